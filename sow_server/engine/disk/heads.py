"""The head cache: record key → 40-byte header, so that an update need not read the old record (owned by the writer).

[1]  An entry equals the header on disk: entries change only after their commit, and are removed with their record.
[2]  About `capacity` entries, in two generations; the older goes when, after a commit, the younger is half full.
     That is nearly least-recently-used, and costs no bookkeeping per look-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat


class HeadCache:
    """Two generations of headers by store key (topic ‖ record key)."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, keys: Sequence[bytes], heads: dict[bytes, bytes | None]) -> list[bytes]:
        """Puts the cached heads of `keys` into `heads`, None for the keys that are in neither; returns these."""
        if heads:
            keys = [key for key in keys if key not in heads]
        # Whole columns, as this is on the path of every publish.
        heads.update(zip(keys, map(self._young.get, keys), strict=True))
        missing = [key for key in keys if heads[key] is None]
        if missing and self._old:
            heads.update(zip(missing, map(self._old.get, missing), strict=True))
            missing = [key for key in missing if heads[key] is None]
        return missing

    def update(self, heads: Mapping[bytes, bytes | None], removed: Sequence[bytes]) -> None:
        """Takes over the heads of a commit; `removed` are the keys whose record is gone."""
        young = self._young
        if removed or None in heads.values():
            # Whole columns here, too: this is on the path of every expiry.
            gone = [key for key in removed if heads[key] is None]
            for generation in (young, self._old):
                if generation:
                    deque(map(generation.pop, gone, repeat(None)), maxlen=0)
            if any(heads.values()):
                # Missing keys that were looked up are not kept here either.
                young.update({key: head for key, head in heads.items() if head is not None})
        else:
            young.update(heads)  # type: ignore[arg-type]  # there is no None among them
        if len(young) > self._half:
            self._old, self._young = young, {}

    def clear(self) -> None:
        """Forgets everything."""
        self._young, self._old = {}, {}
