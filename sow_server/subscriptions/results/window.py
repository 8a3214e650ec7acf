"""The best records of a topic in an order: the window from which a list is cut (rule S12). Pure.

[1]  It knows every matching record before its boundary, and nothing of those behind it. Without a boundary it knows
     all matching records.
[2]  It holds at most 2 K records, where K is the list with the records before it, and as many again in reserve. More
     are cut off behind K, and the place of the last one kept is the boundary.
[3]  It is short when it knows fewer records than the list needs and there may be more. It has to be read anew then.
[4]  Equal results of two windows are not certain to come from equal windows: only the list is promised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.frames import Row

RESERVE_MIN: Final = 100
"""Records in reserve, at least: so many may leave before the topic has to be read again."""


class Place(Protocol):
    """A record's place in an order. Two records never have the same."""

    def __lt__(self, other: Any, /) -> bool: ...


class _Held(NamedTuple):
    place: Place
    row: Row


class Window:
    """Owns the best records."""

    def __init__(self, skip: int, top: int, bytes_max: int) -> None:
        """The list has `top` records behind the first `skip`. `bytes_max`: of memory."""
        self._skip: Final = skip
        self._needed: Final = skip + top
        self.records_max: Final = self._needed + max(RESERVE_MIN, top)
        """K: so many are read."""
        self._bytes_max: Final = bytes_max
        self._held: dict[bytes, _Held] = {}
        self._places: list[Place] = []
        self._keys: list[bytes] = []
        """Both in order."""
        self._boundary: Place | None = None
        self._extent = self._needed
        """The list was cut from so many of the first records, at least: a change behind them does not concern it."""
        self.size = 0
        """Bytes of memory."""
        self.changed = False
        """True if the list may have changed since it was cut."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def is_due(self, key: bytes, now_micros: int) -> bool:
        """True if a record is here, and its time is over."""
        held = self._held.get(key)
        return held is not None and held.row.expire_time <= now_micros

    # -- reading anew -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forgets everything: the best records are read anew."""
        self._held, self._places, self._keys = {}, [], []
        self._boundary = None
        self.size = 0
        self.changed = True

    def load(self, found: Iterable[tuple[Place, Row]]) -> bool:
        """The next records that were read, in order. True: they fill the memory, and the rest need not be read."""
        for place, row in found:
            self._places.append(place)
            self._keys.append(row.key)
            self._held[row.key] = _Held(place, row)
            self.size += row.size
        return self.size > self._bytes_max

    def loaded(self, *, complete: bool) -> None:
        """All were read. `complete`: there are no more. Raises StoreError RESULT_TOO_LARGE."""
        if not complete:
            self._boundary = self._places[-1]
        self._bound()

    # -- changes ----------------------------------------------------------------------------------------------------

    def put(self, place: Place, row: Row) -> None:
        """A record was put, and matches. Raises StoreError RESULT_TOO_LARGE."""
        self.remove(row.key)
        if self._boundary is not None and self._boundary < place:
            return  # [1]
        at = bisect_left(self._places, place)
        self._places.insert(at, place)
        self._keys.insert(at, row.key)
        self._held[row.key] = _Held(place, row)
        self.size += row.size
        if at < self._extent:
            self.changed = True
        self._bound()

    def remove(self, key: bytes) -> None:
        """A record does not match any more, or is gone. One that is not here changes nothing."""
        held = self._held.pop(key, None)
        if held is None:
            return
        at = bisect_left(self._places, held.place)
        del self._places[at], self._keys[at]
        self.size -= held.row.size
        if at < self._extent:
            self.changed = True

    def _bound(self) -> None:
        """Keeps to the bounds [2]."""
        if len(self._keys) > 2 * self.records_max:
            self._cut(self.records_max)
        if self.size > self._bytes_max and len(self._keys) > self._needed:
            self._cut(max(self._needed, self._within(self._bytes_max // 2)))
        if self.size > self._bytes_max:
            raise StoreError(
                Reason.RESULT_TOO_LARGE,
                f"top_n: the records of this live result take more than {self._bytes_max} bytes; ask for fewer "
                "([subscriptions] result_bytes_max)",
                field="top_n",
            )

    def _within(self, room: int) -> int:
        """The number of first records that fit into so many bytes."""
        for count, key in enumerate(self._keys):
            room -= self._held[key].row.size
            if room < 0:
                return count
        return len(self._keys)

    def _cut(self, count: int) -> None:
        """Drops the records behind the first `count` [2]."""
        for key in self._keys[count:]:
            self.size -= self._held.pop(key).row.size
        del self._keys[count:], self._places[count:]
        self._boundary = self._places[-1]

    # -- the list ---------------------------------------------------------------------------------------------------

    def shown(self, now_micros: int) -> list[Row] | None:
        """The list, without records that are due by `now_micros`; None: the window is short [3]."""
        found: list[Row] = []
        scanned = 0
        for key in self._keys:
            if len(found) == self._needed:
                break
            scanned += 1
            row = self._held[key].row
            if now_micros < row.expire_time:
                found.append(row)
        if len(found) < self._needed and self._boundary is not None:
            return None
        self._extent = max(self._needed, scanned)
        self.changed = False
        return found[self._skip :]
