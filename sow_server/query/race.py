"""Chooses among the indexes and key ranges of a plan, by reading them in turns until one ends.

[1]  The way that ends first is taken. By then each of the others has been read at most ten times as far, or up to the
     first of RACE_STEPS.
[2]  The keys that a race keeps are bounded, in number and in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow_server.engine.reading import Cut
from sow_server.query.hits import HITS_BYTES_MAX
from sow_server.query.planner import IndexBound, Range
from sow_server.query.sources import FIND_CHUNK, Entries

HITS_MAX: Final = 200_000
"""Record keys from an index that may be sorted in memory."""
HITS_SHARE: Final = 4
"""An index is used if it finds at most one in this many of the stored records: a look-up costs that much more."""
RACE_STEPS: Final = (100, 1_000, 10_000, 100_000)
"""How far the ways are read in turns to see which one ends first. The others then cost at most ten times the entries of
the best, and an entry costs a tenth of a look-up."""
STREAMED_FROM: Final = 1_000
"""For a query that wants only the first few records, more matches than this need not be counted."""


class Race:
    """Finds the way that ends first: reads indexes, and ranges of record keys if there are any, in turns."""

    def __init__(self, cut: Cut, bounds: Sequence[IndexBound], ranges: Sequence[Range]) -> None:
        self._bounds = bounds
        self._indexes = [Entries(cut.indexes[bound.steps].fill, bound.intervals) for bound in bounds]
        prefix = cut.topic.prefix
        within = [(prefix + start, prefix + stop) for start, stop in ranges]
        self._ranges = Entries(cut.records.fill_keys_before, within) if within else None
        self._stored = cut.topic.statistics.records

    @property
    def entries(self) -> int:
        """Index entries read."""
        return sum([index.read for index in self._indexes])

    def run(self, *, for_few: bool) -> tuple[IndexBound, list[bytes] | None] | None:
        """The index to use, with the keys of all records that it finds. Without keys: they are too many, so the index
        is read as it stands, in key order. None: use no index."""
        most = max(STREAMED_FROM, min(HITS_MAX, self._stored // HITS_SHARE))
        keys: list[list[bytes]] = [[] for _ in self._indexes]
        for upto in [*[step for step in RACE_STEPS if step < most], most]:
            if self._ranges is not None:
                while not self._ranges.ended and self._ranges.read < upto:
                    self._ranges.fill(min(FIND_CHUNK, upto - self._ranges.read), [])
                if self._ranges.ended:
                    return None
            for bound, index, found in zip(self._bounds, self._indexes, keys, strict=True):
                while not index.ended and len(found) < upto and index.bytes < HITS_BYTES_MAX:
                    index.fill(min(FIND_CHUNK, upto - len(found)), found)
                if index.ended:
                    return bound, found
            if for_few and upto >= STREAMED_FROM:
                break
        first = self._bounds[0]
        if first.points and self._ranges is None and (for_few or most < self._stored // HITS_SHARE):
            return first, None
        return None
