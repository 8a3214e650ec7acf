"""`AsyncSubscription`: following topics in asyncio. `_subscription_core` has the machine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable
from itertools import islice
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc
import grpc.aio

from sow.v1 import sow_pb2
from sow_client import _process, _statuses, _timeouts
from sow_client._records import Change
from sow_client._subscription_core import FRAMES, SubscriptionBase, SubscriptionCore, broken_call, checked_size
from sow_client._transport import RECONNECT_SECONDS, task_is_cancelled
from sow_client.errors import SowError

_Value = TypeVar("_Value")


class AioSubscribeCall(Protocol):
    """A call in progress."""

    async def read(self) -> object: ...

    def cancel(self) -> object: ...


class AioOpenSubscription(Protocol):
    """A client's Subscribe for an asynchronous subscription; see `OpenSubscription`.

    `connect_seconds` bounds the wait for a connection; None: the client's own bound.
    """

    def __call__(
        self, request: sow_pb2.SubscribeRequest, /, *, connect_seconds: float | None = None
    ) -> Awaitable[AioSubscribeCall]: ...


class AsyncSubscription(SubscriptionBase):
    """`Subscription` for asyncio: the same with `async for`, used by one task.

    It is established by `open`, by entering an `async with` block, or by the first change that is asked for.
    """

    def __init__(self, core: SubscriptionCore, open_call: AioOpenSubscription) -> None:
        super().__init__(core)
        self._open_call = open_call
        self._closed = asyncio.Event()
        self._call: AioSubscribeCall | None = None
        self._again = 0.0  # when the next call may be made
        self._opening: asyncio.Future[AioSubscribeCall] | None = None  # the next call, while it is being made
        self._reading: asyncio.Task[object] | None = None  # the next frame, which `next` has stopped waiting for
        _process.tell(self)

    _loop: asyncio.AbstractEventLoop | None = None  # of the call; here, as for `Subscription._reader`

    def _forked(self) -> None:
        if self._closed.is_set():
            return
        super()._forked()
        _process.keep(self._call, self._opening, self._reading)
        self._core.forked(self._what)
        self._closed = asyncio.Event()
        self._call = self._opening = self._reading = self._loop = None

    async def open(self) -> None:
        """Returns once the subscription is established: no change from now on is missed."""
        self._check_process()
        while not self._core.stood:
            if not await self._advance():
                raise _statuses.closed("subscription")

    async def close(self) -> None:
        """Ends the call; a task that waits for the next change finds the iteration ended."""
        self._check_process()
        self._closed.set()
        self._drop_call()

    async def call_again(self) -> None:
        """Ends the present call. The next one follows, for what is wanted by then."""
        if self._call is not None:
            self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        core = self._core
        while not self._closed.is_set():
            for change in core.pending:
                return change
            if not await self._advance():
                break
        raise StopAsyncIteration

    async def next(self, timeout: float | None = None) -> Change | None:  # noqa: ASYNC109 - it ends no call
        """The next change; None if none comes within `timeout` seconds. Nothing is lost then, and the subscription goes
        on. Raises Cancelled (CLOSED) when it is closed."""
        change = await self._next(_timeouts.perhaps(timeout, "timeout"))
        if change is None and self._closed.is_set():
            raise _statuses.closed("subscription")
        return change

    async def batches(
        self,
        size: int = 1_000,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it ends no call
    ) -> AsyncIterator[list[Change]]:
        """The changes in lists: those that are at hand, at most `size`, without waiting for more.

        A list is empty where no change came within `timeout` seconds, so a program can do something else then. The
        iteration ends when the subscription is closed. `bookmark` is the position after the whole list.
        """
        checked_size(size)
        timeout = _timeouts.perhaps(timeout, "timeout")
        while not self._closed.is_set():
            first = await self._next(timeout)
            if first is not None or not self._closed.is_set():
                yield [] if first is None else [first, *islice(self._core.pending, size - 1)]

    async def _next(self, timeout: float | None) -> Change | None:  # noqa: ASYNC109 - it ends no call
        give_up = None if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            for change in self._core.pending:
                return change
            if not await self._advance(give_up):
                break
        return None

    def __repr__(self) -> str:
        return self._core.described(type(self), closed=self._closed.is_set())

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            self._drop_call()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        # The garbage collector may run in any thread, and after the end of the loop, which also ends the call.
        if self._loop is not None and not self._loop.is_closed():
            if self._opening is not None:
                self._loop.call_soon_threadsafe(_abandon, self._opening)
            if self._call is not None:
                self._loop.call_soon_threadsafe(self._call.cancel)

    async def _advance(self, give_up: float | None = None) -> bool:
        """Takes in the next frame, or prepares for the next call; False when it was closed, or the time is over."""
        if not await self._may_call(give_up):
            return False
        try:
            error = await self._read(give_up)
        except TimeoutError:
            return False
        if error is None:
            return True
        try:
            self._drop_call()
            if self._closed.is_set():
                return False
            delay = self._core.ended(error, now=time.monotonic(), jitter=random.random())
        except SowError:
            self._closed.set()
            raise
        finally:
            del error  # as in `Subscription`
        self._again = time.monotonic() + delay
        return True

    async def _may_call(self, give_up: float | None) -> bool:
        """Waits until the next call may be made; False when it was closed meanwhile, or the time is over before."""
        now = time.monotonic()
        wait = self._again - now
        if wait <= 0:
            return True
        allowed = wait if give_up is None else min(wait, max(0.0, give_up - now))
        return await self._rest(allowed) and allowed == wait

    async def _read(self, give_up: float | None) -> SowError | None:
        """Takes in the next frame of the current call, or of a new one. Returns the error if the call ended instead.
        Raises TimeoutError when the time is over."""
        try:
            frame = await self._frame(give_up)
            if not isinstance(frame, sow_pb2.SubscribeResponse):
                return _statuses.cut(FRAMES)
            self._core.feed(frame)
            return None
        except grpc.RpcError as broken:
            return broken_call(broken)
        except SowError as refused:
            return refused
        except asyncio.CancelledError:
            self._drop_call()
            if task_is_cancelled():
                raise
            return _statuses.cut(FRAMES)
        except TimeoutError:
            raise
        except BaseException:
            self._drop_call()
            raise

    async def _frame(self, give_up: float | None) -> object:
        call = self._call
        if call is None:
            call = await self._opened(give_up)
        if give_up is None and self._reading is None:
            return await call.read()
        reading = self._reading
        if reading is None:
            # Of the call, not of this subscription: dropping the last reference to that still ends the call. To cancel
            # a read would end the call, so the task reads on when the time is over.
            reading = self._reading = asyncio.create_task(call.read())
            reading.add_done_callback(_observed)
        await _wait(reading, give_up)
        if self._reading is reading:  # else `close` has dropped it
            self._reading = None
        return await reading

    async def _opened(self, give_up: float | None) -> AioSubscribeCall:
        """Makes the next call. An attempt may last longer than the time of one who waits, so it goes on without him."""
        opening = self._opening
        if opening is None:
            core = self._core
            request = core.request(now=time.monotonic())
            connect_seconds = RECONNECT_SECONDS if core.stood else None
            # Of the opener, not of this subscription, as above.
            opening = asyncio.ensure_future(self._open_call(request, connect_seconds=connect_seconds))
            opening.add_done_callback(_observed)
            self._opening, self._loop = opening, asyncio.get_running_loop()
        await _wait(opening, give_up)
        self._opening = None
        try:
            call = opening.result()
        finally:
            del opening  # else its error, which refers to this frame, would keep the subscription
        if self._closed.is_set():
            call.cancel()  # `close` may have come after the attempt was over
        self._call = call
        return call

    async def _rest(self, seconds: float) -> bool:
        """Waits; False when it was closed during the wait."""
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return True
        return False

    def _drop_call(self) -> None:
        self._reading = None
        opening, self._opening = self._opening, None
        if opening is not None:
            _abandon(opening)
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


async def _wait(future: asyncio.Future[_Value], give_up: float | None) -> None:
    """Returns once it is done. Raises TimeoutError when the time is over; it goes on then."""
    timeout = None if give_up is None else max(0.0, give_up - time.monotonic())
    done, _ = await asyncio.wait([future], timeout=timeout)
    if not done:
        raise TimeoutError


def _abandon(opening: asyncio.Future[AioSubscribeCall]) -> None:
    """Ends the making of a call, or the call if it is made."""
    if not opening.cancel() and not opening.cancelled() and opening.exception() is None:
        opening.result().cancel()


def _observed(done: asyncio.Future[_Value]) -> None:
    """Asks a future for its error, so that asyncio does not report one that nobody awaits any more."""
    if not done.cancelled():
        done.exception()


def aio_opened(made: _Value) -> _Value:
    """A subscription or a view as the asynchronous client hands it out. Its first use opens it: the call that makes it
    is not a coroutine, so that `async with client.subscribe(...)` needs no `await`."""
    return made
