"""The snapshot of several topics (rule S1): read topic by topic, from one cut of all.

The snapshot of one topic is planned like a query, and so comes from outside this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.reading import ManyCut
from sow_server.engine.stored import HEADER_BYTES, header_columns
from sow_server.subscriptions.frames import FRAME_BYTES, SnapshotBatch, SnapshotBegin
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Wants

READ_RECORDS: Final = 10_000
"""Stored records that one step reads, at most, so that a reader thread is not held for long."""
FILL_RECORDS_MIN: Final = 100
FILL_RECORDS_MAX: Final = 1000


class SeveralTopics:
    """The `request.Snapshot` of all topics that match a pattern. Owns the cut."""

    def __init__(
        self, cut: ManyCut, view: Callable[[Topic], tuple[VersionMatcher, Wants] | None], name: bytes = b""
    ) -> None:
        """`name`: of all that the subscriber sees."""
        self._cut: Final = cut
        self.begin: Final = SnapshotBegin(cut.sequence, cut.now_micros, view=name)
        self._view = view
        self._topic = 0
        self._keys: list[bytes] = []
        self._values: list[bytes] = []
        """Matching records that have not been given out."""
        self._next: bytes | None = cut.topics[0].topic.prefix if cut.topics else None
        self.truncated: Final = False
        self.absent_fields: Final[Sequence[str]] = ()
        """Not looked for: a field of one topic may be in no record of another."""

    @property
    def done(self) -> bool:
        return self._topic == len(self._cut.topics)

    def read(self) -> SnapshotBatch | None:
        records = self._cut.topics[self._topic]
        view = self._view(records.topic)
        if view is None or view[0].constant is False:
            self._next_topic()
            return None
        matcher, wants = view
        keys, values = self._keys, self._values
        size, scanned, wanted = sum(map(len, values)), 0, wants.batch_size
        while self._next is not None and len(keys) < wanted and size < FRAME_BYTES and scanned < READ_RECORDS:
            found_keys: list[bytes] = []
            found: list[bytes] = []
            limit = min(max(wanted - len(keys), FILL_RECORDS_MIN), FILL_RECORDS_MAX)
            self._next, read = records.fill(self._next, limit, found_keys, found)
            scanned += read
            if matcher.filter is not None:
                matches = matcher.filter.matches
                rows = [row for row in zip(found_keys, found, strict=True) if matches(*row)]
                found_keys, found = [key for key, _ in rows], [value for _, value in rows]
            keys += found_keys
            values += found
            size += sum(map(len, found))
        self._keys, self._values = keys[wanted:], values[wanted:]
        del keys[wanted:], values[wanted:]
        if self._next is None and not self._keys:
            self._next_topic()
        if not keys:
            return None
        payloads = [value[HEADER_BYTES:] for value in values]
        if wants.projection is not None:
            project = records.topic.format.project
            payloads = [project(payload, wants.projection) for payload in payloads]
        return SnapshotBatch(records.topic.name, keys, payloads, header_columns(values))

    def _next_topic(self) -> None:
        self._topic += 1
        self._next = None if self.done else self._cut.topics[self._topic].topic.prefix

    def close(self) -> None:
        self._cut.close()
