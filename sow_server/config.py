"""Every knob of the server: a TOML file and command-line overrides become one frozen `Config`.

    F1  A knob is one field: its unit in the name, its default, its bounds. Its key in the file is the field's name
        without a trailing `_micros` or `_bytes`, as durations and sizes are written with their unit there.
    F2  What is not known is refused, with file, table, key and the near miss; so is a wrong type and a value out of
        bounds, and values that contradict each other.
    F3  `load` of what `render` writes gives the same `Config`.

Paths are relative to the file's folder (on the command line: to the working directory) and absolute in a `Config`.
"""

# ruff: noqa: RUF009  a knob is a dataclasses.field with its bounds, made by a function that ruff does not know

from __future__ import annotations

import dataclasses
import difflib
import enum
import ipaddress
import json
import re
import socket
import ssl
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, TypeVar, cast

from sow.durations import DURATION_MICROS_MAX, DurationError, format_micros, parse_micros
from sow.sizes import format_bytes, parse_bytes
from sow_server.engine.catalog.topics import check_name, check_settings
from sow_server.engine.commit.reclaim import RECLAIM_RECORDS
from sow_server.engine.commit.requests import Limits
from sow_server.engine.commit.writer import WriterOptions
from sow_server.engine.disk.rocks import RocksOptions
from sow_server.engine.loads.loads import LoadOptions
from sow_server.engine.replicas.replicas import PeerSettings, ReplicaOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.values import policies
from sow_server.engine.values.clock import ClockOptions
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.keys import INSTANCE_NAME
from sow_server.engine.values.model import (
    MICROS,
    BacklogAction,
    Durability,
    Expiration,
    MessageType,
    OnMissing,
    TopicSettings,
)
from sow_server.engine.values.patterns import PatternError, matcher
from sow_server.engine.values.policies import NOTHING, Declared, check_limits_and_values, resolve_topic, tidy
from sow_server.filters.errors import FilterError
from sow_server.filters.parser import parse as parse_filter
from sow_server.query.exports import ExportOptions
from sow_server.query.sort_memory import SORT_BYTES_MAX, SORTS_WAITING_MAX
from sow_server.subscriptions.hub import HubOptions

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
_MILLI: Final = MICROS // 1000
_HOUR: Final = 3600 * MICROS
_DAY: Final = 24 * _HOUR

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)


class ConfigError(Exception):
    """The configuration cannot be used: one message with file, table, key and what is wrong."""


# --- what a value may be ---------------------------------------------------------------------------------------------


class Kind(Protocol[T]):
    """How a value is written. `read` raises ValueError with a message that reads on after the key."""

    def read(self, value: object, folder: Path) -> T:
        """The value of what stands in the file; `folder` is where relative paths begin."""

    def show(self, value: T) -> str:
        """The value as TOML."""


def _expected(what: str, value: object) -> ValueError:
    return ValueError(f"expected {what}, found {_noun(value)}")


def _noun(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return f"the integer {value}"
        case float():
            return f"the number {value}"
        case str():
            return f"the text {_quoted(value)}"
        case list():
            return "an array"
        case dict():
            return "a table"
        case _:
            return "a date or time"


def _quoted(text: str) -> str:
    # JSON's strings are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True, slots=True)
class _Flag:
    def read(self, value: object, folder: Path) -> bool:
        if not isinstance(value, bool):
            raise _expected("true or false", value)
        return value

    def show(self, value: bool) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class _Text:
    pattern: str = ".*"
    what: str = "text"

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.DOTALL):
            raise _expected(self.what, value)
        return value

    def show(self, value: str) -> str:
        return _quoted(value)


_INSTANCE: Final = _Text(INSTANCE_NAME.pattern, "1 to 100 of [A-Za-z0-9_.:-], no leading '_'")


@dataclass(frozen=True, slots=True)
class _Texts:
    what: str

    def read(self, value: object, folder: Path) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise _expected(self.what, value)
        for entry in value:
            if not isinstance(entry, str):
                raise _expected(f"{self.what}, and in it text only", entry)
        return tuple(value)

    def show(self, value: tuple[str, ...]) -> str:
        return "[" + ", ".join(map(_quoted, value)) + "]"


@dataclass(frozen=True, slots=True)
class _Count:
    low: int
    high: int

    def read(self, value: object, folder: Path) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _expected("an integer", value)
        return _bounded(value, self.low, self.high, str)

    def show(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class _Size:
    low: int
    high: int

    def read(self, value: object, folder: Path) -> int:
        if isinstance(value, str):
            size = parse_bytes(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = value
        else:
            raise _expected('a size such as "64MiB", or bytes as an integer', value)
        return _bounded(size, self.low, self.high, format_bytes)

    def show(self, value: int) -> str:
        return _quoted(format_bytes(value))


@dataclass(frozen=True, slots=True)
class _Duration:
    low: int
    high: int

    def read(self, value: object, folder: Path) -> int:
        if not isinstance(value, str):
            raise _expected('a duration such as "30s" or "1h30m"', value)
        return _bounded(_micros(value), self.low, self.high, format_micros)

    def show(self, value: int) -> str:
        return _quoted(format_micros(value))


@dataclass(frozen=True, slots=True)
class _Choice:
    words: tuple[str, ...]

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str) or value not in self.words:
            near = difflib.get_close_matches(value, self.words, n=1) if isinstance(value, str) else []
            hint = f", did you mean {_quoted(near[0])}?" if near else ""
            raise ValueError(f"expected one of {', '.join(map(_quoted, self.words))}, found {_noun(value)}{hint}")
        return value

    def show(self, value: str) -> str:
        return _quoted(value)


@dataclass(frozen=True, slots=True)
class _Named:
    """A choice among the members of an enum, by their names in lower case."""

    members: tuple[enum.Enum, ...]

    def read(self, value: object, folder: Path) -> enum.Enum:
        word = _Choice(tuple(member.name.lower() for member in self.members)).read(value, folder)
        return next(member for member in self.members if member.name.lower() == word)

    def show(self, value: enum.Enum) -> str:
        return _quoted(value.name.lower())


@dataclass(frozen=True, slots=True)
class _Pattern:
    """An RE2 expression that a whole name is to match."""

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str):
            raise _expected('a pattern such as "orders\\\\..*"', value)
        try:
            matcher(value)
        except PatternError as error:
            raise ValueError(f"{_quoted(value)} is no RE2 expression ({error})") from None
        return value

    def show(self, value: str) -> str:
        return _quoted(value)


@dataclass(frozen=True, slots=True)
class _FilterText:
    """A filter; "": everything."""

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str):
            raise _expected("a filter such as \"/region = 'eu'\"", value)
        if value:
            try:
                parse_filter(value)
            except FilterError as error:
                raise ValueError(str(error)) from None
        return value

    def show(self, value: str) -> str:
        return _quoted(value)


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of instances, each once."""

    def read(self, value: object, folder: Path) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise _expected('an array of names of instances such as ["ldn-1"]', value)
        names = tuple(_INSTANCE.read(entry, folder) for entry in value)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{_quoted(name)} stands there twice")
        return names

    def show(self, value: tuple[str, ...]) -> str:
        return "[" + ", ".join(map(_quoted, value)) + "]"


@dataclass(frozen=True, slots=True)
class _File:
    what: str

    def read(self, value: object, folder: Path) -> Path:
        if not isinstance(value, str) or not value or "\0" in value:
            raise _expected(self.what, value)
        return (folder / value).absolute()

    def show(self, value: Path) -> str:
        return _quoted(str(value))


@dataclass(frozen=True, slots=True)
class _Address:
    may_be_empty: bool = False

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str):
            raise _expected('an address such as "127.0.0.1:7450"', value)
        if value or not self.may_be_empty:
            split_address(value)
        return value

    def show(self, value: str) -> str:
        return _quoted(value)


@dataclass(frozen=True, slots=True)
class _Unless(Kind[T | None]):
    """A value, or a word that stands for None."""

    kind: Kind[T]
    word: str

    def read(self, value: object, folder: Path) -> T | None:
        return None if value == self.word else self.kind.read(value, folder)

    def show(self, value: T | None) -> str:
        return _quoted(self.word) if value is None else self.kind.show(value)


@dataclass(frozen=True, slots=True)
class _Maybe(Kind[T | None]):
    """A value that may be left out, which is None; None is not written."""

    kind: Kind[T]

    def read(self, value: object, folder: Path) -> T | None:
        return self.kind.read(value, folder)

    def show(self, value: T | None) -> str:
        assert value is not None, "render leaves it out"
        return self.kind.show(value)


def _bounded(value: int, low: int, high: int, show: Callable[[int], str]) -> int:
    if value < low:
        raise ValueError(f"{show(value)} is below the minimum, {show(low)}")
    if value > high:
        raise ValueError(f"{show(value)} is above the maximum, {show(high)}")
    return value


def _micros(text: str) -> int:
    try:
        return parse_micros(text)
    except DurationError as error:
        raise ValueError(str(error)) from None


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[ipv6]:port`; port 0 lets the system choose. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{_quoted(text)} is not host:port, such as 127.0.0.1:7450 or [::1]:7450")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
        raise ValueError(f"{_quoted(text)} has no port between 0 and 65535 after the last ':'")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{_quoted(text)}: {host!r} is no IPv6 address") from None
    elif ":" in host:
        raise ValueError(f"{_quoted(text)}: an IPv6 address is written in brackets, such as [::1]:7450")
    elif not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise ValueError(f"{_quoted(text)}: {host!r} is no host name")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Whether only programs on this machine reach `address` (host:port)."""
    host, _ = split_address(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name() -> str:
    """The machine's name, as an instance name."""
    name = re.sub(r"[^A-Za-z0-9_.:-]", "-", socket.gethostname())[:100]
    return name.lstrip("_") or "sow"


# --- the sections ----------------------------------------------------------------------------------------------------

_STORE: Final = StoreOptions()
_WRITER: Final = WriterOptions()
_ROCKS: Final = RocksOptions()
_LIMITS: Final = Limits()
_CLOCK: Final = ClockOptions()
_HUB: Final = HubOptions()
_REPLICAS: Final = ReplicaOptions()
_EXPORTS: Final = ExportOptions()
_LOADS: Final = LoadOptions()
_TOPIC: Final = TopicSettings()


def _knob(default: T, kind: Kind[T], *, key: str = "") -> T:
    return field(default=default, metadata={"kind": kind, "key": key})


def _count(default: int, low: int, high: int) -> int:
    return _knob(default, _Count(low, high))


def _size(default: int, low: int, high: int) -> int:
    return _knob(default, _Size(low, high))


def _duration(default: int, low: int, high: int) -> int:
    return _knob(default, _Duration(low, high))


def _flag(default: bool) -> bool:
    return _knob(default, _Flag())


def _named(default: E) -> E:
    return field(default=default, metadata={"kind": _Named(tuple(type(default)))})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """[server]: where it listens, where the data is, how it answers."""

    listen: str = _knob("127.0.0.1:7450", _Address())
    data_dir: Path = _knob(Path("sow-data"), _File("the path of a directory"))
    instance: str = field(default_factory=host_name, metadata={"kind": _INSTANCE})
    durability: Durability = _named(Durability.FSYNC)
    dynamic_topics: bool = _flag(False)
    insecure: bool = _flag(False)
    max_concurrent_rpcs: int = _count(2000, 1, 1_000_000)
    reader_threads: int = _count(4, 1, 64)
    stop_grace_micros: int = _duration(5 * MICROS, 0, _HOUR)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """[server.tls]: PEM files; with `client_ca` a client must present a certificate of that authority."""

    certificate: Path = field(metadata={"kind": _File("the path of a PEM file")})
    key: Path = field(metadata={"kind": _File("the path of a PEM file")})
    client_ca: Path | None = _knob(None, _Maybe(_File("the path of a PEM file")))


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
    """[sweep]: how much of the writer the removal of expired records takes (rule L14)."""

    entries_max: int = _count(_WRITER.sweep_entries_max, 20, 10_000)
    busy_time_micros: int = _duration(_WRITER.sweep_busy_micros, 100, MICROS)
    busy_pause_micros: int = _duration(_WRITER.sweep_busy_pause_micros, 0, MICROS)
    pause_micros: int = _duration(_WRITER.sweep_pause_micros, 0, MICROS)
    busy_window_micros: int = _duration(_WRITER.busy_window_micros, 0, 60 * MICROS)


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """[journal]: upkeep of the journal; what is retained is set per topic."""

    prune_interval_micros: int = _duration(60 * MICROS, 10 * _MILLI, _DAY)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """[limits]: the largest requests (rule K8), what may wait for the writer, and what may be held open."""

    payload_bytes_max: int = _size(_LIMITS.payload_bytes_max, 1, 64 * MIB)
    key_bytes_max: int = _size(_LIMITS.key_bytes_max, 16, 16 * KIB)
    request_records_max: int = _count(_LIMITS.request_records_max, 1, 1_000_000)
    request_bytes_max: int = _size(_LIMITS.request_bytes_max, KIB, 256 * MIB)
    atomic_records_max: int = _count(_LIMITS.atomic_records_max, 1, 10_000)
    queue_requests_max: int = _count(_WRITER.queue_requests_max, 1, 1_000_000)
    queue_bytes_max: int = _size(_WRITER.queue_bytes_max, MIB, 16 * GIB)
    sort_bytes_max: int = _size(SORT_BYTES_MAX, MIB, 64 * GIB)
    sorts_waiting_max: int = _count(SORTS_WAITING_MAX, 0, 10_000)
    exports_max: int = _count(_EXPORTS.exports_max, 1, 10_000)
    loads_max: int = _count(_LOADS.open_max, 1, 1000)
    loads_bytes_max: int = _size(_LOADS.staged_bytes_max, MIB, 1024 * 1024 * GIB)
    loads_disk_free_min_bytes: int = _size(_LOADS.disk_free_min, 0, 1024 * GIB)

    @property
    def message_bytes_max(self) -> int:
        """The largest gRPC message: 20 MiB as at the clients, or a request and its envelope where that is more."""
        return max(20 * MIB, self.request_bytes_max + 4 * MIB)

    @property
    def link_bytes_max(self) -> int:
        """The largest message between instances: a commit is shipped whole, and all that is queued may be in one."""
        return self.queue_bytes_max + 2 * self.request_bytes_max + 16 * MIB


@dataclass(frozen=True, slots=True)
class SubscriptionsConfig:
    """[subscriptions]: what those who follow changes may take (rule S6)."""

    queue_bytes_max: int = _size(_HUB.queue_bytes_max, 64 * KIB, GIB)
    subscriptions_max: int = _count(_HUB.subscriptions_max, 1, 1_000_000)


class LinkMode(enum.Enum):
    """Whether REPLICATED waits for a peer (rules R1, R8)."""

    ASYNC = "async"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """[replication]: who may send to this instance, and what holds for all of its links (rules R1 to R12)."""

    accept: tuple[str, ...] = _knob((), _Names())
    token: str = _knob("", _Text(r"[\x21-\x7e]{0,1000}", "up to 1000 visible ASCII characters"))
    token_file: Path | None = _knob(None, _Maybe(_File("the path of a file")))
    min_sync_peers: int = _count(1, 1, 100)
    sync_timeout_micros: int = _duration(5 * MICROS, 100 * _MILLI, _HOUR)
    tombstone_grace_micros: int = _duration(_DAY, 60 * MICROS, 3650 * _DAY)
    max_clock_skew_micros: int = _duration(_REPLICAS.max_clock_skew_micros, 100 * _MILLI, _DAY)
    peer_max_lag_bytes: int = _knob(_REPLICAS.lag_bytes_max, _Size(MIB, 1024 * GIB), key="peer_max_lag_bytes")
    peer_max_lag_age_micros: int = _duration(_REPLICAS.lag_age_micros_max, 60 * MICROS, 3650 * _DAY)


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """[[replication.peers]]: an instance that this one sends to (rule R1). With `ca` the link is TLS; with
    `certificate` and `key` this end shows who it is."""

    name: str = field(metadata={"kind": _INSTANCE})
    address: str = field(metadata={"kind": _Address()})
    topics: str = _knob(".*", _Pattern())
    mode: LinkMode = _named(LinkMode.ASYNC)
    filter: str = _knob("", _FilterText())
    ca: Path | None = _knob(None, _Maybe(_File("the path of a PEM file")))
    certificate: Path | None = _knob(None, _Maybe(_File("the path of a PEM file")))
    key: Path | None = _knob(None, _Maybe(_File("the path of a PEM file")))


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """[metrics]: the Prometheus endpoint."""

    listen: str = _knob("", _Address(may_be_empty=True))


@dataclass(frozen=True, slots=True)
class LogConfig:
    """[log]: what is logged to standard error, and how."""

    format: str = _knob("auto", _Choice(("auto", "console", "json")))
    level: str = _knob("info", _Choice(("debug", "info", "warning", "error")))


@dataclass(frozen=True, slots=True)
class Config:
    """How this server is set up. `accept_clock`, `accept_loss` and `authoritative` hold for this start alone, so no
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
    metrics: MetricsConfig = MetricsConfig()
    tls: TlsConfig | None = None
    log: LogConfig = LogConfig()
    defaults: Declared = field(default_factory=lambda: NOTHING)
    """What [defaults] writes: settings of topics that neither they nor a policy declare (rule T2)."""
    topics: Mapping[str, Declared] = field(default_factory=lambda: MappingProxyType({}))
    """What the file writes of each topic, and nothing else."""
    accept_clock: bool = False
    accept_loss: bool = False
    authoritative: bool = False

    @property
    def replicates(self) -> bool:
        """Whether there may be links with other instances."""
        return bool(self.peers or self.replication.accept)


def _limit(kind: Kind[int]) -> int | None:
    return _knob(None, _Maybe(kind))


_LONG: Final = _Duration(0, DURATION_MICROS_MAX)
_LARGE: Final = _Size(0, DURATION_MICROS_MAX)


@dataclass(frozen=True, slots=True)
class _DefaultsForm:
    """[defaults]: settings of topics as they are written, but for those that only a topic can have."""

    expiration: str = _knob("disabled", _Text(what='"disabled", "enabled", "reject", or a duration such as "30s"'))
    default_ttl_micros: int | None = _limit(_LONG)
    min_ttl_micros: int | None = _limit(_LONG)
    max_ttl_micros: int | None = _limit(_LONG)
    retain_time_micros: int | None = _knob(_TOPIC.retain_time_micros, _Unless(_LONG, "unlimited"))
    retain_bytes: int | None = _knob(_TOPIC.retain_bytes, _Unless(_LARGE, "unlimited"), key="retain_bytes")
    max_age_micros: int | None = _limit(_LONG)
    max_bytes: int | None = _knob(None, _Maybe(_LARGE), key="max_bytes")
    max_entries: int | None = _limit(_Count(0, DURATION_MICROS_MAX))
    backlog_ttl_micros: int | None = _limit(_LONG)
    backlog_quota_bytes: int | None = _knob(None, _Maybe(_LARGE), key="backlog_quota_bytes")
    backlog_quota_age_micros: int | None = _limit(_LONG)
    backlog_quota_entries: int | None = _limit(_Count(0, DURATION_MICROS_MAX))
    backlog_action: BacklogAction = _named(_TOPIC.backlog_action)
    delivery_limit: int | None = _knob(_TOPIC.delivery_limit, _Unless(_Count(1, DURATION_MICROS_MAX), "unlimited"))
    durable_idle_ttl_micros: int | None = _limit(_LONG)
    idle_ttl_micros: int | None = _limit(_LONG)
    publish_is_use: bool = _flag(_TOPIC.publish_is_use)
    only_if_empty: bool = _flag(_TOPIC.only_if_empty)
    auto_delete: bool = _flag(_TOPIC.auto_delete)
    dead_letter: str = _knob(_TOPIC.dead_letter, _Text(what="the name of a topic"))
    dead_letter_by_key: bool = _flag(_TOPIC.dead_letter_by_key)
    on_missing: OnMissing = _named(_TOPIC.on_missing)


@dataclass(frozen=True, slots=True)
class _TopicForm(_DefaultsForm):
    """[topics.NAME]: settings of a topic as they are written."""

    key: tuple[str, ...] = _knob(_TOPIC.key, _Texts('key paths such as ["/id"]'))
    message_type: MessageType = _named(_TOPIC.message_type)
    journal: bool = _flag(_TOPIC.journal)
    fix_separator: str = _knob(_TOPIC.separator.decode("latin-1"), _Text(r"[\x00-\xff]", "one byte as text"))
    index: tuple[str, ...] = _knob(_TOPIC.index, _Texts('paths such as ["/symbol"]'))


_PEERS: Final = "replication.peers"
_SECTIONS: Final[tuple[tuple[str, type], ...]] = (
    ("server", ServerConfig),
    ("server.tls", TlsConfig),
    ("storage", StorageConfig),
    ("clock", ClockConfig),
    ("sweep", SweepConfig),
    ("journal", JournalConfig),
    ("limits", LimitsConfig),
    ("subscriptions", SubscriptionsConfig),
    ("replication", ReplicationConfig),
    (_PEERS, PeerConfig),
    ("metrics", MetricsConfig),
    ("log", LogConfig),
    ("defaults", _DefaultsForm),
    ("topics.NAME", _TopicForm),
)


@dataclass(frozen=True, slots=True)
class Knob:
    """One key of the file: where it stands, the field it sets, and what the documentation says of it.

    `default` is TOML, "" where there is none or it depends; `bounds` are the least and the most, "" where a kind has
    none.
    """

    table: str
    key: str
    field: str
    kind: Kind[object]
    default: str
    bounds: str


def knobs() -> Iterator[Knob]:
    """Every key that a file may have, table by table."""
    for table, section in _SECTIONS:
        yield from _knobs(table, section)


def _knobs(table: str, section: type) -> Iterator[Knob]:
    for entry in dataclasses.fields(section):
        kind: Kind[object] = entry.metadata["kind"]
        key: str = entry.metadata.get("key") or re.sub("_(micros|bytes)$", "", entry.name)
        none = entry.default is dataclasses.MISSING or (entry.default is None and not isinstance(kind, _Unless))
        own = kind.kind if isinstance(kind, (_Maybe, _Unless)) else kind
        bounds = ""
        if isinstance(own, (_Count, _Size, _Duration)) and own.high < DURATION_MICROS_MAX:
            bounds = f"{own.show(own.low)} … {own.show(own.high)}"
        yield Knob(table, key, entry.name, kind, "" if none else kind.show(entry.default), bounds)


# --- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says, as it was written; None and False: nothing."""

    data_dir: str | None = None
    listen: str | None = None
    prune_interval: str | None = None
    accept_clock: bool = False
    accept_loss: bool = False
    insecure: bool = False
    authoritative: bool = False


def load(path: Path | None, overrides: Overrides | None = None) -> Config:
    """The configuration of a file (None: defaults, with dynamic topics), overridden. Raises ConfigError."""
    overrides = overrides or Overrides()
    if path is None:
        reader = _Reader("default configuration", Path.cwd())
        tables: dict[str, object] = {"server": {"dynamic_topics": True}}
    else:
        reader = _Reader(str(path), path.absolute().parent)
        tables = _parse(path)
    config = _override(reader.config(tables), overrides)
    _check_relations(reader, config)
    return config


def _parse(path: Path) -> dict[str, object]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 at byte {error.start}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what = str(error)
        where = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", what)
        line, column = _end_of(text) if where is None or where[1] is None else (int(where[1]), int(where[2]))
        message = what if where is None else what[: where.start()]
        raise ConfigError(f"{path}:{line}:{column}: {message[:1].lower()}{message[1:]}") from error


def _end_of(text: str) -> tuple[int, int]:
    return text.count("\n") + 1, len(text) - text.rfind("\n")


class _Reader:
    """Reads the tables of one file; every error of it begins with the file's name."""

    def __init__(self, source: str, folder: Path) -> None:
        self._source = source
        self._folder = folder

    def error(self, table: str, key: str, message: str) -> ConfigError:
        where = f"[{table}] {key}" if table and key else f"[{table}]" if table else key
        return ConfigError(f"{self._source}: {where}: {message}")

    def config(self, tables: dict[str, object]) -> Config:
        own = {name for name, _ in _SECTIONS if "." not in name} | {"topics"}
        for name, value in tables.items():
            if name not in own:
                raise self._unknown_table(name, value, sorted(own))
        server_table = self._table("server", tables)
        tls_table = server_table.pop("tls", None)
        server = self.section(ServerConfig, "server", server_table)
        replication_table = self._table("replication", tables)
        peers = self._peers(replication_table.pop("peers", []))
        return Config(
            server=dataclasses.replace(server, data_dir=self._folder / server.data_dir),
            storage=self.section(StorageConfig, "storage", self._table("storage", tables)),
            clock=self.section(ClockConfig, "clock", self._table("clock", tables)),
            sweep=self.section(SweepConfig, "sweep", self._table("sweep", tables)),
            journal=self.section(JournalConfig, "journal", self._table("journal", tables)),
            limits=self.section(LimitsConfig, "limits", self._table("limits", tables)),
            subscriptions=self.section(SubscriptionsConfig, "subscriptions", self._table("subscriptions", tables)),
            replication=self.section(ReplicationConfig, "replication", replication_table),
            peers=peers,
            metrics=self.section(MetricsConfig, "metrics", self._table("metrics", tables)),
            tls=None if tls_table is None else self._tls(tls_table),
            log=self.section(LogConfig, "log", self._table("log", tables)),
            defaults=self._defaults(tables),
            topics=MappingProxyType(
                {name: self._topic(name, value) for name, value in self._table("topics", tables).items()}
            ),
        )

    def _table(self, name: str, tables: dict[str, object]) -> dict[str, object]:
        return self._as_table(name, tables.get(name, {}))

    def _as_table(self, name: str, value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise self.error("", name, f"expected the table [{name}], found {_noun(value)}")
        return dict(value)

    def section(self, make: Callable[..., T], table: str, given: dict[str, object]) -> T:
        """Reads a table into the dataclass `make`."""
        values = self._values(make, table, given)
        for entry in dataclasses.fields(cast(type, make)):
            if entry.default is entry.default_factory is dataclasses.MISSING and entry.name not in values:
                raise self.error(table, entry.name, "is missing")
        return make(**values)

    def _values(self, make: Callable[..., object], table: str, given: dict[str, object]) -> dict[str, object]:
        """What a table for the dataclass `make` writes, by fields."""
        known = {knob.key: knob for knob in _knobs(table, cast(type, make))}
        values: dict[str, object] = {}
        for key, value in given.items():
            knob = known.get(key)
            if knob is None:
                raise self._unknown_key(table, key, value, list(known))
            try:
                values[knob.field] = knob.kind.read(value, self._folder)
            except ValueError as error:
                raise self.error(table, key, str(error)) from None
        return values

    def _tls(self, value: object) -> TlsConfig:
        table = "server.tls"
        tls = self.section(TlsConfig, table, self._as_table(table, value))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._check_pair(context, table, tls.certificate, tls.key)
        if tls.client_ca is not None:
            self._check_authorities(context, table, "client_ca", tls.client_ca)
        return tls

    def _check_pair(self, context: ssl.SSLContext, table: str, certificate: Path, key: Path) -> None:
        self._check_readable(table, "certificate", certificate)
        self._check_readable(table, "key", key)
        try:
            # The password: gRPC cannot use an encrypted key, and OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate, key, password="")
        except (ssl.SSLError, ValueError) as error:
            message = f"{certificate} and {key} are not a certificate and its unencrypted key ({error})"
            raise self.error(table, "certificate", message) from error

    def _check_authorities(self, context: ssl.SSLContext, table: str, key: str, file: Path) -> None:
        self._check_readable(table, key, file)
        try:
            context.load_verify_locations(file)
        except ssl.SSLError as error:
            raise self.error(table, key, f"{file} holds no certificate ({error})") from error

    def _check_readable(self, table: str, key: str, file: Path) -> None:
        try:
            file.open("rb").close()
        except OSError as error:
            raise self.error(table, key, f"{file} cannot be read ({error.strerror or error})") from error

    def _peers(self, value: object) -> tuple[PeerConfig, ...]:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.error("replication", "peers", "expected tables, each headed [[replication.peers]]")
        return tuple(self._peer(number, entry) for number, entry in enumerate(value, 1))

    def _peer(self, number: int, given: dict[str, object]) -> PeerConfig:
        table = _PEERS
        try:
            peer = self.section(PeerConfig, table, given)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if peer.ca is not None:
                self._check_authorities(context, table, "ca", peer.ca)
            for key, file, other, needed in (
                ("certificate", peer.certificate, "key", peer.key),
                ("key", peer.key, "certificate", peer.certificate),
                ("certificate", peer.certificate, "ca", peer.ca),
            ):
                if file is not None and needed is None:
                    raise self.error(table, key, f"needs {other}, too")
            if peer.certificate is not None and peer.key is not None:
                self._check_pair(context, table, peer.certificate, peer.key)
            if not split_address(peer.address)[1]:
                raise self.error(table, "address", f"{peer.address} names no port")
        except ConfigError as error:
            name = given.get("name")
            which = _quoted(name) if isinstance(name, str) else f"number {number}"
            raise ConfigError(f"{error} (peer {which})") from error.__cause__
        return peer

    def _defaults(self, tables: dict[str, object]) -> Declared:
        table = "defaults"
        declared = self._declared(table, self._values(_DefaultsForm, table, self._table(table, tables)))
        self._checked(table, lambda: check_limits_and_values(declared))
        return declared

    def _topic(self, name: str, value: object) -> Declared:
        table = f"topics.{_toml_key(name)}"
        declared = self._declared(table, self._values(_TopicForm, table, self._as_table(table, value)))
        self._checked(table, lambda: check_name(name))
        self._checked(table, lambda: check_settings(declared, topic=name, in_config=True))
        return declared

    def _checked(self, table: str, check: Callable[[], None]) -> None:
        try:
            check()
        except StoreError as error:
            if error.field == "topic":
                raise self.error(table, "", error.message.removeprefix("topic: ")) from None
            key = error.field.removeprefix("settings.")
            message = error.message.removeprefix(f"{key}: ")
            raise self.error(table, key, message) from None

    def _declared(self, table: str, written: dict[str, object]) -> Declared:
        """The settings that a table writes, as the engine has them."""
        declared = dict(written)
        if "fix_separator" in declared:
            declared["separator"] = str(declared.pop("fix_separator")).encode("latin-1")
        if "expiration" in declared:
            text = str(declared["expiration"])
            words = tuple(word.value for word in Expiration)
            if text in words:
                declared["expiration"] = Expiration(text)
                return tidy(declared)
            if not text[:1].isdigit() and text[:1] not in (".", "-"):
                near = difflib.get_close_matches(text, words, n=1)
                hint = f", did you mean {_quoted(near[0])}?" if near else ""
                expected = 'expected "disabled", "enabled", "reject", or a duration such as "30s"'
                raise self.error(table, "expiration", f"{expected}, found {_noun(text)}{hint}")
            try:
                duration = _micros(text)
            except ValueError as error:
                raise self.error(table, "expiration", str(error)) from None
            if "default_ttl_micros" in declared:
                raise self.error(
                    table, "default_ttl", f"expiration = {_quoted(text)} sets it already; write one of the two"
                )
            declared |= {"expiration": Expiration.ENABLED, "default_ttl_micros": duration}
        return tidy(declared)

    def _unknown_table(self, name: str, value: object, known: list[str]) -> ConfigError:
        if isinstance(value, dict):
            near = [f"[{table}]" for table in difflib.get_close_matches(name, known, n=1)]
            return self.error(name, "", f"unknown table{_near(near) or _known(known)}")
        return self._unknown_key("", name, value, [])

    def _unknown_key(self, table: str, key: str, value: object, known: list[str]) -> ConfigError:
        near = difflib.get_close_matches(key, known, n=1)
        if near:
            return self.error(table, key, f"unknown key{_near(near)}")
        if isinstance(value, dict) and table.startswith("topics."):
            dotted = f"{table.removeprefix('topics.')}.{key}"
            return self.error(
                table, key, f"unknown key; if it is part of a topic's name, write [topics.{_quoted(dotted)}]"
            )
        homes = [knob.table for knob in knobs() if knob.key == key and knob.table != table]
        if homes:
            home = "topics.NAME" if table == "defaults" and "topics.NAME" in homes else homes[0]
            return self.error(table, key, f"unknown key, it belongs in [{home}]")
        return self.error(table, key, f"unknown key{_known(known)}")


def _near(near: list[str]) -> str:
    return f", did you mean {near[0]}?" if near else ""


def _known(known: list[str]) -> str:
    return f" (known: {', '.join(known)})" if known else ""


def _override(config: Config, overrides: Overrides) -> Config:
    def read(option: str, kind: Kind[T], text: str) -> T:
        try:
            return kind.read(text, Path.cwd())
        except ValueError as error:
            raise ConfigError(f"{option}: {error}") from None

    server, journal = config.server, config.journal
    if overrides.listen is not None:
        server = dataclasses.replace(server, listen=read("--listen", _Address(), overrides.listen))
    if overrides.data_dir is not None:
        data_dir = read("--data-dir", _File("the path of a directory"), overrides.data_dir)
        server = dataclasses.replace(server, data_dir=data_dir)
    if overrides.insecure:
        server = dataclasses.replace(server, insecure=True)
    if overrides.prune_interval is not None:
        (kind,) = (knob.kind for knob in _knobs("journal", JournalConfig) if knob.key == "prune_interval")
        interval = read("--prune-interval", cast("Kind[int]", kind), overrides.prune_interval)
        journal = dataclasses.replace(journal, prune_interval_micros=interval)
    return dataclasses.replace(
        config,
        server=server,
        journal=journal,
        accept_clock=overrides.accept_clock,
        accept_loss=overrides.accept_loss,
        authoritative=overrides.authoritative,
    )


def _check_relations(reader: _Reader, config: Config) -> None:
    server, limits, storage, clock = config.server, config.limits, config.storage, config.clock
    if config.tls is None and not server.insecure and not is_loopback(server.listen):
        raise reader.error(
            "server",
            "listen",
            f"{server.listen} is reachable from other machines: set up [server.tls], or allow plain text with "
            "--insecure (insecure = true)",
        )
    if config.tls is not None and server.insecure:
        raise reader.error("server", "insecure", "contradicts [server.tls]; leave one of the two out")
    if config.metrics.listen and config.metrics.listen == server.listen and split_address(server.listen)[1]:
        raise reader.error("metrics", "listen", f"{server.listen} is the server's own address, see [server] listen")
    if server.data_dir.exists() and not server.data_dir.is_dir():
        raise reader.error("server", "data_dir", f"{server.data_dir} is not a directory")
    ordered = (
        ("limits", "payload_bytes_max", limits.payload_bytes_max, "request_bytes_max", limits.request_bytes_max),
        ("limits", "key_bytes_max", limits.key_bytes_max, "request_bytes_max", limits.request_bytes_max),
        ("limits", "request_bytes_max", limits.request_bytes_max, "queue_bytes_max", limits.queue_bytes_max),
        ("limits", "atomic_records_max", limits.atomic_records_max, "request_records_max", limits.request_records_max),
        ("storage", "memtable", storage.memtable_bytes, "wal_bytes_max", storage.wal_bytes_max),
        ("storage", "other_memtable", storage.other_memtable_bytes, "wal_bytes_max", storage.wal_bytes_max),
        ("clock", "max_jump", clock.max_jump_micros, "max_ahead", clock.max_ahead_micros),
    )
    for table, low_key, low, high_key, high in ordered:
        if low > high:
            kind = next(knob.kind for knob in knobs() if (knob.table, knob.key) == (table, low_key))
            low_text, high_text = kind.show(low).strip('"'), kind.show(high).strip('"')
            raise reader.error(table, low_key, f"{low_text} is above {high_key}, {high_text}")
    _check_replication(reader, config)


def _check_replication(reader: _Reader, config: Config) -> None:
    server, replication = config.server, config.replication
    if server.instance in replication.accept:
        raise reader.error("replication", "accept", f"{_quoted(server.instance)} is this instance itself")
    names = [peer.name for peer in config.peers]
    for peer in config.peers:
        named = f"(peer {_quoted(peer.name)})"
        if peer.name == server.instance:
            raise reader.error(_PEERS, "name", f"{_quoted(peer.name)} is this instance itself, see [server] instance")
        if names.count(peer.name) > 1:
            raise reader.error(_PEERS, "name", f"{_quoted(peer.name)} names two peers")
        if [other.address for other in config.peers].count(peer.address) > 1:
            raise reader.error(_PEERS, "address", f"{peer.address} is the address of two peers")
        if peer.address == server.listen and split_address(server.listen)[1]:
            raise reader.error(_PEERS, "address", f"{peer.address} is the server's own, see [server] listen {named}")
        if peer.ca is None and not server.insecure and not is_loopback(peer.address):
            raise reader.error(
                _PEERS,
                "address",
                f"{peer.address} is on another machine: set ca for TLS, or allow plain text with --insecure "
                f"(insecure = true) {named}",
            )
    sync_peers = sum(peer.mode is LinkMode.SYNC for peer in config.peers)
    if replication.min_sync_peers > max(1, sync_peers):
        message = f'{replication.min_sync_peers} is above the number of peers with mode = "sync", {sync_peers}'
        raise reader.error("replication", "min_sync_peers", message)
    if server.durability is Durability.REPLICATED and not sync_peers:
        message = '"replicated" needs a peer with mode = "sync" in [[replication.peers]]'
        raise reader.error("server", "durability", message)
    if replication.token and replication.token_file is not None:
        raise reader.error("replication", "token_file", "contradicts token; leave one of the two out")
    if replication.token_file is not None:
        try:
            token = replication_token(config)
        except OSError as error:
            message = f"{replication.token_file} cannot be read ({error.strerror or error})"
            raise reader.error("replication", "token_file", message) from error
        if not re.fullmatch(r"[\x21-\x7e]{1,1000}", token):
            message = f"{replication.token_file} does not hold one line of 1 to 1000 visible ASCII characters"
            raise reader.error("replication", "token_file", message)
    proves = replication.token or replication.token_file or (config.tls is not None and config.tls.client_ca)
    if config.replicates and not proves and not is_loopback(server.listen):
        raise reader.error(
            "replication",
            "token",
            f"is needed, as other machines reach {server.listen}: peers show it; or let them show certificates with "
            "[server.tls] client_ca",
        )


def replication_token(config: Config) -> str:
    """What peers show each other; "": nothing. Raises OSError where a file cannot be read."""
    file = config.replication.token_file
    return config.replication.token if file is None else file.read_bytes().decode(errors="replace").strip()


# --- printing --------------------------------------------------------------------------------------------------------


def warnings(config: Config) -> list[str]:
    """What may not be meant about the topics of the file, and about topics that declare nothing; one line each."""
    found = [
        f"[defaults] {warning}" for warning in policies.warnings(resolve_topic("", {}, defaults=config.defaults)[0])
    ]
    for name, declared in config.topics.items():
        settings = resolve_topic(name, declared, defaults=config.defaults, in_config=True).settings
        found += [f"[topics.{_toml_key(name)}] {warning}" for warning in policies.warnings(settings)]
    return found


def render(config: Config) -> str:
    """The configuration as TOML with every key written out, but of settings of topics those that were written: others
    come from policies and defaults. `load` reads the same `Config` back (F3)."""
    parts = [
        _rendered("server", config.server),
        *([] if config.tls is None else [_rendered("server.tls", config.tls)]),
        _rendered("storage", config.storage),
        _rendered("clock", config.clock),
        _rendered("sweep", config.sweep),
        _rendered("journal", config.journal),
        _rendered("limits", config.limits),
        _rendered("subscriptions", config.subscriptions),
        _rendered("replication", config.replication),
        *(_rendered(f"[{_PEERS}]", peer) for peer in config.peers),
        _rendered("metrics", config.metrics),
        _rendered("log", config.log),
        _rendered_settings("defaults", _DefaultsForm, config.defaults),
        *(
            _rendered_settings(f"topics.{_toml_key(name)}", _TopicForm, declared)
            for name, declared in config.topics.items()
        ),
    ]
    return "\n".join(parts)


def _rendered(table: str, section: object) -> str:
    lines = [f"[{table}]"]
    for knob in _knobs(table, type(section)):
        value: object = getattr(section, knob.field)
        if value is not None or isinstance(knob.kind, _Unless):
            lines.append(f"{knob.key} = {knob.kind.show(value)}")
    return "\n".join(lines) + "\n"


def _rendered_settings(table: str, section: type, declared: Declared) -> str:
    lines = [f"[{table}]"]
    for knob in _knobs(table, section):
        field = "separator" if knob.field == "fix_separator" else knob.field  # as the engine has it
        if field in declared:
            value = declared[field]
            if isinstance(value, bytes):
                value = value.decode("latin-1")
            lines.append(f"{knob.key} = {knob.kind.show(value)}")
    return "\n".join(lines) + "\n"


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


# --- for the engine --------------------------------------------------------------------------------------------------


def store_options(config: Config) -> StoreOptions:
    """What the store is opened with."""
    storage, limits, sweep = config.storage, config.limits, config.sweep
    return StoreOptions(
        instance=config.server.instance,
        dynamic_topics=config.server.dynamic_topics,
        head_cache_records=storage.head_cache_records,
        verify_at_start_bytes=storage.verify_at_start_bytes,
        publisher_ttl_micros=storage.publisher_ttl_micros,
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
            queue_requests_max=limits.queue_requests_max,
            queue_bytes_max=limits.queue_bytes_max,
            buffered_sync_micros=storage.buffered_sync_micros,
            stall_patience_micros=storage.stall_patience_micros,
            sweep_entries_max=sweep.entries_max,
            sweep_busy_micros=sweep.busy_time_micros,
            sweep_busy_pause_micros=sweep.busy_pause_micros,
            sweep_pause_micros=sweep.pause_micros,
            busy_window_micros=sweep.busy_window_micros,
            limits=Limits(
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
    """What the guarded clock goes by."""
    clock = config.clock
    return ClockOptions(
        jump_micros=clock.max_jump_micros,
        behind_max_micros=clock.max_behind_micros,
        ahead_max_micros=clock.max_ahead_micros,
    )
