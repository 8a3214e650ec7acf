"""Rows of docs/origins.md that no test elsewhere shows whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sow_server import config
from sow_server.declaring import declare_topics
from sow_server.engine import store
from sow_server.engine.durables import RewindTo
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Restamp,
    RestampMode,
    TopicSettings,
)
from sow_server.engine.values.policies import Declared, Policy, PolicyTarget
from sow_server.timers import PeriodicJob
from tests.support.stores.stores import HOUR, MINUTE, SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, Subscribers, at
from tests.support.stores.timers import timers

JSON = TopicSettings(expiration=Expiration.ENABLED, retain_bytes=None)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def restart(rig: Rig, declared: dict[str, Declared] | None = None) -> None:
    """A stop and a start as `app` does it, with the sweep of the start and the writer's thread; and a stop and a start
    without, for the next step of the test."""
    rig.close()
    rig.clock = rig.time.clock()
    rig._store = store.Store.open(rig.path, clock=rig.clock, options=rig.options)
    if declared is not None:
        declare_topics(rig.store, declared)
    rig.store.start(lambda answer: answer())
    rig.reopen()


def expire_time(rig: Rig, topic: str, key: str) -> int:
    found = rig.get(topic, key)
    assert found is not None
    return found.expire_time_micros


# --- A: expiration ---------------------------------------------------------------------------------------------------


def test_a_topic_has_expiration_on_and_no_default_unless_the_configuration_has_it(tmp_path: Path) -> None:
    """AMPS 1: the exception to "off unless enabled" (rule L1): records with a lifetime expire there, others stay."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    rig.put("made", "stays", b"{}")
    rig.put("made", "goes", b"{}", ttl=SECOND)
    rig.store.administration.create_topic("asked", {})
    rig.store.writer.step()
    rig.put("asked", "stays", b"{}")
    rig.put("asked", "goes", b"{}", ttl=SECOND)
    rig.create_topic("declared", TopicSettings(), in_config=True)
    rig.put("declared", "stays, too", b"{}", ttl=SECOND)
    for name in ("made", "asked"):
        assert rig.topic(name).settings.expiration is Expiration.ENABLED
        assert rig.topic(name).settings.default_ttl_micros is None
    rig.time.tick(1000 * HOUR)
    restart(rig)
    rig.store.sweep()
    assert list(rig.stored("made")) == list(rig.stored("asked")) == [b"stays"]
    assert list(rig.stored("declared")) == [b"stays, too"]
    rig.close()


def test_the_sweep_of_the_start_leaves_a_disabled_topic_alone(rig: Rig) -> None:
    """AMPS 5: kept with the record, not acted on, also at start."""
    rig.create_topic("off", TopicSettings(expiration=Expiration.DISABLED))
    rig.create_topic("on", JSON)
    for topic in ("off", "on"):
        rig.put(topic, "k", b"{}", ttl=SECOND)
    stamp = expire_time(rig, "off", "k")
    assert stamp == rig.clock.now_micros() + SECOND
    rig.time.tick(HOUR)
    restart(rig)
    assert (list(rig.stored("off")), list(rig.stored("on"))) == ([b"k"], [])
    assert [kind for kind, _ in rig.kinds("off")] == ["put"]
    assert expire_time(rig, "off", "k") == stamp


def test_subscribers_hear_of_an_expiry_as_of_a_delete(rig: Rig) -> None:
    """AMPS 10, S2: out of focus with its own reason, and for those who want all changes its own kind; later changes
    finds neither record."""
    rig.create_topic("t", JSON)
    subscribers = Subscribers(rig)
    focused = subscribers.subscribe("t", oof=True)
    narrow = subscribers.subscribe("t", filter="/px > 1", oof=True)
    everything = subscribers.subscribe("t", changes=True)
    durable = subscribers.attach("t", "d", oof=True)
    for key, px in (("expires", 2), ("deleted", 2), ("unseen", 1)):
        rig.put("t", key, b'{"px":%d}' % px, ttl=SECOND if key != "deleted" else None)
    for follower in (focused, narrow, everything, durable):
        follower.news()
    rig.run(Delete("t", ["deleted"]))
    rig.time.tick(SECOND)
    rig.store.sweep()
    wanted = [("oof deleted", "deleted"), ("oof expired", "expires"), ("oof expired", "unseen")]
    assert [(what, key) for what, key, _ in focused.news()] == wanted
    assert [(what, key) for what, key, _ in durable.news()] == wanted
    assert [(what, key) for what, key, _ in narrow.news()] == wanted[:2], "it never saw the third"
    assert [(what, key) for what, key, _ in everything.news()] == [
        ("delete", "deleted"),
        ("expire", "expires"),
        ("expire", "unseen"),
    ]
    late = subscribers.subscribe("t", sow=True, changes=True)
    assert not late.news()


def test_a_topic_that_the_file_disables_while_the_server_is_down_expires_nothing_any_more(rig: Rig) -> None:
    """AMPS 11, L12: records overdue when it was disabled are removed first, as it could not be seen any more; the rest
    stays for good, with the stamps that it had."""
    declare_topics(rig.store, {"t": {"expiration": Expiration.ENABLED}})
    rig.put("t", "overdue", b"{}", ttl=SECOND)
    rig.put("t", "later", b"{}", ttl=HOUR)
    stamp = expire_time(rig, "t", "later")
    rig.time.tick(MINUTE)
    restart(rig, {"t": {"expiration": Expiration.DISABLED}})
    assert list(rig.stored("t")) == [b"later"]
    rig.time.tick(HOUR)
    restart(rig, {"t": {"expiration": Expiration.DISABLED}})
    rig.store.sweep()
    assert rig.count("t") == 1
    assert expire_time(rig, "t", "later") == stamp


# --- F: retention of durables ----------------------------------------------------------------------------------------


def kept(rig: Rig, name: str, topic: str = "t") -> int:
    return rig.store.durable_commits.figures(rig.topic(topic), name)[1].total_entries


def test_retention_is_set_on_a_durable_or_on_a_template_and_refused_where_it_cannot_be(rig: Rig) -> None:
    """FTL 1, T2: a policy for durables is the template; a topic without a journal has no durables, and limits are all
    that an operator's policy may set."""
    rig.create_topic("t", JSON, retain_time_micros=MINUTE)
    rig.create_topic("bare", JSON, journal=False)
    template = Policy("keep", "t/kept.*", {"retain_time_micros": HOUR}, target=PolicyTarget.DURABLES)
    rig.store.administration.set_policy(template)
    rig.store.writer.step()
    subscribers = Subscribers(rig)
    own: Declared = {"retain_time_micros": 2 * HOUR, "retain_bytes": None}
    names = {"plain": None, "kept-by-a-template": None, "kept-by-itself": own}
    followers = [subscribers.attach("t", name, declared=declared) for name, declared in names.items()]
    rig.put("t", "k", b"{}")
    for follower in followers:
        follower.news()
        follower.acknowledge()
    expected = []
    for micros in (MINUTE - 1, 1, HOUR - MINUTE, HOUR):
        rig.time.tick(micros)
        rig.prune()
        expected.append([kept(rig, name) > 0 for name in names])
    assert expected == [[True, True, True], [False, True, True], [False, False, True], [False, False, False]]

    with pytest.raises(StoreError) as error:
        subscribers.attach("bare", "d", declared=own)
    assert error.value.reason is Reason.NO_JOURNAL
    answers: list[object] = []
    rig.store.administration.set_policy(
        Policy("op", "t/.*", {"retain_time_micros": HOUR}, target=PolicyTarget.DURABLES, operator=True)
    ).then(answers.append)
    rig.store.writer.step()
    assert isinstance(answers[0], StoreError)
    assert answers[0].reason is Reason.INVALID_ARGUMENT


def test_retention_changes_nothing_in_delivery_or_acknowledgement(tmp_path: Path) -> None:
    """FTL 2: the same story with none, a short and an unlimited retention gives the same frames, positions and figures
    of unacknowledged entries."""
    stories = []
    for number, (time, size) in enumerate(((0, 0), (MINUTE, 10_000), (None, None))):
        rig = Rig(tmp_path / str(number))
        rig.create_topic("t", JSON, retain_time_micros=time, retain_bytes=size)
        subscribers = Subscribers(rig)
        told: list[object] = []
        first = subscribers.attach("t", "d")
        for step in range(6):
            rig.put("t", f"k{step % 4}", b'{"step":%d}' % step)
            if step == 2:
                told += first.news()
                told.append(first.acknowledge(2).position)
            if step == 3:
                first.close()
                subscribers.settle()
                rig.time.tick(2 * MINUTE)
                rig.prune()
        second = subscribers.attach("t", "d")
        told += [second.begun.sequence, second.gaps(), second.news()]
        figures = rig.store.durable_commits.figures(rig.topic("t"), "d")[1]
        told += [figures.unacknowledged_entries, figures.unacknowledged_bytes]
        told.append(second.acknowledge().position)
        told.append(second.news())
        stories.append(told)
        rig.close()
    assert stories[0] == stories[1] == stories[2]
    assert len(stories[0]) > 6


# --- P: pruning ------------------------------------------------------------------------------------------------------


def test_periods_for_messages_and_for_consumers_are_given_at_creation_and_may_be_infinite(rig: Rig) -> None:
    """arrebato 1: `max_age` and `durable_idle_ttl`, each by itself."""
    rig.create_topic("t", JSON, max_age_micros=HOUR, durable_idle_ttl_micros=2 * HOUR)
    rig.create_topic("forever", JSON, retain_time_micros=None, retain_bytes=None)
    subscribers = Subscribers(rig)
    for topic in ("t", "forever"):
        subscribers.attach(topic, "d").close()
        rig.put(topic, "k", b"{}")
    subscribers.upkeep()
    found = []
    for micros in (HOUR - 1, 1, HOUR, 1000 * HOUR):
        rig.time.tick(micros)
        subscribers.upkeep()
        rig.prune()
        found.append(
            [(rig.topic(topic).statistics.journal_entries, rig.store.durables.count(rig.topic(topic)))
             for topic in ("t", "forever")]
        )  # fmt: skip
    assert found == [[(1, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 0), (1, 1)], [(0, 0), (1, 1)]]
    assert (rig.count("t"), rig.count("forever")) == (1, 1), "the records stay"


def test_pruning_is_routine_every_minute_or_as_set(rig: Rig, tmp_path: Path) -> None:
    """arrebato 3: nobody asks for it. Durations are written and shown as Go does."""

    def prune_of(text: str) -> tuple[PeriodicJob, str]:
        (tmp_path / "sow.toml").write_text(text)
        micros = config.load(tmp_path / "sow.toml").journal.prune_interval_micros
        shown = next(knob.default for knob in config.knobs() if knob.key == "prune_interval")
        with ThreadPoolExecutor(1) as readers:
            jobs = timers(rig, readers, prune_interval_micros=micros).jobs
        return next(job for job in jobs if job.name == "prune"), shown

    job, default = prune_of("")
    assert (job.seconds, default) == (60, '"1m"')
    assert prune_of('[journal]\nprune_interval = "1h3m0.5s"')[0].seconds == 3780.5

    rig.create_topic("t", JSON, retain_time_micros=MINUTE)
    rig.put("t", "k", b"{}")
    rig.time.tick(MINUTE)

    async def run(readers: ThreadPoolExecutor) -> None:
        jobs = timers(rig, readers, prune_interval_micros=1000)
        jobs.start()
        loop = asyncio.get_running_loop()
        give_up = loop.time() + 30
        while rig.topic("t").statistics.journal_entries:
            assert loop.time() < give_up
            rig.store.writer.step()
            await asyncio.sleep(0.002)
        jobs.stop()

    with ThreadPoolExecutor(1) as readers:
        asyncio.run(run(readers))


def test_a_message_is_as_old_as_its_receipt_and_a_consumer_as_its_last_position(rig: Rig) -> None:
    """arrebato 4: neither the lifetime that a publisher gives nor a rewind makes a message older or younger, and each
    acknowledgement makes a consumer young."""
    rig.create_topic("t", JSON, retain_time_micros=HOUR, durable_idle_ttl_micros=HOUR)
    subscribers = Subscribers(rig)
    follower = subscribers.attach("t", "d")
    begin = rig.clock.now_micros()
    rig.put("t", "a", b"{}", lifetime=Lifetime(LifetimeKind.EXPIRE_TIME, begin + 100 * HOUR))
    rig.time.tick(HOUR // 2)
    rig.put("t", "b", b"{}")
    follower.news()
    assert [entry.commit_time_micros - begin for entry in rig.journal("t")] == [0, HOUR // 2]
    follower.close()
    subscribers.settle()
    follower.acknowledge(1)  # half an hour later: its session may still
    rig.time.tick(HOUR // 2)
    rig.prune()
    assert [entry.key for entry in rig.journal("t")] == [b"b"], "an hour after receipt"
    rig.time.tick(HOUR // 2 - 1)
    subscribers.upkeep()
    assert rig.store.durables.count(rig.topic("t")) == 1
    rig.time.tick(1)
    subscribers.upkeep()
    assert rig.store.durables.count(rig.topic("t")) == 0


# --- R: time-to-live -------------------------------------------------------------------------------------------------


def test_lifetimes_are_of_a_topic_of_a_group_of_topics_or_of_a_record_and_operators_bound_them(rig: Rig) -> None:
    """RabbitMQ 1, by the stamps of records."""
    rig.create_topic("eu.own", JSON, default_ttl_micros=5 * MINUTE)
    rig.create_topic("eu.group", TopicSettings(retain_bytes=None), in_config=True)
    rig.create_topic("us", TopicSettings(retain_bytes=None), in_config=True)
    rig.set_policy("eu", r"eu\..*", {"expiration": Expiration.ENABLED, "default_ttl_micros": 2 * HOUR})

    def lifetimes(**ttls: int) -> dict[str, int | None]:
        begin = rig.clock.now_micros()
        found: dict[str, int | None] = {}
        for topic in ("eu.own", "eu.group", "us"):
            for name, ttl in {"default": None, **ttls}.items():
                rig.put(topic, name, b"{}", ttl=ttl)
                left = expire_time(rig, topic, name) - begin
                found[f"{topic} {name}"] = left if left < 10_000 * HOUR else None
        return found

    assert lifetimes(own=3 * HOUR) == {
        "eu.own default": 5 * MINUTE,
        "eu.own own": 3 * HOUR,
        "eu.group default": 2 * HOUR,
        "eu.group own": 3 * HOUR,
        "us default": None,
        "us own": 3 * HOUR,
    }
    rig.set_policy("bound", r"eu\..*", {"max_ttl_micros": HOUR}, operator=True)
    assert lifetimes(own=3 * HOUR, short=SECOND) == {
        "eu.own default": 5 * MINUTE,
        "eu.own own": HOUR,
        "eu.own short": SECOND,
        "eu.group default": HOUR,
        "eu.group own": HOUR,
        "eu.group short": SECOND,
        "us default": None,
        "us own": 3 * HOUR,
        "us short": SECOND,
    }


def test_an_expired_record_is_delivered_by_no_way_of_reading(rig: Rig) -> None:
    """RabbitMQ 2: before the sweep has come to it, too: get, query, snapshot, changes not yet sent to a live
    subscriber, replay from a bookmark, a durable and its redelivery."""
    rig.create_topic("t", JSON)
    subscribers = Subscribers(rig)
    live = subscribers.subscribe("t")
    durable = subscribers.attach("t", "d")
    rig.put("t", "stays", b"{}")
    rig.put("t", "due", b"{}", ttl=SECOND)
    rig.time.tick(SECOND)
    assert b"due" in rig.stored("t"), "the sweep has not come yet"

    assert rig.get("t", "due") is None
    assert list(rig.live("t")) == [b"stays"]
    readers = {
        "live": live,
        "durable": durable,
        "snapshot": subscribers.subscribe("t", sow=True),
        "replay": subscribers.subscribe("t", start=EARLIEST),
        "bookmark": subscribers.subscribe("t", start=at(1, rig)),
    }
    puts = {name: {key for what, key, _ in reader.news() if what == "put"} for name, reader in readers.items()}
    assert all("due" not in keys for keys in puts.values()), puts
    again = subscribers.attach("t", "d", force=True)
    assert {key for what, key, _ in again.news() if what == "put"} == {"stays"}


def test_removal_waits_for_nothing_in_front_whatever_the_type_of_message(rig: Rig) -> None:
    """RabbitMQ 3: long lives are published first, in every type of topic; each short one goes at its own time."""
    payloads = {
        MessageType.JSON: b"{}",
        MessageType.MSGPACK: b"\x80",
        MessageType.FIX: b"55=a\x01",
        MessageType.NVFIX: b"a=b\x01",
        MessageType.BINARY: b"any",
    }
    for message_type in MessageType:
        rig.create_topic(message_type.value, JSON._replace(message_type=message_type))
    for seconds in range(len(payloads), 0, -1):
        for number, (message_type, payload) in enumerate(payloads.items()):
            rig.put(message_type.value, str(seconds), payload, ttl=seconds * SECOND + number)
    for seconds in range(1, len(payloads) + 1):
        assert rig.store.writer.sweep.next_due == rig.clock.now_micros() + (SECOND if seconds == 1 else SECOND - 4)
        rig.time.tick(SECOND if seconds == 1 else SECOND - 4)
        for number, message_type in enumerate(payloads):
            left = [key for key in (b"1", b"2", b"3", b"4", b"5") if int(key) >= seconds]
            assert sorted(rig.stored(message_type.value)) == left
            rig.store.sweep()
            assert sorted(rig.stored(message_type.value)) == left[1:]
            if number < len(payloads) - 1:
                rig.time.tick(1)


def test_a_record_keeps_its_lifetime_however_often_it_is_handed_over(rig: Rig) -> None:
    """RabbitMQ 7: redelivered to the next consumer, after a restart and after a rewind, with the stamp that it had;
    once that has come it is not delivered again, but told as expired."""
    rig.create_topic("t", JSON, retain_time_micros=10 * HOUR)
    subscribers = Subscribers(rig)
    follower = subscribers.attach("t", "d")
    rig.put("t", "k", b"{}", ttl=HOUR)
    stamp = expire_time(rig, "t", "k")
    follower.news()
    found = [row.expire_time for row in follower.changes()]
    for how in ("again", "restart", "rewind"):
        rig.time.tick(10 * MINUTE)
        if how == "restart":
            restart(rig)
            subscribers = Subscribers(rig)
        if how == "rewind":
            follower.acknowledge()
            answers: list[object] = []
            subscribers.consumers.rewind(rig.topic("t"), "d", RewindTo(), force=True).then(answers.append)
            subscribers.settle()
        follower = subscribers.attach("t", "d", force=True, oof=True)
        found += [row.expire_time for row in follower.changes()]
    assert found == [stamp] * 4
    rig.time.tick(HOUR - 30 * MINUTE)
    late = subscribers.attach("t", "d", force=True, oof=True)
    assert not late.news()
    rig.store.sweep()
    assert [what for what, _, _ in late.news()] == ["oof expired"]


def test_a_policy_that_comes_later_changes_records_only_when_that_is_asked_for(rig: Rig) -> None:
    """RabbitMQ 10, L12, L13: here explicit. The policy acts on new records; a restamp applies the bound to existing
    ones."""
    rig.create_topic("t", JSON)
    rig.put("t", "long", b"{}", ttl=10 * HOUR)
    rig.put("t", "none", b"{}")
    rig.put("t", "short", b"{}", ttl=MINUTE)
    before = rig.live("t")
    rig.set_policy("short", "t", {"max_ttl_micros": HOUR})
    restart(rig)
    assert rig.live("t") == before
    rig.put("t", "new", b"{}", ttl=10 * HOUR)
    now = rig.clock.now_micros()
    assert expire_time(rig, "t", "new") == now + HOUR
    keys = ["long", "none", "short", "new"]
    rig.time.tick(SECOND)
    bound = Lifetime(LifetimeKind.TTL, HOUR)
    assert rig.run(Restamp("t", keys, RestampMode.CAP, bound)).applied == 2
    now = rig.clock.now_micros()
    stamps = [expire_time(rig, "t", key) - now for key in keys]
    assert stamps == [HOUR, HOUR, MINUTE - SECOND, HOUR - SECOND]


def test_a_topics_idle_time_is_positive(rig: Rig) -> None:
    """RabbitMQ 12."""
    for micros in (0, -1):
        with pytest.raises(StoreError) as error:
            rig.create_topic(f"t{abs(micros)}", JSON, idle_ttl_micros=micros)
        assert error.value.reason is Reason.INVALID_ARGUMENT
