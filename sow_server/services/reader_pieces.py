"""Pieces of work of exports and of ranges on the reader threads, a few at a time for all streams together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext
from typing import Any, Final, TypeVar

T = TypeVar("T")

PIECES_AT_ONCE: Final = 1
"""Pieces that reader threads do at the same time. A query has somebody who waits for it, so it must find a free thread
however many clients read snapshots. Two pieces at a time would not read faster, because iterating holds the GIL; a
publish beside them took half as long again."""


class ReaderPieces:
    """Owns the pieces that are under way, and their turns. On the event loop."""

    def __init__(self, readers: Executor) -> None:
        self._readers = readers
        self._at_once = asyncio.Semaphore(PIECES_AT_ONCE)
        self._running: set[asyncio.Task[Any]] = set()
        """The event loop itself holds tasks only weakly."""

    def run(self, work: Callable[[], T], turn: asyncio.Lock | None = None) -> asyncio.Task[T]:
        """Runs a piece on a reader thread. `turn`: it is one of several of which one may run at a time.

        The piece is finished even if its caller has gone. A caller shields it from being cancelled, as the thread uses
        what the piece reads until it is finished."""
        piece = asyncio.get_running_loop().create_task(self._run(work, turn))
        self._running.add(piece)
        piece.add_done_callback(self._done)
        return piece

    async def _run(self, work: Callable[[], T], turn: asyncio.Lock | None) -> T:
        async with turn or nullcontext(), self._at_once:
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _done(self, piece: asyncio.Task[Any]) -> None:
        self._running.discard(piece)
        if not piece.cancelled():
            piece.exception()  # its caller has got it, or has gone
