"""Options of replication, the stored state of a source, and rows of peers and sources.

Another instance chooses a part of what is in such a row, and disks fail. So a row is checked as it is read: one that
cannot be used is a ValueError, and its reader goes on without it.

All rows are in `meta`, JSON except those of seeds:

    "peer/" name      its identity and acknowledged position, whether it has missed tombstones
    "source/" name    its identity, its number in the journal, its topics, its applied position, see `Source`
    "seed/" name / topic u32
                      state u8 | key: how far the topic has been merged, see `SeedState`
    "link/" name      a peer that was added by command, or a pause, see `commanded`
    "taken/" name     u32 | u32: the numbers of sources and of origins that it has taken, see `sources`
    "next_source"     u32: numbers are never used again, so that a source that begins anew has a new one
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from sow_peering import InstanceIdentity, PeerState
from sow_peering.bounds import FILTER_BYTES_MAX, NUMBER_MAX, PATTERN_BYTES_MAX, identity_fault, number_fault
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.model import MICROS, RecordMatcher


class PeerSettings(NamedTuple):
    """An instance that this one sends to."""

    name: str
    topics: str
    """The pattern of the topics that are sent to it."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The instances that this one sends to, and bounds for sending; bytes and microseconds."""

    peers: tuple[PeerSettings, ...] = ()
    max_clock_skew_micros: int = 10 * MICROS
    lag_bytes_max: int = 2**30
    lag_age_micros_max: int = 86_400 * MICROS


class Source(NamedTuple):
    """The stored state of an instance that this one receives from."""

    identity: InstanceIdentity
    number: int
    """Its present number, which marks changes from it in the journal."""
    topics: str
    """The pattern of the topics that it sends."""
    filter: str
    """The filter of its records."""
    cursor: int
    """The sequence of its journal up to which changes have been applied."""
    wait_for: int = 0
    """Not 0: its changes are refused until it has acknowledged this sequence of ours."""
    missing_is_deleted: bool = False
    """True until every topic is seeded. Until then, a row that this instance lacks and whose version is at or below its
    purge mark counts as deleted (replicas [4])."""


class SeedState(enum.IntEnum):
    """The state of a topic of a source: how far it has been seeded."""

    UNDER_WAY = 0
    COMPLETE = 1
    AGAIN = 2
    """Under way, and it was complete before."""


def encode_complete(*, lacking: bool) -> bytes:
    """The row of a topic that was seeded completely; `lacking`: but for rows or changes that were refused."""
    return bytes((SeedState.COMPLETE, 1) if lacking else (SeedState.COMPLETE,))


SelectRecords = Callable[[Topic], RecordMatcher | None]
"""The filter of a link on a topic; None: the peer gets all records."""


def encode_peer(peer: PeerState) -> bytes:
    """The row of a peer."""
    return json.dumps(peer._asdict()).encode()


class _PeerRow(msgspec.Struct):
    identity: tuple[str, str, str] | None
    acknowledged: int
    missed: bool


_peer_rows: Final = msgspec.json.Decoder(_PeerRow)


def decode_peer(row: bytes) -> PeerState:
    """The peer of a row. Raises ValueError."""
    found = _peer_rows.decode(row)
    identity = InstanceIdentity(*found.identity) if found.identity else None
    fault = identity_fault(identity) if identity else ""
    if fault := fault or number_fault(found.acknowledged):
        raise ValueError(fault)
    return PeerState(identity, found.acknowledged, found.missed)


def encode_source(source: Source) -> bytes:
    """The row of a source. On disk the last field has an older name."""
    fields = source._asdict()
    fields["guarded"] = fields.pop("missing_is_deleted")
    return json.dumps(fields).encode()


SOURCES_MAX: Final = 2**16 - 1
"""The journal has two bytes for the number of a source."""


class _SourceRow(msgspec.Struct):
    identity: tuple[str, str, str]
    number: int
    topics: str
    filter: str
    cursor: int
    wait_for: int = 0
    guarded: bool = False


_source_rows: Final = msgspec.json.Decoder(_SourceRow)


def decode_source(row: bytes) -> Source:
    """The source of a row. Raises ValueError. Whether its pattern can be compiled is not looked at."""
    found = _source_rows.decode(row)
    identity = InstanceIdentity(*found.identity)
    if fault := identity_fault(identity):
        raise ValueError(fault)
    for field, number, low, high in (
        ("number", found.number, 1, SOURCES_MAX),
        ("cursor", found.cursor, 0, NUMBER_MAX),
        ("wait_for", found.wait_for, 0, NUMBER_MAX),
    ):
        if fault := number_fault(number, low, high):
            raise ValueError(f"{field} {fault}")
    for field, text, most in (("topics", found.topics, PATTERN_BYTES_MAX), ("filter", found.filter, FILTER_BYTES_MAX)):
        if len(text.encode()) > most:
            raise ValueError(f"{field} is longer than {most} bytes")
    return Source(identity, found.number, found.topics, found.filter, found.cursor, found.wait_for, found.guarded)
