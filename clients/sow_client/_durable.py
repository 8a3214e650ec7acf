"""Consuming durable subscriptions: changes as `_subscription` hands them out, and their acknowledgement (rule J2).

`DurableCore` and `Acknowledgements` are the whole machine, without I/O, threads or clock.

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

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Final, Protocol

from sow.v1 import sow_pb2
from sow_client import _ends, _statuses, _timeouts
from sow_client._aio_subscription import AioOpenSubscription, AsyncSubscription
from sow_client._arguments import refused_by_name
from sow_client._change_frames import prefix_of
from sow_client._lines import Home
from sow_client._records import Change, invalid
from sow_client._reports import Gap, GapReason
from sow_client._subscription import (
    PASSING_REASONS,
    OpenSubscription,
    Subscription,
    SubscriptionCore,
)
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
_ACK_RETRIED_ELSEWHERE: Final = frozenset({"NOT_SERVING", "STORE_FAILED", "DISK_FULL", "BOOKMARK_OTHER_EPOCH"})
"""The same where the durable is replicated: the client moves, or has moved and is about to attach, and the changes come
again there ([6])."""
TOLD_MAX: Final = 8
"""Instances whose positions a consumer that has moved tells; the server's limit."""
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
        self.lock = threading.Lock()
        """Guards this object. Every user that shares it with another thread holds the lock."""
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
    ) -> None:
        """`on_gap` gets each gap in its place: after everything before it was handed out, and before the rest. `home`
        hears whether the durable is replicated."""
        super().__init__(request, retry_for=retry_for, connect_timeout=connect_timeout, on_interruption=on_interruption)
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
        """Whether a stream of the server makes this the durable's consumer."""
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


class CallAcknowledge(Protocol):
    """A client's call of Acknowledge, for a blocking durable subscription."""

    def __call__(self, request: sow_pb2.AcknowledgeRequest, /) -> object: ...


class _Acknowledger:
    """Sends acknowledgements in a thread of its own, which the first one starts."""

    def __init__(self, acknowledgements: Acknowledgements, call: CallAcknowledge) -> None:
        self._acknowledgements = acknowledgements
        self._call = call
        # `with` takes the lock and not the condition: where Ctrl-C comes in the method by which a condition takes its
        # lock, nobody gives it back.
        self._lock = acknowledgements.lock  # guards the fields below, too
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._over = False
        self._hurried = False
        self._idle = False

    def add(self, bookmark: str) -> None:
        """Sends it soon. Raises a failure of an earlier one."""
        with self._lock:
            if self._over:
                raise _statuses.closed("durable subscription")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="sow-acknowledge", daemon=True)
                thread.start()
                self._thread = thread
            if self._acknowledgements.add(bookmark) and self._idle:
                self._changed.notify_all()

    def flush(self, seconds: float | None = None) -> None:
        """Returns once everything is acknowledged, or after `seconds`. Raises a failure."""
        acknowledgements = self._acknowledgements
        with self._lock:
            self._hurried = True
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: acknowledgements.is_settled or acknowledgements.has_failed or self._over, seconds
                )
            finally:
                self._hurried = False
            acknowledgements.raise_failure()

    def stop(self) -> None:
        """Ends sending."""
        with self._lock:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        acknowledgements = self._acknowledgements
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # an interrupt has ended `add` before it was known
        while True:
            with self._lock:
                while (wait := acknowledgements.wait(time.monotonic(), hurried=self._hurried)) != 0.0:
                    if self._over:
                        return
                    self._idle = wait is None
                    self._changed.wait(wait)
                if self._over:
                    return
                self._idle = False
                request = acknowledgements.take(time.monotonic())
            error: SowError | None = None
            try:
                self._call(request)
            except SowError as refused:
                error = refused
            except Exception as unexpected:  # noqa: BLE001 - the program must get it
                error = _statuses.error_of_status(unexpected)
            with self._lock:
                if error is None:
                    acknowledgements.done(request)
                else:
                    acknowledgements.failed(request, error, now=time.monotonic(), jitter=random.random())
                self._changed.notify_all()


def _bookmark_of(done: Change | str) -> str | None:
    return done.bookmark if isinstance(done, Change) else done


@refused_by_name
class DurableSubscription(Subscription):
    """The consumer of a durable subscription: an iterator of changes without an end, used by one thread.

    Made by `Client.durable`. The server keeps the position: acknowledged changes do not come again, and the next
    consumer of that name gets all others. When the connection breaks, the consumer calls again and continues at its
    position. Iterating raises Aborted when another consumer takes over (DURABLE_TAKEN_OVER), or when the durable is
    rewound, deleted or cleared by force (DURABLE_DETACHED). The end of a `with` block, or `close`, sends the
    acknowledgements that wait and ends the call.

    Rule: J2.
    """

    def __init__(
        self,
        core: DurableCore,
        open_call: OpenSubscription,
        acknowledgements: Acknowledgements,
        call_acknowledge: CallAcknowledge,
    ) -> None:
        super().__init__(core, open_call)
        self._durable = core
        self._acknowledgements = acknowledgements
        self._call_acknowledge = call_acknowledge
        self._acknowledger = _Acknowledger(acknowledgements, call_acknowledge)

    _what = "durable subscription"

    def acknowledge(self, done: Change | str) -> None:
        """Acknowledges everything up to this change, or bookmark: it does not come again. From any thread.

        Returns at once. The acknowledgement is sent in the background, and one covers all before it, so acknowledge
        each change when it is processed. A change without a bookmark, in a snapshot or inside an atomic request, is
        acknowledged with the next change that has one. Raises the error of an earlier one that failed for good.
        """
        self._check_process()
        bookmark = _bookmark_of(done)
        if bookmark is not None:
            self._acknowledger.add(bookmark)

    def flush(self) -> None:
        """Returns once the server has all acknowledgements; raises why it has not. After a lost connection they are
        sent once the iteration has connected again."""
        self._check_process()
        self._acknowledger.flush()
        self._acknowledgements.raise_held()

    @property
    def created(self) -> bool:
        """True: the durable subscription did not exist, and began with this consumer."""
        return self._durable.created

    @property
    def reset(self) -> bool:
        """True: it existed before, was removed, and began anew; changes may have been missed. Rule: J10."""
        return self._durable.reset

    @property
    def gap(self) -> Gap | None:
        """The last gap; None: nothing is missing so far."""
        return self._durable.gap

    def close(self) -> None:
        """Sends the acknowledgements that wait, for 5 seconds at most, and ends the call. Another
        consumer can attach at once. A thread that waits for the
        next change finds the iteration ended. Raises the error of a failed acknowledgement."""
        self._end(CLOSE_SECONDS_MAX)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(SowError):  # the error that ended the block is the one to raise
            self._end(INTERRUPTED_SECONDS_MAX)

    def __del__(self) -> None:
        # No caller could get an error here, and none should wait.
        if not self._is_parents and hasattr(self, "_acknowledger"):  # else it was never made
            _ends.hand_over(self._acknowledger.stop)
            super().__del__()

    def _end(self, seconds: float) -> None:
        self._check_process()
        try:
            self._acknowledger.flush(seconds)
        finally:
            self._acknowledger.stop()
            is_attached = self._durable.is_attached and not self._closed
            super().close()
            if is_attached:
                with contextlib.suppress(SowError):  # the end of the stream says the same, a little later
                    self._call_acknowledge(self._acknowledgements.leaving())


class CallAioAcknowledge(Protocol):
    """A client's call of Acknowledge, for an asynchronous durable subscription."""

    def __call__(self, request: sow_pb2.AcknowledgeRequest, /) -> Awaitable[object]: ...


class _AioAcknowledger:
    """Sends acknowledgements in a task, which ends when there are none."""

    def __init__(self, acknowledgements: Acknowledgements, call: CallAioAcknowledge) -> None:
        self._acknowledgements = acknowledgements
        self._call = call
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._progress = asyncio.Event()  # a call has ended
        self._over = False

    def add(self, bookmark: str) -> None:
        """Sends it soon. Raises a failure of an earlier one."""
        if self._over:
            raise _statuses.closed("durable subscription")
        if self._acknowledgements.add(bookmark) and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="sow-acknowledge")

    async def flush(self, seconds: float | None = None) -> None:
        """Returns once everything is acknowledged, or after `seconds`. Raises a failure."""
        self._hurry.set()
        try:
            async with asyncio.timeout(seconds):
                while not (self._over or self._acknowledgements.is_settled or self._acknowledgements.has_failed):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            pass
        finally:
            self._hurry.clear()
        self._acknowledgements.raise_failure()

    def stop(self) -> None:
        """Ends sending."""
        self._over = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        acknowledgements = self._acknowledgements
        while (wait := acknowledgements.wait(time.monotonic(), hurried=self._hurry.is_set())) is not None:
            if wait:
                await self._rest(wait)
                continue
            request = acknowledgements.take(time.monotonic())
            try:
                await self._call(request)
                acknowledgements.done(request)
            except SowError as refused:
                acknowledgements.failed(request, refused, now=time.monotonic(), jitter=random.random())
            self._progress.set()

    async def _rest(self, seconds: float) -> None:
        if self._hurry.is_set():  # it pauses after a failure
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()


@refused_by_name
class AsyncDurableSubscription(AsyncSubscription):
    """`DurableSubscription` for asyncio: the same with `async for` and `await`, used by one task."""

    def __init__(
        self,
        core: DurableCore,
        open_call: AioOpenSubscription,
        acknowledgements: Acknowledgements,
        call_acknowledge: CallAioAcknowledge,
    ) -> None:
        super().__init__(core, open_call)
        self._durable = core
        self._acknowledgements = acknowledgements
        self._call_acknowledge = call_acknowledge
        self._acknowledger = _AioAcknowledger(acknowledgements, call_acknowledge)

    _what = "durable subscription"

    async def acknowledge(self, done: Change | str) -> None:
        """Acknowledges everything up to this change, or bookmark: it does not come again.

        Returns at once. The acknowledgement is sent in the background, and one covers all before it, so acknowledge
        each change when it is processed. A change without a bookmark, in a snapshot or inside an atomic request, is
        acknowledged with the next change that has one. Raises the error of an earlier one that failed for good.
        """
        self._check_process()
        bookmark = _bookmark_of(done)
        if bookmark is not None:
            self._acknowledger.add(bookmark)

    async def flush(self) -> None:
        """Returns once the server has all acknowledgements; raises why it has not. After a lost connection they are
        sent once the iteration has connected again."""
        self._check_process()
        await self._acknowledger.flush()
        self._acknowledgements.raise_held()

    @property
    def created(self) -> bool:
        """True: the durable subscription did not exist, and began with this consumer."""
        return self._durable.created

    @property
    def reset(self) -> bool:
        """True: it existed before, was removed, and began anew; changes may have been missed. Rule: J10."""
        return self._durable.reset

    @property
    def gap(self) -> Gap | None:
        """The last gap; None: nothing is missing so far."""
        return self._durable.gap

    async def close(self) -> None:
        """Sends the acknowledgements that wait, for 5 seconds at most, and ends the call. Another
        consumer can attach at once. A task that waits for the
        next change finds the iteration ended. Raises the error of a failed acknowledgement."""
        await self._end(CLOSE_SECONDS_MAX)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        with contextlib.suppress(SowError):  # the error that ended the block is the one to raise
            await self._end(INTERRUPTED_SECONDS_MAX)

    async def _end(self, seconds: float) -> None:
        self._check_process()
        try:
            await self._acknowledger.flush(seconds)
        finally:
            self._acknowledger.stop()
            is_attached = self._durable.is_attached and not self._closed.is_set()
            await super().close()
            if is_attached:
                with contextlib.suppress(SowError):  # the end of the stream says the same, a little later
                    await self._call_acknowledge(self._acknowledgements.leaving())
