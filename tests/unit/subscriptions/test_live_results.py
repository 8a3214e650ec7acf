"""Live results (rules S10 to S12): what is told and why, what is shared, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters import parse
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.query.sort_memory import SortMemory, SortRoom, SortShare
from sow_server.services.wire import result_convert
from sow_server.subscriptions.frames import ChangeFrame, Progress, Row, SnapshotBegin, SnapshotEnd
from sow_server.subscriptions.results import fed, window
from tests.support.stores.parts import reading_of
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import ResultFollower, Subscribers, px, refused, rig, subscribers

__all__ = ["rig", "subscribers"]  # fixtures

INTERVAL = SECOND // 10


def message(**fields: object) -> sow_pb2.SubscribeRequest:
    asked: dict[str, object] = {"topic": "orders", "sow": True, "order_by": "/px DESC", "top_n": 3, **fields}
    return sow_pb2.SubscribeRequest(**asked)  # type: ignore[arg-type]  # of many kinds


def follow(
    subscribers: Subscribers,
    restriction: Restriction = UNRESTRICTED,
    sorts: SortMemory | None = None,
    **fields: object,
) -> ResultFollower:
    rig = subscribers.rig
    request = message(**fields)
    result_convert.check_result(request)
    granted = Granted(rig.topic("orders"), restriction)
    follower = subscribers.follow(
        result_convert.asked_list(request, reading_of(rig.store), granted, sorts), batch_size=request.batch_size or 1000
    )
    hear(follower, subscribers)
    return follower


def hear(follower: ResultFollower, subscribers: Subscribers, micros: int = INTERVAL) -> list[str]:
    """Lets an interval pass; returns the keys of the list."""
    for _ in range(2):
        subscribers.settle()
        follower.pump()
        subscribers.rig.time.tick(micros)
    follower.pump()
    return [key for key, _ in follower.list()]


def put(rig: Rig, **prices: int) -> None:
    for key, price in prices.items():
        rig.put("orders", key, px(price))


def test_a_list_is_told_as_a_snapshot_and_then_by_differences(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, a=1, b=5, c=3, d=4)
    follower = follow(subscribers)
    assert [key for key, _ in follower.list()] == ["b", "d", "c"]
    begin, *_, end = follower.frames
    assert isinstance(begin, SnapshotBegin)
    assert isinstance(end, SnapshotEnd)
    assert begin.sequence == end.sequence
    put(rig, e=9)
    assert hear(follower, subscribers) == ["e", "b", "d"]
    (frame,) = follower.change_frames()
    assert [(row.op.name, row.key, row.payload) for row in frame.rows] == [("OOF", b"c", b""), ("PUT", b"e", px(9))]
    assert list(frame.positions) == [0, 0]
    put(rig, a=2)  # far behind
    hear(follower, subscribers)
    assert len(follower.change_frames()) == 1


@pytest.mark.parametrize("journal", [True, False])
def test_each_record_leaves_with_its_own_reason(rig: Rig, journal: bool) -> None:
    rig.alter_topic("orders", journal=journal)
    subscribers = Subscribers(rig)
    put(rig, a=1, b=2, c=3, d=4, e=5)
    rig.put("orders", "due", px(9), ttl=SECOND)
    follower = follow(subscribers, filter="/px > 0", top_n=4)
    rig.delete("orders", "e")
    hear(follower, subscribers)
    put(rig, d=0)
    hear(follower, subscribers)
    rig.time.tick(SECOND)
    rig.store.sweep()
    hear(follower, subscribers)
    put(rig, f=6, g=7)
    assert hear(follower, subscribers) == ["g", "f", "c", "b"]
    assert follower.reasons == [("e", "deleted"), ("d", "match"), ("due", "expired"), ("a", "window")]
    put(rig, g=0, h=8)  # it comes back, and goes for another reason
    hear(follower, subscribers)
    assert follower.reasons[-1] == ("g", "match")


def test_a_record_that_the_caller_may_not_see_any_more_leaves_without_content(
    rig: Rig, subscribers: Subscribers
) -> None:
    put(rig, a=5, b=6)
    follower = follow(subscribers, Restriction(rows=parse("/px < 7")))
    put(rig, b=8)
    assert hear(follower, subscribers) == ["a"]
    assert follower.reasons == [("b", "not_permitted")]
    (row,) = follower.changes()
    assert row.payload == b""


def test_a_record_that_leaves_the_list_by_its_time_is_told_once(rig: Rig, subscribers: Subscribers) -> None:
    """J12: it is due when the next difference is made, and not swept yet."""
    put(rig, a=1)
    rig.put("orders", "due", px(9), ttl=SECOND)
    follower = follow(subscribers)
    rig.time.tick(SECOND)
    put(rig, b=2)
    assert hear(follower, subscribers) == ["b", "a"]
    rig.store.sweep()
    assert hear(follower, subscribers) == ["b", "a"]
    assert follower.reasons == [("due", "expired")]
    rig.put("orders", "late", px(9), ttl=1)
    rig.time.tick(2)
    assert hear(follower, subscribers) == ["b", "a"]
    assert len(follower.change_frames()) == 1


def test_a_short_list_is_read_anew(rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "RESERVE_MIN", 1)
    for number in range(20):
        put(rig, **{f"k{number:02}": number})
    follower = follow(subscribers)
    rig.delete("orders", *[f"k{number}" for number in range(12, 20)])
    hear(follower, subscribers)
    assert hear(follower, subscribers) == ["k11", "k10", "k09"]
    assert subscribers.results.reads_total == {"first": 1, "short": 1}
    assert [reason for _, reason in follower.reasons] == ["deleted"] * 3


def test_rows_that_arrive_while_the_topic_is_read_are_applied_behind_its_cut(
    rig: Rig, subscribers: Subscribers
) -> None:
    """results/lists [1]: the cut is taken before the commits are told."""
    put(rig, a=1, b=2)
    follower = ResultFollower(
        subscribers,
        subscribers.results.follow(
            result_convert.asked_list(message(), reading_of(rig.store), Granted(rig.topic("orders"), UNRESTRICTED)),
            progress_micros=SECOND,
            batch_size=10,
        ),
    )
    subscribers.sync()
    put(rig, a=9)  # committed, and told only after the cut
    put(rig, a=1)
    subscribers.driven.run(steps_max=1)
    put(rig, b=7)
    assert hear(follower, subscribers) == ["b", "a"]
    assert follower.rows[1].payload == px(1)


def test_a_list_is_not_shown_ahead_of_its_position(rig: Rig, subscribers: Subscribers) -> None:
    """results/lists [2]: the cut shows a commit of which subscribers have not been told."""
    put(rig, a=1)
    granted = Granted(rig.topic("orders"), UNRESTRICTED)
    follower = subscribers.follow(result_convert.asked_list(message(), reading_of(rig.store), granted))
    subscribers.sync()
    subscribers.loop.run()
    put(rig, b=2)
    subscribers.driven.run()
    follower.pump()
    assert follower.frames == []
    assert hear(follower, subscribers) == ["b", "a"]
    assert follower.bookmark == rig.store.commits.last_sequence


def test_why_a_record_left_in_a_gap_is_not_told(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, a=1, b=2)
    follower = follow(subscribers)
    (feed,) = subscribers.hub.subscriptions()
    subscribers.hub.dispatcher.leave(feed)
    feed.end(StoreError(Reason.RESYNC_REQUIRED, "it fell behind"))
    rig.delete("orders", "b")
    subscribers.sync()
    subscribers.loop.run()
    assert hear(follower, subscribers) == ["a"]
    assert follower.reasons == [("b", "none")]
    assert subscribers.results.reads_total == {"first": 1, "gap": 1}


def test_a_list_that_loses_its_changes_again_and_again_ends(rig: Rig, subscribers: Subscribers) -> None:
    follower = follow(subscribers)
    for _ in range(fed.LOSSES_MAX + 1):
        (feed,) = subscribers.hub.subscriptions()
        feed.end(StoreError(Reason.RESYNC_REQUIRED, "it fell behind"))
        subscribers.driven.run(steps_max=1)
        subscribers.driven.run(steps_max=1)
    follower.pump()
    assert follower.error is not None
    assert follower.error.reason is Reason.RESYNC_REQUIRED


def test_equal_lists_share_one_window_and_their_frames(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, a=1, b=2)
    one, other = follow(subscribers), follow(subscribers)
    assert subscribers.hub.count == 1
    put(rig, c=3)
    subscribers.settle()
    rig.time.tick(INTERVAL)
    (first,), (second,) = one.pump(), other.pump()
    assert first is second
    follow(subscribers, top_n=2)
    assert subscribers.hub.count == 2
    one.close()
    assert subscribers.hub.count == 2
    other.close()
    assert subscribers.hub.count == 1


def test_callers_with_other_rights_share_nothing(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, a=1, b=2)
    follow(subscribers)
    rows = Restriction(rows=parse("/px < 2"))
    few = follow(subscribers, rows)
    follow(subscribers, Restriction(hidden=(("secret",),)))
    assert len(list(subscribers.results.sources())) == 3
    assert [key for key, _ in few.list()] == ["a"]
    follow(subscribers, rows)
    assert len(list(subscribers.results.sources())) == 3


def test_a_slow_follower_skips_the_lists_in_between(rig: Rig, subscribers: Subscribers) -> None:
    """results/follower [1]."""
    put(rig, a=1)
    slow, fast = follow(subscribers), follow(subscribers)
    for number in range(2, 30):
        put(rig, **{f"k{number:02}": number})
        hear(fast, subscribers)
    assert len(fast.change_frames()) > 20
    assert [key for key, _ in slow.list()] == ["a"]
    assert slow.result.queued_bytes == 0
    assert hear(slow, subscribers) == ["k29", "k28", "k27"]
    assert len(slow.change_frames()) == 1
    assert slow.reasons == [("a", "window")]


def test_a_difference_of_several_frames_has_one_bookmark(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, a=1, b=2, c=3)
    follower = follow(subscribers, batch_size=1)
    put(rig, d=4, e=5, f=6)
    assert hear(follower, subscribers) == ["f", "e", "d"]
    frames = follower.change_frames()
    assert [frame.more for frame in frames] == [True] * 5 + [False]
    assert len({frame.bookmark for frame in frames[:-1]}) == 1


def test_progress_tells_up_to_where_the_list_is_right(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, a=1)
    follower = follow(subscribers, progress_micros=SECOND)
    rig.create_topic("other")
    rig.put("other", "x", px(1))
    subscribers.settle()
    rig.time.tick(5 * SECOND)
    last = follower.pump()[-1]
    assert isinstance(last, Progress)
    assert (last.sequence, last.behind) == (rig.store.commits.last_sequence, False)


def test_at_most_one_difference_comes_in_an_interval(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, a=1)
    follower = follow(subscribers, conflation_micros=SECOND)
    for number in range(2, 12):
        put(rig, **{f"k{number:02}": number})
        subscribers.settle()
        follower.pump()
        rig.time.tick(SECOND // 10)
    hear(follower, subscribers, SECOND)
    assert 1 <= len(follower.change_frames()) <= 2
    assert all(isinstance(frame, ChangeFrame) for frame in follower.change_frames())


REFUSED: Mapping[str, tuple[dict[str, object], str]] = {
    "no sow": ({"sow": False}, "order_by"),
    "a pattern": ({"topic": "", "topic_pattern": ".*"}, "order_by"),
    "changes": ({"changes": True}, "order_by"),
    "delta": ({"delta": True}, "order_by"),
    "a durable": ({"durable": {"name": "d"}}, "order_by"),
    "a bookmark": ({"bookmark": "0123456789ab.1"}, "order_by"),
    "a time": ({"start_time_micros": 1}, "order_by"),
    "held": ({"held": {}}, "order_by"),
    "a view": ({"view": b"x"}, "order_by"),
    "snapshot_max": ({"snapshot_max": 1}, "order_by"),
    "no top_n": ({"top_n": 0}, "top_n"),
    "too many": ({"top_n": 9_000, "skip_n": 1_001}, "top_n"),
    "no order": ({"order_by": ""}, "top_n"),
    "no order to skip in": ({"order_by": "", "top_n": 0, "skip_n": 1}, "skip_n"),
    "a bad order": ({"order_by": "px"}, "order_by"),
    "a bad filter": ({"filter": "("}, "filter"),
    "the time": ({"filter": "@expire_time < NOW_MICROS()"}, "filter"),
    "progress": ({"progress_micros": 1}, "progress_micros"),
    "conflation": ({"conflation_micros": -1}, "conflation_micros"),
    "a frame": ({"batch_size": 10_001}, "batch_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_a_live_result_is_refused(rig: Rig, subscribers: Subscribers, case: str) -> None:
    fields, field = REFUSED[case]
    assert refused(follow, subscribers, **fields).field == field
    assert not list(subscribers.results.sources())


def test_a_list_that_takes_too_much_memory_is_refused(rig: Rig) -> None:
    subscribers = Subscribers(rig, result_bytes_max=1_000)
    put(rig, a=1)
    follower = follow(subscribers)
    for number in range(4):
        rig.put("orders", f"k{number}", b'{"px":9,"text":"%s"}' % (b"x" * 300))
    hear(follower, subscribers)
    assert follower.error is not None
    assert (follower.error.reason, follower.error.field) == (Reason.RESULT_TOO_LARGE, "top_n")
    follower.close()
    assert not list(subscribers.results.sources())


def test_a_topic_that_is_deleted_ends_its_lists(rig: Rig, subscribers: Subscribers) -> None:
    follower = follow(subscribers)
    rig.delete_topic("orders")
    hear(follower, subscribers)
    assert follower.error is not None
    assert follower.error.reason is Reason.TOPIC_DELETED


def test_live_results_count_among_the_subscriptions(rig: Rig) -> None:
    subscribers = Subscribers(rig, subscriptions_max=2)
    follow(subscribers)
    assert refused(follow, subscribers).reason is Reason.OVERLOADED


# -- a list that cannot be shown now ----------------------------------------------------------------------------------


def emptied(rig: Rig, subscribers: Subscribers) -> None:
    """So many records have left that the list has to be read anew; nobody has looked yet."""
    rig.delete("orders", *[f"k{number:02}" for number in range(12, 20)])
    subscribers.sync()
    subscribers.loop.run()
    subscribers.driven.run()


@pytest.fixture
def small(rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch) -> Subscribers:
    """A topic of 20 records, and little in reserve."""
    monkeypatch.setattr(window, "RESERVE_MIN", 1)
    put(rig, **{f"k{number:02}": number for number in range(20)})
    return subscribers


def test_the_position_never_goes_back(rig: Rig, small: Subscribers) -> None:
    """A list that is read anew was told as of the last one shown, which was right at later positions, too."""
    follower = follow(small, progress_micros=SECOND // 10)
    rig.create_topic("other")
    rig.put("other", "x", px(1))
    small.settle()
    rig.time.tick(5 * SECOND)
    follower.pump()
    assert follower.bookmark == rig.store.commits.last_sequence
    emptied(rig, small)
    for _ in range(3):
        rig.time.tick(5 * SECOND)
        follower.pump()
    hear(follower, small)
    told = [frame.sequence for frame in follower.frames if isinstance(frame, Progress)]
    assert len(told) > 2
    assert told == sorted(told)
    assert hear(follower, small) == ["k11", "k10", "k09"]


def test_a_slow_follower_is_not_told_a_record_that_has_fallen_due_since(rig: Rig, small: Subscribers) -> None:
    """J12: the list was made while the record lived, and cannot be made anew now."""
    slow, fast = follow(small), follow(small)
    rig.put("orders", "due", px(99), ttl=SECOND)
    assert hear(fast, small)[0] == "due"
    rig.time.tick(SECOND)
    emptied(rig, small)
    rig.time.tick(SECOND)
    fast.pump()  # begins to read the topic
    slow.pump()
    late = follow_now(small)
    late.pump()
    keys = {row.key for one in (slow, late) for row in [*one.changes(), *one.rows]}
    assert b"due" not in keys
    for one in (slow, late):
        assert hear(one, small) == ["k11", "k10", "k09"]


def follow_now(subscribers: Subscribers) -> ResultFollower:
    """A follower that comes now, before anything else happens."""
    reading = reading_of(subscribers.rig.store)
    granted = Granted(subscribers.rig.topic("orders"), UNRESTRICTED)
    return subscribers.follow(result_convert.asked_list(message(), reading, granted))


def test_a_list_that_may_not_be_read_anew_yet_is_behind(rig: Rig, small: Subscribers) -> None:
    """S12: reading takes at most half of the time."""
    follower = follow(small)
    (source,) = small.results.sources()
    source._reads_from = rig.time.elapsed_micros + 10 * SECOND  # type: ignore[attr-defined]  # after a long reading
    emptied(rig, small)
    rig.time.tick(SECOND)
    follower.pump()
    rig.time.tick(6 * SECOND)
    last = follower.pump()[-1]
    assert isinstance(last, Progress)
    assert last.behind
    rig.time.tick(4 * SECOND)
    assert hear(follower, small) == ["k11", "k10", "k09"]
    assert not follower.result.behind


# -- the memory of a reading ------------------------------------------------------------------------------------------


def test_a_list_is_read_in_the_memory_that_ordered_queries_share(rig: Rig, subscribers: Subscribers) -> None:
    """Q2: each list in memory of its own would let one caller take that of the server."""
    put(rig, **{f"k{number:02}": number for number in range(20)})
    sorts = SortMemory(10_000)
    other = SortShare(sorts, "another")
    assert other.hold(9_000) is SortRoom.GRANTED
    follower = follow(subscribers, sorts=sorts)
    assert follower.frames == []
    assert sorts.waiting == 1
    other.close()
    assert hear(follower, subscribers) == ["k19", "k18", "k17"]
    assert sorts.held_bytes == 0
    held = SortShare(sorts, "another")
    assert held.hold(9_000) is SortRoom.GRANTED
    waiting = follow(subscribers, sorts=sorts, top_n=4)
    assert sorts.waiting == 1
    waiting.close()
    assert (sorts.waiting, sorts.held_bytes) == (0, 9_000)


def test_a_reading_ends_where_its_records_fill_the_memory_of_the_list(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_convert, "READ_RECORDS", 2)
    subscribers = Subscribers(rig, result_bytes_max=5_000)
    for number in range(40):
        rig.put("orders", f"k{number:02}", b'{"px":%d,"text":"%s"}' % (number, b"x" * 600))
    follower = follow_now(subscribers)
    subscribers.sync()
    subscribers.loop.run()
    sizes = []
    for _ in range(60):
        subscribers.driven.run(steps_max=1)
        sizes.append(next(subscribers.results.sources()).size)
    assert max(sizes) < 5_000 + 2 * 1_000
    assert hear(follower, subscribers) == ["k39", "k38", "k37"]
    assert subscribers.results.reads_total == {"first": 1}
    rig.delete("orders", "k39")
    hear(follower, subscribers)
    assert hear(follower, subscribers) == ["k38", "k37", "k36"]


@pytest.mark.parametrize(("lists", "part"), [(1, 0.1), (10, 0.5)])
def test_lists_take_a_part_of_the_event_loop_whatever_their_conflation_is(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch, lists: int, part: float
) -> None:
    """results/source [4]: a list of 10,000 records took 12 ms for each change, as often as there were changes."""
    shown, took = window.Window.shown, 0

    def slow(self: window.Window, now_micros: int) -> list[Row] | None:
        nonlocal took
        took += SECOND // 100
        rig.time.tick(SECOND // 100)
        return shown(self, now_micros)

    followers = [follow(subscribers, conflation_micros=1, top_n=number + 1) for number in range(lists)]
    monkeypatch.setattr(window.Window, "shown", slow)
    began = rig.time.elapsed_micros
    for number in range(200):
        put(rig, a=number)
        subscribers.settle()
        for follower in followers:
            follower.pump()
        rig.time.tick(SECOND // 100)
    assert took <= part * (rig.time.elapsed_micros - began) + lists * SECOND // 100
    assert took >= 10 * SECOND // 100
    for follower in followers:
        hear(follower, subscribers, 10 * SECOND)
        assert follower.rows[0].payload == px(199)


def test_who_asks_for_a_list_that_is_kept_finds_what_was_published_before(rig: Rig, subscribers: Subscribers) -> None:
    """Its first follower found it, and another one was told the list of before."""
    put(rig, a=1, b=2)
    follow(subscribers)
    rig.create_topic("other")
    put(rig, c=3)
    rig.put("other", "x", px(1))
    subscribers.sync()  # it is on disk, and the list has not heard of it
    late = follow_now(subscribers)
    assert late.pump() == []
    subscribers.settle()
    rig.time.tick(SECOND)
    late.pump()
    assert [key for key, _ in late.list()] == ["c", "b", "a"]
    assert late.change_frames() == []
