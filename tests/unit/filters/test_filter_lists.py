"""IN of expressions: what it means, and that it cannot make a filter grow."""

from __future__ import annotations

import pytest

from sow_server.filters import FilterError, Meta, compile_filter, parse, print_filter
from sow_server.filters.parser import NESTING_MAX

META = Meta("k", 1, 1, None, "t", 1)


@pytest.mark.parametrize(
    ("text", "document", "matches"),
    [
        ("/a IN (/b, 'x')", {"a": 1, "b": 1}, True),
        ("/a IN (/b, 'x')", {"a": "x"}, True),
        ("/a IN (/b, 'x')", {"a": "y", "b": "z"}, False),
        ("/a NOT IN (/b, 'x')", {"a": "y", "b": "z"}, True),
        ("/a NOT IN (/b, 'x')", {"a": "y"}, False),
        ("/a NOT IN (/b, 'x')", {"a": "x", "b": "z"}, False),
        ("/a IN (/b + 1, LOWER(/c), 7)", {"a": 3, "b": 2}, True),
        ("/a IN (/b + 1, LOWER(/c), 7)", {"a": "q", "c": "Q"}, True),
        ("/a IN (/b)", {"a": [1, 2], "b": [2, 3]}, True),
        ("/a IN (-(1), - 5)", {"a": -5}, True),
        ("INSTR(/a, 'n') = 2 AND REVERSE(/a) = 'ano'", {"a": "ona"}, True),
        ("INSTR(/a, 'x') = 0 AND INSTR(/a, '') = 1", {"a": "ona"}, True),
        ("INSTR(/b, 'x') = 0", {"a": "ona"}, False),
        ("FORMAT_TIME(DATE_MICROS(/a), '%Y-%m') = '2030-01'", {"a": "2030-01-31T12:00:00Z"}, True),
        ("FORMAT_TIME(DATE_MICROS(/a), '%Y-%m') IS NULL", {"a": "tomorrow"}, True),
    ],
)
def test_a_list_may_hold_any_value(text: str, document: dict[str, object], matches: bool) -> None:
    tree = parse(text)
    assert compile_filter(tree).matches(document, META) is matches
    assert parse(print_filter(tree)) == tree


def test_literals_stay_one_list_that_an_index_serves() -> None:
    assert print_filter(parse("/a in (1, 'x', -2)")) == "/a IN (1, 'x', -2)"
    assert print_filter(parse("/a in (1, /b, 2)")) == "/a IN (1, 2) OR /a = /b"
    assert print_filter(parse("/a not in (/b)")) == "NOT /a = /b"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("(" * 40 + "/a" + " IN (/b, /c))" * 40, "more conditions and functions than the limit"),
        ("/[" + "n" * 30_000 + "] IN (/b" + ", /b" * 5_000 + ")", "longer than the limit of 65536 bytes"),
        ("LOWER(/a) IN (/b" + ", /b" * 250 + ")", "more functions than the limit of 250"),
        ("/a IN (/b" + ", /b" * 6_000 + ")", "more conditions and functions than the limit of 6000"),
        ("/a IN (" + "(" * NESTING_MAX + "/b" + ")" * NESTING_MAX + ")", "nested deeper"),
        ("/a IN (" + "1," * 10_000 + "1)", "a list of 10001"),
    ],
)
def test_an_operand_counts_once_for_each_value_of_its_list(text: str, what: str) -> None:
    """Lists in operands of lists doubled a filter with every ten characters: forty of them are a terabyte."""
    with pytest.raises(FilterError, match=what):
        parse(text)
