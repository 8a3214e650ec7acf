"""How far a delete is atomic (rule D2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.disk.rocks import COMMITS
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import decode_commit
from sow_server.engine.values.model import Delete, Publish
from tests.support.stores.stores import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_records_max=10)))
    rig.create_topic("orders")
    yield rig
    rig.close()


def runs(rig: Rig) -> list[int]:
    """How many changes each commit has."""
    commits = [decode_commit(key, value) for key, value in rig.rows(COMMITS)]
    return [commit.last_sequence - commit.first_sequence + 1 for commit in commits]


def test_a_delete_is_not_split_because_it_came_behind_other_requests(rig: Rig) -> None:
    """The rest of a commit that publishes had begun was once filled with the first part of a delete."""
    keys = [str(index) for index in range(10)]
    rig.run(Publish("orders", [b"x"] * 10, keys))
    rig.run_together([Publish("orders", [b"x"] * 6, list("abcdef")), Delete("orders", keys)])
    assert runs(rig) == [10, 6, 10]


def test_a_small_delete_shares_its_commit(rig: Rig) -> None:
    rig.run(Publish("orders", [b"x"] * 2, ["1", "2"]))
    rig.run_together([Publish("orders", [b"x"] * 6, list("abcdef")), Delete("orders", ["1", "2"])])
    assert runs(rig) == [2, 8]


def test_a_delete_of_more_than_a_commit_takes_several(rig: Rig) -> None:
    keys = [f"{index:02}" for index in range(25)]
    rig.run(Publish("orders", [b"x"] * 25, keys))
    (outcome,) = rig.run_together([Delete("orders", keys)])
    assert runs(rig) == [10, 10, 5] * 2
    assert not isinstance(outcome, Exception)
    assert outcome.applied == 25
