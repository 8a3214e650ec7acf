"""A position in one column family."""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from itertools import repeat, starmap
from typing import Final

import rocksdict

from sow_server.engine.disk.rocks.options import MARK_KEY
from sow_server.engine.disk.rocks.rocks_errors import translate
from sow_server.engine.disk.rocks.sequential import SequentialRead
from sow_server.engine.values.database import Failed

STEPS_AT_ONCE: Final = 500
"""Steps of a cursor in one call, which holds the GIL throughout."""
VALUES_AT_ONCE: Final = 64
"""The same when rows are read: few enough for rows of any size."""


class Cursor:
    """A position in one column family, consistent as of the cursor's creation (rocks [1]). Used by one thread at a
    time."""

    __slots__ = ("__weakref__", "_iterator", "_read_options", "_reading", "_sequential")

    def __init__(
        self,
        iterator: rocksdict.RdictIter,
        read_options: rocksdict.ReadOptions,
        sequential: SequentialRead | None = None,
    ) -> None:
        """`sequential`: of the same state; for `fill`, while it goes on where the last one has ended."""
        self._iterator: rocksdict.RdictIter | None = iterator
        self._read_options = read_options  # rocks [3]
        self._sequential = sequential
        self._reading: weakref.ref[Generator[object, None, None]] | None = None

    def rows(self, start: bytes, stop: bytes | None, *, limit: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Rows from `start` (included) to `stop` (excluded; None: to the end), at most `limit`. Raises Damaged (rocks
        [4]).

        Only one iteration at a time: each moves the cursor.
        """
        reading = self._rows(start, stop, limit)
        self._reading = weakref.ref(reading)
        return reading

    def _rows(self, start: bytes, stop: bytes | None, limit: int | None) -> Generator[tuple[bytes, bytes], None, None]:
        at = self._open()
        at.seek(start)
        left = -1 if limit is None else limit
        end = MARK_KEY if stop is None else stop
        # Bound methods: a row costs four calls, and looking up each method would double the cost.
        valid, key_of, value_of, step = at.valid, at.key, at.value, at.next
        while left and valid():
            key = key_of()
            if key >= end:
                return
            yield key, value_of()
            left -= 1
            step()
        if left:
            self._check(at)

    def fill(
        self,
        start: bytes,
        stop: bytes,
        limit: int,
        keys: list[bytes],
        values: list[bytes],
        *,
        bytes_max: int = 2**20,
    ) -> bytes | None:
        """Appends at most `limit` rows from `start` to `stop` (excluded), ending early once the values reach
        `bytes_max`; returns where to go on, None at the end.

        The bulk form of `rows`: a generator would add to the cost of every row.
        """
        at = self._open()
        had = len(keys)
        sequential, following = self._sequential, None
        if sequential is not None and sequential.position == start:
            following = sequential.fill(limit, keys, values, bytes_max)
            if following is None:
                self._sequential = None
                at.seek(keys[-1] + b"\0" if len(keys) > had else start)  # rocks [4]
        else:
            at.seek(start)
            add_key, add_value, size = keys.append, values.append, 0
            key_of, value_of, step = at.key, at.value, at.next
            for _ in range(limit):
                key = key_of()
                if key is None:  # no row is left (rocks [13])
                    self._check(at)
                    break
                add_key(key)
                value = value_of()
                add_value(value)
                step()
                size += len(value)
                if size >= bytes_max:
                    break
        # The end is checked once, not for every row.
        end = bisect.bisect_left(keys, stop, lo=had)
        if end < len(keys):
            del values[end - len(keys) :], keys[end:]
            return None
        if following is None:
            if not at.valid():
                self._check(at)
                return None
            following = at.key()
        return following if following < stop else None

    def fill_values(
        self, start: bytes, stop: bytes, limit: int, values: list[bytes], *, bytes_max: int = 2**20
    ) -> tuple[bytes | None, int]:
        """As `fill`, without the keys: it takes about two thirds of the time. Returns where to go on (None: that was
        all), and the number of rows read."""
        at = self._open()
        at.seek(start)
        had, size = len(values), 0
        nothing: tuple[()] = ()
        valid, value_of, step = at.valid, at.value, at.next
        key: bytes = at.key() if valid() else stop
        while key < stop:
            left = limit + had - len(values)
            if left == 0 or size >= bytes_max:
                return key, len(values) - had
            found: list[bytes] = []
            # `value_of` is None where there is no row, and none is stepped over (rocks [13]).
            rows = zip(
                repeat(None, min(left, VALUES_AT_ONCE)),
                map(found.append, iter(value_of, None)),
                starmap(step, repeat(nothing)),
                strict=False,
            )
            deque(rows, maxlen=0)
            found_size = sum(map(len, found))
            if size + found_size > 2 * bytes_max or not valid() or at.key() >= stop:
                # Too much, or perhaps beyond the end: row by row.
                following = self.fill(key, stop, min(left, VALUES_AT_ONCE), [], values, bytes_max=bytes_max - size)
                return following, len(values) - had
            values += found
            size += found_size
            key = at.key()
        if not valid():
            self._check(at)
        return None, len(values) - had

    def fill_keys(self, start: bytes, limit: int, keys: list[bytes]) -> None:
        """Appends at most `limit` keys from `start` on: the bulk form of `keys`."""
        at = self._open()
        at.seek(start)
        nothing: tuple[()] = ()
        for first in range(0, limit, STEPS_AT_ONCE):
            # Without a line of Python a row, as in `fill_values`.
            rows = zip(
                repeat(None, min(STEPS_AT_ONCE, limit - first)),
                map(keys.append, iter(at.key, None)),
                starmap(at.next, repeat(nothing)),
                strict=False,
            )
            deque(rows, maxlen=0)
            if not at.valid():
                self._check(at)
                return

    def fill_keys_before(self, start: bytes, stop: bytes, limit: int, keys: list[bytes]) -> bytes | None:
        """Appends at most `limit` keys from `start` to `stop` (excluded); returns where to go on, None at the end.

        It checks every key for the end: in the short ranges of an index reading on would cost more.
        """
        at = self._open()
        at.seek(start)
        add = keys.append
        valid, key_of, step = at.valid, at.key, at.next
        while valid():
            key: bytes = key_of()
            if key >= stop:
                return None
            if limit == 0:
                return key
            limit -= 1
            add(key)
            step()
        self._check(at)
        return None

    def sample_keys(
        self, start: bytes, stop: bytes, stride: int, limit: int, keys: list[bytes]
    ) -> tuple[bytes | None, int]:
        """Appends every `stride`-th key from `start` (which need not be there) to `stop` (excluded), beginning with the
        first, until `limit` rows or more are passed; returns where to go on (None: that was all), and the number of
        rows passed.

        It steps without a line of Python a row: half the cost of reading the keys.
        """
        at = self._open()
        at.seek(start)
        passed = 0
        step, nothing = at.next, ()
        while passed < limit:
            if not at.valid():
                self._check(at)
                return None, passed
            key: bytes = at.key()
            if key >= stop:
                return None, passed
            keys.append(key)
            for first in range(0, stride, STEPS_AT_ONCE):
                # Each step is checked first: a step beyond the end would access invalid memory (rocks [13]).
                count = repeat(nothing, min(STEPS_AT_ONCE, stride - first))
                deque(zip(count, iter(at.valid, False), starmap(step, repeat(nothing)), strict=False), maxlen=0)
            if not at.valid() or at.key() >= stop:
                # The end is within this stride: the remaining rows are counted.
                self._check(at)
                left: list[bytes] = []
                self.fill_keys_before(key, stop, stride, left)
                return None, passed + len(left)
            passed += stride
        following: bytes = at.key()
        return following, passed

    def keys(self, start: bytes, stop: bytes | None, *, limit: int | None = None) -> Iterator[bytes]:
        """The keys alone, read as `rows` does."""
        reading = self._keys(start, stop, limit)
        self._reading = weakref.ref(reading)
        return reading

    def _keys(self, start: bytes, stop: bytes | None, limit: int | None) -> Generator[bytes, None, None]:
        at = self._open()
        at.seek(start)
        left = -1 if limit is None else limit
        end = MARK_KEY if stop is None else stop
        valid, key_of, step = at.valid, at.key, at.next
        while left and valid():
            key = key_of()
            if key >= end:
                return
            yield key
            left -= 1
            step()
        if left:
            self._check(at)

    def rows_back(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows from the last one at or before `start` back to `stop` (included). Otherwise as `rows`."""
        reading = self._rows_back(start, stop)
        self._reading = weakref.ref(reading)
        return reading

    def _rows_back(self, start: bytes, stop: bytes) -> Generator[tuple[bytes, bytes], None, None]:
        at = self._open()
        at.seek_for_prev(start)
        valid, key_of, value_of, step = at.valid, at.key, at.value, at.prev
        while valid():
            key = key_of()
            if key < stop:
                return
            yield key, value_of()
            step()
        self._check(at)

    def find(self, key: bytes) -> bytes | None:
        """The value of one key, as of the cursor's creation."""
        at = self._open()
        at.seek(key)
        if at.valid():
            return at.value() if at.key() == key else None
        self._check(at)
        return None

    def last_before(self, stop: bytes) -> tuple[bytes, bytes] | None:
        """The last row at or before `stop`."""
        at = self._open()
        at.seek_for_prev(stop)
        if at.valid():
            return at.key(), at.value()
        self._check(at)
        return None

    def last(self) -> tuple[bytes, bytes] | None:
        """The last row of the column family."""
        at = self._open()
        at.seek_to_last()
        if at.valid() and at.key() == MARK_KEY:
            at.prev()
        if at.valid():
            return at.key(), at.value()
        self._check(at)
        return None

    def close(self) -> None:
        """Lets go of the iterators (rocks [9]); using the cursor afterwards is an error of the caller."""
        self._iterator = self._sequential = None
        if self._reading is not None and (reading := self._reading()) is not None:
            reading.close()  # one that stopped half-way holds the iterator in its frame

    def _open(self) -> rocksdict.RdictIter:
        if self._iterator is None:
            raise Failed("the store is closed")
        return self._iterator

    @staticmethod
    def _check(at: rocksdict.RdictIter) -> None:
        try:
            at.status()
        except Exception as error:
            raise translate(error) from error
