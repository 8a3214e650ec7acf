"""The results of a benchmark: figures, targets, limits, rows, and the arithmetic between them. Pure.

[1]  A rate is the median of rounds. Contestants take turns within a round, so a slow minute affects all of them.
[2]  A ratio is between medians of one run. Figures of two runs are never compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

PER_SECOND: Final = "/s"
MILLISECONDS: Final = "ms"
MICROSECONDS: Final = "µs"
SECONDS: Final = "s"
MEBIBYTES: Final = "MiB"
TIMES: Final = "×"


@dataclass(frozen=True, slots=True)
class Figure:
    """A value and its unit."""

    value: float
    unit: str

    def __str__(self) -> str:
        """Three significant digits: "75.3 k/s", "0.52 ms", "640 MiB"."""
        if self.unit == PER_SECOND:
            if self.value >= 1e6:
                return f"{self.value / 1e6:.2f} M/s"
            return f"{self.value / 1e3:.1f} k/s" if self.value >= 1e4 else f"{self.value:,.0f}/s"
        digits = 0 if self.value >= 100 else 1 if self.value >= 10 else 2
        return f"{self.value:,.{digits}f} {self.unit}"


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a figure holds, at least or at most, and the ambition beyond it, if there is one.

    A bound lies a third or more beside what a quiet run measured, so that noise does not cross it. A figure beyond its
    bound is a regression; one that falls short of its ambition is not.
    """

    bound: float
    unit: str
    at_least: bool = True
    ambition: float | None = None

    def held(self, figure: Figure) -> bool:
        """True if `figure`, in the target's unit, is within the bound."""
        return self._reaches(figure, self.bound)

    def reached(self, figure: Figure) -> bool | None:
        """True if `figure` reaches the ambition. None if there is no ambition."""
        return None if self.ambition is None else self._reaches(figure, self.ambition)

    def _reaches(self, figure: Figure, value: float) -> bool:
        assert figure.unit == self.unit.split()[0], f"{figure} is not comparable with {self}"
        return figure.value >= value if self.at_least else figure.value <= value

    def __str__(self) -> str:
        return self._said(self.bound)

    @property
    def ambition_said(self) -> str:
        """The ambition as text; empty if there is none."""
        return "" if self.ambition is None else self._said(self.ambition)

    def _said(self, value: float) -> str:
        return f"{'≥' if self.at_least else '≤'} {value:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Limit:
    """The figure of a part alone with the same load, and the share of it that sow reaches (1 = all of it)."""

    name: str
    figure: Figure
    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%} of {self.name} ({self.figure})"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    case: str
    """The measured case, with its size."""
    ours: Figure
    peer: Figure | None = None
    judged: Figure | None = None
    """The figure that the target judges: the ratio, or `ours`. None: no target, for information."""
    target: Target | None = None
    limits: tuple[Limit, ...] = ()
    note: str = ""
    skipped: str = ""
    """The reason why there is no peer's figure."""

    @property
    def held(self) -> bool | None:
        """True if the judged figure is within the target's bound. None if nothing is judged."""
        if self.target is None or self.judged is None:
            return None
        return self.target.held(self.judged)

    @property
    def reached(self) -> bool | None:
        """True if the judged figure reaches the ambition. None if nothing is judged or there is no ambition."""
        if self.target is None or self.judged is None:
            return None
        return self.target.reached(self.judged)


def ratio(ours: Sequence[float], peers: Sequence[float]) -> Figure:
    """Ours to the peer's, median to median [2]."""
    return Figure(statistics.median(ours) / statistics.median(peers), TIMES)


def ratio_range(ours: Sequence[float], peers: Sequence[float]) -> str:
    """The least and the greatest ratio of a round, which show the reliability of the median."""
    ratios = [our / peer for our, peer in zip(ours, peers, strict=True)]
    return f"rounds {min(ratios):.2f}–{max(ratios):.2f} ×"


def take_turns(
    rounds: int, contestants: Mapping[str, Callable[[], float]], *, before_round: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Runs every contestant once per round, in turns (benchmarks/turns [1]). Returns the figures by contestant, for
    each round."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        before_round()
        for name, run in contestants.items():
            figures[name].append(run())
    return figures


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample that `share` of the samples do not exceed: 0.5 is the median, 0.99 the p99."""
    assert samples, "a percentile of nothing"
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def bucket_percentile(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float:
    """The percentile of the samples of a Prometheus histogram between two readings.

    Readings map the upper bound of a bucket to its cumulative count. Within a bucket samples count as evenly spread.
    Samples in the last, unbounded bucket are reported as its lower bound.
    """
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[float("inf")]
    assert total > 0, "a percentile of nothing"
    wanted = share * total
    below_bound = below = 0.0
    for bound, count in counts.items():
        if count >= wanted:
            if bound == float("inf"):
                break
            return below_bound + (bound - below_bound) * (wanted - below) / (count - below)
        below_bound, below = bound, count
    return below_bound
