"""The periodic jobs, on APScheduler: pruning, leases of exports, storing acknowledgements of peers, forgetting idle
publishers, the clock's mark and watch, compaction, those of other parts. And the alarm for unused topics (rule T1) and
for durables (rules J8, J10): it is set to the next deadline, and again when settings change.

Expiry is not among them. The writer's thread waits for the next deadline itself, so that a busy event loop cannot delay
it. Every job may be skipped or merged without harm (`coalesce`), and none is dropped for being late
(`misfire_grace_time=None`): by default a job that fires late, after a blocked loop, would not run at all.

[1]  A wall clock that is set, in either direction, delays no job by more than UPKEEP_SECONDS. APScheduler plans by the
     wall clock. Set back by an hour, it would start none of them for an hour. The alarm, which goes by the event
     loop's steady clock, plans them anew. Set ahead, or after a sleep of the machine, it would count all intervals
     that are over, on the event loop: those of 30 days take a minute. `Every` leaves them out.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger

from sow_server import malloc
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.database import RocksError
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import MICROS, NEVER
from sow_server.query.sort_memory import SortMemory
from sow_server.retention.idle import IdleTopics
from sow_server.subscriptions.durable.consumer_registry import Consumers

log = structlog.get_logger(__name__)

CLOCK_WATCH_SECONDS: Final = 1
UPKEEP_SECONDS: Final = 1.0
"""The interval of checking topics and durables when no deadline is nearer."""
ALARM_SECONDS_MIN: Final = 0.001
"""A deadline that cannot be met at once, because the writer refuses, for example, must not keep the event loop busy."""
LONG_SECONDS: Final = 60.0
"""A job that still runs after this time is logged, once per run."""
EXPORTS_SECONDS: Final = 1
KEEP_MARK_SECONDS: Final = 1
SAVE_PEERS_SECONDS: Final = 1
FORGET_SECONDS: Final = 3600
TRIM_SECONDS: Final = 5
SCRUB_SHARE: Final = 0.1
"""The share of a core that the check of the data after a start may take."""
SCRUB_PAUSE_SECONDS: Final = 0.005
"""Its shortest pause: other threads get the GIL."""
TRIM_AFTER_BYTES: Final = 32 * 2**20
"""Memory is trimmed once ordered queries have released so much since the last time, and hold less than that."""
TRIM_REST: Final = 200
"""A trim holds the GIL for a time proportional to the number of objects. The pause after it is this many times as
long."""


class Leases(Protocol):
    """Things that end when nobody has used them for a while, such as exports."""

    def tick(self) -> None:
        """Ends those whose time is over."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The intervals and the durations of the jobs."""

    prune_interval_micros: int
    mark_interval_micros: int
    reclaim_interval_micros: int
    reclaim_records: int
    """The number of removed records, or changes of the journal, from which on compaction is worth it."""
    go_on: Callable[[], bool] = lambda: True
    """False once the server stops, so that no compaction delays that; called from any thread."""
    more: Sequence[PeriodicJob] = ()
    """Those of other parts."""


class Timers:
    """Owns the scheduler, and the alarm for the next deadline of topics and durables. Start and stop it on the event
    loop."""

    def __init__(
        self,
        reads: Reads,
        writes: Writes,
        options: JobOptions,
        *,
        readers: Executor,
        consumers: Consumers,
        idle: IdleTopics,
        exports: Leases,
        sorts: SortMemory,
    ) -> None:
        upkeep = writes.upkeep
        self._commits = writes.commits
        self._upkeep = upkeep
        self._clock = reads.clock
        self._readers = readers
        self._consumers = consumers
        self._idle = idle
        self._sorts = sorts
        self._trimmed = 0
        """Memory that sorts had released at the last trim."""
        self._next_trim = 0.0
        self._was_paused = False
        self._options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._woken = False
        """True if the event loop was asked to check the deadlines and has not yet done so. Set on any thread."""
        # Two instances: the second notices that the first is still running, see `PeriodicJob`.
        # With UTC it need not find out the zone of the machine, which took a tenth of a start.
        self._scheduler = AsyncIOScheduler(
            timezone=UTC, job_defaults={"coalesce": True, "misfire_grace_time": None, "max_instances": 2}
        )
        logging.getLogger("apscheduler.executors.default").addFilter(_is_fault)
        self.jobs: Final[tuple[PeriodicJob, ...]] = (
            PeriodicJob("prune", self._prune, options.prune_interval_micros / MICROS),
            PeriodicJob("clock_watch", _threaded(self._watch_clock), CLOCK_WATCH_SECONDS),
            PeriodicJob("clock_mark", _threaded(upkeep.mark_clock), options.mark_interval_micros / MICROS),
            PeriodicJob("mark", _threaded(upkeep.keep_mark), KEEP_MARK_SECONDS),
            PeriodicJob("save_peers", _threaded(writes.replicas.peers.save), SAVE_PEERS_SECONDS),
            PeriodicJob("forget_publishers", _threaded(upkeep.forget_publishers), FORGET_SECONDS),
            PeriodicJob("forget_durables", _threaded(writes.durables.forget_removed), FORGET_SECONDS),
            PeriodicJob("exports", _threaded(exports.tick), EXPORTS_SECONDS),
            PeriodicJob("reclaim", self._reclaim, options.reclaim_interval_micros / MICROS),
            PeriodicJob("trim", _threaded(self._trim), TRIM_SECONDS),
            *options.more,
        )
        self._planned = [
            (self._scheduler.add_job(job.run, Every(interval, at_once=job.at_once)), interval)
            for job in self.jobs
            for interval in [timedelta(seconds=job.seconds)]
        ]
        reads.topics.watch(lambda topic, settings: self.wake())
        consumers.deadlines.wake = idle.wake = self.wake

    def start(self) -> None:
        """Starts the jobs."""
        self._loop = asyncio.get_running_loop()
        self._watch_clock()
        self._scheduler.start()
        self._meet_deadlines()

    def stop(self) -> None:
        """Stops the jobs, without waiting for a running one."""
        self._loop = None
        if self._alarm is not None:
            self._alarm.cancel()
        self._scheduler.shutdown(wait=False)

    def wake(self) -> None:
        """To be called when deadlines of topics or durables may have become earlier. From any thread, at any time; many
        calls in a short time wake the event loop once."""
        loop = self._loop
        if not self._woken and loop is not None:
            self._woken = True
            loop.call_soon_threadsafe(self._meet_deadlines)

    def _meet_deadlines(self) -> None:
        """Meets the deadlines of topics and durables, and sets the alarm for the next one. The alarm comes within a
        second at the latest, because the clock may be set and because quotas that evict have no deadline."""
        if self._loop is None:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._woken = False  # first: a later `wake` has to set the alarm again
        self._plan_anew_after_a_set_clock()
        due = NEVER
        for meet in (self._idle.tick, self._consumers.upkeep):
            try:
                due = min(due, meet())
            except Exception:  # a failure of one must end neither the other nor the alarm
                log.exception("upkeep_failed")
        left = (due - self._clock.now_micros()) / MICROS
        self._alarm = self._loop.call_later(max(ALARM_SECONDS_MIN, min(left, UPKEEP_SECONDS)), self._meet_deadlines)

    def _plan_anew_after_a_set_clock(self) -> None:
        """Starts each job that is planned for later than an interval from now: the wall clock was set back ([1])."""
        now = datetime.now(UTC)
        for planned, interval in self._planned:
            if planned.next_run_time > now + interval:
                planned.modify(next_run_time=now)

    async def _prune(self) -> None:
        """Prunes in bounded steps until nothing is left to prune. Before that it scans the durables that hold topics: a
        rare filter must not pin the journal (rule J2)."""
        await self._scan()
        while True:
            try:
                pruned = self._upkeep.prune()
            except StoreError as error:
                log.warning("prune_skipped", reason=error.reason.name)
                return
            try:
                if not await pruned:
                    return
            except StoreError as error:
                log.error("prune_failed", reason=error.reason.name, cause=error.message)
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

    def _trim(self) -> None:
        """Gives memory back to the system after a large use. Python's free lists, which only a full collection empties,
        keep small objects that pin whole pages, and so do those of the C library. It does nothing while there are large
        sorts: visiting their records would hold the GIL for a tenth of a second."""
        released, now = self._sorts.given_back, time.monotonic()
        much = released - self._trimmed >= TRIM_AFTER_BYTES > self._sorts.held_bytes
        if much and now >= self._next_trim:
            self._trimmed = released
            gc.collect()
            malloc.trim()
            ended = time.monotonic()
            self._next_trim = ended + TRIM_REST * (ended - now)

    async def _reclaim(self) -> None:
        """Gives the disk space of removed entries back to the system, when nothing waits for the writer (rule L17)."""
        requests, _ = self._commits.queue_depth
        if requests:
            return
        run, options = asyncio.get_running_loop().run_in_executor, self._options
        try:
            parts = await run(self._readers, self._upkeep.reclaim, options.reclaim_records, options.go_on)
        except RocksError as error:
            log.error("reclaim_failed", cause=str(error))
        else:
            if parts:
                log.info("reclaimed", parts=parts)


class Every(BaseTrigger):  # type: ignore[misc]  # it has no types
    """Due once an interval. Of the intervals that are over, only the last one counts ([1])."""

    def __init__(self, interval: timedelta, *, at_once: bool = False) -> None:
        """`at_once`: due once the scheduler starts, too."""
        self._interval: Final = interval
        self._at_once: Final = at_once

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """As APScheduler calls it: later than `now`, but for the first time of those that are due at once."""
        if previous_fire_time is None and self._at_once:
            return now
        planned = (previous_fire_time or now) + self._interval
        return planned if planned > now else now + self._interval


class PeriodicJob:
    """A periodic job. A run that comes due while the last one is still running is skipped; the next run does all the
    work."""

    def __init__(
        self, name: str, work: Callable[[], Awaitable[None]], seconds: float, *, at_once: bool = False
    ) -> None:
        """`at_once`: it runs at the start for the first time, and not only after `seconds`."""
        self.name: Final = name
        self.seconds: Final = seconds
        self.at_once: Final = at_once
        self._work = work
        self._began: float | None = None
        self._told = False

    @property
    def running_seconds(self) -> float:
        """The duration of the current run so far; 0: none is under way. From any thread."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    async def run(self) -> None:
        """Runs the job, unless it is already running."""
        if self._began is not None:
            if self.running_seconds >= LONG_SECONDS and not self._told:
                self._told = True
                log.warning("job_does_not_end", job=self.name, seconds=round(self.running_seconds))
            return
        self._began = time.monotonic()
        try:
            await self._work()
        finally:
            if self._told:
                log.info("job_has_ended", job=self.name, seconds=round(self.running_seconds))
            self._began, self._told = None, False


def _threaded(work: Callable[[], object]) -> Callable[[], Awaitable[None]]:
    """The same work on a thread of the event loop's executor."""

    async def run() -> None:
        await asyncio.get_running_loop().run_in_executor(None, work)

    return run


def _is_fault(record: logging.LogRecord) -> bool:
    """False for a cancelled job: the scheduler cancels jobs when it stops, and logs that as a fault of the job."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class ScrubPace:
    """Leaves the scrub a tenth of a core: it holds the GIL, and much data takes it some minutes of CPU time."""

    def __init__(self, stopped: threading.Event, used_seconds: Callable[[], float] = time.thread_time) -> None:
        """`used_seconds`: the CPU time of the calling thread."""
        self._stopped = stopped
        self._used_seconds = used_seconds
        self._before: float | None = None

    def __call__(self) -> bool:
        """Pauses for the work since the last call. False once the server stops."""
        used = self._used_seconds()
        worked = 0.0 if self._before is None else used - self._before
        stopped = self._stopped.wait(max(SCRUB_PAUSE_SECONDS, worked * (1 / SCRUB_SHARE - 1)))
        self._before = self._used_seconds()
        return not stopped
