"""The careful way of decoding: one document after the other, with a function for each type of a schema.

A field of a document becomes a value of its column's type as follows. Null and a missing field are null. A value that
is not in the table does not fit.

| type | from |
|---|---|
| boolean | `true`, `false` |
| byte, short, int, long | a whole number in its range; `1.0` and `"1"` do not fit |
| float, double | a number in its range; `"NaN"`, `"Infinity"`, `"INF"`, the latter two also with a sign |
| decimal(p, s) | a number, or a string with a number, that p and s hold exactly: nothing is rounded |
| string | a string; any other value as compact JSON, with numbers as they are written |
| binary | a string in base64 |
| date | `"2024-01-05"` |
| timestamp | `"2024-01-05T10:11:12.123456+02:00"`, or a whole number: seconds since the epoch |
| timestamp_ntz | `"2024-01-05T10:11:12.123456"` |
| struct, map, array | an object, an object, an array |
| void | only null |
| variant | any value, as Spark's `parse_json` makes it |

A year has four digits or, beyond 9999 and before the year 0, a sign and up to seven digits: `+10000-01-01`.
In a time these parts may be missing: the zone (then it is UTC), the fraction, the seconds, the minutes, or everything
after the date. A space may stand for the T. Digits beyond microseconds are cut off. So the output of Spark's `to_json`
can be read back.

    [1]  A value that does not fit raises `Misfit` with its path, or becomes null in a permissive converter: then the
         innermost nullable value around it is null. A null where the schema allows none does not fit either.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Final, TypeAlias

import pyarrow as pa
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
    VariantType,
    VariantVal,
)

SHOWN_MAX: Final = 100
"""Characters of a value that an error shows."""


class Misfit(Exception):
    """A document that does not fit the schema: its row in the batch, the path, the found and the expected value."""

    def __init__(self, path: str, found: str, expected: str, row: int = -1) -> None:
        super().__init__(path, found, expected, row)
        self.path = path
        self.found = found
        self.expected = expected
        self.row = row

    def __str__(self) -> str:
        where = f"field {self.path}" if self.path else "the document"
        return f"{where}: expected {self.expected}, found {self.found}"


class Number(str):
    """A number as it is written. No digit of a decimal is lost, and text columns get it unchanged."""

    __slots__ = ()


_make_document = json.JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=Number).decode


def parsed(payload: bytes) -> dict[str, object]:
    try:
        document = _make_document(payload.decode())
    except (ValueError, RecursionError) as error:
        raise Misfit("", _shown_text(str(error)), "a JSON object") from None
    if not isinstance(document, dict):
        raise Misfit("", _shown(document), "a JSON object")
    return document


# ---- a function for each type ----

Convert: TypeAlias = Callable[[object], object]


def converter(kind: DataType, nullable: bool, path: str, permissive: bool) -> Convert:
    """A function from a value of a document to pyarrow's input for the type. It raises Misfit."""
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
            raise Misfit(path, "null, or no value", f"{kind.simpleString()}, not null")
        return convert(value)

    return required


def _convert_to(kind: DataType, path: str, permissive: bool) -> Convert:
    """The function for values that are not null."""
    if isinstance(kind, StructType):
        return _struct_converter(kind, path, permissive)
    if isinstance(kind, ArrayType):
        item = converter(kind.elementType, kind.containsNull, f"{path}[]", permissive)

        def array(value: object) -> object:
            if not isinstance(value, list):
                raise Misfit(path, _shown(value), "an array")
            return [item(one) for one in value]

        return array
    if isinstance(kind, MapType):
        inner = converter(kind.valueType, kind.valueContainsNull, f"{path}{{}}", permissive)

        def mapping(value: object) -> object:
            if not isinstance(value, dict):
                raise Misfit(path, _shown(value), "an object")
            return [(_well_formed(name, path), inner(one)) for name, one in value.items()]

        return mapping
    scalar = _scalar_converter(kind)

    def checked(value: object) -> object:
        try:
            return scalar(value)
        except (NoFit, ValueError, InvalidOperation):
            raise Misfit(path, _shown(value), kind.simpleString()) from None

    return checked


def _struct_converter(kind: StructType, path: str, permissive: bool) -> Convert:
    plan = [
        (field.name, converter(field.dataType, field.nullable, f"{path}/{field.name}", permissive))
        for field in kind.fields
    ]

    def struct(value: object) -> object:
        if not isinstance(value, dict):
            raise Misfit(path, _shown(value), "an object")
        return {name: convert(value.get(name)) for name, convert in plan}

    return struct


class NoFit(Exception):
    """A value that does not fit a scalar type."""


def _scalar_converter(kind: DataType) -> Convert:
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
    if type(value) is not Number or not _WHOLE.fullmatch(value):
        raise NoFit
    number = int(value)
    if not low <= number <= high:
        raise NoFit
    return number


_SPECIAL_NUMBERS: Final = {
    "NaN": float("nan"),
    **dict.fromkeys(("Infinity", "+Infinity", "INF", "+INF"), float("inf")),
    **dict.fromkeys(("-Infinity", "-INF"), float("-inf")),
}
"""The texts of `to_json` for numbers that JSON does not have, and other forms of them that Spark reads."""


def _double(value: object) -> float:
    if type(value) is Number:
        number = float(value)
        if not isfinite(number):
            raise NoFit
        return number
    if isinstance(value, str) and value in _SPECIAL_NUMBERS:
        return _SPECIAL_NUMBERS[value]
    raise NoFit


def _float(value: object) -> float:
    if type(value) is not Number:
        return _double(value)
    # From the text: through a double some numbers would be rounded twice.
    number: float = pa.scalar(str(value)).cast(pa.float32()).as_py()
    if not isfinite(number):
        raise NoFit
    return number


_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def _decimal(value: object, precision: int, scale: int) -> Decimal:
    if not isinstance(value, str) or not _DECIMAL.fullmatch(value):
        raise NoFit
    sign, digits, exponent = Decimal(value).as_tuple()
    assert isinstance(exponent, int), "the pattern leaves out NaN and Infinity"
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return Decimal((0, (0,), -scale))
    kept = text.rstrip("0")
    exponent += len(text) - len(kept)
    if exponent < -scale or len(kept) + exponent + scale > precision:
        raise NoFit
    return Decimal((sign, tuple(map(int, kept + "0" * (exponent + scale))), -scale))


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise NoFit
    return value


def _text(value: object) -> str:
    text = str(value) if isinstance(value, str) else "".join(_written(value))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can escape it, but no text contains it
        raise NoFit from None
    return text


def _well_formed(name: str, path: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Misfit(path, _shown(name), "names that are text") from None
    return name


def _written(value: object) -> Iterator[str]:
    """Compact JSON, with numbers as they were written."""
    if type(value) is Number:
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


def binary(value: object) -> bytes:
    if not isinstance(value, str) or type(value) is Number:
        raise NoFit
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:  # also for characters that are not ASCII
        raise NoFit from None


def _nothing(value: object) -> None:
    raise NoFit


def _variant(value: object) -> dict[str, bytes]:
    text = "".join(_written(value))
    if not _is_finite(value):
        raise NoFit  # it would be an infinity, which cannot be written back
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NoFit from None
    made = VariantVal.parseJson(text)
    return {"value": made.value, "metadata": made.metadata}


def _is_finite(value: object) -> bool:
    if type(value) is Number:
        return isfinite(float(value))
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))


# ---- fields that the schema lacks ----

NOTHING: Final = object()
_HALVES: Final = re.compile("[\ud800-\udfff]")


def beyond(value: object, kind: DataType) -> object:
    """The part of a value that its type has no place for: fields of objects, with the names around them. An array or
    map that has such objects in it is returned whole. NOTHING: there is none."""
    if isinstance(kind, StructType) and isinstance(value, dict):
        known = {field.name: field.dataType for field in kind.fields}
        found = {name: beyond(one, known[name]) if name in known else one for name, one in value.items()}
        found = {name: one for name, one in found.items() if one is not NOTHING}
        return found or NOTHING
    if isinstance(kind, ArrayType) and isinstance(value, list):
        return value if any(beyond(one, kind.elementType) is not NOTHING for one in value) else NOTHING
    if isinstance(kind, MapType) and isinstance(value, dict):
        return value if any(beyond(one, kind.valueType) is not NOTHING for one in value.values()) else NOTHING
    return NOTHING


def compact(value: object) -> str:
    """A value as compact JSON, with numbers as they were written, and half of a surrogate pair escaped."""
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", "".join(_written(value)))


# ---- dates and times: by arithmetic, because Python's own types end at the years 1 and 9999, and at 24 h ----

_DATE: Final = r"([0-9]{4}|[+-][0-9]{4,7})-([0-9]{2})-([0-9]{2})"
_TIME: Final = r"[T ]([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,9}))?)?)?"
_ZONE: Final = r"(?:Z|([+-])([0-9]{2})(?::?([0-9]{2}))?)"
_DAY: Final = re.compile(_DATE)
_INSTANT: Final = re.compile(f"{_DATE}(?:{_TIME}{_ZONE}?)?")
_LOCAL: Final = re.compile(f"{_DATE}(?:{_TIME})?")
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_CYCLE: Final = 146_097  # days of the 400 years after which the calendar repeats
_DAY_MICROS: Final = 86_400_000_000


def _day(year: str, month: str, day: str) -> int:
    """Days since the epoch. Raises ValueError for a day that no calendar has."""
    cycles, rest = divmod(int(year), 400)
    # rest + 400: Python has no year 0.
    return date(rest + 400, int(month), int(day)).toordinal() - _EPOCH_DAY + (cycles - 1) * _CYCLE


def _matched(pattern: re.Pattern[str], value: object) -> tuple[str | None, ...]:
    if not isinstance(value, str) or type(value) is Number:
        raise NoFit
    match = pattern.fullmatch(value)
    if match is None:
        raise NoFit
    return match.groups()


def _date(value: object) -> int:
    year, month, day = _matched(_DAY, value)
    days = _day(year or "", month or "", day or "")
    if not -(2**31) <= days < 2**31:
        raise NoFit
    return days


def _local(value: object) -> int:
    return _storable(_micros(_matched(_LOCAL, value)))


def _storable(micros: int) -> int:
    if not -(2**63) <= micros < 2**63:
        raise NoFit
    return micros


def _instant(value: object) -> int:
    if type(value) is Number:
        if not _WHOLE.fullmatch(value):
            raise NoFit
        micros = int(value) * 1_000_000
    else:
        *local, sign, hours, minutes = _matched(_INSTANT, value)
        micros = _micros(tuple(local))
        if sign is not None:
            away = _two(hours, 23) * 60 + _two(minutes, 59)
            micros -= away * 60_000_000 if sign == "+" else -away * 60_000_000
    return _storable(micros)


def _micros(parts: tuple[str | None, ...]) -> int:
    year, month, day, hour, minute, second, fraction = parts
    micros = _day(year or "", month or "", day or "") * _DAY_MICROS
    micros += (_two(hour, 23) * 3_600 + _two(minute, 59) * 60 + _two(second, 59)) * 1_000_000
    return micros + int((fraction or "").ljust(6, "0")[:6])


def _two(digits: str | None, most: int) -> int:
    number = int(digits or "0")
    if number > most:
        raise NoFit
    return number


_SCALAR_CONVERTERS: Final[tuple[tuple[type[DataType], Convert], ...]] = (
    (StringType, _text),
    (DoubleType, _double),
    (FloatType, _float),
    (BooleanType, _boolean),
    (BinaryType, binary),
    (DateType, _date),
    (TimestampType, _instant),
    (TimestampNTZType, _local),
    (NullType, _nothing),
    (VariantType, _variant),
)


def _shown(value: object) -> str:
    """A value for an error."""
    if value is None:
        return "null"
    if isinstance(value, str) and type(value) is not Number:
        return _shown_text(json.dumps(value))
    return _shown_text("".join(_written(value)))


def _shown_text(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
