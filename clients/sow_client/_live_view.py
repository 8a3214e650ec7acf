"""Live views: a local map of the records that match a filter, right again after every outage (rules F4, F5).

`LiveCore` is the machine: it owns the map, and decides what to ask the server for. `LiveView` and `AsyncLiveView` run
it in a thread or in a task. `Readable` is how the program reads the map.

    [1]  The map shows the state at one position: all changes up to there, and none of those after it. Changes that
         belong together appear together.
    [2]  A snapshot is put together beside the map, and takes its place when it is complete. A snapshot that breaks off
         is continued by the next one.
    [3]  Where the journal does not continue, the request tells what the map holds, and the server sends only what
         differs. That is exact, whatever has happened to either side: the server compares the records themselves.
    [4]  While the view is not current, a record is out of sight from its expire time on. That is judged by the server's
         clock as it was last heard, and the time that has passed here since. The clock of this machine does not count.
    [5]  It goes on by its bookmark at another instance only if that has everything that the view was told. Otherwise it
         compares ([3]): the instance that was left may never come back, and the map would keep what nobody has.
    [6]  Another filter begins with the next call, which compares ([3]). Until its snapshot is complete, the map shows
         the records of the filter before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from heapq import heapify, heappop, heappush
from itertools import repeat
from operator import length_hint
from typing import TYPE_CHECKING, Final, NamedTuple

from sow.checksums import RANGES_MAX, checksum
from sow.v1 import sow_pb2, types_pb2
from sow_client import _process, _statuses
from sow_client._cells import Led
from sow_client._flags import AioFlag, Flag
from sow_client._records import Change, Record, RecordBatch, html_table
from sow_client._subscription import OpenSubscription, SubscribeCall
from sow_client._subscription_core import RESYNC_REASONS, SubscriptionCore
from sow_client._view import differ, in_own_batch
from sow_client._workers import AioWorker, Worker
from sow_client.errors import ResyncRequired, SowError

if TYPE_CHECKING:
    from sow_client._aio_subscription import AioOpenSubscription, AioSubscribeCall

RANGE_RECORDS: Final = 32
"""Records of a range that is compared. Larger ones make a smaller request, and more records that come although they are
held."""
RANGE_BYTES: Final = 256 * 2**10
"""Payload bytes of a range, on average: the server keeps few more until it has compared."""
SAMPLE_RECORDS: Final = 100
"""Records by which the average is found."""
GONE_REASONS: Final = frozenset({"TOPIC_DELETED", "TOPIC_NOT_FOUND"})
"""There are no records of the topic, until it is made again."""

_NOTHING: Final[frozenset[str]] = frozenset()


class ViewFilter(NamedTuple):
    """A filter with the values of its parameters."""

    text: str
    values: Mapping[str, types_pb2.Parameter]

    @classmethod
    def of(cls, request: sow_pb2.SubscribeRequest) -> ViewFilter:
        """That of a request."""
        copy = sow_pb2.SubscribeRequest()
        copy.CopyFrom(request)
        return cls(copy.filter, copy.parameters)

    def put_into(self, request: sow_pb2.SubscribeRequest) -> None:
        """Makes it the filter of a request."""
        request.filter = self.text
        request.parameters.clear()
        for name, value in self.values.items():
            request.parameters[name].CopyFrom(value)


class LiveCore(SubscriptionCore):
    """Owns the map, and the snapshot that is to take its place. One thread feeds it, any thread reads the map."""

    def __init__(
        self,
        request: sow_pb2.SubscribeRequest,
        *,
        retry_for: float,
        connect_timeout: float,
        on_interruption: Callable[[SowError | None], object] | None = None,
        tells: bool = True,
        way: Led | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`request`: with `sow` and `oof`, of one topic. `tells`: whether changes of the map are handed out."""
        super().__init__(
            request, retry_for=retry_for, connect_timeout=connect_timeout, on_interruption=on_interruption, way=way
        )
        self.lock = threading.Lock()  # of the map, where more than one key is changed or read
        self.records: dict[str, Record] = {}
        self.reached: str | None = None
        """The position of the map."""
        self.absent_fields: tuple[str, ...] = ()
        """As the last snapshot told."""
        self.current = False
        """True while the server sends every change, and has sent all from before the call."""
        self.error: BaseException | None = None
        """The error that ended the view."""
        self.is_over = False
        self.settled: Flag | AioFlag = Flag()
        """Set while the view is current or has ended."""
        self._tells = tells
        self._clock = clock
        self._together: list[Change] = []  # of an atomic request that is not complete
        self._expires = False  # whether the topic acts on lifetimes
        self._next: dict[str, Record] | None = None  # the snapshot that is put together ([2])
        self._differing: set[str] | None = set()  # the keys in which it may differ from the map; None: all
        self._held: list[str] = []  # the keys in the ranges of the request, in order
        self._heard_at: float | None = None  # the last time that the view was current
        self._ahead_micros = 0  # by so much the server's clock is ahead of `_clock`, at least
        self._call_began_micros = 0  # by the server's clock; 0: nothing was heard of the call
        self._has_sources = False  # other instances, whose clocks may be ahead, send to the one that is called
        self._due: list[tuple[int, str]] | None = None  # a heap of expire times; None: not made yet
        self._overdue: set[str] = set()
        self._wanted: ViewFilter | None = None  # the next call is for this filter ([6])
        self._before: ViewFilter | None = None  # the filter whose records the map shows, until the snapshot is complete
        self.refused: SowError | None = None
        """Why the server refused the last change of the filter; None: it did not."""

    # ---- reading: any thread ----

    @property
    def age(self) -> float:
        """Seconds since the view was current; 0 while it is, infinite before."""
        if self.current:
            return 0.0
        return float("inf") if self._heard_at is None else self._clock() - self._heard_at

    def hidden(self) -> Collection[str]:
        """The keys of the map that are out of sight ([4])."""
        if self.current or not self._expires:
            return _NOTHING
        with self.lock:
            return self._hidden()

    def shown(self) -> dict[str, Record]:
        """A copy of the map without what is out of sight, as of one instant: a snapshot may take its place then."""
        with self.lock:
            records = self.records.copy()
            if not self.current and self._expires:
                for key in self._hidden():
                    records.pop(key, None)
            return records

    def _hidden(self) -> Collection[str]:
        due = self._due
        if due is None:
            due = self._due = [
                (stamp, key) for key, record in self.records.items() if (stamp := record.expire_time_micros)
            ]
            heapify(due)
        now = self._server_micros()
        while due and due[0][0] <= now:
            stamp, key = heappop(due)
            if (record := self.records.get(key)) is not None and record.expire_time_micros == stamp:
                self._overdue.add(key)
        return self._overdue

    def _server_micros(self) -> int:
        return round(self._clock() * 1_000_000) + self._ahead_micros

    # ---- another filter: any thread ----

    def change(self, wanted: ViewFilter) -> None:
        """From the next call on it is a view of another filter ([6]). `settled` is set once that is current, or
        refused."""
        with self.lock:
            self._wanted, self.refused, self.current = wanted, None, False
            self.settled.clear()

    def request(self, *, now: float) -> sow_pb2.SubscribeRequest:
        """As `SubscriptionCore.request`."""
        with self.lock:
            wanted, self._wanted = self._wanted, None
        if wanted is not None:
            if self._before is None:
                self._before = ViewFilter.of(self._request)
            wanted.put_into(self._request)
            self._snapshot = True
        return super().request(now=now)

    def _takes_back(self, error: SowError) -> bool:
        """True if the server has refused the filter, so that the one before holds again."""
        before = self._before
        if before is None or self._passes(error) or error.reason in RESYNC_REASONS | {"ACCESS_CHANGED"}:
            return False
        before.put_into(self._request)
        self._before, self.refused, self._snapshot = None, error, True
        return True

    # ---- frames ----

    def feed(self, response: sow_pb2.SubscribeResponse) -> None:
        """Takes in the next frame. Hands out how the map has changed: "put", and "oof" for a record that has gone.
        Raises ResyncRequired for [5]."""
        kind = response.WhichOneof("frame")
        if self._wanted is not None:
            raise _statuses.cut("the view of the filter before")
        if kind == "progress" and not self._standing and _lacks_something(response.progress):
            raise ResyncRequired(
                "this instance lacks changes that the view was told elsewhere", reason="RESYNC_REQUIRED"
            )
        super().feed(response)
        told: Sequence[Change] = ()
        if kind == "changes":
            told = self._take_changes(response.changes)
        elif kind == "progress":
            self._has_sources = response.progress.sources
            self._hear(response.progress.now_micros, behind=response.progress.behind)
            self.reached = response.progress.bookmark
        elif kind == "snapshot_begin":
            self._begin_next(response.snapshot_begin)
        elif kind == "snapshot_end":
            told = self._show_next()
            self._before = None
            self.reached = response.snapshot_end.bookmark
            self.absent_fields = tuple(response.snapshot_end.absent_fields)
            self._is_current()
        if self.current:
            self._heard_at = self._clock()
        changes = tuple(told) if self._tells else ()
        self._changes, self.pending = changes, iter(changes)

    def _hear(self, server_micros: int, *, behind: bool = False) -> None:
        """The server has told its time. It is later by now, so of several times the one most ahead is the nearest.
        `behind`: changes from before are still to come."""
        ahead = server_micros - round(self._clock() * 1_000_000)
        if not self._call_began_micros:
            self._call_began_micros, self._ahead_micros = server_micros, ahead
            return
        self._ahead_micros = max(ahead, self._ahead_micros)
        if not behind:
            self._is_current()

    def _is_current(self) -> None:
        if self.current:
            return
        with self.lock:
            if self._wanted is None and self._before is None:
                self.current = True
                self._due, self._overdue = None, set()
                self.settled.set()

    def _take_changes(self, batch: sow_pb2.ChangeBatch) -> list[Change]:
        self._together += self.pending
        if batch.more:
            return []
        changes, self._together = self._together, []
        with self.lock:
            told = [change for change in changes if self._apply(change)]
            self.reached = batch.bookmark
        # A change that was published after the call had begun, so what came before is here. Where other instances send
        # to this one, their clocks may be ahead; but there Progress comes each second, also without a pause (rule F6).
        if (
            not self.current
            and not (self._has_sources or self._marks)
            and max(batch.records.publish_time_micros, default=0) >= self._call_began_micros
        ):
            self._is_current()
        return told

    def _apply(self, change: Change) -> bool:
        """Changes the map. True if there is a change to report."""
        self._overdue.discard(change.key)
        if change.op != "put":
            return self.records.pop(change.key, None) is not None
        assert change.record is not None, "a put has its record"
        before = self.records.get(change.key)
        record = self.records[change.key] = in_own_batch(change.record, change.record.payload)
        if self._due is not None and (stamp := record.expire_time_micros):
            heappush(self._due, (stamp, change.key))
        # Another instance tells some changes again (rule F9).
        return self._tells and (before is None or differ(before, record))

    # ---- snapshots ----

    def _begin_next(self, begin: sow_pb2.SnapshotBegin) -> None:
        self._hear(begin.as_of_micros)
        self._together = []
        self._expires = begin.expires
        if not begin.held:
            self._next, self._differing, self._held = {}, None, []

    def _feed_snapshot(self, snapshot: sow_pb2.SnapshotBatch) -> None:
        records, differing, held = self._next, self._differing, self._held
        if records is None or len(snapshot.after_key) != len(snapshot.upto_key):
            raise _statuses.malformed("a snapshot of ranges that were not asked for")
        for after, upto in zip(snapshot.after_key, snapshot.upto_key, strict=True):
            begin = bisect_right(held, after) if after else 0
            for key in held[begin : bisect_right(held, upto) if upto else len(held)]:
                records.pop(key, None)
                if differing is not None:
                    differing.add(key)
        rows = RecordBatch(snapshot.topic, snapshot.records)
        records.update(zip(rows.keys, rows, strict=True))
        if differing is not None:
            differing.update(rows.keys)

    def _show_next(self) -> list[Change]:
        """The snapshot takes the place of the map."""
        assert self._next is not None, "it has begun"
        before, records, differing = self.records, self._next, self._differing
        with self.lock:
            self.records = records
            self._due, self._overdue = None, set()
        self._next, self._differing, self._held = None, set(), []
        if not self._tells:
            return []
        keys = before.keys() | records.keys() if differing is None else differing
        return list(_differences(before, records, sorted(keys), self._request.topic))

    def _forget(self) -> list[Change]:
        """There are no records any more."""
        self._next, self._differing = {}, None
        return self._show_next()

    # ---- calls ----

    def _go_on(self, request: sow_pb2.SubscribeRequest) -> None:
        super()._go_on(request)
        self._call_began_micros = 0

    def hold(self, request: sow_pb2.SubscribeRequest) -> None:
        """Adds what is held to the request of a snapshot ([3]). Takes half a second for a million records; nothing may
        be fed meanwhile."""
        records = self.records if self._next is None else self._next
        if not request.sow or not records or not self._view:
            return
        if self._next is None:
            self._next = records.copy()
        self._held = keys = sorted(records)
        size = max(1, min(RANGE_RECORDS, RANGE_BYTES // _average_bytes(records, keys)), -(-len(keys) // RANGES_MAX))
        request.view = self._view
        while True:
            request.held.CopyFrom(_ranges(records, keys, size))
            if request.ByteSize() < _statuses.MESSAGE_BYTES_MAX:
                return
            size *= 2

    def ended(self, error: SowError, *, now: float, jitter: float) -> float:
        """As `SubscriptionCore.ended`. A topic that is gone has no records until there is one of its name again."""
        if self.current:
            self.current = False
            self.settled.clear()
        # For another filter the call has ended on purpose. That is no interruption, and costs no retry.
        if self._wanted is not None or self._takes_back(error):
            return 0.0
        if self.stood and error.reason in GONE_REASONS | {"NO_JOURNAL"}:
            self._snapshot = True
        if self.stood and error.reason in GONE_REASONS:
            gone = tuple(self._forget()) if self.records or self._next else ()
            self.reached = None
            self._changes, self.pending = gone, iter(gone)
        return super().ended(error, now=now, jitter=jitter)

    def _passes(self, error: SowError) -> bool:
        return super()._passes(error) or (self.stood and error.reason in GONE_REASONS | {"NO_JOURNAL"})

    def end(self, error: BaseException | None = None) -> None:
        """The view has ended: it was closed, or because of this error."""
        self.error, self.current, self.is_over = error, False, True
        self.settled.set()

    def _settle(self) -> None:
        if not length_hint(self.pending):  # else `ended` has just put changes there, which are handed out next
            super()._settle()


def _lacks_something(progress: sow_pb2.Progress) -> bool:
    """True if the subscriber was told something elsewhere that this instance lacks (rule F9). An older server does not
    tell, and accepts no bookmark of another instance."""
    return not progress.covers and ";h=" in progress.bookmark


def _ranges(records: Mapping[str, Record], keys: Sequence[str], size: int) -> sow_pb2.HeldRanges:
    """These records, the keys of which are in order, as ranges of so many."""
    # A loop over columns of a range, not over records: a third of the time. Records that came in this order need no
    # look-ups, which miss the processor's cache.
    ordered = list(records.values()) if keys == list(records) else [records[key] for key in keys]
    upto: list[str] = []
    checksums: list[int] = []
    for begin in range(0, len(keys), size):
        names = keys[begin : begin + size]
        text = "".join(names)
        lengths = map(len, names) if text.isascii() else (len(name.encode()) for name in names)
        rows = ordered[begin : begin + size]
        upto.append(names[-1])
        checksums.append(checksum(lengths, text.encode(), *_versions_and_origins(rows)))
    upto[-1] = ""  # to the end
    counts = [size] * len(upto)
    counts[-1] = len(keys) - size * (len(upto) - 1)
    return sow_pb2.HeldRanges(upto_key=upto, checksum=checksums, records=counts)


def _versions_and_origins(rows: Sequence[Record]) -> tuple[array[int], Iterable[str]]:
    first, count = rows[0], len(rows)
    batch, at = first._batch, first._index
    columns = batch.columns
    # Records of one snapshot, none of which has changed since, are neighbours in their batch.
    if not columns.origin and rows[-1]._index == at + count - 1 and [row._batch for row in rows].count(batch) == count:
        return array("q", columns.version[at : at + count]), repeat(columns.origins[0], count)
    return array("q", [row.version for row in rows]), [row.origin for row in rows]


def _average_bytes(records: Mapping[str, Record], keys: Sequence[str]) -> int:
    """The average size of the payloads, from a sample."""
    sample = keys[:: -(-len(keys) // SAMPLE_RECORDS)]
    return sum([len(records[key].payload) for key in sample]) // len(sample) + 1


def _differences(
    before: Mapping[str, Record], after: Mapping[str, Record], keys: Iterable[str], topic: str
) -> Iterator[Change]:
    """The changes that lead from `before` to `after`; they may differ in these keys."""
    for key in keys:
        old, new = before.get(key), after.get(key)
        if new is None:
            if old is not None:
                yield Change("oof", None, None, old, None, topic)
        elif old is None or differ(old, new):
            yield Change("put", None, new, None, None, topic)


class Readable(_process.Owned, Mapping[str, Record]):
    """The map, as any thread reads it."""

    _core: LiveCore
    _what = "live view"

    def _forked(self) -> None:
        if self._core.is_over:
            return
        super()._forked()
        self._core.lock = threading.Lock()
        self._core.settled = Flag()
        self._core.end(_process.forked(self._what))

    @property
    def current(self) -> bool:
        """True: the server sends every change, so the map is behind it only by what is under way. False: the connection
        is broken, or changes and differences from before it was made again are still to come."""
        return self._core.current

    @property
    def absent_fields(self) -> tuple[str, ...]:
        """Fields of the filter in which no record that was read for the last snapshot has a value: perhaps they are
        mistyped. Rule: Q10."""
        return self._core.absent_fields

    @property
    def age(self) -> float:
        """Seconds since the view was current; 0 while it is."""
        return self._core.age

    @property
    def position(self) -> str | None:
        """The bookmark of the state that the map shows: all changes up to there. None: the topic is gone."""
        return self._core.reached

    def copy(self) -> dict[str, Record]:
        """The records by key, as they are at one position."""
        self._check()
        return self._core.shown()

    def __getitem__(self, key: str) -> Record:
        self._check()
        record = self._core.records[key]
        if key in self._core.hidden():
            raise KeyError(key)
        return record

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def __len__(self) -> int:
        self._check()
        return len(self._core.records) - len(self._core.hidden())

    def keys(self) -> KeysView[str]:
        """The keys, as they are at one position."""
        return self.copy().keys()

    def values(self) -> ValuesView[Record]:
        """The records, as they are at one position."""
        return self.copy().values()

    def items(self) -> ItemsView[str, Record]:
        """Keys and records, as they are at one position."""
        return self.copy().items()

    def __repr__(self) -> str:
        state = "current" if self.current else "not current"
        return f"{type(self).__name__}({len(self._core.records)} records, {state})"

    def _repr_html_(self) -> str:
        return html_table(self.values(), repr(self))

    def _check(self) -> None:
        if (error := self._core.error) is not None:
            raise error


# ---- threads and tasks ----


def with_held(core: LiveCore, open_call: OpenSubscription) -> OpenSubscription:
    """Calls with what is held in the request."""

    def open_with_held(request: sow_pb2.SubscribeRequest) -> SubscribeCall:
        core.hold(request)
        return open_call(request)

    return open_with_held


def aio_with_held(core: LiveCore, open_call: AioOpenSubscription) -> AioOpenSubscription:
    """As `with_held`."""

    async def open_with_held(
        request: sow_pb2.SubscribeRequest, *, connect_seconds: float | None = None
    ) -> AioSubscribeCall:
        await asyncio.to_thread(core.hold, request)  # may take long, and other tasks have to go on
        return await open_call(request, connect_seconds=connect_seconds)

    return open_with_held


def view_entered(_open_view: Callable[[], object]) -> None:
    """A block of the view begins: `opened` has opened it."""


async def aio_view_entered(open_view: Callable[[], Awaitable[object]]) -> None:
    """A block of the view begins."""
    await open_view()


def view_closed(_worker: Worker) -> None:
    """The subscription of the view has ended. Its thread may be telling a change, as long as the program takes."""


async def aio_view_closed(worker: AioWorker) -> None:
    """The subscription of the view has ended."""
    await worker.join()
