"""Lifetimes and points in time: arguments into messages (rules L1, L2)."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Final, NamedTuple

from google.protobuf import timestamp_pb2

from sow.v1 import types_pb2
from sow_client._records import NEVER_MICROS, ExpireAt, Never, Ttl, datetime_of, invalid, micros_of, ttl_micros

_MICROS_MIN: Final = 10**14
"""In March 1973. Seconds and milliseconds of our time are less. The server judges by its own clock (rule L18)."""


_SECONDS_MAX: Final = 10**11
"""Seconds until the year 5138, milliseconds until 1973."""
_WAYS: Final = (
    "give a datetime with a time zone, or a text such as '2030-01-31T12:00:00Z'; a time from now is ttl, as in ttl='1h'"
)


class Lifetime(NamedTuple):
    """One lifetime as a stream's columns carry it. It is a tuple because publishers make one per record."""

    kind: types_pb2.LifetimeKind.ValueType
    micros: int

    def message(self) -> types_pb2.Lifetime:
        """The lifetime as a message, for calls with one record."""
        if self.kind == types_pb2.LIFETIME_KIND_TTL:
            return types_pb2.Lifetime(ttl_micros=self.micros)
        if self.kind == types_pb2.LIFETIME_KIND_EXPIRE_TIME:
            return types_pb2.Lifetime(expire_time_micros=self.micros)
        return types_pb2.Lifetime(never=True)


def lifetime(ttl: Ttl | None, expire_at: ExpireAt | None) -> Lifetime | None:
    """The lifetime that the two arguments name; None when neither is given. Raises InvalidArgument."""
    if ttl is not None:
        if expire_at is not None:
            raise invalid("expire_at", "give ttl or expire_at, not both")
        if isinstance(ttl, str):
            return _text_lifetime(ttl)
        if ttl is Never.NEVER:
            return Lifetime(types_pb2.LIFETIME_KIND_NEVER, 0)
        return Lifetime(types_pb2.LIFETIME_KIND_TTL, ttl_micros(ttl, "ttl"))
    if expire_at is None:
        return None
    return Lifetime(types_pb2.LIFETIME_KIND_EXPIRE_TIME, _expire_micros(expire_at))


@lru_cache(maxsize=256)  # a stream repeats the same few texts, and parsing takes 5 µs
def _text_lifetime(ttl: str) -> Lifetime:
    if ttl == "never":
        return Lifetime(types_pb2.LIFETIME_KIND_NEVER, 0)
    return Lifetime(types_pb2.LIFETIME_KIND_TTL, ttl_micros(ttl, "ttl"))


def _expire_micros(moment: ExpireAt) -> int:
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError as error:
            raise invalid("expire_at", f"{moment!r} is no time; {_WAYS}") from error
    if isinstance(moment, datetime):
        micros = zoned_micros(moment, "expire_at")
    else:
        if type(moment) is not int:  # one reader would take a float for seconds, another for microseconds
            raise invalid("expire_at", f"{moment!r} is a {type(moment).__name__}, and no point in time; {_WAYS}")
        micros = moment
        if 0 <= micros < _MICROS_MIN:
            unit = "seconds" if micros < _SECONDS_MAX else "milliseconds"
            wrong = f"a number counts microseconds since 1970, and {micros} seems to count {unit}"
            raise invalid("expire_at", f"{wrong}: it would be a moment of {datetime_of(micros):%Y}; {_WAYS}")
    if micros < 0:
        raise invalid("expire_at", "is before 1970", reason="LIFETIME_NEGATIVE")
    if micros > NEVER_MICROS:
        raise invalid("expire_at", "is more than 10 years ahead", reason="LIFETIME_TOO_LONG")
    return micros


def zoned_micros(moment: datetime, field: str) -> int:
    """Microseconds since the epoch of a datetime, which must have a time zone."""
    # Local time would be a guess, and a wrong guess about an expiry loses data.
    if moment.utcoffset() is None:
        raise invalid(
            field, f"{moment.isoformat()} has no time zone; give one, as in {moment.isoformat(timespec='seconds')}Z"
        )
    return micros_of(moment)


def lifetime_message(ttl: Ttl | None, expire_at: ExpireAt | None) -> types_pb2.Lifetime | None:
    """As `lifetime`, as a message."""
    value = lifetime(ttl, expire_at)
    return None if value is None else value.message()


def moment(timestamp: timestamp_pb2.Timestamp) -> datetime:
    """A point in time, UTC."""
    return datetime_of(timestamp.ToMicroseconds())
