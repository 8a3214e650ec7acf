"""The pure core of subscriptions: positions, cuts at every frame, resyncs, and frames that the contract does not allow.

It shows _subscription_core [1] to [4].
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import (
    Change,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    ResyncRequired,
    SowError,
    Unavailable,
    View,
)
from sow_client._subscription_core import SubscriptionCore
from tests.support.fakes.subscriptions import TOPIC, Journal, Told, columns, put, refusal, removed

CUT = Unavailable("the connection broke", reason="UNREACHABLE")


def request_of(*, sow: bool = False, batch_size: int = 0, **start: object) -> sow_pb2.SubscribeRequest:
    return sow_pb2.SubscribeRequest(topic=TOPIC, sow=sow, batch_size=batch_size, **start)  # type: ignore[arg-type]  # keywords of several types


def core_of(request: sow_pb2.SubscribeRequest, *, retry_for: float = 30.0) -> SubscriptionCore:
    return SubscriptionCore(request, retry_for=retry_for, connect_timeout=5.0)


def drained(core: SubscriptionCore) -> list[Change]:
    """The changes that are ready."""
    return list(iter(core.take, None))


def fed(core: SubscriptionCore, *frames: sow_pb2.SubscribeResponse) -> list[Change]:
    """The changes of these frames."""
    changes: list[Change] = []
    for frame in frames:
        core.feed(frame)
        changes += drained(core)
    return changes


def follow(
    core: SubscriptionCore, journal: Journal, cuts: Iterator[int], between: Callable[[], None] = lambda: None
) -> list[Change]:
    """Everything that a subscription hands out whose n-th call breaks after as many frames as `cuts` says."""
    changes: list[Change] = []
    while True:
        left = next(cuts, 1_000_000)
        try:
            for frame in journal.frames(core.request(now=0.0)):
                if left == 0:
                    raise CUT
                core.feed(frame)
                changes += drained(core)
                left -= 1
            return changes
        except SowError as error:
            core.ended(error, now=0.0, jitter=0.5)
            between()


def told(changes: list[Change]) -> list[Told]:
    """The changes among them, as the journal tells them."""
    result = []
    for change in changes:
        if change.op == "put":
            assert change.record is not None
            result.append(Told(change.record.sequence, change.record.key, change.record.payload))
        elif change.op in ("oof", "delete", "expire"):
            assert change.previous is not None
            result.append(Told(change.previous.sequence, change.previous.key, None))
    return result


def history(seed: int, commits: int = 14) -> Journal:
    """Single changes, batches and atomic requests, on a few keys."""
    draw = random.Random(seed)
    journal = Journal()
    for number in range(commits):
        size = draw.choice([1, 1, 2, 5])
        entries = []
        for index in range(size):
            key = draw.choice("abcd")
            entries.append(removed(key) if draw.random() < 0.25 else put(key, {"n": number, "i": index}))
        journal.commit(*entries, atomic=size > 1 and draw.random() < 0.6)
    return journal


# ---- cuts ----


@pytest.mark.parametrize("batch_size", [1, 2, 3, 1_000])
def test_a_cut_after_any_frame_loses_nothing_and_repeats_nothing(seed: int, batch_size: int) -> None:
    """_subscription_core [1], for every position of the cut, inside atomic requests too."""
    journal = history(seed)
    start = journal.bookmark(0)
    frames = len(list(journal.frames(request_of(bookmark=start, batch_size=batch_size))))
    for cut in range(frames + 1):
        core = core_of(request_of(bookmark=start, batch_size=batch_size))
        changes = follow(core, journal, iter([cut]))
        assert told(changes) == journal.told(), f"cut after {cut} frames"
        assert core.bookmark == journal.bookmark(journal.last)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 3, 1_000])
def test_two_cuts_after_any_frames_lose_nothing_and_repeat_nothing(seed: int, batch_size: int) -> None:
    """The second one meets an atomic request of which a part was handed out before the first."""
    journal = history(seed + 1, commits=7)
    start = journal.bookmark(0)
    frames = len(list(journal.frames(request_of(bookmark=start, batch_size=batch_size))))
    for first in range(frames):
        for second in range(frames - first + 2):
            core = core_of(request_of(bookmark=start, batch_size=batch_size))
            assert told(follow(core, journal, iter([first, second]))) == journal.told(), (first, second)


def test_every_bookmark_of_a_change_is_a_place_to_start_at(seed: int) -> None:
    """Where a program stores the bookmark of the last change that it has dealt with."""
    journal = history(seed)
    core = core_of(request_of(bookmark=journal.bookmark(0), batch_size=2))
    for number, change in enumerate(follow(core, journal, iter([]))):
        if change.bookmark is not None:
            other = core_of(request_of(bookmark=change.bookmark, batch_size=3))
            assert told(follow(other, journal, iter([]))) == journal.told()[number + 1 :]


def test_a_subscription_from_now_on_is_pinned_before_its_first_change() -> None:
    """Changes committed during a reconnect are delivered, also when nothing had come before it."""
    journal = Journal()
    journal.commit(put("old", {}))
    core = core_of(request_of())
    changes = follow(core, journal, iter([1]), between=lambda: put_once(journal, "a"))
    assert [one.key for one in told(changes)] == ["a"]


def put_once(journal: Journal, key: str) -> None:
    if key not in journal.state():
        journal.commit(put(key, {}))


def test_a_subscription_that_never_attached_starts_at_its_requested_start() -> None:
    for start in ({"bookmark": "e0.0"}, {"earliest": True}, {"start_time_micros": 5}, {}):
        core = core_of(request_of(**start))
        first = core.request(now=0.0)
        core.ended(CUT, now=0.0, jitter=0.0)
        assert core.request(now=0.1) == first == request_of(**start)


# ---- positions ----


def test_the_position_follows_changes_handed_out_not_changes_that_arrived() -> None:
    """_subscription_core [2]."""
    journal = Journal()
    journal.commit(put("a", {}), put("b", {}))
    core = core_of(request_of(bookmark="e0.0"))
    assert core.bookmark == "e0.0"
    progress, changes, end = journal.frames(core.request(now=0.0))
    core.feed(progress)
    core.feed(changes)
    assert core.bookmark == "e0.0"
    for expected in ("e0.1", "e0.2"):
        change = core.take()
        assert change is not None
        assert core.bookmark == expected == change.bookmark
    journal.last = 9
    core.feed(journal.progress(9))
    assert core.take() is None
    assert core.bookmark == "e0.9"
    assert end.progress.bookmark == "e0.2"


def test_the_position_stands_still_inside_an_atomic_request() -> None:
    journal = Journal()
    journal.commit(put("z", {}))
    journal.commit(put("a", {}), put("b", {}), put("c", {}), atomic=True)
    core = core_of(request_of(bookmark="e0.1", batch_size=2))
    _, first, second, _ = journal.frames(core.request(now=0.0))
    core.feed(journal.progress(1))
    seen = []
    for frame in (first, second):
        core.feed(frame)
        while (change := core.take()) is not None:
            seen.append((change.key, change.bookmark, core.bookmark))
    assert seen == [("a", None, "e0.1"), ("b", None, "e0.1"), ("c", "e0.4", "e0.4")]


def test_changes_that_the_filter_leaves_out_move_the_position_with_their_frame() -> None:
    core = core_of(request_of(bookmark="e0.0"))
    core.request(now=0.0)
    (change,) = fed(
        core,
        Journal().progress(0),
        sow_pb2.SubscribeResponse(
            changes=sow_pb2.ChangeBatch(
                topic=TOPIC, op=[sow_pb2.CHANGE_OP_PUT], records=columns([("a", b"{}", 3)]), bookmark="e0.8"
            )
        ),
    )
    assert change.bookmark == "e0.3"
    assert core.bookmark == "e0.8"


# ---- snapshots ----


def test_a_snapshot_is_rows_and_one_end_also_when_it_is_empty() -> None:
    """Rule S1."""
    journal = Journal()
    empty = core_of(request_of(sow=True))
    assert follow(empty, journal, iter([])) == [Change("snapshot_end", bookmark="e0.0", topic=TOPIC)]
    journal.commit(put("b", {"n": 1}), put("a", {"n": 2}))
    core = core_of(request_of(sow=True))
    frames = journal.frames(core.request(now=0.0))
    core.feed(next(frames))
    assert core.stood
    first, second, end = fed(core, next(frames), next(frames))
    assert [(one.op, one.key, one.bookmark, one.topic) for one in (first, second)] == [
        ("sow", "a", None, TOPIC),
        ("sow", "b", None, TOPIC),
    ]
    assert first.record is not None
    assert first.record.data == {"n": 2}
    assert end == Change("snapshot_end", bookmark="e0.2", topic=TOPIC)
    assert core.bookmark == "e0.2"


def test_there_is_no_place_to_go_on_from_inside_a_snapshot() -> None:
    journal = Journal()
    journal.commit(put("a", {}))
    core = core_of(request_of(sow=True))
    begin, rows, *_ = journal.frames(core.request(now=0.0))
    core.feed(begin)
    core.feed(rows)
    core.take()
    assert core.bookmark is None


@pytest.mark.parametrize("batch_size", [1, 2, 1_000])
def test_a_snapshot_with_its_changes_that_is_cut_anywhere_gives_the_state_in_the_end(
    seed: int, batch_size: int
) -> None:
    """_subscription_core [3]: one resync where something has to be taken back, none where nothing was handed out, then
    a whole snapshot."""
    journal = history(seed)
    more = history(seed + 1)
    frames = len(list(journal.frames(request_of(sow=True, batch_size=batch_size)))) + len(more.commits)
    rows = len(journal.state())
    snapshot_frames = 2 + -(-rows // batch_size)  # begin, rows, end
    for cut in range(frames + 1):
        grown = Journal(commits=list(journal.commits), last=journal.last)

        def grow(grown: Journal = grown) -> None:
            for commit in more.commits:
                grown.commit(*commit.entries, atomic=commit.atomic)

        core = core_of(request_of(sow=True, batch_size=batch_size))
        changes = follow(core, grown, iter([cut]), between=grow)
        if cut > frames:
            grow()
        view = View()
        for change in changes:
            view.apply(change)
        ops = [change.op for change in changes]
        assert {key: record.payload for key, record in view.items()} == grown.state(), cut
        assert view.complete
        cut_inside = 1 < cut < snapshot_frames
        assert ops.count("resync") == cut_inside, cut
        assert ops.count("snapshot_end") == 1
        if cut_inside:
            assert ops.index("resync") == min(rows, (cut - 1) * batch_size)


@pytest.mark.parametrize(
    "reason", ["RESYNC_REQUIRED", "BOOKMARK_TOO_OLD", "BOOKMARK_OTHER_EPOCH", "BOOKMARK_IN_FUTURE"]
)
def test_a_snapshot_that_cannot_be_gone_on_with_is_made_anew(reason: str) -> None:
    journal = Journal()
    journal.commit(put("a", {}), put("b", {}))
    core = core_of(request_of(sow=True))
    fed(core, *journal.frames(core.request(now=0.0)))
    core.ended(refusal(reason), now=0.0, jitter=0.0)
    assert core.bookmark == "e0.2"  # until the new snapshot begins, the last one stays
    other = Journal(epoch="e1")
    other.commit(put("b", {"new": 1}))
    request = core.request(now=0.0)
    assert request == request_of(sow=True)
    changes = fed(core, *other.frames(request))
    assert [(one.op, one.key) for one in changes] == [("resync", ""), ("sow", "b"), ("snapshot_end", "")]
    assert core.bookmark == "e1.1"


@pytest.mark.parametrize(
    "reason", ["RESYNC_REQUIRED", "BOOKMARK_TOO_OLD", "BOOKMARK_OTHER_EPOCH", "BOOKMARK_IN_FUTURE"]
)
def test_without_a_snapshot_there_is_nothing_to_begin_anew(reason: str) -> None:
    journal = Journal()
    journal.commit(put("a", {}))
    core = core_of(request_of(bookmark="e0.0"))
    fed(core, *journal.frames(core.request(now=0.0)))
    with pytest.raises(ResyncRequired) as caught:
        core.ended(refusal(reason), now=0.0, jitter=0.0)
    assert caught.value.bookmark == "e0.1"
    assert caught.value.reason == reason


def test_sequences_of_another_epoch_are_not_taken_for_repeated_ones() -> None:
    journal = Journal()
    journal.commit(*[put("a", {"n": number}) for number in range(50)])
    core = core_of(request_of(sow=True))
    fed(core, *journal.frames(core.request(now=0.0)))
    core.ended(refusal("BOOKMARK_OTHER_EPOCH"), now=0.0, jitter=0.0)
    other = Journal(epoch="e1")
    fed(core, *other.frames(core.request(now=0.0)))
    core.ended(CUT, now=0.0, jitter=0.0)
    other.commit(put("b", {}))
    assert [one.key for one in fed(core, *other.frames(core.request(now=0.0)))] == ["b"]


# ---- when to try again ----


@pytest.mark.parametrize("reason", ["UNREACHABLE", "STREAM_CUT", "STOPPING", "OVERLOADED"])
def test_a_temporary_error_is_retried_until_the_time_is_over(reason: str) -> None:
    core = core_of(request_of(), retry_for=30.0)
    core.request(now=0.0)
    core.feed(Journal().progress(4))
    error = refusal(reason)
    delays = [core.ended(error, now=100.0, jitter=0.0) for _ in range(7)]
    assert delays == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    core.ended(error, now=129.0, jitter=0.0)
    with pytest.raises(type(error)) as caught:
        core.ended(error, now=129.1, jitter=0.0)
    assert caught.value.details["bookmark"] == "e0.4"


def test_a_first_connection_is_waited_for_no_longer_than_the_connect_timeout() -> None:
    """The wait itself is counted: 5 s, not twice 5 s."""
    core = core_of(request_of(), retry_for=300.0)
    core.request(now=10.0)
    with pytest.raises(Unavailable):
        core.ended(CUT, now=15.0, jitter=0.0)


@pytest.mark.parametrize("reason", ["FILTER_INVALID", "TOPIC_NOT_FOUND", "TOPIC_DELETED", "NO_JOURNAL", "INTERNAL"])
def test_a_permanent_error_is_raised_at_once(reason: str) -> None:
    for sow in (False, True):
        core = core_of(request_of(sow=sow))
        core.request(now=0.0)
        with pytest.raises(SowError) as caught:
            core.ended(refusal(reason), now=0.0, jitter=0.0)
        assert caught.value.reason == reason


def test_a_server_that_breaks_off_right_after_its_first_frame_is_not_tried_for_ever() -> None:
    """Only the result of a call counts: a change, a snapshot, or having stood long enough for a second Progress."""
    core = core_of(request_of(), retry_for=10.0)
    now = 0.0
    for attempt in range(100):
        core.request(now=now)
        core.feed(Journal().progress(0))
        try:
            now += core.ended(CUT, now=now, jitter=0.5)
        except Unavailable:
            assert 5 < attempt < 20
            return
    pytest.fail("it goes on trying")


@pytest.mark.parametrize("good", ["progress", "change", "snapshot"])
def test_time_to_try_counts_anew_once_something_came_of_a_call(good: str) -> None:
    journal = Journal()
    core = core_of(request_of(sow=good == "snapshot"), retry_for=10.0)
    for now in range(0, 100, 9):
        request = core.request(now=now)
        if good == "change":
            journal.commit(put("a", {}))
        frames = list(journal.frames(request))
        fed(core, *(frames if good == "progress" else frames[:-1]))
        core.ended(refusal("RESYNC_REQUIRED") if good == "snapshot" else CUT, now=float(now), jitter=0.0)
        core.ended(CUT, now=float(now) + 8, jitter=0.0)


def test_an_interruption_and_its_end_are_reported_once() -> None:
    interruptions: list[SowError | None] = []
    core = SubscriptionCore(request_of(), retry_for=30.0, connect_timeout=5.0, on_interruption=interruptions.append)
    journal = Journal()
    core.request(now=0.0)
    core.ended(CUT, now=0.0, jitter=0.5)
    assert interruptions == []  # it has never stood: that is the caller's wait, and his error
    fed(core, *journal.frames(core.request(now=1.0)))
    assert interruptions == []

    core.ended(CUT, now=2.0, jitter=0.5)
    core.request(now=3.0)
    core.ended(CUT, now=3.0, jitter=0.5)
    assert interruptions == [CUT]
    fed(core, *journal.frames(core.request(now=4.0)))
    assert interruptions == [CUT, None]

    core.ended(CUT, now=5.0, jitter=0.5)
    assert interruptions == [CUT, None, CUT]


def test_a_cancelled_subscription_is_not_reported_as_interrupted() -> None:
    interruptions: list[SowError | None] = []
    core = SubscriptionCore(request_of(), retry_for=0.0, connect_timeout=5.0, on_interruption=interruptions.append)
    fed(core, *Journal().frames(core.request(now=0.0)))
    with pytest.raises(Unavailable):
        core.ended(CUT, now=1.0, jitter=0.5)
    assert interruptions == []


def test_a_negative_time_to_try_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        core_of(request_of(), retry_for=-1.0)


# ---- what changes say ----


def changes_frame(**columns_: object) -> sow_pb2.SubscribeResponse:
    return sow_pb2.SubscribeResponse(changes=sow_pb2.ChangeBatch(topic=TOPIC, bookmark="e0.9", **columns_))  # type: ignore[arg-type]  # keywords of several types


def standing() -> SubscriptionCore:
    core = core_of(request_of())
    core.request(now=0.0)
    core.feed(Journal().progress(0))
    return core


def test_each_op_and_reason_says_whose_record_it_has() -> None:
    """Rule S2."""
    rows = [
        (sow_pb2.CHANGE_OP_PUT, sow_pb2.CHANGE_REASON_UNSPECIFIED),
        (sow_pb2.CHANGE_OP_PUT, sow_pb2.CHANGE_REASON_TOUCHED),
        (sow_pb2.CHANGE_OP_OOF, sow_pb2.CHANGE_REASON_MATCH),
        (sow_pb2.CHANGE_OP_OOF, sow_pb2.CHANGE_REASON_DELETED),
        (sow_pb2.CHANGE_OP_OOF, sow_pb2.CHANGE_REASON_EXPIRED),
        (sow_pb2.CHANGE_OP_DELETE, sow_pb2.CHANGE_REASON_UNSPECIFIED),
        (sow_pb2.CHANGE_OP_EXPIRE, sow_pb2.CHANGE_REASON_UNSPECIFIED),
    ]
    frame = changes_frame(
        op=[op for op, _ in rows],
        reason=[reason for _, reason in rows],
        records=columns([(str(index), b"{}", index + 1) for index in range(len(rows))]),
    )
    assert [
        (one.op, one.reason, one.record and one.record.key, one.previous and one.previous.key, one.key)
        for one in fed(standing(), frame)
    ] == [
        ("put", None, "0", None, "0"),
        ("put", "touched", "1", None, "1"),
        ("oof", "match", "2", None, "2"),
        ("oof", "deleted", None, "3", "3"),
        ("oof", "expired", None, "4", "4"),
        ("delete", None, None, "5", "5"),
        ("expire", None, None, "6", "6"),
    ]


def test_deltas_are_marked_and_name_the_removed_fields() -> None:
    """Rule S3."""
    frame = changes_frame(
        op=[sow_pb2.CHANGE_OP_PUT, sow_pb2.CHANGE_OP_PUT],
        records=columns([("a", b"{}", 1), ("b", b"{}", 2)]),
        is_delta=[True, False],
        unset_paths=[sow_pb2.UnsetPaths(paths=["/x", "/y/z"]), sow_pb2.UnsetPaths()],
    )
    first, second = fed(standing(), frame)
    assert (first.is_delta, first.unset_paths) == (True, ("/x", "/y/z"))
    assert (second.is_delta, second.unset_paths) == (False, ())


@pytest.mark.parametrize(
    "fault",
    [
        {"op": []},
        {"op": [1, 1]},
        {"op": [9]},
        {"op": [0]},
        {"reason": [1, 1]},
        {"reason": [99]},
        {"is_delta": [True, True]},
        {"unset_paths": [sow_pb2.UnsetPaths(paths=["/a"])] * 2},
        {"bookmark": ""},
        {"records": types_pb2.RecordColumns(key=["a"])},
    ],
)
def test_changes_that_do_not_fit_together_are_not_believed(fault: dict[str, object]) -> None:
    values: dict[str, object] = {
        "topic": TOPIC,
        "op": [1],
        "records": columns([("a", b"{}", 1)]),
        "bookmark": "e0.1",
    } | fault
    with pytest.raises(InternalError) as caught:
        standing().feed(sow_pb2.SubscribeResponse(changes=sow_pb2.ChangeBatch(**values)))  # type: ignore[arg-type]  # keywords of several types
    assert caught.value.reason == "MALFORMED_RESPONSE"


def test_frames_out_of_their_place_are_not_believed() -> None:
    journal = Journal()
    journal.commit(put("a", {}))
    plain = list(journal.frames(request_of(bookmark="e0.0")))
    begin, rows, end, *_ = journal.frames(request_of(sow=True))
    for sow, frames in (
        (False, [plain[1]]),  # changes before the first Progress
        (False, [begin]),
        (False, [rows]),
        (True, [plain[0]]),
        (True, [rows]),
        (True, [end]),
        (True, [begin, begin]),
        (True, [begin, plain[1]]),
        (True, [begin, end, end]),
        (True, [begin, end, rows]),
    ):
        core = core_of(request_of(sow=sow))
        core.request(now=0.0)
        with pytest.raises(InternalError):
            fed(core, *frames)


def test_frames_of_a_newer_server_are_passed_over() -> None:
    core = standing()
    assert fed(core, sow_pb2.SubscribeResponse()) == []
    assert core.bookmark == "e0.0"


def test_reasons_of_bookmarks_are_resyncs_and_not_failed_preconditions() -> None:
    assert not issubclass(ResyncRequired, FailedPrecondition)
    assert type(refusal("BOOKMARK_OTHER_EPOCH")) is ResyncRequired


# -- marks: bookmarks that mean something elsewhere (rules F6 to F9) ---------------------------------------------------

MARKS = ";t=5;b00000000000.70"


def progress(bookmark: str, *, covers: bool = True) -> sow_pb2.SubscribeResponse:
    return sow_pb2.SubscribeResponse(progress=sow_pb2.Progress(bookmark=bookmark, covers=covers))


def batch(bookmark: str, *sequences: int, atomic: bool = False) -> sow_pb2.SubscribeResponse:
    records = [(f"k{sequence}", sequence) for sequence in sequences]
    return sow_pb2.SubscribeResponse(
        changes=sow_pb2.ChangeBatch(
            topic=TOPIC,
            bookmark=bookmark,
            atomic=atomic,
            op=[sow_pb2.CHANGE_OP_PUT] * len(records),
            records=types_pb2.RecordColumns(
                key=[key for key, _ in records],
                payload=[b"{}"] * len(records),
                version=[1] * len(records),
                publish_time_micros=[1] * len(records),
                expire_time_micros=[2**63 - 1] * len(records),
                sequence=[sequence for _, sequence in records],
                origins=["a"],
            ),
        )
    )


def test_every_bookmark_has_the_marks_of_the_last_progress() -> None:
    """F6."""
    core = core_of(request_of())
    core.request(now=0.0)
    fed(core, progress("a00000000000.7" + MARKS))
    changes = fed(core, batch("a00000000000.9", 8, 9), batch("a00000000000.11", 10, 11, atomic=True))
    expected = [f"a00000000000.{number}{MARKS}" for number in (8, 9)]
    assert [change.bookmark for change in changes] == [*expected, None, f"a00000000000.11{MARKS}"]
    assert core.bookmark == f"a00000000000.11{MARKS}"
    fed(core, progress("a00000000000.12"))
    assert core.bookmark == "a00000000000.12"


def test_sequences_of_another_instance_are_not_taken_for_repeated_ones() -> None:
    """F7: the other one has sequences of its own, which may be lower."""
    core = core_of(request_of())
    core.request(now=0.0)
    fed(core, progress("a00000000000.70" + MARKS), batch("a00000000000.80", 80))
    core.ended(CUT, now=1.0, jitter=0.0)
    assert core.request(now=1.0).bookmark == "a00000000000.80" + MARKS
    fed(core, progress("b00000000000.3;h=a00000000000.80", covers=False))
    assert [change.bookmark for change in fed(core, batch("b00000000000.4", 4))] == ["b00000000000.4;h=a00000000000.80"]


def test_covers_is_false_while_the_bookmark_names_instances_that_it_has_come_from() -> None:
    """F9."""
    core = core_of(request_of(bookmark="a00000000000.80" + MARKS))
    core.request(now=0.0)
    fed(core, progress("b00000000000.3;h=a00000000000.80", covers=False))
    assert not core.covers
    fed(core, progress("b00000000000.4;t=9;a00000000000.81"))
    assert core.covers


def test_an_older_server_that_knows_no_marks_gets_the_bookmark_without_them() -> None:
    """F6."""
    core = core_of(request_of(bookmark="a00000000000.80" + MARKS))
    assert core.request(now=0.0).bookmark == "a00000000000.80" + MARKS
    core.ended(InvalidArgument("no bookmark", reason="BOOKMARK_MALFORMED"), now=1.0, jitter=0.0)
    assert core.request(now=1.0).bookmark == "a00000000000.80"
    with pytest.raises(InvalidArgument):
        core.ended(InvalidArgument("no bookmark", reason="BOOKMARK_MALFORMED"), now=2.0, jitter=0.0)


def test_an_older_server_is_not_asked_to_go_on_for_one_that_has_come_from_elsewhere() -> None:
    """F8: it would leave out messages that the subscriber needs."""
    core = core_of(request_of(bookmark="a00000000000.80;h=b00000000000.7"))
    core.request(now=0.0)
    with pytest.raises(InvalidArgument):
        core.ended(InvalidArgument("no bookmark", reason="BOOKMARK_MALFORMED"), now=1.0, jitter=0.0)
