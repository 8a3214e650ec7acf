"""Which expire time a record gets: the table of rule L3, the clamps of L4, the bounds of L18."""

from __future__ import annotations

import pytest

from sow_server.engine.values.errors import Reason
from sow_server.engine.values.lifetimes import LifetimeError, expire_time, expired, restamp_time
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

NOW = 1_700_000_000 * MICROS
SECOND = MICROS


def ttl(seconds: int) -> Lifetime:
    return Lifetime(LifetimeKind.TTL, seconds * SECOND)


def at(seconds_ahead: int) -> Lifetime:
    return Lifetime(LifetimeKind.EXPIRE_TIME, NOW + seconds_ahead * SECOND)


DISABLED = TopicSettings()
ENABLED = TopicSettings(expiration=Expiration.ENABLED)
DEFAULT = TopicSettings(expiration=Expiration.ENABLED, default_ttl_micros=30 * SECOND)
REJECT = TopicSettings(expiration=Expiration.REJECT)


def seconds_ahead(settings: TopicSettings, lifetime: Lifetime) -> int | None:
    stamp = expire_time(settings, lifetime, NOW)
    return None if stamp == NEVER else (stamp - NOW) // SECOND


@pytest.mark.parametrize(
    ("settings", "lifetime", "ahead"),
    [
        (DISABLED, ABSENT, None),
        (DISABLED, PERMANENT, None),
        (DISABLED, ttl(5), 5),
        (DISABLED, ttl(0), 0),
        (DISABLED, at(5), 5),
        (DISABLED, at(-5), -5),
        (ENABLED, ABSENT, None),
        (ENABLED, PERMANENT, None),
        (ENABLED, ttl(5), 5),
        (ENABLED, ttl(0), 0),
        (ENABLED, at(5), 5),
        (ENABLED, at(-5), -5),
        (DEFAULT, ABSENT, 30),
        (DEFAULT, PERMANENT, None),
        (DEFAULT, ttl(5), 5),
        (DEFAULT, ttl(60), 60),
        (DEFAULT, ttl(0), 0),
        (DEFAULT, at(60), 60),
        (DEFAULT, at(-5), -5),
        (REJECT, ABSENT, None),
    ],
)
def test_the_topic_and_the_record_decide_together(
    settings: TopicSettings, lifetime: Lifetime, ahead: int | None
) -> None:
    """Rule L3 (AMPS 3, AMPS 4, AMPS 5, AMPS 7, AMPS 15)."""
    assert seconds_ahead(settings, lifetime) == ahead


@pytest.mark.parametrize("lifetime", [ttl(5), ttl(0), at(5), PERMANENT])
def test_a_topic_can_reject_lifetimes(lifetime: Lifetime) -> None:
    """Rule L3, the fourth value."""
    with pytest.raises(LifetimeError) as caught:
        expire_time(REJECT, lifetime, NOW)
    assert caught.value.reason is Reason.LIFETIME_REJECTED


@pytest.mark.parametrize(
    ("minimum", "maximum", "lifetime", "ahead"),
    [
        (10, None, ttl(5), 10),
        (10, None, ttl(0), 10),
        (10, None, at(-5), 10),
        (10, None, ttl(20), 20),
        (10, None, PERMANENT, None),
        (10, None, ABSENT, 30),
        (40, None, ABSENT, 40),
        (None, 20, ttl(5), 5),
        (None, 20, ttl(20), 20),
        (None, 20, ttl(21), 20),
        (None, 20, at(60), 20),
        (None, 20, at(-5), -5),
        (None, 20, ABSENT, 20),
        (None, 20, PERMANENT, 20),
        (10, 20, PERMANENT, 20),
        (10, 20, ttl(5), 10),
        (10, 20, ttl(15), 15),
        (15, 15, ttl(1), 15),
        (15, 15, ttl(99), 15),
        (15, 15, ABSENT, 15),
    ],
)
def test_the_bounds_of_the_topic_clamp_the_lifetime_of_a_record(
    minimum: int | None, maximum: int | None, lifetime: Lifetime, ahead: int | None
) -> None:
    """Rule L4 (R5): never is clamped to the maximum too, but not to the minimum; the default is 30 s."""
    settings = DEFAULT._replace(
        min_ttl_micros=None if minimum is None else minimum * SECOND,
        max_ttl_micros=None if maximum is None else maximum * SECOND,
    )
    assert seconds_ahead(settings, lifetime) == ahead


def test_without_a_default_the_maximum_is_the_lifetime_of_records_that_carry_none() -> None:
    assert seconds_ahead(ENABLED._replace(max_ttl_micros=20 * SECOND), ABSENT) == 20
    assert seconds_ahead(ENABLED._replace(min_ttl_micros=20 * SECOND), ABSENT) is None


@pytest.mark.parametrize(("lifetime", "ahead"), [(ttl(5), 5), (ttl(60), 60), (PERMANENT, None), (ABSENT, None)])
def test_a_topic_with_expiration_disabled_clamps_nothing(lifetime: Lifetime, ahead: int | None) -> None:
    """Rule L3: the record's lifetime is stored without effect."""
    bounded = DISABLED._replace(min_ttl_micros=10 * SECOND, max_ttl_micros=20 * SECOND)
    assert seconds_ahead(bounded, lifetime) == ahead


@pytest.mark.parametrize("settings", [DISABLED, ENABLED, DEFAULT, ENABLED._replace(max_ttl_micros=SECOND)])
@pytest.mark.parametrize("kind", [LifetimeKind.TTL, LifetimeKind.EXPIRE_TIME])
def test_negative_lifetimes_are_refused(settings: TopicSettings, kind: LifetimeKind) -> None:
    """Rule L2."""
    with pytest.raises(LifetimeError) as caught:
        expire_time(settings, Lifetime(kind, -1), NOW)
    assert caught.value.reason is Reason.LIFETIME_NEGATIVE
    assert "-1 µs" in caught.value.message


@pytest.mark.parametrize("settings", [DISABLED, ENABLED, DEFAULT, ENABLED._replace(max_ttl_micros=SECOND)])
@pytest.mark.parametrize(
    "lifetime",
    [
        Lifetime(LifetimeKind.TTL, TTL_MAX_MICROS + 1),
        Lifetime(LifetimeKind.TTL, 2**63 - 1),
        Lifetime(LifetimeKind.EXPIRE_TIME, NOW + TTL_MAX_MICROS + 1),
        Lifetime(LifetimeKind.EXPIRE_TIME, NEVER),
    ],
)
def test_lifetimes_beyond_ten_years_are_refused(settings: TopicSettings, lifetime: Lifetime) -> None:
    """Rule L18: refused also where a maximum would have clamped them, else a wrong unit would pass unseen."""
    with pytest.raises(LifetimeError) as caught:
        expire_time(settings, lifetime, NOW)
    assert caught.value.reason is Reason.LIFETIME_TOO_LONG
    assert "ten years" in caught.value.message


def test_ten_years_is_a_lifetime() -> None:
    """Rule L18."""
    stamp = expire_time(ENABLED, Lifetime(LifetimeKind.TTL, TTL_MAX_MICROS), NOW)
    assert stamp == NOW + TTL_MAX_MICROS
    assert expire_time(ENABLED, Lifetime(LifetimeKind.EXPIRE_TIME, stamp), NOW) == stamp


@pytest.mark.parametrize("settings", [ENABLED, TopicSettings(expiration=Expiration.DISABLED)])
def test_an_expire_time_more_than_ten_years_ago_is_another_unit(settings: TopicSettings) -> None:
    """Rule L18: seconds that were taken for microseconds were a moment of 1970, and the record was gone at once."""
    earliest = NOW - TTL_MAX_MICROS
    assert expire_time(settings, Lifetime(LifetimeKind.EXPIRE_TIME, earliest), NOW) == earliest
    for micros in (0, NOW // 10**6, NOW // 1000, earliest - 1):
        with pytest.raises(LifetimeError) as caught:
            expire_time(settings, Lifetime(LifetimeKind.EXPIRE_TIME, micros), NOW)
        assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_an_expire_time_in_the_past_is_legal() -> None:
    """Rule L7."""
    assert expire_time(ENABLED, Lifetime(LifetimeKind.EXPIRE_TIME, NOW - 1), NOW) == NOW - 1
    assert expire_time(ENABLED, Lifetime(LifetimeKind.TTL, 0), NOW) == NOW


def test_a_record_is_expired_from_its_expire_time_on() -> None:
    """Rule L7."""
    assert not expired(NOW + 1, NOW)
    assert expired(NOW, NOW)
    assert expired(NOW - 1, NOW)
    assert not expired(NEVER, 2**62)


@pytest.mark.parametrize(
    ("settings", "mode", "lifetime", "ahead"),
    [
        (ENABLED, RestampMode.SET, ttl(5), 5),
        (DEFAULT, RestampMode.SET, PERMANENT, None),
        (DEFAULT, RestampMode.CAP, at(7), 7),
        (DEFAULT, RestampMode.CLEAR, ABSENT, None),
        (DEFAULT._replace(max_ttl_micros=40 * SECOND), RestampMode.CLEAR, ABSENT, 40),
        (DEFAULT._replace(min_ttl_micros=9 * SECOND), RestampMode.CAP, ttl(1), 9),
        (DISABLED, RestampMode.SET, ttl(5), 5),
        (DISABLED, RestampMode.CLEAR, ABSENT, None),
        (REJECT, RestampMode.CLEAR, ABSENT, None),
    ],
)
def test_a_restamp_follows_the_topic_as_a_publish_does(
    settings: TopicSettings, mode: RestampMode, lifetime: Lifetime, ahead: int | None
) -> None:
    """L13: but no default comes into it, and clearing is no lifetime that a topic could reject."""
    stamp = restamp_time(settings, mode, lifetime, NOW)
    assert (None if stamp == NEVER else (stamp - NOW) // SECOND) == ahead


@pytest.mark.parametrize(("mode", "lifetime"), [(RestampMode.SET, PERMANENT), (RestampMode.CAP, ttl(1))])
def test_a_restamp_gives_no_lifetime_where_they_are_rejected(mode: RestampMode, lifetime: Lifetime) -> None:
    with pytest.raises(LifetimeError) as caught:
        restamp_time(REJECT, mode, lifetime, NOW)
    assert caught.value.reason is Reason.LIFETIME_REJECTED
