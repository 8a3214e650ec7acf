"""How values are spread: counts by upper bound, as a histogram of Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

FEW: Final = 8
"""Below this number of values, adding them one by one is cheaper than looking for each bound among them."""


class Distribution:
    """Counts of values by upper bound, and their sum. One thread adds; any thread reads."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def add(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def add_all(self, values: Sequence[float]) -> None:
        """Counts many values. Sorting them and finding the bounds among them runs in C."""
        if len(values) < FEW:
            for value in values:
                self.add(value)
            return
        # Lags of a sweep come in order already, so the sort is a single pass.
        ordered = sorted(values)
        below = 0
        for index, bound in enumerate(self._bounds):
            upto = bisect_right(ordered, bound, lo=below)
            self._counts[index] += upto - below
            below = upto
            if below == len(ordered):
                break
        self._counts[-1] += len(ordered) - below
        self.total += sum(ordered)

    def counts(self) -> tuple[int, ...]:
        """Counts by upper bound; the last are the values beyond all bounds."""
        return tuple(self._counts)

    def buckets(self, unit: float = 1) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound (in `unit`s), as Prometheus has them."""
        found: list[tuple[str, float]] = []
        cumulative = 0
        for bound, count in zip((*self._bounds, float("inf")), list(self._counts), strict=True):
            cumulative += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound / unit)), cumulative))
        return found
