"""The view of a subscriber on topics, made from the parts of a query: filter, projection, planned snapshot.

Queries and subscriptions do not know each other. A filter means the same in both, as both get it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.reading import Cuts
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.query.filtering import RecordFilter, callers_filter
from sow_server.query.projection import projection
from sow_server.query.scan import Query, Scan
from sow_server.subscriptions.frames import SnapshotBatch
from sow_server.subscriptions.request import View


class TopicFilters:
    """The filter and the projection of one subscriber, topic by topic, joined to its permissions. From any thread."""

    def __init__(
        self,
        cuts: Cuts,
        text: str,
        include: Sequence[str],
        exclude: Sequence[str],
        batch_size: int,
        part_of: Callable[[Topic], Restriction | None] = lambda topic: UNRESTRICTED,
    ) -> None:
        """`part_of`: the part of a topic that the subscriber may see; None: nothing of it."""
        self._cuts = cuts
        self._text = text
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._batch_size = batch_size
        self._part_of = part_of
        self._filters: dict[tuple[object, ...], RecordFilter | None] = {}
        self._by_key: dict[tuple[tuple[str, ...], Restriction], RecordFilter] = {}
        """By key fields and restriction. A topic may appear later; its filter is then needed on the event loop, where a
        long one must not be compiled again."""

    def view(self, topic: Topic) -> View:
        """The view of a topic. Raises StoreError: FILTER_INVALID, UNSUPPORTED_FOR_MESSAGE_TYPE, …"""
        restriction = self._restriction(topic)
        return View(
            self._filter(topic, restriction), projection(topic, self._include, self._exclude, restriction.hidden)
        )

    def snapshot(self, topic: Topic) -> PlannedSnapshot:
        """A snapshot of a topic, planned like a query."""
        restriction = self._restriction(topic)
        query = Query(
            topic,
            filter=self._filter(topic, restriction),
            projection=projection(topic, self._include, self._exclude, restriction.hidden),
            batch_size=self._batch_size,
        )
        return PlannedSnapshot(Scan(self._cuts, query))

    def permits(self, topic: Topic) -> bool:
        """Whether the subscriber may see anything of a topic."""
        return self._part_of(topic) is not None

    def _restriction(self, topic: Topic) -> Restriction:
        restriction = self._part_of(topic)
        if restriction is None:
            raise StoreError(Reason.TOPIC_NOT_FOUND, f"topic: there is no topic {topic.name!r}", field="topic")
        return restriction

    def _filter(self, topic: Topic, restriction: Restriction) -> RecordFilter | None:
        settings = topic.settings
        key = topic.id, settings.key, settings.message_type, settings.separator, restriction
        if key in self._filters:
            return self._filters[key]
        known = self._by_key.get((settings.key, restriction))
        # There is no `now` to give, as NOW_MICROS() is refused.
        found = callers_filter(topic, self._text, restriction, allow_now=False) if known is None else known.on(topic)
        self._filters[key] = found
        if found is not None:
            self._by_key[settings.key, restriction] = found
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
