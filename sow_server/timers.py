"""The periodic jobs, on APScheduler: pruning, forgetting idle publishers, the clock's mark and watch, compaction.

Expiry is not among them: the writer's thread waits for the next deadline itself, so that a busy event loop cannot
delay it. Every job may be skipped or merged without harm (`coalesce`), and none is dropped for being late
(`misfire_grace_time=None`): by default a job that fires late, behind a blocked loop, would not run at all.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Final

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from sow_server.engine.clock import GuardedClock
from sow_server.engine.errors import StoreError
from sow_server.engine.model import MICROS
from sow_server.engine.store import Store

log = structlog.get_logger(__name__)

CLOCK_WATCH_SECONDS: Final = 1
FORGET_SECONDS: Final = 3600
COMPACT_CHECK_SECONDS: Final = 30
COMPACT_AFTER_EXPIRED: Final = 200_000
"""Expired records after which the swept head of the expiry index is compacted."""


class Timers:
    """Owns the scheduler. Start and stop it on the event loop."""

    def __init__(
        self,
        store: Store,
        clock: GuardedClock,
        readers: Executor,
        *,
        prune_interval_micros: int,
        mark_interval_micros: int,
    ) -> None:
        self._store = store
        self._clock = clock
        self._readers = readers
        self._was_paused = False
        self._compacted_at = 0
        self._scheduler = AsyncIOScheduler(job_defaults={"coalesce": True, "misfire_grace_time": None})
        every = self._scheduler.add_job
        every(self._prune, "interval", seconds=prune_interval_micros / MICROS, max_instances=1)
        every(self._watch_clock, "interval", seconds=CLOCK_WATCH_SECONDS)
        every(store.mark_clock, "interval", seconds=mark_interval_micros / MICROS)
        every(store.forget_publishers, "interval", seconds=FORGET_SECONDS)
        every(self._compact_swept, "interval", seconds=COMPACT_CHECK_SECONDS, max_instances=1)

    def start(self) -> None:
        """Starts the jobs."""
        self._watch_clock()
        self._scheduler.start()

    def stop(self) -> None:
        """Stops them; one that is running is not waited for."""
        self._scheduler.shutdown(wait=False)

    async def _prune(self) -> None:
        """Prunes in bounded steps, until nothing is left to prune."""
        while True:
            pruned: asyncio.Future[bool | StoreError] = asyncio.get_running_loop().create_future()
            try:
                # A job that is under way when the scheduler stops is cancelled, and its answer comes all the same.
                self._store.prune(lambda more, heard=pruned: None if heard.done() else heard.set_result(more))  # type: ignore[misc]  # bound now
            except StoreError as error:
                log.warning("prune_skipped", reason=error.reason.name)
                return
            try:
                more = await pruned
            except asyncio.CancelledError:
                return  # the scheduler stops; passed on, it would log it as the job's fault
            if isinstance(more, StoreError):
                log.error("prune_failed", reason=more.reason.name, cause=more.message)
            if more is not True:
                return

    def _watch_clock(self) -> None:
        paused = self._clock.paused
        if paused and not self._was_paused:
            log.error(
                "clock_jumped",
                effect="sweeping is paused",
                remedy="correct the clock, or confirm it with `sow accept-clock`",
            )
        elif self._was_paused and not paused:
            log.warning("clock_is_back", effect="sweeping goes on")
        self._was_paused = paused

    async def _compact_swept(self) -> None:
        expired = self._store.writer.expired_total
        requests, _ = self._store.writer.queue_depth
        if expired - self._compacted_at < COMPACT_AFTER_EXPIRED or requests:
            return  # not worth it, or not idle
        self._compacted_at = expired
        await asyncio.get_running_loop().run_in_executor(self._readers, self._store.compact_swept)
