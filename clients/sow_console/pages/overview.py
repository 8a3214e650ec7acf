"""Overview: the instances of all cells, what is wrong with them, rates of the last hour, and the topics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Final

from sow_client import (
    CellTrouble,
    Figures,
    Instance,
    PermissionDenied,
    Placement,
    SeparatedTopic,
    SowError,
    Status,
    Topic,
    TopicStatistics,
    Unavailable,
)
from sow_console import charts, horizon, texts
from sow_console.instances import Known
from sow_console.pages import cells
from sow_console.pages.page import Facts, View

OVERDUE_MAX: Final = 10_000
"""More records that are overdue and not removed are an alarm."""
CLOCK_DIFFERENCE_MAX: Final = timedelta(seconds=5)
"""A larger difference between the clocks of an instance and of the console is an alarm."""
LAG_MAX: Final = timedelta(seconds=30)
PREPARED_MAX: Final = timedelta(seconds=10)
"""A topic that moves from cell to cell waits for less."""
NAMED: Final = 3
"""Topics that an alarm names."""
DISK_FREE_MIN: Final = 1 << 30
DISK_FREE_SHARE_MIN: Final = 0.1
"""Less free space, in bytes or as a share of the disk, is an alarm."""
LINE_POINTS: Final = 120
"""The points of the small lines of the rates."""
_TROUBLE: Final[Mapping[CellTrouble, str]] = {
    "DIFFERS": "has another placement",
    "UNREACHABLE": "is not reachable",
    "STRAYS": "has topics of another cell",
}
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
    cell: str = ""
    """Its cell; "": it has none, or it is not known."""


@dataclass(frozen=True, slots=True)
class TopicLine:
    """A topic in the list."""

    name: str
    statistics: TopicStatistics | None
    changes_per_second: float | None
    """None: the person lacks `observe`."""
    expiration: str
    cell: str = ""
    """Its cell; "": there is one only."""
    filled: float = 0.0
    """Its content by its caps: 1 is full. 0: it has none, or the person may not see its figures."""


async def facts(view: View) -> Facts:
    """All instances, and the rates and topics of the one that was chosen."""
    asking = asyncio.create_task(cells.topics(view, with_statistics=True), name="topics of the overview")
    try:
        seen = await asyncio.gather(*(_seen(view, server) for server in view.servers))
        told = await _unless_lost(view, asking)
    finally:
        asking.cancel()
    figures, hour = ((), ()) if told is None else await _figures(view)
    latest = figures[-1] if figures else None
    return {
        "instances": seen,
        "is_there": told is not None,
        "alarms": [
            *((one.server, alarm) for one in seen for alarm in one.alarms),
            *placement_alarms(
                {server: view.session.instance(server).known.placement for server in view.servers}, view.now
            ),
            *((server, why) for server, why in view.session.refused.items()),
            *_link_alarms(view, latest),
        ],
        "figures": latest,
        "has_rates": latest is not None and bool(latest.elapsed),
        "span": charts.span(hour),
        "changes_line": _line_of([one.changes_per_second for one in hour]),
        "expired_line": _line_of([one.expired_per_second for one in hour]),
        "has_cells": told is not None and told.has_cells,
        "topics": [] if told is None else _lines(told, [latest, *await _figures_elsewhere(view, told)]),
        "missing": {} if told is None else told.missing,
        "command": view.command("status", "--watch"),
    }


async def _unless_lost(view: View, asking: asyncio.Task[cells.Joined[list[Topic]]]) -> cells.Joined[list[Topic]] | None:
    """The topics; None: the server does not answer, and others may, so their alarms are to be seen."""
    try:
        return await cells.unless_lost(view, [view.server], asking)
    except Unavailable:
        if len(view.servers) == 1:
            raise
        return None


async def _seen(view: View, server: str) -> Seen:
    known = await view.session.instance(server).look()
    return seen(server, known, view.session.cell(server))


def seen(server: str, known: Known, cell: str = "") -> Seen:
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
    error = known.error or "it was asked just now"
    return Seen(server, instance, status, known.lost, known.time, error, found, cell)


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


def placement_alarms(placements: Mapping[str, Placement | None], now: datetime) -> list[tuple[str, str]]:
    """The reasons to look after the placement of topics, each with the server that tells it. Trouble with a cell, which
    all others see, is told once, and of strays by their own cell if it tells them. Rules: C5, C7, C16, C26."""
    found: list[tuple[str, str]] = []
    told: set[tuple[str, CellTrouble]] = {(one.cell, "STRAYS") for one in placements.values() if one and one.strays}
    for server, placement in placements.items():
        if placement is None:
            continue
        for problem in placement.problems:
            if (problem.cell, problem.kind) not in told:
                told.add((problem.cell, problem.kind))
                found.append((server, f"the cell {problem.cell} {_TROUBLE[problem.kind]}: {problem.message}"))
        found += [
            (server, f"{stray.topic} lives in the cell {stray.cell}, and a copy of it is here: sow doctor")
            for stray in placement.strays
        ]
        found += [(server, _separated(one)) for one in placement.separated]
        prepared = placement.prepared
        if prepared is not None and now - prepared.since > PREPARED_MAX:
            waits = f"version {prepared.version} of the placement, with {', '.join(prepared.topics[:NAMED])}, waits for"
            found.append((server, f"{waits} {texts.duration(now - prepared.since)}: {prepared.message}"))
    return found


def _separated(one: SeparatedTopic) -> str:
    there = f"{one.other}, which lives in the cell {one.cell}"
    if one.setting == "dead_letter":
        return f"the dead letters of {one.topic} go to {there}: they stay here, where nobody can read them"
    return f"the view {one.topic} has the source {there}: nothing new comes into it"


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


async def _figures_elsewhere(view: View, told: cells.Joined[list[Topic]]) -> list[Figures | None]:
    """The figures of the other cells, each of one of its instances, for the rates of its topics."""
    own = view.session.cell(view.server)
    servers = [
        next((one for one in view.session.servers_of(cell, view.server) if not view.session.is_lost(one)), None)
        for cell in told.answers
        if told.has_cells and cell != own
    ]
    return await asyncio.gather(*(_latest(view, server) for server in servers if server is not None))


async def _latest(view: View, server: str) -> Figures | None:
    try:
        return next(reversed(await view.session.figures(server).look()), None)
    except SowError:
        return None


def _lines(told: cells.Joined[list[Topic]], figures: Sequence[Figures | None]) -> list[TopicLine]:
    rates = {one.topic: one.changes_per_second for of in figures if of is not None for one in of.topics}
    found = [
        TopicLine(
            topic.name,
            topic.statistics,
            rates.get(topic.name),
            str(topic.settings.expiration),
            cell if told.has_cells else "",
            filled(topic),
        )
        for cell, listed in told.answers.items()
        for topic in listed
    ]
    return sorted(found, key=attrgetter("name"))


def filled(topic: Topic) -> float:
    """The content of a topic by its caps, the nearer one: 1 is full. 0: it has none, or no figures are told."""
    figures, records, size = topic.statistics, topic.settings.max_records, topic.settings.max_stored_bytes
    if figures is None:
        return 0.0
    stored = (figures.live_records + figures.overdue_records, records), (figures.stored_bytes, size)
    return max([value / cap for value, cap in stored if isinstance(cap, int) and cap > 0], default=0.0)
