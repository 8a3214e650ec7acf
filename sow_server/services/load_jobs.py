"""Applies committed loads, chunk by chunk, between the commits of publishers.

One chunk is under way at a time, of all loads together. While publishers are busy, each chunk is followed by a pause as
long as the chunk took. A load waits while its topic's backlog has used up its quota (rule J9), and while the store is
stalled. A stop or crash loses nothing; the next start resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Executor
from typing import Final

import structlog

from sow_server.engine.doors import Reads, Writes
from sow_server.engine.loads import Load, LoadPhase
from sow_server.engine.values.database import RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Publish
from sow_server.services.records.admission import Admission

log = structlog.get_logger(__name__)

RETRY_SECONDS: Final = 0.2
PROGRESS_SECONDS: Final = 0.5
"""How often a client that waits for a load hears of its progress."""
UPKEEP_SECONDS: Final = 1.0
PASSING: Final = frozenset({Reason.OVERLOADED, Reason.WRITE_STALLED, Reason.BACKLOG_QUOTA_EXCEEDED})


class LoadJobs:
    """Owns the tasks. On the event loop."""

    def __init__(self, reads: Reads, writes: Writes, admission: Admission, readers: Executor) -> None:
        self._loads = writes.loads
        self._commits = writes.commits
        self._clock = reads.clock
        self._admission = admission
        self._readers = readers
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._upkeep: asyncio.Task[None] | None = None
        self._one = asyncio.Lock()

    def start(self) -> None:
        """Resumes the loads that the last process has left."""
        self.wake()
        self._upkeep = asyncio.create_task(self._look_after())

    async def stop(self) -> None:
        """Ends the tasks. A chunk that is with the writer is committed all the same."""
        tasks = [task for task in (self._upkeep, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Starts a load that has been committed."""
        for load in self._loads.registry.working():
            if load.row.number not in self._tasks:
                task = self._tasks[load.row.number] = asyncio.create_task(self._work(load))
                task.add_done_callback(lambda _, number=load.row.number: self._tasks.pop(number, None))  # type: ignore[misc]  # a lambda's default

    async def progressed(self, load: Load) -> None:
        """Returns when a load has ended, and in any case after PROGRESS_SECONDS."""
        task = self._tasks.get(load.row.number)
        if task is None:
            if load.row.working:
                await asyncio.sleep(PROGRESS_SECONDS)
            return
        await asyncio.wait((task,), timeout=PROGRESS_SECONDS)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_SECONDS)
            self.look_after()

    def look_after(self) -> None:
        """Resumes stopped loads that can continue; runs about every second."""
        self._loads.upkeep()
        if self._commits.failure is None:
            self.wake()

    async def _work(self, load: Load) -> None:
        log.info("load_begun", load=load.row.id, topic=load.row.topic, phase=load.row.phase.name)
        try:
            while load.row.working:
                if not await self._step(load):
                    return
        except Exception:
            log.exception("load_interrupted", load=load.row.id)
            return
        row = load.row
        if row.phase is LoadPhase.DONE:
            log.info("load_done", load=row.id, topic=row.topic, **row.figures._asdict())

    async def _step(self, load: Load) -> bool:
        """Applies one chunk. False: the load cannot continue in this process."""
        loop = asyncio.get_running_loop()
        try:
            async with self._one:
                started = loop.time()
                chunk = await asyncio.shield(loop.run_in_executor(self._readers, self._loads.applying.read, load))
            topic = None
            request = Publish(load.row.topic, chunk.payloads)
            if chunk.phase is LoadPhase.APPLYING:
                topic = await self._admission.admit(request, None)  # deletes pass
            try:
                async with self._one:
                    await self._loads.applying.apply(chunk)
            finally:
                if topic is not None:
                    self._admission.left(topic, request)
        except RocksError as error:
            await self._fail(load, f"the staged rows cannot be read ({error})")
            return False
        except StoreError as error:
            if error.reason is Reason.STOPPING or self._commits.failure is not None:
                log.warning("load_interrupted", load=load.row.id, reason=error.reason.name)
                return False
            if error.reason not in PASSING:
                await self._fail(load, error.message)
                return False
            await asyncio.sleep(RETRY_SECONDS)
            return True
        if self._commits.queue_depth[0]:
            await asyncio.sleep(loop.time() - started)
        return True

    async def _fail(self, load: Load, why: str) -> None:
        with contextlib.suppress(StoreError):
            await self._loads.fail(load, why)
