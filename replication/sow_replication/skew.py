"""How far another clock is from this one: the smallest difference that messages have shown lately.

A message is under way for a while, which adds to what its sender's clock said; the quickest one tells best.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MESSAGES: Final = 16


class Skew:
    """The other clock less this one, in microseconds."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=MESSAGES)

    def saw(self, difference_micros: int) -> None:
        """The time in a message, less the time at which it came."""
        self._seen.append(difference_micros)

    @property
    def micros(self) -> int:
        """0: nothing was seen yet."""
        return min(self._seen, key=abs, default=0)
