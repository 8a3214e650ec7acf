"""A subscriber's side of a subscription, as a machine that is driven step by step (rules S1 to S7).

    opening ──▶ snapshot ──▶ live ◀──▶ behind ──▶ over
                                its queue overflowed; it is served from the journal until it has caught up

    [1]  Frames are sent in the order of sequences. Each change that the request asks for is sent once, and none is left
         out.
    [2]  `_position`: everything up to here has been sent. Every bookmark names it.
    [3]  Memory is bounded: at most `queue_bytes_max` bytes wait, or one commit, if that alone is larger.
    [4]  Nothing is sent before it is durable: the dispatcher and the replay give only durable changes.

`step` gives the next step: a frame to send, a read for a reader thread, or a wait. Call it on the dispatcher's thread,
as everything here except the work of a `Read`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.frames import ChangeFrame, Frame, SnapshotBatch, SnapshotEnd
from sow_server.subscriptions.journal.replay import JournalGap, Replay, Replayed
from sow_server.subscriptions.live.conflation import Conflation, Emission, Form
from sow_server.subscriptions.live.dispatch import Dispatcher
from sow_server.subscriptions.live.judging import Unjudged
from sow_server.subscriptions.live.outbox import Outbox
from sow_server.subscriptions.marking import Marking
from sow_server.subscriptions.progress import ProgressReports
from sow_server.subscriptions.request import Request, Snapshot, StartKind
from sow_server.subscriptions.topic_views import TopicViews

FAILURE_CHECK_MICROS: Final = 200_000
"""How often a subscription that waits for its first durable commit checks whether the writer has failed."""

LEAVE_CHECK_MICROS: Final = 50_000
"""How often a subscription that is to end looks whether the last commits are durable: those of other topics do not wake
it."""

TOLD_SHARE: Final = 4
"""A conflating subscriber's versions to compare with take at most one part in so many of its queue (rule S15)."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this frame."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Judged:
    """The frames of the change that was judged."""

    frames: list[ChangeFrame]


@dataclass(frozen=True, slots=True)
class Emitted:
    """The frames of an emission are made."""


@dataclass(frozen=True, slots=True)
class Read:
    """Run this on a reader thread, then give the result to `Subscription.took`."""

    run: Callable[[], Any]
    """Each kind of machine takes its own results."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until `Subscription.wake` is called, or `elapsed` reaches this time."""

    until_micros: int


ReadResult = SnapshotBatch | Replayed | Judged | Emitted | JournalGap | None
Step = Send | Read | Wait


@dataclass(frozen=True, slots=True)
class Common:
    """The things that all subscriptions of a hub have in common."""

    reads: Reads
    writes: Writes
    elapsed: Callable[[], int]
    """Microseconds of a clock that nobody sets."""
    dispatcher: Dispatcher
    queue_bytes_max: int
    moved: Callable[[Callable[[], None]], None]
    """Calls a function once no request for a topic that lives elsewhere is under way. Raises StoreError."""
    closed: Callable[[Subscription], None]
    """Called once for each that is over."""


class Subscription:
    """One subscription. A `groups.Member` of the dispatcher."""

    def __init__(
        self,
        request: Request,
        common: Common,
        *,
        topic: Topic | None,
        matches: Callable[[str], bool],
        marking: Marking | None = None,
    ) -> None:
        """Use `Hub.subscribe`. `topic`: the only one; None: all whose name `matches`. `marking`: makes its bookmarks
        mean something at other instances."""
        self.request: Final = request
        reads, elapsed = common.reads, common.elapsed
        self._commits = common.writes.commits
        self._clock = reads.clock
        self._elapsed = elapsed
        self._dispatcher = common.dispatcher
        self._queue_bytes_max = common.queue_bytes_max
        self._moved = common.moved
        self._closed = common.closed
        self._reports = ProgressReports(request.progress_micros, marking, clock=reads.clock, elapsed=elapsed)
        views = TopicViews(request, reads, topic=topic, matches=matches, elsewhere=self._reports.elsewhere)
        self._views = views
        self._replay = Replay(reads, views.view, topic=topic, follows=views.follows)
        # The facts that the dispatcher asks of a member (`groups.Member`).
        self.several: Final = views.several
        self.wants_previous: Final = request.previous
        self.conflates: Final = bool(request.conflation_micros) or request.with_due
        self.follows: Final = views.follows
        self.view: Final = views.view
        self.wake: Callable[[], None] = lambda: None
        """Set by the driver of the machine."""

        self._may_open = False
        """True if all commits staged before its topics were followed are through, and it has not begun yet."""
        self._durable = False
        """True if its start is on disk."""
        self._greeted = False
        """True once the first frame has been sent."""
        self._snapshot: Snapshot | None = None
        self._batch: SnapshotBatch | None = None
        """Read, and not yet sent."""
        self._attached = False
        self._live_from = 0
        """The position at which it attached."""
        self._behind = False
        """True if the changes after `_covered` have to be read from the journal."""
        self._accepted: dict[int, int] = {}
        self._position = 0
        self._covered = 0
        """Everything up to here has been sent, or is in the outbox."""
        self._together = False
        """True if the last frame belongs together with the next."""
        self._conflation = _conflation(request, common) if request.conflation_micros else None
        self._outbox = Outbox(self._conflation)
        self._emission: Emission | None = None
        """It was taken, and its frames are not made yet."""
        self._error: StoreError | None = None
        self._leaving: tuple[int, StoreError] | None = None
        """It ends with this error once it has sent everything up to there."""
        self._handed_over: frozenset[int] = frozenset()
        """The ids of the topics that it followed then."""
        self._stopping = False
        self._is_closed = False

    @property
    def queued_bytes(self) -> int:
        """Memory of the frames that wait to be sent."""
        return self._outbox.size

    @property
    def error(self) -> StoreError | None:
        """The error with which it has ended, or will end."""
        return self._error

    @property
    def position(self) -> int:
        """Everything up to here has been sent [2]."""
        return self._position

    @property
    def together(self) -> bool:
        """True if the last sent frame belongs together with the next, so that the subscription cannot stop here."""
        return self._together

    @property
    def behind(self) -> bool:
        """True if the subscription is served from the journal."""
        return self._behind

    # -- a member of the dispatcher -----------------------------------------------------------------------------------

    def joined(self, position: int) -> None:
        self._durable = True
        self.wake()

    def push(self, frames: Sequence[ChangeFrame | Unjudged]) -> bool:
        size = sum([frame.size for frame in frames])
        queued = self._outbox.size
        if queued and queued + size > self._queue_bytes_max:
            self.detached(frames[0].after)
            return False
        if self._behind:
            self._outbox.hold(frames, size)
        else:
            self._outbox.add(frames)
        self.wake()
        return True

    def detached(self, position: int) -> None:
        self._attached = False
        if self._behind:
            self._outbox.drop_held()
        else:
            self._behind = True
            self._covered = position
        self.wake()

    def end(self, error: StoreError) -> None:
        self._attached = False
        self._error = self._error or _last_error(self, error)
        self.wake()

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self, position: int | None, accepted: dict[int, int]) -> None:
        """Starts after a position of the journal, or (None) with the commits from now on. `accepted`: floors below
        which nothing is missed, by topic id. Raises StoreError."""
        barrier = self._dispatcher.register(self)
        self._views.check()
        if position is not None:
            self._durable = self._behind = True
            self._position = self._covered = position
            self._accepted = accepted
            if self._conflation is not None:
                resumed = self.request.start.kind is StartKind.BOOKMARK
                self._conflation.begin_behind(self._commits.last_sequence, resumed=resumed)
        elif barrier:
            self._commits.barrier().then(self._passed)
        else:
            self._open()

    def _passed(self, answer: object) -> None:
        """The commits staged before the topic was followed are through."""
        if isinstance(answer, StoreError):
            self.end(answer)
        else:
            self._may_open = True
            self.wake()

    def _open(self) -> None:
        self._may_open = False
        if self.request.sow:
            self._snapshot = snapshot = self._views.snapshot()
            # Nothing else runs on this thread in between, so nothing after the cut has been dispatched yet.
            self._attach(snapshot.begin.sequence)
        else:
            self._attach(self._commits.follow_topics(lambda topics: None))
        self._position = self._covered = self._live_from

    def _attach(self, at: int) -> None:
        self._live_from = at
        self._attached = True
        self._dispatcher.attach(self, at)

    def stop(self) -> None:
        """Ends the stream with a bookmark: the server stops."""
        self._stopping = True
        self.wake()

    def close(self) -> None:
        """Releases everything. No `Read` of it may be running."""
        if self._is_closed:
            return
        self._is_closed = True
        self._dispatcher.unregister(self)
        if self._snapshot is not None:
            self._snapshot.close()
        self._outbox.clear()
        self._closed(self)

    # -- stepping -----------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """The next step. Raises StoreError at the end of the subscription."""
        if self._stopping:
            return self._last()
        if not self._greeted:
            return self._greet()
        if self._snapshot is not None:
            return self._step_snapshot(self._snapshot)
        while True:
            if not self._together and self._reports.has_marks_due(self._position):
                return self._progress()  # also while changes come without a pause
            frame = self._next_frame()
            if frame is not None:
                return Send(self._reports.sending(frame))
            if self._emission is not None:
                return _emitting(self._emission)
            if self._outbox.unjudged_after is not None:
                judge = self._outbox.judging(self._clock.now_micros())
                if judge is None:
                    continue
                due = not self._together and self._reports.is_due(self._position)
                return self._progress() if due else _judging(judge)
            if self._error is not None:
                raise self._error
            if self._leaving is not None and not self._together and self._position >= self._leaving[0]:
                self._error = self._leaving[1]
                if not self._handed_over <= self._views.present():
                    self._error.details["complete"] = "false"  # a topic was deleted before all of it was sent
                return self._progress()  # the position comes before the end: the subscriber goes on behind all of it
            caught_up = self._reports.told_behind and not self._owes
            if not self._together and (caught_up or self._reports.is_due(self._position)):
                return self._progress()  # also while it reads on and nothing matches (rule S5)
            if self._views.elsewhere and not self._reports.elsewhere:
                self._rejoin()
            # A conflating subscription reads on once there is room. Only conflated rows make room by waiting.
            if not self._behind or (self._conflation and self.queued_bytes >= self._queue_bytes_max):
                return self._idle()
            step = self._catch_up()
            if step is not None:
                return step

    def took(self, result: ReadResult) -> None:
        """Takes the result of a `Read`."""
        match result:
            case SnapshotBatch():
                self._batch = result
            case Replayed():
                self._outbox.add(result.frames)
                self._covered = result.position
            case Judged():
                self._outbox.add_result(result.frames)
            case Emitted():
                self._emitted()
            case JournalGap():
                self._error = self._error or _last_error(self, _resync(result, self._covered))
            case None:
                pass

    @property
    def _owes(self) -> bool:
        """True if changes from before it attached are still to be sent. Conflated ones wait here once they are read."""
        return self._behind or self._position < self._live_from

    def _progress(self) -> Send:
        return Send(self._reports.report(self._position, behind=self._owes))

    def _rejoin(self) -> None:
        """This instance has everything that the subscriber was told elsewhere: it goes on like any other, from the
        journal first."""
        if self._together or self._dispatcher.mid_change:
            return  # rows from before `_covered` may still come
        self._dispatcher.leave(self)
        self.detached(self._covered)
        self._views.rejoin()

    def _last(self) -> Step:
        if self._error is None:
            self._error = StoreError(Reason.STOPPING, "the server is stopping")
            if self._greeted and self._snapshot is None and not self._together:
                return self._progress()
        raise self._error

    def _greet(self) -> Step:
        """The first frame tells that the subscription has begun, once its start is durable (rule S7)."""
        if self._error is not None:
            raise self._error
        if self._may_open:
            self._open()
        if not self._durable:
            failure = self._commits.failure
            if failure is not None:
                raise StoreError(failure.reason, failure.message)
            return Wait(self._elapsed() + FAILURE_CHECK_MICROS)
        self._greeted = True
        if self._snapshot is not None:
            return Send(self._reports.sending(self._snapshot.begin))
        return self._progress()

    def _step_snapshot(self, snapshot: Snapshot) -> Step:
        if self._error is not None:
            raise self._error
        if self._batch is not None:
            batch, self._batch = self._batch, None
            return Send(self._reports.sending(batch))
        if not snapshot.done:
            return Read(snapshot.read)
        snapshot.close()
        self._snapshot = None
        sequence, reports = snapshot.begin.sequence, self._reports
        end = SnapshotEnd(sequence, reports.marks(sequence), snapshot.truncated, snapshot.absent_fields)
        return Send(reports.sending(end))

    def _next_frame(self) -> ChangeFrame | None:
        """The next frame of changes, as it is to be handed over now."""
        now = self._clock.now_micros()
        outbox = self._outbox
        while True:
            frame = outbox.take(now)
            if frame is None:
                self._cover()
                if not self._conflate(now):
                    return None
            elif frame.rows or frame.more or self._together:
                self._together = frame.more
                if not frame.more:
                    self._position = frame.bookmark
                return frame
            else:
                self._position = frame.bookmark  # all its records have fallen due, so there is nothing to send

    @property
    def _complete(self) -> int:
        """Everything up to here has been sent, or is ready to be sent, or conflated."""
        unjudged_after = self._outbox.unjudged_after
        return self._covered if unjudged_after is None else unjudged_after

    def _cover(self) -> None:
        """Moves the position: no frame is ready, so everything up to there has been sent."""
        unjudged_after = self._outbox.unjudged_after
        if unjudged_after is None and self._attached and not (self._behind or self._dispatcher.mid_change):
            self._covered = max(self._covered, self._dispatcher.position)
        if not self._conflation:
            self._position = max(self._position, self._covered if unjudged_after is None else unjudged_after)

    def _conflate(self, now_micros: int) -> bool:
        """Emits the conflated rows when it is time. Returns whether frames are ready then."""
        conflation = self._conflation
        ends = self._error is not None or self._leaving is not None
        if not conflation or (now_micros < conflation.due_at() and not ends):
            return False
        self._emission = emission = conflation.take(position=self._position, now_micros=now_micros)
        return self._emitted() if emission.is_light else False

    def _emitted(self) -> bool:
        """The frames of the emission are ready, if there are any."""
        emission, self._emission = self._emission, None
        assert emission is not None, "one was taken"
        assert self._conflation is not None, "it conflates"
        self._conflation.emitted(emission)
        frames = emission.frames()
        self._outbox.add_ready(frames)
        if not frames:
            self._position = emission.bookmark
        return bool(frames)

    def _catch_up(self) -> Step | None:
        """The next step to become live again; None: it is live."""
        synced = self._dispatcher.synced
        if not self._attached and self._covered >= synced:
            # It attaches first, then reads on up to there, so that nothing is missed in between.
            self._attach(self._commits.follow_topics(lambda topics: None))
        if not self._attached:
            return self._read(synced)
        if self._covered < min(self._live_from, synced):
            return self._read(min(self._live_from, synced))
        if self._covered < self._live_from:
            return self._idle()  # until the commit is durable
        self._behind = False
        self._outbox.release()
        return None

    def _read(self, upto: int) -> Read:
        position = self._covered
        return Read(lambda: self._replay.read(position, upto, self._accepted))

    def _idle(self) -> Wait:
        now, until = self._elapsed(), self._reports.next_micros
        if self._conflation:
            until = min(until, now + self._conflation.due_at() - self._clock.now_micros())
        if self._leaving is not None:
            until = min(until, now + LEAVE_CHECK_MICROS)
        return Wait(max(until, now))


def leave(one: Subscription, error: StoreError) -> None:
    """Ends it with this error once all changes are sent that topics have got here before they went to another cell. Its
    last frame is its position, with marks: those of now, so it has them also if nothing has come for long."""

    def committed() -> None:
        marking, commits = one._reports.marking, one._commits
        last = commits.last_sequence
        if marking is not None:
            last = marking.ends_at(lambda: commits.last_sequence, one._elapsed())
        one._leaving = last, error
        one._handed_over = one._views.present()
        one.wake()

    one._moved(committed)


def _last_error(of: Subscription, error: StoreError) -> StoreError:
    """The error to end with. A topic that has left may be deleted here before all of it is sent: its subscriber goes on
    in the other cell, as far as it has got."""
    return error if of._leaving is None or of.several else of._leaving[1]


def reached(by: Subscription) -> int:
    """As its `position`, also where nothing has come since the last step: everything up to here has been sent."""
    caught_up = by._attached and not (by._behind or by._dispatcher.mid_change or by._outbox.size)
    return max(by._position, by._dispatcher.position) if caught_up else by._position


def _judging(judge: Callable[[], list[ChangeFrame]]) -> Read:
    return Read(lambda: Judged(judge()))


def _emitting(emission: Emission) -> Read:
    def make() -> Emitted:
        emission.frames()
        return Emitted()

    return Read(make)


def _conflation(request: Request, common: Common) -> Conflation:
    form = Form(request.batch_size, request.delta, request.empty_deltas, common.queue_bytes_max // TOLD_SHARE)
    return Conflation(request.conflation_micros, form, common.reads.clock.now_micros)


def _resync(gap: JournalGap, position: int) -> StoreError:
    """The journal does not have the changes after `position`."""
    if gap.earliest is None:
        return StoreError(
            Reason.RESYNC_REQUIRED,
            f"topic: the subscriber is behind, and {gap.topic} has no journal; take a new snapshot",
            field="topic",
        )
    return StoreError(
        Reason.RESYNC_REQUIRED,
        f"the journal of {gap.topic} no longer reaches back to sequence {position}; take a new snapshot",
        details={"earliest_sequence": str(gap.earliest + 1)},
    )
