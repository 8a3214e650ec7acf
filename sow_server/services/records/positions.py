"""Reads that have to show a position: they wait until this instance has it (rule F10)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.observers import Committed
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.bookmarks import Position, parse
from sow_server.engine.values.errors import Reason, StoreError

PATIENCE_SECONDS: Final = 1.0
FIELD: Final = "min_position"


async def on_disk(commits: Commits, sequence: int) -> None:
    """Returns once everything up to a sequence is durable (rule S7). Raises StoreError."""
    if sequence > commits.synced_sequence:
        await commits.barrier()


class Positions:
    """Owns the calls that wait. On the event loop."""

    def __init__(
        self,
        reads: Reads,
        writes: Writes,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Make it before the store is started: from then on it follows the writer."""
        self._marks = writes.replicas.marks
        self._instance = reads.instance
        self._patience_seconds = patience_seconds
        self._waiting = 0
        self._moved = asyncio.Event()
        """Replaced at each commit, by one that nobody has waited for."""
        writes.commits.follow(self._committed)

    async def reach(self, topic: Topic, bookmark: str) -> bool:
        """Returns once a read of the topic shows everything up to a bookmark; at once, if it is empty. True: it has
        waited, so the topic may be gone. Raises StoreError BEHIND after a second, or at once if this instance hears
        nothing from there."""
        if not bookmark:
            return False
        position = parse(bookmark, field=FIELD).at
        if self._shows(topic, position):
            return False
        self._waiting += 1
        try:
            async with asyncio.timeout(self._patience_seconds):
                while not self._shows(topic, position):
                    await self._moved.wait()
        except TimeoutError:
            raise StoreError(
                Reason.BEHIND,
                f"{FIELD}: this instance does not have {topic.name} up to {position.text} yet",
                field=FIELD,
            ) from None
        finally:
            self._waiting -= 1
        return True

    def _shows(self, topic: Topic, position: Position) -> bool:
        shows = self._marks.reached(topic, position, self._instance.epoch)
        if shows is None:
            raise StoreError(
                Reason.BEHIND,
                f"{FIELD}: no link brings changes from the journal {position.epoch} to this instance",
                field=FIELD,
            )
        return shows

    def _committed(self, commits: Sequence[Committed], synced: int) -> None:
        if self._waiting:
            self._moved.set()
            self._moved = asyncio.Event()
