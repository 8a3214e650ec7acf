"""The conditions of a filter on single fields: points and ranges in which their values must lie. Pure.

The planner and the dispatcher of subscriptions use them to skip records that cannot match. Bounds only narrow the
search: the whole filter is evaluated for each record that is found.

    [1]  If a filter is true for a record, then for each field in `bounds_of` and each of its bounds, at least one of
         the field's `entries` lies in at least one interval of that bound. So any one bound may serve as the plan. Two
         bounds on one field must not be intersected, as two elements of an array may satisfy one each.
    [2]  If a filter is true for a record, the canonical text of each field in `key_texts` is one of the texts, and that
         of each field in `key_prefixes` begins with one of the prefixes. Key fields are scalars, so these are
         intersected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from sow_server.engine.values.fields import INTEGER_DIGITS_MAX, Entry, Kind, Scalar, as_float, entries, number_of
from sow_server.filters import values
from sow_server.filters.tree import (
    LITERALS,
    MIRRORED,
    And,
    Between,
    Boolean,
    Compare,
    Comparison,
    Expression,
    Field,
    Filter,
    In,
    Like,
    Matches,
    Metadata,
    MetadataName,
    Not,
    Null,
    Number,
    Or,
    Path,
    Text,
    TextTest,
)

__all__ = [
    "Bound",
    "Entry",
    "Interval",
    "Kind",
    "after_prefix",
    "bounds_of",
    "entries",
    "key_prefixes",
    "key_texts",
]

INTERVALS_MAX: Final = 10_000
"""Beyond this many intervals there is no bound: reading everything is cheaper."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Values of one kind between two ends; None: no end. Texts are ordered by code point."""

    kind: Kind
    low: Scalar | None = None
    high: Scalar | None = None
    low_included: bool = True
    high_included: bool = True

    @property
    def is_point(self) -> bool:
        """True if it holds only one value, `low`."""
        return self.low is not None and self.low == self.high and self.low_included and self.high_included

    def holds(self, entry: Entry) -> bool:
        """True if it holds an entry."""
        kind, value = entry
        if kind is not self.kind:
            return False
        if self.low is not None and not (_below(self.low, value) or (self.low_included and self.low == value)):
            return False
        return self.high is None or _below(value, self.high) or (self.high_included and self.high == value)


Bound: TypeAlias = tuple[Interval, ...]
"""A union of intervals. An empty one holds nothing: no record matches."""


def bounds_of(tree: Filter, key_paths: Sequence[Sequence[str]] = ()) -> Mapping[Field, tuple[Bound, ...]]:
    """The bounds of each field that has any [1]. `key_paths` are the topic's key fields, as for `compile_filter`."""
    keys = _keys(key_paths)
    found = _conjunction(tree, True, lambda leaf, wanted: _leaf_bounds(leaf, wanted, keys), _all_bounds, _any_bounds)
    return found if found is not None else {}


def key_texts(tree: Filter, key_paths: Sequence[Sequence[str]]) -> Mapping[Field, frozenset[str]]:
    """The canonical texts that key fields and `@key` must have, from `=` and IN [2]; an empty set: no match."""
    keys = _keys(key_paths)
    found = _conjunction(tree, True, lambda leaf, wanted: _leaf_texts(leaf, wanted, keys), _all_texts, _any_texts)
    return found if found is not None else {}


def key_prefixes(tree: Filter, key_paths: Sequence[Sequence[str]]) -> Mapping[Field, frozenset[str]]:
    """The texts with which key fields and `@key` must begin, from BEGINS WITH and LIKE '^…' [2]."""
    keys = _keys(key_paths)
    found = _conjunction(tree, True, lambda leaf, wanted: _leaf_prefixes(leaf, wanted, keys), _all_prefixes, _any_texts)
    return found if found is not None else {}


def after_prefix(prefix: str) -> str | None:
    """The lowest text above all that begin with `prefix`; None if there is none."""
    while prefix:
        code = ord(prefix[-1]) + 1
        if code <= 0x10FFFF:
            return prefix[:-1] + chr(0xE000 if 0xD800 <= code <= 0xDFFF else code)  # surrogates are no characters
        prefix = prefix[:-1]
    return None


# --- AND, OR, NOT ----------------------------------------------------------------------------------------------------

_Found = TypeVar("_Found")
_PerField: TypeAlias = dict[Field, _Found]
_KEY: Final = Metadata(MetadataName.KEY)


def _keys(key_paths: Sequence[Sequence[str]]) -> frozenset[Field]:
    return frozenset([_KEY, *[Path(tuple(path)) for path in key_paths]])


def _conjunction(
    expression: Expression,
    wanted: bool,
    leaf: Callable[[Expression, bool], _PerField[_Found]],
    all_of: Callable[[Iterable[_PerField[_Found]]], _PerField[_Found]],
    any_of: Callable[[Iterable[_PerField[_Found]]], _PerField[_Found]],
) -> _PerField[_Found] | None:
    """The conditions that hold for every record for which `expression` is `wanted`; None if there is no such record."""
    match expression:
        case Boolean(value):
            return {} if value is wanted else None
        case Null():
            return None
        case Not(operand):
            return _conjunction(operand, not wanted, leaf, all_of, any_of)
        case And(operands) | Or(operands):
            found = [_conjunction(operand, wanted, leaf, all_of, any_of) for operand in operands]
            possible = [part for part in found if part is not None]
            if isinstance(expression, And) is wanted:
                return all_of(possible) if len(possible) == len(found) else None
            return any_of(possible) if possible else None
        case _:
            return leaf(expression, wanted)


def _common(parts: list[_PerField[_Found]]) -> list[Field]:
    return [field for field in parts[0] if all(field in part for part in parts)]


def _all_bounds(parts: Iterable[_PerField[tuple[Bound, ...]]]) -> _PerField[tuple[Bound, ...]]:
    merged: dict[Field, tuple[Bound, ...]] = {}
    for part in parts:
        for field, bounds in part.items():
            merged[field] = merged.get(field, ()) + bounds
    return merged


def _any_bounds(parts: Iterable[_PerField[tuple[Bound, ...]]]) -> _PerField[tuple[Bound, ...]]:
    found = list(parts)
    merged: dict[Field, tuple[Bound, ...]] = {}
    for field in _common(found):
        union = tuple(dict.fromkeys(interval for part in found for interval in min(part[field], key=_cost)))
        if len(union) <= INTERVALS_MAX:
            merged[field] = (union,)
    return merged


def _cost(bound: Bound) -> tuple[int, int]:
    return sum(not interval.is_point for interval in bound), len(bound)


def _all_texts(parts: Iterable[_PerField[frozenset[str]]]) -> _PerField[frozenset[str]]:
    merged: dict[Field, frozenset[str]] = {}
    for part in parts:
        for field, texts in part.items():
            merged[field] = merged[field] & texts if field in merged else texts
    return merged


def _any_texts(parts: Iterable[_PerField[frozenset[str]]]) -> _PerField[frozenset[str]]:
    found = list(parts)
    return {field: frozenset[str]().union(*[part[field] for part in found]) for field in _common(found)}


def _all_prefixes(parts: Iterable[_PerField[frozenset[str]]]) -> _PerField[frozenset[str]]:
    merged: dict[Field, frozenset[str]] = {}
    for part in parts:
        for field, prefixes in part.items():
            known = merged.get(field)
            if known is None or len(prefixes) < len(known) or (len(prefixes) == len(known) and prefixes > known):
                merged[field] = prefixes
    return merged


# --- single conditions -----------------------------------------------------------------------------------------------

_Literal: TypeAlias = Null | Boolean | Number | Text
_TEXT_FIELDS: Final = (_KEY, Metadata(MetadataName.TOPIC), Metadata(MetadataName.ORIGIN))
# The possible beginnings of the canonical text of a number.
_NUMBER_BEGINNING: Final = re.compile(r"-?(?:[0-9][0-9.e+-]*|i|in|inf)?")
_LARGE_DIGITS: Final = 16
"""The number of digits of the least number beyond 2^53."""
_FLOAT_DIGITS: Final = 17
"""The shortest form of a float has at most so many, without zeros at its end."""
_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]*")
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_PATTERN_BEGINNING: Final = re.compile(r"\^((?:[^\\.+*?()|\[\]{}^$]|\\[^\w\s])+)(.?)", re.DOTALL)


def _leaf_bounds(expression: Expression, wanted: bool, keys: frozenset[Field]) -> _PerField[tuple[Bound, ...]]:
    # "Not true" of an array means that no element satisfies it. An empty array has no entries, so no bound finds it.
    if not wanted:
        return {}
    field: Expression
    bound: Bound | None
    match expression:
        case Path():
            return {expression: ((Interval(Kind.BOOLEAN, True, True),),)}
        case Compare():
            field, comparison, literal = _turned(expression)
            bound = _compared(field, comparison, literal, keys) if literal is not None else None
        case In(field, items):
            parts = [_compared(field, Comparison.EQUAL, item, keys) for item in items if not isinstance(item, Null)]
            known = [part for part in parts if part is not None]
            complete = len(known) == len(parts)
            bound = tuple(dict.fromkeys(interval for part in known for interval in part)) if complete else None
        case Between(field, low, high):
            bound = _between(field, low, high)
        case Like() | Matches():
            field, prefixes = expression.operand, _prefixes(expression)
            bound = _beginning(field, prefixes) if prefixes is not None else None
        case _:
            return {}
    return {field: (bound,)} if bound is not None and isinstance(field, (Path, Metadata)) else {}


def _turned(compare: Compare) -> tuple[Expression, Comparison, _Literal | None]:
    """A comparison with the field on the left, and the literal, if there is one, on the right."""
    if isinstance(compare.right, LITERALS):
        return compare.left, compare.operator, compare.right
    if isinstance(compare.left, LITERALS):
        return compare.right, MIRRORED[compare.operator], compare.left
    return compare.left, compare.operator, None


def _compared(field: Expression, comparison: Comparison, literal: _Literal, keys: frozenset[Field]) -> Bound | None:
    if comparison is Comparison.NOT_EQUAL or isinstance(literal, Null):
        return None
    if comparison is Comparison.EQUAL and field in keys:
        return _key_points(field, literal)
    return _of_field(field, literal, lambda kind, value: _interval(comparison, kind, value))


def _of_field(field: Expression, literal: _Literal, interval: Callable[[Kind, Scalar], Interval]) -> Bound | None:
    """The intervals of the values that compare with `literal`, restricted to the kinds of the field."""
    assert not isinstance(literal, Null), "nothing compares with null"
    value = literal.value
    number = number_of(value)
    found: list[Interval] = []
    if isinstance(literal, Boolean):
        found.append(interval(Kind.BOOLEAN, value))
    if isinstance(literal, Text):
        found.append(interval(Kind.TEXT, value))
    if number is not None:
        found.append(interval(Kind.NUMBER, number))
    if not isinstance(field, Metadata):
        return tuple(found)
    # The kind of metadata is known. A number compares with @key as a number, so the order of texts is no help.
    kind = Kind.TEXT if field in _TEXT_FIELDS else Kind.NUMBER
    return tuple(part for part in found if part.kind is kind) or None


def _interval(comparison: Comparison, kind: Kind, value: Scalar) -> Interval:
    match comparison:
        case Comparison.LESS | Comparison.LESS_OR_EQUAL:
            return Interval(kind, None, value, high_included=comparison is Comparison.LESS_OR_EQUAL)
        case Comparison.GREATER | Comparison.GREATER_OR_EQUAL:
            return Interval(kind, value, None, low_included=comparison is Comparison.GREATER_OR_EQUAL)
        case _:
            return Interval(kind, value, value)


def _key_points(field: Expression, literal: _Literal) -> Bound | None:
    """All values with the literal's canonical text."""
    text = values.text_of(_scalar(literal))
    assert text is not None, "a literal that is not null has a text"
    points = [Interval(Kind.TEXT, text, text)]
    if isinstance(field, Metadata):
        return tuple(points)
    points += [Interval(Kind.NUMBER, number, number) for number in _numbers(text)]
    if text in ("true", "false"):
        points.append(Interval(Kind.BOOLEAN, text == "true", text == "true"))
    return tuple(points)


def _numbers(text: str) -> list[int | float]:
    """The numbers with a canonical text: none, one, or an integer and the float that is written like it."""
    if text in ("inf", "-inf"):
        return [float(text)]
    if not _INTEGER.fullmatch(text):
        number = number_of(text)
        return [number] if number is not None and values.text_of(number) == text else []
    if len(text.lstrip("-")) > INTEGER_DIGITS_MAX:
        return []
    integer = int(text)
    if not _may_be_a_large_float(text):
        return [integer]
    near = as_float(integer)
    return [integer, near] if near != integer and values.text_of(near) == text else [integer]


def _may_be_a_large_float(text: str) -> bool:
    """True if a text may be the canonical one of a float beyond 2^53. It spares long lists of keys most of the work."""
    return len(text) >= _LARGE_DIGITS and len(text.lstrip("-").rstrip("0")) <= _FLOAT_DIGITS


def _scalar(literal: _Literal) -> Scalar | None:
    return None if isinstance(literal, Null) else literal.value


def _between(field: Expression, low: Expression, high: Expression) -> Bound | None:
    match low, high:
        case (Number(one), Number(other)):
            if isinstance(field, Metadata) and field in _TEXT_FIELDS:
                return None
            return (Interval(Kind.NUMBER, one, other),)
        case (Text(one), Text(other)):
            found = [Interval(Kind.TEXT, one, other)]
            least, most = number_of(one), number_of(other)
            if least is not None and most is not None:
                found.append(Interval(Kind.NUMBER, least, most))
            if not isinstance(field, Metadata):
                return tuple(found)
            kind = Kind.TEXT if field in _TEXT_FIELDS else Kind.NUMBER
            return tuple(part for part in found if part.kind is kind) or None
        case _:
            return None


def _prefixes(expression: Like | Matches) -> list[str] | None:
    """The prefixes of which the canonical text of a match has one."""
    match expression:
        case Matches(TextTest.BEGINS_WITH, _, texts) if all(isinstance(text, LITERALS) for text in texts):
            scalars = [_scalar(text) for text in texts if isinstance(text, LITERALS)]
            return [text for scalar in scalars if (text := values.text_of(scalar)) is not None]
        case Like(_, pattern) if "|" not in _ESCAPED.sub("", pattern) and (found := _PATTERN_BEGINNING.match(pattern)):
            plain = re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL)
            prefix = plain[:-1] if found[2] and found[2] in "*?{" else plain  # the last character may be absent
            return [prefix] if prefix else None
        case _:
            return None


def _beginning(field: Expression, prefixes: list[str]) -> Bound | None:
    found: list[Interval] = []
    for prefix in prefixes:
        found.append(Interval(Kind.TEXT, prefix, after_prefix(prefix), high_included=False))
        if isinstance(field, Metadata):
            continue
        if _NUMBER_BEGINNING.fullmatch(prefix):
            found.append(Interval(Kind.NUMBER))
        if "true".startswith(prefix):
            found.append(Interval(Kind.BOOLEAN, True, True))
        if "false".startswith(prefix):
            found.append(Interval(Kind.BOOLEAN, False, False))
    if isinstance(field, Metadata) and field not in _TEXT_FIELDS:
        return None
    return tuple(dict.fromkeys(found))


def _leaf_texts(expression: Expression, wanted: bool, keys: frozenset[Field]) -> _PerField[frozenset[str]]:
    field: Expression
    match expression:
        case Compare():
            field, comparison, literal = _turned(expression)
            texts = _texts(literal) if literal is not None else []
            if not texts or comparison is not (Comparison.EQUAL if wanted else Comparison.NOT_EQUAL):
                return {}
        case In(field, items) if wanted:
            texts = [text for item in items for text in _texts(item)]
        case _:
            return {}
    if not isinstance(field, (Path, Metadata)) or field not in keys:
        return {}
    return {field: frozenset(texts)}


def _texts(literal: _Literal) -> list[str]:
    """The canonical text of a literal. Also the digits of a large float with that text: they are the key of a record
    that was published before its shortest digits were."""
    text = values.text_of(_scalar(literal))
    if text is None:
        return []
    if not _may_be_a_large_float(text):
        return [text]
    return [text, *[str(int(number)) for number in _numbers(text) if type(number) is float and number.is_integer()]]


def _leaf_prefixes(expression: Expression, wanted: bool, keys: frozenset[Field]) -> _PerField[frozenset[str]]:
    if wanted and isinstance(expression, (Like, Matches)):
        field, prefixes = expression.operand, _prefixes(expression)
        if prefixes is not None and isinstance(field, (Path, Metadata)) and field in keys:
            return {field: frozenset(prefixes)}
    return {}


def _below(one: Scalar, other: Scalar) -> bool:
    """True if one of two values of one kind is below the other."""
    if isinstance(one, str) or isinstance(other, str):
        return str(one) < str(other)
    return one < other
