"""The journal of one commit under construction (rule J1).

[1]  A chunk holds consecutive sequences of one topic in one commit; its key is the first of them.
[2]  The columns of a chunk have equal length: `add` and `add_columns` are the only places that fill them.
[3]  The head of a chunk says how many entries and bytes the topic ever had before it, so the entries between two
     positions are a subtraction, and a bound is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.rocks import COMMITS, JOURNAL, Batch
from sow_server.engine.stored import (
    ChangeRow,
    Changes,
    Column,
    Commit,
    Numbers,
    PublisherNote,
    Run,
    StoredStatistics,
    encode_change,
    encode_changes,
    encode_commit,
    i64,
)


class ChunkBuilder:
    """Collects consecutive changes of one topic. `Changes` describes the columns.

    Followers get this object, without a detour over the disk. So a followed topic has chunks even without a journal.
    """

    __slots__ = (
        "_columns",
        "_rows",
        "atomic",
        "first_sequence",
        "handed_over",
        "journaled",
        "keys",
        "payloads",
        "previous_values",
        "source",
        "topic",
    )

    def __init__(
        self, topic: Topic, first_sequence: int, *, journaled: bool = True, atomic: bool = False, source: int = 0
    ) -> None:
        """`atomic`: all of it belongs to one atomic request. `source`: the number of the peer that sent it; 0: changes
        of this instance."""
        self.topic: Final = topic
        self.first_sequence: Final = first_sequence
        self.journaled = journaled
        self.atomic: Final = atomic
        self.source: Final = source
        self.previous_values: list[bytes | None] | None = [] if topic.previous_wanted else None
        """If a follower needs them: the stored values of the records that were replaced or removed, None if there was
        no live one. Not journaled: a reader of the journal finds them by `previous`."""
        self.handed_over: set[int] = set()
        """The sequences of records that were due when they were put, and go to the subscribers attached now (rule L7).
        Not journaled, as nobody else gets them."""
        self.keys: list[bytes] = []
        self.payloads: list[bytes] = []
        self._rows: list[ChangeRow] = []
        """The last changes, which are not in the columns yet: most chunks have one change, and need no columns."""
        self._columns: _Columns | None = None

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
        self.keys.append(key)
        self.payloads.append(payload)
        self._rows.append(
            ChangeRow(change, version, publish_time, expire_time, origin, previous, removed_version, removed_origin)
        )

    def add_columns(
        self,
        change: int | bytearray,
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
        """Adds many changes: of one kind, or each of its own. A column that is one number is the same for all."""
        count = len(keys)
        kinds, columns = self._gathered()
        kinds += bytes((change,)) * count if isinstance(change, int) else change
        added = (version, publish_time, expire_time, origin, previous, removed_version, removed_origin)
        for column, numbers in zip(columns, added, strict=True):
            column.add(numbers, count)
        self.keys += keys
        self.payloads += payloads

    def finish(self, commit_time_micros: int, entries_before: int = 0, bytes_before: int = 0) -> Changes:
        """The chunk; the counts before it matter only in the journal."""
        found = self._columns
        kinds, columns = self._gathered() if found is None or self._rows else found
        version, publish_time, expire_time, origin, previous, removed_version, removed_origin = columns
        return Changes(
            self.first_sequence,
            commit_time_micros,
            bytes(kinds),
            version,
            publish_time,
            expire_time,
            origin,
            previous,
            removed_version,
            removed_origin,
            self.keys,
            self.payloads,
            atomic=self.atomic,
            entries_before=entries_before,
            bytes_before=bytes_before,
            source=self.source,
        )

    def encode(self, commit_time_micros: int, entries_before: int, bytes_before: int) -> bytes:
        """The journal value of `finish`."""
        if self._columns is not None or len(self._rows) != 1:
            return encode_changes(self.finish(commit_time_micros, entries_before, bytes_before))
        return encode_change(
            self._rows[0],
            self.keys[0],
            self.payloads[0],
            atomic=self.atomic,
            source=self.source,
            commit_time_micros=commit_time_micros,
            entries_before=entries_before,
            bytes_before=bytes_before,
        )

    def _gathered(self) -> _Columns:
        """The columns of all changes."""
        rows, found = self._rows, self._columns
        if found is None and rows:
            kinds, *columns = zip(*rows, strict=True)
            found = bytearray(kinds), list(map(Column.of, columns))
        elif found is None:
            found = bytearray(), list(map(Column, [()] * COLUMNS))
        else:
            for kind, *numbers in rows:
                found[0].append(kind)
                for column, number in zip(found[1], numbers, strict=True):
                    column.append(number)
        rows.clear()
        self._columns = found
        return found


COLUMNS: Final = len(ChangeRow._fields) - 1
_Columns: TypeAlias = tuple[bytearray, list[Column]]
"""The kinds of changes, and the seven columns of numbers in the order of `Changes`."""


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
        """The chunk of the change of `topic` with a sequence; None for a topic without followers and journal, and for
        a view that is being built (rule V6)."""
        last = self.chunks[-1] if self._open else None
        if (
            last is not None
            and last.topic is topic
            and last.source == self.source
            and last.first_sequence + len(last.keys) == sequence
        ):
            return last
        if not (topic.settings.journal or topic.followers) or not topic.complete:
            return None
        last = ChunkBuilder(topic, sequence, journaled=topic.settings.journal, atomic=self.atomic, source=self.source)
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
        value = chunk.encode(commit_time_micros, figures.appended_entries, figures.appended_bytes)
        rows[topic.prefix + i64(chunk.first_sequence)] = value
        runs.append(Run(topic.id, chunk.first_sequence, count))
        statistics[topic.id] = figures.appended(count, len(value), chunk.first_sequence + count - 1)
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
