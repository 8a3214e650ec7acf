"""The topics that dead letters go to: missing ones, unfit ones, and settings that are refused (T3)."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from sow_server.engine import background, store, upkeep
from sow_server.engine.catalog.topics import UNDELIVERED
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    PERMANENT,
    Delete,
    Lifetime,
    LifetimeKind,
    MessageType,
    OnMissing,
    Publish,
    Restamp,
    RestampMode,
    Touch,
)
from sow_server.engine.values.policies import declared_of
from tests.support.stores.dead_letters import TTL, commits, copy_of, fates, rig
from tests.support.stores.stores import HOUR, Rig
from tests.support.stores.subscribers import JSON

__all__ = ["rig"]  # a fixture


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
    rig.store.administration.create_topic("later", declared_of(JSON)).then(answers.append)
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
    rig.store.administration.create_topic("later", declared_of(JSON)).then(answers.append)
    rig.turn()
    rig.turn()  # it has moved "a"
    assert list(rig.live("later")) == [b"a"]
    rig.store.commits.submit(Publish("lost", [b'{"n":2}'], ["b"], lifetime=Lifetime(LifetimeKind.TTL, 0))).then(
        answers.append
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
    """T2, letter_copies [4]: for a topic that it does not suit the target is missing; nothing else about the topic is
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
