"""The pause before a cell that ended is started again: it doubles up to a bound, and begins anew once the cell has run
well."""

from __future__ import annotations

from typing import Final

PAUSE_SECONDS_MIN: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
WELL_SECONDS: Final = 60.0
"""A cell that was ready for so long has run well."""


class Pauses:
    """The pauses of one cell."""

    def __init__(self) -> None:
        self._next = PAUSE_SECONDS_MIN

    def ended(self, ready_seconds: float) -> float:
        """The pause in seconds, after a life in which the cell was ready for this time; 0: it never was."""
        if ready_seconds >= WELL_SECONDS:
            self._next = PAUSE_SECONDS_MIN
        pause = self._next
        self._next = min(2 * self._next, PAUSE_SECONDS_MAX)
        return pause
