"""Column family `records`: the last value of every key.

    key    topic u32 | record key utf-8
    value  header (40 bytes) | payload

    header  0 format u8 | 1 flags u8 | 2 origin u16 | 4 payload length u32 | 8 version i64
            | 16 publish time i64 | 24 expire time i64 | 32 sequence i64 (of the record's last change)

40 bytes are five words, so a run of headers is an array of int64 and a column of it is a slice. A key of this family is
called a store key; a header without its payload is called a head.

Expire times and sequences can be compared as their eight bytes: all of them are positive, so the order is the same.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from operator import itemgetter
from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.stored.words import FORMAT
from sow_server.engine.values.model import Record

TOPIC: Final = slice(0, 4)
"""The place of the topic's prefix in a store key."""
RECORD_KEY: Final = slice(4, None)
"""The place of the record key in a store key."""
HEADER_BYTES: Final = 40
HEADER: Final = slice(0, HEADER_BYTES)
"""The place of the header in a stored value."""
PAYLOAD: Final = slice(HEADER_BYTES, None)
"""The place of the payload in a stored value."""
_record_key_of: Final[Callable[[bytes], bytes]] = itemgetter(RECORD_KEY)
_head_of: Final[Callable[[bytes], bytes]] = itemgetter(HEADER)
_payload_of: Final[Callable[[bytes], bytes]] = itemgetter(PAYLOAD)
ORIGIN: Final = slice(2, 4)
"""The place of the origin in a header or a stored value; the next four are such places, too."""
VERSION: Final = slice(8, 16)
PUBLISH_TIME: Final = slice(16, 24)
EXPIRE_TIME: Final = slice(24, 32)
SEQUENCE: Final = slice(32, 40)
_HEADER: Final = Struct(">BBHIqqqq")
HEADER_FAST: Final = Struct(">4sIq16sq")
"""The header in five pieces: `header_start`, payload length, version, publish and expire time, sequence."""


def header_start(origin: int) -> bytes:
    """The first four bytes of a header."""
    return bytes((FORMAT, 0, origin >> 8, origin & 0xFF))


def header(
    *, origin: int, payload_bytes: int, version: int, publish_time: int, expire_time: int, sequence: int
) -> bytes:
    """The 40 bytes in front of a payload."""
    return _HEADER.pack(FORMAT, 0, origin, payload_bytes, version, publish_time, expire_time, sequence)


class Header(NamedTuple):
    """The words of one header."""

    origin: int
    payload_bytes: int
    version: int
    publish_time_micros: int
    expire_time_micros: int
    sequence: int


def read_header(value: bytes) -> Header:
    """The header of a stored value, or of a cached head."""
    _, _, origin, length, version, publish_time, expire_time, sequence = _HEADER.unpack_from(value)
    return Header(origin, length, version, publish_time, expire_time, sequence)


def record(key: bytes, value: bytes) -> Record:
    """The record that is stored as `value` under the record key `key`."""
    _, _, origin, _, version, publish_time, expire_time, sequence = _HEADER.unpack_from(value)
    return Record(key, value[HEADER_BYTES:], version, publish_time, expire_time, origin, sequence)


_NO_HEAD: Final = bytes(HEADER_BYTES)


def sequences(heads: Sequence[bytes | None]) -> array[int]:
    """The sequences of many heads, 0 for None."""
    words = array("q", b"".join([head or _NO_HEAD for head in heads]))
    if sys.byteorder == "little":
        words.byteswap()
    return words[4::5]


def versions(heads: Sequence[bytes | None]) -> array[int]:
    """The versions of many heads, 0 for None."""
    words = array("q", b"".join([head or _NO_HEAD for head in heads]))
    if sys.byteorder == "little":
        words.byteswap()
    return words[1::5]


def payload_bytes_each(heads: Sequence[bytes]) -> array[int]:
    """The payload lengths of many heads."""
    halves = array("I", b"".join(heads))
    if sys.byteorder == "little":
        halves.byteswap()
    return halves[1::10]


class HeaderColumns(NamedTuple):
    """The words of many headers, column by column."""

    version: array[int]
    publish_time: array[int]
    expire_time: array[int]
    sequence: array[int]
    origin: array[int]


def payloads(values: Sequence[bytes]) -> list[bytes]:
    """The payloads of stored values."""
    return list(map(_payload_of, values))


def record_keys(store_keys: Sequence[bytes]) -> list[bytes]:
    """The record keys of store keys."""
    return list(map(_record_key_of, store_keys))


def header_columns(values: Sequence[bytes]) -> HeaderColumns:
    """The headers of stored values, in columns: a slice an array instead of an unpack a record."""
    headers = b"".join(map(_head_of, values))
    words, quarters = array("q", headers), array("H", headers)
    if sys.byteorder == "little":
        words.byteswap()
        quarters.byteswap()
    return HeaderColumns(words[1::5], words[2::5], words[3::5], words[4::5], quarters[1::20])


def add_headers(columns: HeaderColumns, values: Sequence[bytes]) -> None:
    """Appends the headers of more stored values."""
    for column, more in zip(columns, header_columns(values), strict=True):
        column.extend(more)
