"""The asynchronous publisher: `PublishCore` with a task."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

import grpc

from sow.v1 import sow_pb2
from sow_client import _lifetimes, _process, _statuses
from sow_client._documents import Document, encode
from sow_client._keys import Key, key_text
from sow_client._payloads import PayloadForm
from sow_client._publish_columns import (
    BATCH_BYTES,
    KEY_CHARACTERS_MAX,
    PAYLOAD_BYTES_MAX,
    checked_columns,
    key_too_large,
)
from sow_client._publish_core import END_SECONDS, Ack, OpenedPublisher, PublishCore
from sow_client._publisher_base import ANSWERS, PublisherBase, leave_async
from sow_client._records import ExpireAt, Ttl
from sow_client._transport import task_is_cancelled
from sow_client.errors import Refusal, SowError

_Value = TypeVar("_Value")


class Cancellable(Protocol):
    """A call, or a task."""

    def cancel(self) -> object: ...


class AioStreamCall(Cancellable, Protocol):
    """An open stream."""

    def __aiter__(self) -> AsyncIterator[sow_pb2.PublishStreamResponse]: ...


class OpenAioStream(Protocol):
    """A client's PublishStream for an asynchronous publisher; see `OpenStream`."""

    def __call__(self, requests: AsyncIterator[sow_pb2.PublishStreamRequest], /) -> Awaitable[AioStreamCall]: ...


class AsyncPublisher(PublisherBase):
    """`Publisher` for asyncio: the same calls with `await`, used by one task. Callbacks run on the event loop."""

    def __init__(
        self,
        core: PublishCore,
        open_stream: OpenAioStream,
        *,
        form: Callable[[bool], Awaitable[PayloadForm]] | None = None,
        next_epoch: Callable[[], Awaitable[OpenedPublisher]] | None = None,
        on_ack: Callable[[Ack], object] | None = None,
        on_refusal: Callable[[Refusal], object] | None = None,
    ) -> None:
        """`form` asks for that of the topic's payloads, with True also if the client remembers one; None: JSON.
        `next_epoch` begins an epoch of the publisher's id, before the first stream; None: the core has its epoch."""
        super().__init__(core, on_ack, on_refusal)
        self._form = form
        self._encode: Callable[[Document], bytes] | None = encode if form is None else None
        self._open_stream = open_stream
        self._next_epoch = next_epoch
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._overdue = False  # records have lingered long enough, and wait for room
        self._call: Cancellable | None = None  # the call or task that `_run` waits for, so that `abort` can end it
        self._task: asyncio.Task[None] | None = None

    def _forked(self) -> None:
        super()._forked()
        _process.keep(self._call, self._task, self._linger)
        self._work, self._progress = asyncio.Event(), asyncio.Event()
        self._call = self._task = self._linger = None

    async def publish(
        self, data: Document, *, key: Key | None = None, ttl: Ttl | None = None, expire_at: ExpireAt | None = None
    ) -> None:
        """Takes one record; `ttl` or `expire_at` overrides the publisher's own. May wait for room. Rule: L2."""
        payload = data if type(data) is bytes else self._encode(data) if self._encode else await self._first(data)
        lifetime = None if ttl is None and expire_at is None else _lifetimes.lifetime(ttl, expire_at)
        size = len(payload)
        if self._stopped or size > PAYLOAD_BYTES_MAX:
            self._refuse(size)
        if key is None and lifetime is None:
            self._append(payload)
        else:
            # `optional_key`, whose calls would take three times as long.
            text = key if key is None or (type(key) is str and key.isascii()) else key_text(key)
            if text is not None and len(text) > KEY_CHARACTERS_MAX:
                raise key_too_large(text)
            self._core.plain = False
            self._append((payload, text, lifetime))
        self._filled = filled = self._filled + size
        if filled >= BATCH_BYTES or len(self._pending) >= self._batch_records:
            await self._seal_all()
        elif self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(self._core.options.linger, self._lingered)

    async def remove(self, key: Key | None = None, *, data: Document | None = None) -> None:
        """Takes a removal: the live record of the key is deleted, in its place among the records; see
        `Publisher.remove`."""
        removal = self._removal(key, data, None if data is None else await self._payload_of(data))
        self._core.plain = False
        self._append(removal)
        self._filled += len(removal.payload)
        if len(self._pending) >= self._batch_records:
            await self._seal_all()
        elif self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(self._core.options.linger, self._lingered)

    async def _payload_of(self, data: Document) -> bytes:
        return self._encode(data) if self._encode else await self._first(data)

    async def _first(self, data: Document) -> bytes:
        """The payload of a document, while the form of the topic's payloads is not known. May wait for the server;
        bytes and text do not need it."""
        if (payload := self._as_it_is(data)) is not None:
            return payload
        form = await self._await_form()
        if self._core.encoded_as not in ("", form.encoded_as):
            await self._seal_all()  # what has the old form says so
        self._encode = known = self._asked(form)
        return known(data)

    def _ask_again(self) -> None:
        if self._form is not None:
            self._encode = None

    async def _await_form(self) -> PayloadForm:
        assert self._form is not None, "without it `_encode` is there from the begin"
        anew, self._form_is_old = self._form_is_old, False
        backoff = _statuses.Backoff()
        while True:
            backoff.begin(time.monotonic())
            try:
                return await self._form(anew)
            except SowError as error:
                delay = self._asking_delay(error, backoff)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    while True:
                        await self._await_progress()  # raises when the publisher has ended

    async def publish_columns(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        lifetime_kinds: Iterable[int] | None = None,
        lifetime_micros: Iterable[int] | None = None,
        removals: Sequence[bool] | None = None,
    ) -> None:
        """Takes many records at once, for a fraction of the cost of as many `publish` calls; see
        `Publisher.publish_columns`."""
        bulk = checked_columns(payloads, keys, lifetime_kinds, lifetime_micros, removals)
        if self._stopped:
            raise self._stop_error()
        if self._pending:
            await self._seal_all()
        at = 0
        while at < len(payloads):
            if self._core.room:
                at = self._core.seal_columns(bulk, at)
                self._start()
            else:
                await self._await_progress()

    async def finish_unit(self, *, without_refused: bool = False) -> None:
        """Finishes the publisher's `unit` together with the last records; see `Publisher.finish_unit`."""
        core = self._core
        core.check_unit()
        if self._failure is not None:
            raise self._failure
        if core.unit_finished:
            return
        if without_refused:
            await self._drain()
        elif self._pending:
            await self._seal_all()
        while not core.held_alone:
            await self._await_progress()
        core.end_unit(without_refused=without_refused)
        self._start()
        while core.has_requests:
            await self._await_progress()
        failed = core.unit_ended()
        if failed is not None:
            raise failed

    async def flush(self) -> None:
        """Returns once all records so far are settled. Raises PublishFailed for refusals since the last flush."""
        if self._failure is not None:
            raise self._failure
        await self._drain()
        self._core.hold()
        failed = self._core.take_refusals()
        if failed is not None and self._on_refusal is None:
            raise failed

    async def _drain(self) -> None:
        self._core.release()
        if self._pending:
            await self._seal_all()
        elif self._core.has_requests:
            self._start()  # the held-back request is free now
        while self._core.unacknowledged:
            await self._await_progress()

    async def close(self) -> None:
        """Flushes and ends the stream. It may be called again. Raises as `flush` does."""
        try:
            if not self._closing:
                await self.flush()
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Ends the stream at once. Unacknowledged records may or may not have been applied."""
        self._closing = self._stopped = True
        if self._linger is not None:
            self._linger.cancel()
        self._work.set()
        self._progress.set()
        if self._task is None:
            return
        if not self._core.unacknowledged:
            await asyncio.wait([self._task], timeout=END_SECONDS)
        if self._call is not None:
            self._call.cancel()
        await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        return await leave_async(error, self.close, self.abort)

    def __del__(self) -> None:
        # A timer or its task keeps it while there is something to send and the loop runs, so the loop has ended.
        if self._is_parents or (core := getattr(self, "_core", None)) is None:
            return
        if not self._closing and core.unacknowledged:
            self._warn_of_end(f"{core.unacknowledged} records may not have been sent")

    async def _seal_all(self) -> None:
        while self._pending:
            if self._core.room:
                self._seal()
            else:
                await self._await_progress()
        self._filled = 0

    def _seal(self) -> None:
        self._core.seal()
        self._overdue = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="sow-publisher")
        self._work.set()

    def _lingered(self) -> None:
        self._linger = None
        if self._stopped or not self._pending:
            return
        if not self._core.room:
            self._overdue = True
            return
        self._seal()
        if self._pending:  # more than one request
            self._linger = asyncio.get_running_loop().call_later(self._core.options.linger, self._lingered)

    async def _await_progress(self) -> None:
        if not self._stopped:
            self._progress.clear()
            await self._progress.wait()
        if self._stopped:
            raise self._stop_error()

    async def _requests(self, stream: int) -> AsyncIterator[sow_pb2.PublishStreamRequest]:
        """The requests of one stream, as they become ready; ends when the publisher closes or reconnects."""
        while stream == self._stream:
            request = self._core.next_request()
            if request is not None:
                yield request
            elif self._closing or self._core.must_reopen:
                return
            else:
                self._work.clear()
                await self._work.wait()

    async def _run(self) -> None:
        try:
            if self._next_epoch is not None:
                self._core.opened(await self._waited_for(self._next_epoch()))
            while not self._closing:
                if not self._core.has_requests:
                    self._work.clear()
                    await self._work.wait()
                    continue
                error = await self._stream_once()
                self._core.rewind()
                if self._core.has_requests:
                    delay = self._core.retry_delay(error, now=time.monotonic(), jitter=random.random())
                    await self._sleep(delay)
        except BaseException as error:  # noqa: BLE001 - also a callback's; the user's task raises it
            if self._closing and isinstance(error, asyncio.CancelledError):
                return  # `abort` has ended the wait
            self._failure = error
            self._stopped = True
            self._progress.set()

    async def _waited_for(self, what: Awaitable[_Value]) -> _Value:
        """Awaits it in such a way that `abort` can end the wait."""
        waiting = self._call = asyncio.ensure_future(what)
        try:
            return await waiting
        finally:
            self._call = None

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not self._closing:
                    self._work.clear()
                    await self._work.wait()
        except TimeoutError:
            pass  # slept

    async def _stream_once(self) -> SowError:
        self._stream += 1
        call = None
        try:
            try:
                call = await self._waited_for(self._open_stream(self._requests(self._stream)))
            except SowError as unavailable:
                return unavailable
            self._call = call
            if self._stopped:
                call.cancel()  # `abort` came before the call was known, and could not cancel it
            async for response in call:
                ack, error = self._core.acknowledge(response)
                self._progress.set()
                if self._overdue:
                    if self._linger is not None:
                        self._linger.cancel()
                    self._lingered()
                self._heed(ack)
                self._deliver(ack)
                if error is not None:
                    return error
            return _statuses.cut(ANSWERS)
        except grpc.RpcError as error:
            return _statuses.stream_error(error, ANSWERS)
        except asyncio.CancelledError:
            if self._closing or task_is_cancelled():
                raise
            return _statuses.cut(ANSWERS)
        finally:
            self._stream += 1
            self._call = None
            self._work.set()
            if call is not None:
                call.cancel()
