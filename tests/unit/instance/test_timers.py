"""The periodic jobs, and the alarm for the deadlines of topics and durables."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest
from apscheduler.schedulers import base as scheduler_module
from structlog.testing import capture_logs

from sow_server import malloc
from sow_server import timers as timers_module
from sow_server.engine.pending import Pending
from sow_server.engine.values.model import NEVER, Expiration, TopicSettings
from sow_server.engine.values.policies import Policy, PolicyTarget
from sow_server.metrics import Metrics
from sow_server.query.sort_memory import SortMemory, SortShare
from sow_server.retention.idle import IdleTopics
from sow_server.timers import ScrubPace
from tests.support.stores.stores import HOUR, SECOND, Rig
from tests.support.stores.subscribers import Subscribers
from tests.support.stores.timers import timers


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_a_job_that_the_stop_cancels_is_no_error(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Story: on a busy machine jobs still waited for a thread when the server stopped; that was logged as theirs."""
    release = threading.Event()

    async def stop_while_jobs_wait(readers: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, release.wait)
        jobs = timers(rig, readers, mark_interval_micros=1000)
        jobs.start()
        await asyncio.sleep(0.05)  # jobs fall due, and wait for the only thread
        jobs.stop()
        await asyncio.sleep(0)
        release.set()
        await busy

    with ThreadPoolExecutor(1) as readers, caplog.at_level(logging.ERROR):
        asyncio.run(stop_while_jobs_wait(readers))
    assert not caplog.records


async def eventually(holds: Callable[[], bool]) -> None:
    """Lets the event loop run until this holds."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + 30
    while not holds():
        assert loop.time() < give_up, "it does not come"
        await asyncio.sleep(0.005)


class WallClock(datetime):
    """The time of day, as it is set."""

    ahead = timedelta()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + cls.ahead


@pytest.mark.slow
@pytest.mark.parametrize("hours", [1, -1, 48, -48])
def test_jobs_go_on_when_the_wall_clock_is_set(rig: Rig, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """timers [1]. Story: a machine starts with its clock an hour ahead, and is set right. No job ran for an hour.
    Another one slept for two days: its event loop stood still while all intervals of that time were counted."""
    monkeypatch.setattr(scheduler_module, "datetime", WallClock)
    monkeypatch.setattr(timers_module, "datetime", WallClock)
    monkeypatch.setattr(WallClock, "ahead", timedelta())

    async def set_the_clock(readers: ThreadPoolExecutor) -> None:
        marks: list[int] = []
        monkeypatch.setattr(rig.store.upkeep, "mark_clock", lambda: marks.append(1))
        jobs = timers(rig, readers, mark_interval_micros=SECOND // 100)
        jobs.start()
        try:
            await eventually(lambda: bool(marks))
            WallClock.ahead = timedelta(hours=hours)
            enough = len(marks) + 10  # more than can have been planned, or have begun, before
            began = asyncio.get_running_loop().time()
            await eventually(lambda: len(marks) >= enough)
            assert asyncio.get_running_loop().time() - began < 20, "the event loop stood still"
        finally:
            jobs.stop()

    with ThreadPoolExecutor(1) as readers:
        asyncio.run(set_the_clock(readers))


JSON = TopicSettings(expiration=Expiration.ENABLED)


def unused(rig: Rig, subscribers: Subscribers) -> Callable[[], bool]:
    rig.alter_topic("t", idle_ttl_micros=SECOND // 50)
    return lambda: "t" not in rig.store.topics.by_name


def unused_by_policy(rig: Rig, subscribers: Subscribers) -> Callable[[], bool]:
    rig.set_policy("short", "t", {"idle_ttl_micros": SECOND // 50})
    return lambda: "t" not in rig.store.topics.by_name


def left(rig: Rig, subscribers: Subscribers) -> Callable[[], bool]:
    rig.alter_topic("t", auto_delete=True)
    return lambda: "t" not in rig.store.topics.by_name


def left_only_now(rig: Rig, subscribers: Subscribers) -> Callable[[], bool]:
    follower = subscribers.subscribe("t")
    rig.alter_topic("t", auto_delete=True)
    follower.close()
    return lambda: "t" not in rig.store.topics.by_name


def emptied_only_now(rig: Rig, subscribers: Subscribers) -> Callable[[], bool]:
    rig.put("t", "k", b"{}")
    rig.alter_topic("t", auto_delete=True, only_if_empty=True)
    rig.delete("t", "k")
    return lambda: "t" not in rig.store.topics.by_name


def durable_idle(rig: Rig, subscribers: Subscribers) -> Callable[[], bool]:
    rig.alter_topic("t", durable_idle_ttl_micros=SECOND // 50)
    return lambda: not rig.store.durables.count(rig.topic("t"))


def durable_idle_by_policy(rig: Rig, subscribers: Subscribers) -> Callable[[], bool]:
    policy = Policy("short", "t/d", {"idle_ttl_micros": SECOND // 50}, target=PolicyTarget.DURABLES)
    rig.store.administration.set_policy(policy)
    return lambda: not rig.store.durables.count(rig.topic("t"))


def backlog_old(rig: Rig, subscribers: Subscribers) -> Callable[[], bool]:
    rig.put("t", "k", b"{}")
    rig.alter_topic("t", backlog_ttl_micros=SECOND // 50)
    return lambda: rig.store.durables.find(rig.topic("t"), "d").position > 0


CASES = (unused, unused_by_policy, left, left_only_now, emptied_only_now)
CASES_OF_DURABLES = (durable_idle, durable_idle_by_policy, backlog_old)


@pytest.mark.parametrize("case", [*CASES, *CASES_OF_DURABLES])
def test_a_setting_on_an_existing_topic_acts_at_its_deadline(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, case: Callable[[Rig, Subscribers], Callable[[], bool]]
) -> None:
    """Rules T1, T4, J8, J10. Story: topics were gone over once in ten seconds, and durables once a second, so a
    deadline that was set on one that was there acted so much late. Here nothing looks but the alarm."""
    monkeypatch.setattr(timers_module, "UPKEEP_SECONDS", 3600.0)

    async def run(readers: ThreadPoolExecutor) -> None:
        rig.create_topic("t", JSON, retain_time_micros=HOUR)
        subscribers = Subscribers(rig)
        if case in CASES_OF_DURABLES:
            subscribers.attach("t", "d").close()
            subscribers.settle()
        else:
            subscribers.subscribe("t").close()
        jobs = timers(rig, readers, consumers=subscribers.consumers)
        jobs.start()
        await asyncio.sleep(0)
        done = case(rig, subscribers)

        def all_settled() -> bool:
            rig.time.tick(SECOND // 200)
            rig.store.writer.step()
            subscribers.settle()
            return done()

        await eventually(all_settled)
        jobs.stop()

    with ThreadPoolExecutor(1) as readers:
        asyncio.run(run(readers))


def test_a_deadline_moves_with_its_topics_use(rig: Rig) -> None:
    """The alarm is set to the earliest deadline that is known, and a use moves it when it rings."""
    rig.create_topic("t", JSON)
    idle = IdleTopics(rig.store.reads, rig.store.writes)
    assert idle.tick() == NEVER
    rig.alter_topic("t", idle_ttl_micros=SECOND)
    begin = rig.clock.now_micros()
    assert idle.tick() == begin + SECOND
    rig.time.tick(SECOND - 1)
    rig.get("t", "k")
    rig.time.tick(1)
    assert idle.tick() == begin + 2 * SECOND - 1
    rig.alter_topic("t", idle_ttl_micros=None)
    idle.tick()
    rig.time.tick(HOUR)
    assert idle.tick() == NEVER
    assert "t" in rig.store.topics.by_name


def test_a_job_that_is_still_running_is_no_warning_but_is_seen_when_it_does_not_end(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: with a small `prune_interval` the scheduler warned "maximum number of running instances reached"."""
    monkeypatch.setattr(timers_module, "LONG_SECONDS", 0.02)
    begun: list[Pending[bool]] = []

    def prune_begins() -> Pending[bool]:
        begun.append(Pending())
        return begun[-1]

    monkeypatch.setattr(rig.store.upkeep, "prune", prune_begins)  # and never answers, until it is told to

    async def run(readers: ThreadPoolExecutor) -> None:
        jobs = timers(rig, readers, prune_interval_micros=2_000)
        prune = next(job for job in jobs.jobs if job.name == "prune")
        jobs.start()
        await eventually(lambda: prune.running_seconds >= 0.05)
        assert len(begun) == 1
        metrics = Metrics()
        metrics.watch_jobs(jobs.jobs)
        shown = metrics.registry.get_sample_value("sow_job_running_seconds", {"job": "prune"})
        assert shown is not None
        assert shown >= 0.05
        assert all(job.running_seconds < 30 for job in jobs.jobs)
        begun[0].settle(False)
        await eventually(lambda: len(begun) > 1)
        jobs.stop()

    with ThreadPoolExecutor(1) as readers, caplog.at_level(logging.WARNING), capture_logs() as logged:
        asyncio.run(run(readers))
    assert not caplog.records
    told = [entry["event"] for entry in logged if entry.get("job") == "prune"]  # on a busy machine others are long, too
    assert told[:2] == ["job_does_not_end", "job_has_ended"]


@pytest.mark.slow
def test_memory_is_trimmed_after_much_of_it_was_given_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the allocator kept hundreds of megabytes after many ordered queries. Nothing is done for a few bytes."""
    trims: list[bool] = []
    monkeypatch.setattr(malloc, "trim", lambda: trims.append(True))
    sorts = SortMemory()
    with ThreadPoolExecutor(1) as readers:
        jobs = timers(rig, readers, sorts=sorts)
        trim = next(job for job in jobs.jobs if job.name == "trim")
        monkeypatch.setattr(timers_module, "TRIM_REST", 0)
        for size, expected in ((timers_module.TRIM_AFTER_BYTES - 1, 0), (1, 1), (1, 1)):
            share = SortShare(sorts)
            assert share.try_hold(size)
            share.close()
            asyncio.run(trim.run())
            assert len(trims) == expected
        large, other = SortShare(sorts), SortShare(sorts)
        assert large.try_hold(timers_module.TRIM_AFTER_BYTES)
        assert other.try_hold(timers_module.TRIM_AFTER_BYTES)
        other.close()
        asyncio.run(trim.run())
        assert len(trims) == 1, "not while there are large ones"
        large.close()
        asyncio.run(trim.run())
        assert len(trims) == 2


def test_another_c_library_than_glibc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    malloc.trim()
    monkeypatch.setattr(malloc, "_LIBRARY", object())
    malloc.trim()
    malloc.tune()


class Stopped(threading.Event):
    """Notes the waits, and takes no time for them."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        return self.is_set()


def test_the_scrub_pauses_nine_times_as_long_as_it_works() -> None:
    """Story: it paused 5 ms after each 3 ms of work, whatever else there was to do. With 10 M records expiry lagged by
    60 ms for minutes after a start."""
    used = [0.0]
    stopped = Stopped()
    pace = ScrubPace(stopped, lambda: used[0])
    for seconds in (0.0, 0.002, 0.0001):
        used[0] += seconds
        assert pace()

    assert stopped.waits == [0.005, pytest.approx(0.018), 0.005]


def test_the_scrub_ends_when_the_server_stops() -> None:
    stopped = Stopped()
    pace = ScrubPace(stopped, lambda: 0.0)
    stopped.set()

    assert not pace()
