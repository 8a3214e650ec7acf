"""Figures of a server as series to draw. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeAlias

from sow_client import Figures

Unit: TypeAlias = Literal["rate", "count", "size", "time"]
Values: TypeAlias = tuple[float | None, ...]
"""One for each moment; None: there was none."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line."""

    label: str
    values: Values


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the same moments."""

    title: str
    unit: Unit
    seconds: tuple[float, ...]
    """Since the epoch, of each moment."""
    series: tuple[Series, ...]


_TIMES: Final = (
    ("commit", "Commits, to disk"),
    ("expiry", "Expiry, behind the lifetimes"),
    ("Publish", "Publish"),
    ("Get", "Get"),
    ("Query", "Query"),
    ("Touch", "Touch"),
)


def charts(figures: Sequence[Figures]) -> tuple[Chart, ...]:
    """The charts of figures in the order of time. Times of which there were none have no chart."""
    told = [one for one in figures if one.elapsed]  # the first of a stream has no rates
    seconds = tuple(one.as_of.timestamp() for one in told)

    def of(take: Callable[[Figures], float]) -> Values:
        return tuple(take(one) for one in told)

    made = [
        Chart(
            "Changes",
            "rate",
            seconds,
            (
                Series("changes", of(lambda one: one.changes_per_second)),
                Series("expired", of(lambda one: one.expired_per_second)),
            ),
        ),
        Chart(
            "Waiting",
            "count",
            seconds,
            (
                Series("requests", of(lambda one: one.queued_requests)),
                Series("overdue records", of(lambda one: one.overdue_records)),
            ),
        ),
        Chart(
            "Subscriptions",
            "size",
            seconds,
            (Series("bytes queued for them", of(lambda one: one.subscriptions_queued_bytes)),),
        ),
    ]
    for name, title in _TIMES:
        found = [next((time for time in one.latencies if time.name == name), None) for one in told]
        if any(found):
            median = tuple(None if one is None else _millis(one.median) for one in found)
            p99 = tuple(None if one is None else _millis(one.p99) for one in found)
            made.append(Chart(title, "time", seconds, (Series("median", median), Series("99 of 100", p99))))
    return tuple(made)


def _millis(length: timedelta) -> float:
    return length / timedelta(milliseconds=1)
