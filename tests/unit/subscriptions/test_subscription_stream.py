"""A subscription on an event loop: it waits without turning, reads on reader threads, is closed whatever happens."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest

from sow_server.engine.store import Store
from sow_server.engine.values.clock import boot_micros
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, Publish
from sow_server.services.wire.topic_filters import PlannedSnapshot
from sow_server.subscriptions.frames import ChangeFrame, Frame, Progress, SnapshotBatch, SnapshotBegin, SnapshotEnd
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.request import FROM_NOW, Start, StartKind
from sow_server.subscriptions.stream import stream
from sow_server.subscriptions.subscription import Subscription
from tests.support.stores.stores import Rig
from tests.support.stores.subscribers import request, rig

__all__ = ["rig"]  # a fixture


@pytest.fixture
def readers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Running:
    """The store with its thread, and a hub on the running loop."""

    def __init__(self, rig: Rig, readers: ThreadPoolExecutor) -> None:
        self.store: Store = rig.store
        self.readers = readers
        loop = asyncio.get_running_loop()
        self.hub = Hub(
            rig.store.reads,
            rig.store.writes,
            loop.call_soon,
        )
        rig.store.start(loop.call_soon_threadsafe)

    def subscribe(
        self, *, sow: bool = False, start: Start = FROM_NOW, elapsed: Callable[[], int] = boot_micros
    ) -> AsyncGenerator[Frame, None]:
        asked = request(self.store, topic="orders", sow=sow, oof=True, start=start)
        return stream(self.hub.subscribe(asked), self.readers, elapsed)

    async def put(self, key: str) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self.store.commits.submit(Publish("orders", [b"{}"], [key])).then(done.set_result)
        await done


def test_changes_arrive_as_they_happen(rig: Rig, readers: ThreadPoolExecutor) -> None:
    async def run() -> None:
        running = Running(rig, readers)
        async with aclosing(running.subscribe(sow=True)) as frames:
            assert isinstance(await anext(frames), SnapshotBegin)
            assert isinstance(await anext(frames), SnapshotEnd)
            waiting = asyncio.ensure_future(anext(frames))
            for number in range(3):
                assert not waiting.done()
                await running.put(str(number))
                frame = await waiting
                assert isinstance(frame, ChangeFrame)
                assert [row.key for row in frame.rows] == [b"%d" % number]
                waiting = asyncio.ensure_future(anext(frames))
            waiting.cancel()
        assert running.hub.count == 0

    asyncio.run(run())


def test_a_timer_of_before_a_suspend_is_made_anew(
    rig: Rig, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's clock stands meanwhile, so it rings late: a frame that was due after 0.3 s came after 3 s."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        start, suspended, made = boot_micros(), 0, 0
        call_later = loop.call_later
        running = Running(rig, readers)

        def noted(delay: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
            nonlocal made
            made += 1
            return call_later(delay, callback)

        monkeypatch.setattr(loop, "call_later", noted)
        async with aclosing(running.subscribe(elapsed=lambda: start + suspended)) as frames:
            assert isinstance(await anext(frames), Progress)
            for number in range(3):
                waiting = asyncio.ensure_future(anext(frames))
                await asyncio.sleep(0)
                assert made == (1 if number < 2 else 2)
                suspended = 3600 * MICROS if number else 0
                await running.put(str(number))
                assert isinstance(await waiting, ChangeFrame)

    asyncio.run(run())


def test_waits_that_end_with_changes_share_a_timer(
    rig: Rig, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each made one and cancelled it, which was most of the cost of the wait. The timer may ring early: then the
    subscription waits on."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        call_later = loop.call_later
        running = Running(rig, readers)

        def noted(delay: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
            timers.append(call_later(delay, callback))
            return timers[-1]

        monkeypatch.setattr(loop, "call_later", noted)
        async with aclosing(running.subscribe()) as frames:
            assert isinstance(await anext(frames), Progress)
            for number in range(4):
                waiting = asyncio.ensure_future(anext(frames))
                await asyncio.sleep(0)
                if number == 2:
                    timers[-1]._run()  # it rings, and nothing is due
                    timers[-1].cancel()
                    await asyncio.sleep(0)
                assert not waiting.done()
                await running.put(str(number))
                assert isinstance(await waiting, ChangeFrame)
            assert len(timers) == 2
        assert timers[-1].cancelled(), "no timer of an ended subscription is left"

    asyncio.run(run())


def test_a_journal_is_read_on_a_reader_thread(rig: Rig, readers: ThreadPoolExecutor) -> None:
    rig.put("orders", "a", b"{}")

    async def run() -> None:
        running = Running(rig, readers)
        start = Start(StartKind.BOOKMARK, bookmark=running.store.instance.bookmark(0))
        async with aclosing(running.subscribe(start=start)) as frames:
            assert isinstance(await anext(frames), Progress)
            frame = await anext(frames)
            assert isinstance(frame, ChangeFrame)
            await running.put("b")
            frame = await anext(frames)
            assert isinstance(frame, ChangeFrame)
            assert [row.key for row in frame.rows] == [b"b"]

    asyncio.run(run())


def test_a_cursor_is_not_closed_under_a_readers_hands(
    rig: Rig, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB crashes when an iterator goes while another thread is in it."""
    rig.put("orders", "a", b"{}")
    reading, go_on = threading.Event(), threading.Event()
    closed = asyncio.Event()
    order: list[str] = []
    read, close = PlannedSnapshot.read, Subscription.close

    def slow_read(self: PlannedSnapshot) -> SnapshotBatch | None:
        reading.set()
        assert go_on.wait(10)
        found = read(self)
        order.append("read")
        return found

    def observed_close(self: Subscription) -> None:
        order.append("closed")
        close(self)
        closed.set()

    monkeypatch.setattr(PlannedSnapshot, "read", slow_read)
    monkeypatch.setattr(Subscription, "close", observed_close)

    async def run() -> None:
        running = Running(rig, readers)
        frames = running.subscribe(sow=True)
        assert isinstance(await anext(frames), SnapshotBegin)
        waiting = asyncio.ensure_future(anext(frames))
        await asyncio.get_running_loop().run_in_executor(None, reading.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert order == []
        go_on.set()
        await closed.wait()
        assert order == ["read", "closed"]

    asyncio.run(run())


def test_an_error_of_a_read_for_which_nobody_waits_is_not_logged(
    rig: Rig, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "Future exception was never retrieved"."""
    reading, go_on = threading.Event(), threading.Event()

    def refused(self: PlannedSnapshot) -> SnapshotBatch | None:
        reading.set()
        assert go_on.wait(10)
        raise StoreError(Reason.RESULT_TOO_LARGE, "too large")

    monkeypatch.setattr(PlannedSnapshot, "read", refused)
    close = Subscription.close
    logged: list[object] = []

    async def run() -> None:
        closed = asyncio.Event()

        def observed_close(self: Subscription) -> None:
            close(self)
            closed.set()

        monkeypatch.setattr(Subscription, "close", observed_close)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        running = Running(rig, readers)
        frames = running.subscribe(sow=True)
        await anext(frames)
        waiting = asyncio.ensure_future(anext(frames))
        await asyncio.get_running_loop().run_in_executor(None, reading.wait)
        waiting.cancel()
        await asyncio.wait([waiting])
        go_on.set()
        await closed.wait()
        del waiting, frames

    asyncio.run(run())
    gc.collect()
    assert logged == []


def test_a_stop_wakes_waiting_calls(rig: Rig, readers: ThreadPoolExecutor) -> None:
    async def run() -> None:
        running = Running(rig, readers)
        frames = running.subscribe()
        assert isinstance(await anext(frames), Progress)
        waiting = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        running.hub.stop()
        assert isinstance(await waiting, Progress)
        with pytest.raises(StoreError) as ended:
            await anext(frames)
        assert ended.value.reason is Reason.STOPPING
        assert running.hub.count == 0

    asyncio.run(run())
