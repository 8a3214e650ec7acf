"""The figures of `sow status --watch`: a line for each answer of the server, as of vmstat. On a terminal the course of
the rates stays below them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, timedelta
from queue import SimpleQueue
from typing import Final

import click
import msgspec

from sow_cli import display, joined
from sow_cli.output import Format, Output, note
from sow_client import Client, Figures, SowError, Unavailable

HEAD_EVERY: Final = 20
"""Lines after which the head of the table is written again."""
TOPICS_SHOWN: Final = 3
NEARLY_FULL: Final = 0.9
"""The share of a cap of a topic from which on it is shown, as `SowTopicNearlyFull` is raised."""
_CELL_WIDTH: Final = 12
_AGAIN_SECONDS: Final = 1.0
_MICROSECOND: Final = timedelta(microseconds=1)
_HEAD: Final = "time      changes/s  expired/s    queue  subscr  behind  overdue      lag  busiest topics"


def show(client: Client, output: Output, interval: str, *, here: bool = False) -> None:
    """Writes the figures of all cells, or with `here` those of the server alone, until it stops."""
    if output.format not in (Format.TABLE, Format.NDJSON):
        raise click.UsageError("--watch never ends: use --format table or ndjson")
    cells = {} if here else client.in_each_cell(lambda one: one)
    answers = _of_cells(cells, interval) if len(cells) > 1 else _of_one(client.here, interval)
    if output.format is Format.NDJSON:
        for cell, figures in answers:
            output.write(_line(cell, figures))
    elif sys.stdout.isatty():
        from sow_cli import courses  # only here, as it needs rich

        courses.show(_texts(answers))
    else:
        for _, text in _texts(answers):
            click.echo(text)


def _of_one(client: Client, interval: str) -> Iterator[tuple[str, Figures]]:
    return (("", figures) for figures in client.watch_figures(interval))


def _of_cells(cells: Mapping[str, Client | SowError], interval: str) -> Iterator[tuple[str, Figures]]:
    """The figures of several cells, as they come. A cell that stops, or does not answer, is a warning, and is asked
    again each second. Raises the error of the last one if none is left."""
    told: SimpleQueue[tuple[str, Figures | SowError]] = SimpleQueue()
    over = threading.Event()
    for cell, one in cells.items():
        threading.Thread(target=_watch, args=(cell, one, interval, told.put, over), daemon=True).start()
    missing: set[str] = set()
    try:
        while True:
            cell, found = told.get()
            if not isinstance(found, SowError):
                if cell in missing:
                    missing.remove(cell)
                    note(f"the cell {cell} answers again")
                yield cell, found
            elif cell not in missing:
                missing.add(cell)
                if len(missing) == len(cells):
                    raise found
                joined.warn(cell, found)
    finally:
        over.set()


def _watch(
    cell: str,
    one: Client | SowError,
    interval: str,
    tell: Callable[[tuple[str, Figures | SowError]], None],
    over: threading.Event,
) -> None:
    """Tells the figures of one cell until the command is `over`."""
    if isinstance(one, SowError):
        tell((cell, one))
        return
    while not over.is_set():
        try:
            for figures in one.watch_figures(interval):
                tell((cell, figures))
            tell((cell, Unavailable("it has stopped", reason="UNREACHABLE")))
        except SowError as error:
            tell((cell, error))
        over.wait(_AGAIN_SECONDS)


def _texts(answers: Iterable[tuple[str, Figures]]) -> Iterator[tuple[Figures, str]]:
    """The figures, each with its line, which has the head above it now and then. With several cells the figures are the
    sums of the last ones."""
    last: dict[str, Figures] = {}
    for number, (cell, figures) in enumerate(answers):
        last[cell] = figures
        lines = [_row(figures)] if number % HEAD_EVERY else [_HEAD, _row(figures)]
        if cell:
            names = ("cell", display.safe(cell))[-len(lines) :]
            lines = [f"{name:<{_CELL_WIDTH}}{line}" for name, line in zip(names, lines, strict=True)]
        yield _sum(figures, last.values()), "\n".join(lines)


def _sum(figures: Figures, last: Collection[Figures]) -> Figures:
    if len(last) == 1:
        return figures
    return replace(
        figures,
        changes_per_second=sum(one.changes_per_second for one in last),
        expired_per_second=sum(one.expired_per_second for one in last),
        queued_requests=sum(one.queued_requests for one in last),
    )


def _line(cell: str, figures: Figures) -> bytes:
    found = ({"cell": cell} if cell else {}) | asdict(figures)
    found["as_of_micros"] = round(found.pop("as_of").timestamp() * 1e6)
    found["elapsed_micros"] = found.pop("elapsed") // _MICROSECOND
    for link in found["links"]:
        link["lag_micros"] = link.pop("lag") // _MICROSECOND
    return msgspec.json.encode(found) + b"\n"


def _row(figures: Figures) -> str:
    """A line for people. The first one has no rates yet."""
    first = not figures.elapsed
    lag = max([link.lag for link in figures.links], default=None)
    busy = [
        f"{display.safe(one.topic)} {one.changes_per_second:,.0f}/s"
        for one in figures.topics[:TOPICS_SHOWN]
        if one.changes_per_second > 0
    ]
    busy += [f"{display.safe(one.topic)} {one.filled:.0%} full" for one in figures.topics if one.filled >= NEARLY_FULL]
    cells = (
        f"{figures.as_of.astimezone(UTC):%H:%M:%S}",
        f"{'-' if first else format(figures.changes_per_second, ',.0f'):>10}",
        f"{'-' if first else format(figures.expired_per_second, ',.0f'):>9}",
        f"{figures.queued_requests:>7,}",
        f"{figures.subscriptions:>6,}",
        f"{figures.subscriptions_behind:>6,}",
        f"{figures.overdue_records:>7,}",
        f"{'-' if lag is None else display.exact_duration(lag):>7}",
        ", ".join(busy),
    )
    return "  ".join(cells).rstrip()
