"""Where to split the records of a topic into parts of about equal size, by samples of its keys."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.reading import Cut
from sow_server.query.planner import ABOVE_ALL, EVERYTHING, Range

DRIFT_SHARE: Final = 4
"""The samples of a topic serve until a quarter as many changes have been written as the topic had records."""
TOPICS_KEPT: Final = 100
"""Topics whose samples are kept."""


class KeySamples:
    """Every n-th record key of some ranges, in order."""

    def __init__(self, stride: int) -> None:
        self.stride: Final = stride
        self.keys: list[bytes] = []
        self.before: list[int] = []
        """Stored records before each of the keys."""
        self.records = 0

    def add(self, keys: Sequence[bytes], records: int) -> None:
        """Adds the next keys, which stand for `records` records."""
        self.keys += keys
        self.before += [self.records + index * self.stride for index in range(len(keys))]
        self.records += records

    def within(self, ranges: Sequence[Range]) -> KeySamples:
        """The samples within the ranges; their counts are then approximate."""
        if ranges == EVERYTHING:
            return self
        found = KeySamples(self.stride)
        for start, stop in ranges:
            first, last = bisect.bisect_left(self.keys, start), bisect.bisect_left(self.keys, stop)
            if first < last:
                upto = self.records if last == len(self.keys) else self.before[last]
                found.add(self.keys[first:last], upto - self.before[first])
        return found

    def place(self, records: int) -> tuple[bytes, int]:
        """The first sample with at least that many records before it, and their number."""
        index = bisect.bisect_left(self.before, records)
        if index == len(self.keys):
            return ABOVE_ALL, self.records
        return self.keys[index], self.before[index]


class SplitCache:
    """Remembers samples of topics, so that not every export has to pass over the whole topic.

    They only decide how even parts are. From any thread.
    """

    def __init__(self) -> None:
        self._samples: dict[int, tuple[int, KeySamples]] = {}
        """The sequence at the time, and the samples, keyed by topic id."""
        self._lock = threading.Lock()

    def of(self, topic: Topic, cut: Cut) -> KeySamples | None:
        """The samples of a topic, if they are recent enough."""
        with self._lock:
            found = self._samples.get(topic.id)
        if found is None:
            return None
        sequence, samples = found
        return samples if abs(cut.sequence - sequence) <= samples.records // DRIFT_SHARE else None

    def keep(self, topic: Topic, cut: Cut, samples: KeySamples) -> None:
        """Remembers samples of a whole topic, if its journal tells how much the topic has changed since."""
        if not topic.settings.journal:
            return
        with self._lock:
            self._samples.pop(topic.id, None)
            self._samples[topic.id] = (cut.sequence, samples)
            while len(self._samples) > TOPICS_KEPT:
                del self._samples[next(iter(self._samples))]
