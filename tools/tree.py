"""The files of this project that the checks in this folder read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A package of Python: its name, and the folder of this project that it lies in."""

    name: str
    folder: str

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}".removeprefix("/")


PACKAGES = (
    Package("sow_server", ""),
    Package("sow", "proto"),
    Package("sow_client", "clients"),
    Package("sow_cli", "clients"),
    Package("sow_pytest", "clients"),
    Package("sow_peering", "replication"),
    Package("sow_replication", "replication"),
    Package("sow_spark", "spark_connector"),
    Package("pyspark_sow", "spark_connector"),
    Package("tools", ""),
    Package("benchmarks", ""),
    Package("examples", ""),
    Package("tests", ""),
)
_SINGLE_FILES = ("proto/generate.py", "clients/generate_blocking.py")
_OTHERS = (
    *("*.md", "docs/**/*.md", "benchmarks/*.md", "spark_connector/*.md", "clients/typescript/*.md"),
    *("proto/**/*.proto", "tests/mutants/*.patch", "Makefile", "pyproject.toml"),
)
_HEADER_CHARS = 400


class Finding(NamedTuple):
    """A fault, and the line that shows it."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def python_files(root: Path) -> Iterator[Path]:
    """All files of Python, without generated ones."""
    for package in PACKAGES:
        for file in sorted((root / package.path).rglob("*.py")):
            if not is_generated(file):
                yield file
    yield from (root / name for name in _SINGLE_FILES if (root / name).exists())


def other_files(root: Path) -> Iterator[Path]:
    """Pages, contracts, planted mistakes and settings: all other files that cite rules."""
    for pattern in _OTHERS:
        yield from sorted(root.glob(pattern))


def is_generated(file: Path) -> bool:
    """A generated file says so in a comment at its head."""
    with file.open(encoding="utf-8") as lines:
        head = lines.read(_HEADER_CHARS)
    return any(line.startswith("#") and "generated" in line.lower() for line in head.splitlines())
