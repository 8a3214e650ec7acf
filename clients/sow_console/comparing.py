"""A comparison with a peer, or a repair, that goes on while people look at other pages."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from datetime import datetime

from sow_client import AsyncClient, Repaired, SowError, Verified

KEYS: int = 10
"""Differing keys that are listed of each topic."""


class Comparison:
    """Owns one run. It ends with its session."""

    def __init__(
        self,
        client: AsyncClient,
        peer: str,
        topics: Sequence[str],
        *,
        repairs: bool,
        topics_total: int | None,
        now: Callable[[], datetime],
    ) -> None:
        """`topics`: only these; empty: all of the link. `topics_total`: how many that are, if it is known."""
        self.peer = peer
        self.topics = tuple(topics)
        self.repairs = repairs
        self.topics_total = topics_total
        self.began = now()
        self.ended: datetime | None = None
        """None: it is under way."""
        self.verified: list[Verified] = []
        self.repaired: list[Repaired] = []
        self.error: SowError | None = None
        self._now = now
        self._task = asyncio.create_task(self._run(client), name="a comparison")

    @property
    def done(self) -> int:
        """Topics that are done."""
        return len(self.repaired if self.repairs else self.verified)

    @property
    def records(self) -> int:
        """Records that were compared so far."""
        return sum(one.records for one in self.verified)

    @property
    def differing(self) -> int:
        """Keys that differed so far."""
        return sum(one.differing for one in (self.repaired if self.repairs else self.verified))

    async def wait(self) -> None:
        """Returns once it has ended."""
        await asyncio.wait({self._task})

    async def close(self) -> None:
        """Ends it; topics that are done stay done."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self, client: AsyncClient) -> None:
        try:
            if self.repairs:
                await client.repair_replication(self.peer, self.topics or None, on_topic=self.repaired.append)
            else:
                await client.verify_replication(
                    self.peer, self.topics or None, keys_max=KEYS, on_topic=self.verified.append
                )
        except SowError as error:
            self.error = error
        finally:
            self.ended = self._now()


def matching(names: Sequence[str], pattern: str) -> int | None:
    """The number of topics that a link's pattern takes; None: the pattern is none that Python knows."""
    try:
        wanted = re.compile(pattern or ".*")
    except re.error:
        return None
    return sum(wanted.fullmatch(name) is not None for name in names if not name.startswith("_"))
