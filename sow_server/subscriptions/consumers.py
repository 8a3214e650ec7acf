"""Who consumes durable subscriptions, what each is handed, and what time does to them (rules J2, J6, J8 to J10).

    DC1  A durable has at most one consumer. Taking over by force ends the stream of the one before.
    DC2  What is handed over begins after the acknowledged position, and is what a subscription from there sends. What
         is left out of it is told as a gap first.
    DC3  An acknowledgement counts for the session that was handed what it names, and never goes beyond that.
    DC4  Once everything that was handed over is acknowledged, the position follows what the filter has left out.
    DC5  Changes of durables go to the writer in batches: one commit for all that came while the last one was written.
    DC6  What was handed over as often as the delivery limit allows is set aside before a consumer is handed anything:
         the first entry alone, as what follows may never have been looked at (rule J15).

All of it runs on the dispatcher's thread, the event loop's, but for what a `FloorScan` reads.
"""

from __future__ import annotations

import heapq
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import structlog

from sow_server.engine.catalog.topics import Topic, topic_deleted
from sow_server.engine.durables.durables import (
    Attached,
    Cleared,
    Delivered,
    Durable,
    DurableStage,
    Figures,
    Gap,
    GapReason,
    RewindTo,
    check_same,
    delivered,
    in_use,
    not_found,
)
from sow_server.engine.store import Store
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, NEVER, BacklogAction
from sow_server.engine.values.policies import Declared
from sow_server.subscriptions.frames import (
    ChangeFrame,
    DurableBegin,
    Frame,
    GapNotice,
    Progress,
    SnapshotEnd,
)
from sow_server.subscriptions.matching import VersionMatcher
from sow_server.subscriptions.replay import Replay, Replayed
from sow_server.subscriptions.request import FROM_NOW, Request, StartKind, View, Wants
from sow_server.subscriptions.subscription import Read, Send, Step, Subscription, Wait

log = structlog.get_logger(__name__)

T = TypeVar("T")
Key = tuple[int, str]
"""A topic's id and a durable's name."""
ViewOf = Callable[[str], Callable[[Topic], View]]
"""What is seen through a filter, by its text."""
STEP_MICROS: Final = MICROS // 20
"""How soon a durable is looked at again for which something was done: what comes due meanwhile shares a commit."""
RETRY_MICROS: Final = MICROS
"""The same where the writer would not."""
FOR_EVER: Final = 2**62
SCAN_STEPS: Final = 50
"""Reads of one scan in one round of pruning, at most."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Which durable a subscriber consumes; as in `sow.v1.DurableAttachment`."""

    name: str
    force: bool = False
    expected: bool = False
    declared: Declared | None = None


class _DurableChange(NamedTuple):
    """One change of durables that waits for the writer."""

    run: Callable[[DurableStage], object]
    done: Callable[[Any], None]
    """Hears the result, or the StoreError."""


class Consumer:
    """One attachment: a machine like `Subscription`, and around one, which is replaced behind every gap."""

    def __init__(
        self,
        owner: Consumers,
        request: Request,
        topic: Topic,
        attachment: Attachment,
        closed: Callable[[Consumer], None],
    ) -> None:
        """Use `Consumers.attach`."""
        self.request: Final = request
        self.topic: Final = topic
        self.name: Final = attachment.name
        self._expected = attachment.expected
        self.session: Final = uuid.uuid4().hex
        self.wake: Callable[[], None] = lambda: None
        """Set by who drives the machine."""
        self.sent = 0
        """Everything up to here has been sent, and may be acknowledged."""
        self.handed = 0
        """The last sequence that was handed over and needs an acknowledgement."""
        self.told = 0
        """Gaps up to here have been told, or lie behind what was handed over."""
        self._owner = owner
        self._closed = closed
        self._frames: deque[Frame] = deque()
        self._inner: Subscription | None = None
        self._greeting = False
        """Whether the next progress of the inner subscription is its first frame, which is not for the client."""
        self._snapshot = False
        """Whether a snapshot takes the place of a backlog, and has not ended yet."""
        self._error: StoreError | None = None
        self._is_closed = False
        self._attached: Attached | None = None
        """Before its first frame: what it will be told. Meanwhile its first entry may have to be set aside (DC6)."""
        self._looked = False
        self._first: FirstEntries | None = None
        self._deliveries: tuple[Delivered, ...] = ()

    # -- its life ---------------------------------------------------------------------------------------------------

    def begin(self, attached: Attached) -> None:
        """The durable is there, and ours. Raises StoreError."""
        if not self._expected and self._owner.delivered_enough(self.topic, attached.durable):
            self._attached = attached
        else:
            self._greet(attached)

    def _greet(self, attached: Attached) -> None:
        durable = attached.durable
        self._attached = None
        self._deliveries = durable.deliveries
        self.sent = self.handed = durable.position
        self._frames.append(DurableBegin(durable.position, attached.created, attached.reset, self.session))
        gaps = sorted(durable.gaps, key=lambda gap: gap.reason is GapReason.CONFLATED)
        self._go_on(durable.position, gaps)

    def _go_on(self, position: int, gaps: list[Gap]) -> None:
        """Tells of gaps, and continues behind them; with a snapshot, where one of them is conflated."""
        for gap in gaps:
            self._frames.append(GapNotice(gap.reason, gap.after, gap.upto, gap.entries))
            position = max(position, gap.upto)
        self._snapshot = any(gap.reason is GapReason.CONFLATED for gap in gaps)
        self.sent = max(self.sent, position)
        if self._inner is not None:
            self._inner.close()
        hub = self._owner.hub
        if self._snapshot:
            self._inner = hub.subscribe(replace(self.request, sow=True, start=FROM_NOW))
        else:
            self.told = max([self.told, *[gap.upto for gap in gaps]])
            self._inner = hub.subscribe(self.request, after=position)
            self._greeting = True
        self._inner.wake = self._wake

    def changed(self) -> None:
        """Something has been acknowledged on its behalf, perhaps: what that leaves out is told."""
        durable, inner = self._owner.row(self), self._inner
        if durable is None or inner is None or self._error is not None or self._snapshot:
            return
        position = self.sent
        unknown = [gap for gap in durable.gaps if gap.upto > self.told]
        behind = [gap for gap in unknown if gap.upto > position]
        if not behind:
            self.told = max([self.told, *[gap.upto for gap in unknown]])
            return
        if all(gap.reason is GapReason.DISCARDED for gap in behind) or inner.together:
            return  # what is in memory is handed over all the same; the replay notices what is not
        self._go_on(position, [_after(gap, position) for gap in behind])
        self.wake()

    def _wake(self) -> None:
        self.wake()

    def end(self, error: StoreError) -> None:
        """The stream ends with this error."""
        self._error = self._error or error
        self.wake()

    def close(self) -> None:
        """Lets go of everything. No `Read` of it may be running."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._inner is not None:
            self._inner.close()
        self._closed(self)

    # -- stepping: as `Subscription` --------------------------------------------------------------------------------

    def step(self) -> Step:
        """What is next. Raises StoreError at the end."""
        while True:
            if self._error is not None:
                raise self._error
            if self._frames:
                return Send(self._frames.popleft())
            if (attached := self._attached) is not None:
                if self._looked:
                    return Wait(FOR_EVER)  # for the writer
                self._looked = True
                return Read(partial(self._look, self._owner.look(self.request, self.topic, attached.durable)))
            self.changed()
            if self._frames:
                continue
            inner = self._inner
            assert inner is not None, "it has begun"
            try:
                step = inner.step()
            except StoreError as error:
                if error.reason is not Reason.RESYNC_REQUIRED or not self._pass_gap(inner):
                    raise
                continue
            if not isinstance(step, Send):
                return step
            if not self._sent(step.frame, inner):
                continue
            return self._counted(step)

    def _counted(self, step: Send) -> Send:
        """Tells with the rows that were handed over before how often."""
        frame, steps = step.frame, self._deliveries
        if not (steps and isinstance(frame, ChangeFrame) and frame.rows and frame.rows[0].sequence <= steps[-1].upto):
            return step
        return Send(frame.counted([delivered(steps, row.sequence) + 1 for row in frame.rows]))

    def took(self, result: Any) -> None:  # the union of what a `Read` of the inner one may give
        """Hears the result of a `Read`."""
        if (attached := self._attached) is not None:
            self._take_first(attached, self._first)
            return
        assert self._inner is not None, "it has read"
        self._inner.took(result)

    def _look(self, look: Callable[[], FirstEntries | None]) -> None:
        self._first = look()

    def _take_first(self, attached: Attached, first: FirstEntries | None) -> None:
        if first is None:
            self._begin_with(attached, attached.durable)
            return
        owner, topic, before = self._owner, self.topic, attached.durable.position

        def done(result: bool | StoreError) -> None:
            if self._is_closed:
                return
            if isinstance(result, StoreError):
                self.end(result)
                return
            durable = owner.row(self)
            if durable is None:
                self.end(not_found(topic, self.name))
                return
            if result:
                log.warning(
                    "entry_set_aside",
                    topic=topic.name,
                    durable=self.name,
                    sequence=first.sequences[0],
                    entries=len(first.sequences),
                    deliveries=attached.durable.delivered(first.sequences[0]),
                    dead_letter=topic.settings.dead_letter,
                )
            self._begin_with(attached, durable)

        try:
            owner.set_aside(topic, self.name, before, first, done)
        except StoreError as error:
            self.end(error)

    def _begin_with(self, attached: Attached, durable: Durable) -> None:
        try:
            self._greet(attached._replace(durable=durable))
        except StoreError as error:
            self._error = self._error or error
        self.wake()

    def _sent(self, frame: Frame, inner: Subscription) -> bool:
        """Takes note of a frame that is about to be sent; whether it is for the client."""
        if isinstance(frame, ChangeFrame):
            if frame.rows:
                self.handed = max(self.handed, frame.rows[-1].sequence)
        elif isinstance(frame, SnapshotEnd):
            self._snapshot = False
            self.handed = self.told = frame.sequence
        if not self._snapshot and not inner.together:
            self.sent = max(self.sent, inner.position)
        if isinstance(frame, Progress):
            if self._greeting:
                self._greeting = False
                return False
            self._owner.follow(self)
        return True

    def _pass_gap(self, inner: Subscription) -> bool:
        """The journal does not reach back to where it is: it goes on behind that (rule J5). False: it cannot."""
        topic = self.topic
        durable = self._owner.row(self)
        if durable is None or not topic.settings.journal or inner.together:
            return False
        floor = topic.statistics.floor_sequence
        if floor <= self.sent:
            return False
        gaps = [_after(gap, self.sent) for gap in durable.gaps if gap.upto > max(self.sent, self.told)]
        if not gaps or gaps[-1].upto < floor:
            gaps.append(Gap(GapReason.DISCARDED, gaps[-1].upto if gaps else self.sent, floor, 0))
        self._go_on(self.sent, gaps)
        return True

    @property
    def snapshot_pending(self) -> bool:
        """Whether what takes the place of its backlog has not been sent to its end."""
        return self._snapshot


def _after(gap: Gap, position: int) -> Gap:
    """What of a gap lies after a position; how many entries that is, is not known."""
    return gap if gap.after >= position else gap._replace(after=position, entries=0)


class FirstEntries(NamedTuple):
    """The first that a consumer would be handed, which go together: one, or those of an atomic request."""

    sequences: list[int]
    upto: int


class FloorScan(NamedTuple):
    """A detached durable which holds its topic's floor, and may do so for entries that its filter leaves out."""

    topic: Topic
    durable: Durable
    read: Callable[[], int | None]
    """From any thread: the position before the first entry that matches, as far as a bounded number of reads goes."""


class Browse:
    """What a durable has not acknowledged, read step by step (rule J16). One thread at a time."""

    def __init__(
        self, replay: Replay, position: int, upto: int, entries_max: int, deliveries: Callable[[int], int]
    ) -> None:
        """Use `Consumers.browse`."""
        self._replay = replay
        self._upto = upto
        self._left = entries_max
        self._deliveries = deliveries
        self.position = position
        """Everything up to here has been read."""

    @property
    def complete(self) -> bool:
        """Whether there is no more."""
        return self.position >= self._upto

    @property
    def done(self) -> bool:
        """Whether there is no more, or as much as was asked for."""
        return self.complete or not self._left

    def read(self) -> list[ChangeFrame]:
        """The next entries; none among those that this step has looked at."""
        found = self._replay.read(self.position, self._upto, {})
        if not isinstance(found, Replayed):
            # Discarded meanwhile; without a journal there is nothing at all.
            self.position = self._upto if found.earliest is None else found.earliest
            return []
        frames: list[ChangeFrame] = []
        for frame in found.frames:
            rows = frame.rows[: self._left]
            self._left -= len(rows)
            last = rows[-1].sequence
            shown = ChangeFrame(
                frame.topic, rows, after=self.position, bookmark=last, size=frame.size, atomic=frame.atomic
            )
            delivered = [self._deliveries(row.sequence) for row in rows]
            frames.append(shown.counted(delivered) if any(delivered) else shown)
            self.position = last
            if not self._left and (len(rows) < len(frame.rows) or frame is not found.frames[-1]):
                return frames
        self.position = found.position
        return frames


class SubscriptionSource(Protocol):
    """The part of the hub that consumers use."""

    def subscribe(self, request: Request, *, after: int | None = None) -> Subscription:
        """A new subscription; `after`: the position that it starts at, instead of the start of the request."""

    def start(self, request: Request, topics: list[Topic], *, several: bool) -> tuple[int | None, dict[int, int]]:
        """The position that a request starts after, None for now, and the floors below which it misses nothing."""


class Consumers:
    """Owns the attachments, and the way of every change of a durable to the writer."""

    def __init__(self, store: Store, clock: GuardedClock, hub: SubscriptionSource, view_of: ViewOf) -> None:
        self.hub: Final = hub
        """Its inner subscriptions come from there, and count among those of the server."""
        self._store = store
        self._clock = clock
        self._view_of = view_of
        self._consumers: dict[Key, Consumer] = {}
        self._sessions: dict[Key, Consumer] = {}
        """The last session of each durable, over or not: what it was handed it may still acknowledge."""
        self._waiting: list[_DurableChange] = []
        self._writing = False
        self._heap: list[tuple[int, int, str]] = []
        self._due: dict[Key, int] = {}
        """When each durable that has a `backlog_ttl` or an `idle_ttl` is looked at next."""
        self._settled: deque[Topic] = deque(
            [topic for topic in map(store.topics.by_id.get, store.durables.topic_ids()) if topic is not None]
        )
        """Topics whose settings, or whose durables' settings, have changed. Added to on any thread."""
        store.topics.watch(lambda topic, settings: self._settled.append(topic) if settings else None)
        self.wake: Callable[[], None] = lambda: None
        """Called when `upkeep` has something to do earlier than it said."""
        self._dropped = 0
        """The deletions of topics, as `Durables.dropped` counts them, whose sessions are forgotten."""
        self._relieved: dict[int, None] = {}
        """The topics with a quota that evicts or conflates."""
        for topic_id in store.durables.topic_ids():
            topic = store.topics.by_id.get(topic_id)
            for durable in [] if topic is None else store.durables.of(topic):
                if durable.attached and topic is not None:
                    # Its consumer went with the last process.
                    self._change(_detach(topic, durable.name), _ignore)

    # -- attaching --------------------------------------------------------------------------------------------------

    def attach(self, request: Request, attachment: Attachment, done: Callable[[Consumer | StoreError], None]) -> None:
        """Attaches a consumer; `request` has passed `request.check`. Raises StoreError at once, or `done` hears it:
        DURABLE_IN_USE, DURABLE_DIFFERS, NO_JOURNAL, …"""
        topic = self._store.topics.find(request.topic)
        view = request.view(topic)
        text = "" if view.filter is None else view.filter.text
        key = topic.id, attachment.name
        present = self._consumers.get(key)
        if present is not None and not attachment.force:
            raise in_use(topic, attachment.name)
        known = self._store.durables.get(topic.id, attachment.name)
        if known is not None:
            check_same(topic, known, text, attachment.declared)
        start, unstartable = None, None
        try:
            start, _ = self.hub.start(request, [topic], several=False)
        except StoreError as error:
            if known is None:
                raise
            unstartable = error  # it counts only if the durable is gone when the writer comes to it
        if present is not None:
            present.end(
                StoreError(
                    Reason.DURABLE_TAKEN_OVER,
                    f"durable: another consumer has taken {attachment.name} of {topic.name} over",
                    field="durable",
                )
            )
        consumer = Consumer(self, request, topic, attachment, self._closed)
        self._consumers[key] = self._sessions[key] = consumer

        def attach(staged: DurableStage) -> Attached:
            if self._store.topics.by_id.get(topic.id) is not topic:
                raise topic_deleted(topic)
            if unstartable is not None and staged.get(topic, attachment.name) is None:
                raise unstartable
            return staged.attach(
                topic,
                attachment.name,
                filter_text=text,
                start=start,
                declared=attachment.declared,
                expected=attachment.expected,
                bookmarked=request.start.kind is StartKind.BOOKMARK,
                handed=0 if present is None else present.handed,
            )

        def attached(result: Attached | StoreError) -> None:
            if isinstance(result, StoreError):
                self._drop(consumer, present)
                done(result)
                return
            try:
                consumer.begin(result)
            except StoreError as error:
                consumer.close()
                done(error)
                return
            self._watch(topic)
            self._look_at(topic, result.durable)
            done(consumer)

        try:
            self._change(attach, attached)
        except StoreError:
            self._drop(consumer, None)
            raise

    def _drop(self, consumer: Consumer, present: Consumer | None) -> None:
        """Its attaching was refused. `present`: whom it has taken over; the row still says that it is there."""
        key = consumer.topic.id, consumer.name
        if self._consumers.get(key) is consumer:
            del self._consumers[key]
            if present is not None:
                self._change_quietly(_detach(consumer.topic, consumer.name, present.handed), _ignore)
        if self._sessions.get(key) is consumer:
            del self._sessions[key]

    def _closed(self, consumer: Consumer) -> None:
        key = consumer.topic.id, consumer.name
        if self._consumers.get(key) is consumer:
            del self._consumers[key]
            self._change_quietly(_detach(consumer.topic, consumer.name, consumer.handed), _ignore)

    def row(self, consumer: Consumer) -> Durable | None:
        """The durable of a consumer, as it is now."""
        return self._store.durables.get(consumer.topic.id, consumer.name)

    @property
    def attached_count(self) -> int:
        """Attached consumers."""
        return len(self._consumers)

    def is_attached(self, topic: Topic, name: str) -> bool:
        """Whether somebody consumes it."""
        return (topic.id, name) in self._consumers

    # -- acknowledging ----------------------------------------------------------------------------------------------

    def acknowledge(
        self, topic: Topic, name: str, session: str, position: int, done: Callable[[Durable | StoreError], None]
    ) -> None:
        """Everything up to `position` is acknowledged. Raises StoreError at once, or `done` hears it:
        DURABLE_NOT_FOUND, DURABLE_TAKEN_OVER, DURABLE_DETACHED, BOOKMARK_IN_FUTURE."""
        self._store.durables.find(topic, name)
        consumer = self._sessions.get((topic.id, name))
        if consumer is None:
            raise StoreError(
                Reason.DURABLE_DETACHED,
                f"session: {name} of {topic.name} has been detached since; attach again",
                field="session",
            )
        if consumer.session != session:
            raise StoreError(
                Reason.DURABLE_TAKEN_OVER,
                f"session: another consumer has taken {name} of {topic.name} over",
                field="session",
            )
        if position > consumer.sent:
            raise StoreError(
                Reason.BOOKMARK_IN_FUTURE,
                f"bookmark: names the sequence {position}, and {name} was handed what is up to {consumer.sent}",
                field="bookmark",
            )
        told = min(position, consumer.told)
        if position >= consumer.handed and not consumer.snapshot_pending:
            position = max(position, consumer.sent)  # DC4

        def acknowledged(result: Durable | StoreError | None) -> None:
            done(not_found(topic, name) if result is None else result)

        self._change(lambda staged: staged.acknowledge(topic, name, position, told=told), acknowledged)

    def follow(self, consumer: Consumer) -> None:
        """Lets the position follow what was left out, if all that was handed over is acknowledged (DC4)."""
        durable = self.row(consumer)
        if durable is None or consumer.snapshot_pending:
            return
        if consumer.handed <= durable.position < consumer.sent:
            topic, name, before, sent = consumer.topic, consumer.name, durable.position, consumer.sent
            self._change_quietly(lambda staged: staged.follow(topic, name, before, sent), _ignore)

    # -- browsing ---------------------------------------------------------------------------------------------------

    def browse(self, topic: Topic, name: str, after: int, entries_max: int) -> Browse:
        """Shows what a durable has not acknowledged, from behind `after` on, to whom it is not handed over. Raises
        StoreError DURABLE_NOT_FOUND."""
        durable, consumer = self._store.durables.find(topic, name), self._consumers.get((topic.id, name))
        handed = durable.handed if consumer is None else max(durable.handed, consumer.handed)

        def deliveries(sequence: int) -> int:
            return durable.delivered(sequence) + (sequence <= handed)

        upto = min(self._store.writer.synced_sequence, topic.statistics.last_sequence)
        start = max(after, durable.position)
        return Browse(self._replay(topic, durable.filter), start, max(start, upto), entries_max, deliveries)

    # -- the delivery limit -----------------------------------------------------------------------------------------

    def delivered_enough(self, topic: Topic, durable: Durable) -> bool:
        """Whether what comes first was handed over as often as it may be, unless the filter leaves all of that out."""
        limit = self._store.durables.settings(topic, durable).delivery_limit
        if limit is None or durable.delivered(durable.position + 1) < limit:
            return False
        # In the place of what was conflated comes a snapshot, which is no entry.
        return not any(gap.reason is GapReason.CONFLATED for gap in durable.gaps)

    def look(self, request: Request, topic: Topic, durable: Durable) -> Callable[[], FirstEntries | None]:
        """Reads what a consumer would be handed first, of what was handed over as often as it may be; None: there is
        none. For a reader thread."""
        limit = self._store.durables.settings(topic, durable).delivery_limit
        view = request.view(topic)
        seen = VersionMatcher(view.filter), request.wants(view)
        replay = Replay(self._store, self._clock, lambda _: seen, topic=topic, follows=lambda other: other is topic)
        often = [step.upto for step in durable.deliveries if limit is not None and step.times >= limit]

        def read() -> FirstEntries | None:
            position, upto = durable.position, max(often, default=0)
            while position < upto:
                found = replay.read(position, upto, {})
                if not isinstance(found, Replayed):
                    return None
                now = self._clock.now_micros()
                frames = [frame for whole in found.frames if (frame := whole.at(now)).rows]
                if frames:
                    rows = frames[0].rows
                    if not frames[0].atomic:
                        return FirstEntries([rows[0].sequence], rows[0].sequence)
                    first = [frame for frame in frames if frame.atomic and frame.after == frames[0].after]
                    return FirstEntries([row.sequence for frame in first for row in frame.rows], first[-1].bookmark)
                position = found.position
            return None

        return read

    def set_aside(
        self, topic: Topic, name: str, before: int, entries: FirstEntries, done: Callable[[bool | StoreError], None]
    ) -> None:
        """Sets entries aside, if the durable is still at `before` (rule J15); `done` hears whether it has. Raises
        StoreError."""
        sequences, upto = entries
        self._change(lambda staged: staged.set_aside(topic, name, before, sequences, upto), done)

    # -- pinning ----------------------------------------------------------------------------------------------------

    def pin(
        self,
        topic: Topic,
        name: str,
        position: int,
        done: Callable[[tuple[Durable, bool] | StoreError], None],
        *,
        idle_ttl_micros: int,
    ) -> None:
        """Keeps what comes after a position under a name: a durable without a filter and without a consumer, made if
        need be, and acknowledged up to there. Raises StoreError at once, or `done` hears it: DURABLE_IN_USE,
        DURABLE_DIFFERS, NO_JOURNAL, BOOKMARK_TOO_OLD, INVALID_ARGUMENT."""
        if (topic.id, name) in self._consumers:
            raise in_use(topic, name)
        declared = {"idle_ttl_micros": idle_ttl_micros}

        def pin(staged: DurableStage) -> tuple[Durable, bool]:
            if self._store.topics.by_id.get(topic.id) is not topic:
                raise topic_deleted(topic)
            return staged.pin(topic, name, position, declared)

        def pinned(result: tuple[Durable, bool] | StoreError) -> None:
            if not isinstance(result, StoreError) and result[1]:
                self._watch(topic)
                self._look_at(topic, result[0])
            done(result)

        self._change(pin, pinned)

    # -- administering ----------------------------------------------------------------------------------------------

    def rewind(
        self,
        topic: Topic,
        name: str,
        to: RewindTo,
        done: Callable[[tuple[Durable, int] | StoreError], None],
        *,
        force: bool,
    ) -> None:
        """Moves a durable back (rule J6). Raises StoreError at once, or `done` hears it: DURABLE_NOT_FOUND,
        DURABLE_IN_USE, BOOKMARK_TOO_OLD, INVALID_ARGUMENT."""
        self._store.durables.find(topic, name)
        self._free(topic, name, "rewound", force=force)

        def rewound(result: tuple[Durable, int] | StoreError) -> None:
            if not isinstance(result, StoreError):
                self._look_at(topic, result[0])  # what it has before it now may be due already (rule J4)
            done(result)

        self._change(lambda staged: staged.rewind(topic, name, to), rewound)

    def delete(self, topic: Topic, name: str, done: Callable[[Durable | StoreError], None], *, force: bool) -> None:
        """Deletes a durable. Raises StoreError at once, or `done` hears it: DURABLE_NOT_FOUND, DURABLE_IN_USE."""
        self._store.durables.find(topic, name)
        self._free(topic, name, "deleted", force=force)
        self._change(lambda staged: staged.remove(topic, name), done)

    def clear(self, topic: Topic, name: str, done: Callable[[Cleared | StoreError], None]) -> None:
        """Acknowledges everything; of all durables of the topic where `name` is empty (rule J13). Consumers come back
        for what is next. Raises StoreError at once, or `done` hears it: DURABLE_NOT_FOUND."""
        if name:
            self._store.durables.find(topic, name)
        for topic_id, other in list(self._sessions):
            if topic_id == topic.id and name in ("", other):
                self._free(topic, other, "cleared", force=True)
        self._change(lambda staged: staged.clear(topic, name), done)

    def _free(self, topic: Topic, name: str, what: str, *, force: bool) -> None:
        """Sees to it that nobody is attached. Raises StoreError DURABLE_IN_USE."""
        key = topic.id, name
        consumer = self._consumers.get(key)
        if consumer is not None:
            if not force:
                raise in_use(topic, name)
            consumer.end(
                StoreError(Reason.DURABLE_DETACHED, f"durable: {name} of {topic.name} has been {what}", field="durable")
            )
            self._consumers.pop(key)
            self._change(_detach(topic, name, consumer.handed), _ignore)
        self._sessions.pop(key, None)

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def upkeep(self) -> int:
        """What time does to durables: every second or so, and when the time comes that it returns, at which the next
        may be due. Costs in proportion to what is due, and to the durables whose settings have changed."""
        if self._store.writer.failure is not None:
            return NEVER
        now, store = self._clock.now_micros(), self._store
        while self._settled:
            topic = self._settled.popleft()
            self._relieved.pop(topic.id, None)
            if store.topics.by_id.get(topic.id) is topic and store.durables.count(topic):
                self._watch(topic)
                for durable in store.durables.of(topic):
                    self._look_at(topic, durable)
        if self._dropped != store.durables.dropped:
            self._dropped = store.durables.dropped
            for key in [key for key in self._sessions if key[0] not in store.topics.by_id]:
                self._forget(key)
        for topic_id in list(self._relieved):
            relieved = store.topics.by_id.get(topic_id)
            if relieved is None:
                del self._relieved[topic_id]
            elif exceeds(store, relieved, now):
                self._change_quietly(_relieve(relieved), partial(self._tell, relieved))
        while self._heap and self._heap[0][0] <= now:
            when, topic_id, name = heapq.heappop(self._heap)
            if self._due.get((topic_id, name)) != when:
                continue  # it has been put in again since
            del self._due[topic_id, name]
            held = store.topics.by_id.get(topic_id)
            found = None if held is None else store.durables.get(topic_id, name)
            if held is None or found is None:
                self._forget((topic_id, name))
                continue
            self._fall_due(held, found, now)
        return self._heap[0][0] if self._heap else NEVER

    def _forget(self, key: Key) -> None:
        """The durable is gone: nobody acknowledges what its last session was handed; but who attaches at this moment
        makes it anew."""
        if key not in self._consumers:
            self._sessions.pop(key, None)

    def _tell(self, topic: Topic, names: list[str] | StoreError) -> None:
        """Wakes the consumers of durables for which something was acknowledged on their behalf: they look for gaps."""
        for name in [] if isinstance(names, StoreError) else names:
            consumer = self._consumers.get((topic.id, name))
            if consumer is not None:
                consumer.wake()

    def _watch(self, topic: Topic) -> None:
        """A topic has durables: has it a quota that evicts or conflates?"""
        settings = topic.settings
        if settings.has_quota and settings.backlog_action in (BacklogAction.EVICT, BacklogAction.CONFLATE):
            self._relieved[topic.id] = None

    def _look_at(self, topic: Topic, durable: Durable, *, not_before: int = 0) -> None:
        """Puts a durable into the heap, for when something may be due."""
        settings = self._store.durables.settings(topic, durable)
        now, key = self._clock.now_micros(), (topic.id, durable.name)
        due: list[int] = []
        if settings.idle_ttl_micros is not None:
            idle_since = now if key in self._consumers else durable.last_use_micros
            due.append(idle_since + settings.idle_ttl_micros)
        if settings.backlog_ttl_micros is not None:
            oldest = self._store.durables.oldest(topic, durable.position)
            due.append((now if oldest is None else oldest) + settings.backlog_ttl_micros)
        if not due:
            self._due.pop(key, None)
            return
        when = max(min(due), not_before)
        if self._due.get(key) != when:
            self._due[key] = when
            heapq.heappush(self._heap, (when, *key))
            if self._heap[0] == (when, *key):
                self.wake()

    def _fall_due(self, topic: Topic, durable: Durable, now: int) -> None:
        settings = self._store.durables.settings(topic, durable)
        key = topic.id, durable.name
        idle, ttl = settings.idle_ttl_micros, settings.backlog_ttl_micros

        def again(result: object) -> None:
            found = self._store.durables.get(*key)
            if found is not None and topic.id in self._store.topics.by_id:
                pause = RETRY_MICROS if isinstance(result, StoreError) else STEP_MICROS
                self._look_at(topic, found, not_before=self._clock.now_micros() + pause)
                self._tell(topic, [durable.name])
            else:
                self._forget(key)

        try:
            if idle is not None and key not in self._consumers and durable.last_use_micros + idle <= now:
                self._change(lambda staged: _remove_idle(staged, topic, durable.name, idle), again)
                return
            if ttl is not None:
                oldest = self._store.durables.oldest(topic, durable.position)
                if oldest is not None and oldest + ttl <= now:
                    self._change(lambda staged: staged.expire_backlog(topic, durable.name), again)
                    return
            self._look_at(topic, durable)
        except StoreError as error:
            again(error)  # the writer takes nothing now

    def scans(self) -> Iterator[FloorScan]:
        """The durables to scan at prune time (rule J2): of each topic the one that holds the floor, if it has a filter
        and nobody is attached to it. Run `read` on a reader thread and give what it returns to `scanned`."""
        store = self._store
        synced = store.writer.synced_sequence
        for topic_id in store.durables.topic_ids():
            topic = store.topics.by_id.get(topic_id)
            durable = None if topic is None else store.durables.slowest(topic)
            if topic is None or durable is None or not durable.filter or (topic_id, durable.name) in self._consumers:
                continue
            upto = min(synced, topic.statistics.last_sequence)
            if durable.position < upto:
                yield FloorScan(topic, durable, self._scan(topic, durable, upto))

    def _scan(self, topic: Topic, durable: Durable, upto: int) -> Callable[[], int | None]:
        def read() -> int | None:
            try:
                replay_ = self._replay(topic, durable.filter)  # parses and compiles, which may take a while
            except StoreError as error:
                # Its topic is of another message type by now: that must not keep others from being pruned.
                log.warning("scan_skipped", topic=topic.name, durable=durable.name, cause=error.message)
                return None
            position = durable.position
            for _ in range(SCAN_STEPS):
                found = replay_.read(position, upto, {})
                if not isinstance(found, Replayed):
                    return None
                if found.frames:
                    return found.frames[0].after
                position = found.position
                if position >= upto:
                    break
            return position

        return read

    def scanned(self, scan: FloorScan, position: int, done: Callable[[object], None] = lambda _: None) -> None:
        """A scan has come as far as this: its durable's position follows, if nobody has moved it since."""
        topic, durable = scan.topic, scan.durable
        self._change_quietly(lambda staged: staged.follow(topic, durable.name, durable.position, position), done)

    def exact(self, topic: Topic, durable: Durable, figures: Figures) -> Figures:
        """The figures of a durable, counted: only entries that match its filter. Reads them all, so not on the event
        loop."""
        replay_ = self._replay(topic, durable.filter)
        upto = min(self._store.writer.synced_sequence, topic.statistics.last_sequence)
        total, unacknowledged, position = [0, 0], [0, 0], figures.earliest
        while position < upto:
            found = replay_.read(position, upto, {})
            if not isinstance(found, Replayed):
                assert found.earliest is not None, "a durable's topic has a journal"
                position = found.earliest  # discarded meanwhile
                continue
            for row in [row for frame in found.frames for row in frame.rows]:
                size = len(row.key) + len(row.payload)
                total = [total[0] + 1, total[1] + size]
                if row.sequence > durable.position:
                    unacknowledged = [unacknowledged[0] + 1, unacknowledged[1] + size]
            position = found.position
        return replace(
            figures,
            total_entries=total[0],
            total_bytes=total[1],
            unacknowledged_entries=unacknowledged[0],
            unacknowledged_bytes=unacknowledged[1],
        )

    def _replay(self, topic: Topic, text: str) -> Replay:
        """Reads every entry of a topic that concerns a filter, whatever its consumers ask for besides."""
        view = self._view_of(text)(topic)
        seen = VersionMatcher(view.filter), Wants(changes=True)
        return Replay(self._store, self._clock, lambda _: seen, topic=topic, follows=lambda other: other is topic)

    # -- on the way to the writer -----------------------------------------------------------------------------------

    def _change(self, run: Callable[[DurableStage], T], done: Callable[[T | StoreError], None]) -> None:
        """Queues a change of durables. Raises StoreError when the writer takes nothing."""
        self._waiting.append(_DurableChange(run, done))
        if not self._writing:
            try:
                self._write()
            except StoreError:
                del self._waiting[-1:]
                raise

    def _change_quietly(self, run: Callable[[DurableStage], T], done: Callable[[T | StoreError], None]) -> None:
        """As `_change`; while the store is stopping, failed or overloaded it is simply not done."""
        try:
            self._change(run, done)
        except StoreError as error:
            log.debug("durable_change_skipped", reason=error.reason.name)

    def _write(self) -> None:
        """DC5."""
        batch = list(self._waiting)

        def change(staged: DurableStage) -> list[object]:
            results: list[object] = []
            for one in batch:
                try:
                    results.append(one.run(staged))
                except StoreError as error:
                    results.append(error)
            return results

        self._store.change_durables(change, lambda results: self._written(batch, results))
        del self._waiting[: len(batch)]
        self._writing = True

    def _written(self, batch: list[_DurableChange], results: list[object] | StoreError) -> None:
        self._writing = False
        if self._waiting:
            try:
                self._write()
            except StoreError as error:
                left, self._waiting = self._waiting, []
                for one in left:
                    one.done(error)
        answers = [results] * len(batch) if isinstance(results, StoreError) else results
        for one, answer in zip(batch, answers, strict=True):
            try:
                one.done(answer)
            except Exception:
                log.exception("answer_failed")  # its own matter: the others still want to hear theirs


def exceeds(store: Store, topic: Topic, now_micros: int, under_way: tuple[int, int] = (0, 0)) -> bool:
    """Whether a topic's backlog has come to its quota (rule J9), with what is `under_way` to it: entries and bytes."""
    settings = topic.settings
    size, age, number = settings.backlog_quota_bytes, settings.backlog_quota_age_micros, settings.backlog_quota_entries
    backlog = store.durables.backlog(topic)
    if backlog is None:
        return False
    if size is not None and backlog.bytes + under_way[1] >= size:
        return True
    if number is not None and backlog.entries + under_way[0] >= number:
        return True
    return age is not None and backlog.oldest_micros is not None and now_micros - backlog.oldest_micros >= age


def _detach(topic: Topic, name: str, handed: int = 0) -> Callable[[DurableStage], None]:
    return lambda staged: staged.detach(topic, name, handed)


def _relieve(topic: Topic) -> Callable[[DurableStage], list[str]]:
    return lambda staged: staged.relieve(topic)


def _remove_idle(staged: DurableStage, topic: Topic, name: str, idle_ttl_micros: int) -> None:
    """Removes a durable that nobody has used for so long (rule J10), if that is still so."""
    found = staged.get(topic, name)
    if found is not None and not found.attached and found.last_use_micros + idle_ttl_micros <= staged.now:
        log.info("durable_idle", topic=topic.name, durable=name)
        staged.remove(topic, name)


def _ignore(_: object) -> None:
    """Nobody waits for the result."""
