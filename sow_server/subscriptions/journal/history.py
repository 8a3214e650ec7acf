"""The changes of one key, the newest first (rule S9).

[1]  Every entry names the previous change of its key while the record lives (rule J1), so a step back is one look-up.
     Before the put of a record that was not there, the journal is read back to the last removal of the key.
[2]  A piece of work reads a bounded part of the journal, from a cut of its own, and returns.
[3]  A history begins at or before a position that is on disk (rule S7), and never goes below the topic's floor.
[4]  Changes are those that a change reader of the same caller gets (S2): with rows, where it may see the new or the
     previous record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sow_server.engine.catalog.topics import Topic, topic_deleted
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.journal.reading import JournalCut, ReadingLeft
from sow_server.engine.reading import Cuts
from sow_server.engine.stored import Changes, read_header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.changes import changes_of
from sow_server.subscriptions.frames import ChangeReason, Row
from sow_server.subscriptions.live import focus
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import ViewFilter, Wants

PIECE_ENTRIES: Final = 200
PIECE_BYTES: Final = 2**20
PIECE_CHUNKS: Final = 4_000
PIECE_READ_BYTES: Final = 16 * 2**20
"""Bounds of one piece of work, however many changes it finds: a thread is held for some ten milliseconds."""


@dataclass(frozen=True, slots=True)
class PastChange:
    """One change of the key. `made_by`: the number of the instance that accepted it; None where the caller may not see
    the record any more."""

    row: Row
    commit_time_micros: int
    made_by: int | None


class History:
    """Reads the history of one key, piece by piece. From any thread, one at a time."""

    def __init__(
        self,
        cuts: Cuts,
        topic: Topic,
        key: bytes,
        *,
        upto: int,
        entries_max: int,
        rows: ViewFilter | None = None,
        projection: Projection | None = None,
    ) -> None:
        """`upto` is on disk. `rows`: the caller may see these only."""
        self._cuts = cuts
        self._topic = topic
        self._key = key
        self._matcher = VersionMatcher(rows)
        self._restricted = rows is not None
        self._wants = Wants(changes=True, projection=projection)
        self._left = entries_max
        self._known = False
        """True if the next change is certainly at `_position`."""
        self._begun = False
        self._position = upto
        self.done = False
        """True once all has been read, or as many entries as were asked for."""
        self.discarded = False
        """True if the journal has discarded changes of the topic from before the last entry."""

    @property
    def next_position(self) -> int:
        """A history up to here continues this one; 0: there is nothing more."""
        return self._position

    def read(self) -> list[PastChange]:
        """The next changes, perhaps none. Raises StoreError: TOPIC_DELETED, NO_JOURNAL."""
        if not self._begun:
            self._begun = True
            self._begin()
        cut = self._cuts.journal()
        try:
            return self._read(cut)
        finally:
            cut.close()

    def _begin(self) -> None:
        """Starts at the present record's last change, if that is not after the position. A record that has changed
        since the position was taken is found by reading back."""
        value = self._cuts.get(self._topic, [self._key])[1][0]
        if value is not None and (sequence := read_header(value).sequence) <= self._position:
            self._position, self._known = sequence, True

    def _read(self, cut: JournalCut) -> list[PastChange]:
        topic = self._topic
        floor = cut.floors.get(topic.id)
        if floor is None:
            raise topic_deleted(topic)
        if not topic.settings.journal:
            raise StoreError(
                Reason.NO_JOURNAL, f"topic: {topic.name} has no journal, so its changes cannot be read", field="topic"
            )
        found: list[PastChange] = []
        size = looked_at = 0
        left = ReadingLeft(PIECE_CHUNKS, PIECE_READ_BYTES)
        while self._left and looked_at < PIECE_ENTRIES and size < PIECE_BYTES and not left.is_none:
            looked_at += 1
            changes = self._next(cut, floor, left)
            if changes is None:
                break
            past = self._told(cut, changes)
            self._step_back(changes)
            if past is not None:
                if self._restricted and self._left == 1:
                    self._position = past.row.sequence - 1  # not the place of a change that it may not see (rule A4)
                found.append(past)
                size += past.row.size
                self._left -= 1
        if self._position <= floor:
            self._position = 0
            self.discarded = floor > topic.statistics.created_sequence
        self.done = self._left == 0 or self._position == 0
        return found

    def _next(self, cut: JournalCut, floor: int, left: ReadingLeft) -> Changes | None:
        """The next change; None: not found yet, or there is none."""
        if self._position <= floor:
            return None
        if self._known:
            changes = cut.change(self._topic, self._position, left)
            if changes is not None and changes.keys[0] == self._key:
                return changes
            self._known = False  # of a page that begins between two changes
        found = cut.last_change(self._topic, self._key, self._position, left)
        self._position = found.position
        return found.change

    def _step_back(self, changes: Changes) -> None:
        previous = changes.previous[0]
        self._known = previous > 0
        self._position = previous or changes.first_sequence - 1

    def _told(self, cut: JournalCut, changes: Changes) -> PastChange | None:
        for change in changes_of(
            self._topic, changes, start=0, stop=1, find=lambda sequence: cut.entry(self._topic, sequence)
        ):
            row = focus.row_of(change, self._wants, self._matcher, 0)
            if row is not None:
                hidden = row.reason is ChangeReason.NOT_PERMITTED
                return PastChange(row, changes.commit_time_micros, None if hidden else changes.origin[0])
        return None
