"""The reader threads, shared by callers (rule N7).

[1]  The next work is that of the caller that has used the threads least. The work of one caller keeps its order.
[2]  One caller has at most `caller_threads_max` threads at a time. So another one finds a thread within a piece of work
     of its own, and the event loop waits for the interpreter's lock behind few threads. Without an access file a caller
     may have all of them.
[3]  The server's own work comes before that of callers, has no bound, and costs nobody a turn.
[4]  Work that is cancelled while it waits is dropped. Work that is under way is finished.

Work comes in pieces: a thread is not taken back from a piece, so each is bounded by whoever makes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from sow_server.engine.values.turns import CALLER, SERVER, Turns

P = ParamSpec("P")
T = TypeVar("T")

PIECE_SECONDS: Final = 0.00002
"""Charged for each piece besides its time: handing it over is work, too."""


class FairReaders(Executor):
    """Owns the threads and the work that waits. `submit` may be called on any thread; it reads `CALLER`, and the work
    runs with the same one."""

    def __init__(
        self, threads: int, caller_threads_max: int = 0, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`caller_threads_max`: 0 for a quarter of the threads. `clock`: in seconds."""
        self._caller_threads_max = caller_threads_max or max(1, threads // 4)
        self._clock = clock
        self._lock = threading.Lock()
        self._turns: Turns[_Work] = Turns()
        """Work that waits. Where a thread is idle, none of it may run now [2]."""
        self._running: dict[str, int] = {}
        """The number of threads of each caller that has any."""
        self._idle = threads
        self._stopping = False
        self._given: SimpleQueue[_Work | None] = SimpleQueue()
        """Work for idle threads; None ends one."""
        self._threads = [
            threading.Thread(target=self._serve, name=f"sow-reader-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs a piece of work when it is its caller's turn."""
        caller = CALLER.get()
        work = _Work(caller, Future(), fn, args, kwargs)
        with self._lock:
            if self._stopping:
                raise RuntimeError("the reader threads have been stopped")
            if self._idle and self._may(caller):
                self._idle -= 1
                self._begin(work)
                self._given.put(work)
            else:
                self._turns.put(caller, work)
        return work.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more work, and ends the threads once all that waits is done; with `cancel_futures`, cancelled."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                for _ in self._threads:
                    self._given.put(None)
            while cancel_futures and len(self._turns):
                self._turns.take(self._turns.next_caller()).future.cancel()
        if wait:
            for thread in self._threads:
                thread.join()

    def _may(self, caller: str) -> bool:
        return caller == SERVER or self._running.get(caller, 0) < self._caller_threads_max

    def _begin(self, work: _Work) -> bool:
        """Notes that a thread has work to do; False: it is cancelled."""
        if not work.future.set_running_or_notify_cancel():
            return False
        self._running[work.caller] = self._running.get(work.caller, 0) + 1
        return True

    # -- on the threads -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (work := self._given.get()) is not None:
            while work is not None:
                work = self._run(work)

    def _run(self, work: _Work) -> _Work | None:
        """Does the work; returns the next one, if there is one for this thread."""
        CALLER.set(work.caller)
        begun = self._clock()
        try:
            result = work.function(*work.arguments, **work.named)
        except BaseException as error:  # noqa: BLE001  # whoever waits for it gets it
            following = self._ended(work.caller, self._clock() - begun)
            work.future.set_exception(error)
        else:
            # Before the result is told: whoever hears it may hand over the next piece at once.
            following = self._ended(work.caller, self._clock() - begun)
            work.future.set_result(result)
        return following

    def _ended(self, caller: str, seconds: float) -> _Work | None:
        """A thread has done its work; returns the next that is not cancelled [4]. None: it is idle."""
        with self._lock:
            running = self._running[caller] - 1
            if running:
                self._running[caller] = running
            else:
                del self._running[caller]
            turns = self._turns
            if len(turns):
                if caller != SERVER:
                    turns.charge(caller, seconds + PIECE_SECONDS)
                while (following := SERVER if turns.waits(SERVER) else turns.next_among(self._may)) is not None:  # [3]
                    work = turns.take(following)
                    if self._begin(work):
                        return work
            self._idle += 1
            return None


class _Work(NamedTuple):
    """A piece of work."""

    caller: str
    future: Future[Any]
    function: Callable[..., object]
    arguments: tuple[object, ...]
    named: dict[str, Any]
