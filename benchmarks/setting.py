"""The input of a benchmark: sizes, a directory, the machine's speed, and an output for progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import percentile
from sow_server.engine.disk.rocks import RECORDS, Batch, Rocks

LOOP_ADDITIONS = 1_000_000
SPEED_BATCHES = 50
BATCH_RECORDS = 1_000
SYNCS = 100


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of this machine, so that absolute figures can be compared with those of another."""

    loop_milliseconds: float
    """A Python loop of one million additions, the best of five."""
    puts_per_second: float
    """Bare puts of 160 bytes through rocksdict, batches of 1,000, unsynced."""
    sync_milliseconds: float
    """p50 of syncing the log after one such put."""

    def __str__(self) -> str:
        return (
            f"1 M additions {self.loop_milliseconds:.0f} ms, bare puts {self.puts_per_second / 1000:.0f} k/s,"
            f" fsync {self.sync_milliseconds:.2f} ms"
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. The directory is the run's own and goes when the run ends."""

    quick: bool
    directory: Path
    machine: Machine
    say: Callable[[str], None]
    records: int | None = None
    """The number of records for the benchmarks that count them (`restart`, `memory`, `growth`, `spark-scale`,
    `spark-state-scale`). None: their own."""
    cases: tuple[str, ...] = ()
    """The attacks that `hostile` measures. None: all."""
    server_roots: tuple[Path, ...] = ()
    """The checkouts whose servers `hostile` starts. None: this one."""

    def count(self, full: int, *, quick: int) -> int:
        """The number of records, which the user may choose."""
        return self.size(full, quick=quick) if self.records is None else self.records

    def size(self, full: int, *, quick: int) -> int:
        """The size for this run."""
        return quick if self.quick else full


def measure_machine(directory: Path) -> Machine:
    """Takes about a second."""
    return Machine(_loop_milliseconds(), *_rocks_speed(directory / "machine"))


def _loop_milliseconds() -> float:
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        total = 0
        for _ in range(LOOP_ADDITIONS):
            total = total + 1  # the measured step
        best = min(best, time.perf_counter() - begin)
    return best * 1000


def _rocks_speed(path: Path) -> tuple[float, float]:
    rocks = Rocks(path, create=True)
    try:
        batches = []
        for batch_number in range(SPEED_BATCHES):
            batch = Batch()
            first = batch_number * BATCH_RECORDS
            batch.puts[RECORDS] = {b"%012d" % number: bytes(160) for number in range(first, first + BATCH_RECORDS)}
            batches.append(batch)
        begin = time.perf_counter()
        for batch in batches:
            rocks.write(batch)
        seconds = time.perf_counter() - begin
        rocks.sync()
        syncs = []
        for number in range(SYNCS):
            batch = Batch()
            batch.puts[RECORDS] = {b"sync%d" % number: bytes(160)}
            begin_sync = time.perf_counter()
            rocks.write(batch)
            rocks.sync()
            syncs.append(time.perf_counter() - begin_sync)
    finally:
        rocks.close()
    return SPEED_BATCHES * BATCH_RECORDS / seconds, percentile(syncs, 0.5) * 1000
