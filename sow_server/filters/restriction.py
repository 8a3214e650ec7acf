"""The part of a topic that a caller may see, and its effect on the caller's own filter (rules A4, A5). Pure.

A restriction is joined to a filter as a tree, never as text: no filter can close a bracket or begin a comment that
changes the meaning of the restriction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeAlias, assert_never

from sow_server.filters.tree import (
    And,
    Arithmetic,
    Between,
    Boolean,
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
    Null,
    Number,
    Or,
    Path,
    Text,
)

Steps: TypeAlias = tuple[str, ...]


class Restriction(NamedTuple):
    """The rows that a caller may see, and the fields that are hidden from it."""

    rows: Filter | None = None
    """None: all rows."""
    hidden: tuple[Steps, ...] = ()


UNRESTRICTED = Restriction()


def joined(asked: Filter | None, restriction: Restriction) -> Filter | None:
    """The filter that a caller asks for, as the store evaluates it: hidden fields are null in it, and it finds only
    rows that the caller may see. None: all records."""
    own = None if asked is None else without(asked, restriction.hidden)
    if restriction.rows is None or own is None:
        return own if restriction.rows is None else restriction.rows
    operands: list[Expression] = []
    for part in (restriction.rows, own):
        operands.extend(part.operands if isinstance(part, And) else (part,))
    return And(tuple(operands))


def hides(hidden: tuple[Steps, ...], path: tuple[str | int, ...]) -> bool:
    """True if a path leads to a hidden field, or into one. Subscripts do not count: a field that is hidden in an array
    is hidden in each of its elements."""
    names = tuple(step for step in path if isinstance(step, str))
    return any(names[: len(steps)] == steps for steps in hidden)


def without(expression: Expression, hidden: tuple[Steps, ...]) -> Expression:
    """The expression with null in place of every hidden field."""
    if not hidden:
        return expression

    def shown(part: Expression) -> Expression:
        return without(part, hidden)

    def all_shown(parts: tuple[Expression, ...]) -> tuple[Expression, ...]:
        return tuple(map(shown, parts))

    match expression:
        case Path(steps):
            return Null() if hides(hidden, steps) else expression
        case FunctionCall(Function.ARRAY_COUNT, (Path(steps),)):
            return Null() if hides(hidden, steps) else expression
        case FunctionCall(Function.MESSAGE_SIZE):
            return Null()  # it would tell how long the hidden fields are
        case FunctionCall(_, arguments):
            return replace(expression, arguments=all_shown(arguments))
        case Negate(operand) | IsNull(operand) | Not(operand) | Like(operand, _) | In(operand, _):
            return replace(expression, operand=shown(operand))
        case Arithmetic(_, left, right) | Compare(_, left, right):
            return replace(expression, left=shown(left), right=shown(right))
        case Between(operand, low, high):
            return Between(shown(operand), shown(low), shown(high))
        case Matches(_, operand, texts):
            return replace(expression, operand=shown(operand), texts=all_shown(texts))
        case And(operands) | Or(operands):
            return replace(expression, operands=all_shown(operands))
        case Null() | Boolean() | Number() | Text() | Metadata():
            return expression
        case _:  # a new kind of node must not pass unseen
            assert_never(expression)
