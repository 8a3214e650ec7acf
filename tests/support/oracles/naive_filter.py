"""The filter language once more, slow and plain, as docs/filters.md describes it. Tests check the compiler against it.

It shares nothing with the compiler but the tree: three-valued logic is computed with None, arrays are walked by
recursion, every pair is compared, numbers are exact fractions and read by a regular expression.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction
from typing import Final, assert_never

from sow_server.filters import Meta
from sow_server.filters.tree import (
    And,
    Arithmetic,
    Between,
    Boolean,
    Compare,
    Comparison,
    Expression,
    Function,
    FunctionCall,
    In,
    IsNull,
    Like,
    Matches,
    Metadata,
    MetadataName,
    Negate,
    Not,
    Null,
    Number,
    Operator,
    Or,
    Path,
    Step,
    Text,
    TextTest,
)

NUMERIC: Final = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\Z")
WHOLE: Final = re.compile(r"[+-]?[0-9]+\Z")


class Array(list[object]):
    """The values of a field that is an array, or lies in one; arrays in it already taken apart."""


class NaiveFilter:
    """Evaluates a tree for one record."""

    def __init__(self, document: object, meta: Meta, key_paths: list[tuple[str, ...]]) -> None:
        self.document = document
        self.meta = meta
        self.key_paths = key_paths

    def matches(self, tree: Expression) -> bool:
        return self.truth(tree) is True

    def truth(self, node: Expression) -> bool | None:
        """The truth of a condition; None is unknown."""
        match node:
            case And(operands):
                truths = [self.truth(operand) for operand in operands]
                return False if False in truths else None if None in truths else True
            case Or(operands):
                return disjunction([self.truth(operand) for operand in operands])
            case Not(operand):
                truth = self.truth(operand)
                return None if truth is None else not truth
            case Compare(comparison, left, right):
                by_text = comparison in (Comparison.EQUAL, Comparison.NOT_EQUAL) and (
                    self.is_key(left) or self.is_key(right)
                )
                pairs = [(one, other) for one in self.all(left) for other in self.all(right)]
                return disjunction([compare(comparison, one, other, by_text=by_text) for one, other in pairs])
            case In(operand, items):
                by_text = self.is_key(operand)
                return disjunction(
                    [
                        compare(Comparison.EQUAL, one, self.one(item), by_text=by_text)
                        for one in self.all(operand)
                        for item in items
                    ]
                )
            case Between(operand, low, high):
                least, most = self.one(low), self.one(high)
                found: list[bool | None] = []
                for one in self.all(operand):
                    truths = [
                        compare(Comparison.GREATER_OR_EQUAL, one, least),
                        compare(Comparison.LESS_OR_EQUAL, one, most),
                    ]
                    found.append(False if False in truths else None if None in truths else True)
                return disjunction(found)
            case Like(operand, pattern):
                subjects = [text(one) for one in self.all(operand)]
                return disjunction([None if one is None else bool(re.search(pattern, one)) for one in subjects])
            case Matches(test, operand, texts):
                return disjunction(
                    [test_text(test, text(one), text(self.one(want))) for one in self.all(operand) for want in texts]
                )
            case IsNull(operand):
                return all(one is None for one in self.all(operand))
            case _:
                return disjunction([one if isinstance(one, bool) else None for one in self.all(node)])

    def is_key(self, node: Expression) -> bool:
        return node == Metadata(MetadataName.KEY) or (isinstance(node, Path) and node.steps in self.key_paths)

    def all(self, node: Expression) -> list[object]:
        """The values that a comparison tries."""
        value = self.value(node)
        return list(value) if isinstance(value, Array) else [value]

    def one(self, node: Expression) -> object:
        """The value that a function takes."""
        value = self.value(node)
        return (value[0] if value else None) if isinstance(value, Array) else value

    def value(self, node: Expression) -> object:
        match node:
            case Null():
                return None
            case Boolean() | Text() | Number():
                return node.value
            case Path(steps):
                found = find(self.document, steps)
                return Array(flat(found)) if isinstance(found, list) else scalar(found)
            case Metadata(name):
                meta = self.meta
                return {
                    MetadataName.KEY: meta.key,
                    MetadataName.VERSION: meta.version,
                    MetadataName.PUBLISH_TIME: meta.publish_time_micros,
                    MetadataName.EXPIRE_TIME: meta.expire_time_micros,
                    MetadataName.TOPIC: meta.topic,
                    MetadataName.SEQUENCE: meta.sequence,
                    MetadataName.ORIGIN: meta.origin,
                }[name]
            case Negate(operand):
                return self.value(Arithmetic(Operator.MULTIPLY, Number(-1), operand))
            case Arithmetic(operator, left, right):
                return calculate(operator, number(self.one(left)), number(self.one(right)))
            case FunctionCall(Function.ARRAY_COUNT, (Path(steps),)):
                found = find(self.document, steps)
                return len(found) if isinstance(found, list) else None
            case FunctionCall(Function.NOW_MICROS):
                return self.meta.now_micros
            case FunctionCall(Function.MESSAGE_SIZE):
                return self.meta.size
            case FunctionCall(Function.IF, (condition, yes, no)):
                return self.one(yes) if self.truth(condition) is True else self.one(no)
            case FunctionCall(Function.COALESCE, arguments):
                return next((value for argument in arguments if (value := self.one(argument)) is not None), None)
            case FunctionCall(function, arguments):
                return call(function, [self.one(argument) for argument in arguments])
            case _:
                return self.truth(node)


def disjunction(truths: list[bool | None]) -> bool | None:
    return True if True in truths else None if None in truths else False


def find(at: object, steps: tuple[Step, ...]) -> object:
    if not steps:
        return at
    if isinstance(at, dict) and isinstance(steps[0], str):
        return find(at.get(steps[0]), steps[1:])
    if isinstance(at, list):
        if isinstance(steps[0], str):
            # Every element by itself, all steps, and their values side by side.
            return [find(element, steps) for element in flat(at)]
        return find(at[steps[0]], steps[1:]) if steps[0] < len(at) else None
    return None


def flat(array: list[object]) -> Iterator[object]:
    for element in array:
        if isinstance(element, list):
            yield from flat(element)
        else:
            yield scalar(element)


def scalar(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value


def number(value: object) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str) and len(value) <= 100 and NUMERIC.match(value):
        return int(value) if WHOLE.match(value) else float(value)
    return None


def text(value: object) -> str | None:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value
        case int():
            return str(value)
        case float():
            if math.isfinite(value) and value == math.floor(value):
                return str(int(Decimal(repr(value))))  # the digits of its shortest form, without an exponent
            return repr(value)
        case _:
            return None


def compare(comparison: Comparison, one: object, other: object, *, by_text: bool = False) -> bool | None:
    if by_text:
        one, other = text(one), text(other)
    elif isinstance(one, bool) != isinstance(other, bool):
        return None
    elif not (isinstance(one, str) and isinstance(other, str)) and not isinstance(one, bool):
        one, other = number(one), number(other)
    if one is None or other is None:
        return None
    if isinstance(one, str) or isinstance(other, str):
        sign = (str(one) > str(other)) - (str(one) < str(other))
    else:
        assert isinstance(one, (int, float)), "numbers or booleans"
        assert isinstance(other, (int, float)), "numbers or booleans"
        left, right = exact(one), exact(other)
        sign = (left > right) - (left < right)
    return {
        Comparison.EQUAL: sign == 0,
        Comparison.NOT_EQUAL: sign != 0,
        Comparison.LESS: sign < 0,
        Comparison.LESS_OR_EQUAL: sign <= 0,
        Comparison.GREATER: sign > 0,
        Comparison.GREATER_OR_EQUAL: sign >= 0,
    }[comparison]


def exact(value: int | float) -> Fraction | float:
    return value if math.isinf(value) else Fraction(value)


def test_text(test: TextTest, subject: str | None, wanted: str | None) -> bool | None:
    if subject is None or wanted is None:
        return None
    match test:
        case TextTest.BEGINS_WITH:
            return subject[: len(wanted)] == wanted
        case TextTest.ENDS_WITH:
            return subject[len(subject) - len(wanted) :] == wanted if len(wanted) <= len(subject) else False
        case TextTest.CONTAINS:
            return subject.find(wanted) >= 0


test_text.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def calculate(operator: Operator, one: int | float | None, other: int | float | None) -> int | float | None:
    if one is None or other is None:
        return None
    result: int | float
    match operator:
        case Operator.ADD:
            result = one + other
        case Operator.SUBTRACT:
            result = one - other
        case Operator.MULTIPLY:
            result = one * other
        case Operator.DIVIDE:
            if other == 0:
                return None
            exact_result = isinstance(one, int) and isinstance(other, int) and one % other == 0
            result = one // other if exact_result else one / other
        case Operator.REMAINDER:
            if other == 0 or math.isinf(one):
                return None
            if isinstance(one, int) and isinstance(other, int):
                result = one - other * int(Fraction(one, other))
            else:
                result = math.fmod(one, other)
        case _:
            assert_never(operator)
    return bounded(result)


def bounded(value: int | float) -> int | float | None:
    if isinstance(value, int):
        return value if abs(value) < 10**4300 else math.copysign(math.inf, value)
    return None if math.isnan(value) else value


def call(function: Function, arguments: list[object]) -> object:
    if any(argument is None for argument in arguments):
        return None
    match function:
        case Function.ABS | Function.FLOOR | Function.CEIL | Function.ROUND:
            value, places = number(arguments[0]), number(arguments[1]) if len(arguments) > 1 else 0
            if value is None or places is None:
                return None
            if math.isinf(value):
                return abs(value) if function is Function.ABS else value
            if function is Function.ABS:
                return bounded(abs(value))
            if isinstance(value, float) and abs(value) > 2**53 and places >= 0:
                return value  # it has no digits behind its point
            if function is Function.FLOOR:
                return bounded(Fraction(value).__floor__())
            if function is Function.CEIL:
                return bounded(Fraction(value).__ceil__())
            digits = int(max(-330, min(330, places)))
            with localcontext(prec=800):
                rounded = Decimal(repr(value)).quantize(Decimal(f"1e{-digits}"), ROUND_HALF_UP)
            rounds_to_float = digits > 0 or abs(rounded) > 2**53
            return bounded(float(rounded) if isinstance(value, float) and rounds_to_float else int(rounded))
        case Function.SUBSTR:
            subject, begin = text(arguments[0]), number(arguments[1])
            length = number(arguments[2]) if len(arguments) > 2 else math.inf
            if subject is None or begin is None or length is None:
                return None
            place = math.trunc(max(-1e9, min(1e9, begin)))
            if place < 0:
                place = max(1, len(subject) + 1 + place)
            end = max(place, 1) + math.trunc(max(0, min(1e9, length)))
            return "".join(letter for index, letter in enumerate(subject, 1) if max(place, 1) <= index < end)
        case Function.FORMAT_TIME:
            micros, form = number(arguments[0]), text(arguments[1])
            # None of the forms here has a directive.
            return (
                form if micros is not None and abs(micros) < 10**15 and form is not None and "%" not in form else None
            )
        case _:
            texts = [text(argument) for argument in arguments]
            if None in texts:
                return None
            return text_call(function, [str(part) for part in texts])


def text_call(function: Function, texts: list[str]) -> object:
    match function:
        case Function.LENGTH:
            return len(texts[0])
        case Function.LOWER:
            return texts[0].lower()
        case Function.UPPER:
            return texts[0].upper()
        case Function.TRIM:
            return texts[0].lstrip().rstrip()
        case Function.CONCAT:
            return "".join(texts)
        case Function.INSTR:
            return next((at + 1 for at in range(len(texts[0]) + 1) if texts[0][at:].startswith(texts[1])), 0)
        case Function.REVERSE:
            return "".join(reversed(texts[0]))
        case Function.DATE_MICROS:
            return None  # no value here is a time; tests/unit/filters/test_filter_times.py has some
        case Function.REGEXP_REPLACE:
            # An empty match is not replaced.
            return re.sub(texts[1], lambda match: texts[2] if match[0] else "", texts[0])
        case Function.REPLACE:
            return texts[2].join(texts[0].split(texts[1])) if texts[1] else texts[0]
        case _:
            raise AssertionError(f"{function} is not a function of texts")
