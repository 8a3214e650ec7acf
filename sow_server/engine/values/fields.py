"""Values of the fields of a document: reaching a field, flattening arrays, reading numeric texts. Pure.

Filters evaluate every record with it, and indexes every record that changes. Both use this module, so they agree.

    [1]  None, a missing field and a float that is not a number are null: no comparison with them is true, and no index
         holds them.
    [2]  A text that is a number also compares as that number.
    [3]  A field with an array holds each of its elements; nested arrays are flattened.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, TypeAlias

Step: TypeAlias = str | int
"""A name, or the subscript of an array, from 0."""
Steps: TypeAlias = tuple[Step, ...]
Scalar: TypeAlias = bool | int | float | str

INTEGER_DIGITS_MAX: Final = 4300
"""Integers are exact up to so many digits, which is as many as msgspec and Python convert. Longer ones are infinite."""
INTEGER_LIMIT: Final = 10**INTEGER_DIGITS_MAX
NUMBER_CHARACTERS_MAX: Final = 100
"""A longer text does not count as a number."""
_NUMBER_BEGINNINGS: Final = frozenset("+-.0123456789")
_SIGNS: Final = frozenset("+-")


class Kind(enum.IntEnum):
    """Kinds of values; only values of one kind are ordered among themselves. The numbers are on disk, in the keys of
    indexes."""

    BOOLEAN = 1
    NUMBER = 2
    TEXT = 3


Entry: TypeAlias = tuple[Kind, Scalar]


def entries(document: object, steps: Sequence[Step]) -> list[Entry]:
    """The entries of an index for a field: one per array element ([3]); a numeric text also has one under its
    number."""
    return entries_of(value_at(document, steps))


def entries_of(value: object) -> list[Entry]:
    """The same for the value of a field."""
    found: list[Entry] = []
    for element in elements(value) if type(value) is list else [value]:
        kind = type(element)
        if kind is str:
            found.append((Kind.TEXT, element))  # type: ignore[arg-type]  # narrowed by `type() is`, which is fast
            number = number_of(element)
            if number is not None:
                found.append((Kind.NUMBER, number))
        elif kind is int or kind is float:
            if element == element:
                found.append((Kind.NUMBER, element))  # type: ignore[arg-type]  # as above
        elif kind is bool:
            found.append((Kind.BOOLEAN, element))  # type: ignore[arg-type]  # as above
    return found


def value_at(document: object, steps: Sequence[Step]) -> object:
    """The value of a field, null when it is missing. Through an array of objects: the list of its elements' values."""
    at = document
    for index, step in enumerate(steps):
        if type(at) is dict:
            at = at.get(step) if type(step) is str else None
        elif type(at) is list:
            if type(step) is str:
                return _values_at(at, steps[index:])
            assert type(step) is int, "a step is a name or a subscript"
            at = at[step] if step < len(at) else None
        else:
            return None
    return at


def _values_at(many: list[object], steps: Sequence[Step]) -> list[object]:
    for step in steps:
        if type(step) is str:
            many = [element.get(step) if type(element) is dict else None for element in elements(many)]
        else:
            assert type(step) is int, "a step is a name or a subscript"
            many = [
                element[step] if type(element) is list and step < len(element) else None  # not of the list of them
                for element in many
            ]
    return many


def elements(array: list[object]) -> list[object]:
    """The elements of an array; a nested array is replaced by its elements ([3])."""
    if list not in [type(element) for element in array]:
        return array
    found: list[object] = []
    waiting = [iter(array)]  # no recursion: a document may be nested deeper than Python's stack
    while waiting:
        for element in waiting[-1]:
            if type(element) is list:
                waiting.append(iter(element))
                break
            found.append(element)
        else:
            waiting.pop()
    return found


def number_of(value: object) -> int | float | None:
    """The number that a number or a numeric text is ([2]): `[+-] digits [. digits] [e [+-] digits]`, nothing around."""
    kind = type(value)
    if kind is int:
        return value  # type: ignore[return-value]  # narrowed by `type() is`, faster than isinstance
    if kind is float:
        return value if value == value else None  # type: ignore[return-value]  # as above
    if kind is not str:
        return None
    text: str = value  # type: ignore[assignment]  # as above
    first = text[:1]
    if first not in _NUMBER_BEGINNINGS or len(text) > NUMBER_CHARACTERS_MAX:  # most are none, and raising is slow
        return None
    if text.isdigit() or (first in _SIGNS and text[1:].isdigit()):  # of any script
        return int(text) if text.isascii() else None
    try:
        number = float(text)
    except ValueError:
        return None
    if text.strip("0123456789+-.eE"):  # float() also takes blanks, underscores, other scripts' digits, inf and nan
        return None
    return number


def as_float(number: int | float) -> float:
    """The nearest float; infinite beyond the range of floats."""
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")
