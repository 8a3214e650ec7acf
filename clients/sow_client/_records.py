"""The values that the client returns: records as views on the columns they arrived in, and the answers to writes and
reads.

A query's batch keeps the two columns that every program reads (key, payload) as Python lists, and the others as they
came off the wire. A `Record` is four references into the batch. Its numbers are looked up only when an attribute is
read, which makes a million records a second possible.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import repeat
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec

from sow.durations import parse_micros
from sow.v1 import types_pb2
from sow_client._documents import decode_as
from sow_client._payloads import MessageTypeName, PayloadForm
from sow_client.errors import InternalError, InvalidArgument

_Value = TypeVar("_Value")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
NEVER_MICROS = 2**63 - 1
"""The value for "never" in a column of expire times."""


class Never(enum.Enum):
    """The type of `NEVER`."""

    NEVER = "never"

    def __repr__(self) -> str:
        return "NEVER"


NEVER = Never.NEVER
"""As a `ttl`: the record never expires, even where its topic has a default. Rule: L3."""

Ttl: TypeAlias = str | timedelta | int | float | Literal[Never.NEVER]
"""A time to live: text such as "500ms", "1h30m" or "7d", a timedelta, seconds, or NEVER. Rule: L1."""


class Earliest(enum.Enum):
    """The type of `EARLIEST`."""

    EARLIEST = "earliest"

    def __repr__(self) -> str:
        return "EARLIEST"


EARLIEST = Earliest.EARLIEST
"""As the `start` of a subscription: the earliest change that is retained. Rule: S4."""

Start: TypeAlias = str | datetime | Literal[Earliest.EARLIEST]
"""Where a subscription starts: after a bookmark, with the first change at or after a time, or EARLIEST. Rule: S4."""

ExpireAt: TypeAlias = datetime | int | str
"""A point in time: a datetime with its time zone, microseconds since the epoch, or ISO 8601 with its time zone."""

DurabilityName: TypeAlias = Literal["fsync", "buffered", "replicated"]
"""When a write is acknowledged: "fsync" once it is on disk, "buffered" before that, and "replicated" once it is on disk
here and at the sync peers. Rule: P5."""


UNKNOWN_FORM: Final = PayloadForm("")
_FORMS: Final[Mapping[str, PayloadForm]] = {name: PayloadForm(name) for name in get_args(MessageTypeName)}


def form_of(message_type: str, separator: str) -> PayloadForm:
    """The form of the payloads in an answer; `separator` is empty but for fix and nvfix."""
    form = _FORMS.get(message_type, UNKNOWN_FORM)
    return PayloadForm(form.message_type, separator) if separator and form.message_type else form


def datetime_of(micros: int) -> datetime:
    """The point in time, in UTC, exact to the microsecond."""
    return EPOCH + timedelta(microseconds=micros)


def micros_of(moment: datetime) -> int:
    """Microseconds since the epoch of a datetime that knows its time zone."""
    return (moment - EPOCH) // _MICROSECOND


class Record(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One record: its key, its payload as published, and its metadata.

    Records are equal if all of this is equal; they can stand in sets, and be pickled. A record is a view on the batch
    that it came in, which lives as long as one of its records; a pickled one is on its own.

    Rule: K6.
    """

    # A msgspec.Struct because its constructor runs in C (0.1 µs against 0.35 µs) and gc=False keeps a million of
    # them out of the garbage collector; nothing in it can form a cycle.
    key: str
    """The record key: the values of the key fields as text, joined with "|", or the published key. Rule: K4."""
    payload: bytes
    """The bytes as published, or reduced by `select`; empty with `keys_only`."""
    _batch: RecordBatch
    _index: int
    _data: object = msgspec.UNSET

    @property
    def topic(self) -> str:
        """The topic that holds it."""
        return self._batch.topic

    @property
    def form(self) -> PayloadForm:
        """The message type of its topic; it decodes the payload."""
        return self._batch.form

    @property
    def data(self) -> Any:  # of any type, as only the program knows its topic: `data["price"]` needs no cast
        """The payload decoded by the message type of its topic, as a dict; of a binary topic its bytes. Decoded once,
        at the first access. `PayloadForm.document` says which values it has.

        A server that is older than this client does not tell the message type. Then JSON objects are decoded, which
        begin with `{`, and other payloads are bytes.
        """
        data = self._data
        if data is msgspec.UNSET:
            data = self._batch.form.document(self.payload)
            msgspec.structs.force_setattr(self, "_data", data)
        return data

    def as_(self, kind: type[_Value]) -> _Value:
        """The payload, a JSON document, as a value of this type: a `msgspec.Struct`, a dataclass, a pydantic model, or
        any other type that msgspec decodes, such as `dict[str, float]`.

        Raises the ValueError of msgspec or of pydantic when it does not fit, with the topic and the key as a note.
        """
        try:
            return decode_as(self.payload, kind)
        except ValueError as error:
            error.add_note(f"the record {self.key!r} of the topic {self.topic!r}")
            raise

    @property
    def version(self) -> int:
        """Hybrid logical clock value of the write: larger is newer. Rule: K7."""
        return self._batch.columns.version[self._index]

    @property
    def publish_time_micros(self) -> int:
        """The time when the server applied the publish, microseconds since the epoch."""
        return self._batch.columns.publish_time_micros[self._index]

    @property
    def publish_time(self) -> datetime:
        """The time when the server applied the publish, UTC."""
        return datetime_of(self.publish_time_micros)

    @property
    def expire_time_micros(self) -> int | None:
        """The time when the record expires, microseconds since the epoch; None: never."""
        micros = self._batch.columns.expire_time_micros[self._index]
        return None if micros == NEVER_MICROS else micros

    @property
    def expire_time(self) -> datetime | None:
        """The time when the record expires, UTC; None: never."""
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

    def _fields(self) -> tuple[str, str, bytes, int, int, int, int, str]:
        columns, index = self._batch.columns, self._index
        return (
            self.topic,
            self.key,
            self.payload,
            columns.version[index],
            columns.publish_time_micros[index],
            columns.expire_time_micros[index],
            columns.sequence[index],
            self.origin,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return self is other or (self.key == other.key and self._fields() == other._fields())

    def __hash__(self) -> int:
        return hash((self.key, self.version))

    def __reduce__(self) -> tuple[Callable[..., Record], tuple[object, ...]]:
        return partial(record_of, form=self.form), self._fields()  # not the batch, which may have thousands of others

    def __repr__(self) -> str:
        return f"Record(topic={self.topic!r}, key={self.key!r}, version={self.version}, payload={_shown(self.payload)})"

    def _repr_html_(self) -> str:
        return html_table([self], f"Record of {self.topic!r}, version {self.version}")


def record_of(
    topic: str,
    key: str,
    payload: bytes,
    version: int,
    publish_time_micros: int,
    expire_time_micros: int,
    sequence: int,
    origin: str,
    *,
    form: PayloadForm = UNKNOWN_FORM,
) -> Record:
    """A record in a batch of its own. `expire_time_micros`: `NEVER_MICROS` for never."""
    columns = types_pb2.RecordColumns(
        key=[key],
        version=[version],
        publish_time_micros=[publish_time_micros],
        expire_time_micros=[expire_time_micros],
        sequence=[sequence],
        origins=[origin],
        message_type=form.message_type,
        fix_separator=form.separator,
    )
    return Record(key, payload, RecordBatch(topic, columns), 0)


def html_table(records: Iterable[Record], caption: str) -> str:
    """The first records, for a notebook."""
    from sow_client import _html  # lazily: only notebooks need it

    return _html.table(records, caption)


_SHOWN_BYTES: Final = 200
"""The most bytes of a payload in a repr; a payload may have a megabyte."""


def _shown(payload: bytes) -> str:
    if len(payload) <= _SHOWN_BYTES:
        return repr(payload)
    return f"{payload[:_SHOWN_BYTES]!r}… of {len(payload)} bytes"


ChangeOp: TypeAlias = Literal["sow", "put", "oof", "delete", "expire", "snapshot_end", "resync"]
"""The kind of a message of a subscription: see `Change`. Rule: S2."""

ChangeReason: TypeAlias = Literal["touched", "deleted", "expired", "match", "not_permitted", "window", "truncated"]
"""The reason: a put that changed only the lifetime; out of focus because the record was deleted, has expired, or no
longer matches; it is not in the list of a live result any more ("window"); the snapshot that ends has not all records
(`snapshot_max`).

Rule: S2.
"""


class Change(msgspec.Struct, frozen=True, gc=False):
    """One message of a subscription.

    | op | tells | record | previous |
    |---|---|---|---|
    | "sow" | a record of the snapshot | the record | None |
    | "snapshot_end" | the snapshot is complete; changes follow | None | None |
    | "put" | the record was published, or its lifetime was changed (reason "touched") | the record | None |
    | "oof" | out of focus: "deleted" or "expired" | None | the removed record |
    | "oof" | out of focus: "match", it no longer matches | the updated record | None |
    | "delete", "expire" | to change readers: it was removed | None | the removed record |
    | "resync" | forget all records: the subscription could not go on, and a new snapshot follows | None | None |

    Rule: S2.
    """

    op: ChangeOp
    reason: ChangeReason | None = None
    """None: nothing to add."""
    record: Record | None = None
    """Its `sequence` is the sequence of the change. The payload of a delta has the changed fields and the key
    fields."""
    previous: Record | None = None
    """The removed record; its `sequence` is the sequence of the removal."""
    bookmark: str | None = None
    """The `start` of a subscription that continues after this message. None inside a snapshot and inside an atomic
    request, where a subscription cannot start; the last message of the request has it."""
    topic: str = ""
    """The topic; empty for the marks "snapshot_end" and "resync" of a subscription to several topics."""
    is_delta: bool = False
    """True: `record` holds changed fields, not a whole record. Rule: S3."""
    unset_paths: tuple[str, ...] = ()
    """The removed fields, as paths such as "/a/b"; only of deltas."""
    delivery_count: int = 1
    """The number of deliveries to a durable subscription, including this one. In the answer of `durable_browse`: the
    number so far.

    Rule: J15.
    """
    absent_fields: tuple[str, ...] = ()
    """Only of a "snapshot_end", and of a single topic: fields of the filter and of `select` in which no record that was
    read has a value: perhaps they are mistyped.

    Rule: Q10.
    """
    position: int | None = None
    """Only of a "put" of a live result: its place in the new list, from 0.

    Rule: S11.
    """
    cell: str = ""
    """The cell it comes from, which its `bookmark` is of; only of a `JoinedSubscription`, and of no mark. Rule: C21."""

    @property
    def key(self) -> str:
        """The key of its record; empty for marks."""
        about = self.record or self.previous
        return "" if about is None else about.key


class RecordBatch:
    """The records of one message, in columns of equal length: the fast way to read a large answer."""

    __slots__ = ("columns", "form", "keys", "payloads", "topic")

    def __init__(self, topic: str, columns: types_pb2.RecordColumns) -> None:
        """Raises InternalError when the columns are not of equal length."""
        self.topic = topic
        self.columns = columns
        self.form: PayloadForm = form_of(columns.message_type, columns.fix_separator)
        """The message type of the topic, which decodes the payloads."""
        # A slice is a list that protobuf makes in one go, a third quicker than list(), which asks for entry by entry.
        self.keys: list[str] = columns.key[:]
        count = len(self.keys)
        self.payloads: list[bytes] = columns.payload[:] or [b""] * count
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

    def __repr__(self) -> str:
        return f"RecordBatch({self.topic!r}, {len(self)} records)"

    def _repr_html_(self) -> str:
        return html_table(self, repr(self))

    def __iter__(self) -> Iterator[Record]:
        return map(Record, self.keys, self.payloads, repeat(self), range(len(self.keys)))

    @property
    def versions(self) -> list[int]:
        """Versions, see `Record.version`."""
        return self.columns.version[:]

    @property
    def publish_times_micros(self) -> list[int]:
        """The times when the server applied the publishes, microseconds since the epoch."""
        return self.columns.publish_time_micros[:]

    @property
    def expire_times_micros(self) -> list[int]:
        """The times when the records expire, microseconds since the epoch; 9223372036854775807 stands for never."""
        return self.columns.expire_time_micros[:]

    @property
    def sequences(self) -> list[int]:
        """Journal sequences of the last changes."""
        return self.columns.sequence[:]

    @property
    def origins(self) -> list[str]:
        """Names of the instances that accepted the writes."""
        names = self.columns.origins[:]
        return [names[index] for index in self.columns.origin] or names[:1] * len(self)


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome of one record that was published or touched."""

    key: str
    version: int
    """Its new version. For a duplicate the version of the first attempt; 0: no longer remembered."""
    expire_time_micros: int | None
    """The expire time stamped on it, microseconds since the epoch; None: never, or not `expire_time_known`."""
    sequence: int
    """Journal sequence of the change. For a duplicate the sequence of the first attempt; 0: no longer remembered."""
    ttl_ignored: bool
    """True: the lifetime is stored without effect, because the topic has expiration disabled. Rule: L3."""
    duplicate: bool
    """True: an earlier attempt had applied it, and this one changed nothing. Rule: P6."""
    expire_time_known: bool = True
    """False: the expire time of this duplicate is no longer remembered, so `expire_time` has no meaning."""
    bookmark: str | None = None
    """The `start` of a subscription to the changes after it; for a record of an atomic request, after the whole
    request. None: the position is not known, or the server is older."""
    delivered: int | None = None
    """For a record that was due at once, such as with ttl 0: the number of attached subscribers that received it. None
    for every other record.

    Rule: L7.
    """
    removed: bool = False
    """True for a removal that has deleted a record. A removal that found none has version and sequence 0. Rule: P11."""

    @property
    def expire_time(self) -> datetime | None:
        """The expire time stamped on it, UTC; None: never."""
        return None if self.expire_time_micros is None else datetime_of(self.expire_time_micros)


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a delete, or its progress."""

    matched: int
    """Live records that matched."""
    deleted: int
    """Records deleted; 0 in a dry run."""
    sequence: int
    """Journal sequence of the last delete; 0 when there was none."""
    absent_fields: tuple[str, ...] = ()
    """Known at the end: fields of the filter in which no record that was read has a value. Rule: Q10."""


@dataclass(frozen=True, slots=True)
class Restamped:
    """The result of a restamp, or its progress. Rule: L13."""

    matched: int
    """Live records that matched."""
    restamped: int
    """Records whose lifetime was changed; 0 in a dry run."""
    sequence: int
    """Journal sequence of the last change; 0 when there was none."""
    absent_fields: tuple[str, ...] = ()
    """Known at the end: fields of the filter in which no record that was read has a value. Rule: Q10."""


TouchOnlyName: TypeAlias = Literal["later", "earlier", "without", "with"]
"""The records that a touch changes, by their expire time. Rule: L19."""
RestampMode: TypeAlias = Literal["set", "cap", "clear"]
"""The effect of a restamp on lifetimes: replaces them, lowers the longer ones, removes them. Rule: L13."""


OnAbsentFields: TypeAlias = Callable[[tuple[str, ...]], object]
"""Gets fields, as paths, in which no record that was read has a value. Rule: Q10."""


@dataclass(frozen=True, slots=True)
class QueryHeader:
    """Opens the answer to a query."""

    bookmark: str
    """The position in the journal at which the query was cut."""
    as_of_micros: int
    """The one instant at which expiry was judged, microseconds since the epoch. Rule: L8."""

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
    """Stored records that were read to find the matches."""
    next_page_token: str
    """The token of the next page; empty if this was the last one, or if the query was not paged."""
    absent_fields: tuple[str, ...] = ()
    """Fields of the filter, the order, `select` and aggregates in which no record that was read has a value: perhaps
    they are mistyped. Rule: Q10."""
    groups: int = 0
    """With `group_by` or `aggregate`: how many groups there are, before `having`, `skip_n` and `top_n`. Rule: Q12."""
    ungrouped: int = 0
    """Records that matched and are in no group. Rule: Q12."""


AccessName: TypeAlias = Literal["points", "key_ranges", "index", "scan", "nothing", "unknown"]
"""The source that a query reads first: records by their keys, ranges of keys, an index, every record, or nothing.
"unknown" stands for a source that only a newer server has.

Rule: Q3.
"""


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The way in which the records of a query are found, and the cost. Rule: Q3."""

    access: AccessName
    """The source that is read first; each record found there is then checked with the whole filter."""
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
    absent_fields: tuple[str, ...] = ()
    """Fields of the filter and the order in which no record that was read has a value: perhaps they are mistyped.
    Rule: Q10."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the records of a topic, in key order or the one asked for. Rule: Q4."""

    records: list[Record]
    next_page_token: str
    """The argument for the next call; empty: this was the last page."""
    header: QueryHeader
    footer: QueryFooter

    def __repr__(self) -> str:
        return f"Page({len(self.records)} records, next_page_token={self.next_page_token!r})"

    def _repr_html_(self) -> str:
        return html_table(self.records, repr(self))


Size: TypeAlias = int | str
"""Bytes: a number, text such as "64MiB" or "1.5GiB", or UNLIMITED."""

Count: TypeAlias = int | Literal["unlimited"]
"""A number, or UNLIMITED."""


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
