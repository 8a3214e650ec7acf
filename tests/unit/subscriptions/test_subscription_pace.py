"""Subscribers that get progress, that conflate, or that are slower than the changes (S5 to S7)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import NEVER, Durability, Publish
from sow_server.subscriptions.frames import ChangeFrame, ChangeOp, ChangeReason, Progress, Row, frames_of
from sow_server.subscriptions.journal.replay import JournalGap, Replay, Replayed
from sow_server.subscriptions.live.conflation import Conflation, Form
from sow_server.subscriptions.live.outbox import Outbox
from tests.support.stores.stores import MINUTE, SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, JSON, Subscribers, behind, px, rig, subscribers

__all__ = ["rig", "subscribers"]  # fixtures


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
    connection before that had to begin again. The last one tells that it has caught up."""
    for number in range(40):
        rig.put("orders", "a", px(number))
    read = Replay.read

    def slowly(self: Replay, position: int, upto: int, accepted: Mapping[int, int]) -> Replayed | JournalGap:
        rig.time.tick(SECOND // 2)
        return read(self, position, upto, accepted)

    monkeypatch.setattr("sow_server.subscriptions.journal.replay.READ_CHANGES", 5)
    monkeypatch.setattr(Replay, "read", slowly)
    follower = subscribers.subscribe("orders", filter="/px < 0", start=EARLIEST, progress=SECOND)
    assert [frame.sequence for frame in follower.frames if isinstance(frame, Progress)] == [0, 10, 20, 30, 40, 40]


@pytest.mark.parametrize("filter_", ["", "/px >= 0"])
def test_a_long_journal_is_read_chunk_by_chunk(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch, filter_: str
) -> None:
    """S1: every change once and in order. A step ends before a chunk that it would take in part: the next one would
    decode it again. A filter is judged as far as the step goes."""
    for first in (0, 3, 6, 13):
        numbers = range(first, first + (7 if first == 6 else 3))
        rig.run(Publish("orders", [px(number) for number in numbers], [f"{number}" for number in numbers]))
    monkeypatch.setattr("sow_server.subscriptions.journal.replay.READ_CHANGES", 4)
    follower = subscribers.subscribe("orders", filter=filter_, start=EARLIEST)
    frames = [[row.sequence for row in frame.rows] for frame in follower.frames if isinstance(frame, ChangeFrame)]
    if filter_:
        assert frames == [[*range(first, first + 4)] for first in (1, 5, 9, 13)]
    else:
        assert frames == [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12, 13], [14, 15, 16]]


def test_conflation_sends_the_newest_of_each_key_once_per_interval(rig: Rig, subscribers: Subscribers) -> None:
    """S6."""
    follower = subscribers.subscribe("orders", oof=True, conflation=SECOND)
    rig.put("orders", "a", px(1))
    assert follower.news() == []
    rig.time.tick(SECOND)
    assert follower.news() == [("put", "a", px(1))]
    for number in (2, 3):
        rig.put("orders", "a", px(number))
        rig.put("orders", "b", px(number))
        assert follower.news() == []
    rig.put("orders", "c", px(1))
    rig.delete("orders", "c")
    rig.put("orders", "b", px(4))
    subscribers.settle()
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
    subscribers.settle()
    rig.time.tick(SECOND)
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
    subscribers.settle()
    rig.time.tick(SECOND)
    assert follower.news() == [("oof match", "back", px(2))]


@pytest.mark.parametrize("meanwhile", ["waits", "is emitted", "is there again"])
def test_a_conflated_record_that_fell_due_unsent_is_not_reported_out_of_focus(
    rig: Rig, subscribers: Subscribers, meanwhile: str
) -> None:
    """S6, J12: it is left out as it is due, so its expiry, which comes an interval later, concerns nobody."""
    follower = subscribers.subscribe("orders", oof=True, conflation=SECOND)
    rig.put("orders", "a", px(1), ttl=SECOND)
    if meanwhile == "waits":  # in the frames of an emission that nobody takes
        subscribers.settle()
        conflation = follower.subscription._conflation
        assert conflation is not None
        emission = conflation.take(position=0, now_micros=rig.clock.now_micros())
        follower.subscription._emission = emission
        assert follower.subscription._emitted()
    rig.put("orders", "b", px(1))
    subscribers.settle()
    rig.time.tick(SECOND)
    assert follower.news() == [("put", "b", px(1))]
    if meanwhile == "is there again":
        rig.put("orders", "a", px(2), ttl=3 * SECOND)
        subscribers.settle()
        rig.time.tick(SECOND)
        assert follower.news() == [("put", "a", px(2))]
        rig.time.tick(2 * SECOND)
        rig.store.sweep()
        subscribers.settle()
        rig.time.tick(SECOND)
        assert follower.news() == [("oof expired", "a", px(2))]
    else:
        rig.store.sweep()
        rig.time.tick(SECOND)
        assert follower.news() == []
    assert follower.subscription._conflation is not None
    assert not follower.subscription._conflation._unsent


@pytest.mark.parametrize("then", ["put", "deleted", "both"])
def test_a_slow_reader_is_told_what_follows_a_record_that_fell_due_unsent(
    rig: Rig, subscribers: Subscribers, then: str
) -> None:
    """S6: a record is left out of the frames that wait for it. What came then waits in two intervals."""
    follower = subscribers.subscribe("orders", oof=True, conflation=SECOND, batch_size=1)
    rig.put("orders", "first", px(1))
    rig.put("orders", "a", px(1), ttl=3 * SECOND)
    subscribers.settle()
    rig.time.tick(SECOND)
    follower.pump(frames_max=1)
    if then != "deleted":
        rig.put("orders", "a", px(2))
        subscribers.settle()
        rig.time.tick(SECOND)
    if then != "put":
        rig.delete("orders", "a")
        subscribers.settle()
        rig.time.tick(SECOND)
    if then != "both":
        rig.put("orders", "last", px(1))
        subscribers.settle()
    rig.time.tick(2 * SECOND)
    told = []
    for _ in range(3):
        told += follower.news()
        rig.time.tick(SECOND)
    mine = [(what, key) for what, key, _ in told if key == "a"]
    assert mine == {"put": [("put", "a")], "deleted": [], "both": [("put", "a"), ("oof deleted", "a")]}[then]
    assert not follower.subscription._conflation._unsent  # type: ignore[union-attr]  # it conflates


@pytest.mark.parametrize("oof", [False, True])
def test_a_touch_behind_an_update_is_told_as_an_update(rig: Rig, subscribers: Subscribers, oof: bool) -> None:
    """S2: `touched` says that only the lifetime has changed."""
    rig.put("orders", "a", px(1), ttl=MINUTE)
    follower = subscribers.subscribe("orders", oof=oof, conflation=SECOND)
    rig.put("orders", "a", px(2), ttl=MINUTE)
    rig.touch("orders", "a", ttl=2 * MINUTE)
    subscribers.settle()
    rig.time.tick(SECOND)
    assert follower.news() == [("put", "a", px(2))]
    rig.touch("orders", "a", ttl=MINUTE)
    subscribers.settle()
    rig.time.tick(SECOND)
    assert follower.news() == [("touched", "a", px(2))]


def test_an_atomic_request_that_waited_for_a_reader_is_of_one_interval() -> None:
    """S5: its changes come together, though its interval may end while its frames are taken over."""
    clock = itertools.count(0, SECOND)
    conflation = Conflation(SECOND, Form(), clock.__next__)
    outbox = Outbox(conflation)
    row = Row(ChangeOp.PUT, ChangeReason.NONE, b"a", b"{}", 1, 0, NEVER, 0, 2)
    rows = [row, row._replace(key=b"b", sequence=3), row._replace(key=b"c", sequence=4)]
    frames = [
        *frames_of("orders", rows[:2], batch_size=1, after=1, bookmark=3, together=True, atomic=True),
        *frames_of("orders", rows[2:], batch_size=1, after=3, bookmark=4),
    ]
    outbox._unjudged += frames  # as behind a change that a reader judges
    assert outbox.judging(0) is None
    emissions = [conflation.take(position=1, now_micros=0) for _ in range(2)]
    assert [[key for (_, key), _ in emission.rows] for emission in emissions] == [[b"a", b"b"], [b"c"]]
    assert [emission.bookmark for emission in emissions] == [3, 4]


def test_a_conflating_subscriber_has_caught_up_once_it_was_sent_the_older_changes(
    rig: Rig, subscribers: Subscribers
) -> None:
    """S5: those that were read in the journal wait for the end of the interval."""
    rig.put("orders", "a", px(1))
    follower = subscribers.subscribe("orders", start=EARLIEST, conflation=10 * SECOND, progress=SECOND)
    rig.time.tick(SECOND)
    follower.pump()
    rig.time.tick(10 * SECOND)
    follower.pump()
    told = [frame.behind if isinstance(frame, Progress) else "a" for frame in follower.frames]
    assert told == [True, True, "a", False]
    rig.put("orders", "a", px(2))
    subscribers.settle()
    rig.time.tick(SECOND)
    assert [frame.behind for frame in follower.pump() if isinstance(frame, Progress)] == [False]


def test_an_emission_of_conflated_messages_belongs_together(rig: Rig, subscribers: Subscribers) -> None:
    """A place to resume at lies behind all of it: in between, messages that were replaced by newer ones are missing."""
    follower = subscribers.subscribe("orders", conflation=SECOND, batch_size=2)
    rig.run(Publish("orders", [px(2)] * 5, list("abcde")))
    follower.news()
    rig.time.tick(SECOND)
    follower.news()
    assert [(len(frame.rows), frame.more) for frame in follower.change_frames()] == [(2, True), (2, True), (1, False)]
    assert follower.bookmark == 5


# --- slow consumers --------------------------------------------------------------------------------------------------


def fill(subscribers: Subscribers, count: int, begin: int = 0) -> list[tuple[str, str, bytes]]:
    """Publishes records, each of which is dispatched before the next one comes."""
    for number in range(begin, begin + count):
        subscribers.rig.put("orders", str(number), px(number))
        subscribers.settle()
    return [("put", str(number), px(number)) for number in range(begin, begin + count)]


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
    monkeypatch.setattr("sow_server.subscriptions.journal.replay.FRAME_BYTES", 1500)
    subscribers = Subscribers(rig, queue_bytes_max=3000)
    follower = subscribers.subscribe("orders", conflation=SECOND)
    for number in range(100):
        rig.put("orders", "a", px(number))
    subscribers.settle()
    assert not behind(follower)
    wanted = fill(subscribers, 40, 1)
    assert behind(follower)
    got: dict[str, bytes] = {}
    for _ in range(20):
        rig.time.tick(SECOND)
        got |= {key: payload for _, key, payload in follower.news()}
        assert follower.subscription.queued_bytes <= 2 * 3000
    assert got == {"a": px(99)} | {key: payload for _, key, payload in wanted}
    assert not behind(follower)


def test_a_conflating_subscriber_that_catches_up_is_not_stopped_by_one_large_commit(rig: Rig) -> None:
    """It waited for room that only it could have made: nothing was conflated, so nothing was ever emitted, and live
    changes stayed in the queue until somebody published again."""
    subscribers = Subscribers(rig, queue_bytes_max=2000)
    rig.run(Publish("orders", [px(1)], ["a"], durability=Durability.BUFFERED))
    follower = subscribers.subscribe("orders", start=EARLIEST, conflation=SECOND, settled=False)
    follower.pump()  # it attaches behind commits that are not yet durable
    keys = [str(number) for number in range(20)]
    rig.run(Publish("orders", [px(2)] * 20, keys))
    assert follower.news() == []
    rig.time.tick(SECOND)
    assert follower.news() == [("put", "a", px(1))]
    rig.time.tick(SECOND)
    assert follower.news() == [("put", key, px(2)) for key in keys]
    assert not behind(follower)


def test_a_backlog_that_grows_too_large_is_served_from_the_journal(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dispatch [5]: filters that cannot keep up with the publishers cost bounded memory."""
    live = "sow_server.subscriptions.live"
    for name, value in (("dispatch.BACKLOG_BYTES_MAX", 2000), ("slices.SLICE_CHANGES", 1), ("slices.BLOCK_CHANGES", 1)):
        monkeypatch.setattr(f"{live}.{name}", value)
    follower = subscribers.subscribe("orders", oof=True)
    late = None
    wanted = []
    for number in range(0, 60, 2):  # a slice takes half of the changes
        rig.run(Publish("orders", [px(number), px(number + 1)], [str(number), str(number + 1)]))
        wanted += [("put", str(each), px(each)) for each in (number, number + 1)]
        if number == 14:
            late = subscribers.subscribe("orders", settled=False)
    assert follower.news() == wanted
    assert subscribers.hub.dispatcher.dropped_total > 0
    assert late is not None
    assert late.news() == wanted[16:]
