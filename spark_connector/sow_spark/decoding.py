"""Packed records into Arrow batches: metadata as it is, json documents by a schema, or payloads as one column.

A field of a document becomes a value of its column's type as follows. Null and missing are null; what is not in the
table does not fit.

| type | from |
|---|---|
| boolean | `true`, `false` |
| byte, short, int, long | a whole number in its range; `1.0` and `"1"` are none |
| float, double | a number in its range; `"NaN"`, `"Infinity"`, `"INF"`, the latter two also with a sign |
| decimal(p, s) | a number, or a string that is one, which p and s hold exactly: nothing is rounded |
| string | a string; anything else as compact JSON, numbers as they are written |
| binary | a string in base64 |
| date | `"2024-01-05"` |
| timestamp | `"2024-01-05T10:11:12.123456+02:00"`, or a whole number: seconds since the epoch |
| timestamp_ntz | `"2024-01-05T10:11:12.123456"` |
| struct, map, array | an object, an object, an array |
| void | nothing but null |

Of a time, the zone (then it is UTC), the fraction, the seconds, the minutes, or all after the date may be missing; a
space may be where the T is; digits beyond microseconds are cut off. So what Spark's `to_json` writes is read back.

Guarantees:

D1  There is a fast way, Arrow's reader of JSON over a whole batch, and a careful one, document by document. The result
    never depends on which was taken: the fast way is left wherever it refuses, or could differ.
D2  A value that does not fit is an error that names record, field, value and type (FAILFAST), or null (PERMISSIVE: the
    innermost nullable value around it), or its row is left out (DROPMALFORMED). So is a null where the schema allows
    none; where nothing around it may be null, PERMISSIVE fails as well.
D3  Every batch has exactly the Arrow schema that Spark expects, with nullability.
"""

from __future__ import annotations

import base64
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from sow_client import PackedColumn, PackedRecords
from sow_spark.options import ParseMode, PayloadForm
from sow_spark.schemas import Layout

NEVER_MICROS: Final = 2**63 - 1
"""The expire time of a record that never expires, on the wire."""
RUN: Final = 500
"""Documents of a batch that the fast way refuses are tried again in runs of so many, so that one odd document does not
make the whole batch slow."""
SHOWN_MAX: Final = 100
"""Characters of a value that an error shows."""

_PUT: Final = b"\x01"
_OPS: Final = ("", "put", "oof", "delete", "expire")
_REASONS: Final = (None, "touched", "deleted", "expired", "match")


class Misfit(Exception):
    """A document that does not fit the schema: which of the batch, where in it, what was found, what was expected."""

    def __init__(self, path: str, found: str, expected: str, row: int = -1) -> None:
        super().__init__(path, found, expected, row)
        self.path = path
        self.found = found
        self.expected = expected
        self.row = row

    def __str__(self) -> str:
        where = f"field {self.path}" if self.path else "the document"
        return f"{where}: expected {self.expected}, found {self.found}"


class Decoder:
    """Makes Arrow batches of packed records; one for each task."""

    def __init__(self, layout: Layout, form: PayloadForm, mode: ParseMode, *, only_puts: bool = False) -> None:
        """With `only_puts` changes that are none are left out."""
        self._only_puts = only_puts
        self._layout = layout
        self._form = form
        self._mode = mode
        self.schema: pa.Schema = _arrow_schema(layout.schema)
        self._documents = _Documents(layout.fields, mode) if form == "columns" and layout.fields.fields else None

    @property
    def columns(self) -> tuple[PackedColumn, ...]:
        """The packed columns that it needs."""
        needed: list[PackedColumn] = [_SOURCES[name] for name in self._layout.metadata]
        if self._layout.fields.fields:
            needed.append("payload")
        if self._only_puts:
            needed.append("op")
        # The count of an empty selection would still be known, but no server has promised that.
        return tuple(dict.fromkeys(needed)) or ("version",)

    @property
    def lines(self) -> bool:
        """Whether payloads have to come as lines."""
        return self._documents is not None

    def decode(self, packed: PackedRecords) -> pa.RecordBatch:
        """The records as a batch. Raises Misfit."""
        count = packed.count
        keep: pa.Array | None = None
        found: dict[str, pa.Array] = {}
        if self._documents is not None:
            arrays, dropped = self._documents.decode(packed)
            found |= zip(self._layout.fields.names, arrays, strict=True)
            if dropped:
                gone = set(dropped)
                keep = pa.array([row for row in range(count) if row not in gone], pa.int64())
        elif self._layout.fields.fields:
            column, keep = self._whole(packed)
            found[self._layout.fields.names[0]] = column
        for name in self._layout.metadata:
            made = _METADATA[name](packed)
            found[name] = made if keep is None else made.take(keep)
        if self._only_puts and packed.ops.strip(_PUT):
            ops = _words(pa.uint8(), count, packed.ops)
            puts = pc.equal(ops if keep is None else ops.take(keep), 1)
            found = {name: column.filter(puts) for name, column in found.items()}
            keep = pa.array(range(puts.true_count), pa.int64())
        rows = count if keep is None else len(keep)
        arrays = [_of_type(found[field.name], field.type) for field in self.schema]
        if not arrays:  # a schema without columns still counts rows
            return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _whole(self, packed: PackedRecords) -> tuple[pa.Array, pa.Array | None]:
        """Payloads as one column, and which rows are kept of them."""
        if self._form == "binary":
            return _packed(pa.binary(), packed.count, packed.payload_offsets, packed.payloads), None
        texts = _packed(pa.string(), packed.count, packed.payload_offsets, packed.payloads)
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            return self._checked_texts(packed)
        return texts, None

    def _checked_texts(self, packed: PackedRecords) -> tuple[pa.Array, pa.Array | None]:
        texts: list[str | None] = []
        keep: list[int] = []
        nullable = self._layout.fields.fields[0].nullable
        for row, payload in enumerate(_payloads(packed)):
            try:
                texts.append(payload.decode())
            except UnicodeDecodeError as error:
                if self._mode == "DROPMALFORMED":
                    continue
                if self._mode == "FAILFAST" or not nullable:
                    raise Misfit("", f"a byte that is not UTF-8 at {error.start}", "text", row) from None
                texts.append(None)
            keep.append(row)
        return pa.array(texts, pa.string()), pa.array(keep, pa.int64())


# ---- metadata ----


def _packed(kind: pa.DataType, count: int, offsets: bytes, data: bytes) -> pa.Array:
    """Texts or bytes without copying them: the wire has Arrow's layout."""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _words(kind: pa.DataType, count: int, data: bytes) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def _expire_time(packed: PackedRecords) -> pa.Array:
    micros = _words(pa.int64(), packed.count, packed.expire_times)
    return pc.if_else(pc.equal(micros, NEVER_MICROS), pa.scalar(None, pa.int64()), micros).cast(_MOMENT)


def _origin(packed: PackedRecords) -> pa.Array:
    names = pa.array(list(packed.origin_names), pa.string())
    if packed.origins:
        return names.take(_words(pa.uint16(), packed.count, packed.origins))
    return names.take(pa.array([0] * packed.count, pa.int64()))


def _named(names: Sequence[str | None], codes: bytes, count: int, default: int) -> pa.Array:
    indices = _words(pa.uint8(), count, codes) if codes else pa.array([default] * count, pa.uint8())
    return pa.array(names, pa.string()).take(indices)


_MOMENT: Final = pa.timestamp("us", tz="UTC")
_METADATA: Final[dict[str, Callable[[PackedRecords], pa.Array]]] = {
    "_key": lambda packed: _packed(pa.string(), packed.count, packed.key_offsets, packed.keys),
    "_version": lambda packed: _words(pa.int64(), packed.count, packed.versions),
    "_publish_time": lambda packed: _words(_MOMENT, packed.count, packed.publish_times),
    "_expire_time": _expire_time,
    "_origin": _origin,
    # Records of a snapshot have neither: each was put.
    "_op": lambda packed: _named(_OPS, packed.ops, packed.count, _PUT[0]),
    "_reason": lambda packed: _named(_REASONS, packed.reasons, packed.count, 0),
    "_sequence": lambda packed: _words(pa.int64(), packed.count, packed.sequences),
}
_SOURCES: Final[Mapping[str, PackedColumn]] = {
    "_key": "key",
    "_version": "version",
    "_publish_time": "publish_time",
    "_expire_time": "expire_time",
    "_origin": "origin",
    "_op": "op",
    "_reason": "op",
    "_sequence": "sequence",
}
"""Which packed column fills which of ours."""


def _payloads(packed: PackedRecords) -> Iterator[bytes]:
    offsets = memoryview(packed.payload_offsets).cast("i")
    for row in range(packed.count):
        yield packed.payloads[offsets[row] : offsets[row + 1]]


# ---- documents ----


class _Documents:
    """Json documents by the fields of a schema."""

    def __init__(self, fields: StructType, mode: ParseMode) -> None:
        self._mode = mode
        self._types: list[DataType] = [field.dataType for field in fields.fields]
        self._names = fields.names
        self._targets: list[pa.DataType] = [field.type for field in _arrow_schema(fields)]
        self._required = [not field.nullable for field in fields.fields]
        self._converters = [
            _converter(field.dataType, field.nullable, f"/{field.name}", mode == "PERMISSIVE")
            for field in fields.fields
        ]
        # A schema with a map in it, or with anything else that Arrow's reader does not make, has no fast way.
        self._fast = (
            pa.schema([(field.name, _readable(field.dataType)) for field in fields.fields])
            if all(_is_readable(field.dataType) for field in fields.fields)
            else None
        )

    def decode(self, packed: PackedRecords) -> tuple[list[pa.Array], list[int]]:
        """A column for each field, without the rows that are dropped; and these. Raises Misfit."""
        if packed.count == 0:
            return [pa.array([], kind) for kind in self._targets], []
        if (fast := self._read(packed.payloads, packed.count)) is not None:
            return fast, []
        if self._fast is None or packed.count <= RUN:
            return self._carefully(packed, 0, packed.count)
        pieces: list[list[pa.Array]] = []
        dropped: list[int] = []
        offsets = memoryview(packed.payload_offsets).cast("i")
        view = pa.py_buffer(packed.payloads)
        for start in range(0, packed.count, RUN):
            end = min(start + RUN, packed.count)
            run = view.slice(offsets[start], offsets[end] - offsets[start])
            piece = self._read(run, end - start)
            if piece is None:
                piece, gone = self._carefully(packed, start, end)
                dropped += gone
            pieces.append(piece)
        return [pa.concat_arrays(column) for column in zip(*pieces, strict=True)], dropped

    def _read(self, documents: bytes | pa.Buffer, count: int) -> list[pa.Array] | None:
        """The fast way; None where it must not be taken.

        Arrow reads nothing but objects, and json topics hold nothing else (rule K2).
        """
        if self._fast is None:
            return None
        source = documents if isinstance(documents, pa.Buffer) else pa.py_buffer(documents)
        try:
            table = pa_json.read_json(
                pa.BufferReader(source),
                # One block, so that a line feed inside a document is white space like any other.
                read_options=pa_json.ReadOptions(use_threads=False, block_size=source.size + 1),
                parse_options=pa_json.ParseOptions(explicit_schema=self._fast, unexpected_field_behavior="ignore"),
            )
            if table.num_rows != count:
                return None
            columns = []
            for index, column in enumerate(table.columns):
                array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
                if self._required[index] and array.null_count:
                    return None
                columns.append(_converted(array, self._types[index], self._targets[index]))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, _Differs):
            return None
        return columns

    def _carefully(self, packed: PackedRecords, start: int, end: int) -> tuple[list[pa.Array], list[int]]:
        offsets = memoryview(packed.payload_offsets).cast("i")
        columns: list[list[object]] = [[] for _ in self._names]
        dropped: list[int] = []
        plan = list(zip(self._names, self._converters, columns, strict=True))
        for row in range(start, end):
            try:
                document = _parsed(packed.payloads[offsets[row] : offsets[row + 1]])
                values = [convert(document.get(name)) for name, convert, _ in plan]
            except Misfit as misfit:
                if self._mode == "DROPMALFORMED":
                    dropped.append(row)
                    continue
                if self._mode == "FAILFAST" or misfit.path or any(self._required):
                    misfit.row = row
                    raise
                values = [None] * len(plan)  # not a document at all
            for (_, _, column), value in zip(plan, values, strict=True):
                column.append(value)
        return [pa.array(column, kind) for column, kind in zip(columns, self._targets, strict=True)], dropped


class _Number(str):
    """A number as it is written: no digit of a decimal is lost, and text columns get it unchanged."""

    __slots__ = ()


_make_document = json.JSONDecoder(parse_int=_Number, parse_float=_Number, parse_constant=_Number).decode


def _parsed(payload: bytes) -> dict[str, object]:
    try:
        document = _make_document(payload.decode())
    except (ValueError, RecursionError) as error:
        raise Misfit("", _shown_text(str(error)), "a JSON object") from None
    if not isinstance(document, dict):
        raise Misfit("", _shown(document), "a JSON object")
    return document


# ---- the careful way: a function for each type ----

_Convert: TypeAlias = Callable[[object], object]


def _converter(kind: DataType, nullable: bool, path: str, permissive: bool) -> _Convert:
    """A function from a value of a document to what pyarrow takes for the type. It raises Misfit."""
    convert = _convert_to(kind, path, permissive)
    if permissive and nullable:

        def converted_or_null(value: object) -> object:
            if value is None:
                return None
            try:
                return convert(value)
            except Misfit:
                return None

        return converted_or_null
    if nullable:
        return lambda value: None if value is None else convert(value)

    def required(value: object) -> object:
        if value is None:
            raise Misfit(path, "null, or nothing", f"{kind.simpleString()}, not null")
        return convert(value)

    return required


def _convert_to(kind: DataType, path: str, permissive: bool) -> _Convert:
    """The same for values that are not null."""
    if isinstance(kind, StructType):
        return _struct_converter(kind, path, permissive)
    if isinstance(kind, ArrayType):
        item = _converter(kind.elementType, kind.containsNull, f"{path}[]", permissive)

        def array(value: object) -> object:
            if not isinstance(value, list):
                raise Misfit(path, _shown(value), "an array")
            return [item(one) for one in value]

        return array
    if isinstance(kind, MapType):
        inner = _converter(kind.valueType, kind.valueContainsNull, f"{path}{{}}", permissive)

        def mapping(value: object) -> object:
            if not isinstance(value, dict):
                raise Misfit(path, _shown(value), "an object")
            return [(_well_formed(name, path), inner(one)) for name, one in value.items()]

        return mapping
    scalar = _scalar_converter(kind)

    def checked(value: object) -> object:
        try:
            return scalar(value)
        except (_NoFit, ValueError, InvalidOperation):
            raise Misfit(path, _shown(value), kind.simpleString()) from None

    return checked


def _struct_converter(kind: StructType, path: str, permissive: bool) -> _Convert:
    plan = [
        (field.name, _converter(field.dataType, field.nullable, f"{path}/{field.name}", permissive))
        for field in kind.fields
    ]

    def struct(value: object) -> object:
        if not isinstance(value, dict):
            raise Misfit(path, _shown(value), "an object")
        return {name: convert(value.get(name)) for name, convert in plan}

    return struct


class _NoFit(Exception):
    """A value that a scalar type does not take."""


def _scalar_converter(kind: DataType) -> _Convert:
    if isinstance(kind, DecimalType):
        precision, scale = kind.precision, kind.scale
        return lambda value: _decimal(value, precision, scale)
    if isinstance(kind, (ByteType, ShortType, IntegerType, LongType)):
        bits = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}[type(kind)]
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        return lambda value: _integer(value, low, high)
    for types, convert in _SCALAR_CONVERTERS:
        if isinstance(kind, types):
            return convert
    raise AssertionError(f"{kind} has passed the check of the schema")


_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")


def _integer(value: object, low: int, high: int) -> int:
    if type(value) is not _Number or not _WHOLE.fullmatch(value):
        raise _NoFit
    number = int(value)
    if not low <= number <= high:
        raise _NoFit
    return number


_SPECIAL_NUMBERS: Final = {
    "NaN": float("nan"),
    **dict.fromkeys(("Infinity", "+Infinity", "INF", "+INF"), float("inf")),
    **dict.fromkeys(("-Infinity", "-INF"), float("-inf")),
}
"""What `to_json` makes of the numbers that JSON does not have, and other ways to write them that Spark reads."""
INFINITE_TEXTS: Final = tuple(_SPECIAL_NUMBERS)


def _double(value: object) -> float:
    if type(value) is _Number:
        number = float(value)
        if not isfinite(number):
            raise _NoFit
        return number
    if isinstance(value, str) and value in _SPECIAL_NUMBERS:
        return _SPECIAL_NUMBERS[value]
    raise _NoFit


def _float(value: object) -> float:
    if type(value) is not _Number:
        return _double(value)
    # From the text: by way of a double some would be rounded twice.
    number: float = pa.scalar(str(value)).cast(pa.float32()).as_py()
    if not isfinite(number):
        raise _NoFit
    return number


_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def _decimal(value: object, precision: int, scale: int) -> Decimal:
    if not isinstance(value, str) or not _DECIMAL.fullmatch(value):
        raise _NoFit
    sign, digits, exponent = Decimal(value).as_tuple()
    assert isinstance(exponent, int), "the pattern leaves out NaN and Infinity"
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return Decimal((0, (0,), -scale))
    kept = text.rstrip("0")
    exponent += len(text) - len(kept)
    if exponent < -scale or len(kept) + exponent + scale > precision:
        raise _NoFit
    return Decimal((sign, tuple(map(int, kept + "0" * (exponent + scale))), -scale))


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise _NoFit
    return value


def _text(value: object) -> str:
    text = str(value) if isinstance(value, str) else "".join(_written(value))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and no text has
        raise _NoFit from None
    return text


def _well_formed(name: str, path: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Misfit(path, _shown(name), "names that are text") from None
    return name


def _written(value: object) -> Iterator[str]:
    """Compact JSON, with numbers as they were written."""
    if type(value) is _Number:
        yield value
    elif isinstance(value, dict):
        yield "{"
        for index, (name, inner) in enumerate(value.items()):
            yield f"{',' if index else ''}{json.dumps(name, ensure_ascii=False)}:"
            yield from _written(inner)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for index, inner in enumerate(value):
            if index:
                yield ","
            yield from _written(inner)
        yield "]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def _binary(value: object) -> bytes:
    if not isinstance(value, str) or type(value) is _Number:
        raise _NoFit
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:  # also what is not ASCII
        raise _NoFit from None


def _nothing(value: object) -> None:
    raise _NoFit


# ---- dates and times: by arithmetic, as Python's own end at the years 1 and 9999, and at 24 h ----

_DATE: Final = r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
_TIME: Final = r"[T ]([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,9}))?)?)?"
_ZONE: Final = r"(?:Z|([+-])([0-9]{2})(?::?([0-9]{2}))?)"
_DAY: Final = re.compile(_DATE)
_INSTANT: Final = re.compile(f"{_DATE}(?:{_TIME}{_ZONE}?)?")
_LOCAL: Final = re.compile(f"{_DATE}(?:{_TIME})?")
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_CYCLE: Final = 146_097  # days of the 400 years after which the calendar repeats
_DAY_MICROS: Final = 86_400_000_000


def _day(year: str, month: str, day: str) -> int:
    """Days since the epoch. Raises ValueError for one that no calendar has."""
    cycles, rest = divmod(int(year), 400)
    # rest + 400: the year 0 is not one of Python's.
    return date(rest + 400, int(month), int(day)).toordinal() - _EPOCH_DAY + (cycles - 1) * _CYCLE


def _matched(pattern: re.Pattern[str], value: object) -> tuple[str | None, ...]:
    if not isinstance(value, str) or type(value) is _Number:
        raise _NoFit
    match = pattern.fullmatch(value)
    if match is None:
        raise _NoFit
    return match.groups()


def _date(value: object) -> int:
    year, month, day = _matched(_DAY, value)
    return _day(year or "", month or "", day or "")


def _local(value: object) -> int:
    return _micros(_matched(_LOCAL, value))


def _instant(value: object) -> int:
    if type(value) is _Number:
        if not _WHOLE.fullmatch(value):
            raise _NoFit
        micros = int(value) * 1_000_000
    else:
        *local, sign, hours, minutes = _matched(_INSTANT, value)
        micros = _micros(tuple(local))
        if sign is not None:
            away = _two(hours, 23) * 60 + _two(minutes, 59)
            micros -= away * 60_000_000 if sign == "+" else -away * 60_000_000
    if not -(2**63) <= micros < 2**63:
        raise _NoFit
    return micros


def _micros(parts: tuple[str | None, ...]) -> int:
    year, month, day, hour, minute, second, fraction = parts
    micros = _day(year or "", month or "", day or "") * _DAY_MICROS
    micros += (_two(hour, 23) * 3_600 + _two(minute, 59) * 60 + _two(second, 59)) * 1_000_000
    return micros + int((fraction or "").ljust(6, "0")[:6])


def _two(digits: str | None, most: int) -> int:
    number = int(digits or "0")
    if number > most:
        raise _NoFit
    return number


_SCALAR_CONVERTERS: Final[tuple[tuple[type[DataType], _Convert], ...]] = (
    (StringType, _text),
    (DoubleType, _double),
    (FloatType, _float),
    (BooleanType, _boolean),
    (BinaryType, _binary),
    (DateType, _date),
    (TimestampType, _instant),
    (TimestampNTZType, _local),
    (NullType, _nothing),
)


def _shown(value: object) -> str:
    """A value for an error."""
    if value is None:
        return "null"
    if isinstance(value, str) and type(value) is not _Number:
        return _shown_text(json.dumps(value))
    return _shown_text("".join(_written(value)))


def _shown_text(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


# ---- the fast way: what Arrow's reader is told to read, and what is made of it ----


class _Differs(Exception):
    """The fast way might not give what the careful one does."""


def _is_readable(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_is_readable(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _is_readable(kind.elementType)
    return not isinstance(kind, MapType)


def _readable(kind: DataType) -> pa.DataType:
    """The type as which Arrow's reader is to read it: everything nullable, and as text what it reads otherwise than we
    do: bytes, dates, times without a zone."""
    if isinstance(kind, StructType):
        return pa.struct([(field.name, _readable(field.dataType)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return pa.list_(pa.field("element", _readable(kind.elementType)))
    if isinstance(kind, (BinaryType, DateType, TimestampNTZType)):
        return pa.string()
    target: pa.DataType = _arrow_schema(StructType().add("x", kind)).field(0).type
    return target


def _converted(array: pa.Array, kind: DataType, target: pa.DataType) -> pa.Array:
    """What was read as `_readable(kind)`, as `target`. Raises _Differs, also for a null where there may be none."""
    if isinstance(kind, StructType):
        children = []
        for index, field in enumerate(kind.fields):
            child = array.field(index)
            if not field.nullable and child.null_count:
                # Children of a null struct are null too, and may be.
                if array.flatten()[index].filter(array.is_valid()).null_count:
                    raise _Differs
            children.append(_converted(child, field.dataType, target.field(index).type))
        return pa.Array.from_buffers(target, len(array), array.buffers()[:1], array.null_count, array.offset, children)
    if isinstance(kind, ArrayType):
        if array.offset:
            raise _Differs  # never seen: the reader makes its arrays anew
        values = array.values
        if not kind.containsNull and values.null_count:
            raise _Differs
        element = _converted(values, kind.elementType, target.value_type)
        return pa.Array.from_buffers(target, len(array), array.buffers()[:2], array.null_count, 0, [element])
    if isinstance(kind, DateType):
        return _cast_if(array, r"^\d{4}-\d{2}-\d{2}$", target)
    if isinstance(kind, TimestampNTZType):
        return _cast_if(array, r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,6})?$", target)
    if isinstance(kind, BinaryType):
        try:
            return pa.array([None if text is None else _binary(text) for text in array.to_pylist()], target)
        except _NoFit:
            raise _Differs from None
    if isinstance(kind, DecimalType):
        array.validate(full=True)  # the reader does not look whether the digits in front of the point are too many
    if isinstance(kind, FloatType) and pc.any(pc.is_inf(array)).as_py():
        raise _Differs  # a number that is too large, which the reader does not refuse
    return array


def _cast_if(texts: pa.Array, pattern: str, target: pa.DataType) -> pa.Array:
    if pc.all(pc.match_substring_regex(texts, pattern)).as_py() is False:
        raise _Differs
    return texts.cast(target)


def _of_type(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type != target:
        raise AssertionError(f"made {array.type}, and Spark expects {target}")
    return array


def _arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects, with times in UTC: that is what PySpark 4.1, which cannot be told, takes."""
    told = inspect.signature(to_arrow_schema).parameters
    return to_arrow_schema(schema, timezone="UTC") if "timezone" in told else to_arrow_schema(schema)
