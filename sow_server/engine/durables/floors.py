"""The floor of a topic: how far limits, retention, durables and peers let it rise (durables [2], [3])."""

from __future__ import annotations

from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.rocks import JOURNAL
from sow_server.engine.durables.drafted import DraftedDurables
from sow_server.engine.durables.model import Durable, GapReason
from sow_server.engine.journal.retention import NO_BOUNDS, JournalBounds, beyond_entries

RETENTION: Final = "retention"
"""The cause of a rise that no hard limit has forced."""


class FloorTargets(NamedTuple):
    """The floor to which a topic may rise, and the one to which it has to."""

    held: int
    """No durable holds the entries up to here."""
    hard: int
    """A hard limit discards the entries up to here; 0: none does."""
    limit: str
    """The name of that limit."""


class TopicFloors:
    """Raises floors of topics in one commit."""

    def __init__(self, drafted: DraftedDurables) -> None:
        self._drafted = drafted
        self._durables = drafted.durables
        self._heads = drafted.heads

    def keep(self, topic: Topic) -> int | None:
        """Raises the topic's floor to where its settings and its durables let it be, and removes the entries below it.
        Returns the first sequence that is retained; None where nothing is (rules J3, J11)."""
        targets = self._targets(topic)
        self._raise(topic, targets.held, RETENTION)
        self._raise(topic, targets.hard, targets.limit)
        draft, freed = self._drafted.draft, self._durables.freed
        figures = self._drafted.figures(topic)
        first: int | None = None
        if figures.journal_entries:
            chunk = self._durables.retention.chunk(self._heads, topic, figures, NO_BOUNDS, self._drafted.now)
            first = None if chunk is None else max(chunk.first_sequence, figures.floor_sequence + 1)
        if figures.floor_sequence > freed.get(topic.id, 0) and figures.appended_entries:
            below = self._heads.upto(topic, figures.floor_sequence)
            if below is not None:
                stop = below.first_sequence if below.last_sequence > figures.floor_sequence else below.last_sequence + 1
                draft.batch.ranges.append((JOURNAL, topic.prefix, topic.prefix + stop.to_bytes(8, "big")))
            done = figures.floor_sequence
            draft.on_commit.append(lambda: freed.__setitem__(topic.id, done))
        return first

    def keep_limits(self, topic: Topic) -> None:
        """Discards the entries beyond the hard limits before somebody begins to read, however long ago the last prune
        was."""
        settings = topic.settings
        if (settings.max_age_micros, settings.max_bytes, settings.max_entries) != (None, None, None):
            targets = self._targets(topic)
            if targets.hard > targets.held:
                self._raise(topic, targets.hard, targets.limit)

    def let_go(self) -> None:
        """Raises the floors of the topics of which durables hold less after this commit (durables [3])."""
        for topic in self._drafted.let_go():
            self._raise(topic, self._targets(topic).held, RETENTION)

    def earliest(self, topic: Topic, durable: Durable) -> int:
        """The position from which a durable can read; entries up to there are gone for it (rule J5)."""
        settings = self._durables.settings(topic, durable)
        bounds = JournalBounds(settings.retain_time_micros, settings.retain_bytes)
        figures = self._drafted.figures(topic)
        inside = self._durables.retention.first(self._heads, topic, figures, bounds, self._drafted.now)
        return max(min(durable.position, inside - 1), durable.floor, figures.floor_sequence, figures.created_sequence)

    def _targets(self, topic: Topic) -> FloorTargets:
        durables, heads, settings = self._durables, self._heads, topic.settings
        figures = self._drafted.figures(topic)
        first, now = durables.retention.first, self._drafted.now
        bounds = {JournalBounds(settings.retain_time_micros, settings.retain_bytes): None}
        held = durables.held_for_peers(heads, topic, figures, now)
        for durable in self._drafted.holders(topic):
            held = min(held, durable.position)
            own = durables.settings(topic, durable)
            bounds[JournalBounds(own.retain_time_micros, own.retain_bytes)] = None
        for bound in bounds:
            held = min(held, first(heads, topic, figures, bound, now) - 1)
        hard, limit = 0, ""
        for name, bound in (
            ("max_age", JournalBounds(time_micros=settings.max_age_micros)),
            ("max_bytes", JournalBounds(bytes=settings.max_bytes)),
        ):
            if bound != NO_BOUNDS:
                upto = first(heads, topic, figures, bound, now) - 1
                if upto > max(hard, figures.floor_sequence):
                    hard, limit = upto, name
        if settings.max_entries is not None:
            upto = beyond_entries(heads, topic, figures, settings.max_entries)
            if upto > max(hard, figures.floor_sequence):
                hard, limit = upto, "max_entries"
        return FloorTargets(held, hard, limit)

    def _raise(self, topic: Topic, floor: int, reason: str) -> None:
        """Raises the floor, if that is higher. Durables that have not come that far are told of a gap."""
        drafted = self._drafted
        figures = drafted.figures(topic)
        if floor <= figures.floor_sequence:
            return
        below = self._heads.upto(topic, floor)
        # The floor is the last entry that is let go, not a place between two: a bookmark there misses nothing.
        floor = figures.floor_sequence if below is None else min(floor, below.last_sequence)
        if floor <= figures.floor_sequence:
            return
        entries, size = self._heads.counts(topic, figures, floor)
        late: list[Durable] = []
        for durable in drafted.existing(topic):
            if durable.position < floor:
                late.append(durable)
            elif not drafted.is_changed(topic, durable.name):
                break  # the others are faster
        for durable in late:
            drafted.skip(topic, durable, floor, GapReason.DISCARDED)
        drafted.count_discarded(reason, entries - figures.trimmed_entries)
        drafted.draft.statistics[topic.id] = figures._replace(
            floor_sequence=floor, trimmed_entries=entries, trimmed_bytes=size
        )
