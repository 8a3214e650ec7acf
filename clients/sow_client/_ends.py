"""The ends of calls that no program waits for: those of objects that were dropped, and those at the end of the process.

The garbage collector runs a finalizer in the middle of anything, in any thread. A finalizer that takes a lock may wait
for the code that it has interrupted, and to cancel a call takes locks of gRPC.

    [1]  A finalizer takes no lock, starts no thread and makes no call: it hands a function over, into a queue in C.
    [2]  One thread of the process runs these functions. It refers to no client, so it outlives each. It is started
         before there is anything to hand over. Where one of them does not return, the next stream gets another thread.
    [3]  gRPC's own finalizer of a call, which takes locks, finds a call that has ended: until then it is held here.
    [4]  At the end of the process publishers send what they hold, for `FLUSH_SECONDS_MAX` at most. Then all streams
         end, and threads of theirs are waited for, `END_SECONDS_MAX` at most: one that dies in gRPC keeps its locks.
    [5]  A forked child has none of this of its parent.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Protocol, Self, TypeAlias

import grpc

from sow_client import _process

FLUSH_SECONDS_MAX: Final = 5.0
"""How long the end of a process waits for records of publishers that were not closed; a dropped publisher tries so
long."""
END_SECONDS_MAX: Final = 1.0
"""How long the end of a process waits for the ends of streams."""
STUCK_SECONDS: Final = 1.0
"""An end that takes longer may never return."""

_End: TypeAlias = Callable[[], object]


class Unfinished(Protocol):
    """A publisher that may hold records."""

    def settle(self, give_up: float) -> None:
        """Sends them, until `give_up` of `time.monotonic` at most. It goes on then."""

    def finish(self, give_up: float) -> None:
        """As `settle`; it is closed then, and warns of records that were left."""


class _Ends:
    """Owns the queue, its thread, and what is open in this process."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_End | None] = SimpleQueue()
        self.calls: dict[int, Any] = {}
        """The calls that have not ended, by their id ([3])."""
        self.threads: dict[threading.Thread, _End] = {}
        """Those that read streams, and what ends each of them: a call alone would be made again."""
        self.unfinished: dict[Unfinished, None] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None

    def ready(self) -> None:
        """There is a thread that runs what is handed over ([2])."""
        if self._works():
            return
        with self._starting:
            if not self._works():
                thread = threading.Thread(target=self._run, name="sow-ends", daemon=True)
                thread.start()
                self._busy_since = None
                self._thread = thread

    def _works(self) -> bool:
        since = self._busy_since
        return self._thread is not None and (since is None or time.monotonic() - since < STUCK_SECONDS)

    def _run(self) -> None:
        me = threading.current_thread()
        with self._starting:
            if self._thread is not me:
                return  # an interrupt has ended `ready` before it was known
        while (end := self.queue.get()) is not None:
            self._busy_since = time.monotonic()
            try:
                with _process.inside_grpc():
                    end()
            except Exception:  # noqa: BLE001, S110 - nobody waits for it, and a call that has ended is no mistake
                pass
            del end
            if self._thread is not me:
                return  # it was stuck, and another thread has its place
            self._busy_since = None

    def over(self, give_up: float) -> None:
        """Ends all streams ([4])."""
        for end in list(self.threads.values()):
            self.queue.put(end)
        for call in list(self.calls.values()):
            self.queue.put(call.cancel)
        for thread in list(self.threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up - time.monotonic()))
        self.queue.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, give_up - time.monotonic()))


_ends = _Ends()


def hand_over(end: _End) -> None:
    """Runs a function soon, in the thread of the ends. For finalizers: it takes no lock ([1])."""
    _ends.queue.put(end)


def ready() -> None:
    """Whoever is going to hand something over says so before, outside of a finalizer."""
    _ends.ready()


class StreamThread(threading.Thread):
    """A thread that reads a stream. The end of the process waits for it, a little ([4]).

    Whoever starts one names it afterwards, under a lock that the thread takes first: it ends if it is not named then.
    The start may fail, and be tried again; an interrupt may come in the middle of it.
    """

    def __init__(self, target: Callable[..., object], name: str, end: _End, **more: Any) -> None:
        """`end` ends it soon, and returns at once."""
        super().__init__(target=target, name=name, daemon=True, **more)
        self._end = end

    def run(self) -> None:
        threads = _ends.threads
        threads[self] = self._end
        try:
            super().run()
        finally:
            del threads[self]


class Stream:
    """A blocking call with a stream of answers. `cancel` returns at once, so a finalizer may call it ([1], [3]). In a
    forked child it raises FORKED, and its end does nothing ([5])."""

    __slots__ = ("__weakref__", "_call", "_ends", "_over")

    def __init__(self, call: Any) -> None:
        self._call = call
        self._over = False
        self._ends = _ends
        _ends.calls[id(call)] = call
        _ends.ready()  # may raise, and a finalizer follows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._ends is not _ends:
            raise _process.forked("answer")
        try:
            return next(self._call)
        except (StopIteration, grpc.RpcError):
            self._over = True
            self._ends.calls.pop(id(self._call), None)
            raise

    def done(self) -> bool:
        """True if it has ended, or was ended."""
        return self._over

    def cancel(self) -> None:
        """Ends the call soon."""
        if not self._over:
            self._over = True
            if self._ends is _ends:
                _ends.queue.put(self._end)

    def __del__(self) -> None:
        if hasattr(self, "_ends"):  # else an exception came before the first line of `__init__`
            self.cancel()

    def _end(self) -> None:
        try:
            self._call.cancel()
        finally:
            self._ends.calls.pop(id(self._call), None)


def unfinished(publisher: Unfinished) -> None:
    """It may hold records until `finished`."""
    _ends.ready()
    _ends.unfinished[publisher] = None


def finished(publisher: Unfinished) -> None:
    """It holds no records any more."""
    _ends.unfinished.pop(publisher, None)


def _settle_all() -> None:
    """Before the end of the program's threads, as from Python 3.12 on no connection can be made after it."""
    give_up = time.monotonic() + FLUSH_SECONDS_MAX
    for publisher in list(_ends.unfinished):
        publisher.settle(give_up)


@atexit.register
def _end_all() -> None:
    give_up = time.monotonic() + FLUSH_SECONDS_MAX
    try:
        for publisher in list(_ends.unfinished):
            publisher.finish(give_up)
    finally:  # also after Ctrl-C
        _ends.over(time.monotonic() + END_SECONDS_MAX)


def _forked() -> None:
    global _ends
    _left.append(_ends)  # else the child would run finalizers of what it refers to
    _ends = _Ends()


_left: Final[list[_Ends]] = []
_process.hold_at_fork(lambda: [call._state.condition for call in list(_ends.calls.values()) if hasattr(call, "_state")])
threading._register_atexit(_settle_all)  # type: ignore[attr-defined]  # as the standard library does for its executors
os.register_at_fork(after_in_child=_forked)
