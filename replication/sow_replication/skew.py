"""The difference between another clock and this one: the smallest that recent messages have shown.

The time that a message is under way adds to the difference, so the quickest message is the most exact.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MESSAGES: Final = 16


class Skew:
    """The other clock minus this one, in microseconds."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=MESSAGES)

    def saw(self, difference_micros: int) -> None:
        """Adds the time in a message minus the time of its arrival."""
        self._seen.append(difference_micros)

    @property
    def micros(self) -> int:
        """The smallest recent difference; 0: there is none yet."""
        return min(self._seen, key=abs, default=0)
