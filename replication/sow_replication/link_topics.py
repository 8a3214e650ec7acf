"""The topics of one link, as its sender knows them.

pending ──(answer)──▶ seeding ──(its last part acknowledged)──▶ seeded
   │                  ▲  ▲ │                                     │ │
   │                  │  │ └──────────(answer: refused)──┐       │ │
   │   (answer: wanted)  └──(the journal was pruned, or answer: wanted)
   ▼                  │                                  ▼         │
refused ──────────────┘◀───────────────(answer: refused)───────────┘
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sow_peering import TopicKind
from sow_replication.reads import Seed


class TopicState(enum.Enum):
    """The state of a topic on the link."""

    PENDING = "pending"
    SEEDING = "seeding"
    SEEDED = "seeded"
    REFUSED = "refused"


@dataclass(slots=True)
class LinkTopic:
    """One topic of the link."""

    kind: TopicKind
    state: TopicState = TopicState.PENDING
    message: str = ""
    """Why it was refused."""
    seed: Seed | None = None
    """The seed, until all of it is read and acknowledged."""

    @property
    def takes_changes(self) -> bool:
        """True if the receiver gets the changes of the topic, perhaps beside its seed."""
        return self.state in (TopicState.SEEDING, TopicState.SEEDED)

    def begin_seed(self, after_key: bytes, *, lost: bool) -> None:
        """A seed begins behind a key. `lost`: it replaces changes that the journal has lost."""
        self.state = TopicState.SEEDING
        self.message = ""
        self.seed = Seed(after_key, lost)

    def refuse(self, message: str) -> None:
        """The receiver does not take the topic."""
        self.state = TopicState.REFUSED
        self.message = message
        self.seed = None


class LinkTopics:
    """Owns the states of the topics of one link."""

    def __init__(self, kinds: Sequence[TopicKind]) -> None:
        self.by_name: Final = {kind.name: LinkTopic(kind) for kind in kinds}

    @property
    def kinds(self) -> list[TopicKind]:
        """The topics, as the receiver is told of them."""
        return [topic.kind for topic in self.by_name.values()]

    @property
    def seeding(self) -> bool:
        """True if a topic is not yet seeded."""
        return any(topic.state in (TopicState.SEEDING, TopicState.PENDING) for topic in self.by_name.values())

    def states(self) -> list[tuple[str, TopicState, str]]:
        """The topics with their states, and the reasons of refusals."""
        return [(name, topic.state, topic.message) for name, topic in self.by_name.items()]

    def refused(self, topic: str) -> bool:
        """True if the peer refuses the topic."""
        found = self.by_name.get(topic)
        return found is not None and found.state is TopicState.REFUSED

    def refusals(self) -> list[str]:
        """The topics that the peer refuses."""
        return [name for name, topic in self.by_name.items() if topic.state is TopicState.REFUSED]

    def lacking(self) -> frozenset[str]:
        """The topics that the peer lacks, in whole or in part."""
        return frozenset(name for name, topic in self.by_name.items() if topic.state is not TopicState.SEEDED)

    def is_seeded(self, topic: str) -> bool:
        """True if the peer has the topic's snapshot, so that changes bring the rest. The link notices a new topic at
        the next tick."""
        found = self.by_name.get(topic)
        return found is not None and found.state is TopicState.SEEDED

    def seeded(self) -> frozenset[str]:
        """The topics of which the peer has the snapshot."""
        return frozenset(name for name, topic in self.by_name.items() if topic.state is TopicState.SEEDED)

    def with_changes(self) -> frozenset[str]:
        """The topics of which the receiver gets changes."""
        return frozenset(name for name, topic in self.by_name.items() if topic.takes_changes)

    def with_unread_seeds(self) -> set[str]:
        """The topics of which a part of a seed is to be read."""
        return {name for name, topic in self.by_name.items() if topic.seed is not None and not topic.seed.read}

    def has_another_kind(self, kinds: Sequence[TopicKind]) -> bool:
        """True if a topic has another kind by now than the receiver knows."""
        known = self.by_name
        return any(kind.name in known and known[kind.name].kind != kind for kind in kinds)

    def acknowledge_seeds(self, parts: int) -> None:
        """All parts of seeds up to this number have been acknowledged."""
        for topic in self.by_name.values():
            if topic.seed is not None and 0 < topic.seed.last_part <= parts:
                topic.seed = None
                topic.state = TopicState.SEEDED

    def replace(self, kinds: Sequence[TopicKind]) -> list[str]:
        """The link has these topics from now on. Returns those that have left it."""
        before = dict(self.by_name)
        self.by_name.clear()
        for kind in kinds:
            topic = before.get(kind.name)
            if topic is None:
                topic = LinkTopic(kind)
            topic.kind = kind
            self.by_name[kind.name] = topic
        return [name for name in before if name not in self.by_name]
