"""The figures of `sow status --watch`: a line for each answer of the server, as of vmstat. On a terminal the course of
the rates stays below them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, timedelta
from typing import Final

import click
import msgspec

from sow_cli import display
from sow_cli.output import Format, Output
from sow_client import Client, Figures

HEAD_EVERY: Final = 20
"""Lines after which the head of the table is written again."""
TOPICS_SHOWN: Final = 3
NEARLY_FULL: Final = 0.9
"""The share of a cap of a topic from which on it is shown, as `SowTopicNearlyFull` is raised."""
_MICROSECOND: Final = timedelta(microseconds=1)
_HEAD: Final = "time      changes/s  expired/s    queue  subscr  behind  overdue      lag  busiest topics"


def show(client: Client, output: Output, interval: str) -> None:
    """Writes the figures, until the server stops."""
    if output.format not in (Format.TABLE, Format.NDJSON):
        raise click.UsageError("--watch never ends: use --format table or ndjson")
    answers = client.watch_figures(interval)
    if output.format is Format.NDJSON:
        for figures in answers:
            output.write(_line(figures))
    elif sys.stdout.isatty():
        from sow_cli import courses  # only here, as it needs rich

        courses.show(_texts(answers))
    else:
        for _, text in _texts(answers):
            click.echo(text)


def _texts(answers: Iterable[Figures]) -> Iterator[tuple[Figures, str]]:
    """The figures, each with its line, which has the head above it now and then."""
    for number, figures in enumerate(answers):
        head = "" if number % HEAD_EVERY else f"{_HEAD}\n"
        yield figures, head + _row(figures)


def _line(figures: Figures) -> bytes:
    found = asdict(figures)
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
