"""Docstrings of the public API are complete: ids of rules stand at their ends only, for who wants the exact promise."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest

import sow_client

RULES = re.compile(r"Rules?: [A-Z]\d+(?:(?:, | to )[A-Z]\d+)*\.")
ID = re.compile(r"\b[A-Z]\d{1,2}\b")


def docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of public classes and functions, with their names."""
    for name in sow_client.__all__:
        value = getattr(sow_client, name)
        if not inspect.isclass(value):
            continue
        yield name, inspect.getdoc(value) or ""
        yield f"{name}.__init__", inspect.getdoc(value.__init__) or ""
        for member in dir(value):
            if not member.startswith("_"):
                yield f"{name}.{member}", inspect.getdoc(inspect.getattr_static(value, member)) or ""


def test_the_ids_of_rules_stand_at_the_ends_of_docstrings() -> None:
    """Story: help(client.publish) said "(P3)", which tells nobody what a condition is."""
    wrong = [name for name, text in docstrings() if ID.search(RULES.sub("", text)) or text.count("Rule") > 1]
    assert not wrong
    ends = [text for _, text in docstrings() if RULES.search(text)]
    assert len(ends) > 100
    assert all(RULES.fullmatch(text.rstrip()[text.rindex("Rule") :]) for text in ends)


@pytest.mark.parametrize("name", ["publish", "query", "subscribe", "get_many"])
def test_each_argument_of_the_main_calls_is_explained(name: str) -> None:
    method = getattr(sow_client.Client, name)
    text = inspect.getdoc(method) or ""
    of_others = {"self", "topic", "filter", "settings", "key", "data"}
    named = set(inspect.signature(method).parameters) - of_others
    assert {one for one in named if f"`{one}`" not in text and one not in text} == set()
