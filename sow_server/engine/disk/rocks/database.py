"""The database: the only handle that writes."""

from __future__ import annotations

import bisect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final

import rocksdict

from sow_server.engine.disk.rocks.cursor import Cursor
from sow_server.engine.disk.rocks.handle import Handle
from sow_server.engine.disk.rocks.options import (
    FAMILIES,
    FOLLOWED,
    MARK_BYTES,
    MARK_KEY,
    META,
    all_family_options,
    database_options,
)
from sow_server.engine.disk.rocks.rocks_errors import translate
from sow_server.engine.values.database import Damaged, RocksOptions, Stalled

STALL_PATIENCE_SECONDS: Final = 120.0
STALL_LOOK_SECONDS: Final = 0.01
_NOT_FOUND: Final = "key not found"
"""The error of a snapshot that has no such key."""


@dataclass(slots=True)
class Batch:
    """The changes of one atomic write: first ranges, then deletes, then puts, per column family.

    Plain data, so that it survives a write that stalls (rocks [6]). If a key is in both deletes and puts, the put
    counts.
    """

    # Most batches change some of the families: the others take no room.
    puts: defaultdict[str, dict[bytes, bytes]] = field(default_factory=partial(defaultdict, dict))
    deletes: defaultdict[str, list[bytes]] = field(default_factory=partial(defaultdict, list))
    ranges: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    beat: bool = False
    """True if the write leaves its number in all followed families, although it may change none of them."""
    note: bytes = b""
    """A note for processes that follow the database; empty: that of the last write."""


class Rocks(Handle):
    """The handle of the database that writes. There is one in all processes together (`Locked`)."""

    def __init__(
        self,
        path: Path,
        options: RocksOptions | None = None,
        *,
        create: bool,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Opens the database at `path`; with `create` it makes a new one, where none may exist yet (rocks [11]).
        Closing it also calls `on_close`.

        Raises Locked, Damaged, DiskFull or Failed.
        """
        wanted = options or RocksOptions()
        if create == (path / "CURRENT").exists():
            raise Damaged(f"{path} holds a database already" if create else f"{path / 'CURRENT'} is missing")
        super().__init__(
            lambda: rocksdict.Rdict(
                str(path),
                options=database_options(path, wanted, create=create),
                column_families=all_family_options(wanted),
            ),
            path,
            on_close,
        )
        self._write_options = rocksdict.WriteOptions()
        self._write_options.no_slowdown = True  # rocks [6]
        rows = [self.get(family, MARK_KEY) for family in FOLLOWED]
        self.write_number = max([int.from_bytes(row[:MARK_BYTES], "big") for row in rows if row is not None], default=0)
        """The number of the last write."""
        self._note = b""
        self.marking = False
        """True if writes leave their numbers. It costs up to three rows a write, so it begins with the first process
        that follows the database. Set it while nobody writes, and call `flush` before the process opens the database:
        then no log has a write without a number."""

    # -- writing: the writer thread alone ---------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        """Applies `batch` atomically, without syncing. Raises Stalled (try again) or Failed (final)."""
        db = self._open()
        write = rocksdict.WriteBatch(raw_mode=True)
        put, delete = write.put, write.delete
        number = self.write_number + 1
        if self.marking:
            self._mark(write, batch, number)
        for name, begin, end in batch.ranges:
            write.delete_range(begin, end, self._handles[name])
        for name in FAMILIES if batch.deletes else ():
            if keys := batch.deletes.get(name):
                handle = self._handles[name]
                for key in keys:
                    delete(key, handle)
        for name in FAMILIES:
            if puts := batch.puts.get(name):
                handle = self._handles[name]
                for key, value in puts.items():
                    put(key, value, handle)
        try:
            db.write(write, self._write_options)
        except Exception as error:
            raise translate(error) from error
        self.write_number = number

    def _mark(self, write: rocksdict.WriteBatch, batch: Batch, number: int) -> None:
        """Leaves the number of a write in the followed families that it changes (rocks [15]). In META the note follows
        it."""
        self._note = batch.note or self._note
        mark = number.to_bytes(8, "big")
        for name in FOLLOWED:
            if batch.beat or batch.puts[name] or batch.deletes[name] or batch.ranges:
                write.put(MARK_KEY, mark + self._note if name == META else mark, self._handles[name])

    def write_waiting(self, batch: Batch) -> None:
        """As `write`, but waits while it stalls: for a start, which has no caller to refuse. Raises Stalled when no
        write succeeded for `STALL_PATIENCE_SECONDS`."""
        give_up = time.monotonic() + STALL_PATIENCE_SECONDS
        while True:
            try:
                self.write(batch)
            except Stalled:
                if time.monotonic() >= give_up:
                    raise
                time.sleep(STALL_LOOK_SECONDS)
            else:
                return

    def sync(self) -> None:
        """Makes all writes so far durable, without holding the GIL (rocks [5]). Raises Failed (final)."""
        try:
            self._open().flush_wal(True)
        except Exception as error:
            raise translate(error) from error

    # -- looking up: any thread ------------------------------------------------------------------------------------

    def get(self, family: str, key: bytes) -> bytes | None:
        """The value of one key."""
        try:
            value: bytes | None = self._family(family).get(key)
        except Exception as error:
            raise translate(error) from error
        return value

    def multi_get(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of many keys, in their order, without holding the GIL (rocks [5])."""
        if len(keys) < 2:
            # Reading a list releases the GIL, which costs too much for one key.
            return [self.get(family, key) for key in keys]
        try:
            values: list[bytes | None] = self._family(family).get(list(keys))  # type: ignore[assignment]  # a list for a list
        except Exception as error:
            raise translate(error) from error
        return values

    def each(self, family: str, keys: Sequence[bytes]) -> Iterator[bytes | None]:
        """The values of a few keys, all of one instant, read one by one: for a reader that stops once it has enough. It
        holds the GIL, as `get` does."""
        if len(keys) == 1:
            yield self.get(family, keys[0])
            return
        snapshot = self._family(family).snapshot()
        for key in keys:
            try:
                value: bytes | None = snapshot[key]
            except Exception as error:
                if str(error) != _NOT_FOUND:
                    raise translate(error) from error
                value = None
            yield value

    # -- the whole --------------------------------------------------------------------------------------------------

    def verify(self) -> int:
        """Reads every block of every column family once. Returns the rows read; raises Damaged."""
        rows = 0
        for name in FAMILIES:
            read_options = rocksdict.ReadOptions()
            read_options.fill_cache(False)  # type: ignore[call-arg]  # a method; the stub says property
            at = self._family(name).iter(read_options)
            at.seek_to_first()
            valid, step = at.valid, at.next
            while valid():
                rows += 1
                step()
            Cursor._check(at)
        return rows - sum(self.get(family, MARK_KEY) is not None for family in FOLLOWED)

    def table_bytes(self) -> int:
        """Bytes of the live table files."""
        return sum(int(file["size"]) for file in self._open().live_files())

    def free_bytes(self) -> int:
        """Free bytes of the disk."""
        found = os.statvfs(self._path)
        return found.f_bavail * found.f_frsize

    def flush(self) -> None:
        """Writes the memtables out as table files."""
        for name in FAMILIES:
            try:
                self._family(name).flush()
            except Exception as error:
                raise translate(error) from error

    def checkpoint(self, path: Path) -> None:
        """Makes a copy of the database as of between two writes; its table files are links. Call `flush` first, so that
        it is quick (rocks [12]). Raises RocksError."""
        try:
            rocksdict.Checkpoint(self._open()).create_checkpoint(str(path))
        except Exception as error:
            raise translate(error) from error

    def compact(self, family: str, begin: bytes | None = None, end: bytes | None = None) -> None:
        """Compacts a key range, without holding the GIL."""
        options = rocksdict.CompactOptions()
        options.set_exclusive_manual_compaction(False)
        options.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force_optimized())
        try:
            self._family(family).compact_range(begin, end, options)
        except Exception as error:
            raise translate(error) from error

    def parts(self, ranges: Sequence[tuple[bytes, bytes]], bytes_max: int) -> list[tuple[bytes, bytes]]:
        """Splits ranges, which do not overlap, into parts to compact one by one: each of about `bytes_max` of table
        files, or one file.

        RocksDB writes whole files, and two ranges in one file would write it twice, so ranges with little between them
        are joined. Large ranges are cut at the ends of files. RocksDB lists the files of all column families together,
        without their names, so files of other families with such keys make the parts smaller than necessary.
        """
        # A file with the mark of a followed family ends behind all rows; its begin tells more about its place.
        files = sorted(
            ((file["start_key"] if file["end_key"] == MARK_KEY else file["end_key"]) or b"", file["size"])
            for file in self._open().live_files()
        )
        ends = [end for end, _ in files]
        before = [0, *accumulate(size for _, size in files)]
        """Bytes of the files that end before the one at the same place."""
        joined: list[tuple[bytes, bytes]] = []
        for begin, end in sorted(ranges):
            if joined:
                last = joined[-1]
                if before[bisect.bisect_left(ends, begin)] - before[bisect.bisect_left(ends, last[1])] < bytes_max // 2:
                    joined[-1] = (last[0], end)
                    continue
            joined.append((begin, end))
        parts: list[tuple[bytes, bytes]] = []
        for begin, end in joined:
            start, size = begin, 0
            for at in range(bisect.bisect_right(ends, begin), bisect.bisect_left(ends, end)):
                size += files[at][1]
                if size >= bytes_max and ends[at] > start:
                    parts.append((start, ends[at]))
                    start, size = ends[at], 0
            parts.append((start, end))
        return parts

    def write_stalled(self) -> bool:
        """True if RocksDB is slowing writes down or stopping them at this moment."""
        db = self._open()
        return bool(
            db.property_int_value("rocksdb.is-write-stopped")
            or db.property_int_value("rocksdb.actual-delayed-write-rate")
        )


def first_log_needed(path: Path) -> int:
    """The number of the first write-ahead log that the database at `path`, which is not open, needs.

    It changes nothing and reads the existing logs, so it may take as long as a start. Raises RocksError.
    """
    options = RocksOptions()
    try:
        there = set(rocksdict.Rdict.list_cf(str(path)))  # an earlier release had fewer
        families = {name: own for name, own in all_family_options(options).items() if name in there}
        database = rocksdict.Rdict(
            str(path),
            options=database_options(path, options, create=False),
            column_families=families,
            access_type=rocksdict.AccessType.read_only(False),
        )
        try:
            return database.property_int_value("rocksdb.min-log-number-to-keep") or 0
        finally:
            database.close()
    except Exception as error:
        raise translate(error) from error


def disk_bytes(path: Path) -> int:
    """Disk space of the files below `path`, in bytes."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:  # compaction removed it meanwhile
                continue
    return total
