"""The end of a subscriber's bookmarks: the positions of other instances that belong to them (rules F6, F8, F9).

[1]  The marks that are told belong to the position that is told with them, or to an earlier one.
[2]  `elsewhere` stays until this instance has everything that the subscriber was told at others. Every bookmark says so
     until then, so that another call goes on likewise. For a subscriber to deltas it stays for good: another instance
     may have told it of an expiry that is still to come here, and then there is nothing to apply a delta to.
[3]  A subscriber whose topic has left the cell is told the marks of that moment, however late it gets to the end: the
     links may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.replicas.marks import SAMPLE_MICROS, SourceMarks
from sow_server.engine.values.bookmarks import Marks, Position, held_text
from sow_server.engine.values.model import MICROS

MARK_MICROS: Final = MICROS
"""The time between two bookmarks with marks, at most, while anything is written."""


class Marking:
    """The marks of one subscriber."""

    def __init__(
        self,
        source_marks: SourceMarks,
        topics: Callable[[], Iterable[Topic] | None],
        *,
        marks: Marks | None = None,
        held: tuple[Position, ...] = (),
        lasting: bool = False,
    ) -> None:
        """`topics`: those that it follows; None: it may not see all of each, so there are no marks for it. `marks`: of
        the bookmark that it starts at. `held`: what it was told at other instances; `lasting`: for good."""
        self._source_marks = source_marks
        self._topics = topics
        self._marks = marks
        self._held = held
        self._lasting = lasting
        self.covers = not held
        """True if this instance has everything that the subscriber was told at others (rule F9)."""
        self._whole: frozenset[str] | None = None
        """The sources that send all of its topics whole, in `_version`."""
        self._version = -1
        self._told_at = -MARK_MICROS
        self._told: int | None = None
        self._last: tuple[int, Marks] | None = None
        """A position from which on these marks are told ([3])."""

    @property
    def elsewhere(self) -> bool:
        """True if the subscriber may have something that this instance lacks ([2])."""
        return bool(self._held)

    @property
    def sources(self) -> bool:
        """True if other instances send to this one. Subscribers that get no marks are told so, too."""
        return self._source_marks.active

    @property
    def next_micros(self) -> int | None:
        """The elapsed time at which to look again; None: there is nothing to tell."""
        if not (self._held or self._source_marks.active):
            return None
        return self._told_at + (SAMPLE_MICROS if self._waits_for_marks else MARK_MICROS)

    @property
    def _waits_for_marks(self) -> bool:
        """There are sources to tell, and no sample so old yet. Until then its bookmark is worth nothing elsewhere."""
        return (self._marks is None or not self._marks.sources) and bool(self._whole)

    def is_due(self, position: int, elapsed_micros: int) -> bool:
        """True if a position is to be told now."""
        at = self.next_micros
        if at is None or elapsed_micros < at:
            return False
        if position == self._told and self.covers:
            self._told_at = elapsed_micros  # nothing was written: look again later
            return False
        return True

    def sample(self, elapsed_micros: int) -> None:
        """Notes the present state, for a later position."""
        self._source_marks.sample(elapsed_micros)

    def ends_at(self, last: Callable[[], int], elapsed_micros: int) -> int:
        """The last position of now, which gets the marks of now ([3])."""
        self._source_marks.sample(elapsed_micros, at_once=self._source_marks.outdated)
        position = last()
        found = self._present(position)
        self._last = None if found is None else (position, found)
        return position

    def tell(self, position: int, elapsed_micros: int) -> str:
        """The end of the bookmark of a position."""
        self.sample(elapsed_micros)
        found = self._present(position)
        if self._last is not None and position >= self._last[0]:
            found = self._last[1]
        if found is not None:
            self._marks = found
            reached = dict(found.sources)
            if all(held.sequence <= reached.get(held.epoch, -1) for held in self._held):
                self.covers = True
                if not self._lasting:
                    self._held = ()
        self._told, self._told_at = position, elapsed_micros
        return ("" if self._marks is None else self._marks.text) + held_text(self._held)

    def _present(self, position: int) -> Marks | None:
        source_marks, version = self._source_marks, self._source_marks.version
        if version != self._version:
            topics = self._topics()
            whole = None if topics is None else source_marks.whole(topics)
            if version != source_marks.version:
                return None  # it changed meanwhile
            self._whole, self._version = whole, version
        return None if self._whole is None else source_marks.at(position, self._whole, version)
