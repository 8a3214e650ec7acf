"""Overview: the instances, what is wrong with them, rates, and the topics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sow_client import (
    AsyncClient,
    Figures,
    Instance,
    PermissionDenied,
    SowError,
    Status,
    Topic,
    TopicStatistics,
    Unavailable,
)
from sow_console import horizon, texts
from sow_console.pages.page import Facts, View

OVERDUE_MAX: Final = 10_000
"""More records that are overdue and not removed are an alarm."""
CLOCK_DIFFERENCE_MAX: Final = timedelta(seconds=5)
"""A larger difference between the clocks of an instance and of the console is an alarm."""
LAG_MAX: Final = timedelta(seconds=30)
DISK_FREE_MIN: Final = 1 << 30
DISK_FREE_SHARE_MIN: Final = 0.1
"""Less free space, in bytes or as a share of the disk, is an alarm."""
EXPIRY_LAG_MAX: Final = timedelta(seconds=10)
"""Expiry that is further behind is an alarm."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An instance, or the reason why it is not seen."""

    server: str
    instance: Instance | None
    status: Status | None
    """None: it is not reachable, or the person lacks `observe`."""
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


async def facts(view: View) -> Facts:
    """All instances, and the rates and topics of the one that was chosen."""
    looks = (_seen(view.session.client(server), server, view.now) for server in view.servers)
    topics, seen = await asyncio.gather(_topics(view), asyncio.gather(*looks))
    figures = () if topics is None else await _figures(view)
    latest = figures[-1] if figures else None
    return {
        "instances": seen,
        "is_there": topics is not None,
        "alarms": [(one.server, alarm) for one in seen for alarm in one.alarms] + _link_alarms(view, latest),
        "figures": latest,
        "has_rates": latest is not None and bool(latest.elapsed),
        "changes_line": horizon.line([one.changes_per_second for one in figures], 240, 36),
        "expired_line": horizon.line([one.expired_per_second for one in figures], 240, 36),
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


async def _seen(client: AsyncClient, server: str, now: datetime) -> Seen:
    try:
        instance = await client.describe_instance()
    except SowError as error:
        return Seen(server, None, None, error.message, (f"not reachable: {error.message}",))
    try:
        status = await client.status()
    except PermissionDenied as error:
        return Seen(server, instance, None, error.message, ())
    except SowError as error:
        return Seen(server, instance, None, error.message, (error.message,))
    return Seen(server, instance, status, "", tuple(alarms(status, serving=instance.serving, now=now)))


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


async def _figures(view: View) -> tuple[Figures, ...]:
    try:
        return await view.session.figures(view.server).look()
    except PermissionDenied:
        return ()


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
    return TopicLine(topic.name, topic.statistics, rate, str(topic.settings.expiration))
