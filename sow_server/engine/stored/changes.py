"""Column family `journal`: every change, in chunks of consecutive changes of one topic in one commit.

    key    topic u32 | first sequence i64
    value  format u8 | flags u8 (1: of one atomic request) | source u16 | count u32 | commit time i64
           | entries before i64 | bytes before i64 (of the topic, ever, in front of this chunk)
           | columns: change u8*count, then (version, publish time, expire time, origin, previous sequence,
             removed version, removed origin), each as columns.py draws it
           | key lengths u16*count | payload lengths u32*count | keys | payloads

Instances send each other chunks in the same layout, with the sender's numbers of origins; source, previous sequence and
the two counts before have no meaning there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.stored.columns import Column
from sow_server.engine.stored.words import FORMAT, big_endian, i64, read_array, u32

PUT: Final = 1
TOUCH: Final = 2
"""A put of the whole record that changed its lifetime only (rule P8)."""
DELETE: Final = 3
EXPIRE: Final = 4
BURY: Final = 5
"""A delete, by a peer, of a record that is not here: for other peers alone (rule R4)."""
WITHDRAW: Final = 6
"""Between instances alone, on a link with a filter: the record is not for this peer, or not any more."""
FIRST_SEQUENCE: Final = slice(4, None)
"""The place of the first sequence in a key."""
_JOURNAL_HEAD: Final = Struct(">BBHIqqq")
_ONE_CHANGE: Final = Struct(">BBHIqqqB" + "Bq" * 7 + "HI")
"""All that is in front of the key in a value with one change; its columns are constant."""
_U16: Final = Struct(">H")
_I64: Final = Struct(">q")
_KINDS: Final = frozenset(range(PUT, WITHDRAW + 1))


class Changes(NamedTuple):
    """Consecutive changes of one topic in one commit, in columns of equal length.

    The payload is the new record's for PUT and TOUCH, the removed record's for DELETE and EXPIRE; `previous` is the
    sequence of the key's previous change, 0 when there was no live record (rule J1). A DELETE has a new version, an
    EXPIRE the version of the record; `removed_version` and `removed_origin` are those of the removed record, else 0.
    `atomic`: the whole chunk belongs to one atomic request. `source`: the instance that sent it, 0 for this one, see
    `replicas.py`; an EXPIRE always has 0. `entries_before` and `bytes_before` count everything ever journaled of the
    topic before this chunk, so the amount between two positions is a subtraction (rule J7).
    """

    first_sequence: int
    commit_time_micros: int
    change: bytes
    version: Column
    publish_time_micros: Column
    expire_time_micros: Column
    origin: Column
    previous: Column
    removed_version: Column
    removed_origin: Column
    keys: Sequence[bytes]
    payloads: Sequence[bytes]
    atomic: bool = False
    entries_before: int = 0
    bytes_before: int = 0
    source: int = 0


def journal_key(topic_id: int, first_sequence: int) -> bytes:
    """The place of the changes of one topic in one commit."""
    return u32(topic_id) + i64(first_sequence)


class ChangeRow(NamedTuple):
    """One change, without key and payload; the fields are those of `Changes`."""

    change: int
    version: int
    publish_time_micros: int
    expire_time_micros: int
    origin: int
    previous: int
    removed_version: int
    removed_origin: int


def encode_change(
    row: ChangeRow,
    key: bytes,
    payload: bytes,
    *,
    atomic: bool,
    source: int,
    commit_time_micros: int,
    entries_before: int,
    bytes_before: int,
) -> bytes:
    """A journal value with one change, as `encode_changes` makes it, at a fifth of its cost."""
    change, version, publish_time, expire_time, origin, previous, removed_version, removed_origin = row
    head = _ONE_CHANGE.pack(
        FORMAT,
        atomic,
        source,
        1,
        commit_time_micros,
        entries_before,
        bytes_before,
        change,
        0,
        version,
        0,
        publish_time,
        0,
        expire_time,
        0,
        origin,
        0,
        previous,
        0,
        removed_version,
        0,
        removed_origin,
        len(key),
        len(payload),
    )
    return head + key + payload


def encode_changes(changes: Changes) -> bytes:
    """One journal value."""
    count = len(changes.keys)
    return b"".join(
        [
            _JOURNAL_HEAD.pack(
                FORMAT,
                changes.atomic,
                changes.source,
                count,
                changes.commit_time_micros,
                changes.entries_before,
                changes.bytes_before,
            ),
            changes.change,
            changes.version.encode(),
            changes.publish_time_micros.encode(),
            changes.expire_time_micros.encode(),
            changes.origin.encode(),
            changes.previous.encode(),
            changes.removed_version.encode(),
            changes.removed_origin.encode(),
            big_endian("H", list(map(len, changes.keys))),
            big_endian("I", list(map(len, changes.payloads))),
            *changes.keys,
            *changes.payloads,
        ]
    )


def decode_changes(first_sequence: int, value: bytes) -> Changes:
    """The changes of a journal value."""
    return _decode_changes(first_sequence, value)[0]


def _decode_changes(first_sequence: int, value: bytes) -> tuple[Changes, int]:
    """The changes, and where they end."""
    _, flags, source, count, commit_time, entries_before, bytes_before = _JOURNAL_HEAD.unpack_from(value)
    at = _JOURNAL_HEAD.size
    change = value[at : at + count]
    at += count
    columns: list[Column] = []
    for _ in range(7):
        column, at = Column.decode(value, at, count)
        columns.append(column)
    key_lengths, at = read_array("H", value, at, count)
    payload_lengths, at = read_array("I", value, at, count)
    keys: list[bytes] = []
    for length in key_lengths:
        keys.append(value[at : at + length])
        at += length
    payloads: list[bytes] = []
    for length in payload_lengths:
        payloads.append(value[at : at + length])
        at += length
    version, publish_time, expire_time, origin, previous, removed_version, removed_origin = columns
    changes = Changes(
        first_sequence,
        commit_time,
        change,
        version,
        publish_time,
        expire_time,
        origin,
        previous,
        removed_version,
        removed_origin,
        keys,
        payloads,
        atomic=bool(flags & 1),
        entries_before=entries_before,
        bytes_before=bytes_before,
        source=source,
    )
    return changes, at


class Entry(NamedTuple):
    """One change of a journal value; the fields are those of `Changes`."""

    change: int
    version: int
    publish_time_micros: int
    expire_time_micros: int
    origin: int
    key: bytes
    payload: bytes


def decode_entry(value: bytes, index: int) -> Entry:
    """The change at a position of a journal value, without decoding the others."""
    change, numbers, key, payload = _decode_one(value, index)
    version, publish_time, expire_time, origin, *_ = numbers
    return Entry(change, version, publish_time, expire_time, origin, key, payload)


def decode_change(first_sequence: int, value: bytes, index: int) -> Changes:
    """As `decode_entry`, with all columns, as changes of length one."""
    change, numbers, key, payload = _decode_one(value, index)
    _, flags, source, _, commit_time, entries_before, bytes_before = _JOURNAL_HEAD.unpack_from(value)
    version, publish_time, expire_time, origin, previous, removed_version, removed_origin = (
        Column((number,)) for number in numbers
    )
    return Changes(
        first_sequence + index,
        commit_time,
        bytes((change,)),
        version,
        publish_time,
        expire_time,
        origin,
        previous,
        removed_version,
        removed_origin,
        [key],
        [payload],
        atomic=bool(flags & 1),
        entries_before=entries_before + index,
        bytes_before=bytes_before,
        source=source,
    )


def _decode_one(value: bytes, index: int) -> tuple[int, list[int], bytes, bytes]:
    """Kind, numbers, key and payload of one change."""
    count = changes_head(value).entries
    at = _JOURNAL_HEAD.size
    change = value[at + index]
    at += count
    numbers: list[int] = []
    for _ in range(7):
        kind = value[at]
        if kind == 2:
            numbers.append(_I64.unpack_from(value, at + 1 + 8 * index)[0])
            at += 1 + 8 * count
        else:
            first: int = _I64.unpack_from(value, at + 1)[0]
            numbers.append(first + index if kind else first)
            at += 9
    key_lengths, at = read_array("H", value, at, count)
    payload_lengths, at = read_array("I", value, at, count)
    key_at = at + sum(key_lengths[:index])
    payload_at = at + sum(key_lengths) + sum(payload_lengths[:index])
    return (
        change,
        numbers,
        value[key_at : key_at + key_lengths[index]],
        value[payload_at : payload_at + payload_lengths[index]],
    )


def last_index(value: bytes, key: bytes, stop: int) -> int:
    """The index of the last change of a key among the first `stop` changes of a journal value; -1: there is none.

    A value without the key costs one search of its bytes, which is a hundredth of decoding it.
    """
    if key not in value:
        return -1
    count = changes_head(value).entries
    at = _JOURNAL_HEAD.size + count
    for _ in range(7):
        at += 1 + 8 * (count if value[at] == 2 else 1)
    lengths, at = read_array("H", value, at, count)
    at += 4 * count  # the lengths of the payloads
    wanted, end = len(key), at + sum(lengths[:stop])
    if value.find(key, at, end) < 0:
        return -1
    for index in range(min(stop, count) - 1, -1, -1):
        length = lengths[index]
        if length == wanted and value.startswith(key, end - length):
            return index
        end -= length
    return -1


class ChangesHead(NamedTuple):
    """The part before the columns; the fields are those of `Changes`."""

    entries: int
    commit_time_micros: int
    entries_before: int
    bytes_before: int


def changes_head(value: bytes) -> ChangesHead:
    """The head of a journal value, without decoding the rest."""
    return ChangesHead(*_JOURNAL_HEAD.unpack_from(value)[3:])


def changes_source(value: bytes) -> int:
    """The source of the changes of a journal value."""
    return _U16.unpack_from(value, 2)[0]  # type: ignore[no-any-return]  # "H" is an int


def changes_kinds(value: bytes) -> bytes:
    """The column `change` of a journal value, without decoding the rest."""
    at = _JOURNAL_HEAD.size
    return value[at : at + changes_head(value).entries]


def foreign_changes(value: bytes) -> Changes:
    """The changes of a chunk that another instance has packed. Raises ValueError for bytes that are none."""
    if not value or value[0] != FORMAT:
        raise ValueError(f"a chunk of format {value[0] if value else 'none'}, and this version reads format {FORMAT}")
    try:
        changes, end = _decode_changes(0, value)
    except (IndexError, ValueError, struct.error) as error:
        raise ValueError(f"a chunk that cannot be read: {error}") from None
    if end != len(value) or not _KINDS.issuperset(changes.change):
        raise ValueError(f"a chunk of {len(value)} bytes that should have {end}, or with changes of another kind")
    if min(changes.origin, default=0) < 0:
        raise ValueError("a chunk with a negative number of an origin")
    return changes
