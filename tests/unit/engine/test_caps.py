"""The caps of a topic: what clients publish makes it no larger (rules T6, T7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sow_server.engine.commit.caps import fit
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    NEVER,
    Caps,
    Condition,
    ConditionKind,
    Lifetime,
    LifetimeKind,
    Outcome,
    Publish,
    PublisherPosition,
    Restamp,
    RestampMode,
    TopicSettings,
    Touch,
)
from tests.support.stores.stores import BINARY, MINUTE, SECOND, Rig

IF_ABSENT = Condition(ConditionKind.IF_ABSENT)
FULL = Reason.TOPIC_FULL


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A topic of at most three records, and one of at most ten bytes."""
    rig = Rig(tmp_path)
    rig.create_topic("few", BINARY._replace(max_records=3))
    rig.create_topic("small", BINARY._replace(max_stored_bytes=10))
    yield rig
    rig.close()


def publish(rig: Rig, topic: str, keys: str, payload: bytes = b"x", *, atomic: bool = False) -> Outcome:
    return rig.run(Publish(topic, [payload] * len(keys), list(keys), atomic=atomic))


def refused(outcome: Outcome) -> list[tuple[int, Reason]]:
    return [(one.index, one.reason) for one in outcome.refusals]


def keys(rig: Rig, topic: str) -> str:
    return "".join(sorted(key.decode() for key in rig.stored(topic)))


# --- one record after the other --------------------------------------------------------------------------------------


def test_a_new_key_beyond_the_cap_is_refused_and_the_others_are_taken(rig: Rig) -> None:
    """T6: with its index, while updates of keys that are there pass, in the order of the request."""
    outcome = publish(rig, "few", "abcdaeb")
    assert refused(outcome) == [(3, FULL), (5, FULL)]
    assert outcome.applied == 5
    assert outcome.refusals[0].message == "topic: few is full, max_records has no room for this record"
    assert keys(rig, "few") == "abc"
    assert rig.topic("few").full_refusals == 2


@pytest.mark.parametrize("count", [4, 9, 40])
def test_columns_decide_as_single_records_do(rig: Rig, count: int) -> None:
    """T6: column by column, and one by one."""
    many = [f"{number:02}" for number in range(count)]
    outcome = rig.run(Publish("few", [b"x"] * count, many))
    assert refused(outcome) == [(index, FULL) for index in range(3, count)]
    assert outcome.applied == 3


def test_bytes_are_those_of_keys_and_payloads(rig: Rig) -> None:
    """T6: an update that grows beyond the cap is refused; one that shrinks or keeps its size is not."""
    assert not refused(publish(rig, "small", "ab", b"1234"))  # 10 bytes
    assert refused(publish(rig, "small", "a", b"12345")) == [(0, FULL)]
    assert refused(publish(rig, "small", "c", b"")) == [(0, FULL)]
    assert not refused(publish(rig, "small", "ab", b"9999"))
    assert not refused(publish(rig, "small", "a", b"12"))
    assert not refused(publish(rig, "small", "c", b"1"))
    assert rig.topic("small").statistics.record_bytes == 10
    assert "max_stored_bytes" in publish(rig, "small", "d").refusals[0].message


def test_updates_that_do_not_grow_pass_above_the_cap(rig: Rig) -> None:
    """T7: a cap may be set below the content."""
    publish(rig, "few", "abc", b"12")
    rig.alter_topic("few", max_records=1, max_stored_bytes=2)
    assert not refused(publish(rig, "few", "abc", b"34"))
    assert not refused(publish(rig, "few", "abc", b"5"))
    assert refused(publish(rig, "few", "a", b"67")) == [(0, FULL)]
    assert refused(publish(rig, "few", "d", b"")) == [(0, FULL)]
    rig.delete("few", "a", "b")
    assert refused(publish(rig, "few", "d", b"")) == [(0, FULL)]
    rig.delete("few", "c")
    assert not refused(publish(rig, "few", "d", b"1"))


def test_a_column_of_updates_of_a_full_topic_stays_one(rig: Rig) -> None:
    """T6: what a full topic pays. The run fits, although it has more records than there is room."""
    rig.create_topic("full", BINARY._replace(max_records=20, max_stored_bytes=60))
    many = [f"{number:02}" for number in range(20)]
    store = rig.store
    assert not refused(rig.run(Publish("full", [b"1"] * 20, many)))
    topic = rig.topic("full")
    store_keys = [topic.prefix + key.encode() for key in many]
    draft = store.writer.committer.new_draft()
    draft.fetch_heads(store_keys)
    caps, encoded = topic.caps, [key.encode() for key in many]
    assert caps == Caps(20, 60)
    assert fit(draft, caps, topic, encoded, store_keys, [b"2"] * 20)
    assert fit(draft, caps, topic, encoded, store_keys, [b""] * 20)
    assert not fit(draft, caps, topic, encoded, store_keys, [b"", b"22", *[b"2"] * 18])
    assert fit(draft, Caps(20, NEVER), topic, encoded, store_keys, [b"22"] * 20)
    assert not fit(draft, caps, topic, encoded[:1] * 2, store_keys[:1] * 2, [b"2"] * 2), "perhaps; one by one tells"
    draft.fetch_heads([topic.prefix + b"new"])
    assert not fit(draft, Caps(20, NEVER), topic, [b"new"], [topic.prefix + b"new"], [b""])
    assert not fit(draft, Caps(NEVER, 60), topic, [b"new"], [topic.prefix + b"new"], [b""])
    more = [*encoded, b"new"], [*store_keys, topic.prefix + b"new"], [b"2"] * 20 + [b""]
    assert fit(draft, Caps(NEVER, 63), topic, *more)
    assert not fit(draft, Caps(NEVER, 62), topic, *more)


def test_requests_of_one_commit_share_the_room(rig: Rig) -> None:
    """T6: exact under concurrency."""
    outcomes = rig.run_together([Publish("few", [b"x", b"y"], [f"{n}a", f"{n}b"]) for n in range(4)])
    assert sum(one.applied for one in outcomes if isinstance(one, Outcome)) == 3
    assert rig.count("few") == 3


def test_a_condition_that_fails_comes_before_the_cap(rig: Rig) -> None:
    """P3, T6."""
    publish(rig, "few", "abc")
    outcome = rig.run(Publish("few", [b"x"] * 2, ["a", "d"], conditions=[IF_ABSENT, IF_ABSENT]))
    assert refused(outcome) == [(0, Reason.CONDITION_FAILED), (1, FULL)]


def test_deletes_touches_and_restamps_pass_above_the_cap(rig: Rig) -> None:
    """T7."""
    publish(rig, "few", "abc")
    rig.alter_topic("few", max_records=1)
    assert not rig.touch("few", "a", ttl=MINUTE).refusals
    assert not rig.run(Touch("few", ["b", "c"], Lifetime(LifetimeKind.TTL, MINUTE), atomic=True)).refusals
    assert not rig.run(Restamp("few", ["a"], RestampMode.SET, Lifetime(LifetimeKind.TTL, SECOND))).refusals
    assert rig.delete("few", "c").applied == 1


def test_a_record_that_is_due_at_once_needs_no_room(rig: Rig) -> None:
    """L7, T6: it does not stay."""
    publish(rig, "few", "abc")
    assert not rig.run(Publish("few", [b"x"], ["d"], lifetime=Lifetime(LifetimeKind.TTL, 0))).refusals
    assert keys(rig, "few") == "abc"


def test_a_delta_counts_with_the_record_that_it_makes(rig: Rig) -> None:
    """P2, T6: also where a delta makes a new record."""
    rig.create_topic("json", TopicSettings(key=("/id",), max_records=1, max_stored_bytes=30))
    assert not rig.run(Publish("json", [b'{"id":1,"a":1}'], delta=True)).refusals
    assert not rig.run(Publish("json", [b'{"id":1,"b":2}'], delta=True)).refusals
    assert refused(rig.run(Publish("json", [b'{"id":1,"c":"0123456789"}'], delta=True))) == [(0, FULL)]
    assert refused(rig.run(Publish("json", [b'{"id":2}'], delta=True))) == [(0, FULL)]
    assert [one.payload for one in rig.stored("json").values()] == [b'{"id":1,"a":1,"b":2}']


# --- atomic requests -------------------------------------------------------------------------------------------------


def test_an_atomic_request_is_refused_as_a_whole(rig: Rig) -> None:
    """T6, P2: the record that exceeded the cap has the reason."""
    publish(rig, "few", "ab")
    outcome = publish(rig, "few", "acd", atomic=True)
    aborted = Reason.ATOMIC_ABORTED
    assert refused(outcome) == [(0, aborted), (1, aborted), (2, FULL)]
    assert keys(rig, "few") == "ab"
    assert rig.topic("few").full_refusals == 1


def test_an_atomic_request_counts_what_it_adds_in_the_end(rig: Rig) -> None:
    """T6: that it exceeds a cap on its way does not matter, as nobody sees that."""
    publish(rig, "small", "ab", b"1234")
    outcome = rig.run(Publish("small", [b"123456", b"12"], ["a", "b"], atomic=True))
    assert not refused(outcome)
    assert rig.topic("small").statistics.record_bytes == 10
    rig.alter_topic("small", max_stored_bytes=5)
    assert not refused(rig.run(Publish("small", [b"12", b"123456"], ["a", "b"], atomic=True)))
    assert refused(rig.run(Publish("small", [b"123", b"123456"], ["a", "b"], atomic=True)))[0] == (0, FULL)


def test_a_record_that_goes_makes_room_in_an_atomic_request(rig: Rig) -> None:
    """L7, T6: one that is due at once removes the one that it replaces, also above a cap."""
    publish(rig, "few", "abc")
    rig.alter_topic("few", max_records=1)
    gone, stays = Lifetime(LifetimeKind.TTL, 0), Lifetime(LifetimeKind.TTL, MINUTE)
    moved = Publish("few", [b"x"] * 2, ["a", "d"], lifetimes=[gone, stays], atomic=True)
    assert not refused(rig.run(moved))
    assert keys(rig, "few") == "bcd"
    assert refused(rig.run(replace(moved, keys=["x", "e"])))[1] == (1, FULL)


# --- overdue records -------------------------------------------------------------------------------------------------


def test_overdue_records_take_no_room(rig: Rig) -> None:
    """T6: they are expired before a record is refused because of them."""
    for key in "abc":
        rig.put("few", key, ttl=SECOND)
    rig.time.tick(SECOND)
    assert keys(rig, "few") == "abc"  # not yet swept
    assert refused(publish(rig, "few", "defg")) == [(3, FULL)]
    assert keys(rig, "few") == "def"
    assert rig.store.writer.expired_total == 3


def test_a_topic_with_room_waits_for_no_sweep(rig: Rig) -> None:
    """T6, L14: nor does an update of a full one."""
    for key in "abc":
        rig.put("few", key, ttl=SECOND if key == "a" else None)
    rig.time.tick(SECOND)
    assert not refused(publish(rig, "few", "bc"))
    assert keys(rig, "few") == "abc"
    assert rig.store.writer.expired_total == 0


def test_a_long_sweep_lets_others_pass(tmp_path: Path) -> None:
    """L14, T6: more is overdue than one commit removes. The request that waits keeps its place, the others their
    turns."""
    options = StoreOptions(writer=WriterOptions(sweep_entries_max=2))
    rig = Rig(tmp_path, options=options)
    rig.create_topic("other", BINARY)
    rig.create_topic("few", BINARY._replace(max_records=2))
    for key in "0123456789":
        rig.put("other", key, ttl=SECOND)
    for key in "ab":
        rig.put("few", key, ttl=2 * SECOND)
    rig.time.tick(2 * SECOND)
    full, free, last = rig.run_together(
        [Publish("few", [b"x"] * 3, ["c", "d", "e"]), Publish("other", [b"y"], ["z"]), Publish("few", [b"x"], ["f"])]
    )
    assert isinstance(full, Outcome)
    assert isinstance(free, Outcome)
    assert isinstance(last, Outcome)
    assert (refused(full), refused(free), refused(last)) == ([(2, FULL)], [], [(0, FULL)])
    assert (keys(rig, "few"), keys(rig, "other")) == ("cd", "z")
    rig.close()


def test_while_the_sweep_is_paused_overdue_records_count(rig: Rig) -> None:
    """L15, T6: a jump of the wall clock must not remove anything; the publish has its answer."""
    for key in "abc":
        rig.put("few", key, ttl=SECOND)
    rig.time.tick(SECOND)
    rig.time.step_wall(MINUTE)
    assert rig.clock.paused
    assert refused(publish(rig, "few", "d")) == [(0, FULL)]
    assert keys(rig, "few") == "abc"
    rig.clock.accept()
    assert not refused(publish(rig, "few", "d"))


def test_an_atomic_request_waits_for_the_sweep_too(rig: Rig) -> None:
    """T6."""
    for key in "abc":
        rig.put("few", key, ttl=SECOND)
    rig.time.tick(SECOND)
    assert not refused(publish(rig, "few", "def", atomic=True))
    assert keys(rig, "few") == "def"


# --- publishers, restarts, settings ----------------------------------------------------------------------------------


def test_a_retry_of_a_refused_record_has_the_same_answer(rig: Rig) -> None:
    """P6: also when there is room meanwhile. A new sequence is a new record."""
    publish(rig, "few", "abc")
    position = PublisherPosition("p", 1, 1)
    again = Publish("few", [b"x"], ["d"], publisher=position)
    assert refused(rig.run(again)) == [(0, FULL)]
    rig.delete("few", "a")
    assert refused(rig.run(again)) == [(0, FULL)]
    rig.crash()
    assert refused(rig.run(again)) == [(0, FULL)]
    assert not refused(rig.run(replace(again, publisher=PublisherPosition("p", 1, 2))))
    assert keys(rig, "few") == "bcd"


def test_caps_and_figures_survive_a_kill(rig: Rig) -> None:
    """T6: the figures are of the commit that changed the records."""
    publish(rig, "few", "ab")
    publish(rig, "small", "ab", b"1234")
    rig.crash()
    assert refused(publish(rig, "few", "cd")) == [(1, FULL)]
    assert refused(publish(rig, "small", "a", b"12345")) == [(0, FULL)]
    rig.cut_power()
    assert (rig.count("few"), rig.topic("small").statistics.record_bytes) == (3, 10)


def test_a_cap_that_is_taken_away_is_gone_and_a_new_one_is_in_force_at_once(rig: Rig) -> None:
    """T4, T6."""
    publish(rig, "few", "abc")
    rig.alter_topic("few", max_records=None)
    assert not refused(publish(rig, "few", "d"))
    rig.alter_topic("few", max_records=4)
    assert refused(publish(rig, "few", "e")) == [(0, FULL)]


def test_the_strictest_cap_holds(rig: Rig) -> None:
    """T2: caps are limits."""
    rig.set_policy("cap", "few|free", operator=True, max_records=1)
    rig.create_topic("free", BINARY)
    assert refused(publish(rig, "few", "ab")) == [(1, FULL)]
    assert refused(publish(rig, "free", "ab")) == [(1, FULL)]


def test_a_cap_is_above_zero(rig: Rig) -> None:
    """T6: a topic for nothing is a mistake."""
    with pytest.raises(StoreError, match="max_records: 0 must be above zero"):
        rig.alter_topic("few", max_records=0)
    with pytest.raises(StoreError, match="max_stored_bytes: 0B must be above zero"):
        rig.alter_topic("few", max_stored_bytes=0)


def test_dead_letters_come_to_a_full_topic(rig: Rig) -> None:
    """T3, T7: none is lost. Publishes to it are refused meanwhile."""
    rig.create_topic("dead", BINARY._replace(max_records=1))
    rig.create_topic("work", BINARY._replace(dead_letter="dead"))
    for key in "abc":
        rig.put("work", key, ttl=SECOND)
    rig.time.tick(SECOND)
    rig.store.writer.sweep_now()
    assert rig.count("dead") == 3
    assert refused(publish(rig, "dead", "d")) == [(0, FULL)]


def test_a_removal_makes_room_for_the_puts_of_its_request(rig: Rig) -> None:
    """T6, P11: a record moves to another key in a full topic, all or nothing, and in a stream."""

    def changed(keys: str, removals: list[bool], *, atomic: bool = False) -> list[tuple[int, Reason]]:
        payloads = [b"" if removes else b"y" for removes in removals]
        return refused(rig.run(Publish("few", payloads, list(keys), removals=removals, atomic=atomic)))

    publish(rig, "few", "abc")
    assert changed("ad", [True, False], atomic=True) == []
    assert keys(rig, "few") == "bcd"
    assert changed("ebf", [False, True, False]) == [(0, FULL)]
    assert keys(rig, "few") == "cdf"
    aborted = [(0, Reason.ATOMIC_ABORTED), (1, Reason.ATOMIC_ABORTED), (2, FULL)]
    assert changed("cgh", [True, False, False], atomic=True) == aborted
    assert keys(rig, "few") == "cdf"
