"""The blocking subscription: `SubscriptionCore`, and a thread for each of its calls."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from itertools import islice
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from sow.v1 import sow_pb2
from sow_client import _ends, _process, _statuses, _timeouts
from sow_client._records import Change
from sow_client._subscription_core import FRAMES, SubscriptionBase, SubscriptionCore, broken_call, checked_size
from sow_client.errors import SowError


class SubscribeCall(Protocol):
    """A call in progress."""

    def __next__(self) -> sow_pb2.SubscribeResponse: ...

    def cancel(self) -> object: ...


class OpenSubscription(Protocol):
    """A client's Subscribe for a blocking subscription: it waits for a connection, then makes the call."""

    def __call__(self, request: sow_pb2.SubscribeRequest, /) -> SubscribeCall: ...


class _Reader:
    """One call, made and read by a thread of its own, one frame ahead of the consumer.

    The thread is needed because gRPC's blocking calls are not safe against Ctrl-C. A KeyboardInterrupt between two of
    their lines can leave a lock of the whole channel taken, and a consumer spends nearly all its time in those lines.
    Here the consumer waits in a queue, in C: an interrupt takes effect at once and breaks nothing.
    """

    def __init__(self, open_call: OpenSubscription, request: sow_pb2.SubscribeRequest, delay: float) -> None:
        """The call is made after `delay` seconds."""
        self._open_call = open_call
        self._request = request
        self._delay = delay
        self._outcomes: SimpleQueue[sow_pb2.SubscribeResponse | SowError] = SimpleQueue()
        self._demand: SimpleQueue[bool] = SimpleQueue()  # True: the call, then another frame is wanted; False: no more
        self._cancelled = False
        self._call: SubscribeCall | None = None

    def start(self) -> None:
        """Begins. After an exception, which may come when the thread runs already, it has to be cancelled: then no call
        is made, which could hold a durable when the program asks for it again."""
        _ends.StreamThread(self._run, "sow-subscription", self.cancel).start()
        self._demand.put(True)

    def take(self, seconds: float | None = None) -> sow_pb2.SubscribeResponse | SowError | None:
        """Waits for the next frame, or for the error that ended the call; None: neither came in these seconds."""
        try:
            outcome = self._outcomes.get(timeout=seconds)
        except Empty:
            return None
        self._demand.put(True)
        return outcome

    def cancel(self) -> None:
        """Ends the call; a waiting consumer gets an error. A finalizer may call it: it takes no lock (_ends [1])."""
        self._cancelled = True  # set first, look second, as `_run` does: one of both sees the other
        call = self._call
        self._outcomes.put(_statuses.closed("subscription"))
        self._demand.put(False)
        if call is not None:
            call.cancel()

    def end_call(self) -> None:
        """Ends the call, so that the consumer calls again. Before it is made it has no effect."""
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        outcome: SowError
        try:
            if not self._demand.get() or self._rest(self._delay):
                return
            call = self._open_call(self._request)
            self._call = call
            if self._cancelled:
                call.cancel()  # `cancel` came before the call was known, and could not cancel it
            while True:
                self._outcomes.put(next(call))
                if not self._demand.get():
                    return
        except StopIteration:
            outcome = _statuses.cut(FRAMES)
        except grpc.RpcError as broken:
            outcome = broken_call(broken)
        except SowError as refused:
            outcome = refused
        except Exception as unexpected:  # noqa: BLE001 - the waiting consumer must get it
            outcome = _statuses.error_of_status(unexpected)
            outcome.__cause__ = unexpected
        self._outcomes.put(outcome)

    def _rest(self, seconds: float) -> bool:
        """Waits; True when it was cancelled during the wait."""
        try:
            return seconds > 0 and not self._demand.get(timeout=seconds)
        except Empty:
            return False


class Subscription(SubscriptionBase):
    """The changes of a topic as they come: an iterator without an end, used by one thread.

    Made by `Client.subscribe` and `Client.sow_and_subscribe`. When the connection breaks or the server restarts, it
    calls again and continues at its position: each change comes once, and none is missing. The end of a `with` block,
    `close` (from any thread), or dropping the last reference ends the call and the server's work for it. The iteration
    ends then.

    Rules: S1 to S7.
    """

    # None of its parts refers back to it, so that dropping the last reference ends the call.

    def __init__(self, core: SubscriptionCore, open_call: OpenSubscription) -> None:
        super().__init__(core)
        self._open_call = open_call
        self._lock = threading.Lock()  # of the two that follow
        self._closed = False
        _process.tell(self)

    _reader: _Reader | None = None  # here, as a finalizer reads it, also if an exception has ended `__init__`

    def _forked(self) -> None:
        if self._closed:
            return
        super()._forked()
        _process.keep(self._reader)
        self._core.forked(self._what)
        self._lock, self._reader = threading.Lock(), None

    def open(self) -> None:
        """Returns once the subscription is established: no change from now on is missed. `subscribe` and
        `sow_and_subscribe` have called it already."""
        self._check_process()
        while not self._core.stood:
            if not self._advance():
                raise _statuses.closed("subscription")

    def close(self) -> None:
        """Ends the call; a thread that waits for the next change finds the iteration ended."""
        self._check_process()
        with self._lock:
            self._closed = True
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()

    def call_again(self) -> None:
        """Ends the present call. The next one follows, for what is wanted by then."""
        reader = self._reader
        if reader is not None:
            reader.end_call()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        core = self._core
        while not self._closed:
            for change in core.pending:
                return change
            if not self._advance():
                break
        raise StopIteration

    def next(self, timeout: float | None = None) -> Change | None:
        """The next change; None if none comes within `timeout` seconds. Nothing is lost then, and the subscription goes
        on. Raises Cancelled (CLOSED) when it is closed."""
        change = self._next(_timeouts.perhaps(timeout, "timeout"))
        if change is None and self._closed:
            raise _statuses.closed("subscription")
        return change

    def batches(self, size: int = 1_000, *, timeout: float | None = None) -> Iterator[list[Change]]:
        """The changes in lists: those that are at hand, at most `size`, without waiting for more.

        A list is empty where no change came within `timeout` seconds, so a program can do something else then. The
        iteration ends when the subscription is closed. `bookmark` is the position after the whole list.
        """
        checked_size(size)
        timeout = _timeouts.perhaps(timeout, "timeout")
        while not self._closed:
            first = self._next(timeout)
            if first is not None or not self._closed:
                yield [] if first is None else [first, *islice(self._core.pending, size - 1)]

    def _next(self, timeout: float | None) -> Change | None:
        give_up = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            for change in self._core.pending:
                return change
            if not self._advance(give_up):
                break
        return None

    def __repr__(self) -> str:
        return self._core.described(type(self), closed=self._closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_parents and (reader := self._reader) is not None:
            reader.cancel()

    def _advance(self, give_up: float | None = None) -> bool:
        """Takes in the next frame, or begins the next call; False when it was closed, or the time is over."""
        reader = self._reader or self._begin(0.0)
        if reader is None:
            return False
        try:
            outcome = reader.take(None if give_up is None else max(0.0, give_up - time.monotonic()))
            if outcome is None:
                return False
            if not isinstance(outcome, SowError):
                self._core.feed(outcome)
                return True
        except SowError as malformed:
            outcome = malformed
        except BaseException:
            # Most likely Ctrl-C. It is unknown whether a frame was taken and fed, and a consumer that continues must
            # not miss one: so the next call begins at the position reached.
            self._drop(reader)
            raise
        self._drop(reader)
        if self._closed:
            return False
        try:
            delay = self._core.ended(outcome, now=time.monotonic(), jitter=random.random())
        except SowError:
            self.close()
            raise
        return self._begin(delay) is not None

    def _begin(self, delay: float) -> _Reader | None:
        """Begins the next call; None when it was closed."""
        request = self._core.request(now=time.monotonic() + delay)
        with self._lock:
            if not self._closed:
                reader = _Reader(self._open_call, request, delay)
                try:
                    self._reader = reader
                    reader.start()
                except BaseException:
                    self._reader = None
                    reader.cancel()
                    raise
            return self._reader

    def _drop(self, reader: _Reader) -> None:
        with self._lock:
            if self._reader is reader:
                self._reader = None
        reader.cancel()


class Opening(Protocol):
    """A subscription or a view, which the blocking client hands out established."""

    def open(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


_Opening = TypeVar("_Opening", bound=Opening)


def opened(made: _Opening) -> _Opening:
    """A subscription or a view as the blocking client hands it out: established."""
    try:
        made.open()
    except BaseException as error:  # else it would go on while somebody keeps the error, and with it this frame
        made.__exit__(type(error), error, error.__traceback__)
        raise
    return made
