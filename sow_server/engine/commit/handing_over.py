"""Handing records that are due at once to attached subscribers (rule L7)."""

from __future__ import annotations

import time
from typing import Final

from sow_server.engine.catalog.topics import Topic

TAKING_SECONDS_MAX: Final = 0.05
"""The time in one commit for evaluating the filters of subscribers on records that are due at once. The writer does
nothing else meanwhile."""


class HandOver:
    """Hands records that are due at once to attached subscribers, in a bounded part of one commit's time (rule L7)."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = TAKING_SECONDS_MAX

    def takers(self, topic: Topic, key: bytes, value: bytes) -> int:
        """The number of attached subscribers that a record matches; subscribers that were not evaluated in time do not
        count."""
        if topic.takers is None or self._seconds <= 0:
            return 0
        begin = time.perf_counter()
        try:
            return topic.takers(key, value, begin + self._seconds)
        finally:
            self._seconds -= time.perf_counter() - begin
