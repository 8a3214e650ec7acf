"""The reader threads, shared by callers (rule N7; fair_readers [1] to [4])."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from sow_server.engine.values.turns import CALLER, SERVER
from sow_server.services.door.fair_readers import FairReaders

WATCHDOG_SECONDS = 20.0


class Clock:
    """Seconds that only work takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Reader threads, work that ends when the test says so, and a note of what has begun."""

    def __init__(self, threads: int, caller_threads_max: int = 0) -> None:
        self.clock = Clock()
        self.readers = FairReaders(threads, caller_threads_max, clock=self.clock)
        self.begun: list[str] = []
        self._starts = threading.Semaphore(0)

    def give(self, caller: str, name: str, *, seconds: float = 0.0) -> tuple[Future[str], threading.Event]:
        """Work of a caller, which waits for the event."""
        go_on = threading.Event()

        def work() -> str:
            self.begun.append(name)
            self._starts.release()
            assert go_on.wait(WATCHDOG_SECONDS)
            self.clock.now += seconds
            return CALLER.get()

        token = CALLER.set(caller)
        try:
            return self.readers.submit(work), go_on
        finally:
            CALLER.reset(token)

    def started(self, count: int = 1) -> None:
        """Waits until so much more work has begun."""
        for _ in range(count):
            assert self._starts.acquire(timeout=WATCHDOG_SECONDS)

    def served(self, work: list[tuple[Future[str], threading.Event]]) -> None:
        """Lets work go on, and waits for it."""
        for _, go_on in work:
            go_on.set()
        for future, _ in work:
            future.result(WATCHDOG_SECONDS)


@pytest.fixture
def one() -> Iterator[Rig]:
    """With one thread."""
    rig = Rig(1)
    yield rig
    rig.readers.shutdown()


@pytest.fixture
def four() -> Iterator[Rig]:
    """With four threads, two of a caller."""
    rig = Rig(4, 2)
    yield rig
    rig.readers.shutdown()


def test_the_work_of_a_caller_comes_between_that_of_one_with_much(one: Rig) -> None:
    """fair_readers [1]: each caller's work in its order."""
    held = one.give("much", "m0", seconds=1.0)
    one.started()
    waiting = [one.give("much", f"m{number}", seconds=1.0) for number in range(1, 4)]
    waiting += [one.give("little", f"l{number}", seconds=0.1) for number in range(3)]
    one.served([held, *waiting])
    assert one.begun == ["m0", "l0", "l1", "l2", "m1", "m2", "m3"]


def test_a_turn_counts_by_the_time_that_it_took(one: Rig) -> None:
    """fair_readers [1]: not by the number of pieces."""
    held = one.give("long", "held")
    one.started()
    waiting = [one.give("long", f"long{number}", seconds=3.0) for number in range(2)]
    waiting += [one.give("short", f"short{number}", seconds=1.0) for number in range(4)]
    one.served([held, *waiting])
    assert one.begun == ["held", "short0", "long0", "short1", "short2", "long1", "short3"]


def test_one_caller_leaves_threads_to_the_others(four: Rig) -> None:
    """fair_readers [2]"""
    much = [four.give("much", f"m{number}") for number in range(10)]
    four.started(2)
    other = four.give("other", "other")
    four.started()
    assert sorted(four.begun) == ["m0", "m1", "other"], "two threads of the caller with much, one is idle"
    four.served([other])
    four.served(much)
    assert len(four.begun) == 11


def test_work_that_waits_for_its_callers_threads_begins_once_one_is_free(four: Rig) -> None:
    """fair_readers [2]"""
    much = [four.give("much", f"m{number}") for number in range(3)]
    four.started(2)
    four.served(much[:1])
    four.started()
    assert four.begun[2:] == ["m2"]
    four.served(much[1:])


def test_the_work_of_the_server_comes_first_and_has_all_threads(four: Rig) -> None:
    """fair_readers [3]"""
    much = [four.give("much", f"m{number}", seconds=1.0) for number in range(3)]
    four.started(2)
    own = [four.give(SERVER, f"s{number}", seconds=1000.0) for number in range(4)]
    four.started(2)
    assert sorted(four.begun) == ["m0", "m1", "s0", "s1"]
    four.served(much[:1])
    four.started()
    assert four.begun[-1] == "s2", "before m2, which has waited longer"
    four.served([*own, *much[1:]])


def test_the_work_of_the_server_comes_before_that_of_many_callers(one: Rig) -> None:
    """fair_readers [3]. Story: it came behind one piece of each caller that had had no more than it."""
    held = one.give("much", "m0", seconds=1.0)
    one.started()
    waiting = [one.give(f"c{number}", f"c{number}") for number in range(3)]
    own = [one.give(SERVER, f"s{number}", seconds=5.0) for number in range(2)]
    one.served([held, *own, *waiting])
    assert one.begun == ["m0", "s0", "s1", "c0", "c1", "c2"]


def test_work_that_is_cancelled_while_it_waits_is_dropped(one: Rig) -> None:
    """fair_readers [4]"""
    held = one.give("much", "held")
    one.started()
    waiting = [one.give("much", f"m{number}") for number in range(100)]
    last = one.give("much", "last")
    for future, _ in waiting:
        assert future.cancel()
    one.served([held, last])
    assert one.begun == ["held", "last"]
    with pytest.raises(CancelledError):
        waiting[0][0].result()


def test_work_that_is_under_way_is_not_cancelled(one: Rig) -> None:
    """fair_readers [4]: it may use a cursor."""
    future, go_on = one.give("a", "a")
    one.started()
    assert not future.cancel()
    one.served([(future, go_on)])


def test_the_work_runs_with_the_caller_that_has_given_it(four: Rig) -> None:
    given = [four.give(caller, caller) for caller in ("a", "b")]
    four.served(given)
    assert [future.result() for future, _ in given] == ["a", "b"]


def test_an_error_is_told_and_costs_no_thread(one: Rig) -> None:
    def fail() -> None:
        raise ValueError("so it is")

    for _ in range(3):
        with pytest.raises(ValueError, match="so it is"):
            one.readers.submit(fail).result(WATCHDOG_SECONDS)
    assert one.readers.submit(lambda: 7).result(WATCHDOG_SECONDS) == 7


def test_a_caller_that_has_gone_takes_its_waiting_work_along(one: Rig) -> None:
    """fair_readers [4]: a cancelled task cancels what it waits for."""
    held = one.give("much", "held")
    one.started()
    ran = threading.Event()

    async def ask() -> None:
        await asyncio.get_running_loop().run_in_executor(one.readers, ran.set)

    async def gone() -> None:
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(gone())
    last = one.give("much", "last")
    one.served([held, last])
    assert not ran.is_set()


def test_a_stop_does_the_work_that_waits_and_takes_no_more() -> None:
    rig = Rig(2, 1)
    given = [rig.give("a", f"a{number}") for number in range(5)]
    rig.started()
    rig.readers.shutdown(wait=False)
    with pytest.raises(RuntimeError):
        rig.give("a", "late")
    rig.served(given)
    rig.readers.shutdown()
    assert rig.begun == [f"a{number}" for number in range(5)]


def test_a_stop_may_cancel_the_work_that_waits() -> None:
    rig = Rig(1)
    given = [rig.give("a", f"a{number}") for number in range(3)]
    rig.started()
    rig.readers.shutdown(wait=False, cancel_futures=True)
    rig.served(given[:1])
    rig.readers.shutdown()
    assert rig.begun == ["a0"]
    assert all(future.cancelled() for future, _ in given[1:])
