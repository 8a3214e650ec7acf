"""The memory in which ordered queries sort, and others group, shared by all callers (rules Q2, Q12, N7).

One caller may have `bytes_max`, and all together have a quarter more, so however much one holds, another finds room.
While there is room, every sort takes the memory that it needs. When a sort finds none, the oldest of those that still
grow gets *the turn*: it keeps its memory, and waits for room. Every other sort that needs more gives back all its
memory, waits in line, and begins anew when it gets the turn. The line goes by caller.

    [1]  A sort that waits in line holds nothing. At most one sort waits while it holds memory: the one with the turn.
         The memory it waits for is held by sorts that need no more, as their rows are being sent, or that give it back
         once they do. So no two sorts wait for each other.
    [2]  While one sort has the turn, others of its caller start with up to `small` bytes: a small sort does not wait
         for a large one, unless the large one waits for room. Sorts of other callers take what they find, unless the
         one with the turn waits for room and its caller has no other: then only small ones do.
    [3]  A sort that does not fit into what one caller may have is refused; no other sort is.
    [4]  While a sort waits, the memory of one whose rows nobody reads is taken back, and its query ends. That of the
         caller that holds most goes first. Likewise of one with the turn that does not go on.

From any thread.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.turns import Turns

SORT_BYTES_MAX: Final = 256 * 2**20
"""Memory of the ordered queries of one caller."""
OTHERS_PART: Final = 4
"""One in this many parts of that is there for other callers in addition. A caller may have this many times the memory
that is free: alone, all of `bytes_max`."""
SORTS_WAITING_MAX: Final = 256
"""Ordered queries that may wait in line."""
SMALL_PARTS: Final = 64
"""A sort of at most one in this many parts of the memory is small [2]."""
UNREAD_SECONDS: Final = 10.0
"""How long nobody may read a result while another sort waits for its memory [4]."""
UNREAD_OTHERS_SECONDS: Final = 2.0
"""The same while a sort of another caller waits."""
LOOK_SECONDS: Final = 0.1
"""How often the memory is looked through for such results, at most."""
RETRY_MICROS: Final = MICROS


class SortRoom(enum.Enum):
    """The answer to a request for memory."""

    GRANTED = enum.auto()
    WAIT = enum.auto()
    """The share has the turn and keeps its memory; it asks again once it is ready."""
    BEGIN_ANEW = enum.auto()
    """The share holds nothing any more. Once it is ready, its sort begins anew."""
    NEVER = enum.auto()
    """It needs more than one caller may have."""


class SortMemory:
    """Owns the shares, the turn, and the line."""

    def __init__(
        self,
        bytes_max: int = SORT_BYTES_MAX,
        waiting_max: int = SORTS_WAITING_MAX,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bytes_max`: of one caller. `elapsed`: seconds of a monotonic clock."""
        self.bytes_max: Final = bytes_max
        self._total = bytes_max + -(-bytes_max // OTHERS_PART)
        self.elapsed: Final = elapsed
        self._waiting_max = waiting_max
        self._small = bytes_max // SMALL_PARTS
        self._lock = threading.Lock()
        self._held = 0
        self._of: Counter[str] = Counter()
        """The bytes that each caller holds."""
        self._holding: dict[SortShare, None] = {}
        """The sorts that hold memory."""
        self._looked = elapsed()
        self._growing: dict[SortShare, None] = {}
        """Sorts that may need more, the oldest first."""
        self._turn: SortShare | None = None
        self._wanted = 0
        """How much more memory the sort with the turn waits for."""
        self._line: Turns[SortShare] = Turns()
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
        self._of[share.caller] += more
        share.held = size
        share.moved_seconds = self.elapsed()
        if size:
            self._holding[share] = None
        else:
            self._holding.pop(share, None)
            if not self._of[share.caller]:
                del self._of[share.caller]
        if self._turn is share:
            self._wanted = 0
        if more < 0:
            self.given_back -= more
            self._advance()
        return True

    def _may_take(self, share: SortShare, size: int) -> bool:
        turn = self._turn
        if not self._has_room(share, size - share.held):
            return False
        if turn is None or turn is share:
            return True
        if turn.caller != share.caller:
            return not self._wanted or self._of[turn.caller] > turn.held or size <= self._small
        if self._wanted:
            return False
        # a sort that was large before goes on while there is room
        return size <= self._small or share.held > self._small

    def _has_room(self, share: SortShare, more: int) -> bool:
        """True if there are so many more bytes for the caller of a share."""
        return self._of[share.caller] + more <= OTHERS_PART * (self._total - self._held - more)

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
                f"{share.field}: {self._waiting_max} queries wait for memory to sort and group in; try again later",
                field=share.field,
                retry_after_micros=RETRY_MICROS,
            )
        self._growing.pop(share, None)
        self._line.put(share.caller, share)
        share.in_line = True
        self._take(share, 0)
        return SortRoom.BEGIN_ANEW

    def _grown(self, share: SortShare) -> None:
        if share in self._growing:
            del self._growing[share]
            self._line.charge(share.caller, share.held)
        if self._turn is share:
            self._turn, self._wanted = None, 0
            self._advance()

    def _advance(self) -> None:
        """Wakes the sorts that may go on, after memory or the turn has become free."""
        if self._turn is None and self._line:
            self._turn = self._line.take(self._line.next_caller())
            self._turn.in_line = False
            self._growing[self._turn] = None
            self.moves += 1
        if self._turn is not None and self._is_ready(self._turn):
            wake, self._turn.wake = self._turn.wake, None
            if wake is not None:
                wake()

    def _is_ready(self, share: SortShare) -> bool:
        if share.in_line:
            return False
        return self._turn is not share or self._has_room(share, self._wanted)

    def _leave_line(self, share: SortShare) -> None:
        if share.in_line:
            share.in_line = False
            self._line.remove(share.caller, share)

    # -- taking back --------------------------------------------------------------------------------------------------

    def take_back(self) -> None:
        """Takes memory back from sorts that stand still, as far as another one waits for it [4]. To be called by those
        that wait, now and then."""
        with self._lock:
            now = self.elapsed()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._take_back(now)

    def _take_back(self, now: float) -> None:
        waiting = set(self._line.waiting)
        if self._turn is not None and self._wanted:
            waiting.add(self._turn.caller)
        for share in sorted(self._holding, key=lambda share: (-self._of[share.caller], share.moved_seconds)):
            turn = self._turn
            if turn is None or (self._wanted and self._is_ready(turn)):
                return
            # Where the one with the turn does not wait for room, it alone stands in the way.
            if (share is turn) == bool(self._wanted):
                continue
            others_wait = share is not turn and bool(waiting - {share.caller})
            patience = UNREAD_OTHERS_SECONDS if others_wait else UNREAD_SECONDS
            if now - share.moved_seconds >= patience and share.reclaim():
                self._grown(share)
                self._take(share, 0)


class SortShare:
    """The memory of one sort."""

    def __init__(
        self,
        memory: SortMemory,
        caller: str = "",
        reclaim: Callable[[], bool] = lambda: False,
        field: str = "order_by",
    ) -> None:
        """`reclaim`: forgets the records, so that the sort has ended; False if it is at work at the moment. Called on
        any thread and under the lock. `field`: of the request, the reason to sort or to group."""
        self.memory: Final = memory
        self.caller: Final = caller
        self.reclaim: Final = reclaim
        self.field: Final = field
        self.held = 0
        self.in_line = False
        self.moved_seconds = 0.0
        """When it took or gave back memory, or was read, the last time."""
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
            self.memory._grown(self)  # first: its caller is charged for what it has held
            self.memory._take(self, min(size, self.held))

    def moved(self) -> None:
        """Its records are being read."""
        self.moved_seconds = self.memory.elapsed()

    def close(self) -> None:
        """Gives everything back, and leaves the line."""
        with self.memory._lock:
            self.memory._leave_line(self)
            self.wake = None
        self.shrink(0)

    def when_ready(self, wake: Callable[[], None]) -> bool:
        """True if it may go on; if not, `wake` is called when it may."""
        with self.memory._lock:
            if self.memory._is_ready(self):
                return True
            self.wake = wake
            return False
