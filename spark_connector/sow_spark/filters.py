"""Spark's pushed filters in the filter language (docs/filters.md), so that fewer records have to be read.

Spark evaluates every filter again on the rows it gets. So this module guarantees only:

    [1]  Every record that Spark would keep matches the pushed text. The text may match more records, never fewer.
    [2]  A filter that cannot be expressed this way is left out, not approximated.

The language compares values of a document, Spark compares the columns made of them (`sow_spark.converting`). The two
differ: a column of text may come from a number or an object, a double from the text "NaN", a time from several texts.
Each function below states its assumptions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final, TypeAlias

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from sow_spark.options import ParseMode
from sow_spark.schemas import Layout

TEXT_BYTES_MAX: Final = 48 * 1024
"""The language accepts 64 KiB; the rest is for the user's own filter."""
LIST_MAX: Final = 10_000
"""Literals of one IN."""
_EXACT: Final = 2**53
"""Up to this bound every whole number is exactly a double."""

_METADATA: Final = {"_key": "@key", "_version": "@version", "_publish_time": "@publish_time"}
_NULLABLE_METADATA: Final = {"_expire_time": "@expire_time"}
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CANONICAL_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]{0,17}")
_ORDERINGS: Final = {GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}

_Literal: TypeAlias = Callable[[object], str]
"""Writes a literal. Raises _NotExpressible for a literal of another type, or one that must not be pushed."""

_ABOVE: Final = "'NaN', 'Infinity', '+Infinity', 'INF', '+INF'"  # for Spark NaN is greater than any other value
_BELOW: Final = "'-Infinity', '-INF'"


class _NotExpressible(Exception):
    """The language has no text that matches all records that Spark keeps."""


def combined(user: str, filters: Sequence[Filter], found: Layout, mode: ParseMode) -> str:
    """The user's filter and as many of Spark's as can be expressed, joined by AND."""
    texts = [f"({user})"] if user else []
    length = 0
    for text in pushed(filters, found, mode):
        length += len(text.encode()) + 5
        if length > TEXT_BYTES_MAX:
            break
        texts.append(text)
    if user and len(texts) == 1:
        return user
    return " AND ".join(texts)


def pushed(filters: Iterable[Filter], found: Layout, mode: ParseMode) -> list[str]:
    """A condition for each filter that can be expressed [1]. `found` is the layout of documents in columns."""
    texts: list[str] = []
    for one in filters:
        try:
            texts.append(_condition(one, found, mode))
        except _NotExpressible:
            continue
    return texts


def _condition(one: Filter, found: Layout, mode: ParseMode) -> str:
    if isinstance(one, Not):
        return _negated(one.child, found)
    if isinstance(one, IsNull | IsNotNull):
        return _null_test(one, found, mode)
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    value: object = getattr(one, "value", None)
    if isinstance(one, EqualNullSafe):
        if value is None:
            return _null_test(IsNull(attribute), found, mode)
        one = EqualTo(attribute, value)
    if (name := _metadata(attribute, found)) is not None:
        return _on_metadata(one, name)
    kind = _type_of(attribute, found)
    path = _path(attribute)
    if isinstance(kind, StringType):
        return _on_text(one, path, kind)
    if isinstance(kind, BooleanType):
        return _on_values(one, path, _boolean)
    if isinstance(kind, ByteType | ShortType | IntegerType | LongType):
        return _on_values(one, path, _integer)
    if isinstance(kind, DoubleType):
        return _on_double(one, path)
    if isinstance(kind, FloatType):
        return _on_float(one, path)
    if isinstance(kind, DecimalType):
        return _on_decimal(one, path)
    raise _NotExpressible  # bytes, dates and times are texts in a document, in more than one form


def _negated(one: Filter, found: Layout) -> str:
    """NOT turns "more records" into "fewer records". So it is allowed only for conditions that are exact both ways: on
    metadata, and on whole numbers and booleans, which come from no other kind of value. For null both the condition and
    its negation are unknown."""
    if isinstance(one, EqualNullSafe | IsNull | IsNotNull | Not):
        raise _NotExpressible
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    if isinstance(one, In) and None in one.value:
        raise _NotExpressible  # never true for Spark, which does not send such a filter
    if _metadata(attribute, found) is None and not isinstance(
        _type_of(attribute, found), BooleanType | ByteType | ShortType | IntegerType | LongType
    ):
        raise _NotExpressible
    # The mode matters only for IsNull.
    return f"NOT ({_condition(one, found, 'FAILFAST')})"


def _null_test(one: IsNull | IsNotNull, found: Layout, mode: ParseMode) -> str:
    if (name := _metadata(one.attribute, found)) is not None:
        if name not in _NULLABLE_METADATA.values():
            raise _NotExpressible  # never null: Spark sends no such filter
        return f"{name} IS NULL" if isinstance(one, IsNull) else f"{name} IS NOT NULL"
    kind, path = _type_of(one.attribute, found), _path(one.attribute)
    if isinstance(one, IsNull):
        if mode == "PERMISSIVE":
            raise _NotExpressible  # a value that does not fit is null, too
        return f"{path} IS NULL"
    if isinstance(kind, ArrayType):
        raise _NotExpressible  # an empty array is not null for Spark
    if isinstance(kind, StringType):
        return f"({path} IS NOT NULL OR ARRAY_COUNT({path}) IS NOT NULL)"  # an empty array may become a text
    return f"{path} IS NOT NULL"


# ---- columns ----


def _metadata(attribute: tuple[str, ...], found: Layout) -> str | None:
    if len(attribute) != 1 or attribute[0] not in found.metadata:
        return None
    name = _METADATA.get(attribute[0]) or _NULLABLE_METADATA.get(attribute[0])
    if name is None:
        raise _NotExpressible  # the language has no origins and sequences
    return name


def _type_of(attribute: tuple[str, ...], found: Layout) -> DataType:
    kind: DataType = found.fields
    for name in attribute:
        if not isinstance(kind, StructType) or name not in kind.names:
            raise _NotExpressible
        kind = kind[name].dataType
    if not attribute:
        raise _NotExpressible
    return kind


def _path(attribute: tuple[str, ...]) -> str:
    steps: list[str] = []
    for name in attribute:
        if not name:
            raise _NotExpressible  # no path names it
        escaped = name.replace("\\", "\\\\").replace("]", "\\]")
        steps.append(name if _PLAIN.fullmatch(name) else f"[{escaped}]")
    return "".join([f"/{step}" for step in steps])


# ---- literals ----


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _NotExpressible
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + "".join([one if one >= " " else f"\\u{ord(one):04x}" for one in escaped]) + "'"


def _boolean(value: object) -> str:
    if not isinstance(value, bool):
        raise _NotExpressible
    return "true" if value else "false"


def _integer(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise _NotExpressible
    return str(value)


def _micros(value: object) -> str:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise _NotExpressible
    away = value - datetime(1970, 1, 1, tzinfo=UTC)
    return str((away.days * 86_400 + away.seconds) * 1_000_000 + away.microseconds)


def _finite(value: object) -> str:
    """A double below 2^53. Above it, different whole numbers become one double for Spark, but not for the language."""
    if not isinstance(value, float) or not math.isfinite(value) or abs(value) >= _EXACT:
        raise _NotExpressible
    return repr(value) if value else "0"


# ---- conditions ----


def _on_metadata(one: Filter, name: str) -> str:
    """Each metadata has one type, and is exact."""
    if name == "@key":
        if isinstance(one, StringStartsWith | StringEndsWith | StringContains):
            word = {StringStartsWith: "BEGINS WITH", StringEndsWith: "ENDS WITH", StringContains: "CONTAINS"}[type(one)]
            return f"{name} {word} {_text(one.value)}"
        return _on_values(one, name, _text)
    return _on_values(one, name, _integer if name == "@version" else _micros)


def _on_values(one: Filter, name: str, literal: _Literal) -> str:
    """Comparisons that mean the same for Spark and the language."""
    if isinstance(one, EqualTo):
        return f"{name} = {literal(one.value)}"
    if isinstance(one, In):
        return f"{name} IN ({_list(one, literal)})"
    if type(one) in _ORDERINGS and literal is not _boolean:
        value: object = getattr(one, "value", None)
        return f"{name} {_ORDERINGS[type(one)]} {literal(value)}"
    raise _NotExpressible


def _list(one: In, literal: _Literal) -> str:
    values = [value for value in one.value if value is not None]  # a null in the list makes nothing true
    if not values or len(values) > LIST_MAX:
        raise _NotExpressible
    return ", ".join([literal(value) for value in values])


def _on_double(one: Filter, path: str) -> str:
    """A double is a number, or one of the texts for numbers that JSON does not have."""
    if isinstance(one, EqualTo):
        return f"{path} = {_finite(one.value)}"
    if isinstance(one, In):
        return f"{path} IN ({_list(one, _finite)})"
    if isinstance(one, GreaterThan | GreaterThanOrEqual):
        return f"({path} {_ORDERINGS[type(one)]} {_finite(one.value)} OR {path} IN ({_ABOVE}))"
    if isinstance(one, LessThan | LessThanOrEqual):
        return f"({path} {_ORDERINGS[type(one)]} {_finite(one.value)} OR {path} IN ({_BELOW}))"
    raise _NotExpressible


def _on_float(one: Filter, path: str) -> str:
    """A float is the rounded number of the document, and rounding keeps the order. If the column is above a literal,
    the number was above it, too. If the column is equal to the literal, the number may have been on either side."""
    if isinstance(one, GreaterThan | LessThan):
        return _on_double(one, path)
    raise _NotExpressible


def _on_decimal(one: Filter, path: str) -> str:
    """Decimals are exact for Spark. The language has exact integers, and doubles for numbers with a point or exponent,
    so a smaller decimal may be equal there, or even greater."""
    if not isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        raise _NotExpressible
    low, high = _around(one.value)
    if isinstance(one, EqualTo):
        # Not `=`: on a key field it compares texts, and a decimal may be a text with a zero at its end.
        return f"({path} >= {low} AND {path} <= {high})"
    return f"{path} <= {high}" if isinstance(one, LessThan | LessThanOrEqual) else f"{path} >= {low}"


def _around(value: object) -> tuple[str, str]:
    """Literals at or below, and at or above a decimal and the double next to it."""
    if not isinstance(value, Decimal) or not value.is_finite():
        raise _NotExpressible
    if abs(value) < _EXACT:
        return f"{value:f}", f"{value:f}"  # the language reads it as that double
    near = Decimal(float(value))  # a whole number
    return str(math.floor(min(value, near))), str(math.ceil(max(value, near)))


def _on_text(one: Filter, path: str, kind: StringType) -> str:
    """A text may come from a number, as it is written, from a boolean, or from an object or array as JSON. So a literal
    is pushed only if none of these could equal it, or begin or end with it. A plain whole number is also pushed,
    because the language finds it in either form."""
    if not kind.isUTF8BinaryCollation():
        raise _NotExpressible
    if isinstance(one, EqualTo):
        return f"{path} = {_distinct(one.value)}"
    if isinstance(one, In):
        return f"{path} IN ({_list(one, _distinct)})"
    if isinstance(one, StringStartsWith) and one.value and one.value[0] not in "-0123456789{[":
        return f"{path} BEGINS WITH {_text(one.value)}"
    if isinstance(one, StringEndsWith) and one.value and one.value[-1] not in "0123456789}]":
        return f"{path} ENDS WITH {_text(one.value)}"
    if isinstance(one, StringContains) and re.search(r"[^-+.0-9eE]", one.value):
        # Objects have no length, arrays a count.
        return f"({path} CONTAINS {_text(one.value)} OR LENGTH({path}) IS NULL OR ARRAY_COUNT({path}) IS NOT NULL)"
    raise _NotExpressible


def _distinct(value: object) -> str:
    if not isinstance(value, str):
        raise _NotExpressible
    if not _CANONICAL_WHOLE.fullmatch(value) and (value[:1] in tuple("-0123456789{[") or value in ("true", "false")):
        raise _NotExpressible
    return _text(value)
