"""Bounds of the calls of one listener, of their waits for a request, and of the memory that requests and answers take
(rules N4, N5). On the event loop.

[1]  Administrative calls and health have places of their own: other calls, however many, leave them free.
[2]  Calls without a credential are few for each connection, and few in all.
[3]  Bytes that arrive are counted before they are parsed.
[4]  Bytes that a client does not take, or that its calls keep, count against its connection alone.
[5]  The wait for a request ends in time. A call that is cancelled meanwhile ends as cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from sow_server.access.needs import Action, Need, Scope
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

T = TypeVar("T")

OPEN_CALLS_MAX: Final = 200
OPEN_CALLS_PER_CONNECTION_MAX: Final = 4
"""A client checks health with one call at a time."""
ADMINISTRATIVE_CALLS_MAX: Final = 100
RESERVED_CALLS: Final = OPEN_CALLS_MAX + ADMINISTRATIVE_CALLS_MAX
"""Places of a listener beyond `max_concurrent_rpcs`."""
_ADMINISTRATIVE: Final = frozenset({Action.OBSERVE, Action.OPERATOR})
CONNECTION_SHARE: Final = 4
"""One connection may hold this part of `in_flight_bytes_max`."""


class Places:
    """The calls of one listener."""

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._administrative_max = calls_max + ADMINISTRATIVE_CALLS_MAX
        self._calls = 0
        self._open = 0
        self._open_of: dict[str, int] = {}

    def enter(self, need: Need, connection: str) -> None:
        """A call begins; `leave` must follow. Raises StoreError OVERLOADED."""
        if need.scope is Scope.OPEN:
            own = self._open_of.get(connection, 0)
            if own >= OPEN_CALLS_PER_CONNECTION_MAX or self._open >= OPEN_CALLS_MAX:
                raise _no_place()
            self._open += 1
            self._open_of[connection] = own + 1
            return
        if self._calls >= (self._administrative_max if need.action in _ADMINISTRATIVE else self._calls_max):
            raise _no_place()
        self._calls += 1

    def leave(self, need: Need, connection: str) -> None:
        """A call has ended."""
        if need.scope is not Scope.OPEN:
            self._calls -= 1
            return
        self._open -= 1
        left = self._open_of[connection] - 1
        if left:
            self._open_of[connection] = left
        else:
            del self._open_of[connection]


def _no_place() -> StoreError:
    return StoreError(
        Reason.OVERLOADED,
        "there are as many calls under way as this address may have; try again later",
        retry_after_micros=MICROS // 10,
    )


class Arrivals:
    """Ends the waits for requests that do not arrive in time. One timer serves all: they may take equally long, so the
    oldest ends first. A timer for each would cost 3 µs a call, more than the rest of the guard."""

    def __init__(self, seconds: float) -> None:
        self.seconds: Final = seconds
        self._waiting: dict[asyncio.Task[object], float] = {}
        """When the wait of each task ends, the oldest first."""
        self._late: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def of(self, arriving: Awaitable[T]) -> T:
        """The result of a wait. Raises TimeoutError once it has taken too long."""
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        loop = task.get_loop()
        self._waiting[task] = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._look, loop)
        try:
            return await arriving
        except asyncio.CancelledError:
            if task in self._late and not task.uncancel():  # otherwise the call itself is cancelled, too
                raise TimeoutError from None
            raise
        finally:
            self._late.discard(task)
            self._waiting.pop(task, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for task, end in list(self._waiting.items()):
            if end > now:
                self._timer = loop.call_at(end, self._look, loop)
                return
            del self._waiting[task]
            self._late.add(task)
            task.cancel()


class InFlight:
    """Bounds the bytes of the requests that are not answered, of all callers together [3]."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0
        self.connections: Final = ConnectionBytes(bytes_max // CONNECTION_SHARE)

    def take(self, size: int) -> bool:
        """Takes bytes until `free`; False if there is no room. The first request always has room."""
        if self.bytes and self.bytes + size > self._bytes_max:
            return False
        self.bytes += size
        return True

    def free(self, size: int) -> None:
        """Gives bytes back."""
        self.bytes -= size


class ConnectionBytes:
    """Bounds the bytes that the calls of one connection hold: their requests until they end, and single answers until
    the client has taken them [4]."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: dict[str, int] = {}

    def held(self, connection: str) -> int:
        """The bytes that the calls of a connection hold."""
        return self._held.get(connection, 0)

    def take(self, connection: str, size: int) -> bool:
        """Takes bytes until `free`; False if there is no room. If the connection holds none, any size has room."""
        held = self._held.get(connection, 0)
        if held and held + size > self._bytes_max:
            return False
        self._held[connection] = held + size
        return True

    def free(self, connection: str, size: int) -> None:
        """Gives bytes back."""
        left = self._held[connection] - size
        if left:
            self._held[connection] = left
        else:
            del self._held[connection]


def no_room() -> StoreError:
    """The refusal of a request for whose bytes there is no room."""
    return StoreError(
        Reason.OVERLOADED,
        "the requests under way fill the memory for requests; try again later",
        retry_after_micros=MICROS // 10,
    )


def unread() -> StoreError:
    """The refusal of an answer for which there is no room."""
    return StoreError(
        Reason.OVERLOADED,
        "answers that the client does not read fill the memory of its connection; read them first",
        retry_after_micros=MICROS // 10,
    )
