"""Hearing of commits: the followers of changes, and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.journal.builder import ChunkBuilder


class Committed(NamedTuple):
    """The effect of one commit on topics, for the followers of changes."""

    last_sequence: int
    commit_time_micros: int
    chunks: Sequence[ChunkBuilder]
    control: bool = False
    """True if the commit may have added, removed or altered topics."""
    dropped: Sequence[Topic] = ()
    """Topics that were deleted; they have no later changes."""


Follow = Callable[[Sequence[Committed], int], None]
"""Called on the deliverer's thread, in order, with the commits that have become durable, and the sequence up to which
all are."""


class Observer(Protocol):
    """Called with the work of the writer (the metrics). Called from the writer thread; must be quick."""

    def committed(self, records: int, seconds: float) -> None:
        """A commit of `records` applied records took `seconds`, sync included."""

    def expired(self, lags_micros: list[int]) -> None:
        """Records were expired, the given time after their expire time."""

    def stalled(self) -> None:
        """A write found RocksDB stalled."""


class NoObserver:
    """Nobody watches."""

    def committed(self, records: int, seconds: float) -> None: ...
    def expired(self, lags_micros: list[int]) -> None: ...
    def stalled(self) -> None: ...
