"""Names for the common subexpressions of generated code: each is computed once on every path, where it is needed first.
Pure."""

from __future__ import annotations

import ast
from collections.abc import Hashable

from sow_server.filters import pycode as py


class CommonSubexpressions:
    """Owns the names. Code is made with bare names; the first use on a path becomes `(name := load)`.

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
