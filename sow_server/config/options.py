"""The options that the configuration gives to the parts of the server."""

from __future__ import annotations

from pathlib import Path

from sow_server.config.sections import Config, MetricsConfig
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.loads import LoadOptions
from sow_server.engine.replicas import PeerSettings, ReplicaOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.clock import ClockOptions
from sow_server.engine.values.database import RocksOptions
from sow_server.regular_files import read_regular


def store_options(config: Config) -> StoreOptions:
    """The options of the store."""
    storage, limits, sweep = config.storage, config.limits, config.sweep
    return StoreOptions(
        instance=config.server.instance,
        dynamic_topics=config.server.dynamic_topics,
        head_cache_records=storage.head_cache_records,
        verify_at_start_bytes=storage.verify_at_start_bytes,
        publisher_ttl_micros=storage.publisher_ttl_micros,
        backup_root=config.backup.root,
        defaults=config.defaults,
        replicas=ReplicaOptions(
            peers=tuple(PeerSettings(peer.name, peer.topics) for peer in config.peers),
            max_clock_skew_micros=config.replication.max_clock_skew_micros,
            lag_bytes_max=config.replication.peer_max_lag_bytes,
            lag_age_micros_max=config.replication.peer_max_lag_age_micros,
        ),
        loads=LoadOptions(
            open_max=limits.loads_max,
            staged_bytes_max=limits.loads_bytes_max,
            disk_free_min=limits.loads_disk_free_min_bytes,
        ),
        writer=WriterOptions(
            commit_records_max=storage.commit_records_max,
            commit_merged_bytes_max=storage.commit_merged_bytes_max,
            commit_work_micros=storage.commit_work_micros,
            queue_requests_max=limits.queue_requests_max,
            queue_bytes_max=limits.queue_bytes_max,
            queue_shared=config.access.file is not None,
            buffered_sync_micros=storage.buffered_sync_micros,
            stall_patience_micros=storage.stall_patience_micros,
            sweep_entries_max=sweep.entries_max,
            sweep_busy_micros=sweep.busy_time_micros,
            sweep_busy_pause_micros=sweep.busy_pause_micros,
            sweep_pause_micros=sweep.pause_micros,
            busy_window_micros=sweep.busy_window_micros,
            limits=RequestLimits(
                payload_bytes_max=limits.payload_bytes_max,
                key_bytes_max=limits.key_bytes_max,
                request_records_max=limits.request_records_max,
                request_bytes_max=limits.request_bytes_max,
                atomic_records_max=limits.atomic_records_max,
            ),
        ),
        rocks=RocksOptions(
            block_cache_bytes=storage.block_cache_bytes,
            records_memtable_bytes=storage.memtable_bytes,
            other_memtable_bytes=storage.other_memtable_bytes,
            log_bytes_max=storage.wal_bytes_max,
            background_jobs=storage.background_jobs,
        ),
    )


def clock_options(config: Config) -> ClockOptions:
    """The bounds of the guarded clock."""
    clock = config.clock
    return ClockOptions(
        jump_micros=clock.max_jump_micros,
        behind_max_micros=clock.max_behind_micros,
        ahead_max_micros=clock.max_ahead_micros,
    )


def replication_token(config: Config) -> str:
    """The token that peers present to each other; "": none. Raises OSError when its file cannot be read."""
    file = config.replication.token_file
    return config.replication.token if file is None else token_in(file)


def metrics_token(metrics: MetricsConfig) -> str:
    """The token that a scrape presents; "": none. Raises OSError when its file cannot be read."""
    return "" if metrics.token_file is None else token_in(metrics.token_file)


def token_in(file: Path) -> str:
    """The token that a file holds. Raises OSError."""
    return read_regular(file).decode(errors="replace").strip()


def peer_tokens(config: Config) -> dict[str, str]:
    """The tokens to present to single peers, by their names. Raises OSError when a file cannot be read."""
    return {peer.name: token_in(peer.token_file) for peer in config.peers if peer.token_file is not None}
