"""The rest of the server imports from the engine only what is listed here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

import sow_server
from sow_server.engine.doors import Reads, Writes

SERVER: Final = Path(sow_server.__file__).parent
ENGINE: Final = "sow_server.engine"
OPEN_ROOMS: Final = (
    "values",
    "formats",
    "stored",
    "catalog.indexes",
    "commit.soundness",
    "journal",
    "durables",
    "loads",
    "replicas",
)
"""Rooms and modules from which everything may be imported."""
OFFERED: Final[Mapping[str, tuple[str, ...]]] = {
    "catalog.topics": (
        "UNDELIVERED",
        "KnownOrigins",
        "Topic",
        "Topics",
        "check_name",
        "check_settings",
        "topic_deleted",
    ),
    "commit.commits": ("Commits",),
    "commit.observers": ("Committed",),
    "commit.options": ("WriterOptions",),
    "commit.pace": ("CallsUnderWay",),
    "commit.reclaim": ("RECLAIM_RECORDS",),
    "commit.requests": ("RequestLimits", "payload_key"),
    "derived.plans": ("Computed", "Entries", "Group", "Grouped", "Row", "Share"),
    "doors": ("Reads", "Writes"),
    "durables.commits": ("DurableCommits",),
    "following": ("Beats", "Follower", "Moment", "TopicImage"),
    "opening": ("claim_directory", "holds_data", "in_use"),
    "pending": ("Pending", "answered"),
    "reading": ("Counts", "Cut", "CutSource", "Cuts", "ManyCut"),
    "store": ("Store", "StoreOptions"),
    "upkeep": ("KeptPlacement",),
    "values.errors": ("OpenError", "Reason", "StoreError"),
}
"""The names of other modules that may be imported from there."""


@functools.cache
def outside() -> Mapping[str, Sequence[ast.AST]]:
    """The nodes of each file of the rest of the server."""
    return {
        file.relative_to(SERVER).as_posix(): list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        for file in sorted(SERVER.rglob("*.py"))
        if not file.is_relative_to(SERVER / "engine")
    }


def imports_from_outside() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of every import of the engine by the rest of the server."""
    for file, nodes in outside().items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    if f"{node.module}.".startswith(f"{ENGINE}."):
                        yield file, node.module, alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if f"{alias.name}.".startswith(f"{ENGINE}."):
                        yield file, alias.name, ""


def is_open(module: str, name: str) -> bool:
    """Whether an import is one of an open room, or of an offered name."""
    path = f"{module}.{name}".removeprefix(f"{ENGINE}.")
    if any(f"{path}.".startswith(f"{room}.") for room in OPEN_ROOMS):
        return True
    return any(path == f"{home}.{offered}" for home, names in OFFERED.items() for offered in names)


def test_each_open_room_is_a_room_of_the_engine() -> None:
    assert all(importlib.import_module(f"{ENGINE}.{room}") for room in OPEN_ROOMS)


@pytest.mark.slow
def test_the_rest_of_the_server_imports_only_names_that_the_engine_offers() -> None:
    found = list(imports_from_outside())
    assert len(found) > 100, "the imports are found"
    closed = [f"{file}: {module} {name}" for file, module, name in found if not is_open(module, name)]
    assert closed == []


def test_only_the_modules_that_link_the_server_know_the_whole_store() -> None:
    """Every other module is handed the parts that it uses."""
    holders = {file for file, _, name in imports_from_outside() if name == "Store"}
    assert holders == {"app.py", "declaring.py", "linking.py"}


def parts_taken() -> Iterator[tuple[str, set[str]]]:
    """(class, the doors and the parts of a door that its constructor takes) of each class outside of the engine."""
    names = {door.__name__ for door in (Reads, Writes)} | {
        str(part.type) for door in (Reads, Writes) for part in dataclasses.fields(door)
    }
    for file, nodes in outside().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                for made in node.body:
                    if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                        arguments = [*made.args.args, *made.args.kwonlyargs]
                        taken = {ast.unparse(one.annotation) for one in arguments if one.annotation is not None}
                        yield f"{file} {node.name}", taken & names


def test_who_takes_two_parts_of_the_store_takes_the_doors() -> None:
    doors = {"Reads", "Writes"}
    taken = list(parts_taken())
    assert sum(bool(found & doors) for _, found in taken) > 20, "the holders of doors are found"
    assert [(name, found) for name, found in taken if len(found) > 1 and found - doors] == []


def test_the_inside_of_the_engine_is_closed() -> None:
    """The test above can fail."""
    assert not is_open(f"{ENGINE}.commit.draft", "Draft")
    assert not is_open(f"{ENGINE}.disk", "rocks")
    assert is_open(f"{ENGINE}.values", "model")
