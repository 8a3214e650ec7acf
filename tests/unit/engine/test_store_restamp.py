"""Changes by filter on a store: a record is changed only if it is still meant (rules D2, L13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import HEADER_BYTES
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    PERMANENT,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    Restamp,
    RestampMode,
)
from tests.support.stores.stores import SECOND, START, Rig

SET, CAP, CLEAR = RestampMode.SET, RestampMode.CAP, RestampMode.CLEAR


def ttl(seconds: int) -> Lifetime:
    return Lifetime(LifetimeKind.TTL, seconds * SECOND)


def at(seconds: int) -> Lifetime:
    return Lifetime(LifetimeKind.EXPIRE_TIME, START + seconds * SECOND)


def is_old(key: bytes, value: bytes) -> bool:
    return value[HEADER_BYTES:] == b"old"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_records_max=10)))
    rig.create_topic("t")
    yield rig
    rig.close()


def ahead(rig: Rig) -> dict[str, int | None]:
    """Seconds after START at which the records expire; None for never."""
    return {
        key.decode(): None if kept.expire_time_micros == NEVER else (kept.expire_time_micros - START) // SECOND
        for key, kept in rig.live("t").items()
    }


def restamp(rig: Rig, mode: RestampMode, lifetime: Lifetime = ABSENT, keys: str = "abc") -> int:
    return rig.run(Restamp("t", list(keys), mode, lifetime)).applied


# --- deletes ---------------------------------------------------------------------------------------------------------


def test_a_record_that_does_not_match_any_more_is_not_deleted(rig: Rig) -> None:
    """D2: the record that was found was deleted and published anew meanwhile, or changed, or is as it was."""
    for key in "abc":
        rig.put("t", key, b"old")
    delete = Delete("t", ["a", "b", "c"], matches=is_old)
    rig.put("t", "b", b"new")
    rig.delete("t", "c")
    outcome = rig.run(delete)
    assert outcome.applied == 1
    assert list(rig.live("t")) == [b"b"]


def test_requests_queued_before_a_delete_take_effect_before_it(rig: Rig) -> None:
    """In one commit: the predicate sees the record that the publish has just put."""
    rig.put("t", "a", b"old")
    rig.run_together(
        [
            Publish("t", [b"new"], ["a"]),
            Delete("t", ["a", "b"], matches=is_old),
            Publish("t", [b"old"], ["b"]),
            Delete("t", ["b"], matches=is_old),
        ]
    )
    assert list(rig.live("t")) == [b"a"]


def test_an_overdue_record_is_no_match_and_expires(rig: Rig) -> None:
    """L10: a delete does not count expired records."""
    rig.put("t", "a", ttl=SECOND)
    rig.time.tick(SECOND)
    assert rig.run(Delete("t", ["a"], matches=lambda key, value: True)).applied == 0
    assert rig.kinds("t") == [("put", "a"), ("expire", "a")]


def test_keys_found_in_a_topic_are_not_deleted_from_another_of_its_name(rig: Rig) -> None:
    rig.put("t", "a")
    found_in = rig.topic("t").id
    rig.delete_topic("t")
    rig.create_topic("t")
    rig.put("t", "a")
    for request in (Delete("t", ["a"], topic_id=found_in), Restamp("t", ["a"], CLEAR, topic_id=found_in)):
        with pytest.raises(StoreError, match="was deleted meanwhile") as caught:
            rig.run(request)
        assert caught.value.reason is Reason.TOPIC_NOT_FOUND
    assert rig.run(Delete("t", ["a"], topic_id=rig.topic("t").id)).applied == 1


def test_a_fault_of_the_predicate_fails_its_request_alone(rig: Rig) -> None:
    """writer [5]."""
    rig.put("t", "a")

    def broken(key: bytes, value: bytes) -> bool:
        raise ZeroDivisionError

    first, second = rig.run_together([Delete("t", ["a"], matches=broken), Delete("t", ["a"])])
    assert isinstance(first, StoreError)
    assert first.reason is Reason.INTERNAL
    assert not isinstance(second, StoreError)
    assert second.applied == 1


# --- restamps --------------------------------------------------------------------------------------------------------


@pytest.fixture
def stamped(rig: Rig) -> Rig:
    """a: never, b: 10 s, c: 60 s."""
    rig.put("t", "a")
    rig.put("t", "b", ttl=10 * SECOND)
    rig.put("t", "c", ttl=60 * SECOND)
    return rig


def test_set_replaces_every_lifetime(stamped: Rig) -> None:
    assert restamp(stamped, SET, ttl(30)) == 3
    assert ahead(stamped) == {"a": 30, "b": 30, "c": 30}
    assert restamp(stamped, SET, PERMANENT, "b") == 1
    assert restamp(stamped, SET, at(5), "c") == 1
    assert ahead(stamped) == {"a": 30, "b": None, "c": 5}


def test_cap_lowers_only_longer_lifetimes(stamped: Rig) -> None:
    assert restamp(stamped, CAP, ttl(30)) == 2
    assert ahead(stamped) == {"a": 30, "b": 10, "c": 30}
    assert restamp(stamped, CAP, at(30)) == 0


def test_clear_makes_records_permanent(stamped: Rig) -> None:
    assert restamp(stamped, CLEAR) == 2
    assert ahead(stamped) == {"a": None, "b": None, "c": None}


def test_clear_gives_no_default_but_obeys_the_longest_lifetime(stamped: Rig) -> None:
    """L4."""
    stamped.alter_topic("t", default_ttl_micros=5 * SECOND)
    assert restamp(stamped, CLEAR) == 2
    assert ahead(stamped) == {"a": None, "b": None, "c": None}
    stamped.alter_topic("t", max_ttl_micros=40 * SECOND)
    assert restamp(stamped, CLEAR) == 3
    assert ahead(stamped) == {"a": 40, "b": 40, "c": 40}


def test_set_and_cap_are_clamped_like_a_publish(stamped: Rig) -> None:
    """L4."""
    stamped.alter_topic("t", min_ttl_micros=20 * SECOND, max_ttl_micros=50 * SECOND)
    assert restamp(stamped, SET, ttl(1), "a") == 1
    assert restamp(stamped, CAP, ttl(1), "bc") == 1
    assert ahead(stamped) == {"a": 20, "b": 10, "c": 20}
    assert restamp(stamped, SET, PERMANENT, "b") == 1
    assert ahead(stamped)["b"] == 50


def test_a_restamp_is_like_a_touch(stamped: Rig) -> None:
    """P8: it mints a version, keeps the payload and its publish_time, and is journaled as a touch."""
    before = stamped.get("t", "b")
    stamped.time.tick(SECOND)
    outcome = stamped.run(Restamp("t", ["b"], SET, ttl(30)))
    after = stamped.get("t", "b")
    assert before is not None
    assert after is not None
    assert after.version > before.version
    assert (after.payload, after.publish_time_micros) == (before.payload, before.publish_time_micros)
    assert (outcome.last_version, outcome.last_sequence) == (after.version, after.sequence)
    entry = stamped.journal("t")[-1]
    assert (entry.kind, entry.key, entry.previous) == ("touch", b"b", before.sequence)


def test_records_that_are_not_meant_missing_or_overdue_are_left_alone(stamped: Rig) -> None:
    stamped.time.tick(10 * SECOND)
    request = Restamp("t", ["a", "b", "c", "gone"], SET, ttl(30), matches=lambda key, value: key != b"c")
    assert stamped.run(request).applied == 1
    assert ahead(stamped) == {"a": 40, "c": 60}
    assert stamped.kinds("t")[3:] == [("touch", "a"), ("expire", "b")]


def test_a_lifetime_of_nothing_expires_records_at_once(stamped: Rig) -> None:
    """L7."""
    assert restamp(stamped, CAP, ttl(0), "ab") == 2
    assert ahead(stamped) == {"c": 60}
    assert stamped.kinds("t")[3:] == [("touch", "a"), ("expire", "a"), ("touch", "b"), ("expire", "b")]


def test_the_sweep_goes_by_the_new_stamps(stamped: Rig) -> None:
    """draft [2]: earlier ones need an entry of their own, of later ones the old entry is no deadline."""
    restamp(stamped, SET, ttl(5), "ac")
    restamp(stamped, SET, ttl(20), "b")
    stamped.time.tick(10 * SECOND)
    stamped.store.sweep()
    assert list(stamped.stored("t")) == [b"b"]


def test_where_expiration_is_disabled_stamps_are_stored_all_the_same(stamped: Rig) -> None:
    """L3."""
    stamped.alter_topic("t", expiration=Expiration.DISABLED)
    assert restamp(stamped, SET, ttl(1)) == 3
    stamped.time.tick(2 * SECOND)
    assert ahead(stamped) == {"a": 1, "b": 1, "c": 1}
    assert restamp(stamped, CLEAR, keys="a") == 1


def test_a_topic_that_rejects_lifetimes_takes_only_clear(stamped: Rig) -> None:
    """It gets rid of the stamps from before; the others would give lifetimes."""
    stamped.alter_topic("t", expiration=Expiration.REJECT)
    for mode, lifetime in ((SET, ttl(1)), (CAP, ttl(1)), (SET, PERMANENT)):
        with pytest.raises(StoreError) as caught:
            restamp(stamped, mode, lifetime)
        assert (caught.value.reason, caught.value.field) == (Reason.LIFETIME_REJECTED, "lifetime")
    assert restamp(stamped, CLEAR) == 2
    assert ahead(stamped) == {"a": None, "b": None, "c": None}


@pytest.mark.parametrize(
    ("lifetime", "reason"),
    [(ttl(-1), Reason.LIFETIME_NEGATIVE), (ttl(3_654 * 86_400), Reason.LIFETIME_TOO_LONG)],
)
def test_a_lifetime_out_of_bounds_refuses_the_request(stamped: Rig, lifetime: Lifetime, reason: Reason) -> None:
    with pytest.raises(StoreError) as caught:
        restamp(stamped, CAP, lifetime)
    assert caught.value.reason is reason
    assert ahead(stamped) == {"a": None, "b": 10, "c": 60}


def test_more_than_a_commit_is_restamped_in_several(rig: Rig) -> None:
    keys = [f"{number:02}" for number in range(25)]
    for key in keys:
        rig.put("t", key)
    assert rig.run(Restamp("t", keys, SET, ttl(9))).applied == 25
    assert set(ahead(rig).values()) == {9}
