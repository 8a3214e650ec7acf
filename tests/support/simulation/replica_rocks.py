"""The real store, for the simulation of replication: the engine on RocksDB, under the simulation's clock and in its
thread, through the ports that replication has in a server."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from unittest import mock

from sow_peering import PublisherPart, SeedPart
from sow_server.engine.commit import handing_over, writer
from sow_server.engine.disk.layout import decode_tombstone
from sow_server.engine.disk.rocks import TOMBSTONES
from sow_server.engine.durables.editor import DurableEditor
from sow_server.engine.durables.floors import RETENTION
from sow_server.engine.replicas import CommandedPeer, PeerSettings, ReplicaOptions
from sow_server.engine.store import Store, StoreOptions
from sow_server.engine.stored import DELETE, EXPIRE, PUT, TOUCH, decode_changes
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import (
    NEVER,
    Delete,
    Durability,
    Expiration,
    Lifetime,
    LifetimeKind,
    Outcome,
    Publish,
    TopicSettings,
    Touch,
)
from sow_server.engine.values.policies import declared_of
from sow_server.peer_store import PeerStore
from tests.support.simulation.replica_rows import Backup, Make, Row, Written
from tests.support.stores.stores import FakeTime, Rig

LATER: Final = Durability.BUFFERED
"""Local changes are synced by the simulation, after they were answered."""


@contextmanager
def stores_in(folder: Path) -> Iterator[Make]:
    """Makes stores in a new folder, and closes them at the end. They tell nothing of what is written: reading it back
    is a tenth of a life.

    No work takes time: the turns of a writer depend on the time that its steps take, and a life is to be the same with
    each run of its seed, however busy the machine is.
    """
    folder.mkdir()
    stores: list[RocksStore] = []

    def make(
        name: str, now: Callable[[], int], peers: Sequence[str], *, written: Callable[[Written], None]
    ) -> RocksStore:
        stores.append(RocksStore(folder, name, now, peers))
        return stores[-1]

    still = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=time.monotonic)
    with mock.patch.object(writer, "time", still), mock.patch.object(handing_over, "time", still):
        try:
            yield make
        finally:
            for store in stores:
                store.close()


class _WorldTime(FakeTime):
    """The simulation's clock, as both sources of a guarded one."""

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__()
        self._now = now

    def clock(self) -> GuardedClock:
        return GuardedClock(wall=self._now, elapsed=self._now)


class RocksStore(PeerStore):
    """One instance's store, with what tests do to it: `tests.support.simulation.replica_rows.SimulatedStore`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        now: Callable[[], int],
        peers: Sequence[str] = (),
        *,
        written: Callable[[Written], None] | None = None,
    ) -> None:
        options = StoreOptions(
            instance=name, replicas=ReplicaOptions(peers=tuple(PeerSettings(peer, ".*") for peer in peers))
        )
        self._rig = Rig(folder / name, options=options, time=_WorldTime(now), syncs=False)
        self._name = name
        self._written = written
        self._seen = 0
        self._folder = folder / name
        self._backups = 0
        self._open()

    def _open(self) -> None:
        store = self._rig.store
        super().__init__(store.reads, store.writes, name=self._name)

    # -- what tests do ----------------------------------------------------------------------------------------------

    def _submit(self, request: Publish | Touch | Delete) -> None:
        def heard(answer: Outcome | StoreError) -> None:
            """Refusals are none of the simulation's business: a topic may be missing."""

        self._rig.store.commits.submit(request).then(heard)

    def submit_heard(self, request: Publish | Touch | Delete, heard: Callable[[Outcome | StoreError], None]) -> None:
        """As a client that listens to the answer."""
        self._rig.store.commits.submit(request).then(heard)

    def create(self, topic: str, *, acts: bool = True, key: tuple[str, ...] = ()) -> None:
        settings = TopicSettings(key=key, expiration=Expiration.ENABLED if acts else Expiration.DISABLED)
        # `prune` says which entries are pruned.
        declared = {**declared_of(settings), "retain_time_micros": None, "retain_bytes": None}
        declared["expiration"] = settings.expiration
        self._rig.store.administration.create_topic(topic, declared)

    def drop_topic(self, topic: str) -> None:
        self._rig.store.administration.delete_topic(topic, force=True)

    def publish(self, topic: str, key: str, payload: str, ttl_micros: int | None = None) -> None:
        lifetime = Lifetime(LifetimeKind.NEVER) if ttl_micros is None else Lifetime(LifetimeKind.TTL, ttl_micros)
        self._submit(Publish(topic, [json.dumps({"p": payload}).encode()], [key], lifetime=lifetime, durability=LATER))

    def delta(self, topic: str, key: str, payload: str) -> None:
        self._submit(Publish(topic, [json.dumps({payload: 1}).encode()], [key], delta=True, durability=LATER))

    def touch(self, topic: str, key: str, ttl_micros: int) -> None:
        self._submit(Touch(topic, [key], Lifetime(LifetimeKind.TTL, ttl_micros), durability=LATER))

    def delete(self, topic: str, key: str) -> None:
        self._submit(Delete(topic, [key], durability=LATER))

    def sweep(self) -> None:
        self._rig.store.sweep()

    def prune(self, upto: int) -> None:
        """Lets go of the journal, whoever needs it: as a hard limit does."""

        def raise_floors(staged: DurableEditor) -> None:
            for topic in self._rig.store.topics.by_id.values():
                staged._floors._raise(topic, upto, RETENTION)  # what limits come down to

        def pruned(result: object) -> None:
            assert not isinstance(result, StoreError), result

        self._rig.store.durable_commits.change(raise_floors).then(pruned)

    def add_peer(self, name: str) -> None:
        self._rig.store.replicas.commanded.add(CommandedPeer(name, "somewhere:1"))

    def remove_peer(self, name: str) -> None:
        self._rig.store.replicas.commanded.remove(name)
        options = self._rig.options  # also where it was a peer from the start on
        left = tuple(peer for peer in options.replicas.peers if peer.name != name)
        self._rig.options = replace(options, replicas=replace(options.replicas, peers=left))

    def busy(self) -> bool:
        requests, _ = self._rig.store.writer.queue.depth
        return requests > 0

    def step(self, *, sync: bool = True) -> bool:
        was = self.busy() or self.unsynced()
        self._rig.store.writer.step()
        if sync:
            self._rig.store.sync()
        self._tell()
        return was

    def unsynced(self) -> bool:
        return self._rig.store.writer.committer.unsynced_since is not None

    def sync(self) -> None:
        self._rig.store.sync()
        self._tell()

    def seed(self, topic: str, after_key: bytes, *, filter_text: str, bytes_max: int) -> SeedPart:
        self.sync()  # which the store would wait for
        return super().seed(topic, after_key, filter_text=filter_text, bytes_max=bytes_max)

    def publishers(self, topics: Collection[str], after_id: str) -> PublisherPart:
        self.sync()  # as above
        return super().publishers(topics, after_id)

    def _tell(self) -> None:
        """Reports the commits that have become durable since the last time."""
        last = self._rig.store.writer.synced_sequence
        if self._written is not None:
            for written in self._accepted(last):
                self._written(written)
        self._seen = last

    def _accepted(self, last: int) -> list[Written]:
        """The changes accepted here after `_seen`, from the journal."""
        found: list[Written] = []
        cut = self._rig.store.cuts.journal()
        try:
            for commit in cut.commits(self._seen, last):
                for run in commit.runs:
                    topic = self._rig.store.topics.by_id.get(run.topic_id)
                    value = None if topic is None else cut.packed(topic, run.first_sequence)
                    if topic is None or value is None:
                        continue
                    changes = decode_changes(run.first_sequence, value)
                    if changes.source:
                        continue
                    for kind, key, version, stamp, payload in zip(
                        changes.change,
                        changes.keys,
                        changes.version,
                        changes.expire_time_micros,
                        changes.payloads,
                        strict=True,
                    ):
                        if kind in (PUT, TOUCH, DELETE):
                            row = (
                                Row(version, self._name, 0, None)
                                if kind == DELETE
                                else Row(version, self._name, 0 if stamp == NEVER else stamp, payload.decode())
                            )
                            found.append(Written(self._name, topic.name, key.decode(), row))
        finally:
            cut.close()
        return found

    def crash(self, *, power: bool = False) -> Sequence[Written]:
        unheard = self._accepted(self._rig.store.writer.last_sequence)
        if power:
            self._rig.cut_power()
        else:
            self._rig.crash()
        self._open()
        self._seen = self._rig.store.writer.last_sequence
        if power:
            return unheard
        if self._written is not None:
            for written in unheard:
                self._written(written)
        return ()

    def backup(self) -> Path:
        self._backups += 1
        name = f"backup-{self._backups}"
        self._rig.store.upkeep.backup(name)
        return self._folder / name

    def restore(self, backup: Backup, *, authoritative: bool = False) -> None:
        assert isinstance(backup, Path), "one of this kind of store"
        self._rig.close()
        shutil.rmtree(self._rig.path)
        shutil.copytree(backup, self._rig.path)
        self._rig.clock = self._rig.time.clock()
        self._rig._store = Store.open(
            self._rig.path, clock=self._rig.clock, options=self._rig.options, authoritative=authoritative
        )
        self._rig.watch_syncs()
        self._rig.store.background.begin()
        self._open()
        self._seen = self._rig.store.writer.last_sequence

    def close(self) -> None:
        """Frees the directory."""
        self._rig.close()

    def save(self) -> None:
        self._rig.store.replicas.peers.save()

    # -- content ---------------------------------------------------------------------------------------------------

    def records(self, topic: str) -> dict[str, Row]:
        if topic not in self._rig.store.topics.by_name:
            return {}
        origins = self._rig.store.origins.names
        return {
            key.decode(): Row(
                found.version,
                origins[found.origin],
                0 if found.expire_time_micros == NEVER else found.expire_time_micros,
                found.payload.decode(),
            )
            for key, found in self._rig.live(topic).items()
        }

    def tombstones(self, topic: str) -> dict[str, Row]:
        if topic not in self._rig.store.topics.by_name:
            return {}
        found, origins = self._rig.topic(topic), self._rig.store.origins.names
        rows = self._rig.rows(TOMBSTONES, found.prefix, found.stop)
        stones = {key[4:].decode(): decode_tombstone(value) for key, value in rows}
        live = self.records(topic)
        return {
            key: Row(stone.version, origins[stone.origin], 0, None, stone.kind == EXPIRE)
            for key, stone in stones.items()
            if key not in live
        }

    def dropped(self) -> set[tuple[str, str]]:
        return {
            (file.name.partition(".")[0], json.loads(line)["key"])
            for file in self._rig.path.glob("dropped/*")
            for line in file.read_text().splitlines()
        }
