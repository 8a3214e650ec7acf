"""Backlogs of durables: the time to live, and quotas that evict, conflate, hold or refuse (J8, J9)."""

from __future__ import annotations

import asyncio

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.durables import DurableGap, GapReason, RewindTo
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import BacklogAction, Publish
from sow_server.services.records.admission import Admission
from sow_server.subscriptions.durable.deadlines import STEP_MICROS
from sow_server.subscriptions.frames import SnapshotBegin, SnapshotEnd
from tests.support.fakes.loops import FakeLoop
from tests.support.stores.durables import JSON, crash, durable, figures, floor, put, refused, rewind, rig
from tests.support.stores.stores import HOUR, MINUTE, SECOND, Rig
from tests.support.stores.subscribers import Subscribers, subscribers

__all__ = ["rig", "subscribers"]  # fixtures


# --- the time to live (J8; arrebato 4) -------------------------------------------------------------------------------


def test_changes_unacknowledged_for_the_backlog_ttl_count_as_acknowledged(rig: Rig, subscribers: Subscribers) -> None:
    """Pulsar 8, J8: then retention applies; the durable is told."""
    rig.alter_topic("orders", backlog_ttl_micros=MINUTE, retain_time_micros=2 * MINUTE)
    subscribers.attach("orders", "d").close()
    put(rig, "a")
    rig.time.tick(1)
    put(rig, "b")
    subscribers.upkeep()
    rig.time.tick(MINUTE - 1)
    subscribers.upkeep()
    assert (durable(rig).position, figures(rig).total_entries) == (1, 2)
    rig.time.tick(STEP_MICROS)
    subscribers.upkeep()
    assert durable(rig).position == 2
    assert subscribers.attach("orders", "d").gaps() == [("BACKLOG_TTL", 0, 2, 2)]
    rig.time.tick(MINUTE)
    rig.prune()
    assert floor(rig) == 2


def test_setting_and_removing_the_backlog_ttl_acts_at_once(rig: Rig, subscribers: Subscribers) -> None:
    """Pulsar 8: set, get, remove."""
    subscribers.attach("orders", "d").close()
    put(rig, "a")
    rig.time.tick(MINUTE)
    rig.alter_topic("orders", backlog_ttl_micros=HOUR)
    subscribers.upkeep()
    rig.alter_topic("orders", backlog_ttl_micros=None)
    rig.time.tick(HOUR)
    subscribers.upkeep()
    assert durable(rig).position == 0
    rig.alter_topic("orders", backlog_ttl_micros=HOUR)
    subscribers.upkeep()
    assert durable(rig).position == 1


# --- quotas by bytes and age (J9) ------------------------------------------------------------------------------------


def size_of_one(rig: Rig) -> int:
    put(rig, "size")
    figures_ = rig.topic("orders").statistics
    return figures_.appended_bytes // figures_.appended_entries


def test_evicting_acknowledges_the_oldest_of_the_slowest_down_to_nine_tenths(
    rig: Rig, subscribers: Subscribers
) -> None:
    """Pulsar 5, J9."""
    quota = 10 * size_of_one(rig)
    slow, fast = subscribers.attach("orders", "slow"), subscribers.attach("orders", "fast")
    rig.alter_topic("orders", backlog_quota_bytes=quota, backlog_action=BacklogAction.EVICT)
    slow.close()
    subscribers.settle()
    for _ in range(9):
        put(rig, "aaaa")
    subscribers.upkeep()
    assert durable(rig, "slow").position == 1
    put(rig, "aaaa", "aaaa", "aaaa")
    fast.news()
    fast.acknowledge()
    subscribers.upkeep()
    assert durable(rig, "slow").position == 4
    assert rig.store.durable_commits.topic_statistics(rig.topic("orders")).backlog_bytes <= quota * 9 // 10
    assert durable(rig, "fast").gaps == ()
    again = subscribers.attach("orders", "slow")
    assert again.gaps() == [("EVICTED", 1, 4, 3)]
    assert again.got() == list(range(5, 14))


def test_evicting_by_age_and_telling_a_consumer_that_is_attached(rig: Rig, subscribers: Subscribers) -> None:
    """Pulsar 5, J9: undelivered changes are skipped."""
    follower = subscribers.attach("orders", "d")
    rig.alter_topic("orders", backlog_quota_age_micros=100 * SECOND, backlog_action=BacklogAction.EVICT)
    put(rig, "a")
    rig.time.tick(50 * SECOND)
    put(rig, "b")
    rig.time.tick(50 * SECOND)
    subscribers.upkeep()
    assert durable(rig).position == 1
    follower.news()
    assert follower.gaps() == [("EVICTED", 0, 1, 1)]
    assert follower.got() == [2]
    follower.acknowledge()
    assert durable(rig).gaps == ()


def test_delivered_changes_are_no_gap(rig: Rig, subscribers: Subscribers) -> None:
    """durables [4]: it was only slow to acknowledge."""
    follower = subscribers.attach("orders", "d")
    rig.alter_topic("orders", backlog_quota_age_micros=100 * SECOND, backlog_action=BacklogAction.EVICT)
    put(rig, "a", "b")
    follower.news()
    rig.time.tick(100 * SECOND)
    subscribers.upkeep()
    follower.news()
    assert (follower.gaps(), durable(rig).position) == ([], 2)
    follower.acknowledge(2)
    assert durable(rig).gaps == ()


def test_conflating_replaces_the_backlog_by_a_snapshot(rig: Rig, subscribers: Subscribers) -> None:
    """J9: the matching records, then live; until the snapshot is acknowledged it comes again."""
    quota = 3 * size_of_one(rig)
    subscribers.attach("orders", "d", filter="/px > 1").close()
    subscribers.settle()
    rig.alter_topic("orders", backlog_quota_bytes=quota, backlog_action=BacklogAction.CONFLATE)
    for px in (2, 3, 4):
        put(rig, "a", px=px)
    put(rig, "b", px=1)
    subscribers.upkeep()
    last = rig.store.writer.last_sequence
    assert durable(rig).position == last
    for _ in range(2):
        follower = subscribers.attach("orders", "d", filter="/px > 1")
        assert follower.gaps() == [("CONFLATED", 1, last, 4)]
        assert follower.snapshot() == {"a": b'{"px":4}'}
        follower.close()
        subscribers.settle()
    follower = subscribers.attach("orders", "d", filter="/px > 1")
    kinds = follower.kinds()
    assert kinds[:3] == ["DurableBegin", "GapNotice", "SnapshotBegin"]
    put(rig, "c", px=5)
    assert [key for _, key, _ in follower.news()] == ["c"]
    (end,) = [frame for frame in follower.frames if isinstance(frame, SnapshotEnd)]
    follower.acknowledge(end.sequence)
    follower.close()
    subscribers.settle()
    again = subscribers.attach("orders", "d", filter="/px > 1")
    assert again.gaps() == []
    assert [key for _, key, _ in again.news()] == ["c"]
    assert again.got() == [last + 1]
    assert not [frame for frame in again.frames if isinstance(frame, SnapshotBegin)]


def test_a_consumer_is_woken_for_its_own_gap_alone(rig: Rig, subscribers: Subscribers) -> None:
    """J9. Every commit of any durable looked at all consumers, and woke all that had a gap."""
    rig.create_topic("other", JSON)
    follower, other = subscribers.attach("orders", "d"), subscribers.attach("other", "d")
    rig.alter_topic("orders", backlog_quota_age_micros=MINUTE, backlog_action=BacklogAction.EVICT)
    put(rig, "a")
    put(rig, "b", topic="other")
    subscribers.settle()
    woken: list[str] = []
    follower._machine.wake = lambda: woken.append("orders")
    rig.time.tick(MINUTE)
    subscribers.upkeep()
    assert woken == ["orders"]
    other.news()
    other.acknowledge()
    assert durable(rig).gaps
    assert woken == ["orders"]


@pytest.mark.parametrize("action", [BacklogAction.EVICT, BacklogAction.CONFLATE])
def test_a_rewind_brings_back_evicted_and_conflated_changes(
    rig: Rig, subscribers: Subscribers, action: BacklogAction
) -> None:
    """J6, J9. The gap stayed in the row, and who came back was sent behind it at once."""
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    rig.alter_topic("orders", backlog_quota_bytes=3 * size_of_one(rig), backlog_action=action)
    put(rig, "a", "b", "c")
    subscribers.upkeep()
    position = durable(rig).position
    assert position > 1
    rewind(subscribers, RewindTo(position=1))
    again = subscribers.attach("orders", "d")
    assert again.gaps() == [("EVICTED" if action is BacklogAction.CONFLATE else action.name + "ED", 0, 1, 0)]
    assert again.got() == [2, 3, 4]
    again.close()
    subscribers.settle()
    rewind(subscribers)
    last = subscribers.attach("orders", "d")
    assert (last.gaps(), last.got()) == ([], [1, 2, 3, 4])


def test_a_gap_of_which_a_part_was_handed_over_again_does_not_tell_the_number_of_the_next_one(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J6. How much of the first is left is not known; joined with the second, it told the second one's number alone."""
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    rig.alter_topic("orders", backlog_quota_bytes=3 * size_of_one(rig), backlog_action=BacklogAction.EVICT)
    put(rig, "a", "b", "c")
    subscribers.upkeep()
    assert [(gap.reason, gap.after, gap.entries) for gap in durable(rig).gaps] == [(GapReason.EVICTED, 0, 2)]
    rewind(subscribers, RewindTo(position=1))
    assert durable(rig).gaps == (DurableGap(GapReason.EVICTED, 0, 1, 0),)
    put(rig, "d")
    subscribers.upkeep()
    position = durable(rig).position
    assert position > 1
    assert durable(rig).gaps == (DurableGap(GapReason.EVICTED, 0, position, 0),)


def held(admission: Admission) -> asyncio.Task[Topic | None]:
    """A publish that waits for the quota, without a deadline. On an event loop."""
    return asyncio.get_running_loop().create_task(
        admission.admit(Publish("orders", keys=["x"], payloads=[b"{}"]), None), name="held"
    )


def full(rig: Rig, subscribers: Subscribers) -> int:
    """A topic that holds publishers, and has a backlog beyond its quota, which is returned."""
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    quota = size_of_one(rig)
    rig.alter_topic("orders", backlog_quota_bytes=quota, backlog_action=BacklogAction.HOLD)
    return quota


@pytest.mark.parametrize(("seconds", "left"), [(10.0, 0.25), (0.2, 0.02)])
def test_a_publish_that_is_held_uses_its_time(rig: Rig, subscribers: Subscribers, seconds: float, left: float) -> None:
    """J9. Story: it was refused 0.2 s before its deadline, though room that came then would have let it pass."""
    quota = full(rig, subscribers)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        admission = Admission(rig.store.reads, rig.store.writes)
        publish = Publish("orders", keys=["x"], payloads=[b"{}"])
        begin = loop.time()
        with pytest.raises(StoreError) as error:
            await admission.admit(publish, seconds)
        assert error.value.reason is Reason.BACKLOG_QUOTA_EXCEEDED
        assert loop.time() - begin == pytest.approx(seconds - left, abs=0.001)

        late = loop.call_later(seconds - 2 * left, lambda: rig.alter_topic("orders", backlog_quota_bytes=100 * quota))
        assert await admission.admit(publish, seconds) is not None, "there was room in time"
        assert late.when() <= loop.time() < begin + 2 * seconds

    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        runner.run(run())


def test_a_publish_that_is_held_hears_when_the_quota_refuses_from_now_on(rig: Rig, subscribers: Subscribers) -> None:
    """J9. It passed, whatever the backlog."""
    quota = full(rig, subscribers)

    async def run() -> None:
        admission = Admission(rig.store.reads, rig.store.writes)
        waiting = held(admission)
        done, _ = await asyncio.wait((waiting,), timeout=0)
        assert not done
        assert admission.held_total == 1
        rig.alter_topic("orders", backlog_quota_bytes=quota, backlog_action=BacklogAction.REJECT)
        with pytest.raises(StoreError) as error:
            await asyncio.wait_for(waiting, 30)
        assert refused(error) is Reason.BACKLOG_QUOTA_EXCEEDED
        assert (admission.held_total, admission.rejected_total) == (1, 1)

    asyncio.run(run())


def test_a_backlog_comes_to_a_quota_by_age_when_its_oldest_entry_is_that_old(
    rig: Rig, subscribers: Subscribers
) -> None:
    """Pulsar 5, J9: and not before; an acknowledgement makes room."""
    follower = subscribers.attach("orders", "d")
    rig.alter_topic("orders", backlog_quota_age_micros=MINUTE, backlog_action=BacklogAction.REJECT)
    put(rig, "a")

    async def run() -> None:
        admission = Admission(rig.store.reads, rig.store.writes)
        rig.time.tick(MINUTE - 1)
        await held(admission)
        rig.time.tick(1)
        with pytest.raises(StoreError) as error:
            await held(admission)
        assert refused(error) is Reason.BACKLOG_QUOTA_EXCEEDED
        assert len(follower.news()) == 1
        follower.acknowledge(1)
        await held(admission)

    asyncio.run(run())


def test_cancelled_writes_do_not_wait_for_room(rig: Rig, subscribers: Subscribers) -> None:
    """J9. The poll went on until there was room, perhaps for ever."""
    full(rig, subscribers)

    async def run() -> None:
        admission = Admission(rig.store.reads, rig.store.writes)
        waiting = held(admission)
        done, _ = await asyncio.wait((waiting,), timeout=0.001)
        assert not done
        polls = list(admission._polls.values())
        assert len(polls) == 1
        waiting.cancel()
        await asyncio.wait_for(asyncio.gather(*polls), 5)
        assert (admission._polls, admission._waiting, admission._under_way) == ({}, {}, {})

    asyncio.run(run())


# --- quotas by entries (J9) ------------------------------------------------------------------------------------------


def test_evicting_by_entries_leaves_nine_tenths(rig: Rig, subscribers: Subscribers) -> None:
    """Pulsar 5, FTL 8: counted one by one, also inside of a commit."""
    crash(subscribers)
    rig.alter_topic("orders", backlog_quota_entries=10, backlog_action=BacklogAction.EVICT)
    rig.run(Publish("orders", [b"{}"] * 9, [f"k{number}" for number in range(9)]))
    subscribers.upkeep()
    assert durable(rig).position == 0
    put(rig, "ten", "eleven")
    subscribers.upkeep()
    assert figures(rig).unacknowledged_entries == 9
    assert durable(rig).gaps == (DurableGap(GapReason.EVICTED, 0, 2, 2),)
    rig.alter_topic("orders", backlog_quota_entries=1)
    subscribers.upkeep()
    assert figures(rig).unacknowledged_entries == 0


def test_a_quota_of_entries_refuses_new_ones_and_counts_entries_under_way(rig: Rig, subscribers: Subscribers) -> None:
    """Pulsar 5: `reject` equals discard-new of other systems; no existing entry is discarded."""
    crash(subscribers)
    rig.alter_topic("orders", backlog_quota_entries=2, backlog_action=BacklogAction.REJECT)
    admission = Admission(rig.store.reads, rig.store.writes)
    one = Publish("orders", [b"{}"], ["a"])

    async def admit() -> None:
        assert await admission.admit(one, None) is rig.topic("orders")
        assert await admission.admit(one, None) is rig.topic("orders"), "below the quota with one under way"
        with pytest.raises(StoreError, match=r"has used up the quota \(backlog_quota_entries 2\)") as error:
            await admission.admit(one, None)
        assert refused(error) is Reason.BACKLOG_QUOTA_EXCEEDED
        admission.left(rig.topic("orders"), one)
        assert await admission.admit(one, None) is rig.topic("orders")
        admission.left(rig.topic("orders"), one)
        admission.left(rig.topic("orders"), one)
        put(rig, "x", "y")
        with pytest.raises(StoreError):
            await admission.admit(one, None)

    asyncio.run(admit())
    assert figures(rig).unacknowledged_entries == 2
    assert admission._under_way == {}
