"""The rows, journal and disk of the model of a store, and what tests do to a store besides replication."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from sow_peering import InstanceIdentity, PeerState, TopicKind
from sow_replication.ports import Store

SECOND = 1_000_000


class Row(NamedTuple):
    """A record, or (payload None) a tombstone."""

    version: int
    origin: str
    stamp: int
    """When it expires; 0: never. Of a tombstone 0."""
    payload: str | None
    expired: bool = False

    @property
    def rank(self) -> tuple[int, str]:
        return (self.version, self.origin)


class Kept(NamedTuple):
    """A row, where and when it was last changed here."""

    row: Row
    sequence: int
    made: int
    own: bool = False
    """Whether this instance has written it, with the data that it has now."""


class Entry(NamedTuple):
    """A journaled change."""

    sequence: int
    time: int
    topic: str
    key: str
    row: Row
    via: InstanceIdentity | None


class Written(NamedTuple):
    """A change that was accepted somewhere."""

    instance: str
    topic: str
    key: str
    row: Row


@dataclass
class ModelTopic:
    kind: TopicKind
    floor: int
    rows: dict[str, Kept] = field(default_factory=dict)
    purged: tuple[int, str] = (0, "")


@dataclass
class ModelSource:
    identity: InstanceIdentity
    cursor: int
    topics: str
    filter: str
    missing_is_deleted: bool
    wait_for: int = 0
    seeds: dict[str, bytes | None] = field(default_factory=dict)
    """None: seeded; else up to which key."""


@dataclass
class Disk:
    """The state after a crash."""

    topics: dict[str, ModelTopic] = field(default_factory=dict)
    journal: list[Entry] = field(default_factory=list)
    head: int = 0
    last: int = 0
    sources: dict[str, ModelSource] = field(default_factory=dict)
    peers: dict[str, PeerState] = field(default_factory=dict)

    def copied(self) -> Disk:
        """A copy that shares nothing that changes."""
        return Disk(
            {name: replace(topic, rows=dict(topic.rows)) for name, topic in self.topics.items()},
            list(self.journal),
            self.head,
            self.last,
            {name: replace(source, seeds=dict(source.seeds)) for name, source in self.sources.items()},
            dict(self.peers),
        )


Backup: TypeAlias = Disk | Path


class Operations(Protocol):
    """The changes that tests make to a store besides replication. All but the last are queued for the next commit."""

    def create(self, topic: str, *, acts: bool = True, key: tuple[str, ...] = ()) -> None: ...
    def drop_topic(self, topic: str) -> None: ...
    def publish(self, topic: str, key: str, payload: str, ttl_micros: int | None = None) -> None: ...
    def delta(self, topic: str, key: str, payload: str) -> None: ...
    def touch(self, topic: str, key: str, ttl_micros: int) -> None: ...
    def delete(self, topic: str, key: str) -> None: ...
    def sweep(self) -> None: ...
    def prune(self, upto: int) -> None: ...
    def add_peer(self, name: str) -> None:
        """Sends everything to another instance, by command (rule R14)."""

    def remove_peer(self, name: str) -> None:
        """Forgets an instance that was added by command."""

    def step(self, *, sync: bool = True) -> bool:
        """Commits the queue and gives each answer. Returns whether there was anything. Not `sync`: local changes are
        committed, and not durable before the next sync."""

    def busy(self) -> bool: ...
    def unsynced(self) -> bool:
        """Whether a power cut would take something back."""

    def sync(self) -> None:
        """Makes all commits durable."""

    def save(self) -> None:
        """Writes down what peers have acknowledged; about once a second."""

    def crash(self, *, power: bool = False) -> Sequence[Written]:
        """Keeps only committed changes; after a power cut, only synced ones. Returns the changes that are lost."""

    def backup(self) -> Backup: ...
    def restore(self, backup: Backup, *, authoritative: bool = False) -> None: ...
    def records(self, topic: str) -> dict[str, Row]:
        """Live ones: not those that are due."""

    def tombstones(self, topic: str) -> dict[str, Row]: ...
    def dropped(self) -> set[tuple[str, str]]:
        """Topics and keys of rows that were dropped, or not taken, as dead."""


class SimulatedStore(Store, Operations, Protocol):
    """The store on which the simulation runs."""


def pack(rows: Sequence[tuple[str, Row]], names: list[str]) -> bytes:
    """Rows as a chunk; `names` collects the origins that it points at."""
    packed = []
    for key, row in rows:
        if row.origin not in names:
            names.append(row.origin)
        packed.append([key, row.version, names.index(row.origin), row.stamp, row.payload, row.expired])
    return json.dumps(packed).encode()


def unpack(chunk: bytes, names: Sequence[str]) -> list[tuple[str, Row]]:
    """The changes that `pack` has packed."""
    if not chunk:
        return []
    return [
        (key, Row(version, names[origin], stamp, payload, expired))
        for key, version, origin, stamp, payload, expired in json.loads(chunk)
    ]


class Make(Protocol):
    """Makes a store."""

    def __call__(
        self, name: str, now: Callable[[], int], peers: Sequence[str], *, written: Callable[[Written], None]
    ) -> SimulatedStore: ...
