"""Stamps of a lifetime column are those of its lifetimes one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_server.engine.values.model import (
    Durability,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    PublishChannel,
    TopicSettings,
)
from sow_server.services.wire import convert
from tests.support.stores.stores import DAY, HOUR, MINUTE, START, Rig

KINDS = (LifetimeKind.TTL, LifetimeKind.EXPIRE_TIME)
BOUNDS: list[tuple[int | None, int | None]] = [(None, None), (MINUTE, HOUR)]


def sent(lifetimes: Sequence[Lifetime]) -> Sequence[Lifetime]:
    """The column as it arrives over the wire."""
    request = sow_pb2.PublishStreamRequest(
        payload=[b"{}"] * len(lifetimes),
        lifetime_kind=[types_pb2.LifetimeKind.ValueType(lifetime.kind) for lifetime in lifetimes],
        lifetime_micros=[lifetime.micros for lifetime in lifetimes],
    )
    column = convert.publish_stream(request, "columns", Durability.FSYNC, PublishChannel()).lifetimes
    assert column is not None, "one is in the request"
    return column


def test_a_column_of_one_kind_is_the_lifetimes_that_were_sent() -> None:
    lifetimes = [Lifetime(LifetimeKind.TTL, micros) for micros in (5, 7, 5, -1)]
    column = sent(lifetimes)
    assert list(column) == lifetimes
    assert list(column[1:3]) == lifetimes[1:3]
    assert column[-1] == lifetimes[-1]
    assert set(column) == set(lifetimes)


@pytest.mark.parametrize("expiration", list(Expiration))
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:], tuple(LifetimeKind)])
@pytest.mark.parametrize("refused", [False, True])
def test_a_column_gives_the_stamps_that_its_lifetimes_give(
    tmp_path: Path,
    expiration: Expiration,
    bounds: tuple[int | None, int | None],
    kinds: tuple[LifetimeKind, ...],
    refused: bool,
) -> None:
    """L2 to L5: bounds, refusals, and lifetimes that are over at once."""
    chance = random.Random(7)
    rig = Rig(tmp_path)
    low, high = bounds
    settings = TopicSettings(expiration=expiration, min_ttl_micros=low, max_ttl_micros=high)
    rig.create_topic("columns", settings)
    rig.create_topic("singles", settings)
    lifetimes = []
    for _ in range(40):
        kind, ttl = chance.choice(kinds), chance.choice([0, 1, 5 * MINUTE, chance.randrange(2 * HOUR), 3 * DAY])
        micros = {LifetimeKind.TTL: ttl, LifetimeKind.EXPIRE_TIME: START + ttl}.get(kind, 0)
        lifetimes.append(Lifetime(kind, micros))
    if refused:
        lifetimes[3] = Lifetime(kinds[-1] if kinds[-1] in KINDS else LifetimeKind.TTL, -1)
    keys = [str(number) for number in range(40)]
    together = rig.run(Publish("columns", [b"{}"] * 40, keys, lifetimes=sent(lifetimes)))
    alone = [
        rig.run(Publish("singles", [b"{}"], [key], lifetimes=[lifetime]))
        for key, lifetime in zip(keys, lifetimes, strict=True)
    ]
    assert [refusal.reason for refusal in together.refusals] == [
        refusal.reason for outcome in alone for refusal in outcome.refusals
    ]
    assert {key: record.expire_time_micros for key, record in rig.live("columns").items()} == {
        key: record.expire_time_micros for key, record in rig.live("singles").items()
    }
    rig.close()
