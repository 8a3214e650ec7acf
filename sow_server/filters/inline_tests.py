"""Code that tests an operand inline: its type, and a comparison of it. Pure.

A test of the frequent types stands in the code itself. Anything else takes the slow way, which covers all cases.
"""

from __future__ import annotations

import ast
from typing import Final, NamedTuple

from sow_server.filters import pycode as py
from sow_server.filters.common_subexpressions import CommonSubexpressions
from sow_server.filters.tree import Comparison, ValueKinds


class Operand(NamedTuple):
    """A value in the generated code. `name` may be used any number of times, see `CommonSubexpressions`."""

    name: ast.expr
    kinds: ValueKinds


class InlineTests:
    """Makes the code of inline tests."""

    def __init__(self, subexpressions: CommonSubexpressions) -> None:
        self._subexpressions = subexpressions

    def type_of(self, operand: Operand) -> ast.expr:
        """The type of an operand, which is kept like the operand itself."""
        assert isinstance(operand.name, ast.Name), "a constant needs no test of its type"
        return self._subexpressions.name(("type", operand.name.id), py.call(py.name("type"), operand.name))

    def is_list(self, operand: Operand) -> ast.expr:
        return py.compare(self.type_of(operand), ast.Is(), py.name("list"))

    def is_not_null(self, operand: Operand) -> ast.expr:
        return py.compare(operand.name, ast.IsNot(), ast.Constant(None))

    def unless_nan(self, operand: Operand, test: ast.expr, kind: ValueKinds) -> ast.expr:
        """`nan != 1` holds in Python; here it is unknown (values [1])."""
        if kind is not ValueKinds.NUMBER or ValueKinds.OTHER not in operand.kinds:  # only documents have NaN
            return test
        return py.and_([test, py.compare(operand.name, ast.Eq(), operand.name)])

    def compared(self, operand: Operand, comparison: Comparison, right: ast.expr, kind: ValueKinds) -> ast.expr:
        """A comparison of two values of `kind`."""
        test = py.compare(operand.name, _OPERATORS[comparison](), right)
        if comparison is Comparison.NOT_EQUAL:
            test = self.unless_nan(operand, test, kind)
            if not isinstance(right, ast.Constant) and kind is ValueKinds.NUMBER and ValueKinds.OTHER in operand.kinds:
                test = py.and_([test, py.compare(right, ast.Eq(), right)])
        return test

    def never_true(self, operand: Operand, truth: ast.expr, wanted: bool) -> ast.expr:
        """Code for a comparison with null: unknown, except for an empty array, for which it is false (values [3])."""
        if wanted or ValueKinds.OTHER not in operand.kinds:
            return ast.Constant(False)
        return py.and_([self.is_list(operand), py.settled(truth, wanted)])

    def fast_or_slow(
        self, operand: Operand, kind: ValueKinds, fast: ast.expr, slow: ast.expr, *, coerces: bool
    ) -> ast.expr:
        """`fast` if the operand is of `kind`, else `slow`. Without `coerces` an operand of another kind makes the
        comparison unknown, unless it is an array."""
        if operand.kinds in kind:
            return fast
        if operand.kinds in kind | ValueKinds.NULL:
            return py.and_([self.is_not_null(operand), fast])
        if coerces:
            otherwise = py.and_([self.is_not_null(operand), slow]) if ValueKinds.NULL in operand.kinds else slow
        else:
            otherwise = (
                py.and_([self.is_list(operand), slow]) if ValueKinds.OTHER in operand.kinds else ast.Constant(False)
            )
        if not operand.kinds & kind:
            return otherwise
        types = {ValueKinds.NUMBER: ("float", "int"), ValueKinds.TEXT: ("str",), ValueKinds.BOOLEAN: ("bool",)}[kind]
        guard = py.or_([py.compare(self.type_of(operand), ast.Is(), py.name(name)) for name in types])
        return py.and_([guard, fast]) if isinstance(otherwise, ast.Constant) else py.if_(guard, fast, otherwise)


_OPERATORS: Final[dict[Comparison, type[ast.cmpop]]] = {
    Comparison.EQUAL: ast.Eq,
    Comparison.NOT_EQUAL: ast.NotEq,
    Comparison.LESS: ast.Lt,
    Comparison.LESS_OR_EQUAL: ast.LtE,
    Comparison.GREATER: ast.Gt,
    Comparison.GREATER_OR_EQUAL: ast.GtE,
}
