"""The lifetime of a record: stamping, clamping, renewing; no read returns it afterwards (the L-rules)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sow_server.engine.commit.expiry import Sweep
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    PERMANENT,
    Applied,
    Condition,
    ConditionKind,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    TopicSettings,
    Touch,
)
from tests.support.stores.stores import BINARY, DAY, MINUTE, SECOND, START, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def stamped(rig: Rig, topic: str, key: str) -> int | None:
    """The rest of a stored record's lifetime; None for never."""
    expire_time = rig.stored(topic)[key.encode()].expire_time_micros
    return None if expire_time == NEVER else expire_time - rig.clock.now_micros()


# --- L1 to L5: which stamp a record gets -----------------------------------------------------------------------------


def test_records_stay_until_they_are_deleted_where_expiration_is_not_enabled(rig: Rig) -> None:
    """AMPS 1: expiration is off unless a topic enables it."""
    rig.create_topic("orders", TopicSettings(key=("/id",)))
    rig.run(Publish("orders", [b'{"id":%d}' % number for number in range(3)]))
    rig.time.tick(3_000 * DAY)
    rig.store.sweep()
    assert rig.count("orders") == 3
    rig.delete("orders", "1")
    assert list(rig.live("orders")) == [b"0", b"2"]


@pytest.mark.parametrize(
    ("settings", "lifetime", "left"),
    [
        ({"default_ttl_micros": 30 * SECOND}, ABSENT, 30 * SECOND),
        ({"default_ttl_micros": 30 * SECOND}, Lifetime(LifetimeKind.TTL, 5 * SECOND), 5 * SECOND),
        ({"default_ttl_micros": 30 * SECOND}, Lifetime(LifetimeKind.TTL, 5 * MINUTE), 5 * MINUTE),
        ({"default_ttl_micros": 30 * SECOND}, PERMANENT, None),
        ({}, ABSENT, None),
        ({}, Lifetime(LifetimeKind.TTL, 5 * SECOND), 5 * SECOND),
        ({}, Lifetime(LifetimeKind.EXPIRE_TIME, START + 7 * SECOND), 7 * SECOND),
        ({"max_ttl_micros": MINUTE}, Lifetime(LifetimeKind.TTL, 5 * MINUTE), MINUTE),
        ({"max_ttl_micros": MINUTE}, PERMANENT, MINUTE),
        ({"min_ttl_micros": MINUTE}, Lifetime(LifetimeKind.TTL, SECOND), MINUTE),
    ],
)
def test_the_records_own_lifetime_goes_before_the_topics_default(
    rig: Rig, settings: dict[str, object], lifetime: Lifetime, left: int | None
) -> None:
    """AMPS 2, AMPS 3, AMPS 7, RabbitMQ 5: own lifetime, else the default, else never; `never` beats the default; bounds
    clamp (L3, L4)."""
    rig.create_topic("orders", BINARY, settings)
    outcome = rig.put("orders", "a", lifetime=lifetime, want_results=True)
    assert stamped(rig, "orders", "a") == left
    assert outcome.results is not None
    (applied,) = outcome.results
    assert isinstance(applied, Applied)
    assert applied.expire_time_micros == (NEVER if left is None else START + left)
    assert not applied.ttl_ignored


def test_where_expiration_is_enabled_without_a_default_only_records_with_a_lifetime_expire(rig: Rig) -> None:
    """AMPS 4."""
    rig.create_topic("orders")
    rig.put("orders", "short", ttl=SECOND)
    rig.put("orders", "long")
    rig.time.tick(1_000 * DAY)
    assert list(rig.live("orders")) == [b"long"]


def test_pending_orders_expire_by_the_default_and_large_ones_never(rig: Rig) -> None:
    """AMPS 15: the topic's 5 minutes for pending orders, `never` on the large ones."""
    settings = TopicSettings(key=("/id",), expiration=Expiration.ENABLED, default_ttl_micros=5 * MINUTE)
    rig.create_topic("pending", settings)
    rig.run(Publish("pending", [b'{"id":1,"size":10}', b'{"id":2,"size":20}']))
    rig.run(Publish("pending", [b'{"id":3,"size":100000}'], lifetime=PERMANENT))
    rig.time.tick(5 * MINUTE - 1)
    assert rig.count("pending") == 3
    rig.time.tick(1)
    assert list(rig.live("pending")) == [b"3"]


def test_a_disabled_topic_keeps_lifetimes_and_does_not_act_on_them(rig: Rig) -> None:
    """AMPS 5: not at a restart either; the response says that the lifetime is ignored (L3)."""
    rig.create_topic("orders", expiration=Expiration.DISABLED)
    outcome = rig.put("orders", "a", ttl=SECOND, want_results=True)
    assert outcome.results is not None
    (applied,) = outcome.results
    assert isinstance(applied, Applied)
    assert applied.ttl_ignored
    assert stamped(rig, "orders", "a") == SECOND
    rig.time.tick(DAY)
    rig.store.sweep()
    assert rig.count("orders") == 1
    rig.reopen()
    rig.store.sweep()
    assert rig.get("orders", "a") is not None


def test_a_rejecting_topic_refuses_any_lifetime_and_applies_the_rest(rig: Rig) -> None:
    """L3: also `never` is a lifetime."""
    rig.create_topic("orders", expiration=Expiration.REJECT)
    lifetimes = [ABSENT, Lifetime(LifetimeKind.TTL, SECOND), PERMANENT]
    outcome = rig.run(Publish("orders", [b"x"] * 3, ["a", "b", "c"], lifetimes=lifetimes))
    assert [(refusal.index, refusal.reason) for refusal in outcome.refusals] == [
        (1, Reason.LIFETIME_REJECTED),
        (2, Reason.LIFETIME_REJECTED),
    ]
    assert list(rig.live("orders")) == [b"a"]


def test_the_stamp_is_absolute_and_taken_from_the_servers_clock(rig: Rig) -> None:
    """AMPS 6: computed when the record is applied, stored with it; reading it later gives the same (L5)."""
    rig.create_topic("orders")
    rig.time.tick(3 * SECOND)
    rig.put("orders", "a", ttl=MINUTE)
    rig.time.tick(10 * SECOND)
    found = rig.get("orders", "a")
    assert found is not None
    assert found.publish_time_micros == START + 3 * SECOND
    assert found.expire_time_micros == START + 3 * SECOND + MINUTE


def test_records_of_several_key_fields_in_fix_expire_each_by_itself(rig: Rig) -> None:
    """AMPS 14: composite key of `/55` and `/109`, message type fix."""
    settings = TopicSettings(
        key=("/55", "/109"), message_type=MessageType.FIX, expiration=Expiration.ENABLED, separator=b"|"
    )
    rig.create_topic("fix", settings)
    ttl = Lifetime(LifetimeKind.TTL, 10 * SECOND)
    rig.run(Publish("fix", [b"55=IBM|109=A|38=1|", b"55=IBM|109=B|38=2|"], lifetime=ttl))
    rig.time.tick(5 * SECOND)
    rig.run(Publish("fix", [b"109=B|55=IBM|38=3|"], lifetime=ttl))
    assert list(rig.live("fix")) == [b"IBM|A", b"IBM|B"]
    rig.time.tick(5 * SECOND)
    assert {key: kept.payload for key, kept in rig.live("fix").items()} == {b"IBM|B": b"109=B|55=IBM|38=3|"}


@pytest.mark.parametrize(
    ("lifetime", "reason"),
    [
        (Lifetime(LifetimeKind.TTL, -1), Reason.LIFETIME_NEGATIVE),
        (Lifetime(LifetimeKind.EXPIRE_TIME, -1), Reason.LIFETIME_NEGATIVE),
        (Lifetime(LifetimeKind.TTL, 3_653 * DAY + 1), Reason.LIFETIME_TOO_LONG),
        (Lifetime(LifetimeKind.TTL, 2**63 - 1), Reason.LIFETIME_TOO_LONG),
        (Lifetime(LifetimeKind.EXPIRE_TIME, 2**63 - 1), Reason.LIFETIME_TOO_LONG),
        (Lifetime(LifetimeKind.EXPIRE_TIME, START - 3_653 * DAY - 1), Reason.INVALID_ARGUMENT),
        (Lifetime(LifetimeKind.EXPIRE_TIME, START // SECOND), Reason.INVALID_ARGUMENT),
    ],
)
@pytest.mark.parametrize("expiration", [Expiration.ENABLED, Expiration.DISABLED])
def test_impossible_lifetimes_are_refused_and_change_nothing(
    rig: Rig, lifetime: Lifetime, reason: Reason, expiration: Expiration
) -> None:
    """L1, L18: no negative lifetimes, none beyond ten years, and nothing overflows."""
    rig.create_topic("orders", expiration=expiration)
    rig.put("orders", "a", b"before")
    outcome = rig.put("orders", "a", b"after", lifetime=lifetime)
    assert [refusal.reason for refusal in outcome.refusals] == [reason]
    found = rig.get("orders", "a")
    assert found is not None
    assert found.payload == b"before"


def test_the_longest_lifetime_is_ten_years(rig: Rig) -> None:
    """L18."""
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=3_653 * DAY)
    rig.time.tick(3_653 * DAY - 1)
    rig.clock.accept()
    assert rig.count("orders") == 1
    rig.time.tick(1)
    assert rig.count("orders") == 0


# --- L6: renewing ----------------------------------------------------------------------------------------------------


def test_every_publish_renews_the_lifetime_any_number_of_times(rig: Rig) -> None:
    """AMPS 8: 45 s, updated at 15 s, lives 45 s more."""
    rig.create_topic("orders", default_ttl_micros=45 * SECOND)
    rig.put("orders", "a")
    for _ in range(20):
        rig.time.tick(15 * SECOND)
        rig.store.sweep()
        rig.put("orders", "a")
    rig.time.tick(45 * SECOND - 1)
    rig.store.sweep()
    assert rig.count("orders") == 1
    rig.time.tick(1)
    assert rig.count("orders") == 0


def test_an_update_without_a_lifetime_gets_the_topics_and_not_the_old_one(rig: Rig) -> None:
    """L6: what L3 says for "absent", even if the old value had a lifetime of its own."""
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=SECOND)
    rig.put("orders", "a")
    assert stamped(rig, "orders", "a") is None


def test_an_update_may_keep_the_stamp(rig: Rig) -> None:
    """L6: ttl_mode KEEP; without a live record there is no stamp to keep."""
    rig.create_topic("orders")
    rig.put("orders", "a", b"1", ttl=10 * SECOND)
    rig.time.tick(4 * SECOND)
    rig.put("orders", "a", b"2", ttl=MINUTE, keep=True)
    assert stamped(rig, "orders", "a") == 6 * SECOND
    rig.time.tick(6 * SECOND)
    assert rig.get("orders", "a") is None
    rig.put("orders", "a", b"3", ttl=MINUTE, keep=True)
    assert stamped(rig, "orders", "a") == MINUTE


# --- L7: at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lifetime",
    [
        Lifetime(LifetimeKind.TTL, 0),
        Lifetime(LifetimeKind.EXPIRE_TIME, START),
        Lifetime(LifetimeKind.EXPIRE_TIME, START - DAY),
        Lifetime(LifetimeKind.EXPIRE_TIME, START - 3_653 * DAY),
    ],
)
def test_a_record_that_is_due_at_once_supersedes_the_current_one_and_expires_in_the_same_commit(
    rig: Rig, lifetime: Lifetime
) -> None:
    """RabbitMQ 8: ttl 0 is PUT and EXPIRE in one commit; the key is absent afterwards (L7)."""
    rig.create_topic("orders")
    rig.put("orders", "a", b"before", ttl=MINUTE)
    outcome = rig.put("orders", "a", b"after", lifetime=lifetime)
    assert outcome.applied == 1
    assert rig.get("orders", "a") is None
    assert rig.stored("orders") == {}
    _, put, expire = rig.journal("orders")
    assert (put.kind, expire.kind) == ("put", "expire")
    assert put.payload == expire.payload == b"after"
    assert expire.sequence == put.sequence + 1
    assert expire.commit_time_micros == put.commit_time_micros
    assert rig.count("orders") == 0


# --- L8: never seen --------------------------------------------------------------------------------------------------


def test_an_expired_record_is_never_returned_before_the_sweep_or_after_a_restart(rig: Rig) -> None:
    """RabbitMQ 2: not by get, query or count; conditions treat it as absent; a touch does not find it (L8)."""
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=SECOND)
    rig.put("orders", "b")
    version = rig.stored("orders")[b"a"].version
    rig.time.tick(SECOND - 1)
    assert rig.get("orders", "a") is not None
    rig.time.tick(1)
    for restart in (False, True):
        if restart:
            rig.crash()
        assert b"a" in rig.stored("orders"), "it has not been swept"
        assert rig.get("orders", "a") is None
        assert list(rig.live("orders")) == [b"b"]
        assert rig.count("orders") == 1
    for condition in (Condition(ConditionKind.IF_PRESENT), Condition(ConditionKind.IF_VERSION, version)):
        (refusal,) = rig.put("orders", "a", condition=condition).refusals
        assert (refusal.reason, refusal.current_version) == (Reason.CONDITION_FAILED, 0)
    (refusal,) = rig.touch("orders", "a", ttl=MINUTE).refusals
    assert refusal.reason is Reason.RECORD_NOT_FOUND
    assert rig.delete("orders", "a").applied == 0
    assert rig.put("orders", "a", condition=Condition(ConditionKind.IF_ABSENT)).applied == 1


@pytest.mark.parametrize("meeting", ["publish", "publish with results", "touch", "delete"])
def test_a_write_that_meets_an_overdue_record_expires_it_first(rig: Rig, meeting: str) -> None:
    """L10: EXPIRE, then itself, in consecutive sequences of one commit; and the sweep does not expire it again."""
    rig.create_topic("orders")
    rig.put("orders", "a", b"old", ttl=SECOND)
    rig.time.tick(SECOND)
    match meeting:
        case "touch":
            rig.touch("orders", "a", ttl=MINUTE)
        case "delete":
            rig.delete("orders", "a")
        case _:
            rig.put("orders", "a", b"new", want_results=meeting == "publish with results")
    then = ["put"] if meeting.startswith("publish") else []
    entries = rig.journal("orders")
    assert [entry.kind for entry in entries] == ["put", "expire", *then]
    assert entries[1].payload == b"old"
    assert [entry.sequence for entry in entries] == list(range(entries[0].sequence, entries[0].sequence + len(entries)))
    assert len({entry.commit_time_micros for entry in entries[1:]}) == 1
    rig.store.sweep()
    assert rig.journal("orders") == entries


# --- L12: settings and stamps ----------------------------------------------------------------------------------------


def test_changing_the_default_changes_no_stored_stamp_not_at_a_restart_either(rig: Rig) -> None:
    """AMPS 11, RabbitMQ 10: limits and defaults act on records published from then on."""
    rig.create_topic("orders", default_ttl_micros=30 * SECOND)
    rig.put("orders", "a")
    rig.alter_topic("orders", default_ttl_micros=50 * SECOND, min_ttl_micros=45 * SECOND, max_ttl_micros=50 * SECOND)
    rig.put("orders", "b", ttl=MINUTE)
    for _ in range(2):
        assert (stamped(rig, "orders", "a"), stamped(rig, "orders", "b")) == (30 * SECOND, 50 * SECOND)
        rig.reopen()
    rig.time.tick(30 * SECOND)
    assert list(rig.live("orders")) == [b"b"]


def test_disabling_expires_overdue_records_and_keeps_the_rest_for_good(rig: Rig) -> None:
    """AMPS 11: disabled later, no expiry; but nothing that was hidden reappears (L12)."""
    rig.create_topic("orders")
    rig.put("orders", "overdue", ttl=SECOND)
    rig.put("orders", "ahead", ttl=MINUTE)
    rig.time.tick(SECOND)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    assert rig.kinds("orders")[-1] == ("expire", "overdue")
    rig.time.tick(DAY)
    rig.store.sweep()
    assert list(rig.live("orders")) == [b"ahead"]
    rig.reopen()
    assert list(rig.live("orders")) == [b"ahead"]


def test_enabling_again_expires_overdue_records_at_once(rig: Rig) -> None:
    """L12: stamps are kept while expiration is disabled, those that were given meanwhile too."""
    rig.create_topic("orders")
    rig.put("orders", "before", ttl=MINUTE)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    rig.put("orders", "meanwhile", ttl=2 * MINUTE)
    rig.put("orders", "later", ttl=DAY)
    rig.put("orders", "never")
    rig.time.tick(5 * MINUTE)
    assert rig.count("orders") == 4
    rig.alter_topic("orders", expiration=Expiration.ENABLED)
    assert list(rig.live("orders")) == [b"later", b"never"]
    rig.store.sweep()
    assert list(rig.stored("orders")) == [b"later", b"never"]
    rig.time.tick(DAY)
    rig.store.sweep()
    assert list(rig.stored("orders")) == [b"never"]


# --- L16, L17: figures and space -------------------------------------------------------------------------------------


def test_counts_leave_out_expired_records_and_the_unswept_are_a_figure_of_their_own(rig: Rig) -> None:
    """RabbitMQ 11: expired records are not counted (L16)."""
    rig.create_topic("orders")
    rig.create_topic("quotes")
    for number in range(10):
        rig.put("orders", str(number), b"payload", ttl=(1 + number % 2) * SECOND)
        rig.put("quotes", str(number), ttl=SECOND)
    rig.time.tick(SECOND)
    orders = rig.topic("orders")
    assert rig.count("orders") == 5
    assert rig.store.cuts.counts() == {orders.id: (5, 5), rig.topic("quotes").id: (0, 10)}
    assert rig.store.cuts.counts([orders]) == {orders.id: (5, 5)}
    assert rig.store.durable_commits.topic_statistics(orders).stored_records == 10
    rig.store.sweep()
    assert (rig.count("orders"), rig.store.cuts.counts([orders])) == (5, {orders.id: (5, 0)})
    assert rig.store.durable_commits.topic_statistics(orders).stored_records == 5
    assert rig.store.durable_commits.topic_statistics(orders).stored_bytes == 5 * (1 + len(b"payload"))


def test_counts_are_of_one_instant_while_a_sweep_removes_records(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """L16: overdue records were counted first, and the stored ones read after: those that a sweep had removed between
    were missing from the live ones."""
    rig.create_topic("orders")
    for number in range(10):
        rig.put("orders", str(number), ttl=SECOND if number < 4 else MINUTE)
    rig.time.tick(SECOND)
    count = Sweep.overdue

    def swept_meanwhile(sweep: Sweep, now_micros: int, **options: Any) -> dict[int, int]:
        rig.store.sweep()
        found = count(sweep, now_micros, **options)
        assert rig.topic("orders").statistics.records == 6, "the sweep is over"
        return found

    monkeypatch.setattr(Sweep, "overdue", swept_meanwhile)
    assert rig.store.cuts.counts() == {rig.topic("orders").id: (6, 4)}
    assert rig.store.cuts.counts() == {rig.topic("orders").id: (6, 0)}


def test_refreshed_and_deleted_records_are_not_counted_as_overdue(rig: Rig) -> None:
    """L16: their entries in the expiry index are stale, and are looked through."""
    rig.create_topic("orders")
    for key in "abc":
        rig.put("orders", key, ttl=SECOND)
    rig.put("orders", "a", ttl=MINUTE)
    rig.delete("orders", "b")
    rig.time.tick(SECOND)
    assert (rig.count("orders"), rig.store.cuts.counts()) == (1, {rig.topic("orders").id: (1, 1)})


@pytest.mark.slow
def test_loading_and_expiring_again_and_again_keeps_the_directory_on_a_plateau(rig: Rig) -> None:
    """P6, R11, L17: space of expired records is given back by compaction."""
    rig.create_topic("orders", retain_bytes=0, retain_time_micros=0)
    sizes = []
    for generation in range(4):
        payload = bytes(str(generation), "ascii") * 2000
        for start in range(0, 1000, 500):
            keys = [f"{generation}/{number}" for number in range(start, start + 500)]
            rig.run(Publish("orders", [payload] * 500, keys, lifetime=Lifetime(LifetimeKind.TTL, SECOND)))
        rig.time.tick(SECOND)
        assert rig.store.sweep() > 0
        rig.prune()
        rig.store._rocks.flush()
        rig.store.upkeep.compact()
        rig.reopen()  # old logs go
        sizes.append(rig.store.upkeep.disk_bytes())
    assert sizes[-1] < 2 * sizes[0]


def test_a_touch_with_nothing_left_to_live_expires_the_record(rig: Rig) -> None:
    """L7, P8: ttl 0 is legal for a touch too."""
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=MINUTE)
    assert rig.touch("orders", "a", ttl=0).applied == 1
    assert rig.get("orders", "a") is None
    assert rig.kinds("orders") == [("put", "a"), ("touch", "a"), ("expire", "a")]


def test_one_request_has_one_now(rig: Rig) -> None:
    """L8: the stamp of all records of a request is the same, and reads judge by one instant."""
    rig.create_topic("orders", default_ttl_micros=SECOND)
    rig.run(Publish("orders", [b"x"] * 3, ["a", "b", "c"], want_results=True))
    assert len({kept.expire_time_micros for kept in rig.stored("orders").values()}) == 1
    cut = rig.store.cuts.records(rig.topic("orders"))
    try:
        rig.time.tick(DAY)
        rig.store.sweep()
        keys: list[bytes] = []
        cut.fill(cut.topic.prefix, 10, keys, [])
        assert keys == [b"a", b"b", b"c"], "all of them lived when the cut was made"
    finally:
        cut.close()


def test_the_same_payload_in_several_topics_expires_in_each_by_itself(rig: Rig) -> None:
    """RabbitMQ 6."""
    rig.create_topic("short", default_ttl_micros=SECOND)
    rig.create_topic("long", default_ttl_micros=MINUTE)
    rig.create_topic("ever")
    for topic in ("short", "long", "ever"):
        rig.put(topic, "a", b"the same")
    for ttl, left in ((SECOND, [0, 1, 1]), (MINUTE, [0, 0, 1])):
        rig.time.tick(ttl)
        rig.store.sweep()
        assert [len(rig.stored(topic)) for topic in ("short", "long", "ever")] == left


def test_a_topic_that_is_not_there_is_named(rig: Rig) -> None:
    for request in (Publish("nowhere", [b"{}"]), Touch("nowhere", ["a"]), Delete("nowhere", ["a"])):
        with pytest.raises(StoreError, match="nowhere") as caught:
            rig.run(request)
        assert caught.value.reason is Reason.TOPIC_NOT_FOUND
