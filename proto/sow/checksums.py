"""The checksum of the records in a range of keys, by which a subscriber and a server find out that they hold the same.

[1]  Equal checksums mean the same keys with the same versions and origins. A version is issued once by its origin
     (rule K7), so these are the same records.
[2]  It depends on the records alone, not on how they came: server and client compute it here.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

RANGES_MAX: Final = 65_536
"""Ranges of a request."""
RANGE_RECORDS_MAX: Final = 10_000
"""Records of a range."""


def checksum(lengths: Iterable[int], keys: bytes, versions: array[int], origins: Iterable[str]) -> int:
    """The checksum of records in key order: the lengths of their keys in UTF-8, these keys one behind the other, their
    versions (typecode q), the names of their origins. The contract describes its form (HeldRanges.checksum)."""
    # A range has some 32 records, and a topic many ranges: columns cost a fifth of a loop over records.
    sizes = array("I", lengths)
    if sys.byteorder == "big":
        versions = versions[:]
        versions.byteswap()
        sizes.byteswap()
    names = "\n".join([*origins, ""])
    content = b"".join([sizes.tobytes(), keys, versions.tobytes(), names.encode()])
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")
