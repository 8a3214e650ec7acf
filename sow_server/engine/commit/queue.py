"""The write queue: requests and steps on their way to the writer, bounded in requests and bytes.

[1]  An item that is queued is answered by the writer, once; one that cannot be queued raises StoreError at once.
[2]  Nothing is queued after a failure or behind the stop, so the writer refuses the rest and misses none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias

from sow_server.engine.commit.requests import Job
from sow_server.engine.commit.steps import Step
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, NEVER


class WriteQueue:
    """Owns the queue, its backlog and its bounds. `submit` from any thread; the backlog is the writer thread's."""

    def __init__(self, *, requests_max: int, bytes_max: int) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self._admission = threading.Lock()
        self._requests = 0
        self._bytes = 0
        self.backlog: Final[deque[Item]] = deque()
        """Items that the writer has taken and not finished, in order."""
        self.failure: StoreError | None = None
        """The reason why no more items are accepted."""
        self.stopping = False

    def submit(self, item: Job | QueuedStep) -> None:
        """Queues an item. Raises StoreError when the queue is full, or the store failed or is stopping."""
        with self._admission:
            if self.failure is not None:
                raise self.refusal()
            if self.stopping:
                raise StoreError(Reason.STOPPING, "the server is stopping")
            if (isinstance(item, Job) or item.size) and (
                self._requests >= self._requests_max or (self._bytes and self._bytes + item.size > self._bytes_max)
            ):
                raise StoreError(
                    Reason.OVERLOADED,
                    f"the write queue is full ({self._requests} requests, {self._bytes} bytes)",
                    retry_after_micros=100_000,
                )
            self._requests += 1
            self._bytes += item.size
            self._queue.put(item)

    @property
    def depth(self) -> tuple[int, int]:
        """(requests, bytes) that wait or are under way."""
        return self._requests, self._bytes

    def take(self, wait_micros: int) -> bool:
        """Moves the queued items to the backlog, after waiting for at most `wait_micros` for the first. False: the
        backlog is empty."""
        try:
            item = self._queue.get(timeout=wait_micros / MICROS) if wait_micros else self._queue.get_nowait()
            while True:
                if item is not None:
                    self.backlog.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return bool(self.backlog)

    def wake(self) -> None:
        """Ends a wait of `take`. From any thread."""
        self._queue.put(None)

    def settle(self, item: Job | QueuedStep) -> None:
        """An item has its answer: it no longer counts."""
        with self._admission:
            self._requests -= 1
            self._bytes -= item.size

    def stop(self) -> bool:
        """Refuses new items, and queues the stop behind the others. False: it is stopping already."""
        with self._admission:
            if self.stopping:
                return False
            self.stopping = True
            self._queue.put(Stop())
            return True

    def fail(self, error: StoreError) -> bool:
        """Refuses new items for good. False: it has failed before, and for that reason."""
        with self._admission:
            if self.failure is not None:
                return False
            self.failure = error
            return True

    def refusal(self) -> StoreError:
        """The answer to everything after a failure."""
        assert self.failure is not None, "asked only of a failed writer"
        return StoreError(self.failure.reason, self.failure.message)


class QueuedStep:
    """A step in the queue: staged on a separate draft, committed and synced before `done` is called.

    `sweep_first`: overdue records are expired before, in separate commits, between which other items get their turn. A
    step with a `size` counts for the bounds of the queue like a publish of so many bytes. Without `sync` it is as
    durable as a BUFFERED publish.
    """

    __slots__ = ("begun_micros", "done", "size", "step", "sweep_first", "sync")

    def __init__(
        self,
        step: Step[object],
        done: Callable[[object], None],
        *,
        sweep_first: bool = False,
        size: int = 0,
        sync: bool = True,
    ) -> None:
        self.step = step
        self.done = done
        self.sweep_first = sweep_first
        self.size = size
        self.sync = sync
        self.begun_micros = NEVER
        """The time of its first turn."""


class Stop:
    """Ends the writer once everything queued before it is done."""


Item: TypeAlias = Job | QueuedStep | Stop
