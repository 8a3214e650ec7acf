"""The canonical text of a filter: `parse(print_filter(tree)) == tree`, for every tree within the bounds. Pure.

Operators, keywords, texts and paths have one spelling each, with one blank between them and only the necessary
parentheses.
"""

from __future__ import annotations

import re
from typing import Final

from sow_server.filters.tree import (
    And,
    Arithmetic,
    Between,
    Boolean,
    Compare,
    Expression,
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
    Operator,
    Or,
    Path,
    Step,
    Text,
)

PLAIN_STEP: Final = re.compile(r"[\w.:$#]+")
"""A name that needs no brackets, as in the grammar."""
_UNPRINTABLE: Final = re.compile(r"['\\\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "'": "\\'", "\\": "\\\\"}

# How tightly an expression binds; an operand that binds less than its place needs gets parentheses.
_OR, _AND, _NOT, _COMPARISON, _SUM, _PRODUCT, _UNARY, _ATOM = range(8)
_SUMS: Final = (Operator.ADD, Operator.SUBTRACT)


def print_filter(tree: Expression) -> str:
    """The canonical text of `tree`."""
    return _text(tree, _OR)


def print_path(steps: tuple[Step, ...]) -> str:
    """A path as a filter writes it: `/a/b[0]`, `/[odd name]`."""
    return "".join(
        f"[{step}]"
        if isinstance(step, int)
        else f"/{step}"
        if PLAIN_STEP.fullmatch(step)
        else "/[" + re.sub(r"([\]\\])", r"\\\1", step) + "]"
        for step in steps
    )


def _text(expression: Expression, place: int) -> str:
    text, binds = _printed(expression)
    return f"({text})" if binds < place else text


def _printed(expression: Expression) -> tuple[str, int]:
    match expression:
        case Null():
            return "null", _ATOM
        case Boolean(value):
            return "true" if value else "false", _ATOM
        case Number(number):
            text = repr(number)
            if "inf" in text:
                text = text.replace("inf", "1e999")  # the shortest literal that is infinite
            return text, _UNARY if text.startswith("-") else _ATOM
        case Text(value):
            return _quoted(value), _ATOM
        case Path(steps):
            return print_path(steps), _ATOM
        case Metadata(name):
            return f"@{name.value}", _ATOM
        case Negate(Number(number)) if not repr(number).startswith("-"):
            return f"-({_text(Number(number), _OR)})", _UNARY  # -5 is a literal
        case Negate(operand):
            return "-" + _text(operand, _UNARY), _UNARY
        case Arithmetic(operator, left, right):
            level = _SUM if operator in _SUMS else _PRODUCT
            return f"{_text(left, level)} {operator.value} {_text(right, level + 1)}", level
        case FunctionCall(function, arguments):
            return f"{function.value}({_list(arguments)})", _ATOM
        case Not(operand):
            negated = _negated(operand)
            return (negated, _COMPARISON) if negated else (f"NOT {_text(operand, _NOT)}", _NOT)
        case And(operands):
            return " AND ".join([_text(operand, _NOT) for operand in operands]), _AND
        case Or(operands):
            return " OR ".join([_text(operand, _AND) for operand in operands]), _OR
        case Compare(operator=comparison, left=left, right=right):
            return f"{_text(left, _SUM)} {comparison.value} {_text(right, _SUM)}", _COMPARISON
        case In() | Between() | Like() | Matches() | IsNull():
            return _predicate(expression, ""), _COMPARISON


def _negated(expression: Expression) -> str | None:
    """`x NOT IN (…)` for `NOT x IN (…)`, if there is such a form."""
    if isinstance(expression, (In, Between, Like, Matches, IsNull)):
        return _predicate(expression, "NOT ")
    return None


def _predicate(expression: In | Between | Like | Matches | IsNull, negation: str) -> str:
    operand = _text(expression.operand, _SUM)
    match expression:
        case In(_, items):
            return f"{operand} {negation}IN ({_list(items)})"
        case Between(_, low, high):
            return f"{operand} {negation}BETWEEN {_text(low, _SUM)} AND {_text(high, _SUM)}"
        case Like(_, pattern):
            return f"{operand} {negation}LIKE {_quoted(pattern)}"
        case Matches(test, _, texts):
            wanted = _text(texts[0], _SUM) if len(texts) == 1 else f"({_list(texts)})"
            return f"{operand} {negation}{test.value} {wanted}"
        case IsNull():
            return f"{operand} IS {negation}NULL"


def _list(expressions: tuple[Expression, ...]) -> str:
    return ", ".join([_text(expression, _OR) for expression in expressions])


def _quoted(text: str) -> str:
    return "'" + _UNPRINTABLE.sub(lambda found: _SHORT.get(found[0]) or f"\\u{ord(found[0]):04x}", text) + "'"
