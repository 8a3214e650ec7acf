"""Reading the journal: between two commits (`JournalCut`), or the heads of its chunks (`ChunkHeads`).

[1]  A topic's floor is the highest sequence ever discarded from it, and never falls. No entry at or below it is read,
     although its row may exist until the next prune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.rocks import JOURNAL, Cursor, Rocks
from sow_server.engine.stored import (
    FIRST_SEQUENCE,
    Changes,
    Commit,
    Entry,
    StoredStatistics,
    changes_head,
    decode_change,
    decode_changes,
    decode_commit,
    decode_entry,
    i64,
    journal_key,
    last_index,
    unpack_i64,
)


class JournalCut:
    """The journal between two commits, for readers. One thread at a time; close it.

    Chunks and entries at or below a topic's floor are missing; a reader checks `floors` first (rule J1).
    """

    def __init__(self, *, walk: Cursor, entries: Cursor, commits: Cursor, floors: Mapping[int, int]) -> None:
        """Use `Store.journal_cut`."""
        self._walk = walk
        self._entries = entries
        self._commits = commits
        self.floors: Final = floors
        """The highest sequence ever discarded, keyed by topic id."""

    def changes(self, topic: Topic, after: int, upto: int) -> Iterator[Changes]:
        """The chunks of a topic with sequences above `after`, up to `upto`; the first may begin before."""
        start = journal_key(topic.id, after + 1)
        row = self._walk.last_before(start)
        if row is not None and row[0].startswith(topic.prefix) and _last_of(*row) > after:
            start = row[0]
        for key, value in self._walk.rows(start, journal_key(topic.id, upto + 1)):
            yield decode_changes(unpack_i64(key[FIRST_SEQUENCE]), value)

    def commits(self, after: int, upto: int) -> Iterator[Commit]:
        """The commits with sequences above `after` that begin at or before `upto`, in the total order."""
        start = i64(after + 1)
        row = self._commits.last_before(start)
        if row is not None and decode_commit(*row).last_sequence > after:
            start = row[0]
        for key, value in self._commits.rows(start, i64(upto + 1)):
            yield decode_commit(key, value)

    def chunk(self, topic: Topic, first_sequence: int) -> Changes | None:
        """The chunk that begins with a sequence; None when it has been discarded."""
        value = self.packed(topic, first_sequence)
        return None if value is None else decode_changes(first_sequence, value)

    def packed(self, topic: Topic, first_sequence: int) -> bytes | None:
        """As `chunk`, not decoded."""
        value = self._entries.find(journal_key(topic.id, first_sequence))
        if value is None or first_sequence + changes_head(value).entries - 1 <= self.floors.get(topic.id, 0):
            return None
        return value

    def entry(self, topic: Topic, sequence: int) -> Entry | None:
        """The change with a sequence; None when it has been discarded."""
        if sequence <= self.floors.get(topic.id, 0):
            return None
        row = self._entries.last_before(journal_key(topic.id, sequence))
        if row is None or not row[0].startswith(topic.prefix) or _last_of(*row) < sequence:
            return None
        return decode_entry(row[1], sequence - unpack_i64(row[0][FIRST_SEQUENCE]))

    def change(self, topic: Topic, sequence: int, left: ReadingLeft) -> Changes | None:
        """As `entry`, with all columns, as changes of length one."""
        if sequence <= self.floors.get(topic.id, 0):
            return None
        row = self._entries.last_before(journal_key(topic.id, sequence))
        if row is None or not row[0].startswith(topic.prefix) or _last_of(*row) < sequence:
            return None
        left.take(row[1])
        first = unpack_i64(row[0][FIRST_SEQUENCE])
        return decode_change(first, row[1], sequence - first)

    def last_change(self, topic: Topic, key: bytes, upto: int, left: ReadingLeft) -> LastChange:
        """The last change of a key at or before a sequence, found by reading back for as long as reading is left, at
        least one chunk."""
        floor = self.floors.get(topic.id, 0)
        position = upto
        for row_key, value in self._walk.rows_back(journal_key(topic.id, upto), topic.prefix):
            left.take(value)
            first = unpack_i64(row_key[FIRST_SEQUENCE])
            index = last_index(value, key, position - first + 1)
            if index >= 0:
                found = first + index
                return LastChange(found, decode_change(first, value, index) if found > floor else None)
            position = first - 1
            if position <= floor:
                return LastChange(floor, None)
            if left.is_none:
                return LastChange(position, None)
        return LastChange(floor, None)

    def last_before(self, time_micros: int) -> int | None:
        """The last sequence of the last commit before a time; None if all retained commits came later."""
        # Commit times rise with the sequences, as the store's clock never runs backwards (rule L15).
        earliest = next(self._commits.rows(i64(0), None, limit=1), None)
        latest = self._commits.last()
        if earliest is None or latest is None or decode_commit(*earliest).commit_time_micros >= time_micros:
            return None
        low, high = unpack_i64(earliest[0]), unpack_i64(latest[0])
        while low < high:  # the commit at or before `low` is before the time
            middle = (low + high + 1) // 2
            commit = self.commit_at(middle)
            if commit.commit_time_micros < time_micros:
                low = middle
            else:
                high = commit.first_sequence - 1
        return self.commit_at(low).last_sequence

    def last_upto(self, time_micros: int, otherwise: int) -> int:
        """The last sequence of the last commit at or before a time; if all retained commits came later, the sequence
        before them, and without any the sequence `otherwise`."""
        found = self.last_before(time_micros + 1)
        if found is not None:
            return found
        earliest = next(self._commits.rows(i64(0), None, limit=1), None)
        return otherwise if earliest is None else decode_commit(*earliest).first_sequence - 1

    def commit_at(self, sequence: int) -> Commit:
        """The commit of a retained sequence, or the last one before it."""
        found = self.commit_before(sequence)
        assert found is not None, "there is a commit at or before it"
        return found

    def commit_before(self, sequence: int) -> Commit | None:
        """The commit of a sequence of any topic, or the last one before it that is retained."""
        row = self._commits.last_before(i64(sequence))
        return None if row is None else decode_commit(*row)

    def close(self) -> None:
        """Lets go of the cursors."""
        self._walk.close()
        self._entries.close()
        self._commits.close()


@dataclass(slots=True)
class ReadingLeft:
    """The part of the journal that one piece of work may still read."""

    chunks: int
    size: int
    """Bytes of chunks."""

    def take(self, chunk: bytes) -> None:
        """A chunk was read."""
        self.chunks -= 1
        self.size -= len(chunk)

    @property
    def is_none(self) -> bool:
        """True if the piece of work has read its part."""
        return self.chunks <= 0 or self.size <= 0


class LastChange(NamedTuple):
    """The result of reading back for a key."""

    position: int
    """The sequence of the change; without one, there is none from here on up to where the reading began."""
    change: Changes | None
    """A run of one change. None: none was found yet; if the position is the floor, there is none."""


def _last_of(key: bytes, value: bytes) -> int:
    """The last sequence of a journal row."""
    return unpack_i64(key[FIRST_SEQUENCE]) + changes_head(value).entries - 1


class StoredChunk(NamedTuple):
    """The head of a chunk, and its position."""

    first_sequence: int
    entries: int
    commit_time_micros: int
    entries_before: int
    bytes_before: int
    size: int

    @property
    def last_sequence(self) -> int:
        """The sequence of its last entry."""
        return self.first_sequence + self.entries - 1


class JournalCounts(NamedTuple):
    """Entries and bytes that were ever journaled of a topic, up to some position."""

    entries: int
    bytes: int


class ChunkHeads:
    """Reads heads of chunks, from a cursor that is opened when it is first needed. One thread; close it."""

    opened_total = 0
    """The number of reads in the whole process; it measures a step of pruning."""

    def __init__(self, rocks: Rocks) -> None:
        self._rocks = rocks
        self._cursor: Cursor | None = None

    def from_(self, topic: Topic, sequence: int) -> StoredChunk | None:
        """The first chunk that begins at a sequence or after it."""
        for row in self._open().rows(journal_key(topic.id, sequence), topic.stop, limit=1):
            return _chunk(*row)
        return None

    def upto(self, topic: Topic, sequence: int) -> StoredChunk | None:
        """The last chunk that begins at a sequence or before it."""
        row = self._open().last_before(journal_key(topic.id, sequence))
        return _chunk(*row) if row is not None and row[0].startswith(topic.prefix) else None

    def after(self, topic: Topic, position: int) -> StoredChunk | None:
        """The chunk with the first entry after a position."""
        found = self.upto(topic, position + 1)
        return found if found is not None and found.last_sequence > position else self.from_(topic, position + 1)

    def entry(self, topic: Topic, sequence: int) -> Entry | None:
        """The change with a sequence; None if its row was removed."""
        row = self._open().last_before(journal_key(topic.id, sequence))
        if row is None or not row[0].startswith(topic.prefix) or _last_of(*row) < sequence:
            return None
        return decode_entry(row[1], sequence - unpack_i64(row[0][FIRST_SEQUENCE]))

    def counts(self, topic: Topic, figures: StoredStatistics, position: int) -> JournalCounts:
        """Entries and bytes ever journaled up to a position, which is not below the floor. A chunk that reaches
        over the position adds none of its bytes."""
        if position >= figures.last_sequence:
            return JournalCounts(figures.appended_entries, figures.appended_bytes)
        chunk = self.upto(topic, position)
        if chunk is None:
            return JournalCounts(figures.trimmed_entries, figures.trimmed_bytes)
        if chunk.last_sequence <= position:
            return JournalCounts(chunk.entries_before + chunk.entries, chunk.bytes_before + chunk.size)
        return JournalCounts(chunk.entries_before + position - chunk.first_sequence + 1, chunk.bytes_before)

    def first(self, topic: Topic, start: int, keeps: Callable[[StoredChunk], bool]) -> StoredChunk | None:
        """The first kept chunk from `start` on; all later ones are kept, too. None: none is kept.

        From the front in steps that double, then by bisection between the last two: the cost grows with the logarithm
        of the number of skipped chunks.
        """
        found = self.from_(topic, start)
        if found is None or keeps(found):
            return found
        step, low = 1, found.last_sequence + 1
        high: StoredChunk | None = None
        while (probe := self.from_(topic, low + step - 1)) is not None:
            if keeps(probe):
                high = probe
                break
            low, step = probe.last_sequence + 1, step * 2
        stop = low + step if high is None else high.first_sequence
        while low < stop:  # chunks before `low` are not kept; chunks from `stop` on are known
            middle = (low + stop) // 2
            probe = self.from_(topic, middle)
            if probe is None or probe.first_sequence >= stop:
                stop = middle
            elif keeps(probe):
                high, stop = probe, middle
            else:
                low = probe.last_sequence + 1
        return high

    def close(self) -> None:
        """Lets go of the cursor."""
        if self._cursor is not None:
            self._cursor.close()

    def open(self) -> None:
        """Opens the cursor now: from here on it sees the state of this moment."""
        self._open()

    def _open(self) -> Cursor:
        if self._cursor is None:
            ChunkHeads.opened_total += 1
            self._cursor = self._rocks.cursor(JOURNAL, fill_cache=False)
        return self._cursor


class Ledger:
    """The counts of one topic's journal: the ends of commits, and the amounts between two positions. One thread; close
    it."""

    def __init__(
        self, cut: JournalCut, heads: ChunkHeads, topic: Topic, figures: StoredStatistics, synced: int
    ) -> None:
        """Use `Store.journal_ledger`."""
        heads.open()
        self.cut: Final = cut
        self._heads = heads
        self._topic = topic
        self._figures = figures
        self.earliest: Final = max(figures.floor_sequence, figures.created_sequence)
        """Changes after this position are retained, all of them."""
        self.head: Final = max(synced, self.earliest)
        """The last position that is on disk. (Of a topic that keeps nothing the floor may be ahead of that.)"""

    def counts(self, position: int) -> JournalCounts:
        """Entries and bytes ever journaled up to a position, which is not before the earliest."""
        return self._heads.counts(self._topic, self._figures, position)

    def after(self, position: int) -> StoredChunk | None:
        """The chunk with the first entry after a position."""
        return self._heads.after(self._topic, position)

    def first(self, start: int, keeps: Callable[[StoredChunk], bool]) -> StoredChunk | None:
        """As `ChunkHeads.first`."""
        return self._heads.first(self._topic, start, keeps)

    def close(self) -> None:
        """Lets go of the cursors."""
        self._heads.close()
        self.cut.close()


def _chunk(key: bytes, value: bytes) -> StoredChunk:
    return StoredChunk(unpack_i64(key[FIRST_SEQUENCE]), *changes_head(value), len(value))
