"""RocksDB. Only this package imports rocksdict; every trap of it is handled here.

[1]  Snapshots do not isolate iterators; an iterator is consistent as of its creation. `Rocks.cursor` opens one;
     a cut over column families opens all of them between two commits.
[2]  `set_iterate_lower_bound` sets the upper bound: never called; a cursor seeks.
[3]  Iterator bounds dangle with their ReadOptions: no bounds are set; a cursor compares keys in Python and keeps
     its ReadOptions alive.
[4]  `items()` ends silently at a corrupt block: a cursor checks `status()` whenever it runs out, also of `items()`.
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
[14]  A secondary reads the list of table files first, and the logs after it. If the database writes a memtable out and
     removes its log in between, the secondary shows new rows of one column family without those of another, and tells
     no error: `Secondary.catch_up` repeats itself until no log was removed meanwhile.
[15]  A secondary keeps a memtable that the database has written out since, until it reads a later write to the same
     column family from a log. Meanwhile the old rows of the memtable hide newer ones: always from a look-up by key, and
     from a cursor once compaction has given the newer ones the sequence 0. So, once there is a secondary, every write
     to a followed family leaves its number there. A look-up of it tells the number of the last write in the memtable,
     if there is one. A state is used only if these numbers are not below that of a write made for it, after the state
     before was left.
"""

from __future__ import annotations

from sow_server.engine.disk.rocks.cursor import Cursor
from sow_server.engine.disk.rocks.database import Batch, Rocks, disk_bytes, first_log_needed
from sow_server.engine.disk.rocks.options import (
    COMMITS,
    EXPIRY,
    FAMILIES,
    FOLLOWED,
    INDEXES,
    JOURNAL,
    MARK_BYTES,
    MARK_KEY,
    META,
    RECORDS,
    STAGING,
    TOMBSTONES,
    VIEWS,
)
from sow_server.engine.disk.rocks.secondary import Secondary

__all__ = [
    "COMMITS",
    "EXPIRY",
    "FAMILIES",
    "FOLLOWED",
    "INDEXES",
    "JOURNAL",
    "MARK_BYTES",
    "MARK_KEY",
    "META",
    "RECORDS",
    "STAGING",
    "TOMBSTONES",
    "VIEWS",
    "Batch",
    "Cursor",
    "Rocks",
    "Secondary",
    "disk_bytes",
    "first_log_needed",
]
