"""The parts of the client in which threads and tasks differ, and the classes of both clients that stand on them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from queue import SimpleQueue
from typing import Self

import pytest

from sow.v1 import load_pb2, sow_pb2
from sow_client import Cancelled
from sow_client._durable import Acknowledgements
from sow_client._loads import StageCore
from sow_client._workers import TOGETHER_MAX, AioCondition, AioGuard, AioWorker, Worker, aio_together, together
from sow_client.aio._consuming import AioAcknowledger
from sow_client.aio._loading import AioStageCall, AsyncLoadStager
from sow_client.blocking._consuming import Acknowledger
from sow_client.errors import Aborted
from sow_server.placement import CELLS_MAX

SECONDS_MAX = 20.0  # before a hanging test fails; nothing takes as long


def test_a_worker_whose_start_was_interrupted_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread runs already when the interrupt comes, and does nothing."""
    ran: list[str] = []
    worker = Worker("sow-test")
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.start(ran.append, "first")
    worker.start(ran.append, "second")
    worker.start(ran.append, "third")
    worker.join(SECONDS_MAX)
    for thread in threading.enumerate():
        if thread.name == "sow-test":
            thread.join(SECONDS_MAX)
    assert ran == ["second"]


def test_a_task_that_waits_is_woken_and_its_time_is_bounded() -> None:
    async def use() -> None:
        changed = AioCondition(AioGuard())
        seen: list[int] = []
        both = [asyncio.create_task(changed.wait_for(lambda: bool(seen))) for _ in range(2)]
        await changed.wait(0.001)
        changed.notify_all()
        await changed.wait_for(lambda: bool(seen), 0.001)
        assert not any(one.done() for one in both), "nothing was seen yet"
        seen.append(1)
        changed.notify_all()
        async with asyncio.timeout(SECONDS_MAX):
            await asyncio.gather(*both)

    asyncio.run(use())


def attached() -> Acknowledgements:
    made = Acknowledgements("t", "d", retry_for=10.0)
    made.attached(sow_pb2.DurableBegin(bookmark="e0.0", session="s1"), anew=True)
    made.received("e0.9")
    return made


DETACHED = Aborted("detached", reason="DURABLE_DETACHED")


def test_what_a_detached_consumer_has_acknowledged_is_sent_by_a_flush_once_it_is_attached_again() -> None:
    """Story: in asyncio the task had ended with the attachment, and a flush waited for ever."""
    acknowledgements = attached()
    sent: list[str] = []
    refused = threading.Event()

    def call(request: sow_pb2.AcknowledgeRequest) -> None:
        if request.session == "s1":
            refused.set()
            raise DETACHED
        sent.append(request.bookmark)

    acknowledger = Acknowledger(acknowledgements, call)
    acknowledger.add("e0.3")
    acknowledger.flush(SECONDS_MAX)
    assert refused.is_set()
    attach_again(acknowledgements)
    acknowledger.flush(SECONDS_MAX)
    assert sent == ["e0.3"]
    assert acknowledger.stop()
    assert not acknowledger.stop()


def test_the_same_in_a_task_which_ends_when_there_is_nothing_to_send() -> None:
    acknowledgements = attached()
    sent: list[str] = []

    async def call(request: sow_pb2.AcknowledgeRequest) -> None:
        if request.session == "s1":
            raise DETACHED
        sent.append(request.bookmark)

    async def use() -> None:
        acknowledger = AioAcknowledger(acknowledgements, call)
        acknowledger.add("e0.3")
        await acknowledger.flush(SECONDS_MAX)
        attach_again(acknowledgements)
        async with asyncio.timeout(SECONDS_MAX):
            await acknowledger.flush()
        assert sent == ["e0.3"]
        await ended("sow-acknowledge")
        acknowledger.add("e0.5")
        await acknowledger.flush(SECONDS_MAX)
        assert sent == ["e0.3", "e0.5"]

    asyncio.run(use())


def attach_again(acknowledgements: Acknowledgements) -> None:
    with acknowledgements.lock:
        acknowledgements.attached(sow_pb2.DurableBegin(bookmark="e0.0", session="s2"), anew=False)
        acknowledgements.received("e0.9")


def test_what_waits_for_an_attachment_is_sent_with_it_and_not_with_the_next_acknowledgement() -> None:
    """Story: nobody told the worker. Where no change came after it, the durable kept its last entry as unacknowledged
    until the consumer was closed."""
    acknowledgements = attached()
    sent: SimpleQueue[str] = SimpleQueue()

    def call(request: sow_pb2.AcknowledgeRequest) -> None:
        sent.put(request.session)
        if request.session == "s1":
            raise DETACHED

    acknowledger = Acknowledger(acknowledgements, call)
    acknowledger.add("e0.3")
    acknowledger.flush(SECONDS_MAX)
    attach_again(acknowledgements)
    assert [sent.get(timeout=SECONDS_MAX) for _ in range(2)] == ["s1", "s2"]
    assert acknowledger.stop()


def test_the_same_with_a_task() -> None:
    acknowledgements = attached()
    sent: asyncio.Queue[str] = asyncio.Queue()

    async def call(request: sow_pb2.AcknowledgeRequest) -> None:
        sent.put_nowait(request.session)
        if request.session == "s1":
            raise DETACHED

    async def use() -> None:
        acknowledger = AioAcknowledger(acknowledgements, call)
        acknowledger.add("e0.3")
        await acknowledger.flush(SECONDS_MAX)
        attach_again(acknowledgements)
        async with asyncio.timeout(SECONDS_MAX):
            assert [await sent.get() for _ in range(2)] == ["s1", "s2"]
        await ended("sow-acknowledge")

    asyncio.run(use())


async def ended(name: str) -> None:
    """Returns once no task of this name is left."""
    async with asyncio.timeout(SECONDS_MAX):
        left = [task for task in asyncio.all_tasks() if task.get_name() == name]
        await asyncio.gather(*left, return_exceptions=True)


class Silent:
    """A stream of which gRPC ends each read with a CancelledError, as it does for a channel that was closed."""

    def __init__(self, ends: bool) -> None:
        self.over = asyncio.Event()
        if ends:
            self.over.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> load_pb2.StageLoadResponse:
        await self.over.wait()
        raise asyncio.CancelledError

    def cancel(self) -> None:
        self.over.set()


def stager(opens: Callable[[], Silent]) -> AsyncLoadStager:
    async def open_stream(_requests: AsyncIterator[load_pb2.StageLoadRequest]) -> AioStageCall:
        return opens()

    return AsyncLoadStager(StageCore("load", 0, 0, retry_for=30.0), open_stream)


def test_a_stager_whose_call_was_cancelled_by_others_opens_the_next_one() -> None:
    async def use() -> None:
        opened: list[Silent] = []
        second = asyncio.Event()

        def opens() -> Silent:
            opened.append(Silent(ends=not opened))
            if len(opened) == 2:
                second.set()
            return opened[-1]

        staging = stager(opens)
        await staging.stage([b"{}"])
        async with asyncio.timeout(SECONDS_MAX):
            await second.wait()
        await staging.abort()

    asyncio.run(use())


def test_a_stager_that_was_ended_in_the_middle_says_that_it_is_closed() -> None:
    """Story: in asyncio its next use raised a CancelledError, in a task that nobody had cancelled."""

    async def use() -> None:
        staging = stager(lambda: Silent(ends=False))
        await staging.stage([b"{}"])
        await asyncio.sleep(0)  # its task begins
        await staging.abort()
        with pytest.raises(Cancelled, match="the stager is closed"):
            await staging.stage([b"{}"])
        await ended("sow-stager")

    asyncio.run(use())


def test_a_worker_of_tasks_is_not_waited_for_by_itself() -> None:
    async def use() -> None:
        worker = AioWorker("sow-test")
        worker.start(worker.join)
        async with asyncio.timeout(SECONDS_MAX):
            await worker.join()

    asyncio.run(use())


# -- together ----------------------------------------------------------------------------------------------------------


def test_calls_that_are_made_together_wait_for_one_another_and_the_first_fault_counts() -> None:
    """_workers [3]: each waits until all have begun: one after the other would never end."""
    begun = threading.Barrier(3, timeout=SECONDS_MAX)
    ended: set[int] = set()

    def call(number: int) -> None:
        begun.wait()
        ended.add(number)
        if number:
            raise Aborted(str(number), reason="ABORTED")

    with pytest.raises(Aborted, match="1"):
        together([partial(call, number) for number in range(3)])
    assert ended == {0, 1, 2}


def test_more_calls_than_threads_are_all_made() -> None:
    made: list[int] = []
    together([partial(made.append, number) for number in range(3 * TOGETHER_MAX)])
    assert sorted(made) == list(range(3 * TOGETHER_MAX))
    together([])


def test_no_cell_of_a_placement_waits_for_another_one() -> None:
    """Story: of 100 cells that hung, a list waited for four times its timeout."""
    assert TOGETHER_MAX >= CELLS_MAX


def test_the_same_in_tasks() -> None:
    async def run() -> None:
        begun = asyncio.Barrier(3)

        async def call(number: int) -> None:
            await begun.wait()
            if number:
                raise Aborted(str(number), reason="ABORTED")

        async with asyncio.timeout(SECONDS_MAX):
            with pytest.raises(Aborted, match="1"):
                await aio_together([partial(call, number) for number in range(3)])
            await aio_together([])

    asyncio.run(run())
