"""The caps of a topic as callers of the services meet them (rules T6, T7)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from sow.v1 import admin_pb2, sow_pb2, types_pb2
from sow_server.services.figures import Figures, FigureSource
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.access import grant, identity
from tests.support.stores.stores import BINARY, Rig

ACCESS = (
    identity("desk", "desk")
    + grant("desk", "few", "read publish", "rows = \"@key BEGINS WITH 'mine'\"")
    + identity("clerk", "clerk")
    + grant("clerk", "few", "topic-admin")
)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[GuardedParts]:
    rig = Rig(tmp_path)
    rig.create_topic("few", BINARY._replace(max_records=3))
    with GuardedParts(rig, ACCESS) as parts:
        yield parts
    rig.close()


def published(parts: GuardedParts, identity: str, *keys: str) -> list[str]:
    """The reasons of the refusals, empty for records that were applied."""
    records = [sow_pb2.PublishRecord(key=key, payload=b"x") for key in keys]
    (response,) = parts.answers(identity, "Publish", topic="few", records=records)
    return [
        types_pb2.ErrorReason.Name(one.refusal.reason).removeprefix("ERROR_REASON_") if one.HasField("refusal") else ""
        for one in response.results
    ]


def altered(parts: GuardedParts, identity: str, **settings: Any) -> list[str]:
    """The warnings."""
    wanted = admin_pb2.TopicSettings(**settings)
    (response,) = parts.answers(identity, "AlterTopic", name="few", settings=wanted, update_paths=list(settings))
    return list(response.warnings)


def test_each_record_has_its_refusal_and_the_figures_count_them(parts: GuardedParts) -> None:
    """T6, T7."""
    assert published(parts, "root", "a", "b", "c", "d", "a") == ["", "", "", "TOPIC_FULL", ""]
    assert published(parts, "root", "e") == ["TOPIC_FULL"]
    (described,) = parts.answers("root", "DescribeTopic", name="few")
    statistics = described.topic.statistics
    assert (statistics.live_records, statistics.full_refusals) == (3, 2)
    told = {one.name: (one.value, one.origin) for one in described.topic.effective}
    assert (told["max_records"], told["max_stored_bytes"]) == (("3", "topic"), ("unlimited", "default"))


def test_a_publisher_of_some_rows_learns_only_that_there_is_no_room(parts: GuardedParts) -> None:
    """A3, T6: a record that it may not write is no different in a full topic, and no number is told."""
    assert published(parts, "root", "a", "b", "c") == [""] * 3
    records = [sow_pb2.PublishRecord(key=key, payload=b"x") for key in ("mine", "new")]
    (response,) = parts.answers("desk", "Publish", topic="few", records=records)
    full, denied = (one.refusal for one in response.results)
    assert full.reason == types_pb2.ERROR_REASON_TOPIC_FULL
    assert full.message == "topic: few is full, max_records has no room for this record"
    assert denied.reason == types_pb2.ERROR_REASON_PERMISSION_DENIED


def test_a_cap_below_the_content_is_set_and_the_answer_warns(parts: GuardedParts) -> None:
    """T7: those who may see the figures."""
    published(parts, "root", "a", "b", "c")
    assert altered(parts, "root", max_records=3, max_stored_bytes=6) == []
    assert altered(parts, "root", max_records=1, max_stored_bytes=5) == [
        "max_records: is 1, and topic few has 3 now; publishes that add to it are refused until there is less",
        "max_stored_bytes: is 5B, and topic few has 6B now; publishes that add to it are refused until there is less",
    ]
    assert altered(parts, "clerk", max_records=2) == []
    assert altered(parts, "root", max_records=-1, max_stored_bytes=-1) == []
    assert published(parts, "root", "d") == [""]


def test_a_policy_warns_of_the_topics_that_exceed_it(parts: GuardedParts) -> None:
    """T2, T7."""
    published(parts, "root", "a", "b")
    policy = admin_pb2.Policy(name="cap", pattern=".*", operator=True, topic=admin_pb2.TopicSettings(max_records=1))
    (response,) = parts.answers("root", "SetPolicy", policy=policy)
    assert list(response.warnings) == ["1 of the topics have more than their caps now; see rule T7"]
    assert published(parts, "root", "c") == ["TOPIC_FULL"]


def test_figures_tell_how_full_a_topic_is(parts: GuardedParts) -> None:
    """T7: by the cap that is nearer."""
    topic = parts.rig.topic("few")
    assert topic.filled == 0
    published(parts, "root", "a", "b")
    assert topic.filled == 2 / 3
    parts.rig.alter_topic("few", max_stored_bytes=5)
    assert topic.filled == 4 / 5
    found = Figures(5).taken(FigureSource(parts.rig.store.commits, [topic], [], []), 0, 0, 0)
    assert found.topics[0].filled == 4 / 5
    parts.rig.alter_topic("few", max_records=None, max_stored_bytes=None)
    assert topic.filled == 0


def test_a_load_is_refused_at_its_commit(parts: GuardedParts) -> None:
    """T7."""
    (opened,) = parts.answers("root", "OpenLoad", topic="few")
    rows = {"load_id": opened.load_id, "attempt": 1, "first_row": 1}
    keys = ["a", "b", "c", "d"]
    parts.answers("root", "StageLoad", **rows, key=keys, payload=[b"x"] * 4)
    part = [{"part": 0, "attempt": 1, "rows": 4}]
    refused = parts.status("root", "CommitLoad", load_id=opened.load_id, parts=part)
    assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert "more than max_records of topic few allows, 3; nothing was loaded" in refused.message
    assert parts.rig.live("few") == {}


def test_a_load_that_has_no_more_records_than_a_topic_may_have_is_counted_and_committed(parts: GuardedParts) -> None:
    """T7: the rows alone are more than `max_records`."""
    (opened,) = parts.answers("root", "OpenLoad", topic="few")
    rows = {"load_id": opened.load_id, "attempt": 1, "first_row": 1}
    parts.answers("root", "StageLoad", **rows, key=["a", "b", "c", "a"], payload=[b"x"] * 4)
    part = [{"part": 0, "attempt": 1, "rows": 4}]
    *_, last = parts.answers("root", "CommitLoad", load_id=opened.load_id, parts=part)
    assert last.figures.staged == 4
    assert set(parts.rig.live("few")) == {b"a", b"b", b"c"}
