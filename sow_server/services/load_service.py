"""`sow.v1.LoadService`: replace the content of a topic by a bulk load."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Executor
from typing import Final

from sow.v1 import load_pb2
from sow_server.access.caller import Call
from sow_server.access.needs import Action
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.doors import Writes
from sow_server.engine.loads import (
    LEASE_MICROS,
    LEASE_MICROS_MAX,
    PARTS_MAX,
    Load,
    LoadContent,
    LoadPart,
    LoadPhase,
    RowsToStage,
    load_not_found,
)
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services.door.received import readable
from sow_server.services.load_jobs import LoadJobs
from sow_server.services.records.writing import permit_load
from sow_server.services.wire import convert

STREAM_REQUESTS_MAX: Final = 4
"""Requests of one stream that may be under way; the next is read when the first is answered."""
ROOM_BYTES: Final = 64 * 2**20
"""Payload bytes that all streams together may have read and not staged; one request may exceed it."""
PATIENCE_SECONDS: Final = 30.0
"""How long a stream waits for room in the write queue before it is refused."""


class _RequestMemory:
    """Bounds the memory of the requests under way, of all streams together. On the event loop."""

    def __init__(self) -> None:
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Waits for room for this many bytes, first come, first served. If nothing is taken, any size fits."""
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, given))
        self._give()
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self.free(size)  # the room was granted just then
            raise

    def free(self, size: int) -> None:
        """Gives bytes back."""
        self._taken -= size
        self._give()

    def _give(self) -> None:
        while self._waiting:
            size, given = self._waiting[0]
            if self._taken and self._taken + size > ROOM_BYTES and not given.cancelled():
                return
            self._waiting.popleft()
            if not given.cancelled():
                self._taken += size
                given.set_result(None)


class LoadService:
    """Validates, calls the store, translates; owns nothing."""

    def __init__(
        self,
        writes: Writes,
        jobs: LoadJobs,
        readers: Executor,
        limits: RequestLimits,
        *,
        dynamic_topics: bool,
    ) -> None:
        self._dynamic_topics = dynamic_topics
        self._loads = writes.loads
        self._commits = writes.commits
        self._jobs = jobs
        self._readers = readers
        self._limits = limits
        self._room = _RequestMemory()
        self._checking = asyncio.Semaphore(1)
        """One request at a time is checked, of all streams. Queries and subscriptions need the threads and the
        processor, too, and one thread checks as fast as two."""
        self._staging = asyncio.Lock()
        """One piece at a time is with the writer, of all streams, so that a publish waits for at most one."""

    async def OpenLoad(self, request: load_pb2.OpenLoadRequest, call: Call) -> load_pb2.OpenLoadResponse:
        lease = request.lease_micros or LEASE_MICROS
        if not 0 < lease <= LEASE_MICROS_MAX:
            raise convert.invalid("lease_micros", f"{lease} is not 1 to {LEASE_MICROS_MAX}")
        permit_load(call, request.topic, dynamic=self._dynamic_topics)
        with call.making("loads", self._loads.registry.open_of(call.owner)):
            load = await self._loads.open(request.topic, lease, owner=call.owner)
        return load_pb2.OpenLoadResponse(
            load_id=load.row.id, lease_micros=load.row.lease_micros, begin_version=load.row.begin_version
        )

    async def StageLoad(
        self, requests: AsyncIterator[load_pb2.StageLoadRequest], call: Call
    ) -> AsyncGenerator[load_pb2.StageLoadResponse, None]:
        """Reads and checks at most `STREAM_REQUESTS_MAX` requests ahead of the staging. The writer has one piece of a
        stream at a time, so that publishers get their turn in between."""
        ready: asyncio.Queue[list[RowsToStage] | None] = asyncio.Queue()
        turns = asyncio.Semaphore(STREAM_REQUESTS_MAX)
        sizes: deque[int] = deque()
        reading = asyncio.create_task(self._read_stream(call, requests, ready, turns, sizes))
        reading.add_done_callback(_looked_at)
        try:
            while (pieces := await ready.get()) is not None:
                for piece in pieces:
                    await self._stage(piece)
                self._room.free(sizes.popleft())
                turns.release()
                yield load_pb2.StageLoadResponse(
                    staged=sum(len(piece.positions) for piece in pieces),
                    refusals=[convert.refusal(refusal) for piece in pieces for refusal in piece.refusals],
                )
            await reading  # raises the error that ended the reading
        finally:
            reading.cancel()
            while sizes:
                self._room.free(sizes.popleft())

    async def _read_stream(
        self,
        call: Call,
        requests: AsyncIterator[load_pb2.StageLoadRequest],
        ready: asyncio.Queue[list[RowsToStage] | None],
        turns: asyncio.Semaphore,
        sizes: deque[int],
    ) -> None:
        load_id = ""
        run = asyncio.get_running_loop().run_in_executor
        try:
            async for request in requests:
                readable(request)
                await turns.acquire()
                size = request.ByteSize()
                await self._room.take(size)
                sizes.append(size)
                if request.load_id and request.load_id != load_id:
                    load_id = request.load_id
                    self._owned(call, load_id)
                if request.first_row < 1:
                    raise convert.invalid("first_row", "must be at least 1")
                async with self._checking:
                    ready.put_nowait(await run(self._readers, self._checked, load_id, request))
        finally:
            ready.put_nowait(None)

    def _checked(self, load_id: str, request: load_pb2.StageLoadRequest) -> list[RowsToStage]:
        """On a reader thread. Raises StoreError."""
        count = len(request.payload)
        if count > self._limits.request_records_max:
            raise StoreError(
                Reason.REQUEST_TOO_LARGE,
                f"payload: {count} rows are more than the limit of {self._limits.request_records_max} per request",
                field="payload",
            )
        rows = convert.staged_rows(request)
        return self._loads.staging.prepare(
            load_id,
            request.part,
            request.attempt,
            request.first_row,
            rows,
            self._limits,
            stager=request.stager,
        )

    async def _stage(self, piece: RowsToStage) -> None:
        """Waits for room in the write queue. While it waits the stream is not read, which slows the client down."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE_SECONDS
        while True:
            try:
                async with self._staging:
                    await self._loads.staging.stage(piece)
                return
            except StoreError as error:
                if error.reason is not Reason.OVERLOADED or loop.time() > give_up:
                    raise
                await asyncio.sleep(0.005)

    async def _commit(self, load_id: str, parts: Sequence[LoadPart]) -> Load:
        """Commits a load. Its records are counted only where the topic may not have as many as it has rows (rule T7);
        rows that come meanwhile are LOAD_INCOMPLETE."""
        content: LoadContent | None = None
        while True:
            committed = self._loads.commit(load_id, parts, content)
            committed.then(lambda _: self._jobs.wake())  # also if the caller has gone meanwhile
            try:
                return await committed
            except StoreError as error:
                if error.reason is not Reason.TOPIC_FULL or content is not None:
                    raise
            run = asyncio.get_running_loop().run_in_executor
            content = await run(self._readers, self._loads.content, load_id, parts)

    async def CommitLoad(
        self, request: load_pb2.CommitLoadRequest, call: Call
    ) -> AsyncGenerator[load_pb2.CommitLoadResponse, None]:
        if len(request.parts) > PARTS_MAX:
            raise StoreError(
                Reason.REQUEST_TOO_LARGE,
                f"parts: {len(request.parts)} are more than the limit of {PARTS_MAX}",
                field="parts",
            )
        self._owned(call, request.load_id)
        parts = [LoadPart(part.part, part.attempt, part.rows) for part in request.parts]
        load = await self._commit(request.load_id, parts)
        while True:
            row = load.row
            if row.phase is LoadPhase.FAILED:
                raise StoreError(Reason.LOAD_FAILED, f"load_id: {row.failure}", field="load_id")
            yield load_pb2.CommitLoadResponse(phase=_phase(row.phase), figures=_figures(load))
            if not row.working:
                return
            if (failure := self._commits.failure) is not None:
                raise StoreError(failure.reason, failure.message)  # the next start continues it
            await self._jobs.progressed(load)

    def _owned(self, call: Call, load_id: str) -> Load:
        """A load of the caller, on a topic that it may still load; another one's does not exist. Raises StoreError."""
        load = self._loads.registry.find(load_id)
        if call.unrestricted:
            call.require(load.row.topic)
            return load
        if not call.owns(load.row.owner):
            raise load_not_found(load_id)
        call.topic(load.row.topic, whole=True)
        return load

    async def GetLoad(self, request: load_pb2.GetLoadRequest, call: Call) -> load_pb2.GetLoadResponse:
        return _described(self._owned(call, request.load_id))

    async def RenewLoad(self, request: load_pb2.RenewLoadRequest, call: Call) -> load_pb2.RenewLoadResponse:
        self._owned(call, request.load_id)
        return load_pb2.RenewLoadResponse(lease_micros=self._loads.registry.renew(request.load_id).row.lease_micros)

    async def AbortLoad(self, request: load_pb2.AbortLoadRequest, call: Call) -> load_pb2.AbortLoadResponse:
        try:
            self._owned(call, request.load_id)
            await self._loads.abort(request.load_id)
        except StoreError as error:
            if error.reason is not Reason.LOAD_NOT_FOUND:
                raise
        return load_pb2.AbortLoadResponse()

    async def ListLoads(self, request: load_pb2.ListLoadsRequest, call: Call) -> load_pb2.ListLoadsResponse:
        return load_pb2.ListLoadsResponse(
            loads=[
                _described(load)
                for load in self._loads.registry.all()
                if (not request.topic or load.row.topic == request.topic)
                and call.owns(load.row.owner)
                and call.may(Action.LOAD, load.row.topic)
                and call.cells.have(load.row.topic)
            ]
        )


def _looked_at(done: asyncio.Task[None]) -> None:
    """Marks the error of a reading task as seen. When staging fails first, the caller gets that error, and asyncio must
    not complain that nobody took the other one."""
    if not done.cancelled():
        done.exception()


def _phase(phase: LoadPhase) -> load_pb2.LoadPhase.ValueType:
    return load_pb2.LoadPhase.ValueType(phase.value)


def _figures(load: Load) -> load_pb2.LoadFigures:
    return load_pb2.LoadFigures(**load.figures._asdict())


def _described(load: Load) -> load_pb2.GetLoadResponse:
    row = load.row
    return load_pb2.GetLoadResponse(
        topic=row.topic,
        phase=_phase(row.phase),
        figures=_figures(load),
        failure=row.failure,
        load_id=row.id,
        open_time_micros=row.open_micros,
        staged_bytes=load.staged_bytes,
        lease_end_micros=load.lease_end_micros if row.phase is LoadPhase.STAGING else 0,
    )
