"""Loads: the content of a topic replaced, all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from datetime import timedelta
from functools import partial

import grpc
import grpc.aio

from sow.v1 import load_pb2
from sow_client import _lines, _loads, _statuses, _transport
from sow_client._lines import Home
from sow_client._loads import (
    AioStageCall,
    AsyncLoadStager,
    CommitRetry,
    Load,
    LoadInfo,
    LoadPart,
    LoadProgress,
    StageCore,
)
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
        while True:
            call = None
            try:
                line = await self._transport.await_ready(home=home)
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
        """The loads of a topic, or of all topics, including those that ended within the last day."""
        response = await self._call(self._load.ListLoads, load_pb2.ListLoadsRequest(topic=topic or ""))
        return [_loads.info(one) for one in response.loads]

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
        line = await self._transport.await_ready(_transport.RECONNECT_SECONDS, home)
        with _transport.unless_closed():
            return _lines.at(line, self._load.StageLoad)(requests)
