"""Column family `tombstones`: the traces of records that were deleted or have expired (rule R4).

key    topic u32 | record key
value  version i64 | sequence i64 | made i64 | origin u16 | kind u8 (DELETE or EXPIRE)
key    ff ff ff ff | sequence i64 | topic u32 | record key          value  empty: the order of making
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.stored.words import i64

MADE_SEQUENCE: Final = slice(4, 12)
"""The place of the sequence in a key of the order of making; the next two are such places, too."""
MADE_STORE_KEY: Final = slice(12, None)
MADE_TOPIC: Final = slice(12, 16)
_TOMBSTONE: Final = Struct(">qqqHB")


class Tombstone(NamedTuple):
    """The trace of a record that was deleted or has expired: an older version must not bring it back (rule R4)."""

    version: int
    sequence: int
    """The sequence of the change here that left it."""
    made_micros: int
    origin: int
    kind: int
    """DELETE or EXPIRE."""


MADE_ORDER: Final = b"\xff\xff\xff\xff"
"""The prefix of the keys that keep the order in which tombstones were made; no topic has this id."""


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """27 bytes."""
    return _TOMBSTONE.pack(*tombstone)


def decode_tombstone(value: bytes) -> Tombstone:
    """The tombstone of a row."""
    return Tombstone(*_TOMBSTONE.unpack(value))


def made_key(sequence: int, store_key: bytes) -> bytes:
    """The key under which the order of tombstones is kept."""
    return MADE_ORDER + i64(sequence) + store_key
