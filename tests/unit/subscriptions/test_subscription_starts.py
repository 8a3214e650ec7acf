"""Where a subscription starts: at a bookmark, at a time, at the earliest change, or now (S4, J12)."""

from __future__ import annotations

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Publish
from sow_server.services.wire.topic_filters import PlannedSnapshot, TopicFilters
from sow_server.subscriptions.frames import Progress
from sow_server.subscriptions.hub import AHEAD_MICROS_MAX
from sow_server.subscriptions.request import Start, StartKind
from tests.support.stores.stores import MINUTE, SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, JSON, Follower, Subscribers, at, px, refused, rig, subscribers

__all__ = ["rig", "subscribers"]  # fixtures


def test_a_start_at_a_future_time_is_refused(rig: Rig, subscribers: Subscribers) -> None:
    """S4: it got the changes published now. A little ahead is a difference of clocks, and means now."""
    rig.put("orders", "before", px(1))
    tolerated = rig.clock.now_micros() + AHEAD_MICROS_MAX
    follower = subscribers.subscribe("orders", start=Start(StartKind.TIME, time_micros=tolerated))
    rig.put("orders", "a", px(1))
    assert follower.news() == [("put", "a", px(1))]
    start = Start(StartKind.TIME, time_micros=tolerated + 1)
    for options in ({"topic": "orders"}, {"pattern": "o.*"}):
        error = refused(subscribers.subscribe, start=start, **options)
        assert (error.reason, error.field) == (Reason.TIME_IN_FUTURE, "start_time_micros")
    error = refused(subscribers.attach, "orders", "d", start=start)
    assert (error.reason, error.field) == (Reason.TIME_IN_FUTURE, "start_time_micros")
    assert list(rig.store.durables.of(rig.topic("orders"))) == []
    # One that is there goes on where it is; a start counts only for one that is new.
    subscribers.attach("orders", "d").close()
    rig.put("orders", "b", px(1))
    assert subscribers.attach("orders", "d", start=start).got() == [3]


def test_a_subscriber_resumes_at_a_bookmark_without_gap_or_repeat(rig: Rig, subscribers: Subscribers) -> None:
    """S4."""
    for number in range(6):
        rig.put("orders", "a", px(number))
    followers = [subscribers.subscribe("orders", start=at(position, rig)) for position in range(7)]
    rig.put("orders", "b", px(6))
    for position, follower in enumerate(followers):
        assert follower.frames[0] == Progress(position, rig.clock.now_micros(), behind=True)
        wanted = [("put", "a", px(number)) for number in range(position, 6)]
        assert follower.news() == [*wanted, ("put", "b", px(6))]
        assert follower.bookmark == 7


def test_a_replay_of_focus_and_delta_looks_the_previous_record_up(rig: Rig, subscribers: Subscribers) -> None:
    """J1."""
    live = [
        subscribers.subscribe("orders", filter="/px > 5", oof=True),
        subscribers.subscribe("orders", filter="/px > 5", changes=True),
        subscribers.subscribe("orders", filter="/px > 5", delta=True, oof=True),
    ]
    for key, number in [("a", 6), ("a", 7), ("a", 1), ("b", 8), ("a", 9), ("a", 9)]:
        rig.put("orders", key, px(number))
    rig.touch("orders", "b", ttl=MINUTE)
    rig.delete("orders", "a", "b")
    options = [{"oof": True}, {"changes": True}, {"delta": True, "oof": True}]
    for follower, asked in zip(live, options, strict=True):
        replayed = subscribers.subscribe("orders", filter="/px > 5", start=at(0, rig), **asked)  # type: ignore[arg-type]  # keywords of several types
        assert replayed.news() == follower.news() != []


def test_below_the_floor_a_record_counts_as_having_been_in_focus(rig: Rig, subscribers: Subscribers) -> None:
    """J1: oof when it leaves, the whole record for a delta."""
    rig.put("orders", "a", px(1))
    rig.put("orders", "b", px(9))
    rig.time.tick(20 * MINUTE)
    rig.prune()
    start = rig.put("orders", "x", px(0)).last_sequence
    rig.put("orders", "a", px(2))
    rig.put("orders", "b", px(8))
    oof = subscribers.subscribe("orders", filter="/px > 5", oof=True, start=at(start, rig))
    assert oof.news() == [("oof match", "a", px(2)), ("put", "b", px(8))]
    delta = subscribers.subscribe("orders", filter="/px > 5", delta=True, start=at(start, rig))
    assert delta.news() == [("put", "b", px(8))]


def test_bookmarks_are_refused_for_three_reasons(rig: Rig, subscribers: Subscribers) -> None:
    """S4."""

    def reason(bookmark: str) -> Reason:
        return refused(subscribers.subscribe, "orders", start=Start(StartKind.BOOKMARK, bookmark=bookmark)).reason

    rig.put("orders", "a", px(1))
    for text in (
        "",
        "7",
        "x.1",
        f"{rig.store.instance.epoch}.01",
        f"{rig.store.instance.epoch}.-1",
        f"{rig.store.instance.epoch}.1 ",
    ):
        assert reason(text) is Reason.BOOKMARK_MALFORMED
    assert reason("0123456789ab.1") is Reason.BOOKMARK_OTHER_EPOCH
    assert reason(rig.store.instance.bookmark(2)) is Reason.BOOKMARK_IN_FUTURE
    rig.put("orders", "b", px(1))
    rig.time.tick(20 * MINUTE)
    rig.prune()
    assert reason(rig.store.instance.bookmark(1)) is Reason.BOOKMARK_TOO_OLD
    error = refused(subscribers.subscribe, "orders", start=at(0, rig))
    assert error.details == {"earliest_sequence": "3", "earliest_bookmark": rig.store.instance.bookmark(2)}
    assert subscribers.subscribe("orders", start=at(2, rig)).error is None


def test_a_bookmark_of_a_deleted_topic_is_none_of_its_namesake(rig: Rig, subscribers: Subscribers) -> None:
    """J1: the floor of a new topic is the sequence at its creation, and the deletion took one.

    The last bookmark of the old topic was accepted: its reader kept records that were gone, and was told nothing.
    """
    rig.put("orders", "a", px(1))
    rig.delete_topic("orders")
    rig.create_topic("orders", JSON)
    for position in (0, 1):
        error = refused(subscribers.subscribe, "orders", start=at(position, rig))
        assert error.reason is Reason.BOOKMARK_TOO_OLD
    assert subscribers.subscribe("orders", start=at(2, rig)).error is None


def test_starting_at_a_time_means_after_the_last_commit_before_it(rig: Rig, subscribers: Subscribers) -> None:
    """S4."""
    times = []
    for number in range(9):
        times.append(rig.clock.now_micros())
        rig.run(
            Publish("orders", [px(number)] * (1 + number % 3), [f"{number}{index}" for index in range(1 + number % 3)])
        )
        rig.time.tick(SECOND)

    def keys(time: int) -> list[str]:
        start = Start(StartKind.TIME, time_micros=time)
        return sorted({key[0] for _, key, _ in subscribers.subscribe("orders", start=start).news()})

    for number, time in enumerate(times):
        assert keys(time) == [str(later) for later in range(number, 9)]
        assert keys(time + 1) == [str(later) for later in range(number + 1, 9)]
    assert keys(0) == [str(number) for number in range(9)]
    assert keys(rig.clock.now_micros()) == []


def test_the_earliest_start_is_the_oldest_retained_change(rig: Rig, subscribers: Subscribers) -> None:
    rig.put("orders", "a", px(1))
    rig.time.tick(20 * MINUTE)
    rig.prune()
    rig.put("orders", "b", px(2))
    follower = subscribers.subscribe("orders", start=EARLIEST)
    assert follower.news() == [("put", "b", px(2))]
    early = Start(StartKind.TIME, time_micros=1)
    assert subscribers.subscribe("orders", start=early).news() == [("put", "b", px(2))]


def test_a_topic_without_a_journal_has_nothing_to_start_from(rig: Rig, subscribers: Subscribers) -> None:
    rig.create_topic("quiet", JSON, journal=False)
    for start in (at(0, rig), EARLIEST, Start(StartKind.TIME, time_micros=1)):
        assert refused(subscribers.subscribe, "quiet", start=start).reason is Reason.NO_JOURNAL
        assert refused(subscribers.subscribe, pattern="q.*|orders", start=start).reason is Reason.NO_JOURNAL


def test_a_topic_without_a_journal_is_followed_live(rig: Rig, subscribers: Subscribers) -> None:
    rig.create_topic("quiet", JSON, journal=False)
    rig.put("quiet", "a", px(7))
    follower = subscribers.subscribe("quiet", sow=True, oof=True, filter="/px > 5")
    assert follower.snapshot() == {"a": px(7)}
    rig.put("quiet", "b", px(8))
    rig.put("quiet", "a", px(1))
    assert follower.news() == [("put", "b", px(8)), ("oof match", "a", px(1))]
    follower.close()
    assert (rig.topic("quiet").followers, rig.topic("quiet").previous_wanted) == (0, 0)


def test_changes_staged_before_the_first_follower_are_not_missed(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that was being staged when the subscriber came has no chunk of a topic without a journal: were the
    subscriber attached before it, that change would be missing, and the snapshot would not have it either."""
    rig.create_topic("quiet", JSON, journal=False)
    committer = rig.store.writer.committer
    reserve = committer._reserve
    followers: list[Follower] = []

    def subscribe_then_reserve(draft: Draft) -> None:
        """Between staging and writing."""
        if not followers:
            followers.append(subscribers.subscribe("quiet", sow=True, settled=False))
        reserve(draft)

    monkeypatch.setattr(committer, "_reserve", subscribe_then_reserve)
    rig.put("quiet", "a", px(1))
    (follower,) = followers
    rig.put("quiet", "b", px(2))
    assert follower.news() == [("put", "b", px(2))] or follower.snapshot() == {"a": px(1), "b": px(2)}
    rig.put("quiet", "c", px(3))
    assert follower.news() == [("put", "c", px(3))]
    assert "a" in follower.snapshot()


def test_a_snapshot_that_cannot_be_begun_ends_the_stream(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a topic without a journal it begins later than the subscription. The error was then logged as that of an
    answer of the writer, and the subscriber waited for ever."""
    rig.create_topic("quiet", JSON, journal=False)

    def broken(self: TopicFilters, topic: Topic) -> PlannedSnapshot:
        raise StoreError(Reason.DATA_DAMAGED, "for the test")

    monkeypatch.setattr(TopicFilters, "snapshot", broken)
    follower = subscribers.subscribe("quiet", sow=True, settled=False)
    follower.news()
    assert follower.error is not None
    assert follower.error.reason is Reason.DATA_DAMAGED


def test_a_topic_that_is_created_while_a_pattern_is_followed_is_followed_from_its_first_change(
    rig: Rig, subscribers: Subscribers
) -> None:
    """The loop hears of it only later, and there is no journal to catch up from."""
    follower = subscribers.subscribe(pattern=".*", oof=True)
    topic = rig.create_topic("quiet", JSON, journal=False)
    assert (topic.followers, topic.previous_wanted) == (1, 1)
    rig.put("quiet", "a", px(1))
    rig.delete("quiet", "a")
    assert follower.news() == [("put", "a", px(1)), ("oof deleted", "a", px(1))]
