"""The links with each other instance, over all their streams: the state of a peer, and that of a source.

A peer that this instance sends to, as the status names it:

    connecting ──▶ greeting ──▶ seeding ◀──▶ streaming
        ▲             │            │             │        `dialled`: the driver has a stream
        │             ▼            ▼             ▼        `closed`: the link has ended, for any reason
        └───────── waiting, or refused (an operator has to change something), until the backoff has passed

A paused peer is in the state `paused`, from which only `resume` leads, to `connecting`. The node moves it.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

from sow.v1 import types_pb2
from sow_replication.backoff import Backoff
from sow_replication.options import NodeOptions, PeerOptions
from sow_replication.ports import Reason, Refused
from sow_replication.receiver import Receiver
from sow_replication.sender import Sender

COVERS_MAX: Final = 1000
"""Probes for which the acknowledgements at the time of sending are kept."""


class Trouble:
    """The last error of a link."""

    def __init__(self) -> None:
        self.reason: Reason = types_pb2.ERROR_REASON_UNSPECIFIED
        self.message = ""
        self.at_micros = 0

    def happened(self, why: Refused, now_micros: int) -> None:
        """Stores an error."""
        self.reason, self.message, self.at_micros = why.reason, why.message, now_micros

    def is_like(self, why: Refused) -> bool:
        """True if the error is the same as before: a repeated failure needs no line in the log."""
        if why.reason != types_pb2.ERROR_REASON_UNSPECIFIED:
            return self.reason == why.reason
        return (self.reason, self.message) == (why.reason, why.message)

    def passed(self) -> None:
        """The link is up."""
        self.reason, self.message, self.at_micros = types_pb2.ERROR_REASON_UNSPECIFIED, "", 0


class Outgoing:
    """The state of a peer, over all its links."""

    def __init__(self, peer: PeerOptions, options: NodeOptions, draw: random.Random, now_micros: int) -> None:
        self.peer: Final = peer
        self.backoff: Final = Backoff(options, draw)
        self.sender: Sender | None = None
        self.trouble: Final = Trouble()
        self.state = "connecting"
        self.since_micros = now_micros
        self.next_at_micros = now_micros
        self.downgraded = False
        self.healthy_at_micros = now_micros
        """The last time when it was connected and kept up, or made progress."""
        self.behind_since_micros = 0
        """The time since when it lacks changes; 0: it has everything."""
        self.mark: tuple[int, int] | None = None
        """A time, and the head at that time."""
        self.acknowledged_time = 0
        """It has everything that was committed here before this time."""
        self.asked: tuple[int, int] | None = None
        """A time, and the head at that time: the delay until the peer has that head tells whether it keeps up."""
        self.lacking: frozenset[str] | None = None
        """Topics that the peer lacked, in whole or in part, when its last link ended; None: there was no link."""
        self.refusals: list[str] | None = None
        """Topics that the peer refused when it was last seen; None: not seen since the start."""
        self.gives_first = False
        """True if the peer refuses changes until this instance has taken the changes of the peer."""
        self.paused = False
        """True if nothing is sent to it until it is resumed."""

    def enter(self, state: str, now_micros: int) -> None:
        """Changes its state."""
        if state != self.state:
            self.state, self.since_micros = state, now_micros

    def sends_all(self, pattern: str) -> bool:
        """True if this instance sends the peer everything of the topics that a pattern matches."""
        return not self.peer.filter and self.peer.topics in (pattern, ".*")

    def note_head(self, now_micros: int, head: int, acknowledged: int) -> None:
        """Moves `acknowledged_time` on, by the sequence that the peer has acknowledged."""
        if self.mark is not None and acknowledged >= self.mark[1]:
            self.acknowledged_time = self.mark[0]
            self.mark = None
        if self.mark is None:
            self.mark = (now_micros, head)


class Incoming:
    """The state of a source, over all its links, since this process started."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.live: Receiver | None = None
        self.trouble: Final = Trouble()
        self.applied = 0
        self.superseded = 0
        self.dropped = 0
        self.rows_refused = 0
        self.head = 0
        self.skew_micros = 0
        self.satisfied_probe = 0
        """Everything that it had when it heard this probe was applied."""
        self.read_time = 0
        """Changes that it may still bring are newer than every tombstone made here before this time."""
        self.refusals: list[str] | None = None
        """Its topics that this instance refused when it was last seen; None: not seen since the start."""
        self.covers: deque[tuple[int, int]] = deque(maxlen=COVERS_MAX)
        """Probes, each with the time up to which the source had acknowledged everything when the probe went out."""

    def probe_came_back(self, probe: int) -> None:
        """Everything that the source had when it heard this probe was applied."""
        if probe <= self.satisfied_probe:
            return
        self.satisfied_probe = probe
        while self.covers and self.covers[0][0] < probe:
            self.covers.popleft()
        if self.covers and self.covers[0][0] == probe:
            self.read_time = max(self.read_time, self.covers.popleft()[1])
