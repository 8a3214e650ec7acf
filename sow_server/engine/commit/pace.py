"""The times and the sizes of the sweep's commits: publishers come first, and the sweep gets its share (rule L14). Pure.

[1]  While somebody publishes, a commit of the sweep takes about `sweep_busy_micros`: a publish may have to wait for it.
[2]  The sweep gives way to calls that are about to queue a request, or to send the answer, until `GIVE_WAY_MICROS`
     after its last commit and no longer: it always has a share, however many publishers there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sow_server.engine.commit.options import WriterOptions

ENTRIES_MIN: Final = 20
"""A commit of the sweep has room for at least this many entries, however slow the disk: fewer would be mostly
overhead."""
GIVE_WAY_MICROS: Final = 2_000
"""A single publish takes about one millisecond, from its arrival to its answer."""


class CallsUnderWay:
    """Counts the calls that publish single requests, from their arrival to their answer. Counted on the thread of the
    event loop, read on the writer's."""

    __slots__ = ("_count", "awaited", "wake")

    def __init__(self) -> None:
        self._count = 0
        self.awaited = False
        """True while the writer waits until no such call is under way."""
        self.wake: Callable[[], None] = lambda: None
        """Ends the writer's wait."""

    def __bool__(self) -> bool:
        return self._count > 0

    def begin(self) -> None:
        """A call has come."""
        self._count += 1

    def end(self) -> None:
        """A call has its answer."""
        self._count -= 1
        if not self._count and self.awaited:
            self.awaited = False
            self.wake()


class SweepPace:
    """Owns the time of the next commit of the sweep, and the bound of its entries. Used by the writer's thread."""

    __slots__ = ("_calls", "_entries", "_last_publish", "_options", "_swept", "next_micros")

    def __init__(self, options: WriterOptions, calls: CallsUnderWay) -> None:
        self._options = options
        self._calls = calls
        self._entries = ENTRIES_MIN
        self.next_micros = 0
        """The end of the pause after the last commit."""
        self._swept = 0
        """When the last commit ended."""
        self._last_publish = 0

    def published(self, now: int) -> None:
        """Somebody has published."""
        self._last_publish = now

    def not_before(self) -> int:
        """The time before which a sweep that is due does not go on; `CallsUnderWay.wake` may make it earlier."""
        if self._calls:
            self._calls.awaited = True
            return max(self.next_micros, self._swept + GIVE_WAY_MICROS)
        return self.next_micros

    def busy(self, now: int) -> bool:
        """True if somebody published a short time ago."""
        return now - self._last_publish < self._options.busy_window_micros

    def entries_max(self, now: int) -> int:
        """How many entries the next commit may visit."""
        return self._entries if self.busy(now) else self._options.sweep_entries_max

    def swept(self, visited: int, begun: int, now: int, *, more: bool) -> None:
        """A commit of the sweep has visited so many entries, from `begun` to `now`. `more`: others are overdue."""
        if visited:
            # The number of entries that fit into the time depends on the machine and on the records. A factor of two at
            # most: a commit that took long because others had the processor tells little about the next one.
            fitting = visited * self._options.sweep_busy_micros // max(1, now - begun)
            fitting = min(max(fitting, self._entries // 2), 2 * self._entries)
            self._entries = min(max(ENTRIES_MIN, fitting), self._options.sweep_entries_max)
        self._swept = now
        if not more:
            # A pause lets a steady trickle of expiries share commits; without it each would cost a commit.
            pause = self._options.sweep_pause_micros
        else:
            # Between commits of a long sweep the event loop gets a turn: it has answers to send, and requests to read
            # that the next commit would otherwise miss.
            pause = self._options.sweep_busy_pause_micros if self.busy(begun) else 0
        self.next_micros = now + pause
