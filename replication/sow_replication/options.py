"""The settings of replication. Times are microseconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

SECOND: Final = 1_000_000
MATCH_ALL: Final = ".*"


class Mode(enum.Enum):
    """The two kinds of peers: a sync peer counts for REPLICATED acknowledgements (rule R8)."""

    ASYNC = "async"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """An instance to send to."""

    name: str
    address: str
    topics: str = MATCH_ALL
    """A pattern that has to match the whole name."""
    mode: Mode = Mode.ASYNC
    filter: str = ""
    """Empty: everything."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """All links of an instance."""

    peers: tuple[PeerOptions, ...] = ()
    accept: tuple[str, ...] = ()
    """Names of instances that may send, in addition to the peers."""
    commanded: frozenset[str] = frozenset()
    """Names that were added by command, of those in `peers` and `accept`."""
    min_sync_peers: int = 1
    """The number of sync peers that must have a write before it counts as REPLICATED."""
    sync_timeout_micros: int = 5 * SECOND
    """How long a sync peer may be away or silent before it is downgraded (rule R8)."""
    tombstone_grace_micros: int = 24 * 3600 * SECOND
    """The longest time that a tombstone is kept (rule R4)."""
    settle_micros: int = 60 * SECOND
    """The time after the start in which sources may come, before tombstones are purged by age without them."""
    flight_bytes_max: int = 8 * 2**20
    """The most that is sent and not acknowledged on a link; a single message may be larger."""
    flight_messages_max: int = 32
    read_bytes_max: int = 2**18
    """The approximate size of a message of changes. It is one commit at the receiver, and publishers there wait for it.
    Larger messages do not cost less per record."""
    seed_bytes_max: int = 2**18
    """The approximate size of a part of a seed; as above."""
    heartbeat_micros: int = SECOND
    silence_micros: int = 10 * SECOND
    """A link is closed after this time of silence."""
    cursor_sequences_max: int = 10_000
    cursor_micros: int = SECOND
    """Where changes are not for the link, the cursor is stored after so many sequences, or after this time. A peer is
    told positions of durables only up to it (rule F14)."""
    farewell_micros: int = SECOND
    """How long a stop waits for the last messages of its links to arrive."""
    backoff_min_micros: int = SECOND // 10
    backoff_max_micros: int = 5 * SECOND
    backoff_operator_micros: int = 30 * SECOND
    """The delay between attempts that only an operator can make succeed."""
