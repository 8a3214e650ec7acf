"""A subscriber gets each of its changes once, in order, and only after it is durable (rules S1 to S7, J12)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Delete,
    Durability,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    TopicSettings,
)
from sow_server.services.topic_filters import PlannedSnapshot, TopicFilters
from sow_server.subscriptions.frames import Progress, SnapshotBegin, SnapshotEnd
from sow_server.subscriptions.groups import Member
from sow_server.subscriptions.hub import AHEAD_MICROS_MAX
from sow_server.subscriptions.replay import JournalGap, Replay, Replayed
from sow_server.subscriptions.request import Start, StartKind
from tests.support.stores import MINUTE, SECOND, Rig
from tests.support.subscribers import EARLIEST, Follower, Subscribers, at

JSON = TopicSettings(expiration=Expiration.ENABLED)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", JSON)
    yield rig
    rig.close()


@pytest.fixture
def subscribers(rig: Rig) -> Subscribers:
    return Subscribers(rig)


def px(number: int) -> bytes:
    return b'{"px":%d}' % number


def refused(make: object, *arguments: object, **options: object) -> StoreError:
    with pytest.raises(StoreError) as caught:
        make(*arguments, **options)  # type: ignore[operator]  # a method of the fixture
    return caught.value


# --- live ------------------------------------------------------------------------------------------------------------


def test_a_subscriber_gets_the_changes_after_it_and_no_others(rig: Rig, subscribers: Subscribers) -> None:
    """S1; the first frame tells that the subscription stands."""
    rig.put("orders", "before", px(1))
    follower = subscribers.subscribe("orders")
    assert follower.frames == [Progress(1, rig.clock.now_micros())]
    rig.put("orders", "a", px(1))
    rig.put("orders", "b", px(2))
    assert follower.news() == [("put", "a", px(1)), ("put", "b", px(2))]
    assert follower.bookmark == 3


def test_only_matches_are_sent(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", filter="/px > 5")
    rig.put("orders", "a", px(1))
    rig.put("orders", "b", px(6))
    rig.put("orders", "b", px(2))
    rig.delete("orders", "b")
    assert follower.news() == [("put", "b", px(6))]


def test_nothing_is_sent_before_it_is_durable(rig: Rig, subscribers: Subscribers) -> None:
    """S7, whatever durability was asked for."""
    follower = subscribers.subscribe("orders")
    rig.run(Publish("orders", [px(1)], ["a"], durability=Durability.BUFFERED))
    subscribers.loop.run()
    assert [type(frame) for frame in follower.pump()] == []
    assert follower.news() == [("put", "a", px(1))]


def test_the_snapshot_waits_until_its_records_are_durable(rig: Rig, subscribers: Subscribers) -> None:
    """S7: cut at the last written sequence, its header waits for the sync."""
    rig.run(Publish("orders", [px(1)], ["a"], durability=Durability.BUFFERED))
    follower = subscribers.subscribe("orders", sow=True, settled=False)
    assert follower.pump() == []
    subscribers.settle()
    follower.pump()
    assert follower.kinds() == ["SnapshotBegin", "SnapshotBatch", "SnapshotEnd"]
    assert follower.snapshot() == {"a": px(1)}


def test_a_touch_is_a_put_of_the_whole_record(rig: Rig, subscribers: Subscribers) -> None:
    rig.put("orders", "a", px(1))
    follower = subscribers.subscribe("orders")
    rig.touch("orders", "a", ttl=MINUTE)
    assert follower.news() == [("touched", "a", px(1))]


def test_rows_carry_the_stored_values(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders")
    rig.put("orders", "a", px(1), ttl=MINUTE)
    follower.news()
    (row,) = follower.changes()
    found = rig.get("orders", "a")
    assert found is not None
    assert (row.version, row.publish_time, row.expire_time, row.origin, row.sequence) == found[2:]


def test_fields_are_selected(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", include=["/px"], sow=True, oof=True)
    rig.put("orders", "a", b'{"px":1,"qty":2}')
    rig.delete("orders", "a")
    assert follower.news() == [("put", "a", px(1)), ("oof deleted", "a", px(1))]


# --- snapshot, then live ---------------------------------------------------------------------------------------------


def test_the_end_of_an_empty_snapshot_is_marked(subscribers: Subscribers) -> None:
    """S1."""
    follower = subscribers.subscribe("orders", sow=True)
    assert follower.kinds() == ["SnapshotBegin", "SnapshotEnd"]


def test_a_snapshot_and_its_changes_have_neither_gap_nor_repeat(rig: Rig, subscribers: Subscribers) -> None:
    """S1, though changes go on while the snapshot is being read."""
    for key in "abc":
        rig.put("orders", key, px(1))
    follower = subscribers.subscribe("orders", sow=True, batch_size=1, settled=False)
    subscribers.settle()
    follower.pump(frames_max=2)
    rig.put("orders", "c", px(2))
    rig.put("orders", "d", px(2))
    assert follower.news() == [("put", "c", px(2)), ("put", "d", px(2))]
    assert follower.snapshot() == {"a": px(1), "b": px(1), "c": px(1)}
    begin, end = (
        next(frame for frame in follower.frames if isinstance(frame, kind)) for kind in (SnapshotBegin, SnapshotEnd)
    )
    assert begin.sequence == end.sequence == 3


def test_a_snapshot_has_only_matching_records_that_are_not_overdue(rig: Rig, subscribers: Subscribers) -> None:
    """L8."""
    rig.put("orders", "a", px(9), ttl=SECOND)
    rig.put("orders", "b", px(9))
    rig.put("orders", "c", px(1))
    rig.time.tick(SECOND)
    assert subscribers.subscribe("orders", sow=True, filter="/px > 5").snapshot() == {"b": px(9)}


def test_a_long_snapshot_with_a_rare_filter_is_read_in_bounded_steps(rig: Rig, subscribers: Subscribers) -> None:
    rig.run(Publish("orders", [px(number) for number in range(500)], [f"{number:03}" for number in range(500)]))
    follower = subscribers.subscribe("orders", sow=True, filter="/px IN (3, 250, 251, 499)", batch_size=2)
    assert list(follower.snapshot()) == ["003", "250", "251", "499"]
    assert follower.kinds() == ["SnapshotBegin", "SnapshotBatch", "SnapshotBatch", "SnapshotEnd"]


# --- focus -----------------------------------------------------------------------------------------------------------


def test_a_record_leaves_focus_with_a_reason(rig: Rig, subscribers: Subscribers) -> None:
    """S2: deleted and expired with the previous record, match with the updated one."""
    follower = subscribers.subscribe("orders", filter="/px > 5", oof=True)
    rig.put("orders", "a", px(6))
    rig.put("orders", "a", px(7))
    rig.put("orders", "a", px(1))
    rig.put("orders", "a", px(2))
    rig.delete("orders", "a")
    rig.put("orders", "b", px(8))
    rig.delete("orders", "b")
    rig.put("orders", "c", px(9), ttl=SECOND)
    assert follower.news() == [
        ("put", "a", px(6)),
        ("put", "a", px(7)),
        ("oof match", "a", px(1)),
        ("put", "b", px(8)),
        ("oof deleted", "b", px(8)),
        ("put", "c", px(9)),
    ]
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert follower.news() == [("oof expired", "c", px(9))]


def test_change_readers_get_every_change_of_a_matching_record(rig: Rig, subscribers: Subscribers) -> None:
    """S2: put, delete and expire wherever the new or the previous value matches."""
    follower = subscribers.subscribe("orders", filter="/px > 5", changes=True)
    rig.put("orders", "a", px(1))
    rig.put("orders", "a", px(6))
    rig.put("orders", "a", px(2))
    rig.put("orders", "a", px(3))
    rig.put("orders", "b", px(7))
    rig.delete("orders", "b")
    rig.put("orders", "c", px(8), ttl=SECOND)
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert follower.news() == [
        ("put", "a", px(6)),
        ("put", "a", px(2)),
        ("put", "b", px(7)),
        ("delete", "b", px(7)),
        ("put", "c", px(8)),
        ("expire", "c", px(8)),
    ]


def test_a_removed_record_is_reported_with_its_own_version(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", oof=True)
    version = rig.put("orders", "a", px(1)).last_version
    rig.delete("orders", "a")
    follower.news()
    assert [row.version for row in follower.changes()] == [version, version]
    assert [row.sequence for row in follower.changes()] == [1, 2]


def test_a_filter_on_metadata_judges_the_record_as_it_was(rig: Rig, subscribers: Subscribers) -> None:
    version = rig.put("orders", "a", px(1)).last_version
    follower = subscribers.subscribe("orders", filter=f"@version = {version}", oof=True)
    other = subscribers.subscribe("orders", filter="@expire_time IS NOT NULL", oof=True)
    rig.touch("orders", "a", ttl=MINUTE)
    rig.delete("orders", "a")
    assert follower.news() == [("oof match", "a", px(1))]
    assert other.news() == [("touched", "a", px(1)), ("oof deleted", "a", px(1))]


# --- delta -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quotes(rig: Rig) -> None:
    rig.create_topic("quotes", TopicSettings(key=("/id",), expiration=Expiration.ENABLED))


def quote(rig: Rig, payload: bytes) -> None:
    rig.run(Publish("quotes", [payload]))


@pytest.mark.usefixtures("quotes")
def test_a_record_that_stays_in_focus_is_sent_as_its_changed_fields(rig: Rig, subscribers: Subscribers) -> None:
    """S3: whole when it comes into focus; vanished fields are listed."""
    follower = subscribers.subscribe("quotes", filter="/bid > 0", delta=True)
    quote(rig, b'{"id":1,"bid":5,"ask":6}')
    quote(rig, b'{"id":1,"bid":5,"ask":7}')
    quote(rig, b'{"id":1,"bid":5}')
    quote(rig, b'{"id":1,"bid":0}')
    quote(rig, b'{"id":1,"bid":2}')
    assert follower.news() == [
        ("put", "1", b'{"id":1,"bid":5,"ask":6}'),
        ("put delta", "1", b'{"id":1,"ask":7}'),
        ("put delta", "1", b'{"id":1}'),
        ("put", "1", b'{"id":1,"bid":2}'),
    ]
    assert [row.unset_paths for row in follower.changes()] == [(), (), ("/ask",), ()]


@pytest.mark.usefixtures("quotes")
@pytest.mark.parametrize("empty_deltas", [False, True])
def test_an_update_that_changes_nothing_is_sent_only_if_asked_for(
    rig: Rig, subscribers: Subscribers, empty_deltas: bool
) -> None:
    """S3."""
    quote(rig, b'{"id":1,"bid":5}')
    follower = subscribers.subscribe("quotes", delta=True, empty_deltas=empty_deltas)
    quote(rig, b'{"bid":5,"id":1}')
    rig.touch("quotes", "1", ttl=MINUTE)
    told = [("put delta", "1", b'{"id":1}'), ("touched delta", "1", b'{"id":1}')]
    assert follower.news() == (told if empty_deltas else [])


@pytest.mark.usefixtures("quotes")
def test_a_delta_subscription_tells_of_leaving_with_the_whole_record(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("quotes", filter="/bid > 0", delta=True, oof=True, sow=True)
    quote(rig, b'{"id":1,"bid":5,"ask":6}')
    quote(rig, b'{"id":1,"bid":0,"ask":6}')
    assert follower.news()[1:] == [("oof match", "1", b'{"id":1,"bid":0,"ask":6}')]


@pytest.mark.usefixtures("quotes")
def test_no_delta_is_made_to_a_version_that_the_subscriber_was_spared(rig: Rig, subscribers: Subscribers) -> None:
    """J12: a put that was due when its turn came was skipped, though a touch had saved the record; a delta of that
    would have been to a record that the subscriber never got."""
    follower = subscribers.subscribe("quotes", delta=True, empty_deltas=True)
    rig.run(Publish("quotes", [b'{"id":1,"bid":5}'], lifetime=_ttl(SECOND)))
    rig.touch("quotes", "1", ttl=MINUTE)
    rig.time.tick(SECOND)
    assert follower.news() == [("touched", "1", b'{"id":1,"bid":5}')]


# --- due records -----------------------------------------------------------------------------------------------------


def test_a_put_that_is_due_when_its_turn_comes_is_skipped_and_its_expiry_follows(
    rig: Rig, subscribers: Subscribers
) -> None:
    """J12."""
    follower = subscribers.subscribe("orders", oof=True)
    rig.put("orders", "a", px(1), ttl=SECOND)
    rig.time.tick(SECOND)
    assert follower.news() == []
    rig.store.sweep()
    assert follower.news() == [("oof expired", "a", px(1))]


def test_a_put_that_falls_due_while_it_waits_to_be_sent_is_skipped(rig: Rig, subscribers: Subscribers) -> None:
    """J12: delivery counts, not queueing."""
    follower = subscribers.subscribe("orders")
    reader = subscribers.subscribe("orders", changes=True)
    rig.run_together([Publish("orders", [px(1)], ["a"], lifetime=_ttl(SECOND)), Publish("orders", [px(2)], ["b"])])
    subscribers.settle()
    rig.time.tick(SECOND)
    assert follower.news() == [("put", "b", px(2))]
    assert reader.news() == [("put", "a", px(1)), ("put", "b", px(2))]
    assert follower.bookmark == reader.bookmark == 2


def test_a_record_due_at_its_own_commit_goes_to_attached_subscribers_and_is_never_replayed(
    rig: Rig, subscribers: Subscribers
) -> None:
    """L7."""
    start = rig.put("orders", "x", px(0)).last_sequence
    live = subscribers.subscribe("orders", oof=True)
    rig.put("orders", "a", px(1), ttl=0)
    assert live.news() == [("put", "a", px(1)), ("oof expired", "a", px(1))]
    assert subscribers.subscribe("orders", start=at(start, rig)).news() == []
    assert subscribers.subscribe("orders", start=at(start, rig), changes=True).news() == [
        ("put", "a", px(1)),
        ("expire", "a", px(1)),
    ]


def test_leaving_focus_by_a_record_that_is_due_is_still_reported(rig: Rig, subscribers: Subscribers) -> None:
    """J12: the subscriber has the record, so it must hear that it does not match any more."""
    rig.put("orders", "a", px(9))
    follower = subscribers.subscribe("orders", filter="/px > 5", oof=True, sow=True)
    rig.put("orders", "a", px(1), ttl=SECOND)
    rig.time.tick(SECOND)
    assert follower.news() == [("oof match", "a", px(1))]


def test_a_topic_that_does_not_act_on_lifetimes_skips_nothing(rig: Rig, subscribers: Subscribers) -> None:
    rig.create_topic("kept", JSON._replace(expiration=Expiration.DISABLED))
    follower = subscribers.subscribe("kept")
    rig.put("kept", "a", px(1), ttl=SECOND)
    rig.time.tick(MINUTE)
    assert follower.news() == [("put", "a", px(1))]


# --- atomic requests and frames --------------------------------------------------------------------------------------


def test_an_atomic_request_is_whole_and_its_bookmark_comes_last(rig: Rig, subscribers: Subscribers) -> None:
    """S5."""
    follower = subscribers.subscribe("orders", batch_size=2)
    replayed_from = rig.put("orders", "x", px(0)).last_sequence
    rig.run_together(
        [
            Publish("orders", [px(1)] * 5, list("abcde"), atomic=True),
            Publish("orders", [px(2)], ["z"]),
        ]
    )
    follower.news()
    replayed = subscribers.subscribe("orders", batch_size=2, start=at(replayed_from, rig))
    replayed.news()
    for frames in (follower.change_frames()[1:], replayed.change_frames()):
        assert [(len(frame.rows), frame.atomic, frame.more) for frame in frames] == [
            (2, True, True),
            (2, True, True),
            (1, True, False),
            (1, False, False),
        ]
        assert [frame.bookmark for frame in frames] == [1, 1, 6, 7]


def test_only_the_matches_of_an_atomic_request_are_sent(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", filter="/px = 1", batch_size=1)
    rig.run(Publish("orders", [px(1), px(2), px(1), px(3)], list("abcd"), atomic=True))
    assert [row[1] for row in follower.news()] == ["a", "c"]
    assert [(frame.more, frame.bookmark) for frame in follower.change_frames()] == [(True, 0), (False, 4)]


def test_frames_are_bounded_in_records_and_bytes(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", batch_size=3)
    large = subscribers.subscribe("orders")
    blob = b'{"blob":"' + b"x" * 400_000 + b'"}'
    rig.run(Publish("orders", [px(1)] * 7 + [blob] * 3, [str(number) for number in range(10)]))
    follower.news()
    large.news()
    assert [len(frame.rows) for frame in follower.change_frames()] == [3, 3, 3, 1]
    assert [frame.bookmark for frame in follower.change_frames()] == [3, 6, 9, 10]
    assert [len(frame.rows) for frame in large.change_frames()] == [9, 1]


def test_equal_subscribers_share_their_frames(rig: Rig, subscribers: Subscribers) -> None:
    one = subscribers.subscribe("orders", filter="/px>5")
    other = subscribers.subscribe("orders", filter="(/px) > 5")
    third = subscribers.subscribe("orders", filter="/px > 5", oof=True)
    assert subscribers.hub.dispatcher.group_count == 2
    rig.put("orders", "a", px(6))
    for follower in (one, other, third):
        follower.news()
    assert one.change_frames() == other.change_frames() != third.change_frames()


# --- progress and conflation -----------------------------------------------------------------------------------------


def test_progress_comes_when_nothing_was_sent_and_tells_how_far_it_is(rig: Rig, subscribers: Subscribers) -> None:
    """S5: its bookmark advances though nothing matched."""
    follower = subscribers.subscribe("orders", filter="/px > 5", progress=SECOND)
    rig.put("orders", "a", px(1))
    subscribers.settle()
    assert follower.pump() == []
    rig.time.tick(SECOND)
    assert follower.pump() == [Progress(1, rig.clock.now_micros())]
    rig.time.tick(SECOND - 1)
    assert follower.pump() == []
    rig.put("orders", "a", px(9))
    assert follower.news() == [("put", "a", px(9))]
    rig.time.tick(SECOND - 1)
    assert follower.pump() == []


def test_progress_comes_while_a_long_journal_is_read_in_which_nothing_matches(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5: a bookmark moves on at least every interval. It came only once the replay had caught up, so that who lost the
    connection before that had to begin again."""
    for number in range(40):
        rig.put("orders", "a", px(number))
    read = Replay.read

    def slowly(self: Replay, position: int, upto: int, accepted: Mapping[int, int]) -> Replayed | JournalGap:
        rig.time.tick(SECOND // 2)
        return read(self, position, upto, accepted)

    monkeypatch.setattr("sow_server.subscriptions.replay.READ_CHANGES", 5)
    monkeypatch.setattr(Replay, "read", slowly)
    follower = subscribers.subscribe("orders", filter="/px < 0", start=EARLIEST, progress=SECOND)
    assert [frame.sequence for frame in follower.frames if isinstance(frame, Progress)] == [0, 10, 20, 30, 40]


def test_conflation_sends_the_newest_of_each_key_once_per_interval(rig: Rig, subscribers: Subscribers) -> None:
    """S6."""
    follower = subscribers.subscribe("orders", oof=True, conflation=SECOND)
    rig.put("orders", "a", px(1))
    assert follower.news() == [("put", "a", px(1))]
    for number in (2, 3):
        rig.put("orders", "a", px(number))
        rig.put("orders", "b", px(number))
        assert follower.news() == []
    rig.put("orders", "c", px(1))
    rig.delete("orders", "c")
    rig.put("orders", "b", px(4))
    rig.time.tick(SECOND)
    assert follower.news() == [("put", "a", px(3)), ("put", "b", px(4))]
    assert follower.bookmark == 8
    rig.put("orders", "a", px(5))
    assert follower.news() == []
    rig.time.tick(SECOND)
    assert follower.news() == [("put", "a", px(5))]


@pytest.mark.parametrize("behind", [False, True])
def test_a_record_that_came_and_left_within_one_interval_is_not_reported_out_of_focus(
    rig: Rig, subscribers: Subscribers, behind: bool
) -> None:
    """S6: it was told out of focus, though the subscriber never had it. Live, and from the journal."""
    follower = subscribers.subscribe("orders", filter="/px > 5", oof=True, conflation=SECOND)
    rig.put("orders", "kept", px(6))
    assert follower.news() == [("put", "kept", px(6))]
    if behind:
        subscribers.hub.dispatcher.leave(follower.subscription)
        follower.subscription.detached(1)
    rig.put("orders", "kept", px(7))
    for key in ("deleted", "unmatched", "back"):
        rig.put("orders", key, px(6))
        rig.put("orders", key, px(7))
    rig.put("orders", "expired", px(6), ttl=SECOND // 2)
    rig.put("orders", "unmatched", px(1))
    for key in ("deleted", "back", "kept"):
        rig.delete("orders", key)
    rig.put("orders", "back", px(8))
    rig.time.tick(SECOND // 2)
    rig.store.sweep()
    assert follower.news() == []
    rig.time.tick(SECOND)
    assert follower.news() == [("oof deleted", "kept", px(7)), ("put", "back", px(8))]
    # Changes sent by now leave as they should, also when it comes back and goes again before the interval is over.
    rig.delete("orders", "back")
    rig.put("orders", "back", px(9))
    rig.put("orders", "back", px(2))
    rig.time.tick(SECOND)
    assert follower.news() == [("oof match", "back", px(2))]


@pytest.mark.parametrize("meanwhile", ["waits", "is emitted", "is there again"])
def test_a_conflated_record_that_fell_due_unsent_is_not_reported_out_of_focus(
    rig: Rig, subscribers: Subscribers, meanwhile: str
) -> None:
    """S6, J12: it is left out as it is due, so its expiry, which comes an interval later, concerns nobody."""
    follower = subscribers.subscribe("orders", oof=True, conflation=SECOND)
    rig.put("orders", "first", px(1))
    follower.news()
    rig.put("orders", "a", px(1), ttl=SECOND)
    if meanwhile == "waits":  # in the frames of an emission that nobody takes
        rig.time.tick(SECOND - 1)
        rig.put("orders", "b", px(1))
        subscribers.settle()
        follower.subscription._conflate(rig.clock.now_micros())
        follower.subscription._conflation._emitted_at = rig.time.elapsed_micros - SECOND  # type: ignore[union-attr]  # the subscription conflates
        follower.subscription._conflate(rig.clock.now_micros())
        rig.time.tick(1)
    else:
        rig.put("orders", "b", px(1))
        rig.time.tick(SECOND)
    assert follower.news() == [("put", "b", px(1))]
    if meanwhile == "is there again":
        rig.put("orders", "a", px(2), ttl=3 * SECOND)
        rig.time.tick(SECOND)
        assert follower.news() == [("put", "a", px(2))]
        rig.time.tick(2 * SECOND)
        rig.store.sweep()
        assert follower.news() == [("oof expired", "a", px(2))]
    else:
        rig.store.sweep()
        rig.time.tick(SECOND)
        assert follower.news() == []
    assert follower.subscription._conflation is not None
    assert not follower.subscription._conflation._unsent


def test_an_emission_of_conflated_messages_belongs_together(rig: Rig, subscribers: Subscribers) -> None:
    """A place to resume at lies behind all of it: in between, what a newer message of its key has hidden is missing."""
    follower = subscribers.subscribe("orders", conflation=SECOND, batch_size=2)
    rig.put("orders", "x", px(1))
    follower.news()
    rig.run(Publish("orders", [px(2)] * 5, list("abcde")))
    rig.time.tick(SECOND)
    follower.news()
    assert [(len(frame.rows), frame.more) for frame in follower.change_frames()[1:]] == [
        (2, True),
        (2, True),
        (1, False),
    ]
    assert follower.bookmark == 6


# --- where to start --------------------------------------------------------------------------------------------------


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
        assert follower.frames[0] == Progress(position, rig.clock.now_micros())
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
    """J1: the floor of a new topic is the sequence at its creation."""
    rig.put("orders", "a", px(1))
    rig.delete_topic("orders")
    rig.create_topic("orders", JSON)
    error = refused(subscribers.subscribe, "orders", start=at(0, rig))
    assert error.reason is Reason.BOOKMARK_TOO_OLD
    assert subscribers.subscribe("orders", start=at(1, rig)).error is None


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
    writer = rig.store.writer
    reserve = writer._reserve
    followers: list[Follower] = []

    def subscribe_then_reserve(draft: Draft) -> None:
        """Between staging and writing."""
        if not followers:
            followers.append(subscribers.subscribe("quiet", sow=True, settled=False))
        reserve(draft)

    monkeypatch.setattr(writer, "_reserve", subscribe_then_reserve)
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
    """Of a topic without a journal it begins later than the subscription. What went wrong then was logged as that of an
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


# --- slow consumers --------------------------------------------------------------------------------------------------


def fill(subscribers: Subscribers, count: int, begin: int = 0) -> list[tuple[str, str, bytes]]:
    """Publishes records, each of which is dispatched before the next one comes."""
    for number in range(begin, begin + count):
        subscribers.rig.put("orders", str(number), px(number))
        subscribers.settle()
    return [("put", str(number), px(number)) for number in range(begin, begin + count)]


def behind(follower: Follower) -> bool:
    """Whether it is served from the journal."""
    return follower.subscription.behind


def test_a_slow_subscriber_is_served_from_the_journal_and_returns(rig: Rig) -> None:
    """S6: memory is bounded, nothing is missed, nothing comes twice."""
    subscribers = Subscribers(rig, queue_bytes_max=2000)
    follower = subscribers.subscribe("orders")
    wanted = fill(subscribers, 50)
    subscribers.settle()
    assert behind(follower)
    assert follower.subscription.queued_bytes <= 2000
    assert follower.news() == wanted
    assert not behind(follower)
    assert follower.news() == []
    more = fill(subscribers, 3, 50)
    assert follower.news() == more
    assert follower.subscription.queued_bytes == 0


def test_a_consumer_that_is_slow_again_while_it_catches_up_misses_nothing(rig: Rig) -> None:
    subscribers = Subscribers(rig, queue_bytes_max=1500)
    follower = subscribers.subscribe("orders", batch_size=2)
    wanted = fill(subscribers, 20)
    got: list[tuple[str, str, bytes]] = []
    begin = 20
    for _ in range(12):
        subscribers.settle()
        follower.pump(frames_max=3)
        wanted += fill(subscribers, 5, begin)
        begin += 5
    got += follower.news()
    assert got == wanted


def test_an_overflow_during_the_snapshot_goes_on_from_the_journal(rig: Rig) -> None:
    subscribers = Subscribers(rig, queue_bytes_max=1500)
    fill(subscribers, 4)
    follower = subscribers.subscribe("orders", sow=True, batch_size=1, settled=False)
    subscribers.settle()
    follower.pump(frames_max=2)
    wanted = fill(subscribers, 30, 4)
    subscribers.settle()
    assert behind(follower)
    assert follower.news() == wanted
    assert len(follower.snapshot()) == 4


def test_behind_the_journal_the_stream_ends(rig: Rig) -> None:
    """S6."""
    subscribers = Subscribers(rig, queue_bytes_max=1500)
    follower = subscribers.subscribe("orders")
    wanted = fill(subscribers, 30)
    subscribers.settle()
    rig.time.tick(20 * MINUTE)
    rig.prune()
    got = follower.news()
    assert got == wanted[: len(got)] != []
    assert follower.error is not None
    assert follower.error.reason is Reason.RESYNC_REQUIRED
    assert follower.error.details == {"earliest_sequence": "31"}
    assert subscribers.hub.resyncs_total == 1
    assert subscribers.hub.count == 0


def test_without_a_journal_an_overflow_ends_the_stream(rig: Rig) -> None:
    subscribers = Subscribers(rig, queue_bytes_max=1500)
    rig.create_topic("quiet", JSON, journal=False)
    follower = subscribers.subscribe("quiet")
    for number in range(20):
        rig.put("quiet", str(number), px(number))
        subscribers.settle()
    got = follower.news()
    assert [key for _, key, _ in got] == [str(number) for number in range(len(got))] != []
    assert follower.error is not None
    assert follower.error.reason is Reason.RESYNC_REQUIRED


def test_a_stopped_consumer_does_not_touch_the_others(rig: Rig) -> None:
    subscribers = Subscribers(rig, queue_bytes_max=1500)
    stopped = subscribers.subscribe("orders")
    follower = subscribers.subscribe("orders")
    wanted: list[tuple[str, str, bytes]] = []
    for number in range(30):
        wanted += fill(subscribers, 1, number)
        assert follower.news() == wanted[-1:]
    assert behind(stopped)
    assert not behind(follower)
    assert stopped.news() == wanted


def test_a_conflating_subscriber_is_bounded_by_its_keys(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sow_server.subscriptions.replay.FRAME_BYTES", 1500)
    subscribers = Subscribers(rig, queue_bytes_max=3000)
    follower = subscribers.subscribe("orders", conflation=SECOND)
    fill(subscribers, 1)
    follower.news()
    for number in range(100):
        rig.put("orders", "a", px(number))
    subscribers.settle()
    assert not behind(follower)
    wanted = fill(subscribers, 40, 1)
    subscribers.settle()
    assert behind(follower)
    got: dict[str, bytes] = {}
    for _ in range(20):
        rig.time.tick(SECOND)
        got |= {key: payload for _, key, payload in follower.news()}
        assert follower.subscription.queued_bytes <= 2 * 3000
    assert got == {"a": px(99)} | {key: payload for _, key, payload in wanted}
    assert not behind(follower)


def test_a_conflating_subscriber_that_catches_up_is_not_stopped_by_one_large_commit(rig: Rig) -> None:
    """It waited for room that only it could have made: nothing was conflated, so nothing was ever emitted, and what had
    come live stayed in the queue until somebody published again."""
    subscribers = Subscribers(rig, queue_bytes_max=2000)
    rig.run(Publish("orders", [px(1)], ["a"], durability=Durability.BUFFERED))
    follower = subscribers.subscribe("orders", start=EARLIEST, conflation=SECOND, settled=False)
    follower.pump()  # it attaches behind what is not yet durable
    keys = [str(number) for number in range(20)]
    rig.run(Publish("orders", [px(2)] * 20, keys))
    assert follower.news() == [("put", "a", px(1))]
    rig.time.tick(SECOND)
    assert follower.news() == [("put", key, px(2)) for key in keys]
    assert not behind(follower)


def test_a_backlog_that_grows_too_large_is_served_from_the_journal(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dispatch [5]: filters that cannot keep up with the publishers cost bounded memory."""
    for name, value in (("BACKLOG_BYTES_MAX", 2000), ("SLICE_CHANGES", 1), ("BLOCK_CHANGES", 1)):
        monkeypatch.setattr(f"sow_server.subscriptions.dispatch.{name}", value)
    follower = subscribers.subscribe("orders", oof=True)
    late = None
    wanted = []
    for number in range(0, 60, 2):  # a slice takes half of what comes
        rig.run(Publish("orders", [px(number), px(number + 1)], [str(number), str(number + 1)]))
        wanted += [("put", str(each), px(each)) for each in (number, number + 1)]
        if number == 14:
            late = subscribers.subscribe("orders", settled=False)
    assert follower.news() == wanted
    assert subscribers.hub.dispatcher.dropped_total > 0
    assert late is not None
    assert late.news() == wanted[16:]


# --- several topics --------------------------------------------------------------------------------------------------


def test_a_pattern_follows_topics_in_one_order_and_new_ones_too(rig: Rig, subscribers: Subscribers) -> None:
    rig.create_topic("orders.b", JSON)
    rig.create_topic("other", JSON)
    rig.put("orders", "s", px(1))
    rig.put("orders.b", "s", px(2))
    follower = subscribers.subscribe(pattern=r"orders.*", sow=True, oof=True)
    rig.run_together(
        [
            Publish("orders", [px(1)], ["a"]),
            Publish("other", [px(1)], ["a"]),
            Publish("orders.b", [px(2)], ["a"]),
            Publish("orders", [px(3)], ["b"]),
        ]
    )
    rig.create_topic("orders.c", JSON, journal=False)
    rig.put("orders.c", "a", px(4))
    rig.delete("orders.c", "a")
    assert follower.news() == [
        ("put", "a", px(1)),
        ("put", "a", px(2)),
        ("put", "b", px(3)),
        ("put", "a", px(4)),
        ("oof deleted", "a", px(4)),
    ]
    frames = [(frame.topic, len(frame.rows)) for frame in follower.change_frames()]
    assert frames == [("orders", 1), ("orders.b", 1), ("orders", 1), ("orders.c", 1), ("orders.c", 1)]
    assert [row.sequence for row in follower.changes()] == [3, 5, 6, 7, 8]


def test_a_pattern_resumes_in_the_total_order(rig: Rig, subscribers: Subscribers) -> None:
    """J1, and a topic that was created since is told from its beginning."""
    rig.create_topic("orders.b", JSON)
    live = subscribers.subscribe(pattern=r"orders.*", oof=True)
    start = rig.store.writer.last_sequence
    for number in range(5):
        rig.run_together([Publish("orders", [px(number)], ["a"]), Publish("orders.b", [px(number)], ["a"])])
    rig.create_topic("orders.c", JSON)
    rig.run_together([Delete("orders", ["a"]), Publish("orders.c", [px(7)], ["a"])])
    wanted = live.news()
    assert len(wanted) == 12
    replayed = subscribers.subscribe(pattern=r"orders.*", oof=True, start=at(start, rig))
    assert replayed.news() == wanted
    assert [row.sequence for row in replayed.changes()] == [row.sequence for row in live.changes()]
    assert subscribers.subscribe(pattern=r"orders.*", oof=True, start=EARLIEST).news() == wanted


def test_a_pattern_must_match_whole_names_and_something(rig: Rig, subscribers: Subscribers) -> None:
    assert refused(subscribers.subscribe, pattern="order").reason is Reason.PATTERN_MATCHES_NOTHING
    for bad in ("(", "a)|(orders", "x" * 1001):
        error = refused(subscribers.subscribe, pattern=bad)
        assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "topic_pattern")


def test_a_deleted_topic_ends_its_subscription_after_its_earlier_changes(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders")
    rig.create_topic("orders.b", JSON)
    several = subscribers.subscribe(pattern="orders.*")
    rig.put("orders", "a", px(1))
    rig.delete_topic("orders")
    rig.create_topic("orders", JSON)
    rig.put("orders", "b", px(2))
    assert follower.news() == [("put", "a", px(1))]
    assert follower.error is not None
    assert follower.error.reason is Reason.TOPIC_DELETED
    assert several.news() == [("put", "a", px(1)), ("put", "b", px(2))]
    assert several.error is None


def test_deleting_a_topic_during_a_subscribe_call_ends_the_call_with_an_error(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread may delete it between the look-up and the registration: of a topic that was not there any
    more nobody was registered, and the subscription stood for ever without a word."""
    dispatcher = subscribers.hub.dispatcher
    register = dispatcher.register

    def too_late(member: Member) -> bool:
        rig.delete_topic("orders")
        return register(member)

    monkeypatch.setattr(dispatcher, "register", too_late)
    assert refused(subscribers.subscribe, "orders").reason is Reason.TOPIC_DELETED
    assert subscribers.hub.count == 0


def test_a_topic_that_is_changed_while_somebody_subscribes_is_looked_at_anew(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise: it failed when its turn to attach came, and with it the dispatching of everything else."""
    dispatcher = subscribers.hub.dispatcher
    register = dispatcher.register

    def too_late(member: Member) -> bool:
        rig.alter_topic("orders", message_type=MessageType.BINARY)
        return register(member)

    monkeypatch.setattr(dispatcher, "register", too_late)
    error = refused(subscribers.subscribe, "orders", filter="/px > 1", start=EARLIEST)
    assert error.reason is Reason.UNSUPPORTED_FOR_MESSAGE_TYPE
    assert subscribers.hub.count == 0


def test_a_topic_of_another_kind_does_not_come_into_a_pattern(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe(pattern="orders.*", filter="/px > 0", sow=True)
    rig.create_topic("orders.blobs", TopicSettings(message_type=MessageType.BINARY))
    rig.put("orders.blobs", "a", b"\0")
    rig.put("orders", "a", px(1))
    assert follower.news() == [("put", "a", px(1))]
    error = refused(subscribers.subscribe, pattern="orders.*", filter="/px > 0")
    assert error.reason is Reason.UNSUPPORTED_FOR_MESSAGE_TYPE


def test_a_topic_that_gets_other_key_fields_has_to_be_subscribed_to_anew(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", filter="/px > 1")
    rig.alter_topic("orders", key=("/id",))
    follower.news()
    assert follower.error is not None
    assert follower.error.reason is Reason.RESYNC_REQUIRED


def test_switching_the_journal_off_leaves_live_subscribers_alone(rig: Rig, subscribers: Subscribers) -> None:
    follower = subscribers.subscribe("orders", oof=True)
    rig.put("orders", "a", px(1))
    rig.alter_topic("orders", journal=False)
    rig.put("orders", "a", px(2))
    rig.alter_topic("orders", journal=True)
    rig.delete("orders", "a")
    assert follower.news() == [("put", "a", px(1)), ("put", "a", px(2)), ("oof deleted", "a", px(2))]


# --- options, bounds, the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "other"),
    [
        ({}, "topic", "topic_pattern"),
        ({"topic": "orders", "pattern": "orders"}, "topic", "topic_pattern"),
        ({"topic": "orders", "sow": True, "start": EARLIEST}, "sow", "earliest"),
        ({"topic": "orders", "sow": True, "start": Start(StartKind.TIME)}, "sow", "start_time_micros"),
        ({"topic": "orders", "sow": True, "start": Start(StartKind.BOOKMARK)}, "sow", "bookmark"),
        ({"topic": "orders", "changes": True, "oof": True}, "changes", "oof"),
        ({"topic": "orders", "changes": True, "delta": True}, "changes", "delta"),
        ({"topic": "orders", "changes": True, "conflation": 5}, "changes", "conflation_micros"),
        ({"topic": "orders", "delta": True, "conflation": 5}, "delta", "conflation_micros"),
        ({"topic": "orders", "delta": True, "include": ["/px"]}, "delta", "select"),
        ({"topic": "orders", "empty_deltas": True}, "empty_deltas", "delta"),
        ({"topic": "orders", "conflation": -1}, "conflation_micros", "0"),
        ({"topic": "orders", "progress": 99_999}, "progress_micros", "100000"),
        ({"topic": "orders", "batch_size": 10_001}, "batch_size", "10000"),
        ({"topic": "orders", "start": Start(StartKind.TIME, time_micros=-1)}, "start_time_micros", "negative"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    subscribers: Subscribers, options: dict[str, object], field: str, other: str
) -> None:
    error = refused(subscribers.subscribe, **options)
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, field)
    assert other in error.message


def test_filters_are_checked(rig: Rig, subscribers: Subscribers) -> None:
    rig.create_topic("blobs")
    assert refused(subscribers.subscribe, "orders", filter="/px >").reason is Reason.FILTER_INVALID
    error = refused(subscribers.subscribe, "orders", filter="@expire_time > NOW_MICROS()")
    assert error.reason is Reason.FILTER_INVALID
    unsupported = Reason.UNSUPPORTED_FOR_MESSAGE_TYPE
    assert refused(subscribers.subscribe, "blobs", filter="/px > 1").reason is unsupported
    assert refused(subscribers.subscribe, "blobs", delta=True).reason is unsupported
    assert refused(subscribers.subscribe, "blobs", include=["/px"]).reason is unsupported
    assert subscribers.subscribe("blobs", filter="@key = 'a'").error is None
    assert refused(subscribers.subscribe, "nothing").reason is Reason.TOPIC_NOT_FOUND
    assert subscribers.hub.count == 1
    assert (rig.topic("orders").followers, rig.topic("blobs").followers) == (0, 1)


def test_subscriptions_are_bounded(rig: Rig) -> None:
    subscribers = Subscribers(rig, subscriptions_max=2)
    first = subscribers.subscribe("orders")
    subscribers.subscribe("orders")
    assert refused(subscribers.subscribe, "orders").reason is Reason.OVERLOADED
    first.close()
    assert subscribers.subscribe("orders").error is None


def test_a_stop_ends_every_stream_with_a_bookmark(rig: Rig, subscribers: Subscribers) -> None:
    followers = [subscribers.subscribe("orders", sow=sow) for sow in (False, True)]
    rig.put("orders", "a", px(1))
    for follower in followers:
        follower.news()
    subscribers.hub.stop()
    for follower in followers:
        follower.pump()
        assert follower.frames[-1] == Progress(1, rig.clock.now_micros())
        assert follower.error is not None
        assert follower.error.reason is Reason.STOPPING
    assert refused(subscribers.subscribe, "orders").reason is Reason.STOPPING


def test_a_subscriber_that_leaves_leaves_no_state_behind(rig: Rig, subscribers: Subscribers) -> None:
    followers: list[Follower] = [
        subscribers.subscribe("orders", filter="/px = 5", oof=True),
        subscribers.subscribe("orders", filter="/px > 5", delta=True),
        subscribers.subscribe(pattern="o.*", sow=True),
        subscribers.subscribe("orders", start=at(0, rig), settled=False),
        subscribers.subscribe("orders", sow=True, settled=False),
    ]
    rig.put("orders", "a", px(5))
    for follower in followers:
        follower.close()
    dispatcher = subscribers.hub.dispatcher
    assert (subscribers.hub.count, dispatcher.group_count, dispatcher._topics, dispatcher._several) == (0, 0, {}, ())
    assert (rig.topic("orders").followers, rig.topic("orders").previous_wanted) == (0, 0)
    rig.create_topic("others", JSON)
    assert rig.topic("others").followers == 0
    subscribers.settle()


def test_a_new_subscription_on_a_failed_store_gets_its_error(rig: Rig, subscribers: Subscribers) -> None:
    """X3: its first changes may never become durable."""
    rig.run(Publish("orders", [px(1)], ["a"], durability=Durability.BUFFERED))
    rig.store.writer.fail(StoreError(Reason.STORE_FAILED, "for the test"))
    follower = subscribers.subscribe("orders", sow=True, settled=False)
    follower.pump()
    assert follower.error is not None
    assert follower.error.reason is Reason.STORE_FAILED


def _ttl(micros: int) -> Lifetime:
    return Lifetime(LifetimeKind.TTL, micros)


def test_a_fault_while_giving_out_ends_the_subscriptions_and_later_ones_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dispatch [5]. An exception between two slices left the backlog where it was until the next commit, and
    those who follow waiting."""
    subscribers = Subscribers(rig)
    follower = subscribers.subscribe("orders")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(subscribers.hub.dispatcher, "_flush", broken)
        rig.put("orders", "a", b'{"px":1}')
        subscribers.settle()
    follower.pump()
    assert follower.error is not None
    assert follower.error.reason is Reason.INTERNAL
    later = subscribers.subscribe("orders")
    rig.put("orders", "b", b'{"px":2}')
    subscribers.settle()
    assert later.news() == [("put", "b", b'{"px":2}')]
