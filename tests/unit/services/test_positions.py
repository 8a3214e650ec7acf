"""Reads that have to show a position wait until this instance has it (rule F10)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sow.v1 import sow_pb2
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services.records.positions import Positions
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.access import grant, identity
from tests.support.stores.replicas import greet, pair, seed, ship
from tests.support.stores.stores import Rig

__all__ = ["pair"]  # a fixture


def positions_of(rig: Rig, *, patience_seconds: float = 0) -> Positions:
    store = rig.store
    return Positions(store.reads, store.writes, patience_seconds=patience_seconds)


def head(rig: Rig, more: int = 0) -> str:
    return rig.store.instance.bookmark(rig.store.commits.last_sequence + more)


async def refused(positions: Positions, rig: Rig, bookmark: str) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await positions.reach(rig.topic("t"), bookmark)
    return caught.value


def test_a_position_that_is_here_is_reached_at_once(pair: tuple[Rig, Rig]) -> None:
    """F10: of this journal, and of a source's."""
    a, b = pair

    async def scenario() -> None:
        a.put("t", "1")
        ship(a, b)
        positions = positions_of(b)
        for bookmark in ("", head(b), head(a), head(a) + ";t=1;c0ffee000000.7"):
            await positions.reach(b.topic("t"), bookmark)

    asyncio.run(scenario())


def test_a_position_that_does_not_come_is_refused(pair: tuple[Rig, Rig]) -> None:
    """F10."""
    a, b = pair

    async def scenario() -> None:
        ship(a, b)
        positions = positions_of(b)
        for bookmark in (head(b, 1), head(a, 1), "c0ffee000000.7"):
            error = await refused(positions, b, bookmark)
            assert error.reason is Reason.BEHIND
            assert error.field == "min_position"

    asyncio.run(scenario())


def test_a_topic_that_is_not_yet_seeded_shows_nothing_for_certain(pair: tuple[Rig, Rig]) -> None:
    """F10: the cursor alone does not tell."""
    a, b = pair

    async def scenario() -> None:
        a.put("t", "1")
        greet(a, b)
        positions = positions_of(b)
        assert (await refused(positions, b, head(a))).reason is Reason.BEHIND
        seed(a, b, "t")
        await positions.reach(b.topic("t"), head(a))

    asyncio.run(scenario())


def test_a_read_waits_for_the_commit_that_brings_the_position(pair: tuple[Rig, Rig]) -> None:
    """F10."""
    a, b = pair

    async def scenario() -> None:
        ship(a, b)
        positions = positions_of(b, patience_seconds=60)
        a.put("t", "1")
        waiting = asyncio.create_task(positions.reach(b.topic("t"), head(a)))
        await asyncio.sleep(0)
        b.put("t", "2")
        await asyncio.sleep(0)
        assert not waiting.done()
        ship(a, b)
        await waiting

    asyncio.run(scenario())


@pytest.mark.parametrize("again", [False, True])
def test_a_topic_that_is_deleted_while_a_read_waits_is_not_read_as_it_was(tmp_path: Path, again: bool) -> None:
    """F10, T5: its records were gone, and the answer was that there are none."""
    rig = Rig(tmp_path)
    rig.create_topic("t")
    rig.put("t", "1")
    with GuardedParts(rig, identity("desk", "desk") + grant("desk", "t", "read")) as parts:
        sow = parts.sow
        sow._positions = positions_of(rig, patience_seconds=60)

        async def scenario() -> None:
            request = sow_pb2.GetRequest(topic="t", keys=["2"], min_position=head(rig, 3))
            get = asyncio.create_task(sow.Get(request, parts.call("desk", "Get")))
            query = parts.call("desk", "Query")
            counted = asyncio.create_task(
                anext(sow.Query(sow_pb2.QueryRequest(topic="t", min_position=head(rig, 3)), query))
            )
            await asyncio.sleep(0)
            rig.delete_topic("t")
            if again:
                rig.create_topic("t")
            rig.create_topic("other")
            for number in range(3):
                rig.put("t" if again else "other", str(number))
            if again:
                answer = await get
                assert isinstance(answer, sow_pb2.GetResponse), "it needs no thread"
                assert [record.key for record in answer.records] == ["2"]
                await counted
                return
            for read in (get, counted):
                with pytest.raises(StoreError) as caught:
                    await read
                assert caught.value.reason is Reason.TOPIC_NOT_FOUND

        parts._run(scenario())
    rig.close()


def test_a_malformed_position_is_refused_by_its_name(pair: tuple[Rig, Rig]) -> None:
    """F10."""
    _, b = pair

    async def scenario() -> None:
        error = await refused(positions_of(b), b, "nonsense")
        assert (error.reason, error.field) == (Reason.BOOKMARK_MALFORMED, "min_position")

    asyncio.run(scenario())
