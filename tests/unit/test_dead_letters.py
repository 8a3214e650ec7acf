"""Dead letters (rule T3, L7, L10; rows R8 and R9): every way in which a record can expire, and where its copy goes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from sow_server.engine import background, store, upkeep
from sow_server.engine.catalog.topics import UNDELIVERED
from sow_server.engine.commit import dead_letters, puts
from sow_server.engine.commit.dead_letters import Fate
from sow_server.engine.disk.layout import decode_commit
from sow_server.engine.disk.rocks import COMMITS
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    PERMANENT,
    Applied,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    OnMissing,
    Publish,
    Restamp,
    RestampMode,
    TopicSettings,
    Touch,
)
from sow_server.engine.values.policies import declared_of
from sow_server.subscriptions.matching import VersionMatcher
from tests.support.stores import HOUR, SECOND, Rig
from tests.support.subscribers import Follower, Subscribers, at

JSON = TopicSettings(expiration=Expiration.ENABLED)
TTL = 10 * SECOND


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """`orders` sends its dead letters to `dead`."""
    rig = Rig(tmp_path)
    rig.create_topic("dead", JSON)
    rig.create_topic("orders", JSON, dead_letter="dead")
    return rig


def copy_of(rig: Rig, topic: str = "dead") -> tuple[str, bytes]:
    """Key and payload of the only record of a topic."""
    ((key, found),) = rig.live(topic).items()
    return key.decode(), found.payload


def fates(rig: Rig) -> dict[str, int]:
    """The number of dead letters, by each fate that occurred."""
    return {fate: count for fate, count in rig.store.writer.letters_total.items() if count}


def commits(rig: Rig) -> int:
    """Commits with changes."""
    return len(rig.rows(COMMITS))


# --- the ways of expiring --------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(puts, "TAKING_SECONDS_MAX", 1e-9)
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


# --- the copy --------------------------------------------------------------------------------------------------------


def test_the_copy_has_the_lifetime_of_its_topic(rig: Rig) -> None:
    rig.alter_topic("dead", default_ttl_micros=TTL)
    rig.put("orders", "k", b"{}", ttl=5)
    rig.time.tick(5)
    rig.store.sweep()
    (found,) = rig.live("dead").values()
    assert found.expire_time_micros == rig.clock.now_micros() + TTL
    rig.time.tick(TTL)
    rig.store.sweep()
    assert not rig.stored("dead")


def test_a_copy_that_is_due_at_once_expires_in_the_same_commit_and_is_copied_on(rig: Rig) -> None:
    rig.create_topic("last", JSON)
    rig.alter_topic("dead", default_ttl_micros=0, dead_letter="last")
    before = commits(rig)
    rig.put("orders", "k", b"{}", ttl=0)
    assert commits(rig) == before + 1
    assert [kind for kind, _ in rig.kinds("dead")] == ["put", "expire"]
    letters = json.loads(copy_of(rig, "last")[1])["dead_letter"]
    assert [letter["topic"] for letter in letters] == ["dead", "orders"], "newest first"
    assert not rig.stored("dead")


def test_by_key_the_copy_has_the_key_and_replaces_an_older_one(rig: Rig) -> None:
    rig.alter_topic("orders", dead_letter_by_key=True)
    for number in (1, 2):
        rig.put("orders", "k", b'{"n":%d}' % number, ttl=0)
    key, payload = copy_of(rig)
    assert (key, json.loads(payload)["n"]) == ("k", 2)
    assert [entry.previous > 0 for entry in rig.journal("dead")] == [False, True]
    assert rig.store.durable_commits.topic_statistics(rig.topic("dead")).stored_records == 1


def test_a_copy_that_meets_an_overdue_record_expires_that_first(rig: Rig) -> None:
    rig.alter_topic("orders", dead_letter_by_key=True)
    rig.put("dead", "k", b'{"old":1}', ttl=TTL)
    rig.put("orders", "k", b'{"new":1}', ttl=TTL)
    rig.time.tick(TTL)
    rig.store.sweep()  # of both, in one commit
    assert "new" in json.loads(copy_of(rig)[1])
    assert sorted(rig.kinds("dead")) == [("expire", "k"), ("put", "k"), ("put", "k")]
    assert rig.kinds("dead")[1][0] == "expire"


def test_a_live_record_that_a_copy_replaces_in_the_sweep_that_visits_it_keeps_an_entry(rig: Rig) -> None:
    """draft [2]: the entry that is popped was for an older stamp, and the copy's stamp is later than the record's."""
    rig.alter_topic("orders", dead_letter_by_key=True)
    rig.alter_topic("dead", default_ttl_micros=5 * TTL)
    rig.put("dead", "k", b"{}", ttl=TTL)
    rig.put("dead", "k", b"{}", ttl=2 * TTL)  # no entry of its own: the first one comes before
    rig.put("orders", "k", b"{}", ttl=TTL)
    rig.time.tick(TTL)
    rig.store.sweep()
    assert "dead_letter" in json.loads(copy_of(rig)[1])
    rig.time.tick(5 * TTL)
    rig.store.sweep()
    assert not rig.stored("dead")


@pytest.mark.parametrize(
    ("payload", "wanted"),
    [
        (b"{}", b'{"dead_letter":[%s]}'),
        (b" { } \n", b' {"dead_letter":[%s]}'),
        (b'{"a":{"b":"}"}}', b'{"a":{"b":"}"},"dead_letter":[%s]}'),
        (b'{"dead_letter":"mine","a":1}', b'{"a":1,"dead_letter":[%s]}'),
        (b'{"dead_letter":[{"topic":1}]}', b'{"dead_letter":[%s]}'),
        (b'{"dead\\u005fletter":7}', b'{"dead_letter":[%s]}'),
        (
            b'{"dead_letter":[{"topic":"x","key":"y","version":3,"expire_time_micros":4,"reason":"expired"}]}',
            b'{"dead_letter":[%s,{"topic":"x","key":"y","version":3,"expire_time_micros":4,"reason":"expired"}]}',
        ),
    ],
)
def test_the_list_is_added_to_a_json_document(rig: Rig, payload: bytes, wanted: bytes) -> None:
    outcome = rig.put("orders", "k", payload, ttl=0)
    letter = b'{"topic":"orders","key":"k","version":%d,"expire_time_micros":%d,"reason":"expired"}'
    due = rig.journal("orders")[0].expire_time_micros
    assert copy_of(rig)[1] == wanted % (letter % (outcome.last_version, due))


def test_the_list_is_added_to_a_msgpack_map(rig: Rig) -> None:
    rig.create_topic("packed-dead", JSON, message_type=MessageType.MSGPACK)
    rig.create_topic("packed", JSON, message_type=MessageType.MSGPACK, dead_letter="packed-dead")
    outcome = rig.put("packed", "k", msgspec.msgpack.encode({"a": [1, b"\xff"]}), ttl=0)
    document = msgspec.msgpack.decode(copy_of(rig, "packed-dead")[1])
    assert document["a"] == [1, b"\xff"]
    assert [(one["topic"], one["key"], one["version"]) for one in document["dead_letter"]] == [
        ("packed", "k", outcome.last_version)
    ]


@pytest.mark.parametrize(("separator", "key"), [(b"\x01", "k"), (b"|", "a|b"), (b";", "a;b")])
def test_the_list_is_a_field_of_an_nvfix_payload(rig: Rig, separator: bytes, key: str) -> None:
    nvfix = JSON._replace(message_type=MessageType.NVFIX, separator=separator)
    rig.create_topic("last", nvfix)
    rig.create_topic("fields-dead", nvfix, dead_letter="last", default_ttl_micros=0)
    rig.create_topic("fields", nvfix, dead_letter="fields-dead")
    rig.put("fields", key, b"a=1" + separator + b"b=2" + separator, ttl=0)
    payload = copy_of(rig, "last")[1]
    document = rig.topic("last").format.decode(payload)
    assert (document["a"], document["b"]) == ("1", "2")
    letters = json.loads(str(document["dead_letter"]))
    assert [(one["topic"], one["key"][: len(key)]) for one in letters] == [
        ("fields-dead", json.loads(json.dumps("fields"))[: len(key)]),
        ("fields", key),
    ]
    assert payload.count(b"dead_letter=") == 1


@pytest.mark.parametrize("kind", [MessageType.FIX, MessageType.BINARY])
def test_a_payload_without_room_for_letters_stays_unchanged(rig: Rig, kind: MessageType) -> None:
    rig.create_topic("rooms-dead", JSON, message_type=kind)
    rig.create_topic("rooms", JSON, message_type=kind, dead_letter="rooms-dead")
    outcome = rig.put("rooms", "k", b"55=IBM\x01", ttl=0)
    assert copy_of(rig, "rooms-dead") == (f"rooms|k|{outcome.last_version}", b"55=IBM\x01")


def test_a_binary_topic_takes_the_copies_of_any_type(rig: Rig) -> None:
    rig.create_topic("bin", JSON, message_type=MessageType.BINARY)
    rig.alter_topic("orders", dead_letter="bin")
    rig.put("orders", "k", b'{"a":1}', ttl=0)
    assert json.loads(copy_of(rig, "bin")[1])["dead_letter"][0]["topic"] == "orders"


def test_a_key_that_has_grown_too_long_is_replaced_by_its_digest(rig: Rig) -> None:
    rig.create_topic("bin", JSON, message_type=MessageType.BINARY)
    chain = ["bin"]
    for hop in range(5):
        rig.create_topic(f"b{hop}", JSON, message_type=MessageType.BINARY, dead_letter=chain[-1], default_ttl_micros=0)
        chain.append(f"b{hop}")
    rig.put("b4", "|" * 1000, b"x", ttl=0)
    key, payload = copy_of(rig, "bin")
    assert payload == b"x"
    assert len(key) <= dead_letters.KEY_BYTES_MAX
    assert "sha256:" in key


# --- cycles ----------------------------------------------------------------------------------------------------------


def test_a_cycle_ends_after_one_round(rig: Rig) -> None:
    rig.alter_topic("dead", dead_letter="orders", default_ttl_micros=TTL)
    rig.alter_topic("orders", default_ttl_micros=TTL)
    rig.put("orders", "k", b"{}")
    for _ in range(5):
        rig.time.tick(TTL)
        rig.store.sweep()
    assert not rig.stored("orders")
    assert not rig.stored("dead")
    assert fates(rig) == {"delivered": 1, "ended": 1}


def test_a_cycle_of_copies_that_are_due_at_once_ends_in_its_commit(rig: Rig) -> None:
    rig.alter_topic("dead", dead_letter="orders", default_ttl_micros=0)
    rig.put("orders", "k", b"{}", ttl=0)
    assert fates(rig) == {"delivered": 1, "ended": 1}
    assert not rig.stored("dead")


def test_a_letter_that_comes_back_to_a_key_that_is_being_written_is_replaced_by_the_write(rig: Rig) -> None:
    """An overdue record of each topic under one key, each topic the other's target: letters [1]."""
    rig.alter_topic("orders", dead_letter_by_key=True)
    rig.alter_topic("dead", dead_letter="orders", dead_letter_by_key=True)
    rig.put("orders", "k", b'{"o":1}', ttl=TTL)
    rig.put("dead", "k", b'{"d":1}', ttl=TTL)
    rig.time.tick(TTL)
    rig.put("orders", "k", b'{"o":2}')
    assert rig.get("orders", "k").payload == b'{"o":2}'  # type: ignore[union-attr]  # it is there
    assert "o" in json.loads(copy_of(rig)[1])
    assert [kind for kind, _ in rig.kinds("orders")] == ["put", "expire", "put", "put"]
    assert [entry.previous > 0 for entry in rig.journal("orders")] == [False, True, False, True]
    assert rig.store.durable_commits.topic_statistics(rig.topic("orders")).stored_records == 1
    rig.store.sweep()
    assert fates(rig) == {"delivered": 2}


def test_without_room_for_a_list_a_cycle_is_refused_and_one_that_came_about_ends(rig: Rig) -> None:
    binary = JSON._replace(message_type=MessageType.BINARY, default_ttl_micros=0)
    rig.create_topic("x", binary, dead_letter="y")
    rig.create_topic("y", binary, dead_letter="z")
    with pytest.raises(StoreError, match=r"dead_letter: 'x' leads back to 'z' \(z > x > y > z\)") as refused:
        rig.create_topic("z", binary, dead_letter="x")
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert refused.value.field == "settings.dead_letter"
    topic = rig.create_topic("z", binary)
    topic.apply(topic.settings._replace(dead_letter="x"), topic.indexes)  # as a policy might
    rig.put("z", "k", b"b", ttl=0)
    assert fates(rig) == {"ended": 1}


def test_a_chain_of_copies_has_an_end(rig: Rig) -> None:
    hops = dead_letters.HOPS_MAX + 2
    for hop in range(hops):
        rig.create_topic(f"hop{hop}", JSON, dead_letter=f"hop{hop - 1}" if hop else "", default_ttl_micros=0)
    rig.put(f"hop{hops - 1}", "k", b"{}")
    assert fates(rig) == {"delivered": dead_letters.HOPS_MAX, "dropped": 1}


# --- a missing target ------------------------------------------------------------------------------------------------


def test_the_journal_of_the_waiting_copies_is_pruned_as_that_of_any_topic(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J3. The store's own topic has the id 0, and each step of pruning began at the topics above 0: its journal grew
    without an end, and kept the rows of all commits."""
    monkeypatch.setattr(upkeep, "PRUNE_TOPICS", 2)
    for name in ("a", "b", "c"):
        rig.create_topic(name, JSON)
    rig.create_topic("lost", JSON, dead_letter="later")
    rig.put("lost", "k", b"{}", ttl=0)
    assert rig.topic(UNDELIVERED).statistics.journal_entries
    rig.time.tick(HOUR)
    rig.prune()
    assert not any(topic.statistics.journal_entries for topic in rig.store.topics.by_id.values())


def test_while_the_target_is_missing_copies_wait_and_move_when_it_appears(rig: Rig) -> None:
    """Row RabbitMQ 9."""
    rig.create_topic("lost", JSON, dead_letter="later")
    assert rig.topic(UNDELIVERED).settings.message_type is MessageType.BINARY
    before = commits(rig)
    outcome = rig.put("lost", "k", b"{}", ttl=0)
    assert commits(rig) == before + 1
    key, payload = copy_of(rig, UNDELIVERED)
    assert key == rf"later|json|lost\|k\|{outcome.last_version}"
    rig.crash()
    rig.create_topic("later", JSON, default_ttl_micros=TTL)
    assert not rig.stored(UNDELIVERED)
    assert copy_of(rig, "later") == (f"lost|k|{outcome.last_version}", payload)
    (found,) = rig.live("later").values()
    assert found.expire_time_micros == rig.clock.now_micros() + TTL
    assert rig.kinds(UNDELIVERED)[-1][0] == "delete"
    rig.put("lost", "k2", b"{}", ttl=0)
    assert len(rig.live("later")) == 2


def test_a_dynamic_topic_can_be_the_target_that_appears(tmp_path: Path) -> None:
    rig = Rig(tmp_path, options=store.StoreOptions(dynamic_topics=True))
    rig.create_topic("lost", JSON, dead_letter="later")
    rig.put("lost", "k", b"{}", ttl=0)
    rig.put("later", "own", b"{}")
    assert len(rig.live("later")) == 2


@pytest.mark.parametrize("killed", [False, True])
def test_moving_goes_on_after_an_interruption(rig: Rig, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    monkeypatch.setattr(background, "LETTERS_CHUNK", 3)
    rig.create_topic("lost", JSON, dead_letter="later")
    rig.create_topic("lost2", JSON, dead_letter="late")
    for number in range(10):
        rig.put("lost", str(number), b"{}", ttl=0)
        rig.put("lost2", str(number), b"{}", ttl=0)
    answers: list[object] = []
    rig.store.administration.create_topic("later", declared_of(JSON), answers.append)
    rig.turn()
    rig.turn()
    assert len(rig.live("later")) == 3
    if killed:
        rig.crash()
    else:
        rig.store.writer.step()
    assert len(rig.live("later")) == 10
    assert {key.split(b"|")[0] for key in rig.live(UNDELIVERED)} == {b"late"}


def test_a_target_that_cannot_take_the_copies_is_missing_until_it_can(rig: Rig) -> None:
    rig.create_topic("picky", JSON, message_type=MessageType.MSGPACK)
    lost = rig.create_topic("lost", JSON)
    lost.apply(lost.settings._replace(dead_letter="picky"), lost.indexes)  # as a policy might
    rig.put("lost", "k", b"{}", ttl=0)
    assert len(rig.live(UNDELIVERED)) == 1
    assert fates(rig) == {"retained": 1}
    rig.alter_topic("picky", message_type=MessageType.BINARY)
    assert not rig.live(UNDELIVERED)
    assert len(rig.live("picky")) == 1
    assert fates(rig) == {"retained": 1, "delivered": 1}


def test_a_copy_that_has_waited_does_not_replace_a_newer_record(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LETTERS_CHUNK", 1)
    rig.create_topic("lost", JSON, dead_letter="later", dead_letter_by_key=True)
    for key in ("a", "b"):
        rig.put("lost", key, b'{"n":1}', ttl=0)
    rig.time.tick(1)
    answers: list[object] = []
    rig.store.administration.create_topic("later", declared_of(JSON), answers.append)
    rig.turn()
    rig.turn()  # it has moved "a"
    assert list(rig.live("later")) == [b"a"]
    rig.store.commits.submit(
        Publish("lost", [b'{"n":2}'], ["b"], lifetime=Lifetime(LifetimeKind.TTL, 0)), answers.append
    )
    rig.store.writer.step()
    assert not rig.live(UNDELIVERED)
    assert {key: json.loads(found.payload)["n"] for key, found in rig.live("later").items()} == {b"a": 1, b"b": 2}


@pytest.mark.parametrize("chunk", [1, 250])
@pytest.mark.parametrize("later", ["json", "packed"])
def test_the_newer_of_two_copies_of_different_types_for_one_key_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, later: str, chunk: int
) -> None:
    """T3: with their own keys they would have replaced each other in the order of the expiries."""
    monkeypatch.setattr(background, "LETTERS_CHUNK", chunk)
    by_key = {"dead_letter": "later", "dead_letter_by_key": True}
    rig.create_topic("json", JSON, by_key)
    rig.create_topic("packed", JSON, by_key, message_type=MessageType.MSGPACK)
    payloads = {"json": b"{}", "packed": msgspec.msgpack.encode({})}
    for name in sorted(payloads, key=lambda name: name == later):
        rig.put(name, "a", payloads[name], ttl=TTL)
        rig.time.tick(TTL)
        rig.store.sweep()
    rig.create_topic("later", JSON, message_type=MessageType.BINARY)
    key, payload = copy_of(rig, "later")
    decode = json.loads if later == "json" else msgspec.msgpack.decode
    assert (key, decode(payload)["dead_letter"][0]["topic"]) == ("a", later)
    assert rig.stored(UNDELIVERED) == {}


def test_a_deleted_target_is_missing_again(rig: Rig) -> None:
    rig.delete_topic("dead")
    rig.put("orders", "k", b"{}", ttl=0)
    assert len(rig.live(UNDELIVERED)) == 1


def test_copies_are_dropped_and_counted_if_the_topic_does_not_retain_them(rig: Rig) -> None:
    rig.create_topic("lost", JSON, dead_letter="nowhere", on_missing=OnMissing.DROP)
    rig.delete_topic("orders")
    rig.put("lost", "k", b"{}", ttl=0)
    assert fates(rig) == {"dropped": 1}
    assert not rig.live(UNDELIVERED)


def test_only_the_store_writes_to_the_topic_of_undelivered_letters(rig: Rig) -> None:
    rig.create_topic("lost", JSON, dead_letter="later")
    rig.put("lost", "k", b"{}", ttl=0)
    (key,) = rig.live(UNDELIVERED)
    refused = (
        lambda: rig.put(UNDELIVERED, "x", b"x"),
        lambda: rig.run(Touch(UNDELIVERED, [key.decode()], PERMANENT)),
        lambda: rig.run(Restamp(UNDELIVERED, [key.decode()], RestampMode.CLEAR)),
        lambda: rig.alter_topic(UNDELIVERED, journal=False),
        lambda: rig.delete_topic(UNDELIVERED),
    )
    for attempt in refused:
        with pytest.raises(StoreError, match="reserved") as error:
            attempt()
        assert error.value.reason is Reason.TOPIC_NAME_INVALID
    assert rig.run(Delete(UNDELIVERED, [key.decode()])).applied == 1, "what nobody will ask for can be thrown away"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "changes", "field", "text"),
    [
        ("orders", {"dead_letter": "orders"}, "dead_letter", "the topic itself"),
        ("orders", {"dead_letter": "no name"}, "dead_letter", "no topic name"),
        ("orders", {"dead_letter": UNDELIVERED}, "dead_letter", "no topic name"),
        ("orders", {"dead_letter": "keyed"}, "dead_letter", r"keyed has key = \['/id'\]"),
        ("orders", {"dead_letter": "packed"}, "dead_letter", "'msgpack', but its dead letters need 'json' or 'binary'"),
        ("orders", {"message_type": MessageType.MSGPACK}, "dead_letter", "dead has message_type = 'json'"),
        ("dead", {"key": ("/id",)}, "key", r"\['/id'\].*orders has dead_letter = 'dead'"),
        ("dead", {"message_type": MessageType.NVFIX}, "message_type", "'nvfix'.*orders has dead_letter"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    rig: Rig, topic: str, changes: dict[str, object], field: str, text: str
) -> None:
    rig.create_topic("keyed", JSON, key=("/id",))
    rig.create_topic("packed", JSON, message_type=MessageType.MSGPACK)
    before = rig.topic(topic).settings
    with pytest.raises(StoreError, match=text) as error:
        rig.alter_topic(topic, changes)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    assert error.value.field == f"settings.{field}"
    assert rig.topic(topic).settings == before


def test_a_policy_never_prevents_the_creation_of_a_topic(rig: Rig) -> None:
    """T2, dead_letters [4]: for a topic that it does not suit the target is missing; nothing else about the topic is
    refused."""
    rig.set_policy("p", ".*", dead_letter="grave")
    rig.create_topic("packed", JSON, message_type=MessageType.MSGPACK)
    rig.create_topic("grave", JSON)  # fit for most, but not for `packed`
    rig.create_topic("more", JSON, message_type=MessageType.MSGPACK)
    rig.alter_topic("more", max_ttl_micros=TTL)
    rig.put("more", "a", msgspec.msgpack.encode({}))
    rig.time.tick(TTL)
    rig.store.sweep()
    assert fates(rig) == {"retained": 1}
    with pytest.raises(StoreError, match="grave has message_type = 'json'"):
        rig.alter_topic("more", dead_letter="grave")


def test_a_separator_has_to_be_the_same(rig: Rig) -> None:
    nvfix = JSON._replace(message_type=MessageType.NVFIX)
    rig.create_topic("semicolons", nvfix, separator=b";")
    with pytest.raises(StoreError, match=r"b';', but its dead letters have b'\\x01'"):
        rig.create_topic("fields", nvfix, dead_letter="semicolons")


def test_a_topic_that_is_waited_for_cannot_be_created_unfit(rig: Rig) -> None:
    rig.create_topic("lost", JSON, dead_letter="later")
    with pytest.raises(StoreError, match="lost has dead_letter = 'later'"):
        rig.create_topic("later", JSON, key=("/id",))


# --- followers -------------------------------------------------------------------------------------------------------


def test_followers_of_the_target_get_the_copy_and_those_of_the_topic_the_expiry(rig: Rig) -> None:
    subscribers = Subscribers(rig)
    source = subscribers.subscribe("orders", oof=True)
    target = subscribers.subscribe("dead", filter="/px > 0")
    rig.put("orders", "k", b'{"px":1}', ttl=TTL)
    rig.put("orders", "other", b'{"px":0}', ttl=TTL)
    assert [news[:2] for news in source.news()] == [("put", "k"), ("put", "other")]
    rig.time.tick(TTL)
    rig.store.sweep()
    assert [news[:2] for news in source.news()] == [("oof expired", "k"), ("oof expired", "other")]
    ((name, key, payload),) = target.news()
    assert (name, key.split("|")[:2], json.loads(payload)["px"]) == ("put", ["orders", "k"], 1)


@pytest.mark.parametrize("late", [False, True])
def test_an_atomic_request_is_delivered_as_a_whole_and_its_dead_letters_after_it(rig: Rig, late: bool) -> None:
    """Rule S5: of one topic and of all, live and from the journal, there is no bookmark inside the request."""
    subscribers = Subscribers(rig)
    begin = rig.store.writer.last_sequence
    start = at(begin, rig)

    def subscribe() -> tuple[Follower, Follower, Follower]:
        return (
            subscribers.subscribe("orders", oof=True, batch_size=2, start=start),
            subscribers.subscribe("dead", start=start),
            subscribers.subscribe(pattern=".*", oof=True, batch_size=2, start=start),
        )

    early = None if late else subscribe()
    rig.put("orders", "b", b'{"n":0}', ttl=TTL)
    rig.time.tick(TTL)
    lifetimes = [Lifetime(LifetimeKind.TTL, TTL), Lifetime(LifetimeKind.TTL, TTL), Lifetime(LifetimeKind.TTL, 0)]
    before = commits(rig)
    rig.run(Publish("orders", [b'{"n":1}'] * 3, ["a", "b", "c"], lifetimes=lifetimes, atomic=True))
    assert commits(rig) == before + 1
    # put b | put a, expire b, put b, put c, expire c | the copies of b and, with nobody there to be handed it, of c
    letters = [begin + 7, begin + 8] if late else [begin + 7]
    assert [entry.sequence for entry in rig.journal("orders")] == list(range(begin + 1, begin + 7))
    assert [entry.sequence for entry in rig.journal("dead")] == letters
    subscribers.settle()
    one, dead, many = early or subscribe()
    for follower in (one, dead, many):
        follower.pump()
    for follower in (one, many):
        atomic = [frame for frame in follower.change_frames() if frame.atomic]
        assert {frame.topic for frame in atomic} == {"orders"}
        assert [frame.more for frame in atomic] == [True] * (len(atomic) - 1) + [False]
        assert len(atomic) > 1
        assert atomic[-1].bookmark == begin + 6
        assert all(frame.bookmark <= begin + 1 for frame in atomic[:-1]), "none inside the request"
    assert [frame.atomic for frame in dead.change_frames()] == [False]
    assert [row.sequence for row in dead.changes()] == letters
    told = [(frame.topic, row.sequence) for frame in many.change_frames() for row in frame.rows]
    assert [sequence for _, sequence in told] == sorted(sequence for _, sequence in told)
    assert [topic for topic, _ in told if topic == "dead"] == ["dead"] * len(letters)
    assert many.bookmark == letters[-1]


def test_an_atomic_request_that_is_refused_leaves_no_letters(rig: Rig) -> None:
    rig.put("orders", "k", b"{}", ttl=TTL)
    rig.time.tick(TTL)
    rig.run(Publish("orders", [b"{}", b"{"], ["k", "x"], atomic=True))
    assert not rig.live("dead")
    rig.store.sweep()
    assert len(rig.live("dead")) == 1


def test_the_commits_tell_the_runs_of_both_topics(rig: Rig) -> None:
    rig.put("orders", "k", b"{}", ttl=0)
    commit = decode_commit(*rig.rows(COMMITS)[-1])
    runs = [(run.topic_id, run.length) for run in commit.runs]
    assert runs == [(rig.topic("orders").id, 2), (rig.topic("dead").id, 1)]


def test_topics_without_dead_letters_have_none(rig: Rig) -> None:
    rig.create_topic("plain", JSON)
    rig.put("plain", "k", b"{}", ttl=0)
    assert fates(rig) == {}
    assert set(rig.store.writer.letters_total) == set(Fate)
