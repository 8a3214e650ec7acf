"""One export: a cut of one topic or several, split into parts that may be read in parallel and repeatedly (rule Q6).

[1]  All records come from one cut. Its one `now` and the filter decide about each record. So the parts together
     have each record that was live and matched, once, whatever happens meanwhile.
[2]  Reading changes nothing: each piece of work begins with a seek of the export's cursor, so any number of
     readings of any parts can take turns. The caller runs one piece at a time.
[3]  Where the owner may see only some rows, neither the parts nor the positions in them depend on other rows: there
     are as many parts as it asked for, some perhaps empty, split at keys that it may see (rule A4).
[4]  Closing waits for the piece that is under way: a cursor must not be closed while a reader uses it.
"""

from __future__ import annotations

import bisect
import math
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Final, NamedTuple
from zlib import crc32

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.formats.topic_formats import key_paths
from sow_server.engine.reading import Cut, CutSource
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.query.absence import AbsentFields
from sow_server.query.export_splits import KeySamples, SplitCache
from sow_server.query.filtering import RecordFilter
from sow_server.query.planner import ABOVE_ALL, EVERYTHING, NOTHING, Access, IndexBound, Plan, Range, plan
from sow_server.query.race import Race
from sow_server.query.sieve import sieve
from sow_server.query.sources import Points, Ranges, Rows, merged

PARTS_MAX: Final = 10_000
PARTS_APT_MAX: Final = 64
PARTS_APT_OF_ROWS: Final = 8
"""Parts of an export of some rows, if the client leaves their number to the server ([3])."""
PART_RECORDS_APT: Final = 100_000
"""Stored records of a part, if the client leaves the number of parts to the server."""
PART_RECORDS_MIN: Final = 100
"""Parts are never made smaller than this."""
SAMPLES_PER_PART: Final = 16
"""Samples per part: more of them make the parts more even."""
SAMPLES_MIN: Final = 2048
"""Samples of a topic, at least, so that they serve another number of parts, too."""
SAMPLE_CHUNK: Final = 20_000
"""Stored records that a piece of sampling passes: some ten milliseconds."""
LOOK_UPS: Final = 500
"""Samples that a piece of work looks up, to see whether the owner may see them [3]."""
PIECE_BYTES: Final = 400 * 2**10
"""Size of a piece, approximately. From 512 KiB on each copy would be memory fresh from the system, and fall out of the
processor's cache. Pieces of 2 MiB give half as many records a second."""
PIECE_RECORDS_FIRST: Final = 1000
PIECE_RECORDS_MAX: Final = 5000
PIECE_SECONDS: Final = 0.05  # a piece that takes longer, as its filter is slow, is followed by a smaller one


@dataclass(frozen=True, slots=True)
class ExportPart:
    """The records of one part: by ranges of keys, by known keys, or by an index."""

    records: int
    """Stored records to read for it, approximately."""
    ranges: tuple[Range, ...] = ()
    keys: Sequence[bytes] = ()
    """In order, without duplicates."""
    bound: IndexBound | None = None

    def rows(self, cut: Cut, begin: bytes) -> Rows:
        """The part of its records from the key `begin` on (included)."""
        if self.ranges:
            return Ranges(cut, self.ranges, begin)
        if self.bound is not None:
            return merged(cut, self.bound, begin)
        first = bisect.bisect_left(self.keys, begin)
        return Points(cut, (self.keys[index] for index in range(first, len(self.keys))))


class ExportPiece(NamedTuple):
    """The records that a piece of work found, in key order, and the position after them."""

    keys: list[bytes]
    """Empty if keys are not wanted."""
    values: list[bytes]
    position: bytes


class Chosen(NamedTuple):
    """The records of a topic that an export is to have, and about how many parts."""

    topic: Topic
    given: RecordFilter | None = None
    """None: all records."""
    parts: int = 0
    """0: the server decides."""
    restriction: Restriction = UNRESTRICTED
    """The part of the topic that the owner may see, whose rows `given` has already."""


class Export:
    """One cut, and its parts, topic by topic. Readings and `prepare` run on reader threads, one piece at a time."""

    def __init__(self, cuts: CutSource, chosen: Sequence[Chosen], splits: SplitCache, *, owner: str = "") -> None:
        """`owner`: the identity that opens it. Call `prepare` until it returns True before reading."""
        self.id: Final = secrets.token_hex(12)
        self.owner: Final = owner
        plans = [_plan(one.topic, one.given) for one in chosen]
        taken = cuts.together(
            [(one.topic, [bound.steps for bound in plan.bounds]) for one, plan in zip(chosen, plans, strict=True)]
        )
        self.shares: Final = [
            TopicShare(self.id, cut, one, plan, splits) for cut, one, plan in zip(taken, chosen, plans, strict=True)
        ]
        """Those of its topics, in the order in which they were asked for."""
        self.sequence: Final = taken[0].sequence
        self.now_micros: Final = max(cut.now_micros for cut in taken)  # a view may be as of an earlier time (rule V5)
        self._unprepared = list(self.shares)

    @property
    def topics(self) -> Sequence[Topic]:
        """Its topics."""
        return [share.topic for share in self.shares]

    @property
    def restrictions(self) -> Sequence[Restriction]:
        """The part of each topic that the owner may see."""
        return [share.restriction for share in self.shares]

    @property
    def parts(self) -> tuple[PartFigures, ...]:
        """The parts, by their index."""
        return tuple([PartFigures(part.records, at) for at, share in enumerate(self.shares) for part in share.parts])

    def prepare(self) -> bool:
        """Does a bounded piece of the work that finds the parts. True: the parts are known. Raises StoreError once the
        export has ended."""
        if self._unprepared and self._unprepared[0].prepare():
            del self._unprepared[0]
        return not self._unprepared

    def find_part(self, index: int) -> tuple[TopicShare, int]:
        """The share that has a part, and the index of the part there."""
        for share in self.shares:
            if index < len(share.parts):
                return share, index
            index -= len(share.parts)
        raise IndexError(index)

    def reading(self, index: int, begin: bytes = b"", *, keys_wanted: bool = True) -> Reading:
        """A reading of a part, from the key `begin` on."""
        share, at = self.find_part(index)
        return Reading(share, share.parts[at], begin, keys_wanted=keys_wanted)

    def close(self) -> None:
        """Releases the cuts once nobody uses them. May be called again."""
        for share in self.shares:
            share.close()


class PartFigures(NamedTuple):
    """A part of an export, as its readers see it."""

    records: int
    """About how many stored records there are to read for it."""
    topic: int
    """The number of its topic, from 0."""


class TopicShare:
    """The records of one topic in an export, and their parts."""

    def __init__(self, export_id: str, cut: Cut, chosen: Chosen, plan: Plan, splits: SplitCache) -> None:
        topic, given, parts, restriction = chosen
        self._export_id = export_id
        self.granted: Final = None if given is None else given.granted
        """The filter of the rows that the owner may see; None: all."""
        self.restriction: Final = restriction
        self._projection = Projection(hidden=restriction.hidden) if restriction.hidden else None
        self.topic: Final = topic
        self.parts: tuple[ExportPart, ...] = ()
        self._wanted = parts
        self._splits = splits
        self._plan = plan
        self._guard = threading.Lock()
        self._busy = False
        self._closed = False
        self.cut: Final = cut
        self.stored: Final = topic.statistics.records
        """Stored records of the topic, approximately: of a moment after the cut."""
        self.absent: Final = AbsentFields(topic, given)  # in all that was read so far
        self._sieve = sieve(topic, given, self.cut.now_micros, self.absent)
        sieve_wants_keys = given is not None and (given.uses_metadata or not given.predicate.uses_payload)
        self._needs_keys = sieve_wants_keys or self.granted is not None
        """True if keys are read in any case: for the filter, or for the position behind a record [3]."""
        self._preparing: Iterator[tuple[ExportPart, ...] | None] = self._prepare()

    @property
    def project(self) -> Callable[[bytes], bytes] | None:
        """Makes the payloads that the owner may see; None: whole ones."""
        projection, form = self._projection, self.topic.format
        return None if projection is None else lambda payload: form.project(payload, projection)

    def prepare(self) -> bool:
        """Does a bounded piece of the work that finds the parts. True: the parts are known."""
        with self.piece():
            found = next(self._preparing)
        if found is None:
            return False
        self.parts = found + (ExportPart(0),) * (0 if self.granted is None else self._parts_of_rows - len(found))
        return True

    def _prepare(self) -> Iterator[tuple[ExportPart, ...] | None]:
        access, points, ranges = self._plan.access, self._plan.points, self._plan.ranges
        bounds = [bound for bound in self._plan.bounds if bound.steps in self.cut.indexes]
        if bounds:
            found = Race(self.cut, bounds, ranges if access is Access.KEY_RANGES else ()).run(for_few=False)
            if found is not None and found[1] is None:
                # Too many keys for memory, and yet too few for a scan: one part, read from the index as it stands.
                yield (ExportPart(self.stored, bound=found[0]),)
                return
            if found is not None:
                yield from self._of_keys(sorted(set(found[1] or ())))
                return
        if not ranges:
            yield from self._of_keys(points)
            return
        if self.granted is not None:
            yield from self._of_visible_ranges(ranges, self.granted)
            return
        if self._wanted == 1 or (ranges == EVERYTHING and self.stored <= PART_RECORDS_MIN):
            # The figures are of a moment later, when the records of the cut may be gone, so the cut itself is asked.
            first: list[bytes] = []
            self.cut.records.fill_keys_before(self.topic.prefix, self.topic.stop, 1, first)
            yield (ExportPart(self.stored, ranges),) if first else ()
            return
        at_least = self._wanted * SAMPLES_PER_PART
        known = self._splits.of(self.topic, self.cut)
        if known is not None:
            known = known.within(ranges)
            if len(known.keys) >= max(at_least, SAMPLES_PER_PART):
                yield self._of_ranges(ranges, known)
                return
        # Enough samples for this number of parts, and for other numbers later.
        samples = KeySamples(max(1, self.stored // max(SAMPLES_MIN, at_least)))
        prefix = self.topic.prefix
        for start, stop in ranges:
            at: bytes | None = prefix + start
            end = self.topic.stop if stop == ABOVE_ALL else prefix + stop
            while at is not None:
                keys: list[bytes] = []
                at, passed = self.cut.records.sample_keys(at, end, samples.stride, SAMPLE_CHUNK, keys)
                samples.add([key[len(prefix) :] for key in keys], passed)
                yield None
        if ranges == EVERYTHING:
            self._splits.keep(self.topic, self.cut, samples)
        yield self._of_ranges(ranges, samples) if samples.records else ()

    def _of_keys(self, keys: Sequence[bytes]) -> Iterator[tuple[ExportPart, ...] | None]:
        if self.granted is None:
            count = _parts(self._wanted, len(keys))
            edges = [len(keys) * index // count for index in range(count + 1)] if count else []
        else:
            visible: list[bytes] = []
            yield from self._sample_visible(keys, len(keys), self.granted, visible)
            inner = [bisect.bisect_left(keys, place) for place in _places(visible, self._parts_of_rows)]
            edges = sorted({0, *inner, len(keys)}) if keys else []
        yield tuple([ExportPart(stop - start, keys=keys[start:stop]) for start, stop in pairwise(edges)])

    def _of_ranges(self, ranges: Sequence[Range], samples: KeySamples) -> tuple[ExportPart, ...]:
        """The parts together are the ranges, whatever the samples are."""
        count = _parts(self._wanted, samples.records)
        parts: list[ExportPart] = []
        left, before = list(ranges), 0
        for index in range(1, count):
            # A sample is not always where the records divide, and no part must come out too small.
            edge, upto = samples.place(max(samples.records * index // count, before + PART_RECORDS_MIN))
            if samples.records - upto < PART_RECORDS_MIN:
                break
            mine, behind = _split(left, edge)
            if mine:
                parts.append(ExportPart(upto - before, tuple(mine)))
                left, before = behind, upto
        if left:
            parts.append(ExportPart(samples.records - before, tuple(left)))
        return tuple(parts)

    # -- where only some rows may be seen ([3]) -----------------------------------------------------------------------

    @property
    def _parts_of_rows(self) -> int:
        return self._wanted or PARTS_APT_OF_ROWS

    def _of_visible_ranges(
        self, ranges: Sequence[Range], granted: RecordFilter
    ) -> Iterator[tuple[ExportPart, ...] | None]:
        """The parts together are the ranges. They are split so that each has about as many visible records."""
        prefix = self.topic.prefix
        visible: list[bytes] = []
        for start, stop in ranges:
            at: bytes | None = prefix + start
            end = self.topic.stop if stop == ABOVE_ALL else prefix + stop
            while at is not None:
                stored: list[bytes] = []
                at, _ = self.cut.records.sample_keys(at, end, 1, SAMPLE_CHUNK, stored)
                keys = [key[len(prefix) :] for key in stored]
                yield from self._sample_visible(keys, self.stored, granted, visible)
        parts: list[ExportPart] = []
        left = list(ranges)
        for edge in _places(visible, self._parts_of_rows):
            mine, left = _split(left, edge)
            if mine:
                parts.append(ExportPart(0, tuple(mine)))
        if left:
            parts.append(ExportPart(0, tuple(left)))
        yield tuple(parts)

    def _sample_visible(
        self, keys: Sequence[bytes], of: int, granted: RecordFilter, visible: list[bytes]
    ) -> Iterator[None]:
        """Adds some of the keys, those that the owner may see. A hash chooses them, so that the choice among visible
        keys does not tell how many others lie between them; `of`: the number of all keys, of which it takes so many
        that there are enough samples."""
        every = max(1, of // max(SAMPLES_MIN, self._parts_of_rows * SAMPLES_PER_PART))
        mask = (1 << every.bit_length() - 1) - 1
        chosen = [key for key in keys if crc32(key) & mask == 0]
        for start in range(0, len(chosen), LOOK_UPS):
            for key in chosen[start : start + LOOK_UPS]:
                value = self.cut.find(key)
                if value is not None and granted.matches(key, value):
                    visible.append(key)
            yield None

    def find(self, rows: Rows, limit: int, *, keys_wanted: bool) -> tuple[list[bytes], list[bytes], int]:
        """The matching records among the next `limit` stored ones, at most, and the number of stored ones read."""
        keys: list[bytes] = []
        values: list[bytes] = []
        if not (keys_wanted or self._needs_keys) and isinstance(rows, Ranges):
            scanned = rows.read_values(limit, values)
        else:
            scanned = rows.read(limit, keys, values)
        if self._sieve is not None and values:
            wanted = self._sieve(keys, values)
            keys, values = list(compress(keys, wanted)), list(compress(values, wanted))
        return keys, values, scanned

    @contextmanager
    def piece(self) -> Generator[None, None, None]:
        """Guards every use of the cut [4]. Raises StoreError once it is closed."""
        with self._guard:
            if self._closed:
                raise not_found(self._export_id, "it has ended")
            assert not self._busy, "one piece at a time"
            self._busy = True
        try:
            yield
        finally:
            if self._put_down():
                self.cut.close()

    def _put_down(self) -> bool:
        """True if it was closed while it was in use."""
        with self._guard:
            self._busy = False
            return self._closed

    def close(self) -> None:
        """Releases the cut once nobody uses it. May be called again."""
        with self._guard:
            closed, self._closed = self._closed, True
            if closed or self._busy:
                return
        self.cut.close()


class Reading:
    """Owns the position in a part. For one thread at a time."""

    def __init__(self, share: TopicShare, part: ExportPart, begin: bytes, *, keys_wanted: bool) -> None:
        self._share = share
        self._keys_wanted = keys_wanted
        self._part = part
        self._begin = begin
        self._rows: Rows | None = None
        self._limit = PIECE_RECORDS_FIRST
        self.returned = 0
        self.scanned = 0
        """Stored records read."""

    def step(self, limit: int) -> ExportPiece | None:
        """A piece of work: the records found, perhaps none, among at most `limit` stored ones; None: there are no more.
        Raises StoreError once the export has ended."""
        with self._share.piece():
            if self._rows is None:
                self._rows = self._part.rows(self._share.cut, self._begin)
            if self._rows.ended:
                return None
            limit, began = min(limit, self._limit), time.perf_counter()
            keys, values, scanned = self._share.find(self._rows, limit, keys_wanted=self._keys_wanted)
            if (took := time.perf_counter() - began) > PIECE_SECONDS:
                self._limit = max(1, int(limit * PIECE_SECONDS / took))
            elif values or self._limit < PIECE_RECORDS_FIRST:
                size = sum(map(len, values)) // max(1, len(values))
                self._limit = max(1, min(PIECE_RECORDS_MAX, PIECE_BYTES // (size + 1), 5 * self._limit))
            self.scanned += scanned
            self.returned += len(values)
            if self._share.granted is not None and keys:
                return ExportPiece(keys, values, keys[-1] + b"\0")  # the next stored key may be hidden [3]
            return ExportPiece(keys, values, self._rows.position)


def _plan(topic: Topic, given: RecordFilter | None) -> Plan:
    if given is not None and given.predicate.constant is False:
        return NOTHING
    return plan(
        None if given is None else given.tree,
        key_paths=key_paths(topic.settings),
        indexed=[index.steps for index in topic.indexes.all],
    )


def _parts(wanted: int, records: int) -> int:
    """The number of parts for this many stored records, each with `PART_RECORDS_MIN` or more. Fewer are one part."""
    if wanted == 0:
        wanted = min(PARTS_APT_MAX, math.ceil(records / PART_RECORDS_APT))
    return min(wanted, max(records // PART_RECORDS_MIN, min(records, 1)))


def _places(visible: Sequence[bytes], parts: int) -> list[bytes]:
    """Where to split, for parts with about equally many of the visible keys."""
    return sorted({visible[len(visible) * index // parts] for index in range(1, parts)}) if visible else []


def _split(ranges: Sequence[Range], edge: bytes) -> tuple[list[Range], list[Range]]:
    """The ranges before a key, and those from it on."""
    before: list[Range] = []
    for index, (start, stop) in enumerate(ranges):
        if stop > edge:
            if start < edge:
                return [*before, Range(start, edge)], [Range(edge, stop), *ranges[index + 1 :]]
            return before, list(ranges[index:])
        before.append(Range(start, stop))
    return before, []


def not_found(export_id: str, why: str) -> StoreError:
    """EXPORT_NOT_FOUND, with the cause."""
    return StoreError(
        Reason.EXPORT_NOT_FOUND, f"export_id: there is no export {export_id[:80]!r}: {why}", field="export_id"
    )
