"""Applying: the staged rows of a committed load become records, and the records that it does not name are deleted.

The reader's thread finds the work of the next commit (`read`); the writer does it (`apply`) (loads [3], [4]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.mutations import stage_job
from sow_server.engine.commit.requests import Job
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import (
    STAGED_BYTES,
    decode_named,
    mark_key,
    marks_range,
    named_key,
    read_staged,
    read_staged_key,
    staged_range,
)
from sow_server.engine.disk.rocks import RECORDS, STAGING
from sow_server.engine.loads.model import Load, LoadContent, LoadPhase, LoadRow, load_failed
from sow_server.engine.loads.registry import LoadRegistry
from sow_server.engine.loads.removal_marks import AppliedLoad
from sow_server.engine.pending import Pending
from sow_server.engine.stored import EXPIRE_TIME, HEADER, RECORD_KEY, read_header, sequences, u32
from sow_server.engine.values.model import Delete, Lifetime, LifetimeKind, Publish

APPLY_ROWS: Final = 1000
"""Rows that one commit applies, so that publishers never wait for long."""
APPLY_BYTES: Final = 4 * 2**20
"""Payload bytes after which a commit takes no further row to apply."""
READ_ROWS: Final = 1000
SCAN_RECORDS: Final = 10_000
"""Stored records that one step of the search for records to delete reads."""
_KINDS: Final = {kind.value: kind for kind in LifetimeKind}


@dataclass(frozen=True, slots=True)
class LoadWork:
    """The work of one commit of a committed load: rows to apply, or keys to delete."""

    load: Load
    phase: LoadPhase
    position: bytes
    """Where it was read: work that was done already does not fit any more."""
    following: bytes | None
    """Where to go on; None: this is the last of its phase."""
    keys: list[bytes] = field(default_factory=list)
    lifetimes: list[Lifetime] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    repeated: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of the payloads."""
        return sum(map(len, self.payloads))


class LoadApplying:
    """Reads the work of committed loads, and has the writer do it."""

    def __init__(self, core: Core, registry: LoadRegistry) -> None:
        self.registry: Final = registry
        self.rocks: Final = core.rocks
        self.commits: Final = core.commits
        self.topics: Final = core.topics
        self.applied_total = 0
        self.deleted_total = 0

    def content(self, load: Load, named: Mapping[int, int]) -> LoadContent:
        """The records that the staged rows of these attempts make. All are counted, whatever the caps of the topic are
        now: they may be others when the load is committed. Not on the event loop. Raises RocksError."""
        keys: list[bytes] = []
        values: list[bytes] = []
        records = size = last = 0
        before: bytes | None = None
        start, stop = staged_range(load.row.number)
        following: bytes | None = start
        cursor = self.rocks.cursor(STAGING, fill_cache=False)
        try:
            while following is not None:
                keys.clear()
                values.clear()
                following = cursor.fill(following, stop, READ_ROWS, keys, values)
                for staged, value in zip(keys, values, strict=True):
                    key, part, attempt = read_staged_key(staged)
                    if named.get(part) != attempt:
                        continue
                    if key == before:  # of several rows of a key the last one counts
                        size -= last
                    else:
                        records += 1
                    before, last = key, len(key) + len(value) - STAGED_BYTES
                    size += last
        finally:
            cursor.close()
        return LoadContent(records, size)

    def read(self, load: Load) -> LoadWork:
        """The work of the next commit of a committed load. Not on the event loop, and for one load by one thread at a
        time. Raises RocksError."""
        row = load.row
        return self._read_rows(load, row) if row.phase is LoadPhase.APPLYING else self._read_others(load, row)

    def _read_rows(self, load: Load, row: LoadRow) -> LoadWork:
        """Staged rows to apply. All rows of a key lie together: of those that count, the one of the highest part comes
        last."""
        named = load.named
        if named is None:
            named = load.named = decode_named(self.rocks.get(STAGING, named_key(row.number)) or b"")
        keys: list[bytes] = []
        values: list[bytes] = []
        found: dict[bytes, bytes] = {}
        repeated = size = read = 0
        start: bytes | None = row.position
        stop = staged_range(row.number)[1]
        cursor = self.rocks.cursor(STAGING, fill_cache=False)
        try:
            while start is not None:
                keys.clear()
                values.clear()
                start = cursor.fill(start, stop, READ_ROWS, keys, values)
                read += len(keys)
                for staged, value in zip(keys, values, strict=True):
                    key, part, attempt = read_staged_key(staged)
                    if named.get(part) != attempt:
                        if read >= SCAN_RECORDS and key not in found and staged > row.position:
                            return _work(load, row, staged, found, repeated)  # the others have their turn
                        continue
                    if key in found:
                        repeated += 1
                        size -= len(found[key])
                    elif len(found) == APPLY_ROWS or size >= APPLY_BYTES:
                        # The next work begins with the first row of this key that counts; rows before it do not.
                        return _work(load, row, staged, found, repeated)
                    found[key] = value
                    size += len(value)
        finally:
            cursor.close()
        return _work(load, row, None, found, repeated)

    def _read_others(self, load: Load, row: LoadRow) -> LoadWork:
        """Records to delete: they were there when the load was opened, and have not changed since."""
        keys: list[bytes] = []
        chosen: list[bytes] = []
        stop = u32(row.topic_id + 1)
        start: bytes | None = row.position
        read = size = 0
        cursor = self.rocks.cursor(RECORDS, fill_cache=False)
        try:
            while start is not None and read < SCAN_RECORDS and len(chosen) < APPLY_ROWS and size < APPLY_BYTES:
                values: list[bytes] = []
                keys.clear()
                start = cursor.fill(start, stop, APPLY_ROWS - len(chosen), keys, values)
                read += len(keys)
                found = sequences([value[HEADER] for value in values])
                mine = [sequence <= row.begin_sequence for sequence in found]
                chosen += [key[RECORD_KEY] for key in compress(keys, mine)]
                size += sum(map(len, compress(values, mine)))  # the commit reads and journals them whole
        finally:
            cursor.close()
        return LoadWork(load, row.phase, row.position, start, chosen)

    def apply(self, work: LoadWork) -> Pending[Load]:
        """Does work in one commit, together with the load's new position. Raises StoreError at once where the step
        cannot be queued; the answer is LOAD_FAILED where a row is refused."""
        return self.commits.run(ApplyWork(self, work))


def _work(load: Load, row: LoadRow, following: bytes | None, found: dict[bytes, bytes], repeated: int) -> LoadWork:
    rows = [read_staged(value) for value in found.values()]
    return LoadWork(
        load,
        row.phase,
        row.position,
        following,
        list(found),
        [Lifetime(_KINDS[kind], micros) for kind, micros, _ in rows],
        [payload for _, _, payload in rows],
        repeated,
    )


class ApplyWork:
    """The step that does the work of one commit. Work that was done already, or whose load has failed, changes
    nothing."""

    def __init__(self, applying: LoadApplying, work: LoadWork) -> None:
        self._applying = applying
        self._work = work
        self._row: LoadRow | None = None
        self._topic: Topic | None = None
        self._applied = 0
        self._deleted = 0
        self._now = 0

    def stage(self, draft: Draft) -> None:
        """Puts the rows, or deletes the records, and puts the load's row."""
        work, row = self._work, self._work.load.row
        self._row = self._topic = None
        self._applied = self._deleted = 0
        self._now = draft.now
        if row.phase is not work.phase or row.position != work.position:
            return
        topic = self._applying.topics.by_id[row.topic_id]  # with the topic its loads fail
        draft.part(AppliedLoad).number = row.number
        change = self._apply if work.phase is LoadPhase.APPLYING else self._delete
        self._row = change(draft, topic, row)
        self._applying.registry.stage_row(draft, self._row)

    def committed(self) -> Load:
        """Counts, and takes the load's row over."""
        load = self._work.load
        if self._row is not None:
            self._applying.applied_total += self._applied
            self._applying.deleted_total += self._deleted
            if self._topic is not None:
                self._topic.last_use_micros = self._now
            self._applying.registry.take_over(load, self._row)
        return load

    def _apply(self, draft: Draft, topic: Topic, row: LoadRow) -> LoadRow:
        work = self._work
        self._topic = topic
        taken = self._taken(draft, topic, row, work.keys)
        if any(taken):
            given = list(compress(work.lifetimes, taken))
            request = Publish(
                topic.name,
                list(compress(work.payloads, taken)),
                lifetimes=given if any(lifetime.kind is not LifetimeKind.ABSENT for lifetime in given) else None,
            )
            job = _job(request, topic, list(compress(work.keys, taken)))
            if topic.wants_previous:
                draft.fetch_values(job.store_keys)
            part = stage_job(draft, job, len(job.keys), self._applying.commits.publishers)
            if part.refusals:
                refusal = part.refusals[0]
                key = job.keys[refusal.index]
                shown = key.decode()[:80] if isinstance(key, bytes) else ""
                raise load_failed(work.load, f"the row {shown!r} is refused ({refusal.reason.name}: {refusal.message})")
            self._applied = part.applied
        figures = row.figures
        figures = figures._replace(
            applied=figures.applied + self._applied,
            superseded=figures.superseded + len(work.keys) - self._applied,
            repeated=figures.repeated + work.repeated,
        )
        if work.following is not None:
            return row._replace(figures=figures, position=work.following)
        # An attempt that has staged a key twice has one row of it.
        figures = figures._replace(repeated=figures.staged - figures.applied - figures.superseded)
        return row._replace(figures=figures, position=topic.prefix, phase=LoadPhase.DELETING)

    def _taken(self, draft: Draft, topic: Topic, row: LoadRow, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys others have left alone since the load was opened (loads [4])."""
        begin = row.begin_sequence
        store_keys = [topic.prefix + key for key in keys]
        draft.fetch_heads(store_keys)
        if topic.acts:
            # First, as a dead letter may come to one of these keys (letter_posting [1]).
            for key, store_key in zip(keys, store_keys, strict=True):
                head = draft.heads[store_key]
                if head is not None and head[EXPIRE_TIME] <= draft.now_bytes and read_header(head).sequence <= begin:
                    draft.live_head(topic, key, store_key)
        taken = [sequence <= begin for sequence in sequences([draft.heads[key] for key in store_keys])]
        start, stop = marks_range(row.number)
        rocks = self._applying.rocks
        cursor = rocks.cursor(STAGING)
        try:
            marked = next(cursor.keys(start, stop, limit=1), None) is not None
        finally:
            cursor.close()
        if marked:
            marks = rocks.multi_get(STAGING, [mark_key(row.number, key) for key in keys])
            taken = [free and mark is None for free, mark in zip(taken, marks, strict=True)]
        return taken

    def _delete(self, draft: Draft, topic: Topic, row: LoadRow) -> LoadRow:
        work, begin = self._work, row.begin_sequence
        if work.keys:
            request = Delete(topic.name, matches=lambda _, value: read_header(value).sequence <= begin)
            job = _job(request, topic, work.keys)
            self._deleted = stage_job(draft, job, len(job.keys), self._applying.commits.publishers).applied
        figures = row.figures._replace(deleted=row.figures.deleted + self._deleted)
        if work.following is not None:
            return row._replace(figures=figures, position=work.following)
        self._applying.registry.stage_unstaged(draft, work.load)
        return row._replace(figures=figures, position=b"", phase=LoadPhase.DONE, end_micros=draft.now)


def _job(request: Publish | Delete, topic: Topic, keys: list[bytes]) -> Job:
    """A request whose keys are known."""
    job = Job(request)
    job.topic = topic
    job.keys = [*keys]
    job.store_keys = [topic.prefix + key for key in keys]
    return job
