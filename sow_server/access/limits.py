"""The use that one identity makes of its limits (rule A7). Event loop only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from sow_server.access.model import Limits
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

CREATED_SECONDS: Final = 3600.0
"""The time within which topics and publisher ids count. A program takes a new publisher id each time it begins, so a
count without an end would stop a busy identity for good."""
DESCRIPTIONS_MORE: Final = 10
"""Calls of DescribeInstance at a time, in addition to `rpcs`: each client of an identity holds one, and more ask."""


def exceeded(name: str, limit: int, retry_after_micros: int = 0) -> StoreError:
    """The refusal at a limit."""
    return StoreError(
        Reason.LIMIT_EXCEEDED,
        f"this caller has reached its limit of {name}, {limit}",
        details={"limit": name, "value": str(limit)},
        retry_after_micros=retry_after_micros,
    )


class Usage:
    """Counts the calls and things of one identity, and bounds its rate of calls."""

    def __init__(self, limits: Limits, elapsed: Callable[[], float]) -> None:
        """`elapsed`: seconds of a monotonic clock."""
        self.limits = limits
        self._elapsed: Final = elapsed
        self._held: dict[str, int] = {}
        self._making: dict[str, int] = {}
        self._recent = 0.0
        """Requests that count against the rate: each is forgotten as time passes."""
        self._at = elapsed()
        self._created: dict[str, dict[str, float]] = {"topics": {}, "publishers": {}}
        """When each name was counted, the oldest first."""

    def held(self, name: str) -> int:
        """The amount of a limit that is in use."""
        return self._held.get(name, 0)

    def take(self, name: str, limit: int | None, amount: int = 1, *, told: str = "") -> None:
        """Takes a part of a limit, until `free`. `told`: the name of the limit, if it is another one. Raises StoreError
        LIMIT_EXCEEDED."""
        held = self._held.get(name, 0)
        # A single request may exceed a limit of bytes, or it could never be made.
        if limit is not None and held + amount > limit and (held or amount == 1):
            raise exceeded(told or name, limit, MICROS // 10)
        self._held[name] = held + amount

    def take_call(self, kind: str) -> None:
        """Takes the place of a call, until `free`. Calls of DescribeInstance have places of their own: a client with
        several addresses holds one open, and would take the only place of an identity with one. Raises StoreError
        LIMIT_EXCEEDED."""
        limit = self.limits.rpcs
        self.take(kind, limit + DESCRIPTIONS_MORE if limit and kind != "rpcs" else limit, told="rpcs")

    def free(self, name: str, amount: int = 1) -> None:
        """Gives back."""
        left = self._held.get(name, 0) - amount
        assert left >= 0, "only what was taken is given back"
        if left:
            self._held[name] = left
        else:
            self._held.pop(name, None)

    def make(self, limit: str, held: int, most: int | None) -> None:
        """Begins to make something, until `made`. Raises StoreError LIMIT_EXCEEDED."""
        making = self._making.get(limit, 0)
        if most is not None and held + making >= most:
            raise exceeded(limit, most)
        self._making[limit] = making + 1

    def made(self, limit: str) -> None:
        """It was made, and is held from now on, or was not."""
        self._making[limit] -= 1

    def request(self) -> None:
        """Counts one request against `requests_per_second`: a second's worth may come at once. Raises StoreError
        LIMIT_EXCEEDED with the time to wait."""
        rate = self.limits.requests_per_second
        if rate is None:
            return
        now = self._elapsed()
        # A reload may have lowered the rate: nobody waits for longer than a second's worth of the new one.
        recent = self._recent = max(0.0, min(self._recent, float(rate)) - (now - self._at) * rate)
        self._at = now
        if recent + 1 > rate:
            # With a rate of 0, waiting does not help.
            raise exceeded("requests_per_second", rate, math.ceil((recent + 1 - rate) / rate * MICROS) if rate else 0)
        self._recent += 1

    def creates(self, kind: str, name: str, limit: int | None) -> None:
        """Counts a new thing of this identity, each name once within `CREATED_SECONDS`. Raises StoreError
        LIMIT_EXCEEDED with the time to wait."""
        made, now = self._created[kind], self._elapsed()
        while made and made[oldest := next(iter(made))] <= now - CREATED_SECONDS:
            del made[oldest]
        if name in made:
            return
        if limit is not None and len(made) >= limit:
            wait = next(iter(made.values())) + CREATED_SECONDS - now if made else 0
            raise exceeded(kind, limit, math.ceil(wait * MICROS))
        made[name] = now
