"""One consumer of a durable subscription, as a machine that is driven step by step (rules J2, J5, J15).

[1]  The consumer gets the changes after the acknowledged position, as a subscription from there sends them. A gap
     is told before the changes behind it.
[2]  If the first entry has reached the delivery limit, it is set aside before the consumer gets anything. Only that
     entry: the consumer may never have looked at the later ones (rule J15).
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.durables import (
    AttachedDurable,
    DeliveryStep,
    Durable,
    DurableGap,
    GapReason,
    Life,
    delivered,
    not_found,
)
from sow_server.engine.pending import Pending
from sow_server.engine.values.bookmarks import Position
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.policies import Declared
from sow_server.subscriptions.durable.entries import DurableEntries, FirstEntries
from sow_server.subscriptions.frames import ChangeFrame, DurableBegin, Frame, GapNotice, Progress, SnapshotEnd
from sow_server.subscriptions.request import FROM_NOW, Request
from sow_server.subscriptions.subscription import Read, Send, Step, Subscription, Wait

log = structlog.get_logger(__name__)

FOR_EVER: Final = 2**62


@dataclass(frozen=True, slots=True)
class Attachment:
    """The durable that a subscriber consumes, with its options; as in `sow.v1.DurableAttachment`."""

    name: str
    force: bool = False
    expected: bool = False
    declared: Declared | None = None
    told: tuple[Position, ...] = ()
    """Up to where its consumer was handed changes at other instances (rule F17)."""


class SubscriptionSource(Protocol):
    """The part of the hub that consumers use."""

    def subscribe(self, request: Request, *, after: int | None = None, held: tuple[Position, ...] = ()) -> Subscription:
        """A new subscription. `after`: a position to start at, instead of the start of the request. `held`: what its
        subscriber was told at other instances."""

    def start(self, request: Request, topics: list[Topic], *, several: bool) -> tuple[int | None, dict[int, int]]:
        """The position after which a request starts, None for now, and the floors below which it misses nothing."""


class ConsumerOwner(Protocol):
    """The part of `Consumers` that one consumer uses."""

    @property
    def source(self) -> SubscriptionSource:
        """Makes the inner subscriptions, which count among those of the server."""

    def row(self, consumer: Consumer) -> Durable | None:
        """The durable of a consumer, as it is now."""

    def follow(self, consumer: Consumer) -> None:
        """Lets the position follow the entries that the filter has left out."""

    @property
    def entries(self) -> DurableEntries:
        """Reads the entries of its durable."""

    def set_aside(self, topic: Topic, name: str, before: int, entries: FirstEntries) -> Pending[bool]:
        """Sets entries aside, if the durable is still at `before`; answers whether it was. Raises StoreError."""


class EndedConsumer(NamedTuple):
    """The part of a consumer that is kept, so that it can still acknowledge what it was handed. The fields are those of
    `Consumer`."""

    session: str
    sent: int
    handed: int
    told: int
    snapshot_pending: bool
    life: Life | None


class Consumer:
    """One attachment. Wraps a `Subscription`, and replaces it behind every gap."""

    def __init__(
        self,
        owner: ConsumerOwner,
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
        self._told_elsewhere = attachment.told
        self.session: Final = uuid.uuid4().hex
        self.wake: Callable[[], None] = lambda: None
        """Set by the driver of the machine."""
        self.sent = 0
        """Everything up to here has been sent and may be acknowledged."""
        self.handed = 0
        """The last sequence that was handed over and needs an acknowledgement."""
        self.told = 0
        """Gaps up to here have been told, or lie behind changes that were handed over."""
        self.life: Life | None = None
        """The life of its durable, when it attached. None: it has not attached yet."""
        self._owner = owner
        self._closed = closed
        self._frames: deque[Frame] = deque()
        self._inner: Subscription | None = None
        self._greeting = False
        """True if the next progress of the inner subscription is its first frame, which the client does not get."""
        self._snapshot = False
        """True if a snapshot replaces the backlog, and has not ended yet."""
        self._error: StoreError | None = None
        self._is_closed = False
        self._attached: AttachedDurable | None = None
        """Set until the first frame: the answer to the attachment. Meanwhile the first entry may be set aside, see
        [2]."""
        self._looked = False
        self._first: FirstEntries | None = None
        self._deliveries: tuple[DeliveryStep, ...] = ()

    @property
    def position(self) -> int:
        """Everything up to here has been sent."""
        return self.sent

    @property
    def behind(self) -> bool:
        """True if the consumer is served from the journal."""
        return self._inner is None or self._inner.behind

    @property
    def queued_bytes(self) -> int:
        """Memory of the frames that wait to be sent."""
        return 0 if self._inner is None else self._inner.queued_bytes

    # -- start and end ------------------------------------------------------------------------------------------------

    def begin(self, attached: AttachedDurable) -> None:
        """Starts: the durable exists, and this consumer is attached to it. Raises StoreError."""
        self.life = attached.durable.life
        if not self._expected and self._owner.entries.delivered_enough(self.topic, attached.durable):
            self._attached = attached
        else:
            self._greet(attached)

    def _greet(self, attached: AttachedDurable) -> None:
        durable = attached.durable
        self._attached = None
        self._deliveries = durable.deliveries
        self.sent = self.handed = durable.position
        self._frames.append(_begin_frame(attached, self.session))
        gaps = sorted(durable.gaps, key=lambda gap: gap.reason is GapReason.CONFLATED)
        self._go_on(durable.position, gaps)

    def _go_on(self, position: int, gaps: list[DurableGap]) -> None:
        """Tells of gaps, and continues behind them; with a snapshot, if one of them is conflated."""
        for gap in gaps:
            self._frames.append(GapNotice(gap.reason, gap.after, gap.upto, gap.entries))
            position = max(position, gap.upto)
        self._snapshot = any(gap.reason is GapReason.CONFLATED for gap in gaps)
        self.sent = max(self.sent, position)
        if self._inner is not None:
            self._inner.close()
        source = self._owner.source
        if self._snapshot:
            self._inner = source.subscribe(replace(self.request, sow=True, start=FROM_NOW))
        else:
            self.told = max([self.told, *[gap.upto for gap in gaps]])
            self._inner = source.subscribe(self.request, after=position, held=self._told_elsewhere)
            self._greeting = True
        self._inner.wake = self._wake

    def changed(self) -> None:
        """Tells of the entries that were acknowledged on behalf of the consumer, if there are any."""
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
            return  # entries in memory are handed over all the same; the replay notices the others
        self._go_on(position, [_after(gap, position) for gap in behind])
        self.wake()

    def _wake(self) -> None:
        self.wake()

    def end(self, error: StoreError) -> None:
        """Ends the stream with this error."""
        self._error = self._error or error
        self.wake()

    def close(self) -> None:
        """Releases everything. No `Read` of it may be running."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._inner is not None:
            self._inner.close()
        self._closed(self)

    # -- stepping: as `Subscription` ----------------------------------------------------------------------------------

    def step(self) -> Step:
        """The next step. Raises StoreError at the end."""
        while True:
            if self._error is not None:
                raise self._error
            if self._frames:
                return Send(self._frames.popleft())
            if (attached := self._attached) is not None:
                if self._looked:
                    return Wait(FOR_EVER)  # until the writer has answered
                self._looked = True
                first = self._owner.entries.first_entries(self.request, self.topic, attached.durable)
                return Read(partial(self._look, first))
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
        """Adds to redelivered rows how often each was handed over."""
        frame, steps = step.frame, self._deliveries
        if not (steps and isinstance(frame, ChangeFrame) and frame.rows and frame.rows[0].sequence <= steps[-1].upto):
            return step
        return Send(frame.counted([delivered(steps, row.sequence) + 1 for row in frame.rows]))

    def took(self, result: Any) -> None:  # a union of the results of the inner subscription's reads
        """Takes the result of a `Read`."""
        if (attached := self._attached) is not None:
            self._take_first(attached, self._first)
            return
        assert self._inner is not None, "it has read"
        self._inner.took(result)

    def _look(self, look: Callable[[], FirstEntries | None]) -> None:
        self._first = look()

    def _take_first(self, attached: AttachedDurable, first: FirstEntries | None) -> None:
        if first is None:
            self._begin_with(attached, attached.durable)
            return
        owner, topic, before = self._owner, self.topic, attached.durable.position

        def set_aside(result: bool | StoreError) -> None:
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
            owner.set_aside(topic, self.name, before, first).then(set_aside)
        except StoreError as error:
            self.end(error)

    def _begin_with(self, attached: AttachedDurable, durable: Durable) -> None:
        try:
            self._greet(attached._replace(durable=durable))
        except StoreError as error:
            self._error = self._error or error
        self.wake()

    def _sent(self, frame: Frame, inner: Subscription) -> bool:
        """Records a frame that is about to be sent. Returns whether it is for the client."""
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
        """Continues behind a gap in the journal (rule J5). False: that is not possible."""
        topic = self.topic
        durable = self._owner.row(self)
        if durable is None or not topic.settings.journal or inner.together:
            return False
        floor = topic.statistics.floor_sequence
        if floor <= self.sent:
            return False
        gaps = [_after(gap, self.sent) for gap in durable.gaps if gap.upto > max(self.sent, self.told)]
        if not gaps or gaps[-1].upto < floor:
            gaps.append(DurableGap(GapReason.DISCARDED, gaps[-1].upto if gaps else self.sent, floor, 0))
        self._go_on(self.sent, gaps)
        return True

    @property
    def snapshot_pending(self) -> bool:
        """True if a snapshot replaces the backlog, and has not been sent to its end."""
        return self._snapshot

    def ended(self) -> EndedConsumer:
        """The part that is kept once the consumer is closed. A consumer with its subscription takes 10 KB."""
        return EndedConsumer(self.session, self.sent, self.handed, self.told, self._snapshot, self.life)


def _begin_frame(attached: AttachedDurable, session: str) -> DurableBegin:
    durable = attached.durable
    return DurableBegin(durable.position, attached.created, attached.reset, session, durable.replicated)


def _after(gap: DurableGap, position: int) -> DurableGap:
    """The part of a gap after a position; the number of its entries is not known."""
    return gap if gap.after >= position else gap._replace(after=position, entries=0)
