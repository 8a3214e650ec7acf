"""How far back a journal is kept: the first sequence inside a period, a size or a number of entries (rule J3).
`durables` decides which entries are discarded.

[1]  Entries outside the bounds once stay outside: times only rise and the journal only grows.
[2]  A commit row is removed once no topic retains a change from before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.rocks import COMMITS, Batch, Rocks
from sow_server.engine.journal.reading import ChunkHeads, StoredChunk
from sow_server.engine.stored import StoredStatistics, i64

MEMOS_MAX: Final = 16
"""Remembered bounds of one topic: those that are no longer in force are forgotten with the others."""


class JournalBounds(NamedTuple):
    """The bounds of a journal: how far back it is kept. None: no bound of that kind."""

    time_micros: int | None = None
    bytes: int | None = None


NO_BOUNDS: Final = JournalBounds()


class Retention:
    """Remembers where the kept part of a topic begins, so that a topic where nothing has changed costs no read.

    Used by the writer's thread alone.
    """

    def __init__(self) -> None:
        self._found: dict[int, dict[JournalBounds, StoredChunk]] = {}

    def first(
        self, heads: ChunkHeads, topic: Topic, figures: StoredStatistics, bounds: JournalBounds, now_micros: int
    ) -> int:
        """The first sequence inside the bounds, above the floor; behind the last one if there is none.

        An entry exactly at the cut-off is outside (rule J4). Because times only rise and the journal only grows, an
        entry that is outside once stays outside.
        """
        if bounds == NO_BOUNDS or figures.last_sequence <= figures.floor_sequence:
            return figures.floor_sequence + 1
        chunk = self.chunk(heads, topic, figures, bounds, now_micros)
        if chunk is None:
            return figures.last_sequence + 1
        if chunk.entries_before <= figures.trimmed_entries:
            return figures.floor_sequence + 1  # no entries are in between
        return max(chunk.first_sequence, figures.floor_sequence + 1)

    def chunk(
        self, heads: ChunkHeads, topic: Topic, figures: StoredStatistics, bounds: JournalBounds, now_micros: int
    ) -> StoredChunk | None:
        """The first chunk inside the bounds that has entries above the floor; None: there is none."""
        floor = figures.floor_sequence
        found = self._found.setdefault(topic.id, {})
        known = found.get(bounds)
        if known is not None and known.last_sequence > floor:
            if _keeps(known, bounds, figures, now_micros):
                return known
            start = known.first_sequence
        else:
            reaching = heads.after(topic, floor)
            start = floor + 1 if reaching is None else reaching.first_sequence
        first = heads.first(topic, start, lambda chunk: _keeps(chunk, bounds, figures, now_micros))
        if first is None:
            found.pop(bounds, None)
            return None
        if len(found) >= MEMOS_MAX:
            found.clear()
        found[bounds] = first
        return first

    def forget(self, topic_id: int) -> None:
        """The topic is gone."""
        self._found.pop(topic_id, None)


def first_inside(
    heads: ChunkHeads, topic: Topic, figures: StoredStatistics, bounds: JournalBounds, now_micros: int
) -> int:
    """As `Retention.first`, from any thread."""
    return Retention().first(heads, topic, figures, bounds, now_micros)


def _keeps(chunk: StoredChunk, bounds: JournalBounds, figures: StoredStatistics, now_micros: int) -> bool:
    time, size = bounds
    return (time is None or chunk.commit_time_micros > now_micros - time) and (
        size is None or figures.appended_bytes - chunk.bytes_before <= size
    )


def beyond_entries(heads: ChunkHeads, topic: Topic, figures: StoredStatistics, entries_max: int) -> int:
    """The last sequence beyond the newest `entries_max` entries; at most the floor where there is none."""
    allowed = figures.appended_entries - entries_max
    if allowed <= figures.trimmed_entries:
        return 0
    chunk = heads.first(
        topic,
        heads_start(heads, topic, figures),
        lambda chunk: chunk.entries_before + chunk.entries > allowed,
    )
    if chunk is None:
        return figures.last_sequence
    return chunk.first_sequence + allowed - chunk.entries_before - 1


def heads_start(heads: ChunkHeads, topic: Topic, figures: StoredStatistics) -> int:
    """The start of the first chunk with an entry above the floor."""
    reaching = heads.after(topic, figures.floor_sequence)
    return figures.floor_sequence + 1 if reaching is None else reaching.first_sequence


def prune_commits(rocks: Rocks, firsts: Iterable[int], batch: Batch, last_sequence: int) -> None:
    """Puts into `batch` the removal of the commit rows from before the first retained change of any topic; `firsts` are
    those changes."""
    first_kept = min([last_sequence + 1, *firsts])
    rows = rocks.cursor(COMMITS, fill_cache=False)
    try:
        # The row whose commit reaches over the first kept sequence begins at or before it, and stays.
        reaching = rows.last_before(i64(first_kept))
    finally:
        rows.close()
    if reaching is not None:
        batch.ranges.append((COMMITS, i64(0), reaching[0]))
