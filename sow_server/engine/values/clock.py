"""The guarded clock: the one `now` of the store, for stamps, reads and versions alike (rule L15).

    [1]  It never runs backwards, across restarts too: it starts at or above the persisted high-water mark.
    [2]  It advances by elapsed (boot) time and is slewed towards the wall clock by at most 5 %.
    [3]  A forward jump of the wall clock against elapsed time beyond `jump_micros` pauses sweeping; while paused the
        clock advances by elapsed time alone, until the wall clock has come back or an operator accepts it.

Any thread may call `now_micros` and `paused` at any time. An operator calls `accept`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sow_server.engine.values.model import MICROS

SLEW_PARTS: Final = 20
"""The clock gains or loses at most 1/20 of the elapsed time."""


def wall_micros() -> int:
    """The machine's wall clock."""
    return time.time_ns() // 1000


def boot_micros() -> int:
    """Time since boot, suspended time included, so that a laptop's sleep is elapsed time and not a jump."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


@dataclass(frozen=True, slots=True)
class TimeSource:
    """The clocks of the machine that a guarded clock follows, in microseconds. Tests give others."""

    wall: Callable[[], int] = wall_micros
    elapsed: Callable[[], int] = boot_micros


@dataclass(frozen=True, slots=True)
class ClockOptions:
    """Bounds of rule L15, in microseconds."""

    jump_micros: int = 10 * MICROS
    behind_max_micros: int = 10 * MICROS
    ahead_max_micros: int = 7 * 86_400 * MICROS


class ClockBehindError(Exception):
    """At start the wall clock is further behind the high-water mark than allowed."""

    def __init__(self, behind_micros: int) -> None:
        super().__init__(
            f"the wall clock is {behind_micros / MICROS:.0f} s behind the last time that this data has seen; "
            "correct the clock, or start once with --accept-clock if the clock is right and the data was ahead"
        )
        self.behind_micros = behind_micros


class GuardedClock:
    """Owns the relation between elapsed time and `now`."""

    def __init__(
        self,
        *,
        wall: Callable[[], int] = wall_micros,
        elapsed: Callable[[], int] = boot_micros,
        options: ClockOptions | None = None,
    ) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._options = options or ClockOptions()
        self._lock = threading.Lock()
        self._mark = elapsed()
        self._now = wall()
        self._slewable = 0
        self._paused = False
        self.jumps_total = 0

    def start(self, high_water_micros: int, *, accept: bool = False) -> None:
        """Sets the clock from the persisted mark (0: none). Raises ClockBehindError; `accept` overrides every check."""
        with self._lock:
            wall = self._wall()
            self._mark = self._elapsed()
            self._now = wall
            self._paused = False
            if accept or high_water_micros == 0:
                return
            if wall < high_water_micros - self._options.behind_max_micros:
                raise ClockBehindError(high_water_micros - wall)
            if wall > high_water_micros + self._options.ahead_max_micros:
                self._now = high_water_micros
                self._paused = True
                self.jumps_total += 1
            else:
                self._now = max(wall, high_water_micros)

    def now_micros(self) -> int:
        """Microseconds since the epoch; never less than any value returned before."""
        with self._lock:
            return self._advance()

    def elapsed_micros(self) -> int:
        """A steady time, for lengths and rates: nobody sets it, and it is not slewed."""
        return self._elapsed()

    @property
    def paused(self) -> bool:
        """True if a forward jump has paused sweeping. It reads the wall clock, so that a jump is never noticed too
        late."""
        return self.look()[1]

    def look(self) -> tuple[int, bool]:
        """`now_micros` and `paused`, of one moment."""
        with self._lock:
            return self._advance(), self._paused

    def accept(self) -> tuple[int, int]:
        """The operator confirms the wall clock: `now` steps forward to it, if it is ahead. Returns (before, after)."""
        with self._lock:
            before = self._advance()
            self._now = max(before, self._wall())
            self._paused = False
            return before, self._now

    def _advance(self) -> int:
        mark = self._elapsed()
        passed = mark - self._mark
        if passed > 0:
            self._mark = mark
            self._now += passed
        else:
            passed = 0
        offset = self._wall() - self._now
        if offset > self._options.jump_micros:
            if not self._paused:
                self._paused = True
                self.jumps_total += 1
            return self._now
        self._paused = False
        # A wall clock that is behind slows this clock down, but never turns it back (the bound is at most `passed`).
        # The remainder is carried over; otherwise calls a few microseconds apart would never slew.
        bound, self._slewable = divmod(self._slewable + passed, SLEW_PARTS)
        self._now += max(-bound, min(bound, offset))
        return self._now
