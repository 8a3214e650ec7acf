"""The expiry horizon: how many records fall due when, from the expiry index (rule L22).

[1]  The index has an entry at or before the expire time of every record that can expire. The sweep writes the entry of
     a refreshed record anew only when it meets the old one, and may meet entries of records that are gone. So the
     records of the first RECORDS_MAX entries are looked at. As no entry is later than its record's expire time, the
     counts are exact up to the last of these entries. Behind it, each entry counts as one record, at its own time,
     unless its record is counted already; with `exact` the count ends there.
[2]  A count is of one instant, read in pieces of bounded work. It ends after a number of entries of the counted topics,
     and tells up to where it came. Entries of other topics make no difference to that (rule A4).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.reading import Cuts
from sow_server.engine.stored import DUE, DUE_STORE_KEY, DUE_TOPIC, EXPIRE_TIME, i64, unpack_i64

PIECE_ENTRIES: Final = 20_000
PIECE_RECORDS: Final = 2_000
ENTRIES_MAX: Final = 1_000_000
RECORDS_MAX: Final = 100_000
"""The most entries that are counted, and the most of them whose records are looked at."""

_time_of: Final = itemgetter(DUE)
_topic_of: Final = itemgetter(DUE_TOPIC)


@dataclass(slots=True)
class TopicHorizon:
    """The records of one topic, by when they fall due."""

    topic: Topic
    due: list[int]
    """First those that are overdue and not yet removed, then those up to each edge."""
    incomplete: bool
    """True if the index had not yet an entry for each record, because expiration had just been enabled."""
    next_micros: int | None = None
    """When the first one falls due. None: none does, as far as was counted."""


class Horizon:
    """Counts, piece by piece. From any thread, one at a time; close it."""

    def __init__(self, cuts: Cuts, topics: Collection[Topic], edges: Sequence[int], *, exact: bool) -> None:
        """`edges`: offsets from now, rising, above 0."""
        self.now_micros, self._cut, rearming = cuts.expiry(topics)
        self._ends = [self.now_micros, *[self.now_micros + edge for edge in edges]]
        self.counted: Final = {
            topic.prefix: TopicHorizon(topic, [0] * len(self._ends), topic.prefix in rearming) for topic in topics
        }
        """Keyed by the prefix of the topic."""
        self.upto_micros = self._ends[-1]
        """Everything that falls due up to here is counted."""
        self.exact_upto_micros = self._ends[-1]
        """Up to here, records are counted; behind it, entries."""
        self.done = False
        self._exact = exact
        self._start = self._cut.floor
        self._looks = RECORDS_MAX
        self._left = RECORDS_MAX if exact else ENTRIES_MAX
        self._ahead: set[bytes] = set()
        """Store keys of records that were counted ahead of the entry that was read."""

    def read(self) -> None:
        """The next piece of work."""
        found: list[bytes] = []
        size = PIECE_RECORDS if self._looks else PIECE_ENTRIES
        following = self._cut.entries.fill_keys_before(self._start, i64(self._ends[-1] + 1), size, found)
        acting = self._cut.acting
        entries = [entry for entry in found if entry[DUE_TOPIC] in acting]
        if len(entries) > self._left:
            self.upto_micros, self.done = unpack_i64(entries[self._left][DUE]) - 1, True
            del entries[self._left :]
        self._left -= len(entries)
        looked_at, entries = entries[: self._looks], entries[self._looks :]
        self._count_records(looked_at)
        self._looks -= len(looked_at)
        self._count_entries(entries)
        self.exact_upto_micros = min(self.exact_upto_micros, self.upto_micros)
        if following is None:
            self.done = True
        else:
            self._start = following

    def _count_entries(self, entries: list[bytes]) -> None:
        if entries:
            self.exact_upto_micros = min(self.exact_upto_micros, unpack_i64(entries[0][DUE]) - 1)
        if self._ahead:
            entries = [entry for entry in entries if entry[DUE_STORE_KEY] not in self._ahead]
        for prefix, entry in {_topic_of(entry): entry for entry in reversed(entries)}.items():
            counted, stamp = self.counted[prefix], unpack_i64(entry[DUE])
            counted.next_micros = min(stamp, counted.next_micros or stamp)
        at = 0
        for place, end in enumerate(self._ends):
            upto = bisect_right(entries, i64(end), lo=at, key=_time_of)
            for prefix, count in Counter(map(_topic_of, entries[at:upto])).items():
                self.counted[prefix].due[place] += count
            at = upto

    def _count_records(self, entries: list[bytes]) -> None:
        for entry in entries:
            key = entry[DUE_STORE_KEY]
            value = self._cut.records.find(key)
            # A record with an earlier expire time was counted at an earlier entry.
            if value is None or value[EXPIRE_TIME] < entry[DUE] or key in self._ahead:
                continue
            stamp = unpack_i64(value[EXPIRE_TIME])
            if value[EXPIRE_TIME] > entry[DUE]:
                self._ahead.add(key)
            if stamp <= self._ends[-1]:
                counted = self.counted[entry[DUE_TOPIC]]
                counted.due[bisect_left(self._ends, stamp)] += 1
                counted.next_micros = min(stamp, counted.next_micros or stamp)

    def close(self) -> None:
        """Lets go of the cut."""
        self._cut.close()
