"""Consuming durable subscriptions: changes as `_subscription_core` hands them out, and their acknowledgement (rule J2).

`DurableCore` and `Acknowledgements` are the whole machine, without I/O, threads or clock. `aio/_consuming.py` runs it.

    [1]  After a broken connection a consumer attaches again by itself and hands nothing out twice. If the durable was
         rewound, removed or made anew in the meantime, it begins at the new position instead.
    [2]  A consumer never takes over from another one by itself: while another one is attached, it waits. For a while
         the server may also take the consumer's own lost connection for another consumer.
    [3]  Acknowledgements are cumulative: only the last of the waiting ones is sent, at most one call at a time, and at
         most one per `LINGER_SECONDS`. Changes from before a rewind are not acknowledged.
    [4]  The next call of the program raises the error of an acknowledgement that failed for good, once.
    [5]  Changes that the current attachment has not received are not acknowledged yet: the server would refuse that.
         After a broken connection they are the changes that come again. A consumer that leaves before then gets them
         again next time.
    [6]  The consumer of a replicated durable goes on at another instance, which has positions of its own. There,
         acknowledgements of changes that another instance has handed out have no effect: those changes come again
         (rule F17).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from sow.v1 import sow_pb2
from sow_client import _ends, _statuses, _timeouts
from sow_client._cells import ELSEWHERE, Led
from sow_client._change_frames import prefix_of
from sow_client._lines import Home
from sow_client._records import invalid
from sow_client._reports import Gap, GapReason
from sow_client._subscription_core import PASSING_REASONS, SubscriptionCore
from sow_client._workers import AioGuard, Guard
from sow_client.errors import SowError

LINGER_SECONDS: Final = 0.02
"""After an acknowledgement was sent, later ones are collected for this long."""
CLOSE_SECONDS_MAX: Final = 5.0
"""A consumer that ends waits at most this long for its acknowledgements to arrive. The server hands out again the
changes whose acknowledgement has not arrived."""
INTERRUPTED_SECONDS_MAX: Final = 1.0
"""The same for a consumer that ends with an error or with Ctrl-C."""
LEAVE_SECONDS_MAX: Final = 1.0
"""How long a consumer that ends waits for the instance to know that it has left. Without an answer the instance notices
it by the end of the stream."""

IN_USE_SECONDS_MAX: Final = 0.5
"""How long a consumer that waits for another one rests between two attempts. After a kill, that other one is most often
this consumer itself, until the instance notices that the link with the lost one is down."""

_ACK_RETRIED: Final = PASSING_REASONS | {"WRITE_STALLED", "DEADLINE_EXCEEDED"}
_ACK_RETRIED_ELSEWHERE: Final = frozenset(
    {"NOT_SERVING", "STORE_FAILED", "DISK_FULL", "BOOKMARK_OTHER_EPOCH", ELSEWHERE}
)
"""The same where the durable is replicated: the client moves, or has moved and is about to attach, and the changes come
again there ([6])."""
TOLD_MAX: Final = 8
"""Instances whose positions a consumer that has moved tells; the server's limit."""
_KEPT: Final = (
    "this durable subscription stays in the cell where it began, as it is not replicated: read it to its end there, "
    "and begin another one in the new cell"
)
_OF_ATTACHMENTS: Final = frozenset({"DURABLE_TAKEN_OVER", "DURABLE_DETACHED"})
_GAP_REASONS: Final[Mapping[int, GapReason]] = {
    sow_pb2.GAP_REASON_DISCARDED: "discarded",
    sow_pb2.GAP_REASON_EVICTED: "evicted",
    sow_pb2.GAP_REASON_CONFLATED: "conflated",
    sow_pb2.GAP_REASON_BACKLOG_TTL: "backlog_ttl",
    sow_pb2.GAP_REASON_DELIVERY_LIMIT: "delivery_limit",
}


def sequence_of(bookmark: str) -> int:
    """The sequence of a bookmark. Raises InvalidArgument (BOOKMARK_MALFORMED)."""
    position = bookmark.partition(";")[0]
    digits = position[len(prefix_of(position)) :]
    if not digits or len(digits) == len(position):
        raise invalid("bookmark", f"{bookmark!r} is not a bookmark of a server", reason="BOOKMARK_MALFORMED")
    return int(digits)


class Acknowledgements:
    """Owns the position to acknowledge and the position that the server has confirmed. Not thread-safe: see `lock`."""

    def __init__(self, topic: str, name: str, *, retry_for: float) -> None:
        """`retry_for` bounds the seconds to deliver an acknowledgement."""
        self.lock: Guard | AioGuard = Guard()
        """Guards this object. Every user that shares it with another thread holds the lock."""
        self.hears: Callable[[], Callable[[], object] | None] = lambda: None
        """Whom to tell that the consumer is attached: what waited for that can be sent now. A weak reference."""
        self.confirmed = 0
        """The last sequence that the server is known to have acknowledged."""
        self._topic = topic
        self._name = name
        self._retry_for = _timeouts.seconds(retry_for, "retry_for")
        self._session = ""
        self._prefix = ""
        self._left: set[str] = set()  # prefixes of attachments at other instances ([6])
        self.moves = False
        """The durable is replicated."""
        self._wanted = 0  # above `confirmed`: there is something to send
        self._received = 0  # in the current attachment ([5])
        self._detached: SowError | None = None  # the attachment has ended: wait for the next one
        self._under_way = False
        self._not_before = 0.0  # the next call
        self._resting = False  # pausing after a failure; `hurried` does not shorten the pause
        self._backoff = _statuses.Backoff()
        self._failure: SowError | None = None

    def attached(self, begin: sow_pb2.DurableBegin, *, anew: bool) -> None:
        """The consumer is attached. `anew`: acknowledgements from before no longer apply ([1])."""
        at = sequence_of(begin.bookmark)
        self._session = begin.session
        self.moves = begin.replicated
        self._left.add(self._prefix)
        self._prefix = prefix_of(begin.bookmark)
        self._left -= {self._prefix, ""}
        self._received = at
        self._detached = None
        if anew:
            self.confirmed = self._wanted = at
        else:
            self.confirmed = max(self.confirmed, at)
        if (heard := self.hears()) is not None:
            heard()

    def received(self, bookmark: str) -> None:
        """Everything up to this bookmark has come in the current attachment."""
        self._received = sequence_of(bookmark)

    def add(self, bookmark: str) -> bool:
        """Marks everything up to this bookmark for acknowledgement; True if that is new. Raises a failure ([4])."""
        self.raise_failure()
        sequence = sequence_of(bookmark)
        if prefix_of(bookmark.partition(";")[0]) in self._left:
            return False  # [6]
        if not bookmark.startswith(self._prefix):
            raise invalid("bookmark", f"{bookmark!r} is of another journal", reason="BOOKMARK_OTHER_EPOCH")
        if sequence <= self._wanted or sequence <= self.confirmed:
            return False
        self._wanted = sequence
        return True

    def wait(self, now: float, *, hurried: bool) -> float | None:
        """Seconds until the next call is to be made; None: nothing is to be sent. `now`: monotonic seconds."""
        if self._under_way or self._wanted <= self.confirmed or self._detached is not None:
            return None
        if self._received <= self.confirmed:
            return LINGER_SECONDS  # the attachment comes soon, without a signal
        return 0.0 if hurried and not self._resting else max(0.0, self._not_before - now)

    def take(self, now: float) -> sow_pb2.AcknowledgeRequest:
        """The next call's request."""
        self._under_way = True
        self._backoff.begin(now)
        self._not_before = now + LINGER_SECONDS
        return sow_pb2.AcknowledgeRequest(
            topic=self._topic,
            durable=self._name,
            bookmark=f"{self._prefix}{min(self._wanted, self._received)}",
            session=self._session,
        )

    def leaving(self) -> sow_pb2.AcknowledgeRequest:
        """The request of a consumer that leaves."""
        return sow_pb2.AcknowledgeRequest(topic=self._topic, durable=self._name, session=self._session, detach=True)

    def done(self, request: sow_pb2.AcknowledgeRequest) -> None:
        """The call has succeeded."""
        self._under_way = self._resting = False
        self._backoff.reset()
        if request.session == self._session:
            self.confirmed = max(self.confirmed, sequence_of(request.bookmark))

    def failed(self, request: sow_pb2.AcknowledgeRequest, error: SowError, *, now: float, jitter: float) -> None:
        """The call has failed. It is made again, or its error is kept for the next call of the user ([4])."""
        self._under_way = False
        if error.reason in _OF_ATTACHMENTS:
            # Either the iteration raises why, or the consumer attaches again and this is sent then.
            self._detached = error if request.session == self._session else None
            self._backoff.reset()
            self._resting = False
            return
        if prefix_of(request.bookmark) in self._left:
            self._backoff.reset()
            self._resting = False
            return  # [6]
        again = error.reason in _ACK_RETRIED or (self.moves and error.reason in _ACK_RETRIED_ELSEWHERE)
        delay = self._backoff.delay(error, now=now, jitter=jitter, limit=self._retry_for) if again else None
        if delay is None:
            self._backoff.reset()
            self._resting = False
            self._wanted = self.confirmed
            self._failure = error
        else:
            self._resting = True
            self._not_before = now + delay

    @property
    def is_settled(self) -> bool:
        """No call is in progress, and nothing can be sent now."""
        sendable = min(self._wanted, self._received) > self.confirmed and self._detached is None
        return not self._under_way and not sendable

    def raise_held(self) -> None:
        """Raises why an acknowledgement is still missing although nothing can be sent."""
        if self._detached is not None:
            raise self._detached
        if self._wanted > self.confirmed:
            raise _statuses.cut(
                f"up to {self._prefix}{self._wanted}, which has to be handed over first, the subscription"
            )

    @property
    def has_failed(self) -> bool:
        """There is an error to raise."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raises, once, the error of a call that failed for good."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class DurableCore(SubscriptionCore):
    """`SubscriptionCore` for a durable subscription, whose position the server keeps. Not thread-safe."""

    def __init__(
        self,
        request: sow_pb2.SubscribeRequest,
        acknowledgements: Acknowledgements,
        *,
        retry_for: float,
        connect_timeout: float,
        on_interruption: Callable[[SowError | None], object] | None = None,
        on_gap: Callable[[Gap], object] | None = None,
        home: Home | None = None,
        way: Led | None = None,
    ) -> None:
        """`on_gap` gets each gap in its place: after everything before it was handed out, and before the rest. `home`
        hears whether the durable is replicated."""
        super().__init__(
            request, retry_for=retry_for, connect_timeout=connect_timeout, on_interruption=on_interruption, way=way
        )
        self.created = False
        self.reset = False
        self.gap: Gap | None = None
        self._acknowledgements = acknowledgements
        self._on_gap = on_gap
        self._home = home
        self._told: dict[str, int] = {}  # by the prefix of other instances: what was handed out there ([6])
        self._conflated = False  # a snapshot follows

    @property
    def is_attached(self) -> bool:
        """True while a stream of the server makes this the durable's consumer."""
        return self._standing

    def feed(self, response: sow_pb2.SubscribeResponse) -> None:
        kind = response.WhichOneof("frame")
        if kind == "durable_begin" and not self._standing:
            self._settle()
            self._begin(response.durable_begin)
        elif kind is not None and not self._standing:
            raise _statuses.malformed(f"{kind} in the wrong place")
        elif kind == "gap" and not self._snapshot:
            self._settle()
            self._feed_gap(response.gap)
        elif kind == "snapshot_begin" and self._conflated:
            self._settle()
            self._shown = False  # changes handed out stay valid: a resync has nothing to take back
            self._begin_snapshot(response.snapshot_begin)
            self._snapshot, self._conflated = True, False
        else:
            super().feed(response)
        if end := _end_of(response):
            self._acknowledgements.received(end)

    def _passes(self, error: SowError) -> bool:
        return super()._passes(error) or (self.stood and error.reason == "DURABLE_IN_USE")  # [2]

    def _may_follow(self) -> bool:
        # In another cell only a replicated one is known: another would begin there anew, and changes would be missed.
        return super()._may_follow() and (not self.stood or (self._home is not None and self._home.moves))

    def _failure(self, error: SowError) -> SowError:
        failure = super()._failure(error)
        if error.reason != ELSEWHERE or self._may_follow():
            return failure
        told = _statuses.error_like(failure, f"{failure.message}; {_KEPT}")
        told.__cause__ = failure.__cause__
        return told

    def ended(self, error: SowError, *, now: float, jitter: float) -> float:
        delay = super().ended(error, now=now, jitter=jitter)
        return min(delay, IN_USE_SECONDS_MAX) if error.reason == "DURABLE_IN_USE" else delay

    def _go_on(self, request: sow_pb2.SubscribeRequest) -> None:
        self._snapshot = self._conflated = False  # the server repeats a snapshot that was cut short, with its gap
        if self.stood:
            request.durable.force = False  # [2]
            request.durable.expected = True
            request.durable.told.extend(self._told_elsewhere())

    def _told_elsewhere(self) -> list[str]:
        """The positions up to which changes were handed out at instances; the one in use leaves out its own."""
        bookmark = self.bookmark
        if self._home is None or not self._home.moves or bookmark is None:
            return []
        self._told.pop(self._prefix, None)
        self._told[self._prefix] = sequence_of(bookmark)
        while len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]
        return [f"{prefix}{sequence}" for prefix, sequence in self._told.items()]

    def _begin(self, begin: sow_pb2.DurableBegin) -> None:
        at = sequence_of(begin.bookmark)
        acknowledgements = self._acknowledgements
        is_new = begin.created or begin.reset
        with acknowledgements.lock:
            # The position is before the acknowledged one: the durable was rewound.
            goes_on = (
                self.stood
                and not is_new
                and prefix_of(begin.bookmark) == self._prefix
                and at >= acknowledgements.confirmed
            )
            acknowledgements.attached(begin, anew=not goes_on)
        if self._home is not None:
            self._home.moves = begin.replicated
        before, has_stood = self._position, self.stood
        self.created = self.created or (begin.created and not has_stood)
        self._prefix = prefix_of(begin.bookmark)
        self._repeated = self._sequence if goes_on else 0
        if not goes_on:
            self._sequence = 0
        if at >= self._repeated:
            self._after = begin.bookmark
        self._stand()
        if begin.reset:
            self.reset = True
            self._tell_gap(Gap("reset", before if has_stood else "", begin.bookmark, None))

    def _feed_gap(self, gap: sow_pb2.Gap) -> None:
        self._backoff.reset()
        self._conflated = gap.reason == sow_pb2.GAP_REASON_CONFLATED
        if not self._conflated and sequence_of(gap.upto_bookmark) >= self._repeated:
            self._after = gap.upto_bookmark
        reason = _GAP_REASONS.get(gap.reason, "unknown")
        self._tell_gap(Gap(reason, gap.after_bookmark, gap.upto_bookmark, gap.entries or None))

    def _tell_gap(self, gap: Gap) -> None:
        self.gap = gap
        if self._on_gap is not None:
            self._on_gap(gap)

    def _feed_progress(self, bookmark: str, *, covers: bool = True) -> None:
        super()._feed_progress(bookmark, covers=covers)
        if covers:
            self._told.clear()
        if sequence_of(bookmark) < self._repeated:
            self._after = ""  # it lies before changes that were handed out before the connection broke


def _end_of(response: sow_pb2.SubscribeResponse) -> str:
    """The bookmark up to which everything has come with this frame; empty: not known."""
    match response.WhichOneof("frame"):
        case "changes":
            return "" if response.changes.more else response.changes.bookmark
        case "progress":
            return response.progress.bookmark
        case "snapshot_end":
            return response.snapshot_end.bookmark
        case _:
            return ""


def dropped(stop: Callable[[], object]) -> None:
    """A consumer that nobody closes is finalized: no caller could get an error, and none should wait."""
    _ends.hand_over(stop)


def aio_dropped(_stop: Callable[[], object]) -> None:
    """As `dropped`. The task sends what waits, and ends."""
