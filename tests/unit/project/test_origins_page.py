"""docs/origins.md: beside each behaviour of the other systems stands a test that exists, runs, and names its row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = (
    [f"AMPS {number}" for number in range(1, 16)]
    + [f"FTL {number}" for number in range(1, 9)]
    + [f"arrebato {number}" for number in range(1, 7)]
    + [f"Pulsar {number}" for number in range(1, 11)]
    + [f"RabbitMQ {number}" for number in range(1, 14)]
    + [f"Lifetime {number}" for number in range(1, 7)]
    + [f"Elsewhere {number}" for number in range(1, 6)]
    + [f"Access {number}" for number in range(1, 8)]
)


@cache
def table() -> dict[str, tuple[str, str, list[str]]]:
    """Behaviour, rule and names of tests, by row."""
    found: dict[str, tuple[str, str, list[str]]] = {}
    for line in (ROOT / "docs" / "origins.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[A-Za-z]+ [0-9]+", cells[0]):
            row, behaviour, rule, tests = cells
            assert row not in found, f"{row} stands twice"
            found[row] = (behaviour, rule, re.findall(r"`(test_\w+)`", tests))
    return found


@cache
def docstrings() -> dict[str, str]:
    """The docstring of every test of the default suite in the files that define one of the page's tests."""
    named = {name for _, _, names in table().values() for name in names}
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if named.isdisjoint(re.findall(r"def (test_\w+)\(", text)):
            continue
        module = ast.parse(text)
        for test in _functions(module):
            marks = [ast.unparse(mark) for mark in test.decorator_list]
            if not any(mark.startswith(("pytest.mark.long", "pytest.mark.skip")) for mark in marks):
                found[test.name] = ast.get_docstring(test) or ""
    return found


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in module.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
                yield inner


def test_every_row_is_there_in_order() -> None:
    assert list(table()) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_its_rule_and_tests_that_name_it(row: str) -> None:
    behaviour, rule, names = table()[row]
    assert behaviour
    assert rule
    assert names, f"{row} has no test"
    for name in names:
        assert name in docstrings(), f"{row}: there is no test {name} in the default suite"
        assert re.search(rf"\b{row}\b", docstrings()[name]), f"{row}: the docstring of {name} does not name it"
