"""What the client hands out: records as views on the columns they arrived in, and the answers to writes and reads.

A query's batch keeps the two columns that everybody reads (key, payload) as Python lists and the rest as they came
off the wire; a `Record` is four references into it. That is what makes a million records a second possible: the
numbers of a record are looked up only when one of its attributes is asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Final, Literal, TypeAlias, TypedDict

import msgspec

from sow.durations import format_micros, parse_micros
from sow.sizes import SizeError, parse_bytes
from sow.v1 import types_pb2
from sow_client._documents import decode
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

SettingValue: TypeAlias = str | int | bool
"""A setting of a policy: a duration such as "1h0m0s", a word, a number, or yes or no."""

DurabilityName: TypeAlias = Literal["fsync", "buffered", "replicated"]
"""When a write is acknowledged (rule P5)."""


def datetime_of(micros: int) -> datetime:
    """The point in time, in UTC, exact to the microsecond."""
    return EPOCH + timedelta(microseconds=micros)


def micros_of(moment: datetime) -> int:
    """Microseconds since the epoch of a datetime that knows its time zone."""
    return (moment - EPOCH) // _MICROSECOND


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
        A number that no float reaches, such as 1e400, is a Decimal.

        A record does not carry its topic's message type, so this looks at the payload: JSON objects begin with `{`,
        documents of msgpack, fix and nvfix topics do not.
        """
        if self._data is msgspec.UNSET:
            self._data = self.payload
            if self.payload[:1] == b"{" or self.payload.lstrip(b" \t\r\n")[:1] == b"{":
                try:
                    self._data = decode(self.payload)
                except ValueError:
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
    delivery_count: int = 1
    """Of a durable subscription: how often it was handed over, this time included (rule J15). Of what
    `durable_browse` shows: how often so far."""

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
    """Its new version. Of a duplicate the one that it got when it was applied; 0: that is not remembered."""
    expire_time_micros: int | None
    """The expire time stamped on it, microseconds since the epoch; None: never, or not `expire_time_known`."""
    sequence: int
    """Journal sequence of the change. Of a duplicate that of when it was applied; 0: that is not remembered."""
    ttl_ignored: bool
    """True: the lifetime is stored but not acted on, as the topic has expiration disabled (rule L3)."""
    duplicate: bool
    """True: it had been applied by an earlier attempt, nothing was changed now (rule P6)."""
    expire_time_known: bool = True
    """False: of this duplicate it is not remembered, so that `expire_time` says nothing."""
    bookmark: str | None = None
    """The `start` of a subscription to what comes after it; of a record of an atomic request, after all of that. None:
    the position is not known, or the server is an older one."""
    delivered: int | None = None
    """Of a record that was due at once, such as with ttl 0: how many attached subscribers it was handed to (rule L7).
    None: of every other record."""

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


@dataclass(frozen=True, slots=True)
class UnsoundRow:
    """A stored row that no publish could have made (rule R13)."""

    key: bytes
    """Any bytes, perhaps none."""
    reason: str
    """Why a publish of it would be refused, as of an exception."""
    message: str
    version: int
    origin: str
    """The instance that wrote it."""
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class TopicChecked:
    """What a check of a topic has found, or has found so far (rule R13)."""

    checked: int
    """Rows that were looked at."""
    unsound: int
    """Those of them that no publish could have made."""
    removed: int
    """Those of these that were removed."""
    rows: tuple[UnsoundRow, ...]
    """Some of the unsound ones."""


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


BacklogActionName: TypeAlias = Literal["hold", "reject", "evict", "conflate"]
"""What happens when a topic's unacknowledged entries exceed its quota (rule J9)."""

OnMissingName: TypeAlias = Literal["retain", "drop"]
"""What becomes of a dead letter whose target topic does not exist (rule T3)."""

UNLIMITED: Final = -1
"""As a number of bytes or entries, or as `retain_time`: no limit. The text "unlimited" says the same."""

Size: TypeAlias = int | str
"""Bytes: a number, text such as "64MiB" or "1.5GiB", or UNLIMITED."""

Count: TypeAlias = int | Literal["unlimited"]
"""A number, or UNLIMITED."""


class TopicSettingsArguments(TypedDict, total=False):
    """The settings of a topic as keyword arguments; see `TopicSettings`. `default_ttl`: `expiration` as a duration."""

    key: tuple[str, ...] | list[str]
    message_type: MessageTypeName
    expiration: Ttl | None
    default_ttl: Ttl | None
    min_ttl: Ttl | None
    max_ttl: Ttl | None
    journal: bool
    fix_separator: str
    retain_time: Ttl | None
    retain_bytes: Size | None
    index: tuple[str, ...] | list[str]
    max_age: Ttl | None
    max_bytes: Size | None
    max_entries: Count | None
    backlog_ttl: Ttl | None
    backlog_quota_bytes: Size | None
    backlog_quota_age: Ttl | None
    backlog_quota_entries: Count | None
    backlog_action: BacklogActionName | None
    delivery_limit: Count | None
    durable_idle_ttl: Ttl | None
    idle_ttl: Ttl | None
    publish_is_use: bool | None
    only_if_empty: bool | None
    auto_delete: bool | None
    dead_letter: str
    dead_letter_by_key: bool | None
    on_missing: OnMissingName | None


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Settings of a topic. However they were given, durations are kept in one notation ("1h30m0s"), sizes as bytes.

    What is not set (None, unless its line says otherwise) takes its value from a policy that matches the topic, else
    from the server's defaults (rule T2).
    """

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
    """Journal entries are kept at least this long (rule J3); "unlimited" is legal."""
    retain_bytes: Size | None = None
    """Bytes of journal to keep at least; with `retain_time`, whichever is reached first. -1: unlimited."""
    index: tuple[str, ...] | list[str] = ()
    """Paths with a secondary index each, such as "/symbol" (rule Q3)."""
    max_age: Ttl | None = None
    """Journal entries of this age are discarded, acknowledged or not (rule J3)."""
    max_bytes: Size | None = None
    """Journal bytes beyond this are discarded, oldest first. -1: no limit."""
    max_entries: Count | None = None
    """Journal entries beyond this are discarded, oldest first. -1: no limit."""
    backlog_ttl: Ttl | None = None
    """An entry that a durable leaves unacknowledged for this long counts as acknowledged (rule J8)."""
    backlog_quota_bytes: Size | None = None
    """Bytes that the slowest durable may leave unacknowledged (rule J9). -1: no quota."""
    backlog_quota_age: Ttl | None = None
    """Age that the oldest unacknowledged entry may have (rule J9)."""
    backlog_quota_entries: Count | None = None
    """Entries that the slowest durable may leave unacknowledged (rule J9). -1: no quota."""
    backlog_action: BacklogActionName | None = None
    """What happens beyond the quota; "hold" unless said otherwise (rule J9)."""
    delivery_limit: Count | None = None
    """How often an entry is handed to consumers of a durable before it is set aside (rule J15). -1: unlimited."""
    durable_idle_ttl: Ttl | None = None
    """A durable that is neither attached nor acknowledges for this long is removed (rule J10)."""
    idle_ttl: Ttl | None = None
    """The topic is deleted when it was not used for this long (rule T1)."""
    publish_is_use: bool | None = None
    """True: a publish is a use of the topic, too (rule T1)."""
    only_if_empty: bool | None = None
    """True: the topic is deleted for being unused only while it has no live records (rule T1)."""
    auto_delete: bool | None = None
    """True: the topic is deleted when its last subscriber leaves (rule T1)."""
    dead_letter: str = ""
    """The topic that expired records are copied to (rule T3). Empty: none, unless a policy says otherwise."""
    dead_letter_by_key: bool | None = None
    """True: a dead letter has the key that the record had, not topic|key|version (rule T3)."""
    on_missing: OnMissingName | None = None
    """What becomes of dead letters while their target does not exist; "retain" unless said otherwise (rule T3)."""

    def __post_init__(self) -> None:
        _normalise(self)

    def named(self) -> frozenset[str]:
        """Names of the settings that differ from the defaults."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)


_DURATION_WORDS: Mapping[str, frozenset[str]] = {
    "expiration": frozenset({"disabled", "enabled", "reject"}),
    "min_ttl": frozenset(),
    "max_ttl": frozenset(),
    "retain_time": frozenset({"unlimited"}),
    "max_age": frozenset(),
    "backlog_ttl": frozenset(),
    "backlog_quota_age": frozenset(),
    "durable_idle_ttl": frozenset(),
    "idle_ttl": frozenset(),
}


class DurableSettingsArguments(TypedDict, total=False):
    """The settings of a durable subscription as keyword arguments; see `DurableSettings`."""

    retain_time: Ttl | None
    retain_bytes: Size | None
    backlog_ttl: Ttl | None
    idle_ttl: Ttl | None
    delivery_limit: Count | None


@dataclass(frozen=True, slots=True)
class DurableSettings:
    """Settings of a durable subscription. None: those of its topic, or of a policy. Durations are kept in one notation.

    It names the same things as `TopicSettings`, for one durable.
    """

    retain_time: Ttl | None = None
    """How long acknowledged entries can be rewound to (rule J3); "unlimited": as long as the topic retains them."""
    retain_bytes: Size | None = None
    """Bytes of acknowledged entries that can be rewound to. -1: unlimited."""
    backlog_ttl: Ttl | None = None
    """An entry that is unacknowledged for this long counts as acknowledged (rule J8)."""
    idle_ttl: Ttl | None = None
    """Removed when neither attached nor acknowledging for this long (rule J10)."""
    delivery_limit: Count | None = None
    """How often an entry is handed over before it is set aside (rule J15). -1: unlimited."""

    def __post_init__(self) -> None:
        _normalise(self)


_FLAGS: Final = frozenset(
    {"journal", "publish_is_use", "only_if_empty", "auto_delete", "dead_letter_by_key"},
)
_TEXTS: Final = frozenset({"message_type", "fix_separator", "backlog_action", "dead_letter", "on_missing"})


def _normalise(settings: TopicSettings | DurableSettings) -> None:
    """Brings each setting into its one form. Raises InvalidArgument naming the first that is of a wrong kind."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is not None:
            object.__setattr__(settings, field.name, _normal(field.name, value))


def _normal(name: str, value: object) -> object:
    if name in ("key", "index"):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise invalid(name, "is a list of paths")
        paths = tuple(value)
        for path in paths:
            if not isinstance(path, str):
                raise invalid(name, f"has a {type(path).__name__} among its paths")
        return paths
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise invalid(name, f"{value!r} is neither True nor False")
        return value
    if name in _TEXTS:
        if not isinstance(value, str):
            raise invalid(name, f"a {type(value).__name__} is not text")
        return value
    if name in _DURATION_WORDS:
        return _normal_duration(name, value)
    return _normal_number(name, value)


def _normal_duration(name: str, value: object) -> str:
    if isinstance(value, str) and value in _DURATION_WORDS[name]:
        return value
    if value is NEVER or value in ("never", "unlimited") or (type(value) is int and value == UNLIMITED):
        if "unlimited" in _DURATION_WORDS[name]:
            return "unlimited"
        raise invalid(name, f"{value!r} is not a duration; None leaves it out")
    if not isinstance(value, str | timedelta | int | float):
        raise invalid(name, f"a {type(value).__name__} is not a duration such as '10m', a timedelta, or seconds")
    return format_micros(ttl_micros(value, name))


def _normal_number(name: str, value: object) -> int:
    is_size = name.endswith("_bytes")
    if isinstance(value, str):
        if value == "unlimited":
            return UNLIMITED
        if is_size:
            try:
                value = parse_bytes(value)
            except SizeError as error:
                raise invalid(name, str(error)) from error
    if isinstance(value, bool) or not isinstance(value, int):
        wanted = "a number of bytes, text such as '64MiB'" if is_size else "a number"
        raise invalid(name, f"{value!r} is not {wanted} or UNLIMITED")
    if not UNLIMITED <= value < 2**63:
        raise invalid(name, f"{value} is out of range; UNLIMITED is {UNLIMITED}")
    return value


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
    durables: int = 0
    """Durable subscriptions."""
    backlog_bytes: int = 0
    """Unacknowledged bytes of the slowest durable: what the backlog quota is about (rule J9)."""
    backlog_age: timedelta | None = None
    """Age of the oldest unacknowledged entry; None: there is none."""
    tombstones: int = 0
    """Kept for peers, not yet purged (rule R4)."""
    slowest_durable: str = ""
    """The durable that has acknowledged least: whose backlog it is. Empty: there are no durables."""
    backlog_entries: int = 0
    """Entries that it leaves unacknowledged, before its filter."""


@dataclass(frozen=True, slots=True)
class IndexStatus:
    """How far a secondary index is."""

    path: str
    complete: bool
    """True: queries use it. False: it is being built."""


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One setting as it is in force, and where it comes from (rule T2)."""

    name: str
    """The name of a setting of a topic."""
    value: str
    """As the command line takes it: Go-style durations, binary sizes, "unlimited", "never"."""
    origin: str
    """ "topic", "config", "policy NAME", "operator policy NAME" or "default"."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the server has it."""

    name: str
    settings: TopicSettings
    """As they are in force: what the topic leaves to policies and defaults is filled in (rule T2)."""
    set_in_config: bool
    """True: declared in the configuration file, which owns it (rule K1)."""
    create_time: datetime
    statistics: TopicStatistics | None
    """None when it was not asked for."""
    indexes: tuple[IndexStatus, ...] = ()
    """Its secondary indexes, in the order of the settings."""
    effective: tuple[EffectiveSetting, ...] = ()
    """Every setting as it is in force; only when it was described."""
    planned_journal_bytes: int | None = None
    """Bytes of journal to plan storage for: what is retained plus the backlog quota (rule T2); -1: unlimited. Only when
    it was described."""
    warnings: tuple[str, ...] = ()
    """What may not be meant about its settings; only when it was created or altered (rule J17)."""


PolicyTargetName: TypeAlias = Literal["topics", "durables"]
"""What a policy applies to."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings for all topics, or all durables, whose names match a pattern (rule T2)."""

    name: str
    pattern: str
    """RE2 expression that the whole name of a topic, or `topic/name` of a durable, must match."""
    priority: int
    """The highest counts; ties: the longest pattern, then the name."""
    applies_to: PolicyTargetName
    operator: bool
    """True: an operator policy, which has limits only, and nobody can go beyond them."""
    settings: Mapping[str, SettingValue]
    """What it sets, and nothing else: as `set_policy` takes it."""
    matches: int
    """How many topics or durables take something from it now."""
    warnings: tuple[str, ...] = ()
    """What may not be meant about what it sets; only when it was set (rule J17)."""


@dataclass(frozen=True, slots=True)
class DurableFigures:
    """Figures of a durable subscription (rule J7). Unless `exact`, entries are counted before its filter."""

    total_entries: int
    """Entries that it can read, acknowledged or not."""
    total_bytes: int
    """Their bytes, before compression."""
    unacknowledged_entries: int
    unacknowledged_bytes: int
    """Before compression."""
    oldest_unacknowledged_age: timedelta | None
    """None: nothing is unacknowledged."""
    exact: bool
    """True: only entries that match its filter are counted."""
    set_aside_entries: int = 0
    """Entries that were set aside for the delivery limit since it was created (rule J15)."""


@dataclass(frozen=True, slots=True)
class Durable:
    """A durable subscription as the server has it (rules J2, J7)."""

    topic: str
    name: str
    filter: str
    """In canonical form; empty: all records."""
    acknowledged: str
    """Bookmark: everything up to here is acknowledged."""
    earliest: str
    """Bookmark: the earliest position that it can be rewound to."""
    attached: bool
    """True: a consumer is attached."""
    create_time: datetime
    last_use_time: datetime
    """When it was last attached, or acknowledged something."""
    settings: DurableSettings
    """As they are in force."""
    figures: DurableFigures | None
    """None in lists, unless they were asked for."""


@dataclass(frozen=True, slots=True)
class Browsed:
    """What a durable subscription has not acknowledged, or some of it (rule J16)."""

    entries: tuple[Change, ...]
    """As a change reader gets them: "put", "delete", "expire"; `delivery_count` is how often each came so far."""
    bookmark: str
    """Everything up to here was looked at: for `after` of the next call."""
    complete: bool
    """True: there was nothing after it."""


@dataclass(frozen=True, slots=True)
class Rewound:
    """Where a durable subscription was moved to (rule J6)."""

    bookmark: str
    """Everything up to here counts as acknowledged."""
    unacknowledged_entries: int
    """Entries after it, before filtering."""


GapReason: TypeAlias = Literal["discarded", "evicted", "conflated", "backlog_ttl", "delivery_limit", "reset", "unknown"]
"""Why a durable subscription was not handed something: see `Gap`."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that a durable subscription was not handed, and will not be.

    | reason | why |
    |---|---|
    | "discarded" | max_age, max_bytes or max_entries of the topic discarded it (rule J5) |
    | "evicted" | the backlog quota evicted it (rule J9) |
    | "conflated" | the backlog quota replaced it by the snapshot that follows (rule J9) |
    | "backlog_ttl" | it was unacknowledged for too long (rule J8) |
    | "delivery_limit" | it was handed over as often as the delivery limit allows, and was set aside (rule J15) |
    | "reset" | the durable was removed, for being idle or by somebody, and begins anew (rule J10) |
    | "unknown" | for a reason that only a newer server knows |
    """

    reason: GapReason
    after: str
    """Bookmark: it came after this position; empty: not known."""
    upto: str
    """Bookmark: up to this one."""
    entries: int | None
    """How many, before filtering; None: not known."""


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


@dataclass(frozen=True, slots=True)
class LinkTopic:
    """How a topic stands on a link, where it is not simply up to date."""

    topic: str
    state: str
    """ "seeding" or "refused"."""
    message: str
    """Why it was refused."""


@dataclass(frozen=True, slots=True)
class OutgoingLink:
    """A link on which an instance sends (rules R1, R8)."""

    peer: str
    address: str
    state: str
    """ "connecting", "greeting", "seeding", "streaming", "waiting" (for the next attempt) or "refused"."""
    mode: str
    """ "async", "sync", or "downgraded": sync, but down for longer than `sync_timeout`."""
    topics_pattern: str
    acknowledged_sequence: int
    """How far the peer is, in the instance's own sequences."""
    lag_sequences: int
    """Sequences that it has not acknowledged."""
    lag: timedelta
    """Age of the oldest change that it has not acknowledged; zero where there is none."""
    skew: timedelta
    """The peer's clock less the instance's, as far as the way of the messages allows to tell."""
    since: datetime | None
    """Since when the link is in this state."""
    last_error: str
    """Empty: none since the link is up."""
    last_error_reason: str
    """As of an exception; empty where there is none."""
    last_error_time: datetime | None
    topics: tuple[LinkTopic, ...]
    """Those that are being seeded, or were refused."""


@dataclass(frozen=True, slots=True)
class IncomingLink:
    """A link on which an instance receives (rules R3, R4)."""

    peer: str
    state: str
    """ "connected", "seeding" or "away"."""
    cursor: int
    """How far the instance has what the sender has, in the sender's sequences."""
    head_sequence: int
    """The last sequence that the sender has told."""
    applied: int
    """Changes that were applied since the process runs."""
    superseded: int
    """Changes that lost against a newer version, since then."""
    dropped: int
    """Records that were dropped, as they are dead by what the sender says, since then."""
    skew: timedelta
    """The sender's clock less the instance's."""
    last_error: str
    """Empty: none since the link is up."""
    last_error_reason: str
    """As of an exception; empty where there is none."""
    last_error_time: datetime | None
    topics: tuple[LinkTopic, ...]
    """Those that are being seeded, or were refused."""
    rows_refused: int = 0
    """Rows that were not taken, as no publish could have made them, since the process runs."""


@dataclass(frozen=True, slots=True)
class ReplicationStatus:
    """How the links of an instance are."""

    instance: str
    last_sequence: int
    """Its last sequence that is on disk."""
    outgoing: tuple[OutgoingLink, ...]
    """One a configured peer, in the order of the configuration."""
    incoming: tuple[IncomingLink, ...]
    """By the sender's name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs between two instances."""

    key: str
    version_here: int
    """0: there is no such record."""
    version_there: int
    """0: there is no such record."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What the comparison of one topic with a peer found (rule R10)."""

    topic: str
    records: int
    """That were compared, at this end."""
    differing: int
    """Keys that differ."""
    differences: tuple[Difference, ...]
    """Some of them."""
    left_out: str
    """Why the topic was not compared; empty: it was."""
    unreadable_here: int = 0
    """Records that could not be compared, as their key is empty or not UTF-8; see `check_topic`."""
    unreadable_there: int = 0
    """The same at the peer."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was done about one topic so that two instances have the same (rule R10)."""

    topic: str
    differing: int
    """Keys that differed."""
    sent: int
    """Records and tombstones that the peer took over."""
    received: int
    """Records and tombstones that this instance took over."""
    left_out: str
    """Why the topic was not repaired; empty: it was."""
    refused: int = 0
    """Records and tombstones that one end did not take, as no publish could have made them."""


@dataclass(frozen=True, slots=True)
class BackupMade:
    """A backup on the server's machine (rule J14)."""

    directory: str
    sequence: int
    """Up to which it has everything."""
    bytes: int
    """Files that it shares with the store count, too."""
