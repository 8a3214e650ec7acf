"""The view of a subscriber on topics, made from the parts of a query: filter, projection, planned snapshot.

Queries and subscriptions do not know each other. A filter means the same in both, as both get it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.reading import Cuts
from sow_server.engine.stored import HeaderColumns
from sow_server.engine.values.errors import Reason, StoreError, no_topic
from sow_server.filters import print_filter
from sow_server.filters.parameters import NO_VALUES, Values
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.query.filtering import RecordFilter, callers_filter
from sow_server.query.projection import projection
from sow_server.query.scan import BATCH_RECORDS_MAX, Query, RecordBatch, Scan
from sow_server.subscriptions.frames import SnapshotBatch, SnapshotBegin
from sow_server.subscriptions.request import Snapshot, View

VIEW_NAME_BYTES: Final = 8


class AskedView(NamedTuple):
    """The records and fields that a subscriber asks for."""

    text: str = ""
    """Its filter."""
    given: Values = NO_VALUES
    """The values of the parameters of the filter."""
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()


class TopicFilters:
    """The filter and the projection of one subscriber, topic by topic, joined to its permissions. From any thread."""

    def __init__(
        self,
        cuts: Cuts,
        asked: AskedView,
        batch_size: int,
        part_of: Callable[[Topic], Restriction | None] = lambda topic: UNRESTRICTED,
        *,
        known: bytes = b"",
        held: Callable[[Snapshot, str], Snapshot] | None = None,
        snapshot_max: int = 0,
    ) -> None:
        """`part_of`: the part of a topic that the subscriber may see; None: nothing of it. `known`: the name of
        the view on which its position or its records are; empty: any. `held` leaves the records that it holds out of
        the snapshot of the topic named. `snapshot_max`: the most records of a snapshot; 0: all."""
        self._cuts = cuts
        self._text = asked.text
        self._given = asked.given
        self._include, self._exclude = tuple(asked.include), tuple(asked.exclude)
        self._batch_size = batch_size
        self._part_of = part_of
        self._known = known
        self._held = held
        self._snapshot_max = snapshot_max
        self._filters: dict[tuple[object, ...], RecordFilter | None] = {}
        self._by_key: dict[tuple[tuple[str, ...], Restriction], RecordFilter] = {}
        """The filters by key fields and restriction. A topic may appear later. Its filter is then needed on the event
        loop, where a long one must not be compiled again."""

    def view(self, topic: Topic) -> View:
        """The view of a topic. Raises StoreError: FILTER_INVALID, UNSUPPORTED_FOR_MESSAGE_TYPE, RESYNC_REQUIRED, …"""
        restriction = self._restriction(topic)
        if self._known and self._held is None and self._known != self._name(topic, restriction):
            raise _other_view(
                "the caller may see more or less than before, or the topic treats lifetimes in another way"
            )
        return View(
            self._filter(topic, restriction), projection(topic, self._include, self._exclude, restriction.hidden)
        )

    def name_of_all(self, rights: str) -> bytes:
        """Names what the subscriber sees of all topics that match a pattern. `rights` names what it may see. Raises
        StoreError RESYNC_REQUIRED if its position is on something else."""
        name = blake2b(repr((rights, self._include, self._exclude)).encode(), digest_size=VIEW_NAME_BYTES).digest()
        known, self._known = self._known, b""
        if known not in (b"", name):
            raise _other_view("the caller's grants have changed")
        return name

    def snapshot(self, topic: Topic) -> Snapshot:
        """A snapshot of a topic, planned like a query."""
        restriction = self._restriction(topic)
        name = self._name(topic, restriction)
        held = self._held if self._known == name else None
        query = Query(
            topic,
            filter=self._filter(topic, restriction),
            projection=projection(topic, self._include, self._exclude, restriction.hidden),
            # Most of what is compared is not sent, so each piece is as large as a reader thread may be held.
            batch_size=self._batch_size if held is None else BATCH_RECORDS_MAX,
            top_n=self._snapshot_max + 1 if self._snapshot_max else 0,  # one more tells whether there are more
        )
        whole = PlannedSnapshot(Scan(self._cuts, query), name, records_max=self._snapshot_max)
        return whole if held is None else held(whole, topic.name)

    def filter(self, topic: Topic) -> RecordFilter | None:
        """The filter for a topic; None: all records. Raises StoreError."""
        return self._filter(topic, self._restriction(topic))

    def name(self, topic: Topic) -> bytes:
        """Names the part of a topic that the subscriber may see, and the fields that it asks for."""
        return self._name(topic, self._restriction(topic))

    def permits(self, topic: Topic) -> bool:
        """True if the subscriber may see anything of a topic."""
        return self._part_of(topic) is not None

    def _name(self, topic: Topic, restriction: Restriction) -> bytes:
        """Names what the subscriber sees of a topic, the same at every instance: two views of the same name show the
        same fields of the same records, if their filters are equal."""
        rows = "" if restriction.rows is None else print_filter(restriction.rows)
        parts = rows, restriction.hidden, self._include, self._exclude, topic.acts
        return blake2b(repr(parts).encode(), digest_size=VIEW_NAME_BYTES).digest()

    def _restriction(self, topic: Topic) -> Restriction:
        restriction = self._part_of(topic)
        if restriction is None:
            raise no_topic(topic.name)
        return restriction

    def _filter(self, topic: Topic, restriction: Restriction) -> RecordFilter | None:
        settings = topic.settings
        key = topic.id, settings.key, settings.message_type, settings.separator, restriction
        if key in self._filters:
            return self._filters[key]
        known = self._by_key.get((settings.key, restriction))
        # There is no `now` to give, as NOW_MICROS() is refused.
        found = (
            callers_filter(topic, self._text, restriction, allow_now=False, given=self._given)
            if known is None
            else known.on(topic)
        )
        self._filters[key] = found
        if found is not None:
            self._by_key[settings.key, restriction] = found
        return found


def _other_view(why: str) -> StoreError:
    return StoreError(Reason.RESYNC_REQUIRED, f"view: {why}; take a new snapshot", field="view")


class PlannedSnapshot:
    """A `subscriptions.request.Snapshot` of one topic. Owns the scan."""

    def __init__(self, scan: Scan, name: bytes, *, records_max: int = 0) -> None:
        """`name`: of the subscriber's view. `records_max`: it ends behind so many records; 0: it has all."""
        self._scan: Final = scan
        cut = scan.cut
        self.begin: Final = SnapshotBegin(cut.sequence, cut.now_micros, view=name, expires=cut.acts)
        self.done = False
        self.truncated = False
        self._left = records_max or None

    def read(self) -> SnapshotBatch | None:
        """The next records; None if this step found none that match."""
        batch = self._scan.step()
        if batch is None:
            self.done = True
            return None
        if not batch.keys:
            return None
        assert batch.payloads is not None, "keys alone were not asked for"
        if self._left is not None:
            if len(batch.keys) > self._left:
                self.done = self.truncated = True
                batch = _first(batch, self._left)
            self._left -= len(batch.keys)
            if not batch.keys:
                return None
        assert batch.payloads is not None, "as above"
        return SnapshotBatch(self._scan.query.topic.name, batch.keys, batch.payloads, batch.headers)

    @property
    def waits(self) -> bool:
        """True while others hold the memory that it needs to sort in (rule Q2). To be asked again now and then: it has
        memory taken back from those who do not read."""
        share = self._scan.waits_for
        if share is None or share.when_ready(_nothing):
            return False
        share.memory.take_back()
        return True

    @property
    def absent_fields(self) -> Sequence[str]:
        """The fields of the filter and the projection that no record has (rule Q10). Known once it is done."""
        return self._scan.absent_fields

    def close(self) -> None:
        """Releases the cut."""
        self._scan.close()


def _first(batch: RecordBatch, count: int) -> RecordBatch:
    headers = HeaderColumns(*[column[:count] for column in batch.headers])
    return RecordBatch(batch.keys[:count], None if batch.payloads is None else batch.payloads[:count], headers)


def _nothing() -> None:
    pass
