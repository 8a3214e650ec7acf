"""The share of a key, wherever records are divided by their keys: among servers, the topics of a family, and readers.

[1]  It is the CRC-32 of the key in UTF-8, modulo the number of shares. Every language has that sum, and so does SQL
     (Spark's `crc32`), so a program in any of them finds a key where another one has put it.
"""

from __future__ import annotations

from zlib import crc32


def share_of_key(key: bytes, shares: int) -> int:
    """The number of the share that has a key, from 0 on."""
    return crc32(key) % shares
