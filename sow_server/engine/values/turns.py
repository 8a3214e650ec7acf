"""Turns: what several callers wait for is handed out by caller, not in the order of arrival (rule N7).

[1]  The next item is one of the caller that has had least. Items of one caller keep their order.
[2]  A caller that comes back after a pause gets no credit for it: it begins at what the last
     caller that was chosen had had.
[3]  Memory is bounded by the items that wait, and IDLE_MAX accounts of callers that have none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from itertools import chain
from typing import Final, Generic, TypeVar

T = TypeVar("T")

IDLE_MAX: Final = 1000

SERVER: Final = ""
"""The server itself, and work that is done for several callers at once."""

CALLER: Final[ContextVar[str]] = ContextVar("sow_caller", default=SERVER)
"""The caller for whom the current task works: the name of its identity, its host where it proves none, or SERVER. The
guard sets it when it admits a call; whoever hands work to a shared thread or queue reads it."""


class Turns(Generic[T]):
    """Items that wait, by caller. It has no lock: its owner calls it from one thread at a time."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        """Only callers with items."""
        self._had: dict[str, float] = {}
        """The cost charged to each caller since somebody has waited."""
        self._floor = 0.0
        """The most that a caller chosen so far had had when it was chosen."""
        self._size = 0
        self.callers = 0
        """How many callers wait."""

    def __len__(self) -> int:
        return self._size

    @property
    def items(self) -> Iterator[T]:
        """The items that wait, by caller."""
        return chain.from_iterable(self._waiting.values())

    @property
    def waiting(self) -> Iterable[str]:
        """The callers that wait."""
        return self._waiting.keys()

    def put(self, caller: str, item: T) -> None:
        """An item waits behind the others of its caller."""
        self._join(caller).append(item)
        self._size += 1

    def put_back(self, caller: str, item: T) -> None:
        """An item that was taken waits again, before the others of its caller."""
        self._join(caller).appendleft(item)
        self._size += 1

    def next_caller(self) -> str:
        """The caller whose turn it is. Only while items wait."""
        if len(self._waiting) == 1:
            return next(iter(self._waiting))
        return min(self._waiting, key=self._had.__getitem__)

    def next_item(self) -> T | None:
        """The next item of the caller whose turn it is; it goes on waiting. None: nobody waits."""
        waiting = self._waiting
        if len(waiting) == 1:
            for queue in waiting.values():
                return queue[0]
        return waiting[min(waiting, key=self._had.__getitem__)][0] if waiting else None

    def waits(self, caller: str) -> bool:
        """True if a caller waits."""
        return caller in self._waiting

    def next_among(self, may: Callable[[str], bool]) -> str | None:
        """The caller whose turn it is among those that may have one; None: no such caller waits."""
        if len(self._waiting) == 1:
            caller = next(iter(self._waiting))
            return caller if may(caller) else None
        return min(filter(may, self._waiting), key=self._had.__getitem__, default=None)

    def first(self, caller: str) -> T:
        """The next item of a caller that waits; it goes on waiting."""
        return self._waiting[caller][0]

    def take(self, caller: str) -> T:
        """Removes the next item of a caller that waits."""
        queue = self._waiting[caller]
        item = queue.popleft()
        self._size -= 1
        self._floor = max(self._floor, self._had[caller])
        if not queue:
            del self._waiting[caller]
            self.callers -= 1
            self._forget()
        return item

    def remove(self, caller: str, item: T) -> None:
        """Removes an item that waits, out of its turn."""
        queue = self._waiting[caller]
        queue.remove(item)
        self._size -= 1
        if not queue:
            del self._waiting[caller]
            self.callers -= 1
            self._forget()

    def charge(self, caller: str, cost: float) -> None:
        """Adds what an item has cost, in a unit of the owner's choice."""
        self._had[caller] = max(self._had.get(caller, 0.0), self._floor) + cost
        if (queue := self._waiting.pop(caller, None)) is not None:
            self._waiting[caller] = queue  # the last one: of equals, whoever had a turn longest ago comes first
        self._forget()

    def _join(self, caller: str) -> deque[T]:
        queue = self._waiting.get(caller)
        if queue is None:
            queue = self._waiting[caller] = deque()
            self.callers += 1
            self._had[caller] = max(self._had.get(caller, 0.0), self._floor)  # [2]
        return queue

    def _forget(self) -> None:
        """Forgets the accounts of idle callers, once they say nothing or are too many [3]."""
        if not self._waiting:  # nobody waits, so nobody is owed a turn before the others
            self._had.clear()
            self._floor = 0.0
        elif len(self._had) > len(self._waiting) + IDLE_MAX:
            self._had = {caller: self._had[caller] for caller in self._waiting}
