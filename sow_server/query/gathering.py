"""A query that has to read all of its records before it answers: it gathers what it needs of them, in the memory that
such queries share (`sort_memory`), and then gives the rows of its answer.

    [1]  What is gathered is counted before it is kept for long: where it does not fit, the query waits, begins anew, or
         is refused.
    [2]  While records are added or rows are read, the memory is not taken back.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.query.sort_memory import RETRY_MICROS, SortMemory, SortRoom, SortShare

Row: TypeAlias = tuple[tuple[object, ...], bytes, bytes]
"""(sort keys of all terms in one tuple, record key, stored value): each further object would make sorting slower."""


class Gathering(ABC):
    """Owns the share of the memory. A subclass owns what is gathered."""

    def __init__(self, memory: SortMemory, caller: str, field: str, advice: str) -> None:
        """`caller`: who waits for the answer. `field`: of the request, the reason to gather. `advice`: what to do where
        the result is too large."""
        self.share: Final = SortShare(memory, caller, self._reclaim, field)
        self._advice = advice
        self._at_work = threading.Lock()
        """Held while records are added or rows are read [2]."""
        self._reclaimed = False
        self._bytes = 0
        """Bytes of what is gathered; more than the share holds while it waits for room."""

    def add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> SortRoom:
        """Takes records. GRANTED: go on. WAIT: call `again` once the share is ready. BEGIN_ANEW: once it is ready, add
        all records again from the first. Raises StoreError RESULT_TOO_LARGE, OVERLOADED."""
        with self.working():
            return self._add(keys, values)

    @property
    def busy(self) -> bool:
        """True if it has work to do before it takes more records."""
        return False

    def work(self) -> SortRoom:
        """Does a piece of this work; as `add`."""
        raise AssertionError("it is never busy")

    def settle(self) -> SortRoom | None:
        """After the last record: does a piece of the work that is left; as `add`. None: the rows may be read."""
        return None

    @abstractmethod
    def rows(self, skip: int = 0, stop: int | None = None) -> Iterator[Row]:
        """The rows of the answer from `skip` up to `stop`. Read them once."""

    @abstractmethod
    def _add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> SortRoom: ...

    @abstractmethod
    def forget(self) -> None:
        """Lets all go that was gathered, also from those who read the rows."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """While it is at work, its memory is not taken back [2]. Raises StoreError OVERLOADED if it was."""
        with self._at_work:
            if self._reclaimed:
                raise StoreError(
                    Reason.OVERLOADED,
                    f"{self.share.field}: other queries needed the memory of this result, which nobody read; ask again,"
                    " and read it as it comes",
                    field=self.share.field,
                    retry_after_micros=RETRY_MICROS,
                )
            self.share.moved()
            yield

    def again(self) -> SortRoom:
        """Asks again for memory that was not free; as `add`."""
        room = self.share.hold(self._bytes)
        if room is SortRoom.NEVER:
            raise self.too_large()
        if room is SortRoom.BEGIN_ANEW:
            self.forget()
        return room

    def too_large(self) -> StoreError:
        """The error of a result that is too large on its own. It lets all go."""
        self.close()
        return StoreError(
            Reason.RESULT_TOO_LARGE,
            f"{self.share.field}: the result does not fit into the {self.share.memory.bytes_max >> 20} MiB that this"
            f" server sorts and groups in; {self._advice}",
            field=self.share.field,
        )

    def close(self) -> None:
        """Releases what was gathered."""
        self.forget()
        self.share.close()

    def _reclaim(self) -> bool:
        """Lets all go, for another query that waits; False if it is at work."""
        if not self._at_work.acquire(blocking=False):
            return False
        try:
            self._reclaimed = True
            self.forget()
        finally:
            self._at_work.release()
        return True
