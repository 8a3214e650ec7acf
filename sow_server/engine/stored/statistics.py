"""The figures of a topic: a row of the column family `meta`.

"stats/"       u32   twelve i64
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

_STATS: Final = Struct(">12q")


class StoredStatistics(NamedTuple):
    """Figures of a topic, written in the same batch as the counted changes. For the journal they count everything that
    was ever appended, and the discarded part (at or below the floor; bytes chunk by chunk): both only grow."""

    records: int = 0
    record_bytes: int = 0
    appended_entries: int = 0
    appended_bytes: int = 0
    trimmed_entries: int = 0
    trimmed_bytes: int = 0
    floor_sequence: int = 0
    created_sequence: int = 0
    last_sequence: int = 0
    """The sequence of the last journaled change; 0 if there was none."""
    tombstones: int = 0
    """Tombstones that are not yet purged; a replaced one counts until its own turn."""
    purged_version: int = 0
    """The highest version among the purged tombstones; 0: there were none."""
    purged_origin: int = 0

    @property
    def journal_entries(self) -> int:
        """Entries above the floor."""
        return self.appended_entries - self.trimmed_entries

    @property
    def journal_bytes(self) -> int:
        """Bytes of the chunks that have entries above the floor."""
        return self.appended_bytes - self.trimmed_bytes

    def counted(self, records: int, size: int) -> StoredStatistics:
        """The figures with so many records more, and bytes. Without `_replace`, which costs three times as much: every
        commit counts."""
        return StoredStatistics(self.records + records, self.record_bytes + size, *self[2:])

    def appended(self, entries: int, size: int, last_sequence: int) -> StoredStatistics:
        """The figures with a chunk of the journal more."""
        appended = self.appended_entries + entries, self.appended_bytes + size
        return StoredStatistics(*self[:2], *appended, *self[4:8], last_sequence, *self[9:])

    def trimmed(self, floor: int) -> StoredStatistics:
        """The figures after everything journaled so far is discarded: the floor is at least `floor`."""
        return self._replace(
            trimmed_entries=self.appended_entries,
            trimmed_bytes=self.appended_bytes,
            floor_sequence=max(self.floor_sequence, floor),
        )


def encode_statistics(statistics: StoredStatistics) -> bytes:
    """Twelve words."""
    return _STATS.pack(*statistics)


def decode_statistics(value: bytes) -> StoredStatistics:
    """The statistics of a row."""
    return StoredStatistics(*_STATS.unpack(value))
