"""Pure: which expire time a record gets, and whether it has expired (the L-rules).

A lifetime that breaks a rule is a `LifetimeError` with the reason; nothing here reads a clock.
"""

from __future__ import annotations

from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import (
    ABSENT,
    MICROS,
    NEVER,
    PERMANENT,
    TTL_MAX_MICROS,
    Expiration,
    Lifetime,
    LifetimeKind,
    RestampMode,
    TopicSettings,
)


class LifetimeError(ValueError):
    """A lifetime that is refused, with the reason."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def expired(expire_time_micros: int, now_micros: int) -> bool:
    """True if a stamp is due, on a topic that acts on expiration (rule L7)."""
    return now_micros >= expire_time_micros


def left(expire_time_micros: int, now_micros: int) -> int:
    """The time until a stamp is due; `NEVER` for a record that never expires."""
    return NEVER if expire_time_micros == NEVER else expire_time_micros - now_micros


def expire_time(settings: TopicSettings, lifetime: Lifetime, now_micros: int) -> int:
    """The stamp of a record that is published with `lifetime` at `now_micros`; `NEVER` for none (rules L3 to L5).

    On a topic with expiration disabled a record's own lifetime is stamped unclamped, and a record without one gets
    none: defaults and bounds belong to topics that act on expiration.

    Raises LifetimeError for a negative or too long lifetime, an expire time more than ten years ago (rule L18), or any
    lifetime where the topic rejects them.
    """
    kind, micros = lifetime
    if kind is not LifetimeKind.ABSENT and settings.expiration is Expiration.REJECT:
        raise LifetimeError(
            Reason.LIFETIME_REJECTED, "lifetime: the topic refuses lifetimes of records (expiration = reject)"
        )
    if kind is LifetimeKind.TTL:
        _check_range("ttl", micros, micros)
        ttl: int | None = micros
    elif kind is LifetimeKind.EXPIRE_TIME:
        _check_range("expire_time", micros, micros - now_micros)
        if now_micros - micros > TTL_MAX_MICROS:
            # Somebody has given seconds or milliseconds: the record would be gone at once, and acknowledged.
            raise LifetimeError(
                Reason.INVALID_ARGUMENT,
                f"expire_time: {micros} is more than ten years ago; it counts microseconds since 1970, not seconds or "
                "milliseconds",
            )
        ttl = micros - now_micros
    elif kind is LifetimeKind.ABSENT and settings.expiration is Expiration.ENABLED:
        ttl = settings.default_ttl_micros
    else:
        ttl = None
    if settings.expiration is not Expiration.ENABLED:
        return NEVER if ttl is None else now_micros + ttl
    if settings.max_ttl_micros is not None and (ttl is None or ttl > settings.max_ttl_micros):
        ttl = settings.max_ttl_micros
    if ttl is None:
        return NEVER
    if settings.min_ttl_micros is not None and ttl < settings.min_ttl_micros:
        ttl = settings.min_ttl_micros
    return now_micros + ttl


def restamp_time(settings: TopicSettings, mode: RestampMode, lifetime: Lifetime, now_micros: int) -> int:
    """The stamp that a restamp at `now_micros` gives; with CAP, the latest stamp that it leaves in place (rule L13).

    As `expire_time`, except that CLEAR carries no lifetime, so a topic that rejects lifetimes accepts it. Raises
    LifetimeError.
    """
    if mode is RestampMode.CLEAR:
        lifetime = ABSENT if settings.expiration is Expiration.REJECT else PERMANENT
    return expire_time(settings, lifetime, now_micros)


def _check_range(name: str, given_micros: int, ahead_micros: int) -> None:
    if given_micros < 0:
        raise LifetimeError(Reason.LIFETIME_NEGATIVE, f"{name}: {given_micros} µs is negative")
    if ahead_micros > TTL_MAX_MICROS:
        raise LifetimeError(
            Reason.LIFETIME_TOO_LONG,
            f"{name}: {ahead_micros // MICROS} s ahead is more than the longest lifetime of ten years",
        )
