"""Column family `commits`: the total order of all changes (rule J1).

key    first sequence i64
value  last sequence i64 | commit time i64 | runs: (topic u32 | first sequence i64 | count u32)*
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.disk.layout.words import i64, unpack_i64

_COMMIT_HEAD: Final = Struct(">qq")
_RUN: Final = Struct(">IqI")


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
    return i64(commit.first_sequence), value + b"".join([_RUN.pack(*run) for run in commit.runs])


def decode_commit(key: bytes, value: bytes) -> Commit:
    """The commit of a row."""
    last, commit_time = _COMMIT_HEAD.unpack_from(value)
    runs = tuple(Run(*run) for run in _RUN.iter_unpack(value[_COMMIT_HEAD.size :]))
    return Commit(unpack_i64(key), last, commit_time, runs)
