"""Live results of both clients against a real server (rules S10 to S13)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_client import AsyncClient, Change, Client, InvalidArgument, LiveResult, Record
from tests.support.servers.server import ServerProcess

CONFIG = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
"""
ORDER = "/px DESC"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as made:
        yield made
        assert made.terminate() == 0
        assert not made.faults()


def fill(client: Client, count: int) -> None:
    for number in range(count):
        client.publish("orders", {"id": number, "px": number, "desk": number % 2})


def keys(rows: object) -> list[str]:
    assert isinstance(rows, list)
    return [record.key for record in rows]


def asked(client: Client, top: int, skip: int = 0) -> list[tuple[str, int]]:
    found = client.query("orders", "/desk = 0", order_by=ORDER, top_n=top, skip_n=skip)
    return [(record.key, record.version) for record in found]


def shown(rows: LiveResult) -> list[tuple[str, int]]:
    return [(record.key, record.version) for record in rows.list()]


def until(rows: LiveResult, wanted: list[tuple[str, int]]) -> list[Change]:
    """Takes changes until the list is this one."""
    told: list[Change] = []
    while shown(rows) != wanted:
        change = rows.next(timeout=10)
        assert change is not None, (shown(rows), wanted)
        told.append(change)
    return told


def test_a_list_stays_that_of_the_query(server: ServerProcess) -> None:
    """Also across a restart, after which the differences are told."""
    chance = random.Random(1)
    with server.client() as client:
        fill(client, 30)
        with client.live_result("orders", "/desk = 0", order_by=ORDER, top_n=5, skip_n=2, conflation="20ms") as rows:
            assert shown(rows) == asked(client, 5, 2)
            applied: list[Record] = list(rows.list())
            for round_ in range(4):
                for _ in range(20):
                    number = chance.randrange(30)
                    if chance.random() < 0.3:
                        client.sow_delete("orders", keys=[str(number)])
                    else:
                        client.publish(
                            "orders", {"id": number, "px": chance.randrange(50), "desk": chance.randrange(2)}
                        )
                if round_ == 2:
                    server.restart()
                told = until(rows, asked(client, 5, 2))
                told += list(rows.batches(1000, timeout=0.0).__next__())
                apply(applied, told)
                assert [(one.key, one.version) for one in applied] == shown(rows)
            assert rows.bookmark is not None


def apply(rows: list[Record], told: list[Change]) -> None:
    """Applies what a program is told, one change after the other: each interval ends with a bookmark."""
    together: list[Change] = []
    for change in told:
        together.append(change)
        if change.bookmark is None:
            continue
        concerned = {one.key for one in together}
        rows[:] = [record for record in rows if record.key not in concerned]
        for one in together:
            if one.op == "put":
                assert one.record is not None
                assert one.position is not None
                rows.insert(one.position, one.record)
        together = []


def test_each_record_that_leaves_has_its_reason(server: ServerProcess) -> None:
    with server.client() as client:
        fill(client, 8)
        with client.live_result("orders", order_by=ORDER, top_n=3, conflation="20ms") as rows:
            assert keys(list(rows.list())) == ["7", "6", "5"]
            client.publish("orders", {"id": 9, "px": 9})
            (left, put) = next(rows.batches())
            assert (left.op, left.reason, left.key) == ("oof", "window", "5")
            assert left.previous is not None
            assert left.previous.data["px"] == 5
            assert (put.op, put.key, put.position, put.bookmark) == ("put", "9", 0, rows.bookmark)
            client.sow_delete("orders", keys=["7"])
            (left, put) = next(rows.batches())
            assert (left.op, left.reason, left.key) == ("oof", "deleted", "7")
            assert (put.key, put.position) == ("5", 2)
            assert keys(list(rows.list())) == ["9", "6", "5"]


def test_the_asynchronous_client_has_it_too(server: ServerProcess) -> None:
    async def follow() -> None:
        async with AsyncClient(server.address) as client:
            async with client.live_result("orders", order_by=ORDER, top_n=2, conflation="20ms") as rows:
                assert [record.key for record in rows.list()] == ["2", "1"]
                await client.publish("orders", {"id": 5, "px": 5})
                told = [await rows.next(10), await rows.next(10)]
                assert [(one.op, one.key) for one in told if one is not None] == [("oof", "1"), ("put", "5")]
                assert [record.key for record in rows.list()] == ["5", "2"]

    with server.client() as client:
        fill(client, 3)
    asyncio.run(follow())


def test_the_query_changes_to_the_next_page_and_to_another_order(server: ServerProcess) -> None:
    async def follow() -> None:
        async with AsyncClient(server.address) as client:
            async with client.live_result("orders", order_by=ORDER, top_n=2) as rows:
                assert await rows.next(0.01) is None, "a read is under way now"
                await rows.change(order_by="/px", top_n=1)
                assert keys(rows.list()) == ["0"]

    with server.client() as client:
        fill(client, 6)
        with client.live_result("orders", order_by=ORDER, top_n=2) as rows:
            rows.change(order_by=ORDER, top_n=2, skip_n=1)
            assert keys(rows.list()) == ["4", "3"]
            told = [rows.next(10), rows.next(10)]
            assert [(one.op, one.key, one.position) for one in told if one] == [("oof", "5", None), ("put", "3", 1)]
            with pytest.raises(InvalidArgument) as refused:
                rows.change(order_by="px", top_n=2)
            assert refused.value.details["field"] == "order_by"
            client.publish("orders", {"id": 9, "px": 9})
            until(
                rows,
                [(found.key, found.version) for found in client.query("orders", order_by=ORDER, top_n=2, skip_n=1)],
            )
            rows.change(group_by="/desk", aggregate={"n": "COUNT(*)"}, order_by="/n")
            assert [record.data["n"] for record in rows.list()] == [3, 3]
    asyncio.run(follow())


def test_what_does_not_go_together_is_refused(server: ServerProcess) -> None:
    with server.client() as client:
        for options, field in (
            ({"order_by": ORDER, "top_n": 9_000, "skip_n": 1_001}, "top_n"),
            ({"order_by": "px", "top_n": 1}, "order_by"),
        ):
            with pytest.raises(InvalidArgument) as refused:
                client.live_result("orders", **options)  # type: ignore[arg-type]  # of several kinds
            assert refused.value.details["field"] == field
        with pytest.raises(InvalidArgument, match="top_n"):
            client.live_result("orders", order_by=ORDER, top_n=0)


def test_results_of_groups_stay_those_of_the_query(server: ServerProcess) -> None:
    def grouped() -> list[tuple[str, bytes]]:
        found = client.query("orders", group_by="/desk", aggregate="COUNT(*) AS n, SUM(/px) AS px", having="/n > 0")
        return [(record.key, record.payload) for record in found]

    with server.client() as client:
        fill(client, 10)
        asked_for = {"group_by": "/desk", "aggregate": "COUNT(*) AS n, SUM(/px) AS px", "having": "/n > 0"}
        with client.live_result("orders", **asked_for, conflation="50ms") as rows:  # type: ignore[arg-type]  # texts
            assert [(record.key, record.payload) for record in rows.list()] == grouped()
            assert rows.list()[0].data == {"desk": 0, "n": 5, "px": 20}
            client.publish("orders", {"id": 77, "px": 1, "desk": 7})
            change = rows.next(timeout=10)
            assert change is not None
            assert (change.op, change.key, change.position) == ("put", "7", 2)
            client.sow_delete("orders", keys=["77"])
            change = rows.next(timeout=10)
            assert change is not None
            assert (change.op, change.key, change.reason) == ("oof", "7", None)
            assert [(record.key, record.payload) for record in rows.list()] == grouped()
        for options, field in (
            ({"group_by": "/desk", "aggregate": "COUNT(*) AS n", "having": "("}, "having"),
            ({"group_by": "/desk", "select": ["/px"]}, "group_by"),
        ):
            with pytest.raises(InvalidArgument) as refused:
                client.live_result("orders", **options)
            assert refused.value.details["field"] == field, refused.value


def test_an_operator_sees_what_is_kept_for_each(server: ServerProcess) -> None:
    with server.client() as client:
        fill(client, 300)
        with (
            client.live_result("orders", order_by=ORDER, top_n=5) as one,
            client.live_result("orders", order_by=ORDER, top_n=5),
            client.live_result("orders", group_by="/desk", aggregate={"n": "COUNT(*)"}),
            client.subscribe("orders"),
        ):
            first, second, groups, other = (found.kept for found in client.subscriptions("orders"))
            assert other is None
            assert first is not None
            assert first == second, "equal lists are kept once"
            assert (first.records, first.runs, first.followers) == (105, 1, 2), "five, and a hundred in reserve"
            assert first.bytes > 105
            assert groups is not None
            assert (groups.records, groups.runs, groups.followers) == (2, 1, 1)
            client.sow_delete("orders", filter="/px >= 190")
            until(one, [(record.key, record.version) for record in client.query("orders", order_by=ORDER, top_n=5)])
            again = client.subscriptions("orders")[0].kept
            assert again is not None
            assert (again.records, again.runs) == (105, 2), "the reserve was used up, so they were read again"
