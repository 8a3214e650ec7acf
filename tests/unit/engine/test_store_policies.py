"""Policies on a store: set and deleted at run time, in force at once and after any crash (rules T2, T4, L12)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from sow_server.engine import background
from sow_server.engine.administration import expiration
from sow_server.engine.background import Rearming
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.disk.layout import TOPIC_KEY
from sow_server.engine.disk.rocks import EXPIRY, META, Batch
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.database import Stalled
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER, Expiration, MessageType, TopicSettings
from sow_server.engine.values.policies import Declared, Policy, PolicyTarget
from tests.support.stores.stores import BINARY, DAY, HOUR, MINUTE, SECOND, FaultyRocks, Rig

ENABLED: Final[Declared] = {"expiration": Expiration.ENABLED}
PLAIN: Final = TopicSettings(message_type=MessageType.BINARY)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def origin(rig: Rig, topic: str, field: str) -> str:
    return rig.store.administration.effective(rig.topic(topic)).origins[field]


@pytest.mark.parametrize("restart", ["crash", "reopen"])
def test_policies_survive_a_restart(rig: Rig, restart: str) -> None:
    """T4."""
    rig.create_topic("orders")
    rig.set_policy("p", "ord.*", priority=3, retain_bytes=None, max_entries=7)
    rig.set_policy("p", "ord.*", operator=True, max_entries=5)
    durables = Policy("d", "orders/.*", {"retain_time_micros": None}, target=PolicyTarget.DURABLES)
    rig.store.administration.set_policy(durables)
    rig.store.writer.step()
    before = list(rig.store.administration.policies)
    assert len(before) == 3
    getattr(rig, restart)()
    assert list(rig.store.administration.policies) == before
    settings = rig.topic("orders").settings
    assert (settings.retain_bytes, settings.max_entries) == (None, 5)
    assert origin(rig, "orders", "max_entries") == "operator policy p"


def test_a_policy_is_in_force_at_once_and_gone_when_it_is_deleted(rig: Rig) -> None:
    """T4, Pulsar 3, RabbitMQ 1: set, get, remove by pattern; a topic that is made later has it, too."""
    rig.create_topic("orders")
    rig.create_topic("quotes", retain_bytes=9)
    rig.set_policy("p", "orders|quotes|later", retain_bytes=5)
    rig.create_topic("later")
    rig.create_topic("other")
    found = [rig.topic(name).settings.retain_bytes for name in ("orders", "quotes", "later", "other")]
    assert found == [5, 9, 5, 256 * 2**20]
    assert rig.store.administration.policy_matches()[PolicyTarget.TOPICS, "policy p"] == 2
    rig.alter_topic("orders", retain_bytes=1)
    assert rig.topic("orders").settings.retain_bytes == 1
    rig.store.administration.alter_topic("orders", lambda declared: {"expiration": declared["expiration"]})
    rig.store.writer.step()
    assert rig.topic("orders").settings.retain_bytes == 5, "declared no more, so the policy's again"
    rig.delete_policy("p")
    assert [rig.topic(name).settings.retain_bytes for name in ("orders", "quotes")] == [256 * 2**20, 9]


def test_limits_act_at_once_and_stamps_never_change(rig: Rig) -> None:
    """T4, L12, RabbitMQ 10: a policy applied later leaves existing records unchanged."""
    rig.create_topic("orders")
    rig.put("orders", "before", ttl=HOUR)
    rig.put("orders", "for ever")
    rig.set_policy("o", ".*", operator=True, max_ttl_micros=MINUTE)
    rig.put("orders", "after", ttl=HOUR)
    now = rig.clock.now_micros()
    stamps = {key: record.expire_time_micros - now for key, record in rig.live("orders").items()}
    assert stamps == {b"before": HOUR, b"for ever": NEVER - now, b"after": MINUTE}


def test_disabling_by_policy_expires_overdue_records_first_and_enabling_later_ones(rig: Rig) -> None:
    """L12, through a policy as through the topic itself; AMPS 11."""
    rig.create_topic("orders", PLAIN, in_config=True)
    rig.create_topic("quotes", PLAIN, in_config=True)
    rig.set_policy("p", "orders|quotes", ENABLED)
    for topic in ("orders", "quotes"):
        rig.put(topic, "soon", ttl=SECOND)
        rig.put(topic, "later", ttl=MINUTE)
    rig.time.tick(SECOND)
    rig.delete_policy("p")
    for topic in ("orders", "quotes"):
        assert list(rig.stored(topic)) == [b"later"], "the overdue record is gone, and does not reappear"
        assert rig.kinds(topic)[-1] == ("expire", "soon")
    rig.time.tick(HOUR)
    assert rig.count("orders") == 1, "a record that was not due stays"
    rig.set_policy("p", "orders|quotes", ENABLED)
    assert rig.count("orders") == rig.count("quotes") == 0
    rig.store.sweep()
    assert rig.kinds("quotes")[-1] == ("expire", "later")


def test_a_policy_that_disables_while_the_expiry_index_is_being_filled_hides_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12: overdue records that are not in the index yet are removed first."""
    monkeypatch.setattr(background, "REARM_CHUNK", 2)
    rig.create_topic("orders", PLAIN, in_config=True)
    for number in range(9):
        rig.put("orders", f"{number}", ttl=SECOND)
    rig.time.tick(SECOND)
    rig.store.administration.set_policy(Policy("p", ".*", ENABLED))
    rig.turn()  # enabled, and the filling has not begun
    answers: list[Policy | StoreError] = []
    rig.store.administration.delete_policy("p", operator=False).then(answers.append)
    rig.answer(answers)
    assert rig.stored("orders") == {}
    assert not rig.topic("orders").acts


def test_many_topics_that_are_disabled_while_they_are_re_armed_share_no_huge_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L14: a commit takes up some of them, until all are complete."""
    monkeypatch.setattr(expiration, "REARM_ROUND", 4)
    for number in range(5):
        rig.create_topic(f"t{number}", PLAIN, in_config=True)
        for key in range(3):
            rig.put(f"t{number}", f"{key}", ttl=SECOND)
    rig.time.tick(SECOND)
    rig.store.administration.set_policy(Policy("p", ".*", ENABLED))
    rig.turn()  # enabled, and nothing is re-armed
    faulty = FaultyRocks(rig)
    answers: list[Policy | StoreError] = []
    rig.store.administration.delete_policy("p", operator=False).then(answers.append)
    rig.answer(answers)
    assert [rig.stored(f"t{number}") for number in range(5)] == [{}] * 5
    assert max(len(batch.puts[EXPIRY]) for batch in faulty.attempts) == 6


def test_many_topics_are_enabled_one_after_the_other(tmp_path: Path) -> None:
    """A policy may enable more topics than the writer's queue takes at once."""
    options = StoreOptions()
    options = replace(options, writer=replace(options.writer, queue_requests_max=2))
    rig = Rig(tmp_path, options=options)
    names = [f"t{number}" for number in range(10)]
    for name in names:
        rig.create_topic(name, PLAIN, in_config=True)
        rig.put(name, "a", ttl=SECOND)
    rig.set_policy("p", "t.*", ENABLED)
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert [rig.stored(name) for name in names] == [{}] * 10
    rig.close()


def test_a_topic_that_cannot_be_re_armed_does_not_keep_the_others_from_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12: of the others, records that have become overdue are expired at once."""
    for name in ("a", "b", "c"):
        rig.create_topic(name, PLAIN, in_config=True)
        rig.put(name, "key", ttl=SECOND)
    rig.time.tick(SECOND)
    stage_records = Rearming.stage_records

    def failing(work: Rearming, draft: Draft, keys: list[bytes], values: list[bytes]) -> None:
        if work.topic_name == "b":
            raise RuntimeError("as asked for")
        stage_records(work, draft, keys, values)

    monkeypatch.setattr(Rearming, "stage_records", failing)
    rig.set_policy("p", ".*", ENABLED)
    rig.store.sweep()
    assert [len(rig.stored(name)) for name in ("a", "b", "c")] == [0, 1, 0]


@pytest.mark.parametrize("written", [True, False])
def test_a_policy_and_its_effects_are_written_atomically(tmp_path: Path, written: bool) -> None:
    """T4: a process that is killed while a policy is set has it on all topics, or on none."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(stall_patience_micros=0)))
    for number in range(5):
        rig.create_topic(f"t{number}", PLAIN, in_config=True)
    faulty = FaultyRocks(rig)
    if not written:
        faulty.writes = [Stalled("as asked for")] * 1000
    answers: list[Policy | StoreError] = []
    rig.store.administration.set_policy(Policy("p", "t[0-3]", {"max_entries": 3, **ENABLED})).then(answers.append)
    rig.turn()
    rig.crash()
    found = [rig.topic(f"t{number}").settings.max_entries for number in range(5)]
    assert found == ([3, 3, 3, 3, None] if written else [None] * 5)
    assert len(rig.store.administration.policies) == written
    if written:
        rig.put("t0", "a", ttl=SECOND)
        rig.time.tick(SECOND)
        rig.store.sweep()
        assert rig.stored("t0") == {}, "the expiry index is complete again"
    rig.close()


def test_a_start_applies_changed_defaults(tmp_path: Path) -> None:
    """T2: the server's defaults may change between two starts; topics that they disable expire first (L12)."""
    rig = Rig(tmp_path, options=StoreOptions(defaults={**ENABLED, "retain_bytes": 5}))
    rig.create_topic("orders", PLAIN, in_config=True)
    assert (rig.topic("orders").settings.retain_bytes, origin(rig, "orders", "retain_bytes")) == (5, "default")
    rig.put("orders", "soon", ttl=SECOND)
    rig.put("orders", "later", ttl=DAY)
    rig.time.tick(SECOND)
    rig.options = StoreOptions()
    rig.crash()
    assert not rig.topic("orders").acts
    assert list(rig.stored("orders")) == [b"later"]
    assert rig.kinds("orders")[-1] == ("expire", "soon")
    rig.options = StoreOptions(defaults=ENABLED)
    rig.reopen()
    rig.time.tick(DAY)
    rig.store.sweep()
    assert rig.stored("orders") == {}
    rig.close()


def test_a_topic_of_an_older_version_declares_its_settings(rig: Rig) -> None:
    """Rows of a release without policies have the settings in force, but not their sources."""
    rig.create_topic("orders", retain_bytes=5)
    (row,) = [(key, value) for key, value in rig.rows(META, TOPIC_KEY, TOPIC_KEY + b"\xff")]
    fields = json.loads(row[1])
    del fields["declared"], fields["dynamic"]
    batch = Batch()
    batch.puts[META][row[0]] = json.dumps(fields).encode()
    rig.store._rocks.write(batch)
    rig.reopen()
    rig.set_policy("p", ".*", retain_bytes=9, retain_time_micros=MINUTE)
    settings = rig.topic("orders").settings
    assert settings == BINARY._replace(retain_bytes=5, retain_time_micros=MINUTE)


def test_a_policy_that_is_refused_changes_nothing(rig: Rig) -> None:
    rig.create_topic("orders")
    with pytest.raises(StoreError) as caught:
        rig.set_policy("p", "(", max_entries=1)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    with pytest.raises(StoreError) as caught:
        rig.delete_policy("p")
    assert caught.value.reason is Reason.POLICY_NOT_FOUND
    assert (len(rig.store.administration.policies), rig.topic("orders").settings) == (0, BINARY)


def test_a_dynamic_topic_takes_its_expiration_from_a_policy(tmp_path: Path) -> None:
    """K1, R1: topics that nobody created have the lifetimes that their pattern gives them."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    rig.set_policy("p", "temp.*", ENABLED, default_ttl_micros=MINUTE)
    rig.put("temp.a", "k", b"{}")
    rig.put("kept", "k", b"{}")
    rig.time.tick(MINUTE)
    assert (rig.count("temp.a"), rig.count("kept")) == (0, 1)
    assert rig.topic("kept").settings.expiration is Expiration.ENABLED
    rig.crash()
    rig.delete_policy("p")
    assert rig.topic("temp.a").settings == TopicSettings(expiration=Expiration.ENABLED), "still a dynamic one"
    rig.close()


def test_a_topic_that_leaves_the_file_may_be_deleted_by_policies_again(rig: Rig) -> None:
    """K1, T1."""
    rig.create_topic("orders", in_config=True)
    rig.set_policy("p", ".*", idle_ttl_micros=HOUR)
    assert rig.topic("orders").settings.idle_ttl_micros is None
    rig.release_topic("orders")
    assert (rig.topic("orders").settings.idle_ttl_micros, origin(rig, "orders", "idle_ttl_micros")) == (
        HOUR,
        "policy p",
    )


@pytest.mark.parametrize("changes", [{"idle_ttl_micros": HOUR}, {"auto_delete": True}])
def test_the_file_cannot_have_its_topics_deleted(rig: Rig, changes: dict[str, object]) -> None:
    """T1."""
    with pytest.raises(StoreError) as caught:
        rig.create_topic("orders", BINARY, changes, in_config=True)
    assert "contradicts that the topic is declared in the configuration file" in caught.value.message


def test_a_dead_letter_topic_is_another_topic(rig: Rig) -> None:
    """T3."""
    with pytest.raises(StoreError) as caught:
        rig.create_topic("orders", dead_letter="orders")
    assert caught.value.message == "dead_letter: orders is the topic itself"
    assert caught.value.field == "settings.dead_letter"
