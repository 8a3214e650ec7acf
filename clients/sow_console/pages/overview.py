"""Overview: the instances, what is wrong with them, rates of the last hour, and the topics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sow_client import Figures, Instance, PermissionDenied, Status, Topic, TopicStatistics, Unavailable
from sow_console import charts, horizon, texts
from sow_console.instances import WAIT_SECONDS, Known
from sow_console.pages.page import Facts, View

OVERDUE_MAX: Final = 10_000
"""More records that are overdue and not removed are an alarm."""
CLOCK_DIFFERENCE_MAX: Final = timedelta(seconds=5)
"""A larger difference between the clocks of an instance and of the console is an alarm."""
LAG_MAX: Final = timedelta(seconds=30)
DISK_FREE_MIN: Final = 1 << 30
DISK_FREE_SHARE_MIN: Final = 0.1
"""Less free space, in bytes or as a share of the disk, is an alarm."""
LINE_POINTS: Final = 120
"""The points of the small lines of the rates."""
EXPIRY_LAG_MAX: Final = timedelta(seconds=10)
"""Expiry that is further behind is an alarm."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An instance, or the reason why it is not seen."""

    server: str
    instance: Instance | None
    status: Status | None
    """None: it has never answered, or the person lacks `observe`."""
    lost: bool
    """It does not answer; `instance` and `status` are as they were at `answered`."""
    answered: datetime | None
    error: str
    alarms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopicLine:
    """A topic in the list."""

    name: str
    statistics: TopicStatistics | None
    changes_per_second: float | None
    """None: the person lacks `observe`."""
    expiration: str
    filled: float = 0.0
    """Its content by its caps: 1 is full. 0: it has none, or the person may not see its figures."""


async def facts(view: View) -> Facts:
    """All instances, and the rates and topics of the one that was chosen."""
    asking = asyncio.create_task(_topics(view), name="topics of the overview")
    try:
        seen = await asyncio.gather(*(_seen(view, server) for server in view.servers))
        topics = await _unless_lost(view, asking)
    finally:
        asking.cancel()
    figures, hour = ((), ()) if topics is None else await _figures(view)
    latest = figures[-1] if figures else None
    return {
        "instances": seen,
        "is_there": topics is not None,
        "alarms": [(one.server, alarm) for one in seen for alarm in one.alarms] + _link_alarms(view, latest),
        "figures": latest,
        "has_rates": latest is not None and bool(latest.elapsed),
        "span": charts.span(hour),
        "changes_line": _line_of([one.changes_per_second for one in hour]),
        "expired_line": _line_of([one.expired_per_second for one in hour]),
        "topics": [_line(topic, latest) for topic in topics or ()],
        "command": view.command("status", "--watch"),
    }


async def _topics(view: View) -> list[Topic] | None:
    """The topics; None: the server does not answer, and others may, so their alarms are to be seen."""
    try:
        return await view.client.topics(with_statistics=True)
    except Unavailable:
        if len(view.servers) == 1:
            raise
        return None


async def _unless_lost(view: View, asking: asyncio.Task[list[Topic] | None]) -> list[Topic] | None:
    """The topics; None: their server does not answer, so the other instances do not wait for it."""
    while not asking.done() and len(view.servers) > 1:
        known = await view.session.instance(view.server).look()
        if known.lost or known.silent:
            return None
        await asyncio.wait({asking}, timeout=WAIT_SECONDS)
    return await asking


async def _seen(view: View, server: str) -> Seen:
    return seen(server, await view.session.instance(server).look(), view.now)


def seen(server: str, known: Known, now: datetime) -> Seen:
    """An instance in the list, with its alarms. One that is asked for the first time has none yet."""
    instance, status = known.instance, known.status
    found: tuple[str, ...] = ()
    if known.lost:
        found = (known.error,)
    elif instance is not None and status is not None:
        assert known.time is not None, "it has answered"
        # By the clock of the time when it answered: a later look at the same answer finds the same.
        found = tuple(alarms(status, serving=instance.serving, now=known.time))
    elif instance is not None and not known.denied:
        found = (known.error,)
    return Seen(server, instance, status, known.lost, known.time, known.error or "it was asked just now", found)


def alarms(status: Status, *, serving: bool, now: datetime) -> list[str]:
    """The reasons to look after an instance, in words."""
    found = []
    if status.state == "failed":
        found.append(f"failed, writes have stopped: {status.failure}")
    elif not serving:
        found.append("it does not serve")
    if status.sweep_paused:
        found.append("expiry is paused: the clock has jumped; see sow accept-clock")
    if status.overdue_records > OVERDUE_MAX:
        found.append(f"{texts.count(status.overdue_records)} records are overdue and not yet removed")
    free, size = status.disk_free_bytes, status.disk_size_bytes
    if free is not None and size and (free < DISK_FREE_MIN or free / size < DISK_FREE_SHARE_MIN):
        found.append(f"its disk has {texts.size(free)} of {texts.size(size)} free")
    if abs(status.clock_time - now) > CLOCK_DIFFERENCE_MAX:
        found.append(f"its clock differs from this one's by {texts.duration(status.clock_time - now)}")
    return found


async def _figures(view: View) -> tuple[tuple[Figures, ...], tuple[Figures, ...]]:
    """Those of the last seconds, and those of the last hour."""
    try:
        figures, hour = (view.session.figures(view.server, hour=hour) for hour in (False, True))
        return await figures.look(), tuple(one for one in await hour.look() if one.elapsed)
    except PermissionDenied:
        return (), ()


def _line_of(values: Sequence[float]) -> str:
    return horizon.line(charts.peaks(values, LINE_POINTS), 240, 36)


def _link_alarms(view: View, figures: Figures | None) -> list[tuple[str, str]]:
    if figures is None:
        return []
    slow = [one for one in figures.latencies if one.name == "expiry" and one.p99 > EXPIRY_LAG_MAX]
    behind = [(view.server, f"expiry is {texts.duration(one.p99)} behind the lifetimes") for one in slow]
    return behind + [
        (view.server, f"peer {link.peer} is {texts.duration(link.lag)} behind ({link.state})")
        for link in figures.links
        if link.lag > LAG_MAX
    ]


def _line(topic: Topic, figures: Figures | None) -> TopicLine:
    rates = {one.topic: one.changes_per_second for one in figures.topics} if figures else {}
    rate = rates.get(topic.name) if figures else None
    return TopicLine(topic.name, topic.statistics, rate, str(topic.settings.expiration), filled(topic))


def filled(topic: Topic) -> float:
    """The content of a topic by its caps, the nearer one: 1 is full. 0: it has none, or no figures are told."""
    figures, records, size = topic.statistics, topic.settings.max_records, topic.settings.max_stored_bytes
    if figures is None:
        return 0.0
    stored = (figures.live_records + figures.overdue_records, records), (figures.stored_bytes, size)
    return max([value / cap for value, cap in stored if isinstance(cap, int) and cap > 0], default=0.0)
