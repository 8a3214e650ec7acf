"""The periodic jobs, on APScheduler: pruning, what time does to durables and exports, deleting unused topics, writing
down what peers have acknowledged, forgetting idle publishers, the clock's mark and watch, compaction.

Expiry is not among them: the writer's thread waits for the next deadline itself, so that a busy event loop cannot
delay it. Every job may be skipped or merged without harm (`coalesce`), and none is dropped for being late
(`misfire_grace_time=None`): by default a job that fires late, behind a blocked loop, would not run at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from sow_server.engine.clock import GuardedClock
from sow_server.engine.errors import StoreError
from sow_server.engine.model import MICROS
from sow_server.engine.rocks import RocksError
from sow_server.engine.store import Store
from sow_server.query.exports import Exports
from sow_server.retention.idle import TICK_SECONDS, IdleTopics
from sow_server.subscriptions.durables import Consumers

log = structlog.get_logger(__name__)

CLOCK_WATCH_SECONDS: Final = 1
DURABLES_SECONDS: Final = 1
EXPORTS_SECONDS: Final = 1
SAVE_PEERS_SECONDS: Final = 1
FORGET_SECONDS: Final = 3600
RECLAIM_SECONDS: Final = 30
RECLAIM_AFTER: Final = 200_000
"""Records, or changes of the journal, that have to be removed before compacting is worth it."""


class Timers:
    """Owns the scheduler. Start and stop it on the event loop."""

    def __init__(
        self,
        store: Store,
        clock: GuardedClock,
        readers: Executor,
        consumers: Consumers,
        idle: IdleTopics,
        exports: Exports,
        *,
        prune_interval_micros: int,
        mark_interval_micros: int,
        go_on: Callable[[], bool],
    ) -> None:
        """`go_on`: False once the server stops, which no compaction is to keep waiting; asked from any thread."""
        self._store = store
        self._clock = clock
        self._readers = readers
        self._consumers = consumers
        self._idle = idle
        self._was_paused = False
        self._go_on = go_on
        self._scheduler = AsyncIOScheduler(job_defaults={"coalesce": True, "misfire_grace_time": None})
        logging.getLogger("apscheduler.executors.default").addFilter(_is_fault)
        every = self._scheduler.add_job
        every(self._prune, "interval", seconds=prune_interval_micros / MICROS, max_instances=1)
        every(self._watch_clock, "interval", seconds=CLOCK_WATCH_SECONDS)
        every(store.mark_clock, "interval", seconds=mark_interval_micros / MICROS)
        every(store.replicas.save_peers, "interval", seconds=SAVE_PEERS_SECONDS)
        every(store.forget_publishers, "interval", seconds=FORGET_SECONDS)
        every(store.forget_durables, "interval", seconds=FORGET_SECONDS)
        every(consumers.upkeep, "interval", seconds=DURABLES_SECONDS, max_instances=1)
        every(exports.tick, "interval", seconds=EXPORTS_SECONDS)
        every(self._delete_unused, "interval", seconds=TICK_SECONDS, max_instances=1)
        every(self._reclaim, "interval", seconds=RECLAIM_SECONDS, max_instances=1)

    def start(self) -> None:
        """Starts the jobs."""
        self._watch_clock()
        self._scheduler.start()

    def stop(self) -> None:
        """Stops them; one that is running is not waited for."""
        self._scheduler.shutdown(wait=False)

    async def _prune(self) -> None:
        """Prunes in bounded steps, until nothing is left to prune. Before that the durables that hold topics are
        looked at: a rare filter must not pin them (rule J2)."""
        await self._scan()
        while True:
            pruned: asyncio.Future[bool | StoreError] = asyncio.get_running_loop().create_future()
            try:
                self._store.prune(partial(_answer, pruned))
            except StoreError as error:
                log.warning("prune_skipped", reason=error.reason.name)
                return
            more = await pruned
            if isinstance(more, StoreError):
                log.error("prune_failed", reason=more.reason.name, cause=more.message)
            if more is not True:
                return

    async def _scan(self) -> None:
        run = asyncio.get_running_loop().run_in_executor
        for scan in self._consumers.scans():
            try:
                position = await run(self._readers, scan.read)
            except (StoreError, RocksError) as error:
                log.error("scan_failed", topic=scan.topic.name, durable=scan.durable.name, cause=str(error))
                continue
            if position is not None:
                self._consumers.scanned(scan, position)

    async def _delete_unused(self) -> None:
        """A coroutine, so that it runs on the event loop and not in a thread."""
        self._idle.tick()

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

    async def _reclaim(self) -> None:
        """Gives space of what was removed back to the system, when nothing waits for the writer (rule L17)."""
        requests, _ = self._store.writer.queue_depth
        if requests:
            return
        run = asyncio.get_running_loop().run_in_executor
        try:
            parts = await run(self._readers, self._store.reclaim, RECLAIM_AFTER, self._go_on)
        except RocksError as error:
            log.error("reclaim_failed", cause=str(error))
        else:
            if parts:
                log.info("reclaimed", parts=parts)


def _is_fault(record: logging.LogRecord) -> bool:
    """The scheduler cancels what is under way, or has not begun, when it stops, and logs that as the job's fault."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def _answer(heard: asyncio.Future[bool | StoreError], more: bool | StoreError) -> None:
    # A job that is under way when the scheduler stops is cancelled, and its answer comes all the same.
    if not heard.done():
        heard.set_result(more)
