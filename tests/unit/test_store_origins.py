"""docs/origins.md names tests that exist, and they name its rows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ROW: Final = re.compile(r"\| (?P<row>[A-Z]\d+) \|.*\| (?P<tests>[^|]*) \|")


def docstrings() -> dict[str, str]:
    """The docstring of every test function."""
    found: dict[str, str] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[node.name] = ast.get_docstring(node) or ""
    return found


def rows() -> dict[str, str]:
    """What stands in the last column of every row."""
    text = (ROOT / "docs" / "origins.md").read_text()
    return {match["row"]: match["tests"].strip() for match in map(ROW.fullmatch, text.splitlines()) if match}


def test_every_row_has_a_test_or_says_later() -> None:
    unclear = [row for row, tests in rows().items() if tests != "later" and not re.fullmatch(r"(`\w+`(, )?)+", tests)]
    assert unclear == []
    assert len(rows()) == 15 + 8 + 6 + 10 + 13


def test_every_test_that_is_named_exists_and_names_its_row() -> None:
    known = docstrings()
    for row, tests in rows().items():
        for name in re.findall(r"`(\w+)`", tests):
            assert name in known, f"{row}: there is no test {name}"
            assert re.search(rf"\b{row}\b", known[name]), f"{name} does not name {row}"
