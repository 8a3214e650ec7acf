"""The view of a subscriber on topics, made from the parts of a query: filter, projection, planned snapshot.

Queries and subscriptions do not know each other. A filter means the same in both, as both get it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.reading import Cuts
from sow_server.query.filtering import RecordFilter, record_filter
from sow_server.query.projection import projection
from sow_server.query.scan import Query, Scan
from sow_server.subscriptions.frames import SnapshotBatch
from sow_server.subscriptions.request import View


class TopicFilters:
    """The filter and the projection of one subscriber, topic by topic. From any thread."""

    def __init__(self, cuts: Cuts, text: str, include: Sequence[str], exclude: Sequence[str], batch_size: int) -> None:
        self._cuts = cuts
        self._text = text
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._batch_size = batch_size
        self._filters: dict[tuple[object, ...], RecordFilter] = {}
        self._by_key: dict[tuple[str, ...], RecordFilter] = {}
        """By key fields. A topic may appear later; its filter is then needed on the event loop, where a long one must
        not be compiled again."""

    def view(self, topic: Topic) -> View:
        """The view of a topic. Raises StoreError: FILTER_INVALID, UNSUPPORTED_FOR_MESSAGE_TYPE, …"""
        return View(self._filter(topic), projection(topic, self._include, self._exclude))

    def snapshot(self, topic: Topic) -> PlannedSnapshot:
        """A snapshot of a topic, planned like a query."""
        query = Query(
            topic,
            filter=self._filter(topic),
            projection=projection(topic, self._include, self._exclude),
            batch_size=self._batch_size,
        )
        return PlannedSnapshot(Scan(self._cuts, query))

    def _filter(self, topic: Topic) -> RecordFilter | None:
        if not self._text:
            return None
        settings = topic.settings
        key = topic.id, settings.key, settings.message_type, settings.separator
        found = self._filters.get(key)
        if found is None:
            known = self._by_key.get(settings.key)
            # There is no `now` to give, as NOW_MICROS() is refused.
            found = record_filter(topic, self._text, 0, allow_now=False) if known is None else known.on(topic)
            self._filters[key] = self._by_key[settings.key] = found
        return found


class PlannedSnapshot:
    """A `subscriptions.request.Snapshot` of one topic. Owns the scan."""

    def __init__(self, scan: Scan) -> None:
        self._scan: Final = scan
        self.sequence: Final = scan.cut.sequence
        self.now_micros: Final = scan.cut.now_micros
        self.done = False

    def read(self) -> SnapshotBatch | None:
        """The next records; None if this step found none that match."""
        batch = self._scan.step()
        if batch is None:
            self.done = True
            return None
        if not batch.keys:
            return None
        assert batch.payloads is not None, "keys alone were not asked for"
        return SnapshotBatch(self._scan.query.topic.name, batch.keys, batch.payloads, batch.headers)

    def close(self) -> None:
        """Releases the cut."""
        self._scan.close()
