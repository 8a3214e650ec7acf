"""Rewinding, clearing, deleting and browsing durables (J5, J6, J7, J16)."""

from __future__ import annotations

import pytest

from sow_server.engine.durables import RewindTo
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Publish
from tests.support.stores.durables import JSON, clear, crash, delete, durable, figures, floor, put, refused, rewind, rig
from tests.support.stores.stores import MINUTE, Rig
from tests.support.stores.subscribers import EARLIEST, Subscribers, subscribers

__all__ = ["rig", "subscribers"]  # fixtures


# --- rewinding, clearing, deleting (J5, J6) --------------------------------------------------------------------------


def test_acknowledged_and_retained_entries_are_neither_handed_over_nor_counted_until_a_rewind(
    rig: Rig, subscribers: Subscribers
) -> None:
    """FTL 3, FTL 6, FTL 7, J6, J7, RabbitMQ 7: ages do not change."""
    follower = subscribers.attach("orders", "d")
    put(rig, "a", "b", "c")
    follower.news()
    follower.acknowledge()
    follower.close()
    subscribers.settle()
    assert subscribers.attach("orders", "d").got() == []
    found = figures(rig)
    assert (found.total_entries, found.unacknowledged_entries) == (3, 0)
    with pytest.raises(StoreError) as error:
        rewind(subscribers)
    assert refused(error) is Reason.DURABLE_IN_USE
    rig.time.tick(MINUTE)
    moved, entries = rewind(subscribers, force=True)
    assert (moved.position, entries) == (0, 3)
    assert figures(rig).oldest_micros == rig.clock.now_micros() - MINUTE
    assert subscribers.attach("orders", "d").got() == [1, 2, 3]


@pytest.mark.parametrize(
    ("to", "position"), [(RewindTo(position=1), 1), (RewindTo(time_micros=2 * MINUTE), 2), (RewindTo(time_micros=0), 0)]
)
def test_a_rewind_goes_to_a_position_or_a_time(rig: Rig, subscribers: Subscribers, to: RewindTo, position: int) -> None:
    """J6. Times are counted from the first change."""
    begin = rig.clock.now_micros()
    follower = subscribers.attach("orders", "d")
    for key in "abc":
        put(rig, key)
        rig.time.tick(MINUTE)
    follower.news()
    follower.acknowledge()
    follower.close()
    if to.time_micros is not None:
        to = RewindTo(time_micros=begin + to.time_micros)
    assert rewind(subscribers, to)[0].position == position


def test_a_rewind_ends_at_the_earliest_change_and_does_not_go_ahead(rig: Rig, subscribers: Subscribers) -> None:
    rig.alter_topic("orders", retain_time_micros=MINUTE)
    follower = subscribers.attach("orders", "d")
    put(rig, "a", "b")
    rig.time.tick(MINUTE)
    put(rig, "c", "d")
    follower.news()
    follower.acknowledge(3)
    follower.close()
    for position, reason in ((1, Reason.BOOKMARK_TOO_OLD), (4, Reason.INVALID_ARGUMENT)):
        with pytest.raises(StoreError) as error:
            rewind(subscribers, RewindTo(position=position))
        assert refused(error) is reason
    assert rewind(subscribers, RewindTo(position=2))[0].position == 2


def test_a_forced_rewind_ends_the_stream_and_its_later_acknowledgements_do_not_count(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J6."""
    follower = subscribers.attach("orders", "d")
    put(rig, "a", "b")
    follower.news()
    follower.acknowledge(1)
    rewind(subscribers, force=True)
    follower.pump()
    assert follower.error is not None
    assert follower.error.reason is Reason.DURABLE_DETACHED
    with pytest.raises(StoreError) as error:
        follower.acknowledge(2)
    assert refused(error) is Reason.DURABLE_DETACHED
    assert durable(rig).position == 0


def test_clearing_acknowledges_everything_of_one_or_all(rig: Rig, subscribers: Subscribers) -> None:
    """Pulsar 7, J13."""
    subscribers.attach("orders", "d").close()
    subscribers.attach("orders", "e").close()
    put(rig, "a", "b")
    assert clear(subscribers) == 2
    assert (durable(rig).position, durable(rig, "e").position) == (2, 0)
    assert clear(subscribers, "") == 2
    assert durable(rig, "e").position == 2
    with pytest.raises(StoreError) as error:
        clear(subscribers, "nobody")
    assert refused(error) is Reason.DURABLE_NOT_FOUND


def test_a_deleted_durable_releases_the_journal_and_its_returning_client_gets_a_gap(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J10 (reset), durables [3]."""
    rig.alter_topic("orders", retain_time_micros=0, retain_bytes=0)
    follower = subscribers.attach("orders", "d")
    put(rig, "a")
    with pytest.raises(StoreError) as error:
        delete(subscribers)
    assert refused(error) is Reason.DURABLE_IN_USE
    delete(subscribers, force=True)
    follower.pump()
    assert follower.error is not None
    assert floor(rig) == 1
    rig.crash()
    again = Subscribers(rig).attach("orders", "d")
    assert (again.begun.created, again.begun.reset) == (True, True)
    again.close()
    assert not Subscribers(rig).attach("orders", "d").begun.reset, "once"


def test_a_durable_can_be_rewound_to_the_earliest_position_of_its_figures(rig: Rig, subscribers: Subscribers) -> None:
    """Of a topic that was created behind others it was 0, and a rewind to that was refused."""
    put(rig, "a", "b")
    rig.create_topic("late", JSON)
    put(rig, "c", topic="late")
    subscribers.attach("late", "d", start=EARLIEST).close()
    subscribers.settle()
    assert figures(rig, topic="late").earliest == durable(rig, topic="late").position == 2


# --- browsing (J16) --------------------------------------------------------------------------------------------------


def test_browsing_shows_unacknowledged_changes_and_consumes_nothing(rig: Rig, subscribers: Subscribers) -> None:
    """FTL 6: acknowledged retained entries are not browsable. It works while a consumer is attached."""
    crash(subscribers, filter="/px > 1")
    put(rig, "a", "b", px=2)
    put(rig, "left-out")
    put(rig, "c", px=2)
    crash(subscribers, filter="/px > 1")
    follower = subscribers.attach("orders", "d", filter="/px > 1")
    follower.acknowledge(1)
    follower.news()
    put(rig, "new", px=2)
    subscribers.settle()
    before = durable(rig)

    rows, times, position = subscribers.browse("orders", "d")

    assert [row.key for row in rows] == [b"b", b"c", b"new"]
    assert times == [2, 2, 0], "the last one has not been handed over yet"
    assert position == 5
    assert durable(rig) == before
    assert [key for _, key, _ in follower.news()] == ["new"]


def test_browsing_goes_on_where_it_was(rig: Rig, subscribers: Subscribers) -> None:
    """J16: page by page, also through an atomic request; a position in front of the durable's own is that."""
    crash(subscribers)
    put(rig, "a")
    rig.run(Publish("orders", [b"{}"] * 3, ["b", "c", "d"], atomic=True))
    put(rig, "e")
    seen: list[bytes] = []
    position = 0
    while page := subscribers.browse("orders", "d", after=position, entries_max=2)[0]:
        position = subscribers.browse("orders", "d", after=position, entries_max=2)[2]
        seen += [row.key for row in page]
    assert seen == [b"a", b"b", b"c", b"d", b"e"]
    clear(subscribers)
    assert subscribers.browse("orders", "d")[0] == []
    with pytest.raises(StoreError) as error:
        subscribers.browse("orders", "nobody")
    assert refused(error) is Reason.DURABLE_NOT_FOUND
