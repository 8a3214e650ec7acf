"""A flag that threads wait for, and that Ctrl-C does not break.

`threading.Event` takes a lock in a method of Python. An exception between that method and the block that gives the lock
back leaves it taken: the thread that sets the event next waits for ever. This one waits in C, and has no lock.
"""

from __future__ import annotations

import asyncio
from queue import Empty, SimpleQueue


class Flag:
    """`threading.Event`, for any number of threads that wait."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: set[SimpleQueue[None]] = set()

    def is_set(self) -> bool:
        """As an Event's."""
        return self._is_set

    def set(self) -> None:
        """As an Event's."""
        self._is_set = True  # set first, look second, as `wait` does: one of both sees the other
        for waiting in tuple(self._waiting):
            waiting.put(None)

    def clear(self) -> None:
        """As an Event's."""
        self._is_set = False

    def wait(self, seconds: float | None = None) -> bool:
        """As an Event's. True: it was set meanwhile."""
        woken: SimpleQueue[None] = SimpleQueue()
        self._waiting.add(woken)
        try:
            if not self._is_set:
                woken.get(timeout=seconds)
        except Empty:
            return self._is_set
        finally:
            self._waiting.discard(woken)
        return True


class AioFlag:
    """`Flag`, for tasks."""

    def __init__(self) -> None:
        event = asyncio.Event()
        self.is_set, self.set, self.clear, self._wait = event.is_set, event.set, event.clear, event.wait

    async def wait(self, seconds: float | None = None) -> bool:
        """As a Flag's."""
        try:
            async with asyncio.timeout(seconds):
                return await self._wait()
        except TimeoutError:
            return self.is_set()
