"""The column families, and the options of the database and of each family."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import rocksdict

from sow_server.engine.values.database import RocksOptions

RECORDS: Final = "records"
EXPIRY: Final = "expiry"
JOURNAL: Final = "journal"
COMMITS: Final = "commits"
INDEXES: Final = "indexes"
TOMBSTONES: Final = "tombstones"
STAGING: Final = "staging"
VIEWS: Final = "views"
META: Final = "meta"
FAMILIES: Final = (RECORDS, EXPIRY, JOURNAL, COMMITS, INDEXES, TOMBSTONES, STAGING, VIEWS, META)
FOLLOWED: Final = (RECORDS, INDEXES, META)
"""The column families that a `Secondary` reads. Every write to one of them leaves its number there (rocks [15])."""
MARK_KEY: Final = b"\xff" * 32
"""The key of that number. It lies behind all rows."""
MARK_BYTES: Final = 8
"""The number itself; in META a note follows it."""
OPENING_THREADS_MAX: Final = 16
"""The default of RocksDB."""


def database_options(path: Path, options: RocksOptions, *, create: bool) -> rocksdict.Options:
    """The options of the database at `path` as a whole."""
    database = rocksdict.Options(raw_mode=True)
    database.create_if_missing(create)
    database.create_missing_column_families(True)
    database.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())  # rocks [8]
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
    # RocksDB starts as many threads for each column family, however few tables it has to open, also when a `Secondary`
    # catches up. Its default took half of the time that opening a small database takes.
    database.set_max_file_opening_threads(min(OPENING_THREADS_MAX, 1 + len(list(path.glob("*.sst"))) // 16))
    return database


def all_family_options(options: RocksOptions) -> dict[str, rocksdict.Options]:
    """The options of every column family."""
    return {name: _family_options(name, options) for name in FAMILIES}


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
    # Indexes and filters in blocks of 4 KiB. In one piece each is about 1 MiB for a file, and the cache has many small
    # shards: from some millions of records on they pushed each other out, and a look-up read a whole one again.
    table.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
    table.set_partition_filters(True)
    table.set_metadata_block_size(4096)
    table.set_pin_top_level_index_and_filter(True)
    if name in (RECORDS, TOMBSTONES, VIEWS):
        table.set_bloom_filter(10, False)
    if records:
        # Most look-ups of a publish are for missing keys: the memtable's own filter answers those.
        family.set_memtable_prefix_bloom_ratio(0.1)
        family.set_memtable_whole_key_filtering(True)
    if name in (EXPIRY, INDEXES, TOMBSTONES, VIEWS):
        # Some families are deleted from at their head all the time, others at a value that records leave (the state
        # "open", say): files that are mostly tombstones get compacted.
        family.add_compact_on_deletion_collector_factory(1000, 500, 0.5)
    family.set_block_based_table_factory(table)
    return family


@cache
def _shared_cache(capacity: int) -> rocksdict.Cache:
    """One block cache for all column families of a size; RocksDB keeps the cache of an open database alive."""
    return rocksdict.Cache(capacity)
