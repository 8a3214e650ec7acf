"""A handler reaches a topic through its call, and in no other way (access [3]): what no import contract can say."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from sow_server.access.needs import NEEDS, Scope

ROOT: Final = Path(__file__).parents[3]
SERVICES: Final = ROOT / "sow_server" / "services"
FINDS_TOPICS: Final = {"by_name", "by_id"}
MAY_FIND: Final[dict[str, set[str]]] = {
    # They get a request that a handler has had permitted, and look at the quotas of its topic.
    "submissions.py": {"by_name"},
    "admission.py": {"by_name", "by_id"},
    # It samples all topics on a timer; a call gets from it the samples of the topics that it names.
    "figure_history.py": {"by_name"},
    # It has the topics counted that are placed in other cells, for the cell that asks.
    "placement_service.py": set(),
}
DECIDES: Final = {"topic", "require", "require_create", "part_of", "topics", "seen"}
"""Methods of a call that decide about topics."""
OWNED: Final = {"own_name", "owns", "shown_name"}
HELPERS: Final = {"permit_publish", "permit_load", "permit_touch", "_check_owner", "_granted", "_owned", "_read_stream"}
"""Functions that ask the call in place of a handler."""


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(SERVICES.rglob("*.py"))]


@pytest.mark.slow
def test_no_service_finds_a_topic_by_itself() -> None:
    found = {
        (path.name, node.attr)
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in FINDS_TOPICS
    }
    assert found == {(name, attribute) for name, attributes in MAY_FIND.items() for attribute in attributes}


def takes_topics(node: ast.AST) -> bool:
    """Whether code takes the registry of topics: `Topics` finds topics by name, and `Topic` is what a call gives."""
    match node:
        case ast.ImportFrom(names=names):
            return any(name.name == "Topics" for name in names)
        case ast.Attribute(value=ast.Name(id=door) | ast.Attribute(attr=door), attr="topics"):
            return door.lstrip("_") in ("reads", "reading")
    return False


def test_no_service_has_the_registry_of_topics() -> None:
    found = {path.name for path, tree in trees() if any(map(takes_topics, ast.walk(tree)))}
    assert found == set(MAY_FIND)


@cache
def handlers() -> list[tuple[str, ast.AST]]:
    methods = {path.rpartition("/")[2] for path in NEEDS}
    return [
        (function.name, function)
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Service")
        for function in node.body
        if isinstance(function, ast.AsyncFunctionDef) and function.name in methods
    ]


def asks(handler: ast.AST, methods: set[str]) -> bool:
    """Whether a handler calls one of these methods of its `call`, or a helper that does."""
    for node in ast.walk(handler):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id="call"), attr=attribute) if attribute in methods:
                return True
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in HELPERS:
                return True
    return False


OF_TOPICS: Final = sorted(
    path.rpartition("/")[2] for path, need in NEEDS.items() if need.scope is Scope.TOPIC and path.startswith("/sow.v1.")
)


@pytest.mark.parametrize("method", OF_TOPICS)
def test_each_handler_of_topics_asks_its_call(method: str) -> None:
    (handler,) = [handler for name, handler in handlers() if name == method]
    assert asks(handler, DECIDES | (OWNED if method == "CloseExport" else set())), "closing an export shows nothing"


OF_THE_CALLER: Final = sorted(
    path.rpartition("/")[2] for path, need in NEEDS.items() if need.scope is Scope.KNOWN and path.startswith("/sow.v1.")
)


@pytest.mark.parametrize("method", sorted({*OF_THE_CALLER} - {"WhoAmI", "DescribeInstance"}))
def test_each_handler_for_everybody_shows_what_is_the_callers(method: str) -> None:
    (handler,) = [handler for name, handler in handlers() if name == method]
    assert asks(handler, DECIDES | OWNED)
