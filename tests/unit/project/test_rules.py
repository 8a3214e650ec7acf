"""Every rule that code, contract and documents cite can be looked up in docs/rules.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CITED = re.compile(r"\brules? ((?:[A-Z]\d+)(?:(?:,| and| to|, and) [A-Z]\d+)*)")
STATED = re.compile(r"^\*\*([A-Z]\d+) · ", re.MULTILINE)


@pytest.mark.slow
def test_a_rule_that_is_cited_is_stated() -> None:
    stated = set(STATED.findall((ROOT / "docs/rules.md").read_text()))
    cited: dict[str, str] = {}
    for folder, pattern in (
        ("sow_server", "*.py"),
        ("clients", "*.py"),
        ("clients/typescript/src", "*.ts"),
        ("proto/sow", "*.py"),
        ("proto/sow", "*.proto"),
        ("docs", "*.md"),
    ):
        for file in (ROOT / folder).rglob(pattern):
            for ids in CITED.findall(file.read_text()):
                for rule in re.findall(r"[A-Z]\d+", ids):
                    cited.setdefault(rule, str(file.relative_to(ROOT)))
    assert len(cited) > 30
    assert {rule: file for rule, file in cited.items() if rule not in stated} == {}


def test_a_rule_is_stated_once() -> None:
    stated = STATED.findall((ROOT / "docs/rules.md").read_text())
    assert len(stated) == len(set(stated))
