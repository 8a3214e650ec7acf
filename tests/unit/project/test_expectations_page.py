"""docs/expectations.md: every expectation has an answer and a place; test_docs_site.py follows its links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[3] / "docs" / "expectations.md"
EXPECTATIONS: Final = 71
"""As many as were tried by users of the systems that the page names."""


def test_each_expectation_has_one_answer_and_a_link() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("| expected |")[2]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    asked = [[cell.strip() for cell in row] for row in rows if not row[0].strip().startswith("**")]
    for expected, known_from, answer, where in asked:
        assert answer in ("yes", "partly", "no"), expected
        assert known_from, expected
        assert "](" in where, expected
    assert [name for name, count in Counter(row[0] for row in asked).items() if count > 1] == []
    assert len(asked) == EXPECTATIONS
