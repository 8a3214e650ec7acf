"""Every byte layout on disk, drawn. Integers are big-endian; `FORMAT` is the version of all of it. Pure.

    records   key    topic u32 | record key utf-8
              value  header (40 bytes) | payload

              header  0 format u8 | 1 flags u8 | 2 origin u16 | 4 payload length u32 | 8 version i64
                      | 16 publish time i64 | 24 expire time i64 | 32 sequence i64 (of the record's last change)

              40 bytes are five words, so that a run of headers is an array of int64 and a column of it a slice.

    expiry    key    expire time i64 | topic u32 | record key        value  empty

    indexes   key    topic u32 | index u16 | kind u8 | value | record key          value  empty

              value  1 boolean  u8: 0 or 1
                     2 number   the nearest float64, no NaN, no -0; its sign bit inverted, if negative all its bits
                     3 text     the first 256 bytes of its UTF-8, 0 as 0 255 | 0 0

    journal   key    topic u32 | first sequence i64
              value  format u8 | flags u8 (1: of one atomic request) | source u16 | count u32 | commit time i64
                     | entries before i64 | bytes before i64 (of the topic, ever, in front of this chunk)
                     | columns: change u8*count, then (version, publish time, expire time, origin, previous sequence,
                       removed version, removed origin), each
                       kind u8: 0 constant (one i64), 1 counting up by one (first i64), 2 as it is (i64*count)
                     | key lengths u16*count | payload lengths u32*count | keys | payloads

              Between instances the same layout, with the sender's numbers of origins, and without a meaning in source,
              previous and before.

    tombstones
              key    topic u32 | record key
              value  version i64 | sequence i64 | made i64 | origin u16 | kind u8 (DELETE or EXPIRE)
              key    ff ff ff ff | sequence i64 | topic u32 | record key          value  empty: the order of making

    staging   what loads have staged, see loads.py
              key    load u32 | "r" | key length u16 | record key | part u32 | attempt u64
              value  lifetime kind u8 | lifetime i64 | payload
              key    load u32 | "a" | part u32 | attempt u64
              value  rows seen i64 | rows staged i64 | bytes i64 | stager u64
              key    load u32 | "d" | record key                  value  empty: others have removed it since
              key    load u32 | "n"                               value  those that count: (part u32 | attempt u64)*

              The key's length in front keeps the rows of one key together, whatever its bytes.

    commits   key    first sequence i64
              value  last sequence i64 | commit time i64 | runs: (topic u32 | first sequence i64 | count u32)*

    meta      "format"  u32            "instance"  JSON: id, epoch, origins        "bounds"  version i64 | sequence i64
              "clock"   i64            "sweep"     expiry key                      "next_topic" u32
              "accepted" i64   last sequence when an operator last accepted the clock: no time up to it counts for it
              "rearm/" u32   where putting the expiry entries of a topic goes on
              "index/" u32 u16   where building an index goes on; without this row it is complete
              "deliver/" u32   where moving the dead letters that have waited for a topic goes on
              "topic/" u32   JSON      "stats/" u32   twelve i64                   "publisher/" id   see publishers.py
              "durable/" u32 name   JSON, see durables.py
              "load/" u32   JSON, see loads.py                     "next_load" u32
              "peer/" name, "source/" name, "seed/" name / u32, "next_source"      see replicas.py

Stamps of expire times are compared as their eight bytes: all of them are positive, so the order is the same.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.values.model import BacklogAction, Expiration, MessageType, OnMissing, Record, TopicSettings

FORMAT: Final = 3

HEADER_BYTES: Final = 40
_HEADER: Final = Struct(">BBHIqqqq")
_U16: Final = Struct(">H")
_U32: Final = Struct(">I")
_I64: Final = Struct(">q")
_JOURNAL_HEAD: Final = Struct(">BBHIqqq")
_COMMIT_HEAD: Final = Struct(">qq")
_RUN: Final = Struct(">IqI")
_STATS: Final = Struct(">12q")
_TOMBSTONE: Final = Struct(">qqqHB")

PUT: Final = 1
TOUCH: Final = 2
"""A put of the whole record that changed its lifetime only (rule P8)."""
DELETE: Final = 3
EXPIRE: Final = 4
BURY: Final = 5
"""A delete, by a peer, of a record that is not here: for other peers alone (rule R4)."""
WITHDRAW: Final = 6
"""Between instances alone, on a link with a filter: the record is not for this peer, or not any more."""


def u16(number: int) -> bytes:
    """Two bytes."""
    return _U16.pack(number)


def u32(number: int) -> bytes:
    """Four bytes."""
    return _U32.pack(number)


def i64(number: int) -> bytes:
    """Eight bytes."""
    return _I64.pack(number)


def unpack_i64(eight: bytes) -> int:
    """The number of eight bytes."""
    number: int = _I64.unpack(eight)[0]
    return number


# --- records ---------------------------------------------------------------------------------------------------------


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


def payload_bytes_total(heads: Sequence[bytes]) -> int:
    """The sum of the payload lengths of many heads."""
    halves = array("I", b"".join(heads))
    if sys.byteorder == "little":
        halves.byteswap()
    return sum(halves[1::10])


class HeaderColumns(NamedTuple):
    """The words of many headers, column by column."""

    version: array[int]
    publish_time: array[int]
    expire_time: array[int]
    sequence: array[int]
    origin: array[int]


def header_columns(values: Sequence[bytes]) -> HeaderColumns:
    """The headers of stored values, in columns: a slice an array instead of an unpack a record."""
    headers = b"".join([value[:HEADER_BYTES] for value in values])
    words, quarters = array("q", headers), array("H", headers)
    if sys.byteorder == "little":
        words.byteswap()
        quarters.byteswap()
    return HeaderColumns(words[1::5], words[2::5], words[3::5], words[4::5], quarters[1::20])


# --- journal ---------------------------------------------------------------------------------------------------------


class Column:
    """A column of int64 that stays two numbers while it is constant or counts up by one, as most columns do."""

    __slots__ = ("_first", "_length", "_numbers", "_step")

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self._first = 0
        self._step = 0
        self._length = 0
        self._numbers: array[int] | None = None
        for number in numbers:
            self.append(number)

    def __len__(self) -> int:
        return self._length if self._numbers is None else len(self._numbers)

    def __getitem__(self, index: int) -> int:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and self.tolist() == other.tolist()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Column({self.tolist()})"

    def tolist(self) -> list[int]:
        """The numbers."""
        if self._numbers is not None:
            return self._numbers.tolist()
        if self._step:
            return list(range(self._first, self._first + self._length))
        return [self._first] * self._length

    def part(self, start: int, stop: int) -> list[int]:
        """The numbers from one position to another, without making a list of all."""
        if self._numbers is not None:
            return self._numbers[start:stop].tolist()
        # Without min and max, whose calls are most of what this costs.
        if stop > self._length:
            stop = self._length
        if self._step:
            return list(range(self._first + start, self._first + stop))
        return [self._first] * (stop - start)

    def append(self, number: int) -> None:
        """Adds one number."""
        if self._numbers is None and self._length == 1 and number == self._first + 1:
            self._step = 1
        self._add(number, 1, self._step)

    def constant(self, number: int, count: int) -> None:
        """Adds `count` times the same number."""
        self._add(number, count, 0)

    def counting(self, first: int, count: int) -> None:
        """Adds `count` numbers that count up by one."""
        if self._length == 1 and self._numbers is None and first == self._first + 1:
            self._step = 1
        self._add(first, count, 1 if count > 1 else self._step)

    def extend(self, other: Column) -> None:
        """Adds another column."""
        if other._numbers is not None:
            self._materialise().extend(other._numbers)
        elif other._step:
            self.counting(other._first, other._length)
        elif other._length:
            self.constant(other._first, other._length)

    def numbers(self, numbers: array[int]) -> None:
        """Adds any numbers."""
        if not any(numbers):
            self._add(0, len(numbers), 0)
        else:
            # Origins come as two bytes each.
            self._materialise().extend(numbers if numbers.typecode == "q" else array("q", numbers))

    def _add(self, first: int, count: int, step: int) -> None:
        if self._numbers is None:
            if self._length == 0:
                self._first, self._step, self._length = first, step, count
                return
            if step == self._step and first == self._first + self._step * self._length:
                self._length += count
                return
        self._materialise().extend(range(first, first + count) if step else repeat(first, count))

    def _materialise(self) -> array[int]:
        if self._numbers is None:
            self._numbers = array("q", self.tolist())
        return self._numbers

    def encode(self) -> bytes:
        """The column on disk."""
        if self._numbers is not None:
            return b"\2" + _big_endian("q", self._numbers)
        return (b"\1" if self._step else b"\0") + _I64.pack(self._first)

    @classmethod
    def decode(cls, value: bytes, at: int, count: int) -> tuple[Column, int]:
        """The column at a position of a journal value, and where it ends."""
        column = cls()
        kind = value[at]
        if kind == 2:
            column._numbers, end = _read_array("q", value, at + 1, count)
            return column, end
        column._add(unpack_i64(value[at + 1 : at + 9]), count, kind)
        return column, at + 9


_KINDS: Final = frozenset(range(PUT, WITHDRAW + 1))


class Changes(NamedTuple):
    """Consecutive changes of one topic in one commit, in columns of equal length.

    The payload is the new record's for PUT and TOUCH, the removed record's for DELETE and EXPIRE; `previous` is the
    sequence of the key's previous change, 0 when there was no live record (rule J1). A DELETE has a version of its own,
    an EXPIRE that of the record; `removed_version` and `removed_origin` are those of the record that went, else 0.
    `atomic`: all of it belongs to one atomic request. `source`: where it came from, 0 for here, see `replicas.py`; an
    EXPIRE is of here in any case. `entries_before` and `bytes_before` are what was ever
    journaled of the topic in front of this chunk, so that what lies between two positions is a subtraction (rule J7).
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
    """Where the changes of one topic in one commit stand."""
    return _U32.pack(topic_id) + _I64.pack(first_sequence)


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
            _big_endian("H", list(map(len, changes.keys))),
            _big_endian("I", list(map(len, changes.payloads))),
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
    key_lengths, at = _read_array("H", value, at, count)
    payload_lengths, at = _read_array("I", value, at, count)
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
    key_lengths, at = _read_array("H", value, at, count)
    payload_lengths, at = _read_array("I", value, at, count)
    key_at = at + sum(key_lengths[:index])
    payload_at = at + sum(key_lengths) + sum(payload_lengths[:index])
    version, publish_time, expire_time, origin, *_ = numbers
    return Entry(
        change,
        version,
        publish_time,
        expire_time,
        origin,
        value[key_at : key_at + key_lengths[index]],
        value[payload_at : payload_at + payload_lengths[index]],
    )


class ChangesHead(NamedTuple):
    """What is in front of the columns; the fields are those of `Changes`."""

    entries: int
    commit_time_micros: int
    entries_before: int
    bytes_before: int


def changes_head(value: bytes) -> ChangesHead:
    """The head of a journal value, without decoding the rest."""
    return ChangesHead(*_JOURNAL_HEAD.unpack_from(value)[3:])


def changes_source(value: bytes) -> int:
    """Where the changes of a journal value came from."""
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


def _big_endian(typecode: str, numbers: Sequence[int]) -> bytes:
    packed = array(typecode, numbers)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def _read_array(typecode: str, value: bytes, at: int, count: int) -> tuple[array[int], int]:
    numbers = array(typecode)
    end = at + numbers.itemsize * count
    numbers.frombytes(value[at:end])
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers, end


# --- tombstones ------------------------------------------------------------------------------------------------------


class Tombstone(NamedTuple):
    """What is left of a record that was deleted, or expired: an older version must not bring it back (rule R4)."""

    version: int
    sequence: int
    """Of the change here that left it."""
    made_micros: int
    origin: int
    kind: int
    """DELETE or EXPIRE."""


MADE_ORDER: Final = b"\xff\xff\xff\xff"
"""In front of the keys that say in which order tombstones were made; no topic has this id."""


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """27 bytes."""
    return _TOMBSTONE.pack(*tombstone)


def decode_tombstone(value: bytes) -> Tombstone:
    """The tombstone of a row."""
    return Tombstone(*_TOMBSTONE.unpack(value))


def made_key(sequence: int, store_key: bytes) -> bytes:
    """The key under which the order of tombstones is kept."""
    return MADE_ORDER + _I64.pack(sequence) + store_key


# --- staging ---------------------------------------------------------------------------------------------------------


_ATTEMPT: Final = Struct(">IQ")
_STAGED: Final = Struct(">Bq")
_ATTEMPT_COUNTS: Final = Struct(">qqqQ")
_ROW, _COUNTS, _MARK, _NAMED = b"r", b"a", b"d", b"n"
ATTEMPT_BYTES: Final = _ATTEMPT.size
STAGED_BYTES: Final = _STAGED.size
"""In front of a staged payload."""


class AttemptCounts(NamedTuple):
    """What one attempt at a part of a load has done: rows seen, refused ones included; rows staged; their bytes; and
    whose they are, where that was told."""

    seen: int = 0
    staged: int = 0
    bytes: int = 0
    stager: int = 0


def staged_keys(load: int, keys: Sequence[bytes], part: int, attempt: int) -> list[bytes]:
    """Where the rows of record keys are staged."""
    front, back, length = u32(load) + _ROW, _ATTEMPT.pack(part, attempt), _U16.pack
    return [front + length(len(key)) + key + back for key in keys]


def staged_range(load: int) -> tuple[bytes, bytes]:
    """Where all rows of a load are: from, and to (excluded)."""
    return u32(load) + _ROW, u32(load) + bytes((_ROW[0] + 1,))


def read_staged_key(key: bytes) -> tuple[bytes, int, int]:
    """Record key, part and attempt of a staged row."""
    part, attempt = _ATTEMPT.unpack_from(key, len(key) - ATTEMPT_BYTES)
    return key[7:-ATTEMPT_BYTES], part, attempt


def staged_value(kind: int, micros: int, payload: bytes) -> bytes:
    """A staged row."""
    return _STAGED.pack(kind, micros) + payload


def read_staged(value: bytes) -> tuple[int, int, bytes]:
    """Lifetime kind, its value, and the payload of a staged row."""
    kind, micros = _STAGED.unpack_from(value)
    return kind, micros, value[STAGED_BYTES:]


def attempt_key(load: int, part: int, attempt: int) -> bytes:
    """Where the counts of an attempt are."""
    return u32(load) + _COUNTS + _ATTEMPT.pack(part, attempt)


def attempts_range(load: int) -> tuple[bytes, bytes]:
    """Where the counts of all attempts of a load are."""
    return u32(load) + _COUNTS, u32(load) + bytes((_COUNTS[0] + 1,))


def read_attempt_key(key: bytes) -> tuple[int, int]:
    """Part and attempt."""
    part, attempt = _ATTEMPT.unpack_from(key, 5)
    return part, attempt


def encode_attempt(counts: AttemptCounts) -> bytes:
    """Four words."""
    return _ATTEMPT_COUNTS.pack(*counts)


def decode_attempt(value: bytes) -> AttemptCounts:
    """The counts of a row."""
    return AttemptCounts(*_ATTEMPT_COUNTS.unpack(value))


def mark_key(load: int, key: bytes) -> bytes:
    """Where it is noted that others have removed a record since the load was opened."""
    return u32(load) + _MARK + key


def marks_range(load: int) -> tuple[bytes, bytes]:
    """Where all such notes of a load are."""
    return u32(load) + _MARK, u32(load) + bytes((_MARK[0] + 1,))


def named_key(load: int) -> bytes:
    """Where the attempts that count are."""
    return u32(load) + _NAMED


def encode_named(named: Sequence[tuple[int, int]]) -> bytes:
    """(part, attempt) one after the other."""
    return b"".join([_ATTEMPT.pack(part, attempt) for part, attempt in named])


def decode_named(value: bytes) -> dict[int, int]:
    """The attempt that counts, by part."""
    return dict(_ATTEMPT.iter_unpack(value))


# --- commits ---------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Consecutive sequences of one topic."""

    topic_id: int
    first_sequence: int
    length: int


class Commit(NamedTuple):
    """One row of the total order (rule J1)."""

    first_sequence: int
    last_sequence: int
    commit_time_micros: int
    runs: tuple[Run, ...]


def encode_commit(commit: Commit) -> tuple[bytes, bytes]:
    """Key and value of a commit."""
    value = _COMMIT_HEAD.pack(commit.last_sequence, commit.commit_time_micros)
    return _I64.pack(commit.first_sequence), value + b"".join([_RUN.pack(*run) for run in commit.runs])


def decode_commit(key: bytes, value: bytes) -> Commit:
    """The commit of a row."""
    last, commit_time = _COMMIT_HEAD.unpack_from(value)
    runs = tuple(Run(*run) for run in _RUN.iter_unpack(value[_COMMIT_HEAD.size :]))
    return Commit(unpack_i64(key), last, commit_time, runs)


# --- meta ------------------------------------------------------------------------------------------------------------


class StoredStatistics(NamedTuple):
    """What is counted per topic, in the same batch as what it counts. Of the journal it is what was ever appended and
    what of that was let go (at or below the floor; bytes chunk by chunk): both only grow."""

    records: int = 0
    record_bytes: int = 0
    appended_entries: int = 0
    appended_bytes: int = 0
    trimmed_entries: int = 0
    trimmed_bytes: int = 0
    floor_sequence: int = 0
    created_sequence: int = 0
    last_sequence: int = 0
    """Of the last journaled change; 0 when there was none."""
    tombstones: int = 0
    """Made and not yet purged; one that was replaced by another counts until its own turn."""
    purged_version: int = 0
    """The highest version among the purged tombstones; 0: there were none."""
    purged_origin: int = 0

    @property
    def journal_entries(self) -> int:
        """Entries above the floor."""
        return self.appended_entries - self.trimmed_entries

    @property
    def journal_bytes(self) -> int:
        """Bytes of the chunks that have entries above the floor."""
        return self.appended_bytes - self.trimmed_bytes

    def trimmed(self, floor: int) -> StoredStatistics:
        """As they are when everything journaled so far is let go: the floor is at least `floor`."""
        return self._replace(
            trimmed_entries=self.appended_entries,
            trimmed_bytes=self.appended_bytes,
            floor_sequence=max(self.floor_sequence, floor),
        )


def encode_statistics(statistics: StoredStatistics) -> bytes:
    """Twelve words."""
    return _STATS.pack(*statistics)


def decode_statistics(value: bytes) -> StoredStatistics:
    """The statistics of a row."""
    return StoredStatistics(*_STATS.unpack(value))


def settings_to_json(settings: TopicSettings) -> dict[str, object]:
    """Settings as a JSON object; the names are those of `TopicSettings`."""
    fields = settings._asdict()
    fields["separator"] = settings.separator.decode("latin-1")
    return fields


def settings_from_json(fields: dict[str, object]) -> TopicSettings:
    """The settings of a stored JSON object."""
    known: dict[str, object] = {name: value for name, value in fields.items() if name in TopicSettings._fields}
    known["key"] = tuple(known["key"])  # type: ignore[arg-type]  # JSON as settings_to_json wrote it
    known["index"] = tuple(known.get("index", ()))  # type: ignore[arg-type]  # as above
    known["message_type"] = MessageType(str(known["message_type"]))
    known["expiration"] = Expiration(str(known["expiration"]))
    known["backlog_action"] = BacklogAction(str(known.get("backlog_action", BacklogAction.HOLD.value)))
    known["on_missing"] = OnMissing(str(known.get("on_missing", OnMissing.RETAIN.value)))
    known["separator"] = str(known["separator"]).encode("latin-1")
    return TopicSettings(**known)  # type: ignore[arg-type]  # as above
