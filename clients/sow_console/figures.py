"""Streams that a server sends one person, such as its figures: followed while somebody looks, the last ones kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final, Generic, TypeVar

from sow_client import AsyncClient, FailedPrecondition, Figures, LogLine, SowError

LOOKED_SECONDS: Final = 30.0
"""A stream is followed for this long after the last look."""
FIRST_SECONDS: Final = 3.0
"""A look waits this long for the first one: a log may be empty."""
KEPT: Final = 120
"""Figures that are kept, one a second."""
HOUR_KEPT: Final = 720
"""Figures of an hour that are kept, one each 5 s, as the server keeps them."""
LINES_KEPT: Final = 1_000
"""Lines of the log that are kept."""
_Item = TypeVar("_Item")


class Watch(Generic[_Item]):
    """Owns a stream, which begins with the first look."""

    def __init__(
        self,
        opened: Callable[[], AsyncGenerator[_Item, None]],
        kept: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_of_now: Callable[[_Item], bool] = lambda _: True,
    ) -> None:
        """`opened` begins the stream, which raises SowError where it cannot. Those of the past come before the first
        one that `is_of_now`."""
        self._opened = opened
        self._clock = clock
        self._is_of_now = is_of_now
        self._kept: deque[_Item] = deque(maxlen=kept)
        self._looked = clock()
        self._task: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        self._limit: asyncio.Timeout | None = None
        """Ends a stream in which nothing comes, such as a log."""
        self.error: SowError | None = None
        """The reason why there are none at present."""

    async def look(self) -> tuple[_Item, ...]:
        """Those that came so far, the newest last. It waits for the first one of now. Raises SowError where there are
        none."""
        self._looked = self._clock()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + LOOKED_SECONDS)
        if self._task is None or self._task.done():
            self.error = None
            self._first.clear()
            self._task = asyncio.create_task(self._follow(), name="a watch")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
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
        self._limit = asyncio.timeout(LOOKED_SECONDS)
        try:
            async with self._limit, contextlib.aclosing(self._opened()) as coming:
                async for item in coming:
                    self._kept.append(item)
                    if self._is_of_now(item):
                        self._first.set()
                    if self._clock() > self._looked + LOOKED_SECONDS:
                        break
        except TimeoutError:
            pass  # nobody has looked for a while
        except SowError as error:
            self.error = error
        finally:
            self._limit = None
            self._first.set()


def figures_of(client: AsyncClient) -> Watch[Figures]:
    """The figures of a server, two minutes of them."""
    return Watch(lambda: client.watch_figures("1s", topics_max=1_000), KEPT)


def hour_of(client: AsyncClient) -> Watch[Figures]:
    """The figures of a server's last hour, or since its start; those of an older server since the first look."""
    return Watch(lambda: _hour(client), HOUR_KEPT, is_of_now=lambda one: not one.elapsed)


async def _hour(client: AsyncClient) -> AsyncGenerator[Figures, None]:
    for history in ("1h", None):
        try:
            async with contextlib.aclosing(client.watch_figures("5s", topics_max=1, history=history)) as coming:
                async for figures in coming:
                    yield figures
            return
        except FailedPrecondition as error:
            if error.reason != "SERVER_TOO_OLD":
                raise


def log_of(client: AsyncClient) -> Watch[LogLine]:
    """The log of a server."""
    return Watch(lambda: client.watch_log(lines_max=LINES_KEPT), LINES_KEPT)
