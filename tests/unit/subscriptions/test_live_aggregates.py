"""The results of groups as live results: when they are asked again, and what is told (rules S10 to S12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_server.access.caller import Granted
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query.sort_memory import SortMemory
from sow_server.services.live_queries import LiveQueries, asked_aggregates
from sow_server.services.records.queries import Queries
from sow_server.services.wire import result_convert
from sow_server.subscriptions.results.aggregates import REST, RESULTS_MAX, AskedAggregates, Run
from tests.support.stores.parts import reading_of
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import ResultFollower, Subscribers, px, rig, subscribers

__all__ = ["rig", "subscribers"]  # fixtures

Answer = Callable[[Run | StoreError], None]


class Runs:
    """Counts the records of each price, when it is told to answer."""

    def __init__(self, subscribers: Subscribers) -> None:
        self.subscribers = subscribers
        self.rig = subscribers.rig
        self.asked = 0
        self.waiting: list[tuple[Answer, Run]] = []

    def __call__(self, done: Answer) -> Callable[[], object]:
        self.asked += 1
        groups: dict[bytes, int] = {}
        for record in self.rig.live("orders").values():
            groups[record.payload[6:-1]] = groups.get(record.payload[6:-1], 0) + 1
        keys = sorted(groups)
        run = Run(self.rig.store.commits.last_sequence, keys, [b'{"n":%d}' % groups[key] for key in keys], ())
        waits = done, run
        self.waiting.append(waits)
        return lambda: self.waiting.remove(waits) if waits in self.waiting else None

    def answer(self, micros: int = 0, *, error: StoreError | None = None) -> None:
        """The run that is under way ends after a time."""
        self.rig.time.tick(micros)
        ((done, run),) = self.waiting
        self.waiting = []
        done(error or run)

    def follow(self) -> ResultFollower:
        message = sow_pb2.SubscribeRequest(topic="orders", sow=True)
        topic = self.rig.topic("orders")
        fed = result_convert.feed(message, reading_of(self.rig.store), Granted(topic, UNRESTRICTED))
        follower = self.subscribers.follow(AskedAggregates(("a",), topic, fed.request, b"", SECOND, self))
        self.hear(follower)
        return follower

    def hear(self, follower: ResultFollower, micros: int = 0) -> dict[str, bytes]:
        """Lets time pass; returns the results that it was told."""
        self.rig.time.tick(micros)
        self.subscribers.settle()
        follower.pump()
        return {row.key.decode(): row.payload for row in follower.rows}


@pytest.fixture
def runs(subscribers: Subscribers) -> Runs:
    return Runs(subscribers)


def test_the_query_is_asked_again_only_when_something_has_changed(rig: Rig, runs: Runs) -> None:
    rig.put("orders", "a", px(1))
    rig.put("orders", "b", px(1))
    follower = runs.follow()
    runs.answer()
    assert runs.hear(follower) == {"1": b'{"n":2}'}
    rig.create_topic("other")
    rig.put("other", "x", px(1))
    runs.hear(follower, 10 * SECOND)
    assert runs.asked == 1
    assert follower.bookmark == rig.store.commits.last_sequence
    rig.put("orders", "c", px(2))
    rig.delete("orders", "a", "b")
    runs.hear(follower)
    runs.hear(follower, SECOND)
    assert runs.asked == 2
    runs.answer()
    assert runs.hear(follower) == {"2": b'{"n":1}'}
    assert follower.reasons == [("1", "none")]
    assert follower.bookmark == rig.store.commits.last_sequence


def test_a_change_behind_the_run_is_asked_for_again(rig: Rig, runs: Runs) -> None:
    """results/aggregates [2], [3]."""
    follower = runs.follow()
    rig.put("orders", "a", px(1))
    runs.hear(follower)
    runs.answer()
    assert runs.hear(follower) == {}
    assert follower.bookmark is not None
    assert follower.bookmark < rig.store.commits.last_sequence
    assert follower.result.behind
    for _ in range(2):
        runs.hear(follower, SECOND)
    assert runs.asked == 2
    runs.answer()
    assert runs.hear(follower) == {"1": b'{"n":1}'}
    assert not follower.result.behind


def test_runs_take_a_tenth_of_the_time_at_most(rig: Rig, runs: Runs) -> None:
    follower = runs.follow()
    runs.answer(2 * SECOND)
    for number in range(REST * 2 - 1):
        rig.put("orders", f"k{number}", px(1))
        runs.hear(follower, SECOND)
    assert runs.asked == 1
    runs.hear(follower, SECOND)
    runs.hear(follower, SECOND)
    assert runs.asked == 2


def test_a_run_that_is_lost_is_made_again_and_another_error_ends_it(rig: Rig, runs: Runs) -> None:
    follower = runs.follow()
    runs.answer(error=StoreError(Reason.READER_LOST, "it is gone"))
    for _ in range(3):
        runs.hear(follower, SECOND)
    assert runs.asked == 2
    runs.answer(error=StoreError(Reason.RESULT_TOO_LARGE, "too many", field="group_by"))
    runs.hear(follower)
    assert follower.error is not None
    assert follower.error.field == "group_by"


def test_too_many_groups_are_refused(rig: Rig, runs: Runs) -> None:
    follower = runs.follow()
    ((done, run),) = runs.waiting
    done(run._replace(keys=[b"k"] * (RESULTS_MAX + 1), payloads=[b""] * (RESULTS_MAX + 1)))
    runs.hear(follower)
    assert follower.error is not None
    assert follower.error.reason is Reason.RESULT_TOO_LARGE


def test_one_run_serves_all_who_ask_for_the_same(rig: Rig, runs: Runs) -> None:
    rig.put("orders", "a", px(3))
    one, other = runs.follow(), runs.follow()
    assert runs.asked == 1
    runs.answer()
    assert runs.hear(one) == runs.hear(other) == {"3": b'{"n":1}'}
    rig.put("orders", "b", px(3))
    runs.hear(one)
    runs.hear(one, SECOND)
    one.close()
    other.close()
    assert runs.waiting == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"group_by": [{"expression": "/a < NOW_MICROS()", "name": "late"}]}, "group_by[0]"),
        ({"aggregate": [{"expression": "COUNT(*)", "name": "n"}, {"expression": "MAX(NOW_MICROS())", "name": "t"}]},
         "aggregate[1]"),
        ({"aggregate": [{"expression": "NOW_MICROS() - MAX(/t)", "name": "age"}]}, "aggregate[0]"),
        ({"aggregate": [{"expression": "MAX(/t)", "name": "t"}], "having": "MAX(/t) < NOW_MICROS()"}, "having"),
    ],
)  # fmt: skip
def test_results_that_change_with_time_alone_are_refused(rig: Rig, fields: dict[str, Any], field: str) -> None:
    message = sow_pb2.SubscribeRequest(topic="orders", sow=True, **fields)
    runs: LiveQueries = None  # type: ignore[assignment]  # nothing is asked
    with pytest.raises(StoreError) as raised:
        asked_aggregates(message, reading_of(rig.store), Granted(rig.topic("orders"), UNRESTRICTED), runs)
    assert (raised.value.reason, raised.value.field) == (Reason.EXPRESSION_INVALID, field)


def test_an_answer_that_is_too_large_is_not_waited_for() -> None:
    """It would be held in full by each live result that gets one at this time."""

    class Endless(Queries):
        given = 0

        def __init__(self) -> None:
            pass

        async def answer(
            self, granted: Granted, request: sow_pb2.QueryRequest, *, asks: bool = True
        ) -> AsyncGenerator[bytes, None]:
            while self.given < 1_000:
                self.given += 1
                batch = types_pb2.RecordColumns(key=["k"], payload=[b"x" * 100])
                yield sow_pb2.QueryResponse(batch=batch).SerializeToString()

    endless = Endless()
    granted: Granted = None  # type: ignore[assignment]  # nobody looks

    async def answered() -> Run | StoreError:
        told: asyncio.Queue[Run | StoreError] = asyncio.Queue()
        LiveQueries(endless, SortMemory(), 1_000).of(granted, sow_pb2.QueryRequest())(told.put_nowait)
        return await told.get()

    error = asyncio.run(answered())
    assert isinstance(error, StoreError)
    assert error.reason is Reason.RESULT_TOO_LARGE
    assert endless.given < 20
