"""Figures of a server for the pages of one person: followed while somebody looks, and kept for a short chart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from sow_client import AsyncClient, Figures, SowError

LOOKED_SECONDS: Final = 30.0
"""The figures are followed for this long after the last look."""
KEPT: Final = 120
"""Figures that are kept, one a second."""


class FiguresWatch:
    """Owns the stream of figures, which begins with the first look."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._kept: deque[Figures] = deque(maxlen=KEPT)
        self._looked = clock()
        self._task: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        self.error: SowError | None = None
        """The reason why there are none at present."""

    async def look(self) -> tuple[Figures, ...]:
        """The figures so far, the newest last. It waits for the first ones. Raises SowError where there are none."""
        self._looked = self._clock()
        if self._task is None or self._task.done():
            self.error = None
            self._first.clear()
            self._task = asyncio.create_task(self._follow(), name="figures")
        await self._first.wait()
        if self.error is not None:
            raise self.error
        return tuple(self._kept)

    async def close(self) -> None:
        """Ends the stream."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        self._kept.clear()
        try:
            async with contextlib.aclosing(self._client.watch_figures("1s", topics_max=1_000)) as coming:
                async for figures in coming:
                    self._kept.append(figures)
                    self._first.set()
                    if self._clock() > self._looked + LOOKED_SECONDS:
                        break
        except SowError as error:
            self.error = error
        finally:
            self._first.set()
