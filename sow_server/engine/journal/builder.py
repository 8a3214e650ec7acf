"""The journal of one commit under construction (rule J1).

[1]  A chunk holds consecutive sequences of one topic in one commit; its key is the first of them.
[2]  The columns of a chunk have equal length: `add` and `add_columns` are the only places that fill them.
[3]  The head of a chunk says how many entries and bytes the topic ever had before it, so the entries between two
     positions are a subtraction, and a bound is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.rocks import COMMITS, JOURNAL, Batch
from sow_server.engine.stored import (
    Changes,
    Column,
    Commit,
    Numbers,
    PublisherNote,
    Run,
    StoredStatistics,
    encode_changes,
    encode_commit,
    journal_key,
)


@dataclass(slots=True)
class ChunkBuilder:
    """Collects consecutive changes of one topic. `Changes` describes the columns.

    Followers get this object, without a detour over the disk. So a followed topic has chunks even without a journal.
    """

    topic: Topic
    first_sequence: int
    journaled: bool = True
    atomic: bool = False
    """True if all of it belongs to one atomic request."""
    source: int = 0
    """The number of the peer that sent it; 0: changes of this instance."""
    previous_values: list[bytes | None] | None = None
    """If a follower needs them: the stored values of the records that were replaced or removed, None if there was no
    live one. Not journaled: a reader of the journal finds them by `previous`."""
    handed_over: set[int] = field(default_factory=set)
    """The sequences of records that were due when they were put, and go to the subscribers attached now (rule L7). Not
    journaled, as nobody else gets them."""
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

    def add(
        self,
        change: int,
        key: bytes,
        payload: bytes,
        *,
        version: int,
        publish_time: int,
        expire_time: int,
        origin: int,
        previous: int,
        removed_version: int = 0,
        removed_origin: int = 0,
    ) -> None:
        """Adds one change."""
        self.change.append(change)
        self.version.append(version)
        self.publish_time.append(publish_time)
        self.expire_time.append(expire_time)
        self.origin.append(origin)
        self.previous.append(previous)
        self.removed_version.append(removed_version)
        self.removed_origin.append(removed_origin)
        self.keys.append(key)
        self.payloads.append(payload)

    def add_columns(
        self,
        change: int,
        keys: Sequence[bytes],
        payloads: Sequence[bytes],
        *,
        version: Numbers,
        publish_time: Numbers,
        expire_time: Numbers,
        origin: Numbers,
        previous: Numbers,
        removed_version: Numbers = 0,
        removed_origin: Numbers = 0,
    ) -> None:
        """Adds many changes of one kind. A column that is one number is the same for all of them."""
        count = len(keys)
        self.change += bytes((change,)) * count
        self.version.add(version, count)
        self.publish_time.add(publish_time, count)
        self.expire_time.add(expire_time, count)
        self.origin.add(origin, count)
        self.previous.add(previous, count)
        self.removed_version.add(removed_version, count)
        self.removed_origin.add(removed_origin, count)
        self.keys += keys
        self.payloads += payloads

    def finish(self, commit_time_micros: int, entries_before: int = 0, bytes_before: int = 0) -> Changes:
        """The chunk; the counts before it matter only in the journal."""
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


class JournalDraft:
    """The chunks of one commit, and the request that the next change belongs to."""

    __slots__ = ("_open", "atomic", "chunks", "source")

    def __init__(self) -> None:
        self.chunks: list[ChunkBuilder] = []
        self.atomic = False
        """True if the changes that are being staged belong to one atomic request."""
        self.source = 0
        """The number of the peer that sent the changes being staged; 0: changes of this instance."""
        self._open = False
        """True if the next change may go into the last chunk."""

    def chunk(self, topic: Topic, sequence: int) -> ChunkBuilder | None:
        """The chunk of the change of `topic` with a sequence; None for a topic without followers and journal."""
        last = self.chunks[-1] if self._open else None
        if (
            last is not None
            and last.topic is topic
            and last.source == self.source
            and last.first_sequence + len(last.keys) == sequence
        ):
            return last
        if not topic.settings.journal and not topic.followers:
            return None
        last = ChunkBuilder(topic, sequence, journaled=topic.settings.journal, atomic=self.atomic, source=self.source)
        if topic.previous_wanted:
            last.previous_values = []
        self.chunks.append(last)
        self._open = True
        return last

    def end_request(self) -> None:
        """The next change belongs to no atomic request."""
        self.atomic = False
        self._open = False


def append_chunks(
    batch: Batch,
    chunks: list[ChunkBuilder],
    statistics: dict[int, StoredStatistics],
    commit_time_micros: int,
    notes: Sequence[PublisherNote] = (),
    next_sequence: int = 0,
) -> int:
    """Adds the chunks of a commit, its row in the total order with notes of publishers, and their figures to the
    commit's batch. Returns the next sequence: if there are only notes, the row takes one."""
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
    if not runs and not notes:
        return next_sequence
    if runs:
        first, last = runs[0].first_sequence, runs[-1].first_sequence + runs[-1].length - 1
    else:
        first = last = next_sequence
        next_sequence += 1
    key, value = encode_commit(Commit(first, last, commit_time_micros, tuple(runs), tuple(notes)))
    batch.puts[COMMITS][key] = value
    return next_sequence
