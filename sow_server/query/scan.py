"""Runs one query over a cut, in bounded pieces of work (rules Q1 to Q4).

    [1]  All records come from one cut. Its one `now` and the filter decide about each record.
    [2]  Without `order_by`, memory holds only the records of one piece of work, whatever the size of the topic.
    [3]  A piece of work is bounded by the records it reads and by the time that its filter takes, not by the records it
         finds. So a query with few matches can be cancelled at any time, and other queries get their turns.
    [4]  Whatever the plan, a record is returned only if the whole filter is true for it.
    [5]  For a caller that may see only some rows, a page is the last one unless another match follows it (rule A4).

A `Scan` is used by one thread at a time; its owner closes it.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Final, NamedTuple, Protocol, TypeAlias

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.formats.topic_formats import key_paths
from sow_server.engine.reading import Cut, CutSource
from sow_server.engine.stored import HeaderColumns, header_columns, payloads
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters import print_path
from sow_server.query.absence import AbsentFields
from sow_server.query.filtering import RecordFilter
from sow_server.query.hits import HITS_BYTES_MAX, packed
from sow_server.query.ordering import Order, Row, Sorter
from sow_server.query.pages import Place, query_hash, read_token, write_token
from sow_server.query.planner import ABOVE_ALL, EVERYTHING, NOTHING, Access, IndexBound, Plan, Range, plan
from sow_server.query.sieve import Judging, sieve
from sow_server.query.sort_memory import SortMemory, SortRoom, SortShare

BATCH_RECORDS_MAX: Final = 10_000
BATCH_BYTES: Final = 2**20
KEYS_MAX: Final = 10_000
SCAN_CHUNK: Final = 10_000
"""Stored records that a piece of work reads at most: some ten milliseconds."""
SCAN_CHUNK_FIRST: Final = 1_000
"""The same for the first pieces, as the first match may be enough."""
FIND_CHUNK: Final = 1_000
"""Records that a piece of work looks up by key, which costs about four times as much as reading on."""
RANGE_FIRST: Final = 32
"""Records that are read of a range of keys before it counts as long."""
HITS_MAX: Final = 200_000
"""Record keys from an index that may be sorted in memory."""
HITS_SHARE: Final = 4
"""An index is used if it finds at most one in this many of the stored records: a look-up costs that much more."""
RACE_STEPS: Final = (100, 1_000, 10_000, 100_000)
"""How far the ways are read in turns to see which one ends first. The others then cost at most ten times the entries of
the best, and an entry costs a tenth of a look-up."""
STREAMED_FROM: Final = 1_000
"""For a query that wants only the first few records, more matches than this need not be counted."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query. `top_n` and `page_size`: 0 for no limit."""

    topic: Topic
    keys: tuple[bytes, ...] = ()
    projection: Projection | None = None
    batch_size: int = 1000
    keys_only: bool = False
    count_only: bool = False
    skip_n: int = 0
    top_n: int = 0
    page_size: int = 0
    page_token: str = ""
    filter: RecordFilter | None = None
    order: Order | None = None
    explain: bool = False
    plan_only: bool = False
    """It chooses its way, and ends."""
    with_plan: bool = False
    """The way is told with the records."""
    unreadable: bool = False
    """Also finds records whose key does not fit into a message (rule R13); with `keys_only`, to remove them."""

    @property
    def tells_plan(self) -> bool:
        """True if the footer has the plan."""
        return self.explain or self.plan_only or self.with_plan


class RecordBatch(NamedTuple):
    """Records in columns; `payloads` is None if only keys were asked for."""

    keys: list[bytes]
    payloads: list[bytes] | None
    headers: HeaderColumns


class Footer(NamedTuple):
    """The end of the answer."""

    matched: int
    returned: int
    scanned: int
    next_page_token: str


class Explanation(NamedTuple):
    """The way that was used."""

    access: Access
    index_path: str
    """Empty: no index was used."""
    probes: int
    """Planned look-ups, ranges or intervals."""
    index_entries: int
    """Entries read, to choose the way and to find records."""


class Scan:
    """Owns the cut of one query and the position in it."""

    def __init__(
        self,
        cuts: CutSource,
        query: Query,
        sort_memory: SortMemory | None = None,
        caller: str = "",
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`sort_memory`: the memory that ordered queries share, by `caller`. `clock`: in seconds. Raises StoreError for
        options that contradict each other, or a page token of another query."""
        _check(query)
        self.query: Final = query
        self._hash = query_hash(query.topic.prefix, "" if query.filter is None else query.filter.text, query.order)
        after = read_token(query.page_token, self._hash, query.order) if query.page_token else None
        self._begin = after.key + b"\0" if after is not None and query.order is None else b""
        self._plan = _plan(query)
        # A count passes over all records, and then tells how many would have been returned.
        self._limit = None if query.count_only else query.top_n or query.page_size or None
        self._skip = query.skip_n
        self._sorter = _sorter(query, sort_memory or SortMemory(), after, caller)
        self._room = SortRoom.GRANTED
        self._sorted: Iterator[Row] | None = None
        self._chunk = SCAN_CHUNK_FIRST
        self._keys: list[bytes] = []  # found, not returned yet
        self._values: list[bytes] = []
        self._last = Place(b"", ())
        self._token = ""  # of the next page, once there is one
        self._looks_ahead = bool(query.page_size) and _is_restricted(query.filter)
        self._ended = False
        self._matched = self._returned = self._scanned = 0
        self._rows: Rows | None = None
        self._way = Explanation(self._plan.access, "", 0, 0)
        self.cut: Final[Cut] = cuts.records(
            query.topic,
            [bound.steps for bound in self._plan.bounds],
            counted=_counts_all(query),
            unreadable=query.unreadable,
        )
        asks = query.filter or query.order or query.projection
        self._absent = AbsentFields(query.topic, query.filter, query.order, query.projection) if asks else None
        found = sieve(query.topic, query.filter, self.cut.now_micros, self._absent)
        self._judging = None if found is None else Judging(found, clock)

    def next_batch(self) -> RecordBatch | None:
        """The next records; None: there are no more. With a filter this may read the whole topic, see `step`."""
        while (batch := self.step()) is not None:
            if batch.keys:
                return batch
            assert self.waits_for is None, "a scan that shares the memory of sorts takes steps"
        return None

    @property
    def waits_for(self) -> SortShare | None:
        """The share of a sort that has to become ready before the next step; None: go on."""
        return None if self._sorter is None or self._room is SortRoom.GRANTED else self._sorter.share

    def step(self) -> RecordBatch | None:
        """Does a piece of work [3]: returns the records found, perhaps none; None: there are no more."""
        if self._ended:
            return None
        if self.query.plan_only:
            self._choose()
            self._ended = True
            return None
        if self._room is not SortRoom.GRANTED:
            return self._go_on()
        if self.cut.total is not None:
            self._matched = self.cut.total.count()  # from the figures
            self._end()
            return None
        if self._rows is None:
            self._rows = self._choose()
            if self._way.index_entries:
                return _NO_RECORDS
        if self._sorted is not None:
            assert self._sorter is not None, "it has sorted them"
            with self._sorter.working():
                return self._next_sorted(self._sorted)
        if not self._keys:
            if not self._unjudged:
                if self._rows.ended:
                    return self._end_of_rows()
                self._read(self._rows)
            if self._judging is not None:
                self._judging.judge(self._keys, self._values)
            elif self._absent is not None and self._absent.looks:
                self._absent.look(self._values)
        if self._sorter is not None:
            return self._sort(self._sorter)
        return self._next_found(self._rows)

    @property
    def _unjudged(self) -> bool:
        """True if the filter has not judged all records that were read."""
        return self._judging is not None and self._judging.waits

    @property
    def scanned(self) -> int:
        """Stored records that have been read so far."""
        return self._scanned

    def footer(self) -> Footer:
        """The figures of the answer, once there are no more batches."""
        return Footer(self._matched, self._returned, self._scanned, self._token)

    @property
    def absent_fields(self) -> tuple[str, ...]:
        """Those of filter, order and projection, as paths, in which no record that was read has a value (rule Q10)."""
        return () if self._absent is None else self._absent.paths

    def explanation(self) -> Explanation:
        """The way that found the records, once there are no more batches."""
        read = 0 if self._rows is None else self._rows.entries
        return self._way._replace(index_entries=self._way.index_entries + read)

    def give_up(self) -> None:
        """Nobody waits for the answer any more: a step that has not begun does nothing. From any thread."""
        self._ended = True

    def close(self) -> None:
        """Releases the cut and the sorted records."""
        self.cut.close()
        if self._sorter is not None:
            self._sorter.close()

    # -- choosing a way -----------------------------------------------------------------------------------------------

    def _choose(self) -> Rows:
        """Reads enough to choose among the ways that the plan leaves open."""
        access, points, ranges = self._plan.access, self._plan.points, self._plan.ranges
        bounds = [bound for bound in self._plan.bounds if bound.steps in self.cut.indexes]
        entries = 0
        if bounds:
            race = Race(self.cut, bounds, ranges if access is Access.KEY_RANGES else ())
            # A query for the first few records gets them sooner from an index that gives records in key order.
            found = race.run(for_few=self._limit is not None and self._sorter is None)
            entries = race.entries
            if found is not None:
                bound, keys = found
                self._way = Explanation(Access.INDEX, print_path(bound.steps), len(bound.intervals), entries)
                if keys is None:
                    return merged(self.cut, bound, self._begin)
                return Points(self.cut, self._behind(packed(sorted(set(keys)))))
        probes = {Access.POINTS: len(points), Access.KEY_RANGES: len(ranges)}
        self._way = Explanation(access, "", probes.get(access, 0), entries)
        if ranges:
            return Ranges(self.cut, ranges, self._begin)
        return Points(self.cut, self._behind(points))

    def _behind(self, keys: Iterable[bytes]) -> Iterator[bytes]:
        """The records of this page and of the following ones."""
        begin = self._begin
        return (key for key in keys if key >= begin) if begin else iter(keys)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, rows: Rows) -> None:
        """Reads stored records."""
        keys: list[bytes] = []
        values: list[bytes] = []
        limit = self._chunk
        if self._judging is None and self._sorter is None and self._limit is not None:
            limit = min(limit, self._skip + self._limit - self._returned)  # all live records match
        self._scanned += rows.read(limit, keys, values)
        self._chunk = min(2 * self._chunk, SCAN_CHUNK)
        if self._judging is None:
            self._keys, self._values = keys, values
        else:
            self._judging.take(keys, values)

    def _next_found(self, rows: Rows) -> RecordBatch:
        """A batch of the found records, after skipping, and up to the limit."""
        query = self.query
        if query.count_only:
            self._matched += len(self._keys)
            self._keys, self._values = [], []
            return _NO_RECORDS
        if self._skip:
            skipped = min(self._skip, len(self._keys))
            self._skip -= skipped
            self._matched += skipped
            del self._keys[:skipped], self._values[:skipped]
        size = query.batch_size
        if self._limit is not None:  # 0 while it looks ahead
            size = min(size, self._limit - self._returned)
        keys, values = self._keys[:size], self._values[:size]
        del self._keys[:size], self._values[:size]
        self._matched += len(keys)
        self._returned += len(keys)
        if keys:
            self._last = Place(keys[-1], ())
        if self._returned == self._limit:
            more = bool(query.page_size) and (bool(self._keys) or not rows.ended)
            self._token = write_token(self._hash, self._last) if more else ""
            # Until a page knows whether there is another one, it judges on.
            judged = not (query.page_size and self._unjudged)
            self._ended = bool(self._keys) or (judged and (rows.ended or not self._looks_ahead))
        return self._batch(keys, values)

    def _sort(self, sorter: Sorter) -> RecordBatch:
        self._matched += len(self._keys)
        self._room = sorter.add(self._keys, self._values)
        self._keys, self._values = [], []
        return _NO_RECORDS

    def _go_on(self) -> RecordBatch:
        """Continues after a wait: there is room now, or it is this sort's turn to begin anew."""
        if self._room is SortRoom.BEGIN_ANEW:
            self._rows, self._chunk = None, SCAN_CHUNK_FIRST
            if self._judging is not None:
                self._judging.take([], [])
            self._matched = self._scanned = 0
            self._room = SortRoom.GRANTED
        elif self._sorter is not None:
            self._room = self._sorter.again()
        return _NO_RECORDS

    def _end_of_rows(self) -> RecordBatch | None:
        if self._sorter is None:
            self._end()
            return None
        self._sorted = islice(self._sorter.rows(), min(self.query.skip_n, sys.maxsize), None)
        return _NO_RECORDS

    def _next_sorted(self, rows: Iterator[Row]) -> RecordBatch | None:
        query = self.query
        most = min(query.batch_size, query.page_size - self._returned) if query.page_size else query.batch_size
        keys: list[bytes] = []
        values: list[bytes] = []
        size = 0
        for row in islice(rows, most):
            _, key, value = row
            keys.append(key)
            values.append(value)
            size += len(value)
            if size >= BATCH_BYTES:
                break
        if not keys:
            if query.page_size and next(rows, None) is not None:  # the sort has one record more than the page
                self._token = write_token(self._hash, self._last)
            self._end()
            return None
        self._last = Place(keys[-1], row[0])
        self._returned += len(keys)
        return self._batch(keys, values)

    def _end(self) -> None:
        self._ended = True
        if self.query.count_only:
            left = max(0, self._matched - self.query.skip_n)
            self._returned = min(left, self.query.top_n or left)

    def _batch(self, keys: list[bytes], values: list[bytes]) -> RecordBatch:
        if self.query.explain or not keys:
            return _NO_RECORDS
        returned: list[bytes] | None = None
        if not self.query.keys_only:
            projection = self.query.projection
            if projection is None:
                returned = payloads(values)
            else:
                project = self.query.topic.format.project
                returned = [project(payload, projection) for payload in payloads(values)]
        return RecordBatch(keys, returned, header_columns(values))


_NO_RECORDS: Final = RecordBatch([], None, header_columns([]))


def _plan(query: Query) -> Plan:
    topic = query.topic
    if query.filter is not None and query.filter.predicate.constant is False:
        return NOTHING
    return plan(
        None if query.filter is None else query.filter.tree,
        key_paths=key_paths(topic.settings),
        indexed=[index.steps for index in topic.indexes.all],
        keys=query.keys or None,
    )


def _is_restricted(given: RecordFilter | None) -> bool:
    """True if there may be records that the caller may not see."""
    return given is not None and given.granted is not None and given.predicate.constant is None


def _sorter(query: Query, memory: SortMemory, after: Place | None, caller: str) -> Sorter | None:
    if query.order is None:
        return None
    limit = min(query.skip_n + query.top_n, sys.maxsize) if query.top_n else None
    if query.page_size:
        limit = query.page_size + 1  # one more tells whether there is another page
    return Sorter(
        query.order,
        limit,
        payloads=not (query.keys_only or query.explain),
        memory=memory,
        after=None if after is None else (after.sort_keys, after.key),
        caller=caller,
    )


def _counts_all(query: Query) -> bool:
    """True if the figures of the topic are the answer."""
    return query.count_only and not query.keys and (query.filter is None or query.filter.predicate.constant is True)


# --- sources of records ----------------------------------------------------------------------------------------------


class Rows(Protocol):
    """Live records, in key order."""

    @property
    def ended(self) -> bool:
        """True if there are no more records."""

    @property
    def entries(self) -> int:
        """Index entries read."""

    @property
    def position(self) -> bytes:
        """The record key to continue from, which need not exist; ABOVE_ALL at the end."""

    def read(self, limit: int, keys: list[bytes], values: list[bytes]) -> int:
        """Appends the live records among the next `limit` stored ones, at most. Returns the number of stored ones
        read."""


class Ranges:
    """The records in ranges of keys."""

    entries = 0

    def __init__(self, cut: Cut, ranges: Sequence[Range], begin: bytes) -> None:
        """The records from `begin` on (included)."""
        # Reading past a short range would cost more than the range.
        self._reach = SCAN_CHUNK if ranges == EVERYTHING else RANGE_FIRST
        if begin:
            ranges = [Range(max(start, begin), stop) for start, stop in ranges if stop > begin]
        self._cut = cut
        self._ranges = iter(ranges)
        self._at: bytes | None = None
        self._stop = b""
        self._next_range()

    @property
    def ended(self) -> bool:
        return self._at is None

    @property
    def position(self) -> bytes:
        return ABOVE_ALL if self._at is None else self._at[len(self._cut.topic.prefix) :]

    def _next_range(self) -> None:
        following = next(self._ranges, None)
        if following is None:
            return
        topic = self._cut.topic
        self._at = topic.prefix + following.start
        self._stop = topic.stop if following.stop == ABOVE_ALL else topic.prefix + following.stop

    def read(self, limit: int, keys: list[bytes], values: list[bytes]) -> int:
        return self._read(limit, keys, values)

    def read_values(self, limit: int, values: list[bytes]) -> int:
        """As `read` without the keys, which is faster."""
        return self._read(limit, None, values)

    def _read(self, limit: int, keys: list[bytes] | None, values: list[bytes]) -> int:
        scanned = size = 0
        cut = self._cut
        for _ in range(FIND_CHUNK):  # each of many ranges may hold only one record
            assert self._at is not None, "asked only while there is more"
            had, asked = len(values), min(limit - scanned, self._reach)
            if keys is None:
                self._at, read = cut.fill_values(self._at, asked, values, stop=self._stop)
            else:
                self._at, read = cut.fill(self._at, asked, keys, values, stop=self._stop)
            scanned += read
            if self._at is None:
                self._next_range()
                self._reach = min(self._reach, RANGE_FIRST)
            elif read < asked:
                break  # it has reached the limit of bytes
            else:
                self._reach = min(4 * self._reach, SCAN_CHUNK)
            size += sum(map(len, islice(values, had, None)))
            if self._at is None or scanned >= limit or size >= BATCH_BYTES:
                break
        return scanned


class Points:
    """The records of known keys, in order and without duplicates."""

    def __init__(self, cut: Cut, keys: Iterator[bytes], streams: Sequence[_Entries] = ()) -> None:
        """`streams`: the sources of the keys, if they come from an index."""
        self._cut = cut
        self._keys = keys
        self._streams = streams
        self._next = next(keys, None)

    @property
    def ended(self) -> bool:
        return self._next is None

    @property
    def position(self) -> bytes:
        return ABOVE_ALL if self._next is None else self._next

    @property
    def entries(self) -> int:
        return sum([stream.read for stream in self._streams])

    def read(self, limit: int, keys: list[bytes], values: list[bytes]) -> int:
        read = size = 0
        while self._next is not None and read < min(limit, FIND_CHUNK) and size < BATCH_BYTES:
            key, self._next = self._next, next(self._keys, None)
            read += 1
            value = self._cut.find(key)
            if value is not None:
                keys.append(key)
                values.append(value)
                size += len(value)
        return read


class _Entries:
    """The record keys of the index entries in some intervals, one interval after the other."""

    def __init__(self, fill: _Fill, intervals: Iterable[tuple[bytes, bytes]]) -> None:
        self._fill = fill
        self._intervals = iter(intervals)
        self._at: bytes | None = None
        self._stop = b""
        self.read = self.bytes = 0
        self._next_interval()

    @property
    def ended(self) -> bool:
        return self._at is None

    def _next_interval(self) -> None:
        following = next(self._intervals, None)
        if following is not None:
            self._at, self._stop = following

    def fill(self, limit: int, keys: list[bytes]) -> None:
        """Appends at most the next `limit` keys."""
        while self._at is not None and limit > 0:
            had = len(keys)
            self._at = self._fill(self._at, self._stop, limit, keys)
            limit -= len(keys) - had
            self.read += len(keys) - had
            self.bytes += sum(map(len, islice(keys, had, None)))
            if self._at is None:
                self._next_interval()

    def stream(self, chunk: int) -> Iterator[bytes]:
        """All keys, read in chunks."""
        while not self.ended:
            keys: list[bytes] = []
            self.fill(chunk, keys)
            yield from keys


_Fill: TypeAlias = Callable[[bytes, bytes, int, list[bytes]], bytes | None]
"""As `IndexCursor.fill`."""


def merged(cut: Cut, bound: IndexBound, begin: bytes) -> Points:
    """The records of a bound that consists of points, from the key `begin` on (included). Its entries are read
    meanwhile: those of each point are in key order."""
    cursor = cut.indexes[bound.steps]
    streams = [_Entries(cursor.fill, [(start + begin, stop)]) for start, stop in bound.intervals]
    chunk = max(16, FIND_CHUNK // len(streams))
    keys = heapq.merge(*[stream.stream(chunk) for stream in streams])
    return Points(cut, (key for key, _ in groupby(keys)), streams)


class Race:
    """Finds the way that ends first: reads indexes, and ranges of record keys if there are any, in turns."""

    def __init__(self, cut: Cut, bounds: Sequence[IndexBound], ranges: Sequence[Range]) -> None:
        self._bounds = bounds
        self._indexes = [_Entries(cut.indexes[bound.steps].fill, bound.intervals) for bound in bounds]
        prefix = cut.topic.prefix
        within = [(prefix + start, prefix + stop) for start, stop in ranges]
        self._ranges = _Entries(cut.records.fill_keys_before, within) if within else None
        self._stored = cut.topic.statistics.records

    @property
    def entries(self) -> int:
        """Index entries read."""
        return sum([index.read for index in self._indexes])

    def run(self, *, for_few: bool) -> tuple[IndexBound, list[bytes] | None] | None:
        """The index to use, with the keys of all records that it finds. Without keys: they are too many, so the index
        is read as it stands, in key order. None: use no index."""
        most = max(STREAMED_FROM, min(HITS_MAX, self._stored // HITS_SHARE))
        keys: list[list[bytes]] = [[] for _ in self._indexes]
        for upto in [*[step for step in RACE_STEPS if step < most], most]:
            if self._ranges is not None:
                while not self._ranges.ended and self._ranges.read < upto:
                    self._ranges.fill(min(FIND_CHUNK, upto - self._ranges.read), [])
                if self._ranges.ended:
                    return None
            for bound, index, found in zip(self._bounds, self._indexes, keys, strict=True):
                while not index.ended and len(found) < upto and index.bytes < HITS_BYTES_MAX:
                    index.fill(min(FIND_CHUNK, upto - len(found)), found)
                if index.ended:
                    return bound, found
            if for_few and upto >= STREAMED_FROM:
                break
        first = self._bounds[0]
        if first.points and self._ranges is None and (for_few or most < self._stored // HITS_SHARE):
            return first, None
        return None


# --- options and page tokens -----------------------------------------------------------------------------------------


def _check(query: Query) -> None:
    def refuse(field: str, message: str) -> StoreError:
        return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)

    if len(query.keys) > KEYS_MAX:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE,
            f"keys: {len(query.keys)} keys are more than the limit of {KEYS_MAX} per request",
            field="keys",
        )
    if not 1 <= query.batch_size <= BATCH_RECORDS_MAX:
        raise refuse("batch_size", f"must be between 1 and {BATCH_RECORDS_MAX}")
    given = {
        "select": query.projection is not None,
        "keys_only": query.keys_only,
        "count_only": query.count_only,
        "explain": query.explain,
        "plan_only": query.plan_only,
        "with_plan": query.with_plan,
        "order_by": query.order is not None,
        "page_size": bool(query.page_size),
        "page_token": bool(query.page_token),
        "skip_n": bool(query.skip_n),
        "top_n": bool(query.top_n),
        "keys": bool(query.keys),
    }
    for field, others, why in _CONTRADICTIONS:
        for other in others:
            if given[field] and given[other]:
                raise refuse(field, f"cannot be combined with {other}: {why}")
    if query.page_token and not query.page_size:
        raise refuse("page_size", "is needed with a page_token")


_PAGED: Final = ("page_size", "page_token")
_CONTRADICTIONS: Final = (
    ("select", ("keys_only", "count_only"), "no payloads are returned"),
    ("keys_only", ("count_only",), "no records are returned"),
    ("order_by", ("count_only",), "no records are returned"),
    ("explain", ("count_only",), "explain tells the count as well"),
    ("plan_only", ("explain", "count_only"), "the query does not run"),
    ("with_plan", ("count_only",), "no records are returned"),
    *[(field, ("skip_n", "top_n"), "page_size limits the answer already") for field in _PAGED],
    *[(field, ("count_only",), "no records are returned") for field in _PAGED],
    *[(field, ("keys",), "all of them fit into one answer") for field in _PAGED],
)
"""(field, other fields, why they exclude each other)"""


def point_keys(keys: Sequence[str | bytes]) -> tuple[bytes, ...]:
    """Record keys as they are stored."""
    return tuple(key if isinstance(key, bytes) else key.encode() for key in keys)
