"""Column family `expiry`: the expiry index, in the order of expire times.

key    expire time i64 | topic u32 | record key        value  empty
"""

from __future__ import annotations

from typing import Final

from sow_server.engine.stored.words import i64

DUE: Final = slice(0, 8)
"""The place of the expire time in an entry."""
DUE_STORE_KEY: Final = slice(8, None)
"""The place of the record's store key in an entry."""
DUE_TOPIC: Final = slice(8, 12)
"""The place of the topic's prefix in an entry."""
DUE_TOPIC_AT: Final = 8
"""The start of the topic's prefix in an entry."""


def expiry_entry(expire_time: int, store_key: bytes) -> bytes:
    """The entry of a record."""
    return i64(expire_time) + store_key
