"""Deliveries of durables: they are counted, and an entry that consumers fail on is set aside (J15)."""

from __future__ import annotations

import json

import pytest

from sow_server.engine.disk.layout import DURABLE_KEY
from sow_server.engine.disk.rocks import META
from sow_server.engine.durables import Durable
from sow_server.engine.durables.model import STEPS_MAX
from sow_server.engine.durables.rows import decode_durable
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import Publish
from tests.support.stores.durables import crash, durable, put, rewind, rig
from tests.support.stores.stores import BINARY, SECOND, Rig
from tests.support.stores.subscribers import Subscribers, subscribers

__all__ = ["rig", "subscribers"]  # fixtures


def letters(rig: Rig) -> dict[str, bytes]:
    """The dead letters, by key."""
    return {key.decode(): record.payload for key, record in rig.live("dead").items()}


def test_an_entry_that_consumers_fail_on_is_set_aside_and_dead_lettered(rig: Rig, subscribers: Subscribers) -> None:
    """FTL 8: after so many deliveries without acknowledgement the durable goes on behind it, and its consumer is
    told."""
    rig.create_topic("dead", BINARY)
    rig.alter_topic("orders", delivery_limit=2, dead_letter="dead")
    crash(subscribers, filter="/px > 1")
    put(rig, "left-out")
    put(rig, "good", "poison", "next", px=2)
    assert crash(subscribers, filter="/px > 1", acknowledged=2).got() == [2, 3, 4]
    second = crash(subscribers, filter="/px > 1")
    assert (second.got(), second.times(), second.gaps()) == ([3, 4], [2, 2], [])

    third = subscribers.attach("orders", "d", filter="/px > 1")

    assert third.gaps() == [("DELIVERY_LIMIT", 2, 3, 1)]
    assert (third.got(), third.times()) == ([4], [3]), "only the first: the others may never have been looked at"
    assert (third.begun.sequence, durable(rig).position, durable(rig).set_aside) == (3, 3, 1)
    assert rig.store.durables.discarded["delivery_limit"] == 1
    ((key, value),) = letters(rig).items()
    (version,) = [record.version for key, record in rig.live("orders").items() if key == b"poison"]
    assert key == f"orders|poison|{version}|d"
    assert json.loads(value)["px"] == 2
    assert json.loads(value)["dead_letter"] == [
        {
            "topic": "orders",
            "key": "poison",
            "version": version,
            "expire_time_micros": None,
            "reason": "delivery_limit",
            "durable": "d",
        }
    ]
    third.acknowledge(4)
    third.close()
    subscribers.settle()
    assert subscribers.attach("orders", "d", filter="/px > 1").gaps() == [], "it has acknowledged beyond the gap"


def test_deliveries_are_counted_over_crashes_of_the_server(rig: Rig, subscribers: Subscribers) -> None:
    """J15: sessions that ended count, whatever becomes of the process; the one that the crash ended does not."""
    crash(subscribers)
    rig.alter_topic("orders", delivery_limit=2)
    put(rig, "a", "b")
    crash(subscribers)
    cut_off = Subscribers(rig).attach("orders", "d")
    assert cut_off.times() == [2, 2]
    rig.crash()
    again = Subscribers(rig)
    assert crash(again).times() == [2, 2]
    rig.crash()
    assert Subscribers(rig).attach("orders", "d").gaps() == [("DELIVERY_LIMIT", 0, 1, 1)]


def test_a_consumer_that_comes_back_after_a_lost_connection_goes_on_with_its_delivery(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J15: it keeps its delivered changes, however often its connection breaks."""
    crash(subscribers)
    rig.alter_topic("orders", delivery_limit=1)
    put(rig, "a", "b")
    for _ in range(3):
        again = crash(subscribers, expected=True)
        assert (again.got(), again.gaps(), again.times()) == ([1, 2], [], [1, 1])
    assert subscribers.attach("orders", "d").gaps() == [("DELIVERY_LIMIT", 0, 1, 1)], "another process"


def test_a_takeover_counts_as_a_delivery_of_the_previous_consumers_changes(rig: Rig, subscribers: Subscribers) -> None:
    """J15."""
    rig.alter_topic("orders", delivery_limit=1)
    first = subscribers.attach("orders", "d")
    put(rig, "a", "b")
    first.news()
    assert subscribers.attach("orders", "d", force=True).gaps() == [("DELIVERY_LIMIT", 0, 1, 1)]


def test_acknowledging_ends_a_count_and_a_rewind_all_of_them(rig: Rig, subscribers: Subscribers) -> None:
    """J15, FTL 3."""
    crash(subscribers)
    put(rig, "a", "b", "c")
    crash(subscribers)
    assert crash(subscribers, acknowledged=1).times() == [2, 2, 2]
    put(rig, "d")
    assert crash(subscribers).times() == [3, 3, 1], "of the entries that are left"
    rewind(subscribers)
    again = subscribers.attach("orders", "d")
    assert (again.got(), again.times()) == ([1, 2, 3, 4], [1, 1, 1, 1])


def test_the_limit_is_a_value_of_the_durable_the_policy_or_the_topic(rig: Rig, subscribers: Subscribers) -> None:
    """J15, T2: unlimited can be said against a limit from elsewhere."""
    rig.alter_topic("orders", delivery_limit=1)
    crash(subscribers, name="free", declared={"delivery_limit": None})
    crash(subscribers, name="two", declared={"delivery_limit": 2})
    crash(subscribers, name="one")
    put(rig, "a")
    gaps = {name: [crash(subscribers, name=name).gaps() for _ in range(4)] for name in ("free", "two", "one")}
    told = [("DELIVERY_LIMIT", 0, 1, 1)]
    assert gaps == {"free": [[]] * 4, "two": [[], [], told, told], "one": [[], told, told, told]}
    with pytest.raises(StoreError, match="delivery_limit: 0 must be above zero"):
        rig.alter_topic("orders", delivery_limit=0)


def test_an_atomic_request_is_set_aside_whole(rig: Rig, subscribers: Subscribers) -> None:
    """J15: its changes are handed over, and acknowledged, together."""
    crash(subscribers)
    rig.alter_topic("orders", delivery_limit=1)
    rig.run(Publish("orders", [b'{"px":1}', b'{"px":2}'], ["a", "b"], atomic=True))
    put(rig, "c")
    assert crash(subscribers).got() == [1, 2, 3]
    again = subscribers.attach("orders", "d")
    assert (again.gaps(), again.got()) == ([("DELIVERY_LIMIT", 0, 2, 2)], [3])
    assert durable(rig).set_aside == 2


def test_an_entry_set_aside_by_several_durables_makes_several_letters(rig: Rig, subscribers: Subscribers) -> None:
    """T3: neither replaces the other, nor the letter of its expiry. A delete that is set aside has its record."""
    rig.create_topic("dead", BINARY)
    rig.alter_topic("orders", delivery_limit=1, dead_letter="dead")
    for name in ("x", "y"):
        crash(subscribers, name=name, changes=True)
    put(rig, "a")
    for name in ("x", "y", "x", "y"):
        crash(subscribers, name=name, changes=True)
    assert sorted(key.rsplit("|", 1)[1] for key in letters(rig)) == ["x", "y"]
    rig.delete("orders", "a")
    crash(subscribers, name="x", changes=True)
    crash(subscribers, name="x", changes=True)
    assert [key.split("|")[1] for key in letters(rig)] == ["a"] * 3


def test_the_steps_of_deliveries_are_bounded(rig: Rig, subscribers: Subscribers) -> None:
    """durables [5]: the highest delivery counts are exact, the lowest may be too low."""
    crash(subscribers)
    for _ in range(30):
        put(rig, "a")
        crash(subscribers)
    steps = durable(rig).deliveries
    assert len(steps) == STEPS_MAX
    assert [step.times for step in steps] == [*range(29, 29 - STEPS_MAX + 1, -1), 1]
    assert list(steps) == sorted(steps)


def test_an_old_row_without_counts_is_read(rig: Rig, subscribers: Subscribers) -> None:
    """durables [5]: rows of before have no deliveries."""
    crash(subscribers)
    ((_, row),) = rig.rows(META, DURABLE_KEY, DURABLE_KEY + b"\xff")
    fields = json.loads(row)
    for name in ("handed", "deliveries", "set_aside"):
        del fields[name]
    old = decode_durable(1, "d", json.dumps(fields).encode())
    assert isinstance(old, Durable)
    assert (old.handed, old.deliveries, old.set_aside) == (0, (), 0)


def test_an_entry_that_is_due_when_it_is_handed_over_is_skipped_and_needs_no_acknowledgement(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J12, R2: replayed as live; the expiry follows for who wants to know."""
    rig.create_topic("quotes")
    subscribers.attach("quotes", "d").close()
    subscribers.settle()
    rig.put("quotes", "short", ttl=SECOND)
    rig.put("quotes", "long")
    rig.time.tick(SECOND)
    follower = subscribers.attach("quotes", "d", oof=True)
    assert [key for _, key, _ in follower.news()] == ["long"]
    rig.store.sweep()
    assert [what for what, _, _ in follower.news()] == ["oof expired"]
