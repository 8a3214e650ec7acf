"""The window of one link: what is sent and not acknowledged yet.

[1]  At most `flight_bytes_max` and `flight_messages_max` are under way; one message may be larger.
[2]  Changes are acknowledged by their sequence, parts of seeds by their number. Both share the window.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from sow_replication.options import NodeOptions


class _Flying(NamedTuple):
    """A message that is not acknowledged yet."""

    size: int
    last: int
    """The last sequence of changes, or the number of the part of a seed."""
    committed_micros: int


class Window:
    """Owns the messages of one link that are under way."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._changes: deque[_Flying] = deque()
        self._seeds: deque[_Flying] = deque()
        self._bytes = 0
        self.parts = 0
        """The number of parts of seeds that were sent."""
        self.merged = 0
        """The number of parts that were acknowledged."""

    @property
    def has_changes(self) -> bool:
        """True if changes are under way."""
        return bool(self._changes)

    @property
    def oldest_commit_micros(self) -> int:
        """The commit time of the oldest change under way; 0: there is none."""
        return next((flying.committed_micros for flying in self._changes if flying.committed_micros), 0)

    def has_room(self, size: int) -> bool:
        """True if a message of this size may be sent [1]."""
        messages = len(self._changes) + len(self._seeds)
        if not messages:
            return True
        return messages < self._options.flight_messages_max and self._bytes + size <= self._options.flight_bytes_max

    def send_changes(self, size: int, upto: int, committed_micros: int) -> None:
        """Changes up to a sequence are under way."""
        self._bytes += size
        self._changes.append(_Flying(size, upto, committed_micros))

    def send_part(self, size: int) -> int:
        """A part of a seed is under way. Returns its number."""
        self._bytes += size
        self.parts += 1
        self._seeds.append(_Flying(size, self.parts, 0))
        return self.parts

    def acknowledged(self, sequence: int, parts: int) -> bool:
        """Changes up to a sequence, and as many parts of seeds, have been acknowledged. True: something has left the
        window by that, or nothing was in it."""
        before = len(self._changes) + len(self._seeds)
        self.merged = max(self.merged, parts)
        for flying, upto in ((self._changes, sequence), (self._seeds, self.merged)):
            while flying and flying[0].last <= upto:
                self._bytes -= flying.popleft().size
        return not before or len(self._changes) + len(self._seeds) < before
