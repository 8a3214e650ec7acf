"""Column family `indexes`: the entries of secondary indexes, in the order of values. Pure.

    key    topic u32 | index u16 | kind u8 | value | record key          value  empty

    value  1 boolean  u8: 0 or 1
           2 number   the nearest float64, no NaN, no -0; its sign bit inverted, if negative all its bits
           3 text     the first 256 bytes of its UTF-8, 0 as 0 255 | 0 0

Entries are in the order of values: booleans, numbers by value, texts by code point. Entries of one value are in the
order of record keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

from sow_server.engine.stored.words import u16, u32
from sow_server.engine.values.fields import Kind, Scalar, as_float

TEXT_BYTES_MAX: Final = 256
"""The entry of a longer text has only its beginning."""
PREFIX_BYTES: Final = 6
_FLOAT: Final = Struct(">d")
_WORD: Final = Struct(">Q")
_SIGN: Final = 1 << 63
_ALL_ONES: Final = (1 << 64) - 1
_TEXT_END: Final = b"\0\0"
_ENTRY_BYTES: Final = {Kind.BOOLEAN: PREFIX_BYTES + 2, Kind.NUMBER: PREFIX_BYTES + 9}
"""Where the record key begins, for values of one length."""


def index_prefix(topic_id: int, index_id: int) -> bytes:
    """The beginning of an index's entries."""
    return u32(topic_id) + u16(index_id)


def index_value(kind: Kind, value: Scalar) -> bytes:
    """A value in bytes that have its order, its kind in front."""
    if kind is Kind.TEXT:
        assert type(value) is str, "texts are str"
        # UTF-8 has the order of code points. A text of 256 bytes has no more than 256 characters.
        raw = value[:TEXT_BYTES_MAX].encode("utf-8", "surrogatepass")[:TEXT_BYTES_MAX]
        if b"\0" in raw:
            raw = raw.replace(b"\0", b"\0\xff")  # above the end, which a shorter text has in this place
        return b"\3" + raw + _TEXT_END
    if kind is Kind.NUMBER:
        assert type(value) is int or type(value) is float, "numbers are int or float"
        (bits,) = _WORD.unpack(_FLOAT.pack(as_float(value) + 0.0))  # -0.0 + 0.0 is 0.0
        return b"\2" + _WORD.pack(bits ^ _ALL_ONES if bits & _SIGN else bits ^ _SIGN)
    return b"\1\1" if value else b"\1\0"


def indexed_keys(entries: Sequence[bytes]) -> list[bytes]:
    """The record keys of entries, which are in order."""
    if not entries:
        return []
    kind = entries[0][PREFIX_BYTES]
    if kind != entries[-1][PREFIX_BYTES]:
        return [indexed_keys([entry])[0] for entry in entries]
    if kind == Kind.TEXT:
        # Zeros inside a text are followed by 255, so the first two in a row are its end.
        return [entry[entry.index(_TEXT_END, PREFIX_BYTES + 1) + 2 :] for entry in entries]
    begin = _ENTRY_BYTES[Kind(kind)]
    return [entry[begin:] for entry in entries]
