"""Record keys that an index has found, as long as the query lasts: nobody may read its answer (rule N5)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

HITS_BYTES_MAX: Final = 4 * 2**20
"""Bytes of the keys that are kept."""


def packed(keys: Sequence[bytes]) -> Iterator[bytes]:
    """The same keys, which take their bytes and four more each. A list of them takes 40 more each."""
    return _unpacked(b"".join(keys), array("I", map(len, keys)))


def _unpacked(joined: bytes, sizes: array[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield joined[start : start + size]
        start += size
