"""The settings of replication. Times are microseconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

SECOND: Final = 1_000_000
MATCH_ALL: Final = ".*"


class Mode(enum.Enum):
    """Whether a peer counts for REPLICATED acknowledgements (rule R8)."""

    ASYNC = "async"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """An instance to send to."""

    name: str
    address: str
    topics: str = MATCH_ALL
    """A pattern; the whole name has to match."""
    mode: Mode = Mode.ASYNC
    filter: str = ""
    """Empty: everything."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """All links of an instance."""

    peers: tuple[PeerOptions, ...] = ()
    accept: tuple[str, ...] = ()
    """Names of instances that may send, besides the peers."""
    min_sync_peers: int = 1
    """How many have to have a write before it counts as REPLICATED."""
    sync_timeout_micros: int = 5 * SECOND
    """How long a sync peer may be away, or silent, before it is downgraded (rule R8)."""
    tombstone_grace_micros: int = 24 * 3600 * SECOND
    """How long a tombstone is kept at most (rule R4)."""
    settle_micros: int = 60 * SECOND
    """After the start: how long sources may take to come before tombstones go by age without them."""
    flight_bytes_max: int = 8 * 2**20
    """What is sent and not acknowledged on a link; a single message may be larger."""
    flight_messages_max: int = 32
    read_bytes_max: int = 2**18
    """About what one message of changes holds. It is one commit at the receiver, which its own publishers wait for;
    larger ones cost no less a record."""
    seed_bytes_max: int = 2**18
    """About what one part of a snapshot holds; as above."""
    heartbeat_micros: int = SECOND
    silence_micros: int = 10 * SECOND
    """A link on which nothing is heard for so long is closed."""
    cursor_sequences_max: int = 10_000
    cursor_micros: int = 3 * SECOND
    """A cursor that passes over what is not for its link is stored when it has moved so far, or after this time."""
    backoff_min_micros: int = SECOND // 10
    backoff_max_micros: int = 5 * SECOND
    backoff_operator_micros: int = 30 * SECOND
    """Between attempts of which an operator has to change the outcome."""
