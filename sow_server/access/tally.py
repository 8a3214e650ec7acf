"""Which events of a flood the audit log tells one by one, and which it counts (rule A8).

Failed attempts are counted by address, denials by identity. A flood of them must not push other lines out of the log,
nor fill the disk.

    [1]  Each event is told, by itself or in a count.
    [2]  One source has no part in what is told of another, but for the bound of all together.
    [3]  Memory is bounded: SOURCES_MAX sources.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

WINDOW_SECONDS: Final = 60.0
IN_ALL_MAX: Final = 1_000
"""Events of all sources in a window that are told one by one: a flood from many is a flood, too."""
SOURCES_MAX: Final = 10_000
COUNTS_TOLD_MAX: Final = 100
"""Sources whose counts are told at a time; the rest is told as one number."""
OTHERS: Final = "others"
"""Stands for the sources that are not told by themselves."""


class Untold(NamedTuple):
    """Events of a source that were not told one by one."""

    source: str
    events: int


@dataclass(slots=True)
class _Window:
    since: float
    count: int = 0
    untold: int = 0


class Tally:
    """Owns the counts. Event loop only."""

    def __init__(self, elapsed: Callable[[], float], each_max: int) -> None:
        """`elapsed`: seconds of a monotonic clock. `each_max`: events of one source in a window that are told one by
        one."""
        self._elapsed: Final = elapsed
        self._each_max: Final = each_max
        self._windows: dict[str, _Window] = {}
        """Keyed by source, in the order in which they began."""
        self._others = 0
        """Events of forgotten sources that were not told."""
        self._all = _Window(elapsed())

    def told(self, source: str) -> bool:
        """Counts an event; whether it is told by itself."""
        now = self._elapsed()
        window = self._windows.get(source)
        if window is None:
            if len(self._windows) >= SOURCES_MAX:
                self._others += self._windows.pop(next(iter(self._windows))).untold
            window = self._windows[source] = _Window(now)
        if now - self._all.since >= WINDOW_SECONDS:
            self._all = _Window(now)
        window.count += 1
        if window.count > self._each_max or self._all.count >= IN_ALL_MAX:
            window.untold += 1
            return False
        self._all.count += 1
        return True

    def due(self, *, at_the_end: bool = False) -> list[Untold]:
        """The counts of sources whose window is over, each once. To be called every second or so, and `at_the_end`,
        when the windows count as over."""
        now = self._elapsed()
        over = itertools.takewhile(
            lambda item: at_the_end or now - item[1].since >= WINDOW_SECONDS, list(self._windows.items())
        )
        found: list[Untold] = []
        for source, window in over:
            del self._windows[source]
            if window.untold and len(found) < COUNTS_TOLD_MAX:
                found.append(Untold(source, window.untold))
            else:
                self._others += window.untold
        if self._others:
            found.append(Untold(OTHERS, self._others))
            self._others = 0
        return found
