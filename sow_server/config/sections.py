"""The sections of the configuration: one frozen dataclass per table of the file.

[1]  A knob is one field: its unit in the name, its default, its bounds. Its key in the file is the field's name
     without a trailing `_micros` or `_bytes`, because durations and sizes are written with their unit there.
"""

# ruff: noqa: RUF009  a knob is a dataclasses.field with its bounds, made by a function that ruff does not know

from __future__ import annotations

import enum
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, TypeVar

from sow.durations import DURATION_MICROS_MAX
from sow_server.certificates import CertificateFiles
from sow_server.config.kinds import (
    CELL_KIND,
    CLUSTER_KIND,
    INSTANCE_KIND,
    Address,
    Choice,
    Count,
    Duration,
    EnumChoice,
    FilePath,
    FilterText,
    Flag,
    InstanceNames,
    JwtAlgorithms,
    MayBeAbsent,
    NamedExpressions,
    Pattern,
    Size,
    Text,
    Texts,
    UnlessWord,
    ValueKind,
)
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.reclaim import RECLAIM_RECORDS
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.loads import LoadOptions
from sow_server.engine.replicas import ReplicaOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.clock import ClockOptions
from sow_server.engine.values.database import RocksOptions
from sow_server.engine.values.model import (
    MICROS,
    BacklogAction,
    Durability,
    MessageType,
    OnMissing,
    TopicSettings,
)
from sow_server.engine.values.policies import NOTHING, Declared
from sow_server.engine.values.views import Named, ViewDefinition
from sow_server.query.exports import ExportOptions
from sow_server.query.sort_memory import SORT_BYTES_MAX, SORTS_WAITING_MAX
from sow_server.subscriptions.durable.backlogs import HOLD_MICROS
from sow_server.subscriptions.hub import HubOptions
from sow_server.subscriptions.results.live_results import RESULT_BYTES_MAX

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
_MILLI: Final = MICROS // 1000
_HOUR: Final = 3600 * MICROS
_DAY: Final = 24 * _HOUR

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)


class ConfigError(Exception):
    """The configuration cannot be used: one message with the file, table, key and fault."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key: Final = key
        """The key at fault; empty: none, or it is unknown."""


def host_name() -> str:
    """The machine's name, as an instance name."""
    name = re.sub(r"[^A-Za-z0-9_.:-]", "-", socket.gethostname())[:100]
    return name.lstrip("_") or "sow"


_STORE: Final = StoreOptions()
_WRITER: Final = WriterOptions()
_ROCKS: Final = RocksOptions()
_LIMITS: Final = RequestLimits()
_CLOCK: Final = ClockOptions()
_HUB: Final = HubOptions()
_REPLICAS: Final = ReplicaOptions()
_EXPORTS: Final = ExportOptions()
_LOADS: Final = LoadOptions()
_TOPIC: Final = TopicSettings()


def _knob(default: T, kind: ValueKind[T], *, key: str = "") -> T:
    return field(default=default, metadata={"kind": kind, "key": key})


def _count(default: int, low: int, high: int) -> int:
    return _knob(default, Count(low, high))


def _size(default: int, low: int, high: int) -> int:
    return _knob(default, Size(low, high))


def _duration(default: int, low: int, high: int) -> int:
    return _knob(default, Duration(low, high))


def _flag(default: bool) -> bool:
    return _knob(default, Flag())


def _named(default: E) -> E:
    return field(default=default, metadata={"kind": EnumChoice(tuple(type(default)))})


class ListenerAuth(enum.Enum):
    """The way in which the clients of a listener prove who they are."""

    NONE = "none"
    CERTIFICATE = "certificate"
    TOKEN = "token"
    JWT = "jwt"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """[server]: the address, the data directory, the defaults of answers, and bounds of connections."""

    listen: str = _knob("127.0.0.1:7450", Address())
    auth: ListenerAuth = _named(ListenerAuth.NONE)
    data_dir: Path = _knob(Path("sow-data"), FilePath("the path of a directory"))
    instance: str = field(default_factory=host_name, metadata={"kind": INSTANCE_KIND})
    cluster: str = _knob("", CLUSTER_KIND)
    durability: Durability = _named(Durability.FSYNC)
    dynamic_topics: bool = _flag(False)
    insecure: bool = _flag(False)
    reflection: bool | None = _knob(None, MayBeAbsent(Flag()))
    max_concurrent_rpcs: int = _count(2000, 1, 1_000_000)
    max_connections: int | None = _knob(None, UnlessWord(Count(1, 1_000_000), "unlimited"))
    streams_per_connection_max: int = _count(256, 1, 1_000_000)
    max_connection_age_micros: int | None = _knob(None, UnlessWord(Duration(MICROS, 365 * _DAY), "unlimited"))
    max_connection_age_grace_micros: int = _duration(60 * MICROS, 0, _DAY)
    compression: bool = _flag(False)
    reader_threads: int = _count(4, 1, 64)
    reader_processes: int | None = _knob(None, UnlessWord(Count(0, 64), "auto"))
    stop_grace_micros: int = _duration(5 * MICROS, 0, _HOUR)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """[server.tls]: PEM files; with `client_ca` a client must present a certificate of that authority."""

    certificate: Path = field(metadata={"kind": FilePath("the path of a PEM file")})
    key: Path = field(metadata={"kind": FilePath("the path of a PEM file")})
    client_ca: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    revoked: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """[[server.listeners]]: an address with its own authentication and certificates. A bound that is absent is that of
    [server]."""

    listen: str = field(metadata={"kind": Address()})
    auth: ListenerAuth = _named(ListenerAuth.NONE)
    certificate: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    key: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    client_ca: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    revoked: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    links: bool = _flag(True)
    max_concurrent_rpcs: int | None = _knob(None, MayBeAbsent(Count(1, 1_000_000)))
    max_connections: int | None = _knob(None, MayBeAbsent(Count(1, 1_000_000)))

    @property
    def files(self) -> CertificateFiles | None:
        """The files for TLS; None: this listener speaks plain text."""
        if self.certificate is None or self.key is None:
            return None
        return CertificateFiles(self.certificate, self.key, self.client_ca)


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """[storage]: memory, files and commits."""

    block_cache_bytes: int = _size(_ROCKS.block_cache_bytes, MIB, 1024 * GIB)
    memtable_bytes: int = _size(_ROCKS.records_memtable_bytes, MIB, 16 * GIB)
    other_memtable_bytes: int = _size(_ROCKS.other_memtable_bytes, MIB, 16 * GIB)
    wal_bytes_max: int = _size(_ROCKS.log_bytes_max, MIB, 1024 * GIB)
    background_jobs: int = _count(_ROCKS.background_jobs, 1, 64)
    head_cache_records: int = _count(_STORE.head_cache_records, 0, 100_000_000)
    verify_at_start_bytes: int = _size(_STORE.verify_at_start_bytes, 0, 1024 * 1024 * GIB)
    commit_records_max: int = _count(_WRITER.commit_records_max, 1, 10_000)
    commit_merged_bytes_max: int = _size(_WRITER.commit_merged_bytes_max, MIB, GIB)
    commit_work_micros: int = _duration(_WRITER.commit_work_micros, _MILLI, 10 * MICROS)
    buffered_sync_micros: int = _duration(_WRITER.buffered_sync_micros, _MILLI, 50 * _MILLI)
    stall_patience_micros: int = _duration(_WRITER.stall_patience_micros, 0, 60 * MICROS)
    reclaim_interval_micros: int = _duration(30 * MICROS, MICROS, _DAY)
    reclaim_records: int = _count(RECLAIM_RECORDS, 1, 1_000_000_000)
    publisher_ttl_micros: int = _duration(_STORE.publisher_ttl_micros, 60 * MICROS, 3650 * _DAY)


@dataclass(frozen=True, slots=True)
class ClockConfig:
    """[clock]: the bounds of rule L15."""

    max_jump_micros: int = _duration(_CLOCK.jump_micros, 100 * _MILLI, 30 * _DAY)
    max_behind_micros: int = _duration(_CLOCK.behind_max_micros, 0, 30 * _DAY)
    max_ahead_micros: int = _duration(_CLOCK.ahead_max_micros, MICROS, 3650 * _DAY)
    mark_interval_micros: int = _duration(MICROS, 100 * _MILLI, 60 * MICROS)


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """[sweep]: the share of the writer's time for removing expired records (rule L14)."""

    entries_max: int = _count(_WRITER.sweep_entries_max, 20, 10_000)
    busy_time_micros: int = _duration(_WRITER.sweep_busy_micros, 100, MICROS)
    busy_pause_micros: int = _duration(_WRITER.sweep_busy_pause_micros, 0, MICROS)
    pause_micros: int = _duration(_WRITER.sweep_pause_micros, 0, MICROS)
    busy_window_micros: int = _duration(_WRITER.busy_window_micros, 0, 60 * MICROS)


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """[journal]: upkeep of the journal; retention is set per topic."""

    prune_interval_micros: int = _duration(60 * MICROS, 10 * _MILLI, _DAY)
    hold_max_micros: int = _duration(HOLD_MICROS, MICROS, _DAY)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """[limits]: bounds of requests (rule K8), of the writer's queue, and of open sorts, exports and loads."""

    payload_bytes_max: int = _size(_LIMITS.payload_bytes_max, 1, 64 * MIB)
    key_bytes_max: int = _size(_LIMITS.key_bytes_max, 16, 16 * KIB)
    request_records_max: int = _count(_LIMITS.request_records_max, 1, 1_000_000)
    request_bytes_max: int = _size(_LIMITS.request_bytes_max, KIB, 256 * MIB)
    atomic_records_max: int = _count(_LIMITS.atomic_records_max, 1, 10_000)
    queue_requests_max: int = _count(_WRITER.queue_requests_max, 1, 1_000_000)
    queue_bytes_max: int = _size(_WRITER.queue_bytes_max, MIB, 16 * GIB)
    in_flight_bytes_max: int = _size(512 * MIB, 64 * MIB, 1024 * GIB)
    sort_bytes_max: int = _size(SORT_BYTES_MAX, MIB, 64 * GIB)
    sorts_waiting_max: int = _count(SORTS_WAITING_MAX, 0, 10_000)
    exports_max: int = _count(_EXPORTS.exports_max, 1, 10_000)
    pin_idle_ttl_max_micros: int = _duration(7 * _DAY, MICROS, 3650 * _DAY)
    loads_max: int = _count(_LOADS.open_max, 1, 1000)
    loads_bytes_max: int = _size(_LOADS.staged_bytes_max, MIB, 1024 * 1024 * GIB)
    loads_disk_free_min_bytes: int = _size(_LOADS.disk_free_min, 0, 1024 * GIB)

    @property
    def message_bytes_max(self) -> int:
        """The largest gRPC message: 20 MiB as at the clients, or a request and its envelope where that is more."""
        return max(20 * MIB, self.request_bytes_max + 4 * MIB)

    @property
    def link_bytes_max(self) -> int:
        """The largest message between instances: a commit is shipped whole, and may hold everything that was queued."""
        return self.queue_bytes_max + 2 * self.request_bytes_max + 16 * MIB


@dataclass(frozen=True, slots=True)
class SubscriptionsConfig:
    """[subscriptions]: bounds of subscriptions (rule S6)."""

    queue_bytes_max: int = _size(_HUB.queue_bytes_max, 64 * KIB, GIB)
    subscriptions_max: int = _count(_HUB.subscriptions_max, 1, 1_000_000)
    result_bytes_max: int = _size(RESULT_BYTES_MAX, 64 * KIB, GIB)


class LinkMode(enum.Enum):
    """The two kinds of peers: REPLICATED waits for a sync peer only (rules R1, R8)."""

    ASYNC = "async"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """[replication]: the sources that may send to this instance, and settings of all links (rules R1 to R12)."""

    accept: tuple[str, ...] = _knob((), InstanceNames())
    serve_links: bool = _flag(False)
    token: str = _knob("", Text(r"[\x21-\x7e]{0,1000}", "up to 1000 visible ASCII characters"))
    token_file: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a file")))
    min_sync_peers: int = _count(1, 1, 100)
    sync_timeout_micros: int = _duration(5 * MICROS, 100 * _MILLI, _HOUR)
    tombstone_grace_micros: int = _duration(_DAY, 60 * MICROS, 3650 * _DAY)
    max_clock_skew_micros: int = _duration(_REPLICAS.max_clock_skew_micros, 100 * _MILLI, _DAY)
    peer_max_lag_bytes: int = _knob(_REPLICAS.lag_bytes_max, Size(MIB, 1024 * GIB), key="peer_max_lag_bytes")
    peer_max_lag_age_micros: int = _duration(_REPLICAS.lag_age_micros_max, 60 * MICROS, 3650 * _DAY)


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """[[replication.peers]]: an instance that this one sends to (rule R1). With `ca` the link uses TLS; with
    `certificate` and `key` this end authenticates itself."""

    name: str = field(metadata={"kind": INSTANCE_KIND})
    address: str = field(metadata={"kind": Address()})
    topics: str = _knob(".*", Pattern())
    mode: LinkMode = _named(LinkMode.ASYNC)
    filter: str = _knob("", FilterText())
    ca: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    certificate: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    key: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    token_file: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a file")))


@dataclass(frozen=True, slots=True)
class BackupConfig:
    """[backup]: the directory in which backups are made (rule J14)."""

    root: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a directory")))


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """[metrics]: the Prometheus endpoint. With `certificate` and `key` it speaks TLS; with `token_file` a scrape must
    present the token (rule X6)."""

    listen: str = _knob("", Address(may_be_empty=True))
    certificate: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    key: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    token_file: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a file")))


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """[access]: the file with identities and permissions, and the audit log (rules A1 to A8). Without `file` every
    caller may do everything."""

    file: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a TOML file")))
    audit: Path = _knob(Path("sow-audit.jsonl"), FilePath("the path of a file"))
    audit_reads: bool = _flag(False)
    audit_bytes_max: int = _knob(64 * MIB, Size(64 * KIB, 1024 * GIB), key="audit_bytes_max")
    audit_files: int = _count(10, 1, 10_000)


@dataclass(frozen=True, slots=True)
class JwtConfig:
    """[access.jwt]: how JWTs are checked. All of it is needed where a listener has auth = "jwt"."""

    jwks: Path = field(metadata={"kind": FilePath("the path of a file with JSON web keys")})
    issuer: str = field(metadata={"kind": Text(r".{1,1000}", "the `iss` of the tokens")})
    audience: str = field(metadata={"kind": Text(r".{1,1000}", "the `aud` of the tokens")})
    algorithms: tuple[str, ...] = _knob(("ES256",), JwtAlgorithms())
    claim: str = _knob("sub", Text(r"[A-Za-z0-9_.:/-]{1,200}", "the name of a claim"))


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """[placement]: the cell of this server, and the file that says which topics live in which cell (rules C1 to C8).
    With `ca` it asks other cells over TLS; with `certificate` and `key` it authenticates itself there."""

    cell: str = _knob("", CELL_KIND)
    file: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a TOML file")))
    ca: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    certificate: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))
    key: Path | None = _knob(None, MayBeAbsent(FilePath("the path of a PEM file")))


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """[tracing]: spans for a collector of OpenTelemetry. Without `endpoint` there are none."""

    endpoint: str = _knob(
        "", Text(r"(?:https?://[^\s/]{1,500})?", 'the address of a collector such as "http://127.0.0.1:4317", or empty')
    )
    sample_every: int = _count(0, 0, 1_000_000_000)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """[log]: the level and format of the log on standard error."""

    format: str = _knob("auto", Choice(("auto", "console", "json")))
    level: str = _knob("info", Choice(("debug", "info", "warning", "error")))


Place: TypeAlias = tuple[str, int, str]
"""The place of a setting: its table, the number of the table from 1 on (0: the table is there once), and its key."""


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of a server. `accept_clock`, `accept_loss` and `authoritative` hold for this start alone, so no
    file can set them."""

    server: ServerConfig = field(default_factory=ServerConfig)
    storage: StorageConfig = StorageConfig()
    clock: ClockConfig = ClockConfig()
    sweep: SweepConfig = SweepConfig()
    journal: JournalConfig = JournalConfig()
    limits: LimitsConfig = LimitsConfig()
    subscriptions: SubscriptionsConfig = SubscriptionsConfig()
    replication: ReplicationConfig = ReplicationConfig()
    peers: tuple[PeerConfig, ...] = ()
    """[[replication.peers]], in the order of the file."""
    backup: BackupConfig = BackupConfig()
    metrics: MetricsConfig = MetricsConfig()
    tls: TlsConfig | None = None
    listener_tables: tuple[ListenerConfig, ...] = ()
    """[[server.listeners]], in the order of the file; instead of them `listeners` is to be used."""
    access: AccessConfig = AccessConfig()
    jwt: JwtConfig | None = None
    placement: PlacementConfig = PlacementConfig()
    tracing: TracingConfig = TracingConfig()
    log: LogConfig = LogConfig()
    defaults: Declared = field(default_factory=lambda: NOTHING)
    """[defaults]: settings for topics where neither the topic nor a policy declares them (rule T2)."""
    topics: Mapping[str, Declared] = field(default_factory=lambda: MappingProxyType({}))
    """The settings that the file sets for each topic, and nothing else."""
    views: Mapping[str, DeclaredView] = field(default_factory=lambda: MappingProxyType({}))
    """Views, by name (rule V1)."""
    accept_clock: bool = False
    accept_loss: bool = False
    authoritative: bool = False
    given: Mapping[Place, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """The origin of each setting that is not a default: "file", "environment" or "command line"."""

    @property
    def listeners(self) -> tuple[ListenerConfig, ...]:
        """The listeners of the server: [[server.listeners]], or the one listener of [server] and [server.tls]."""
        if self.listener_tables:
            return self.listener_tables
        server, tls = self.server, self.tls
        if tls is None:
            return (ListenerConfig(server.listen, server.auth),)
        return (ListenerConfig(server.listen, server.auth, tls.certificate, tls.key, tls.client_ca, tls.revoked),)

    @property
    def reflects(self) -> bool:
        """True if reflection is served. Reflection serves everybody, so by default it is on only where everybody is
        served anyway."""
        if self.server.reflection is not None:
            return self.server.reflection
        return all(listener.auth is ListenerAuth.NONE for listener in self.listeners)

    @property
    def replicates(self) -> bool:
        """True if links with other instances are possible."""
        return bool(self.peers or self.replication.accept or self.replication.serve_links)


def _limit(kind: ValueKind[int]) -> int | None:
    return _knob(None, MayBeAbsent(kind))


_LONG: Final = Duration(0, DURATION_MICROS_MAX)
_LARGE: Final = Size(0, DURATION_MICROS_MAX)


@dataclass(frozen=True, slots=True)
class DefaultsForm:
    """[defaults]: settings of topics as the file has them, without those that only a topic can have."""

    expiration: str = _knob("disabled", Text(expected='"disabled", "enabled", "reject", or a duration such as "30s"'))
    default_ttl_micros: int | None = _limit(_LONG)
    min_ttl_micros: int | None = _limit(_LONG)
    max_ttl_micros: int | None = _limit(_LONG)
    retain_time_micros: int | None = _knob(_TOPIC.retain_time_micros, UnlessWord(_LONG, "unlimited"))
    retain_bytes: int | None = _knob(_TOPIC.retain_bytes, UnlessWord(_LARGE, "unlimited"), key="retain_bytes")
    max_age_micros: int | None = _limit(_LONG)
    max_bytes: int | None = _knob(None, MayBeAbsent(_LARGE), key="max_bytes")
    max_entries: int | None = _limit(Count(0, DURATION_MICROS_MAX))
    backlog_ttl_micros: int | None = _limit(_LONG)
    backlog_quota_bytes: int | None = _knob(None, MayBeAbsent(_LARGE), key="backlog_quota_bytes")
    backlog_quota_age_micros: int | None = _limit(_LONG)
    backlog_quota_entries: int | None = _limit(Count(0, DURATION_MICROS_MAX))
    backlog_action: BacklogAction = _named(_TOPIC.backlog_action)
    delivery_limit: int | None = _knob(_TOPIC.delivery_limit, UnlessWord(Count(1, DURATION_MICROS_MAX), "unlimited"))
    durable_idle_ttl_micros: int | None = _limit(_LONG)
    idle_ttl_micros: int | None = _limit(_LONG)
    publish_is_use: bool = _flag(_TOPIC.publish_is_use)
    only_if_empty: bool = _flag(_TOPIC.only_if_empty)
    auto_delete: bool = _flag(_TOPIC.auto_delete)
    dead_letter: str = _knob(_TOPIC.dead_letter, Text(expected="the name of a topic"))
    dead_letter_by_key: bool = _flag(_TOPIC.dead_letter_by_key)
    on_missing: OnMissing = _named(_TOPIC.on_missing)
    replicate_durables: bool = _flag(_TOPIC.replicate_durables)
    max_records: int | None = _limit(Count(0, DURATION_MICROS_MAX))
    max_stored_bytes: int | None = _knob(None, MayBeAbsent(_LARGE), key="max_stored_bytes")


@dataclass(frozen=True, slots=True)
class TopicForm(DefaultsForm):
    """[topics.NAME]: settings of a topic as the file has them."""

    key: tuple[str, ...] = _knob(_TOPIC.key, Texts('key paths such as ["/id"]'))
    message_type: MessageType = _named(_TOPIC.message_type)
    journal: bool = _flag(_TOPIC.journal)
    fix_separator: str = _knob(_TOPIC.separator.decode("latin-1"), Text(r"[\x00-\xff]", "one byte as text"))
    index: tuple[str, ...] = _knob(_TOPIC.index, Texts('paths such as ["/symbol"]'))


@dataclass(frozen=True, slots=True)
class ViewForm:
    """[views.NAME]: the definition of a view, and settings of its topic, as the file has them (rule V1)."""

    source: str = field(metadata={"kind": Text(".+", "the name of a topic")})
    where: str = _knob("", FilterText())
    group_by: tuple[Named, ...] = _knob((), NamedExpressions())
    select: tuple[Named, ...] = _knob((), NamedExpressions())
    journal: bool = _flag(_TOPIC.journal)
    index: tuple[str, ...] = _knob(_TOPIC.index, Texts('paths such as ["/symbol"]'))
    retain_time_micros: int | None = _knob(_TOPIC.retain_time_micros, UnlessWord(_LONG, "unlimited"))
    retain_bytes: int | None = _knob(_TOPIC.retain_bytes, UnlessWord(_LARGE, "unlimited"), key="retain_bytes")
    max_age_micros: int | None = _limit(_LONG)
    max_bytes: int | None = _knob(None, MayBeAbsent(_LARGE), key="max_bytes")
    max_entries: int | None = _limit(Count(0, DURATION_MICROS_MAX))


DEFINING: Final = ("source", "where", "group_by", "select")
"""The fields of `ViewForm` that define the view; the others are settings of its topic."""


class DeclaredView(NamedTuple):
    """A view as the file declares it."""

    definition: ViewDefinition
    settings: Declared


PEERS_TABLE: Final = "replication.peers"
LISTENERS_TABLE: Final = "server.listeners"
SECTIONS: Final[tuple[tuple[str, type], ...]] = (
    ("server", ServerConfig),
    ("server.tls", TlsConfig),
    (LISTENERS_TABLE, ListenerConfig),
    ("storage", StorageConfig),
    ("clock", ClockConfig),
    ("sweep", SweepConfig),
    ("journal", JournalConfig),
    ("limits", LimitsConfig),
    ("subscriptions", SubscriptionsConfig),
    ("replication", ReplicationConfig),
    (PEERS_TABLE, PeerConfig),
    ("backup", BackupConfig),
    ("metrics", MetricsConfig),
    ("access", AccessConfig),
    ("access.jwt", JwtConfig),
    ("placement", PlacementConfig),
    ("tracing", TracingConfig),
    ("log", LogConfig),
    ("defaults", DefaultsForm),
    ("topics.NAME", TopicForm),
    ("views.NAME", ViewForm),
)
