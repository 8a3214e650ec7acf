"""Compares and calculates with the values of fields: the run-time half of the compiler. Pure.

A value comes from a decoder: None, bool, int, float, str, list, dict. These rules always hold:

    [1]  None, a missing field and a float that is not a number are null. Every comparison with null is unknown (None).
    [2]  A number and a text compare as numbers if the text is one, else the comparison is unknown.
    [3]  A comparison with an array is the OR over its elements; nested arrays are flattened. Functions, arithmetic and
         the ends of BETWEEN take the first element.
    [4]  Objects, and other values that no literal can have, compare as unknown. They are not null.
    [5]  Where a text is needed, a number or boolean stands for its canonical text (rule K4).
    [6]  Integers are exact. One of more than INTEGER_DIGITS_MAX digits becomes infinite; a text longer than
         TEXT_CHARACTERS_MAX becomes null.
    [7]  Integers and floats are compared by their exact values, as Python does. Arithmetic with a float is done in
         floats.
"""

from __future__ import annotations

import decimal
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from sow_server.engine.values.fields import INTEGER_DIGITS_MAX, INTEGER_LIMIT, Scalar, as_float, elements, number_of
from sow_server.engine.values.keys import EXACT_MAX, KeyFieldError, canonical_text
from sow_server.filters.times import date_micros, format_time
from sow_server.filters.tree import Comparison, Function, Operator, TextTest

Truth: TypeAlias = bool | None
"""None is unknown."""

TEXT_CHARACTERS_MAX: Final = 1 << 20
"""The longest text that a function makes. Without a bound, nested functions could make any amount of text from a short
one."""

# --- single values ---------------------------------------------------------------------------------------------------


def first(value: object) -> object:
    """The single value of `value`: the first element of an array; a float that is not a number is null [1] [3]."""
    kind = type(value)
    if kind is list:
        array: list[object] = value  # type: ignore[assignment]  # narrowed by `type() is`, faster than isinstance
        if array and type(array[0]) is list:
            array = elements(array)
        return first(array[0]) if array else None
    if kind is float and value != value:
        return None
    return value


def text_of(value: object) -> str | None:
    """The text of a scalar [5]; None for null, arrays and objects."""
    if type(value) is str:
        return value
    if value is None or _is_nan(value):
        return None
    try:
        return canonical_text(value)
    except (KeyFieldError, ValueError):  # ValueError: an integer of more than INTEGER_DIGITS_MAX digits
        return None


# --- comparisons -----------------------------------------------------------------------------------------------------

Test: TypeAlias = Callable[[Any, Any], bool]  # of two numbers, two texts or two booleans
Compared: TypeAlias = Callable[[object, object], Truth]

_TESTS: Final[dict[Comparison, Test]] = {
    Comparison.EQUAL: operator.eq,
    Comparison.NOT_EQUAL: operator.ne,
    Comparison.LESS: operator.lt,
    Comparison.LESS_OR_EQUAL: operator.le,
    Comparison.GREATER: operator.gt,
    Comparison.GREATER_OR_EQUAL: operator.ge,
}


def any_of(truths: Iterable[Truth]) -> Truth:
    """The OR of several truths; false if there are none."""
    unknown = False
    for truth in truths:
        if truth:
            return True
        if truth is None:
            unknown = True
    return None if unknown else False


def _compare_scalars(test: Test, left: object, right: object) -> Truth:
    one, other = type(left), type(right)
    if one is str and other is str:
        return test(left, right)
    if one is bool or other is bool:
        return test(left, right) if one is other else None
    left_number, right_number = number_of(left), number_of(right)
    return None if left_number is None or right_number is None else test(left_number, right_number)


def comparing(comparison: Comparison) -> Compared:
    """The comparison of any two values."""
    test = _TESTS[comparison]

    def compare(left: object, right: object) -> Truth:
        if type(left) is list:
            if type(right) is list:
                return _compare_arrays(comparison, elements(left), elements(right))
            return any_of([_compare_scalars(test, element, right) for element in elements(left)])
        if type(right) is list:
            return any_of([_compare_scalars(test, left, element) for element in elements(right)])
        return _compare_scalars(test, left, right)

    return compare


class _Sorted:
    """The elements of an array, by the kinds with which they compare."""

    def __init__(self, array: list[object]) -> None:
        self.numbers: list[Any] = [element for element in array if type(element) in (int, float) and element == element]
        self.texts: list[Any] = [element for element in array if type(element) is str]
        self.booleans: list[Any] = [element for element in array if type(element) is bool]
        self.numeric: list[Any] = [number for text in self.texts if (number := number_of(text)) is not None]
        self.others = len(array) - len(self.numbers) - len(self.texts) - len(self.booleans)


def _compare_arrays(comparison: Comparison, left: list[object], right: list[object]) -> Truth:
    """The OR over all pairs, without forming them: a thousand elements by a thousand would stall the server."""
    if not left or not right:
        return False
    one, other = _Sorted(left), _Sorted(right)
    for some, others in (
        (one.numbers, other.numbers),
        (one.numbers, other.numeric),
        (one.numeric, other.numbers),
        (one.texts, other.texts),
        (one.booleans, other.booleans),
    ):
        if some and others and _any_pair(comparison, some, others):
            return True
    incomparable = (
        one.others
        or other.others
        or (one.booleans and len(other.booleans) < len(right))
        or (other.booleans and len(one.booleans) < len(left))
        or (one.numbers and len(other.numeric) < len(other.texts))
        or (other.numbers and len(one.numeric) < len(one.texts))
    )
    return None if incomparable else False


def _any_pair(comparison: Comparison, left: list[Any], right: list[Any]) -> bool:
    match comparison:
        case Comparison.EQUAL:
            return not set(left).isdisjoint(right)
        case Comparison.NOT_EQUAL:
            return len({*left, *right}) > 1
        case Comparison.LESS | Comparison.LESS_OR_EQUAL:
            return _TESTS[comparison](min(left), max(right))
        case Comparison.GREATER | Comparison.GREATER_OR_EQUAL:
            return _TESTS[comparison](max(left), min(right))


def comparing_with(comparison: Comparison, constant: Scalar) -> Callable[[object], Truth]:
    """The comparison of any value with a constant on its right."""
    test = _TESTS[comparison]
    number = number_of(constant) if type(constant) is not str else None

    def compare(value: object) -> Truth:
        if number is not None and type(value) is str:  # every number of fix and nvfix comes here
            left = number_of(value)
            return None if left is None else test(left, number)
        if type(value) is list:
            return any_of([_compare_scalars(test, element, constant) for element in elements(value)])
        return _compare_scalars(test, value, constant)

    return compare


def _texts_of(value: object) -> list[str | None]:
    return [text_of(element) for element in elements(value)] if type(value) is list else [text_of(value)]


def comparing_keys(*, equal: bool) -> Compared:
    """`=` or `!=` where one side is a key field: of canonical texts (rule K4)."""

    def compare(left: object, right: object) -> Truth:
        ours, theirs = _texts_of(left), _texts_of(right)
        if not ours or not theirs:
            return False
        texts, others = set(ours), set(theirs)
        unknown = None in texts or None in others
        texts.discard(None)
        others.discard(None)
        if (not texts.isdisjoint(others)) if equal else (texts and others and len(texts | others) > 1):
            return True
        return None if unknown else False

    return compare


def member_of(items: Sequence[Scalar | None], *, key: bool) -> Callable[[object], Truth]:
    """Membership in a list of literals, of canonical texts for a key field (rule K4)."""
    if key:
        canonical = frozenset([text_of(item) for item in items])
        has_null = None in canonical

        def key_in(element: object) -> Truth:
            text = text_of(element)
            if text is None:
                return None
            return True if text in canonical else None if has_null else False

        return _over_elements(key_in)
    null = any(item is None for item in items)
    texts = frozenset([item for item in items if type(item) is str])
    numbers = frozenset([item for item in items if type(item) in (int, float)])
    booleans = frozenset([item for item in items if type(item) is bool])
    numeric = frozenset([number for text in texts if (number := number_of(text)) is not None])
    wordy = any(number_of(text) is None for text in texts)
    # Whether the list holds an item that compares as unknown with an element of this type. Numbers in the list compare
    # as unknown with texts that are no numbers; `is_in` handles this case by itself.
    beside_text = null or bool(booleans)
    beside_number = beside_text or wordy
    beside_boolean = null or bool(texts) or bool(numbers)

    def is_in(element: object) -> Truth:
        kind = type(element)
        if kind is str:
            if element in texts:
                return True
            if not numbers:
                return None if beside_text else False
            number = number_of(element)
            if number is None:
                return None
            return True if number in numbers else None if beside_text else False
        if kind is bool:
            return True if element in booleans else None if beside_boolean else False
        if (kind is int or kind is float) and element == element:
            return True if element in numbers or element in numeric else None if beside_number else False
        return None

    return _over_elements(is_in)


def _over_elements(test: Callable[[object], Truth]) -> Callable[[object], Truth]:
    def over_elements(value: object) -> Truth:
        return any_of([test(element) for element in elements(value)]) if type(value) is list else test(value)

    return over_elements


def between(value: object, low: object, high: object) -> Truth:
    """True if a value lies between two others, both included; one element of an array suffices."""

    def is_between(element: object) -> Truth:
        return both(_compare_scalars(operator.ge, element, low), _compare_scalars(operator.le, element, high))

    return _over_elements(is_between)(value)


def between_constants(low: Scalar, high: Scalar) -> Callable[[object], Truth]:
    """As `between`, with two constants of one type."""
    numbers = None if isinstance(low, str) or isinstance(high, str) else (low, high)

    def is_between(value: object) -> Truth:
        if numbers is not None and type(value) is str:  # as in `comparing_with`
            number = number_of(value)
            return None if number is None else numbers[0] <= number <= numbers[1]
        return between(value, low, high)

    return is_between


def searching(search: Callable[[str], bool]) -> Callable[[object], Truth]:
    """LIKE for any value."""

    def like(element: object) -> Truth:
        text = text_of(element)
        return None if text is None else search(text)

    return _over_elements(like)


def _contains(text: str, wanted: str) -> bool:
    return wanted in text


_TEXT_TESTS: Final[dict[TextTest, Callable[[str, str], bool]]] = {
    TextTest.BEGINS_WITH: str.startswith,
    TextTest.ENDS_WITH: str.endswith,
    TextTest.CONTAINS: _contains,
}


def testing(test: TextTest) -> Callable[..., Truth]:
    """BEGINS WITH and the like, for any value and one or more wanted texts."""
    holds = _TEXT_TESTS[test]

    def matches(value: object, *wanted: object) -> Truth:
        texts = [text_of(want) for want in wanted]

        def element_matches(element: object) -> Truth:
            text = text_of(element)
            return None if text is None else any_of([None if want is None else holds(text, want) for want in texts])

        return _over_elements(element_matches)(value)

    return matches


def is_null(value: object) -> bool:
    """True if there is no value. An array has one if any of its elements is not null."""
    if type(value) is list:
        return all(element is None or _is_nan(element) for element in elements(value))
    return value is None or _is_nan(value)


def _is_nan(value: object) -> bool:
    return type(value) is float and value != value


def is_true(value: object) -> Truth:
    """A value as a condition: unknown unless it is a boolean; the OR over the elements of an array."""
    return _over_elements(_boolean)(value)


def _boolean(element: object) -> Truth:
    return element if type(element) is bool else None


# --- three-valued logic ----------------------------------------------------------------------------------------------


def both(*truths: Truth) -> Truth:
    """AND."""
    if any(truth is False for truth in truths):
        return False
    return None if None in truths else True


def either(*truths: Truth) -> Truth:
    """OR."""
    return any_of(truths)


def inverse(truth: Truth) -> Truth:
    """NOT."""
    return None if truth is None else not truth


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _bounded(number: int | float) -> int | float | None:
    if type(number) is int:
        return number if -INTEGER_LIMIT < number < INTEGER_LIMIT else as_float(number)
    return number if number == number else None


def _divide(left: int | float, right: int | float) -> int | float | None:
    if not right:
        return None
    if type(left) is int and type(right) is int and not -EXACT_MAX <= left <= EXACT_MAX and not left % right:
        return left // right  # a float might not hold it
    return left / right


def _remainder(left: int | float, right: int | float) -> int | float | None:
    """The remainder, with the sign of the dividend, as in SQL."""
    if not right:
        return None
    if type(left) is int and type(right) is int:
        rest = abs(left) % abs(right)
        return -rest if left < 0 else rest
    return None if _is_infinite(left) else math.fmod(left, right)


_ARITHMETIC: Final[dict[Operator, Callable[[int | float, int | float], int | float | None]]] = {
    Operator.ADD: operator.add,
    Operator.SUBTRACT: operator.sub,
    Operator.MULTIPLY: operator.mul,
    Operator.DIVIDE: _divide,
    Operator.REMAINDER: _remainder,
}


def calculating(sign: Operator) -> Callable[[object, object], int | float | None]:
    """Arithmetic with two single values; null unless both are numbers or numeric texts."""
    calculate = _ARITHMETIC[sign]

    def calculated(left: object, right: object) -> int | float | None:
        # float and int inline: saves three calls in the most frequent case.
        one = left if type(left) is float or type(left) is int else number_of(left)
        other = right if type(right) is float or type(right) is int else number_of(right)
        if one is None or other is None:
            return None
        try:
            number = calculate(one, other)
        except OverflowError:  # a document's integer beyond 64 bits, which no float holds
            number = calculate(as_float(one), as_float(other))
        if type(number) is float:
            return number if number == number else None
        return None if number is None else _bounded(number)

    return calculated


def negated(value: object) -> int | float | None:
    number = number_of(value)
    return None if number is None else _bounded(-number)


# --- functions -------------------------------------------------------------------------------------------------------


def _length(value: object) -> int | None:
    text = text_of(value)
    return None if text is None else len(text)


def _bounded_text(text: str) -> str | None:
    return text if len(text) <= TEXT_CHARACTERS_MAX else None


def _lower(value: object) -> str | None:
    text = text_of(value)
    return None if text is None else _bounded_text(text.lower())


def _upper(value: object) -> str | None:
    text = text_of(value)
    return None if text is None else _bounded_text(text.upper())


def _trim(value: object) -> str | None:
    text = text_of(value)
    return None if text is None else text.strip()


def texts_of(values: Iterable[object]) -> list[str] | None:
    """The texts of values; None if one of them has none."""
    texts: list[str] = []
    for value in values:
        text = text_of(value)
        if text is None:
            return None
        texts.append(text)
    return texts


def _concat(*values: object) -> str | None:
    texts = texts_of(values)
    if texts is None or sum([len(text) for text in texts]) > TEXT_CHARACTERS_MAX:
        return None
    return "".join(texts)


def _integer(value: object) -> int | None:
    """A position or a count: the integral part of a number, within what an index may be."""
    number = number_of(value)
    return None if number is None else int(max(-(2**62), min(2**62, number)))


def _substr(value: object, position: object, length: object = 2**62) -> str | None:
    text, begin, count = text_of(value), _integer(position), _integer(length)
    if text is None or begin is None or count is None:
        return None
    start = begin - 1 if begin > 0 else max(0, len(text) + begin) if begin < 0 else 0
    return text[start : start + max(0, count)]


def _replace(value: object, old: object, new: object) -> str | None:
    text, sought, instead = text_of(value), text_of(old), text_of(new)
    if text is None or sought is None or instead is None:
        return None
    if not sought:
        return text
    if len(instead) > len(sought):
        grown = len(text) + text.count(sought) * (len(instead) - len(sought))
        if grown > TEXT_CHARACTERS_MAX:
            return None
    return text.replace(sought, instead)


def replacing(replaced: Callable[[str, str, int], str | None]) -> Callable[[object, object], str | None]:
    """REGEXP_REPLACE with one pattern."""

    def made(value: object, new: object) -> str | None:
        text, instead = text_of(value), text_of(new)
        return None if text is None or instead is None else replaced(text, instead, TEXT_CHARACTERS_MAX)

    return made


def _instr(value: object, sought: object) -> int | None:
    """The position of a text in another, from 1; 0: it is not there."""
    text, part = text_of(value), text_of(sought)
    return None if text is None or part is None else text.find(part) + 1


def _reverse(value: object) -> str | None:
    text = text_of(value)
    return None if text is None else text[::-1]


def _date_micros(value: object) -> int | None:
    text = text_of(value)
    return None if text is None else date_micros(text)


def _format_time(value: object, pattern: object) -> str | None:
    micros, form = number_of(value), text_of(pattern)
    return None if micros is None or form is None else format_time(micros, form)


def _abs(value: object) -> int | float | None:
    number = number_of(value)
    return None if number is None else _bounded(abs(number))


_DIGITS: Final = decimal.Context(
    prec=800, rounding=decimal.ROUND_HALF_UP
)  # enough digits to round any float at any place


def _round(value: object, digits: object = 0) -> int | float | None:
    """Half away from zero, of the number as it is written: ROUND(2.675, 2) is 2.68."""
    number, places = number_of(value), _integer(digits)
    if number is None or places is None:
        return None
    if _is_infinite(number):
        return number
    if type(number) is int:
        return number if places >= 0 else _bounded(_rounded(number, 10 ** min(-places, INTEGER_DIGITS_MAX + 1)))
    places = max(-330, min(330, places))
    rounded = decimal.Decimal(repr(number)).quantize(decimal.Decimal((0, (1,), -places)), context=_DIGITS)
    return int(rounded) if places <= 0 and abs(rounded) <= EXACT_MAX else float(rounded)


def _rounded(number: int, unit: int) -> int:
    units, rest = divmod(abs(number), unit)
    rounded = (units + (2 * rest >= unit)) * unit
    return -rounded if number < 0 else rounded


def _floor(value: object) -> int | float | None:
    number = number_of(value)
    return number if number is None or _is_whole(number) else math.floor(number)


def _ceil(value: object) -> int | float | None:
    number = number_of(value)
    return number if number is None or _is_whole(number) else math.ceil(number)


def _is_whole(number: int | float) -> bool:
    return type(number) is int or not -EXACT_MAX <= number <= EXACT_MAX


def _is_infinite(number: int | float) -> bool:
    return type(number) is float and math.isinf(number)


def _coalesce(*values: object) -> object:
    for value in values:
        if value is not None:
            return value
    return None


def array_count(value: object) -> int | None:
    """The number of elements of an array; null for anything else."""
    return len(value) if type(value) is list else None


FUNCTIONS: Final[dict[Function, Callable[..., object]]] = {
    Function.LENGTH: _length,
    Function.LOWER: _lower,
    Function.UPPER: _upper,
    Function.TRIM: _trim,
    Function.CONCAT: _concat,
    Function.SUBSTR: _substr,
    Function.REPLACE: _replace,
    Function.ABS: _abs,
    Function.ROUND: _round,
    Function.FLOOR: _floor,
    Function.CEIL: _ceil,
    Function.COALESCE: _coalesce,
    Function.INSTR: _instr,
    Function.REVERSE: _reverse,
    Function.DATE_MICROS: _date_micros,
    Function.FORMAT_TIME: _format_time,
}
"""The functions of single values. The others are compiled in place: IF, ARRAY_COUNT, REGEXP_REPLACE, and those without
arguments."""
