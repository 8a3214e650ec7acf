"""Bounds of the writer."""

from __future__ import annotations

from dataclasses import dataclass, field

from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.values.model import MICROS


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """Bounds of the writer; times in microseconds."""

    commit_records_max: int = 1000
    commit_merged_bytes_max: int = 32 * 2**20
    commit_work_micros: int = 20_000
    """The estimated work of one commit (work [1])."""
    queue_requests_max: int = 10_000
    queue_bytes_max: int = 64 * 2**20
    queue_shared: bool = False
    """True if each caller leaves a part of the queue to others (queue [5])."""
    buffered_sync_micros: int = 40_000
    stall_patience_micros: int = 5 * MICROS
    sweep_entries_max: int = 1000
    sweep_busy_micros: int = 1500
    sweep_busy_pause_micros: int = 100
    sweep_pause_micros: int = 2000
    busy_window_micros: int = 200_000
    version_reserve_micros: int = 2 * MICROS
    sequence_reserve: int = 1_000_000
    limits: RequestLimits = field(default_factory=RequestLimits)
