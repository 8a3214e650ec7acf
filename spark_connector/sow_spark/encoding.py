"""Rows as JSON documents: Arrow record batches in, the bytes of one document per row out.

The texts are made a column at a time, in Arrow. Python touches only values of the rarer types (binary, intervals), and
strings that need escaping. Guarantees:

    [1]  Every document is valid JSON if the strings are valid UTF-8. Other strings are passed on, and the server
         refuses them.
    [2]  Integers and decimals are written whole. Floats are written in the shortest form that reads back as the same
         float, with `.0` if they are integral, so that they are inferred as floats again.
    [3]  The text of a value depends only on the value and its type, not on its batch.
    [4]  A batch is processed in pieces of at most `PIECE_BYTES`. So large rows do not overflow Arrow's 32-bit offsets,
         and need at most a small multiple of that memory.

The conventions are those of Spark's `to_json`. Null fields are left out (in arrays and maps they are `null`). Decimals
are numbers, binary is base64, dates are `2026-01-31`, intervals are Spark's `INTERVAL '1 02:03:04' DAY TO SECOND`. NaN
and the infinities are the strings "NaN", "Infinity", "-Infinity", but only in error messages: no published row has them
(`all_finite`). One convention differs: times keep their microseconds, `2026-01-31T12:00:00.000Z`, with six digits where
three do not suffice, whereas to_json cuts them off. Times with a zone are written in UTC. A year beyond 9999, or before
the year 0, has a sign: `+10000-01-01`.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sow_spark.errors import SowSourceError
from sow_spark.options import NESTING_MAX

PIECE_BYTES: Final = 32 * 1024 * 1024
_DAYS_NEAR: Final = range(-719_528, 2_932_897)
"""Days since the epoch whose years have four digits and no sign."""
_DAY_MICROS: Final = 86_400_000_000
_CYCLE_DAYS: Final = 146_097
"""Days of the 400 years after which the calendar repeats."""

# pyarrow is not annotated: for the type checker all arrays are `Any`.
Array: TypeAlias = pa.Array

_NEEDS_ESCAPE: Final = r'["\\\x00-\x1f]'
_ESCAPED: Final = re.compile(rb'["\\\x00-\x1f]')
_ESCAPES: Final[dict[bytes, bytes]] = {bytes([code]): b"\\u%04x" % code for code in range(0x20)} | {
    b'"': b'\\"',
    b"\\": b"\\\\",
    b"\n": b"\\n",
    b"\r": b"\\r",
    b"\t": b"\\t",
    b"\b": b"\\b",
    b"\f": b"\\f",
}


@dataclass(frozen=True, slots=True)
class _Text:
    """JSON texts of a column: `values`, each in `quote`s, null where the value is null. The quotes are added when the
    texts are joined, because adding them here would be another pass."""

    values: Array
    quote: bytes = b""

    def quoted(self) -> Array:
        """The texts, with their quotes."""
        if not self.quote:
            return self.values
        return _join(self.quote, self.values, self.quote)


def documents(batch: pa.RecordBatch, *, write_nulls: bool = False) -> list[bytes]:
    """One JSON object per row, with a member per column in their order.

    Raises SowSourceError (SCHEMA_UNSUPPORTED) for a type that has no JSON form. `check_schema` checks this beforehand.
    """
    found: list[bytes] = []
    for piece in pieces(batch):
        objects = _objects(
            [field.name for field in piece.schema],
            [_text(column, field.name, write_nulls) for column, field in zip(piece.columns, piece.schema, strict=True)],
            piece.num_rows,
            write_nulls=write_nulls,
        )
        found += objects.to_pylist()
    return found


def all_finite(array: Array) -> bool:
    """True if all floats in the array, at any depth, are finite. Takes a few microseconds for a column without
    floats."""
    kind, types = array.type, pa.types
    if types.is_floating(kind):
        # Null where the value is null; `all` ignores these.
        return pc.all(pc.is_finite(array.cast(pa.float32()) if types.is_float16(kind) else array)).as_py() is not False
    if types.is_dictionary(kind):
        return all_finite(array.dictionary)
    if isinstance(array, pa.ExtensionArray):
        return all_finite(array.storage)
    if types.is_struct(kind):
        return all(map(all_finite, array.flatten()))
    if types.is_map(kind):
        _, first, last = _offsets(array)
        return all_finite(array.keys.slice(first, last - first)) and all_finite(array.items.slice(first, last - first))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return all_finite(array.flatten())
    return True


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in parts of whole rows, of about `PIECE_BYTES` [4]."""
    rows = batch.num_rows
    if rows == 0:
        return
    size = max(1, batch.nbytes)
    if size <= PIECE_BYTES or rows == 1:
        yield batch
        return
    half = rows // 2  # halving also handles rows of very different size
    yield from pieces(batch.slice(0, half))
    yield from pieces(batch.slice(half))


def check_schema(schema: pa.Schema) -> None:
    """Raises SowSourceError (SCHEMA_UNSUPPORTED) with the column's name if `documents` would for a batch of this
    schema."""
    for field in schema:
        _text(pa.array([], field.type), field.name, False)


# ---- joining ----


def _join(*parts: Array | bytes) -> Array:
    """The parts of each row joined. Null where one of them is null."""
    return pc.binary_join_element_wise(
        *[pa.scalar(part, pa.binary()) if isinstance(part, bytes) else part for part in parts],
        pa.scalar(b"", pa.binary()),
    )


def _objects(names: Sequence[str], texts: Sequence[_Text], rows: int, *, write_nulls: bool) -> Array:
    """A JSON object of each row."""
    if not texts:
        return pa.array([b"{}"] * rows, pa.binary())
    # The pivot is the first member that is never missing. Members before it have their comma after them, members after
    # it have their comma before them. So no comma depends on another member. If there is no pivot, the first comma is
    # cut off.
    pivot = next((index for index, text in enumerate(texts) if write_nulls or not text.values.null_count), -1)
    parts: list[Array | bytes] = []
    constant = b"{" if pivot >= 0 else b""  # constant text that is not in `parts` yet
    for index, (name, text) in enumerate(zip(names, texts, strict=True)):
        member = msgspec.json.encode(name) + b":"
        comma = b"," if index > pivot else b""
        if not text.values.null_count:
            parts += [constant + comma + member + text.quote, text.values]
            constant = text.quote
            continue
        if write_nulls:
            written = pc.fill_null(text.quoted(), b"null")
            constant += comma + member
        elif index < pivot:
            written = pc.fill_null(_join(member + text.quote, text.values, text.quote + b","), b"")
        else:
            written = pc.fill_null(_join(b"," + member + text.quote, text.values, text.quote), b"")
        parts += [constant, written] if constant else [written]
        constant = b""
    if pivot >= 0:
        return _join(*parts, constant + b"}")
    # Not binary_slice, which fails on an empty value.
    members = pc.ascii_ltrim(_join(*parts).view(pa.string()), characters=",").view(pa.binary())
    return _join(b"{", members, b"}")


# ---- the texts of columns ----


def _text(array: Array, where: str, write_nulls: bool, depth: int = 0) -> _Text:
    """The JSON texts of an array's values, as binary."""
    kind = array.type
    if depth > NESTING_MAX:
        raise _unsupported(where, f"is nested more than {NESTING_MAX} deep")
    if pa.types.is_dictionary(kind):
        return _text(array.dictionary_decode(), where, write_nulls, depth)
    if isinstance(array, pa.ExtensionArray):
        return _text(array.storage, where, write_nulls, depth)
    if pa.types.is_struct(kind):
        if _is_variant(kind):
            return _Text(_each(array, _variant))
        return _struct(array, where, write_nulls, depth)
    if pa.types.is_map(kind):
        return _map(array, where, write_nulls, depth)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list(array, where, write_nulls, depth)
    return _scalar(array, where)


def _scalar(array: Array, where: str) -> _Text:
    kind = array.type
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return _Text(_escaped(array.cast(pa.binary())), b'"')
    if types.is_integer(kind) or types.is_boolean(kind):
        return _Text(array.cast(pa.string()).cast(pa.binary()))
    if types.is_floating(kind):
        return _Text(_floats(array))
    if types.is_decimal(kind):
        return _Text(array.cast(pa.string()).cast(pa.binary()))
    if types.is_date(kind):
        return _Text(_dates(array.cast(pa.date32())), b'"')
    if types.is_timestamp(kind):
        return _Text(_times(array), b'"')
    if types.is_null(kind):
        return _Text(pa.nulls(len(array), pa.binary()))
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _Text(_each(array, _base64), b'"')
    if types.is_time(kind):
        return _Text(_each(array.cast(pa.time64("us"), safe=False), lambda time: str(time.isoformat()).encode()), b'"')
    if types.is_duration(kind):
        return _Text(_each(array.cast(pa.duration("us"), safe=False), _interval), b'"')
    raise _unsupported(where, f"has the type {kind}, which has no JSON form")


def _escaped(array: Array) -> Array:
    """The contents of JSON strings. Bytes that are not UTF-8 stay unchanged [1]."""
    mask = pc.match_substring_regex(array, _NEEDS_ESCAPE)
    if not pc.any(mask).as_py():
        return array
    # A null in the mask leaves the null in its place.
    replaced = [_ESCAPED.sub(lambda found: _ESCAPES[found[0]], value) for value in array.filter(mask).to_pylist()]
    return pc.replace_with_mask(array, mask, pa.array(replaced, pa.binary()))


def _floats(array: Array) -> Array:
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    text = array.cast(pa.string()).cast(pa.binary())
    # Arrow writes 1 for 1.0, but 1e+22 for 1e22: `.0` is needed where there is neither point nor exponent.
    whole = pc.equal(pc.floor(array), array)
    if pc.any(whole).as_py():
        whole = pc.and_(whole, pc.and_(pc.is_finite(array), pc.invert(pc.match_substring_regex(text, "[.e]"))))
        text = pc.if_else(whole, _join(text, b".0"), text)
    finite = pc.is_finite(array)
    if not pc.all(finite).as_py():
        named = pc.if_else(
            pc.is_nan(array), b'"NaN"', pc.if_else(pc.greater(array, 0), b'"Infinity"', b'"-Infinity"')
        ).cast(pa.binary())
        text = pc.if_else(finite, text, named)
    return text


def _dates(array: Array) -> Array:
    days = array.view(pa.int32())
    near = pc.and_(pc.greater_equal(days, _DAYS_NEAR.start), pc.less(days, _DAYS_NEAR.stop))
    if pc.all(near).as_py() is not False:
        return array.cast(pa.string()).cast(pa.binary())
    return _each(days, lambda day: _date(day).encode())


def _times(array: Array) -> Array:
    """`2026-01-31T12:00:00.000Z`, without the Z if there is no zone, with six digits where three do not suffice."""
    zoned = array.type.tz is not None
    naive = pa.timestamp("us")
    # A time with a zone is a count of microseconds since the epoch. As a time without a zone it is shown in UTC.
    counts = array.cast(pa.timestamp("us", array.type.tz), safe=False).view(pa.int64())
    near = pc.and_(
        pc.greater_equal(counts, _DAYS_NEAR.start * _DAY_MICROS), pc.less(counts, _DAYS_NEAR.stop * _DAY_MICROS)
    )
    if pc.all(near).as_py() is False:  # Arrow has no text for the farthest ones
        text = _each(counts, _far_time)
        return _join(text, b"Z") if zoned else text
    micros = counts.view(naive)
    millis = pc.floor_temporal(micros, unit="millisecond")
    fine = pc.not_equal(millis, micros)
    if not pc.any(fine).as_py():
        text = micros.cast(pa.timestamp("ms"), safe=False).cast(pa.string())
    elif pc.all(fine).as_py():
        text = micros.cast(pa.string())
    else:
        text = pc.if_else(fine, micros.cast(pa.string()), millis.cast(pa.timestamp("ms"), safe=False).cast(pa.string()))
    text = pc.replace_substring(text, " ", "T", max_replacements=1).cast(pa.binary())
    return _join(text, b"Z") if zoned else text


def _far_time(micros: int) -> bytes:
    day, micros = divmod(micros, _DAY_MICROS)
    seconds, fraction = divmod(micros, 1_000_000)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    digits = f"{fraction:06}" if fraction % 1_000 else f"{fraction // 1_000:03}"
    return f"{_date(day)}T{clock}.{digits}".encode()


def _date(day: int) -> str:
    """A day, counted since the epoch, as text. By arithmetic, because Python's dates end at the years 1 and 9999."""
    cycles, rest = divmod(day + date(1970, 1, 1).toordinal() - 1, _CYCLE_DAYS)
    within = date.fromordinal(rest + 1)
    year = within.year + 400 * cycles
    return f"{year:04}-{within:%m-%d}" if 0 <= year <= 9999 else f"{year:+05}-{within:%m-%d}"


def _each(array: Array, text: Callable[..., bytes]) -> Array:
    return pa.array([None if value is None else text(value) for value in array.to_pylist()], pa.binary())


def _base64(value: bytes) -> bytes:
    return binascii.b2a_base64(value, newline=False)


def _interval(value: timedelta) -> bytes:
    micros = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    sign = "-" if micros < 0 else ""
    seconds, fraction = divmod(abs(micros), 1_000_000)
    days, seconds = divmod(seconds, 86_400)
    fractional = f".{fraction:06}".rstrip("0") if fraction else ""
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fractional}"
    return f"INTERVAL '{sign}{days} {clock}' DAY TO SECOND".encode()


def _is_variant(kind: pa.StructType) -> bool:
    return any((kind.field(index).metadata or {}).get(b"variant") == b"true" for index in range(kind.num_fields))


def _variant(value: dict[str, bytes]) -> bytes:
    from pyspark.sql.types import VariantVal  # only for the columns that are variants

    return VariantVal(value["value"], value["metadata"]).toJson().encode()


# ---- nested types ----


def _struct(array: Array, where: str, write_nulls: bool, depth: int) -> _Text:
    kind = array.type
    fields = [kind.field(index) for index in range(kind.num_fields)]
    # flatten() pushes the struct's own nulls into the children. They are restored at the end: a null struct is null,
    # not {}.
    children = array.flatten()
    texts = [
        _text(child, f"{where}.{field.name}", write_nulls, depth + 1)
        for child, field in zip(children, fields, strict=True)
    ]
    objects = _objects([field.name for field in fields], texts, len(array), write_nulls=write_nulls)
    return _Text(_nulled(objects, array))


def _list(array: Array, where: str, write_nulls: bool, depth: int) -> _Text:
    if not pa.types.is_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    offsets, first, last = _offsets(array)
    values = array.values.slice(first, last - first)
    text = pc.fill_null(_text(values, f"{where}[]", write_nulls, depth + 1).quoted(), b"null")
    return _Text(_nulled(_joined(offsets, text, b"[", b"]"), array))


def _map(array: Array, where: str, write_nulls: bool, depth: int) -> _Text:
    offsets, first, last = _offsets(array)
    keys = _text(array.keys.slice(first, last - first), f"{where}.key", write_nulls, depth + 1)
    if pa.types.is_nested(array.type.key_type):
        raise _unsupported(where, f"has the type {array.type}: keys of a map are not nested")
    items = _text(array.items.slice(first, last - first), f"{where}.value", write_nulls, depth + 1)
    values = keys.values
    if pa.types.is_floating(array.type.key_type):  # NaN has its quotes
        values = pc.replace_substring(values, b'"', b"")
    entries = _join(b'"', values, b'":', pc.fill_null(items.quoted(), b"null"))
    return _Text(_nulled(_joined(offsets, entries, b"{", b"}"), array))


def _offsets(array: Array) -> tuple[Array, int, int]:
    """Offsets that begin at 0, and the range of values that they refer to."""
    if len(array) == 0:
        return pa.array([0], pa.int32()), 0, 0
    offsets = array.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    return (offsets if first == 0 else pc.subtract(offsets, pa.scalar(first, pa.int32()))), first, last


def _joined(offsets: Array, texts: Array, opening: bytes, closing: bytes) -> Array:
    lists = pa.ListArray.from_arrays(offsets, texts)
    return _join(opening, pc.binary_join(lists, pa.scalar(b",", pa.binary())), closing)


def _nulled(texts: Array, array: Array) -> Array:
    """The texts, null where the array is null."""
    if not array.null_count:
        return texts
    return pc.if_else(array.is_valid(), texts, pa.scalar(None, pa.binary()))


def _unsupported(where: str, problem: str) -> SowSourceError:
    return SowSourceError("SCHEMA_UNSUPPORTED", f"column {where} {problem}", "leave it out, or cast it to string")
