"""The journal: every change of a journaled topic, in the same batch as the change (rule J1); reading it; trimming it
(rule J3).

J-a  A chunk holds consecutive sequences of one topic in one commit; its key is the first of them.
J-b  A topic's floor is the highest sequence ever discarded from it, and never falls.
J-c  A commit row goes once no topic retains a change from before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from sow_server.engine.codec import (
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
from sow_server.engine.rocks import COMMITS, JOURNAL, Batch, Cursor, Rocks
from sow_server.engine.topics import Topic

PRUNE_CHUNKS_MAX: Final = 64
"""Chunks that one step of pruning looks at, so that it never holds publishers up for long."""


@dataclass(slots=True)
class ChunkBuilder:
    """Collects consecutive changes of one topic. Columns of equal length; `codec.Changes` says what they mean.

    What followers get is this, without a detour over the disk; so a topic that is followed has chunks even where it has
    no journal.
    """

    topic: Topic
    first_sequence: int
    journaled: bool = True
    atomic: bool = False
    """Whether all of the commit belongs to one atomic request."""
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

    def finish(self, commit_time_micros: int) -> Changes:
        """The chunk."""
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
        value = encode_changes(chunk.finish(commit_time_micros))
        rows[journal_key(topic.id, chunk.first_sequence)] = value
        runs.append(Run(topic.id, chunk.first_sequence, count))
        figures = statistics[topic.id]
        statistics[topic.id] = figures._replace(
            journal_entries=figures.journal_entries + count, journal_bytes=figures.journal_bytes + len(value)
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
            yield decode_changes(unpack_i64(key[4:]), value)

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
        value = self._entries.find(journal_key(topic.id, first_sequence))
        return None if value is None else decode_changes(first_sequence, value)

    def entry(self, topic: Topic, sequence: int) -> Entry | None:
        """The change with a sequence; None when it has been discarded."""
        row = self._entries.last_before(journal_key(topic.id, sequence))
        if row is None or not row[0].startswith(topic.prefix) or _last_of(*row) < sequence:
            return None
        return decode_entry(row[1], sequence - unpack_i64(row[0][4:]))

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
            commit = self._commit_at(middle)
            if commit.commit_time_micros < time_micros:
                low = middle
            else:
                high = commit.first_sequence - 1
        return self._commit_at(low).last_sequence

    def _commit_at(self, sequence: int) -> Commit:
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
    return unpack_i64(key[4:]) + changes_head(value)[0] - 1


def prune(rocks: Rocks, topic: Topic, now_micros: int, batch: Batch) -> tuple[StoredStatistics, bool]:
    """Puts into `batch` the removal of what topic's retention no longer covers.

    Stops at the first chunk inside retention, and after `PRUNE_CHUNKS_MAX`. Returns the topic's new figures, and
    whether there may be more. An entry exactly at the cut-off goes (rule J4).
    """
    settings, figures = topic.settings, topic.statistics
    if not figures.journal_entries:
        return figures, False  # most topics of many are quiet, and each cursor costs the publishers' time
    cut = None if settings.retain_time_micros is None else now_micros - settings.retain_time_micros
    cursor = rocks.cursor(JOURNAL, fill_cache=False)
    removed_to: bytes | None = None
    looked_at = 0
    try:
        for key, value in cursor.rows(topic.prefix, topic.stop, limit=PRUNE_CHUNKS_MAX):
            count, commit_time = changes_head(value)
            too_old = cut is not None and commit_time <= cut
            too_many = settings.retain_bytes is not None and figures.journal_bytes > settings.retain_bytes
            if not (too_old or too_many):
                break
            looked_at += 1
            last = unpack_i64(key[4:]) + count - 1
            removed_to = key[:4] + i64(last + 1)
            figures = figures._replace(
                journal_entries=figures.journal_entries - count,
                journal_bytes=figures.journal_bytes - len(value),
                floor_sequence=max(figures.floor_sequence, last),
            )
    finally:
        cursor.close()
    if removed_to is not None:
        batch.ranges.append((JOURNAL, topic.prefix, removed_to))
    return figures, looked_at == PRUNE_CHUNKS_MAX


def prune_commits(rocks: Rocks, topics: Mapping[int, Topic], batch: Batch, last_sequence: int) -> None:
    """Puts into `batch` the removal of the commit rows from before the first retained change of any topic."""
    first_kept = last_sequence + 1
    cursor = rocks.cursor(JOURNAL, fill_cache=False)
    try:
        for topic in topics.values():
            if not topic.statistics.journal_entries:
                continue
            for key in cursor.keys(topic.prefix, topic.stop, limit=1):
                first_kept = min(first_kept, unpack_i64(key[4:]))
    finally:
        cursor.close()
    rows = rocks.cursor(COMMITS, fill_cache=False)
    try:
        # The row whose commit reaches over the first kept sequence begins at or before it, and stays.
        reaching = rows.last_before(i64(first_kept))
    finally:
        rows.close()
    if reaching is not None:
        batch.ranges.append((COMMITS, i64(0), reaching[0]))
