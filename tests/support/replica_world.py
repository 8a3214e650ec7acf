"""A store of dicts that keeps the promises of `sow_replication.ports`, and a network of instances under one clock.

Simple and obviously right: a commit is a list of closures that run at once. A crash loses the closures that have not
run; a power cut also loses the writes that were not synced. A commit of replication is synced before its `done`; local
changes are synced later, as BUFFERED publishes are.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from sow.v1 import replication_pb2, types_pb2
from sow_peering import (
    Checksums,
    Identity,
    JournalPart,
    MergeCounts,
    Packed,
    PeerState,
    Purged,
    RecordVersion,
    SeedPart,
    SeedRange,
    TopicAnswer,
    TopicKind,
)
from sow_replication.node import Node
from sow_replication.options import NodeOptions
from sow_replication.ports import Done, Refused, SourceState, Store
from sow_replication.reads import Fetched, Read
from sow_replication.receiver import Receiver
from sow_replication.sender import Sender, TopicState

SECOND = 1_000_000
SKEW_MAX = 10 * SECOND


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
    via: Identity | None


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
    identity: Identity
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
    """What tests do to a store, besides what replication does. All but the last are queued for the next commit."""

    def create(self, topic: str, *, acts: bool = True, key: tuple[str, ...] = ()) -> None: ...
    def drop_topic(self, topic: str) -> None: ...
    def publish(self, topic: str, key: str, payload: str, ttl_micros: int | None = None) -> None: ...
    def delta(self, topic: str, key: str, payload: str) -> None: ...
    def touch(self, topic: str, key: str, ttl_micros: int) -> None: ...
    def delete(self, topic: str, key: str) -> None: ...
    def sweep(self) -> None: ...
    def prune(self, upto: int) -> None: ...
    def step(self, *, sync: bool = True) -> bool:
        """Commits the queue and calls each `done`. Returns whether there was anything. Not `sync`: local changes are
        committed, and not durable before the next sync."""

    def busy(self) -> bool: ...
    def unsynced(self) -> bool:
        """Whether a power cut would take something back."""

    def sync(self) -> None:
        """Makes all commits durable."""

    def save(self) -> None:
        """Writes down what peers have acknowledged; about once a second."""

    def crash(self, *, power: bool = False) -> Sequence[Written]:
        """Only what was committed is left; after a power cut, only what was synced. The changes that are lost."""

    def backup(self) -> Backup: ...
    def restore(self, backup: Backup, *, authoritative: bool = False) -> None: ...
    def records(self, topic: str) -> dict[str, Row]:
        """Live ones: not those that are due."""

    def tombstones(self, topic: str) -> dict[str, Row]: ...
    def dropped(self) -> set[tuple[str, str]]:
        """Topics and keys of rows that were dropped, or not taken, as dead."""


class SimulatedStore(Store, Operations, Protocol):
    """The store on which the simulation runs."""


class ModelStore:
    """One instance's store."""

    def __init__(
        self,
        name: str,
        now: Callable[[], int],
        peers: Sequence[str] = (),
        *,
        written: Callable[[Written], None] = lambda written: None,
    ) -> None:
        self._now = now
        self._peers = peers
        self._written = written
        self._lives = 0
        self._versions = 0
        self._identity = Identity(name, f"{name}-id-0", f"{name}-epoch-0")
        self.disk = Disk()
        self._synced = Disk()
        """The state after a power cut."""
        self._dirty = False
        self._sync_asked = False
        """Whether somebody waits for the next commit to be durable."""
        self._unheard: list[Written] = []
        """Changes that were accepted and are not durable."""
        self._peer_memory: dict[str, PeerState] = {}
        self._queue: list[Callable[[], Callable[[], None] | None]] = []
        self._dropped: set[tuple[str, str]] = set()
        self._authoritative = False
        self.down = False

    # -- identity, clock --------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def authoritative(self) -> bool:
        return self._authoritative

    def now_micros(self) -> int:
        return self._now()

    def head(self) -> int:
        return self._synced.head

    @property
    def topics_version(self) -> int:
        self._versions += 1  # always another: it is looked at in any case
        return self._versions

    # -- commits ----------------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], Callable[[], None] | None], *, sync: bool = False) -> None:
        self._queue.append(job)
        self._sync_asked = self._sync_asked or sync

    def _submit_for(self, job: Callable[[], MergeCounts | Refused], done: Done) -> None:
        def run() -> Callable[[], None]:
            result = job()
            return lambda: done(result)

        self._submit(run, sync=True)

    def busy(self) -> bool:
        return bool(self._queue)

    def step(self, *, sync: bool = True) -> bool:
        queue, self._queue = self._queue, []
        asked, self._sync_asked = self._sync_asked, False
        answers = [job() for job in queue]
        self.disk.peers = dict(self._peer_memory)
        if sync or asked:
            self.sync()
        elif queue:
            self._dirty = True
        for answer in answers:
            if answer is not None:
                answer()
        return bool(queue)

    def unsynced(self) -> bool:
        return self._dirty

    def sync(self) -> None:
        self._dirty = False
        self._synced = self.disk.copied()
        heard, self._unheard = self._unheard, []
        for written in heard:
            self._written(written)

    def save(self) -> None:
        """Every step does."""

    def crash(self, *, power: bool = False) -> Sequence[Written]:
        self._queue = []
        lost: Sequence[Written] = ()
        self._sync_asked = False
        if power:
            # Versions and sequences that were used are not used again (rule K7).
            reserved = self.disk
            self.disk = self._synced
            self.disk.head, self.disk.last = reserved.head, reserved.last
            lost, self._unheard = self._unheard, []
        self.sync()
        self._peer_memory = dict(self.disk.peers)
        return lost

    def backup(self) -> Disk:
        return self.disk.copied()

    def restore(self, backup: Backup, *, authoritative: bool = False) -> None:
        assert isinstance(backup, Disk), "one of this kind of store"
        self._lives += 1
        name = self._identity.name
        self._identity = Identity(name, f"{name}-id-{self._lives}", f"{name}-epoch-{self._lives}")
        self._authoritative = authoritative
        self._queue = []
        self.disk = backup.copied()
        for topic in self.disk.topics.values():
            topic.rows = {key: kept._replace(own=False) for key, kept in topic.rows.items()}
        self.disk.last = max(self.disk.last, self._now())
        self._unheard = []
        self.sync()
        self._peer_memory = dict(self.disk.peers)

    # -- changes ----------------------------------------------------------------------------------------------------

    def _mint(self) -> int:
        self.disk.last = max(self._now(), self.disk.last + 1)
        return self.disk.last

    def _put(self, topic: str, key: str, row: Row, via: Identity | None, *, own: bool = False) -> None:
        disk = self.disk
        disk.head += 1
        disk.journal.append(Entry(disk.head, self._now(), topic, key, row, via))
        disk.topics[topic].rows[key] = Kept(row, disk.head, self._now(), own)
        disk.last = max(disk.last, row.version)

    def _due(self, topic: ModelTopic, row: Row) -> bool:
        return topic.kind.acts and row.payload is not None and 0 < row.stamp <= self._now()

    def _expire(self, topic: str, key: str, row: Row) -> None:
        own = self.disk.topics[topic].rows[key].own
        self._put(topic, key, self._grace_tombstone(row), None, own=own)

    def _grace_tombstone(self, row: Row) -> Row:
        return Row(row.version, row.origin, 0, None, expired=True)

    def _expire_if_due(self, topic: str, key: str) -> None:
        kept = self.disk.topics[topic].rows.get(key)
        if kept is not None and self._due(self.disk.topics[topic], kept.row):
            self._expire(topic, key, kept.row)

    def _write(self, topic: str, key: str, change: Callable[[Row | None], Row | None]) -> None:
        """A local change: `change` is given the live record, and a version of 0 is filled in."""

        def job() -> None:
            if topic not in self.disk.topics:
                return
            self._expire_if_due(topic, key)
            kept = self.disk.topics[topic].rows.get(key)
            live = kept.row if kept is not None and kept.row.payload is not None else None
            row = change(live)
            if row is not None:
                row = row._replace(version=self._mint(), origin=self._identity.name)
                self._put(topic, key, row, None, own=True)
                self._unheard.append(Written(self._identity.name, topic, key, row))

        self._submit(job)

    def _stamp(self, ttl_micros: int | None) -> int:
        return 0 if ttl_micros is None else self._now() + ttl_micros

    def create(self, topic: str, *, acts: bool = True, key: tuple[str, ...] = ()) -> None:
        def job() -> None:
            self.disk.topics.setdefault(
                topic, ModelTopic(TopicKind(topic, key, "json", b"\x01", acts), floor=self.disk.head)
            )

        self._submit(job, sync=True)

    def drop_topic(self, topic: str) -> None:
        def job() -> None:
            self.disk.topics.pop(topic, None)
            self.disk.journal = [entry for entry in self.disk.journal if entry.topic != topic]
            for source in self.disk.sources.values():
                source.seeds.pop(topic, None)

        self._submit(job, sync=True)

    def publish(self, topic: str, key: str, payload: str, ttl_micros: int | None = None) -> None:
        self._write(topic, key, lambda live: Row(0, "", self._stamp(ttl_micros), payload))

    def delta(self, topic: str, key: str, payload: str) -> None:
        def change(live: Row | None) -> Row:
            return Row(0, "", 0, payload) if live is None else live._replace(payload=f"{live.payload}+{payload}"[-40:])

        self._write(topic, key, change)

    def touch(self, topic: str, key: str, ttl_micros: int) -> None:
        self._write(topic, key, lambda live: None if live is None else live._replace(stamp=self._stamp(ttl_micros)))

    def delete(self, topic: str, key: str) -> None:
        self._write(topic, key, lambda live: None if live is None else Row(0, "", 0, None))

    def sweep(self) -> None:
        def job() -> None:
            for name, topic in self.disk.topics.items():
                for key, kept in list(topic.rows.items()):
                    if self._due(topic, kept.row):
                        self._expire(name, key, kept.row)

        self._submit(job)

    def prune(self, upto: int) -> None:
        def job() -> None:
            for entry in self.disk.journal:
                if entry.sequence <= upto:
                    topic = self.disk.topics[entry.topic]
                    topic.floor = max(topic.floor, entry.sequence)
            self.disk.journal = [entry for entry in self.disk.journal if entry.sequence > upto]

        self._submit(job, sync=True)

    # -- what is there ----------------------------------------------------------------------------------------------

    def records(self, topic: str) -> dict[str, Row]:
        found = self.disk.topics.get(topic)
        if found is None:
            return {}
        return {
            key: kept.row
            for key, kept in sorted(found.rows.items())
            if kept.row.payload is not None and not self._due(found, kept.row)
        }

    def tombstones(self, topic: str) -> dict[str, Row]:
        found = self.disk.topics.get(topic)
        rows = {} if found is None else found.rows
        return {key: kept.row for key, kept in sorted(rows.items()) if kept.row.payload is None}

    def dropped(self) -> set[tuple[str, str]]:
        return self._dropped

    # -- Sending ----------------------------------------------------------------------------------------------------

    def topics(self, pattern: str) -> list[TopicKind]:
        assert pattern in (".*", "nothing") or pattern in self.disk.topics or pattern.isalnum(), "a simple pattern"
        return [t.kind for name, t in sorted(self.disk.topics.items()) if pattern in (".*", name)]

    def shares(self, pattern: str, topic: str) -> bool:
        found = self.disk.topics.get(topic)
        return pattern in (".*", topic) and (found is None or found.kind.journal)

    def read(
        self, peer: Identity, after: int, *, topics: Collection[str], filter_text: str, bytes_max: int
    ) -> JournalPart:
        names: list[str] = []
        chunks: list[Packed] = []
        upto, size, first, last = after, 0, 0, 0
        head = self._readable()
        for entry in self.disk.journal:
            if entry.sequence <= after:
                continue
            if size >= bytes_max or entry.sequence > head:
                break
            upto = entry.sequence
            first, last = first or entry.time, entry.time
            if entry.topic in topics and self._crosses(entry, peer):
                chunk = pack([(entry.key, entry.row)], names)
                size += len(chunk)
                chunks.append(Packed(entry.topic, chunk))
        else:
            upto = max(upto, head)
        lost = [name for name in sorted(topics) if name in self.disk.topics and self.disk.topics[name].floor > after]
        return JournalPart(after, upto, chunks, names, first, last, lost)

    def _readable(self) -> int:
        """Peers are not sent what a power cut could take back (rule S7)."""
        return self._synced.head

    def _crosses(self, entry: Entry, peer: Identity) -> bool:
        # An expiry that came with a seed is news for others: the row that it ended may never have been here.
        return entry.via != peer and not (entry.row.expired and entry.via is None)

    def seed(self, topic: str, after_key: bytes, *, filter_text: str, bytes_max: int) -> SeedPart:
        found = self.disk.topics.get(topic)
        if found is None:
            raise Refused(types_pb2.ERROR_REASON_TOPIC_NOT_FOUND, topic)
        self.sync()  # as above
        names: list[str] = []
        rows: list[tuple[str, Row]] = []
        size = 0
        for key, kept in sorted(found.rows.items()):
            if key.encode() <= after_key:
                continue
            if size >= bytes_max:
                return SeedPart(pack(rows, names), names, rows[-1][0].encode())
            rows.append((key, kept.row))
            size += 60
        return SeedPart(pack(rows, names) if rows else b"", names, b"")

    def purged(self, topic: str) -> Purged:
        found = self.disk.topics.get(topic)
        return Purged(0, "") if found is None else Purged(*found.purged)

    def peer(self, name: str) -> PeerState:
        return self._peer_memory.get(name, PeerState(None, 0, False))

    def acknowledged(self, name: str, identity: Identity, sequence: int) -> None:
        before = self.peer(name)
        missed = before.missed or before.identity not in (None, identity)
        self._peer_memory[name] = PeerState(identity, sequence, missed)

    def reseeded(self, name: str) -> None:
        self._peer_memory[name] = self.peer(name)._replace(missed=False)

    # -- Receiving --------------------------------------------------------------------------------------------------

    def source(self, name: str) -> SourceState | None:
        return self.disk.sources.get(name)

    def answers(self, name: str, topics: Sequence[TopicKind]) -> list[TopicAnswer]:
        row = self.disk.sources[name]
        answers = [self._answer(row, kind) for kind in topics]
        carried = {answer.topic for answer in answers if not answer.reason}
        for topic in [topic for topic in row.seeds if topic not in carried]:
            del row.seeds[topic]
        if row.missing_is_deleted and not any(answer.wanted for answer in answers):
            row.missing_is_deleted = False
        return answers

    def answer(self, name: str, topic: TopicKind) -> TopicAnswer:
        return self._answer(self.disk.sources[name], topic)

    def _answer(self, row: ModelSource, kind: TopicKind) -> TopicAnswer:
        refusal = self.check(kind)
        if refusal.reason:
            return refusal
        seed = row.seeds.get(kind.name, b"")
        return TopicAnswer(kind.name) if seed is None else TopicAnswer(kind.name, wanted=True, after_key=seed)

    def check(self, topic: TopicKind) -> TopicAnswer:
        mine = self.disk.topics.get(topic.name)
        if mine is None:
            return TopicAnswer(topic.name, reason=types_pb2.ERROR_REASON_TOPIC_NOT_FOUND, message="there is none")
        if mine.kind[1:4] != topic[1:4]:
            return TopicAnswer(topic.name, reason=types_pb2.ERROR_REASON_TOPIC_DIFFERS, message="other key fields")
        return TopicAnswer(topic.name)

    def begin(
        self,
        identity: Identity,
        *,
        topics: str,
        filter_text: str,
        cursor: int,
        missing_is_deleted: bool,
        done: Done,
    ) -> None:
        def job() -> MergeCounts:
            self.disk.sources[identity.name] = ModelSource(identity, cursor, topics, filter_text, missing_is_deleted)
            return MergeCounts()

        self._submit_for(job, done)

    def wait_for(self, name: str, sequence: int, done: Done) -> None:
        def job() -> MergeCounts:
            self.disk.sources[name].wait_for = sequence
            return MergeCounts()

        self._submit_for(job, done)

    def apply(
        self, name: str, *, after: int, upto: int, chunks: Sequence[Packed], origins: Sequence[str], done: Done
    ) -> None:
        self._submit_for(lambda: self._apply(name, after, upto, chunks, origins), done)

    def _apply(
        self, name: str, after: int, upto: int, chunks: Sequence[Packed], origins: Sequence[str]
    ) -> MergeCounts | Refused:
        row = self.disk.sources[name]
        changes = [(topic, key, change) for topic, chunk in chunks for key, change in unpack(chunk, origins)]
        refusal = self._refusal(row, [change for _, _, change in changes])
        if refusal is None and self._skips(row, after):
            refusal = Refused(types_pb2.ERROR_REASON_BATCH_DAMAGED, "behind the cursor")
        if refusal is not None:
            return refusal
        result = MergeCounts()
        for topic, key, change in changes:
            if topic in self.disk.topics:
                result = self._take(row, topic, key, change, result)
            else:
                row.seeds.pop(topic, None)
        self._move(row, upto)
        return result

    def _skips(self, row: ModelSource, after: int) -> bool:
        return after > row.cursor

    def _move(self, row: ModelSource, upto: int) -> None:
        row.cursor = max(row.cursor, upto)

    def _refusal(self, row: ModelSource, changes: Sequence[Row]) -> Refused | None:
        if row.wait_for:
            return Refused(types_pb2.ERROR_REASON_RESEED_PENDING, "it has to wait")
        if any(change.version > self._now() + SKEW_MAX for change in changes):
            return Refused(types_pb2.ERROR_REASON_CLOCK_SKEW, "a change is from the future")
        return None

    def _take(self, row: ModelSource, topic: str, key: str, change: Row, result: MergeCounts) -> MergeCounts:
        self._expire_if_due(topic, key)
        found = self.disk.topics[topic]
        kept = found.rows.get(key)
        dead = kept is None or (kept.row.payload is None and kept.row.rank < change.rank)
        if dead and self._counts_missing_as_deleted(row, topic) and change.rank <= found.purged:
            if change.payload is not None:
                self._bury(topic, key, change)
            return result._replace(dropped=result.dropped + 1)
        if kept is not None and not self._wins(change, kept.row):
            if kept.row.rank == change.rank:
                return result._replace(known=result.known + 1)
            return result._replace(superseded=result.superseded + 1)
        if kept is not None and kept.own and change.origin == self._identity.name:
            # By this instance, with data that it has lost: older than all that it has written since (K7).
            self.disk.last = max(self.disk.last, change.version)
            outranking = kept.row._replace(version=self._mint(), expired=False)
            self._put(topic, key, outranking, None, own=True)
            self._unheard.append(Written(self._identity.name, topic, key, outranking))
            return result._replace(superseded=result.superseded + 1)
        self._put(topic, key, self._stored(change), row.identity)
        return result._replace(applied=result.applied + 1)

    def _bury(self, topic: str, key: str, row: Row) -> None:
        """A dead row becomes a tombstone right above it: wherever else it lives, it ends there, too, and nothing that
        is newer does."""
        self._dropped.add((topic, key))
        self._put(topic, key, Row(row.version + 1, self._identity.name, 0, None), None)

    def _counts_missing_as_deleted(self, row: ModelSource, topic: str) -> bool:
        return row.missing_is_deleted and row.seeds.get(topic, b"") is not None

    def _wins(self, change: Row, kept: Row) -> bool:
        return change.rank > kept.rank

    def _stored(self, change: Row) -> Row:
        return change

    def merge(
        self, name: str, part: SeedRange, *, chunk: bytes, origins: Sequence[str], purged: Purged, done: Done
    ) -> None:
        self._submit_for(lambda: self._merge(name, part, chunk, origins, purged), done)

    def _merge(
        self, name: str, part: SeedRange, chunk: bytes, origins: Sequence[str], purged: Purged
    ) -> MergeCounts | Refused:
        row = self.disk.sources[name]
        rows = unpack(chunk, origins)
        refusal = self._refusal(row, [change for _, change in rows])
        if refusal is not None:
            return refusal
        topic = self.disk.topics.get(part.topic)
        if topic is None:
            return MergeCounts()
        result = MergeCounts()
        for key, change in rows:
            result = self._take(row, part.topic, key, change, result)
        if purged.version:
            brought = {key for key, _ in rows}
            for key, kept in list(topic.rows.items()):
                in_range = part.after_key < key.encode() and (part.last or key.encode() <= part.upto_key)
                if in_range and key not in brought and kept.row.rank <= purged:
                    if kept.row.payload is None:
                        continue
                    self._bury(part.topic, key, kept.row)
                    result = result._replace(dropped=result.dropped + 1)
            # What is dead there is dead here: this instance has to tell others in its turn.
            topic.purged = max(topic.purged, (purged.version, purged.origin))
        progress = row.seeds.get(part.topic, b"")
        if part.first or (progress is not None and part.after_key <= progress):
            row.seeds[part.topic] = None if part.last else part.upto_key
        return result

    # -- Tombstones -------------------------------------------------------------------------------------------------

    def purge(
        self, upto: int, *, held: Collection[str], made_before_micros: int, unread: Collection[str], done: Done
    ) -> None:
        self._submit_for(lambda: self._purge(upto, held, made_before_micros, unread), done)

    def _purge(self, upto: int, held: Collection[str], made_before_micros: int, unread: Collection[str]) -> MergeCounts:
        gone = 0
        for name, topic in self.disk.topics.items():
            for key, kept in list(topic.rows.items()):
                early = kept.sequence <= upto and name not in held
                if kept.row.payload is not None or not (early or kept.made < made_before_micros):
                    continue
                if not early:
                    for peer in self._peers:
                        if self.peer(peer).acknowledged < kept.sequence or name in held:
                            self._peer_memory[peer] = self.peer(peer)._replace(missed=True)
                    for source in unread:
                        if source in self.disk.sources:
                            self.disk.sources[source].wait_for = self.disk.head
                topic.purged = max(topic.purged, kept.row.rank)
                del topic.rows[key]
                gone += 1
        return MergeCounts(gone)

    # -- Comparing: not part of this world --------------------------------------------------------------------------

    def checksums(self, topic: str, buckets: int, now_micros: int) -> Checksums:
        raise NotImplementedError

    def versions(self, topic: str, buckets: int, wanted: Collection[int], now_micros: int) -> list[RecordVersion]:
        raise NotImplementedError

    def rows(self, topic: str, keys: Sequence[bytes]) -> tuple[bytes, Sequence[str]]:
        raise NotImplementedError

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], done: Done, *, peer: str) -> None:
        raise NotImplementedError


def pack(rows: Sequence[tuple[str, Row]], names: list[str]) -> bytes:
    """Rows as a chunk; `names` collects the origins that it points at."""
    packed = []
    for key, row in rows:
        if row.origin not in names:
            names.append(row.origin)
        packed.append([key, row.version, names.index(row.origin), row.stamp, row.payload, row.expired])
    return json.dumps(packed).encode()


def unpack(chunk: bytes, names: Sequence[str]) -> list[tuple[str, Row]]:
    """What `pack` has packed."""
    if not chunk:
        return []
    return [
        (key, Row(version, names[origin], stamp, payload, expired))
        for key, version, origin, stamp, payload, expired in json.loads(chunk)
    ]


M = TypeVar("M", replication_pb2.ReplicateRequest, replication_pb2.ReplicateResponse)


def _copy(message: M) -> M:
    return type(message).FromString(message.SerializeToString())


class Make(Protocol):
    """Makes a store."""

    def __call__(
        self, name: str, now: Callable[[], int], peers: Sequence[str], *, written: Callable[[Written], None]
    ) -> SimulatedStore: ...


# -- a network of instances ---------------------------------------------------------------------------------------


class Wire:
    """One stream: what was sent on it arrives in order, later, or never."""

    def __init__(self, world: World, sender: Sender, receiver: Receiver, source: Instance, target: Instance) -> None:
        self.world = world
        self.sender = sender
        self.receiver = receiver
        self.source = source
        self.target = target
        self.broken = False
        self.seeded: frozenset[str] = frozenset()
        """Topics that the receiver has told are seeded, when it acknowledged last."""
        self._arrivals = {True: 0, False: 0}
        sender.wake = lambda: world.soon(source)
        receiver.wake = lambda: world.soon(target)

    @property
    def ends(self) -> tuple[str, str]:
        """The names of receiver and sender."""
        return self.target.store.identity.name, self.source.store.identity.name

    def later(self, forward: bool, action: Callable[[], None]) -> None:
        at = max(self._arrivals[forward], self.world.now + self.world.delay())
        self._arrivals[forward] = at

        def arrive() -> None:
            if not self.broken:
                action()

        self.world.at(at, arrive)

    def cut(self) -> None:
        """What is under way is lost; each end hears of it when it does."""
        if self.broken:
            return
        self.broken = True
        gone = Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "the connection is gone")
        for machine, home in ((self.sender, self.source), (self.receiver, self.target)):
            # Some notice at once, some only by the silence.
            delay = self.world.random.choice([0, self.world.delay(), 30 * SECOND])
            self.world.at(self.world.now + delay, partial(self.world.end, machine, home, gone))


class Instance:
    """A store and its node; crashes take all but the store's disk."""

    def __init__(self, world: World, store: SimulatedStore, options: NodeOptions, offset: int) -> None:
        self.world = world
        self.store = store
        self.options = options
        self.offset = offset
        self.up = True
        self.life = 0
        self.fragile = False
        """Whether it crashes in front of its next commit, or loses power in front of its next sync."""
        self.exposed = False
        """Whether it loses power right after it has told another one something: what it has, or what it was given."""
        self.node = Node(store, options, world.random)

    def boot(self) -> None:
        if self.up:
            return
        self.up = True
        self.fragile = self.exposed = False
        self.life += 1
        self.node = Node(self.store, self.options, self.world.random)
        self.world.at(self.world.now, self.tick)

    def crash(self, *, power: bool = False) -> None:
        self.up = False
        self.life += 1
        self.world.lost += self.store.crash(power=power)
        self.world.check_promises(self)
        self.world.check_lost()
        for wire in list(self.world.wires):
            if self in (wire.source, wire.target):
                wire.cut()
                machine = wire.sender if wire.source is self else wire.receiver
                machine.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "crashed"))

    def tick(self) -> None:
        life = self.life

        def again() -> None:
            if self.up and self.life == life:
                self.node.tick()
                self.store.sweep()
                self.store.save()
                self.world.soon(self)
                self.world.at(self.world.now + SECOND, again)

        again()


EVENTS_MAX = 200_000
"""Of one life; some 35,000 are the most that one has had."""


class Storm(AssertionError):
    """There is no end to it."""


class Broken(AssertionError):
    """A receiver lacks changes that it has acknowledged."""


class Promise(NamedTuple):
    """The changes that a receiver has acknowledged to a source."""

    receiver: Identity
    source: Identity
    sequence: int


class World:
    """Instances, their network, and time."""

    def __init__(self, seed: int, make: Make = ModelStore) -> None:
        self.random = random.Random(seed)
        self.now = 1_700_000_000 * SECOND
        self.instances: dict[str, Instance] = {}
        self.wires: list[Wire] = []
        self.cuts: set[tuple[str, str]] = set()
        """Directed: who cannot reach whom."""
        self.history: list[Written] = []
        self.lost: list[Written] = []
        """The writes lost in power cuts, in the last seconds."""
        self._lost_until = 0
        self._make = make
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._pending: set[str] = set()
        self._committing: set[str] = set()
        self._syncing: set[str] = set()
        self._promises: dict[tuple[str, str], Promise] = {}
        """By the names of receiver and source."""
        self.reading_micros = 3_000
        self.delay_max = 40_000

    def add(self, name: str, options: NodeOptions, offset: int = 0) -> Instance:
        store = self._make(
            name,
            lambda: self.now + self.instances[name].offset if name in self.instances else self.now + offset,
            [peer.name for peer in options.peers],
            written=self.history.append,
        )
        instance = self.instances[name] = Instance(self, store, options, offset)
        self.at(self.now + self.random.randrange(SECOND), instance.tick)
        return instance

    def delay(self) -> int:
        return self.random.randint(100, self.delay_max)

    def at(self, time: int, action: Callable[[], None]) -> None:
        number = next(self._numbers)
        if number == EVENTS_MAX:
            raise Storm(f"{number} events, and no end: something goes round and round")
        heapq.heappush(self._events, (time, number, action))

    def soon(self, instance: Instance) -> None:
        """Something may be to be done at an instance."""
        name = instance.store.identity.name
        if name not in self._pending:
            self._pending.add(name)
            self.at(self.now, lambda: self._pump(instance))

    def run(self, micros: int) -> None:
        until = self.now + micros
        while self._events and self._events[0][0] <= until:
            time, _, action = heapq.heappop(self._events)
            self.now = max(self.now, time)
            action()
        self.now = until

    def run_until(self, holds: Callable[[], bool], micros: int) -> bool:
        for _ in range(micros // SECOND):
            if holds():
                return True
            self.run(SECOND)
        return holds()

    # -- driving ----------------------------------------------------------------------------------------------------

    def _pump(self, instance: Instance) -> None:
        self._pending.discard(instance.store.identity.name)
        if not instance.up:
            return
        self._dial(instance)
        for wire in list(self.wires):
            if wire.source is instance:
                self._pump_sender(wire)
            if wire.target is instance:
                self._pump_receiver(wire)
        self._commit(instance)
        self._sync(instance)

    def _commit(self, instance: Instance) -> None:
        name = instance.store.identity.name
        if not instance.store.busy() or name in self._committing:
            return
        self._committing.add(name)

        def commit() -> None:
            self._committing.discard(name)
            if instance.fragile and instance.up:
                instance.crash(power=self.random.random() < 0.5)
                self.at(self.now + SECOND, instance.boot)
            if instance.up and instance.store.step(sync=False):
                self.check_lost()
                instance.node.wake()
                self.soon(instance)

        self.at(self.now + self.random.randint(100, 10_000), commit)

    def _sync(self, instance: Instance) -> None:
        """What nobody waits for becomes durable within 50 ms (rule P5)."""
        name = instance.store.identity.name
        if name in self._syncing or not instance.store.unsynced():
            return
        self._syncing.add(name)

        def sync() -> None:
            self._syncing.discard(name)
            if not instance.up or not instance.store.unsynced():
                return
            if instance.fragile and self.random.random() < 0.3:
                instance.crash(power=True)
                self.at(self.now + SECOND, instance.boot)
                return
            instance.store.sync()
            instance.node.wake()
            self.soon(instance)

        self.at(self.now + self.random.randint(100, 50_000), sync)

    def _dial(self, instance: Instance) -> None:
        for out in instance.node.due():
            target = self.instances[out.peer.name]
            sender = instance.node.dialled(out)
            if not target.up or self._is_cut(instance, target):
                sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "no route"))
                instance.node.closed(sender)
                continue
            self.wires.append(Wire(self, sender, target.node.accept(), instance, target))
        when = instance.node.next_dial_micros()
        if when is not None:
            self.at(when - instance.offset + 1, lambda: self.soon(instance))

    def _is_cut(self, a: Instance, b: Instance) -> bool:
        pair = (a.store.identity.name, b.store.identity.name)
        return pair in self.cuts

    def cut(self, a: str, b: str) -> None:
        """`a` does not reach `b` any more."""
        self.cuts.add((a, b))
        for wire in list(self.wires):
            if (wire.source.store.identity.name, wire.target.store.identity.name) == (a, b):
                wire.cut()

    def heal(self) -> None:
        self.cuts.clear()
        for instance in self.instances.values():
            if not instance.up:
                instance.boot()

    def _pump_sender(self, wire: Wire) -> None:
        sender, home = wire.sender, wire.source
        read = sender.next_read()
        if read is not None:
            self._read(wire, read)
        while True:
            request = sender.next_message()
            if request is None:
                break
            wire.later(True, partial(self._arrive, wire, _copy(request)))
            if request.WhichOneof("message") in ("changes", "seed"):
                self._expose(home)
        if sender.failure is not None:
            home.node.closed(sender)
            self._hang_up(wire, wire.receiver, wire.target, forward=True)

    def _read(self, wire: Wire, read: Read) -> None:
        home, life = wire.source, wire.source.life
        started = self.now + self.random.randrange(self.reading_micros)

        def run() -> None:
            if home.life != life:
                return
            result: Fetched | Refused
            try:
                result = read.run()
            except Refused as refused:
                result = refused

            def done() -> None:
                if home.life == life:
                    wire.sender.took(result)
                    self.soon(home)

            self.at(self.now + self.random.randrange(self.reading_micros), done)

        self.at(started, run)

    def _expose(self, instance: Instance) -> None:
        if not instance.exposed:
            return
        instance.exposed = False
        life = instance.life

        def cut() -> None:
            if instance.up and instance.life == life:
                instance.crash(power=True)
                self.at(self.now + SECOND, instance.boot)

        self.at(self.now + self.random.randrange(20_000), cut)

    def _arrive(self, wire: Wire, request: replication_pb2.ReplicateRequest) -> None:
        if request.HasField("hello"):
            told = self._promises.get(wire.ends)
            if told is not None and told.source[1:] != (request.hello.instance.id, request.hello.instance.epoch):
                del self._promises[wire.ends]  # it is another one, and begins anew
        wire.receiver.received(request)
        self.soon(wire.target)

    def _pump_receiver(self, wire: Wire) -> None:
        receiver = wire.receiver
        while True:
            response = receiver.next_message()
            if response is None:
                break
            if response.HasField("acknowledged") and receiver.identity is not None:
                self._promises[wire.ends] = Promise(
                    wire.target.store.identity, receiver.identity, response.acknowledged.sequence
                )
                wire.seeded = _seeded(receiver)
                self._expose(wire.target)
            wire.later(False, partial(self._answer, wire, _copy(response)))
        if receiver.failure is not None:
            self._hang_up(wire, wire.sender, wire.source, forward=False)

    def _answer(self, wire: Wire, response: replication_pb2.ReplicateResponse) -> None:
        wire.sender.received(response)
        self.soon(wire.source)

    def end(self, machine: Sender | Receiver, home: Instance, why: Refused) -> None:
        """One end hears that the stream is over."""
        machine.fail(why)
        self.soon(home)

    def _hang_up(self, wire: Wire, other: Sender | Receiver, home: Instance, *, forward: bool) -> None:
        """One end is over: the other one hears why, unless the wire is broken."""
        failure = wire.receiver.failure if not forward else wire.sender.failure
        assert failure is not None, "one end is over"
        if other.failure is None:
            wire.later(forward, partial(self.end, other, home, failure))
        elif wire in self.wires:
            wire.source.node.closed(wire.sender)  # a node that has crashed since does not know it any more
            self.wires.remove(wire)
            self.soon(wire.source)

    # -- what is to hold --------------------------------------------------------------------------------------------

    def check_promises(self, instance: Instance) -> None:
        """After a crash a receiver still has all that it has acknowledged (receiver [1], rule R6).

        Senders let go of their journal and of tombstones by that, and tell publishers that their records are
        REPLICATED (rule P5). Raises Broken.
        """
        store = instance.store
        for (name, other), promise in self._promises.items():
            if (name, store.identity) != (store.identity.name, promise.receiver):
                continue
            source = store.source(other)
            if source is None or source.identity != promise.source or (source.cursor or 0) < promise.sequence:
                raise Broken(f"{name} has acknowledged {promise}, and has {source}")
        for wire in self.wires:
            if wire.target is not instance or wire.receiver.failure is not None or not wire.seeded:
                continue
            kinds = {kind.name: kind for kind in wire.source.store.topics(".*")}
            assert wire.receiver.identity is not None, "it has acknowledged"
            for topic in sorted(wire.seeded & _seeded(wire.receiver) & set(kinds)):
                if store.answer(wire.receiver.identity.name, kinds[topic]).wanted:
                    raise Broken(f"{store.identity.name} has acknowledged the seed of {topic}, and lacks it")

    def check_lost(self) -> None:
        """No instance has what a power cut took from its origin (rule S7). Raises Broken."""
        if not self.lost:
            return
        self._lost_until = self._lost_until or self.now + SECOND
        for instance in self.instances.values():
            for topic in {written.topic for written in self.lost}:
                rows = {**instance.store.records(topic), **instance.store.tombstones(topic)}
                for written in self.lost:
                    if written.topic == topic and rows.get(written.key) == written.row:
                        raise Broken(f"{instance.store.identity.name} has what {written.instance} has lost: {written}")
        if self.now > self._lost_until:  # what was under way has arrived, or never will
            self.lost, self._lost_until = [], 0

    def reaches(self, a: str) -> set[str]:
        """Where the changes of an instance get to, when all is well."""
        seen = {a}
        todo = [a]
        while todo:
            for out in self.instances[todo.pop()].options.peers:
                if out.name not in seen:
                    seen.add(out.name)
                    todo.append(out.name)
        return seen

    def lag(self) -> int:
        """Sequences that peers have not acknowledged."""
        total = 0
        for instance in self.instances.values():
            for out in instance.node.outgoing.values():
                total += max(0, instance.store.head() - instance.node.settled(out))
                total += 0 if out.state == "streaming" else 1
        return total


def _seeded(receiver: Receiver) -> frozenset[str]:
    return frozenset(name for name, state, _ in receiver.topics() if state is TopicState.SEEDED)
