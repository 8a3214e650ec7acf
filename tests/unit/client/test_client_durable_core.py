"""Consumers of durable subscriptions: the pure core (_durable [1] to [6])."""

from __future__ import annotations

import pytest

from sow.v1 import sow_pb2
from sow_client import (
    Aborted,
    Change,
    FailedPrecondition,
    Gap,
    InternalError,
    InvalidArgument,
    SowError,
    Unavailable,
)
from sow_client._durable import LINGER_SECONDS, Acknowledgements, DurableCore, sequence_of
from sow_client._lines import Home
from tests.support.fakes.kept_durable import NAME, Kept
from tests.support.fakes.subscriptions import TOPIC, Journal, put, refusal
from tests.unit.client.test_client_subscription_core import CUT, drained, fed, history, told


class Consumer:
    """A core with its acknowledgements, and a clock that stands still."""

    def __init__(self, *, batch_size: int = 0, retry_for: float = 30.0, force: bool = False) -> None:
        request = sow_pb2.SubscribeRequest(
            topic=TOPIC, batch_size=batch_size, durable=sow_pb2.DurableAttachment(name=NAME, force=force)
        )
        self.acknowledgements = Acknowledgements(TOPIC, NAME, retry_for=retry_for)
        self.gaps: list[tuple[int, Gap]] = []
        self.changes: list[Change] = []
        self.core = DurableCore(
            request,
            self.acknowledgements,
            retry_for=retry_for,
            connect_timeout=5.0,
            on_gap=lambda gap: self.gaps.append((len(self.changes), gap)),
            home=Home("the consumer"),
        )

    def feed(self, *frames: sow_pb2.SubscribeResponse) -> None:
        """Hands out what these frames give."""
        for frame in frames:
            self.core.feed(frame)
            self.changes += drained(self.core)

    def follow(self, kept: Kept, cut: int | None = None, *, acknowledges: int = 0) -> None:
        """One call, which breaks after so many frames; after each, the changes handed out are acknowledged, but for
        the last so many."""
        for number, frame in enumerate(kept.frames(self.core.request(now=0.0))):
            if number == cut:
                self.core.ended(CUT, now=0.0, jitter=0.5)
                return
            self.feed(frame)
            self.acknowledge(kept, len(self.changes) - acknowledges)

    def acknowledge(self, kept: Kept, upto: int) -> None:
        """Acknowledges so many of the changes that were handed out."""
        marks = [change.bookmark for change in self.changes[: max(0, upto)] if change.bookmark]
        if marks and self.acknowledgements.add(marks[-1]):
            request = self.acknowledgements.take(0.0)
            kept.acknowledge(request)
            self.acknowledgements.done(request)


# ---- cuts (_durable [1]) ----


@pytest.mark.parametrize("unacknowledged", [0, 1, 3, 1_000])
@pytest.mark.parametrize("batch_size", [1, 2, 1_000])
def test_a_cut_after_any_frame_loses_nothing_and_repeats_nothing(
    seed: int, batch_size: int, unacknowledged: int
) -> None:
    """However much of it was acknowledged, as the server begins again after that."""
    journal = history(seed)
    first = len(list(Kept(journal).frames(sow_pb2.SubscribeRequest(batch_size=batch_size))))
    for cut in range(1, first + 1):
        kept, consumer = Kept(journal), Consumer(batch_size=batch_size)
        consumer.follow(kept, cut, acknowledges=unacknowledged)
        reached = consumer.core.bookmark
        assert reached is not None
        journal_calls = kept.frames(consumer.core.request(now=0.0))
        for frame in journal_calls:
            consumer.feed(frame)
            assert consumer.core.bookmark is None or sequence_of(consumer.core.bookmark) >= sequence_of(reached)
        assert told(consumer.changes) == journal.told(), f"cut after {cut} frames"
        assert consumer.core.bookmark == journal.bookmark(journal.last)


def test_a_returning_consumer_identifies_itself_and_does_not_take_over() -> None:
    """_durable [2]: the force of the first call does not push away whoever has taken over since."""
    kept, consumer = Kept(history(1)), Consumer(force=True)
    assert consumer.core.request(now=0.0).durable == sow_pb2.DurableAttachment(name=NAME, force=True)
    consumer.follow(kept)

    again = consumer.core.request(now=0.0)

    assert again.durable == sow_pb2.DurableAttachment(name=NAME, expected=True)
    assert not again.bookmark


def test_changes_after_a_rewind_are_handed_out_again() -> None:
    journal = history(3)
    kept, consumer = Kept(journal), Consumer()
    consumer.follow(kept)
    assert kept.at == journal.last
    kept.at = 4
    consumer.changes.clear()

    consumer.follow(kept)

    assert told(consumer.changes) == journal.told(after=4)
    assert kept.at == journal.last, "the new acknowledgement counts, though it is below the one before"
    assert consumer.gaps == []


def test_an_acknowledgement_from_before_a_rewind_is_not_sent() -> None:
    kept, consumer = Kept(history(3)), Consumer()
    consumer.follow(kept)
    journal = kept.journal
    journal.commit(put("z", {}))
    consumer.acknowledgements.add(journal.bookmark(journal.last))
    kept.at = 2

    consumer.feed(next(kept.frames(consumer.core.request(now=0.0))))

    assert consumer.acknowledgements.is_settled
    assert consumer.acknowledgements.confirmed == 2


def test_a_durable_that_was_removed_meanwhile_begins_anew_and_says_so() -> None:
    """J10."""
    journal = history(5)
    kept, consumer = Kept(journal), Consumer()
    consumer.follow(kept)
    assert (consumer.core.created, consumer.core.reset, consumer.core.gap) == (False, False, None)
    handed_out, reached = len(consumer.changes), journal.last
    journal.commit(put("missed", {}))
    kept.exists = False

    consumer.follow(kept)
    journal.commit(put("new", {}))
    consumer.feed(*journal.changes(reached + 1, journal.last))

    assert (consumer.core.created, consumer.core.reset) == (False, True)
    gap = Gap("reset", journal.bookmark(reached), journal.bookmark(reached + 1), None)
    assert consumer.gaps == [(handed_out, gap)]
    assert consumer.core.gap == gap
    assert [change.key for change in consumer.changes[handed_out:]] == ["new"]


def test_a_durable_that_was_not_there_says_that_it_was_created() -> None:
    kept, consumer = Kept(history(5)), Consumer()
    kept.exists = False
    consumer.follow(kept)
    assert (consumer.core.created, consumer.core.reset, consumer.gaps) == (True, False, [])


# ---- one consumer at a time (_durable [2]) ----


def test_a_durable_in_use_refuses_new_consumers_and_returning_ones_wait() -> None:
    in_use = refusal("DURABLE_IN_USE")
    consumer = Consumer(retry_for=10.0)
    consumer.core.request(now=0.0)
    with pytest.raises(FailedPrecondition):
        consumer.core.ended(in_use, now=0.0, jitter=0.5)

    consumer = Consumer(retry_for=10.0)
    consumer.follow(Kept(history(1)))
    assert consumer.core.ended(in_use, now=100.0, jitter=0.5) > 0
    with pytest.raises(FailedPrecondition):
        consumer.core.ended(in_use, now=110.0, jitter=0.5)


def test_waiting_for_another_consumer_is_asking_twice_a_second() -> None:
    """So a consumer whose instance was killed begins soon after its former link is known to be down."""
    consumer = Consumer(retry_for=60.0)
    consumer.follow(Kept(history(1)))
    delays = [consumer.core.ended(refusal("DURABLE_IN_USE"), now=100.0 + number, jitter=1.0) for number in range(10)]
    assert delays == [0.1, 0.2, 0.4, *[0.5] * 7]
    assert consumer.core.ended(refusal("STOPPING"), now=111.0, jitter=1.0) == 2.0, "others are asked less often"


@pytest.mark.parametrize("reason", ["DURABLE_TAKEN_OVER", "DURABLE_DETACHED"])
def test_a_detached_consumer_gets_an_error(reason: str) -> None:
    consumer = Consumer()
    consumer.follow(Kept(history(1)))
    with pytest.raises(Aborted) as caught:
        consumer.core.ended(refusal(reason), now=0.0, jitter=0.5)
    assert caught.value.reason == reason
    assert caught.value.details["bookmark"] == consumer.core.bookmark


# ---- gaps ----


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (sow_pb2.GAP_REASON_DISCARDED, "discarded"),
        (sow_pb2.GAP_REASON_EVICTED, "evicted"),
        (sow_pb2.GAP_REASON_BACKLOG_TTL, "backlog_ttl"),
        (sow_pb2.GAP_REASON_UNSPECIFIED, "unknown"),
    ],
)
def test_a_gap_is_reported_in_its_place(reason: sow_pb2.GapReason.ValueType, name: str) -> None:
    journal = Journal()
    for key in "abcdef":
        journal.commit(put(key, {}))
    kept, consumer = Kept(journal), Consumer()
    begin, progress, *rest = kept.frames(consumer.core.request(now=0.0))
    gap = sow_pb2.Gap(reason=reason, after_bookmark="e0.2", upto_bookmark="e0.4", entries=2)
    consumer.feed(begin, progress, *rest[:2], sow_pb2.SubscribeResponse(gap=gap))
    assert consumer.core.bookmark == "e0.4"
    consumer.feed(*rest[4:])

    assert [change.key for change in consumer.changes] == ["a", "b", "e", "f"]
    assert [(place, gap.reason, gap.after, gap.upto, gap.entries) for place, gap in consumer.gaps] == [
        (2, name, "e0.2", "e0.4", 2)
    ]


def conflated(journal: Journal) -> list[sow_pb2.SubscribeResponse]:
    """A gap and the snapshot that stands for it."""
    gap = sow_pb2.Gap(
        reason=sow_pb2.GAP_REASON_CONFLATED, after_bookmark="e0.1", upto_bookmark=journal.bookmark(journal.last)
    )
    snapshot = list(journal.frames(sow_pb2.SubscribeRequest(sow=True, topic=TOPIC, batch_size=1)))
    return [sow_pb2.SubscribeResponse(gap=gap), *snapshot]


def test_a_conflated_backlog_is_replaced_by_the_records_which_then_change() -> None:
    journal = Journal()
    journal.commit(put("a", {}))
    kept, consumer = Kept(journal), Consumer()
    consumer.follow(kept)
    journal.commit(put("b", {"n": 1}), put("b", {"n": 2}))
    consumer.feed(*conflated(journal))
    journal.commit(put("c", {}))
    consumer.feed(*journal.changes(3, 4))

    assert [(change.op, change.key, change.bookmark) for change in consumer.changes] == [
        ("put", "a", "e0.1"),
        ("sow", "a", None),
        ("sow", "b", None),
        ("snapshot_end", "", "e0.3"),
        ("put", "c", "e0.4"),
    ]
    assert [(place, gap.reason, gap.entries) for place, gap in consumer.gaps] == [(1, "conflated", None)]


def test_a_snapshot_that_was_cut_short_is_begun_again_by_the_server() -> None:
    journal = Journal()
    journal.commit(put("a", {}), put("b", {}))
    for cut in range(5):
        kept, consumer = Kept(journal), Consumer()
        consumer.feed(next(kept.frames(consumer.core.request(now=0.0))), *conflated(journal)[:cut])
        consumer.core.ended(CUT, now=0.0, jitter=0.5)
        request = consumer.core.request(now=0.0)
        assert not request.sow
        consumer.changes.clear()
        consumer.feed(next(kept.frames(request)), *conflated(journal))
        assert [change.op for change in consumer.changes] == ["sow", "sow", "snapshot_end"], cut


def test_frames_out_of_their_place_are_not_believed() -> None:
    journal = history(1)
    begin = next(Kept(journal).frames(sow_pb2.SubscribeRequest()))
    snapshot = list(journal.frames(sow_pb2.SubscribeRequest(sow=True, topic=TOPIC)))
    change, *_ = journal.changes(0, journal.last)
    gap = sow_pb2.SubscribeResponse(gap=sow_pb2.Gap(after_bookmark="e0.1", upto_bookmark="e0.2"))
    for frames in (
        [change],
        [journal.progress(1)],
        [gap],
        [begin, begin],
        [begin, snapshot[0]],
        [begin, snapshot[1]],
        [begin, *conflated(journal)[:2], change],
    ):
        consumer = Consumer()
        consumer.core.request(now=0.0)
        with pytest.raises(InternalError, match="in the wrong place"):
            consumer.feed(*frames)


def test_frames_of_a_newer_server_are_passed_over() -> None:
    consumer = Consumer()
    consumer.core.request(now=0.0)
    assert fed(consumer.core, sow_pb2.SubscribeResponse()) == []


# ---- acknowledgements (_durable [3], [4]) ----


def attached(session: str = "s1", at: int = 0, *, retry_for: float = 10.0) -> Acknowledgements:
    """Having received much."""
    made = Acknowledgements(TOPIC, NAME, retry_for=retry_for)
    made.attached(sow_pb2.DurableBegin(bookmark=f"e0.{at}", session=session), anew=True)
    made.received("e0.1000")
    return made


def test_only_the_last_waiting_acknowledgement_is_sent_one_call_at_a_time() -> None:
    made = attached(at=3)
    assert made.wait(0.0, hurried=False) is None
    assert not made.add("e0.3"), "the server has that"
    assert made.add("e0.4")
    assert made.wait(0.0, hurried=False) == 0.0, "the first one does not linger"
    first = made.take(0.0)
    assert first == sow_pb2.AcknowledgeRequest(topic=TOPIC, durable=NAME, bookmark="e0.4", session="s1")
    assert made.add("e0.9")
    assert not made.add("e0.7")
    assert made.wait(0.0, hurried=True) is None, "one is under way"
    made.done(first)

    assert made.wait(0.001, hurried=False) == pytest.approx(LINGER_SECONDS - 0.001)
    assert made.wait(0.001, hurried=True) == 0.0
    second = made.take(0.02)
    assert second.bookmark == "e0.9"
    assert not made.is_settled
    made.done(second)
    assert made.is_settled


@pytest.mark.parametrize("reason", ["UNREACHABLE", "STOPPING", "OVERLOADED", "DEADLINE_EXCEEDED"])
def test_an_acknowledgement_that_may_pass_is_sent_again_until_the_time_is_over(reason: str) -> None:
    made = attached()
    made.add("e0.4")
    made.failed(made.take(0.0), refusal(reason), now=0.0, jitter=0.5)
    made.add("e0.5")
    rest = made.wait(0.0, hurried=True)
    assert rest, "nobody can hurry it"
    made.raise_failure()
    assert made.take(rest).bookmark == "e0.5"
    made.failed(sow_pb2.AcknowledgeRequest(), refusal(reason), now=10.0, jitter=0.5)

    assert made.is_settled
    with pytest.raises(SowError) as caught:
        made.add("e0.6")
    assert caught.value.reason == reason
    assert made.add("e0.6"), "it is told once"


@pytest.mark.parametrize("reason", ["DURABLE_TAKEN_OVER", "DURABLE_DETACHED"])
@pytest.mark.parametrize("attached_before", [True, False])
def test_an_acknowledgement_of_an_attachment_that_has_ended_is_sent_with_the_next_one(
    reason: str, attached_before: bool
) -> None:
    """Such as after a restart of the server, which knows no attachment then. If there is no next one, the iteration
    says why."""
    made = attached("s1")
    made.add("e0.4")
    request = made.take(0.0)
    begin = sow_pb2.DurableBegin(bookmark="e0.0", session="s2")
    if attached_before:
        made.attached(begin, anew=False)
        made.failed(request, refusal(reason), now=0.0, jitter=0.5)
    else:
        made.failed(request, refusal(reason), now=0.0, jitter=0.5)
        assert made.wait(100.0, hurried=True) is None
        assert made.is_settled, "nothing can be sent"
        with pytest.raises(Aborted):
            made.raise_held()
        made.attached(begin, anew=False)
    made.raise_failure()
    made.received("e0.4")
    again = made.take(1.0)
    assert (again.bookmark, again.session) == ("e0.4", "s2")
    made.done(again)
    made.raise_held()


def test_changes_that_the_current_attachment_has_not_received_are_not_acknowledged_yet() -> None:
    """_durable [5]."""
    made = attached("s1")
    made.add("e0.80")
    made.attached(sow_pb2.DurableBegin(bookmark="e0.50", session="s2"), anew=False)
    assert made.wait(1.0, hurried=True) == LINGER_SECONDS
    assert made.is_settled
    with pytest.raises(Unavailable):
        made.raise_held()
    made.received("e0.65")
    request = made.take(1.0)
    assert request.bookmark == "e0.65"
    made.done(request)
    made.received("e0.90")
    assert made.take(2.0).bookmark == "e0.80"


@pytest.mark.parametrize("bookmark", ["", "17", "e0.", "e0.x"])
def test_a_malformed_bookmark_is_not_acknowledged(bookmark: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        attached().add(bookmark)
    assert caught.value.reason == "BOOKMARK_MALFORMED"


def test_a_bookmark_of_another_journal_is_not_acknowledged() -> None:
    with pytest.raises(InvalidArgument) as caught:
        attached().add("e1.5")
    assert caught.value.reason == "BOOKMARK_OTHER_EPOCH"


# ---- at another instance (_durable [6]) ----


def begun(bookmark: str, session: str, *, replicated: bool = True) -> sow_pb2.SubscribeResponse:
    begin = sow_pb2.DurableBegin(bookmark=bookmark, session=session, replicated=replicated)
    return sow_pb2.SubscribeResponse(durable_begin=begin)


def progress(bookmark: str, *, covers: bool = True) -> sow_pb2.SubscribeResponse:
    return sow_pb2.SubscribeResponse(progress=sow_pb2.Progress(bookmark=bookmark, covers=covers))


def moved() -> Consumer:
    """A consumer that was handed everything up to aa.7, has acknowledged aa.5, and goes on at bb.30."""
    consumer = Consumer()
    consumer.core.request(now=0.0)
    consumer.feed(begun("aa.0", "s1"), progress("aa.7"))
    consumer.acknowledgements.add("aa.5")
    consumer.acknowledgements.done(consumer.acknowledgements.take(0.0))
    consumer.core.ended(CUT, now=0.0, jitter=0.5)
    assert list(consumer.core.request(now=0.0).durable.told) == ["aa.7"]
    consumer.feed(begun("bb.30", "s2"))
    return consumer


def test_an_acknowledgement_of_another_instance_never_acknowledges_anything_here() -> None:
    """F17."""
    consumer = moved()
    consumer.feed(progress("bb.40"))
    acknowledgements = consumer.acknowledgements
    assert not acknowledgements.add("aa.7"), "7 is below 30, and aa.35 would be above"
    assert not acknowledgements.add("aa.35")
    assert acknowledgements.is_settled
    acknowledgements.raise_held()
    assert acknowledgements.add("bb.31")
    assert acknowledgements.take(0.0).bookmark == "bb.31"
    with pytest.raises(InvalidArgument) as caught:
        acknowledgements.add("cc.1")
    assert caught.value.reason == "BOOKMARK_OTHER_EPOCH"


def test_an_acknowledgement_that_was_under_way_to_the_lost_instance_is_no_failure() -> None:
    """F17: whatever became of it, the changes come again."""
    consumer = Consumer()
    consumer.core.request(now=0.0)
    consumer.feed(begun("aa.0", "s1"), progress("aa.7"))
    acknowledgements = consumer.acknowledgements
    acknowledgements.add("aa.7")
    request = acknowledgements.take(0.0)
    consumer.core.ended(CUT, now=0.0, jitter=0.5)
    consumer.core.request(now=0.0)
    consumer.feed(begun("bb.30", "s2"), progress("bb.40"))
    acknowledgements.failed(request, refusal("BOOKMARK_OTHER_EPOCH"), now=0.0, jitter=0.5)
    acknowledgements.raise_failure()
    assert acknowledgements.is_settled
    assert acknowledgements.add("bb.33")
    assert acknowledgements.take(0.0).bookmark == "bb.33"


@pytest.mark.parametrize("reason", ["STORE_FAILED", "DISK_FULL", "BOOKMARK_OTHER_EPOCH"])
@pytest.mark.parametrize("replicated", [False, True])
def test_an_instance_that_takes_no_acknowledgements_fails_acknowledgements_only_where_there_is_no_other_one(
    reason: str, replicated: bool
) -> None:
    """F17. Story: an acknowledgement that was made while the client moved came to the next instance before its consumer
    was attached there, and its refusal ended the consumer."""
    consumer = Consumer()
    consumer.core.request(now=0.0)
    consumer.feed(begun("aa.0", "s1", replicated=replicated), progress("aa.7"))
    acknowledgements = consumer.acknowledgements
    acknowledgements.add("aa.7")
    acknowledgements.failed(acknowledgements.take(0.0), refusal(reason), now=0.0, jitter=0.5)
    assert acknowledgements.has_failed is not replicated


def test_a_consumer_tells_what_it_was_handed_elsewhere_until_the_server_has_it() -> None:
    """F17."""
    consumer = moved()
    consumer.feed(progress("bb.40", covers=False))
    consumer.core.ended(CUT, now=0.0, jitter=0.5)
    assert list(consumer.core.request(now=0.0).durable.told) == ["aa.7", "bb.40"]
    consumer.feed(begun("bb.35", "s3"), progress("bb.41", covers=True))
    consumer.core.ended(CUT, now=0.0, jitter=0.5)
    assert list(consumer.core.request(now=0.0).durable.told) == ["bb.41"]


def test_a_durable_that_is_not_replicated_tells_nothing() -> None:
    consumer = Consumer()
    consumer.core.request(now=0.0)
    consumer.feed(begun("aa.0", "s1", replicated=False), progress("aa.7"))
    consumer.core.ended(CUT, now=0.0, jitter=0.5)
    assert not consumer.core.request(now=0.0).durable.told


def test_a_consumer_that_comes_back_to_an_instance_acknowledges_there_again() -> None:
    consumer = moved()
    consumer.core.ended(CUT, now=0.0, jitter=0.5)
    consumer.core.request(now=0.0)
    consumer.feed(begun("aa.5", "s3"), progress("aa.9"))
    assert consumer.acknowledgements.add("aa.8")
    assert not consumer.acknowledgements.add("bb.99")
    assert consumer.acknowledgements.take(0.0).bookmark == "aa.8"
