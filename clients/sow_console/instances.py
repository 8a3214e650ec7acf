"""The known state of the instances: each is asked on its own, so one that does not answer holds up no page.

[1]  A look waits WAIT_SECONDS at most, and not at all for an instance that is known to be lost.
[2]  An instance that was lost is not asked again for LOST_SECONDS.
[3]  Of an instance that does not answer, the last answer stays known, with its time.
[4]  The placement of topics in cells is asked for every PLACEMENT_SECONDS: the cells look at each other less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from sow_client import (
    AsyncClient,
    DeadlineExceeded,
    Instance,
    PermissionDenied,
    Placement,
    SowError,
    Status,
    Unavailable,
)
from sow_console import texts

WAIT_SECONDS: Final = 1.0
LOST_SECONDS: Final = 5.0
PLACEMENT_SECONDS: Final = 5.0
ALARM_SECONDS: Final = 3.0
"""An instance that has not answered for so long counts as lost, also where its connection stands."""


@dataclass(frozen=True, slots=True)
class Known:
    """An instance as it was at its last answer."""

    instance: Instance | None = None
    """None: it has never answered."""
    status: Status | None = None
    """None: likewise, or the person lacks `observe`."""
    time: datetime | None = None
    """When it answered, by the console's clock."""
    silent: bool = False
    """It was asked, and has not answered yet."""
    lost: bool = False
    """It does not answer."""
    denied: bool = False
    """The person may not see its status."""
    error: str = ""
    """The reason why it does not answer, or why there is no status."""
    placement: Placement | None = None
    """As far as the person may know it; None: it has told none."""


class Watched:
    """Owns what is known of one instance, and the question that is under way."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`clock`: monotonic seconds; `now`: the time of day."""
        self._client = client
        self._clock = clock
        self._now = now
        self._known = Known()
        self._asking: asyncio.Task[Known] | None = None
        self._begun = 0.0
        self._again = 0.0
        """It is not asked before."""
        self._placement_again = 0.0
        """It is not asked for its placement before."""

    @property
    def known(self) -> Known:
        """The known state, without a question."""
        return self._known

    async def look(self) -> Known:
        """The known state of now, after at most WAIT_SECONDS."""
        if self._asking is None and self._clock() >= self._again:
            self._asking = asyncio.create_task(self._ask(), name="question to an instance")
            self._begun = self._clock()
        if self._asking is None:
            return self._known
        asking = self._asking
        wait = 0.0 if self._known.lost else max(0.0, self._begun + WAIT_SECONDS - self._clock())
        await asyncio.wait({asking}, timeout=wait)
        if asking.done():
            self._take_in(asking)
            return self._known
        silent = self._clock() - self._begun
        if self._known.lost or silent < ALARM_SECONDS:
            return replace(self._known, silent=True)
        error = f"no answer for {texts.duration(timedelta(seconds=silent))}"
        return replace(self._known, lost=True, silent=True, error=error)

    async def close(self) -> None:
        """Ends the question that is under way."""
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    def _take_in(self, asking: asyncio.Task[Known]) -> None:
        if asking is not self._asking:
            return  # another look at the same time was first
        self._asking = None
        self._known = asking.result()
        if self._known.lost:
            self._again = self._clock() + LOST_SECONDS

    async def _ask(self) -> Known:
        try:
            instance = await self._client.describe_instance()
        except (Unavailable, DeadlineExceeded) as error:
            return replace(self._known, lost=True, error=f"not reachable: {error.message}")
        except PermissionDenied as error:  # the token was taken out of use: what it has shown is gone, too
            return Known(lost=True, error=error.message)
        except SowError as error:
            return replace(self._known, lost=True, error=error.message)
        placement = await self._placed()
        try:
            status = await self._client.status()
        except (Unavailable, DeadlineExceeded) as error:
            return replace(self._known, lost=True, error=f"not reachable: {error.message}")
        except SowError as error:
            denied = isinstance(error, PermissionDenied)
            return Known(instance, None, self._now(), error=error.message, denied=denied, placement=placement)
        return Known(instance, status, self._now(), placement=placement)

    async def _placed(self) -> Placement | None:
        if self._clock() < self._placement_again:
            return self._known.placement
        self._placement_again = self._clock() + PLACEMENT_SECONDS
        try:
            return await self._client.placement()
        except SowError:  # an older one has none; of one that is lost the next call tells
            return self._known.placement
