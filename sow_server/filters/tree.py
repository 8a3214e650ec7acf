"""The syntax tree of a filter: frozen values, equal when they mean the same text. Pure.

Any expression may stand anywhere: a comparison is a value (true, false or null), and a field that holds a boolean is a
condition. `And` and `Or` hold all their operands at one level, so a long chain is not a deep tree. The parser builds
trees from text, and the Spark connector builds them from pushed filters. `printer.print_filter` gives the one text of a
tree.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from sow_server.engine.values import fields

SUBSCRIPT_MAX: Final = 2**64 - 1
STEPS_MAX: Final = 64
"""The largest number of steps of a path."""

Step: TypeAlias = fields.Step


class Comparison(enum.Enum):
    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="


MIRRORED: Final = {
    Comparison.EQUAL: Comparison.EQUAL,
    Comparison.NOT_EQUAL: Comparison.NOT_EQUAL,
    Comparison.LESS: Comparison.GREATER,
    Comparison.LESS_OR_EQUAL: Comparison.GREATER_OR_EQUAL,
    Comparison.GREATER: Comparison.LESS,
    Comparison.GREATER_OR_EQUAL: Comparison.LESS_OR_EQUAL,
}
"""`a < b` is `b > a`."""


class ValueKinds(enum.Flag):
    """The possible kinds of an expression's value."""

    NULL = enum.auto()
    BOOLEAN = enum.auto()
    NUMBER = enum.auto()
    TEXT = enum.auto()
    OTHER = enum.auto()
    """Arrays and objects."""


class Operator(enum.Enum):
    """Arithmetic with two operands."""

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    DIVIDE = "/"
    REMAINDER = "%"


class TextTest(enum.Enum):
    BEGINS_WITH = "BEGINS WITH"
    ENDS_WITH = "ENDS WITH"
    CONTAINS = "CONTAINS"


class MetadataName(enum.Enum):
    KEY = "key"
    VERSION = "version"
    PUBLISH_TIME = "publish_time"
    EXPIRE_TIME = "expire_time"
    TOPIC = "topic"
    SEQUENCE = "sequence"
    ORIGIN = "origin"


class Function(enum.Enum):
    LENGTH = "LENGTH"
    LOWER = "LOWER"
    UPPER = "UPPER"
    TRIM = "TRIM"
    CONCAT = "CONCAT"
    SUBSTR = "SUBSTR"
    REPLACE = "REPLACE"
    ABS = "ABS"
    ROUND = "ROUND"
    FLOOR = "FLOOR"
    CEIL = "CEIL"
    COALESCE = "COALESCE"
    IF = "IF"
    ARRAY_COUNT = "ARRAY_COUNT"
    NOW_MICROS = "NOW_MICROS"
    INSTR = "INSTR"
    REVERSE = "REVERSE"
    DATE_MICROS = "DATE_MICROS"
    FORMAT_TIME = "FORMAT_TIME"
    REGEXP_REPLACE = "REGEXP_REPLACE"
    MESSAGE_SIZE = "MESSAGE_SIZE"


ARGUMENTS: Final[dict[Function, tuple[int, int | None]]] = {
    Function.LENGTH: (1, 1),
    Function.LOWER: (1, 1),
    Function.UPPER: (1, 1),
    Function.TRIM: (1, 1),
    Function.CONCAT: (1, None),
    Function.SUBSTR: (2, 3),
    Function.REPLACE: (3, 3),
    Function.ABS: (1, 1),
    Function.ROUND: (1, 2),
    Function.FLOOR: (1, 1),
    Function.CEIL: (1, 1),
    Function.COALESCE: (1, None),
    Function.IF: (3, 3),
    Function.ARRAY_COUNT: (1, 1),
    Function.NOW_MICROS: (0, 0),
    Function.INSTR: (2, 2),
    Function.REVERSE: (1, 1),
    Function.DATE_MICROS: (1, 1),
    Function.FORMAT_TIME: (2, 2),
    Function.REGEXP_REPLACE: (3, 3),
    Function.MESSAGE_SIZE: (0, 0),
}
"""How many arguments each function takes, at least and at most; None: any number."""


# Literals are four classes, because 1 == True in Python: as one class, two different filters would be equal.


@dataclass(frozen=True, slots=True)
class Null:
    pass


@dataclass(frozen=True, slots=True)
class Boolean:
    value: bool


@dataclass(frozen=True, slots=True, eq=False)
class Number:
    """An integer of at most INTEGER_DIGITS_MAX digits, or a float that is a number. The products of a field with 1 and
    with 1.0 are of different types, so these two are not equal."""

    value: int | float

    def __eq__(self, other: object) -> bool:
        return type(other) is Number and type(other.value) is type(self.value) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __post_init__(self) -> None:
        if type(self.value) is int:
            if not -fields.INTEGER_LIMIT < self.value < fields.INTEGER_LIMIT:
                raise ValueError(f"an integer of more than {fields.INTEGER_DIGITS_MAX} digits; make it a float")
        elif type(self.value) is not float or math.isnan(self.value):
            raise ValueError(f"{self.value!r} is not a number")


@dataclass(frozen=True, slots=True)
class Text:
    value: str


@dataclass(frozen=True, slots=True)
class Path:
    """A field of the payload: `/a/b[0]` has the steps `("a", "b", 0)`."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.steps or type(self.steps[0]) is not str:
            raise ValueError("a path begins with a name")
        if len(self.steps) > STEPS_MAX:
            raise ValueError(f"a path of {len(self.steps)} steps, more than the limit of {STEPS_MAX}")
        if any(step == "" or (type(step) is int and not 0 <= step <= SUBSCRIPT_MAX) for step in self.steps):
            raise ValueError("a step is a name that is not empty, or a subscript from 0")


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata of a record: `@key`, `@version`, …"""

    name: MetadataName


@dataclass(frozen=True, slots=True)
class Negate:
    operand: Expression


@dataclass(frozen=True, slots=True)
class Arithmetic:
    operator: Operator
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class FunctionCall:
    function: Function
    arguments: tuple[Expression, ...]

    def __post_init__(self) -> None:
        least, most = ARGUMENTS[self.function]
        if len(self.arguments) < least or (most is not None and len(self.arguments) > most):
            raise ValueError(f"{self.function.value} takes {arguments_text(self.function)}")
        if self.function is Function.ARRAY_COUNT and not isinstance(self.arguments[0], Path):
            raise ValueError("ARRAY_COUNT takes a field")
        if self.function is Function.REGEXP_REPLACE and not isinstance(self.arguments[1], Text):
            raise ValueError("the pattern of REGEXP_REPLACE is a text")


@dataclass(frozen=True, slots=True)
class Compare:
    operator: Comparison
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class In:
    operand: Expression
    items: tuple[Literal, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("IN takes at least one item")


@dataclass(frozen=True, slots=True)
class Between:
    """Both ends included."""

    operand: Expression
    low: Expression
    high: Expression


@dataclass(frozen=True, slots=True)
class Like:
    """A search for a regular expression, in the syntax of RE2."""

    operand: Expression
    pattern: str


@dataclass(frozen=True, slots=True)
class Matches:
    """BEGINS WITH, ENDS WITH, CONTAINS: true if it holds for any of `texts`. Several texts are literals."""

    test: TextTest
    operand: Expression
    texts: tuple[Expression, ...]

    def __post_init__(self) -> None:
        if not self.texts or (len(self.texts) > 1 and not all(isinstance(text, LITERALS) for text in self.texts)):
            raise ValueError(f"{self.test.value} takes an expression, or a list of literals")


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Expression


@dataclass(frozen=True, slots=True)
class Not:
    operand: Expression


@dataclass(frozen=True, slots=True)
class And:
    operands: tuple[Expression, ...]

    def __post_init__(self) -> None:
        if len(self.operands) < 2:
            raise ValueError("AND takes at least two operands")


@dataclass(frozen=True, slots=True)
class Or:
    operands: tuple[Expression, ...]

    def __post_init__(self) -> None:
        if len(self.operands) < 2:
            raise ValueError("OR takes at least two operands")


Literal: TypeAlias = Null | Boolean | Number | Text
Field: TypeAlias = Path | Metadata
Expression: TypeAlias = (
    Literal
    | Path
    | Metadata
    | Negate
    | Arithmetic
    | FunctionCall
    | Compare
    | In
    | Between
    | Like
    | Matches
    | IsNull
    | Not
    | And
    | Or
)
Filter: TypeAlias = Expression
"""The root of a tree: a record matches if the expression is true for it."""

LITERALS: Final = (Null, Boolean, Number, Text)


def arguments_text(function: Function) -> str:
    """The number of arguments of `function`, in words."""
    least, most = ARGUMENTS[function]
    if most is None:
        return f"at least {least} argument" + ("s" if least > 1 else "")
    if most == 0:
        return "no arguments"
    count = str(least) if least == most else f"{least} or {most}"
    return f"{count} argument" + ("s" if most > 1 else "")


def literal(value: object) -> Literal:
    """The literal of a Python value; an integer of more than INTEGER_DIGITS_MAX digits is infinite, as everywhere in
    the language."""
    if value is None or (type(value) is float and math.isnan(value)):
        return Null()
    if type(value) is bool:
        return Boolean(value)
    if type(value) is str:
        return Text(value)
    if type(value) is int:
        return Number(value if -fields.INTEGER_LIMIT < value < fields.INTEGER_LIMIT else fields.as_float(value))
    if type(value) is float:
        return Number(value)
    raise ValueError(f"no literal has the value {value!r}")


def children(expression: Expression) -> tuple[Expression, ...]:
    """The expressions directly below, in the order of the text."""
    match expression:
        case Negate(operand) | IsNull(operand) | Not(operand) | Like(operand, _):
            return (operand,)
        case Arithmetic(_, left, right) | Compare(_, left, right):
            return (left, right)
        case FunctionCall(_, arguments):
            return arguments
        case In(operand, items):
            return (operand, *items)
        case Between(operand, low, high):
            return (operand, low, high)
        case Matches(_, operand, texts):
            return (operand, *texts)
        case And(operands) | Or(operands):
            return operands
        case _:
            return ()


def replaces(node: Expression) -> bool:
    """True for a function with a regular expression."""
    return isinstance(node, FunctionCall) and node.function is Function.REGEXP_REPLACE


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and all below it."""
    waiting = [expression]
    while waiting:
        at = waiting.pop()
        yield at
        waiting.extend(children(at))
