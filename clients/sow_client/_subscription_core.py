"""Following topics: every change once and in order, however often the connection breaks (rules S1 to S7).

`SubscriptionCore` is the whole machine, without I/O, threads or clock. `Subscription` and `AsyncSubscription` only
carry frames to it and make the calls that it asks for.

                      feed                    take
    frame of a call ────────▶ its changes  ────────▶  handed out: the position moves
                                  ▲
       call again, from there ────┘ the call broke: `ended` says when to call again, `request` where to go on

    [1]  A change is handed out once. A repeated call continues after the position reached. A position inside an atomic
         request makes the server send that whole request again; its changes that were handed out before are dropped.
    [2]  The position never passes a change that was not handed out. A frame's own bookmark counts once the whole frame
         was taken, and Progress once everything before it was.
    [3]  A snapshot that cannot continue begins anew. One "resync" tells the program to forget the records so far; there
         is none if nothing was handed out. A subscription without a snapshot raises ResyncRequired instead.
    [4]  At most two frames are held: the frame being handed out and, in the blocking client, the next one. The rest
         waits in gRPC's flow control and in the server.
    [5]  A subscription that is closed, or has raised why it ended, has no further changes.
    [6]  A topic that moves to another cell takes the subscription along (rule C12). Its position is of the journal that
         it leaves; where the other cell does not know it, [3] says what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Final

import grpc

from sow.v1 import sow_pb2
from sow_client import _process, _statuses, _timeouts
from sow_client._cells import ELSEWHERE, Led
from sow_client._change_frames import changes_of, marks_of, prefix_of
from sow_client._records import Change, ChangeReason, RecordBatch, invalid
from sow_client.errors import SowError

RETRY_SECONDS: Final = 300.0
"""The time that a subscription tries to connect again. It is enough for the restart of a server with much data, and
short enough to report a server that is gone."""

PASSING_REASONS: Final = _statuses.CUT_REASONS | {"STOPPING", "OVERLOADED", "ACCESS_CHANGED"}
"""The call is made again, and continues at the position reached."""
RESYNC_REASONS: Final = frozenset({"RESYNC_REQUIRED", "BOOKMARK_TOO_OLD", "BOOKMARK_OTHER_EPOCH", "BOOKMARK_IN_FUTURE"})
"""The journal does not continue at the position reached; a new snapshot is needed ([3])."""

_NO_CHANGES: Final[Iterator[Change]] = iter(())
"""An iterator at its end."""


class SubscriptionCore:
    """Owns the position, the current frame, and the decision to call again. Not thread-safe."""

    def __init__(
        self,
        request: sow_pb2.SubscribeRequest,
        *,
        retry_for: float,
        connect_timeout: float,
        on_interruption: Callable[[SowError | None], object] | None = None,
        way: Led | None = None,
    ) -> None:
        """`retry_for` bounds the seconds to repair a broken connection, `connect_timeout` those for the first one.

        `on_interruption` gets the error, once, when an established subscription is interrupted, and None when it is
        established again. `way`: to the cell of the topic; None: there is one place only.
        """
        self.stood = False
        """The server has confirmed the subscription once."""
        self._request = request
        self._retry_for = _timeouts.seconds(retry_for, "retry_for")
        self._connect_timeout = connect_timeout
        self._backoff = _statuses.Backoff()
        self._standing = False  # the server has confirmed the current call
        self._way = way
        self._on_interruption = on_interruption
        self._interrupted = False  # `on_interruption` was told so
        self._snapshot = request.sow  # a snapshot is wanted, or not complete
        self._shown = False  # something was handed out that a resync would have to take back
        self._position = request.bookmark  # everything up to here was handed out; empty: no position yet
        self._marks = marks_of(request.bookmark)  # these end every bookmark until others come
        self._covers = False  # as the server has told last; an older one tells nothing
        self.behind = True
        """True: changes from before are still to come, as far as the server has told."""
        self._view = b""  # the name of what the server shows, by its snapshot; empty: there was none, or no name
        self._prefix = prefix_of(request.bookmark)  # epoch and dot: of these, bookmarks of single changes are made
        self._sequence = 0  # of the last change of the current frame
        self._repeated = 0  # changes up to this sequence are repeated ([1]); 0: none
        self._changes: Sequence[Change] = ()  # of the current frame
        self.pending: Iterator[Change] = _NO_CHANGES
        """The changes of the current frame that were not handed out. Its user takes the next change from here: that is
        cheaper than a call of a method for each. At its end another frame is needed."""
        self._after = ""  # the position once all of them were handed out; empty: unchanged

    def forked(self, what: str) -> None:
        """This is a child: what was not handed out is handed out by the parent (_process [3])."""
        bookmark = self.bookmark
        self._position, self._after = bookmark or "", ""
        self._changes, self.pending = (), _ParentsChanges(what)

    # ---- changes ----

    def take(self) -> Change | None:
        """The next change of the current frame; None: another frame is needed."""
        return next(self.pending, None)

    @property
    def bookmark(self) -> str | None:
        """The position after the last change that was handed out; None while there is no position to continue from."""
        taken = len(self._changes) - length_hint(self.pending)  # exact, as these iterate over lists and tuples
        if taken == len(self._changes):
            return self._after or self._position or None
        return (self._changes[taken - 1].bookmark if taken else None) or self._position or None

    @property
    def covers(self) -> bool:
        """True if the server has everything that the subscriber got (rule F9)."""
        return self._covers or ";h=" not in self._marks

    def described(self, kind: type, *, closed: bool) -> str:
        """The repr of its subscription."""
        request = self._request
        named = {"durable": request.durable.name, "filter": request.filter, "bookmark": self.bookmark}
        told = [
            repr(request.topic or request.topic_pattern),
            *(f"{name}={text!r}" for name, text in named.items() if text),
        ]
        return f"{kind.__name__}({', '.join(told)}{', closed' if closed else ''})"

    # ---- frames ----
    # The fields that a frame changes are assigned last and together, so that after Ctrl-C a frame is fed as a whole or
    # not at all: an interrupt comes with a call or a loop, never between two assignments.

    def feed(self, response: sow_pb2.SubscribeResponse) -> None:
        """Takes in the next frame of the current call. All changes before it must have been taken."""
        self._settle()
        kind = response.WhichOneof("frame")
        if kind == "changes" and self._standing and not self._snapshot:
            self._feed_changes(response.changes)
        elif kind == "progress" and not self._snapshot:
            self._feed_progress(response.progress.bookmark, covers=response.progress.covers)
            self.behind = response.progress.behind
        elif kind == "snapshot_begin" and self._snapshot and not self._standing:
            self._begin_snapshot(response.snapshot_begin)
        elif kind == "snapshot" and self._snapshot and self._standing:
            self._feed_snapshot(response.snapshot)
        elif kind == "snapshot_end" and self._snapshot and self._standing:
            self._end_snapshot(response.snapshot_end)
        elif kind is not None:  # None: a kind of frame that a newer server sends
            raise _statuses.malformed(f"{kind} in the wrong place")

    def _settle(self) -> None:
        """The whole current frame was handed out: its end is the position now ([2])."""
        assert not length_hint(self.pending), "a frame is asked for when the one before has been handed out"
        if self._after:
            self._position, self._after = self._after, ""
        self._changes, self.pending = (), _NO_CHANGES

    def _stand(self) -> None:
        if not self.stood:
            self._backoff.reset()
        if self._way is not None:
            self._way.arrived()
        self._standing = self.stood = True
        if self._interrupted:
            self._interrupted = False
            self._tell(None)

    def _tell(self, interruption: SowError | None) -> None:
        if self._on_interruption is not None:
            self._on_interruption(interruption)

    def _feed_progress(self, bookmark: str, *, covers: bool = True) -> None:
        if self._standing:  # it has stood a while; the first one may come from a call that breaks right after it
            self._backoff.reset()
        self._stand()
        prefix, marks = prefix_of(bookmark), marks_of(bookmark)
        if prefix != self._prefix:
            self._sequence = self._repeated = 0  # another instance has sequences of its own (rule F7)
        self._after, self._prefix, self._marks, self._covers = bookmark, prefix, marks, covers

    def _begin_snapshot(self, begin: sow_pb2.SnapshotBegin) -> None:
        self._stand()
        prefix, view = prefix_of(begin.bookmark), begin.view
        resync = (Change("resync", topic=self._request.topic),) if self._shown else ()
        pending = iter(resync)
        self._position, self._prefix, self._marks, self._view = "", prefix, "", view
        self._sequence = self._repeated = 0
        self._shown = False
        self._changes, self.pending = resync, pending

    def _feed_snapshot(self, snapshot: sow_pb2.SnapshotBatch) -> None:
        topic = snapshot.topic
        rows = RecordBatch(topic, snapshot.records)
        changes = [Change("sow", None, record, None, None, topic) for record in rows]
        pending = iter(changes)
        self._shown = self._shown or changes != []
        self._changes, self.pending = changes, pending

    def _end_snapshot(self, end: sow_pb2.SnapshotEnd) -> None:
        self._backoff.reset()
        bookmark, absent = end.bookmark, tuple(end.absent_fields)
        why: ChangeReason | None = "truncated" if end.truncated else None
        topic = self._request.topic
        changes = (Change("snapshot_end", why, bookmark=bookmark, topic=topic, absent_fields=absent),)
        pending = iter(changes)
        marks = marks_of(bookmark)
        self._shown = True
        self._changes, self.pending = changes, pending
        self._after, self._marks = bookmark, marks
        self._snapshot = self.behind = False

    def _feed_changes(self, batch: sow_pb2.ChangeBatch) -> None:
        if not batch.more and not batch.bookmark:
            raise _statuses.malformed("changes without a bookmark")
        changes = changes_of(batch, self._prefix, self._marks)
        sequences = batch.records.sequence
        if sequences and sequences[-1] <= self._repeated:
            return  # all of its changes were handed out before the call broke
        if self._repeated:
            fresh = [index for index, sequence in enumerate(sequences) if sequence > self._repeated]
            changes = [changes[index] for index in fresh]
        if changes:
            self._backoff.reset()
        more, after, sequence = batch.more, batch.bookmark, sequences[-1] if changes else self._sequence
        after += self._marks
        pending = iter(changes)
        self._sequence = sequence
        self._shown = self._shown or changes != []
        self._changes, self.pending = changes, pending
        if not more:
            self._after = after
            self._repeated = 0 if sequences else self._repeated

    # ---- calls ----

    def request(self, *, now: float) -> sow_pb2.SubscribeRequest:
        """The request of the next call: everything after the position. `now` as for `ended`."""
        self._settle()
        if not self.stood:
            self._backoff.begin(now)  # the wait for a first connection counts
        self._standing, self.behind = False, True
        request = sow_pb2.SubscribeRequest()
        request.CopyFrom(self._request)
        self._go_on(request)
        return request

    def _go_on(self, request: sow_pb2.SubscribeRequest) -> None:
        """Makes the next call continue after the position. If what the caller may see has changed since its snapshot,
        the server asks for another one ([3])."""
        if not self._snapshot and self._position:
            request.sow = False
            request.snapshot_max = 0
            request.bookmark = self._position
            request.view = self._view
            self._repeated = self._sequence

    def ended(self, error: SowError, *, now: float, jitter: float) -> float:
        """Seconds to wait before the next call, after one that ended with `error`; raises if no call is to follow.

        `now` is a monotonic clock in seconds, `jitter` a random number in [0, 1).
        """
        led, error = self._led(error)
        # After a change of permissions, rows that it holds may be hidden: only a new snapshot tells which.
        if error.reason in RESYNC_REASONS | {"ACCESS_CHANGED"} and self._request.sow:
            self._snapshot = True
        elif not (led or self._passes(error) or self._leaves_marks(error)):
            raise self._failure(error)
        limit = self._retry_for if self._lasts else min(self._connect_timeout, self._retry_for)
        delay = 0.0 if led else self._backoff.delay(error, now=now, jitter=jitter, limit=limit)
        if delay is None:
            raise self._failure(error)
        if self._lasts and not self._interrupted:
            self._interrupted = True
            self._tell(error)
        return delay

    @property
    def _lasts(self) -> bool:
        """It is tried for `retry_for`, and the program is told meanwhile. Else its begin fails."""
        return self.stood

    def _leaves_marks(self, error: SowError) -> bool:
        """True when the call can be made again without the marks of its bookmark: an older server knows none (rule
        F6)."""
        plain = self._position.partition(";")[0]
        if error.reason != "BOOKMARK_MALFORMED" or plain == self._position or ";h=" in self._position:
            return False
        self._position = plain
        return True

    def _passes(self, error: SowError) -> bool:
        """True when the call can be made again and continue at its position."""
        return error.reason in PASSING_REASONS or (error.reason == ELSEWHERE and self._may_follow())

    def _may_follow(self) -> bool:
        """True when the call may go on in another cell, from its position if that cell knows it ([6])."""
        return self._way is not None

    def _led(self, error: SowError) -> tuple[bool, SowError]:
        """True if the call is to be made again at once, in the cell of the topic; and the error, with the cells where
        they matter. Raises it where the topic cannot be followed."""
        way = self._way
        if way is None or not self._may_follow():
            return False, error
        if way.leads(error):
            return True, error
        told = way.told(error)
        if told is not error:
            told.__cause__ = error.__cause__
        if told.reason == ELSEWHERE:
            if not way.differs:
                raise self._failure(told)
            way.begin_again()
        return False, told

    def _failure(self, error: SowError) -> SowError:
        """The error as the user gets it: with the position reached."""
        bookmark = self.bookmark
        if bookmark is None:
            return error
        failure = _statuses.error_like(error, error.message, bookmark=bookmark)
        failure.__cause__ = error.__cause__
        return failure


class _ParentsChanges(Iterator[Change]):
    """In a forked child, the changes of a subscription of the parent."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __next__(self) -> Change:
        raise _process.forked(self._what)


class SubscriptionBase(_process.Owned):
    """The common half of the blocking and the asynchronous subscription: where it stands."""

    _what = "subscription"

    def __init__(self, core: SubscriptionCore) -> None:
        self._core = core

    @property
    def bookmark(self) -> str | None:
        """The bookmark at which another subscription may start to go on after the last change handed out, or after the
        quiet time since then. None while there is no such place: before the first frame and inside a snapshot.
        That of a `JoinedSubscription` may be a mapping."""
        return self._core.bookmark

    @property
    def cells(self) -> Mapping[str, SowError | None]:
        """The cells that a subscription to a pattern follows, each with the error of an interruption that lasts. Empty
        where there is one server, and for a topic, which is in one cell.

        Rule: C21.
        """
        return {}

    @property
    def covers(self) -> bool:
        """False: the subscription has come from another instance, and this one may lack changes that were handed out
        there.

        Rule: F9.
        """
        return self._core.covers

    @property
    def behind(self) -> bool:
        """False: the subscription has caught up, and the server sends each change as it happens. True: changes from
        before are still to come. The snapshot is not complete, the server still reads older changes in its journal, or
        the connection is interrupted. The server tells when this ends. It does not tell when a subscriber falls behind
        because it reads slowly, until nothing else is to be sent for the time `progress`.

        Rule: S5.
        """
        return self._core.behind


def checked_size(size: int) -> None:
    """Raises InvalidArgument for batches without changes."""
    if size < 1:
        raise invalid("size", f"{size} is less than 1")


FRAMES: Final = "the subscription"


def broken_call(error: grpc.RpcError) -> SowError:
    translated = _statuses.stream_error(error, FRAMES)
    # Without its traceback: gRPC's errors are their own calls, so they refer to the stack frames that refer to them.
    # Such a cycle would keep the subscription alive, too, after the program has dropped it.
    translated.__cause__ = error.with_traceback(None)
    return translated
