"""Durables as a commit under construction leaves them, and the rows that it puts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from sow_peering import NO_STAMP, Stamp
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.layout import durable_key
from sow_server.engine.disk.rocks import META
from sow_server.engine.durables.model import Durable, DurableGap, GapReason, RemovedDurable, with_gap
from sow_server.engine.durables.registry import Durables
from sow_server.engine.durables.rows import encode_durable, encode_removed
from sow_server.engine.journal.reading import ChunkHeads
from sow_server.engine.stored import StoredStatistics


class DraftedDurables:
    """Owns the durables that one commit changes or removes, until it is written. Close it."""

    def __init__(self, durables: Durables, draft: Draft, topics: Mapping[int, Topic]) -> None:
        self.durables: Final = durables
        self.draft: Final = draft
        self.topics: Final = topics
        self.heads: Final = ChunkHeads(durables.rocks)
        self.now: Final = draft.now
        self._changed: dict[tuple[int, str], Durable] = {}
        self._removed: dict[tuple[int, str], RemovedDurable] = {}
        self._let_go: dict[int, Topic] = {}
        """Topics of which durables may hold less than before."""
        self._discarded: list[tuple[str, int]] = []

    # -- reading ----------------------------------------------------------------------------------------------------

    def get(self, topic: Topic, name: str) -> Durable | None:
        """A durable as this commit leaves it."""
        key = topic.id, name
        if key in self._removed:
            return None
        return self._changed.get(key) or self.durables.get(topic.id, name)

    def existing(self, topic: Topic) -> Iterator[Durable]:
        """The durables of a topic as this commit leaves them, without those that it creates. The slowest come first, by
        their positions before the commit."""
        of = self.durables.of_topic(topic.id)
        for _, name in [] if of is None else of.order:
            found = self.get(topic, name)
            if found is not None:
                yield found

    def holders(self, topic: Topic) -> Iterator[Durable]:
        """The durables that decide how far the floor may rise: the slowest, those with settings of their own, and those
        that this commit changes."""
        found = self.durables.of_topic(topic.id)
        if found is None or not (found.rows or self._changed):
            return
        if self.durables.shares_settings(topic, found):
            yield from [durable for durable in self._changed.values() if durable.topic_id == topic.id]
            for name in found.own:
                if (topic.id, name) not in self._removed:
                    yield self._changed.get((topic.id, name), found.rows[name])
            for _, name in found.order:
                if not self.is_changed(topic, name) and (topic.id, name) not in self._removed:
                    yield found.rows[name]
                    return
        else:
            yield from self.existing(topic)
            for durable in self._changed.values():
                if durable.topic_id == topic.id and durable.name not in found.rows:
                    yield durable

    def is_changed(self, topic: Topic, name: str) -> bool:
        """True if this commit changes a durable."""
        return (topic.id, name) in self._changed

    def removed(self, topic: Topic, name: str) -> RemovedDurable | None:
        """The durable of this name that was removed, if the name is still remembered."""
        found = self.durables.of_topic(topic.id)
        if (topic.id, name) in self._removed or found is None:
            return self._removed.get((topic.id, name))
        return found.removed.get(name)

    def figures(self, topic: Topic) -> StoredStatistics:
        """The topic's figures as this commit leaves them; unlike `Draft.figures`, without a row for them."""
        return self.draft.statistics.get(topic.id, topic.statistics)

    # -- changing ---------------------------------------------------------------------------------------------------

    def put(self, durable: Durable) -> None:
        """Adds or replaces a durable."""
        key = durable.topic_id, durable.name
        self._changed[key] = durable
        self._removed.pop(key, None)

    def remove(self, topic: Topic, name: str, *, buried: Stamp = NO_STAMP, idle: Stamp = NO_STAMP) -> None:
        """Removes a durable; the stamps are those of `RemovedDurable`."""
        self._changed.pop((topic.id, name), None)
        self._removed[topic.id, name] = RemovedDurable(self.now, buried, idle)
        self._let_go[topic.id] = topic

    def moved(self, topic: Topic, durable: Durable, position: int) -> Durable:
        """A durable at another position; `put` stores it."""
        if position == durable.position:
            return durable
        self._let_go[topic.id] = topic
        entries, size = self.heads.counts(topic, self.figures(topic), position)
        steps = tuple([step for step in durable.deliveries if step.upto > position])
        return durable._replace(position=position, entries=entries, bytes=size, deliveries=steps)

    def skip(self, topic: Topic, durable: Durable, upto: int, reason: GapReason) -> bool:
        """Acknowledges unacknowledged entries on behalf of a durable, and tells it of the gap. False: there were
        none."""
        if upto <= durable.position:
            return False
        moved = self.moved(topic, durable, upto)
        entries = moved.entries - durable.entries
        if entries <= 0:
            self.put(moved)
            return False
        gap = DurableGap(reason, durable.position, upto, entries)
        self.put(moved._replace(gaps=with_gap(durable.gaps, gap)))
        if reason is not GapReason.DISCARDED:  # those are counted once, where the floor rises
            self.count_discarded(reason.name.lower(), entries)
        return True

    def count_discarded(self, reason: str, entries: int) -> None:
        """Counts entries that are let go, once the commit is written."""
        self._discarded.append((reason, entries))

    # -- the end ----------------------------------------------------------------------------------------------------

    def let_go(self) -> list[Topic]:
        """The topics of which durables may hold less than before this commit, unless they were deleted."""
        return [topic for topic in self._let_go.values() if self.topics.get(topic.id) is topic]

    def finish(self) -> None:
        """Puts the rows into the batch."""
        puts = self.draft.batch.puts[META]
        for (topic_id, name), removed in self._removed.items():
            puts[durable_key(topic_id, name)] = encode_removed(removed)
        for durable in self._changed.values():
            puts[durable_key(durable.topic_id, durable.name)] = encode_durable(durable)
        if self._changed or self._removed or self._discarded:
            self.draft.on_commit.append(self._committed)

    def _committed(self) -> None:
        durables = self.durables
        durables.take_over(
            self._changed.values(), [(topic_id, name, gone) for (topic_id, name), gone in self._removed.items()]
        )
        for topic_id in {topic_id for topic_id, _ in self._removed} & self.topics.keys():
            durables.lost(self.topics[topic_id])
        for reason, entries in self._discarded:
            durables.count_discarded(reason, entries)

    def close(self) -> None:
        """Closes the cursor on the journal."""
        self.heads.close()
