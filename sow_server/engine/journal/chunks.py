"""The journal: every change of a journaled topic, in the same batch as the change (rule J1); reading it, and finding
what lies outside a period, a size or a number of entries (rule J3). `durables.py` decides what is let go.

J-a  A chunk holds consecutive sequences of one topic in one commit; its key is the first of them.
J-b  A topic's floor is the highest sequence ever discarded from it, and never falls. Nothing at or below it is read,
     though its row may be there until the next prune.
J-c  A commit row goes once no topic retains a change from before it.
J-d  A chunk's head says how many entries and bytes were ever in front of it, so that what lies between two positions
     is a subtraction, and a bound is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import (
    FIRST_SEQUENCE,
    Changes,
    Column,
    Commit,
    Entry,
    Run,
    StoredStatistics,
    changes_head,
    decode_changes,
    decode_commit,
    decode_entry,
    encode_changes,
    encode_commit,
    i64,
    journal_key,
    unpack_i64,
)
from sow_server.engine.disk.rocks import COMMITS, JOURNAL, Batch, Cursor, Rocks

MEMOS_MAX: Final = 16
"""Bounds of one topic that are remembered: those that are in force no more are forgotten with the others."""


@dataclass(slots=True)
class ChunkBuilder:
    """Collects consecutive changes of one topic. Columns of equal length; `Changes` says what they mean.

    What followers get is this, without a detour over the disk; so a topic that is followed has chunks even where it has
    no journal.
    """

    topic: Topic
    first_sequence: int
    journaled: bool = True
    atomic: bool = False
    """Whether all of it belongs to one atomic request."""
    source: int = 0
    """Where it came from; 0: from here."""
    previous_values: list[bytes | None] | None = None
    """Where somebody wants them: the stored values of the records that were replaced or removed, None where there was
    no live one. Not journaled: a reader of the journal finds them by `previous`."""
    change: bytearray = field(default_factory=bytearray)
    version: Column = field(default_factory=Column)
    publish_time: Column = field(default_factory=Column)
    expire_time: Column = field(default_factory=Column)
    origin: Column = field(default_factory=Column)
    previous: Column = field(default_factory=Column)
    removed_version: Column = field(default_factory=Column)
    removed_origin: Column = field(default_factory=Column)
    keys: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)

    def finish(self, commit_time_micros: int, entries_before: int = 0, bytes_before: int = 0) -> Changes:
        """The chunk; what was before counts in the journal only."""
        return Changes(
            self.first_sequence,
            commit_time_micros,
            bytes(self.change),
            self.version,
            self.publish_time,
            self.expire_time,
            self.origin,
            self.previous,
            self.removed_version,
            self.removed_origin,
            self.keys,
            self.payloads,
            atomic=self.atomic,
            entries_before=entries_before,
            bytes_before=bytes_before,
            source=self.source,
        )


def append(
    batch: Batch, chunks: list[ChunkBuilder], statistics: dict[int, StoredStatistics], commit_time_micros: int
) -> None:
    """Adds the chunks of a commit, its row in the total order, and their figures to the commit's batch."""
    rows = batch.puts[JOURNAL]
    runs: list[Run] = []
    for chunk in chunks:
        if not chunk.journaled:
            continue
        topic = chunk.topic
        count = len(chunk.keys)
        before = runs[-1] if runs else None
        assert before is None or before.first_sequence + before.length <= chunk.first_sequence, "runs do not overlap"
        figures = statistics[topic.id]
        value = encode_changes(chunk.finish(commit_time_micros, figures.appended_entries, figures.appended_bytes))
        rows[journal_key(topic.id, chunk.first_sequence)] = value
        runs.append(Run(topic.id, chunk.first_sequence, count))
        statistics[topic.id] = figures._replace(
            appended_entries=figures.appended_entries + count,
            appended_bytes=figures.appended_bytes + len(value),
            last_sequence=chunk.first_sequence + count - 1,
        )
    if not runs:
        return
    last = runs[-1].first_sequence + runs[-1].length - 1
    key, value = encode_commit(Commit(runs[0].first_sequence, last, commit_time_micros, tuple(runs)))
    batch.puts[COMMITS][key] = value


class JournalCut:
    """The journal between two commits, for those who read it. One thread at a time; close it.

    Chunks and entries at or below a topic's floor are not there; whoever reads asks `floors` first (rule J1).
    """

    def __init__(self, *, walk: Cursor, entries: Cursor, commits: Cursor, floors: Mapping[int, int]) -> None:
        """Use `Store.journal_cut`."""
        self._walk = walk
        self._entries = entries
        self._commits = commits
        self.floors: Final = floors
        """By topic id: the highest sequence ever discarded."""

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

    def last_before(self, time_micros: int) -> int | None:
        """The last sequence of the last commit before a time; None when all commits that are retained came later."""
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

    def commit_at(self, sequence: int) -> Commit:
        """The commit that a retained sequence belongs to, or the last one before it."""
        row = self._commits.last_before(i64(sequence))
        assert row is not None, "there is a commit at or before it"
        return decode_commit(*row)

    def close(self) -> None:
        """Lets go of the cursors."""
        self._walk.close()
        self._entries.close()
        self._commits.close()


def _last_of(key: bytes, value: bytes) -> int:
    """The last sequence of a journal row."""
    return unpack_i64(key[FIRST_SEQUENCE]) + changes_head(value).entries - 1


# --- finding bounds --------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """What the head of a chunk says, and where it is."""

    first_sequence: int
    entries: int
    commit_time_micros: int
    entries_before: int
    bytes_before: int
    size: int

    @property
    def last_sequence(self) -> int:
        """Of its last entry."""
        return self.first_sequence + self.entries - 1


class Counts(NamedTuple):
    """Entries and bytes that were ever journaled of a topic, up to some position."""

    entries: int
    bytes: int


class Heads:
    """Reads heads of chunks, from a cursor that is opened when it is first needed. One thread; close it."""

    opened_total = 0
    """How many were needed, in the whole process; what a step of pruning is measured by."""

    def __init__(self, rocks: Rocks) -> None:
        self._rocks = rocks
        self._cursor: Cursor | None = None

    def from_(self, topic: Topic, sequence: int) -> Chunk | None:
        """The first chunk that begins at a sequence or after it."""
        for row in self._open().rows(journal_key(topic.id, sequence), topic.stop, limit=1):
            return _chunk(*row)
        return None

    def upto(self, topic: Topic, sequence: int) -> Chunk | None:
        """The last chunk that begins at a sequence or before it."""
        row = self._open().last_before(journal_key(topic.id, sequence))
        return _chunk(*row) if row is not None and row[0].startswith(topic.prefix) else None

    def after(self, topic: Topic, position: int) -> Chunk | None:
        """The chunk with the first entry after a position."""
        found = self.upto(topic, position + 1)
        return found if found is not None and found.last_sequence > position else self.from_(topic, position + 1)

    def entry(self, topic: Topic, sequence: int) -> Entry | None:
        """The change with a sequence; None when its row is gone."""
        row = self._open().last_before(journal_key(topic.id, sequence))
        if row is None or not row[0].startswith(topic.prefix) or _last_of(*row) < sequence:
            return None
        return decode_entry(row[1], sequence - unpack_i64(row[0][FIRST_SEQUENCE]))

    def counts(self, topic: Topic, figures: StoredStatistics, position: int) -> Counts:
        """What was ever journaled up to a position, which is not below the floor. Of a chunk that reaches over it no
        byte counts."""
        if position >= figures.last_sequence:
            return Counts(figures.appended_entries, figures.appended_bytes)
        chunk = self.upto(topic, position)
        if chunk is None:
            return Counts(figures.trimmed_entries, figures.trimmed_bytes)
        if chunk.last_sequence <= position:
            return Counts(chunk.entries_before + chunk.entries, chunk.bytes_before + chunk.size)
        return Counts(chunk.entries_before + position - chunk.first_sequence + 1, chunk.bytes_before)

    def first(self, topic: Topic, start: int, keeps: Callable[[Chunk], bool]) -> Chunk | None:
        """The first chunk from `start` on that is kept; none behind it is not. None: none is kept.

        From the front in steps that double, then by bisection between the last two: what it costs grows with the
        logarithm of what is passed over.
        """
        found = self.from_(topic, start)
        if found is None or keeps(found):
            return found
        step, low = 1, found.last_sequence + 1
        high: Chunk | None = None
        while (probe := self.from_(topic, low + step - 1)) is not None:
            if keeps(probe):
                high = probe
                break
            low, step = probe.last_sequence + 1, step * 2
        stop = low + step if high is None else high.first_sequence
        while low < stop:  # no chunk that begins before `low` is kept; what begins at `stop` or after it is known
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
        """Opens the cursor now: from here on it sees what there is at this moment."""
        self._open()

    def _open(self) -> Cursor:
        if self._cursor is None:
            Heads.opened_total += 1
            self._cursor = self._rocks.cursor(JOURNAL, fill_cache=False)
        return self._cursor


class Ledger:
    """The journal of one topic as it is counted: where commits end, and what lies between two positions. One thread;
    close it."""

    def __init__(self, cut: JournalCut, heads: Heads, topic: Topic, figures: StoredStatistics, synced: int) -> None:
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

    def counts(self, position: int) -> Counts:
        """What was ever journaled up to a position, which is not before the earliest."""
        return self._heads.counts(self._topic, self._figures, position)

    def after(self, position: int) -> Chunk | None:
        """The chunk with the first entry after a position."""
        return self._heads.after(self._topic, position)

    def first(self, start: int, keeps: Callable[[Chunk], bool]) -> Chunk | None:
        """As `Heads.first`."""
        return self._heads.first(self._topic, start, keeps)

    def close(self) -> None:
        """Lets go of the cursors."""
        self._heads.close()
        self.cut.close()


def _chunk(key: bytes, value: bytes) -> Chunk:
    return Chunk(unpack_i64(key[FIRST_SEQUENCE]), *changes_head(value), len(value))


class Bounds(NamedTuple):
    """How far back a journal is kept. None: no bound of that kind."""

    time_micros: int | None = None
    bytes: int | None = None


NO_BOUNDS: Final = Bounds()


class Retention:
    """Remembers where the kept part of a topic begins, so that a topic where nothing has changed costs no read.

    Used by the writer's thread alone.
    """

    def __init__(self) -> None:
        self._found: dict[int, dict[Bounds, Chunk]] = {}

    def first(self, heads: Heads, topic: Topic, figures: StoredStatistics, bounds: Bounds, now_micros: int) -> int:
        """The first sequence inside the bounds, above the floor; behind the last where there is none.

        An entry exactly at the cut-off is outside (rule J4). As times only rise and the journal only grows, what is
        outside once stays outside.
        """
        if bounds == NO_BOUNDS or figures.last_sequence <= figures.floor_sequence:
            return figures.floor_sequence + 1
        chunk = self.chunk(heads, topic, figures, bounds, now_micros)
        if chunk is None:
            return figures.last_sequence + 1
        if chunk.entries_before <= figures.trimmed_entries:
            return figures.floor_sequence + 1  # nothing lies in between
        return max(chunk.first_sequence, figures.floor_sequence + 1)

    def chunk(
        self, heads: Heads, topic: Topic, figures: StoredStatistics, bounds: Bounds, now_micros: int
    ) -> Chunk | None:
        """The first chunk inside the bounds that has entries above the floor; None: there is none."""
        floor = figures.floor_sequence
        found = self._found.setdefault(topic.id, {})
        known = found.get(bounds)
        if known is not None and known.last_sequence > floor:
            if _keeps(known, bounds, figures, now_micros):
                return known
            start = known.first_sequence
        else:
            reaching = heads.after(topic, floor)
            start = floor + 1 if reaching is None else reaching.first_sequence
        first = heads.first(topic, start, lambda chunk: _keeps(chunk, bounds, figures, now_micros))
        if first is None:
            found.pop(bounds, None)
            return None
        if len(found) >= MEMOS_MAX:
            found.clear()
        found[bounds] = first
        return first

    def forget(self, topic_id: int) -> None:
        """The topic is gone."""
        self._found.pop(topic_id, None)


def first_inside(heads: Heads, topic: Topic, figures: StoredStatistics, bounds: Bounds, now_micros: int) -> int:
    """As `Retention.first`, from any thread."""
    return Retention().first(heads, topic, figures, bounds, now_micros)


def _keeps(chunk: Chunk, bounds: Bounds, figures: StoredStatistics, now_micros: int) -> bool:
    time, size = bounds
    return (time is None or chunk.commit_time_micros > now_micros - time) and (
        size is None or figures.appended_bytes - chunk.bytes_before <= size
    )


def beyond_entries(heads: Heads, topic: Topic, figures: StoredStatistics, entries_max: int) -> int:
    """The last sequence beyond the newest `entries_max` entries; at most the floor where there is none."""
    allowed = figures.appended_entries - entries_max
    if allowed <= figures.trimmed_entries:
        return 0
    chunk = heads.first(
        topic,
        heads_start(heads, topic, figures),
        lambda chunk: chunk.entries_before + chunk.entries > allowed,
    )
    if chunk is None:
        return figures.last_sequence
    return chunk.first_sequence + allowed - chunk.entries_before - 1


def heads_start(heads: Heads, topic: Topic, figures: StoredStatistics) -> int:
    """Where the first chunk with an entry above the floor begins."""
    reaching = heads.after(topic, figures.floor_sequence)
    return figures.floor_sequence + 1 if reaching is None else reaching.first_sequence


def prune_commits(rocks: Rocks, firsts: Iterable[int], batch: Batch, last_sequence: int) -> None:
    """Puts into `batch` the removal of the commit rows from before the first retained change of any topic; `firsts` are
    those changes."""
    first_kept = min([last_sequence + 1, *firsts])
    rows = rocks.cursor(COMMITS, fill_cache=False)
    try:
        # The row whose commit reaches over the first kept sequence begins at or before it, and stays.
        reaching = rows.last_before(i64(first_kept))
    finally:
        rows.close()
    if reaching is not None:
        batch.ranges.append((COMMITS, i64(0), reaching[0]))
