"""The changes of durables in one commit, and a topic's part of pruning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import structlog

from sow_peering import NO_STAMP, DurableMark, Stamp
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit import letter_posting
from sow_server.engine.commit.draft import Draft
from sow_server.engine.durables.drafted import DraftedDurables
from sow_server.engine.durables.floors import TopicFloors
from sow_server.engine.durables.merging import MarkMerge
from sow_server.engine.durables.model import (
    AttachedDurable,
    ClearedBacklogs,
    Durable,
    DurableGap,
    GapReason,
    Life,
    Merged,
    RewindTo,
    check_same,
    delivered_again,
    detached,
    gap_up_to,
    in_use,
    not_found,
    rewinds_of,
    with_gap,
)
from sow_server.engine.durables.registry import Durables, first_position
from sow_server.engine.journal.retention import JournalBounds, beyond_entries, first_inside
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.database import RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import OWNED_NAME
from sow_server.engine.values.model import BacklogAction
from sow_server.engine.values.policies import NOTHING, Declared, check_durable_settings

log = structlog.get_logger(__name__)

EVICT_PARTS: Final = 10
"""Evicting goes on until a tenth of the quota is free."""


class DurableEditor:
    """Changes durables in one commit. Use it as a context: its end puts the rows, and raises the floors."""

    def __init__(self, durables: Durables, draft: Draft, topics: Mapping[int, Topic]) -> None:
        self._durables = durables
        self._draft = draft
        self._drafted = DraftedDurables(durables, draft, topics)
        self._floors = TopicFloors(self._drafted)
        self._heads = self._drafted.heads
        self.now: Final = draft.now

    def __enter__(self) -> DurableEditor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._floors.let_go()
                self._drafted.finish()
        finally:
            self._drafted.close()

    # -- a consumer comes and goes ----------------------------------------------------------------------------------

    def get(self, topic: Topic, name: str) -> Durable | None:
        """A durable as this commit leaves it."""
        return self._drafted.get(topic, name)

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
    ) -> AttachedDurable:
        """Attaches a consumer to a durable, which is created where there is none (rules J2, J10).

        `start`: the position of a new durable; None: now. `bookmarked`: a bookmark has named `start`, so all entries
        behind it must exist. `expected`: the consumer is the one that was there before, so it still has the entries
        that it was handed. `handed`: the position up to which a consumer whose durable is taken over was handed
        entries.

        Raises StoreError: NO_JOURNAL, DURABLE_DIFFERS, BOOKMARK_TOO_OLD, INVALID_ARGUMENT.
        """
        if not OWNED_NAME.match(name):
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"durable.name: {name[:220]!r} is no name of a durable: 1 to 200 of [A-Za-z0-9_.:-] are allowed",
                field="durable.name",
            )
        if not topic.settings.journal:
            raise StoreError(
                Reason.NO_JOURNAL, f"topic: {topic.name} has no journal, so it has no durables", field="topic"
            )
        self._floors.keep_limits(topic)
        if declared:
            check_durable_settings(declared, where="durable.settings")
        found = self.get(topic, name)
        if found is None:
            return self._create(topic, name, filter_text, start, declared, expected=expected, bookmarked=bookmarked)
        check_same(topic, found, filter_text, declared)
        handed = max(found.handed, handed)
        attached = found._replace(attached=True, last_use_micros=self.now, handed=handed, pin=False, reader="")
        if not expected:
            attached = attached._replace(handed=0, deliveries=delivered_again(found, handed))
        attached = self._known_elsewhere(topic, attached)
        self._drafted.put(attached)
        return AttachedDurable(attached, created=False, reset=False)

    def _create(
        self,
        topic: Topic,
        name: str,
        filter_text: str,
        start: int | None,
        declared: Declared | None,
        *,
        expected: bool,
        bookmarked: bool,
    ) -> AttachedDurable:
        figures = self._drafted.figures(topic)
        last = self._draft.next_sequence - 1
        position = last if start is None else max(start, first_position(figures))
        if bookmarked and start is not None and start < position:
            raise StoreError(
                Reason.BOOKMARK_TOO_OLD,
                f"bookmark: names the sequence {start}, and the journal of {topic.name} begins at {position + 1}",
                field="bookmark",
                details={"earliest_sequence": str(position + 1)},
            )
        entries, size = self._heads.counts(topic, figures, position)
        created = Durable(
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
        removed = self._drafted.removed(topic, name)
        if removed is not None:
            created = created._replace(buried=removed.buried)
        created = self._known_elsewhere(topic, created)
        self._drafted.put(created)
        return AttachedDurable(created, created=True, reset=removed is not None or expected)

    def _known_elsewhere(self, topic: Topic, durable: Durable) -> Durable:
        """A durable as it is from now on: replicated, if its settings say so (rule F14)."""
        if durable.replicated or not self._durables.settings(topic, durable).replicated:
            return durable
        return durable._replace(born=self._stamp(durable.buried))

    def _stamp(self, after: Stamp) -> Stamp:
        """A stamp of this instance, greater than another one."""
        return Stamp(max(self.now, after.number + 1), self._durables.by)

    def replicate(self, topic: Topic, name: str) -> bool:
        """Makes a durable known at the peers, if its settings say so by now. False: they do not, or it is known."""
        found = self.get(topic, name)
        if found is None or (known := self._known_elsewhere(topic, found)) is found:
            return False
        self._drafted.put(known)
        return True

    def merge(self, topic: Topic, mark: DurableMark, position: int | None) -> Merged:
        """Takes over what another instance tells of a durable, see `MarkMerge.merge`."""
        return MarkMerge(self._drafted, self._floors).merge(topic, mark, position)

    def pin(self, topic: Topic, name: str, position: int, declared: Declared, reader: str = "") -> tuple[Durable, bool]:
        """Keeps the entries after a position, without a consumer: creates the durable, or acknowledges that far on it,
        never back. Returns whether it was created. Either is a use of the durable (rule J10). `declared` counts when it
        is created. `reader`: who reads; an empty text leaves the earlier one.

        Raises StoreError: as `attach`, and DURABLE_IN_USE.
        """
        found = self.get(topic, name)
        if found is not None and topic.settings.journal:
            check_same(topic, found, "", None)
            if found.attached:
                raise in_use(topic, name)
            moved = self.acknowledge(topic, name, position, told=position)
            assert moved is not None, "it is there"
            told = moved._replace(pin=True, reader=reader or moved.reader)
            if told != moved:
                self._drafted.put(told)
            return told, False
        created = self.attach(
            topic, name, filter_text="", start=position, declared=declared, expected=False, bookmarked=True
        ).durable._replace(attached=False, pin=True, reader=reader)
        self._drafted.put(created)
        return created, True

    def detach(self, topic: Topic, name: str, handed: int = 0) -> None:
        """The durable has no consumer any more; the last one was handed entries up to `handed`."""
        found = self.get(topic, name)
        if found is not None:
            self._drafted.put(
                found._replace(attached=False, last_use_micros=self.now, handed=max(found.handed, handed))
            )

    def use(self, topic: Topic, name: str) -> None:
        """The durable is in use: its consumer is there, though it has nothing to acknowledge."""
        found = self.get(topic, name)
        if found is not None:
            self._drafted.put(found._replace(last_use_micros=self.now))

    # -- a position moves -------------------------------------------------------------------------------------------

    def acknowledge(
        self, topic: Topic, name: str, position: int, *, told: int = 0, life: Life | None = None
    ) -> Durable | None:
        """Acknowledges everything up to `position`, and gaps up to `told`. None: the durable is gone. `life`: that of
        the position. Raises StoreError DURABLE_DETACHED if it is over."""
        found = self.get(topic, name)
        if found is None:
            return None
        if life not in (None, found.life):
            raise detached(topic, name)
        gaps = tuple([gap for gap in found.gaps if gap.upto > told])
        moved = self._drafted.moved(topic, found, max(position, found.position))
        moved = moved._replace(gaps=gaps, last_use_micros=self.now)
        self._drafted.put(moved)
        return moved

    def follow(self, topic: Topic, name: str, before: int, position: int, life: Life) -> bool:
        """Moves a durable over entries that were scanned and that its filter leaves out, if it is still where the scan
        began, and in the same life."""
        found = self.get(topic, name)
        if found is None or found.position != before or position <= before or found.life != life:
            return False
        self._drafted.put(self._drafted.moved(topic, found, position))
        return True

    def rewind(self, topic: Topic, name: str, to: RewindTo) -> tuple[Durable, int]:
        """Moves a durable back (rule J6); returns it and the number of its unacknowledged entries. Raises StoreError:
        DURABLE_NOT_FOUND, BOOKMARK_TOO_OLD, INVALID_ARGUMENT for a position ahead of it."""
        self._floors.keep_limits(topic)
        found = self.get(topic, name)
        if found is None:
            raise not_found(topic, name)
        figures = self._drafted.figures(topic)
        position = self._rewind_position(topic, found, to)
        # Entries that are handed over again are no gap any more.
        gaps = tuple([gap_up_to(gap, position) for gap in found.gaps if gap.after < position])
        moved = self._drafted.moved(topic, found, position)._replace(gaps=gaps, last_use_micros=self.now)
        moved = moved._replace(handed=0, deliveries=())  # a rewind asks for them again, as often as the limit allows
        if moved.replicated:
            before = max([one for one in moved.rewinds if one.instance == self._durables.by], default=NO_STAMP)
            moved = moved._replace(rewinds=rewinds_of(moved.rewinds, [self._stamp(before)]))
        self._drafted.put(moved)
        return moved, figures.appended_entries - moved.entries

    def _rewind_position(self, topic: Topic, found: Durable, to: RewindTo) -> int:
        earliest = self._floors.earliest(topic, found)
        if to.position is not None:
            if to.position > found.position:
                raise StoreError(
                    Reason.INVALID_ARGUMENT,
                    f"bookmark: names the sequence {to.position}, and {found.name} has acknowledged up to "
                    f"{found.position}: a rewind goes back; to go on, acknowledge, or clear the backlog",
                    field="bookmark",
                )
            if to.position < earliest:
                raise StoreError(
                    Reason.BOOKMARK_TOO_OLD,
                    f"bookmark: names the sequence {to.position}, and {found.name} can be rewound to {earliest}",
                    field="bookmark",
                    details={"earliest_sequence": str(earliest + 1)},
                )
            return to.position
        if to.time_micros is not None:
            time = to.time_micros
            start = self._heads.after(topic, earliest)
            first = None
            if start is not None:
                first = self._heads.first(topic, start.first_sequence, lambda chunk: chunk.commit_time_micros >= time)
            position = found.position if first is None else first.first_sequence - 1
            return min(max(position, earliest), found.position)
        return earliest

    def clear(self, topic: Topic, name: str) -> ClearedBacklogs:
        """Acknowledges everything (rule J13); `name` "": for every durable of the topic. Raises StoreError
        DURABLE_NOT_FOUND."""
        if name and self.get(topic, name) is None:
            raise not_found(topic, name)
        figures = self._drafted.figures(topic)
        chosen = [durable for durable in self._drafted.existing(topic) if name in ("", durable.name)]
        entries = 0
        for durable in chosen:
            entries += figures.appended_entries - durable.entries
            moved = self._drafted.moved(topic, durable, max(durable.position, figures.last_sequence))
            self._drafted.put(moved._replace(gaps=(), last_use_micros=self.now))
        return ClearedBacklogs(tuple([durable.name for durable in chosen]), entries)

    def remove(self, topic: Topic, name: str, *, idle: bool = False) -> Durable:
        """Removes a durable that is deleted. `idle`: only here, because it was idle for too long; then peers keep a
        replicated one (rule F16). Raises StoreError DURABLE_NOT_FOUND."""
        found = self.get(topic, name)
        if found is None:
            raise not_found(topic, name)
        if idle:
            self._drafted.remove(topic, name, buried=found.buried, idle=found.born)
        else:
            self._drafted.remove(topic, name, buried=max(found.born, found.buried))
        return found

    # -- limits and settings ----------------------------------------------------------------------------------------

    def set_aside(self, topic: Topic, name: str, before: int, sequences: Sequence[int], upto: int) -> bool:
        """Sets entries aside that have been handed over as often as they may be (rule J15). False: they have not.

        `sequences`: those entries, the first ones after the position `before` that the filter matches. All other
        entries up to `upto` count as acknowledged, too.
        """
        found = self.get(topic, name)
        limit = None if found is None else self._durables.settings(topic, found).delivery_limit
        if found is None or found.position != before or limit is None or found.delivered(sequences[0]) < limit:
            return False
        # Entries in front of the first one, which the filter leaves out, are no part of the gap.
        moved = self._drafted.moved(topic, found, sequences[0] - 1)
        moved = moved._replace(set_aside=found.set_aside + len(sequences))
        self._drafted.put(moved)
        if not self._drafted.skip(topic, moved, upto, GapReason.DELIVERY_LIMIT):
            return False
        if topic.settings.dead_letter:
            kept = [entry for sequence in sequences if (entry := self._heads.entry(topic, sequence)) is not None]
            letter_posting.set_aside(self._draft, topic, name, kept)
        return True

    def expire_backlog(self, topic: Topic, name: str) -> bool:
        """Acknowledges entries that were unacknowledged for the `backlog_ttl` (rule J8). False: there were none."""
        found = self.get(topic, name)
        ttl = None if found is None else self._durables.settings(topic, found).backlog_ttl_micros
        if found is None or ttl is None:
            return False
        first = first_inside(self._heads, topic, self._above(topic, found.position), JournalBounds(ttl), self.now)
        return self._drafted.skip(topic, found, first - 1, GapReason.BACKLOG_TTL)

    def relieve(self, topic: Topic, names: Collection[str] | None = None) -> list[str]:
        """Evicts or conflates the entries beyond the topic's backlog quota (rule J9). `names`: evicts those of these
        durables alone, whatever the quota does (rule J19). Returns the names of the durables that have lost some."""
        settings, figures = topic.settings, self._drafted.figures(topic)
        size, age = settings.backlog_quota_bytes, settings.backlog_quota_age_micros
        number = settings.backlog_quota_entries
        relieved: list[str] = []
        for durable in list(self._drafted.existing(topic)):
            above = self._above(topic, durable.position)
            oldest = self._heads.after(topic, durable.position)
            over = size is not None and figures.appended_bytes - durable.bytes >= size
            late = age is not None and oldest is not None and self.now - oldest.commit_time_micros >= age
            many = number is not None and figures.appended_entries - durable.entries >= number
            if oldest is None or not (over or late or many):
                break  # the others are faster
            if names is not None and durable.name not in names:
                continue
            if names is None and settings.backlog_action is BacklogAction.CONFLATE:
                upto, reason = figures.last_sequence, GapReason.CONFLATED
            else:
                left = JournalBounds(
                    None if age is None else age - age // EVICT_PARTS,
                    None if size is None else size - size // EVICT_PARTS,
                )
                upto, reason = first_inside(self._heads, topic, above, left, self.now) - 1, GapReason.EVICTED
                if number is not None:
                    # At least one entry goes, also where the quota is so small that it has no tenth.
                    kept = min(number - 1, number - number // EVICT_PARTS)
                    upto = max(upto, beyond_entries(self._heads, topic, above, kept))
            if self._drafted.skip(topic, durable, upto, reason):
                relieved.append(durable.name)
        return relieved

    def bound(self, topic: Topic, names: Collection[str], bytes_max: int) -> list[str]:
        """Evicts what durables keep beyond so many bytes, unless the retention of the topic keeps it anyway (rule J19).
        Returns the names of the durables that have lost some."""
        settings, figures = topic.settings, self._drafted.figures(topic)
        retained = JournalBounds(settings.retain_time_micros, settings.retain_bytes)
        inside = first_inside(self._heads, topic, figures, retained, self.now)
        found: list[str] = []
        for durable in filter(None, [self.get(topic, name) for name in names]):
            above = self._above(topic, durable.position)
            first = first_inside(self._heads, topic, above, JournalBounds(None, bytes_max), self.now)
            if self._drafted.skip(topic, durable, min(first, inside) - 1, GapReason.EVICTED):
                found.append(durable.name)
        return found

    def freeze(self, topic: Topic) -> None:
        """Entries that are gone for its durables stay gone. To be called before the topic's settings, or policies,
        change."""
        for durable in list(self._drafted.existing(topic)):
            earliest = self._floors.earliest(topic, durable)
            if earliest > durable.floor:
                self._drafted.put(durable._replace(floor=earliest))

    def reset(self, topic: Topic) -> None:
        """Puts its durables at the floor that the draft has set, after all of the topic's journal has gone."""
        figures = self._drafted.figures(topic)
        floor = figures.floor_sequence
        for durable in list(self._drafted.existing(topic)):
            entries = figures.trimmed_entries - durable.entries
            gaps = durable.gaps
            if entries > 0:
                gaps = with_gap(gaps, DurableGap(GapReason.DISCARDED, durable.position, floor, entries))
            self._drafted.put(
                durable._replace(
                    position=max(durable.position, floor),
                    floor=floor,
                    entries=figures.trimmed_entries,
                    bytes=figures.trimmed_bytes,
                    gaps=gaps,
                )
            )

    def keep(self, topic: Topic) -> int | None:
        """As `TopicFloors.keep`."""
        return self._floors.keep(topic)

    def _above(self, topic: Topic, position: int) -> StoredStatistics:
        """The topic's figures as they would be if its floor were at `position`."""
        figures = self._drafted.figures(topic)
        return figures._replace(floor_sequence=max(figures.floor_sequence, position))


def prune_topic(durables: Durables, draft: Draft, topics: Mapping[int, Topic], topic: Topic) -> int | None:
    """One topic's part of a prune. Returns the first sequence that it retains, None where it retains nothing. A topic
    that cannot be pruned is logged and left as it is; the batch then has nothing of it (rule J11)."""
    figures, ranges, also = draft.statistics.get(topic.id), len(draft.batch.ranges), len(draft.on_commit)
    try:
        with DurableEditor(durables, draft, topics) as editor:
            first = editor.keep(topic)
    except (RocksError, StoreError) as error:
        log.error("prune_failed", topic=topic.name, cause=str(error))
        del draft.batch.ranges[ranges:], draft.on_commit[also:]
        if figures is None:
            draft.statistics.pop(topic.id, None)
        else:
            draft.statistics[topic.id] = figures
        return topic.statistics.floor_sequence + 1
    return first
