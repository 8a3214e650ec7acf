"""Durable subscriptions: retention, delivery, reports and release (J2 to J13; rows F, P1, P4, U of the origins)."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import DURABLE_KEY
from sow_server.engine.disk.rocks import META, Failed
from sow_server.engine.durables import (
    ClearedBacklogs,
    Durable,
    DurableEditor,
    DurableFigures,
    DurableGap,
    GapReason,
    RewindTo,
)
from sow_server.engine.durables.model import STEPS_MAX
from sow_server.engine.durables.rows import decode_durable
from sow_server.engine.journal import reading as journal
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import BacklogAction, MessageType, Publish, TopicSettings
from sow_server.services.admission import Admission
from sow_server.subscriptions.consumers import STEP_MICROS
from sow_server.subscriptions.frames import SnapshotBegin, SnapshotEnd
from sow_server.subscriptions.request import FROM_NOW, Start, StartKind
from tests.support.stores import BINARY, MINUTE, SECOND, Rig
from tests.support.subscribers import EARLIEST, Subscribers, at

HOUR = 60 * MINUTE
TO_EARLIEST = RewindTo()
JSON = TopicSettings(retain_bytes=None)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", JSON)
    yield rig
    rig.close()


@pytest.fixture
def subscribers(rig: Rig) -> Subscribers:
    return Subscribers(rig)


def put(rig: Rig, *keys: str, topic: str = "orders", px: int = 1) -> None:
    """One change a commit."""
    for key in keys:
        rig.put(topic, key, b'{"px":%d}' % px)


def durable(rig: Rig, name: str = "d", topic: str = "orders") -> Durable:
    return rig.store.durables.find(rig.topic(topic), name)


def figures(rig: Rig, name: str = "d", topic: str = "orders") -> DurableFigures:
    return rig.store.durable_commits.figures(rig.topic(topic), name)[1]


def floor(rig: Rig, topic: str = "orders") -> int:
    return rig.topic(topic).statistics.floor_sequence


def rewind(
    subscribers: Subscribers,
    to: RewindTo = TO_EARLIEST,
    *,
    name: str = "d",
    force: bool = False,  # unchanging
) -> tuple[Durable, int]:
    topic = subscribers.rig.topic("orders")
    answers: list[tuple[Durable, int] | StoreError] = []
    subscribers.consumers.rewind(topic, name, to, answers.append, force=force)
    return subscribers.answer(answers)


def delete(subscribers: Subscribers, name: str = "d", *, force: bool = False) -> None:
    answers: list[Durable | StoreError] = []
    subscribers.consumers.delete(subscribers.rig.topic("orders"), name, answers.append, force=force)
    assert subscribers.answer(answers).name == name


def clear(subscribers: Subscribers, name: str = "d") -> int:
    topic = subscribers.rig.topic("orders")
    answers: list[ClearedBacklogs | StoreError] = []
    subscribers.consumers.clear(topic, name, answers.append)
    return subscribers.answer(answers).entries


def refused(error: pytest.ExceptionInfo[StoreError]) -> Reason:
    return error.value.reason


# --- consuming (J2) --------------------------------------------------------------------------------------------------


def test_a_new_durable_begins_now_and_a_returning_client_continues_after_its_acknowledgements(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J2: cumulative acknowledgement; unacknowledged changes come again."""
    put(rig, "before")
    first = subscribers.attach("orders", "d")
    assert (first.begun.sequence, first.begun.created, first.begun.reset) == (1, True, False)
    put(rig, "a", "b", "c")
    assert [key for _, key, _ in first.news()] == ["a", "b", "c"]
    assert first.acknowledge(3).position == 3
    first.close()
    subscribers.settle()
    put(rig, "d")
    second = subscribers.attach("orders", "d", start=EARLIEST)
    assert (second.begun.sequence, second.begun.created, second.begun.reset) == (3, False, False)
    assert second.got() == [4, 5], "a start counts only when it is created"
    assert second.acknowledge(2).position == 3, "positions below the present one change nothing"


@pytest.mark.parametrize(
    ("start", "expected"), [("now", []), ("earliest", [1, 2, 3]), ("bookmark", [2, 3]), ("time", [3])]
)
def test_it_begins_where_it_was_asked_to(rig: Rig, subscribers: Subscribers, start: str, expected: list[int]) -> None:
    """J2, S4."""
    put(rig, "a", "b")
    rig.time.tick(SECOND)
    put(rig, "c")
    time = Start(StartKind.TIME, time_micros=rig.clock.now_micros())
    starts = {"now": FROM_NOW, "earliest": EARLIEST, "bookmark": at(1, rig), "time": time}
    assert subscribers.attach("orders", "d", start=starts[start]).got() == expected


def test_positions_survive_a_crash(rig: Rig, subscribers: Subscribers) -> None:
    """J2: the acknowledgement is in a commit of its own, synced before it is answered."""
    follower = subscribers.attach("orders", "d", filter="/px > 0")
    put(rig, "a", "b")
    follower.news()
    follower.acknowledge(1)
    rig.crash()
    assert (durable(rig).position, durable(rig).filter) == (1, "/px > 0")
    again = Subscribers(rig).attach("orders", "d", filter="/px > 0")
    assert again.got() == [2]


def test_one_consumer_at_a_time_and_force_takes_over(rig: Rig, subscribers: Subscribers) -> None:
    """J2: the stream before ends, and its late acknowledgement does not count."""
    first = subscribers.attach("orders", "d")
    put(rig, "a")
    first.news()
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "d")
    assert refused(error) is Reason.DURABLE_IN_USE
    second = subscribers.attach("orders", "d", force=True)
    first.pump()
    assert first.error is not None
    assert first.error.reason is Reason.DURABLE_TAKEN_OVER
    assert second.got() == [1]
    with pytest.raises(StoreError) as error:
        first.acknowledge(1)
    assert refused(error) is Reason.DURABLE_TAKEN_OVER
    assert durable(rig).position == 0
    assert second.acknowledge().position == 1


def test_another_filter_or_other_settings_under_its_name_are_refused(rig: Rig, subscribers: Subscribers) -> None:
    """J2: and the consumer that is attached stays."""
    first = subscribers.attach("orders", "d", filter="/px > 1", declared={"retain_bytes": 10})
    for other in ({"filter": "/px > 2"}, {"filter": "/px > 1", "declared": {"retain_bytes": 11}}):
        with pytest.raises(StoreError) as error:
            subscribers.attach("orders", "d", force=True, **other)
        assert refused(error) is Reason.DURABLE_DIFFERS
    assert first.pump() == []
    assert first.error is None
    first.close()
    assert not subscribers.attach("orders", "d", filter="( /px > 1 )").begun.created


def test_changes_that_were_not_delivered_cannot_be_acknowledged(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.attach("orders", "d")
    put(rig, "a", "b")
    with pytest.raises(StoreError) as error:
        follower.acknowledge(2)
    assert refused(error) is Reason.BOOKMARK_IN_FUTURE
    follower.news()
    follower.close()
    subscribers.settle()
    assert follower.acknowledge(2).position == 2, "also just after its stream has ended"


def test_a_topic_without_a_journal_has_no_durables_and_a_name_has_its_characters(
    rig: Rig, subscribers: Subscribers
) -> None:
    rig.create_topic("quiet", journal=False)
    with pytest.raises(StoreError) as error:
        subscribers.attach("quiet", "d")
    assert refused(error) is Reason.NO_JOURNAL
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "a b")
    assert refused(error) is Reason.INVALID_ARGUMENT
    assert not subscribers.consumers.attached_count


def test_deleting_a_topic_ends_its_consumers_and_removes_its_durables(rig: Rig, subscribers: Subscribers) -> None:
    """T5."""
    follower = subscribers.attach("orders", "d")
    rig.delete_topic("orders")
    subscribers.settle()
    follower.pump()
    assert follower.error is not None
    assert follower.error.reason is Reason.TOPIC_DELETED
    subscribers.settle()
    rig.create_topic("orders", JSON)
    assert subscribers.attach("orders", "d").begun.reset is False
    assert subscribers.attach("orders", "e", expected=True).begun.reset, "the client remembers what the server cannot"
    rig.crash()
    assert [found.name for found in rig.store.durables.of(rig.topic("orders"))] == ["d", "e"]


# --- changes that a filter leaves out (J2) ---------------------------------------------------------------------------


def test_the_position_advances_over_changes_that_the_filter_leaves_out(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.attach("orders", "d", filter="/px > 1")
    put(rig, "a", "b", px=1)
    put(rig, "c", px=2)
    put(rig, "d", px=1)
    assert [key for _, key, _ in follower.news()] == ["c"]
    rig.time.tick(10 * SECOND)
    follower.news()
    assert durable(rig).position == 0, "c is not acknowledged"
    assert follower.acknowledge(3).position == 4, "nothing that was handed over is left"
    put(rig, "e", px=1)
    follower.news()
    rig.time.tick(10 * SECOND)
    follower.news()
    subscribers.settle()
    assert durable(rig).position == 5


def test_a_rare_filter_does_not_pin_a_topic(rig: Rig, subscribers: Subscribers) -> None:
    """J2: the detached durable that holds the floor is scanned at prune time, up to what it wants."""
    rig.alter_topic("orders", retain_time_micros=MINUTE)
    subscribers.attach("orders", "d", filter="/px > 1").close()
    subscribers.settle()
    put(rig, "a", "b", px=1)
    rig.time.tick(MINUTE)
    rig.prune()
    assert floor(rig) == 0
    subscribers.scan()
    assert (durable(rig).position, floor(rig)) == (2, 2)
    put(rig, "c", px=2)
    put(rig, "d", px=1)
    rig.time.tick(MINUTE)
    subscribers.scan()
    rig.prune()
    assert (durable(rig).position, floor(rig)) == (2, 2), "c is for it"
    assert [key for _, key, _ in subscribers.attach("orders", "d", filter="/px > 1").news()] == ["c"]


def test_a_record_that_leaves_the_filter_is_not_scanned_away(rig: Rig, subscribers: Subscribers) -> None:
    """J2, S2: its consumer may want to hear of it."""
    put(rig, "a", px=2)
    subscribers.attach("orders", "d", filter="/px > 1").close()
    subscribers.settle()
    put(rig, "a", px=1)
    subscribers.scan()
    assert durable(rig).position == 1


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
    """FTL 8, J5: what is retained goes as well where nobody has anything left to acknowledge, and nobody is told."""
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


def test_a_durable_can_be_rewound_to_the_earliest_position_of_its_figures(rig: Rig, subscribers: Subscribers) -> None:
    """Of a topic that was created behind others it was 0, and a rewind to that was refused."""
    put(rig, "a", "b")
    rig.create_topic("late", JSON)
    put(rig, "c", topic="late")
    subscribers.attach("late", "d", start=EARLIEST).close()
    subscribers.settle()
    assert figures(rig, topic="late").earliest == durable(rig, topic="late").position == 2


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


# --- time (J8, J10; arrebato 4, Pulsar 8) ----------------------------------------------------------------------------


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


def test_an_idle_durable_is_removed_and_its_client_gets_a_gap(rig: Rig, subscribers: Subscribers) -> None:
    """arrebato 1, arrebato 4, J10: neither attached nor acknowledging."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    follower = subscribers.attach("orders", "d")
    rig.time.tick(HOUR)
    subscribers.upkeep()
    follower.close()
    subscribers.settle()
    rig.time.tick(MINUTE - 1)
    subscribers.upkeep()
    assert durable(rig).position == 0
    rig.time.tick(1)
    subscribers.upkeep()
    assert rig.store.durables.of(rig.topic("orders")) == []
    again = subscribers.attach("orders", "d")
    assert (again.begun.created, again.begun.reset) == (True, True)


def test_a_crash_is_no_idleness_and_a_restart_does_not_make_young(rig: Rig, subscribers: Subscribers) -> None:
    """J10: who was attached then is idle from the start on; who was not has been idle all the time."""
    rig.alter_topic("orders", durable_idle_ttl_micros=HOUR)
    subscribers.attach("orders", "away").close()
    subscribers.attach("orders", "here")
    rig.time.tick(HOUR)
    rig.crash()
    after = Subscribers(rig)
    after.settle()
    after.upkeep()
    assert [found.name for found in rig.store.durables.of(rig.topic("orders"))] == ["here"]
    rig.time.tick(HOUR)
    after.upkeep()
    assert rig.store.durables.of(rig.topic("orders")) == []


def test_names_of_removed_durables_are_forgotten_in_the_end(rig: Rig, subscribers: Subscribers) -> None:
    subscribers.attach("orders", "d").close()
    delete(subscribers)
    rig.time.tick(31 * 24 * HOUR)
    rig.clock.accept()
    rig.store.durable_commits.forget_removed()
    rig.store.writer.step()
    assert rig.rows(META, b"durable/", b"durable0") == []
    assert not subscribers.attach("orders", "d").begun.reset


# --- backlog quotas (J9) ---------------------------------------------------------------------------------------------


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
        admission = Admission(rig.store.topics, rig.store.durables, rig.store.commits, rig.clock)
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


class FakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only, and at once, when there is nothing to do until a timer."""

    def __init__(self) -> None:
        self._impatient = Impatient()
        super().__init__(self._impatient)

    def time(self) -> float:
        return self._impatient.now


class Impatient(selectors.SelectSelector):
    """Counts the time that it should wait, instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def test_a_publish_that_is_held_hears_when_the_quota_refuses_from_now_on(rig: Rig, subscribers: Subscribers) -> None:
    """J9. It passed, whatever the backlog."""
    quota = full(rig, subscribers)

    async def run() -> None:
        admission = Admission(rig.store.topics, rig.store.durables, rig.store.commits, rig.clock)
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
        admission = Admission(rig.store.topics, rig.store.durables, rig.store.commits, rig.clock)
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
        admission = Admission(rig.store.topics, rig.store.durables, rig.store.commits, rig.clock)
        waiting = held(admission)
        done, _ = await asyncio.wait((waiting,), timeout=0.001)
        assert not done
        polls = list(admission._polls.values())
        assert len(polls) == 1
        waiting.cancel()
        await asyncio.wait_for(asyncio.gather(*polls), 5)
        assert (admission._polls, admission._waiting, admission._under_way) == ({}, {}, {})

    asyncio.run(run())


# --- at the same time ------------------------------------------------------------------------------------------------


def test_a_refused_takeover_leaves_no_consumer_attached(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J10. The row still said that somebody was there, so that it was never idle."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    subscribers.attach("orders", "d")
    with monkeypatch.context() as patch:

        def stalled(*_: object, **__: object) -> None:
            raise StoreError(Reason.WRITE_STALLED, "the disk cannot keep up")

        patch.setattr(DurableEditor, "attach", stalled)
        with pytest.raises(StoreError) as error:
            subscribers.attach("orders", "d", force=True)
    assert refused(error) is Reason.WRITE_STALLED
    subscribers.settle()
    assert not durable(rig).attached
    rig.time.tick(MINUTE)
    subscribers.upkeep()
    assert rig.store.durables.of(rig.topic("orders")) == []


def test_a_consumer_that_returns_while_its_idle_durable_is_removed_can_acknowledge(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J10. The removal took the session of the new one with it."""
    rig.alter_topic("orders", durable_idle_ttl_micros=MINUTE)
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    rig.time.tick(MINUTE)
    subscribers.consumers.upkeep()
    follower = subscribers.attach("orders", "d")
    assert follower.begun.reset
    put(rig, "a")
    follower.news()
    assert follower.acknowledge().position == rig.store.writer.last_sequence


def test_a_consumer_that_returns_while_its_durable_is_deleted_begins_at_its_requested_start(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J2. It was not looked where that is, as the durable was still there; and so it began at now."""
    put(rig, "a", "b")
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    answers: list[Durable | StoreError] = []
    subscribers.consumers.delete(rig.topic("orders"), "d", answers.append, force=False)
    follower = subscribers.attach("orders", "d", start=EARLIEST)
    assert (follower.begun.reset, follower.got()) == (True, [1, 2])
    follower.close()
    subscribers.settle()
    subscribers.consumers.delete(rig.topic("orders"), "d", answers.append, force=False)
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "d", start=at(9, rig))
    assert refused(error) is Reason.BOOKMARK_IN_FUTURE
    assert [answer.name for answer in answers if isinstance(answer, Durable)] == ["d", "d"]
    assert not subscribers.consumers.is_attached(rig.topic("orders"), "d")
    assert rig.store.durables.of(rig.topic("orders")) == []


def test_a_bookmark_beyond_a_hard_limit_is_too_old_even_before_the_prune(rig: Rig, subscribers: Subscribers) -> None:
    """S4, durables [4]. The durable began after the discarded changes, and no gap was reported."""
    rig.alter_topic("orders", max_age_micros=MINUTE)
    put(rig, "a", "b")
    rig.time.tick(MINUTE)
    put(rig, "c")
    with pytest.raises(StoreError) as error:
        subscribers.attach("orders", "d", start=at(1, rig))
    assert refused(error) is Reason.BOOKMARK_TOO_OLD
    assert error.value.details == {"earliest_sequence": "3"}
    assert rig.store.durables.of(rig.topic("orders")) == []
    follower = subscribers.attach("orders", "d", start=at(2, rig))
    assert (follower.got(), follower.gaps()) == ([3], [])


def test_a_changing_row_is_always_present(rig: Rig, subscribers: Subscribers) -> None:
    """durables [1]. It was taken out and put in again: a reader on another thread was told DURABLE_NOT_FOUND."""
    follower = subscribers.attach("orders", "d")
    put(rig, "a")
    follower.news()

    class Watched(dict[str, Durable]):
        taken: ClassVar[list[str]] = []

        def pop(self, key: str, *default: Any) -> Any:  # as dict
            self.taken.append(key)
            return super().pop(key, *default)

    found = rig.store.durables.of_topic(rig.topic("orders").id)
    assert found is not None
    found.rows = Watched(found.rows)
    assert follower.acknowledge().position == 1
    assert Watched.taken == []
    assert [one.position for one in rig.store.durables.of(rig.topic("orders"))] == [1]
    assert found.order == [(1, "d")]


def test_sessions_go_with_their_topic(rig: Rig, subscribers: Subscribers) -> None:
    """They stayed for ever, each with all that its consumer knew."""
    subscribers.attach("orders", "d").close()
    subscribers.settle()
    assert len(subscribers.consumers._sessions) == 1
    rig.delete_topic("orders")
    subscribers.upkeep()
    assert subscribers.consumers._sessions == {}


def test_a_topic_is_deleted_while_its_durable_is_rewound_and_it_is_pruned(rig: Rig, subscribers: Subscribers) -> None:
    """T5: whatever comes behind the deletion finds nothing, and writes nothing of the topic."""
    follower = subscribers.attach("orders", "d")
    rig.alter_topic("orders", max_entries=1)
    put(rig, "a", "b", "c")
    topic = rig.topic("orders")
    deleted: list[int | StoreError] = []
    rewound: list[tuple[Durable, int] | StoreError] = []
    pruned: list[bool | StoreError] = []
    rig.store.administration.delete_topic("orders", deleted.append)
    subscribers.consumers.rewind(topic, "d", TO_EARLIEST, rewound.append, force=True)
    rig.store.upkeep.prune(pruned.append)
    subscribers.settle()
    follower.pump()
    assert (deleted, pruned) == ([3], [False])
    (answer,) = rewound
    assert isinstance(answer, StoreError)
    assert answer.reason is Reason.DURABLE_NOT_FOUND
    for family in (META, "journal"):
        assert [key for key, _ in rig.rows(family) if topic.prefix in key] == []


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


# --- many ------------------------------------------------------------------------------------------------------------


def test_acknowledgements_share_commits(rig: Rig, subscribers: Subscribers) -> None:
    """durable_changes [1]."""
    followers = [subscribers.attach("orders", f"d{number}") for number in range(5)]
    put(rig, "a")
    answers: list[object] = []
    for follower in followers:
        follower.news()
    written: list[object] = []
    write = rig.store._rocks.write

    def counted(batch: object) -> None:
        written.append(batch)
        write(batch)  # type: ignore[arg-type]  # a batch

    rig.store._rocks.write = counted  # type: ignore[method-assign]  # to see how many there are
    for follower in followers:
        consumer = follower.consumer
        subscribers.consumers.acknowledge(consumer.topic, consumer.name, consumer.session, 1, answers.append)
    subscribers.settle()
    assert len(answers) == 5
    assert len(written) == 2, "the first, and all that came meanwhile"


def test_idle_upkeep_reads_nothing(rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a second is in proportion to the entries due in it."""
    rig.alter_topic("orders", durable_idle_ttl_micros=HOUR, backlog_ttl_micros=HOUR)
    for number in range(50):
        subscribers.attach("orders", f"d{number}").close()
    subscribers.upkeep()
    monkeypatch.setattr(rig.store._rocks, "cursor", None)
    monkeypatch.setattr(rig.store.durable_commits, "change", None)
    for _ in range(10):
        rig.time.tick(SECOND)
        subscribers.consumers.upkeep()


# --- the delivery limit (J15) ----------------------------------------------------------------------------------------


def crash(subscribers: Subscribers, name: str = "d", *, acknowledged: int | None = None, **attach: Any) -> Any:
    """A consumer that takes what there is, acknowledges up to some position, and goes away for good."""
    follower = subscribers.attach("orders", name, **attach)
    if acknowledged is not None:
        follower.acknowledge(acknowledged)
    follower.close()
    subscribers.settle()
    return follower


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
    assert crash(subscribers).times() == [3, 3, 1], "of what is left"
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
    admission = Admission(rig.store.topics, rig.store.durables, rig.store.commits, rig.clock)
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
