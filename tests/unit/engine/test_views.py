"""Views: their content follows from their source, in the commit of every change of it (rules V1 to V9)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sow_peering import TopicKind
from sow_server.config import DeclaredView
from sow_server.declaring import DeclarationError, declare_topics
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.derived import building, views
from sow_server.engine.disk.layout import VIEW_KEY
from sow_server.engine.disk.mark import Bounds
from sow_server.engine.disk.rocks import META, VIEWS
from sow_server.engine.losses import settle
from sow_server.engine.replicas import PeerSettings, ReplicaOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.database import Stalled
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    Request,
    Restamp,
    RestampMode,
    TopicSettings,
    Touch,
)
from sow_server.engine.values.views import VIEWS_MAX
from tests.support.stores.replicas import ship
from tests.support.stores.stores import SECOND, FakeTime, FaultyRocks
from tests.support.stores.views import ViewRig, definition

JSON = TopicSettings(expiration=Expiration.ENABLED)
TOTALS = ("COUNT(*) AS n", "SUM(/qty) AS qty", "AVG(/px) AS px")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ViewRig]:
    """A topic of orders, without a view."""
    rig = ViewRig(tmp_path)
    rig.create_topic("orders", JSON)
    yield rig
    rig.close()


def order(rig: ViewRig, key: str, account: object = "A", qty: object = 1, px: object = 1.5, **more: object) -> None:
    rig.put("orders", key, json.dumps({"account": account, "qty": qty, "px": px, **more}).encode())


def totals(rig: ViewRig, name: str = "totals") -> None:
    rig.create_view(name, "orders", group_by=["/account"], select=TOTALS)


def refusal(call: Callable[[], object]) -> StoreError:
    with pytest.raises(StoreError) as refused:
        call()
    return refused.value


# --- what a view shows -----------------------------------------------------------------------------------------------


def test_a_view_has_a_record_for_each_group(rig: ViewRig) -> None:
    totals(rig)
    order(rig, "1", "A", 2, 10.5)
    order(rig, "2", "A", 3, 11.5)
    order(rig, "3", "B", 7, 1)
    assert rig.content("totals") == {
        "A": {"account": "A", "n": 2, "qty": 5, "px": 11.0},
        "B": {"account": "B", "n": 1, "qty": 7, "px": 1.0},
    }
    order(rig, "1", "B", 1, 2)  # it moves from one group to the other
    rig.delete("orders", "2")
    assert rig.content("totals") == {"B": {"account": "B", "n": 2, "qty": 8, "px": 1.5}}
    rig.check("totals")


def test_where_decides_which_records_count(rig: ViewRig) -> None:
    rig.create_view("open", "orders", group_by=["/account"], select=["COUNT(*) AS n"], where="/open")
    order(rig, "1", open=True)
    order(rig, "2", open=True)
    order(rig, "3", open=False)
    assert rig.content("open") == {"A": {"account": "A", "n": 2}}
    order(rig, "2", open=False)
    assert rig.content("open") == {"A": {"account": "A", "n": 1}}
    rig.check("open")


def test_without_a_group_there_is_one_record_while_there_are_records(rig: ViewRig) -> None:
    rig.create_view("all", "orders", select=["COUNT(*) AS n", "MAX(/px) AS high"])
    assert rig.content("all") == {}
    order(rig, "1", px=5)
    order(rig, "2", px=7)
    assert rig.content("all") == {"*": {"n": 2, "high": 7}}
    rig.delete("orders", "1", "2")
    assert rig.content("all") == {}
    rig.check("all")


def test_a_view_without_aggregates_has_a_record_for_each_record(rig: ViewRig) -> None:
    """V3: chosen and computed fields, under the record's own key."""
    rig.create_view("slim", "orders", select=["/px * /qty AS notional", "/account"], where="/qty > 1")
    order(rig, "1", qty=2, px=3.5)
    order(rig, "2", qty=1)
    assert rig.content("slim") == {"1": {"notional": 7.0, "account": "A"}}
    order(rig, "1", qty=2, px=3.5, more="of no interest")
    assert rig.kinds("slim") == [("put", "1")], "a document that stays is no change (V4)"
    order(rig, "1", qty=0)
    assert rig.content("slim") == {}
    assert rig.kinds("slim") == [("put", "1"), ("delete", "1")]


def test_fields_of_a_record_may_be_objects_and_what_is_no_json_is_null(rig: ViewRig) -> None:
    rig.create_view("slim", "orders", select=["/tags", "/px / /qty AS each", "/missing"])
    order(rig, "1", qty=0, px=1, tags={"a": [1, "ü"]})
    assert rig.content("slim") == {"1": {"tags": {"a": [1, "ü"]}, "each": None, "missing": None}}


def test_names_and_numbers_inside_an_object_that_json_does_not_have_end_nothing(rig: ViewRig) -> None:
    """A msgpack object whose names were bytes or arrays ended all writes, with a TypeError."""
    rig.create_topic("packed", TopicSettings(message_type=MessageType.MSGPACK))
    rig.create_view("slim", "packed", select=["/v"])
    inside = ({b"x": 1, "a": 2}, {(1, 2): 3}, {1: 2, math.inf: 4}, [[math.inf], {"b": math.nan}], b"x", [b"x"])
    for number, value in enumerate(inside):
        rig.run(Publish("packed", [msgspec.msgpack.encode({"v": value})], [str(number)]))
    found = [one["v"] for one in rig.content("slim").values()]
    assert found == [{"a": 2}, {}, {"1": 2}, [[None], {"b": None}], None, [None]]
    assert rig.topic("slim").ungrouped == 0
    rig.delete("packed", *rig.content("slim"))
    assert rig.content("slim") == {}


def test_the_greatest_value_may_leave(rig: ViewRig) -> None:
    rig.create_view("high", "orders", group_by=["/account"], select=["MAX(/px) AS high", "MIN(/px) AS low"])
    for key, px in (("1", 5), ("2", 9), ("3", 9.0), ("4", "text"), ("5", True), ("6", None), ("7", 2**60 + 1)):
        order(rig, key, px=px)
        rig.check("high")
    for key in "4752":
        rig.delete("orders", key)
        rig.check("high")
    assert rig.content("high") == {"A": {"account": "A", "high": 9.0, "low": 5}}
    order(rig, "3", px=1)
    assert rig.content("high") == {"A": {"account": "A", "high": 5, "low": 1}}


def test_the_next_greatest_is_none_that_the_same_commit_deletes(rig: ViewRig) -> None:
    """Planted mistake: an extreme that is looked up without the deletes of its own commit."""
    rig.create_view("high", "orders", select=["MAX(/px) AS high"])
    for key, px in (("1", 5), ("2", 8), ("3", 9)):
        order(rig, key, px=px)
    rig.delete("orders", "2", "3")
    assert rig.content("high") == {"*": {"high": 5}}


def test_rows_that_are_remembered_have_a_bound_in_bytes(rig: ViewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their number had one: with texts of 100 KB as names of groups, 200,000 of them were 20 GB."""
    monkeypatch.setattr(views, "ROWS_BYTES_MAX", 200_000)
    rig.create_view("n", "orders", group_by=["/account"], select=["COUNT(*) AS n", "MAX(/text) AS most"])
    for start in range(0, 2000, 100):
        payloads = [json.dumps({"account": f"{number}", "text": "x" * 250}).encode() for number in range(100)]
        rig.run(Publish("orders", payloads, [f"k{start + number}" for number in range(100)]))
    (view,) = rig.store.views._of_source[rig.topic("orders").id]
    assert 50 < len(view.rows) < 500
    view.rows.__init__()  # type: ignore[misc]  # it begins anew
    for start in range(0, 40, 10):
        payloads = [json.dumps({"account": "y" * 100_000}).encode()] * 10
        rig.run(Publish("orders", payloads, [f"k{start + number}" for number in range(10)]))
    assert len(view.rows) == 40, "such a text is the name of no group, and nothing of it is kept"
    assert not any("yyy" in str(row) for row in view.rows._young.values())
    assert rig.topic("n").ungrouped == 40
    rig.check("n")


def test_a_key_that_changes_twice_in_a_commit_counts_once(rig: ViewRig) -> None:
    """Planted mistake: its first old value is taken twice."""
    totals(rig)
    order(rig, "1", "A", 5)
    payloads = [b'{"account":"B","qty":2,"px":1}', b'{"account":"C","qty":3,"px":1}']
    rig.run(Publish("orders", payloads, ["1", "1"]))
    assert rig.content("totals") == {"C": {"account": "C", "n": 1, "qty": 3, "px": 1.0}}
    rig.check("totals")


def test_a_key_that_is_removed_and_put_again_in_a_commit_counts_once(rig: ViewRig) -> None:
    """Planted mistake: it is among the deletes and among the puts of the batch."""
    totals(rig)
    order(rig, "1", "A", 5)
    payload = b'{"account":"A","qty":7,"px":1}'
    rig.run(Publish("orders", [b"", payload], ["1", "1"], removals=[True, False]))
    assert rig.content("totals") == {"A": {"account": "A", "n": 1, "qty": 7, "px": 1.0}}
    rig.check("totals")


def test_removals_and_deltas_change_a_view(rig: ViewRig) -> None:
    totals(rig)
    for key in "123":
        order(rig, key)
    rig.run(Publish("orders", [b"", b'{"account":"A","qty":9,"px":1}'], ["1", "4"], removals=[True, False]))
    rig.run(Publish("orders", [b'{"qty":5}'], ["2"], delta=True))
    assert rig.content("totals") == {"A": {"account": "A", "n": 3, "qty": 15, "px": pytest.approx(4 / 3)}}
    rig.check("totals")


def test_records_that_expire_leave_with_their_expiry(rig: ViewRig) -> None:
    """V5, and planted mistake: the sweep settles no views."""
    totals(rig)
    for key, ttl in (("1", 5 * SECOND), ("2", 50 * SECOND)):
        rig.put("orders", key, b'{"account":"A","qty":1,"px":1}', ttl=ttl)
    rig.time.tick(10 * SECOND)
    due = rig.clock.now_micros() - 5 * SECOND
    assert rig.content("totals")["A"]["n"] == 2, "it is overdue, and not swept"
    cut = rig.store.cuts.records(rig.topic("totals"))
    assert cut.now_micros == due - 1, "the answer is of a time at which nothing in it had expired"
    cut.close()
    rig.store.sweep()
    assert rig.content("totals")["A"]["n"] == 1
    cut = rig.store.cuts.records(rig.topic("totals"))
    assert cut.now_micros == rig.clock.now_micros()
    cut.close()


def test_a_touch_changes_only_views_that_read_metadata(rig: ViewRig) -> None:
    totals(rig)
    rig.create_view("times", "orders", select=["@expire_time AS until"])
    order(rig, "1")
    before = rig.kinds("totals")
    rig.touch("orders", "1", ttl=5 * SECOND)
    assert rig.content("times")["1"]["until"] == rig.clock.now_micros() + 5 * SECOND
    assert rig.kinds("totals") == before


def test_records_in_no_group_are_counted(rig: ViewRig) -> None:
    totals(rig)
    for key, account in (("1", None), ("2", ["A"]), ("3", ""), ("4", "x" * 2000), ("5", 1), ("6", "1"), ("7", True)):
        order(rig, key, account)
    assert set(rig.content("totals")) == {"1", "true"}
    assert rig.topic("totals").view_status == (True, 0, 2, 4)
    rig.check("totals")
    rig.delete("orders", "1", "6")
    assert rig.content("totals")["1"]["account"] == 1, "no record of the group has a text any more"
    assert rig.topic("totals").view_status == (True, 0, 2, 3)
    rig.check("totals")
    rig.reopen()
    assert rig.topic("totals").view_status == (True, 0, 2, 3)
    rig.check("totals")


# --- the commit ------------------------------------------------------------------------------------------------------


def test_a_view_changes_in_the_commit_of_its_source_and_behind_it(rig: ViewRig) -> None:
    """V2, V4: one change of a group however many of its records have changed, and together as an atomic request."""
    totals(rig)
    rig.create_view("count", "orders", select=["COUNT(*) AS n"])
    payload = b'{"account":"A","qty":1,"px":1}'
    rig.run(Publish("orders", [payload] * 3, ["1", "2", "3"]))
    source, view, count = rig.journal("orders"), rig.journal("totals"), rig.journal("count")
    assert [(one.kind, one.key) for one in view] == [("put", b"A")]
    assert [one.sequence for one in source] == [1, 2, 3]
    assert {view[0].sequence, count[0].sequence} == {4, 5}
    assert {one.commit_time_micros for one in (*source, *view, *count)} == {source[0].commit_time_micros}
    rig.run(Publish("orders", [payload], ["1"]))
    assert len(rig.journal("totals")) == 1, "nothing has changed"


def test_a_draft_that_is_dropped_leaves_nothing_in_a_view(tmp_path: Path) -> None:
    """Planted mistakes: the group of a draft that was dropped is kept in memory, or what its records bring."""
    rig = ViewRig(tmp_path, options=StoreOptions(writer=WriterOptions(stall_patience_micros=0)))
    rig.create_topic("orders", JSON)
    totals(rig)
    order(rig, "1")
    faulty = FaultyRocks(rig)
    faulty.writes = [Stalled("the disk is slow")]
    assert refusal(lambda: order(rig, "2")).reason is Reason.WRITE_STALLED
    order(rig, "2", qty=3)
    assert rig.content("totals")["A"] == {"account": "A", "n": 2, "qty": 4, "px": 1.5}
    rig.check("totals")
    rig.close()


def test_an_aborted_request_changes_no_view(rig: ViewRig) -> None:
    totals(rig)
    order(rig, "1")
    payloads = [b'{"account":"A","qty":1,"px":1}', b"no document"]
    rig.run(Publish("orders", payloads, ["2", "3"], atomic=True))
    rig.check("totals")
    assert rig.content("totals")["A"]["n"] == 1


def test_a_view_is_the_same_after_a_crash(rig: ViewRig) -> None:
    totals(rig)
    rig.create_view("high", "orders", group_by=["/account"], select=["MAX(/px) AS high"])
    for number in range(20):
        order(rig, str(number), f"A{number % 3}", number, number / 3)
    rig.crash()
    for view in ("totals", "high"):
        rig.check(view)
    rig.delete("orders", *map(str, range(10, 20)))
    for view in ("totals", "high"):
        rig.check(view)


def test_dead_letters_and_a_load_change_the_views_of_their_topics(rig: ViewRig) -> None:
    rig.create_topic("letters", JSON)
    rig.alter_topic("orders", dead_letter="letters")
    rig.create_view("expired", "letters", group_by=["/account"], select=["COUNT(*) AS n"])
    rig.put("orders", "1", b'{"account":"A"}', ttl=SECOND)
    rig.time.tick(2 * SECOND)
    rig.store.sweep()
    assert rig.content("expired") == {"A": {"account": "A", "n": 1}}
    rig.check("expired")


# --- building --------------------------------------------------------------------------------------------------------


def slowly(monkeypatch: pytest.MonkeyPatch, records: int = 2) -> None:
    monkeypatch.setattr(building, "BUILD_CHUNK", records)


def test_a_view_of_records_that_are_there_is_built(rig: ViewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """V6: in commits of their own, without a journal, which begins then."""
    slowly(monkeypatch)
    for number in range(5):
        order(rig, str(number), qty=number)
    topic = rig.create_view("totals", "orders", group_by=["/account"], select=TOTALS, built=False)
    assert topic.view_status == (False, 0, 0, 0)
    rig.turn()
    assert topic.view_status == (False, 2, 1, 0)
    rig.store.writer.step()
    assert topic.view_status == (True, 5, 1, 0)
    rig.check("totals")
    assert rig.journal("totals") == []
    order(rig, "9")
    assert rig.kinds("totals") == [("put", "A")]
    assert rig.journal("totals")[0].sequence > topic.statistics.floor_sequence > 5


def test_changes_meanwhile_count_once(rig: ViewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted mistake: a change behind the position is counted, and again when the build comes to it."""
    slowly(monkeypatch)
    for number in range(8):
        order(rig, str(number), qty=number)
    rig.create_view("totals", "orders", group_by=["/account"], select=[*TOTALS, "MAX(/qty) AS high"], built=False)
    rig.turn()
    order_payload = b'{"account":"A","qty":100,"px":1}'
    requests: list[Request] = [
        Publish("orders", [order_payload] * 3, ["0", "7", "11"]),
        Delete("orders", ["1", "6"]),
    ]
    for request in requests:
        rig.store.commits.submit(request)
        rig.turn()
        rig.turn()
    rig.store.writer.step()
    rig.check("totals")


def test_a_build_goes_on_after_a_crash_and_says_so(
    rig: ViewRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slowly(monkeypatch)
    for number in range(8):
        order(rig, str(number), qty=number)
    rig.create_view("totals", "orders", group_by=["/account"], select=TOTALS, built=False)
    rig.turn()
    said: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(building.log, "info", lambda event, **fields: said.append((event, fields)), raising=False)
    rig.crash()
    assert said[0] == ("view_build_resumed", {"topic": "totals", "records_read": 2})
    assert said[-1][0] == "view_built"
    assert rig.topic("totals").view_status == (True, 8, 1, 0)
    rig.check("totals")


def test_after_an_accepted_loss_a_view_is_built_anew(rig: ViewRig) -> None:
    totals(rig)
    rig.create_view("high", "orders", group_by=["/account"], select=["MAX(/px) AS high"])
    for number in range(8):
        order(rig, str(number), qty=number)
    settle(rig.store._rocks, Bounds(), {"id": "other", "epoch": "other", "origin": None})
    rig.abandon()
    rig.open()
    for view in ("totals", "high"):
        assert rig.topic(view).complete
        rig.check(view)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_nobody_writes_to_a_view(rig: ViewRig) -> None:
    totals(rig)
    order(rig, "1")
    requests = [
        Publish("totals", [b"{}"], ["A"]),
        Touch("totals", ["A"], ABSENT),
        Delete("totals", ["A"]),
        Restamp("totals", ["A"], RestampMode.SET, Lifetime(LifetimeKind.TTL, SECOND)),
    ]
    for request in requests:
        error = refusal(lambda request=request: rig.run(request))  # type: ignore[misc]  # bound at once
        assert (error.reason, error.field) == (Reason.VIEW_READ_ONLY, "topic")
    answers: list[object] = []
    rig.store.loads.open("totals", 60 * SECOND).then(answers.append)
    assert refusal(lambda: rig.answer(answers)).reason is Reason.VIEW_READ_ONLY
    assert refusal(lambda: rig.alter_topic("orders", dead_letter="totals")).reason is Reason.INVALID_ARGUMENT
    rig.check("totals")


@pytest.mark.parametrize(
    ("arguments", "reason", "field"),
    [
        ({"select": ["COUNT(*)"]}, Reason.EXPRESSION_INVALID, "view.select[0]"),
        ({"select": ["COUNT(*) AS n", "/px AS px"]}, Reason.EXPRESSION_INVALID, "view.select[1]"),
        ({"select": []}, Reason.EXPRESSION_INVALID, "view.select"),
        ({"select": ["SUM(/px) AS"]}, Reason.EXPRESSION_INVALID, "view.select[0]"),
        ({"select": ["COUNT(DISTINCT /px) AS n"]}, Reason.EXPRESSION_INVALID, "view.select"),
        ({"select": ["SUM(NOW_MICROS()) AS n"]}, Reason.EXPRESSION_INVALID, "view.select[0]"),
        ({"select": ["COUNT(*) AS n"], "group_by": ["COUNT(*)"]}, Reason.EXPRESSION_INVALID, "view.group_by[0]"),
        ({"select": ["COUNT(*) AS n"], "where": "/px >"}, Reason.FILTER_INVALID, "view.where"),
        ({"select": ["COUNT(*) AS n"], "where": "/px > NOW_MICROS()"}, Reason.EXPRESSION_INVALID, "view.where"),
        (
            {"select": ["COUNT(*) AS n"], "expiration": Expiration.ENABLED},
            Reason.INVALID_ARGUMENT,
            "settings.expiration",
        ),
        ({"select": ["COUNT(*) AS n"], "key": ("/a",)}, Reason.INVALID_ARGUMENT, "settings.key"),
    ],
)
def test_a_wrong_definition_is_refused_by_its_place(
    rig: ViewRig, arguments: dict[str, object], reason: Reason, field: str
) -> None:
    error = refusal(lambda: rig.create_view("v", "orders", **arguments))  # type: ignore[arg-type]  # as parametrized
    assert (error.reason, error.field) == (reason, field)
    assert error.message.startswith((field, field.removeprefix("settings.")))
    assert "v" not in rig.store.topics.by_name


def test_a_source_is_a_topic_that_is_no_view_and_has_room_for_one(rig: ViewRig) -> None:
    totals(rig)
    assert refusal(lambda: rig.create_view("v", "missing", select=["COUNT(*) AS n"])).reason is Reason.TOPIC_NOT_FOUND
    error = refusal(lambda: rig.create_view("v", "totals", select=["COUNT(*) AS n"]))
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "view.source")
    for number in range(VIEWS_MAX - 1):
        totals(rig, f"totals-{number}")
    error = refusal(lambda: totals(rig, "one-more"))
    assert error.message == "view.source: orders has 8 views, as many as it may have"


def test_a_source_stays_as_it_is_while_it_has_views(rig: ViewRig) -> None:
    """V7: and an error names only the views that the caller sees."""
    totals(rig)
    error = refusal(lambda: rig.delete_topic("orders"))
    assert (error.reason, error.details["views"]) == (Reason.TOPIC_HAS_VIEWS, "totals")
    assert refusal(lambda: rig.alter_topic("orders", key=("/id",))).reason is Reason.TOPIC_HAS_VIEWS
    answers: list[object] = []
    rig.store.administration.delete_topic("orders", sees=lambda name: False).then(answers.append)
    hidden = refusal(lambda: rig.answer(answers))
    assert "totals" not in hidden.message
    assert hidden.details["views"] == ""
    rig.alter_topic("orders", max_records=5)
    rig.delete_topic("totals")
    assert rig.topic("orders").views == ()
    assert rig.rows(VIEWS) == []
    rig.delete_topic("orders")


def test_a_view_that_is_deleted_while_it_is_built_is_gone(rig: ViewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    for number in range(8):
        order(rig, str(number))
    topic = rig.create_view("totals", "orders", group_by=["/account"], select=TOTALS, built=False)
    rig.turn()
    rig.delete_topic("totals")
    assert rig.rows(VIEWS) == []
    assert rig.store._rocks.get(META, VIEW_KEY + topic.prefix) is None
    order(rig, "9")


def test_a_policy_gives_a_view_no_lifetimes(rig: ViewRig) -> None:
    rig.set_policy("short", ".*", default_ttl_micros=SECOND, expiration=Expiration.ENABLED)
    totals(rig)
    order(rig, "1")
    rig.time.tick(5 * SECOND)
    assert rig.topic("totals").settings.expiration is Expiration.DISABLED
    rig.alter_topic("totals", journal=False)
    assert rig.topic("totals").view is not None


# --- other instances -------------------------------------------------------------------------------------------------


def linked(path: Path, name: str, peer: str, time: FakeTime) -> ViewRig:
    replicas = ReplicaOptions(peers=(PeerSettings(peer, ".*"),))
    return ViewRig(path / name, options=replace(StoreOptions(), instance=name, replicas=replicas), time=time)


def test_each_instance_computes_its_own_and_they_agree(tmp_path: Path) -> None:
    """V9: a merge changes the views of its topic; views themselves are not sent."""
    time = FakeTime()
    rigs = linked(tmp_path, "a", "b", time), linked(tmp_path, "b", "a", time)
    for rig in rigs:
        rig.create_topic("orders", JSON)
        totals(rig)
        assert not rig.topic("totals").replicated
    for number in range(9):
        order(rigs[0], str(number), f"A{number % 2}", number, number / 7)
    rigs[0].delete("orders", "3", "4")
    ship(*rigs)
    for rig in rigs:
        rig.check("totals")
    one, other = ({key: record.payload for key, record in rig.stored("totals").items()} for rig in rigs)
    assert one == other != {}
    kinds = [kind.name for kind in rigs[0].store.replicas.shared.matching(".*")]
    assert kinds == ["orders"]
    kind = TopicKind("totals", (), "json", b"\x01", acts=False)
    assert rigs[1].store.replicas.sources.announced.check(kind).reason == Reason.TOPIC_DIFFERS
    for rig in rigs:
        rig.close()


def test_a_peer_that_is_behind_holds_no_view(tmp_path: Path) -> None:
    """V9: a view was not deleted before the peer had its changes, which are never sent, and its journal was kept."""
    rig = linked(tmp_path, "a", "b", FakeTime())
    rig.create_topic("orders", JSON)
    totals(rig)
    for number in range(5):
        order(rig, str(number))
    assert rig.store.replicas.peers.of(rig.topic("orders")) == ["b"]
    rig.alter_topic("totals", retain_bytes=0, retain_time_micros=0)
    rig.prune()
    assert rig.journal("totals") == []
    order(rig, "more")
    rig.delete_topic("totals")
    assert refusal(lambda: rig.delete_topic("orders")).reason is Reason.PEER_BEHIND
    rig.close()


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("gone", "view.source: there is no topic gone"),
        ("other", "view.source: other is a view, and a view is no source of another one"),
        ("full", "view.source: full would have 9 views, more than 8"),
        ("packed", "view.select: topic packed is binary, its payloads have no fields; ask for metadata such as @key"),
    ],
)
def test_a_view_of_the_file_does_not_go_for_a_definition_that_is_refused(rig: ViewRig, source: str, fault: str) -> None:
    """The view went with its durables, and then the start failed: only expressions were looked at before."""
    for name in ("full", "packed"):
        rig.create_topic(name, TopicSettings(message_type=MessageType.BINARY if name == "packed" else MessageType.JSON))
    for number in range(VIEWS_MAX):
        rig.create_view(f"v{number}", "full", select=["COUNT(*) AS n"])
    rig.create_view("other", "orders", select=["COUNT(*) AS n"])
    views_before = DeclaredView(definition("orders", group_by=["/a"], select=["COUNT(*) AS n"]), {})
    declare_topics(rig.store, {}, {"kept": views_before})
    made = rig.topic("kept")
    changed = DeclaredView(definition(source, group_by=["/a"], select=["COUNT(*) AS n"]), {})
    with pytest.raises(DeclarationError) as refused:
        declare_topics(rig.store, {}, {"kept": changed})
    assert str(refused.value) == f"[views.kept]: {fault}"
    assert rig.topic("kept") is made
    declare_topics(rig.store, {"gone": {}}, {"kept": DeclaredView(definition("gone", select=["/a"]), {})})
    assert rig.topic("kept").view == definition("gone", select=["/a"])
