"""The registry: all durables of the store. The writer's thread changes it (durables [1]); any thread reads it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final, NamedTuple

from sow_peering import Stamp
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.layout import DURABLE_KEY, durable_key, read_durable_key
from sow_server.engine.disk.rocks import META, Rocks
from sow_server.engine.durables.model import Durable, DurableBacklog, DurableFigures, RemovedDurable, not_found
from sow_server.engine.durables.rows import decode_durable
from sow_server.engine.journal.reading import ChunkHeads
from sow_server.engine.journal.retention import JournalBounds, Retention, first_inside
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.model import MICROS, DurableSettings
from sow_server.engine.values.policies import NO_POLICIES, NOTHING, Policies, PolicyTarget, resolve_durable

REMOVED_MICROS: Final = 30 * 86_400 * MICROS
"""How long the name of a removed durable is remembered, so that its client is told when it comes back."""

HeldForPeers = Callable[[ChunkHeads, Topic, StoredStatistics, int], int]
"""The sequence up to which no peer needs the journal of a topic, by its heads, its figures and the time (rule R9)."""


class Durables:
    """Owns the durables in memory, and the settings in force on them."""

    def __init__(
        self,
        rocks: Rocks,
        policies: Callable[[], Policies] = lambda: NO_POLICIES,
        held_for_peers: HeldForPeers = lambda heads, topic, figures, now_micros: figures.last_sequence,
        lost: Callable[[Topic], None] = lambda topic: None,
        *,
        by: str = "",
    ) -> None:
        """`lost`: hears of a topic that has lost a durable. `by`: the id of this instance, for stamps (rule F14)."""
        self.rocks: Final = rocks
        self.by: Final = by
        self._policies = policies
        self.held_for_peers: Final = held_for_peers
        self._topics: dict[int, TopicDurables] = {}
        self._named: Final[Counter[str]] = Counter()
        """The number of durables by the prefix of their name. To count them at each creation takes long (rule A7)."""
        self.retention: Final = Retention()
        self.freed: Final[dict[int, int]] = {}
        """The sequence up to which this process has removed rows of a journal, keyed by topic id."""
        self.lost: Final = lost
        self.dropped = 0
        """How many topics that had durables have been deleted."""
        self.changes = 0
        """The number of the last change of a replicated durable."""
        self._changes: dict[tuple[int, str], int] = {}
        """The number of the last change of each replicated durable, keyed by topic id and name, in rising order."""
        self.discarded: Final[dict[str, int]] = {}
        """Entries let go since the start, by the limit or action that let them go."""
        self._load()

    def _load(self) -> None:
        rows = self.rocks.cursor(META, fill_cache=False)
        try:
            for key, row in rows.rows(DURABLE_KEY, DURABLE_KEY + b"\xff"):
                topic_id, name = read_durable_key(key)
                found = self._of(topic_id)
                durable = decode_durable(topic_id, name, row)
                if isinstance(durable, RemovedDurable):
                    found.removed[name] = durable
                    if durable.buried.number:
                        self._note_change(topic_id, name)
                else:
                    found.rows[name] = durable
                    if durable.declared:
                        found.own[name] = None
                    if durable.replicated:
                        self._note_change(topic_id, name)
        finally:
            rows.close()
        for found in self._topics.values():
            found.order = sorted(durable.order for durable in found.rows.values())
            self._named.update(map(_prefix, found.rows))

    def _of(self, topic_id: int) -> TopicDurables:
        return self._topics.setdefault(topic_id, TopicDurables())

    # -- reading: any thread ----------------------------------------------------------------------------------------

    def find(self, topic: Topic, name: str) -> Durable:
        """Raises StoreError DURABLE_NOT_FOUND."""
        found = self.get(topic.id, name)
        if found is None:
            raise not_found(topic, name)
        return found

    def get(self, topic_id: int, name: str) -> Durable | None:
        """One durable."""
        found = self._topics.get(topic_id)
        return None if found is None else found.rows.get(name)

    def of(self, topic: Topic) -> list[Durable]:
        """The durables of a topic, the slowest first."""
        found = self._topics.get(topic.id)
        if found is None:
            return []
        rows = found.rows
        # A durable that is moved at this moment may be there twice.
        names = dict.fromkeys([name for _, name in list(found.order)])
        return [durable for name in names if (durable := rows.get(name)) is not None]

    def count(self, topic: Topic) -> int:
        """The number of durables of a topic."""
        found = self._topics.get(topic.id)
        return 0 if found is None else len(found.rows)

    def count_owned(self, owner: str) -> int:
        """The number of durables, of all topics, that belong to an identity (rule A7)."""
        return self._named[f"{owner}/"]

    def slowest(self, topic: Topic, passed_over: Collection[str] = ()) -> Durable | None:
        """The durable of a topic that has acknowledged least. `passed_over`: owners whose durables do not count; costs
        in proportion to the number of these."""
        found = self._topics.get(topic.id)
        for _, name in () if found is None else found.order:
            if not passed_over or owner_of(name) not in passed_over:
                return None if found is None else found.rows.get(name)
        return None

    def topic_ids(self) -> list[int]:
        """The topics that have durables."""
        return [topic_id for topic_id, found in list(self._topics.items()) if found.rows]

    def changed_after(self, number: int) -> list[tuple[int, str]]:
        """The replicated durables, and the names of deleted ones, that have changed since a change: topic ids and names
        (rule F14). Under the cut lock; costs in proportion to their number."""
        found: list[tuple[int, str]] = []
        for key, changed in reversed(self._changes.items()):
            if changed <= number:
                break
            found.append(key)
        return found

    def buried(self, topic_id: int, name: str) -> Stamp | None:
        """The time when the deleted durable of a name was born; None: none of it was deleted."""
        found = self._topics.get(topic_id)
        removed = None if found is None else found.removed.get(name)
        return None if removed is None or not removed.buried.number else removed.buried

    def _note_change(self, topic_id: int, name: str) -> None:
        self._changes.pop((topic_id, name), None)  # the last change stands at the end
        self.changes += 1
        self._changes[topic_id, name] = self.changes

    def of_topic(self, topic_id: int) -> TopicDurables | None:
        """The durables of a topic, for the writer's thread; None where there never were any."""
        return self._topics.get(topic_id)

    def settings(self, topic: Topic, durable: Durable) -> DurableSettings:
        """The settings in force on a durable."""
        resolved = self._resolve(topic, self._of(topic.id))
        if resolved.all_shared and not durable.declared:
            return resolved.shared
        found = resolved.own.get(durable.name)
        if found is None:
            found = resolve_durable(topic.settings, topic.name, durable.name, durable.declared, resolved.policies)
            if topic.view is not None:
                found = found._replace(replicated=False)  # rule V9
            resolved.own[durable.name] = found
        return found

    def shares_settings(self, topic: Topic, found: TopicDurables) -> bool:
        """True if all durables of a topic that declare nothing have the same settings."""
        return self._resolve(topic, found).all_shared

    def _resolve(self, topic: Topic, found: TopicDurables) -> _ResolvedSettings:
        resolved, policies = found.resolved, self._policies()
        if resolved is None or resolved.topic_settings is not topic.settings or resolved.policies is not policies:
            shared = resolve_durable(topic.settings, topic.name, "", NOTHING)
            all_shared = not any(policy.target is PolicyTarget.DURABLES for policy in policies)
            resolved = found.resolved = _ResolvedSettings(topic.settings, policies, shared, all_shared, {})
        return resolved

    def backlog(self, topic: Topic, passed_over: Collection[str] = ()) -> DurableBacklog | None:
        """The unacknowledged entries of the slowest durable; None without durables. `passed_over`: as of `slowest`."""
        slowest = self.slowest(topic, passed_over)
        if slowest is None:
            return None
        figures = topic.statistics
        size = max(0, figures.appended_bytes - slowest.bytes)
        entries = max(0, figures.appended_entries - slowest.entries)
        if slowest.position >= figures.last_sequence:
            return DurableBacklog(slowest.name, size, None, entries)
        found = self._of(topic.id)
        known = found.oldest
        if known is not None and known[0] == slowest.position:
            return DurableBacklog(slowest.name, size, known[1], entries)
        oldest = self.oldest(topic, slowest.position)
        if oldest is not None:
            found.oldest = slowest.position, oldest
        return DurableBacklog(slowest.name, size, oldest, entries)

    def oldest(self, topic: Topic, position: int) -> int | None:
        """The commit time of the first entry after a position; None where there is none."""
        if position >= topic.statistics.last_sequence:
            return None
        heads = ChunkHeads(self.rocks)
        try:
            chunk = heads.after(topic, position)
        finally:
            heads.close()
        return None if chunk is None else chunk.commit_time_micros

    def figures(
        self, topic: Topic, durable: Durable, statistics: StoredStatistics, heads: ChunkHeads, now_micros: int
    ) -> DurableFigures:
        """Figures of a durable. All arguments are as of one moment, between two commits."""
        settings = self.settings(topic, durable)
        bounds = JournalBounds(settings.retain_time_micros, settings.retain_bytes)
        inside = first_inside(heads, topic, statistics, bounds, now_micros)
        earliest = max(min(durable.position, inside - 1), durable.floor, first_position(statistics))
        from_ = heads.counts(topic, statistics, earliest)
        oldest = heads.after(topic, durable.position) if durable.position < statistics.last_sequence else None
        return DurableFigures(
            earliest,
            statistics.appended_entries - from_.entries,
            statistics.appended_bytes - from_.bytes,
            statistics.appended_entries - durable.entries,
            statistics.appended_bytes - durable.bytes,
            None if oldest is None else oldest.commit_time_micros,
        )

    # -- changing: the writer's thread ------------------------------------------------------------------------------

    def stage_drop(self, draft: Draft, topic: Topic) -> None:
        """Puts the end of all durables of a topic into the commit that deletes the topic (rule T5)."""
        key = DURABLE_KEY + topic.prefix
        draft.batch.ranges.append((META, key, DURABLE_KEY + topic.stop))

        def apply() -> None:
            gone = self._topics.pop(topic.id, None)
            if gone is not None:
                self.dropped += 1
                self._named.subtract(map(_prefix, gone.rows))
            self.freed.pop(topic.id, None)
            self._changes = {key: number for key, number in self._changes.items() if key[0] != topic.id}
            self.retention.forget(topic.id)

        draft.on_commit.append(apply)

    def forget_removed(self, draft: Draft) -> None:
        """Forgets the names of durables that were removed long ago."""
        cut = draft.now - REMOVED_MICROS
        for topic_id, found in list(self._topics.items()):
            for name in [name for name, removed in found.removed.items() if removed.removed_micros <= cut]:
                draft.batch.deletes[META].append(durable_key(topic_id, name))
                draft.on_commit.append(partial(found.removed.pop, name, None))
                draft.on_commit.append(partial(self._changes.pop, (topic_id, name), None))

    def take_over(self, changed: Iterable[Durable], removed: Iterable[tuple[int, str, RemovedDurable]]) -> None:
        """Takes over a commit's durables after its write. `removed`: with topic id and name."""
        for topic_id, name, gone in removed:
            found = self._of(topic_id)
            if name in found.rows:
                self._named.subtract([_prefix(name)])
            found.remove(name, gone)
            if gone.buried.number or (topic_id, name) in self._changes:
                self._note_change(topic_id, name)
        for durable in changed:
            found = self._of(durable.topic_id)
            if durable.name not in found.rows:
                self._named.update([_prefix(durable.name)])
            found.put(durable)
            if durable.replicated:
                self._note_change(durable.topic_id, durable.name)

    def count_discarded(self, reason: str, entries: int) -> None:
        """Counts entries that were let go."""
        if entries > 0:
            self.discarded[reason] = self.discarded.get(reason, 0) + entries


class TopicDurables:
    """The durables of one topic."""

    __slots__ = ("oldest", "order", "own", "removed", "resolved", "rows")

    def __init__(self) -> None:
        self.rows: dict[str, Durable] = {}
        self.order: list[tuple[int, str]] = []
        """The slowest first."""
        self.own: dict[str, None] = {}
        """The durables that declare settings."""
        self.removed: dict[str, RemovedDurable] = {}
        self.resolved: _ResolvedSettings | None = None
        self.oldest: tuple[int, int] | None = None
        """A position, and the commit time of the first entry after it."""

    def put(self, durable: Durable) -> None:
        """Adds or replaces a durable."""
        # It is replaced, not taken out and put in again: readers on other threads find it at every moment.
        before = self.rows.get(durable.name)
        self.rows[durable.name] = durable
        if before is None or before.order != durable.order:
            insort(self.order, durable.order)
            if before is not None:
                del self.order[bisect_left(self.order, before.order)]
        if durable.declared:
            self.own[durable.name] = None
        else:
            self.own.pop(durable.name, None)
        if self.resolved is not None and (before is None or before.declared != durable.declared):
            self.resolved.own.pop(durable.name, None)
        self.removed.pop(durable.name, None)

    def remove(self, name: str, removed: RemovedDurable) -> None:
        """Removes a durable, and remembers that."""
        before = self.rows.pop(name, None)
        if before is not None:
            del self.order[bisect_left(self.order, before.order)]
            self.own.pop(name, None)
            if self.resolved is not None:
                self.resolved.own.pop(name, None)
        self.removed[name] = removed


class _ResolvedSettings(NamedTuple):
    """Settings in force on the durables of a topic, for these settings of the topic and these policies."""

    topic_settings: object
    policies: Policies
    shared: DurableSettings
    """The settings of durables that nothing of their own applies to."""
    all_shared: bool
    own: dict[str, DurableSettings]


def owner_of(name: str) -> str:
    """The owner of a durable, by its stored name; empty where it has none."""
    return name.rpartition("/")[0]


def _prefix(name: str) -> str:
    """The owner of a durable, up to the slash; empty where it has none."""
    owner, slash, _ = name.rpartition("/")
    return owner + slash


def first_position(figures: StoredStatistics) -> int:
    """The position in front of the first retained entry of a topic."""
    return max(figures.floor_sequence, figures.created_sequence)
