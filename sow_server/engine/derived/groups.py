"""The groups of views in memory, so that a change of a group need not read it.

[1]  A group is taken out while a draft changes it, and put back once the draft is committed. So the changes of a draft
     that is dropped are never here: the next look reads the group from disk.
[2]  There are at most so many groups, of at most so many bytes. Those go first that were not changed for the longest
     time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sow_server.engine.derived.plans import Group

GROUPS_MAX: Final = 20_000
GROUPS_BYTES_MAX: Final = 64 * 2**20


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
            size = group.memory
            kept[prefix + key] = group, size
            self._bytes += size
        while len(kept) > self._groups_max or self._bytes > self._bytes_max:
            _, size = kept.pop(next(iter(kept)))
            self._bytes -= size

    def clear(self) -> None:
        """Forgets everything."""
        self._groups.clear()
        self._bytes = 0
