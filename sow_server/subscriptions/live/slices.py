"""How much the dispatcher does in one go: slices, and changes that take several of them.

    [1]  A slice ends at a number of changes, of bytes, or after a time, whichever comes first. So frames are bounded,
         too.
    [2]  The clock is looked at after a block of changes, or a piece of estimated work, and not after each filter.

On the dispatcher's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from sow_server.subscriptions.changes import Change
from sow_server.subscriptions.live.groups import FollowedTopic, Group, Watch
from sow_server.subscriptions.live.judging import EFFORT_MAX

SLICE_CHANGES: Final = 1000
SLICE_BYTES: Final = 2**20
SLICE_SECONDS: Final = 0.005
"""A slice ends at the first of these limits, and then gives out its frames [1]."""
BLOCK_CHANGES: Final = 50
"""Changes between two looks at the clock."""
BLOCK_OFFERS: Final = 2000
"""Filters, about, that are evaluated between two looks at the clock."""
OFFER_NANOS: Final = 500
"""The time to evaluate a cheap filter."""
LOOK_NANOS: Final = EFFORT_MAX // 10
"""Estimated work between two looks at the clock, for changes that are much work."""


class Slice:
    """Measures the thread's time that one slice takes."""

    __slots__ = ("_give_up", "_ticks", "bytes", "changes")

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks = ticks
        self._give_up = ticks() + SLICE_SECONDS
        self.changes = 0
        self.bytes = 0

    @property
    def over(self) -> bool:
        """True if other work should run now."""
        return self.changes >= SLICE_CHANGES or self.bytes >= SLICE_BYTES or self._ticks() >= self._give_up

    @property
    def late(self) -> bool:
        """True if the slice's time is over."""
        return self._ticks() >= self._give_up

    def block(self, payloads: Sequence[bytes], start: int, filters: int) -> int:
        """The end of the next block of changes from `start` on, each of which is offered to `filters` filters."""
        stop, last = start, len(payloads)
        if last > start + 1:
            last = min(last, start + min(BLOCK_CHANGES, 1 + BLOCK_OFFERS // (1 + filters)))
        while stop < last and self.bytes < SLICE_BYTES:
            self.bytes += len(payloads[stop])
            stop += 1
        stop = max(stop, start + 1)
        self.changes += stop - start
        return stop


class HeavyChange:
    """A change, or an atomic request, that may be much work for all filters together. They are evaluated one after the
    other, over several slices if needed."""

    __slots__ = ("_offers", "changes", "followed", "stop", "unjudged")

    def __init__(self, followed: FollowedTopic, changes: list[Change], stop: int, position: int) -> None:
        """`position`: everything up to here came before."""
        self.followed = followed
        self.changes = changes
        self.stop = stop
        """Its end in the chunk."""
        self.unjudged: dict[Watch, None] = {}
        """The watches whose filters are left to reader threads."""
        self._offers: Iterator[tuple[Watch, Change, int]] = self._left(position)
        """The filters that are left to evaluate, each with its change and the nanoseconds that it takes at most."""

    def ask(self, slice_: Slice, now_micros: int, dirty: list[Group]) -> bool:
        """Evaluates filters until the slice's time is over. Returns whether all have been evaluated. `dirty`: gets the
        groups with rows that are not yet in a frame."""
        nanos_left = LOOK_NANOS
        for watch, change, nanos in self._offers:
            watch.offer(change, now_micros, dirty)
            nanos_left -= nanos
            if nanos_left <= 0:
                if slice_.late:
                    return False
                nanos_left = LOOK_NANOS
        return True

    def _left(self, position: int) -> Iterator[tuple[Watch, Change, int]]:
        for change in self.changes:
            effort = self.followed.effort(change)
            for watch in self.followed.concerned(change, effort):
                if watch in self.unjudged or not watch.groups:
                    continue
                nanos = OFFER_NANOS if effort is None else OFFER_NANOS + effort.of(watch.cost)
                if nanos <= EFFORT_MAX:
                    yield watch, change, nanos
                    continue
                self.unjudged[watch] = None
                for group in watch.groups.values():
                    group.forget(position)  # its rows of the same atomic request are judged again
