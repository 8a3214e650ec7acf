"""Instances that replicate, without links: the test decides which changes go from one store to another, and when.

a, b = instance(tmp_path, "a", peers=["b"]), instance(tmp_path, "b", peers=["a"])
ship(a, b)
assert b.get("t", "1") == a.get("t", "1")

`pair` is a fixture for test modules to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sow_peering import NOTHING_PURGED, InstanceIdentity, MergeCounts, Purged, SeedRange
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import Tombstone, decode_tombstone
from sow_server.engine.disk.rocks import TOMBSTONES
from sow_server.engine.replicas import PeerSettings, ReplicaOptions, SelectRecords
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import RecordMatcher
from tests.support.stores.stores import FakeTime, Rig


class Live(NamedTuple):
    """The state on which replicas have to agree."""

    payload: bytes
    version: int
    publish_time_micros: int
    expire_time_micros: int
    origin: str


def instance(
    path: Path, name: str, *, peers: Sequence[str] = (), time: FakeTime | None = None, topics: str = ".*", **bounds: Any
) -> Rig:
    """A store with peers."""
    options = ReplicaOptions(peers=tuple(PeerSettings(peer, topics) for peer in peers), **bounds)
    return Rig(path / name, options=replace(StoreOptions(), instance=name, replicas=options), time=time)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Rig, Rig]:
    """Two instances that send to each other, on one time."""
    time = FakeTime()
    rigs = instance(tmp_path, "a", peers=["b"], time=time), instance(tmp_path, "b", peers=["a"], time=time)
    for rig in rigs:
        rig.create_topic("t")
    return rigs


def identity(rig: Rig) -> InstanceIdentity:
    """Its identity."""
    return InstanceIdentity(rig.options.instance, rig.store.instance.id, rig.store.instance.epoch)


def everything(topic: Topic) -> RecordMatcher | None:
    """No filter."""
    return None


def greet(sender: Rig, receiver: Rig, *, missing_is_deleted: bool = False, cursor: int | None = None) -> None:
    """The receiver begins to receive."""
    answers: list[MergeCounts | StoreError] = []
    at = sender.store.writer.synced_sequence if cursor is None else cursor
    receiver.store.replicas.sources.begin(
        identity(sender),
        topics=".*",
        filter_text="",
        cursor=at,
        missing_is_deleted=missing_is_deleted,
    ).then(answers.append)
    receiver.answer(answers)


def seed(
    sender: Rig, receiver: Rig, topic: str, *, purged: Purged = NOTHING_PURGED, bytes_max: int = 2**20
) -> list[MergeCounts]:
    """Sends the snapshot of a topic, part by part."""
    name = sender.options.instance
    tell(sender, receiver)
    sender.store.sync()
    counts: list[MergeCounts] = []
    after, first = b"", True
    while True:
        rows = sender.store.replicas.reader.seed(sender.topic(topic), after, select=everything, bytes_max=bytes_max)
        part = SeedRange(topic, first, not rows.upto_key, after, rows.upto_key)
        answers: list[MergeCounts | StoreError] = []
        receiver.store.replicas.changes.merge(
            name, part, chunk=rows.chunk, origins=sender.store.origins.names, purged=purged
        ).then(answers.append)
        counts.append(receiver.answer(answers))
        if part.last:
            return counts
        after, first = rows.upto_key, False


def tell(sender: Rig, receiver: Rig) -> None:
    """The receiver hears of the sender's topics."""
    receiver.store.replicas.sources.answers(sender.options.instance, sender.store.replicas.shared.matching(".*"))


def ship(
    sender: Rig, receiver: Rig, *, bytes_max: int = 2**20, topics: str = ".*", select: SelectRecords = everything
) -> MergeCounts:
    """Sends the changes behind the receiver's cursor, and everything before the first time; and the acknowledgement
    comes back."""
    name = sender.options.instance
    sender.store.sync()
    total = [0] * len(MergeCounts())
    source = receiver.store.replicas.sources.by_name.get(name)
    if source is None or source.identity != identity(sender):
        greet(sender, receiver)
        for topic in sender.store.replicas.shared.matching(".*"):
            for counts in seed(sender, receiver, topic.name):
                total = [one + other for one, other in zip(total, counts, strict=True)]
    tell(sender, receiver)
    while True:
        cursor = receiver.store.replicas.sources.by_name[name].cursor
        names = [kind.name for kind in sender.store.replicas.shared.matching(topics)]
        piece = sender.store.replicas.reader.read(
            identity(receiver), cursor, topics=names, select=select, bytes_max=bytes_max
        )
        if piece.upto == cursor:
            break
        answers: list[MergeCounts | StoreError] = []
        receiver.store.replicas.changes.apply(
            name,
            after=cursor,
            upto=piece.upto,
            chunks=piece.chunks,
            origins=sender.store.origins.names,
            publishers=piece.publishers,
        ).then(answers.append)
        result: MergeCounts = receiver.answer(answers)
        total = [one + other for one, other in zip(total, result, strict=True)]
    sender.store.replicas.peers.acknowledged(
        receiver.options.instance, identity(receiver), receiver.store.replicas.sources.by_name[name].cursor
    )
    return MergeCounts(*total)


def tell_publishers(sender: Rig, receiver: Rig) -> None:
    """Sends all publishers, as a link does once its topics are seeded."""
    name = sender.options.instance
    sender.store.sync()
    names = [kind.name for kind in sender.store.replicas.shared.matching(".*")]
    part = sender.store.replicas.reader.publishers(names, "")
    cursor = receiver.store.replicas.sources.by_name[name].cursor
    assert part.upto <= cursor, "ship the changes first"
    answers: list[MergeCounts | StoreError] = []
    receiver.store.replicas.changes.apply(
        name, after=cursor, upto=cursor, chunks=[], origins=[], publishers=part.marks
    ).then(answers.append)
    receiver.answer(answers)


def purge(
    rig: Rig, *, upto: int = 0, held: Sequence[str] = (), made_before: int = 0, unread: Sequence[str] = ()
) -> int:
    """Purges tombstones until there is no more to do; how many."""
    gone = 0
    while True:
        answers: list[MergeCounts | StoreError] = []
        rig.store.replicas.tombstones.purge(upto, held=held, made_before_micros=made_before, unread=unread).then(
            answers.append
        )
        applied = rig.answer(answers).applied
        if not applied:
            return gone
        gone += applied


def live(rig: Rig, topic: str = "t") -> dict[str, Live]:
    """The live records of a topic, as replicas have to agree on them."""
    return {
        key.decode(): Live(
            found.payload,
            found.version,
            found.publish_time_micros,
            found.expire_time_micros,
            rig.store.origins.names[found.origin],
        )
        for key, found in rig.live(topic).items()
    }


def tombstones(rig: Rig, topic: str = "t") -> dict[str, Tombstone]:
    """The tombstones of a topic, by key."""
    found = rig.topic(topic)
    return {key[4:].decode(): decode_tombstone(value) for key, value in rig.rows(TOMBSTONES, found.prefix, found.stop)}
