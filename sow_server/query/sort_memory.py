"""The memory in which ordered queries sort, shared by the whole server (rule Q2).

While there is room, every sort takes the memory that it needs. When a sort finds none, the oldest of those that still
grow gets *the turn*: it keeps its memory, and waits for room. Every other sort that needs more gives back all its
memory, waits in line, and begins anew when it gets the turn, first come, first served.

    [1]  A sort that waits in line holds nothing. At most one sort waits while it holds memory: the one with the turn.
         The memory it waits for is held by sorts that need no more, as their rows are being sent, or that give it back
         once they do. So no two sorts wait for each other.
    [2]  While one sort has the turn, others start with up to `small` bytes: a small sort does not wait for a large one,
         unless the large one waits for room.
    [3]  A sort that does not fit into the whole memory is refused; no other sort is.

From any thread.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Final

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

SORT_BYTES_MAX: Final = 256 * 2**20
"""Memory of all ordered queries of a server together."""
SORTS_WAITING_MAX: Final = 256
"""Ordered queries that may wait in line."""
SMALL_PARTS: Final = 64
"""A sort of at most one in this many parts of the memory is small [2]."""
RETRY_MICROS: Final = MICROS


class SortRoom(enum.Enum):
    """The answer to a request for memory."""

    GRANTED = enum.auto()
    WAIT = enum.auto()
    """The share has the turn and keeps its memory; it asks again once it is ready."""
    BEGIN_ANEW = enum.auto()
    """The share holds nothing any more. Once it is ready, its sort begins anew."""
    NEVER = enum.auto()
    """It needs more than the whole memory."""


class SortMemory:
    """Owns the shares, the turn, and the line."""

    def __init__(self, bytes_max: int = SORT_BYTES_MAX, waiting_max: int = SORTS_WAITING_MAX) -> None:
        self.bytes_max: Final = bytes_max
        self._waiting_max = waiting_max
        self._small = bytes_max // SMALL_PARTS
        self._lock = threading.Lock()
        self._held = 0
        self._growing: dict[SortShare, None] = {}
        """Sorts that may need more, the oldest first."""
        self._turn: SortShare | None = None
        self._wanted = 0
        """How much more memory the sort with the turn waits for."""
        self._line: dict[SortShare, None] = {}
        self.given_back = 0
        """Bytes given back since the start."""
        self.moves = 0
        """Rises whenever memory is taken or given back. If it stands still, the holders of the memory hang."""

    @property
    def held_bytes(self) -> int:
        """Memory that is held now."""
        return self._held

    @property
    def waiting(self) -> int:
        """The number of waiting sorts."""
        return len(self._line) + bool(self._wanted)

    # -- called by shares, under the lock -----------------------------------------------------------------------------

    def _take(self, share: SortShare, size: int) -> bool:
        more = size - share.held
        if more > 0 and not self._may_take(share, size):
            return False
        if more:  # a sort without memory is no reason to wait on
            self.moves += 1
        self._held += more
        share.held = size
        if self._turn is share:
            self._wanted = 0
        if more < 0:
            self.given_back -= more
            self._advance()
        return True

    def _may_take(self, share: SortShare, size: int) -> bool:
        if size - share.held > self.bytes_max - self._held:
            return False
        if self._turn is None or self._turn is share:
            return True
        if self._wanted:
            return False
        # a sort that was large before goes on while there is room
        return size <= self._small or share.held > self._small

    def _wait(self, share: SortShare, size: int) -> SortRoom:
        if size > self.bytes_max:
            return SortRoom.NEVER
        if self._turn is None:
            self._turn = next(iter(self._growing), share)
        if self._turn is share:
            if self._take(share, size):
                return SortRoom.GRANTED
            self._wanted = size - share.held
            return SortRoom.WAIT
        if len(self._line) >= self._waiting_max:
            raise StoreError(
                Reason.OVERLOADED,
                f"order_by: {self._waiting_max} ordered queries wait for memory to sort in; try again later",
                field="order_by",
                retry_after_micros=RETRY_MICROS,
            )
        self._growing.pop(share, None)
        self._line[share] = None
        self._take(share, 0)
        return SortRoom.BEGIN_ANEW

    def _grown(self, share: SortShare) -> None:
        self._growing.pop(share, None)
        if self._turn is share:
            self._turn, self._wanted = None, 0
            self._advance()

    def _advance(self) -> None:
        """Wakes the sorts that may go on, after memory or the turn has become free."""
        if self._turn is None and self._line:
            self._turn = next(iter(self._line))
            del self._line[self._turn]
            self._growing[self._turn] = None
            self.moves += 1
        if self._turn is not None and self._is_ready(self._turn):
            wake, self._turn.wake = self._turn.wake, None
            if wake is not None:
                wake()

    def _is_ready(self, share: SortShare) -> bool:
        if share in self._line:
            return False
        return self._turn is not share or self._wanted <= self.bytes_max - self._held


class SortShare:
    """The memory of one sort."""

    def __init__(self, memory: SortMemory) -> None:
        self.memory: Final = memory
        self.held = 0
        self.wake: Callable[[], None] | None = None
        """Called once, on any thread and under the lock, when it is ready."""

    def try_hold(self, size: int) -> bool:
        """Holds `size` bytes from now on. False: not possible now, nothing has changed."""
        memory = self.memory
        with memory._lock:
            memory._growing.setdefault(self)
            return memory._take(self, size)

    def hold(self, size: int) -> SortRoom:
        """As `try_hold`, but waits if that is not possible now. Raises StoreError OVERLOADED when too many wait."""
        with self.memory._lock:
            return self.memory._wait(self, size)

    def shrink(self, size: int) -> None:
        """Gives back the memory beyond `size`; the sort needs no more."""
        with self.memory._lock:
            self.memory._take(self, min(size, self.held))
            self.memory._grown(self)

    def close(self) -> None:
        """Gives everything back, and leaves the line."""
        with self.memory._lock:
            self.memory._line.pop(self, None)
            self.wake = None
        self.shrink(0)

    def when_ready(self, wake: Callable[[], None]) -> bool:
        """Whether it may go on; if not, `wake` is called when it may."""
        with self.memory._lock:
            if self.memory._is_ready(self):
                return True
            self.wake = wake
            return False
