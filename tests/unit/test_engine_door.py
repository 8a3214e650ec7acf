"""The rest of the server imports from the engine only the names and rooms that its `__init__.py` offers."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import sow_server
from sow_server import engine

SERVER: Final = Path(sow_server.__file__).parent
ENGINE: Final = "sow_server.engine"


def imports_from_outside() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of every import of the engine by the rest of the server."""
    for file in sorted(SERVER.rglob("*.py")):
        if file.is_relative_to(SERVER / "engine"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    if f"{node.module}.".startswith(f"{ENGINE}."):
                        yield file.relative_to(SERVER).as_posix(), node.module, alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if f"{alias.name}.".startswith(f"{ENGINE}."):
                        yield file.relative_to(SERVER).as_posix(), alias.name, ""


def is_open(module: str, name: str) -> bool:
    """Whether an import is one of an open room, or of an offered name."""
    path = f"{module}.{name}".removeprefix(f"{ENGINE}.")
    if any(f"{path}.".startswith(f"{room}.") for room in engine.OPEN_ROOMS):
        return True
    if name not in engine.__all__:
        return False
    found: object = getattr(importlib.import_module(module), name)
    return found is getattr(engine, name)


def test_the_engine_offers_each_name_once_and_in_order() -> None:
    offered = list(engine.__all__)
    assert len(offered) == len(set(offered))
    assert all(hasattr(engine, name) for name in offered)


def test_each_open_room_is_a_room_of_the_engine() -> None:
    assert all(importlib.import_module(f"{ENGINE}.{room}") for room in engine.OPEN_ROOMS)


def test_the_rest_of_the_server_imports_only_names_that_the_engine_offers() -> None:
    found = list(imports_from_outside())
    assert len(found) > 100, "the imports are found"
    closed = [f"{file}: {module} {name}" for file, module, name in found if not is_open(module, name)]
    assert closed == []


def test_only_the_modules_that_link_the_server_know_the_whole_store() -> None:
    """Every other module is handed the parts that it uses."""
    holders = {file for file, _, name in imports_from_outside() if name == "Store"}
    assert holders == {"app.py", "linking.py"}


def test_the_inside_of_the_engine_is_closed() -> None:
    """The test above can fail."""
    assert not is_open(f"{ENGINE}.commit.draft", "Draft")
    assert not is_open(f"{ENGINE}.disk", "rocks")
    assert is_open(f"{ENGINE}.values", "model")
