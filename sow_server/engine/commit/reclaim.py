"""Decides which key ranges to compact, so that removed data give their disk space back (rule L17).

By itself RocksDB merges files when enough was written, not when enough was removed. So removals are counted here, and
the ranges of keys in which they took place are compacted once that pays.

    [1]  A compaction costs in proportion to the removals, apart from the rest of the files that it touches. Records and
         index entries of a topic, or its tombstones, are rewritten only if at least as many were removed as are stored
         now. Of loads only the staged rows that were removed are compacted. Of the journal, the commits, the expiry
         index and the order of tombstones only the part behind the floor is compacted.
    [2]  A compaction proceeds part by part, and may be given up after each. Removals from places of a kind stay counted
         until all ranges of these places have been compacted.
    [3]  The counts begin with the process. Earlier removals are left to RocksDB, or to the next compaction of their
         place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.layout import MADE_ORDER
from sow_server.engine.disk.rocks import COMMITS, EXPIRY, INDEXES, JOURNAL, RECORDS, STAGING, TOMBSTONES, VIEWS
from sow_server.engine.stored import i64, u32

RECLAIM_RECORDS: Final = 200_000
"""Removed records, or changes of the journal, from which on compacting is worth it, unless set otherwise."""


class Place(NamedTuple):
    """A place of removals: records with their index entries, and the rows of a view, under RECORDS, or TOMBSTONES,
    JOURNAL, EXPIRY, STAGING."""

    family: str
    topic_id: int
    """0 for the expiry index, which mixes the topics. For STAGING the load."""


SWEPT: Final = Place(EXPIRY, 0)


Ranges = list[tuple[bytes, bytes]]
"""Keys of a column family: from (included) and to (excluded)."""


class Task(NamedTuple):
    """The ranges to compact, by column family, after many removals from places of one kind."""

    removed: Mapping[Place, int]
    ranges: Mapping[str, Ranges]


class Removals:
    """Owns the counts. Used under the writer's cut lock."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Place, int] = {}

    def count(self, draft: Draft, topics: Mapping[int, Topic]) -> None:
        """Counts the removals of a commit. Called before the figures of its topics are updated."""
        for (family, number), removed in draft.removals.items():
            self._add(Place(family, number), removed)
        for topic_id, figures in draft.statistics.items():
            topic = topics.get(topic_id)
            if topic is not None:
                before = topic.statistics
                if trimmed := figures.trimmed_entries - before.trimmed_entries:
                    self._add(Place(JOURNAL, topic_id), trimmed)
                if figures.tombstones < before.tombstones:
                    self._add(Place(TOMBSTONES, topic_id), before.tombstones - figures.tombstones)
        for topic in draft.dropped:
            self._add(Place(RECORDS, topic.id), topic.statistics.records)
            self._add(Place(JOURNAL, topic.id), topic.statistics.journal_entries)
            self._add(Place(TOMBSTONES, topic.id), topic.statistics.tombstones)
        if draft.expire_times:
            self._add(SWEPT, len(draft.expire_times))

    def counts(self) -> Mapping[Place, int]:
        """The removals of each place since its last compaction; a copy."""
        return self._counts.copy()

    def compacted(self, task: Task) -> None:
        """All ranges of a task have been compacted. Removals since the task was made still count ([2])."""
        for place, removed in task.removed.items():
            self._counts[place] -= removed
            if not self._counts[place]:
                del self._counts[place]

    def _add(self, place: Place, removed: int) -> None:
        if removed:
            self._counts[place] = self._counts.get(place, 0) + removed


def deserving(
    counts: Mapping[Place, int],
    topics: Mapping[int, Topic],
    sweep_floor: bytes,
    first_commit: bytes,
    first_tombstone: bytes,
    at_least: int,
) -> list[Task]:
    """The compactions that pay ([1]). The places of a kind are left alone while fewer than `at_least` records,
    tombstones, changes of the journal or expiry entries in all were removed from the deserving ones among them."""
    removed: dict[str, dict[Place, int]] = {RECORDS: {}, TOMBSTONES: {}, JOURNAL: {}, EXPIRY: {}, STAGING: {}}
    records: Ranges = []
    views: Ranges = []
    # `first_tombstone`: the oldest one left, in the order of creation; the ones before it were purged.
    tombstones: Ranges = [(MADE_ORDER, first_tombstone)] if first_tombstone > MADE_ORDER else []
    journal: Ranges = []
    staging: Ranges = []
    for place, count in counts.items():
        topic = topics.get(place.topic_id)
        prefix, stop = u32(place.topic_id), u32(place.topic_id + 1)
        if place.family == RECORDS:
            if topic is not None and count < topic.statistics.records:
                continue
            records.append((prefix, stop))
            if topic is not None and topic.view is not None:
                views.append((prefix, stop))
        elif place.family == TOMBSTONES:
            if topic is not None and count < topic.statistics.tombstones:
                continue
            tombstones.append((prefix, stop))
        elif place.family == JOURNAL:
            # Of a topic that was deleted everything is behind the floor.
            journal.append((prefix, stop if topic is None else prefix + i64(topic.statistics.floor_sequence + 1)))
        elif place.family == STAGING:
            staging.append((prefix, stop))  # a load loses all of its rows at once, and its number is not used again
        removed[place.family][place] = count
    tasks = (
        Task(removed[RECORDS], {RECORDS: records, INDEXES: records} | ({VIEWS: views} if views else {})),
        Task(removed[TOMBSTONES], {TOMBSTONES: tombstones}),
        # Commits are pruned once all topics have let go of them.
        Task(removed[JOURNAL], {JOURNAL: journal, COMMITS: [(b"", first_commit)]}),
        Task(removed[STAGING], {STAGING: staging}),
        Task(removed[EXPIRY], {EXPIRY: [(b"", sweep_floor)]}),
    )
    return [task for task in tasks if task.removed and sum(task.removed.values()) >= at_least]
