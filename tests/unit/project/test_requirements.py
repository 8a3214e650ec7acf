"""requirements/*.txt: complete, within the bounds of pyproject.toml, with hashes, and without the name of an index."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml
from packaging.requirements import Requirement

from tools.requirements import BUILD, FILES, FOLDER, ROOT, name_of

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PIN: Final = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;]+)((?: ;[^\\]*)?) \\$")


def _text(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def _needed(name: str) -> Iterator[Requirement]:
    if name == BUILD:
        yield from map(Requirement, PROJECT["build-system"]["requires"])
        return
    extras = PROJECT["project"]["optional-dependencies"]
    for of in (PROJECT["project"]["dependencies"], *(extras[extra] for extra in FILES[name])):
        yield from map(Requirement, of)


@pytest.mark.parametrize("name", [*FILES, BUILD])
def test_a_file_has_what_is_needed_at_versions_that_are_allowed(name: str) -> None:
    pinned: dict[str, list[str]] = {}
    for line in _text(name).splitlines():
        if found := PIN.match(line):
            pinned.setdefault(name_of(found[1]), []).append(found[2])
    for requirement in _needed(name):
        versions = pinned[name_of(requirement.name)]
        assert all(requirement.specifier.contains(version, prereleases=True) for version in versions), requirement


@pytest.mark.parametrize("name", [*FILES, BUILD])
def test_each_pin_has_hashes_and_no_line_names_an_index(name: str) -> None:
    lines = [line for line in _text(name).splitlines() if not line.startswith("#")]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(" "):
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?", line), line
        else:
            assert PIN.match(line), line
            assert following.startswith("    --hash="), line


def test_the_workflow_runs_the_checks_and_the_tests_with_each_supported_python() -> None:
    jobs = yaml.safe_load(Path(ROOT, ".github", "workflows", "tests.yml").read_text(encoding="utf-8"))["jobs"]
    runs = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    assert ".ci/run" in runs["check"]
    assert "make PYTHON=python test" in runs["tests"]
    assert ["3.11", *jobs["tests"]["strategy"]["matrix"]["python"]] == ["3.11", "3.12", "3.13", "3.14"]


def test_the_oldest_pyspark_and_those_after_it_are_tested() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    jobs = yaml.safe_load(Path(ROOT, ".github", "workflows", "tests.yml").read_text(encoding="utf-8"))["jobs"]
    (tested,) = re.findall(r"^PYSPARK \?= (.+)$", makefile, re.MULTILINE)
    (pyspark,) = (one for one in _needed("spark") if one.name == "pyspark")
    (newest,) = (found[2] for found in map(PIN.match, _text("spark").splitlines()) if found and found[1] == "pyspark")
    major, minor = map(int, newest.split(".")[:2])
    first = int(str(pyspark.specifier).removeprefix(f">={major}."))
    assert tested.split() == [f"{major}.{number}" for number in range(first, minor)]
    assert tested.split() == jobs["spark"]["strategy"]["matrix"]["pyspark"]
    assert "$(MAKE) test-spark-versions" in makefile.split("\ntest-long:")[1].split("\n\n")[0]
