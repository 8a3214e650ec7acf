"""Pieces of Python code for the compiler, as trees of Python's own `ast`. Pure."""

from __future__ import annotations

import ast

from sow_server.filters.tree import Step


def name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def constant(value: object) -> ast.expr:
    return ast.Constant(value)  # type: ignore[arg-type]  # typeshed leaves out tuples and frozen sets


def call(function: ast.expr, *arguments: ast.expr) -> ast.expr:
    return ast.Call(function, list(arguments), [])


def method(value: ast.expr, name: str, *arguments: ast.expr) -> ast.expr:
    return call(ast.Attribute(value, name, ast.Load()), *arguments)


def compare(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> ast.expr:
    return ast.Compare(left, [operator], [right])


def settled(truth: ast.expr, wanted: bool) -> ast.expr:
    """Code that is truthy when a three-valued `truth` is `wanted`."""
    return truth if wanted else compare(truth, ast.Is(), ast.Constant(False))


def not_(code: ast.expr) -> ast.expr:
    return ast.Constant(not code.value) if isinstance(code, ast.Constant) else ast.UnaryOp(ast.Not(), code)


def and_(codes: list[ast.expr]) -> ast.expr:
    return _bool_op(codes, ast.And(), neutral=True)


def or_(codes: list[ast.expr]) -> ast.expr:
    return _bool_op(codes, ast.Or(), neutral=False)


def _bool_op(codes: list[ast.expr], operator: ast.boolop, *, neutral: bool) -> ast.expr:
    kept: list[ast.expr] = []
    for code in codes:
        if isinstance(code, ast.Constant):
            if bool(code.value) is neutral:
                continue
            return ast.Constant(not neutral)
        kept.append(code)
    if not kept:
        return ast.Constant(neutral)
    return kept[0] if len(kept) == 1 else ast.BoolOp(operator, kept)


def if_(test: ast.expr, yes: ast.expr, no: ast.expr) -> ast.expr:
    if isinstance(test, ast.Constant):
        return yes if test.value else no
    return ast.IfExp(test, yes, no)


def load_field(document: ast.expr, steps: tuple[Step, ...], inline_steps_max: int) -> ast.expr:
    """Reads a field: plain `get`s and subscripts while the types fit the path, else `value_at`."""
    if len(steps) > inline_steps_max:
        return call(name("value_at"), document, constant(steps))
    here = method(document, "get", ast.Constant(steps[0]))
    return _load_below(here, steps[1:], 0)


def _load_below(here: ast.expr, steps: tuple[Step, ...], depth: int) -> ast.expr:
    if not steps:
        return here
    step = steps[0]
    held = name(f"s{depth}")
    test: ast.expr = call(name("type"), ast.NamedExpr(ast.Name(f"s{depth}", ast.Store()), here))
    if isinstance(step, str):
        inner = method(held, "get", ast.Constant(step))
        guard = compare(test, ast.Is(), name("dict"))
        return ast.IfExp(
            guard,
            _load_below(inner, steps[1:], depth + 1),
            _and_value(held, call(name("value_at"), held, constant(steps))),
        )
    return call(name("value_at"), here, constant(steps))


def _and_value(held: ast.expr, value: ast.expr) -> ast.expr:
    """Passes None on without a call."""
    return ast.IfExp(compare(held, ast.Is(), ast.Constant(None)), ast.Constant(None), value)
