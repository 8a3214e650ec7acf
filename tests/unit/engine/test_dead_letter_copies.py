"""The copy that is a dead letter: its key, payload and lifetime, cycles of copies, and its followers (T3, L7, S5)."""

from __future__ import annotations

import json

import msgspec
import pytest

from sow_client import PayloadForm
from sow_console import letter_contents
from sow_server.engine.commit import letter_copies
from sow_server.engine.commit.letter_copies import Fate
from sow_server.engine.disk.rocks import COMMITS
from sow_server.engine.stored import decode_commit
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Lifetime, LifetimeKind, MessageType, Publish
from tests.support.stores.dead_letters import TTL, commits, copy_of, fates, rig
from tests.support.stores.stores import Rig
from tests.support.stores.subscribers import JSON, Follower, Subscribers, at

__all__ = ["rig"]  # a fixture


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


@pytest.mark.parametrize("own", [b'"mine"', b"7", b"null", b'[{"topic":"a"}]', b'{"x":1.50}'])
def test_a_documents_own_field_is_kept_in_its_letter(rig: Rig, own: bytes) -> None:
    """T3. It was lost. It stays in the oldest letter when the copy is copied on, and the console restores it."""
    rig.create_topic("last", JSON)
    rig.alter_topic("dead", default_ttl_micros=0, dead_letter="last")
    rig.put("orders", "k", b'{"n":1,"dead_letter":%s}' % own, ttl=0)
    payload = copy_of(rig, "last")[1]
    letters = json.loads(payload)["dead_letter"]
    assert [letter["topic"] for letter in letters] == ["dead", "orders"]
    assert "replaced" not in letters[0]
    assert letters[1]["replaced"] == json.loads(own)
    restored, hops = letter_contents.opened(payload, PayloadForm("json"))
    assert len(hops) == 2
    assert restored == b'{"n":1,"dead_letter":%s}' % own, "byte for byte"


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
        (b"{}", b'{"dead_letter":[%s}]}'),
        (b" { } \n", b' {"dead_letter":[%s}]}'),
        (b'{"a":{"b":"}"}}', b'{"a":{"b":"}"},"dead_letter":[%s}]}'),
        (b'{"dead_letter":"mine","a":1}', b'{"a":1,"dead_letter":[%s,"replaced":"mine"}]}'),
        (b'{"dead_letter":[{"topic":1}]}', b'{"dead_letter":[%s,"replaced":[{"topic":1}]}]}'),
        (b'{"dead\\u005fletter":7}', b'{"dead_letter":[%s,"replaced":7}]}'),
        (
            b'{"dead_letter":[{"topic":"x","key":"y","version":3,"expire_time_micros":4,"reason":"expired"}]}',
            b'{"dead_letter":[%s},{"topic":"x","key":"y","version":3,"expire_time_micros":4,"reason":"expired"}]}',
        ),
    ],
)
def test_the_list_is_added_to_a_json_document(rig: Rig, payload: bytes, wanted: bytes) -> None:
    outcome = rig.put("orders", "k", payload, ttl=0)
    letter = b'{"topic":"orders","key":"k","version":%d,"expire_time_micros":%d,"reason":"expired"'
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
    assert len(key) <= letter_copies.KEY_BYTES_MAX
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
    """An overdue record of each topic under one key, each topic the other's target: letter_posting [1]."""
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
    hops = letter_copies.HOPS_MAX + 2
    for hop in range(hops):
        rig.create_topic(f"hop{hop}", JSON, dead_letter=f"hop{hop - 1}" if hop else "", default_ttl_micros=0)
    rig.put(f"hop{hops - 1}", "k", b"{}")
    assert fates(rig) == {"delivered": letter_copies.HOPS_MAX, "dropped": 1}


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
