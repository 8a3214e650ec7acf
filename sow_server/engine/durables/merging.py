"""Replicated durables: an instance takes over what another one tells of a durable (rules F14, F15).

[1]  A position of this instance rises by a mark only to entries that consumers have acknowledged elsewhere. Where no
     such position is known, it stays where it is, or begins as early as possible. So no entry is skipped; entries
     may come again.
[2]  A generation is the set of the rewinds that are known. Positions are compared within one generation of one durable
     only. A generation that knows all rewinds of the one here and more, or a durable that was born earlier, takes the
     place of the one here together with its position, also where that goes back. The latter brings its settings.
[3]  Of two generations that each know a rewind of which the other has not heard, the lower position counts, in the
     generation that knows both. So each rewind has its effect.
[4]  Whatever the order in which marks arrive, all instances end with the same durable and generation: the one born
     first of those that are not buried, and all rewinds.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from sow_peering import DurableMark, Stamp
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.durables.drafted import DraftedDurables
from sow_server.engine.durables.floors import TopicFloors
from sow_server.engine.durables.model import (
    Durable,
    DurableGap,
    GapReason,
    Merged,
    RemovedDurable,
    rewinds_of,
    without_gaps,
)
from sow_server.engine.durables.registry import first_position
from sow_server.engine.values.keys import OWNED_NAME

IDLE_PARTS: Final = 10
"""A use at another instance is stored once it is later than the stored one by one part in this many of `idle_ttl`."""


def restarts_by(found: Durable, mark: DurableMark) -> bool:
    """True if a mark takes the place of a durable, or has a rewind that the durable lacks ([2], [3])."""
    if found.filter != mark.filter or mark.born > found.born:
        return False
    return mark.born < found.born or rewinds_of(found.rewinds, mark.rewinds) != found.rewinds


class MarkMerge:
    """Merges marks of replicated durables in one commit."""

    def __init__(self, drafted: DraftedDurables, floors: TopicFloors) -> None:
        self._drafted = drafted
        self._floors = floors

    def merge(self, topic: Topic, mark: DurableMark, position: int | None) -> Merged:
        """Takes over a mark. `position`: everything up to here has been acknowledged, in this instance's journal; None:
        it is not known up to where."""
        drafted = self._drafted
        found, removed = drafted.get(topic, mark.name), drafted.removed(topic, mark.name)
        if found is not None and not found.replicated:
            return Merged.NOTHING if mark.removed else Merged.DIFFERS
        buried = max([mark.buried, *[one.buried for one in (found, removed) if one is not None]])
        outcome, restarts = Merged.NOTHING, 0
        if found is not None and found.born <= buried:
            restarts = found.restarts + 1  # where this commit also creates one in its place
            drafted.remove(topic, mark.name, buried=buried)
            found, removed, outcome = None, drafted.removed(topic, mark.name), Merged.REMOVED
        elif found is None and removed is not None and removed.buried < buried:
            # It was removed here because it was idle, and deleted elsewhere since: others hear of that from here.
            drafted.remove(topic, mark.name, buried=buried, idle=removed.idle)
            outcome = Merged.REMOVED
        if mark.removed or mark.born <= buried:
            return outcome
        if found is None:
            return self._create(topic, mark, buried, removed, position, restarts)
        if found.filter != mark.filter:
            return Merged.DIFFERS
        if mark.born > found.born:
            return Merged.NOTHING  # the other one takes over the durable of this instance
        used = max(found.last_use_micros, drafted.now - max(0, mark.idle_micros))
        if restarts_by(found, mark):
            rewinds = rewinds_of(found.rewinds, mark.rewinds)
            restarted = found._replace(
                born=mark.born,
                buried=buried,
                rewinds=rewinds,
                handed=0,
                last_use_micros=used,
                restarts=found.restarts + 1,
            )
            if mark.born < found.born:
                restarted = restarted._replace(declared=MappingProxyType(dict(mark.declared)))
            if position is not None and rewinds != mark.rewinds:
                position = min(position, found.consumed)  # [3]
            drafted.put(self._placed(topic, restarted, position, self._floors.earliest(topic, found)))
            return Merged.RESTARTED
        if mark.rewinds == found.rewinds and position is not None and position > found.consumed:
            moved = drafted.moved(topic, found, max(position, found.position))
            gaps = without_gaps(found.gaps, position)
            drafted.put(moved._replace(gaps=gaps, buried=buried, last_use_micros=used))
            return Merged.MOVED
        idle = drafted.durables.settings(topic, found).idle_ttl_micros
        if buried != found.buried or (idle is not None and used - found.last_use_micros > idle // IDLE_PARTS):
            drafted.put(found._replace(buried=buried, last_use_micros=used))
        return Merged.NOTHING

    def _create(
        self,
        topic: Topic,
        mark: DurableMark,
        buried: Stamp,
        removed: RemovedDurable | None,
        position: int | None,
        restarts: int,
    ) -> Merged:
        drafted = self._drafted
        used = drafted.now - max(0, mark.idle_micros)
        if removed is not None and removed.idle == mark.born and used <= removed.removed_micros:
            return Merged.NOTHING  # nobody has used it since
        if not OWNED_NAME.match(mark.name) or not topic.settings.journal:
            return Merged.NOTHING
        figures = drafted.figures(topic)
        first = first_position(figures)
        entries, size = drafted.heads.counts(topic, figures, first)
        created = Durable(
            topic.id,
            mark.name,
            mark.filter,
            first,
            entries,
            size,
            drafted.now,
            used,
            declared=MappingProxyType(dict(mark.declared)),
            born=mark.born,
            buried=buried,
            rewinds=mark.rewinds,
            restarts=restarts,
        )
        drafted.put(self._placed(topic, created, position, first))
        return Merged.CREATED

    def _placed(self, topic: Topic, durable: Durable, position: int | None, earliest: int) -> Durable:
        """A durable at a position, or as early as possible (where it is None); with a gap, if entries behind the
        position are gone here."""
        figures = self._drafted.figures(topic)
        wanted = figures.created_sequence if position is None else position
        placed = self._drafted.moved(topic, durable._replace(deliveries=()), max(wanted, earliest))
        gone = placed.entries - self._drafted.heads.counts(topic, figures, max(wanted, first_position(figures))).entries
        pruned = wanted < figures.floor_sequence and figures.trimmed_entries > 0
        if not pruned and gone <= 0:
            return placed._replace(gaps=())
        gap = DurableGap(GapReason.DISCARDED, wanted, placed.position, 0 if pruned else gone)
        return placed._replace(gaps=(gap,))
