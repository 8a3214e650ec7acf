"""Where the records of a query come from: ranges of keys, known keys, or an index that is read as it stands.

    [1]  Records come in key order, each once, and only those that are alive at the cut.
    [2]  One call of `read` is a bounded piece of work: in stored records, in look-ups, and in bytes.

Used by one thread at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Final, Protocol, TypeAlias

from sow_server.engine.reading import Cut
from sow_server.engine.stored import HeaderColumns, add_headers
from sow_server.query.planner import ABOVE_ALL, EVERYTHING, IndexBound, Range

BATCH_BYTES: Final = 2**20
SCAN_CHUNK: Final = 10_000
"""Stored records that a piece of work reads at most: some ten milliseconds."""
FIND_CHUNK: Final = 1_000
"""Records that a piece of work looks up by key, which costs about four times as much as reading on."""
RANGE_FIRST: Final = 32
"""Records that are read of a range of keys before it counts as long."""


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

    def read(self, limit: int, keys: list[bytes], values: list[bytes], headers: HeaderColumns | None = None) -> int:
        """Appends the live records among the next `limit` stored ones, at most, and their headers. Returns the number
        of stored ones read."""


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

    def read(self, limit: int, keys: list[bytes], values: list[bytes], headers: HeaderColumns | None = None) -> int:
        return self._read(limit, keys, values, headers)

    def read_values(self, limit: int, values: list[bytes]) -> int:
        """As `read` without the keys, which is faster."""
        return self._read(limit, None, values, None)

    def _read(self, limit: int, keys: list[bytes] | None, values: list[bytes], headers: HeaderColumns | None) -> int:
        scanned = size = 0
        cut = self._cut
        for _ in range(FIND_CHUNK):  # each of many ranges may hold only one record
            assert self._at is not None, "asked only while there is more"
            had, asked = len(values), min(limit - scanned, self._reach)
            if keys is None:
                self._at, read = cut.fill_values(self._at, asked, values, stop=self._stop)
            else:
                self._at, read = cut.fill(self._at, asked, keys, values, stop=self._stop, headers=headers)
            scanned += read
            if self._at is None:
                self._next_range()
                self._reach = min(self._reach, RANGE_FIRST)
            elif read < asked:
                break  # it has reached the limit of bytes
            else:
                self._reach = min(4 * self._reach, SCAN_CHUNK)
            if self._at is None or scanned >= limit:
                break
            size += sum(map(len, islice(values, had, None)))
            if size >= BATCH_BYTES:
                break
        return scanned


class Points:
    """The records of known keys, in order and without duplicates."""

    def __init__(self, cut: Cut, keys: Iterator[bytes], streams: Sequence[Entries] = ()) -> None:
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

    def read(self, limit: int, keys: list[bytes], values: list[bytes], headers: HeaderColumns | None = None) -> int:
        read = size = 0
        had = len(values)
        while self._next is not None and read < min(limit, FIND_CHUNK) and size < BATCH_BYTES:
            key, self._next = self._next, next(self._keys, None)
            read += 1
            value = self._cut.find(key)
            if value is not None:
                keys.append(key)
                values.append(value)
                size += len(value)
        if headers is not None:
            add_headers(headers, values[had:])
        return read


class Entries:
    """The record keys of the index entries in some intervals, one interval after the other."""

    def __init__(self, fill: Fill, intervals: Iterable[tuple[bytes, bytes]]) -> None:
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


Fill: TypeAlias = Callable[[bytes, bytes, int, list[bytes]], bytes | None]
"""As `IndexCursor.fill`."""


def merged(cut: Cut, bound: IndexBound, begin: bytes) -> Points:
    """The records of a bound that consists of points, from the key `begin` on (included). Its entries are read
    meanwhile: those of each point are in key order."""
    cursor = cut.indexes[bound.steps]
    streams = [Entries(cursor.fill, [(start + begin, stop)]) for start, stop in bound.intervals]
    chunk = max(16, FIND_CHUNK // len(streams))
    keys = heapq.merge(*[stream.stream(chunk) for stream in streams])
    return Points(cut, (key for key, _ in groupby(keys)), streams)
