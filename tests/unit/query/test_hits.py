"""Record keys that an index has found are bounded in bytes (hits; rule N5)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.values.model import MessageType, Publish, TopicSettings
from sow_server.query import race
from sow_server.query.filtering import record_filter
from sow_server.query.hits import packed
from sow_server.query.planner import Access
from sow_server.query.scan import Query, Scan
from tests.support.stores.stores import Rig

RECORDS = 4000


@given(st.lists(st.binary(max_size=300)))
def test_packed_keys_are_the_same_keys(keys: list[bytes]) -> None:
    assert list(packed(keys)) == keys


@pytest.mark.parametrize(("hits_bytes_max", "way"), [(2**20, Access.INDEX), (10_000, Access.SCAN)])
def test_an_index_whose_keys_are_too_many_bytes_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hits_bytes_max: int, way: Access
) -> None:
    """Story: 200,000 keys of up to 16 KiB were kept for as long as a client did not read the answer."""
    monkeypatch.setattr(race, "HITS_BYTES_MAX", hits_bytes_max)
    rig = Rig(tmp_path)
    rig.create_topic("t", TopicSettings(message_type=MessageType.JSON, key=("/id",), index=("/n",)))
    documents = [{"id": f"{number:04}" + "k" * 100, "n": number} for number in range(RECORDS)]
    for first in range(0, RECORDS, 1000):
        rig.run(Publish("t", [json.dumps(one).encode() for one in documents[first : first + 1000]]))
    topic = rig.topic("t")
    asked = Scan(rig.store.cuts, Query(topic, filter=record_filter(topic, "/n < 500", 0), with_plan=True))
    found: list[bytes] = []
    while (batch := asked.step()) is not None:
        found += batch.keys
    assert found == [str(one["id"]).encode() for one in documents[:500]]
    assert asked.explanation().access is way
    asked.close()
    rig.close()
