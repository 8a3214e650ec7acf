"""The newcomer's walk in CONTRIBUTING.md leads through code that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEADING = "## A newcomer's walk\n"
STEP = re.compile(r"^(\d+)\. `([^`]+\.py)` `([^`]+)`", re.MULTILINE)


def steps() -> list[tuple[str, str, str]]:
    """The number, the file and the function of each step."""
    _, heading, below = (ROOT / "CONTRIBUTING.md").read_text().partition(HEADING)
    assert heading, "the section is missing"
    section = below.partition("\n## ")[0]
    found = STEP.findall(section)
    assert len(found) == len(re.findall(r"^\d+\. ", section, re.MULTILINE)), "each step names a file and a function"
    return found


def test_the_walk_has_ten_steps() -> None:
    assert [number for number, _, _ in steps()] == [str(number) for number in range(1, 11)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "file", "function"), steps())
def test_each_step_of_the_walk_names_a_function_that_exists(number: str, file: str, function: str) -> None:
    del number  # it names the case
    scope: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for name in function.split("."):
        named = [node for node in scope if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        found = [node for node in named if node.name == name]
        assert found, f"{file} has no {function}"
        scope = found[0].body
