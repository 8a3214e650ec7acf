"""Rows that compare the CPU time of servers which do the same work in turns (`turns`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.rows import MICROSECONDS, PER_SECOND, TIMES, Figure, Row, Target
from benchmarks.turns import Case, Ratio, Side, Spent, measured


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides, and the target of their ratio; None: for information."""

    ours: str
    peer: str
    target: Target | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A case, and what its costs are compared with."""

    name: str
    case: Case
    comparisons: tuple[Comparison, ...]


Figures: TypeAlias = dict[str, list[dict[str, Spent]]]
"""Keyed by measurement, then by round and side."""


def measure(sides: Mapping[str, Side], measurements: Sequence[Measurement], rounds: int, spent: Figures) -> None:
    """Adds the figures of `rounds` rounds, after one that warms up."""
    for number in range(rounds + 1):
        for one in measurements:
            of_round = measured(sides, one.case, number)
            if number:
                spent.setdefault(one.name, []).append(of_round)


def row(name: str, rounds: Sequence[Mapping[str, Spent]], comparison: Comparison) -> Row:
    """The row of one measurement. Its ratio is that of CPU times, the peer's to ours."""
    ours, peer = ([one[side] for one in rounds] for side in (comparison.ours, comparison.peer))
    ratio = Ratio.of([one.micros for one in peer], [one.micros for one in ours])
    rates = Ratio.of([one.rate for one in ours], [one.rate for one in peer])
    noted = [
        f"rounds {ratio.spread} ×, the middle half {ratio.middle} ×",
        f"rate {_median_rate(ours)} to {_median_rate(peer)}, {rates.median:.2f} ×",
    ]
    if ours[0].p50_milliseconds:
        ours_p50, peer_p50 = (statistics.median(one.p50_milliseconds for one in side) for side in (ours, peer))
        noted.append(f"p50 {ours_p50:.3f} to {peer_p50:.3f} ms")
    judged = Figure(ratio.median, TIMES)
    return Row(
        f"{name}: {comparison.ours}, to {comparison.peer}; server CPU of each, {len(rounds)} rounds",
        Figure(statistics.median(one.micros for one in ours), MICROSECONDS),
        peer=Figure(statistics.median(one.micros for one in peer), MICROSECONDS),
        judged=judged,
        target=comparison.target,
        note="; ".join(noted),
    )


def _median_rate(side: Sequence[Spent]) -> Figure:
    return Figure(statistics.median(one.rate for one in side), PER_SECOND)
