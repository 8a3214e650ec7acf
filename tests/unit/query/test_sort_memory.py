"""The memory to sort in is shared by caller, and taken back from who does not read (rules Q2, N7)."""

from __future__ import annotations

import asyncio

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import StoredStatistics, header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER, TopicSettings
from sow_server.query.ordering import Sorter, order
from sow_server.query.sort_memory import (
    OTHERS_PART,
    UNREAD_OTHERS_SECONDS,
    UNREAD_SECONDS,
    SortMemory,
    SortRoom,
    SortShare,
)
from sow_server.services.records.answering import SORT_PATIENCE_SECONDS, until_ready
from tests.support.fakes.loops import FakeLoop


class Clock:
    """Seconds, as the test sets them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Result(SortShare):
    """A sort whose rows are being sent; it notes whether its memory was taken back."""

    def __init__(self, memory: SortMemory, caller: str, size: int) -> None:
        super().__init__(memory, caller, self._forget)
        self.is_at_work = self.is_lost = False
        assert self.try_hold(size)
        self.shrink(size)

    def _forget(self) -> bool:
        self.is_lost = not self.is_at_work
        return self.is_lost


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> SortMemory:
    return SortMemory(bytes_max=1_000, elapsed=clock)


def look(memory: SortMemory, clock: Clock, after: float) -> None:
    """Somebody that waits looks so many seconds later."""
    clock.seconds += after
    memory.take_back()


def test_one_caller_has_all_of_its_memory_and_leaves_some_to_the_next(memory: SortMemory) -> None:
    """Story: twenty unread results of one caller held all memory, and the first five of others waited for 30 s, and
    then were refused."""
    for _ in range(20):
        Result(memory, "worst", 50)
    assert not SortShare(memory, "worst").try_hold(1)
    assert SortShare(memory, "other").try_hold(1_000 // OTHERS_PART // 2)
    assert SortShare(memory, "third").try_hold(1)
    assert SortShare(SortMemory(bytes_max=7), "alone").try_hold(7), "also where the parts are not whole"


def test_a_large_sort_of_one_caller_that_waits_for_itself_lets_others_pass(memory: SortMemory) -> None:
    """sort_memory [2]. Its other results hold what it waits for."""
    Result(memory, "worst", 700)
    waits = SortShare(memory, "worst")
    assert waits.try_hold(200)
    assert waits.hold(400) is SortRoom.WAIT
    assert SortShare(memory, "other").try_hold(100)


def test_a_large_sort_that_waits_for_others_does_not_starve(memory: SortMemory) -> None:
    """sort_memory [2]. While it is the only one of its caller, others take no more than a small one does."""
    Result(memory, "other", 300)
    waits = SortShare(memory, "desk")
    assert waits.try_hold(500)
    assert waits.hold(900) is SortRoom.WAIT
    assert not SortShare(memory, "third").try_hold(1_000 // 64 + 1)
    assert SortShare(memory, "fourth").try_hold(1_000 // 64)


def test_the_line_goes_by_caller(memory: SortMemory) -> None:
    """A caller that has many sorts in line does not let the one of another wait for all of them."""
    first = SortShare(memory, "worst")
    assert first.try_hold(1_000)
    line = [SortShare(memory, caller) for caller in ("worst", "worst", "worst", "other")]
    assert {share.hold(500) for share in line} == {SortRoom.BEGIN_ANEW}
    first.shrink(1_000)  # it has sorted, and is charged for it
    first.close()
    turns = []
    while line:
        (next_one,) = [share for share in line if share.when_ready(lambda: None)]
        assert next_one.try_hold(500)
        next_one.shrink(500)
        next_one.close()
        turns.append(next_one.caller)
        line.remove(next_one)
    assert turns == ["other", "worst", "worst", "worst"]
    assert memory.held_bytes == memory.waiting == 0


def test_a_result_that_nobody_reads_is_taken_back_from_who_holds_most(memory: SortMemory, clock: Clock) -> None:
    """sort_memory [4]"""
    mine, largest, older = (
        Result(memory, "small", 10),
        Result(memory, "worst", 600),
        Result(memory, "worst", 200),
    )
    waits = SortShare(memory, "other")
    assert not waits.try_hold(500)
    assert waits.hold(500) is SortRoom.WAIT
    look(memory, clock, UNREAD_OTHERS_SECONDS - 0.5)
    assert not largest.is_lost
    older.moved()
    look(memory, clock, 0.5)
    assert (mine.is_lost, largest.is_lost, older.is_lost) == (False, True, False), "no more than is needed"
    assert waits.when_ready(lambda: None)
    assert waits.hold(500) is SortRoom.GRANTED


def test_a_result_that_is_being_read_stays(memory: SortMemory, clock: Clock) -> None:
    """sort_memory [4]. So does one that a thread is at work on."""
    read, worked = Result(memory, "worst", 400), Result(memory, "worst", 400)
    worked.is_at_work = True
    waits = SortShare(memory, "other")
    assert waits.hold(900) is SortRoom.WAIT
    for _ in range(100):
        look(memory, clock, 1.0)
        read.moved()
    assert (read.is_lost, worked.is_lost) == (False, False)


def test_results_of_the_caller_that_waits_itself_have_more_time(memory: SortMemory, clock: Clock) -> None:
    unread = Result(memory, "desk", 900)
    waits = SortShare(memory, "desk")
    assert waits.hold(500) is SortRoom.WAIT
    look(memory, clock, UNREAD_SECONDS - 0.5)
    assert not unread.is_lost
    look(memory, clock, 0.5)
    assert unread.is_lost


def test_nothing_is_taken_back_while_nobody_waits(memory: SortMemory, clock: Clock) -> None:
    unread = Result(memory, "worst", 1_000)
    look(memory, clock, 1_000.0)
    assert not unread.is_lost


def test_a_sort_with_the_turn_that_does_not_go_on_loses_it(memory: SortMemory, clock: Clock) -> None:
    """sort_memory [4]. Story: a client that did not read even the header stopped the sort of its query, which kept the
    turn."""
    stalled = Result(memory, "worst", 0)
    assert stalled.try_hold(900)
    waits = SortShare(memory, "worst")
    assert waits.hold(500) is SortRoom.BEGIN_ANEW
    look(memory, clock, UNREAD_SECONDS)
    assert stalled.is_lost
    assert waits.when_ready(lambda: None)


def test_a_sort_whose_memory_was_taken_back_ends_when_it_is_read(memory: SortMemory, clock: Clock) -> None:
    """Its rows are gone from memory at once, though its client has not read what came before."""
    memory = SortMemory(bytes_max=20_000, elapsed=clock)
    topic = Topic(1, "t", TopicSettings(), create_time_micros=0, statistics=StoredStatistics())
    sorter = Sorter(order(topic, "/a"), None, payloads=True, memory=memory, caller="worst")
    payload = b'{"a":1,"pad":"' + b"x" * 1_000 + b'"}'
    times = {"publish_time": 1, "expire_time": NEVER}
    value = header(origin=0, payload_bytes=len(payload), version=1, sequence=1, **times) + payload
    assert sorter.add([b"%02d" % n for n in range(10)], [value] * 10) is SortRoom.GRANTED
    rows = sorter.rows()
    with sorter.working():
        assert next(rows)[1] == b"00"
    waits = SortShare(memory, "worst")
    assert waits.hold(15_000) is SortRoom.WAIT
    look(memory, clock, UNREAD_SECONDS)
    assert memory.held_bytes == 0
    assert list(rows) == [], "the rows are released"
    with pytest.raises(StoreError) as refused, sorter.working():
        pass
    assert (refused.value.reason, refused.value.field) == (Reason.OVERLOADED, "order_by")
    assert refused.value.retry_after_micros
    sorter.close()
    assert waits.when_ready(lambda: None)


def test_a_query_that_waits_has_the_memory_taken_back() -> None:
    """Story: it waited for 30 s, and was refused then. Others that wait look as well, which costs nothing more."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        memory = SortMemory(bytes_max=1_000, elapsed=loop.time)
        unread = [Result(memory, "worst", 100) for _ in range(10)]
        waits = [SortShare(memory, "worst"), SortShare(memory, "other"), SortShare(memory, "third")]
        rooms = [share.hold(400) for share in waits]
        assert rooms == [SortRoom.WAIT, SortRoom.BEGIN_ANEW, SortRoom.BEGIN_ANEW]
        begun = loop.time()
        for share in waits:
            await until_ready(share)
            assert share.try_hold(400)
            share.shrink(400)
            share.close()
        assert loop.time() - begun < UNREAD_OTHERS_SECONDS + 1 < SORT_PATIENCE_SECONDS
        assert sum(result.is_lost for result in unread) == 4

    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        runner.run(run())
