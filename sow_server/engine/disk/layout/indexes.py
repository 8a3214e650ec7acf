"""Column family `indexes`: the entries of secondary indexes, in the order of values. Pure.

    key    topic u32 | index u16 | kind u8 | value | record key          value  empty

The value is that of stored/ordered.py. Entries are in the order of values. Entries of one value are in the
order of record keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow_server.engine.stored.ordered import FLOAT_BYTES, TEXT_BYTES_MAX, TEXT_END, index_value
from sow_server.engine.stored.words import u16, u32
from sow_server.engine.values.fields import Kind

__all__ = ["PREFIX_BYTES", "TEXT_BYTES_MAX", "index_prefix", "index_value", "indexed_keys"]

PREFIX_BYTES: Final = 6
_ENTRY_BYTES: Final = {Kind.BOOLEAN: PREFIX_BYTES + 2, Kind.NUMBER: PREFIX_BYTES + FLOAT_BYTES}
"""Where the record key begins, for values of one length."""


def index_prefix(topic_id: int, index_id: int) -> bytes:
    """The beginning of an index's entries."""
    return u32(topic_id) + u16(index_id)


def indexed_keys(entries: Sequence[bytes]) -> list[bytes]:
    """The record keys of entries, which are in order."""
    if not entries:
        return []
    kind = entries[0][PREFIX_BYTES]
    if kind != entries[-1][PREFIX_BYTES]:
        return [indexed_keys([entry])[0] for entry in entries]
    if kind == Kind.TEXT:
        # Zeros inside a text are followed by 255, so the first two in a row are its end.
        return [entry[entry.index(TEXT_END, PREFIX_BYTES + 1) + 2 :] for entry in entries]
    begin = _ENTRY_BYTES[Kind(kind)]
    return [entry[begin:] for entry in entries]
