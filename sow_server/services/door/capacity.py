"""Bounds of the calls of one listener, of their waits for a request, and of the memory that requests and answers take
(rules N4, N5). On the event loop.

[1]  Administrative calls and health have places of their own: other calls, however many, leave them free. A watcher of
     health, who stays, takes no place of one who asks.
[2]  Nobody holds all of anything: a caller may hold some times what is free, so the more it holds, the less it gets,
     and the next caller finds something. A caller is as in rule N7. Without an access file all callers trust each
     other, and a host may have all of it, but for the checks and watches of health.
[3]  Bytes that arrive are counted before they are parsed.
[4]  Bytes that a client does not take, or that its calls keep, count against its connection and its caller alone.
[5]  The wait for a request ends in time. A call that is cancelled meanwhile ends as cancelled.
[6]  Calls without a credential that have sent no request keep nobody out: beyond a number of them, the oldest wait of
     the host that has most of them ends.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable
from typing import Final, NamedTuple, TypeVar

from sow_server.access.needs import WATCHES, Action, Need, Scope
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.turns import CALLER

T = TypeVar("T")

HEALTH_CHECKS_MAX: Final = 100
HEALTH_WATCHES_MAX: Final = 100
WATCHES_PER_CONNECTION_MAX: Final = 4
"""A client watches health with one call."""
ADMINISTRATIVE_CALLS_MAX: Final = 100
RESERVED_CALLS: Final = HEALTH_CHECKS_MAX + HEALTH_WATCHES_MAX + ADMINISTRATIVE_CALLS_MAX
"""Places of a listener beyond `max_concurrent_rpcs`."""
CALLS_SHARE: Final = 4.0
"""One caller may hold so many times the places that are free: four fifths of them, if it is alone."""
BYTES_SHARE: Final = 0.5
"""The same of bytes: a third of them, if it is alone."""
CONNECTION_SHARE: Final = 4
"""One connection may hold this part of `in_flight_bytes_max`."""
UNSHARED: Final = math.inf
"""One caller may hold all of it."""
_ADMINISTRATIVE: Final = frozenset({Action.OBSERVE, Action.OPERATOR})


class SharedRoom:
    """Room that callers share [2]."""

    def __init__(self, size: int, share: float) -> None:
        """`share`: how many times the free room one caller may hold."""
        self._size = size
        self._share = share
        self._of: dict[str, int] = {}
        self.held = 0
        """The room that all callers hold."""

    def take(self, caller: str, size: int = 1) -> bool:
        """Takes room until `free`; False if there is none for this caller. If nobody holds any, any size has room."""
        own = self._of.get(caller, 0)
        free = self._size - self.held
        if self.held and (size > free or own >= self._share * free):
            return False
        self._of[caller] = own + size
        self.held += size
        return True

    def add(self, caller: str, size: int) -> None:
        """Takes room until `free`, also where there is none."""
        self._of[caller] = self._of.get(caller, 0) + size
        self.held += size

    def free(self, caller: str, size: int = 1) -> None:
        """Gives room back."""
        self.held -= size
        left = self._of[caller] - size
        if left:
            self._of[caller] = left
        else:
            del self._of[caller]


class Place(NamedTuple):
    """The place of a call (`access.caller.CallPlace`)."""

    room: SharedRoom
    caller: str
    watches_of: Counter[str] | None = None
    """The numbers of calls that watch health, by connection. None: this call does not watch health."""
    connection: str = ""

    def leave(self) -> None:
        """The call has ended."""
        self.room.free(self.caller)
        if self.watches_of is not None:
            self.watches_of[self.connection] -= 1
            if not self.watches_of[self.connection]:
                del self.watches_of[self.connection]


class Places:
    """The calls of one listener."""

    def __init__(self, calls_max: int, *, shared: bool = True) -> None:
        """`shared`: False where there is no access file [2]."""
        share = CALLS_SHARE if shared else UNSHARED
        self._calls = SharedRoom(calls_max, share)
        self._administrative = SharedRoom(ADMINISTRATIVE_CALLS_MAX, share)
        self._checks = SharedRoom(HEALTH_CHECKS_MAX, CALLS_SHARE)
        self._watches = SharedRoom(HEALTH_WATCHES_MAX, CALLS_SHARE)
        self._watches_of: Counter[str] = Counter()
        """The numbers of calls that watch health, by connection."""

    def enter(self, need: Need, connection: str, caller: str) -> Place:
        """A call begins; `Place.leave` must follow. Raises StoreError OVERLOADED."""
        if need.counts_as == WATCHES:
            if self._watches_of[connection] < WATCHES_PER_CONNECTION_MAX and self._watches.take(caller):
                self._watches_of[connection] += 1
                return Place(self._watches, caller, self._watches_of, connection)
        elif need.scope in (Scope.OPEN, Scope.TIERED):
            if self._checks.take(caller):
                return Place(self._checks, caller)
        else:
            if need.action in _ADMINISTRATIVE and self._administrative.take(caller):
                return Place(self._administrative, caller)
            if self._calls.take(caller):
                return Place(self._calls, caller)
        raise _no_place()


def _no_place() -> StoreError:
    return StoreError(
        Reason.OVERLOADED,
        "there are as many calls under way as this address, or this caller, may have; try again later",
        retry_after_micros=MICROS // 10,
    )


class Arrivals:
    """Ends the waits for requests that do not arrive in time. One timer serves all: they may take equally long, so the
    oldest ends first. A timer for each would cost 3 µs a call, more than the rest of the guard."""

    def __init__(self, seconds: float, waiting_max: int | None = None) -> None:
        """`waiting_max`: waits at a time; a further one ends another [6]. None: the calls are bounded already."""
        self.seconds: Final = seconds
        self._waiting_max = waiting_max
        self._waiting: dict[asyncio.Task[object], tuple[float, str]] = {}
        """When the wait of each task ends, and its caller; the oldest first."""
        self._late: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def of(self, arriving: Awaitable[T]) -> T:
        """The result of a wait. Raises TimeoutError once it has taken too long, or makes room for another one."""
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        loop = task.get_loop()
        if self._waiting_max is not None and len(self._waiting) >= self._waiting_max:
            self._end_one()
        self._waiting[task] = loop.time() + self.seconds, CALLER.get()
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

    def _end_one(self) -> None:
        """Ends the oldest wait of the caller that has most of them."""
        most, _ = Counter(caller for _, caller in self._waiting.values()).most_common(1)[0]
        self._end(next(task for task, (_, caller) in self._waiting.items() if caller == most))

    def _end(self, task: asyncio.Task[object]) -> None:
        del self._waiting[task]
        self._late.add(task)
        task.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for task, (end, _) in list(self._waiting.items()):
            if end > now:
                self._timer = loop.call_at(end, self._look, loop)
                return
            self._end(task)


class InFlight:
    """Bounds the bytes of the requests that are not answered [3], and of what calls keep [4]."""

    def __init__(self, bytes_max: int, *, shared: bool = True) -> None:
        """`shared`: False where there is no access file [2]."""
        share = BYTES_SHARE if shared else UNSHARED
        self.requests: Final = SharedRoom(bytes_max, share)
        """The first request always has room."""
        self.kept: Final = KeptBytes(bytes_max, share)


class KeptBytes:
    """Bounds the bytes that calls hold, by connection and by caller: requests until they end, and single answers until
    the client has taken them [4]."""

    def __init__(self, bytes_max: int, share: float = BYTES_SHARE) -> None:
        self._connection_max = bytes_max // CONNECTION_SHARE
        self._of_connection: dict[str, int] = {}
        self._callers = SharedRoom(bytes_max, share)

    def take(self, connection: str, caller: str, size: int) -> bool:
        """Takes bytes until `free`; False if there is no room. A connection that holds none takes any size."""
        held = self._of_connection.get(connection, 0)
        if (held and held + size > self._connection_max) or not self._callers.take(caller, size):
            return False
        self._of_connection[connection] = held + size
        return True

    def free(self, connection: str, caller: str, size: int) -> None:
        """Gives bytes back."""
        self._callers.free(caller, size)
        left = self._of_connection[connection] - size
        if left:
            self._of_connection[connection] = left
        else:
            del self._of_connection[connection]


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
