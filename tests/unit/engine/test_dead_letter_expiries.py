"""Every way in which a record can expire leaves its dead letter (T3, L7, L10; rows R8 and R9)."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from sow_server.engine.commit import handing_over
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    PERMANENT,
    Applied,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    Restamp,
    RestampMode,
)
from sow_server.subscriptions.live.matching import VersionMatcher
from tests.support.stores.dead_letters import TTL, commits, copy_of, fates, rig
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import JSON, Subscribers

__all__ = ["rig"]  # a fixture


def test_the_sweep_leaves_a_copy_that_says_where_it_expired_and_when(rig: Rig) -> None:
    put = rig.put("orders", "a|b", b'{"px": 1}', ttl=TTL)
    rig.time.tick(TTL)
    before = commits(rig)
    rig.store.sweep()
    key, payload = copy_of(rig)
    assert key == rf"orders|a\|b|{put.last_version}"
    due = rig.journal("orders")[0].expire_time_micros
    told = b'{"topic":"orders","key":"a|b","version":%d,"expire_time_micros":%d,"reason":"expired"}'
    assert payload == b'{"px": 1,"dead_letter":[' + told % (put.last_version, due) + b"]}"
    assert commits(rig) == before + 1, "in the same commit"
    assert rig.kinds("orders") == [("put", "a|b"), ("expire", "a|b")]
    assert fates(rig) == {"delivered": 1}
    assert rig.get("orders", "a|b") is None


def test_a_sweep_of_several_topics_and_records_leaves_one_copy_of_each(rig: Rig) -> None:
    rig.create_topic("others", JSON, dead_letter="dead")
    rig.create_topic("plain", JSON)
    for topic in ("orders", "others", "plain"):
        rig.run(Publish(topic, [b"{}"] * 3, ["1", "2", "3"], lifetime=Lifetime(LifetimeKind.TTL, TTL)))
    rig.time.tick(TTL)
    rig.store.sweep()
    rig.crash()
    rig.store.sweep()
    assert sorted(key.decode().rsplit("|", 1)[0] for key in rig.live("dead")) == [
        *("orders|1", "orders|2", "orders|3", "others|1", "others|2", "others|3"),
    ]
    assert rig.store.durable_commits.topic_statistics(rig.topic("dead")).stored_records == 6


@pytest.mark.parametrize("how", ["publish", "plain", "touch", "delete", "restamp"])
def test_a_write_that_meets_an_overdue_record_leaves_its_copy_first(rig: Rig, how: str) -> None:
    rig.put("orders", "k", b'{"n":1}', ttl=TTL)
    rig.time.tick(TTL)
    before = rig.store.writer.last_sequence
    match how:
        case "publish":
            rig.put("orders", "k", b'{"n":2}')
        case "plain":
            rig.run(Publish("orders", [b'{"n":2}'] * 20, ["k", *[str(n) for n in range(19)]]))
        case "touch":
            assert rig.touch("orders", "k", lifetime=PERMANENT).refusals
        case "delete":
            assert rig.delete("orders", "k").applied == 0
        case "restamp":
            assert rig.run(Restamp("orders", ["k"], RestampMode.CLEAR)).applied == 0
    expire = next(entry for entry in rig.journal("orders") if entry.kind == "expire")
    (copied,) = rig.journal("dead")
    assert (expire.sequence, copied.sequence) == (before + 1, before + 2)
    assert copied.commit_time_micros == expire.commit_time_micros
    if how in ("publish", "plain"):
        written = next(entry for entry in rig.journal("orders") if entry.sequence > expire.sequence)
        assert (written.key, written.sequence, written.previous) == (b"k", before + 3, 0)
        assert rig.get("orders", "k") is not None
    rig.store.sweep()
    assert fates(rig) == {"delivered": 1}


def test_a_publish_that_is_due_at_once_is_put_expired_and_copied_in_one_commit(rig: Rig) -> None:
    """Rows RabbitMQ 8, RabbitMQ 9."""
    rig.put("orders", "k", b'{"n":1}')
    before = commits(rig)
    outcome = rig.put("orders", "k", b'{"n":2}', ttl=0)
    assert commits(rig) == before + 1
    assert rig.kinds("orders")[-2:] == [("put", "k"), ("expire", "k")]
    key, payload = copy_of(rig)
    assert key == f"orders|k|{outcome.last_version}"
    assert json.loads(payload)["n"] == 2
    assert rig.journal("dead")[-1].sequence == rig.journal("orders")[-1].sequence + 1


def publish_now(rig: Rig, *payloads: bytes, atomic: bool = False) -> list[int | None]:
    """Publishes records with ttl 0; returns to how many subscribers each was handed."""
    keys = [f"k{number}" for number in range(len(payloads))]
    outcome = rig.run(
        Publish(
            "orders",
            list(payloads),
            keys,
            lifetime=Lifetime(LifetimeKind.TTL, 0),
            atomic=atomic,
            want_results=True,
        )
    )
    assert outcome.results is not None
    return [result.delivered for result in outcome.results if isinstance(result, Applied)]


def test_a_record_due_at_once_goes_to_attached_subscribers_else_becomes_a_dead_letter(rig: Rig) -> None:
    """RabbitMQ 8, L7: the filter decides; who conflates may never be sent it, and does not count. The journal is the
    same."""
    subscribers = Subscribers(rig)
    matching = [subscribers.subscribe("orders", filter="/n > 1") for _ in range(2)]
    conflating = subscribers.subscribe("orders", conflation=SECOND)
    rig.run(Publish("orders", [b'{"n":3}'], ["plain"], want_results=True))

    assert publish_now(rig, b'{"n":1}', b'{"n":2}') == [0, 2]

    assert rig.kinds("orders")[-4:] == [("put", "k0"), ("expire", "k0"), ("put", "k1"), ("expire", "k1")]
    assert [json.loads(record.payload)["n"] for record in rig.live("dead").values()] == [1]
    assert [key for _, key, _ in matching[0].news()] == [key for _, key, _ in matching[1].news()] == ["plain", "k1"]
    matching[0].close()
    assert publish_now(rig, b'{"n":2}') == [1]
    matching[1].close()
    assert publish_now(rig, b'{"n":2}') == [0]
    conflating.close()
    assert rig.topic("orders").takers is None
    assert len(rig.live("dead")) == 2


def test_only_records_due_at_once_have_a_count_of_receivers(rig: Rig) -> None:
    """L7: of a record with a life ahead, and on a topic that does not act on lifetimes, nobody asks."""
    Subscribers(rig).subscribe("orders")
    outcome = rig.run(Publish("orders", [b"{}"], ["a"], lifetime=Lifetime(LifetimeKind.TTL, SECOND), want_results=True))
    assert outcome.results is not None
    assert [result.delivered for result in outcome.results if isinstance(result, Applied)] == [None]
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    assert publish_now(rig, b"{}") == [None]
    assert rig.live("dead") == {}


def test_a_touch_or_a_restamp_that_ends_a_life_leaves_a_dead_letter_despite_subscribers(rig: Rig) -> None:
    """L7: the record was there for everybody; it expires as any other."""
    subscribers = Subscribers(rig)
    subscribers.subscribe("orders")
    rig.put("orders", "a", b"{}")
    rig.touch("orders", "a", ttl=0)
    assert len(rig.live("dead")) == 1


def test_a_record_due_at_once_goes_to_the_consumer_of_a_durable_and_is_never_replayed(rig: Rig) -> None:
    """RabbitMQ 8, J12: a durable without a consumer has not got it; nor has one whose consumer comes later."""
    subscribers = Subscribers(rig)
    consumer = subscribers.attach("orders", "d", filter="/n > 1")
    assert publish_now(rig, b'{"n":2}') == [1]
    assert [key for _, key, _ in consumer.news()] == ["k0"]
    consumer.close()
    subscribers.settle()
    assert publish_now(rig, b'{"n":3}') == [0]
    assert subscribers.attach("orders", "d", filter="/n > 1").got() == []
    assert [json.loads(record.payload)["n"] for record in rig.live("dead").values()] == [3]


def test_followers_by_pattern_also_count_on_topics_created_later(rig: Rig) -> None:
    """L7: and an atomic request is as any other."""
    subscribers = Subscribers(rig)
    everything = subscribers.subscribe(pattern=".*")
    assert publish_now(rig, b"{}", b"{}", atomic=True) == [1, 1]
    rig.create_topic("later", JSON)
    subscribers.settle()
    outcome = rig.run(Publish("later", [b"{}"], ["x"], lifetime=Lifetime(LifetimeKind.TTL, 0), want_results=True))
    assert outcome.results is not None
    assert [result.delivered for result in outcome.results if isinstance(result, Applied)] == [1]
    assert [key for _, key, _ in everything.news()] == ["k0", "k1", "x"]
    assert rig.live("dead") == {}


def test_the_search_for_attached_subscribers_takes_a_bounded_time_of_a_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L7: who was not asked in time does not count: a dead letter too many rather than a record lost. One without a
    filter costs nothing to ask, and a filter that fails is not the publisher's fault."""
    subscribers = Subscribers(rig)
    subscribers.subscribe("orders", filter="/n > 1")
    monkeypatch.setattr(handing_over, "TAKING_SECONDS_MAX", 1e-9)
    assert publish_now(rig, b'{"n":2}') == [0]
    assert len(rig.live("dead")) == 1
    monkeypatch.undo()

    def fails(self: VersionMatcher, key: bytes, value: bytes) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(VersionMatcher, "holds_stored", fails)
    assert publish_now(rig, b'{"n":2}') == [0]


def test_a_restamp_to_now_is_an_expiry(rig: Rig) -> None:
    rig.put("orders", "k", b'{"n":1}')
    rig.run(Restamp("orders", ["k"], RestampMode.SET, Lifetime(LifetimeKind.TTL, 0)))
    assert json.loads(copy_of(rig)[1])["n"] == 1
    assert rig.kinds("orders")[-2:] == [("touch", "k"), ("expire", "k")]


def test_disabling_expiration_copies_only_overdue_records(rig: Rig) -> None:
    rig.put("orders", "over", b"{}", ttl=TTL)
    rig.put("orders", "ahead", b"{}", ttl=2 * TTL)
    rig.time.tick(TTL)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    rig.time.tick(5 * TTL)
    rig.store.sweep()
    assert copy_of(rig)[0].startswith("orders|over|")
    assert rig.get("orders", "ahead") is not None


def test_an_overdue_record_leaves_a_letter_of_the_old_kind_when_its_topic_changes_kind(rig: Rig) -> None:
    """It falls due between the sweep before the change and the change."""
    rig.create_topic("bin-dead", JSON, message_type=MessageType.BINARY)
    rig.create_topic("rooms", JSON, dead_letter="bin-dead")
    rig.put("rooms", "a", b"{}", ttl=TTL)
    rig.time.tick(TTL)
    with mock.patch.object(rig.store.writer, "sweep_now", return_value=0):
        rig.alter_topic("rooms", message_type=MessageType.NVFIX)
    rig.store.sweep()
    assert json.loads(copy_of(rig, "bin-dead")[1])["dead_letter"][0]["key"] == "a"


@pytest.mark.parametrize("more", [{}, {"expiration": Expiration.DISABLED}])
def test_a_letter_that_comes_with_a_change_of_its_targets_kind_refuses_the_change(
    rig: Rig, more: dict[str, object]
) -> None:
    """K1: the target was empty a moment ago."""
    rig.put("orders", "a", b"{}", ttl=TTL)
    rig.time.tick(TTL)
    with (
        mock.patch.object(rig.store.writer, "sweep_now", return_value=0),
        pytest.raises(StoreError) as caught,
    ):
        rig.alter_topic("dead", {"message_type": MessageType.BINARY, **more})
    assert caught.value.reason is Reason.TOPIC_NOT_EMPTY
    assert rig.topic("dead").settings == JSON
    rig.store.sweep()
    assert (rig.count("orders"), rig.count("dead"), fates(rig)) == (0, 1, {"delivered": 1})


def test_records_that_fell_due_while_the_server_was_down_are_copied_at_the_start(rig: Rig) -> None:
    rig.put("orders", "k", b"{}", ttl=TTL)
    rig.kill()
    rig.time.tick(TTL)
    rig.open()
    rig.store.sweep()
    rig.reopen()
    rig.store.sweep()
    assert copy_of(rig)[0].startswith("orders|k|")
    assert [kind for kind, _ in rig.kinds("dead")] == ["put"]


def test_overdue_records_are_copied_before_their_topic_is_deleted(rig: Rig) -> None:
    rig.put("orders", "k", b"{}", ttl=TTL)
    rig.time.tick(TTL)
    rig.delete_topic("orders")
    assert copy_of(rig)[0].startswith("orders|k|")


def test_a_refresh_before_the_deadline_wins_and_a_delete_leaves_no_letter(rig: Rig) -> None:
    rig.put("orders", "refreshed", b"{}", ttl=TTL)
    rig.put("orders", "deleted", b"{}", ttl=TTL)
    rig.put("orders", "refreshed", b"{}", ttl=3 * TTL)
    rig.delete("orders", "deleted")
    rig.time.tick(TTL)
    rig.store.sweep()
    assert not rig.live("dead")
