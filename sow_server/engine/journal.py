"""The journal: every change of a journaled topic, in the same batch as the change (rule J1); trimming it (rule J3).

J-a  A chunk holds consecutive sequences of one topic in one commit; its key is the first of them.
J-b  A topic's floor is the highest sequence ever discarded from it, and never falls.
J-c  A commit row goes once no topic retains a change from before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sow_server.engine.codec import (
    Changes,
    Column,
    Commit,
    Run,
    StoredStatistics,
    changes_head,
    encode_changes,
    encode_commit,
    i64,
    journal_key,
    unpack_i64,
)
from sow_server.engine.rocks import COMMITS, JOURNAL, Batch, Rocks
from sow_server.engine.topics import Topic

PRUNE_CHUNKS_MAX: Final = 64
"""Chunks that one step of pruning looks at, so that it never holds publishers up for long."""


@dataclass(slots=True)
class ChunkBuilder:
    """Collects consecutive changes of one topic. Columns of equal length; `codec.Changes` says what they mean."""

    topic: Topic
    first_sequence: int
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
        )


def append(
    batch: Batch, chunks: list[ChunkBuilder], statistics: dict[int, StoredStatistics], commit_time_micros: int
) -> None:
    """Adds the chunks of a commit, its row in the total order, and their figures to the commit's batch."""
    if not chunks:
        return
    rows = batch.puts[JOURNAL]
    runs: list[Run] = []
    for chunk in chunks:
        topic = chunk.topic
        count = len(chunk.keys)
        value = encode_changes(chunk.finish(commit_time_micros))
        rows[journal_key(topic.id, chunk.first_sequence)] = value
        runs.append(Run(topic.id, chunk.first_sequence, count))
        figures = statistics[topic.id]
        statistics[topic.id] = figures._replace(
            journal_entries=figures.journal_entries + count, journal_bytes=figures.journal_bytes + len(value)
        )
    last = runs[-1].first_sequence + runs[-1].length - 1
    key, value = encode_commit(Commit(runs[0].first_sequence, last, commit_time_micros, tuple(runs)))
    batch.puts[COMMITS][key] = value


def prune(rocks: Rocks, topic: Topic, now_micros: int, batch: Batch) -> tuple[StoredStatistics, bool]:
    """Puts into `batch` the removal of what topic's retention no longer covers.

    Stops at the first chunk inside retention, and after `PRUNE_CHUNKS_MAX`. Returns the topic's new figures, and
    whether there may be more. An entry exactly at the cut-off goes (rule J4).
    """
    settings, figures = topic.settings, topic.statistics
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
