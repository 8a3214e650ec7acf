"""The stamps of all settings and lifetimes, against the rules as sentences (L3, L4, L18)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.catalog.topics import check_settings
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.lifetimes import LifetimeError, expire_time
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    PERMANENT,
    TTL_MAX_MICROS,
    Expiration,
    Lifetime,
    LifetimeKind,
    TopicSettings,
)
from sow_server.engine.values.policies import declared_of

TTLS = st.integers(0, TTL_MAX_MICROS) | st.integers(0, 1000)
NOWS = st.integers(0, 2**52)


@st.composite
def lifetimes(draw: st.DrawFn) -> Lifetime:
    micros = draw(st.integers(-(2**63), 2**63 - 1) | st.integers(-10, 1000))
    kind = draw(st.sampled_from(LifetimeKind))
    return Lifetime(kind, micros if kind in (LifetimeKind.TTL, LifetimeKind.EXPIRE_TIME) else 0)


@st.composite
def topics(draw: st.DrawFn) -> TopicSettings:
    expiration = draw(st.sampled_from(Expiration))
    bounds = sorted([draw(TTLS), draw(TTLS)])
    low, high = draw(st.sampled_from([None, bounds[0]])), draw(st.sampled_from([None, bounds[1] or 1]))
    defaults = st.none() | st.integers(low or 0, high or TTL_MAX_MICROS)
    settings = TopicSettings(
        expiration=expiration,
        default_ttl_micros=draw(defaults) if expiration is Expiration.ENABLED else None,
        min_ttl_micros=low,
        max_ttl_micros=high,
    )
    check_settings(declared_of(settings))
    return settings


@given(topics(), lifetimes(), NOWS)
def test_a_stamp_is_within_the_topics_bounds_or_the_lifetime_is_refused(
    settings: TopicSettings, lifetime: Lifetime, now: int
) -> None:
    try:
        stamp = expire_time(settings, lifetime, now)
    except LifetimeError as error:
        ahead = lifetime.micros - (now if lifetime.kind is LifetimeKind.EXPIRE_TIME else 0)
        match error.reason:
            case Reason.LIFETIME_REJECTED:
                assert settings.expiration is Expiration.REJECT
                assert lifetime != ABSENT
            case Reason.LIFETIME_NEGATIVE:
                assert lifetime.micros < 0
            case Reason.INVALID_ARGUMENT:
                assert ahead < -TTL_MAX_MICROS
            case other:
                assert other is Reason.LIFETIME_TOO_LONG
                assert ahead > TTL_MAX_MICROS
        return
    assert 0 <= stamp <= 2**63 - 1  # the eight bytes of a stamp are compared as they stand
    assert stamp == NEVER or stamp <= now + TTL_MAX_MICROS
    if settings.expiration is Expiration.ENABLED:
        if settings.max_ttl_micros is not None:
            assert stamp <= now + settings.max_ttl_micros
        if settings.min_ttl_micros is not None:
            assert stamp >= now + settings.min_ttl_micros
    if lifetime == PERMANENT and (settings.expiration is not Expiration.ENABLED or settings.max_ttl_micros is None):
        assert stamp == NEVER


@given(topics(), st.integers(0, TTL_MAX_MICROS), NOWS)
def test_a_ttl_and_the_expire_time_it_leads_to_are_the_same(settings: TopicSettings, micros: int, now: int) -> None:
    if settings.expiration is not Expiration.REJECT:
        by_ttl = expire_time(settings, Lifetime(LifetimeKind.TTL, micros), now)
        assert by_ttl == expire_time(settings, Lifetime(LifetimeKind.EXPIRE_TIME, now + micros), now)
