"""What the client hands out: records as views on the columns they arrived in, and the answers to writes and reads.

A query's batch keeps the two columns that everybody reads (key, payload) as Python lists and the rest as they came
off the wire; a `Record` is four references into it. That is what makes a million records a second possible: the
numbers of a record are looked up only when one of its attributes is asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Literal, TypeAlias, TypedDict

import msgspec

from sow.durations import format_micros, parse_micros
from sow.v1 import types_pb2
from sow_client.errors import InternalError, InvalidArgument

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
NEVER_MICROS = 2**63 - 1
"""What stands for "never" in a column of expire times."""


class Never(enum.Enum):
    """The type of `NEVER`."""

    NEVER = "never"

    def __repr__(self) -> str:
        return "NEVER"


NEVER = Never.NEVER
"""As a `ttl`: the record never expires, even where its topic has a default (rule L3)."""

Ttl: TypeAlias = str | timedelta | int | float | Literal[Never.NEVER]
"""A time to live: "1h30m" (rule L1), a timedelta, seconds, or NEVER."""


class Earliest(enum.Enum):
    """The type of `EARLIEST`."""

    EARLIEST = "earliest"

    def __repr__(self) -> str:
        return "EARLIEST"


EARLIEST = Earliest.EARLIEST
"""As the `start` of a subscription: the earliest change that is retained (rule S4)."""

Start: TypeAlias = str | datetime | Literal[Earliest.EARLIEST]
"""Where a subscription starts: after a bookmark, with the first change at or after a time, or EARLIEST (rule S4)."""

ExpireAt: TypeAlias = datetime | int | str
"""A point in time: a datetime with its time zone, microseconds since the epoch, or ISO 8601 with its time zone."""

Document: TypeAlias = Mapping[str, object] | str | bytes | bytearray | memoryview
"""A document: a mapping is encoded as JSON, text as UTF-8, bytes go as they are."""

DurabilityName: TypeAlias = Literal["fsync", "buffered"]
"""When a write is acknowledged (rule P5)."""


def datetime_of(micros: int) -> datetime:
    """The point in time, in UTC, exact to the microsecond."""
    return EPOCH + timedelta(microseconds=micros)


def micros_of(moment: datetime) -> int:
    """Microseconds since the epoch of a datetime that knows its time zone."""
    return (moment - EPOCH) // _MICROSECOND


_decode_json = msgspec.json.Decoder().decode


class Record(msgspec.Struct, gc=False, eq=False, repr_omit_defaults=True):
    """One record (rule K6): a view on the batch that it came in; the batch lives as long as one of its records."""

    # A msgspec.Struct because its constructor runs in C (0.1 µs against 0.35 µs) and gc=False keeps a million of
    # them out of the garbage collector; nothing in it can form a cycle.
    key: str
    """The record key (rule K4)."""
    payload: bytes
    """The bytes as published, or what `select` left of them; empty with `keys_only`."""
    _batch: RecordBatch
    _index: int
    _data: object = msgspec.UNSET

    @property
    def topic(self) -> str:
        """The topic that holds it."""
        return self._batch.topic

    @property
    def data(self) -> object:
        """The payload decoded, if it is a JSON object; other payloads as bytes. Decoded once, when first asked for.

        A record does not carry its topic's message type, so this looks at the payload: JSON objects begin with `{`,
        documents of msgpack, fix and nvfix topics do not.
        """
        if self._data is msgspec.UNSET:
            self._data = self.payload
            if self.payload[:1] == b"{" or self.payload.lstrip(b" \t\r\n")[:1] == b"{":
                try:
                    self._data = _decode_json(self.payload)
                except msgspec.DecodeError:
                    pass  # bytes that merely begin like JSON
        return self._data

    @property
    def version(self) -> int:
        """Hybrid logical clock value of the write (rule K7): larger is newer."""
        return self._batch.columns.version[self._index]

    @property
    def publish_time_micros(self) -> int:
        """When the server applied the publish, microseconds since the epoch."""
        return self._batch.columns.publish_time_micros[self._index]

    @property
    def publish_time(self) -> datetime:
        """When the server applied the publish, UTC."""
        return datetime_of(self.publish_time_micros)

    @property
    def expire_time_micros(self) -> int | None:
        """When the record expires, microseconds since the epoch; None: never."""
        micros = self._batch.columns.expire_time_micros[self._index]
        return None if micros == NEVER_MICROS else micros

    @property
    def expire_time(self) -> datetime | None:
        """When the record expires, UTC; None: never."""
        micros = self.expire_time_micros
        return None if micros is None else datetime_of(micros)

    @property
    def origin(self) -> str:
        """Name of the instance that accepted the write."""
        columns = self._batch.columns
        return columns.origins[columns.origin[self._index] if columns.origin else 0]

    @property
    def sequence(self) -> int:
        """Journal sequence of the record's last change on this instance."""
        return self._batch.columns.sequence[self._index]

    def __repr__(self) -> str:
        return f"Record(topic={self.topic!r}, key={self.key!r}, version={self.version}, payload={self.payload!r})"


ChangeOp: TypeAlias = Literal["sow", "put", "oof", "delete", "expire", "snapshot_end", "resync"]
"""What a message of a subscription tells (rule S2): see `Change`."""

ChangeReason: TypeAlias = Literal["touched", "deleted", "expired", "match"]
"""Why (rule S2): a put that changed nothing but the lifetime; out of focus as it was deleted, has expired, or no longer
matches."""


class Change(msgspec.Struct, frozen=True, gc=False):
    """One message of a subscription (rule S2).

    | op | tells | record | previous |
    |---|---|---|---|
    | "sow" | a record of the snapshot | the record | None |
    | "snapshot_end" | the snapshot is complete; changes follow | None | None |
    | "put" | the record was published, or its lifetime was changed (reason "touched") | the record | None |
    | "oof" | out of focus: "deleted" or "expired" | None | the removed record |
    | "oof" | out of focus: "match", it no longer matches | the updated record | None |
    | "delete", "expire" | to change readers: it was removed | None | the removed record |
    | "resync" | forget all records: the subscription could not go on, and a new snapshot follows | None | None |
    """

    op: ChangeOp
    reason: ChangeReason | None = None
    """None: nothing to add."""
    record: Record | None = None
    """Its `sequence` is that of the change; of a delta, its payload has the changed fields and the key fields."""
    previous: Record | None = None
    """The removed record; its `sequence` is that of the removal."""
    bookmark: str | None = None
    """Where a subscription may start to go on after this message. None inside a snapshot and inside an atomic request,
    where there is no such place; the last message of the request has it."""
    topic: str = ""
    """The topic; empty for the marks "snapshot_end" and "resync" of a subscription to several topics."""
    is_delta: bool = False
    """True: `record` holds changed fields, not a whole record (rule S3)."""
    unset_paths: tuple[str, ...] = ()
    """The fields that are gone, as paths such as "/a/b"; only of deltas."""

    @property
    def key(self) -> str:
        """The key of the record that it is about; empty for marks."""
        about = self.record or self.previous
        return "" if about is None else about.key


class RecordBatch:
    """The records of one message, in columns of equal length: the fast way to read a large answer."""

    __slots__ = ("columns", "keys", "payloads", "topic")

    def __init__(self, topic: str, columns: types_pb2.RecordColumns) -> None:
        """Raises InternalError when the columns are not of equal length."""
        self.topic = topic
        self.columns = columns
        self.keys: list[str] = list(columns.key)
        count = len(self.keys)
        self.payloads: list[bytes] = list(columns.payload) or [b""] * count
        lengths = {
            len(self.payloads),
            len(columns.version),
            len(columns.publish_time_micros),
            len(columns.expire_time_micros),
            len(columns.sequence),
            len(columns.origin) or count,
        }
        if lengths != {count} or (count and not columns.origins):
            raise InternalError("the server sent columns of unequal length", reason="MALFORMED_RESPONSE")

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Record]:
        return map(Record, self.keys, self.payloads, repeat(self), range(len(self.keys)))

    @property
    def versions(self) -> list[int]:
        """Versions, see `Record.version`."""
        return list(self.columns.version)

    @property
    def publish_times_micros(self) -> list[int]:
        """When the server applied the publishes, microseconds since the epoch."""
        return list(self.columns.publish_time_micros)

    @property
    def expire_times_micros(self) -> list[int]:
        """When the records expire, microseconds since the epoch; 9223372036854775807 stands for never."""
        return list(self.columns.expire_time_micros)

    @property
    def sequences(self) -> list[int]:
        """Journal sequences of the last changes."""
        return list(self.columns.sequence)

    @property
    def origins(self) -> list[str]:
        """Names of the instances that accepted the writes."""
        names = list(self.columns.origins)
        return [names[index] for index in self.columns.origin] or names[:1] * len(self)


@dataclass(frozen=True, slots=True)
class Published:
    """What became of one record that was published or touched."""

    key: str
    version: int
    """Its new version; 0 for a duplicate."""
    expire_time_micros: int | None
    """The expire time stamped on it, microseconds since the epoch; None: never."""
    sequence: int
    """Journal sequence of the change; 0 for a duplicate."""
    ttl_ignored: bool
    """True: the lifetime is stored but not acted on, as the topic has expiration disabled (rule L3)."""
    duplicate: bool
    """True: it had been applied by an earlier attempt, nothing was changed now (rule P6)."""

    @property
    def expire_time(self) -> datetime | None:
        """The expire time stamped on it, UTC; None: never."""
        return None if self.expire_time_micros is None else datetime_of(self.expire_time_micros)


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a delete did, or has done so far."""

    matched: int
    """Live records that matched."""
    deleted: int
    """Records deleted; 0 in a dry run."""
    sequence: int
    """Journal sequence of the last delete; 0 when there was none."""


@dataclass(frozen=True, slots=True)
class Restamped:
    """What a restamp did, or has done so far (rule L13)."""

    matched: int
    """Live records that matched."""
    restamped: int
    """Records whose lifetime was changed; 0 in a dry run."""
    sequence: int
    """Journal sequence of the last change; 0 when there was none."""


RestampMode: TypeAlias = Literal["set", "cap", "clear"]
"""What a restamp does to lifetimes (rule L13): replaces them, lowers the longer ones, takes them away."""


@dataclass(frozen=True, slots=True)
class QueryHeader:
    """Opens the answer to a query."""

    bookmark: str
    """The position in the journal at which the query was cut."""
    as_of_micros: int
    """The one instant at which expiry was judged (rule L8), microseconds since the epoch."""

    @property
    def as_of(self) -> datetime:
        """The one instant at which expiry was judged, UTC."""
        return datetime_of(self.as_of_micros)


@dataclass(frozen=True, slots=True)
class QueryFooter:
    """Closes the answer to a query."""

    matched: int
    """Live records that matched."""
    returned: int
    """Records sent."""
    scanned: int
    """Stored records read to find them."""
    next_page_token: str
    """Where the next page goes on; empty when that was the last, or when there were no pages."""


AccessName: TypeAlias = Literal["points", "key_ranges", "index", "scan", "nothing", "unknown"]
"""What a query reads first (rule Q3): records by their keys, ranges of keys, an index, every record, or nothing at all.
"unknown" stands for a way that only a newer server knows."""


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """How the records of a query are found (rule Q3), and what finding them took."""

    access: AccessName
    """What is read first; each record found is then checked with the whole filter."""
    index_path: str
    """The path of the index; empty when none is used."""
    probes: int
    """Keys looked up, ranges, or intervals of the index."""
    index_entries: int
    """Entries of the index that were read."""
    scanned: int
    """Stored records that were read."""
    matched: int
    """Live records that matched."""
    returned: int
    """Records that the query would send."""
    filter: str
    """The filter as the server understood it; empty: none."""
    order_by: str
    """The order as the server understood it; empty: key order."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a topic, in key order (rule Q4)."""

    records: list[Record]
    next_page_token: str
    """Give it to the next call; empty: this was the last page."""
    header: QueryHeader
    footer: QueryFooter


MessageTypeName: TypeAlias = Literal["json", "msgpack", "fix", "nvfix", "binary"]
"""Encoding of a topic's payloads (rule K2)."""


class TopicSettingsArguments(TypedDict, total=False):
    """The settings of a topic as keyword arguments; see `TopicSettings`."""

    key: tuple[str, ...] | list[str]
    message_type: MessageTypeName
    expiration: Ttl
    min_ttl: Ttl | None
    max_ttl: Ttl | None
    journal: bool
    fix_separator: str
    retain_time: Ttl | None
    retain_bytes: int | None
    index: tuple[str, ...] | list[str]


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Settings of a topic. Durations are kept in one notation ("1h30m0s"), however they were given."""

    key: tuple[str, ...] | list[str] = ()
    """Key paths such as "/carrier"; empty: publishers supply the key (rule K3)."""
    message_type: MessageTypeName = "json"
    """Encoding of the payloads (rule K2)."""
    expiration: Ttl = "disabled"
    """ "disabled", "enabled", "reject", or the duration that records without a lifetime get (rules L1, L3)."""
    min_ttl: Ttl | None = None
    """Shorter lifetimes are raised to it (rule L4). None: no bound."""
    max_ttl: Ttl | None = None
    """Longer lifetimes, and never, are lowered to it (rule L4). None: no bound."""
    journal: bool = True
    """False: changes are not journaled (rule J1)."""
    fix_separator: str = "\x01"
    """Field separator of fix and nvfix, one byte as text."""
    retain_time: Ttl | None = None
    """Journal entries older than this may be discarded; "unlimited" is legal. None: the server's default."""
    retain_bytes: int | None = None
    """Journal bytes beyond this may be discarded; -1: unlimited. None: the server's default."""
    index: tuple[str, ...] | list[str] = ()
    """Paths with a secondary index each, such as "/symbol" (rule Q3)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", tuple(self.key))
        object.__setattr__(self, "index", tuple(self.index))
        for name, words in _DURATION_WORDS.items():
            value = getattr(self, name)
            if value is not None and value not in words:
                object.__setattr__(self, name, format_micros(ttl_micros(value, name)))

    def named(self) -> frozenset[str]:
        """Names of the settings that differ from the defaults."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)


_DURATION_WORDS: Mapping[str, frozenset[str]] = {
    "expiration": frozenset({"disabled", "enabled", "reject"}),
    "min_ttl": frozenset(),
    "max_ttl": frozenset(),
    "retain_time": frozenset({"unlimited"}),
}


def ttl_micros(value: Ttl, field: str) -> int:
    """Microseconds of a duration: rule L1 text, a timedelta, or seconds. `field` names the argument in errors."""
    match value:
        case str():
            try:
                micros = parse_micros(value)
            except ValueError as error:
                raise invalid(field, str(error)) from error
        case bool() | Never():
            raise invalid(field, f"{value!r} is not a duration")
        case timedelta():
            micros = value // _MICROSECOND
        case int():
            micros = value * 1_000_000
        case float():
            if not -1e13 < value < 1e13:  # also catches nan, for which every comparison is false
                raise invalid(field, f"{value!r} seconds are not a duration")
            micros = round(value * 1_000_000)
        case _:
            raise invalid(field, f"a {type(value).__name__} is not a duration")
    if micros < 0:
        raise invalid(field, f"{value!r} is negative", reason="LIFETIME_NEGATIVE")
    if micros > NEVER_MICROS:
        raise invalid(field, f"{value!r} is longer than 10 years", reason="LIFETIME_TOO_LONG")
    return micros


def invalid(field: str, message: str, *, reason: str = "INVALID_ARGUMENT") -> InvalidArgument:
    """The error for an argument that is refused before anything is sent."""
    return InvalidArgument(f"{field}: {message}", reason=reason, details={"field": field})


@dataclass(frozen=True, slots=True)
class TopicStatistics:
    """Figures of a topic; expired records count in none but `overdue_records` (rule L16)."""

    live_records: int
    stored_bytes: int
    """Key and payload bytes of the stored records, before compression, overdue ones included."""
    overdue_records: int
    """Expired records that are not yet physically removed."""
    journal_bytes: int
    """Bytes of the retained journal, before compression."""
    journal_entries: int
    floor_sequence: int
    """Highest sequence ever discarded from the journal (rule J1)."""


@dataclass(frozen=True, slots=True)
class IndexStatus:
    """How far a secondary index is."""

    path: str
    complete: bool
    """True: queries use it. False: it is being built."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the server has it."""

    name: str
    settings: TopicSettings
    set_in_config: bool
    """True: declared in the configuration file, which owns it (rule K1)."""
    create_time: datetime
    statistics: TopicStatistics | None
    """None when it was not asked for."""
    indexes: tuple[IndexStatus, ...] = ()
    """Its secondary indexes, in the order of the settings."""


@dataclass(frozen=True, slots=True)
class Status:
    """How the server is."""

    instance: str
    instance_id: str
    journal_epoch: str
    server_version: str
    state: str
    """ "serving" or "failed"."""
    failure: str
    """Why writes have stopped; empty while serving."""
    ready_time: datetime
    clock_time: datetime
    """The guarded clock (rule L15)."""
    sweep_paused: bool
    """True: the clock jumped and sweeping waits for it to come back, or for `accept_clock`."""
    last_sequence: int
    live_records: int
    overdue_records: int
    topics: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class ClockAccepted:
    """The guarded clock before and after the operator confirmed the wall clock."""

    before: datetime
    after: datetime


@dataclass(frozen=True, slots=True)
class Compacted:
    """Bytes of the data directory before and after a compaction."""

    bytes_before: int
    bytes_after: int
