"""Topics come from the configuration or an administrator, and change by rules (K1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Condition,
    ConditionKind,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Outcome,
    Publish,
    PublisherPosition,
    TopicSettings,
)
from tests.support.stores.stores import BINARY, DAY, MINUTE, SECOND, Rig, replaced

JSON = TopicSettings(key=("/id",))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.parametrize("restart", ["crash", "reopen"])
def test_topics_and_their_settings_survive_a_restart(rig: Rig, restart: str) -> None:
    """K1: each field of the settings."""
    settings = TopicSettings(
        key=("/55", "/109"),
        message_type=MessageType.FIX,
        expiration=Expiration.ENABLED,
        default_ttl_micros=MINUTE,
        min_ttl_micros=SECOND,
        max_ttl_micros=DAY,
        journal=False,
        separator=b"\xff",
        retain_time_micros=None,
        retain_bytes=7,
        index=("/44",),
    )
    created = rig.create_topic("a", settings, in_config=True)
    rig.create_topic("b")
    rig.time.tick(SECOND)
    getattr(rig, restart)()
    found = rig.topic("a")
    assert found.settings == settings
    assert found.in_config
    assert (found.id, found.create_time_micros) == (created.id, created.create_time_micros)
    assert rig.topic("b").settings == BINARY
    assert list(rig.store.topics.by_name) == ["a", "b"]


@pytest.mark.parametrize("name", ["orders", "a.b:c-d_E9", "x" * 200])
def test_names_of_topics(rig: Rig, name: str) -> None:
    assert rig.create_topic(name).name == name


@pytest.mark.parametrize("name", ["", "x" * 201, "a b", "a/b", "é", "_reserved", "a\n"])
def test_other_names_are_refused(rig: Rig, name: str) -> None:
    """K1: a leading underscore is reserved."""
    with pytest.raises(StoreError) as caught:
        rig.create_topic(name)
    assert caught.value.reason is Reason.TOPIC_NAME_INVALID


def test_a_topic_is_created_once(rig: Rig) -> None:
    rig.create_topic("orders")
    with pytest.raises(StoreError) as caught:
        rig.create_topic("orders", JSON)
    assert caught.value.reason is Reason.TOPIC_EXISTS
    assert rig.topic("orders").settings == BINARY


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key": ("id",)}, "key"),
        ({"key": ("/a", "/a/b")}, "key"),
        ({"message_type": MessageType.BINARY, "key": ("/id",)}, "key"),
        ({"expiration": Expiration.DISABLED, "default_ttl_micros": 1}, "default_ttl"),
        ({"expiration": Expiration.REJECT, "default_ttl_micros": 1}, "default_ttl"),
        ({"min_ttl_micros": 2, "max_ttl_micros": 1}, "min_ttl"),
        ({"max_ttl_micros": 0}, "max_ttl"),
        ({"max_ttl_micros": -1}, "max_ttl"),
        ({"min_ttl_micros": 4_000 * DAY}, "min_ttl"),
        ({"separator": b"|"}, "fix_separator"),
        ({"message_type": MessageType.NVFIX, "separator": b"||"}, "fix_separator"),
        ({"retain_time_micros": 0}, "retain_time"),
        ({"retain_bytes": 0}, "retain_time"),
        ({"retain_bytes": -1}, "retain_bytes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    rig: Rig, changes: dict[str, object], field: str
) -> None:
    """Pulsar 2, X2, L1, J3: at creation and at a change alike, and nothing is half-done."""
    base = TopicSettings(expiration=Expiration.ENABLED)
    with pytest.raises(StoreError) as caught:
        rig.create_topic("orders", base, changes)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, f"settings.{field}")
    assert not rig.store.topics.by_name
    rig.create_topic("orders", base)
    with pytest.raises(StoreError) as caught:
        rig.alter_topic("orders", changes)
    assert caught.value.field == f"settings.{field}"
    assert rig.topic("orders").settings == base


def test_topics_of_the_configuration_belong_to_it(rig: Rig) -> None:
    """K1: altering or deleting it over the API is refused; the configuration itself may."""
    rig.create_topic("orders", in_config=True)
    for change in (lambda: rig.alter_topic("orders", max_ttl_micros=DAY), lambda: rig.delete_topic("orders")):
        with pytest.raises(StoreError) as caught:
            change()
        assert caught.value.reason is Reason.SET_IN_CONFIG
    rig.alter_topic("orders", in_config=True, max_ttl_micros=DAY)
    assert rig.topic("orders").settings.max_ttl_micros == DAY
    assert rig.topic("orders").in_config


def test_a_topic_that_leaves_the_configuration_stays_as_if_an_administrator_had_made_it(rig: Rig) -> None:
    """K1: with its records; a restart does not forget it."""
    rig.create_topic("orders", in_config=True)
    rig.put("orders", "a")
    rig.release_topic("orders")
    rig.crash()
    assert not rig.topic("orders").in_config
    assert rig.count("orders") == 1
    rig.alter_topic("orders", max_ttl_micros=DAY)
    assert rig.delete_topic("orders") == 1


def test_a_topic_may_enter_the_configuration(rig: Rig) -> None:
    """K1: declaring a topic that an administrator had created."""
    rig.create_topic("orders")
    rig.alter_topic("orders", in_config=True, max_ttl_micros=DAY)
    assert rig.topic("orders").in_config


@pytest.mark.parametrize("changes", [{"key": ("/other",)}, {"message_type": MessageType.MSGPACK}, {"key": ()}])
def test_key_and_message_type_change_only_while_the_topic_is_empty(rig: Rig, changes: dict[str, object]) -> None:
    """K1."""
    rig.create_topic("orders", JSON)
    rig.run(Publish("orders", [b'{"id":1}']))
    with pytest.raises(StoreError) as caught:
        rig.alter_topic("orders", changes)
    assert caught.value.reason is Reason.TOPIC_NOT_EMPTY
    assert rig.topic("orders").settings == JSON
    rig.delete("orders", "1")
    assert rig.alter_topic("orders", changes).settings == replaced(JSON, changes)


def test_a_topic_whose_records_have_all_expired_is_empty(rig: Rig) -> None:
    """K1, L8."""
    rig.create_topic("orders", JSON, expiration=Expiration.ENABLED)
    rig.run(Publish("orders", [b'{"id":1}'], lifetime=Lifetime(LifetimeKind.TTL, SECOND)))
    rig.time.tick(SECOND)
    rig.alter_topic("orders", key=("/other",))
    rig.run(Publish("orders", [b'{"other":7}']))
    assert list(rig.live("orders")) == [b"7"]
    assert list(rig.stored("orders")) == [b"7"]


def test_deleting_a_topic_takes_its_records_and_journal_and_leaves_its_neighbours(rig: Rig) -> None:
    """K1: the answer is how many live records it had."""
    for name in ("a", "b", "c"):
        rig.create_topic(name)
        rig.put(name, "1", ttl=SECOND)
        rig.put(name, "2")
    rig.time.tick(SECOND)
    assert rig.delete_topic("b") == 1
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            rig.topic("b")
        assert caught.value.reason is Reason.TOPIC_NOT_FOUND
        assert [rig.count(name) for name in ("a", "c")] == [1, 1]
        rig.crash()
    rig.create_topic("b")
    assert (rig.live("b"), rig.journal("b")) == ({}, [])
    assert rig.store.durable_commits.topic_statistics(rig.topic("b")).stored_records == 0
    assert rig.topic("b").id == 4, "an id is never used again"


def test_an_operation_on_a_topic_that_is_not_there_says_so(rig: Rig) -> None:
    for change in (lambda: rig.alter_topic("no"), lambda: rig.delete_topic("no")):
        with pytest.raises(StoreError) as caught:
            change()
        assert caught.value.reason is Reason.TOPIC_NOT_FOUND


def test_the_first_publish_creates_a_topic_where_that_is_allowed(tmp_path: Path) -> None:
    """K1: json, keys from the publisher, expiration enabled; only by a publish, and not under an impossible name."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    with pytest.raises(StoreError):
        rig.delete("new", "a")
    with pytest.raises(StoreError) as caught:
        rig.put("_new", "a")
    assert caught.value.reason is Reason.TOPIC_NAME_INVALID
    rig.run_together([Publish("new", [b"{}"], ["a"]), Publish("new", [b"{}"], ["b"]), Publish("newer", [b"{}"], ["c"])])
    assert rig.topic("new").settings == TopicSettings(expiration=Expiration.ENABLED)
    assert (rig.count("new"), rig.count("newer")) == (2, 1)
    rig.put("new", "a", b"{}", ttl=SECOND)
    rig.time.tick(SECOND)
    rig.crash()
    assert list(rig.live("new")) == [b"b"]
    rig.close()


def test_without_dynamic_topics_a_publish_creates_none(rig: Rig) -> None:
    """K1."""
    with pytest.raises(StoreError) as caught:
        rig.put("new", "a")
    assert caught.value.reason is Reason.TOPIC_NOT_FOUND


def test_a_topic_that_exists_is_not_created_again_with_equal_settings_either(rig: Rig) -> None:
    """K1: its creator learns that it was there before, with its records; nothing of it changes."""
    settings = BINARY._replace(expiration=Expiration.ENABLED)
    before = rig.create_topic("orders", settings)
    rig.put("orders", "1", b"kept")
    for other in (settings, settings._replace(expiration=Expiration.DISABLED)):
        with pytest.raises(StoreError) as caught:
            rig.create_topic("orders", other)
        assert (caught.value.reason, caught.value.field) == (Reason.TOPIC_EXISTS, "name")
    assert rig.topic("orders") is before
    assert before.settings.acts_on_expiration
    assert rig.get("orders", "1") is not None


REFUSED_FIRST = {
    "without keys": Publish("new", [b"{}"]),
    "malformed": Publish("new", [b"{", b"nothing"], ["a", "b"]),
    "too large": Publish("new", [b"{}" * 2**20], ["a"]),
    "wanted to be there": Publish("new", [b"{}"], ["a"], conditions=[Condition(ConditionKind.IF_PRESENT)]),
    "a negative lifetime": Publish("new", [b"{}"], ["a"], lifetime=Lifetime(LifetimeKind.TTL, -1)),
    "atomic, and one is malformed": Publish("new", [b"{}", b"{"], ["a", "b"], atomic=True),
}


@pytest.mark.parametrize("request_", REFUSED_FIRST.values(), ids=REFUSED_FIRST)
def test_a_refused_first_publish_creates_no_topic(tmp_path: Path, request_: Publish) -> None:
    """K1. `sow publish nope --data '{"id":1}'` was refused for its missing key, and left an empty topic `nope` whose
    expiration, key and type nobody had chosen."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    (answer,) = rig.run_together([request_])
    assert isinstance(answer, StoreError) or (answer.refusals and not answer.applied)
    assert "new" not in rig.store.topics.by_name
    rig.put("made", "a", b"{}")
    assert rig.topic("made").id == 1, "no id was used either"
    rig.crash()
    assert list(rig.store.topics.by_name) == ["made"]
    rig.close()


def test_a_first_publish_with_one_good_record_creates_the_topic(tmp_path: Path) -> None:
    """K1: records stand alone (P4), so the others are refused as at any other time."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    outcome = rig.run(Publish("new", [b"{", b"{}"], ["a", "b"]))
    assert (outcome.applied, [refusal.index for refusal in outcome.refusals]) == (1, [0])
    assert list(rig.live("new")) == [b"b"]
    rig.close()


def test_a_publisher_remembers_what_was_refused_before_its_topic_was_there(tmp_path: Path) -> None:
    """K1, P6: a retry of the refused record gets the same answer, and the next sequence is no gap."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    bad = Publish("new", [b"{"], ["a"], publisher=PublisherPosition("p", 1, 1), want_results=True)
    good = Publish("new", [b"{}"], ["b"], publisher=PublisherPosition("p", 1, 2))
    first = rig.run(bad)
    assert "new" not in rig.store.topics.by_name
    assert rig.run(good).applied == 1
    rig.crash()
    again = rig.run(bad)
    assert [one.reason for one in again.refusals] == [one.reason for one in first.refusals]
    assert rig.run(good).duplicates == 1
    assert list(rig.live("new")) == [b"b"]
    rig.close()


def test_a_refused_first_publish_waits_for_what_its_publisher_sent_before(tmp_path: Path) -> None:
    """K1, P6. Both are in one turn of the writer: decided first, the refused one would make the other a duplicate."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    rig.create_topic("orders", TopicSettings())
    good = Publish("orders", [b"{}"], ["a"], publisher=PublisherPosition("p", 1, 1))
    bad = Publish("new", [b"{"], ["a"], publisher=PublisherPosition("p", 1, 2))
    first, second = rig.run_together([good, bad])
    assert isinstance(first, Outcome)
    assert isinstance(second, Outcome)
    assert (first.applied, first.duplicates, len(second.refusals)) == (1, 0, 1)
    assert list(rig.live("orders")) == [b"a"]
    rig.close()
