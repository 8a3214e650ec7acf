"""How many index entries one record may have, and their work in a commit (rule K8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from sow_server.engine.catalog import indexes
from sow_server.engine.catalog.indexes import ENTRIES_MAX
from sow_server.engine.commit import requests
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.disk.rocks import INDEXES, Batch
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Delete,
    MessageType,
    Publish,
    TopicSettings,
)
from tests.support.stores.indexes import check_indexes, entries, put
from tests.support.stores.replicas import pair, ship
from tests.support.stores.stores import Rig

__all__ = ["pair"]  # a fixture

TAGS = TopicSettings(key=("/id",), index=("/tags", "/names"))
BOUNDED = StoreOptions(writer=WriterOptions(limits=RequestLimits(index_entries_max=100, atomic_entries_max=250)))


def tagged(key: int, count: int, **more: object) -> bytes:
    return json.dumps({"id": key, "tags": list(range(count)), **more}).encode()


@pytest.fixture
def bounded(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, options=BOUNDED)
    rig.create_topic("orders", TAGS)
    yield rig
    check_indexes(rig.store)
    rig.close()


@pytest.mark.parametrize("few", [2, 20])
def test_a_record_with_too_many_entries_in_all_indexes_is_refused(bounded: Rig, few: int) -> None:
    """Both the ways of a publish: record by record, and column by column."""
    rows = [tagged(1, 60, names=["x"] * 1000), tagged(2, 60, names=list(range(41)))]
    outcome = bounded.run(Publish("orders", rows + [tagged(number, 99) for number in range(3, 3 + few)]))
    assert [(refusal.index, refusal.reason) for refusal in outcome.refusals] == [(1, Reason.PAYLOAD_TOO_LARGE)]
    assert outcome.refusals[0].message == (
        "payload: 101 values in indexed fields, most of them in /tags, are more than the limit of 100 index entries "
        "per record"
    )
    assert outcome.applied == few + 1


def test_arrays_of_msgpack_count_too(bounded: Rig) -> None:
    bounded.create_topic("packed", TAGS, message_type=MessageType.MSGPACK)
    rows = [msgspec.msgpack.encode({"id": 1, "tags": list(range(count))}) for count in (101, 100)]
    assert [refusal.index for refusal in bounded.run(Publish("packed", rows)).refusals] == [0]


def test_a_delta_is_judged_once_it_is_merged(bounded: Rig) -> None:
    put(bounded, {"id": 1, "tags": list(range(60))})
    names = json.dumps({"id": 1, "names": list(range(50))}).encode()
    outcome = bounded.run(Publish("orders", [names], delta=True))
    assert [refusal.reason for refusal in outcome.refusals] == [Reason.PAYLOAD_TOO_LARGE]
    assert "/tags" in outcome.refusals[0].message
    assert "limit of 100 " in outcome.refusals[0].message
    assert bounded.run(Publish("orders", [tagged(2, 101)], delta=True)).refusals, "also one that makes a record"
    less = Publish("orders", [names], delta=True, unset_paths=["/tags"])
    assert not bounded.run(less).refusals, "what it unsets does not count"


def test_what_is_stored_already_stays_and_is_indexed(bounded: Rig) -> None:
    """An index is built over it; a delta may change it, as long as it gets no more entries."""
    bounded.create_topic("old", TopicSettings(key=("/id",)))
    assert not bounded.run(Publish("old", [tagged(1, 500)])).refusals
    bounded.submit_alter("old", lambda _: None, {"index": ("/tags",)})
    for _ in range(10):
        bounded.turn()
    assert len(bounded.rows(INDEXES)) == 500
    assert not bounded.run(Publish("old", [b'{"id": 1, "text": "new"}'], delta=True)).refusals
    assert bounded.run(Publish("old", [tagged(1, 501)], delta=True)).refusals
    assert not bounded.run(Delete("old", ["1"])).refusals
    assert entries(bounded) == 0


def test_rows_of_a_peer_are_not_refused(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    a.create_topic("j", TopicSettings(key=("/id",)))
    b.create_topic("j", TopicSettings(key=("/id",), index=("/tags",)))
    a.run(Publish("j", [tagged(1, ENTRIES_MAX + 1)]))
    ship(a, b)
    assert entries(b) == ENTRIES_MAX + 1


def test_entries_that_stay_are_not_made_again(bounded: Rig) -> None:
    """Story: a delta of some bytes on a record with a long array made all keys of its entries, twice."""
    put(bounded, {"id": 1, "tags": [1, "x" * 300, True]})
    with mock.patch.object(indexes, "_keys", side_effect=AssertionError):
        bounded.run(Publish("orders", [b'{"id": 1, "text": "new"}'], delta=True))
        put(bounded, {"id": 1, "tags": [True, "x" * 300, 1.0, 1]})
    put(bounded, {"id": 1, "tags": [1, "x" * 299, 1]})
    assert entries(bounded) == 2


def test_an_atomic_request_has_a_bound_of_its_own(bounded: Rig) -> None:
    rows = [tagged(number, 99) for number in range(3)]
    with pytest.raises(StoreError) as caught:
        bounded.run(Publish("orders", rows, atomic=True))
    assert caught.value.reason is Reason.ATOMIC_TOO_LARGE
    assert not bounded.run(Publish("orders", rows[:2], atomic=True)).refusals


@pytest.mark.slow
def test_records_with_many_entries_are_spread_over_commits(tmp_path: Path) -> None:
    """Story: a commit took all of a request, as its payloads are small, and staged a million entries."""
    rig = Rig(tmp_path)
    rig.create_topic("orders", TopicSettings(index=("/tags",)))
    staged: list[int] = []
    write = rig.store._rocks.write

    def counted(batch: Batch) -> None:
        staged.append(len(batch.puts[INDEXES]))
        write(batch)

    rows = [tagged(number, 1000) for number in range(20)] + [b"{}"] * 100
    with mock.patch.object(rig.store._rocks, "write", counted):
        rig.run(Publish("orders", rows, [f"{number}-{'x' * 900}" for number in range(120)]))
    assert sum(staged) == 20_000
    assert max(staged) <= 1000
    rig.close()


def test_records_without_long_arrays_are_not_decoded_for_the_bound(bounded: Rig) -> None:
    wide = json.dumps({"id": 1, **{f"f{number}": number for number in range(1000)}}).encode()
    with mock.patch.object(requests, "entries_count", side_effect=AssertionError):
        assert not bounded.run(Publish("orders", [wide, tagged(2, 5)] * 10)).refusals
