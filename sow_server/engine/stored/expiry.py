"""Column family `expiry`: the expiry index, in the order of expire times.

key    expire time i64 | topic u32 | record key        value  empty
"""

from __future__ import annotations

from typing import Final

from sow_server.engine.stored.words import i64

DUE: Final = slice(0, 8)
"""Of an entry: its expire time."""
DUE_STORE_KEY: Final = slice(8, None)
"""Of an entry: the store key of its record."""
DUE_TOPIC: Final = slice(8, 12)
"""Of an entry: the prefix of its topic."""
DUE_TOPIC_AT: Final = 8
"""Of an entry: the start of the prefix of its topic."""


def expiry_entry(expire_time: int, store_key: bytes) -> bytes:
    """The entry of a record."""
    return i64(expire_time) + store_key
