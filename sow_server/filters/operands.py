"""The operands of a filter's code: where each is read, of what kinds it may be, and how code tests it inline. Pure.

[1]  A value is read once on every path through the code, where it is needed first.
[2]  A test of the frequent types stands in the code itself. Anything else takes the slow way, which covers all cases.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Hashable
from typing import Final, NamedTuple

from sow_server.filters import pycode as py
from sow_server.filters.tree import Comparison


class ValueKinds(enum.Flag):
    """The possible kinds of an expression's value."""

    NULL = enum.auto()
    BOOLEAN = enum.auto()
    NUMBER = enum.auto()
    TEXT = enum.auto()
    OTHER = enum.auto()
    """Arrays and objects."""


class Operand(NamedTuple):
    """A value in the generated code. `name` may be used any number of times, see `Placement`."""

    name: ast.expr
    kinds: ValueKinds


class Placement:
    """Places the reads of values. Code is made with bare names; the first use on a path becomes `(name := load)`.

    A use stays a bare name if an earlier use has surely been evaluated. Any other use reads the value again.
    """

    def __init__(self) -> None:
        self.of: dict[str, Hashable] = {}
        """The value that each name stands for."""
        self._loads: dict[str, ast.expr] = {}
        self._names: dict[Hashable, str] = {}
        self._assigned: set[str] = set()
        self._trail: list[str] = []
        self._used: dict[str, None] = {}

    def name(self, what: Hashable, load: ast.expr) -> ast.expr:
        """A name for the value `what`, which `load` computes; the same name for the same value."""
        name = self._names.get(what)
        if name is None:
            name = self._names[what] = f"v{len(self._names)}"
            self._loads[name] = load
            self.of[name] = what
        return py.name(name)

    def place(self, code: ast.expr) -> tuple[ast.expr, list[str]]:
        """`code` with all its reads in place, and the names that it uses."""
        return self._placed(code), list(self._used)

    def _placed(self, code: ast.expr) -> ast.expr:
        match code:
            case ast.Name(id=name) if name in self._loads:
                self._used[name] = None
                if name in self._assigned:
                    return py.name(name)
                load = self._placed(self._loads[name])
                self._assigned.add(name)
                self._trail.append(name)
                return ast.NamedExpr(ast.Name(name, ast.Store()), load)
            case ast.BoolOp(op=op, values=operands):
                first = self._placed(operands[0])
                mark = len(self._trail)
                rest = [self._placed(operand) for operand in operands[1:]]  # each follows the ones before it
                self._forget(mark)
                return ast.BoolOp(op, [first, *rest])
            case ast.IfExp(test=test, body=body, orelse=orelse):
                placed = self._placed(test)
                return ast.IfExp(placed, self._perhaps(body), self._perhaps(orelse))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                # The last operand of a chain, `low <= value <= high`, is a constant, so nothing is read conditionally.
                return ast.Compare(self._placed(left), ops, [self._placed(operand) for operand in comparators])
            case ast.UnaryOp(op=op, operand=operand):
                return ast.UnaryOp(op, self._placed(operand))
            case ast.Call(func=function, args=arguments):
                return ast.Call(self._placed(function), [self._placed(argument) for argument in arguments], [])
            case ast.Attribute(value=value, attr=attribute):
                return ast.Attribute(self._placed(value), attribute, ast.Load())
            case ast.Subscript(value=value, slice=index):
                return ast.Subscript(self._placed(value), index, ast.Load())
            case ast.NamedExpr(target=target, value=value):
                return ast.NamedExpr(target, self._placed(value))
            case _:
                return code

    def _perhaps(self, code: ast.expr) -> ast.expr:
        mark = len(self._trail)
        placed = self._placed(code)
        self._forget(mark)
        return placed

    def _forget(self, mark: int) -> None:
        self._assigned.difference_update(self._trail[mark:])
        del self._trail[mark:]


class InlineTests:
    """Makes the code of inline tests [2]."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def type_of(self, operand: Operand) -> ast.expr:
        """The type of an operand, which is kept like the operand itself."""
        assert isinstance(operand.name, ast.Name), "a constant needs no test of its type"
        return self._placement.name(("type", operand.name.id), py.call(py.name("type"), operand.name))

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
