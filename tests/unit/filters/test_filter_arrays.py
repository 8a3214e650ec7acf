"""Comparisons of two arrays, and functions of values that are missing or at an end of their range."""

from __future__ import annotations

import math

import pytest

from sow_server.filters import Meta, compile_filter, parse
from sow_server.filters.cost import cost_of

META = Meta("k", 1, 1, None, "t", 1)


def matches(text: str, **document: object) -> bool:
    return compile_filter(parse(text)).matches(document, META)


@pytest.mark.parametrize(
    ("one", "operator", "other", "truth"),
    [
        ([1, 2], "!=", [1], True),
        ([1], "!=", [1], False),
        (["a"], "!=", ["a", "b"], True),
        ([1, 5], ">", [3, 9], True),
        ([1, 3], ">", [3, 9], False),
        ([1, 3], ">=", [3, 9], True),
        ([9, 3], "<", [3, 1], False),
        ([9, 3], "<=", [3, 1], True),
        (["b"], ">", ["a", "c"], True),
        (["5"], ">", [3], True),
        ([4], ">", ["5", "3"], True),
        ([True], ">", [False], True),
        ([], "!=", [1], False),
        ([1], "=", [2, 1], True),
    ],
)
def test_two_arrays_compare_if_any_pair_does(
    one: list[object], operator: str, other: list[object], truth: bool
) -> None:
    assert matches(f"/a {operator} /b", a=one, b=other) is truth
    pairs = any(matches(f"/a {operator} /b", a=x, b=y) for x in one for y in other)
    assert pairs is truth, "as each with each"


@pytest.mark.parametrize(
    "text",
    [
        "5.5 % 2 = 1.5",
        "-5.5 % 2 = -1.5",
        "-5 % 2 = -1",
        "5 % 0 IS NULL",
        "/huge % 2 IS NULL",
        "ROUND(/huge, 2) = /huge",
        "SUBSTR(/missing, 1) IS NULL",
        "SUBSTR(/name, /missing) IS NULL",
        "SUBSTR(/name, 1, /missing) IS NULL",
        "SUBSTR(/name, -2) = 'cd'",
        "SUBSTR(/name, 0, -5) = ''",
    ],
)
def test_a_function_at_the_end_of_its_range(text: str) -> None:
    assert matches(text, huge=math.inf, name="abcd")


def test_a_function_of_a_long_text_costs_more_than_one_of_a_short_text() -> None:
    """Work is shared out by its estimate, also of texts that stand in the filter."""
    for call in ("REVERSE({})", "INSTR(/a, {})", "INSTR({}, /a)", "LOWER({})", "TRIM({})"):
        short, long = (cost_of(parse(f"{call.format(repr('x' * size))} = 'y'")) for size in (1, 5_000))
        assert long.once > short.once, call
    time = cost_of(parse("DATE_MICROS(/a) = 1"))
    assert time.once > cost_of(parse("ABS(/a) = 1")).once, "a time is parsed"
    formatted = cost_of(parse("REVERSE(FORMAT_TIME(/a, '%Y')) = 'x'"))
    assert formatted.once > cost_of(parse("REVERSE(/a) = 'x'")).once, "a format makes long texts"
