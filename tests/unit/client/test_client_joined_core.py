"""The pure core of subscriptions over several cells: outages, cells that come, and topics that move (rule C21).

It shows _joined_core [2] to [5].
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any
from unittest.mock import Mock

import pytest

from sow.v1 import sow_pb2
from sow_client import Change, DeadlineExceeded, InvalidArgument, NotFound, ResyncRequired, SowError, Unavailable
from sow_client._cells import Place
from sow_client._joined_core import JoinedCore, PartCore, gone
from sow_client._statuses import AllRefused
from sow_client.blocking._joining import CellCalls, Parts
from tests.support.fakes.subscriptions import Entry, Journal, columns, put

NOTHING = NotFound("no topic matches", reason="PATTERN_MATCHES_NOTHING")
CUT = Unavailable("the connection broke", reason="UNREACHABLE")


class Cell:
    """A cell, and the call that follows it."""

    def __init__(self, name: str, topics: set[str]) -> None:
        self.name = name
        self.topics = topics
        self.version = 1
        self.journal = Journal(epoch=name * 4)
        self.call: Iterator[sow_pb2.SubscribeResponse | None] | None = None
        self.seen: set[str] = set()
        self.leaves_at: int | None = None
        """The call ends once everything up to there is sent; the journal may go on."""

    def frames(self, request: sow_pb2.SubscribeRequest) -> Iterator[sow_pb2.SubscribeResponse | None]:
        """The frames of a call; None: there is none at the moment. Raises SowError at its end."""
        journal, at = self.journal, self.journal.last
        if request.sow:
            begin = sow_pb2.SnapshotBegin(bookmark=journal.bookmark(at), as_of_micros=1)
            yield sow_pb2.SubscribeResponse(snapshot_begin=begin)
            rows: dict[str, dict[str, tuple[bytes, int]]] = {}
            for sequence, entry in self.entries(0, at):
                rows.setdefault(entry.topic, {})[entry.key] = entry.payload or b"", sequence
            for topic, found in rows.items():
                records = columns([(key, payload, sequence) for key, (payload, sequence) in found.items()])
                yield sow_pb2.SubscribeResponse(snapshot=sow_pb2.SnapshotBatch(topic=topic, records=records))
            yield sow_pb2.SubscribeResponse(snapshot_end=sow_pb2.SnapshotEnd(bookmark=journal.bookmark(at)))
        else:
            if request.bookmark:
                at = int(request.bookmark.partition(".")[2])
            elif request.earliest:
                at = 0
            yield journal.progress(at)
        while self.leaves_at != 0:
            last = journal.last
            for sequence, _ in self.entries(at, last):
                at = sequence
                yield next(journal.changes(sequence - 1, sequence))
                if self.leaves_at == 0:
                    raise self.moved()
            at = last
            yield journal.progress(at)
            if self.leaves_at is not None and at >= self.leaves_at:
                raise self.moved()
            while journal.last == at and self.leaves_at is None:
                yield None
        raise self.moved()

    def moved(self) -> SowError:
        details = {"complete": "true", "placement_version": str(self.version)}
        return Unavailable("topics have come or gone", reason="ACCESS_CHANGED", details=details)

    def entries(self, after: int, upto: int) -> Iterator[tuple[int, Entry]]:
        for commit in self.journal.commits:
            (entry,) = commit.entries
            if after < commit.first <= upto and entry.topic in self.seen:
                yield commit.first, entry


class World:
    """Two cells, a topic of each and one that moves, and a subscriber, who takes one step at a time."""

    def __init__(self, draw: random.Random, *, sow: bool) -> None:
        self.draw = draw
        self.cells = {"a": Cell("a", {"a", "moving"}), "b": Cell("b", {"b"})}
        self.place = {"a": "a", "b": "b", "moving": "a"}
        self.published: list[tuple[str, str]] = []
        self.told: list[tuple[str, str]] = []
        self.shown: dict[str, dict[str, bytes]] = {}
        self.ends = self.restarts = 0
        self.sow = sow
        request = sow_pb2.SubscribeRequest(topic_pattern=".*", sow=sow, earliest=not sow)
        self.core = JoinedCore(request, None, retry_for=30.0, connect_timeout=5.0)
        self.core.begin("a", request)
        self.core.found(["a", "b"])

    def publish(self) -> None:
        topic, value = self.draw.choice(list(self.place)), str(len(self.published))
        self.cells[self.place[topic]].journal.commit(put("k", value, topic=topic))
        self.published.append((topic, f'"{value}"'))

    def move(self) -> None:
        """The topic moves with its last record. The cell that it leaves ends its call once all of it is sent, and the
        other one at once."""
        source = self.cells[self.place["moving"]]
        target = self.cells["b" if source.name == "a" else "a"]
        if any(cell.call is None or cell.leaves_at is not None for cell in (source, target)):
            return  # else a change may be missing, which is told
        source.topics.discard("moving")
        target.topics.add("moving")
        last = [value for topic, value in self.published if topic == "moving"][-1:]
        for value in last:
            target.journal.commit(Entry("k", value.encode(), topic="moving"))
        for cell in (source, target):
            cell.version += 1
        source.leaves_at, target.leaves_at = source.journal.last, 0
        self.place["moving"] = target.name

    def follow(self) -> None:
        """A part makes its call, or takes in its next frame."""
        part = self.draw.choice(list((self.core.parts or {}).values()))
        cell = self.cells[part.cell]
        if length_hint(part.pending):
            return
        if cell.call is None:
            self.call(part, cell)
            return
        try:
            frame = next(cell.call)
        except SowError as error:
            cell.call = None
            part.ended(error, now=0.0, jitter=0.5)
        else:
            if frame is not None:
                part.feed(frame)
            self.end_one_that_goes_back(part)

    def call(self, part: PartCore, cell: Cell) -> None:
        request = part.request(now=0.0)
        if part.placed(cell.version, request):
            for back in self.core.newer(part):
                self.look_at(back)
        cell.leaves_at, cell.seen = None, set(cell.topics)
        cell.call = cell.frames(request)

    def look_at(self, part: PartCore) -> None:
        cell = self.cells[part.cell]
        if not part.knows(cell.version):
            part.saw(cell.version, cell.journal.bookmark(cell.journal.last))
        self.end_one_that_goes_back(part)

    def end_one_that_goes_back(self, part: PartCore) -> None:
        if part.is_to_end and self.cells[part.cell].call is not None:
            self.cells[part.cell].call = None
            part.ended(CUT, now=0.0, jitter=0.5)

    def cut(self) -> None:
        """A call breaks. After another placement that would end the subscription."""
        part = self.draw.choice(list((self.core.parts or {}).values()))
        cell = self.cells[part.cell]
        if cell.call is not None and cell.leaves_at is None and not length_hint(part.pending):
            cell.call = None
            part.ended(CUT, now=0.0, jitter=0.5)

    def restart(self) -> None:
        """The program goes on in another process, from its bookmarks, unless that would raise ResyncRequired."""
        starts = self.core.bookmarks
        if self.sow or not isinstance(starts, dict):
            return
        if any(int(at.rpartition(";p=")[2]) != self.cells[cell].version for cell, at in starts.items()):
            return
        for cell in self.cells.values():
            if cell.leaves_at is not None:
                return  # its version is about to be another one for the next call
        self.restarts += 1
        request = sow_pb2.SubscribeRequest(topic_pattern=".*")
        self.core = JoinedCore(request, starts, retry_for=30.0, connect_timeout=5.0)
        self.core.begin("a", request, self.cells)
        self.core.found(["a", "b"])
        for cell in self.cells.values():
            cell.call = None

    def take(self) -> None:
        for change in self.core.pending:
            self._told(change)
            return
        self.core.next_frame()

    def _told(self, change: Change) -> None:
        if change.op == "snapshot_end":
            self.ends += 1
        elif change.op == "resync":
            self.shown.pop(change.topic, None)
        else:
            assert change.record is not None
            assert change.topic
            self.told.append((change.topic, change.record.payload.decode()))
            self.shown.setdefault(change.topic, {})[change.key] = change.record.payload

    def settle(self) -> None:
        for _ in range(2_000):
            self.follow()
            self.take()


@pytest.mark.parametrize("sow", [False, True])
@pytest.mark.parametrize("number", range(12))
def test_nothing_is_lost_and_the_last_state_comes_last(seed: int, number: int, sow: bool) -> None:
    world = World(random.Random(seed + number), sow=sow)
    steps: list[Callable[[], None]] = [world.publish, world.follow, world.follow, world.take, world.take, world.cut]
    for _ in range(400):
        world.draw.choice(steps)()
        if world.draw.random() < 0.02:
            world.move()
        if world.draw.random() < 0.1:
            world.restart()
    world.publish()
    world.settle()
    last = {topic: {"k": value.encode()} for topic, value in world.published}
    assert world.shown == last
    if sow:
        assert world.ends > 0
    else:
        assert set(world.published) <= set(world.told)
        still = [one for one in world.told if one[0] != "moving"]
        for topic in "ab":
            values = [int(value.strip('"')) for name, value in still if name == topic]
            assert values[-1] == max(values)


def test_a_program_that_stops_across_a_move_is_told() -> None:
    """Its bookmarks have the placement of each cell: what a topic got before it left would be missing."""
    world = World(random.Random(1), sow=False)
    for _ in range(20):
        world.publish()
        world.settle()
    starts = world.core.bookmarks
    assert isinstance(starts, dict)
    assert starts["a"].endswith(";p=1")
    world.publish()
    world.move()
    resumed = JoinedCore(sow_pb2.SubscribeRequest(topic_pattern=".*"), starts, retry_for=30.0, connect_timeout=5.0)
    resumed.begin("a", sow_pb2.SubscribeRequest(), world.cells)
    assert resumed.home.request(now=0.0).bookmark == starts["a"].removesuffix(";p=1")
    with pytest.raises(ResyncRequired, match="it has another placement"):
        resumed.home.placed(2, sow_pb2.SubscribeRequest())
    with pytest.raises(ResyncRequired, match="there is no cell 'b' any more"):
        resumed.begin("a", sow_pb2.SubscribeRequest(), ["a"])


@pytest.mark.parametrize("waits", [True, False])
def test_a_cell_that_refuses_is_waited_for_if_nothing_is_missed_meanwhile(waits: bool) -> None:
    """Story: a cell whose server was not up yet, and so refused at once, ended the subscription to all others."""
    request = sow_pb2.SubscribeRequest(topic_pattern=".*", earliest=waits)
    core = JoinedCore(request, None, retry_for=30.0, connect_timeout=5.0)
    core.begin("a", request)
    core.found(["a", "b"])
    (part,) = (part for part in (core.parts or {}).values() if part.cell == "b")
    part.request(now=0.0)
    refused = AllRefused("cannot connect to b:1", reason="UNREACHABLE")
    if waits:
        assert part.ended(refused, now=0.0, jitter=0.5) > 0
        assert part.interruption is not None
        assert (part.interruption.message, type(part.interruption)) == (
            "the cell b: cannot connect to b:1",
            Unavailable,
        )
    else:
        with pytest.raises(Unavailable, match="the cell b: cannot connect"):
            part.ended(refused, now=0.0, jitter=0.5)


def test_a_cell_without_a_topic_is_waited_for_as_the_others_are() -> None:
    """Story: a cell without a topic of the pattern was restarted, and the subscription to all others ended. So it did
    where a cell accepted calls and said nothing."""
    request = sow_pb2.SubscribeRequest(topic_pattern=".*")
    core = JoinedCore(request, None, retry_for=60.0, connect_timeout=5.0)
    core.begin("a", request)
    core.found(["a", "b"])
    assert core.parts is not None
    part = core.parts["b"]
    part.request(now=0.0)
    part.ended(NOTHING, now=0.0, jitter=0.5)
    silent = DeadlineExceeded("no answer in time", reason="DEADLINE_EXCEEDED")
    refused = AllRefused("cannot connect to b:1", reason="UNREACHABLE")
    for now, error in ((10.0, silent), (20.0, CUT), (30.0, refused)):
        part.request(now=now - 10.0)
        assert part.ended(error, now=now, jitter=0.5) > 0
        assert part.interruption is not None
    part.request(now=30.0)
    part.ended(NOTHING, now=30.0, jitter=0.5)
    told = [(type(one), one.message, one.reason) if one else None for one in core.heard()]
    assert told == [(Unavailable, "the cell b: no answer in time", "UNREACHABLE"), None], "told once"


def part_at(version: int, journal: Journal) -> PartCore:
    """A part of the cell a whose call has begun with a placement, after 5."""
    request = sow_pb2.SubscribeRequest(topic_pattern=".*")
    core = JoinedCore(request, {"a": journal.bookmark(5)}, retry_for=30.0, connect_timeout=5.0)
    core.begin("a", request, ["a"])
    core.home.placed(version, core.home.request(now=0.0))
    core.home.feed(journal.progress(5))
    return core.home


def test_a_cell_that_left_in_order_may_leave_again_before_the_next_call() -> None:
    """The call has ended with version 2, and the next one comes with version 3: what left with 3 may be missing."""
    ended = {"complete": "true", "placement_version": "2"}
    for version in (2, 3):
        part = part_at(1, Journal())
        part.ended(Unavailable("left", reason="ACCESS_CHANGED", details=ended), now=0.0, jitter=0.5)
        request = part.request(now=0.0)
        if version == 2:
            assert part.placed(1, request), "the cell names it a little later than it ends calls"
            assert part.version == 2
        else:
            with pytest.raises(ResyncRequired, match="it has another placement"):
                part.placed(version, request)


def test_a_call_that_goes_on_knows_a_placement_once_it_is_behind_its_begin() -> None:
    """A slow program may still have changes to come of a topic that has left."""
    journal = Journal()
    part = part_at(1, journal)
    assert not part.knows(2)
    part.saw(2, journal.bookmark(9))
    assert part.knows(2)
    assert part.version == 1, "it is behind"
    part.feed(journal.progress(9))
    assert part.knows(2)
    assert part.version == 2


def test_bookmarks_lead_back_to_before_changes_that_came_too_early() -> None:
    """b has shown the topic before a was through with it: the last state is to come last in a resumed one, too."""
    world = World(random.Random(1), sow=False)
    core, (a, b) = world.core, (world.cells["a"], world.cells["b"])
    assert core.parts is not None
    for version, cell in ((2, b), (1, a)):
        part = core.parts[cell.name]
        cell.journal.commit(put("k", cell.name, topic="moving"))
        part.placed(version, part.request(now=0.0))
        part.feed(cell.journal.progress(0))
        part.feed(next(cell.journal.changes(0, 1)))
        world.take()
        world.take()
    assert [value for _, value in world.told] == ['"b"', '"a"']
    assert core.bookmarks == {"a": a.journal.bookmark(1) + ";p=1"}, "b has begun with its earliest change"


def test_a_placement_that_comes_with_the_begin_of_a_call_is_told() -> None:
    """The cell was asked before, and the call may have begun with the new one: topics that have left are not in it."""
    part = part_at(1, Journal())
    assert part.began(1)
    assert not part.is_new
    part.ended(CUT, now=0.0, jitter=0.5)
    part.placed(1, part.request(now=0.0))
    part.ended(NOTHING, now=0.0, jitter=0.5)
    assert not part.began(2)
    with pytest.raises(ResyncRequired, match="it has another placement"):
        part.placed(2, part.request(now=0.0))


def test_a_placement_that_comes_with_the_first_topic_of_a_cell_takes_nothing_away() -> None:
    """Story: a topic moved to a cell that had none of the pattern, in the moment in which it was asked again."""
    journal = Journal()
    part = part_at(1, journal)
    part.ended(NOTHING, now=0.0, jitter=0.5)
    part.placed(1, part.request(now=0.0))
    part.feed(journal.progress(0))
    assert part.is_new
    assert part.began(2)
    left = {"complete": "false", "placement_version": "2"}
    part.ended(Unavailable("left", reason="ACCESS_CHANGED", details=left), now=0.0, jitter=0.5)
    with pytest.raises(ResyncRequired, match="it has another placement"):
        part.placed(2, part.request(now=0.0))


def test_a_part_that_goes_back_waits_for_its_cell_and_ends_as_any_other() -> None:
    """It called again without a pause and without an end, whatever the cell answered, and nobody was told."""
    part = part_at(1, Journal())
    part.go_back()
    assert part.ended(CUT, now=0.0, jitter=0.5) == 0.0
    part.request(now=0.0)
    assert part.ended(CUT, now=0.0, jitter=0.5) > 0
    assert part.interruption is not None
    part.request(now=0.0)
    with pytest.raises(SowError, match="has left the placement"):
        part.ended(gone("a"), now=0.0, jitter=0.5)
    assert part.is_over


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (InvalidArgument("token: goes to another machine over TLS only", reason="INVALID_ARGUMENT"), InvalidArgument),
        ({"": Place("", "", None)}, ResyncRequired),
        (CUT, None),
    ],
)
def test_what_home_tells_later_ends_a_subscription_that_would_miss_topics(
    told: SowError | dict[str, Place[Any]], error: type[SowError] | None
) -> None:
    """Its answer was passed over: a cell to which the client does not go, and that there are no cells any more."""
    core = JoinedCore(sow_pb2.SubscribeRequest(topic_pattern=".*"), None, retry_for=60.0, connect_timeout=5.0)
    places = Mock(side_effect=[told])
    parts = Parts(core, CellCalls(places, Mock(), Mock(), Mock()))
    parts.look()
    assert type(parts.failure) is (error or type(None))
    assert parts.found is None


@pytest.mark.parametrize("cut", [False, True])
def test_two_topics_that_swap_their_cells_lose_nothing(cut: bool) -> None:
    """C21. Story: b was late with the topic that has come to a, so a was to go back. But a still owed changes of the
    topic that has gone to b, and to end its call would have passed them over."""
    world = World(random.Random(1), sow=False)
    core, (a, b) = world.core, (world.cells["a"], world.cells["b"])
    assert core.parts is not None
    for cell in (b, a, b):
        part = core.parts[cell.name]
        at = cell.journal.last
        cell.journal.commit(put("k", cell.name, topic="swapped"))
        if not part.stood:
            part.placed(1, part.request(now=0.0))
            part.feed(cell.journal.progress(0))
        part.feed(next(cell.journal.changes(at, at + 1)))
        world.take()
        world.take()
    assert [value for _, value in world.told] == ['"b"', '"a"', '"b"']
    b.version, (of_a, of_b) = 2, (core.parts["a"], core.parts["b"])
    of_b.ended(b.moved(), now=0.0, jitter=0.5)
    assert of_b.placed(2, of_b.request(now=0.0))
    assert core.newer(of_b) == [of_a]
    assert not of_a.knows(2)
    a.journal.commit(put("k", "last", topic="a"))
    of_a.saw(2, a.journal.bookmark(2))
    ends = [of_a.is_to_end]
    if cut:
        assert ends == [False]
        of_a.ended(CUT, now=0.0, jitter=0.5)
        with pytest.raises(ResyncRequired, match="it has another placement"):
            of_a.placed(2, of_a.request(now=0.0))
    else:
        of_a.feed(next(a.journal.changes(1, 2)))
        ends.append(of_a.is_to_end)  # it is not handed out
        world.take()
        world.take()
        of_a.feed(a.journal.progress(2))
        assert [*ends, of_a.is_to_end] == [False, False, True]
        of_a.ended(CUT, now=0.0, jitter=0.5)
        request = of_a.request(now=0.0)
        of_a.placed(2, request)
        assert request.bookmark == a.journal.bookmark(0), "before its first change of the topic that has come"
