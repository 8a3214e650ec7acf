"""The parts of the database that the rest of the server knows: its options, and the ways in which it fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RocksOptions:
    """Memory and work that RocksDB may use."""

    block_cache_bytes: int = 128 * 2**20
    records_memtable_bytes: int = 32 * 2**20
    other_memtable_bytes: int = 16 * 2**20
    log_bytes_max: int = 256 * 2**20
    background_jobs: int = 2


class RocksError(Exception):
    """Any error of RocksDB; the subclass tells the kind."""


class Locked(RocksError):
    """Another process has the database open."""


class Damaged(RocksError):
    """A checksum does not match, or a file is damaged."""


class Stalled(RocksError):
    """A write would have had to wait for compaction. Nothing was written; the same batch may be tried again."""


class Failed(RocksError):
    """Input or output failed. After a failed write the handle is broken for good (rocks [7])."""


class DiskFull(Failed):
    """There is no space, or a file may not grow."""


class Stale(Failed):
    """The secondary does not show a write that was made before it caught up."""
