"""The write queue: requests and steps on their way to the writer, handed out by caller, bounded in requests and bytes.

[1]  An item that is queued is answered by the writer, once; one that cannot be queued raises StoreError at once.
[2]  Nothing is queued after a failure or behind the stop, so the writer refuses the rest and misses none.
[3]  Items of one caller keep their order. Between callers there is none: the next item is one of the caller that has
     had least of the writer, in commits (rule N7). So a step that must follow another item waits for its answer, or is
     queued for the same caller.
[4]  An item whose turn has come, and that does not fit into the commit that others have begun, lets those behind it
     pass into this one. It begins the next one, if its caller has nothing in this one.
[5]  A caller holds at most as much of the queue as it leaves free: there is room for the next one, whatever the present
     ones send. The server itself, which bounds its own work, may use the whole queue. So may each caller where the
     queue is not shared, as without an access file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

from sow_server.engine.commit.requests import Job
from sow_server.engine.commit.steps import Step
from sow_server.engine.pending import Pending
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, NEVER
from sow_server.engine.values.turns import CALLER, SERVER, Turns


class WriteQueue:
    """Owns the queue, the turns and the bounds. `submit` from any thread; the turns are the writer thread's."""

    def __init__(self, *, requests_max: int, bytes_max: int, shared: bool = True) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._shared = shared
        self._arriving: SimpleQueue[Item | Stop | None] = SimpleQueue()
        self._admission = threading.Lock()
        self._requests = 0
        self._bytes = 0
        self._held: dict[str, list[int]] = {}
        """The requests and the bytes of every caller with items."""
        self._turns: Turns[Item] = Turns()
        """Items that the writer has taken in and not finished."""
        self._begins: str | None = None
        """The caller with the next turn, by [4]."""
        self._lately: dict[str, float] = {}
        """The charges of callers since the last `take`. The turns forget them once nobody waits."""
        self.stopped = False
        """True once the stop has been taken in. The writer then ends once nothing waits."""
        self.failure: StoreError | None = None
        """The reason why no more items are accepted."""
        self.stopping = False

    def submit(self, item: Item) -> None:
        """Queues an item. Raises StoreError when there is no room, or the store failed or is stopping."""
        with self._admission:
            if self.failure is not None:
                raise self.refusal()
            if self.stopping:
                raise StoreError(Reason.STOPPING, "the server is stopping")
            caller, size = item.caller, item.size
            held = self._held.get(caller)
            requests, total = self._requests + 1, self._bytes + size
            if held is None:
                if requests > self._requests_max or (total > self._bytes_max and self._bytes):
                    self._check_room(0, 0, item)
                self._held[caller] = [1, size]
            else:
                if held[0] + requests >= self._requests_max or held[1] + size + total > self._bytes_max:
                    self._check_room(held[0], held[1], item)
                held[0] += 1
                held[1] += size
            self._requests, self._bytes = requests, total
            self._arriving.put(item)

    def _check_room(self, requests: int, size: int, item: Item) -> None:
        """Raises StoreError OVERLOADED if there is no room beside `requests` of the caller, of `size` bytes."""
        if not (isinstance(item, Job) or item.size):
            return  # steps are few, and without them nothing would go on
        if self._requests >= self._requests_max or (self._bytes and self._bytes + item.size > self._bytes_max):
            raise StoreError(
                Reason.OVERLOADED,
                f"the write queue is full ({self._requests} requests, {self._bytes} bytes)",
                retry_after_micros=100_000,
            )
        if not requests or item.caller == SERVER or not self._shared:
            return  # the first request of a caller, however large
        if requests + 1 > self._requests_max - self._requests - 1 or (
            size and size + item.size > self._bytes_max - self._bytes - item.size
        ):
            raise StoreError(
                Reason.OVERLOADED,
                f"this caller's share of the write queue is full ({requests} requests, {size} bytes)",
                retry_after_micros=100_000,
            )

    @property
    def depth(self) -> tuple[int, int]:
        """(requests, bytes) that wait or are under way."""
        return self._requests, self._bytes

    def wake(self) -> None:
        """Ends a wait of `take`. From any thread."""
        self._arriving.put(None)

    def settle(self, item: Item) -> None:
        """An item has its answer: it no longer counts."""
        with self._admission:
            caller, size = item.caller, item.size
            held = self._held[caller]
            if held[0] == 1:
                del self._held[caller]
            else:
                held[0] -= 1
                held[1] -= size
            self._requests -= 1
            self._bytes -= size

    def stop(self) -> bool:
        """Refuses new items, and queues the stop behind the others. False: it is stopping already."""
        with self._admission:
            if self.stopping:
                return False
            self.stopping = True
            self._arriving.put(Stop())
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

    # -- the writer's thread ----------------------------------------------------------------------------------------

    def take(self, wait_micros: int) -> bool:
        """Takes in the queued items, after waiting for at most `wait_micros` for the first. False: there is nothing to
        do."""
        arriving, turns, lately = self._arriving, self._turns, self._lately
        forgotten = not turns.callers
        try:
            item = arriving.get(timeout=wait_micros / MICROS) if wait_micros else arriving.get_nowait()
            while True:
                if isinstance(item, Stop):
                    self.stopped = True
                elif item is not None:
                    turns.put(item.caller, item)
                item = arriving.get_nowait()
        except Empty:
            pass
        if lately and turns.callers:
            if forgotten and turns.callers > 1:
                for caller, commits in lately.items():
                    turns.charge(caller, commits)
            lately.clear()
        return self.stopped or turns.callers > 0

    def __len__(self) -> int:
        """The number of items that have been taken in and wait."""
        return len(self._turns)

    @property
    def begun(self) -> Iterator[Job]:
        """The requests of which a part is committed, and the rest waits."""
        return (item for item in self._turns.items if isinstance(item, Job) and item.position and not item.answered)

    def next(self, aside: Sequence[Item] = ()) -> Item | None:
        """The item whose turn it is; it goes on waiting. None: nothing waits, but for the callers of items `aside`."""
        turns = self._turns
        if aside:
            left_out = {item.caller for item in aside}
            caller = turns.next_among(lambda caller: caller not in left_out)
            return None if caller is None else turns.first(caller)
        begins = self._begins
        return turns.first(begins) if begins is not None and turns.waits(begins) else turns.next_item()

    def remove(self, item: Item) -> None:
        """Removes an item that is the next one of its caller, if it waits."""
        turns, caller = self._turns, item.caller
        if turns.waits(caller) and turns.first(caller) is item:
            turns.take(caller)
            if caller == self._begins:
                self._begins = None

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Jobs that were removed, in order, wait again, before the others of their callers. The last one may be waiting
        already."""
        for job in reversed(jobs):
            self.remove(job)
            self._turns.put_back(job.caller, job)

    def put_last(self, item: Item) -> None:
        """An item that was removed waits again, behind the others of its caller."""
        self._turns.put(item.caller, item)

    def taken(self, item: Item, commits: float) -> None:
        """Removes the item whose turn it is; `commits`: what its caller has had, parts of a commit or several."""
        turns, caller = self._turns, item.caller
        turns.take(caller)
        if caller == self._begins:
            self._begins = None
        if turns.callers:
            turns.charge(caller, commits)
        self._lately[caller] = self._lately.get(caller, 0.0) + commits

    def kept(self, item: Item, commits: float) -> None:
        """As `taken`, but the item waits again, before the others of its caller: only a part of it was done."""
        turns, caller = self._turns, item.caller
        self.remove(item)
        turns.put_back(caller, item)
        self.charge(caller, commits)

    def charge(self, caller: str, commits: float) -> None:
        """A caller has had so much of the writer. It counts against those who come during the present commit, too."""
        if self._turns.callers:
            self._turns.charge(caller, commits)
        self._lately[caller] = self._lately.get(caller, 0.0) + commits

    def begin_next(self, aside: Sequence[Item], chosen: Sequence[Item]) -> None:
        """Chooses the item that begins the next commit [4]: the first of those that did not fit into this commit and
        whose caller has nothing in it."""
        served = {item.caller for item in chosen}
        self._begins = next((item.caller for item in aside if item.caller not in served), None)


class QueuedStep:
    """A step in the queue: staged on a separate draft, committed and synced before it is answered.

    `sweep_first`: overdue records are expired before, in separate commits, between which other items get their turn. A
    step with a `size` counts for the bounds of the queue like a publish of so many bytes. Without `sync` it is as
    durable as a BUFFERED publish. `caller`: for whom it is done; None: for the caller of the present task. `topic`: it
    is refused if this topic lives in another cell by its turn (rule C4); "": it is done wherever its topic lives.
    """

    __slots__ = ("begun_micros", "caller", "pending", "size", "step", "sweep_first", "sync", "topic")

    def __init__(
        self,
        step: Step[object],
        *,
        sweep_first: bool = False,
        size: int = 0,
        sync: bool = True,
        caller: str | None = None,
        topic: str = "",
    ) -> None:
        self.step = step
        self.pending: Final[Pending[Any]] = Pending()
        """The answer of `step`."""
        self.sweep_first = sweep_first
        self.size = size
        self.sync = sync
        self.topic = topic
        self.caller: Final = CALLER.get() if caller is None else caller
        self.begun_micros = NEVER
        """The time of its first turn."""


class Stop:
    """Ends the writer once everything queued before it is done."""


Item: TypeAlias = Job | QueuedStep
