"""The stamps of a publish's records, from the lifetimes that they were given, column by column. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values import lifetimes
from sow_server.engine.values.lifetimes import LifetimeError
from sow_server.engine.values.model import Lifetime, LifetimeKind, LifetimesOfOneKind, Publish


def stamp_of(topic: Topic, lifetime: Lifetime, now_micros: int) -> int:
    """The stamp of a record; 0 where the lifetime is refused."""
    try:
        return lifetimes.expire_time(topic.settings, lifetime, now_micros)
    except LifetimeError:
        return 0


def own_stamps(request: Publish, given: Sequence[Lifetime], topic: Topic, now_micros: int) -> list[int]:
    """The stamps of records with lifetimes of their own; 0 where the lifetime is refused."""
    if (stamps_alike := _stamps_of_one_kind(topic, given, now_micros)) is not None:
        return stamps_alike
    # Publishers use few different lifetimes, so each stamp is computed once.
    stamps = {
        lifetime: stamp_of(topic, lifetime, now_micros)
        for lifetime in set(given)
        if lifetime.kind is not LifetimeKind.ABSENT
    }
    common = stamp_of(topic, request.lifetime, now_micros)
    return [stamps.get(lifetime, common) for lifetime in given]


def _stamps_of_one_kind(topic: Topic, given: Sequence[Lifetime], now_micros: int) -> list[int] | None:
    """The stamps of lifetimes that are all ttls, or all expire times, and none of them refused; None for others.

    A lifetime column often has a different value for each record. A stamp rises with its lifetime, so the shortest and
    the longest show whether any is refused or bounded, and the rest is an addition.
    """
    micros: Sequence[int]
    if isinstance(given, LifetimesOfOneKind):
        kind, micros = given.kind, given.micros
    else:
        kinds = list(map(_KIND, given))
        kind = kinds[0]
        # By identity: to hash a member of an enumeration, as a set does, runs Python.
        if kind not in (LifetimeKind.TTL, LifetimeKind.EXPIRE_TIME) or kinds.count(kind) != len(kinds):
            return None
        micros = list(map(_MICROS, given))
    base = now_micros if kind is LifetimeKind.TTL else 0
    shortest, longest = min(micros), max(micros)
    try:
        low = lifetimes.expire_time(topic.settings, Lifetime(kind, shortest), now_micros)
        high = lifetimes.expire_time(topic.settings, Lifetime(kind, longest), now_micros)
    except LifetimeError:
        return None
    if low == base + shortest and high == base + longest:
        return [base + value for value in micros]
    return [min(max(base + value, low), high) for value in micros]


_KIND: Final = itemgetter(0)
_MICROS: Final = itemgetter(1)
