"""The groups and the rows of views in memory, so that a change need not read them.

[1]  A group is taken out while a draft changes it, and put back once the draft is committed. So the changes of a draft
     that is dropped are never here: the next look reads the group from disk.
[2]  There are at most so many groups, of at most so many bytes. Those go first that were not changed for the longest
     time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from sys import getsizeof
from typing import Final

from sow_server.engine.derived.plans import Group, Row

GROUPS_MAX: Final = 20_000
GROUPS_BYTES_MAX: Final = 64 * 2**20
ROWS_MAX: Final = 200_000
"""Rows of all views together."""
ROWS_BYTES_MAX: Final = 64 * 2**20
"""Their memory, about."""
_ROW_BYTES: Final = 200
"""Memory of an entry besides its values."""


class GroupCache:
    """Owns the groups, by the prefix of their view's topic with their key. For the writer's thread."""

    __slots__ = ("_bytes", "_bytes_max", "_groups", "_groups_max")

    def __init__(self, groups_max: int = GROUPS_MAX, bytes_max: int = GROUPS_BYTES_MAX) -> None:
        self._groups_max = groups_max
        self._bytes_max = bytes_max
        self._groups: dict[bytes, tuple[Group, int]] = {}
        """Groups with their memory; those that were changed last come last [2]."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, prefix: bytes, keys: Iterable[bytes]) -> dict[bytes, Group]:
        """Takes the groups of some keys out, as far as they are here [1]."""
        found: dict[bytes, Group] = {}
        pop = self._groups.pop
        for key in keys:
            there = pop(prefix + key, None)
            if there is not None:
                found[key], size = there
                self._bytes -= size
        return found

    def keep(self, prefix: bytes, groups: Mapping[bytes, Group]) -> None:
        """Puts groups back as they are after a commit."""
        kept = self._groups
        for key, group in groups.items():
            size = group.memory + len(group.document)
            kept[prefix + key] = group, size
            self._bytes += size
        while len(kept) > self._groups_max or self._bytes > self._bytes_max:
            _, size = kept.pop(next(iter(kept)))
            self._bytes -= size

    def clear(self) -> None:
        """Forgets everything."""
        self._groups.clear()
        self._bytes = 0


class RowCache:
    """The rows that the records of a source bring to one view, by store key, as of the last commit. So a record that
    changes need not be read and decoded as it was. For the writer's thread.

    Rows go in two generations, the older one once the younger one has half of the rows, or of the memory.
    """

    __slots__ = ("_added", "_added_bytes", "_old", "_young")

    def __init__(self) -> None:
        self._old: dict[bytes, Row] = {}
        self._young: dict[bytes, Row] = {}
        self._added = 0
        """Rows that the younger generation has taken, with those that have replaced others."""
        self._added_bytes = 0
        """Their memory."""

    def __len__(self) -> int:
        return len(self._old) + len(self._young)

    def find(self, store_keys: Sequence[bytes]) -> list[Row | None]:
        """The rows of records; None: it is not here."""
        found = list(map(self._young.get, store_keys))
        if self._old and None in found:
            old = self._old
            found = [old.get(key) if row is None else row for key, row in zip(store_keys, found, strict=True)]
        return found

    def update(self, rows: Mapping[bytes, Row], rows_max: int, bytes_max: int) -> None:
        """Takes over the rows of a commit."""
        young = self._young
        young.update(rows)
        self._added += len(rows)
        self._added_bytes += _memory_of(rows.values())
        # Rows that replace others are counted again, so that the average tells the memory, and not the sum.
        if 2 * len(young) > rows_max or 2 * len(young) * self._added_bytes > bytes_max * self._added:
            self._old, self._young = young, {}
            self._added = self._added_bytes = 0


def _memory_of(rows: Collection[Row]) -> int:
    """About how many bytes rows take."""
    values = list(chain.from_iterable(rows))
    size = _ROW_BYTES * len(rows) + sum(map(getsizeof, values))
    if tuple in set(map(type, values)):
        # A group of several values, and one that is no text, is named by pairs of a type and a value.
        size += sum([getsizeof(value) for name in values if type(name) is tuple for _, value in name])
    return size
