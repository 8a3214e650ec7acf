"""Rows one after the other, without a way back: the fast way through many of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import rocksdict


class SequentialRead:
    """The rows of a column family from a key on, as of its creation (rocks [1]). Used by one thread at a time.

    A row takes one call of rocksdict, where a cursor needs four. It ends without an error, also at a damaged block
    (rocks [4]): a cursor has to look at the rest.
    """

    __slots__ = ("_next", "_pairs", "_read_options", "position")

    def __init__(
        self, pairs: Iterator[tuple[bytes, bytes]], read_options: rocksdict.ReadOptions, position: bytes
    ) -> None:
        self._pairs = pairs
        self._read_options = read_options  # rocks [3]
        self._next: tuple[bytes, bytes] | None = next(pairs, None)
        self.position = position
        """The next row is the first one from here on."""

    def fill(self, limit: int, keys: list[bytes], values: list[bytes], bytes_max: int) -> bytes | None:
        """Appends at most `limit` rows, but at least one, and ends early once the values reach `bytes_max`; returns the
        key to go on at, None if there are no rows any more."""
        if self._next is None:
            return None
        add_key, add_value, size = keys.append, values.append, 0
        for key, value in chain((self._next,), islice(self._pairs, limit - 1)):
            add_key(key)
            add_value(value)
            size += len(value)
            if size >= bytes_max:
                break
        self._next = next(self._pairs, None)
        if self._next is None:
            return None
        self.position = self._next[0]
        return self.position
