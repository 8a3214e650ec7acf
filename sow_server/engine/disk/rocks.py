"""RocksDB. Only this module imports rocksdict; every trap of it is handled here.

[1]  Snapshots do not isolate iterators; an iterator is consistent as of its creation. `Rocks.cursor` opens one;
     a cut over column families opens all of them between two commits.
[2]  `set_iterate_lower_bound` sets the upper bound: never called; a cursor seeks.
[3]  Iterator bounds dangle with their ReadOptions: no bounds are set; a cursor compares keys in Python and keeps
     its ReadOptions alive.
[4]  `items()` ends silently at a corrupt block: a cursor checks `status()` whenever it runs out.
[5]  `write` holds the GIL, `flush_wal` does not: batches are written unsynced, then the log is synced.
[6]  A stalled `write` would freeze every thread: `no_slowdown`, and `Stalled` is raised. A WriteBatch is consumed
     even by a failed write: a `Batch` is plain data and can be written again.
[7]  After a failed log write the database stays broken: `Failed` is final for this handle.
[8]  The default log recovery drops all that follows a damaged spot: a torn tail opens, damage before it refuses.
[9]  `close` frees the lock only once every handle and iterator is closed: `Rocks` owns and closes them all.
[10]  Keys and values are exactly bytes; errors are bare exceptions, told apart by prefix in `_translate` only.
[11]  A database without its CURRENT file would be created anew, empty: `create` tells whether that is intended.
[12]  A checkpoint holds the GIL while it writes memtables out: `flush`, which does not hold it, is called first.
[13]  A step beyond the last row crashes the process: before each the cursor asks whether there is a row.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat, starmap
from operator import itemgetter
from pathlib import Path
from typing import Final

import rocksdict

RECORDS: Final = "records"
EXPIRY: Final = "expiry"
JOURNAL: Final = "journal"
COMMITS: Final = "commits"
INDEXES: Final = "indexes"
TOMBSTONES: Final = "tombstones"
STAGING: Final = "staging"
META: Final = "meta"
FAMILIES: Final = (RECORDS, EXPIRY, JOURNAL, COMMITS, INDEXES, TOMBSTONES, STAGING, META)

STALL_PATIENCE_SECONDS: Final = 120.0
STALL_LOOK_SECONDS: Final = 0.01
STEPS_AT_ONCE: Final = 500
"""Steps of a cursor in one call, which holds the GIL throughout."""
VALUES_AT_ONCE: Final = 64
"""The same when rows are read: few enough for rows of any size."""
_VALUE: Final = itemgetter(2)


class RocksError(Exception):
    """Any error of RocksDB; the subclass tells the kind."""


class Locked(RocksError):
    """Another process has the database open."""


class Damaged(RocksError):
    """A checksum does not match, or a file is damaged."""


class Stalled(RocksError):
    """A write would have had to wait for compaction. Nothing was written; the same batch may be tried again."""


class Failed(RocksError):
    """Input or output failed. After a failed write the handle is broken for good ([7])."""


class DiskFull(Failed):
    """There is no space, or a file may not grow."""


@dataclass(frozen=True, slots=True)
class RocksOptions:
    """Memory and work that RocksDB may use."""

    block_cache_bytes: int = 128 * 2**20
    records_memtable_bytes: int = 32 * 2**20
    other_memtable_bytes: int = 16 * 2**20
    log_bytes_max: int = 256 * 2**20
    background_jobs: int = 2


@dataclass(slots=True)
class Batch:
    """The changes of one atomic write: first ranges, then deletes, then puts, per column family.

    Plain data, so that it survives a write that stalls ([6]). If a key is in both deletes and puts, the put counts.
    """

    puts: dict[str, dict[bytes, bytes]] = field(default_factory=lambda: {name: {} for name in FAMILIES})
    deletes: dict[str, list[bytes]] = field(default_factory=lambda: {name: [] for name in FAMILIES})
    ranges: list[tuple[str, bytes, bytes]] = field(default_factory=list)


class Cursor:
    """A position in one column family, consistent as of the cursor's creation ([1]). Used by one thread at a time."""

    __slots__ = ("__weakref__", "_iterator", "_read_options", "_reading")

    def __init__(self, iterator: rocksdict.RdictIter, read_options: rocksdict.ReadOptions) -> None:
        self._iterator: rocksdict.RdictIter | None = iterator
        self._read_options = read_options  # [3]
        self._reading: weakref.ref[Generator[object, None, None]] | None = None

    def rows(self, start: bytes, stop: bytes | None, *, limit: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Rows from `start` (included) to `stop` (excluded; None: to the end), at most `limit`. Raises Damaged ([4]).

        Only one iteration at a time: each moves the cursor.
        """
        reading = self._rows(start, stop, limit)
        self._reading = weakref.ref(reading)
        return reading

    def _rows(self, start: bytes, stop: bytes | None, limit: int | None) -> Generator[tuple[bytes, bytes], None, None]:
        at = self._open()
        at.seek(start)
        left = -1 if limit is None else limit
        # Bound methods: a row costs four calls, and looking up each method would double the cost.
        valid, key_of, value_of, step = at.valid, at.key, at.value, at.next
        while left and valid():
            key = key_of()
            if stop is not None and key >= stop:
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
        at.seek(start)
        add_key, add_value = keys.append, values.append
        size, had = 0, len(keys)
        valid, key_of, value_of, step = at.valid, at.key, at.value, at.next
        for _ in range(limit):
            if not valid():
                self._check(at)
                break
            add_key(key_of())
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
        if not valid():
            self._check(at)
            return None
        following: bytes = key_of()
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
            rows = zip(
                repeat(None, min(left, VALUES_AT_ONCE)),
                iter(valid, False),  # [13]
                starmap(value_of, repeat(nothing)),
                starmap(step, repeat(nothing)),
                strict=False,
            )
            found: list[bytes] = list(map(_VALUE, rows))
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
        add = keys.append
        valid, key_of, step = at.valid, at.key, at.next
        for _ in range(limit):
            if not valid():
                self._check(at)
                return
            add(key_of())
            step()

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
                # Each step is checked first: a step beyond the end would access invalid memory ([13]).
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
        """Like `rows`, keys only."""
        reading = self._keys(start, stop, limit)
        self._reading = weakref.ref(reading)
        return reading

    def _keys(self, start: bytes, stop: bytes | None, limit: int | None) -> Generator[bytes, None, None]:
        at = self._open()
        at.seek(start)
        left = -1 if limit is None else limit
        valid, key_of, step = at.valid, at.key, at.next
        while left and valid():
            key = key_of()
            if stop is not None and key >= stop:
                return
            yield key
            left -= 1
            step()
        if left:
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
        if at.valid():
            return at.key(), at.value()
        self._check(at)
        return None

    def close(self) -> None:
        """Lets go of the iterator ([9]); using the cursor afterwards is an error of the caller."""
        self._iterator = None
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
            raise _translate(error) from error


class Rocks:
    """Owns the database handle, its column families, and every cursor on it."""

    def __init__(
        self,
        path: Path,
        options: RocksOptions | None = None,
        *,
        create: bool,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Opens the database at `path`; with `create` it makes a new one, where none may exist yet ([11]). Closing it
        also calls `on_close`.

        Raises Locked, Damaged, DiskFull or Failed.
        """
        options = options or RocksOptions()
        if create == (path / "CURRENT").exists():
            raise Damaged(f"{path} holds a database already" if create else f"{path / 'CURRENT'} is missing")
        self._path = path
        self._on_close = on_close
        self._cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
        self._lock = threading.Lock()
        try:
            families = {name: _family_options(name, options) for name in FAMILIES}
            self._db: rocksdict.Rdict | None = rocksdict.Rdict(
                str(path), options=_database_options(options, create=create), column_families=families
            )
            self._families = {name: self._db.get_column_family(name) for name in FAMILIES}
            self._handles = {name: self._db.get_column_family_handle(name) for name in FAMILIES}
        except Exception as error:
            raise _translate(error) from error
        self._write_options = rocksdict.WriteOptions()
        self._write_options.no_slowdown = True  # [6]

    # -- writing: the writer thread alone ---------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        """Applies `batch` atomically, without syncing. Raises Stalled (try again) or Failed (final)."""
        db = self._open()
        write = rocksdict.WriteBatch(raw_mode=True)
        for name, begin, end in batch.ranges:
            write.delete_range(begin, end, self._handles[name])
        for name, keys in batch.deletes.items():
            if keys:
                write.set_default_column_family(self._handles[name])
                deque(map(write.delete, keys), maxlen=0)
        for name, puts in batch.puts.items():
            if puts:
                write.set_default_column_family(self._handles[name])
                # map() in C: the loop costs less than the puts.
                deque(map(write.put, puts.keys(), puts.values()), maxlen=0)
        try:
            db.write(write, self._write_options)
        except Exception as error:
            raise _translate(error) from error

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
        """Makes all writes so far durable, without holding the GIL ([5]). Raises Failed (final)."""
        try:
            self._open().flush_wal(True)
        except Exception as error:
            raise _translate(error) from error

    # -- reading: any thread ----------------------------------------------------------------------------------------

    def get(self, family: str, key: bytes) -> bytes | None:
        """The value of one key."""
        try:
            value: bytes | None = self._family(family).get(key)
        except Exception as error:
            raise _translate(error) from error
        return value

    def multi_get(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of many keys, in their order, without holding the GIL ([5])."""
        if len(keys) < 2:
            # Reading a list releases the GIL, which costs too much for one key.
            return [self.get(family, key) for key in keys]
        try:
            values: list[bytes | None] = self._family(family).get(list(keys))  # type: ignore[assignment]  # a list for a list
        except Exception as error:
            raise _translate(error) from error
        return values

    def cursor(self, family: str, *, fill_cache: bool = True) -> Cursor:
        """A cursor on the state as of now."""
        read_options = rocksdict.ReadOptions()
        read_options.fill_cache(fill_cache)  # type: ignore[call-arg]  # a method; the stub says property
        with self._lock:
            cursor = Cursor(self._family(family).iter(read_options), read_options)
            self._cursors.add(cursor)
        return cursor

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
        return rows

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
                raise _translate(error) from error

    def checkpoint(self, path: Path) -> None:
        """Makes a copy of the database as of between two writes; its table files are links. Call `flush` first, so that
        it is quick ([12]). Raises RocksError."""
        try:
            rocksdict.Checkpoint(self._open()).create_checkpoint(str(path))
        except Exception as error:
            raise _translate(error) from error

    def compact(self, family: str, begin: bytes | None = None, end: bytes | None = None) -> None:
        """Compacts a key range, without holding the GIL."""
        options = rocksdict.CompactOptions()
        options.set_exclusive_manual_compaction(False)
        options.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force_optimized())
        try:
            self._family(family).compact_range(begin, end, options)
        except Exception as error:
            raise _translate(error) from error

    def parts(self, ranges: Sequence[tuple[bytes, bytes]], bytes_max: int) -> list[tuple[bytes, bytes]]:
        """Splits ranges, which do not overlap, into parts to compact one by one: each of about `bytes_max` of table
        files, or one file.

        RocksDB writes whole files, and two ranges in one file would write it twice, so ranges with little between them
        are joined. Large ranges are cut at the ends of files. RocksDB lists the files of all column families together,
        without their names, so files of other families with such keys make the parts smaller than necessary.
        """
        files = sorted((file["end_key"] or b"", file["size"]) for file in self._open().live_files())
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
        """Whether RocksDB is slowing writes down or stopping them at this moment."""
        db = self._open()
        return bool(
            db.property_int_value("rocksdb.is-write-stopped")
            or db.property_int_value("rocksdb.actual-delayed-write-rate")
        )

    def close(self) -> None:
        """Closes everything and frees the lock ([9]). No other thread may be inside a call."""
        with self._lock:
            db, self._db = self._db, None
            if db is None:
                return
            for cursor in list(self._cursors):
                cursor.close()
            handles, self._handles = self._handles, {}
            families, self._families = self._families, {}
            # Closing flushes, and a broken handle ([7]) fails at that once more. No data are lost: synced writes are in
            # the log. If the error were not suppressed, the rest would stay open, and the lock held.
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


def first_log_needed(path: Path) -> int:
    """The number of the first write-ahead log that the database at `path`, which is not open, needs.

    It changes nothing and reads the existing logs, so it may take as long as a start. Raises RocksError.
    """
    options = RocksOptions()
    try:
        database = rocksdict.Rdict(
            str(path),
            options=_database_options(options, create=False),
            column_families={name: _family_options(name, options) for name in FAMILIES},
            access_type=rocksdict.AccessType.read_only(False),
        )
        try:
            return database.property_int_value("rocksdb.min-log-number-to-keep") or 0
        finally:
            database.close()
    except Exception as error:
        raise _translate(error) from error


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


def _database_options(options: RocksOptions, *, create: bool) -> rocksdict.Options:
    database = rocksdict.Options(raw_mode=True)
    database.create_if_missing(create)
    database.create_missing_column_families(True)
    database.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())  # [8]
    database.set_paranoid_checks(True)
    database.set_max_total_wal_size(options.log_bytes_max)
    database.set_max_background_jobs(options.background_jobs)
    # Compaction gets the CPU time that the threads of requests leave; flushes, in the other pool, keep their priority.
    background = rocksdict.Env()
    background.lower_thread_pool_cpu_priority()
    database.set_env(background)
    database.set_keep_log_file_num(4)
    database.set_max_log_file_size(4 * 2**20)
    database.set_bytes_per_sync(2**20)
    return database


def _family_options(name: str, options: RocksOptions) -> rocksdict.Options:
    family = rocksdict.Options(raw_mode=True)
    records = name == RECORDS
    family.set_write_buffer_size(options.records_memtable_bytes if records else options.other_memtable_bytes)
    family.set_max_write_buffer_number(4)
    family.set_compression_type(rocksdict.DBCompressionType.lz4())
    family.set_level_compaction_dynamic_level_bytes(True)
    # Under no_slowdown a slowed write is refused, so slowing down starts late, and stopping later still.
    family.set_level_zero_slowdown_writes_trigger(40)
    family.set_level_zero_stop_writes_trigger(60)
    family.set_soft_pending_compaction_bytes_limit(64 * 2**30)
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(_shared_cache(options.block_cache_bytes))
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    if name in (RECORDS, TOMBSTONES):
        table.set_bloom_filter(10, False)
    if records:
        # Most look-ups of a publish are for missing keys: the memtable's own filter answers those.
        family.set_memtable_prefix_bloom_ratio(0.1)
        family.set_memtable_whole_key_filtering(True)
    if name in (EXPIRY, INDEXES, TOMBSTONES):
        # Some families are deleted from at their head all the time, others at a value that records leave (the state
        # "open", say): files that are mostly tombstones get compacted.
        family.add_compact_on_deletion_collector_factory(1000, 500, 0.5)
    family.set_block_based_table_factory(table)
    return family


_caches: dict[int, rocksdict.Cache] = {}


def _shared_cache(capacity: int) -> rocksdict.Cache:
    """One block cache for all column families of a size; RocksDB keeps the cache of an open database alive."""
    return _caches.setdefault(capacity, rocksdict.Cache(capacity))


def _translate(error: Exception) -> RocksError:
    """The one place that reads RocksDB's error texts ([10])."""
    if isinstance(error, RocksError):
        return error
    text = " ".join(str(error).split())  # some run over several lines, and a message is one
    low = text.lower()
    if "result incomplete" in low or "write stall" in low:
        return Stalled(text)
    if "lock hold by current process" in low or ("/lock" in low and "temporarily unavailable" in low):
        return Locked(text)
    if low.startswith("corruption") or "checksum mismatch" in low or "corrupted" in low:
        return Damaged(text)
    if os.strerror(errno.ENOSPC).lower() in low or os.strerror(errno.EFBIG).lower() in low or "maxsize" in low:
        return DiskFull(text)
    return Failed(text)
