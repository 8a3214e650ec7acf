"""Options of replication, the stored state of a source, and rows of peers and sources.

All rows are in `meta`, JSON except those of seeds:

    "peer/" name      its identity and acknowledged position, whether it has missed tombstones
    "source/" name    its identity, its number in the journal, its topics, its applied position, see `Source`
    "seed/" name / topic u32
                      state u8 | key: how far the topic has been merged, see `SeedState`
    "link/" name      a peer that was added by command, or a pause, see `commanded`
    "next_source"     u32: numbers are never used again, so that a source that begins anew has a new one
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sow_peering import InstanceIdentity, MergeCounts, PeerState
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.errors import StoreError
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
    """How far a topic of a source has been seeded."""

    UNDER_WAY = 0
    COMPLETE = 1
    AGAIN = 2
    """Under way, and it was complete before."""


def encode_complete(*, lacking: bool) -> bytes:
    """The row of a topic that was seeded completely; `lacking`: but for rows or changes that were refused."""
    return bytes((SeedState.COMPLETE, 1) if lacking else (SeedState.COMPLETE,))


ReplicaDone = Callable[[MergeCounts | StoreError], None]
SelectRecords = Callable[[Topic], RecordMatcher | None]
"""The filter of a link on a topic; None: the peer gets all records."""


def encode_peer(peer: PeerState) -> bytes:
    """The row of a peer."""
    return json.dumps(peer._asdict()).encode()


def decode_peer(row: bytes) -> PeerState:
    """The peer of a row."""
    fields = json.loads(row)
    identity = InstanceIdentity(*fields["identity"]) if fields["identity"] else None
    return PeerState(identity, fields["acknowledged"], fields["missed"])


def encode_source(source: Source) -> bytes:
    """The row of a source. On disk the last field has an older name."""
    fields = source._asdict()
    fields["guarded"] = fields.pop("missing_is_deleted")
    return json.dumps(fields).encode()


def decode_source(row: bytes) -> Source:
    """The source of a row."""
    fields = json.loads(row)
    fields["identity"] = InstanceIdentity(*fields["identity"])
    fields["missing_is_deleted"] = fields.pop("guarded", False)
    return Source(**fields)
