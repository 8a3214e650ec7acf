"""Entries that durables keep: retention, hard limits, figures, pruning (J3 to J7, J11; FTL 1 to FTL 8)."""

from __future__ import annotations

import pytest

from sow_server.engine.journal import reading as journal
from sow_server.engine.values.database import Failed
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MessageType, Publish
from tests.support.stores.durables import JSON, crash, durable, figures, floor, put, refused, rewind, rig
from tests.support.stores.stores import HOUR, MINUTE, SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, Subscribers, at, subscribers

__all__ = ["rig", "subscribers"]  # fixtures


# --- retention (J3, J5, J6; FTL 1 to FTL 8) --------------------------------------------------------------------------


def test_acknowledged_and_younger_than_retention_is_kept_and_older_is_gone_for_good(
    rig: Rig, subscribers: Subscribers
) -> None:
    """FTL 2, FTL 4, Pulsar 1, J3, J4."""
    rig.alter_topic("orders", retain_time_micros=MINUTE)
    follower = subscribers.attach("orders", "d")
    put(rig, "a")
    rig.time.tick(1)
    put(rig, "b")
    follower.news()
    follower.acknowledge()
    rig.time.tick(MINUTE - 2)
    rig.prune()
    assert (figures(rig).total_entries, floor(rig)) == (2, 0)
    rig.time.tick(1)
    assert figures(rig).total_entries == 1, "gone for it, though nothing has been pruned yet"
    rig.prune()
    assert (figures(rig).total_entries, floor(rig)) == (1, 1)


def test_unacknowledged_and_older_is_kept_and_goes_in_the_commit_of_its_acknowledgement(
    rig: Rig, subscribers: Subscribers
) -> None:
    """FTL 5, J5."""
    rig.alter_topic("orders", retain_time_micros=MINUTE)
    follower = subscribers.attach("orders", "d")
    put(rig, "a", "b")
    rig.time.tick(HOUR)
    rig.prune()
    assert (figures(rig).unacknowledged_entries, floor(rig)) == (2, 0)
    follower.news()
    follower.acknowledge(1)
    assert (figures(rig).total_entries, floor(rig)) == (1, 1)
    rig.crash()
    assert floor(rig) == 1


def test_a_change_that_one_durable_has_released_is_gone_for_it_though_another_pins_it(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J5: rewinding ends at the first entry inside retention."""
    rig.alter_topic("orders", retain_time_micros=MINUTE)
    follower = subscribers.attach("orders", "d")
    subscribers.attach("orders", "slow").close()
    subscribers.settle()
    put(rig, "a", "b")
    rig.time.tick(HOUR)
    put(rig, "c")
    follower.news()
    follower.acknowledge()
    follower.close()
    subscribers.settle()
    assert (figures(rig).total_entries, figures(rig, "slow").total_entries, floor(rig)) == (1, 3, 0)
    moved, entries = rewind(subscribers)
    assert (moved.position, entries) == (2, 1)


def test_without_retention_entries_behind_the_slowest_are_discarded(rig: Rig, subscribers: Subscribers) -> None:
    """Pulsar 1, Pulsar 2, J3: both zero."""
    rig.alter_topic("orders", retain_time_micros=0, retain_bytes=0)
    follower = subscribers.attach("orders", "d")
    put(rig, "a", "b", "c")
    follower.news()
    follower.acknowledge(2)
    rig.prune()
    assert [entry.key for entry in rig.journal("orders")] == [b"c"]


def test_a_durable_can_keep_longer_than_its_topic(rig: Rig, subscribers: Subscribers) -> None:
    """FTL 1, arrebato 1, J3."""
    rig.alter_topic("orders", retain_time_micros=MINUTE)
    declared = {"retain_time_micros": HOUR, "retain_bytes": None}
    follower = subscribers.attach("orders", "d", declared=declared)
    put(rig, "a")
    follower.news()
    follower.acknowledge()
    rig.time.tick(HOUR - 1)
    rig.prune()
    assert (floor(rig), figures(rig).total_entries) == (0, 1)
    rig.time.tick(1)
    rig.prune()
    assert (floor(rig), figures(rig).total_entries) == (1, 0)


def test_settings_of_a_durable_are_checked(rig: Rig, subscribers: Subscribers) -> None:
    """FTL 1, Pulsar 2: one zero alone is refused."""
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "d", declared={"retain_time_micros": 0, "retain_bytes": 1})
    assert refused(error) is Reason.INVALID_ARGUMENT


def test_a_longer_retention_does_not_bring_back_discarded_changes(rig: Rig, subscribers: Subscribers) -> None:
    """FTL 4: deleted for good, also where another durable still has the bytes."""
    rig.alter_topic("orders", retain_time_micros=MINUTE)
    follower = subscribers.attach("orders", "d")
    subscribers.attach("orders", "slow").close()
    put(rig, "a")
    follower.news()
    follower.acknowledge()
    follower.close()
    rig.time.tick(MINUTE)
    rig.alter_topic("orders", retain_time_micros=HOUR)
    assert rewind(subscribers)[0].position == 1
    rig.crash()
    assert figures(rig).earliest == 1


# --- hard limits (J3, J5; FTL 8) -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "value"), [("max_entries", 2), ("max_age_micros", 2 * MINUTE + 1), ("max_bytes", 2)])
def test_hard_limits_discard_acknowledged_and_retained_entries_and_the_durable_gets_a_gap(
    rig: Rig, subscribers: Subscribers, limit: str, value: int
) -> None:
    """FTL 8, J5: TTL < age < retention: gone. A gap tells how many, again and again until it is acknowledged."""
    subscribers.attach("orders", "d").close()
    for key in "abcd":
        put(rig, key)
        rig.time.tick(MINUTE)
    if limit == "max_bytes":
        value *= rig.store.durable_commits.topic_statistics(rig.topic("orders")).journal_bytes // 4
    rig.alter_topic("orders", {limit: value})
    rig.prune()
    assert [entry.key.decode() for entry in rig.journal("orders")] == ["c", "d"]
    assert rig.store.durables.discarded[limit.removesuffix("_micros")] == 2
    rig.crash()
    assert Subscribers(rig).attach("orders", "d").gaps() == [("DISCARDED", 0, 2, 2)]
    rig.crash()
    subscribers = Subscribers(rig)
    follower = subscribers.attach("orders", "d")
    assert follower.gaps() == [("DISCARDED", 0, 2, 2)]
    assert follower.got() == [3, 4]
    follower.acknowledge(3)
    follower.close()
    subscribers.settle()
    assert subscribers.attach("orders", "d").gaps() == []


@pytest.mark.parametrize(("limit", "value"), [("max_entries", 2), ("max_age_micros", 2 * MINUTE + 1), ("max_bytes", 2)])
def test_hard_limits_discard_changes_that_every_durable_has_acknowledged(
    rig: Rig, subscribers: Subscribers, limit: str, value: int
) -> None:
    """FTL 8, J5: retained entries go as well where nobody has anything left to acknowledge, and nobody is told."""
    follower = subscribers.attach("orders", "d")
    for key in "abcd":
        put(rig, key)
        rig.time.tick(MINUTE)
    assert len(follower.news()) == 4
    assert follower.acknowledge(4).position == 4
    if limit == "max_bytes":
        value *= rig.store.durable_commits.topic_statistics(rig.topic("orders")).journal_bytes // 4
    rig.alter_topic("orders", {limit: value})
    rig.prune()
    assert [entry.key.decode() for entry in rig.journal("orders")] == ["c", "d"]
    follower.close()
    subscribers.settle()
    assert subscribers.attach("orders", "d").gaps() == []


@pytest.mark.parametrize("acknowledges", [True, False])
def test_a_longer_max_age_does_not_stretch_retention(rig: Rig, subscribers: Subscribers, acknowledges: bool) -> None:
    """FTL 8, J3: acknowledged and older than retention is gone, whatever the limit; so it is without durables."""
    rig.alter_topic("orders", retain_time_micros=MINUTE, retain_bytes=None, max_age_micros=HOUR)
    follower = subscribers.attach("orders", "d") if acknowledges else None
    put(rig, "a", "b")
    if follower is not None:
        assert len(follower.news()) == 2
        follower.acknowledge(2)
    rig.time.tick(MINUTE)
    put(rig, "c")
    rig.prune()
    assert [entry.key.decode() for entry in rig.journal("orders")] == ["c"]


def test_entries_are_limited_exactly_within_a_commit(rig: Rig, subscribers: Subscribers) -> None:
    """J3: a limit of entries cuts through a chunk; nobody reads below the floor."""
    subscribers.attach("orders", "d").close()
    rig.alter_topic("orders", max_entries=3)
    rig.run(Publish("orders", [b"{}"] * 5, list("abcde")))
    rig.prune()
    figures_ = rig.topic("orders").statistics
    assert (figures_.floor_sequence, figures_.journal_entries, durable(rig).position) == (2, 3, 2)
    follower = subscribers.attach("orders", "d")
    assert (follower.got(), follower.gaps()) == ([3, 4, 5], [("DISCARDED", 0, 2, 2)])
    assert subscribers.subscribe("orders", start=EARLIEST).news()[0][1] == "c"


def test_a_consumer_that_is_passed_by_a_hard_limit_hears_of_the_gap_and_goes_on(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J5: not RESYNC_REQUIRED."""
    follower = subscribers.attach("orders", "d", settled=False)
    put(rig, "a")
    follower.news()
    rig.alter_topic("orders", max_entries=1)
    limited = Subscribers(rig, queue_bytes_max=1)
    slow = limited.attach("orders", "e", start=at(1, rig))
    put(rig, "b", "c", "d")
    limited.settle()
    rig.prune()
    assert slow.news()[-1][1] == "d"
    assert [gap[0] for gap in slow.gaps()] in ([], ["DISCARDED"])
    assert slow.error is None


def test_limits_hold_for_a_consumer_that_attaches_before_the_next_prune(rig: Rig, subscribers: Subscribers) -> None:
    subscribers.attach("orders", "d").close()
    rig.alter_topic("orders", max_age_micros=MINUTE)
    put(rig, "a")
    rig.time.tick(MINUTE)
    follower = subscribers.attach("orders", "d")
    assert (follower.got(), follower.gaps()) == ([], [("DISCARDED", 0, 1, 1)])


# --- figures (J7) ----------------------------------------------------------------------------------------------------


def test_figures_count_total_and_unacknowledged_entries_and_bytes(rig: Rig, subscribers: Subscribers) -> None:
    """FTL 7, J7; Pulsar 4: plain subscriptions pin nothing."""
    rig.alter_topic("orders", retain_time_micros=0, retain_bytes=0)
    subscribers.subscribe("orders")
    put(rig, "x")
    rig.prune()
    assert floor(rig) == 1
    rig.alter_topic("orders", retain_time_micros=HOUR, retain_bytes=None)
    follower = subscribers.attach("orders", "d", filter="/px > 1")
    for px in (1, 2, 3):
        put(rig, f"k{px}", px=px)
        rig.time.tick(SECOND)
    follower.news()
    follower.acknowledge(3)
    found = figures(rig)
    size = rig.store.durable_commits.topic_statistics(rig.topic("orders")).journal_bytes
    assert (found.total_entries, found.total_bytes) == (3, size)
    assert (found.unacknowledged_entries, found.unacknowledged_bytes) == (1, size // 3)
    assert found.oldest_micros == rig.clock.now_micros() - SECOND
    exact = subscribers.consumers.entries.exact(rig.topic("orders"), durable(rig), found)
    assert (exact.total_entries, exact.unacknowledged_entries) == (2, 1)


def test_figures_of_a_topic_name_the_slowest_durable(rig: Rig, subscribers: Subscribers) -> None:
    """J7, J9."""
    assert rig.store.durable_commits.topic_statistics(rig.topic("orders")).slowest_durable == ""
    crash(subscribers, name="fast")
    crash(subscribers, name="slow")
    put(rig, "a", "b")
    crash(subscribers, name="fast", acknowledged=2)
    found = rig.store.durable_commits.topic_statistics(rig.topic("orders"))
    assert (found.slowest_durable, found.backlog_entries) == ("slow", 2)
    listed, _ = rig.store.durable_commits.all_figures(rig.topic("orders"))
    assert [(one.name, figures.unacknowledged_entries) for one, figures in listed] == [("fast", 0), ("slow", 2)]


# --- pruning (J11; P3, P5) -------------------------------------------------------------------------------------------


def test_a_filter_that_no_longer_fits_its_topic_does_not_prevent_pruning(rig: Rig, subscribers: Subscribers) -> None:
    """J11. With a topic of another message type no topic was pruned any more."""
    rig.create_topic("other", JSON)
    for topic in ("orders", "other"):
        subscribers.attach(topic, "d", filter="/px > 1").close()
        subscribers.settle()
    rig.alter_topic("orders", message_type=MessageType.BINARY)
    put(rig, "a")
    put(rig, "b", topic="other")
    subscribers.scan()
    assert durable(rig, topic="other").position == 2


def test_discards_are_counted_by_cause(rig: Rig, subscribers: Subscribers) -> None:
    """J5. Entries beyond retention counted for the hard limit that went further."""
    put(rig, "a", "b")
    rig.time.tick(HOUR)
    subscribers.attach("orders", "d").close()
    put(rig, "c", "d")
    rig.alter_topic("orders", max_entries=1, retain_time_micros=MINUTE)
    rig.prune()
    assert rig.store.durables.discarded == {"retention": 2, "max_entries": 1}


def test_a_topic_that_cannot_be_pruned_leaves_the_others_working(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J11."""
    rig.create_topic("other", JSON)
    for topic in ("orders", "other"):
        rig.alter_topic(topic, retain_time_micros=MINUTE)
        put(rig, "a", topic=topic)
    rig.time.tick(MINUTE)
    after = journal.ChunkHeads.after
    orders = rig.topic("orders")

    def broken(self: journal.ChunkHeads, topic: object, position: int) -> journal.StoredChunk | None:
        if topic is orders:
            raise Failed("IO error")
        return after(self, topic, position)  # type: ignore[arg-type]  # a topic

    monkeypatch.setattr(journal.ChunkHeads, "after", broken)
    rig.prune()
    assert (floor(rig), floor(rig, "other")) == (0, 2)
    assert len(rig.journal("orders")) == 1
    assert rig.journal("other") == []
    monkeypatch.undo()
    rig.prune()
    assert floor(rig) == 1


def test_the_floor_is_an_entry_so_a_bookmark_between_two_misses_nothing(rig: Rig, subscribers: Subscribers) -> None:
    """J1: a bookmark is too old only where something after it has been discarded."""
    rig.create_topic("other", JSON)
    rig.alter_topic("other", retain_time_micros=MINUTE)
    put(rig, "a", topic="other")
    put(rig, "b", "c")
    rig.time.tick(MINUTE)
    put(rig, "d", topic="other")
    rig.prune()
    assert floor(rig, "other") == 1
    assert subscribers.subscribe("other", start=at(2, rig)).news()[0][1] == "d"
