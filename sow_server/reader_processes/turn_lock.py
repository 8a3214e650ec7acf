"""A lock whose waiters come in turns by caller (rule N7). On one event loop.

[1]  The next is a waiter of the caller that has held the lock for the least time. Waiters of one caller keep their
     order.
[2]  A waiter that is cancelled has no turn, also if it was told of it at that moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

from sow_server.engine.values.turns import Turns

TURN_SECONDS: Final = 0.00002
"""Charged for each turn besides its time."""


class TurnLock:
    """Owns the waiters."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._held = False

    @asynccontextmanager
    async def held(self, caller: str) -> AsyncGenerator[None, None]:
        """Holds the lock for a caller, once it is its turn."""
        if self._held:
            await self._turn(caller)
        self._held = True
        begun = self._clock()
        try:
            yield
        finally:
            self._turns.charge(caller, self._clock() - begun + TURN_SECONDS)
            self._pass_on()

    async def _turn(self, caller: str) -> None:
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.put(caller, told)
        try:
            await told
        except asyncio.CancelledError:
            if not told.cancelled():  # it has the turn, and nobody else would hear of it [2]
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while len(self._turns):
            told = self._turns.take(self._turns.next_caller())
            if not told.done():
                told.set_result(None)
                return
        self._held = False
