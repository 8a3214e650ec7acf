"""Repair between two stores in memory, and the calls that verify and repair answer (rule R10)."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable

import pytest

from sow.v1 import admin_pb2, replication_pb2, types_pb2
from sow_replication import repair as repairing
from sow_replication.messages import topic_of
from sow_replication.ports import Refused
from sow_replication.repair import fetch_rows, merge_rows, repair
from sow_replication.verify import checksum, list_versions
from tests.support.simulation.verifying import (
    ORDERS,
    FakeStore,
    Row,
    World,
    called,
    collected,
    differences,
    refused,
    run,
)
from tests.support.stores.stores import START

# --- repair ----------------------------------------------------------------------------------------------------------


def test_the_newer_one_wins_at_both_ends() -> None:
    world = World()
    world.both({b"%d" % number: Row(number) for number in range(100)})
    world.a.orders |= {b"newer": Row(7), b"older": Row(3), b"here": Row(3), b"tie": Row(5, origin="a")}
    world.b.orders |= {b"newer": Row(6), b"older": Row(4), b"there": Row(4), b"tie": Row(5, origin="b")}

    assert world.repaired() == (0, 2, 3)

    assert world.a.orders == world.b.orders
    assert world.a.orders[b"newer"] == Row(7)
    assert world.a.orders[b"older"] == Row(4)
    assert world.a.orders[b"tie"] == Row(5, origin="b")


def test_a_delete_that_was_missed_is_made_good_not_undone() -> None:
    world = World()
    world.a.orders |= {b"deleted here": Row(9, dead=True), b"deleted there": Row(1)}
    world.b.orders |= {b"deleted here": Row(1), b"deleted there": Row(9, dead=True)}

    assert world.repaired() == (0, 1, 1)

    assert all(row.dead for store in (world.a, world.b) for row in store.orders.values())


def test_ends_that_are_equal_are_not_written_to() -> None:
    world = World()
    world.both({b"1": Row(1)})

    assert world.repaired() == (0, 0, 0)
    assert world.peer.calls == ["checksum"]


def test_one_version_with_two_contents_is_reported_as_differing_still() -> None:
    """No version decides between them: it should not be, and it is not passed over in silence."""
    world = World()
    world.a.orders |= {b"1": Row(5, payload="x"), b"2": Row(1)}
    world.b.orders[b"1"] = Row(5, payload="y")

    assert world.repaired() == (1, 1, 0)
    assert differences(world.verified()) == [("1", 5, 5)]


@pytest.mark.slow
def test_many_keys_go_in_messages_of_a_thousand_at_most() -> None:
    world = World()
    world.a.orders |= {b"a%05d" % number: Row(1) for number in range(3000)}
    world.b.orders |= {b"b%05d" % number: Row(1) for number in range(3000)}

    assert world.repaired() == (0, 3000, 3000)

    assert max(world.peer.keys) == repairing.ROWS_MAX
    assert max(world.a.merges) <= repairing.ROWS_MAX
    assert len(world.peer.keys) < 15  # small first messages, soon full ones


@pytest.mark.parametrize("side", ["a", "b"])
def test_large_rows_go_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    monkeypatch.setattr(repairing, "ROWS_BYTES_MAX", 10_000)
    world = World()
    rows = {b"%03d" % number: Row(1, payload="x" * 3000) for number in range(20)}
    rows[b"huge"] = Row(1, payload="x" * 50_000)
    (world.a if side == "a" else world.b).orders.update(rows)

    assert world.repaired() == ((0, 21, 0) if side == "a" else (0, 0, 21))

    assert world.a.orders == world.b.orders == rows
    assert max(world.a.merges + world.b.merges) <= 3


def test_a_store_that_refuses_to_merge_ends_the_repair_with_its_reason() -> None:
    for side in ("a", "b"):
        world = World()
        world.a.orders[b"1"] = Row(1)
        world.b.orders[b"2"] = Row(1)
        store = world.a if side == "a" else world.b
        store.refuses = Refused(types_pb2.ERROR_REASON_DISK_FULL, "the disk is full")

        assert refused(world.repair) == ("DISK_FULL", f"at {side}: the disk is full")


def test_the_repaired_part_of_a_topic_is_reported_when_it_is_deleted_meanwhile() -> None:
    world = World()
    world.a.orders[b"1"] = Row(1)

    def before(call: str) -> None:
        if call == "checksum" and "merge_rows" in world.peer.calls:
            world.b.kinds.clear()

    world.peer.before = before

    (answer,) = world.repair()

    assert (answer.sent, answer.received) == (1, 0)
    assert answer.left_out.startswith("at b: there is no ")


def test_whatever_differs_the_ends_are_equal_after_a_repair(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(30):
        world = World()
        for store in (world.a, world.b):
            for _ in range(draw.randrange(200)):
                key, version, origin = b"%d" % draw.randrange(150), draw.randrange(1, 6), draw.choice("ab")
                # Version and origin identify a change.
                store.orders[key] = Row(version, origin, f"{version}{origin}", dead=(version + len(key)) % 3 == 0)

        assert world.repaired()[0] == 0

        live = [{key: row for key, row in store.orders.items() if not row.dead} for store in (world.a, world.b)]
        assert live[0] == live[1]


# --- a peer that goes away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost_at", ["checksum", "list_versions", "listed", "fetch_rows", "merge_rows"])
def test_a_peer_that_goes_away_ends_it_with_the_reason_and_earlier_answers_stay(lost_at: str) -> None:
    first = ORDERS._replace(name="a-first")
    world = World(first, ORDERS)
    world.a.orders[b"1"] = Row(1)
    world.b.orders[b"2"] = Row(1)
    answered: list[str] = []

    def before(call: str) -> None:
        if answered and call == lost_at:
            raise Refused(types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE, "the connection is gone")

    world.peer.before = before

    async def use() -> None:
        nonlocal answered
        request = admin_pb2.RepairReplicationRequest(peer="b")
        async for answer in repair(world.a, world.peer, list(world.a.kinds.values()), request, means=world.means):
            answered += [answer.topic]

    reason, message = refused(lambda: asyncio.run(use()))

    assert (reason, message) == ("REPLICATION_UNAVAILABLE", "at b: the connection is gone")
    assert answered == ["a-first"]


# --- answering -------------------------------------------------------------------------------------------------------


def test_requests_out_of_bounds_are_refused() -> None:
    store = FakeStore("b")
    topic = topic_of(ORDERS)

    def sums(**changes: int) -> Callable[[], object]:
        request = replication_pb2.ChecksumRequest(topic=topic, buckets=8, now_micros=START)
        for name, value in changes.items():
            setattr(request, name, value)
        return lambda: called(checksum(store, request, run=run))

    def listed(topic: str = "orders", bucket: int = 0, times: int = 1) -> Callable[[], object]:
        request = replication_pb2.ListVersionsRequest(topic=topic, buckets=8, bucket=[bucket] * times, now_micros=START)
        return lambda: collected(list_versions(store, request, run=run))

    def fetched(*keys: str, topic: str = "orders") -> Callable[[], object]:
        return lambda: called(fetch_rows(store, replication_pb2.FetchRowsRequest(topic=topic, key=keys), run=run))

    sums()()
    listed()()
    fetched(*map(str, range(1000)))()
    assert refused(sums(buckets=0))[0] == "INVALID_ARGUMENT"
    assert refused(sums(buckets=65_537))[0] == "INVALID_ARGUMENT"
    assert refused(sums(now_micros=0))[0] == "INVALID_ARGUMENT"
    assert refused(listed(bucket=8))[0] == "INVALID_ARGUMENT"
    assert refused(listed(times=65_537))[0] == "INVALID_ARGUMENT"
    assert refused(listed(topic="nothing"))[0] == "TOPIC_NOT_FOUND"
    assert refused(fetched())[0] == "INVALID_ARGUMENT"
    assert refused(fetched(*map(str, range(1001))))[0] == "REQUEST_TOO_LARGE"
    assert refused(fetched("1", topic="nothing"))[0] == "TOPIC_NOT_FOUND"


def test_rows_that_do_not_match_their_checksum_are_not_merged() -> None:
    store = FakeStore("b")
    other = FakeStore("a")
    other.orders[b"1"] = Row(1)
    chunk, origins = other.rows("orders", [b"1"])
    request = replication_pb2.MergeRowsRequest(
        topic=topic_of(ORDERS), chunk=chunk.replace(b"x", b"y"), origins=origins, crc32=zlib.crc32(chunk)
    )

    assert refused(lambda: called(merge_rows(store, request)))[0] == "BATCH_DAMAGED"
    assert store.orders == {}

    request.chunk = chunk
    assert called(merge_rows(store, request)) == replication_pb2.MergeRowsResponse(applied=1, passed_over=0)
    assert called(merge_rows(store, request)) == replication_pb2.MergeRowsResponse(applied=0, passed_over=1)


def test_rows_of_a_topic_that_differs_are_not_merged() -> None:
    store = FakeStore("b", ORDERS._replace(key=("/other",)))
    request = replication_pb2.MergeRowsRequest(topic=topic_of(ORDERS), chunk=b"[]", crc32=zlib.crc32(b"[]"))

    assert refused(lambda: called(merge_rows(store, request)))[0] == "TOPIC_DIFFERS"
    assert store.merges == []
