"""The effect of a publish, a touch and a delete on records (P1 to P8, D1 to D3, K5 to K8)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    NEVER,
    PERMANENT,
    Applied,
    Condition,
    ConditionKind,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    Refusal,
    TopicSettings,
    Touch,
)
from tests.support.stores.stores import BINARY, MINUTE, SECOND, Rig, journal_rows

IF_ABSENT = Condition(ConditionKind.IF_ABSENT)
IF_PRESENT = Condition(ConditionKind.IF_PRESENT)
JSON = TopicSettings(key=("/id",), expiration=Expiration.ENABLED)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    rig.create_topic("json", JSON)
    yield rig
    rig.close()


def refusals(outcome_refusals: list[Refusal]) -> list[tuple[int, Reason]]:
    return [(refusal.index, refusal.reason) for refusal in outcome_refusals]


def payload(rig: Rig, key: str, topic: str = "orders") -> bytes | None:
    found = rig.get(topic, key)
    return None if found is None else found.payload


# --- publish ---------------------------------------------------------------------------------------------------------


def test_the_last_publish_of_a_key_wins(rig: Rig) -> None:
    """P1, also within a request."""
    rig.put("orders", "a", b"1")
    rig.run(Publish("orders", [b"2", b"3"], ["a", "a"]))
    assert payload(rig, "a") == b"3"
    assert rig.count("orders") == 1
    first, second, third = rig.journal("orders")
    assert [first.previous, second.previous, third.previous] == [0, first.sequence, second.sequence]


def test_publishing_the_same_content_is_an_update(rig: Rig) -> None:
    """P1: a new version, the lifetime renewed, an entry in the journal."""
    rig.put("orders", "a", b"same", ttl=MINUTE)
    before = rig.get("orders", "a")
    rig.time.tick(SECOND)
    rig.put("orders", "a", b"same", ttl=MINUTE)
    after = rig.get("orders", "a")
    assert before is not None
    assert after is not None
    assert after.version > before.version
    assert after.sequence > before.sequence
    assert after.expire_time_micros == before.expire_time_micros + SECOND
    assert len(rig.journal("orders")) == 2


def test_good_records_are_applied_and_bad_ones_come_back_with_their_place(rig: Rig) -> None:
    """P4, K5: each record stands alone."""
    payloads = [b'{"id":1}', b'{"no":1}', b'{"id":[1]}', b"{", b'{"id":2}', b'{"id":null}']
    for outcome in (rig.run(Publish("json", payloads)), rig.run(Publish("json", payloads, want_results=True))):
        assert outcome.applied == 2
        assert refusals(outcome.refusals) == [
            (1, Reason.KEY_FIELD_MISSING),
            (2, Reason.KEY_FIELD_NOT_SCALAR),
            (3, Reason.PAYLOAD_MALFORMED),
            (5, Reason.KEY_FIELD_MISSING),
        ]
        if outcome.results is not None:
            applied = [isinstance(result, Applied) for result in outcome.results]
            assert applied == [True, False, False, False, True, False]
    assert list(rig.live("json")) == [b"1", b"2"]


def test_an_atomic_request_is_applied_whole_or_not_at_all(rig: Rig) -> None:
    """P4: nothing of it stands, neither in records nor in figures or the journal; each record is told why."""
    rig.put("orders", "b", b"before")
    request = Publish("orders", [b"1", b"2", b"3"], ["a", "b", "c"], conditions=[None, IF_ABSENT, None], atomic=True)
    rows = (rig.stored("orders"), rig.journal("orders"), rig.topic("orders").statistics)
    outcome = rig.run(request)
    assert outcome.applied == 0
    assert refusals(outcome.refusals) == [
        (0, Reason.ATOMIC_ABORTED),
        (1, Reason.CONDITION_FAILED),
        (2, Reason.ATOMIC_ABORTED),
    ]
    assert (rig.stored("orders"), rig.journal("orders"), rig.topic("orders").statistics) == rows
    rig.delete("orders", "b")
    assert rig.run(request).applied == 3
    assert [payload(rig, key) for key in "abc"] == [b"1", b"2", b"3"]


def test_an_atomic_request_that_is_aborted_takes_nothing_else_with_it(rig: Rig) -> None:
    """P4: it has a commit of its own, so that requests queued around it stand."""
    bad = Publish("orders", [b"x"] * 2, ["b", "c"], conditions=[None, IF_PRESENT], atomic=True)
    answers = rig.run_together([Publish("orders", [b"x"], ["a"]), bad, Publish("orders", [b"x"], ["d"])])
    assert not any(isinstance(answer, StoreError) for answer in answers)
    assert list(rig.live("orders")) == [b"a", b"d"]


def test_an_atomic_request_is_never_split_over_commits(tmp_path: Path) -> None:
    """K8."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_records_max=3)))
    rig.create_topic("orders")
    keys = [str(number) for number in range(10)]
    rig.run(Publish("orders", [b"x"] * 10, keys, atomic=True))
    assert len(list(journal_rows(rig.store, rig.topic("orders")))) == 1
    rig.run(Publish("orders", [b"x"] * 10, keys))
    assert len(list(journal_rows(rig.store, rig.topic("orders")))) == 5
    rig.close()


def test_records_are_applied_in_the_order_in_which_they_came(rig: Rig) -> None:
    """P7: requests in the order of their queuing, records in the order of their request, one sequence over all."""
    rig.run_together(
        [
            Publish("orders", [b"1", b"2"], ["a", "b"]),
            Publish("json", [b'{"id":1}']),
            Publish("orders", [b"3"], ["a"], want_results=True),
            Delete("orders", ["b"]),
            Publish("orders", [b"4"], ["b"]),
            Touch("orders", ["a"], PERMANENT),
        ]
    )
    entries = sorted(rig.journal("orders") + rig.journal("json"))
    assert [entry.sequence for entry in entries] == list(range(1, 8))
    assert [(entry.kind, entry.key) for entry in entries] == [
        ("put", b"a"),
        ("put", b"b"),
        ("put", b"1"),
        ("put", b"a"),
        ("delete", b"b"),
        ("put", b"b"),
        ("touch", b"a"),
    ]
    assert (payload(rig, "a"), payload(rig, "b")) == (b"3", b"4")


# --- conditions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "there", "holds"),
    [
        (IF_ABSENT, True, False),
        (IF_ABSENT, False, True),
        (IF_PRESENT, True, True),
        (IF_PRESENT, False, False),
        (Condition(ConditionKind.IF_VERSION, 1), False, False),
        (Condition(ConditionKind.IF_VERSION, 1), True, False),
        (Condition(ConditionKind.IF_VERSION, 0), True, True),
    ],
)
def test_a_condition_is_checked_with_the_write(rig: Rig, condition: Condition, there: bool, holds: bool) -> None:
    """P3: a failed one says the current version, and changes nothing. (Version 0 stands for the right one here.)"""
    version = rig.put("orders", "a", b"before").last_version if there else 0
    if condition == (ConditionKind.IF_VERSION, 0):
        condition = Condition(ConditionKind.IF_VERSION, version)
    outcome = rig.put("orders", "a", b"after", condition=condition)
    if holds:
        assert outcome.applied == 1
        assert payload(rig, "a") == b"after"
    else:
        (refusal,) = outcome.refusals
        assert (refusal.reason, refusal.current_version) == (Reason.CONDITION_FAILED, version)
        assert payload(rig, "a") == (b"before" if there else None)


def test_one_of_two_writers_with_the_same_condition_wins(rig: Rig) -> None:
    """P3: conditions see the earlier changes of the same commit."""
    first, second = rig.run_together(
        [Publish("orders", [text], ["a"], conditions=[IF_ABSENT]) for text in (b"1", b"2")]
    )
    assert not isinstance(first, StoreError)
    assert not isinstance(second, StoreError)
    assert (first.applied, second.applied) == (1, 0)
    assert second.refusals[0].current_version == first.last_version


# --- touch and persist -----------------------------------------------------------------------------------------------


def test_a_touch_changes_the_lifetime_and_nothing_else(rig: Rig) -> None:
    """P8: it mints a version, keeps payload and publish time, and is journaled as a put of the whole record."""
    rig.put("orders", "a", b"body", ttl=SECOND)
    before = rig.get("orders", "a")
    rig.time.tick(1)
    outcome = rig.touch("orders", "a", ttl=MINUTE)
    after = rig.get("orders", "a")
    assert before is not None
    assert after is not None
    assert (after.payload, after.publish_time_micros) == (before.payload, before.publish_time_micros)
    assert after.version > before.version
    assert after.expire_time_micros == rig.clock.now_micros() + MINUTE
    entry = rig.journal("orders")[-1]
    assert (entry.kind, entry.payload, entry.previous) == ("touch", b"body", before.sequence)
    assert outcome.results == [Applied("a", after.version, after.expire_time_micros, after.sequence)]


def test_persist_removes_the_lifetime(rig: Rig) -> None:
    """P8."""
    rig.put("orders", "a", ttl=SECOND)
    rig.touch("orders", "a", lifetime=PERMANENT)
    found = rig.get("orders", "a")
    assert found is not None
    assert found.expire_time_micros == NEVER


def test_a_touch_follows_the_rules_of_lifetimes_and_conditions(rig: Rig) -> None:
    """P8, L3, L4, P3: default, clamps, refusals, conditions, keys that are not there."""
    rig.alter_topic("orders", default_ttl_micros=MINUTE, max_ttl_micros=2 * MINUTE)
    version = rig.put("orders", "a").last_version
    now = rig.clock.now_micros()
    assert rig.touch("orders", "a").applied == 1
    assert rig.stored("orders")[b"a"].expire_time_micros == now + MINUTE
    assert rig.touch("orders", "a", lifetime=PERMANENT).applied == 1
    assert rig.stored("orders")[b"a"].expire_time_micros == now + 2 * MINUTE
    lifetime = Lifetime(LifetimeKind.TTL, -1)
    assert refusals(rig.touch("orders", "a", lifetime=lifetime).refusals) == [(0, Reason.LIFETIME_NEGATIVE)]
    stale = Touch("orders", ["a", "b"], condition=Condition(ConditionKind.IF_VERSION, version))
    assert refusals(rig.run(stale).refusals) == [(0, Reason.CONDITION_FAILED), (1, Reason.RECORD_NOT_FOUND)]


def test_a_touch_sees_records_published_in_the_same_commit(rig: Rig) -> None:
    rig.put("orders", "a", b"1")
    rig.run_together([Publish("orders", [b"2"], ["a"]), Touch("orders", ["a"], Lifetime(LifetimeKind.TTL, MINUTE))])
    found = rig.get("orders", "a")
    assert found is not None
    assert (found.payload, found.expire_time_micros) == (b"2", rig.clock.now_micros() + MINUTE)


# --- delete ----------------------------------------------------------------------------------------------------------


def test_a_delete_counts_the_deleted_records(rig: Rig) -> None:
    """D1, D2: by keys; a key that is not there, or comes twice, does not match."""
    for key in "abc":
        rig.put("orders", key)
    assert rig.delete("orders", "a", "x", "c", "a").applied == 2
    assert list(rig.live("orders")) == [b"b"]


def test_a_delete_by_payload_derives_the_key_as_a_publish_does(rig: Rig) -> None:
    """D1."""
    rig.run(Publish("json", [b'{"id":1,"x":1}', b'{"id":2}']))
    assert rig.run(Delete("json", payload=b'{"x":9,"id":1}')).applied == 1
    assert list(rig.live("json")) == [b"2"]


@pytest.mark.parametrize(
    ("topic", "document", "reason"),
    [
        ("json", b"{}", Reason.KEY_FIELD_MISSING),
        ("json", b"nonsense", Reason.PAYLOAD_MALFORMED),
        ("orders", b"x", Reason.KEY_REQUIRED),
    ],
)
def test_a_delete_by_a_payload_without_a_key_is_refused(rig: Rig, topic: str, document: bytes, reason: Reason) -> None:
    """D1, X2."""
    with pytest.raises(StoreError) as caught:
        rig.run(Delete(topic, payload=document))
    assert caught.value.reason is reason


def test_a_delete_is_journaled_with_the_previous_record_and_a_version_of_its_own(rig: Rig) -> None:
    """D3, AMPS 10."""
    put = rig.put("orders", "a", b"body", ttl=MINUTE)
    rig.delete("orders", "a")
    _, entry = rig.journal("orders")
    assert (entry.kind, entry.payload, entry.previous) == ("delete", b"body", put.last_sequence)
    assert entry.removed_version == put.last_version
    assert entry.version > put.last_version
    assert rig.entries() == [], "its index entry goes with it"
    assert rig.put("orders", "a").last_version > entry.version


# --- versions --------------------------------------------------------------------------------------------------------


def test_versions_follow_the_clock_and_rise_with_every_write(rig: Rig) -> None:
    """K7: max(now, last + 1)."""
    now = rig.clock.now_micros()
    assert rig.run(Publish("orders", [b"x"] * 3, ["a", "b", "c"])).last_version == now + 2
    assert rig.put("orders", "a").last_version == now + 3
    rig.time.tick(SECOND)
    assert rig.put("orders", "a").last_version == now + SECOND


def test_no_version_and_no_sequence_is_issued_twice_after_a_crash(tmp_path: Path) -> None:
    """K7, S7, writer [4]: bounds are on disk before versions and sequences up to them are used, though time stands
    still."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    version = sequence = 0
    for restart in (rig.crash, rig.crash, rig.reopen, rig.crash, rig.reopen, rig.reopen):
        for _ in range(3):
            outcome = rig.put("orders", "a")
            assert outcome.last_version > version
            assert outcome.last_sequence > sequence
            version, sequence = outcome.last_version, outcome.last_sequence
        restart()
        assert rig.store.writer.last_sequence >= sequence
    rig.close()


def test_versions_lead_the_clock_by_one_reservation_at_most_after_any_number_of_crashes(tmp_path: Path) -> None:
    """K7: each crash once added 2 s, so a server that was killed every second led by 10 s after ten of them. Then peers
    refuse its changes (CLOCK_SKEW), and once it has lost its data its new writes lose against its old ones."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    for _ in range(5):
        rig.put("orders", "a")
        assert rig.put("orders", "a").last_version - rig.clock.now_micros() <= 2 * SECOND
        rig.time.tick(SECOND)
        rig.crash()
    rig.close()


def test_an_orderly_stop_returns_reserved_versions(rig: Rig) -> None:
    """K7: so that versions stay close to the clock, and sequences without holes."""
    outcome = rig.put("orders", "a")
    rig.reopen()
    following = rig.put("orders", "a")
    assert following.last_version == outcome.last_version + 1
    assert following.last_sequence == outcome.last_sequence + 1


def test_a_new_version_is_above_that_of_the_record_it_replaces_though_the_clock_was_set_back(rig: Rig) -> None:
    """K7, L15."""
    version = rig.put("orders", "a").last_version
    rig.close()
    rig.time.step_wall(-MINUTE)
    rig.open(accept_clock=True)
    assert rig.put("orders", "a").last_version == version + 1


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Rig]:
    limits = RequestLimits(
        payload_bytes_max=10, key_bytes_max=4, request_records_max=5, request_bytes_max=30, atomic_records_max=3
    )
    rig = Rig(tmp_path / "limited", options=StoreOptions(writer=WriterOptions(limits=limits)))
    rig.create_topic("orders", BINARY)
    yield rig
    rig.close()


def test_records_beyond_a_limit_are_refused_by_size_and_limit(limited: Rig) -> None:
    """K8: in bytes of UTF-8 for keys; the others are applied."""
    outcome = limited.run(Publish("orders", [b"x" * 11, b"x" * 10, b"x", b"x"], ["a", "b", "ccccc", "ééé"]))
    assert [(refusal.index, refusal.reason, refusal.message) for refusal in outcome.refusals] == [
        (0, Reason.PAYLOAD_TOO_LARGE, "payload: 11 bytes are more than the limit of 10"),
        (2, Reason.KEY_TOO_LARGE, "key: 5 bytes are more than the limit of 4"),
        (3, Reason.KEY_TOO_LARGE, "key: 6 bytes are more than the limit of 4"),
    ]
    assert list(limited.live("orders")) == [b"b"]


@pytest.mark.parametrize(
    ("request_", "reason", "message"),
    [
        (Publish("orders", [b"x"] * 6, list("abcdef")), Reason.REQUEST_TOO_LARGE, "6 records .* limit of 5"),
        (Publish("orders", [b"x" * 8] * 4, list("abcd")), Reason.REQUEST_TOO_LARGE, "32 bytes .* limit of 30"),
        (Publish("orders", [b"x"] * 4, list("abcd"), atomic=True), Reason.ATOMIC_TOO_LARGE, "4 records .* limit of 3"),
        (Touch("orders", list("abcdef")), Reason.REQUEST_TOO_LARGE, "6 keys .* limit of 5"),
        (Delete("orders", list("abcdef")), Reason.REQUEST_TOO_LARGE, "6 keys .* limit of 5"),
        (Publish("orders", [], []), Reason.INVALID_ARGUMENT, "at least one"),
        (Delete("orders", []), Reason.INVALID_ARGUMENT, "at least one"),
        (Publish("orders", [b"x"], ["a", "b"]), Reason.INVALID_ARGUMENT, "2 entries for 1"),
        (Publish("orders", [b"x"]), Reason.KEY_REQUIRED, "needs a key"),
    ],
)
def test_requests_beyond_a_limit_are_refused_whole(
    limited: Rig, request_: Publish | Touch | Delete, reason: Reason, message: str
) -> None:
    """K8, X2, K3: the refusal names size and limit, and nothing is half-done."""
    with pytest.raises(StoreError, match=message) as caught:
        limited.run(request_)
    assert caught.value.reason is reason
    assert limited.stored("orders") == {}


def test_a_key_on_a_topic_with_key_fields_is_refused_and_not_ignored(rig: Rig) -> None:
    """K3."""
    with pytest.raises(StoreError) as caught:
        rig.run(Publish("json", [b'{"id":1}'], ["1"]))
    assert caught.value.reason is Reason.KEY_NOT_ALLOWED


def test_empty_keys_and_keys_that_are_no_text_are_refused(rig: Rig) -> None:
    """K5: never an empty key."""
    outcome = rig.run(Publish("orders", [b"x"] * 3, ["", "\ud800", "a"]))
    assert refusals(outcome.refusals) == [(0, Reason.KEY_REQUIRED), (1, Reason.KEY_NOT_UTF8)]
    assert list(rig.live("orders")) == [b"a"]


def test_one_as_number_and_as_text_is_one_record(rig: Rig) -> None:
    """K4: 1, 1.0 and "1" are one key."""
    rig.run(Publish("json", [b'{"id":1}', b'{"id":1.0}', b'{"id":"1"}']))
    assert {key: kept.payload for key, kept in rig.live("json").items()} == {b"1": b'{"id":"1"}'}


def test_a_request_that_is_split_over_commits_is_answered_as_one(tmp_path: Path) -> None:
    """P4, K8."""
    rig = Rig(tmp_path, options=StoreOptions(writer=replace(WriterOptions(), commit_records_max=4)))
    rig.create_topic("json", JSON)
    payloads = [b'{"id":%d}' % number if number % 3 else b"{}" for number in range(10)]
    outcome = rig.run(Publish("json", payloads, want_results=True))
    assert outcome.applied == 6
    assert refusals(outcome.refusals) == [(number, Reason.KEY_FIELD_MISSING) for number in (0, 3, 6, 9)]
    assert outcome.results is not None
    assert [isinstance(result, Applied) for result in outcome.results] == [bool(number % 3) for number in range(10)]
    assert outcome.last_sequence == rig.store.writer.last_sequence
    rig.close()
