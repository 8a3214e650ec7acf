"""Rows of a DataFrame as records: the columns for key, lifetime and payload, and the rows that cannot be records.

The plan is made on the driver, from the schema, the options and the topic, and pickled to the tasks. It turns batches
into columns for the client's bulk calls. Guarantees:

    [1]  A fault of the schema or the options is found and named on the driver, before anything is written.
    [2]  A row that cannot be a record (no key, no payload, an invalid lifetime) never stops the others. It is counted
         and reported with its number, and the option `onBadRow` decides whether the job fails.
    [3]  Metadata columns of a read (`_key`, `_version`, …) and columns with a role are not written into the payload, so
         a DataFrame that was read can be written. On topics without key fields `_key` is the key unless `keyColumn` is
         given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    FractionalType,
    IntegralType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    UserDefinedType,
    YearMonthIntervalType,
)

from sow.durations import DurationError, parse_micros
from sow.v1 import types_pb2
from sow_client import NEVER, Client, NotFound
from sow_client._documents import not_finite
from sow_client._records import Ttl
from sow_client._writes import REQUEST_BYTES_MAX
from sow_spark.encoding import all_finite, documents
from sow_spark.errors import SowSourceError, option_error
from sow_spark.options import NESTING_MAX, OnDelete, Writing
from sow_spark.schemas import METADATA_COLUMNS

SECONDS_MAX: Final = 4 * 10**12
"""Longer lifetimes are cut to this. It fits 64 bits in microseconds, and the server refuses it as too long."""
SAMPLE_CHARACTERS: Final = 200

_TTL = types_pb2.LIFETIME_KIND_TTL
_EXPIRE_TIME = types_pb2.LIFETIME_KIND_EXPIRE_TIME
_NEVER = types_pb2.LIFETIME_KIND_NEVER
_ABSENT = types_pb2.LIFETIME_KIND_UNSPECIFIED

LifetimeForm: TypeAlias = Literal["seconds", "interval", "text", "expire_time"]
_Faults: TypeAlias = dict[int, tuple[str, str]]
"""Reason and message of the rows of a batch that cannot be records, counted from 0 in the batch."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """The facts about a topic that writing needs."""

    message_type: str
    keyed: bool
    """The topic has key fields: keys come from the payload (rule K3)."""
    rejects: bool = False
    """The topic rejects lifetimes, `never` too: its records have none (rule L3)."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was not written, and the reason. `row` counts from 0 in its partition."""

    row: int
    reason: str
    message: str
    value: str


@dataclass(frozen=True, slots=True)
class Puts:
    """Rows to publish, in columns. An optional column without a value is None."""

    rows: Sequence[int]
    payloads: list[bytes]
    keys: list[str] | None
    lifetime_kinds: list[int] | None
    lifetime_micros: list[int] | None


@dataclass(frozen=True, slots=True)
class Removals:
    """Records to delete: by their keys or, on topics with key fields, by documents that have the key fields."""

    rows: Sequence[int]
    keys: list[str] | None
    payloads: list[bytes]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The rows of a batch without their payloads, in columns of equal length. A column without a value is None."""

    rows: Sequence[int]
    keys: list[str] | None
    kinds: list[int] | None
    micros: list[int] | None
    removals: list[bool] | None

    def removes_by_key(self, index: int) -> bool:
        """A row removes the record of its key, so its payload is not sent."""
        return self.keys is not None and self.removals is not None and self.removals[index]

    def picked(self, indices: Sequence[int]) -> _Columns:
        """Some of them."""
        return _Columns(
            [self.rows[index] for index in indices],
            self.keys and [self.keys[index] for index in indices],
            self.kinds and [self.kinds[index] for index in indices],
            self.micros and [self.micros[index] for index in indices],
            self.removals and [self.removals[index] for index in indices],
        )

    def runs(self) -> Iterator[tuple[bool, slice]]:
        """Neighbours that are all published, or all removed."""
        if not self.removals:
            if self.rows:
                yield False, slice(0, len(self.rows))
            return
        stop = 0
        for removed, run in groupby(self.removals):
            start, stop = stop, stop + sum(1 for _ in run)
            yield removed, slice(start, stop)

    def puts(self, part: slice, payloads: list[bytes]) -> Puts:
        """Rows to publish."""
        return Puts(
            self.rows[part],
            payloads,
            self.keys and self.keys[part],
            self.kinds and self.kinds[part],
            self.micros and self.micros[part],
        )

    def removals_of(self, part: slice, payloads: list[bytes]) -> Removals:
        """Rows whose records are deleted. With keys their payloads are not sent."""
        rows = self.rows[part]
        return Removals(rows, self.keys and self.keys[part], payloads if self.keys is None else [b""] * len(rows))


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The role of each column."""

    payload: tuple[str, ...]
    whole: bool
    """The one column of `payload` holds documents."""
    key: str | None
    lifetime: str | None
    lifetime_form: LifetimeForm | None
    op: str | None
    on_delete: OnDelete
    keyed: bool
    write_nulls: bool
    rejects: bool = False
    """The topic takes no lifetime."""

    def ttl(self, writing: Writing) -> Ttl | None:
        """The lifetime of rows that bring none, by the option `ttl`. `never` into a topic that rejects lifetimes is
        left out, as its records never expire."""
        if writing.ttl != "never":
            return writing.ttl
        return None if self.rejects else NEVER

    def steps(self, batch: pa.RecordBatch, first_row: int, bad: list[BadRow]) -> Iterator[Puts | Removals]:
        """The actions for a batch, in its order. `first_row` is the number of its first row. Bad rows go to `bad`."""
        faults: _Faults = {}
        removals = self._removals(batch, faults)
        kinds, micros = self._lifetimes(batch, faults)
        columns = _Columns(
            range(first_row, first_row + batch.num_rows), self._keys(batch, faults), kinds, micros, removals
        )
        self._refuse_unwritable(batch, columns, faults)
        sound, payloads = self._sound_payloads(batch, columns, faults)
        if faults:
            bad += _reported(batch, first_row, faults)
            columns = columns.picked(sound)
        for removed, part in columns.runs():
            if not removed:
                yield columns.puts(part, payloads[part])
            elif self.on_delete == "delete":
                yield columns.removals_of(part, payloads[part])

    def _refuse_unwritable(self, batch: pa.RecordBatch, columns: _Columns, faults: _Faults) -> None:
        """Rows without a payload, or with values that JSON lacks."""
        if not self.whole:
            self._refuse_not_finite(batch, columns.removals, faults)
            return
        name = self.payload[0]
        for index in _indices(batch.column(name).is_null()):
            faults.setdefault(index, ("PAYLOAD_MALFORMED", f"column {name} is null: there is no payload"))

    def _sound_payloads(
        self, batch: pa.RecordBatch, columns: _Columns, faults: _Faults
    ) -> tuple[list[int], list[bytes]]:
        """The rows that are records, counted from 0 in the batch, and their payloads."""
        sound = [index for index in range(batch.num_rows) if index not in faults]
        try:
            payloads = self._payloads(batch.take(pa.array(sound, pa.int64())) if faults else batch)
        except RecursionError:  # a variant that is nested deeper than Spark's own writer of JSON can follow
            payloads = self._payloads_one_by_one(batch, sound, faults)
            sound = [index for index in sound if index not in faults]
        if not payloads or max(map(len, payloads)) <= REQUEST_BYTES_MAX:
            return sound, payloads
        # The client raises an error for the whole call.
        for index, payload in zip(sound, payloads, strict=True):
            if len(payload) > REQUEST_BYTES_MAX and not columns.removes_by_key(index):
                faults[index] = "PAYLOAD_TOO_LARGE", f"{len(payload)} bytes are more than a request may have"
        kept = [index not in faults for index in sound]
        return list(compress(sound, kept)), list(compress(payloads, kept))

    def _refuse_not_finite(self, batch: pa.RecordBatch, removals: list[bool] | None, faults: _Faults) -> None:
        """JSON has no NaN and no infinities (rule K2). Rows that remove records are not written, so they may have
        them."""
        for name in self.payload:
            column = batch.column(name)
            if all_finite(column):
                continue
            for index in range(batch.num_rows):  # rare; row by row, because each bad row is reported separately
                row = column.slice(index, 1)
                if all_finite(row) or (removals is not None and removals[index]):
                    continue
                try:
                    path = not_finite(row.to_pylist(maps_as_pydicts="lossy")[0]) or ""
                except (ValueError, OverflowError):  # another value of the row is a time beyond Python's range
                    path = ""
                faults.setdefault(
                    index, ("PAYLOAD_MALFORMED", f"column {name}: /{name}{path} is NaN or infinite, which JSON lacks")
                )

    def _payloads(self, batch: pa.RecordBatch) -> list[bytes]:
        if self.whole:
            payloads: list[bytes] = batch.column(self.payload[0]).cast(pa.binary()).to_pylist()
            return payloads
        return documents(batch.select(list(self.payload)), write_nulls=self.write_nulls)

    def _payloads_one_by_one(self, batch: pa.RecordBatch, indices: Sequence[int], faults: _Faults) -> list[bytes]:
        found: list[bytes] = []
        for index in indices:
            try:
                found += self._payloads(batch.slice(index, 1))
            except RecursionError:
                faults[index] = "PAYLOAD_MALFORMED", "a variant is nested too deep"
        return found

    def _keys(self, batch: pa.RecordBatch, faults: _Faults) -> list[str] | None:
        if self.key is None:
            return None
        column = batch.column(self.key)
        for index in _indices(column.is_null()):
            faults.setdefault(index, ("KEY_REQUIRED", f"column {self.key} is null: there is no key"))
        if not pa.types.is_string(column.type):
            column = column.cast(pa.string())
        try:
            keys: list[str] = column.to_pylist()
        except UnicodeDecodeError:
            keys = []
            for index, key in enumerate(column.cast(pa.binary()).to_pylist()):
                try:
                    keys.append("" if key is None else key.decode())
                except UnicodeDecodeError:
                    keys.append("")
                    faults.setdefault(index, ("KEY_NOT_UTF8", f"column {self.key} is not UTF-8"))
        return keys

    def _removals(self, batch: pa.RecordBatch, faults: _Faults) -> list[bool] | None:
        if self.op is None:
            return None
        ops = pc.fill_null(batch.column(self.op), "put")
        removals = pc.is_in(ops, pa.array(["delete", "expire"], ops.type))
        unknown = pc.invert(pc.or_(removals, pc.is_in(ops, pa.array(["put", "sow"], ops.type))))
        for index in _indices(unknown):
            faults.setdefault(index, ("ROW_MALFORMED", f"column {self.op} is {ops[index].as_py()!r}, no operation"))
        if not pc.any(removals).as_py():
            return None
        if self.on_delete == "fail":
            for index in _indices(removals):
                faults.setdefault(
                    index, ("ROW_MALFORMED", f"column {self.op} is {ops[index].as_py()!r}, and onDelete is fail")
                )
        found: list[bool] = removals.to_pylist()
        return found

    def _lifetimes(self, batch: pa.RecordBatch, faults: _Faults) -> tuple[list[int] | None, list[int] | None]:
        """Kinds and microseconds of the rows' own lifetimes."""
        if self.lifetime is None:
            return None, None
        column = batch.column(self.lifetime)
        if column.null_count == len(column):
            return None, None
        match self.lifetime_form:
            case "text":
                return self._parsed(column, faults)
            case "expire_time":
                kind, values = (
                    _EXPIRE_TIME,
                    column.cast(pa.timestamp("us", column.type.tz), safe=False).view(pa.int64()),
                )
            case "interval":
                kind, values = _TTL, column.cast(pa.duration("us"), safe=False).view(pa.int64())
            case _:
                kind, values = _TTL, self._seconds(column, faults)
        micros: list[int] = pc.fill_null(values, 0).to_pylist()
        if not column.null_count:
            return [kind] * len(micros), micros
        return pc.if_else(column.is_valid(), kind, _ABSENT).to_pylist(), micros

    def _seconds(self, column: pa.Array, faults: _Faults) -> pa.Array:
        if pa.types.is_integer(column.type):
            cut = _cut(column.cast(pa.int64()), SECONDS_MAX)
            return pc.multiply(cut, 1_000_000)
        seconds = column.cast(pa.float64())
        odd = pc.is_nan(seconds)
        for index in _indices(odd):
            faults.setdefault(index, ("INVALID_ARGUMENT", f"column {self.lifetime} is NaN: no time to live"))
        seconds = pc.if_else(odd, 0.0, seconds)
        return pc.round(pc.multiply(_cut(seconds, float(SECONDS_MAX)), 1e6)).cast(pa.int64())

    def _parsed(self, column: pa.Array, faults: _Faults) -> tuple[list[int], list[int]]:
        encoded = column.dictionary_encode()
        kinds, micros = [], []
        wrong: dict[int, str] = {}
        for code, text in enumerate(encoded.dictionary.to_pylist()):
            kind, value = _TTL, 0
            if text == "never":
                kind = _NEVER
            else:
                try:
                    value = parse_micros(text)
                except DurationError as error:
                    wrong[code] = str(error)
            kinds.append(kind)
            micros.append(value)
        kinds.append(_ABSENT)  # for nulls
        micros.append(0)
        codes: list[int] = pc.fill_null(encoded.indices, len(kinds) - 1).to_pylist()
        if wrong:
            for index, code in enumerate(codes):
                if code in wrong:
                    faults.setdefault(index, ("INVALID_ARGUMENT", f"column {self.lifetime}: {wrong[code]}"))
        return [kinds[code] for code in codes], [micros[code] for code in codes]


def _cut(column: pa.Array, bound: float) -> pa.Array:
    return pc.max_element_wise(pc.min_element_wise(column, bound, skip_nulls=False), -bound, skip_nulls=False)


def _indices(mask: pa.Array) -> list[int]:
    """The indexes where the mask is true. It is nearly always false everywhere, so this is checked first."""
    if not pc.any(mask).as_py():
        return []
    found: list[int] = pc.indices_nonzero(mask).to_pylist()
    return found


def _reported(batch: pa.RecordBatch, first_row: int, faults: _Faults) -> list[BadRow]:
    return [
        BadRow(first_row + index, reason, message, _shown(batch, index))
        for index, (reason, message) in sorted(faults.items())
    ]


def _shown(batch: pa.RecordBatch, index: int) -> str:
    """A shortened row, for people."""
    try:
        return shown(documents(batch.slice(index, 1))[0])
    except (pa.ArrowInvalid, RecursionError, SowSourceError):
        return ""


def shown(payload: bytes) -> str:
    """A shortened payload, for people."""
    text = payload[: 4 * SAMPLE_CHARACTERS].decode(errors="replace")
    return text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]}…"


# ---- the plan ----


def look_up_topic(client: Client, writing: Writing, schema: StructType) -> TopicFacts:
    """The server's facts about the topic. If the server does not know the topic, and the rows bring their keys, it is
    taken for one that the first publish creates (rule K1). If the server does not create it, it refuses the rows."""
    try:
        settings = client.describe_topic(writing.topic).settings
    except NotFound:
        if writing.key_column is None and "_key" not in schema.names:
            raise
        return TopicFacts("json", keyed=False)
    return TopicFacts(settings.message_type, keyed=bool(settings.key), rejects=settings.expiration == "reject")


def plan_rows(schema: StructType, writing: Writing, topic: TopicFacts) -> RowPlan:
    """The role of each column. Raises SowSourceError: OPTION_INVALID, SCHEMA_UNSUPPORTED."""
    _check_names(schema)
    key = _key_column(schema, writing, topic)
    lifetime, form = _lifetime_column(schema, writing)
    roles = {key, lifetime}
    rest = [field for field in schema if field.name not in METADATA_COLUMNS and field.name not in roles]
    whole = writing.payload in ("string", "binary")
    if whole:
        _check_whole(rest, writing)
    else:
        if topic.message_type != "json":
            raise option_error(
                "payload",
                f"topic {writing.topic} holds {topic.message_type}: only json documents are made of columns; give "
                "payload=binary and one column with the documents",
            )
        for field in rest:
            if field.name == "_payload":
                raise SowSourceError(
                    "SCHEMA_UNSUPPORTED",
                    "column _payload has whole records of an exported file, which the other columns do not keep",
                    "publish the file with `sow publish`, or drop the column to write the others",
                )
            _check_type(field.dataType, field.name, 0)
    op = "_op" if "_op" in schema.names else None
    if op is None and "onDelete" in writing.given:
        raise option_error("onDelete", f"there is no column _op; the columns are {', '.join(schema.names)}")
    if op is not None and not isinstance(schema["_op"].dataType, StringType):
        raise _unsupported("_op", f"is {schema['_op'].dataType.simpleString()}, not string")
    return RowPlan(
        payload=tuple(field.name for field in rest),
        whole=whole,
        key=key,
        lifetime=lifetime,
        lifetime_form=form,
        op=op,
        on_delete=writing.on_delete,
        keyed=topic.keyed,
        write_nulls=writing.nulls == "write",
        rejects=topic.rejects,
    )


def _check_names(schema: StructType) -> None:
    seen: set[str] = set()
    for name in schema.names:
        if name in seen:
            raise SowSourceError("SCHEMA_UNSUPPORTED", f"column {name} is there twice", "rename one of them")
        seen.add(name)


def column_named(schema: StructType, option: str, name: str) -> StructField:
    """The column that an option names. As in Spark, upper and lower case may differ if only one column matches."""
    if name in schema.names:
        return schema[name]
    found = [field for field in schema if field.name.lower() == name.lower()]
    if len(found) != 1:
        raise option_error(option, f"there is no column {name!r}; the columns are {', '.join(schema.names)}")
    return found[0]


def _key_column(schema: StructType, writing: Writing, topic: TopicFacts) -> str | None:
    if topic.keyed:
        if writing.key_column is not None:
            raise option_error(
                "keyColumn", f"topic {writing.topic} has key fields: its keys come from the payload (rule K3)"
            )
        return None
    if writing.key_column is not None:
        field = column_named(schema, "keyColumn", writing.key_column)
    elif "_key" in schema.names:
        field = schema["_key"]
    else:
        raise option_error("keyColumn", f"is missing: topic {writing.topic} has no key fields, so each row needs a key")
    if not isinstance(field.dataType, StringType | IntegralType | DateType):
        raise option_error(
            "keyColumn", f"column {field.name} is {field.dataType.simpleString()}; cast it to string, as keys are text"
        )
    return field.name


def _lifetime_column(schema: StructType, writing: Writing) -> tuple[str | None, LifetimeForm | None]:
    if writing.expire_time_column is not None:
        if writing.ttl_column is not None:
            raise option_error("expireTimeColumn", "and ttlColumn exclude each other: a row has one lifetime")
        field = column_named(schema, "expireTimeColumn", writing.expire_time_column)
        if not isinstance(field.dataType, TimestampType):
            raise option_error(
                "expireTimeColumn",
                f"column {field.name} is {field.dataType.simpleString()}, not timestamp (with a time zone); cast it",
            )
        return field.name, "expire_time"
    if writing.ttl_column is None:
        return None, None
    field = column_named(schema, "ttlColumn", writing.ttl_column)
    match field.dataType:
        case StringType():
            return field.name, "text"
        case DayTimeIntervalType():
            return field.name, "interval"
        case IntegralType() | FractionalType() | DecimalType():
            return field.name, "seconds"
        case other:
            raise option_error(
                "ttlColumn",
                f"column {field.name} is {other.simpleString()}: neither a number of seconds, nor an interval of days "
                "to seconds, nor a duration as text such as '30s'",
            )


def _check_whole(rest: list[StructField], writing: Writing) -> None:
    if len(rest) != 1 or not isinstance(rest[0].dataType, StringType | BinaryType):
        columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in rest) or "none"
        raise option_error(
            "payload",
            f"{writing.payload!r} needs exactly one string or binary column beside key, lifetime and metadata; "
            f"there are: {columns}",
        )


def _check_type(kind: DataType, where: str, depth: int) -> None:
    if depth > NESTING_MAX:
        raise _unsupported(where, f"is nested more than {NESTING_MAX} deep")
    match kind:
        case UserDefinedType():
            _check_type(kind.sqlType(), where, depth)
        case StructType():
            for field in kind:
                _check_type(field.dataType, f"{where}.{field.name}", depth + 1)
        case ArrayType():
            _check_type(kind.elementType, f"{where}[]", depth + 1)
        case MapType():
            if isinstance(kind.keyType, StructType | ArrayType | MapType):
                raise _unsupported(where, "is a map with nested keys")
            _check_type(kind.keyType, f"{where}.key", depth + 1)
            _check_type(kind.valueType, f"{where}.value", depth + 1)
        case YearMonthIntervalType():
            raise _unsupported(where, f"is {kind.simpleString()}, which Spark does not hand to Python")
        case _:
            pass


def _unsupported(where: str, problem: str) -> SowSourceError:
    return SowSourceError("SCHEMA_UNSUPPORTED", f"column {where} {problem}", "leave it out, or cast it to string")
