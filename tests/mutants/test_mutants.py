"""The planted mistakes are described, and the tests that they name exist. `make mutants` plants them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.run import CHECK, FOLDER, ROOT, BadPatch, read, read_all

MUTANTS_MIN = 30


def test_every_planted_mistake_names_tests_that_exist() -> None:
    mutants = read_all()
    assert len(mutants) >= MUTANTS_MIN
    for mutant in mutants:
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), f"{mutant.name}: {test}"
    assert (ROOT / CHECK).exists()
    assert not [mistake for mistake, count in Counter(mutant.mistake for mutant in mutants).items() if count > 1]


def test_every_planted_mistake_changes_the_product_and_no_test() -> None:
    for path in FOLDER.glob("*.patch"):
        changed = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("+++ ")]
        assert changed
        for name in changed:
            assert name.startswith("b/")
            assert not name.startswith("b/tests/"), path.name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Mistake: a\nLayer: b\nBreaks: c\nCaught by: d\n", "there is no patch"),
        ("Mistake: a\nLayer: b\nBreaks: c\n\n--- a/x\n", "'Caught by' is missing"),
        ("Mistake: a\nWhy: b\n\n--- a/x\n", "'Why: b' is none"),
    ],
)
def test_a_description_that_is_not_whole_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "one.patch").write_text(text)
    with pytest.raises(BadPatch, match=why):
        read(tmp_path / "one.patch")
