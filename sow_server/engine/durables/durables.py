"""Durable subscriptions: how far each has acknowledged its topic, and what of the journal is therefore kept (rules J2
to J10, J15).

    DU1  A row changes in the commit of what changes it, by the writer's thread alone; the registry follows after the
         write, under the cut lock.
    DU2  A topic's floor is the highest of the hard limits, and of what neither the topic's retention nor any durable
         holds. A durable holds what it has not acknowledged, and what its own retention covers.
    DU3  The floor rises in the commit that lets go: of an acknowledgement, a clearing, a deletion. What only time lets
         go is noticed by pruning; until then it is there, but outside every durable's readable range.
    DU4  Whatever a durable has not handed over and will not is told in a gap, which stays in its row until its consumer
         has acknowledged beyond it.
    DU5  How often an entry was handed over is known by where sessions ended that began at or before the acknowledged
         position: of entries after it, none was handed over more often than one in front of it. So it is a short list
         of steps, which is written when a consumer attaches or leaves, and not for each delivery (rule J15).

What filters mean is not known here: a filter is text. Who is attached is the business of `subscriptions.consumers`; a
row only remembers that somebody was, so that a crash is not taken for idleness.
"""

from __future__ import annotations

import enum
import json
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.layout import DURABLE_KEY, StoredStatistics, durable_key
from sow_server.engine.disk.rocks import JOURNAL, META, Rocks, RocksError
from sow_server.engine.journal.chunks import NO_BOUNDS, Bounds, Heads, Retention, beyond_entries, first_inside
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import TOPIC_NAME
from sow_server.engine.values.model import MICROS, BacklogAction, DurableSettings
from sow_server.engine.values.policies import (
    NO_POLICIES,
    NOTHING,
    Declared,
    Policies,
    PolicyTarget,
    check_durable_settings,
    resolve_durable,
)

log = structlog.get_logger(__name__)

REMOVED_MICROS: Final = 30 * 86_400 * MICROS
"""How long the name of a removed durable is remembered, so that its client is told when it comes back."""
GAPS_MAX: Final = 32
"""Gaps that are kept apart in one row; beyond, the newest are told as one."""
STEPS_MAX: Final = 16
"""Steps of deliveries that are kept of one durable; beyond, those of the fewest deliveries are told as one."""
EVICT_PARTS: Final = 10
"""Evicting goes on until a tenth of the quota is free."""


class GapReason(enum.IntEnum):
    """Why entries are missing; numbered as in `sow.v1.GapReason`."""

    DISCARDED = 1
    EVICTED = 2
    CONFLATED = 3
    BACKLOG_TTL = 4
    DELIVERY_LIMIT = 5


class Gap(NamedTuple):
    """Entries after `after`, up to `upto`, that are not handed over. `entries`: how many, before filtering."""

    reason: GapReason
    after: int
    upto: int
    entries: int


class Delivered(NamedTuple):
    """Entries up to here, and after the step in front of it, were handed over so many times."""

    upto: int
    times: int


class Durable(NamedTuple):
    """One durable subscription, as its row says.

    Everything up to `position` is acknowledged; `entries` and `bytes` are what was ever journaled of its topic up to
    there. What is at or below `floor` is gone for it, though a longer retention set since would cover it. `deliveries`
    has what earlier sessions handed over (DU5); `handed` is up to where the last one has, once it has ended.
    """

    topic_id: int
    name: str
    filter: str
    position: int
    entries: int
    bytes: int
    create_time_micros: int
    last_use_micros: int
    attached: bool = False
    floor: int = 0
    gaps: tuple[Gap, ...] = ()
    declared: Declared = NOTHING
    handed: int = 0
    deliveries: tuple[Delivered, ...] = ()
    set_aside: int = 0
    """Entries that were set aside for the delivery limit."""

    def delivered(self, sequence: int) -> int:
        """How often earlier sessions have handed over an entry that is not acknowledged."""
        return delivered(self.deliveries, sequence)

    @property
    def order(self) -> tuple[int, str]:
        """Sorts the slowest first."""
        return self.position, self.name


@dataclass(frozen=True, slots=True)
class Figures:
    """What a durable can read (rule J7), before filtering. `oldest_micros`: the commit time of the first entry that is
    not acknowledged; None: there is none. `earliest`: the position that it can be rewound to."""

    earliest: int
    total_entries: int
    total_bytes: int
    unacknowledged_entries: int
    unacknowledged_bytes: int
    oldest_micros: int | None


class Backlog(NamedTuple):
    """What the slowest durable of a topic leaves unacknowledged (rule J9)."""

    name: str
    bytes: int
    oldest_micros: int | None
    entries: int


class Attached(NamedTuple):
    """What a consumer is told that attaches."""

    durable: Durable
    created: bool
    reset: bool


class Cleared(NamedTuple):
    """What a clearing did."""

    durables: tuple[str, ...]
    entries: int


class RewindTo(NamedTuple):
    """Where to; both None: the earliest."""

    position: int | None = None
    time_micros: int | None = None


class _OfTopic:
    """The durables of one topic."""

    __slots__ = ("oldest", "order", "own", "removed", "resolved", "rows")

    def __init__(self) -> None:
        self.rows: dict[str, Durable] = {}
        self.order: list[tuple[int, str]] = []
        """The slowest first."""
        self.own: dict[str, None] = {}
        """Those that have settings of their own."""
        self.removed: dict[str, int] = {}
        """When those that are gone were removed."""
        self.resolved: _Resolved | None = None
        self.oldest: tuple[int, int] | None = None
        """A position, and the commit time of the first entry after it."""

    def put(self, durable: Durable) -> None:
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

    def drop(self, name: str) -> None:
        before = self.rows.pop(name, None)
        if before is not None:
            del self.order[bisect_left(self.order, before.order)]
            self.own.pop(name, None)
            if self.resolved is not None:
                self.resolved.own.pop(name, None)


class _Resolved(NamedTuple):
    """Settings in force on the durables of a topic, for these settings of the topic and these policies."""

    topic_settings: object
    policies: Policies
    shared: DurableSettings
    """On those that nothing of their own applies to."""
    all_shared: bool
    own: dict[str, DurableSettings]


HeldForPeers = Callable[[Heads, Topic, StoredStatistics, int], int]
"""Up to which sequence no peer needs the journal of a topic, by its heads and figures and the time (rule R9)."""


class Durables:
    """The registry: all durables of the store. Changed by the writer's thread, read by any."""

    def __init__(
        self,
        rocks: Rocks,
        policies: Callable[[], Policies] = lambda: NO_POLICIES,
        held_for_peers: HeldForPeers = lambda heads, topic, figures, now_micros: figures.last_sequence,
        lost: Callable[[Topic], None] = lambda topic: None,
    ) -> None:
        """`lost`: hears of a topic that has lost a durable."""
        self._rocks = rocks
        self._policies = policies
        self.held_for_peers = held_for_peers
        self._topics: dict[int, _OfTopic] = {}
        self.retention: Final = Retention()
        self._freed: dict[int, int] = {}
        """By topic: up to where rows of its journal have been removed by this process."""
        self.lost: Final = lost
        self.dropped = 0
        """How many topics that had durables have been deleted."""
        self.discarded: Final[dict[str, int]] = {}
        """Entries let go since the start, by what let go."""
        self._load()

    def _load(self) -> None:
        rows = self._rocks.cursor(META, fill_cache=False)
        try:
            for key, value in rows.rows(DURABLE_KEY, DURABLE_KEY + b"\xff"):
                at = len(DURABLE_KEY)
                topic_id, name = int.from_bytes(key[at : at + 4], "big"), key[at + 4 :].decode()
                found = self._of(topic_id)
                fields = json.loads(value)
                if "removed" in fields:
                    found.removed[name] = fields["removed"]
                else:
                    durable = found.rows[name] = _decode(topic_id, name, fields)
                    if durable.declared:
                        found.own[name] = None
        finally:
            rows.close()
        for found in self._topics.values():
            found.order = sorted(durable.order for durable in found.rows.values())

    def _of(self, topic_id: int) -> _OfTopic:
        return self._topics.setdefault(topic_id, _OfTopic())

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
        # One that is moved at this moment may be there twice.
        names = dict.fromkeys([name for _, name in list(found.order)])
        return [durable for name in names if (durable := rows.get(name)) is not None]

    def count(self, topic: Topic) -> int:
        """Durables of a topic."""
        found = self._topics.get(topic.id)
        return 0 if found is None else len(found.rows)

    def slowest(self, topic: Topic) -> Durable | None:
        """The durable of a topic that has acknowledged least."""
        found = self._topics.get(topic.id)
        if found is None:
            return None
        for _, name in found.order[:1]:
            return found.rows.get(name)
        return None

    def topic_ids(self) -> list[int]:
        """The topics that have durables."""
        return [topic_id for topic_id, found in list(self._topics.items()) if found.rows]

    def settings(self, topic: Topic, durable: Durable) -> DurableSettings:
        """What is in force on a durable."""
        resolved = self._resolve(topic, self._of(topic.id))
        if resolved.all_shared and not durable.declared:
            return resolved.shared
        found = resolved.own.get(durable.name)
        if found is None:
            found = resolve_durable(topic.settings, topic.name, durable.name, durable.declared, resolved.policies)
            resolved.own[durable.name] = found
        return found

    def _resolve(self, topic: Topic, found: _OfTopic) -> _Resolved:
        resolved, policies = found.resolved, self._policies()
        if resolved is None or resolved.topic_settings is not topic.settings or resolved.policies is not policies:
            shared = resolve_durable(topic.settings, topic.name, "", NOTHING)
            alone = not any(policy.target is PolicyTarget.DURABLES for policy in policies)
            resolved = found.resolved = _Resolved(topic.settings, policies, shared, alone, {})
        return resolved

    def backlog(self, topic: Topic) -> Backlog | None:
        """What the slowest durable leaves unacknowledged; None without durables."""
        slowest = self.slowest(topic)
        if slowest is None:
            return None
        figures = topic.statistics
        size = max(0, figures.appended_bytes - slowest.bytes)
        entries = max(0, figures.appended_entries - slowest.entries)
        if slowest.position >= figures.last_sequence:
            return Backlog(slowest.name, size, None, entries)
        found = self._of(topic.id)
        known = found.oldest
        if known is not None and known[0] == slowest.position:
            return Backlog(slowest.name, size, known[1], entries)
        oldest = self.oldest(topic, slowest.position)
        if oldest is not None:
            found.oldest = slowest.position, oldest
        return Backlog(slowest.name, size, oldest, entries)

    def oldest(self, topic: Topic, position: int) -> int | None:
        """The commit time of the first entry after a position; None: there is none."""
        if position >= topic.statistics.last_sequence:
            return None
        heads = Heads(self._rocks)
        try:
            chunk = heads.after(topic, position)
        finally:
            heads.close()
        return None if chunk is None else chunk.commit_time_micros

    def figures(
        self, topic: Topic, durable: Durable, statistics: StoredStatistics, heads: Heads, now_micros: int
    ) -> Figures:
        """Figures of a durable; all of it as of one moment, between two commits."""
        settings = self.settings(topic, durable)
        bounds = Bounds(settings.retain_time_micros, settings.retain_bytes)
        inside = first_inside(heads, topic, statistics, bounds, now_micros)
        earliest = max(min(durable.position, inside - 1), durable.floor, _floor(statistics))
        from_ = heads.counts(topic, statistics, earliest)
        oldest = heads.after(topic, durable.position) if durable.position < statistics.last_sequence else None
        return Figures(
            earliest,
            statistics.appended_entries - from_.entries,
            statistics.appended_bytes - from_.bytes,
            statistics.appended_entries - durable.entries,
            statistics.appended_bytes - durable.bytes,
            None if oldest is None else oldest.commit_time_micros,
        )

    # -- changing: the writer's thread, on a draft ------------------------------------------------------------------

    def stage(self, draft: Draft, topics: Mapping[int, Topic]) -> DurableStage:
        """Begins to change durables in a commit. Close what this returns by leaving its `with`."""
        return DurableStage(self, self._rocks, draft, topics)

    def stage_drop(self, draft: Draft, topic: Topic) -> None:
        """The topic is deleted with its durables (rule T5)."""
        key = DURABLE_KEY + topic.prefix
        draft.batch.ranges.append((META, key, DURABLE_KEY + topic.stop))

        def apply() -> None:
            self.dropped += self._topics.pop(topic.id, None) is not None
            self._freed.pop(topic.id, None)
            self.retention.forget(topic.id)

        draft.also.append(apply)

    def forget_removed(self, draft: Draft) -> None:
        """Names that were removed long ago are forgotten."""
        cut = draft.now - REMOVED_MICROS
        for topic_id, found in list(self._topics.items()):
            for name in [name for name, when in found.removed.items() if when <= cut]:
                draft.batch.deletes[META].append(durable_key(topic_id, name))
                draft.also.append(partial(found.removed.pop, name, None))

    def _apply(self, changed: Iterable[Durable], removed: Iterable[tuple[int, str, int]]) -> None:
        for topic_id, name, when in removed:
            found = self._of(topic_id)
            found.drop(name)
            found.removed[name] = when
        for durable in changed:
            self._of(durable.topic_id).put(durable)

    def _count(self, reason: str, entries: int) -> None:
        if entries > 0:
            self.discarded[reason] = self.discarded.get(reason, 0) + entries


class DurableStage:
    """What one commit does to durables. Use as a context: its end puts the rows, and the floors that follow."""

    def __init__(self, durables: Durables, rocks: Rocks, draft: Draft, topics: Mapping[int, Topic]) -> None:
        """Use `Durables.stage`."""
        self._durables = durables
        self._rocks = rocks
        self._draft = draft
        self._topics = topics
        self._heads = Heads(rocks)
        self._changed: dict[tuple[int, str], Durable] = {}
        self._removed: dict[tuple[int, str], int] = {}
        self._let_go: dict[int, Topic] = {}
        """Topics of which less may be held than before."""
        self._discarded: list[tuple[str, int]] = []
        self.now: Final = draft.now

    def __enter__(self) -> DurableStage:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._heads.close()

    # -- one durable ------------------------------------------------------------------------------------------------

    def get(self, topic: Topic, name: str) -> Durable | None:
        """A durable as this commit leaves it."""
        key = topic.id, name
        if key in self._removed:
            return None
        return self._changed.get(key) or self._durables.get(topic.id, name)

    def all_of(self, topic: Topic) -> Iterator[Durable]:
        """The durables of a topic as this commit leaves them, in the order before it; those that it has created left
        out."""
        of = self._durables._topics.get(topic.id)
        for _, name in [] if of is None else of.order:
            found = self.get(topic, name)
            if found is not None:
                yield found

    def attach(
        self,
        topic: Topic,
        name: str,
        *,
        filter_text: str,
        start: int | None,
        declared: Declared | None,
        expected: bool,
        bookmarked: bool = False,
        handed: int = 0,
    ) -> Attached:
        """Somebody consumes it from here on; it is made if need be, at `start`, None for now (rules J2, J10), which was
        asked for by a bookmark if `bookmarked`: then all that follows it must be there. `expected`: it is the consumer
        that was there before, so what it was handed it still has. `handed`: up to where one that was taken over was
        handed entries.

        Raises StoreError: NO_JOURNAL, DURABLE_DIFFERS, BOOKMARK_TOO_OLD, INVALID_ARGUMENT.
        """
        if not TOPIC_NAME.match(name):
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"durable.name: {name[:220]!r} is no name of a durable: 1 to 200 of [A-Za-z0-9_.:-] are allowed",
                field="durable.name",
            )
        if not topic.settings.journal:
            raise StoreError(
                Reason.NO_JOURNAL, f"topic: {topic.name} has no journal, so it has no durables", field="topic"
            )
        self._keep_limits(topic)
        if declared:
            check_durable_settings(declared, where="durable.settings")
        found = self.get(topic, name)
        if found is not None:
            check_same(topic, found, filter_text, declared)
            handed = max(found.handed, handed)
            attached = found._replace(attached=True, last_use_micros=self.now, handed=handed)
            if not expected:
                attached = attached._replace(handed=0, deliveries=_again(found, handed))
            self._put(attached)
            return Attached(attached, created=False, reset=False)
        figures = self._figures(topic)
        last = self._draft.next_sequence - 1
        position = last if start is None else max(start, _floor(figures))
        if bookmarked and start is not None and start < position:
            raise StoreError(
                Reason.BOOKMARK_TOO_OLD,
                f"bookmark: names the sequence {start}, and the journal of {topic.name} begins at {position + 1}",
                field="bookmark",
                details={"earliest_sequence": str(position + 1)},
            )
        entries, size = self._heads.counts(topic, figures, position)
        made = Durable(
            topic.id,
            name,
            filter_text,
            position,
            entries,
            size,
            self.now,
            self.now,
            attached=True,
            declared=NOTHING if declared is None else declared,
        )
        self._put(made)
        gone = (topic.id, name) in self._removed or name in self._durables._of(topic.id).removed
        self._removed.pop((topic.id, name), None)
        return Attached(made, created=True, reset=gone or expected)

    def pin(self, topic: Topic, name: str, position: int, declared: Declared) -> tuple[Durable, bool]:
        """Keeps what comes after a position, for nobody to consume: makes the durable, or acknowledges that far on it,
        never back; whether it was made. Either is a use of it (rule J10). `declared` counts when it is made.

        Raises StoreError: as `attach`, and DURABLE_IN_USE.
        """
        found = self.get(topic, name)
        if found is not None and topic.settings.journal:
            check_same(topic, found, "", None)
            if found.attached:
                raise in_use(topic, name)
            moved = self.acknowledge(topic, name, position, told=position)
            assert moved is not None, "it is there"
            return moved, False
        made = self.attach(
            topic, name, filter_text="", start=position, declared=declared, expected=False, bookmarked=True
        ).durable._replace(attached=False)
        self._put(made)
        return made, True

    def detach(self, topic: Topic, name: str, handed: int = 0) -> None:
        """Nobody consumes it any more; its consumer was handed entries up to `handed`."""
        found = self.get(topic, name)
        if found is not None:
            self._put(found._replace(attached=False, last_use_micros=self.now, handed=max(found.handed, handed)))

    def use(self, topic: Topic, name: str) -> None:
        """It is in use: its consumer is there, though it has nothing to acknowledge."""
        found = self.get(topic, name)
        if found is not None:
            self._put(found._replace(last_use_micros=self.now))

    def acknowledge(self, topic: Topic, name: str, position: int, *, told: int = 0) -> Durable | None:
        """Everything up to `position` is acknowledged; gaps up to `told` have been, too. None: it is gone."""
        found = self.get(topic, name)
        if found is None:
            return None
        gaps = tuple([gap for gap in found.gaps if gap.upto > told])
        moved = self._moved(topic, found, max(position, found.position))._replace(gaps=gaps, last_use_micros=self.now)
        self._put(moved)
        return moved

    def follow(self, topic: Topic, name: str, before: int, position: int) -> bool:
        """Its position follows what was scanned and left out by its filter, if it is still where the scan began."""
        found = self.get(topic, name)
        if found is None or found.position != before or position <= before:
            return False
        self._put(self._moved(topic, found, position))
        return True

    def rewind(self, topic: Topic, name: str, to: RewindTo) -> tuple[Durable, int]:
        """Moves it back (rule J6); returns it and its unacknowledged entries. Raises StoreError: DURABLE_NOT_FOUND,
        BOOKMARK_TOO_OLD, INVALID_ARGUMENT for a position ahead of it."""
        self._keep_limits(topic)
        found = self.get(topic, name)
        if found is None:
            raise not_found(topic, name)
        figures = self._figures(topic)
        earliest = self.earliest(topic, found)
        if to.position is not None:
            position = to.position
            if position > found.position:
                raise StoreError(
                    Reason.INVALID_ARGUMENT,
                    f"bookmark: names the sequence {position}, and {name} has acknowledged up to {found.position}: "
                    "a rewind goes back; to go on, acknowledge, or clear the backlog",
                    field="bookmark",
                )
            if position < earliest:
                raise StoreError(
                    Reason.BOOKMARK_TOO_OLD,
                    f"bookmark: names the sequence {position}, and {name} can be rewound to {earliest}",
                    field="bookmark",
                    details={"earliest_sequence": str(earliest + 1)},
                )
        elif to.time_micros is not None:
            time = to.time_micros
            start = self._heads.after(topic, earliest)
            first = None
            if start is not None:
                first = self._heads.first(topic, start.first_sequence, lambda chunk: chunk.commit_time_micros >= time)
            position = found.position if first is None else first.first_sequence - 1
            position = min(max(position, earliest), found.position)
        else:
            position = earliest
        # What is handed over again is no gap any more.
        gaps = tuple([_before(gap, position) for gap in found.gaps if gap.after < position])
        moved = self._moved(topic, found, position)._replace(gaps=gaps, last_use_micros=self.now)
        moved = moved._replace(handed=0, deliveries=())  # whoever rewinds wants them again, and as often
        self._put(moved)
        return moved, figures.appended_entries - moved.entries

    def clear(self, topic: Topic, name: str) -> Cleared:
        """Everything is acknowledged (rule J13); `name` "": of every durable of the topic. Raises StoreError
        DURABLE_NOT_FOUND."""
        if name and self.get(topic, name) is None:
            raise not_found(topic, name)
        figures = self._figures(topic)
        chosen = [durable for durable in self.all_of(topic) if name in ("", durable.name)]
        entries = 0
        for durable in chosen:
            entries += figures.appended_entries - durable.entries
            moved = self._moved(topic, durable, max(durable.position, figures.last_sequence))
            self._put(moved._replace(gaps=(), last_use_micros=self.now))
        return Cleared(tuple([durable.name for durable in chosen]), entries)

    def remove(self, topic: Topic, name: str) -> Durable:
        """It is deleted, or was idle for too long. Raises StoreError DURABLE_NOT_FOUND."""
        found = self.get(topic, name)
        if found is None:
            raise not_found(topic, name)
        self._changed.pop((topic.id, name), None)
        self._removed[topic.id, name] = self.now
        self._let_go[topic.id] = topic
        return found

    def skip(self, topic: Topic, durable: Durable, upto: int, reason: GapReason) -> bool:
        """Acknowledges on its behalf what it has not: it is told of the gap. False: there was nothing."""
        if upto <= durable.position:
            return False
        moved = self._moved(topic, durable, upto)
        entries = moved.entries - durable.entries
        if entries <= 0:
            self._put(moved)
            return False
        gap = Gap(reason, durable.position, upto, entries)
        self._put(moved._replace(gaps=_with(durable.gaps, gap)))
        if reason is not GapReason.DISCARDED:  # those are counted once, where the floor rises
            self._discarded.append((reason.name.lower(), entries))
        return True

    def set_aside(self, topic: Topic, name: str, before: int, sequences: Sequence[int], upto: int) -> bool:
        """Sets aside the entries with these sequences, the first that its filter matches after the position `before`,
        with all else up to `upto`, if they have been handed over as often as they may be (rule J15). False: not so."""
        found = self.get(topic, name)
        limit = None if found is None else self._durables.settings(topic, found).delivery_limit
        if found is None or found.position != before or limit is None or found.delivered(sequences[0]) < limit:
            return False
        # What the filter leaves out in front of it is no part of the gap.
        self._put(self._moved(topic, found, sequences[0] - 1)._replace(set_aside=found.set_aside + len(sequences)))
        moved = self.get(topic, name)
        assert moved is not None, "it has just been put"
        if not self.skip(topic, moved, upto, GapReason.DELIVERY_LIMIT):
            return False
        if topic.settings.dead_letter:
            kept = [entry for sequence in sequences if (entry := self._heads.entry(topic, sequence)) is not None]
            self._draft.set_aside(topic, name, kept)
        return True

    def expire_backlog(self, topic: Topic, name: str) -> bool:
        """What is unacknowledged for the `backlog_ttl` counts as acknowledged (rule J8). Whether there was any."""
        found = self.get(topic, name)
        ttl = None if found is None else self._durables.settings(topic, found).backlog_ttl_micros
        if found is None or ttl is None:
            return False
        first = first_inside(self._heads, topic, self._above(topic, found.position), Bounds(ttl), self.now)
        return self.skip(topic, found, first - 1, GapReason.BACKLOG_TTL)

    def relieve(self, topic: Topic) -> list[str]:
        """Evicts or conflates what is beyond the topic's backlog quota (rule J9). Returns whose backlog it was."""
        settings, figures = topic.settings, self._figures(topic)
        size, age = settings.backlog_quota_bytes, settings.backlog_quota_age_micros
        number = settings.backlog_quota_entries
        relieved: list[str] = []
        for durable in list(self.all_of(topic)):
            above = self._above(topic, durable.position)
            oldest = self._heads.after(topic, durable.position)
            over = size is not None and figures.appended_bytes - durable.bytes >= size
            late = age is not None and oldest is not None and self.now - oldest.commit_time_micros >= age
            many = number is not None and figures.appended_entries - durable.entries >= number
            if oldest is None or not (over or late or many):
                break  # the others are faster
            if settings.backlog_action is BacklogAction.CONFLATE:
                upto, reason = figures.last_sequence, GapReason.CONFLATED
            else:
                left = Bounds(
                    None if age is None else age - age // EVICT_PARTS,
                    None if size is None else size - size // EVICT_PARTS,
                )
                upto, reason = first_inside(self._heads, topic, above, left, self.now) - 1, GapReason.EVICTED
                if number is not None:
                    # At least one goes, also of a quota so small that it has no tenth.
                    kept = min(number - 1, number - number // EVICT_PARTS)
                    upto = max(upto, beyond_entries(self._heads, topic, above, kept))
            if self.skip(topic, durable, upto, reason):
                relieved.append(durable.name)
        return relieved

    def earliest(self, topic: Topic, durable: Durable) -> int:
        """The position from which it can read: what is up to there is gone for it (rule J5)."""
        settings = self._durables.settings(topic, durable)
        bounds = Bounds(settings.retain_time_micros, settings.retain_bytes)
        figures = self._figures(topic)
        inside = self._durables.retention.first(self._heads, topic, figures, bounds, self.now)
        return max(min(durable.position, inside - 1), durable.floor, _floor(figures))

    def freeze(self, topic: Topic) -> None:
        """The topic's settings, or policies, are about to change: what is gone for its durables stays gone."""
        for durable in list(self.all_of(topic)):
            earliest = self.earliest(topic, durable)
            if earliest > durable.floor:
                self._put(durable._replace(floor=earliest))

    def reset(self, topic: Topic) -> None:
        """All of the topic's journal is gone, and the floor is where the draft has put it."""
        figures = self._figures(topic)
        floor = figures.floor_sequence
        for durable in list(self.all_of(topic)):
            entries = figures.trimmed_entries - durable.entries
            gaps = durable.gaps
            if entries > 0:
                gaps = _with(gaps, Gap(GapReason.DISCARDED, durable.position, floor, entries))
            self._put(
                durable._replace(
                    position=max(durable.position, floor),
                    floor=floor,
                    entries=figures.trimmed_entries,
                    bytes=figures.trimmed_bytes,
                    gaps=gaps,
                )
            )

    def _figures(self, topic: Topic) -> StoredStatistics:
        """The topic's figures as this commit leaves them; unlike `Draft.figures`, without a row for them."""
        return self._draft.statistics.get(topic.id, topic.statistics)

    def _put(self, durable: Durable) -> None:
        self._changed[durable.topic_id, durable.name] = durable

    def _moved(self, topic: Topic, durable: Durable, position: int) -> Durable:
        if position == durable.position:
            return durable
        self._let_go[topic.id] = topic
        entries, size = self._heads.counts(topic, self._figures(topic), position)
        steps = tuple([step for step in durable.deliveries if step.upto > position])
        return durable._replace(position=position, entries=entries, bytes=size, deliveries=steps)

    def _above(self, topic: Topic, position: int) -> StoredStatistics:
        """The topic's figures as they would be if its floor were at `position`."""
        figures = self._figures(topic)
        return figures._replace(floor_sequence=max(figures.floor_sequence, position))

    # -- a topic's floor --------------------------------------------------------------------------------------------

    def keep(self, topic: Topic) -> int | None:
        """Raises the topic's floor to where its settings and its durables let it be, and removes what is below it;
        returns the first sequence that is retained, None where nothing is (rules J3, J11)."""
        floor, hard, why = self._targets(topic)
        self._raise(topic, floor, "retention")
        self._raise(topic, hard, why)
        figures = self._figures(topic)
        freed = self._durables._freed.get(topic.id, 0)
        first: int | None = None
        if figures.journal_entries:
            chunk = self._durables.retention.chunk(self._heads, topic, figures, NO_BOUNDS, self.now)
            first = None if chunk is None else max(chunk.first_sequence, figures.floor_sequence + 1)
        if figures.floor_sequence > freed and figures.appended_entries:
            below = self._heads.upto(topic, figures.floor_sequence)
            if below is not None:
                stop = below.first_sequence if below.last_sequence > figures.floor_sequence else below.last_sequence + 1
                self._draft.batch.ranges.append((JOURNAL, topic.prefix, topic.prefix + stop.to_bytes(8, "big")))
            done = figures.floor_sequence
            self._draft.also.append(lambda: self._durables._freed.__setitem__(topic.id, done))
        return first

    def _keep_limits(self, topic: Topic) -> None:
        """What is beyond the hard limits is discarded before anybody begins to read, however long ago the last prune
        was."""
        settings = topic.settings
        if (settings.max_age_micros, settings.max_bytes, settings.max_entries) != (None, None, None):
            floor, hard, why = self._targets(topic)
            if hard > floor:
                self._raise(topic, hard, why)

    def _targets(self, topic: Topic) -> tuple[int, int, str]:
        """(what nothing holds any more, what hard limits discard, which of them)."""
        durables, heads, settings = self._durables, self._heads, topic.settings
        figures = self._figures(topic)
        first, now = durables.retention.first, self.now
        bounds = {Bounds(settings.retain_time_micros, settings.retain_bytes): None}
        held = durables.held_for_peers(heads, topic, figures, now)
        for durable in self._holders(topic):
            held = min(held, durable.position)
            own = durables.settings(topic, durable)
            bounds[Bounds(own.retain_time_micros, own.retain_bytes)] = None
        for bound in bounds:
            held = min(held, first(heads, topic, figures, bound, now) - 1)
        hard, why = 0, ""
        for name, bound in (
            ("max_age", Bounds(time_micros=settings.max_age_micros)),
            ("max_bytes", Bounds(bytes=settings.max_bytes)),
        ):
            if bound != NO_BOUNDS:
                upto = first(heads, topic, figures, bound, now) - 1
                if upto > max(hard, figures.floor_sequence):
                    hard, why = upto, name
        if settings.max_entries is not None:
            upto = beyond_entries(heads, topic, figures, settings.max_entries)
            if upto > max(hard, figures.floor_sequence):
                hard, why = upto, "max_entries"
        return held, hard, why

    def _holders(self, topic: Topic) -> Iterator[Durable]:
        """The durables that say how far the floor may rise: the slowest, and those with settings of their own."""
        found = self._durables._topics.get(topic.id)
        if found is None or not (found.rows or self._changed):
            return
        if self._durables._resolve(topic, found).all_shared:
            yield from [durable for durable in self._changed.values() if durable.topic_id == topic.id]
            for name in found.own:
                if (topic.id, name) not in self._removed:
                    yield self._changed.get((topic.id, name), found.rows[name])
            for _, name in found.order:
                if (topic.id, name) not in self._changed and (topic.id, name) not in self._removed:
                    yield found.rows[name]
                    return
        else:
            yield from self.all_of(topic)
            for durable in self._changed.values():
                if durable.topic_id == topic.id and durable.name not in found.rows:
                    yield durable

    def _raise(self, topic: Topic, floor: int, why: str) -> None:
        """Raises the floor, if that is higher; durables that have not come there hear of the gap."""
        figures = self._figures(topic)
        if floor <= figures.floor_sequence:
            return
        below = self._heads.upto(topic, floor)
        # The floor is the last entry that is let go, not a place between two: a bookmark there misses nothing.
        floor = figures.floor_sequence if below is None else min(floor, below.last_sequence)
        if floor <= figures.floor_sequence:
            return
        entries, size = self._heads.counts(topic, figures, floor)
        late: list[Durable] = []
        for durable in self.all_of(topic):
            if durable.position < floor:
                late.append(durable)
            elif (topic.id, durable.name) not in self._changed:
                break  # the others are faster
        for durable in late:
            self.skip(topic, durable, floor, GapReason.DISCARDED)
        self._discarded.append((why, entries - figures.trimmed_entries))
        self._draft.statistics[topic.id] = figures._replace(
            floor_sequence=floor, trimmed_entries=entries, trimmed_bytes=size
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        for topic in list(self._let_go.values()):
            if self._topics.get(topic.id) is topic:
                held, _, _ = self._targets(topic)
                self._raise(topic, held, "retention")
        batch, durables = self._draft.batch, self._durables
        for (topic_id, name), when in self._removed.items():
            batch.puts[META][durable_key(topic_id, name)] = json.dumps({"removed": when}).encode()
        for durable in self._changed.values():
            batch.puts[META][durable_key(durable.topic_id, durable.name)] = _encode(durable)
        changed = list(self._changed.values())
        removed = [(topic_id, name, when) for (topic_id, name), when in self._removed.items()]
        discarded, topics = self._discarded, self._topics

        def apply() -> None:
            durables._apply(changed, removed)
            for topic_id in {topic_id for topic_id, _, _ in removed} & topics.keys():
                durables.lost(topics[topic_id])
            for why, entries in discarded:
                durables._count(why, entries)

        if changed or removed or discarded:
            self._draft.also.append(apply)


def prune_topic(durables: Durables, draft: Draft, topics: Mapping[int, Topic], topic: Topic) -> int | None:
    """One topic's part of a prune: the first sequence that it retains, None where it retains nothing. One that cannot
    be pruned is logged and left as it is; nothing of it is in the batch then (rule J11)."""
    figures, ranges, also = draft.statistics.get(topic.id), len(draft.batch.ranges), len(draft.also)
    try:
        with durables.stage(draft, topics) as staged:
            first = staged.keep(topic)
    except (RocksError, StoreError) as error:
        log.error("prune_failed", topic=topic.name, cause=str(error))
        del draft.batch.ranges[ranges:], draft.also[also:]
        if figures is None:
            draft.statistics.pop(topic.id, None)
        else:
            draft.statistics[topic.id] = figures
        return topic.statistics.floor_sequence + 1
    return first


def not_found(topic: Topic, name: str) -> StoreError:
    """There is no such durable."""
    return StoreError(
        Reason.DURABLE_NOT_FOUND, f"durable: topic {topic.name} has no durable {name[:220]!r}", field="durable"
    )


def in_use(topic: Topic, name: str) -> StoreError:
    """Somebody is attached."""
    return StoreError(
        Reason.DURABLE_IN_USE,
        f"durable: {name} of {topic.name} has a consumer; use force to end its stream",
        field="durable",
    )


def check_same(topic: Topic, durable: Durable, filter_text: str, declared: Declared | None) -> None:
    """Raises StoreError DURABLE_DIFFERS (rule J2)."""
    if filter_text != durable.filter:
        raise StoreError(
            Reason.DURABLE_DIFFERS,
            f"filter: {durable.name} of {topic.name} has the filter {durable.filter or 'true'!r}, "
            f"and this is {filter_text or 'true'!r}",
            field="filter",
        )
    if declared and dict(declared) != dict(durable.declared):
        raise StoreError(
            Reason.DURABLE_DIFFERS,
            f"durable.settings: {durable.name} of {topic.name} was created with others: {dict(durable.declared)}, "
            f"and these are {dict(declared)}",
            field="durable.settings",
        )


def _floor(figures: StoredStatistics) -> int:
    return max(figures.floor_sequence, figures.created_sequence)


def _with(gaps: tuple[Gap, ...], gap: Gap) -> tuple[Gap, ...]:
    """Gaps, the newest last; what continues the last one is told with it."""
    if gaps:
        last = gaps[-1]
        # A conflated gap is followed by a snapshot, which tells what comes before it, too.
        if last.reason is gap.reason or len(gaps) >= GAPS_MAX:
            reason = last.reason if last.reason is GapReason.CONFLATED else gap.reason
            # Not known and known together is not known.
            entries = last.entries + gap.entries if last.entries and gap.entries else 0
            return (*gaps[:-1], Gap(reason, last.after, gap.upto, entries))
    return (*gaps, gap)


def delivered(deliveries: Iterable[Delivered], sequence: int) -> int:
    """How often an entry was handed over, by the deliveries of its durable."""
    return next((step.times for step in deliveries if step.upto >= sequence), 0)


def _again(durable: Durable, handed: int) -> tuple[Delivered, ...]:
    """The deliveries of a durable, with those of one more session, which began at its position."""
    if handed <= durable.position:
        return durable.deliveries
    steps: list[Delivered] = []
    reached = durable.position
    for upto, times in durable.deliveries:
        if reached < handed < upto:
            steps.append(Delivered(handed, times + 1))
        steps.append(Delivered(upto, times + (upto <= handed)))
        reached = upto
    if reached < handed:
        steps.append(Delivered(handed, 1))
    merged: list[Delivered] = []
    for step in steps:
        if merged and merged[-1].times == step.times:
            merged.pop()
        merged.append(step)
    while len(merged) > STEPS_MAX:
        del merged[-2]
    return tuple(merged)


def _before(gap: Gap, position: int) -> Gap:
    """What of a gap lies at or before a position; how many entries that is, is not known."""
    if gap.upto <= position:
        return gap
    # A snapshot in its place would tell what comes behind the position, too.
    reason = GapReason.EVICTED if gap.reason is GapReason.CONFLATED else gap.reason
    return Gap(reason, gap.after, position, 0)


def _encode(durable: Durable) -> bytes:
    fields = durable._asdict()
    del fields["topic_id"], fields["name"]
    fields["gaps"] = [[gap.reason.value, gap.after, gap.upto, gap.entries] for gap in durable.gaps]
    fields["declared"] = dict(durable.declared)
    fields["deliveries"] = [list(step) for step in durable.deliveries]
    return json.dumps(fields).encode()


def _decode(topic_id: int, name: str, fields: dict[str, object]) -> Durable:
    known: dict[str, object] = {field: value for field, value in fields.items() if field in Durable._fields}
    gaps: list[list[int]] = known["gaps"]  # type: ignore[assignment]  # JSON as _encode wrote it
    known["gaps"] = tuple([Gap(GapReason(reason), *numbers) for reason, *numbers in gaps])
    steps: list[list[int]] = known.get("deliveries", [])  # type: ignore[assignment]  # as above; older rows have none
    known["deliveries"] = tuple([Delivered(*step) for step in steps])
    known["declared"] = MappingProxyType(dict(known["declared"]))  # type: ignore[call-overload]  # as above
    return Durable(topic_id=topic_id, name=name, **known)  # type: ignore[arg-type]  # as above
