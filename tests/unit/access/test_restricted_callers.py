"""Callers with rows and hidden fields beside each other: shared frames, shared names, patterns, dead letters, exports
(rules A3 to A7)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sow.v1 import sow_pb2
from sow_server.engine.values.model import Expiration, TopicSettings
from sow_server.services.wire import subscribe_convert
from sow_server.subscriptions.frames import ChangeFrame, GapNotice
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.access import grant, identity
from tests.support.stores.parts import reading_of
from tests.support.stores.stores import MINUTE, Rig

KEYED = TopicSettings(key=("/id",), expiration=Expiration.ENABLED)
ACTIONS = "read publish delete consume create topic-admin"


def rows(region: str, *hide: str) -> str:
    return f"rows = \"/region = '{region}'\"\nhide = {json.dumps(hide)}"


ACCESS = (
    identity("eu", "eu")
    + grant("eu", r"orders\..*", ACTIONS, rows("eu"))
    + identity("eu2", "eu")
    + identity("us", "us")
    + grant("us", r"orders\..*", ACTIONS, rows("us"))
    + identity("veiled", "veiled")
    + grant("veiled", r"orders\..*", ACTIONS, rows("eu", "/iban"))
    + identity("sender", "sender")
    + grant("sender", r"orders\..*", ACTIONS)
    + grant("sender", "letters", "publish")
    + grant("sender", "some-letters", "publish", rows("eu"))
    + identity("blind", "blind")
    + grant("blind", r"orders\..*", ACTIONS, 'hide = ["/iban"]')
    + grant("blind", "letters", "read publish")
    + identity("administrator", "administrator")
    + grant("administrator", r"orders\..*", "topic-admin create")
    + grant("administrator", "letters", "read publish")
)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[GuardedParts]:
    rig = Rig(tmp_path)
    rig.create_topic("orders.a", KEYED)
    with GuardedParts(rig, ACCESS) as made:
        yield made
    rig.close()


def publish(parts: GuardedParts, key: str, region: str, topic: str = "orders.a") -> None:
    payload = json.dumps({"id": key, "region": region, "iban": f"secret of {key}"}).encode()
    parts.answers("root", "Publish", topic=topic, records=[{"payload": payload}])


# --- subscriptions ---------------------------------------------------------------------------------------------------


def test_frames_are_shared_among_equal_grants_only(parts: GuardedParts) -> None:
    request = sow_pb2.SubscribeRequest(topic="orders.a", filter="/id != 'x'", oof=True)
    names = ("eu", "eu2", "us", "veiled", "root")
    followers = {name: parts.follow(name, request) for name in names}
    publish(parts, "1", "eu")
    publish(parts, "2", "us")
    parts.subscribers.settle()
    frames: dict[str, list[ChangeFrame]] = {}
    for name, follower in followers.items():
        follower.pump()
        frames[name] = follower.change_frames()
    assert [[row.key for row in frame.rows] for frame in frames["eu"]] == [[b"1"]]
    assert [[row.key for row in frame.rows] for frame in frames["us"]] == [[b"2"]]
    assert frames["eu"][0] is frames["eu2"][0], "one frame for equal grants"
    others = [frame for name in names if name != "eu2" for frame in frames[name]]
    assert len({id(frame) for frame in others}) == len(others), "and another one for each other grant"
    reading = reading_of(parts.rig.store)
    told = {name: b"".join(subscribe_convert.response(frame, reading) for frame in frames[name]) for name in names}
    assert b"secret of 1" in told["eu"]
    assert b"secret of 1" not in told["us"]
    assert b"secret" not in told["veiled"]
    assert b"secret of 2" not in told["eu"]
    assert parts.subscribers.hub.dispatcher.group_count == 4


def test_a_record_that_moves_leaves_one_callers_rows_and_enters_the_others(parts: GuardedParts) -> None:
    publish(parts, "1", "eu")
    request = sow_pb2.SubscribeRequest(topic="orders.a", oof=True)
    eu, us = parts.follow("eu", request), parts.follow("us", request)
    publish(parts, "1", "us")
    parts.subscribers.settle()
    eu.pump()
    us.pump()
    (left,) = eu.changes()
    assert (left.reason.name, left.payload, left.publish_time, left.origin) == ("NOT_PERMITTED", b"", 0, 0)
    (entered,) = us.changes()
    assert (entered.reason.name, json.loads(entered.payload)["region"]) == ("NONE", "us")


def test_a_pattern_takes_in_new_topics_as_they_are_granted(parts: GuardedParts) -> None:
    everything = sow_pb2.SubscribeRequest(topic_pattern=".*", oof=True)
    eu, veiled = parts.follow("eu", everything), parts.follow("veiled", everything)
    for topic in ("orders.b", "payments"):
        parts.rig.create_topic(topic, KEYED)
        publish(parts, "1", "eu", topic)
        publish(parts, "2", "us", topic)
    parts.subscribers.settle()
    eu.pump()
    veiled.pump()
    assert [(frame.topic, [row.key for row in frame.rows]) for frame in eu.change_frames()] == [("orders.b", [b"1"])]
    assert [json.loads(row.payload) for row in veiled.changes()] == [{"id": "1", "region": "eu"}]
    status = parts.status("eu", "Subscribe", topic_pattern="payments")
    assert status.message.replace("payments", "…") == parts.status(
        "eu", "Subscribe", topic_pattern="absent"
    ).message.replace("absent", "…")


# --- durables --------------------------------------------------------------------------------------------------------


def test_a_durable_that_callers_share_shows_each_its_own_rows(parts: GuardedParts) -> None:
    """A durable from before the access file belongs to everybody who may consume its topic (rule A7)."""
    follower = parts.subscribers.attach("orders.a", "old")
    follower.close()
    parts.subscribers.settle()
    publish(parts, "1", "eu")
    publish(parts, "2", "us")
    for name, key in (("eu", b"1"), ("us", b"2")):
        consumer = parts.consume(
            name, sow_pb2.SubscribeRequest(topic="orders.a", durable=sow_pb2.DurableAttachment(name="old"))
        )
        parts.subscribers.settle()
        consumer.pump()
        assert [row.key for row in consumer.changes()] == [key]
        consumer.close()
        parts.subscribers.settle()
        browsed = parts.answers(name, "BrowseDurable", topic="orders.a", durable="old")
        assert [list(answer.changes.records.key) for answer in browsed[:-1]] == [[key.decode()]]


def test_a_gap_does_not_count_entries_of_hidden_records(parts: GuardedParts) -> None:
    parts.rig.alter_topic("orders.a", max_entries=1)
    asked = sow_pb2.SubscribeRequest(topic="orders.a", durable=sow_pb2.DurableAttachment(name="d"), earliest=True)
    parts.consume("eu", asked).close()
    for number in range(5):
        publish(parts, f"{number}", "us")
    parts.rig.time.tick(60 * MINUTE)
    parts.rig.prune()
    consumer = parts.consume("eu", asked)
    consumer.pump()
    (gap,) = [frame for frame in consumer.frames if isinstance(frame, GapNotice)]
    assert gap.entries > 1
    consumer.close()
    parts.subscribers.settle()
    told = [frame.gap for frame in parts.answers("eu", "Subscribe", asked) if frame.HasField("gap")]
    assert [(gap.reason, gap.entries) for gap in told] == [(sow_pb2.GAP_REASON_DISCARDED, 0)]


# --- dead letters, exports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caller", "target", "denied"),
    [
        ("sender", "letters", None),
        ("sender", "some-letters", ("publish", "some-letters")),
        ("sender", "elsewhere", ("publish", "elsewhere")),
        ("blind", "letters", ("read", "orders.new")),
        ("administrator", "letters", ("read", "orders.new")),
        ("eu", "letters", ("create", "orders.new")),
    ],
)
def test_a_target_of_dead_letters_needs_a_grant_of_its_own(
    parts: GuardedParts, caller: str, target: str, denied: tuple[str, str] | None
) -> None:
    """Story: who might read only some rows or fields named a target that it may read, and waited for expiries."""
    settings = {"key": ["/id"], "expiration": 2, "dead_letter": target, "dead_letter_by_key": True}
    parts.ask(caller, "CreateTopic", name="orders.new", settings=settings)
    lines = [(line["action"], line["topic"]) for line in parts.audit.lines if line["event"] == "denied"]
    assert lines == ([] if denied is None else [denied])
    created = parts.rig.store.topics.by_name.get("orders.new")
    assert (created is None) is (denied is not None)
    assert created is None or created.settings.dead_letter == target


def test_an_export_is_not_read_on_with_other_rows(parts: GuardedParts) -> None:
    """Story: an export that was opened before a reload showed the rows of before, for as long as its lease."""
    publish(parts, "1", "eu")
    (opened,) = parts.answers("eu", "OpenExport", topic="orders.a", parts=1)
    assert parts.answers("eu", "ReadExport", export_id=opened.export_id)[-1].footer.returned == 1
    parts.replace_access(ACCESS.replace("/region = 'eu'", "/region = 'asia'"))
    assert "may not see any more" in parts.status("eu", "ReadExport", export_id=opened.export_id).message
    parts.answers("eu", "CloseExport", export_id=opened.export_id)


def test_an_export_of_several_topics_has_the_rights_of_each(parts: GuardedParts) -> None:
    """Q6, A4, A6. Another topic in it is refused, as if it were absent, and shows the rows of its own grant; the export
    ends for its caller when one of the topics shows other rows."""
    parts.rig.create_topic("orders.b", KEYED)
    more = identity("both", "both") + grant("both", "orders.*", "read", "rows = \"/region = 'eu'\"")
    parts.replace_access(ACCESS + more)
    for topic, region in (("orders.a", "eu"), ("orders.b", "us"), ("orders.b", "eu")):
        document = json.dumps({"id": region, "region": region}).encode()
        parts.answers("root", "Publish", topic=topic, records=[{"payload": document}])
    asked = {
        "topic": "orders.a",
        "parts": 1,
        "others": [{"topic": "orders.b", "filter": "/id IN ('eu', 'us')", "parts": 1}],
    }
    (opened,) = parts.answers("both", "OpenExport", None, **asked)
    assert [(part.topic, part.records) for part in opened.parts] == [(0, 0), (1, 0)], "hidden rows are not counted"
    for part in (0, 1):
        assert parts.answers("both", "ReadExport", export_id=opened.export_id, part=part)[-1].footer.returned == 1
    parts.replace_access(ACCESS + more.replace("orders.*", "orders.a"))
    for method in ("ReadExport", "RenewExport"):
        assert "topic: there is no topic" in parts.status("both", method, export_id=opened.export_id).message
    (hidden, absent) = (
        parts.status("both", "OpenExport", topic="orders.a", others=[{"topic": name}])
        for name in ("orders.b", "none000b")
    )
    assert hidden.message.replace("orders.b", "none000b") == absent.message
    assert absent.message.startswith("others[0].topic: there is no topic")


def test_a_select_of_hidden_fields_does_not_tell_whether_there_are_any(parts: GuardedParts) -> None:
    parts.replace_access(identity("desk", "desk") + grant("desk", "orders.a", "read", 'hide = ["/client/iban"]'))
    for document in ({"id": "1", "client": {"iban": 1}}, {"id": "2", "client": {"name": 1}}, {"id": "3"}):
        parts.answers("root", "Publish", topic="orders.a", records=[{"payload": json.dumps(document).encode()}])
    (got,) = parts.answers(
        "desk", "Get", topic="orders.a", keys=["1", "2", "3"], select={"include": ["/id", "/client/iban"]}
    )
    assert [json.loads(record.payload) for record in got.records] == [{"id": "1"}, {"id": "2"}, {"id": "3"}]


# --- what is not granted is absent -----------------------------------------------------------------------------------


def test_what_is_not_granted_is_refused_as_what_is_absent(parts: GuardedParts) -> None:
    """The same message and details, so the same way through the server: a hidden record and one that is absent, a topic
    without a grant and one that is absent."""
    parts.rig.create_topic("payments", KEYED)
    publish(parts, "hidden", "us")

    def same(method: str, hidden: dict[str, Any], absent: dict[str, Any], *names: str) -> None:
        told = []
        for fields in (hidden, absent):
            answer = b"".join(response.SerializePartialToString() for response in parts.ask("eu", method, **fields))
            for name in names:
                answer = answer.replace(name.encode(), b"." * 8)
            told.append(answer)
        assert told[0] == told[1], (method, hidden)

    for method in ("Get", "Touch", "Query"):
        there, nowhere = ({"topic": "orders.a", "keys": [key]} for key in ("hidden", "absent"))
        same(method, there, nowhere, "hidden", "absent")
    for method, field in (("Query", "topic"), ("Get", "topic"), ("PlanChanges", "topic"), ("DescribeTopic", "name")):
        same(method, {field: "payments"}, {field: "nowhere0"}, "payments", "nowhere0")
    for method in (
        "OpenExport",
        "ListDurables",
        "DescribeDurable",
        "ReadChanges",
        "Subscribe",
        "OpenLoad",
        "SowDelete",
    ):
        same(method, {"topic": "payments"}, {"topic": "nowhere0"}, "payments", "nowhere0")
