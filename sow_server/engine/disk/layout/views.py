"""Column family `views`: what views keep beside their records (rules V2, V6). Pure.

    key    topic u32 | 0                                                     value  i64 | i64
           topic u32 | 1 group key                                           value  the state of the group, its plan's
           topic u32 | 2 slot u8 | length u16 | group key | value | record key      empty

The topic is the view. The first row has the number of the source's records that were read to build it, and of those in
no group. The last ones are values of records in the order of stored/ordered.py, each slot for one MIN or MAX.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.stored.words import u16

_STATUS: Final = b"\0"
_GROUP: Final = b"\1"
_VALUES: Final = b"\2"
_COUNTS: Final = Struct(">qq")


class ViewCounts(NamedTuple):
    """Figures of a view that do not follow from its records."""

    records_read: int = 0
    ungrouped: int = 0


def view_counts_key(prefix: bytes) -> bytes:
    """The key of a view's figures, from the prefix of its topic."""
    return prefix + _STATUS


def encode_view_counts(counts: ViewCounts) -> bytes:
    """Their row."""
    return _COUNTS.pack(*counts)


def decode_view_counts(row: bytes) -> ViewCounts:
    """The figures in a row."""
    return ViewCounts(*_COUNTS.unpack(row))


def group_state_prefix(prefix: bytes) -> bytes:
    """The beginning of the keys of a view's groups; the group's key follows."""
    return prefix + _GROUP


def ordered_prefix(prefix: bytes, slot: int, group: bytes) -> bytes:
    """The beginning of the keys of the ordered values of a group; the value and the record's key follow."""
    return prefix + _VALUES + bytes((slot,)) + u16(len(group)) + group
