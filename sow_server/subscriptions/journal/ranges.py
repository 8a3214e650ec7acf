"""Bounded ranges of a topic's changes: planning a range, splitting it, reading it.

For readers that take one range after another, in parallel, and repeat a range after a failure. A range holds the
changes after one position, up to another. It does not follow new changes, and does not keep its changes from being
discarded.

    [1]  A range ends with a commit, and so does each of its parts, unless the caller gives the end.
    [2]  A range holds only changes that are on disk (rule S7).
    [3]  The changes of a range depend on the journal alone, not on the time. With a filter they also depend on how far
         back previous records are known; `history` fixes that (rule J1).
    [4]  A range that the journal no longer has completely is refused, at its beginning and while it is read.
    [5]  Pieces that follow each other have each change once. A piece ends inside an atomic request only if the request
         alone is larger than a piece may be.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, compress
from operator import itemgetter
from typing import Any, Final, NamedTuple

from sow.shares import share_of_key
from sow_server.engine.catalog.topics import Topic, topic_deleted
from sow_server.engine.commit.soundness import all_told
from sow_server.engine.doors import Reads
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.journal.reading import JournalCounts, JournalCut, Ledger, StoredChunk
from sow_server.engine.reading import Cuts
from sow_server.engine.stored import BURY, DELETE, EXPIRE, PUT, TOUCH, Changes, Entry, HeaderColumns
from sow_server.engine.values.bookmarks import Instance
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.changes import Find, changes_of, shown
from sow_server.subscriptions.frames import ChangeOp, ChangeReason, Row
from sow_server.subscriptions.journal.replay import READ_CHANGES
from sow_server.subscriptions.live import focus
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Start, StartKind, ViewFilter, Wants

PIECE_BYTES: Final = 4 * 2**20
ROW_BYTES: Final = 64
"""Bytes of a row on the wire, at most, besides its key and its payload."""
_OPS: Final = bytes.maketrans(
    bytes([PUT, TOUCH, DELETE, EXPIRE]), bytes([ChangeOp.PUT, ChangeOp.PUT, ChangeOp.DELETE, ChangeOp.EXPIRE])
)
_REASONS: Final = bytes.maketrans(
    bytes([PUT, TOUCH, DELETE, EXPIRE]),
    bytes([ChangeReason.NONE, ChangeReason.TOUCHED, ChangeReason.NONE, ChangeReason.NONE]),
)


# --- planning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangeLimits:
    """Limits of a range; 0: no limit. One commit is always taken whole. `parts`: about how many parts to make.

    `by_sequence`: count sequences, which are those of all topics, in the place of this topic's entries, and no bytes. A
    caller that may see only some rows must not learn where the changes of others lie (rule A4).
    """

    entries: int = 0
    bytes: int = 0
    parts: int = 1
    by_sequence: bool = False


@dataclass(frozen=True, slots=True)
class RangePlan:
    """The positions where a range begins and ends; `entries` and `bytes` count before any filter."""

    start: int
    end: int
    head: int
    earliest: int
    entries: int
    bytes: int
    entries_left: int
    part_ends: tuple[int, ...]
    left_since_micros: int | None = None
    """Commit time of the first entry between the end and the head; None: there is none, or it is not told."""


def plan_range(
    cuts: Cuts,
    instance: Instance,
    topic: Topic,
    start: Start,
    position: int,
    end: int | None,
    limits: RangeLimits,
) -> RangePlan:
    """Plans a range of changes that are on disk, by seeks and bisection. From any thread, but not the event loop's.

    `position`: the position of `start.bookmark`, if the range starts at one; NOW is the head. `end`: a position that is
    on disk; None: the head. A range without entries also ends at the limit, so that the floor does not overtake the
    position of an idle topic. Raises StoreError: NO_JOURNAL, TOPIC_DELETED, BOOKMARK_TOO_OLD, INVALID_ARGUMENT.
    """
    ledger = cuts.ledger(topic)
    try:
        if not topic.settings.journal:
            raise _no_journal(topic)
        first = _start(instance, topic, ledger, start, position)
        head = max(ledger.head, first)
        last = head if end is None else min(end, head)
        if last < first:
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"end_bookmark: names the sequence {last}, and the range begins after {first}",
                field="end_bookmark",
            )
        if limits.by_sequence:
            last = _limited_by_sequence(ledger, first, last, limits.entries)
            ends = tuple(_parts_by_sequence(ledger, first, last, limits.parts))
            return RangePlan(first, last, head, ledger.earliest, last - first, 0, head - last, ends)
        base = ledger.counts(first)
        last = _limited(ledger, first, last, base, limits)
        held, all_ = ledger.counts(last), ledger.counts(head)
        left = ledger.after(last) if all_.entries > held.entries else None
        return RangePlan(
            first,
            last,
            head,
            ledger.earliest,
            held.entries - base.entries,
            held.bytes - base.bytes,
            all_.entries - held.entries,
            tuple(_parts(ledger, first, last, base, held.entries - base.entries, limits.parts)),
            None if left is None else left.commit_time_micros,
        )
    finally:
        ledger.close()


def _start(instance: Instance, topic: Topic, ledger: Ledger, start: Start, position: int) -> int:
    match start.kind:
        case StartKind.BOOKMARK:
            if position < ledger.earliest:
                raise _too_old(instance, topic, position, ledger.earliest, "start_bookmark")
            return position
        case StartKind.NOW:
            return ledger.head
        case StartKind.TIME:
            before = ledger.cut.last_before(start.time_micros)
            return max(ledger.earliest, min(ledger.head, before or 0))
        case StartKind.EARLIEST:
            return ledger.earliest


def _limited(ledger: Ledger, start: int, end: int, base: JournalCounts, limits: RangeLimits) -> int:
    """The end of the range, if the limits end it sooner."""

    def exceeds(chunk: StoredChunk) -> bool:
        entries = chunk.entries_before + chunk.entries - base.entries
        size = chunk.bytes_before + chunk.size - base.bytes
        return 0 < limits.entries < entries or 0 < limits.bytes < size

    first = ledger.after(start)
    if first is None or first.first_sequence > end:
        return end
    over = ledger.first(first.first_sequence, exceeds)
    if over is None or over.first_sequence > end:
        return end
    commit = ledger.cut.commit_at(over.first_sequence)
    before = commit.first_sequence - 1
    if before > start and ledger.counts(before).entries > base.entries:
        return min(end, before)
    return min(end, commit.last_sequence)


def _limited_by_sequence(ledger: Ledger, start: int, end: int, sequences: int) -> int:
    """The end of the range: at most so many sequences behind its start, and at least one commit."""
    if not 0 < sequences < end - start:
        return end
    limit = start + sequences
    commit = ledger.cut.commit_before(limit)
    if commit is None or commit.last_sequence <= limit:
        return limit  # the sequences in between are of no journal
    before = commit.first_sequence - 1
    return before if before > start else min(end, commit.last_sequence)


def _parts_by_sequence(ledger: Ledger, start: int, end: int, parts: int) -> Iterator[int]:
    """The ends of parts with about equal numbers of sequences, each a place where the range could end."""
    reached = start
    for part in range(1, min(parts, end - start)):
        goal = start + (end - start) * part // parts
        if goal > reached:
            position = _limited_by_sequence(ledger, reached, end, goal - reached)
            if position >= end:
                break
            yield position
            reached = position
    if end > start:
        yield end


def _parts(ledger: Ledger, start: int, end: int, base: JournalCounts, entries: int, parts: int) -> Iterator[int]:
    """The ends of parts with about equal numbers of entries; no part is empty."""
    if entries == 0:
        return
    first = ledger.after(start)
    assert first is not None, "there are entries"
    at, reached = first.first_sequence, 0
    for part in range(1, min(parts, entries)):
        goal = entries * part // parts
        if goal <= reached:
            continue
        chunk = ledger.first(at, lambda chunk, upto=base.entries + goal: chunk.entries_before + chunk.entries >= upto)  # type: ignore[misc]  # a lambda's default argument
        if chunk is None:
            break
        position = ledger.cut.commit_at(chunk.first_sequence).last_sequence
        reached = ledger.counts(position).entries - base.entries
        if position >= end or reached >= entries:
            break
        yield position
        at = position + 1
    yield end


# --- reading ---------------------------------------------------------------------------------------------------------


class ChangeColumns(NamedTuple):
    """Changes in columns of equal length, for change readers. For a removal, the record is the removed one."""

    keys: list[bytes]
    payloads: list[bytes]
    headers: HeaderColumns
    """The sequences of the changes."""
    ops: bytearray
    reasons: bytearray


def _no_columns() -> ChangeColumns:
    headers = HeaderColumns(array("q"), array("q"), array("q"), array("q"), array("H"))
    return ChangeColumns([], [], headers, bytearray(), bytearray())


@dataclass(frozen=True, slots=True)
class RangePiece:
    """The changes that one step found: all after the last step, up to `position`. `looked_at`: entries read in the
    journal."""

    columns: ChangeColumns
    position: int
    looked_at: int


@dataclass(frozen=True, slots=True)
class KeyShare:
    """One of several disjoint sets of keys: the readers of all shares get all changes, those of each key in order."""

    number: int
    of: int

    def has(self, key: bytes) -> bool:
        """True if a key belongs to the share."""
        return share_of_key(key, self.of) == self.number


@dataclass(frozen=True, slots=True)
class KeySet:
    """Some keys."""

    keys: frozenset[bytes]

    def has(self, key: bytes) -> bool:
        """True if a key is among them."""
        return key in self.keys


@dataclass(frozen=True, slots=True)
class RangeBounds:
    """The changes after `start`, up to `end`, which is on disk."""

    start: int
    end: int
    history: int | None = None
    """Previous records at or before this position are not looked up; None: back to the start of the journal. Only a
    filter needs them."""


class RangeReader:
    """Reads one range, piece by piece, each from a separate cut. From any thread, one at a time."""

    def __init__(
        self,
        reads: Reads,
        topic: Topic,
        record_filter: ViewFilter | None,
        bounds: RangeBounds,
        *,
        batch_size: int = 10_000,
        share: KeyShare | KeySet | None = None,
        projection: Projection | None = None,
        elsewhere: bool = False,
    ) -> None:
        """`elsewhere`: the reader has come from another instance, which may have told it of records that are not
        here."""
        self._share = share
        self._elsewhere = elsewhere
        self._cuts = reads.cuts
        self._instance = reads.instance
        self._topic = topic
        self._matcher = VersionMatcher(record_filter, elsewhere=elsewhere)
        self._wants = Wants(changes=True, projection=projection)
        self._end = bounds.end
        self._history = bounds.history
        self._batch_size = batch_size
        self.position = bounds.start
        """Everything up to here has been read."""

    @property
    def done(self) -> bool:
        """True once everything has been read."""
        return self.position >= self._end

    def read(self) -> RangePiece:
        """The next piece, perhaps empty. Raises StoreError: BOOKMARK_TOO_OLD, TOPIC_DELETED, NO_JOURNAL."""
        cut = self._cuts.journal()
        try:
            self._check(cut)
            return self._read(cut)
        finally:
            cut.close()

    def _check(self, cut: JournalCut) -> None:
        """Raises StoreError if the journal no longer has the whole range [4]."""
        topic = self._topic
        floor = cut.floors.get(topic.id)
        if floor is None:
            raise topic_deleted(topic)
        if not topic.settings.journal:
            raise _no_journal(topic)
        earliest = max(floor, topic.statistics.created_sequence)
        if self.position < earliest:
            raise _too_old(self._instance, topic, self.position, earliest, "start_bookmark")
        if self._history is not None and self._history < earliest and self._matcher.constant is None:
            raise _too_old(self._instance, topic, self._history, earliest, "history_bookmark")

    def _read(self, cut: JournalCut) -> RangePiece:
        history = self._history

        def find(sequence: int) -> Entry | None:
            return None if history is not None and sequence <= history else cut.entry(self._topic, sequence)

        filtered = self._matcher.constant is not True
        found = _RowCollector(
            self._topic,
            self._wants,
            self._matcher if filtered else None,
            find,
            self._batch_size,
            self._share,
            self._elsewhere,
        )
        looked_max = READ_CHANGES if filtered else self._batch_size
        for changes in cut.changes(self._topic, self.position, self._end):
            start = max(0, self.position + 1 - changes.first_sequence)
            stop = min(len(changes.keys), self._end + 1 - changes.first_sequence)
            if changes.atomic and not found.has_room_for(changes, start, stop):
                break
            taken = found.add(changes, start, stop)
            self.position = changes.first_sequence + taken - 1
            if taken < stop or found.full or found.looked_at >= looked_max:
                break
        else:
            self.position = self._end
        return RangePiece(found.columns, self.position, found.looked_at)


@dataclass(slots=True)
class _RowCollector:
    """Collects the rows of a piece. `matcher`: None if everything matches."""

    topic: Topic
    wants: Wants
    matcher: VersionMatcher | None
    find: Find
    rows_max: int
    share: KeyShare | KeySet | None = None
    elsewhere: bool = False
    columns: ChangeColumns = field(default_factory=_no_columns)
    size: int = 0
    looked_at: int = 0

    @property
    def full(self) -> bool:
        return len(self.columns.keys) >= self.rows_max or self.size >= PIECE_BYTES

    def has_room_for(self, changes: Changes, start: int, stop: int) -> bool:
        """True if an atomic request may be added. An empty piece takes the part that fits [5]."""
        count = len(self.columns.keys)
        if count == 0:
            return True
        size = sum([_size(changes, index) for index in range(start, stop)])
        return count + stop - start <= self.rows_max and self.size + size <= PIECE_BYTES

    def add(self, changes: Changes, start: int, stop: int) -> int:
        """Adds as many changes as there is room for, at least one to an empty piece. Returns where it stopped."""
        stop = min(stop, start + self.rows_max - len(self.columns.keys))
        stop = self._within_size(changes, start, stop)
        self.looked_at += stop - start
        if stop == start:
            return stop
        one_by_one = self.matcher is not None or self.wants.projection is not None
        if one_by_one or BURY in changes.change or not all_told(changes.keys[start:stop]):
            matcher = VersionMatcher(None, elsewhere=self.elsewhere) if self.matcher is None else self.matcher
            for change in changes_of(self.topic, changes, start=start, stop=stop, find=self.find):
                if self.share is not None and not self.share.has(change.key):
                    continue
                row = focus.row_of(change, self.wants, matcher, 0)
                if row is not None:
                    self._add_row(row)
            return stop
        if self.share is not None:
            self._add_shared(changes, start, stop, self.share)
            return stop
        versions, origins = shown(changes, start, stop)
        columns, kinds = self.columns, changes.change[start:stop]
        columns.keys.extend(changes.keys[start:stop])
        columns.payloads.extend(changes.payloads[start:stop])
        columns.headers.version.extend(versions)
        columns.headers.publish_time.extend(changes.publish_time_micros.tolist()[start:stop])
        columns.headers.expire_time.extend(changes.expire_time_micros.tolist()[start:stop])
        columns.headers.origin.extend(origins)
        columns.headers.sequence.extend(range(changes.first_sequence + start, changes.first_sequence + stop))
        columns.ops.extend(kinds.translate(_OPS))
        columns.reasons.extend(kinds.translate(_REASONS))
        self.size += sum([_size(changes, index) for index in range(start, stop)])
        return stop

    def _add_shared(self, changes: Changes, start: int, stop: int, share: KeyShare | KeySet) -> None:
        chosen = list(compress(range(start, stop), map(share.has, changes.keys[start:stop])))
        if not chosen:
            return
        pick: itemgetter[Any] = itemgetter(*chosen, chosen[0])  # one more, so that it is always a tuple
        versions, origins = shown(changes, 0, len(changes.keys))
        headers, columns = self.columns.headers, self.columns
        columns.keys.extend(pick(changes.keys)[:-1])
        columns.payloads.extend(payloads := pick(changes.payloads)[:-1])
        headers.version.extend(pick(versions)[:-1])
        headers.publish_time.extend(pick(changes.publish_time_micros.tolist())[:-1])
        headers.expire_time.extend(pick(changes.expire_time_micros.tolist())[:-1])
        headers.origin.extend(pick(origins)[:-1])
        headers.sequence.extend([changes.first_sequence + index for index in chosen])
        kinds = bytes(pick(changes.change)[:-1])
        columns.ops.extend(kinds.translate(_OPS))
        columns.reasons.extend(kinds.translate(_REASONS))
        self.size += ROW_BYTES * len(chosen) + sum(map(len, payloads))

    def _within_size(self, changes: Changes, start: int, stop: int) -> int:
        """The index up to which the bytes allow changes, if all of them become rows."""
        sizes = accumulate([_size(changes, index) for index in range(start, stop)])
        for index, size in enumerate(sizes):
            if self.size + size > PIECE_BYTES and (index or self.columns.keys):
                return start + index
        return stop

    def _add_row(self, row: Row) -> None:
        columns = self.columns
        columns.keys.append(row.key)
        columns.payloads.append(row.payload)
        columns.headers.version.append(row.version)
        columns.headers.publish_time.append(row.publish_time)
        columns.headers.expire_time.append(row.expire_time)
        columns.headers.origin.append(row.origin)
        columns.headers.sequence.append(row.sequence)
        columns.ops.append(row.op)
        columns.reasons.append(row.reason)
        self.size += ROW_BYTES + len(row.key) + len(row.payload)


def _size(changes: Changes, index: int) -> int:
    return ROW_BYTES + len(changes.keys[index]) + len(changes.payloads[index])


def _no_journal(topic: Topic) -> StoreError:
    return StoreError(
        Reason.NO_JOURNAL, f"topic: {topic.name} has no journal, so its changes cannot be read", field="topic"
    )


def _too_old(instance: Instance, topic: Topic, position: int, earliest: int, name: str) -> StoreError:
    return StoreError(
        Reason.BOOKMARK_TOO_OLD,
        f"{name}: names the sequence {position}, and the journal of {topic.name} begins at {earliest + 1}; "
        "take a new snapshot",
        field=name,
        details={"earliest_sequence": str(earliest + 1), "earliest_bookmark": instance.bookmark(earliest)},
    )
