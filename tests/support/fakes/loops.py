"""An event loop with a time of its own."""

from __future__ import annotations

import asyncio
import selectors


class FakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only, and at once, when there is nothing to do until a timer."""

    def __init__(self) -> None:
        self._impatient = Impatient()
        super().__init__(self._impatient)

    def time(self) -> float:
        return self._impatient.now


class Impatient(selectors.SelectSelector):
    """Counts the time that it should wait, instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)
