"""Loads: the content of a topic replaced, all or nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import grpc
import grpc.aio

from sow.v1 import load_pb2
from sow_client import _lines, _loads, _process, _statuses, _transport
from sow_client._lines import Home
from sow_client._loads import (
    END_SECONDS,
    CommitRetry,
    Load,
    LoadInfo,
    LoadPart,
    LoadProgress,
    StageCore,
    StagedRows,
)
from sow_client._records import Ttl
from sow_client._workers import AioCondition, AioGuard, AioWorker
from sow_client.aio._calls import AsyncCalls
from sow_client.errors import SowError


class AsyncLoading(AsyncCalls):
    """The calls that replace the content of a topic."""

    async def open_load(self, topic: str, *, lease: timedelta | None = None) -> Load:
        """Opens a load, which replaces the content of a topic. It is aborted when no row was staged, and it was not
        renewed, for `lease` (by default 10 min, at most 24 h)."""
        request = _loads.open_request(topic, lease)
        home = Home("the load")
        load = _loads.opened(await self._call(self._load.OpenLoad, request, once=True, home=home))
        self._homes.keep(load.id, home)
        return load

    def stage_load(self, load_id: str, part: int, attempt: int, *, retry_for: float = 30.0) -> AsyncLoadStager:
        """Stages rows of one attempt at a part of a load; see `LoadStager`. Only attempts that the commit names count.
        After a break it reconnects, for `retry_for` seconds without progress."""
        core = StageCore(load_id, part, attempt, retry_for=retry_for)
        return AsyncLoadStager(core, partial(self._open_staging, self._home(load_id)))

    async def commit_load(
        self, load_id: str, parts: Iterable[LoadPart], *, retry_for: float = 60.0
    ) -> AsyncIterator[LoadProgress]:
        """Makes the rows of the named attempts the topic's content; without parts it empties the topic.

        The load is committed when this returns. The server finishes it whether or not the iterator is read. The
        iterator reports the progress until the phase "done", and reconnects for up to `retry_for` seconds. The call may
        be repeated with the same parts. Raises FailedPrecondition (LOAD_INCOMPLETE: the counts differ; LOAD_FAILED: the
        load cannot continue).
        """
        told = self._commit_load(_loads.commit_request(load_id, parts), CommitRetry(retry_for), self._home(load_id))
        first = await anext(told)

        async def all_told() -> AsyncIterator[LoadProgress]:
            async with aclosing(told):
                yield first
                async for progress in told:
                    yield progress

        return all_told()

    async def _commit_load(
        self, request: load_pb2.CommitLoadRequest, retry: CommitRetry, home: Home
    ) -> AsyncGenerator[LoadProgress, None]:
        way = self._cells.way("", home)
        while True:
            call = None
            try:
                line = await self._ready(way, home=home)
                with _transport.unless_closed():
                    call = _lines.at(line, self._load.CommitLoad)(request)
                    async for response in call:
                        progress = _loads.progress(response)
                        retry.heard()
                        yield progress
                        if progress.phase == "done":
                            return
                raise _statuses.cut("the progress of a load")
            except grpc.RpcError as error:
                translated = _statuses.stream_error(error, "the progress of a load")
                delay = retry.delay(translated)
            except SowError as error:
                delay = retry.delay(error)
            finally:
                if call is not None:
                    call.cancel()
            await asyncio.sleep(delay)

    async def get_load(self, load_id: str) -> LoadInfo:
        """The state of a load; a load that has ended is known for a day. Raises NotFound (LOAD_NOT_FOUND)."""
        request = load_pb2.GetLoadRequest(load_id=load_id)
        return _loads.info(await self._call(self._load.GetLoad, request, home=self._homes.of(load_id)))

    async def loads(self, topic: str | None = None) -> list[LoadInfo]:
        """The loads of a topic, or of all topics of all cells, also those that ended within the last day. Other calls
        with their ids go to their cells from then on.

        Rule: C19.
        """
        answers = await self._everywhere(self._load.ListLoads, load_pb2.ListLoadsRequest(topic=topic or ""))
        found: list[LoadInfo] = []
        for cell, response in answers.items():
            loads = [_loads.info(one) for one in response.loads]
            place = self._cells.way(topic).place if topic else self._cells.all.get(cell, self._cells.home)
            for one in loads if place is not self._cells.home else ():
                if self._homes.of(one.id) is None:
                    self._homes.keep(one.id, home := Home("the load"))
                    place.begins(home)
            found += loads
        return found if len(answers) == 1 else sorted(found, key=attrgetter("opened"))

    async def renew_load(self, load_id: str) -> timedelta:
        """Restarts the lease; returns its length. Raises NotFound (LOAD_NOT_FOUND)."""
        request = load_pb2.RenewLoadRequest(load_id=load_id)
        response = await self._call(self._load.RenewLoad, request, home=self._homes.of(load_id))
        return timedelta(microseconds=response.lease_micros)

    async def abort_load(self, load_id: str) -> None:
        """Drops a load and its staged rows; a load that no longer exists is no error. Raises FailedPrecondition
        (LOAD_COMMITTED)."""
        request = load_pb2.AbortLoadRequest(load_id=load_id)
        await self._call(self._load.AbortLoad, request, home=self._homes.of(load_id))

    def _home(self, load_id: str) -> Home:
        return self._homes.of(load_id) or Home("the load")

    async def _open_staging(self, home: Home, requests: AsyncIterator[load_pb2.StageLoadRequest]) -> AioStageCall:
        line = await self._ready(self._cells.way("", home), _transport.RECONNECT_SECONDS, home)
        with _transport.unless_closed():
            return _lines.at(line, self._load.StageLoad)(requests)


class AioStageCall(Protocol):
    """An open stream."""

    def __aiter__(self) -> AsyncIterator[load_pb2.StageLoadResponse]: ...

    def cancel(self) -> object: ...


AioOpenStageStream = Callable[[AsyncIterator[load_pb2.StageLoadRequest]], Awaitable[AioStageCall]]
"""A client's StageLoad for a stager: it waits for a connection, then makes the call."""

_ANSWERS: Final = "the stream of answers to staged rows"


class AsyncLoadStager(StagedRows):
    """Stages the rows of one attempt at a part of a load: pipelined, in order, each counted once.

    Made by `AsyncClient.stage_load`; use it in an `async with` block, in one task. The end of the block flushes. Rows
    that the server refuses are in `refusals` and raise nothing. After a break the stager connects again, and sends the
    unanswered rows again.
    """

    def __init__(self, core: StageCore, open_stream: AioOpenStageStream) -> None:
        super().__init__(core)
        self._open_stream = open_stream
        self._begin()

    def _begin(self) -> None:
        self._lock = AioGuard()
        self._changed = AioCondition(self._lock)
        self._call: AioStageCall | None = None
        self._worker = AioWorker("sow-stager", self._end)

    def _forked(self) -> None:
        super()._forked()
        _process.keep(self._call, self._worker)
        self._begin()

    async def stage(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        lifetime: Ttl | None = None,
        lifetime_kinds: Sequence[int] | None = None,
        lifetime_micros: Sequence[int] | None = None,
    ) -> None:
        """Takes any number of rows; may wait for room. `keys` is for topics without key fields.

        `lifetime` is a ttl, or NEVER, for rows without their own lifetime. `lifetime_kinds` (numbers of
        `sow.v1.LifetimeKind`) and `lifetime_micros` give rows their own. A lifetime starts when the row is applied.
        Raises the error that ended staging.

        Rule: K3.
        """
        for request in self._core.requests(payloads, keys, lifetime, lifetime_kinds, lifetime_micros):
            with self._lock:
                await self._changed.wait_for(lambda: self._core.room or self._failure is not None or self._closing)
                self._check()
                self._worker.start(self._run)
                self._core.queue(request)
                self._changed.notify_all()

    async def flush(self) -> None:
        """Returns once all rows so far are staged or refused. Raises the error that ended staging."""
        with self._lock:
            await self._changed.wait_for(lambda: not self._core.busy or self._failure is not None or self._closing)
            self._check()

    async def close(self) -> None:
        """Flushes and ends the stream. It may be called again."""
        try:
            if not self._closing:
                await self.flush()
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Ends the stream at once. Staged rows stay with the load."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if not self._core.busy:
            await self._worker.join(END_SECONDS)  # the requests have ended, the server ends the answers
        self._worker.end()
        await self._worker.join()

    def _end(self) -> None:
        with self._lock:
            self._closing = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            await self.close()
        else:
            await self.abort()
        return False

    async def _requests(self, stream: int) -> AsyncIterator[load_pb2.StageLoadRequest]:
        while True:
            with self._lock:
                while (request := self._core.next_request() if stream == self._stream else None) is None:
                    if stream != self._stream or self._closing:
                        return
                    await self._changed.wait()
            yield request

    async def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    await self._changed.wait_for(lambda: self._core.busy or self._closing)
                    if self._closing:
                        return
                error = await self._stream_once()
                with self._lock:
                    self._core.rewind()
                    if self._core.busy and not self._closing:
                        delay = self._core.retry_delay(error, now=time.monotonic(), jitter=random.random())
                        await self._changed.wait_for(lambda: self._closing, delay)
        except BaseException as error:  # noqa: BLE001 - its user raises it
            with self._lock:
                if not self._closing:  # else `abort` has ended it
                    self._failure = error
                self._changed.notify_all()

    async def _stream_once(self) -> SowError:
        """Opens a stream and settles its answers until it ends. Returns why it ended."""
        with self._lock:
            self._stream += 1
            requests = self._requests(self._stream)
        call = None
        try:
            with _transport.unless_cut(_ANSWERS):
                call = await self._open_stream(requests)
                with self._lock:
                    self._call = call
                    closing = self._closing
                if closing:
                    call.cancel()
                async for response in call:
                    with self._lock:
                        self._core.settle(response)
                        self._changed.notify_all()
            return _statuses.cut(_ANSWERS)
        except SowError as error:
            return error
        except grpc.RpcError as error:
            return _statuses.stream_error(error, _ANSWERS)
        finally:
            with self._lock:
                self._stream += 1
                self._call = None
                self._changed.notify_all()
            if call is not None:
                call.cancel()
