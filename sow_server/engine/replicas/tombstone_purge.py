"""Tombstones: their purge in the order of creation, and the purge marks of topics (replicas [4])."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from sow_peering import MergeCounts, Purged
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import MADE_ORDER, MADE_SEQUENCE, MADE_STORE_KEY, Tombstone, decode_tombstone
from sow_server.engine.disk.rocks import TOMBSTONES
from sow_server.engine.pending import Pending
from sow_server.engine.replicas.peers import Peers
from sow_server.engine.replicas.sources import Sources
from sow_server.engine.stored import TOPIC, unpack_i64, unpack_u32

PURGE_MAX: Final = 1000
PURGE_VISITS_MAX: Final = 20_000
"""Tombstones that one step of purging visits at most, if few of them can be purged."""
MADE_END: Final = MADE_ORDER + b"\xff" * 8


class Tombstones:
    """Purges tombstones, and knows how far they were purged."""

    def __init__(self, core: Core, peers: Peers, sources: Sources) -> None:
        self.rocks: Final = core.rocks
        self.topics: Final = core.topics
        self.origins: Final = core.origins
        self.peers: Final = peers
        self.sources: Final = sources
        self._commits = core.commits
        self.purge_from = MADE_ORDER
        """The key at which the next step of purging continues."""
        self.purged_total = 0

    def purged(self, topic: Topic) -> Purged:
        """The purge mark of a topic."""
        figures = topic.statistics
        if not figures.purged_version:
            return Purged()
        return Purged(figures.purged_version, self.origins.names[figures.purged_origin])

    def purge(
        self, upto: int, *, held: Collection[str], made_before_micros: int, unread: Collection[str]
    ) -> Pending[MergeCounts]:
        """Removes a bounded number of the oldest tombstones. A tombstone is purged if its sequence is at or below
        `upto` and its topic is not `held`, or if it was made before a time, whatever peers have. In the latter case
        changes of the sources `unread` are refused until they have acknowledged this commit (replicas [4]). Answers
        the number removed."""
        return self._commits.run(PurgeTombstones(self, upto, held, made_before_micros, unread))

    def stage_refound(self, draft: Draft, topic: Topic) -> None:
        """A topic accepts records of another kind from this commit on. Its tombstones, including those of this commit,
        belong to other records, whatever their keys. They count until their turn to be purged."""
        draft.batch.ranges.append((TOMBSTONES, topic.prefix, topic.stop))
        left = draft.batch.puts[TOMBSTONES]
        for store_key in [key for key in left if key.startswith(topic.prefix)]:
            del left[store_key]
        draft.statistics[topic.id] = draft.figures(topic)._replace(purged_version=0, purged_origin=0)


class PurgeTombstones:
    """The step that purges a bounded number of tombstones."""

    def __init__(
        self,
        tombstones: Tombstones,
        upto: int,
        held: Collection[str],
        made_before_micros: int,
        unread: Collection[str],
    ) -> None:
        self._tombstones = tombstones
        self._upto = upto
        self._held = held
        self._made_before_micros = made_before_micros
        self._unread = unread
        self._following: bytes | None = None
        self._gone = 0

    def stage(self, draft: Draft) -> None:
        """Removes tombstones, and marks the peers and sources that miss some of them."""
        owner = self._tombstones
        cursor = owner.rocks.cursor(TOMBSTONES, fill_cache=False)
        purge = PurgedTombstones(
            draft, owner.topics.by_id, owner.origins.names, self._upto, self._held, self._made_before_micros
        )
        start: bytes | None = owner.purge_from
        visited = 0
        try:
            while start is not None and purge.gone < PURGE_MAX and visited < PURGE_VISITS_MAX:
                rows: list[bytes] = []
                start = cursor.fill_keys_before(start, MADE_END, PURGE_MAX, rows)
                visited += len(rows)
                dead = owner.rocks.multi_get(TOMBSTONES, [row[MADE_STORE_KEY] for row in rows])
                if not purge.stage_rows(rows, dead):
                    start = None
        finally:
            cursor.close()
        if purge.missed:
            owner.peers.stage_missed(draft, purge.missed, by_all=purge.by_all)
            owner.sources.stage_waits(draft, self._unread)
        self._following, self._gone = start, purge.gone

    def committed(self) -> MergeCounts:
        """The next step continues after this one."""
        self._tombstones.purge_from = self._following or MADE_ORDER
        self._tombstones.purged_total += self._gone
        return MergeCounts(applied=self._gone)


class PurgedTombstones:
    """The tombstones that one step purges, visited in the order of creation."""

    def __init__(
        self,
        draft: Draft,
        topics: Mapping[int, Topic],
        names: Sequence[str],
        upto: int,
        held: Collection[str],
        made_before_micros: int,
    ) -> None:
        self._draft = draft
        self._topics = topics
        self._names = names
        self._upto = upto
        self._held = held
        self._made_before = made_before_micros
        self.gone = 0
        self.missed = 0
        """The highest sequence of tombstones purged by age alone; 0: none."""
        self.by_all = False
        """True if a tombstone of a held topic is purged by age: no peer is known to have it."""

    def stage_rows(self, rows: Sequence[bytes], found: Sequence[bytes | None]) -> bool:
        """Visits some tombstones: their rows in the order of creation, and the values under their keys. False: no later
        one can be purged."""
        for row, value in zip(rows, found, strict=True):
            sequence, store_key = unpack_i64(row[MADE_SEQUENCE]), row[MADE_STORE_KEY]
            topic = self._topics.get(unpack_u32(store_key[TOPIC]))
            tombstone = None if value is None else decode_tombstone(value)
            if tombstone is None or tombstone.sequence != sequence:
                self._remove(topic, row, store_key, None)  # removed with its topic, or a later one has replaced it
                continue
            held = topic is not None and topic.name in self._held
            if sequence > self._upto or held:
                if tombstone.made_micros >= self._made_before:
                    if sequence > self._upto:
                        return False
                    continue
                self.missed, self.by_all = sequence, self.by_all or held
            self._remove(topic, row, store_key, tombstone)
        return True

    def _remove(self, topic: Topic | None, row: bytes, store_key: bytes, tombstone: Tombstone | None) -> None:
        draft = self._draft
        self.gone += 1
        draft.batch.deletes[TOMBSTONES].append(row)
        if topic is None:
            return
        figures = draft.figures(topic)
        figures = figures._replace(tombstones=max(0, figures.tombstones - 1))
        if tombstone is not None:
            draft.batch.deletes[TOMBSTONES].append(store_key)
            before = figures.purged_version, self._names[figures.purged_origin]
            if (tombstone.version, self._names[tombstone.origin]) > before:
                figures = figures._replace(purged_version=tombstone.version, purged_origin=tombstone.origin)
        draft.statistics[topic.id] = figures
