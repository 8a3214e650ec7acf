"""A subscriber gets each of its changes once, in order, and only after it is durable (rules S1 to S7, J12)."""

from __future__ import annotations

import pytest

from sow_server.engine.values.model import Durability, Expiration, Publish, TopicSettings
from sow_server.subscriptions.frames import Progress, SnapshotBegin, SnapshotEnd
from sow_server.subscriptions.live import slices
from tests.support.stores.stores import MINUTE, SECOND, Rig
from tests.support.stores.subscribers import JSON, Subscribers, at, px, rig, subscribers, ttl

__all__ = ["rig", "subscribers"]  # fixtures


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
    rig.run(Publish("quotes", [b'{"id":1,"bid":5}'], lifetime=ttl(SECOND)))
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
    rig.run_together([Publish("orders", [px(1)], ["a"], lifetime=ttl(SECOND)), Publish("orders", [px(2)], ["b"])])
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


def test_frames_are_bounded_in_records_and_bytes(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 3600.0)  # on a slow machine time would bound them, too
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
