"""Column family `commits`: the total order of all changes (rule J1).

key    first sequence i64
value  last sequence i64 | commit time i64 | runs: (topic u32 | first sequence i64 | count u32)*
       or, with notes of publishers (rule F11), the commit time inverted, so below 0:
       last sequence i64 | ~commit time i64 | number of runs u32 | runs | notes in MessagePack

A commit that has notes and no runs takes a sequence for itself.
"""

from __future__ import annotations

from itertools import starmap
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from sow_server.engine.stored.words import i64, u32, unpack_i64, unpack_u32

_COMMIT_HEAD: Final = Struct(">qq")
_RUN: Final = Struct(">IqI")


class Run(NamedTuple):
    """Consecutive sequences of one topic."""

    topic_id: int
    first_sequence: int
    length: int


class PublisherNote(NamedTuple):
    """Sequences of a publisher that a commit has decided, or learned from a peer."""

    publisher_id: str
    epoch: int
    token: int
    first: int
    last: int
    topic_ids: tuple[int, ...]
    """The topics of their records; of what was decided here it is one."""
    refused: tuple[int, ...] = ()
    """The sequences among them that were not applied."""
    source: int = 0
    """The number of the peer that told of them; 0: they were decided here."""
    used_micros: int = 0
    """The last use of the publisher; 0: at the time of the commit."""


class Commit(NamedTuple):
    """One row of the total order (rule J1)."""

    first_sequence: int
    last_sequence: int
    commit_time_micros: int
    runs: tuple[Run, ...]
    notes: tuple[PublisherNote, ...] = ()


def encode_commit(commit: Commit) -> tuple[bytes, bytes]:
    """Key and value of a commit."""
    runs = b"".join(starmap(_RUN.pack, commit.runs))
    if not commit.notes:
        return i64(commit.first_sequence), _COMMIT_HEAD.pack(commit.last_sequence, commit.commit_time_micros) + runs
    head = _COMMIT_HEAD.pack(commit.last_sequence, ~commit.commit_time_micros) + u32(len(commit.runs))
    return i64(commit.first_sequence), head + runs + msgspec.msgpack.encode(commit.notes)


def decode_commit(key: bytes, value: bytes) -> Commit:
    """The commit of a row."""
    last, commit_time = _COMMIT_HEAD.unpack_from(value)
    if commit_time >= 0:
        runs = tuple(Run(*run) for run in _RUN.iter_unpack(value[_COMMIT_HEAD.size :]))
        return Commit(unpack_i64(key), last, commit_time, runs)
    begin = _COMMIT_HEAD.size + 4
    end = begin + _RUN.size * unpack_u32(value[_COMMIT_HEAD.size : begin])
    runs = tuple(Run(*run) for run in _RUN.iter_unpack(value[begin:end]))
    return Commit(unpack_i64(key), last, ~commit_time, runs, _decode_notes(value[end:]))


class _EarlierNote(NamedTuple):
    """A note in data of format 4."""

    publisher_id: str
    epoch: int
    token: int
    first: int
    last: int
    topic_id: int
    refused: tuple[int, ...] = ()
    source: int = 0


_notes: Final = msgspec.msgpack.Decoder(tuple[PublisherNote, ...])
_earlier_notes: Final = msgspec.msgpack.Decoder(tuple[_EarlierNote, ...])


def _decode_notes(packed: bytes) -> tuple[PublisherNote, ...]:
    try:
        return _notes.decode(packed)
    except msgspec.ValidationError:
        earlier = _earlier_notes.decode(packed)
    return tuple([PublisherNote(*note[:5], (note.topic_id,), note.refused, note.source) for note in earlier])
