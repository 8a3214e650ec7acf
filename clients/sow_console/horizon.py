"""The expiry horizon as a chart: which spans to ask for, and bars to draw. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sow_client import ExpiryHorizon, TopicDue

BARS: Final = 60
WITHIN: Final[Mapping[str, timedelta]] = {
    "1m": timedelta(minutes=1),
    "10m": timedelta(minutes=10),
    "1h": timedelta(hours=1),
    "1d": timedelta(days=1),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}
"""The lengths of time that a person may choose."""
DEFAULT_WITHIN: Final = "1h"


@dataclass(frozen=True, slots=True)
class Bar:
    """The records that fall due in one span."""

    begin: datetime
    end: datetime
    due: int
    share: float
    """0 to 1: the height, the largest is 1."""
    counted: bool
    """False: there was too much to count, and this span lies behind the end of the count."""


def spans(within: timedelta) -> list[timedelta]:
    """The ends of the spans to ask for: BARS equal ones."""
    return [within * (number + 1) / BARS for number in range(BARS)]


def bars(horizon: ExpiryHorizon) -> tuple[Bar, ...]:
    """The bars over all topics of a horizon."""
    sums = [sum(column) for column in zip(*(topic.due for topic in horizon.topics), strict=True)]
    sums = sums or [0] * len(horizon.spans)
    most = max(sums, default=0)
    begins = [timedelta(0), *horizon.spans]
    return tuple(
        Bar(
            horizon.as_of + begin,
            horizon.as_of + end,
            due,
            due / most if most else 0.0,
            horizon.as_of + end <= horizon.complete_upto,
        )
        for begin, end, due in zip(begins, horizon.spans, sums, strict=False)
    )


def counted(topic: str, times: Iterable[datetime], as_of: datetime, spans: Sequence[timedelta]) -> ExpiryHorizon:
    """The horizon of one topic's records with these expire times. All are counted."""
    due = [0] * len(spans)
    first: datetime | None = None
    for time in times:
        first = time if first is None or time < first else first
        # The first span whose end is not before it; one that falls due beyond the last end is in none.
        if (index := bisect_left(spans, time - as_of)) < len(due):
            due[index] += 1
    end = as_of + spans[-1]
    return ExpiryHorizon(as_of, tuple(spans), (TopicDue(topic, 0, tuple(due), first, False),), end, end)


def line(values: Sequence[float], width: float, height: float) -> str:
    """The points of a line over so many values, for a `polyline` of SVG; the largest value touches the top."""
    most = max(values, default=0.0) or 1.0
    step = width / max(1, len(values) - 1)
    return " ".join(f"{index * step:.1f},{height - value / most * height:.1f}" for index, value in enumerate(values))
