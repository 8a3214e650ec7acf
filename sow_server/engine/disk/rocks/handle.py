"""An open database, as far as reading goes: column families, cursors, closing."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, cast

import rocksdict

from sow_server.engine.disk.rocks.cursor import Cursor
from sow_server.engine.disk.rocks.options import FAMILIES
from sow_server.engine.disk.rocks.rocks_errors import translate
from sow_server.engine.disk.rocks.sequential import SequentialRead
from sow_server.engine.values.database import Failed

READ_AHEAD_BYTES: Final = 64 * 2**10
"""Bytes of a table file that are read at once, where rows are read one after the other and are not in the cache."""


class Handle:
    """Owns the handle of the database, its column families, and every cursor on it."""

    def __init__(
        self, open_database: Callable[[], rocksdict.Rdict], path: Path, on_close: Callable[[], None] | None
    ) -> None:
        """`path`: of the database. Closing it also calls `on_close`. Raises RocksError."""
        self._path = path
        self._on_close = on_close
        self._cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
        self._lock = threading.Lock()
        try:
            self._db: rocksdict.Rdict | None = open_database()
            self._families = {name: self._db.get_column_family(name) for name in FAMILIES}
            self._handles = {name: self._db.get_column_family_handle(name) for name in FAMILIES}
        except Exception as error:
            raise translate(error) from error

    # -- reading: any thread ----------------------------------------------------------------------------------------

    def cursor(self, family: str, *, fill_cache: bool = True, reads_from: bytes | None = None) -> Cursor:
        """A cursor on the state as of now. `reads_from`: its `fill` will read many rows from this key on, and be faster
        for it. The first of them is read already here."""
        read_options = rocksdict.ReadOptions()
        read_options.fill_cache(fill_cache)  # type: ignore[call-arg]  # a method; the stub says property
        with self._lock:
            found = self._family(family)
            sequential = None if reads_from is None else _sequential(found, reads_from, fill_cache=fill_cache)
            cursor = Cursor(found.iter(read_options), read_options, sequential)
            self._cursors.add(cursor)
        return cursor

    def close(self) -> None:
        """Closes everything and frees the lock (rocks [9]). No other thread may be inside a call."""
        with self._lock:
            db, self._db = self._db, None
            if db is None:
                return
            for cursor in list(self._cursors):
                cursor.close()
            handles, self._handles = self._handles, {}
            families, self._families = self._families, {}
            # Closing flushes, and a broken handle (rocks [7]) fails at that once more. No data are lost: synced writes
            # are in the log. If the error were not suppressed, the rest would stay open, and the lock held.
            for family in families.values():
                with contextlib.suppress(Exception):
                    family.close()
            families.clear()
            handles.clear()
            with contextlib.suppress(Exception):
                db.close()
            if self._on_close is not None:
                self._on_close()

    def _open(self) -> rocksdict.Rdict:
        if self._db is None:
            raise Failed("the store is closed")
        return self._db

    def _family(self, name: str) -> rocksdict.Rdict:
        try:
            return self._families[name]
        except KeyError:
            raise Failed("the store is closed") from None


def _sequential(family: rocksdict.Rdict, start: bytes, *, fill_cache: bool) -> SequentialRead:
    read_options = rocksdict.ReadOptions()
    read_options.fill_cache(fill_cache)  # type: ignore[call-arg]  # as in `Handle.cursor`
    read_options.set_readahead_size(READ_AHEAD_BYTES)
    pairs = family.items(from_key=start, read_opt=read_options)
    return SequentialRead(cast("Iterator[tuple[bytes, bytes]]", pairs), read_options, start)
