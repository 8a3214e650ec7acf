"""A filter that takes long keeps nobody waiting but its own subscribers, and they miss nothing (rule S6)."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import pytest

from sow_server.access.caller import Granted
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.stored import HEADER_BYTES
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import Delete, Expiration, MessageType, Publish, RecordMatcher, TopicSettings
from sow_server.filters import parse
from sow_server.filters.cost import cost_of
from sow_server.filters.parser import FUNCTIONS_MAX
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.services.records import selection
from sow_server.subscriptions.journal import replay
from sow_server.subscriptions.live import dispatch, groups, slices
from sow_server.subscriptions.live.judging import EFFORT_MAX, cost_of_rows, effort_of
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Wants
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, Follower, Subscribers

SLOW = "LENGTH(REPLACE(LOWER(/s), 'a', 'b')) > 2"
QUICK = "@key != 'x'"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", TopicSettings(expiration=Expiration.ENABLED))
    rig.create_topic("quiet", TopicSettings(expiration=Expiration.ENABLED, journal=False))
    yield rig
    rig.close()


@pytest.fixture
def subscribers(rig: Rig) -> Subscribers:
    return Subscribers(rig)


def document(size: int) -> bytes:
    return b'{"s":"%s"}' % (b"A" * size)


LARGE = document(400_000)
SMALL = document(9)


def told(follower: Follower) -> list[tuple[str, str, int]]:
    """The operation, the key and the size of a change."""
    return [(what, key, len(payload)) for what, key, payload in follower.news()]


class Asked:
    """Counts where filters are asked: while changes are dispatched, or while a subscriber reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, subscribers: Subscribers) -> None:
        self.dispatching: list[str] = []
        self.reading: list[str] = []
        self._running = False
        original, run = VersionMatcher.holds, subscribers.hub.dispatcher._run_slice

        def holds(matcher: VersionMatcher, version: object) -> bool:
            (self.dispatching if self._running else self.reading).append(matcher.text)
            return original(matcher, version)  # type: ignore[arg-type]  # as it came

        def run_slice() -> None:
            self._running = True
            run()
            self._running = False

        monkeypatch.setattr(VersionMatcher, "holds", holds)
        monkeypatch.setattr(subscribers.hub.dispatcher, "_run_slice", run_slice)


@pytest.mark.parametrize("topic", ["orders", "quiet"])
@pytest.mark.parametrize("options", [{}, {"oof": True}, {"changes": True}, {"conflation": SECOND, "oof": True}])
def test_a_filter_that_may_take_long_is_asked_by_readers_in_its_turn(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch, topic: str, options: dict[str, int]
) -> None:
    """300 nested functions on a record of 1 MB kept every Get waiting for 3.1 s. Order, focus and bookmarks hold, also
    without a journal."""
    slow = subscribers.subscribe(topic, filter=SLOW, **options)  # type: ignore[arg-type]  # flags by their names
    quick = subscribers.subscribe(topic, filter=QUICK)
    asked = Asked(monkeypatch, subscribers)
    for key, payload in (("a", SMALL), ("a", LARGE), ("b", LARGE), ("b", document(1)), ("c", SMALL)):
        rig.put(topic, key, payload)
    rig.delete(topic, "a")
    subscribers.settle()
    assert QUICK in asked.dispatching
    assert len(quick.pump()) == 5, "it does not wait"
    before = len(asked.dispatching)
    changed = [("put", "a", len(SMALL)), ("put", "a", len(LARGE)), ("put", "b", len(LARGE))]
    if "conflation" in options:
        assert told(slow) == []
        rig.time.tick(SECOND)
        assert told(slow) == [("put", "c", len(SMALL))]
    elif "changes" in options:
        left = [("put", "b", len(document(1))), ("put", "c", len(SMALL)), ("delete", "a", len(LARGE))]
        assert told(slow) == changed + left
    elif "oof" in options:
        left = [("oof match", "b", len(document(1))), ("put", "c", len(SMALL)), ("oof deleted", "a", len(LARGE))]
        assert told(slow) == changed + left
    else:
        assert told(slow) == [*changed, ("put", "c", len(SMALL))]
    assert len(asked.dispatching) == before
    assert any("LENGTH" in text for text in asked.reading)
    assert slow.subscription.position == quick.subscription.position == 6
    assert slow.subscription.queued_bytes == 0
    assert not slow.subscription.behind


def test_equal_subscribers_share_the_results_of_readers(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    followers = [subscribers.subscribe("orders", filter=SLOW) for _ in range(3)]
    asked = Asked(monkeypatch, subscribers)
    rig.put("orders", "a", LARGE)
    for follower in followers:
        assert told(follower) == [("put", "a", len(LARGE))]
    assert len(asked.reading) == 1
    assert asked.dispatching == []


def test_an_atomic_request_is_judged_whole(rig: Rig, subscribers: Subscribers) -> None:
    """S5: one large record in it, and all of it is judged by readers, in one frame."""
    slow = subscribers.subscribe("orders", filter=SLOW)
    quick = subscribers.subscribe("orders", filter=QUICK)
    rig.put("orders", "first", SMALL)
    rig.run(Publish("orders", [SMALL, LARGE, SMALL], ["a", "b", "c"], atomic=True))
    rig.put("orders", "last", SMALL)
    for follower in (slow, quick):
        assert [key for _, key, _ in told(follower)] == ["first", "a", "b", "c", "last"]
        whole = [frame for frame in follower.change_frames() if frame.atomic]
        assert sum(len(frame.rows) for frame in whole) == 3
        assert [frame.more for frame in whole] == [*[True] * (len(whole) - 1), False]
        assert whole[-1].bookmark == 4


def test_the_queue_of_changes_to_judge_is_bounded(rig: Rig) -> None:
    """subscription [3]: beyond its queue the subscriber reads the journal; nothing is missing or comes twice."""
    subscribers = Subscribers(rig, queue_bytes_max=1_000_000)
    slow = subscribers.subscribe("orders", filter=SLOW)
    for number in range(6):
        rig.put("orders", f"k{number}", LARGE)
    subscribers.settle()
    assert slow.subscription.behind
    assert slow.subscription.queued_bytes <= 1_000_000
    assert [key for _, key, _ in told(slow)] == [f"k{number}" for number in range(6)]
    assert not slow.subscription.behind


def test_a_bookmark_does_not_cover_changes_that_are_not_judged_yet(rig: Rig, subscribers: Subscribers) -> None:
    """subscription [2]."""
    slow = subscribers.subscribe("orders", filter=SLOW, progress=SECOND)
    rig.put("orders", "a", LARGE)
    rig.put("orders", "x", SMALL)
    subscribers.settle()
    rig.time.tick(SECOND)
    slow.pump(frames_max=1)
    assert slow.bookmark == 0
    assert [key for _, key, _ in told(slow)] == ["a", "x"]
    assert slow.bookmark == 2


def test_a_slice_ends_between_two_filters(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many filters, each of them allowed, must not take a turn of the loop together. Nothing is told before all have
    been asked, and then everything."""
    monkeypatch.setattr(groups, "EFFORT_MAX", 0)  # every change is looked at closely
    looks = itertools.count()
    monkeypatch.setattr(slices, "LOOK_NANOS", 1)
    subscribers = Subscribers(rig, ticks=lambda: next(looks) * slices.SLICE_SECONDS / 2)
    followers = [subscribers.subscribe("orders", filter=f"LENGTH(/s) > {number}") for number in range(10)]
    rig.put("orders", "a", SMALL)
    subscribers.sync()
    turns = 0
    while subscribers.loop.turn():
        turns += 1
        if subscribers.hub.dispatcher.position == 0:
            assert all(follower.pump() == [] for follower in followers)
    assert turns > 4
    assert [told(follower) for follower in followers] == [[("put", "a", len(SMALL))]] * 9 + [[]]


def test_a_bookmark_does_not_cover_rows_that_wait_while_a_slice_pauses(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """subscription [2]. Story: a slice that paused in the midst of a change kept the rows of the changes before it, and
    progress told a position behind them. After a lost connection the subscriber never got them."""
    monkeypatch.setattr(groups, "EFFORT_MAX", 0)
    monkeypatch.setattr(slices, "LOOK_NANOS", 1)
    looks = itertools.count()
    subscribers = Subscribers(rig, ticks=lambda: next(looks) * slices.SLICE_SECONDS / 5)
    followers = [
        subscribers.subscribe("orders", filter=f"LENGTH(/s) > {number}", progress=SECOND) for number in range(8)
    ]
    for key in ("a", "b", "c", "d", "e", "f"):
        rig.put("orders", key, SMALL)
    subscribers.sync()
    paused = 0
    while subscribers.loop.turn():
        rig.time.tick(SECOND)
        for follower in followers:
            follower.pump()
            assert follower.bookmark is not None
            assert len(follower.changes()) >= follower.bookmark
        paused += subscribers.hub.dispatcher.mid_change and subscribers.hub.dispatcher.position > 0
    assert paused


@pytest.mark.parametrize("what", ["backlog is dropped", "one leaves", "topic is deleted"])
def test_events_in_the_middle_of_a_change(rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(groups, "EFFORT_MAX", 0)
    monkeypatch.setattr(slices, "LOOK_NANOS", 1)
    looks = itertools.count()
    subscribers = Subscribers(rig, ticks=lambda: next(looks) * slices.SLICE_SECONDS / 2)
    followers = [subscribers.subscribe("orders", filter=f"LENGTH(/s) > {number}") for number in range(8)]
    for key in ("a", "b"):
        rig.put("orders", key, SMALL)
    subscribers.sync()
    subscribers.loop.turn()
    assert subscribers.hub.dispatcher._unit is not None
    if what == "backlog is dropped":
        monkeypatch.setattr(dispatch, "BACKLOG_BYTES_MAX", -1)
        rig.put("orders", "c", SMALL)
        subscribers.sync()
        subscribers.loop.turn()
        subscribers.loop.turn()
        monkeypatch.setattr(dispatch, "BACKLOG_BYTES_MAX", 10**9)
    elif what == "one leaves":
        followers.pop().close()
        followers.pop(0).close()
    else:
        rig.delete_topic("orders")
    subscribers.settle()
    keys = ["a", "b", "c"] if what == "backlog is dropped" else ["a", "b"]
    for follower in followers:
        assert [key for _, key, _ in told(follower)] == keys
        if what == "topic is deleted":
            assert follower.error is not None
            assert follower.error.reason is Reason.TOPIC_DELETED


def test_a_step_of_a_replay_ends_when_its_time_is_over(
    rig: Rig, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """replay [1]: 2000 changes of some milliseconds each would hold a reader thread for long."""
    for number in range(5):
        rig.put("orders", f"k{number}", SMALL)
    monkeypatch.setattr(replay, "READ_SECONDS", -1.0)
    read, found = replay.Replay.read, []

    def reading(*arguments: object) -> replay.Replayed | replay.JournalGap:
        found.append(read(*arguments))  # type: ignore[arg-type]  # as they came
        return found[-1]

    monkeypatch.setattr(replay.Replay, "read", reading)
    follower = subscribers.subscribe("orders", filter=SLOW, start=EARLIEST)
    assert [row.key for row in follower.changes()] == [b"k%d" % number for number in range(5)]
    assert [one.position for one in found if isinstance(one, replay.Replayed)] == [1, 2, 3, 4, 5]


# --- elsewhere -------------------------------------------------------------------------------------------------------


def test_the_writer_does_not_ask_a_filter_that_may_take_long(rig: Rig, subscribers: Subscribers) -> None:
    """L7: who takes a record that is due at once is counted in the writer's thread, for which everybody waits."""
    slow = subscribers.subscribe("orders", filter=SLOW)
    subscribers.subscribe("orders", filter=QUICK)
    takers = rig.topic("orders").takers
    assert takers is not None
    header = bytes(HEADER_BYTES)
    assert takers(b"a", header + SMALL, math.inf) == 2
    assert takers(b"a", header + LARGE, math.inf) == 1
    rig.put("orders", "a", LARGE, ttl=0)
    assert told(slow) == [("put", "a", len(LARGE))], "it is handed over all the same"


def test_the_writer_evaluates_a_filter_only_for_records_that_changed_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete by filter asked its filter of every record twice, the second time in the writer's thread."""
    asked: list[bytes] = []
    unless_unchanged = selection._unless_unchanged

    def counting(matches: RecordMatcher, sequence: int) -> RecordMatcher:
        def counted(key: bytes, value: bytes) -> bool:
            asked.append(key)
            return matches(key, value)

        return unless_unchanged(counted, sequence)

    monkeypatch.setattr(selection, "_unless_unchanged", counting)
    for key in "abc":
        rig.put("orders", key, SMALL)

    async def select() -> selection.Selected:
        with ThreadPoolExecutor(1) as readers:
            async with aclosing(
                selection.selected(rig.store.cuts, readers, Granted(rig.topic("orders"), UNRESTRICTED), SLOW)
            ) as batches:
                return await anext(batches)

    found = asyncio.run(select())
    assert found.keys == [b"a", b"b", b"c"]
    rig.put("orders", "b", document(1))
    rig.put("orders", "c", document(7))
    rig.run(Delete("orders", found.keys, matches=found.matches))
    assert [key for key in "abc" if rig.get("orders", key) is None] == ["a", "c"]
    assert asked == [b"b", b"c"]


# --- the estimate ----------------------------------------------------------------------------------------------------


def nanos(rig: Rig, text: str, payload: bytes) -> int:
    return effort_of(rig.topic("orders"), payload, None).of(cost_of(parse(text)))


def test_usual_filters_are_little_work(rig: Rig) -> None:
    order = b'{"id":17,"symbol":"IBM","price":101.5,"legs":[{"px":1},{"px":2}],"note":"%s"}' % (b"x" * 4000)
    for text in (
        "/price > 9 AND /symbol IN ('IBM', 'MSFT')",
        "/legs/px > 1 OR LOWER(/note) LIKE '^x'",
        "@key = 'a'",
        "/price * 2 > 9",
    ):
        assert nanos(rig, text, order) < EFFORT_MAX / 5, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "payload"),
    [
        (SLOW, document(2_000_000)),
        (" OR ".join([f"LENGTH(TRIM(/s)) = {number}" for number in range(FUNCTIONS_MAX // 2)]), document(20_000)),
        ("LENGTH(" + "REPLACE(" * 6 + "/s" + ", 'a', 'aaaaaaaaaa')" * 6 + ") > 1", document(100)),
        ("LENGTH(REPLACE(/s, 'a', /s)) > 1", document(100)),
        ("LENGTH(CONCAT(" + ",".join(["/s"] * 2000) + ")) > 1", document(1000)),
        ("/s CONTAINS (" + ",".join([f"'{number}'" for number in range(5000)]) + ")", document(100_000)),
        (" OR ".join([f"/s LIKE 'a{number}|b'" for number in range(100)]), document(20_000)),
        (" OR ".join([f"/a > {number}" for number in range(3000)]), b'{"a":[' + b"1," * 1000 + b"1]}"),
        ("/a/b/c > 1 AND /a BETWEEN 1 AND /b", b'{"a":[' + b"1," * 100_000 + b"1]}"),
        (" OR ".join(["/a * /a > 1"] * 200), b'{"a":' + b"9" * 4000 + b"}"),
        ("LENGTH(CONCAT(" + ",".join(["-/a"] * 300) + ")) > 1", b'{"a":' + b"9" * 4000 + b"}"),
    ],
)
def test_slow_filters_are_known_by_their_form(rig: Rig, text: str, payload: bytes) -> None:
    assert nanos(rig, text, payload) > EFFORT_MAX


@pytest.mark.parametrize(
    "text", ["{} BEGINS WITH '1'", "@key = {}", "ROUND({}, -7) = 1", "LENGTH({}) = 1", "{} * {} = 1"]
)
def test_large_integers_that_a_filter_makes_by_itself_are_work(rig: Rig, text: str) -> None:
    """Story: the record is short, so the text of such an integer counted as 2 µs; it takes 220."""
    assert nanos(rig, text.format(*[f"(/price * {'9' * 4200})"] * 2), document(1)) > 100_000
    assert nanos(rig, text.format(*["(/price * 99)"] * 2), document(1)) < 10_000


def test_arrays_are_looked_for_where_there_may_be_some(rig: Rig) -> None:
    for kind, elements in ((MessageType.JSON, 3), (MessageType.MSGPACK, 7), (MessageType.FIX, 1)):
        rig.create_topic(kind.name, TopicSettings(message_type=kind))
        assert effort_of(rig.topic(kind.name), b"[1,2,3]", None).elements == elements
    header = b"[," * 20
    assert effort_of(rig.topic("orders"), b"{}", header + b"{}").elements == 2, "no bytes of the header"


def test_hidden_fields_in_arrays_are_work_for_reader_threads(rig: Rig) -> None:
    """Story: whatever a subscriber's projection had to do, it counted as 30 ns a byte, and ran on the event loop."""
    topic = rig.topic("orders")
    effort = effort_of(topic, b'{"legs":[%s]}' % b",".join([b'{"px":1}'] * 10_000), None)
    selecting = Wants(projection=Projection(include=(("legs", "px"),)))
    hiding = Wants(projection=Projection(hidden=(("legs", "iban"),)))
    assert effort.of(cost_of_rows(selecting)) <= EFFORT_MAX < effort.of(cost_of_rows(hiding))
    assert cost_of_rows(Wants()).of(1000, 1000) == 0
