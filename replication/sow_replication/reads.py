"""The reads of a link: changes of the journal, and parts of seeds.

A read blocks, so the driver runs it on a reader thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sow.v1 import replication_pb2
from sow_peering import InstanceIdentity, JournalPart, PublisherPart, SeedPart
from sow_replication.messages import changes_message, seed_message
from sow_replication.ports import Store


@dataclass(slots=True, eq=False)
class Seed:
    """A seed under way. A new seed of the topic is another object, and reads for the old one are then dropped."""

    after_key: bytes
    lost: bool
    """True if it replaces changes that the journal has lost: the receiver once had the whole topic."""
    read: bool = False
    """True if all of it is read."""
    last_part: int = 0
    """The number of its last part, once that is sent."""


@dataclass(frozen=True, slots=True)
class JournalRead:
    """A read of the journal. `run` may be called on any thread."""

    store: Store
    peer: InstanceIdentity
    after: int
    topics: frozenset[str]
    filter: str
    bytes_max: int
    head: int
    probe: int

    def run(self) -> Fetched:
        """Reads, and packs the message."""
        piece = self.store.read(
            self.peer, self.after, topics=self.topics, filter_text=self.filter, bytes_max=self.bytes_max
        )
        return Fetched(piece, changes_message(piece) if piece.chunks or piece.publishers else None)


@dataclass(frozen=True, slots=True)
class SeedRead:
    """A read of a part of a topic's seed. `run` may be called on any thread."""

    store: Store
    topic: str
    seed: Seed
    after_key: bytes
    filter: str
    bytes_max: int

    def run(self) -> Fetched:
        """Reads, and packs the message. Raises Refused."""
        part = self.store.seed(self.topic, self.after_key, filter_text=self.filter, bytes_max=self.bytes_max)
        return Fetched(part, seed_message(self.topic, self.after_key, part))


@dataclass(frozen=True, slots=True)
class PublishersRead:
    """A read of the publishers that are known. `run` may be called on any thread."""

    store: Store
    topics: frozenset[str]
    after_id: str

    def run(self) -> Fetched:
        """Reads."""
        return Fetched(self.store.publishers(self.topics, self.after_id), None)


Read = JournalRead | SeedRead | PublishersRead


class Fetched(NamedTuple):
    """The result of a read."""

    part: JournalPart | SeedPart | PublisherPart
    message: replication_pb2.ReplicateRequest | None
    """None: nothing of it is for the link. The message is large, so it is packed on the reader thread."""
