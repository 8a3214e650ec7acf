"""Loads: rows staged where nobody sees them, which a commit makes the content of a topic (the life of a load).

    LO1  Until its commit a load changes nothing but its own rows in `staging`. Aborted, or its lease ended, it leaves
         the topic as it was.
    LO2  The commit is one row, synced: from then on the load is applied, through restarts, to its end.
    LO3  How far it is applied moves in the commit that applies. So no row is applied twice, also one that has expired
         or was deleted since.
    LO4  A record that others have changed or removed since the load was opened stays as they have left it. "Since" is
         by the sequence of the change here: a change of another instance may come late, with an old version. What they
         remove leaves a mark (removal_marks [1]); whether a row is superseded is decided in the writer's turn.
    LO5  Rows of an attempt have positions without gaps. What was seen is not staged or counted again, so a request may
         be repeated, by the one who has staged the attempt so far: rows of another one would be taken for repeated.
    LO6  Lifetimes start when the row is applied (rule L5).

           open            stage*                     commit                                     rows removed
    ──────────▶ STAGING ──────────▶ STAGING ─────────────────────▶ APPLYING ──▶ DELETING ──▶ DONE ───────────▶ forgotten
                   │ abort, end of the lease: all is removed           └──── cannot go on ──▶ FAILED ─────────▶

A load is a row in `meta`, JSON with the fields of `LoadRow`. The writer's thread changes it; leases are in memory.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, NamedTuple

import structlog

from sow_server.engine.catalog.topics import Topic, Topics, check_name
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.mutations import stage_job
from sow_server.engine.commit.requests import Job, Limits, prepare
from sow_server.engine.commit.steps import StagedBy
from sow_server.engine.disk.layout import (
    EXPIRE_TIME,
    HEADER,
    LOAD_KEY,
    NEXT_LOAD_KEY,
    RECORD_KEY,
    AttemptCounts,
    attempt_key,
    attempts_range,
    decode_attempt,
    decode_named,
    encode_attempt,
    encode_named,
    mark_key,
    marks_range,
    named_key,
    read_attempt_key,
    read_header,
    read_staged,
    read_staged_key,
    sequences,
    staged_keys,
    staged_range,
    staged_value,
    u32,
)
from sow_server.engine.disk.rocks import META, RECORDS, STAGING, Batch, Rocks
from sow_server.engine.formats.payloads import BadRecord
from sow_server.engine.loads.removal_marks import AppliedLoad
from sow_server.engine.values import lifetimes
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.lifetimes import LifetimeError
from sow_server.engine.values.model import ABSENT, MICROS, Delete, Lifetime, LifetimeKind, Publish, Refusal

log = structlog.get_logger(__name__)

STAGE_ROWS: Final = 250
"""Rows that one commit stages: it is not synced, so that small ones cost little, and a publish waits for one."""
PIECE_ROWS: Final = 1000
"""Rows that one commit applies, so that publishers never wait for long."""
PIECE_BYTES: Final = 4 * 2**20
"""Payload bytes after which a commit takes no further row to apply."""
READ_ROWS: Final = 1000
SCAN_RECORDS: Final = 10_000
"""Stored records that one step of the search for those to delete reads."""
PARTS_MAX: Final = 100_000
ATTEMPTS_MAX: Final = 2 * PARTS_MAX
"""Attempts of a load of which is known what they have staged; that is in memory."""
KEPT_MICROS: Final = 86_400 * MICROS
"""For so long a load that has ended is remembered, for who asks again."""
KEPT_MAX: Final = 1000
LEASE_MICROS: Final = 600 * MICROS
LEASE_MICROS_MAX: Final = 86_400 * MICROS
_KINDS: Final = {kind.value: kind for kind in LifetimeKind}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Bounds of loads."""

    open_max: int = 16
    """Loads that have not ended, at one time."""
    staged_bytes_max: int = 64 * 2**30
    """Keys and payloads that all of them may have staged."""
    disk_free_min: int = 2**30
    """Bytes of the disk that stay free when rows are staged, besides room to apply all that is staged."""


class LoadPhase(enum.IntEnum):
    """What a load is about to do; numbered as in `sow.v1.LoadPhase`."""

    STAGING = 1
    APPLYING = 2
    DELETING = 3
    DONE = 4
    FAILED = 5


class LoadPart(NamedTuple):
    """An attempt that counts, and how many rows it has staged."""

    part: int
    attempt: int
    rows: int


class LoadFigures(NamedTuple):
    """Counts of a load, as in `sow.v1.LoadFigures`."""

    staged: int = 0
    applied: int = 0
    superseded: int = 0
    repeated: int = 0
    deleted: int = 0


class LoadRow(NamedTuple):
    """A load as stored."""

    number: int
    epoch: str
    """The journal's when it was opened: clients of a store that was restored since do not know it."""
    topic_id: int
    topic: str
    open_micros: int
    begin_sequence: int
    begin_version: int
    lease_micros: int
    phase: LoadPhase = LoadPhase.STAGING
    figures: LoadFigures = LoadFigures()
    position: bytes = b""
    """APPLYING: where the next staged row is read. DELETING: the store key at which the search goes on."""
    parts_digest: str = ""
    """Of the parts that were committed: whether a repeated commit means the same."""
    failure: str = ""
    end_micros: int = 0

    @property
    def id(self) -> str:
        """How clients name it."""
        return f"{self.epoch}.{self.number}"

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.phase in _OPEN

    @property
    def working(self) -> bool:
        """Whether it is committed and not at its end."""
        return self.phase in (LoadPhase.APPLYING, LoadPhase.DELETING)


_OPEN: Final = frozenset({LoadPhase.STAGING, LoadPhase.APPLYING, LoadPhase.DELETING})


def encode_load(row: LoadRow) -> bytes:
    """The stored row."""
    return json.dumps({**row._asdict(), "position": row.position.hex()}).encode()


def decode_load(value: bytes) -> LoadRow:
    """The load of a stored row."""
    fields = json.loads(value)
    fields["phase"] = LoadPhase(fields["phase"])
    fields["figures"] = LoadFigures(*fields["figures"])
    fields["position"] = bytes.fromhex(fields["position"])
    return LoadRow(**fields)


class Load:
    """A load while the process runs. The writer's thread changes it, after the commit; any thread reads it."""

    __slots__ = ("attempts", "ending", "lease_end_micros", "named", "row", "staged_bytes", "staged_rows")

    def __init__(self, row: LoadRow, lease_end_micros: int) -> None:
        self.row = row
        self.lease_end_micros = lease_end_micros
        self.attempts: dict[tuple[int, int], AttemptCounts] = {}
        """By part and attempt; of a load that has ended, none."""
        self.named: dict[int, int] | None = None
        """The attempt that counts, by part, once they have been read."""
        self.staged_rows = 0
        self.staged_bytes = 0
        self.ending = False
        """Its end is queued."""

    def count(self, attempt: tuple[int, int], counts: AttemptCounts) -> None:
        """Takes the counts of an attempt over."""
        before = self.attempts.get(attempt, AttemptCounts())
        self.attempts[attempt] = counts
        self.staged_rows += counts.staged - before.staged
        self.staged_bytes += counts.bytes - before.bytes

    @property
    def figures(self) -> LoadFigures:
        """Its figures so far; before the commit all attempts count."""
        row = self.row
        return row.figures._replace(staged=self.staged_rows) if row.phase is LoadPhase.STAGING else row.figures


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one attempt that are staged in one commit: checked, with keys and values as they will be stored."""

    load: Load
    topic: Topic
    part: int
    attempt: int
    first_row: int
    rows: int
    """Refused ones included."""
    positions: Sequence[int]
    """Those of the good ones."""
    keys: Sequence[bytes]
    values: Sequence[bytes]
    refusals: Sequence[Refusal]
    """With their indexes in the whole request."""
    size: int = 0
    stager: int = 0
    """Whose they are; 0: not told."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one commit of a committed load does: rows to apply, or keys to delete."""

    load: Load
    phase: LoadPhase
    position: bytes
    """Where it was read: a chunk that was applied already does not fit any more."""
    following: bytes | None
    """Where to go on; None: this is the last of its phase."""
    keys: list[bytes] = field(default_factory=list)
    lifetimes: list[Lifetime] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    repeated: int = 0

    @property
    def bytes(self) -> int:
        """Of the payloads."""
        return sum(map(len, self.payloads))


Done = Callable[[Load | StoreError], None]
CreateTopic = Callable[[str, Callable[[Topic | StoreError], None]], None]


class Loads:
    """Owns the loads of a store. Changes go through the writer; `read` and `prepare` may take a while, and come from a
    reader's thread."""

    def __init__(
        self,
        rocks: Rocks,
        clock: GuardedClock,
        options: LoadOptions,
        *,
        commits: Commits,
        topics: Topics,
        epoch: str,
        create_topic: CreateTopic | None,
    ) -> None:
        """`create_topic`: creates a topic as the first publish to it would; None where publishes create none."""
        self._commits = commits
        self._topics = topics
        self._epoch = epoch
        self._create_topic = create_topic
        self._rocks = rocks
        self._clock = clock
        self._options = options
        self._by_number: dict[int, Load] = {}
        self.applied_total = 0
        self.deleted_total = 0
        self._open()

    def _open(self) -> None:
        """Staging goes on with leases that begin anew; of a store that was restored it ends."""
        now = self._clock.now_micros()
        batch = Batch()
        for key, value in self._rows(META, LOAD_KEY, LOAD_KEY + b"\xff"):
            row = decode_load(value)
            if row.phase is LoadPhase.STAGING and row.epoch != self._epoch:
                batch.deletes[META].append(key)
                batch.ranges.append((STAGING, u32(row.number), u32(row.number + 1)))
                continue
            load = self._by_number[row.number] = Load(row, now + row.lease_micros)
            if row.open:
                for attempt, counts in self._rows(STAGING, *attempts_range(row.number)):
                    load.count(read_attempt_key(attempt), decode_attempt(counts))
        if batch.ranges:
            self._rocks.write_waiting(batch)
        for topic in self._topics.by_id.values():
            self._watch(topic)

    def _rows(self, family: str, start: bytes, stop: bytes) -> list[tuple[bytes, bytes]]:
        cursor = self._rocks.cursor(family, fill_cache=False)
        try:
            return list(cursor.rows(start, stop))
        finally:
            cursor.close()

    def _watch(self, topic: Topic) -> None:
        """Sets for which loads it is noted what others remove."""
        topic.loads = tuple(
            (row.number, row.begin_sequence)
            for row in (load.row for load in self._by_number.values())
            if row.topic_id == topic.id and row.phase in (LoadPhase.STAGING, LoadPhase.APPLYING)
        )

    # -- looking ----------------------------------------------------------------------------------------------------

    def all(self) -> Sequence[Load]:
        """Those that there are, ended ones included, in the order of opening."""
        return tuple(self._by_number.values())

    def working(self) -> Sequence[Load]:
        """Those that are committed and not at their end."""
        return [load for load in self.all() if load.row.working]

    def open_on(self, topic: Topic) -> bool:
        """Whether a load of a topic has not ended."""
        return any(load.row.open and load.row.topic_id == topic.id for load in self.all())

    def find(self, load_id: str) -> Load:
        """The load that clients call so. Raises StoreError LOAD_NOT_FOUND."""
        _, _, number = load_id.rpartition(".")
        load = self._by_number.get(int(number)) if number.isdecimal() and len(number) < 12 else None
        if load is None or load.row.id != load_id:
            raise StoreError(
                Reason.LOAD_NOT_FOUND,
                f"load_id: there is no load {load_id[:80]!r}: it was aborted, or its lease has ended, or it never was",
                field="load_id",
            )
        return load

    def renew(self, load_id: str) -> Load:
        """Begins the lease anew. Raises StoreError LOAD_NOT_FOUND."""
        load = self.find(load_id)
        self._renew(load, self._clock.now_micros())
        return load

    def _renew(self, load: Load, now_micros: int) -> None:
        load.lease_end_micros = now_micros + load.row.lease_micros

    # -- staging ----------------------------------------------------------------------------------------------------

    def open(self, topic_name: str, lease_micros: int, done: Done) -> None:
        """Opens a load of a topic, which is made where a publish would make it. TOPIC_NOT_FOUND, OVERLOADED."""

        def stage_open(draft: Draft) -> Callable[[], Load]:
            topic = self._topics.find(topic_name)
            if topic.reserved:
                check_name(topic.name)
            if any(load.row.topic_id == topic.id for load in self.working()):
                # It has been published in part: the rows that come later would be changes by others to this one, those
                # that came sooner not, and the topic would end with some of each (LO4).
                raise StoreError(
                    Reason.OVERLOADED,
                    f"topic: a committed load of {topic.name} is being applied; open another one when it has ended",
                    field="topic",
                    retry_after_micros=MICROS,
                )
            count = sum(load.row.open for load in self.all())
            if count >= self._options.open_max:
                raise StoreError(
                    Reason.OVERLOADED,
                    f"topic: {count} loads are open, as many as there may be",
                    field="topic",
                    retry_after_micros=10 * MICROS,
                )
            number = int.from_bytes(self._rocks.get(META, NEXT_LOAD_KEY) or u32(1), "big")
            row = LoadRow(
                number,
                self._epoch,
                topic.id,
                topic.name,
                open_micros=draft.now,
                begin_sequence=draft.next_sequence - 1,
                begin_version=draft.next_version - 1,
                lease_micros=lease_micros,
            )
            draft.batch.puts[META][NEXT_LOAD_KEY] = u32(number + 1)
            draft.batch.puts[META][LOAD_KEY + u32(number)] = encode_load(row)
            load = Load(row, draft.now + lease_micros)

            def opened() -> Load:
                self._by_number[number] = load
                topic.last_use_micros = draft.now
                self._watch(topic)
                return load

            return opened

        def created(result: Topic | StoreError) -> None:
            if isinstance(result, StoreError) and result.reason is not Reason.TOPIC_EXISTS:
                done(result)
                return
            try:
                self._commits.run(StagedBy(stage_open), done)
            except StoreError as error:
                done(error)

        if topic_name not in self._topics.by_name and self._create_topic is not None:
            self._create_topic(topic_name, created)
        else:
            self._commits.run(StagedBy(stage_open), done)

    def prepare(
        self,
        load_id: str,
        part: int,
        attempt: int,
        first_row: int,
        request: Publish,
        limits: Limits,
        *,
        stager: int = 0,
    ) -> list[Piece]:
        """Checks rows as a publish would be, and makes pieces of them; `request` is what they would be published by,
        but for the topic. Not on the event loop. Raises StoreError."""
        load = self.find(load_id)
        self._check_staging(load)
        self._check_disk()
        topic = self._topics.by_id.get(load.row.topic_id)
        if topic is None:
            raise _failed(load, "its topic was deleted")
        job = Job(request, lambda _: None)
        prepare(job, topic, limits)
        now = self._clock.now_micros()
        common, bad_common = request.lifetime, _lifetime_fault(topic, request.lifetime, now)
        faults = {given: _lifetime_fault(topic, given, now) for given in set(request.lifetimes or ())}
        pieces: list[Piece] = []
        for start in range(0, len(job.keys), STAGE_ROWS):
            positions: list[int] = []
            keys: list[bytes] = []
            values: list[bytes] = []
            refusals: list[Refusal] = []
            stop = min(start + STAGE_ROWS, len(job.keys))
            for index in range(start, stop):
                key, given = job.keys[index], ABSENT if request.lifetimes is None else request.lifetimes[index]
                lifetime, fault = (common, bad_common) if given.kind is LifetimeKind.ABSENT else (given, faults[given])
                if isinstance(key, BadRecord):
                    refusals.append(Refusal(index, key.reason, key.message))
                elif fault is not None:
                    refusals.append(Refusal(index, fault.reason, fault.message))
                else:
                    positions.append(first_row + index)
                    keys.append(key)
                    values.append(staged_value(lifetime.kind, lifetime.micros, request.payloads[index]))
            size = sum(map(len, values)) + sum(map(len, keys))
            staged = staged_keys(load.row.number, keys, part, attempt)
            pieces.append(
                Piece(
                    load,
                    topic,
                    part,
                    attempt,
                    first_row + start,
                    stop - start,
                    positions,
                    staged,
                    values,
                    refusals,
                    size,
                    stager,
                )
            )
        return pieces

    def stage(self, piece: Piece, done: Done) -> None:
        """Stages a piece, as durable as a BUFFERED publish; its `positions` count as staged then. LOAD_NOT_FOUND,
        LOAD_COMMITTED, LOAD_FAILED, REQUEST_TOO_LARGE; LOAD_INCOMPLETE where rows before it are missing. Raises
        StoreError at once where it cannot be queued."""
        load, attempt = piece.load, (piece.part, piece.attempt)

        def stage_rows(draft: Draft) -> Callable[[], Load]:
            self._check_staging(load)
            before = load.attempts.get(attempt, AttemptCounts())
            if attempt not in load.attempts and len(load.attempts) >= ATTEMPTS_MAX:
                raise StoreError(
                    Reason.REQUEST_TOO_LARGE,
                    f"attempt: {ATTEMPTS_MAX} attempts have staged rows of this load, as many as there may be",
                    field="attempt",
                )
            if before.seen and before.stager != piece.stager:
                raise StoreError(
                    Reason.LOAD_INCOMPLETE,
                    f"attempt: somebody else has staged {before.seen} rows as attempt {piece.attempt} at part"
                    f" {piece.part}; choose another number for each attempt",
                    field="attempt",
                )
            if piece.first_row > before.seen + 1:
                raise StoreError(
                    Reason.LOAD_INCOMPLETE,
                    f"first_row: attempt {piece.attempt} at part {piece.part} sends row {piece.first_row}, and"
                    f" {before.seen} have come",
                    field="first_row",
                )
            after = before
            new = [position > before.seen for position in piece.positions]
            if piece.first_row + piece.rows - 1 > before.seen:
                keys, values = list(compress(piece.keys, new)), list(compress(piece.values, new))
                draft.batch.puts[STAGING].update(zip(keys, values, strict=True))
                size = sum(map(len, keys)) + sum(map(len, values))
                if self.staged_bytes + size > self._options.staged_bytes_max:
                    raise StoreError(
                        Reason.REQUEST_TOO_LARGE,
                        f"payload: loads have staged {self.staged_bytes} bytes, and no more than"
                        f" {self._options.staged_bytes_max} are allowed; commit or abort one",
                        field="payload",
                    )
                seen, staged_rows = piece.first_row + piece.rows - 1, before.staged + len(keys)
                after = AttemptCounts(seen, staged_rows, before.bytes + size, piece.stager)
                counts_key = attempt_key(load.row.number, piece.part, piece.attempt)
                draft.batch.puts[STAGING][counts_key] = encode_attempt(after)

            def staged() -> Load:
                load.count(attempt, after)
                piece.topic.last_use_micros = draft.now
                self._renew(load, draft.now)
                return load

            return staged

        self._commits.run(StagedBy(stage_rows), done, size=piece.size, sync=False)

    def _check_disk(self) -> None:
        """Raises StoreError DISK_FULL while there is still room: a full disk would end all writing (rule X3)."""
        staged, free = self.staged_bytes, self._rocks.free_bytes()
        if free - staged < self._options.disk_free_min:
            raise StoreError(
                Reason.DISK_FULL,
                f"payload: the disk has {free} bytes left, and applying what loads have staged takes {staged};"
                f" {self._options.disk_free_min} are to stay free, so nothing more is staged",
                field="payload",
            )

    @property
    def staged_bytes(self) -> int:
        """Bytes that all loads have staged."""
        return sum([load.staged_bytes for load in self.all()])

    def _check_staging(self, load: Load) -> None:
        """Raises StoreError for a load that takes no rows."""
        if self._by_number.get(load.row.number) is not load:
            self.find(load.row.id)
        if load.row.phase is LoadPhase.FAILED:
            raise _failed(load, load.row.failure)
        if load.row.phase is not LoadPhase.STAGING:
            raise StoreError(Reason.LOAD_COMMITTED, "load_id: the load is committed", field="load_id")

    # -- ending -----------------------------------------------------------------------------------------------------

    def abort(self, load_id: str, done: Done) -> None:
        """Drops a load and what it has staged; one that is not known is dropped already, LOAD_NOT_FOUND all the same.
        LOAD_COMMITTED."""

        def stage_abort(draft: Draft) -> Callable[[], Load]:
            load = self.find(load_id)
            if load.row.phase is not LoadPhase.FAILED:
                self._check_staging(load)
            return self._stage_forget(draft, load)

        self._commits.run(StagedBy(stage_abort), done)

    def _stage_forget(self, draft: Draft, load: Load) -> Callable[[], Load]:
        row = load.row
        self._stage_unstaged(draft, load)
        draft.batch.deletes[META].append(LOAD_KEY + u32(row.number))

        def forgotten() -> Load:
            self._by_number.pop(row.number, None)
            self._watch_again(row, ended=row.open)
            return load

        return forgotten

    def _stage_unstaged(self, draft: Draft, load: Load) -> None:
        number = load.row.number
        draft.batch.ranges.append((STAGING, u32(number), u32(number + 1)))
        puts = draft.batch.puts[STAGING]  # of a batch they come after its ranges
        for key in [key for key in puts if key.startswith(u32(number))]:
            del puts[key]
        if load.staged_rows:
            draft.removals[STAGING, number] = load.staged_rows

    def _watch_again(self, row: LoadRow, *, ended: bool) -> None:
        if (topic := self._topics.by_id.get(row.topic_id)) is not None:
            self._watch(topic)
            if ended:  # it has used the topic until now (rule T1)
                topic.last_use_micros = self._clock.now_micros()
                self._topics.lost(topic)

    def upkeep(self) -> None:
        """Aborts loads whose lease has ended, and forgets those that ended long ago. Called every second or so."""
        now = self._clock.now_micros()
        ended = [load for load in self.all() if load.row.end_micros]
        old = ended[: max(0, len(ended) - KEPT_MAX)]
        for load in self.all():
            row = load.row
            if row.phase is LoadPhase.STAGING and load.lease_end_micros <= now:
                self._end(load, self._lapse(load))
            elif row.end_micros and (row.end_micros + KEPT_MICROS <= now or load in old):
                self._end(load, self._forget(load))

    def _end(self, load: Load, run: Callable[[Draft], Callable[[], object]]) -> None:
        """Queued once, however long the writer takes to come to it."""

        def done(_: object) -> None:
            load.ending = False

        if not load.ending:
            load.ending = True
            self._commits.run_quietly(StagedBy(run), done)

    def _lapse(self, load: Load) -> Callable[[Draft], Callable[[], object]]:
        def stage_lapse(draft: Draft) -> Callable[[], object]:
            # It may have been renewed, or committed, since.
            if (
                self._by_number.get(load.row.number) is not load
                or load.row.phase is not LoadPhase.STAGING
                or load.lease_end_micros > draft.now
            ):
                return lambda: None
            log.warning("load_lease_ended", load=load.row.id, topic=load.row.topic, staged=load.staged_rows)
            return self._stage_forget(draft, load)

        return stage_lapse

    def _forget(self, load: Load) -> Callable[[Draft], Callable[[], object]]:
        return lambda draft: self._stage_forget(draft, load)

    def stage_fail_all(self, draft: Draft, topic: Topic, why: str) -> None:
        """Stages the end of all loads of a topic that can not be loaded any more as they have begun."""
        for load in self.all():
            if load.row.open and load.row.topic_id == topic.id:
                draft.on_commit.append(self._stage_failed(draft, load, why))

    def fail(self, load: Load, why: str, done: Done) -> None:
        """A committed load cannot go on: what it has not done stays undone."""

        def stage_fail(draft: Draft) -> Callable[[], Load]:
            if not load.row.working:
                return lambda: load
            return self._stage_failed(draft, load, why)

        self._commits.run(StagedBy(stage_fail), done)

    def _stage_failed(self, draft: Draft, load: Load, why: str) -> Callable[[], Load]:
        self._stage_unstaged(draft, load)
        figures = load.figures
        log.error("load_failed", load=load.row.id, topic=load.row.topic, cause=why)
        return self._stage_row(
            draft,
            load,
            load.row._replace(phase=LoadPhase.FAILED, failure=why, figures=figures, position=b"", end_micros=draft.now),
        )

    def _stage_row(self, draft: Draft, load: Load, row: LoadRow) -> Callable[[], Load]:
        """Stages a load's new row; what it returns takes it over, for `Draft.after`."""
        draft.batch.puts[META][LOAD_KEY + u32(row.number)] = encode_load(row)

        def taken_over() -> Load:
            watch, was_open = row.phase is not load.row.phase, load.row.open
            load.row = row
            if row.end_micros:
                load.attempts, load.named = {}, None
                load.staged_rows = load.staged_bytes = 0
            if watch:
                self._watch_again(row, ended=was_open and not row.open)
            return load

        return taken_over

    # -- committing -------------------------------------------------------------------------------------------------

    def commit(self, load_id: str, parts: Sequence[LoadPart], done: Done) -> None:
        """Commits a load; with the same parts again it answers the load as it is. LOAD_NOT_FOUND, LOAD_INCOMPLETE,
        LOAD_FAILED; LOAD_COMMITTED where other parts were committed."""
        _check_parts(parts)
        named = sorted((part.part, part.attempt) for part in parts)
        digest = hashlib.sha256(encode_named(named)).hexdigest()

        def stage_commit(draft: Draft) -> Callable[[], Load]:
            load = self.find(load_id)
            row = load.row
            if row.phase is LoadPhase.FAILED:
                raise _failed(load, row.failure)
            if row.phase is not LoadPhase.STAGING:
                if row.parts_digest != digest:
                    raise StoreError(
                        Reason.LOAD_COMMITTED, "parts: the load is committed with other parts", field="parts"
                    )
                return lambda: load
            staged = 0
            for index, part in enumerate(parts):
                counts = load.attempts.get((part.part, part.attempt), AttemptCounts())
                staged += counts.staged
                if counts.staged != part.rows:
                    raise StoreError(
                        Reason.LOAD_INCOMPLETE,
                        f"parts[{index}].rows: attempt {part.attempt} at part {part.part} has staged"
                        f" {counts.staged} rows, not {part.rows}",
                        field=f"parts[{index}].rows",
                    )
            draft.batch.puts[STAGING][named_key(row.number)] = encode_named(named)
            return self._stage_row(
                draft,
                load,
                row._replace(
                    phase=LoadPhase.APPLYING,
                    figures=LoadFigures(staged=staged),
                    position=staged_range(row.number)[0],
                    parts_digest=digest,
                ),
            )

        self._commits.run(StagedBy(stage_commit), done)

    # -- applying ---------------------------------------------------------------------------------------------------

    def read(self, load: Load) -> Chunk:
        """What the next commit of a committed load is to do. Not on the event loop, and for one load by one thread at a
        time. Raises RocksError."""
        row = load.row
        return self._read_rows(load, row) if row.phase is LoadPhase.APPLYING else self._read_others(load, row)

    def _read_rows(self, load: Load, row: LoadRow) -> Chunk:
        """All rows of a key lie together: of those that count the one of the highest part comes last."""
        named = load.named
        if named is None:
            named = load.named = decode_named(self._rocks.get(STAGING, named_key(row.number)) or b"")
        keys: list[bytes] = []
        values: list[bytes] = []
        found: dict[bytes, bytes] = {}
        repeated = size = read = 0
        start: bytes | None = row.position
        stop = staged_range(row.number)[1]
        cursor = self._rocks.cursor(STAGING, fill_cache=False)
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
                            return _chunk(load, row, staged, found, repeated)  # the others have their turn
                        continue
                    if key in found:
                        repeated += 1
                        size -= len(found[key])
                    elif len(found) == PIECE_ROWS or size >= PIECE_BYTES:
                        # It begins with the first row of this key that counts; what lies before it does not.
                        return _chunk(load, row, staged, found, repeated)
                    found[key] = value
                    size += len(value)
        finally:
            cursor.close()
        return _chunk(load, row, None, found, repeated)

    def _read_others(self, load: Load, row: LoadRow) -> Chunk:
        """Records that were there when the load was opened, and are as they were."""
        keys: list[bytes] = []
        chosen: list[bytes] = []
        stop = u32(row.topic_id + 1)
        start: bytes | None = row.position
        read = size = 0
        cursor = self._rocks.cursor(RECORDS, fill_cache=False)
        try:
            while start is not None and read < SCAN_RECORDS and len(chosen) < PIECE_ROWS and size < PIECE_BYTES:
                values: list[bytes] = []
                keys.clear()
                start = cursor.fill(start, stop, PIECE_ROWS - len(chosen), keys, values)
                read += len(keys)
                found = sequences([value[HEADER] for value in values])
                mine = [sequence <= row.begin_sequence for sequence in found]
                chosen += [key[RECORD_KEY] for key in compress(keys, mine)]
                size += sum(map(len, compress(values, mine)))  # the commit reads and journals them whole
        finally:
            cursor.close()
        return Chunk(load, row.phase, row.position, start, chosen)

    def apply(self, chunk: Chunk, done: Done) -> None:
        """Applies a chunk, in one commit with how far the load is then. Raises StoreError at once where it cannot be
        queued; `done` hears LOAD_FAILED where a row is refused."""

        def stage_chunk(draft: Draft) -> Callable[[], Load]:
            load, row = chunk.load, chunk.load.row
            if row.phase is not chunk.phase or row.position != chunk.position:
                return lambda: load  # it is done, or the load has failed
            topic = self._topics.by_id[row.topic_id]  # with the topic its loads fail
            draft.part(AppliedLoad).number = row.number
            if chunk.phase is LoadPhase.APPLYING:
                return self._stage_applied(draft, topic, chunk)
            return self._stage_deleted(draft, topic, chunk)

        self._commits.run(StagedBy(stage_chunk), done)

    def _stage_applied(self, draft: Draft, topic: Topic, chunk: Chunk) -> Callable[[], Load]:
        load, row = chunk.load, chunk.load.row
        applied = 0
        taken = self._taken(draft, topic, row, chunk.keys)
        if any(taken):
            given = list(compress(chunk.lifetimes, taken))
            request = Publish(
                topic.name,
                list(compress(chunk.payloads, taken)),
                lifetimes=given if any(lifetime.kind is not LifetimeKind.ABSENT for lifetime in given) else None,
            )
            job = _job(request, topic, list(compress(chunk.keys, taken)))
            if topic.wants_previous:
                draft.fetch_values(job.store_keys)
            part = stage_job(draft, job, len(job.keys), self._commits.publishers)
            if part.refusals:
                refusal = part.refusals[0]
                key = job.keys[refusal.index]
                shown = key.decode()[:80] if isinstance(key, bytes) else ""
                raise _failed(load, f"the row {shown!r} is refused ({refusal.reason.name}: {refusal.message})")
            applied = part.applied
        figures = row.figures
        figures = figures._replace(
            applied=figures.applied + applied,
            superseded=figures.superseded + len(chunk.keys) - applied,
            repeated=figures.repeated + chunk.repeated,
        )
        if chunk.following is not None:
            row = row._replace(figures=figures, position=chunk.following)
        else:
            # An attempt that has staged a key twice has one row of it.
            figures = figures._replace(repeated=figures.staged - figures.applied - figures.superseded)
            row = row._replace(figures=figures, position=topic.prefix, phase=LoadPhase.DELETING)
        taken_over = self._stage_row(draft, load, row)

        def counted() -> Load:
            self.applied_total += applied
            topic.last_use_micros = draft.now
            return taken_over()

        return counted

    def _taken(self, draft: Draft, topic: Topic, row: LoadRow, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys others have left alone since the load was opened (LO4)."""
        begin = row.begin_sequence
        store_keys = [topic.prefix + key for key in keys]
        draft.fetch_heads(store_keys)
        if topic.acts:
            # First, as a dead letter may come to one of these keys (letters [1]).
            for key, store_key in zip(keys, store_keys, strict=True):
                head = draft.heads[store_key]
                if head is not None and head[EXPIRE_TIME] <= draft.now_bytes and read_header(head).sequence <= begin:
                    draft.live_head(topic, key, store_key)
        taken = [sequence <= begin for sequence in sequences([draft.heads[key] for key in store_keys])]
        start, stop = marks_range(row.number)
        cursor = self._rocks.cursor(STAGING)
        try:
            marked = next(cursor.keys(start, stop, limit=1), None) is not None
        finally:
            cursor.close()
        if marked:
            marks = self._rocks.multi_get(STAGING, [mark_key(row.number, key) for key in keys])
            taken = [free and mark is None for free, mark in zip(taken, marks, strict=True)]
        return taken

    def _stage_deleted(self, draft: Draft, topic: Topic, chunk: Chunk) -> Callable[[], Load]:
        load, row = chunk.load, chunk.load.row
        begin, deleted = row.begin_sequence, 0
        if chunk.keys:
            request = Delete(topic.name, matches=lambda _, value: read_header(value).sequence <= begin)
            job = _job(request, topic, chunk.keys)
            deleted = stage_job(draft, job, len(job.keys), self._commits.publishers).applied
        figures = row.figures._replace(deleted=row.figures.deleted + deleted)
        if chunk.following is not None:
            row = row._replace(figures=figures, position=chunk.following)
        else:
            self._stage_unstaged(draft, load)
            row = row._replace(figures=figures, position=b"", phase=LoadPhase.DONE, end_micros=draft.now)
        taken_over = self._stage_row(draft, load, row)

        def counted() -> Load:
            self.deleted_total += deleted
            return taken_over()

        return counted


def _chunk(load: Load, row: LoadRow, following: bytes | None, found: dict[bytes, bytes], repeated: int) -> Chunk:
    rows = [read_staged(value) for value in found.values()]
    return Chunk(
        load,
        row.phase,
        row.position,
        following,
        list(found),
        [Lifetime(_KINDS[kind], micros) for kind, micros, _ in rows],
        [payload for _, _, payload in rows],
        repeated,
    )


def _job(request: Publish | Delete, topic: Topic, keys: list[bytes]) -> Job:
    """A request whose keys are known."""
    job = Job(request, lambda _: None)
    job.topic = topic
    job.keys = [*keys]
    job.store_keys = [topic.prefix + key for key in keys]
    return job


def _lifetime_fault(topic: Topic, lifetime: Lifetime, now_micros: int) -> LifetimeError | None:
    try:
        lifetimes.expire_time(topic.settings, lifetime, now_micros)
    except LifetimeError as error:
        return error
    return None


def _check_parts(parts: Iterable[LoadPart]) -> None:
    """Raises StoreError INVALID_ARGUMENT for a part that is named twice, or too many of them."""
    seen: set[int] = set()
    for index, part in enumerate(parts):
        if part.part in seen:
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"parts[{index}].part: {part.part} is named twice",
                field=f"parts[{index}].part",
            )
        seen.add(part.part)
    if len(seen) > PARTS_MAX:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE, f"parts: {len(seen)} are more than the limit of {PARTS_MAX}", field="parts"
        )


def _failed(load: Load, why: str) -> StoreError:
    return StoreError(Reason.LOAD_FAILED, f"load_id: the load of {load.row.topic} cannot go on: {why}", field="load_id")
