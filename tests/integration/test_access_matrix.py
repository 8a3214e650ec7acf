"""The rights of every kind of caller for every method that is served (rules A1 to A7), against a table that people have
reviewed: `access_matrix.txt`, which says how it is rewritten."""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from google.protobuf.message import Message

from sow.v1 import sow_pb2
from sow_server.access.needs import NEEDS
from tests.support.oracles.access_cases import CASES, OWNER, Case, Things
from tests.support.oracles.access_matrix import IDENTITIES, STRANGERS, World, full_name, table
from tests.support.oracles.methods import METHODS, path_of

GOLDEN: Final = Path(__file__).with_name("access_matrix.txt")
REWRITE: Final = "SOW_REWRITE_TABLES"
REACHES_ALL: Final = frozenset({"all", "operator"})
"""The callers that reach things of other owners."""
MISSING: Final = "missing"
"""A topic that is not there."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("matrix")) as made:
        yield made
        assert not made.server.faults()


@pytest.fixture(scope="module")
def found(world: World) -> str:
    return table(world)


def test_every_method_that_is_served_has_its_row() -> None:
    assert {full_name(case.method) for case in CASES} == set(METHODS)
    assert {path_of(method) for method in METHODS.values()} <= set(NEEDS)


def test_every_caller_gets_what_the_table_says(found: str) -> None:
    if os.environ.get(REWRITE):
        GOLDEN.write_text(found)
    reviewed = GOLDEN.read_text().splitlines()
    difference = "\n".join(difflib.unified_diff(reviewed, found.splitlines(), "reviewed", "found", lineterm=""))
    assert not difference, f"rights have changed; review, and rewrite the table with {REWRITE}=1:\n{difference}"


@pytest.mark.usefixtures("found")
def test_what_belongs_to_another_is_left_as_it_is(world: World) -> None:
    """An answer that something does not exist, or is gone already, tells nothing if it is gone indeed."""
    for caller in (*STRANGERS, *IDENTITIES):
        if caller not in REACHES_ALL:
            assert world.has_durable(OWNER, f"doomed-{caller}"), caller
            assert world.has_load(OWNER, world.things[caller].loads["another's"]), caller
            assert world.has_export(OWNER, world.things[caller].exports["another's"]), caller
    assert not world.has_load(OWNER, world.things["all"].loads["another's"])
    assert not world.has_export(OWNER, world.things["all"].exports["another's"])


def _about_a_missing_topic(request: Message) -> Message | None:
    """The same request about a topic that is not there; None: it names none."""
    field = "topic" if "topic" in request.DESCRIPTOR.fields_by_name else "name"
    named = getattr(request, field, "")
    if "Policy" in request.DESCRIPTOR.name or not (named in ("orders", "loaded") or named.startswith("doomed-")):
        return None
    other = type(request)()
    other.CopyFrom(request)
    setattr(other, field, MISSING)
    return other


NOTHING: Final = Things("nobody", defaultdict(str), defaultdict(str))
ABOUT_TOPICS: Final = [case for case in CASES if _about_a_missing_topic(case.request(NOTHING)) is not None]


@pytest.mark.parametrize("case", ABOUT_TOPICS, ids=lambda case: case.name)
def test_a_topic_without_any_grant_is_told_as_one_that_is_not_there(world: World, case: Case) -> None:
    request = case.request(world.things["nobody"])
    other = _about_a_missing_topic(request)
    assert other is not None, "the case is chosen by that"
    for caller in ("nobody", "elsewhere", "denied"):
        there, missing = world.call(caller, case.method, request), world.call(caller, case.method, other)
        named = request.topic if hasattr(request, "topic") else request.name  # type: ignore[attr-defined]  # one of them
        answers = [type(one).FromString(one.SerializeToString()) for one in there.answers]
        for answer in answers:
            if isinstance(answer, sow_pb2.PublishStreamResponse):  # each record is refused, and the call is not
                for refusal in answer.refusals:
                    refusal.message = refusal.message.replace(named, MISSING)
        assert there._replace(text=there.text.replace(named, MISSING), answers=answers) == missing
