"""Renewing lifetimes: conditions of a touch, atomic touches, the touch of a get, and publishes that only extend (rules
L6, L19, L20)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    PERMANENT,
    Applied,
    Condition,
    ConditionKind,
    Delete,
    Lifetime,
    LifetimeKind,
    Outcome,
    Publish,
    Refusal,
    Touch,
    TouchOnly,
    TtlMode,
)
from sow_server.services.records.writing import only_versions
from sow_server.services.wire.convert import EVERY_MICROS
from tests.support.stores.stores import BINARY, MINUTE, SECOND, Rig

IN_A_MINUTE = Lifetime(LifetimeKind.TTL, MINUTE)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("sessions", BINARY, {})
    yield rig
    rig.close()


def left(rig: Rig, key: str, topic: str = "sessions") -> int | None:
    """The rest of a stored record's lifetime; None for never."""
    expire_time = rig.stored(topic)[key.encode()].expire_time_micros
    return None if expire_time == NEVER else expire_time - rig.clock.now_micros()


def reasons(outcome: Outcome) -> list[Reason | None]:
    """The reason of each refused record; None for those that were applied."""
    assert outcome.results is not None
    return [one.reason if isinstance(one, Refusal) else None for one in outcome.results]


# --- L19: conditions of a touch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only", "before", "given", "applied"),
    [
        (TouchOnly.LATER, 59 * SECOND, IN_A_MINUTE, True),
        (TouchOnly.LATER, MINUTE, IN_A_MINUTE, False),
        (TouchOnly.LATER, MINUTE, PERMANENT, True),
        (TouchOnly.LATER, None, IN_A_MINUTE, False),
        (TouchOnly.LATER, None, PERMANENT, False),
        (TouchOnly.EARLIER, 61 * SECOND, IN_A_MINUTE, True),
        (TouchOnly.EARLIER, MINUTE, IN_A_MINUTE, False),
        (TouchOnly.EARLIER, None, IN_A_MINUTE, True),
        (TouchOnly.EARLIER, MINUTE, PERMANENT, False),
        (TouchOnly.WITHOUT, None, IN_A_MINUTE, True),
        (TouchOnly.WITHOUT, SECOND, IN_A_MINUTE, False),
        (TouchOnly.WITH, SECOND, PERMANENT, True),
        (TouchOnly.WITH, None, IN_A_MINUTE, False),
    ],
)
def test_a_touch_changes_only_the_records_that_it_names(
    rig: Rig, only: TouchOnly, before: int | None, given: Lifetime, applied: bool
) -> None:
    """Lifetime 1: Redis's GT, LT, NX and XX; never is the latest (L19)."""
    rig.put("sessions", "a", lifetime=PERMANENT if before is None else Lifetime(LifetimeKind.TTL, before))
    version = rig.stored("sessions")[b"a"].version

    outcome = rig.run(Touch("sessions", ["a"], given, only=only))

    if applied:
        assert reasons(outcome) == [None]
        assert left(rig, "a") == (None if given is PERMANENT else MINUTE)
    else:
        (refusal,) = outcome.refusals
        assert (refusal.reason, refusal.current_version) == (Reason.CONDITION_FAILED, version)
        assert left(rig, "a") == before
        assert rig.stored("sessions")[b"a"].version == version


def test_a_touch_is_compared_after_the_bounds_of_the_topic(rig: Rig) -> None:
    """The stamp that counts is the one that the record would get (L4, L19)."""
    rig.create_topic("bounded", BINARY, {"max_ttl_micros": MINUTE})
    rig.put("bounded", "a", ttl=MINUTE)

    outcome = rig.run(Touch("bounded", ["a"], Lifetime(LifetimeKind.TTL, 60 * MINUTE), only=TouchOnly.LATER))

    assert reasons(outcome) == [Reason.CONDITION_FAILED]
    rig.time.tick(SECOND)
    assert reasons(rig.run(Touch("bounded", ["a"], PERMANENT, only=TouchOnly.LATER))) == [None]
    assert left(rig, "a", "bounded") == MINUTE


def test_a_condition_and_only_must_both_hold(rig: Rig) -> None:
    (put,) = rig.put("sessions", "a", ttl=SECOND, want_results=True).results or []
    assert isinstance(put, Applied)
    wrong, right = (Condition(ConditionKind.IF_VERSION, version) for version in (put.version + 1, put.version))

    assert reasons(rig.run(Touch("sessions", ["a"], IN_A_MINUTE, wrong, only=TouchOnly.LATER))) == [
        Reason.CONDITION_FAILED
    ]
    assert reasons(rig.run(Touch("sessions", ["a"], IN_A_MINUTE, right, only=TouchOnly.EARLIER))) == [
        Reason.CONDITION_FAILED
    ]
    assert left(rig, "a") == SECOND
    assert reasons(rig.run(Touch("sessions", ["a"], IN_A_MINUTE, right, only=TouchOnly.LATER))) == [None]


def test_an_overdue_record_is_not_there_for_a_touch_with_a_condition(rig: Rig) -> None:
    rig.put("sessions", "a", ttl=SECOND)
    rig.time.tick(SECOND)
    assert reasons(rig.run(Touch("sessions", ["a"], IN_A_MINUTE, only=TouchOnly.LATER))) == [Reason.RECORD_NOT_FOUND]


def test_an_atomic_touch_gives_all_records_one_stamp_or_changes_none(rig: Rig) -> None:
    for key in ("a", "b", "c"):
        rig.put("sessions", key, ttl=SECOND)
        rig.time.tick(1)
    before = rig.stored("sessions")

    refused = rig.run(Touch("sessions", ["a", "none", "b"], IN_A_MINUTE, atomic=True))

    assert reasons(refused) == [Reason.ATOMIC_ABORTED, Reason.RECORD_NOT_FOUND, Reason.ATOMIC_ABORTED]
    assert rig.stored("sessions") == before

    done = rig.run(Touch("sessions", ["a", "b", "c"], IN_A_MINUTE, atomic=True))

    assert done.applied == 3
    assert {left(rig, key) for key in ("a", "b", "c")} == {MINUTE}
    assert len({entry.commit_time_micros for entry in rig.journal("sessions")[-3:]}) == 1


def test_a_touch_may_name_a_version_for_each_key(rig: Rig) -> None:
    versions = []
    for key in ("a", "b"):
        (put,) = rig.put("sessions", key, ttl=SECOND, want_results=True).results or []
        assert isinstance(put, Applied)
        versions.append(put.version)
    rig.put("sessions", "b", ttl=2 * SECOND)  # another has taken it

    assert reasons(rig.run(Touch("sessions", ["a", "b"], IN_A_MINUTE, versions=versions, atomic=True))) == [
        Reason.ATOMIC_ABORTED,
        Reason.CONDITION_FAILED,
    ]
    assert left(rig, "a") == SECOND
    assert reasons(rig.run(Touch("sessions", ["a", "b"], IN_A_MINUTE, versions=versions))) == [
        None,
        Reason.CONDITION_FAILED,
    ]
    assert (left(rig, "a"), left(rig, "b")) == (MINUTE, 2 * SECOND)


def test_an_atomic_touch_has_a_bound(tmp_path: Path) -> None:
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(limits=RequestLimits(atomic_records_max=2))))
    rig.create_topic("sessions", BINARY, {})
    for key in ("a", "b", "c"):
        rig.put("sessions", key, ttl=SECOND)
    with pytest.raises(StoreError) as caught:
        rig.run(Touch("sessions", ["a", "b", "c"], IN_A_MINUTE, atomic=True))
    assert (caught.value.reason, caught.value.field) == (Reason.ATOMIC_TOO_LARGE, "keys")
    assert rig.run(Touch("sessions", ["a", "b", "c"], IN_A_MINUTE)).applied == 3
    rig.close()


@pytest.mark.parametrize(
    ("keys", "is_taken"), [(["a", "b"], True), (["a", "b", "c"], False), (["a", "b", "b"], False), (["a"] * 2, True)]
)
def test_an_atomic_touch_has_a_bound_of_bytes(tmp_path: Path, keys: list[str], is_taken: bool) -> None:
    """L19: a record that it names twice counts twice, as it is written twice."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_merged_bytes_max=20)))
    rig.create_topic("sessions", BINARY, {})
    for key in ("a", "b", "c"):
        rig.put("sessions", key, b"x" * 10, ttl=SECOND)
    request = Touch("sessions", keys, IN_A_MINUTE, atomic=True)
    if is_taken:
        assert rig.run(request).applied == len(keys)
    else:
        with pytest.raises(StoreError) as caught:
            rig.run(request)
        assert (caught.value.reason, caught.value.field) == (Reason.ATOMIC_TOO_LARGE, "keys")
        assert left(rig, "b") == SECOND
    assert rig.run(Touch("sessions", ["a", "b", "c", "c"], IN_A_MINUTE)).applied == 4
    rig.close()


# --- L20: the touch of a get ------------------------------------------------------------------------------------------


def test_a_get_renews_only_records_with_less_left(rig: Rig) -> None:
    """Lifetime 3: Aerospike's renewal below a part."""
    for key, ttl in (("soon", 5 * SECOND - 1), ("just", 5 * SECOND), ("later", MINUTE)):
        rig.put("sessions", key, ttl=ttl)
    rig.put("sessions", "never", lifetime=PERMANENT)
    keys = ["soon", "just", "later", "never", "none"]

    outcome = rig.run(Touch("sessions", keys, IN_A_MINUTE, below_micros=5 * SECOND))

    assert outcome.applied == 1
    assert [left(rig, key) for key in keys[:4]] == [MINUTE, 5 * SECOND, MINUTE, None]


def test_a_get_without_a_bound_renews_all(rig: Rig) -> None:
    rig.put("sessions", "later", ttl=60 * MINUTE)
    rig.put("sessions", "never", lifetime=PERMANENT)

    assert rig.run(Touch("sessions", ["later", "never", "none"], IN_A_MINUTE, below_micros=EVERY_MICROS)).applied == 2

    assert [left(rig, key) for key in ("later", "never")] == [MINUTE, MINUTE]


def test_the_records_of_a_get_are_renewed_in_one_commit(tmp_path: Path) -> None:
    """Also where commits hold fewer records, and others publish (L20)."""
    options = StoreOptions(writer=WriterOptions(commit_records_max=3))
    rig = Rig(tmp_path, options=options)
    rig.create_topic("sessions", BINARY, {})
    keys = [str(number) for number in range(8)]
    rig.run(Publish("sessions", [b"x"] * 8, keys, lifetime=Lifetime(LifetimeKind.TTL, SECOND)))
    answers: list[object] = []

    for request in (
        Publish("sessions", [b"y"], ["other"]),
        Touch("sessions", keys, IN_A_MINUTE, below_micros=MINUTE),
        Publish("sessions", [b"y"], ["other"]),
    ):
        rig.store.commits.submit(request).then(answers.append)
    while len(answers) < 3:
        rig.turn()
        rig.time.tick(1)

    touched = [entry for entry in rig.journal("sessions") if entry.kind == "touch"]
    assert len(touched) == 8
    assert len({entry.expire_time_micros for entry in touched}) == 1
    rig.close()


# --- L6: publishes that only extend -----------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [1, 8])
@pytest.mark.parametrize("want_results", [False, True])
@pytest.mark.parametrize("overdue", [False, True])
def test_a_publish_that_extends_leaves_the_later_stamp(
    rig: Rig, records: int, want_results: bool, overdue: bool
) -> None:
    """One by one and in columns."""
    keys = [f"{kind}{number}" for number in range(records) for kind in ("short", "long", "never", "new")]
    if overdue:
        keys.insert(2, "over")
    before = {"short": Lifetime(LifetimeKind.TTL, 2 * SECOND), "long": Lifetime(LifetimeKind.TTL, 60 * MINUTE)}
    before |= {"never": PERMANENT, "over": Lifetime(LifetimeKind.TTL, SECOND)}
    for key in keys:
        if (lifetime := before.get(key.rstrip("0123456789"))) is not None:
            rig.put("sessions", key, lifetime=lifetime)
    rig.time.tick(SECOND)

    request = Publish("sessions", [b"new"] * len(keys), keys, lifetime=IN_A_MINUTE, want_results=want_results)
    request.ttl_mode = TtlMode.EXTEND
    assert rig.run(request).applied == len(keys)

    ends = {"short": MINUTE, "long": 60 * MINUTE - SECOND, "never": None, "new": MINUTE, "over": MINUTE}
    for key in keys:
        assert left(rig, key) == ends[key.rstrip("0123456789")]
        assert rig.stored("sessions")[key.encode()].payload == b"new"


def test_a_publish_that_extends_sees_the_records_before_it_in_its_request(rig: Rig) -> None:
    """The same key again and again in one request, with lifetimes of their own."""
    ttls = [5, 9, 3, 9, 1, 2, 8, 4]
    request = Publish(
        "sessions",
        [b"%d" % ttl for ttl in ttls],
        ["a"] * len(ttls),
        lifetimes=[Lifetime(LifetimeKind.TTL, ttl * SECOND) for ttl in ttls],
        ttl_mode=TtlMode.EXTEND,
    )
    rig.run(request)
    assert left(rig, "a") == 9 * SECOND
    assert rig.stored("sessions")[b"a"].payload == b"4"
    assert [entry.expire_time_micros - rig.clock.now_micros() for entry in rig.journal("sessions")] == [
        ttl * SECOND for ttl in (5, 9, 9, 9, 9, 9, 9, 9)
    ]


def test_a_publish_that_extends_cannot_end_a_life(rig: Rig) -> None:
    """A ttl of 0 would end the record at once (L7); extended, the record keeps its stamp."""
    rig.put("sessions", "a", ttl=MINUTE)
    over = Lifetime(LifetimeKind.TTL, 0)
    rig.run(Publish("sessions", [b"new"] * 9, ["a"] * 9, lifetime=over, ttl_mode=TtlMode.EXTEND))
    assert left(rig, "a") == MINUTE
    rig.run(Publish("sessions", [b"new"], ["b"], lifetime=over, ttl_mode=TtlMode.EXTEND))
    assert b"b" not in rig.stored("sessions")


def test_a_delta_extends_too(rig: Rig) -> None:
    rig.create_topic("orders", BINARY._replace(message_type=BINARY.message_type.JSON, key=("/id",)), {})
    rig.run(Publish("orders", [b'{"id":1,"n":1}'], lifetime=IN_A_MINUTE))
    short = Lifetime(LifetimeKind.TTL, SECOND)
    rig.run(Publish("orders", [b'{"id":1,"n":2}'], lifetime=short, ttl_mode=TtlMode.EXTEND, delta=True))
    assert left(rig, "1", "orders") == MINUTE
    rig.run(Publish("orders", [b'{"id":1,"n":3}'], lifetime=ABSENT, ttl_mode=TtlMode.EXTEND, delta=True))
    assert left(rig, "1", "orders") is None


def test_a_record_that_was_extended_expires_at_its_stamp(rig: Rig) -> None:
    """Its entry in the expiry index is the old one, which the sweep moves on."""
    rig.put("sessions", "a", ttl=SECOND)
    rig.run(Publish("sessions", [b"new"] * 8, ["a"] * 8, lifetime=IN_A_MINUTE, ttl_mode=TtlMode.EXTEND))
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert list(rig.live("sessions")) == [b"a"]
    rig.time.tick(59 * SECOND)
    rig.store.sweep()
    assert rig.stored("sessions") == {}


# --- deletes that name versions ---------------------------------------------------------------------------------------


def test_a_delete_leaves_a_record_of_another_version(rig: Rig) -> None:
    (put,) = rig.put("sessions", "a", want_results=True).results or []
    assert isinstance(put, Applied)
    rig.put("sessions", "b")
    delete = Delete("sessions", ["a", "b"])
    only_versions(delete, [put.version, put.version])
    assert rig.run(delete).applied == 1
    assert list(rig.stored("sessions")) == [b"b"]
