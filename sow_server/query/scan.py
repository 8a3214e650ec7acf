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

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.formats.topic_formats import key_paths
from sow_server.engine.reading import Cut, CutSource
from sow_server.engine.stored import HeaderColumns, header_columns, payloads
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters import print_path
from sow_server.query.absence import AbsentFields
from sow_server.query.aggregating import Aggregating, Aggregator
from sow_server.query.filtering import RecordFilter
from sow_server.query.gathering import Gathering, Row
from sow_server.query.hits import packed
from sow_server.query.ordering import Order, Sorter
from sow_server.query.pages import Place, query_hash, read_token, write_token
from sow_server.query.planner import NOTHING, Access, Plan, plan
from sow_server.query.race import Race
from sow_server.query.sieve import Judging, sieve
from sow_server.query.sort_memory import SortMemory, SortRoom, SortShare
from sow_server.query.sources import BATCH_BYTES, SCAN_CHUNK, Points, Ranges, Rows, merged

BATCH_RECORDS_MAX: Final = 10_000
KEYS_MAX: Final = 10_000
SCAN_CHUNK_FIRST: Final = 1_000
"""Stored records that the first pieces of work read at most, as the first match may be enough."""
RESULTS_SECONDS: Final = 0.1
"""A batch of results of groups ends where computing them takes longer."""


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
    aggregating: Aggregating | None = None
    """It answers with results of groups."""
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
        self._clock = clock
        self._memory = sort_memory or SortMemory()
        self._gathering: Gathering | None = _sorter(query, self._memory, after, caller)
        self._room = SortRoom.GRANTED
        self._sorted: Iterator[Row] | None = None
        self._chunk = SCAN_CHUNK_FIRST
        self._keys: list[bytes] = []  # found, not returned yet
        self._values: list[bytes] = []
        self._headers: HeaderColumns | None = None
        """Theirs, where nothing judges or sorts them."""
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
            reads_from=self._begin if self._plan.access is Access.SCAN and not self._plan.bounds else None,
        )
        self.aggregator: Aggregator | None = None
        """It has the figures of an answer with groups; None: the answer has records."""
        if query.aggregating is not None:
            aggregator = Aggregator(query.aggregating, self.cut.now_micros, self._memory, caller, clock=clock)
            self._gathering = self.aggregator = aggregator
        asks = query.filter or query.order or query.projection or query.aggregating
        aggregated = () if query.aggregating is None else query.aggregating.plan.columns
        self._absent = (
            AbsentFields(query.topic, query.filter, query.order, query.projection, aggregated) if asks else None
        )
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
        return None if self._gathering is None or self._room is SortRoom.GRANTED else self._gathering.share

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
            assert self._gathering is not None, "it gives them"
            with self._gathering.working():
                return self._next_sorted(self._sorted)
        if self._gathering is not None and self._gathering.busy:
            self._room = self._gathering.work()
            return _NO_RECORDS
        if not self._keys:
            if not self._unjudged:
                if self._rows.ended:
                    return self._end_of_rows()
                self._read(self._rows)
            if self._judging is not None:
                self._judging.judge(self._keys, self._values)
            elif self._absent is not None and self._absent.looks:
                self._absent.look(self._values)
        if self._gathering is not None:
            return self._gather(self._gathering)
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
        if self._gathering is not None:
            self._gathering.close()

    # -- choosing a way -----------------------------------------------------------------------------------------------

    def _choose(self) -> Rows:
        """Reads enough to choose among the ways that the plan leaves open."""
        access, points, ranges = self._plan.access, self._plan.points, self._plan.ranges
        bounds = [bound for bound in self._plan.bounds if bound.steps in self.cut.indexes]
        entries = 0
        if bounds:
            race = Race(self.cut, bounds, ranges if access is Access.KEY_RANGES else ())
            # A query for the first few records gets them sooner from an index that gives records in key order.
            found = race.run(for_few=self._limit is not None and self._gathering is None)
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
        limit, headers = self._chunk, None
        if self._judging is None and self._gathering is None:
            headers = self._headers = header_columns(())
            # Few enough to stay in the processor's cache on their way.
            limit = min(limit, max(self.query.batch_size, SCAN_CHUNK_FIRST))
            if self._limit is not None:
                limit = min(limit, self._skip + self._limit - self._returned)  # all live records match
        self._scanned += rows.read(limit, keys, values, headers)
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
        skipped = min(self._skip, len(self._keys))
        self._skip -= skipped
        self._matched += skipped
        size = query.batch_size
        if self._limit is not None:  # 0 while it looks ahead
            size = min(size, self._limit - self._returned)
        taken = slice(skipped, skipped + size)
        keys, values, headers = self._keys[taken], self._values[taken], self._headers
        if headers is not None and len(keys) < len(self._keys):
            rest, headers = headers, HeaderColumns(*[column[taken] for column in headers])
            for column in rest:
                del column[: taken.stop]
        del self._keys[: taken.stop], self._values[: taken.stop]
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
        return self._batch(keys, values, headers)

    def _gather(self, gathering: Gathering) -> RecordBatch:
        self._matched += len(self._keys)
        self._room = gathering.add(self._keys, self._values)
        self._keys, self._values = [], []
        return _NO_RECORDS

    def _go_on(self) -> RecordBatch:
        """Continues after a wait: there is room now, or it is this query's turn to begin anew."""
        if self._room is SortRoom.BEGIN_ANEW:
            self._rows, self._chunk = None, SCAN_CHUNK_FIRST
            if self._judging is not None:
                self._judging.take([], [])
            self._matched = self._scanned = 0
            self._room = SortRoom.GRANTED
        elif self._gathering is not None:
            self._room = self._gathering.again()
        return _NO_RECORDS

    def _end_of_rows(self) -> RecordBatch | None:
        if self._gathering is None:
            self._end()
            return None
        room = self._gathering.settle()
        if room is not None:
            self._room = room
            return _NO_RECORDS
        skip, top = min(self.query.skip_n, sys.maxsize), self.query.top_n
        # A sort has no more than `top_n` records behind those that are skipped.
        stop = min(skip + top, sys.maxsize) if top and self.aggregator is not None else None
        self._sorted = self._gathering.rows(skip, stop)
        return _NO_RECORDS

    def _next_sorted(self, rows: Iterator[Row]) -> RecordBatch | None:
        query = self.query
        most = min(query.batch_size, query.page_size - self._returned) if query.page_size else query.batch_size
        keys: list[bytes] = []
        values: list[bytes] = []
        size = 0
        computed, stops = self.aggregator is not None, self._clock() + RESULTS_SECONDS
        for row in islice(rows, most):
            _, key, value = row
            keys.append(key)
            values.append(value)
            size += len(value)
            if size >= BATCH_BYTES or (computed and self._clock() >= stops):
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

    def _batch(self, keys: list[bytes], values: list[bytes], headers: HeaderColumns | None = None) -> RecordBatch:
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
        return RecordBatch(keys, returned, header_columns(values) if headers is None else headers)


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
        "group_by": query.aggregating is not None and bool(query.aggregating.plan.names),
        "aggregate": query.aggregating is not None and bool(query.aggregating.plan.items),
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
    *[
        (field, ("select", "keys_only", "count_only", *_PAGED), "the answer has groups, no records")
        for field in ("group_by", "aggregate")
    ],
)
"""(field, other fields, why they exclude each other)"""


def point_keys(keys: Sequence[str | bytes]) -> tuple[bytes, ...]:
    """Record keys as they are stored."""
    return tuple([key if isinstance(key, bytes) else key.encode() for key in keys])
