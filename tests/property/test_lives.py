"""The program that lives many lives: each of them is the same alone, and its failure is told (see `tests/lives.py`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import lives
from tests.lives import KINDS, Life, live

pytestmark = pytest.mark.simulation

SHORT = ("leases",)
"""The default tests live this kind, which takes least."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.long) for kind in KINDS]
)
def test_a_life_is_the_same_alone_and_behind_another(kind: str) -> None:
    alone, behind, both = live([Life(kind, 1)]), live([Life(kind, 2)]), live([Life(kind, 1), Life(kind, 2)])
    assert not both.failures
    assert alone.figures + behind.figures == both.figures
    assert both.figures


def test_a_life_that_fails_is_told_and_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seed: int, folder: Path) -> Counter[str]:
        assert seed != 1, "the first one"
        return Counter(lived=1)

    monkeypatch.setitem(KINDS, "failing", fails)
    lived = live([Life("failing", 1), Life("failing", 2)])
    assert list(lived.failures) == [Life("failing", 1)]
    assert "the first one" in lived.failures[Life("failing", 1)]
    assert lived.figures == Counter(lived=1)
    assert lives._again(Life("failing", 1)).endswith("--only failing --seed 1 --lives 1")
