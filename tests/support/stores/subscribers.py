"""Subscriptions on a `Rig`, driven in the test's own thread: nothing is dispatched or sent between two statements.

subscribers = Subscribers(rig)
follower = subscribers.subscribe(topic="orders", filter="/px > 2", sow=True, oof=True)
rig.put("orders", "a", b'{"px":3}')
subscribers.settle()
assert follower.rows() == [("put", "a", b'{"px":3}')]

`rig` and `subscribers` are fixtures for test modules to import.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import pytest

from sow_server.engine.durables import Durable
from sow_server.engine.store import Store
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import Expiration, Lifetime, LifetimeKind, TopicSettings
from sow_server.engine.values.policies import Declared
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.services.wire.topic_filters import AskedView, TopicFilters
from sow_server.subscriptions.durable.consumer import Attachment, Consumer
from sow_server.subscriptions.durable.consumer_registry import Consumers
from sow_server.subscriptions.frames import (
    ChangeFrame,
    ChangeOp,
    ChangeReason,
    DurableBegin,
    Frame,
    GapNotice,
    Progress,
    Row,
    SnapshotBatch,
    SnapshotEnd,
)
from sow_server.subscriptions.hub import Hub, HubOptions
from sow_server.subscriptions.request import FROM_NOW, PROGRESS_MICROS, Request, Start, StartKind, check
from sow_server.subscriptions.results.difference import rows_of
from sow_server.subscriptions.results.fed import Asked
from sow_server.subscriptions.results.follower import LiveResult
from sow_server.subscriptions.results.live_results import RESULT_BYTES_MAX, LiveResults
from sow_server.subscriptions.stream import Machine
from sow_server.subscriptions.subscription import Read, Send, Subscription
from tests.support.stores.stores import Rig

T = TypeVar("T")

JSON: Final = TopicSettings(expiration=Expiration.ENABLED)
EARLIEST: Final = Start(StartKind.EARLIEST)
NAMES: Final = {
    (ChangeOp.PUT, ChangeReason.NONE): "put",
    (ChangeOp.PUT, ChangeReason.TOUCHED): "touched",
    (ChangeOp.OOF, ChangeReason.DELETED): "oof deleted",
    (ChangeOp.OOF, ChangeReason.EXPIRED): "oof expired",
    (ChangeOp.OOF, ChangeReason.MATCH): "oof match",
    (ChangeOp.OOF, ChangeReason.NOT_PERMITTED): "oof not permitted",
    (ChangeOp.OOF, ChangeReason.WINDOW): "oof window",
    (ChangeOp.OOF, ChangeReason.NONE): "oof",
    (ChangeOp.DELETE, ChangeReason.NOT_PERMITTED): "delete not permitted",
    (ChangeOp.DELETE, ChangeReason.NONE): "delete",
    (ChangeOp.EXPIRE, ChangeReason.NONE): "expire",
}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A store with the topic `orders`, of JSON."""
    rig = Rig(tmp_path)
    rig.create_topic("orders", JSON)
    yield rig
    rig.close()


@pytest.fixture
def subscribers(rig: Rig) -> Subscribers:
    return Subscribers(rig)


class Loop:
    """An event loop that turns when it is told to."""

    def __init__(self) -> None:
        self._soon: deque[Callable[[], None]] = deque()

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def turn(self) -> bool:
        """Runs the next callback; False: there was none."""
        if not self._soon:
            return False
        self._soon.popleft()()
        return True

    def run(self) -> None:
        """Runs all queued work, and the work that follows from it."""
        while self.turn():
            pass


def at(bookmark: int, rig: Rig) -> Start:
    """A start at a position."""
    return Start(StartKind.BOOKMARK, bookmark=rig.store.instance.bookmark(bookmark))


def px(number: int) -> bytes:
    """A payload."""
    return b'{"px":%d}' % number


def ttl(micros: int) -> Lifetime:
    return Lifetime(LifetimeKind.TTL, micros)


def refused(make: object, *arguments: object, **options: object) -> StoreError:
    """The error that a call ends with."""
    with pytest.raises(StoreError) as caught:
        make(*arguments, **options)  # type: ignore[operator]  # a method of the fixture
    return caught.value


def behind(follower: Follower) -> bool:
    """Whether it is served from the journal."""
    return follower.subscription.behind


def request(
    store: Store,
    *,
    topic: str = "",
    pattern: str = "",
    filter: str = "",  # noqa: A002  # as everywhere
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    sow: bool = False,
    oof: bool = False,
    delta: bool = False,
    changes: bool = False,
    empty_deltas: bool = False,
    start: Start = FROM_NOW,
    conflation: int = 0,
    progress: int = PROGRESS_MICROS,
    batch_size: int = 1000,
    restriction: Restriction = UNRESTRICTED,
) -> Request:
    """The request of a subscriber. Raises StoreError."""

    filters = TopicFilters(
        store.cuts, AskedView(filter, include=include, exclude=exclude), batch_size, lambda topic: restriction
    )
    asked = Request(
        filters.view,
        filters.snapshot,
        topic=topic,
        pattern=pattern,
        sow=sow,
        oof=oof,
        delta=delta,
        changes=changes,
        empty_deltas=empty_deltas,
        start=start,
        conflation_micros=conflation,
        progress_micros=progress,
        batch_size=batch_size,
    )
    check(asked, selects=bool(include or exclude))
    return asked


class Driven:
    """Drives the machines of live results when it is told to."""

    def __init__(self) -> None:
        self._running: dict[Machine, tuple[Callable[[Frame], None], Callable[[StoreError], None]]] = {}

    def __call__(
        self, machine: Machine, hear: Callable[[Frame], None], ended: Callable[[StoreError], None]
    ) -> Callable[[], None]:
        self._running[machine] = hear, ended

        def end() -> None:
            if self._running.pop(machine, None) is not None:
                machine.close()

        return end

    def run(self, *, steps_max: int = 10_000) -> None:
        """Lets each make so many steps, at most, unless it waits before."""
        waiting = set(self._running)
        for machine, (hear, ended) in list(self._running.items()):
            for _ in range(steps_max):
                if machine not in self._running:
                    break
                try:
                    step = machine.step()
                except StoreError as error:
                    del self._running[machine]
                    machine.close()
                    ended(error)
                    break
                match step:
                    case Send(frame):
                        hear(frame)
                    case Read(run):
                        machine.took(run())
                    case _:
                        break
        if steps_max > 1 and not waiting.issuperset(self._running):  # one has begun another
            self.run(steps_max=steps_max)


class Subscribers:
    """Owns the hub of a rig's open store; make another one when the rig has been opened again."""

    def __init__(
        self,
        rig: Rig,
        *,
        ticks: Callable[[], float] = lambda: 0.0,
        result_bytes_max: int = RESULT_BYTES_MAX,
        **options: int,
    ) -> None:
        """`ticks`: seconds, by which slices of dispatching are measured; by default they take none, however busy the
        machine is."""
        self.rig = rig
        self.loop = Loop()
        self.hub = Hub(
            rig.store.reads,
            rig.store.writes,
            self.loop.call_soon,
            options=HubOptions(**options),
            elapsed=lambda: rig.time.elapsed_micros,
            ticks=ticks,
        )
        self.driven = Driven()
        self.results = LiveResults(
            self.hub,
            rig.store.reads,
            self.driven,
            elapsed=lambda: rig.time.elapsed_micros,
            bytes_max=result_bytes_max,
        )
        self.consumers = Consumers(
            rig.store.reads,
            rig.store.writes,
            self.hub,
            lambda text, part: TopicFilters(rig.store.cuts, AskedView(text), 1000, lambda topic: part).view,
        )
        # As in a server: the writer's reports wait for their turn on the loop.
        committed = self.hub.dispatcher.committed
        # In the place of the hub itself, which has just begun to follow: it hears on the loop.
        rig.store.writer.committer._followers[-1] = lambda commits, synced: self.loop.call_soon(
            lambda: committed(commits, synced)
        )

    def subscribe(
        self,
        topic: str = "",
        *,
        pattern: str = "",
        filter: str = "",  # noqa: A002  # as everywhere
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        sow: bool = False,
        oof: bool = False,
        delta: bool = False,
        changes: bool = False,
        empty_deltas: bool = False,
        start: Start = FROM_NOW,
        conflation: int = 0,
        progress: int = PROGRESS_MICROS,
        batch_size: int = 1000,
        restriction: Restriction = UNRESTRICTED,
        settled: bool = True,
    ) -> Follower:
        """A new subscriber; unless told otherwise it has got what there is for it now. Raises StoreError."""
        follower = Follower(
            self,
            request(
                self.rig.store,
                topic=topic,
                pattern=pattern,
                filter=filter,
                include=include,
                exclude=exclude,
                sow=sow,
                oof=oof,
                delta=delta,
                changes=changes,
                empty_deltas=empty_deltas,
                start=start,
                conflation=conflation,
                progress=progress,
                batch_size=batch_size,
                restriction=restriction,
            ),
        )
        if settled:
            self.settle()
            follower.pump()
        return follower

    def attach(
        self,
        topic: str,
        name: str,
        *,
        filter: str = "",  # noqa: A002  # as everywhere
        start: Start = FROM_NOW,
        force: bool = False,
        expected: bool = False,
        declared: Declared | None = None,
        oof: bool = False,
        changes: bool = False,
        batch_size: int = 1000,
        settled: bool = True,
    ) -> DurableFollower:
        """A consumer of a durable; unless told otherwise it has got what there is for it now. Raises StoreError."""
        asked = request(
            self.rig.store, topic=topic, filter=filter, start=start, oof=oof, changes=changes, batch_size=batch_size
        )
        answers: list[Consumer | StoreError] = []
        attachment = Attachment(name, force=force, expected=expected, declared=declared)
        self.consumers.attach(asked, attachment).then(answers.append)
        self.settle()
        (answer,) = answers
        if isinstance(answer, StoreError):
            raise answer
        follower = DurableFollower(self, answer)
        if settled:
            self.settle()
            follower.pump()
            if not follower.frames and follower.error is None:  # the writer was asked to set something aside
                self.settle()
                follower.pump()
        return follower

    def browse(
        self, topic: str, name: str, *, after: int = 0, entries_max: int = 1000
    ) -> tuple[list[Row], list[int], int]:
        """The unacknowledged changes of a durable, how often each was handed over, and up to where that is."""
        found = self.consumers.browse(self.rig.topic(topic), name, after, entries_max)
        frames: list[ChangeFrame] = []
        while not found.done:
            frames += found.read()
        times = [times for frame in frames for times in frame.delivered or [0] * len(frame.rows)]
        return [row for frame in frames for row in frame.rows], times, found.position

    def upkeep(self) -> None:
        """The effect of time on durables."""
        self.consumers.upkeep()
        self.settle()

    def scan(self) -> None:
        """The work of pruning before it prunes."""
        for scan in self.consumers.scans():
            position = scan.read()
            if position is not None:
                self.consumers.scanned(scan, position)
        self.settle()

    def answer(self, answers: list[T | StoreError]) -> T:
        """The answer once everything is settled; or raises it."""
        self.settle()
        (answer,) = answers
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def sync(self) -> None:
        """Makes all writes durable, as the writer does within 50 ms."""
        writer = self.rig.store.writer
        writer.step()
        writer.sync_now()

    def settle(self) -> None:
        """Everything is durable and dispatched, and sources of live results have heard of it."""
        for _ in range(2):  # the loop may give the writer something to do
            self.sync()
            self.loop.run()
        self.driven.run()

    def follow(self, asked: Asked, *, progress: int = PROGRESS_MICROS, batch_size: int = 1000) -> ResultFollower:
        """A follower of a live result. Raises StoreError."""
        return ResultFollower(self, self.results.follow(asked, progress_micros=progress, batch_size=batch_size))


class Follower:
    """A subscriber that keeps everything it gets."""

    def __init__(self, subscribers: Subscribers, asked: Request) -> None:
        self.subscription: Subscription = subscribers.hub.subscribe(asked)
        self._begin(subscribers, self.subscription)

    def _begin(self, subscribers: Subscribers, machine: Subscription | Consumer | LiveResult) -> None:
        self._subscribers = subscribers
        self._machine = machine
        self.frames: list[Frame] = []
        self.error: StoreError | None = None
        self.bookmark: int | None = None
        """The last one that came, as a sequence."""
        self._seen = 0

    def pump(self, *, frames_max: int = 10_000) -> list[Frame]:
        """Takes what there is for it without waiting; returns that."""
        begin = len(self.frames)
        while self.error is None and len(self.frames) - begin < frames_max:
            try:
                step = self._machine.step()
            except StoreError as error:
                self.error = error
                self._machine.close()
                break
            match step:
                case Send(frame):
                    self._hear(frame)
                case Read(run):
                    self._machine.took(run())
                case _:
                    break
        return self.frames[begin:]

    def _hear(self, frame: Frame) -> None:
        self.frames.append(frame)
        match frame:
            case ChangeFrame(more=False, bookmark=bookmark):
                self.bookmark = bookmark
            case SnapshotEnd(sequence) | Progress(sequence):
                self.bookmark = sequence
            case _:
                pass

    def close(self) -> None:
        """The subscriber goes away."""
        self._machine.close()

    # -- its messages --------------------------------------------------------------------------------------------

    def news(self) -> list[tuple[str, str, bytes]]:
        """The changes since this was asked last, each as (what happened, key, payload)."""
        self._subscribers.settle()
        self.pump()
        frames, self._seen = self.frames[self._seen :], len(self.frames)
        return [_named(row) for frame in frames if isinstance(frame, ChangeFrame) for row in frame.rows]

    def changes(self) -> list[Row]:
        """All rows of changes so far."""
        return [row for frame in self.frames if isinstance(frame, ChangeFrame) for row in frame.rows]

    def change_frames(self) -> list[ChangeFrame]:
        """All frames of changes so far."""
        return [frame for frame in self.frames if isinstance(frame, ChangeFrame)]

    def snapshot(self) -> dict[str, bytes]:
        """The payloads of the snapshot, by key."""
        return {
            key.decode(): payload
            for frame in self.frames
            if isinstance(frame, SnapshotBatch)
            for key, payload in zip(frame.keys, frame.payloads, strict=True)
        }

    def kinds(self) -> list[str]:
        """The kinds of its frames, in order."""
        return [type(frame).__name__ for frame in self.frames]


class ResultFollower(Follower):
    """A follower of a live result. It applies what it is told, as the clients do."""

    def __init__(self, subscribers: Subscribers, result: LiveResult) -> None:
        self.result = result
        self.rows: list[Row] = []
        self.reasons: list[tuple[str, str]] = []
        """Each key that has left, with the reason."""
        self._together: list[tuple[Row, int]] = []
        self._begin(subscribers, result)

    def _hear(self, frame: Frame) -> None:
        super()._hear(frame)
        match frame:
            case SnapshotBatch():
                self.rows += rows_of(frame)
            case ChangeFrame():
                self._together += zip(frame.rows, frame.positions, strict=True)
                if not frame.more:
                    told, self._together = self._together, []
                    self._apply(told)
            case _:
                pass

    def _apply(self, told: list[tuple[Row, int]]) -> None:
        ops = [row.op for row, _ in told]
        assert ops == sorted(ops, reverse=True), "each oof comes before the puts"
        concerned = {row.key for row, _ in told}
        assert len(concerned) == len(told), "each record comes once"
        rows = [row for row in self.rows if row.key not in concerned]
        before = -1
        for row, position in told:
            if row.op is ChangeOp.PUT:
                assert position > before, "positions rise"
                before = position
                rows.insert(position, row)
            else:
                self.reasons.append((row.key.decode(), row.reason.name.lower()))
        self.rows = rows

    def list(self) -> tuple[tuple[str, int], ...]:
        """The keys and sequences of its list."""
        return tuple([(row.key.decode(), row.sequence) for row in self.rows])


class DurableFollower(Follower):
    """A consumer of a durable that keeps everything it gets."""

    def __init__(self, subscribers: Subscribers, consumer: Consumer) -> None:
        self.consumer = consumer
        self._begin(subscribers, consumer)

    @property
    def begun(self) -> DurableBegin:
        """Its first frame."""
        (first, *_) = self.frames
        assert isinstance(first, DurableBegin)
        return first

    def gaps(self) -> list[tuple[str, int, int, int]]:
        """The gaps that it got: (reason, after, up to, entries)."""
        found = [frame for frame in self.frames if isinstance(frame, GapNotice)]
        return [(gap.reason.name, gap.after, gap.upto, gap.entries) for gap in found]

    def got(self) -> list[int]:
        """The sequences of all changes so far."""
        return [row.sequence for row in self.changes()]

    def times(self) -> list[int]:
        """How often each of the changes so far was handed over, as the consumer was told."""
        return [times for frame in self.change_frames() for times in frame.delivered or [1] * len(frame.rows)]

    def acknowledge(self, position: int | None = None) -> Durable:
        """Acknowledges all that it has got, or up to a position. Raises StoreError."""
        if position is None:
            position = self.bookmark
        assert position is not None, "it has got something"
        consumer, answers = self.consumer, list[Durable | StoreError]()
        self._subscribers.consumers.acknowledge(consumer.topic, consumer.name, consumer.session, position).then(
            answers.append
        )
        return self._subscribers.answer(answers)


def _named(row: Row) -> tuple[str, str, bytes]:
    name = NAMES[row.op, row.reason] + (" delta" if row.is_delta else "")
    return name, row.key.decode(), row.payload
