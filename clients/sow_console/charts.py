"""Figures of a server as series to draw, and groups as bars. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Final, Literal, TypeAlias

from sow_client import Figures
from sow_console import texts

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
    seconds = _moments(told)

    def of(take: Callable[[Figures], float]) -> Values:
        return tuple(round(take(one), 2) for one in told)

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


def span(figures: Sequence[Figures]) -> timedelta:
    """The time that the rates of figures in the order of time are of; 0: none has rates."""
    return sum((one.elapsed for one in figures), timedelta(0))


def _moments(told: Sequence[Figures]) -> tuple[float, ...]:
    """Counted back from the last one: the server's clock may have been set meanwhile, and an axis only rises."""
    found = [told[-1].as_of.timestamp()] if told else []
    for one in told[:0:-1]:
        found.append(found[-1] - one.elapsed.total_seconds())
    return tuple(round(one, 1) for one in reversed(found))  # an hour of all digits is large


def peaks(values: Sequence[float], most: int) -> list[float]:
    """At most so many values for a small line: the greatest one of each few, so that no peak is lost."""
    few = -(-len(values) // most) or 1
    return [max(values[begin : begin + few]) for begin in range(0, len(values), few)]


def _millis(length: timedelta) -> float:
    return round(length / timedelta(milliseconds=1), 2)


@dataclass(frozen=True, slots=True)
class Bar:
    """A group, and its number as a bar."""

    names: tuple[str, ...]
    value: str
    begin: float
    """From 0 to 1, likewise the length: 0 where there is no number."""
    length: float
    negative: bool


def bars(names: Sequence[Sequence[object]], numbers: Sequence[object]) -> tuple[Bar, ...]:
    """The bars of groups, on one scale that has the zero. `numbers`: integers of any size and doubles; what is none has
    no bar."""
    # Fractions: a sum may have more digits than a double. But that of a text such as "1e999999999" takes all memory.
    known = [Fraction(one) if isinstance(one, (int, float)) and not isinstance(one, bool) else None for one in numbers]
    low = min((one for one in known if one is not None), default=Fraction(0))
    high = max((one for one in known if one is not None), default=Fraction(0))
    low, high = min(low, Fraction(0)), max(high, Fraction(0))
    scale = (high - low) or Fraction(1)
    return tuple(
        Bar(
            tuple([texts.scalar(one) if one is None or isinstance(one, bool) else str(one) for one in of_group]),
            texts.scalar(number),
            float((min(one or Fraction(0), Fraction(0)) - low) / scale),
            float(abs(one or Fraction(0)) / scale),
            one is not None and one < 0,
        )
        for of_group, number, one in zip(names, numbers, known, strict=True)
    )
