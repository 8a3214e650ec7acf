"""An upper estimate, from its tree, of the cost of evaluating a filter on one record. Pure.

The estimate is for the worst record of a size: each field may be the whole record, as one text or as one array. It
decides where a filter runs, never its answer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sow_server.engine.values.fields import INTEGER_DIGITS_MAX
from sow_server.engine.values.patterns import REPLACING_BYTES_MAX
from sow_server.filters.tree import (
    And,
    Arithmetic,
    Between,
    Compare,
    Expression,
    Filter,
    Function,
    FunctionCall,
    In,
    IsNull,
    Like,
    Matches,
    Metadata,
    Negate,
    Not,
    Number,
    Or,
    Path,
    Text,
    TextTest,
    children,
)


class Cost(NamedTuple):
    """Nanoseconds: once, per byte of the payload, and per element of its arrays."""

    once: int = 0
    per_byte: int = 0
    per_element: int = 0

    def plus(self, other: Cost) -> Cost:
        """The cost of both, one after the other."""
        return Cost(self.once + other.once, self.per_byte + other.per_byte, self.per_element + other.per_element)

    def minus(self, other: Cost) -> Cost:
        """The cost without that of `other`."""
        return Cost(self.once - other.once, self.per_byte - other.per_byte, self.per_element - other.per_element)

    def of(self, size: int, elements: int) -> int:
        """The cost for a payload of `size` bytes whose arrays have at most `elements` elements."""
        return self.once + self.per_byte * size + self.per_element * elements


NODE: Final = 150
ELEMENT: Final = 500
"""A comparison with one element of an array."""
TEXT_BYTE: Final = 10
"""LOWER, REPLACE and similar functions, per byte of the text that they make."""
PATTERN_BYTE: Final = 50
DIGIT: Final = 20
"""Arithmetic, per byte of a record that is one large integer: 80 µs for two of 4,300 digits."""
WRITTEN_DIGIT: Final = 50
"""The text of a large integer, or its rounding, per digit: 220 µs for one of 4,300 digits."""
SHORT_DIGITS: Final = 400
"""Fewer than this are as quick as any number. A size is an upper bound, with room for signs and points."""
TIME: Final = 300_000
"""DATE_MICROS and FORMAT_TIME: mostly 3 µs, and 300 for the longest form."""
REPLACING: Final = PATTERN_BYTE * REPLACING_BYTES_MAX
"""REGEXP_REPLACE, whatever the text: a short one may have many matches, with a search through its rest for each."""
LARGEST_TEXT: Final = 2**20 * TEXT_BYTE
"""No function makes a longer text (values [6])."""


class _Size(NamedTuple):
    """An upper bound for the length of a text: `times` the length of the payload, plus `more` characters."""

    times: int
    more: int


def cost_of(tree: Filter) -> Cost:
    """The cost of a filter, without decoding the payload."""
    total = Cost()
    waiting: list[Expression] = [tree]
    while waiting:
        node = waiting.pop()
        total = total.plus(_own(node))
        if isinstance(node, In) or (isinstance(node, Matches) and len(node.texts) > 1):
            waiting.append(node.operand)  # lists hold only literals
        else:
            waiting.extend(children(node))
    return total


def _own(node: Expression) -> Cost:
    match node:
        case Path(steps):
            return Cost(NODE * len(steps), 0, ELEMENT)
        case FunctionCall(Function.LOWER | Function.UPPER | Function.TRIM | Function.SUBSTR | Function.LENGTH):
            return _text(_size(node.arguments[0]))
        case FunctionCall(Function.REPLACE | Function.CONCAT):
            return _text(_size(node))
        case FunctionCall(Function.REVERSE):
            return _text(_size(node.arguments[0]))
        case FunctionCall(Function.INSTR, (text, _)):
            return _text(_size(text)).plus(_text(_size(node.arguments[1])))
        case FunctionCall(Function.DATE_MICROS | Function.FORMAT_TIME):
            return Cost(TIME)
        case FunctionCall(Function.REGEXP_REPLACE, (text, _, _)):
            return _text(_size(text)).plus(Cost(REPLACING + LARGEST_TEXT))
        case Like(operand, _):
            size = _size(operand)
            return Cost(NODE + PATTERN_BYTE * size.more, PATTERN_BYTE * size.times, ELEMENT)
        case Matches(test, operand, texts):
            size, count = _size(operand), len(texts)
            bytes_ = count if test is TextTest.CONTAINS else 0
            once = NODE * count + bytes_ * size.more + _digits(operand, WRITTEN_DIGIT)
            return Cost(once, bytes_ * size.times, ELEMENT + NODE * count)
        case Compare(_, left, right):  # with a key field, or `@key`, texts are compared
            return Cost(NODE + _digits(left, WRITTEN_DIGIT) + _digits(right, WRITTEN_DIGIT), 0, ELEMENT)
        case In(operand, _):
            return Cost(NODE + _digits(operand, WRITTEN_DIGIT), 0, ELEMENT)
        case IsNull():
            return Cost(NODE, 0, ELEMENT)
        case Between():
            return Cost(NODE, 0, 4 * ELEMENT)
        case Arithmetic():
            return Cost(NODE + _digits(node, DIGIT), DIGIT if _size(node).times else 0, 0)
        case FunctionCall(Function.ROUND):
            return Cost(NODE + _digits(node, WRITTEN_DIGIT), 0, 0)
        case And() | Or() | Not() | Negate() | FunctionCall() | Metadata():
            return Cost(NODE, 0, 0)
        case _:
            return Cost()


def _digits(expression: Expression, each: int) -> int:
    """The cost of the large integers that a filter itself makes, with its own literals: they may be far longer than the
    record."""
    if not isinstance(expression, (Arithmetic, Negate, FunctionCall)):
        return 0
    more = _size(expression).more
    return each * min(more, INTEGER_DIGITS_MAX) if more > SHORT_DIGITS else 0


def _text(size: _Size) -> Cost:
    # A longer text than the largest is null, so no function works on one.
    return Cost(NODE + min(TEXT_BYTE * size.more, LARGEST_TEXT), TEXT_BYTE * size.times)


def _size(expression: Expression) -> _Size:
    """An upper bound for the length of the text of a value."""
    match expression:
        case Text(value):
            return _Size(0, len(value))
        case Number(int(value)):
            return _Size(0, 30 + value.bit_length() // 3)
        case Path() | Metadata():
            return _Size(1, 0)
        case Negate() | Arithmetic() | FunctionCall(Function.ABS | Function.ROUND | Function.FLOOR | Function.CEIL):
            sizes = [_size(child) for child in children(expression)]
            return _bounded(sum([size.times for size in sizes]), 30 + sum([size.more for size in sizes]))
        case FunctionCall(Function.LOWER | Function.UPPER | Function.REVERSE, (argument,)):
            return _size(argument)
        case FunctionCall(Function.FORMAT_TIME):
            return _Size(0, 6_000)
        case FunctionCall(Function.TRIM | Function.SUBSTR, (argument, *_)):
            return _size(argument)
        case FunctionCall(Function.REPLACE, (argument, Text(old), Text(new))):
            growth = -(-len(new) // len(old)) if len(new) > len(old) > 0 else 1
            size = _size(argument)
            return _bounded(size.times * growth, size.more * growth)
        case FunctionCall(Function.REPLACE | Function.REGEXP_REPLACE):
            return _Size(0, 2**20)
        case FunctionCall(Function.CONCAT | Function.COALESCE | Function.IF, arguments):
            sizes = [_size(argument) for argument in arguments]
            return _bounded(sum([size.times for size in sizes]), sum([size.more for size in sizes]))
        case _:
            return _Size(0, 30)  # a number


def _bounded(times: int, more: int) -> _Size:
    return _Size(min(times, 2**20), min(more, 2**20))
