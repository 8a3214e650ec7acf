"""Column family `staging`: the rows that loads have staged, and their attempts.

    key    load u32 | "r" | key length u16 | record key | part u32 | attempt u64
    value  lifetime kind u8 | lifetime i64 | payload
    key    load u32 | "a" | part u32 | attempt u64
    value  rows seen i64 | rows staged i64 | bytes i64 | stager u64
    key    load u32 | "d" | record key                  value  empty: others have removed it since
    key    load u32 | "n"                               value  those that count: (part u32 | attempt u64)*

The key's length in front keeps the rows of one key together, whatever its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.stored.words import u16, u32

_ATTEMPT: Final = Struct(">IQ")
_STAGED: Final = Struct(">Bq")
_ATTEMPT_COUNTS: Final = Struct(">qqqQ")
_ROW, _COUNTS, _MARK, _NAMED = b"r", b"a", b"d", b"n"
ATTEMPT_BYTES: Final = _ATTEMPT.size
STAGED_BYTES: Final = _STAGED.size
"""In front of a staged payload."""


class AttemptCounts(NamedTuple):
    """The counts of one attempt at a part of a load: rows seen, including refused ones; rows staged; their bytes; and
    the stager, if it was named."""

    seen: int = 0
    staged: int = 0
    bytes: int = 0
    stager: int = 0


def staged_keys(load: int, keys: Sequence[bytes], part: int, attempt: int) -> list[bytes]:
    """The ranges of the staged rows of record keys."""
    front, back, length = u32(load) + _ROW, _ATTEMPT.pack(part, attempt), u16
    return [front + length(len(key)) + key + back for key in keys]


def staged_range(load: int) -> tuple[bytes, bytes]:
    """The range of all rows of a load: from, and to (excluded)."""
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
    """The key of the counts of an attempt."""
    return u32(load) + _COUNTS + _ATTEMPT.pack(part, attempt)


def attempts_range(load: int) -> tuple[bytes, bytes]:
    """The range of the counts of all attempts of a load."""
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
    """The key of the note that others have removed a record since the load was opened."""
    return u32(load) + _MARK + key


def marks_range(load: int) -> tuple[bytes, bytes]:
    """The range of all such notes of a load."""
    return u32(load) + _MARK, u32(load) + bytes((_MARK[0] + 1,))


def named_key(load: int) -> bytes:
    """The key of the attempts that count."""
    return u32(load) + _NAMED


def encode_named(named: Sequence[tuple[int, int]]) -> bytes:
    """(part, attempt) one after the other."""
    return b"".join([_ATTEMPT.pack(part, attempt) for part, attempt in named])


def decode_named(value: bytes) -> dict[int, int]:
    """The attempt that counts, by part."""
    return dict(_ATTEMPT.iter_unpack(value))
