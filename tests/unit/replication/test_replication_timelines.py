"""Stories about tombstones, restored instances, and topics, told step by step (rules R4, R6, R12, J14)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sow.v1 import types_pb2
from sow_peering import Packed, PublisherMark, SeedPart
from sow_replication.node import Node
from sow_replication.options import NodeOptions, PeerOptions
from sow_replication.ports import Counted
from sow_replication.status import status
from tests.support.simulation.replica_model import ModelStore
from tests.support.simulation.replica_rocks import stores_in
from tests.support.simulation.replica_rows import SECOND, Backup, Disk, Make
from tests.support.simulation.replica_world import Instance, World

GRACE = 60 * SECOND


def world_of(*links: tuple[str, str], make: Make = ModelStore) -> World:
    """Instances with links from the first to the second of each pair, and a topic T."""
    world = World(1, make)
    for name in sorted({name for link in links for name in link}):
        options = NodeOptions(
            peers=tuple(PeerOptions(b, b) for a, b in links if a == name),
            accept=tuple(a for a, b in links if b == name),
            tombstone_grace_micros=GRACE,
            settle_micros=5 * SECOND,
        )
        instance = world.add(name, options)
        instance.store.create("T")
        world.soon(instance)
    world.run(5 * SECOND)
    return world


def both(*names: str) -> list[tuple[str, str]]:
    return [(a, b) for a in names for b in names if a != b]


def put(world: World, name: str, key: str, payload: str) -> None:
    world.instances[name].store.publish("T", key, payload)
    commit(world, name)


def delete(world: World, name: str, key: str) -> None:
    world.instances[name].store.delete("T", key)
    commit(world, name)


def commit(world: World, name: str) -> None:
    world.soon(world.instances[name])
    world.run(20_000)


def payloads(world: World, name: str) -> dict[str, str | None]:
    return {key: row.payload for key, row in world.instances[name].store.records("T").items()}


def part(world: World, a: str, b: str) -> None:
    world.cut(a, b)
    world.cut(b, a)


def restore(world: World, instance: Instance, disk: Backup, *, authoritative: bool = False) -> None:
    instance.crash()
    instance.store.restore(disk, authoritative=authoritative)
    instance.boot()


def test_a_tombstone_goes_once_both_ends_have_it_and_have_read_each_other() -> None:
    world = world_of(*both("a", "b"))
    put(world, "a", "k", "one")
    world.run(5 * SECOND)
    delete(world, "a", "k")
    world.run(15 * SECOND)
    for name in "ab":
        assert world.instances[name].store.tombstones("T") == {}
        assert payloads(world, name) == {}


def test_a_tombstone_stays_while_an_older_version_waits_in_the_journal_of_an_instance_that_is_away() -> None:
    """Nothing that c wrote before the delete comes back with it."""
    world = world_of(*both("a", "b", "c"))
    part(world, "c", "a")
    part(world, "c", "b")
    world.run(SECOND)
    put(world, "c", "k", "old")
    world.run(SECOND)
    put(world, "a", "k", "new")
    delete(world, "a", "k")
    world.run(30 * SECOND)
    assert "k" in world.instances["a"].store.tombstones("T")
    assert "k" in world.instances["b"].store.tombstones("T")
    world.heal()
    world.run(30 * SECOND)
    for name in "abc":
        assert payloads(world, name) == {}
        assert world.instances[name].store.tombstones("T") == {}


def away_for_longer_than_the_grace(*, prune: bool) -> World:
    world = world_of(*both("a", "b"))
    put(world, "a", "gone", "one")
    put(world, "a", "kept", "one")
    world.run(5 * SECOND)
    part(world, "a", "b")
    world.run(SECOND)
    put(world, "b", "early", "of b")
    delete(world, "a", "gone")
    world.run(2 * GRACE)
    assert world.instances["a"].store.tombstones("T") == {}
    put(world, "b", "late", "of b")
    assert set(payloads(world, "b")) == {"gone", "kept", "early", "late"}
    if prune:
        for instance in world.instances.values():
            instance.store.prune(instance.store.head())
            world.soon(instance)
    world.run(SECOND)
    world.heal()
    world.run(40 * SECOND)
    assert payloads(world, "a") == payloads(world, "b")
    assert world.lag() == 0
    assert not world.instances["a"].store.peer("b").missed
    return world


def test_a_tombstone_stays_while_a_sender_has_not_come_since_the_data_were_lost() -> None:
    """b of the ring a → b → c → a lost its data while a was down, so it knew of no source: "each source has been read"
    held of none, and the tombstone of a record written and deleted at b went as soon as c had it. Then a came back and
    b took a's older version: its subscribers were told a put after the delete, of a version before it."""
    world = world_of(("a", "b"), ("b", "c"), ("c", "a"))
    put(world, "a", "k", "old")
    world.run(5 * SECOND)
    a, b = world.instances["a"], world.instances["b"]
    a.crash()
    restore(world, b, Disk())
    b.store.create("T")
    put(world, "b", "k", "new")
    delete(world, "b", "k")
    world.run(20 * SECOND)
    assert "k" in b.store.tombstones("T"), "a may still bring the record that it deletes"
    a.boot()
    for _ in range(40):
        world.run(SECOND // 2)
        assert payloads(world, "b") == {}
    assert payloads(world, "a") == payloads(world, "c") == {}


def test_a_peer_that_was_away_for_longer_than_the_grace_gets_the_deletes_from_the_journal() -> None:
    world = away_for_longer_than_the_grace(prune=False)
    assert set(payloads(world, "a")) == {"kept", "early", "late"}


def test_without_the_journal_it_drops_records_below_the_purge_mark_and_offers_the_rest() -> None:
    world = away_for_longer_than_the_grace(prune=True)
    assert set(payloads(world, "a")) == {"kept", "late"}
    assert world.instances["b"].store.dropped() == {("T", "gone"), ("T", "early")}


def test_a_restored_instance_brings_nothing_dead_back_and_is_brought_up_to_date() -> None:
    """Same name, new id and epoch, old data (rule J14). The changes that it had sent since come back to it."""
    world = world_of(*both("a", "b", "c"))
    put(world, "a", "gone", "one")
    put(world, "a", "kept", "one")
    world.run(5 * SECOND)
    disk = world.instances["a"].store.backup()
    delete(world, "b", "gone")
    put(world, "a", "after", "the backup")
    world.run(40 * SECOND)
    assert world.instances["b"].store.tombstones("T") == {}
    for name in "bc":
        world.instances[name].store.prune(world.instances[name].store.head())
        commit(world, name)
    restore(world, world.instances["a"], disk)
    assert set(payloads(world, "a")) == {"gone", "kept"}
    world.run(90 * SECOND)
    for name in "abc":
        assert payloads(world, name) == {"kept": "one", "after": "the backup"}
    assert world.lag() == 0


def test_a_restored_instance_that_only_sends_brings_nothing_back_that_was_purged_downstream() -> None:
    world = world_of(("a", "b"), ("c", "b"), ("b", "c"))
    put(world, "a", "gone", "one")
    world.run(5 * SECOND)
    disk = world.instances["a"].store.backup()
    delete(world, "a", "gone")
    world.run(2 * GRACE)
    assert world.instances["b"].store.tombstones("T") == {}
    restore(world, world.instances["a"], disk)
    put(world, "a", "new", "of a")
    world.run(60 * SECOND)
    assert payloads(world, "b") == payloads(world, "c") == {"new": "of a"}


def test_a_restored_instance_whose_data_are_to_be_taken_as_they_are_is_not_asked_to_wait() -> None:
    world = world_of(("a", "b"))
    put(world, "a", "gone", "one")
    world.run(5 * SECOND)
    disk = world.instances["a"].store.backup()
    delete(world, "a", "gone")
    world.run(2 * GRACE)
    restore(world, world.instances["a"], disk, authoritative=True)
    world.run(30 * SECOND)
    assert payloads(world, "b") == {"gone": "one"}


def test_acknowledgements_count_only_once_every_topic_is_seeded() -> None:
    """sender [5]: tombstones go, and REPLICATED is answered, once a peer has the rows; a cursor covers no seeds."""
    world = World(1)
    options = NodeOptions(peers=(PeerOptions("b", "b"),), seed_bytes_max=1, flight_messages_max=1)
    for name, given in (("a", options), ("b", NodeOptions(accept=("a",)))):
        instance = world.add(name, given)
        instance.store.create("T")
        world.soon(instance)
    world.cut("a", "b")
    for number in range(30):
        put(world, "a", f"k{number:02}", "one")
    world.run(SECOND)
    world.heal()
    store = world.instances["a"].store
    looks = 0
    while len(payloads(world, "b")) < 30:
        put(world, "a", "k00", f"while seeding {looks}")
        if len(payloads(world, "b")) < 30:
            looks += 1
            assert store.peer("b").acknowledged == 0
    assert looks > 5
    world.run(10 * SECOND)
    assert store.peer("b").acknowledged == store.head()


def test_a_missing_topic_leaves_the_link_and_is_seeded_once_it_exists() -> None:
    world = world_of(("a", "b"))
    world.instances["a"].store.create("U")
    world.instances["a"].store.publish("U", "k", "one")
    put(world, "a", "k", "two")
    world.run(10 * SECOND)
    assert payloads(world, "b") == {"k": "two"}
    [link] = status(world.instances["a"].node).outgoing
    assert [(topic.topic, topic.state) for topic in link.topics] == [("U", "refused")]
    world.instances["b"].store.create("U")
    commit(world, "b")
    world.run(10 * SECOND)
    assert list(world.instances["b"].store.records("U")) == ["k"]
    assert not status(world.instances["a"].node).outgoing[0].topics
    assert world.lag() == 0


def test_a_topic_that_is_created_anew_at_the_receiver_is_seeded_anew() -> None:
    world = world_of(("a", "b"))
    put(world, "a", "k", "one")
    world.run(5 * SECOND)
    world.instances["b"].store.drop_topic("T")
    world.instances["b"].store.create("T")
    commit(world, "b")
    assert payloads(world, "b") == {}
    world.run(10 * SECOND)
    assert payloads(world, "b") == {"k": "one"}


@pytest.mark.parametrize("stores", ["model", "rocks"])
def test_a_peer_whose_journal_position_is_lost_again_is_seeded_again(tmp_path: Path, stores: str) -> None:
    """R9: each seed brings all records, lifetimes and deletions, and the changes behind it come from the journal."""
    with nullcontext(ModelStore) if stores == "model" else stores_in(tmp_path / "stores") as make:
        world = world_of(("a", "b"), make=make)
        a, b = (world.instances[name].store for name in "ab")
        for key in ("kept", "touched", "dies 1", "dies 2", "dies later 1", "dies later 2"):
            put(world, "a", key, "of before")
        world.run(5 * SECOND)
        assert set(payloads(world, "b")) == set(payloads(world, "a"))
        seeds: list[str] = []
        read = a.seed

        def seed(topic: str, *position: Any, **bounds: Any) -> SeedPart:
            seeds.append(topic)
            return read(topic, *position, **bounds)

        a.seed = seed  # type: ignore[method-assign]  # counts
        for number in (1, 2):
            part(world, "a", "b")
            world.run(SECOND)
            put(world, "a", f"new {number}", "of the time apart")
            delete(world, "a", f"dies {number}")
            a.touch("T", "touched", number * 1_000 * SECOND)
            a.publish("T", f"short {number}", "x", ttl_micros=SECOND)
            commit(world, "a")
            world.run(2 * SECOND)
            a.sweep()
            a.prune(a.head())
            commit(world, "a")
            world.run(SECOND)
            assert f"new {number}" not in payloads(world, "b")
            world.heal()
            world.run(10 * SECOND)
            assert seeds == ["T"] * number
            assert b.records("T") == a.records("T"), "payloads, versions and expire times"
            assert f"dies {number}" not in b.records("T")
            assert f"short {number}" not in b.records("T")
            assert world.lag() == 0
            put(world, "a", "kept", f"of after seed {number}")
            delete(world, "a", f"dies later {number}")
            a.touch("T", f"new {number}", 5_000 * SECOND)
            commit(world, "a")
            world.run(2 * SECOND)
            assert b.records("T") == a.records("T")
            assert seeds == ["T"] * number, "they come from the journal"
        assert set(b.records("T")) == {"kept", "touched", "new 1", "new 2"}


def test_another_pattern_begins_the_link_anew() -> None:
    """Changes that a narrower link skipped are not before the cursor of a wider one."""
    world = world_of(("a", "b"))
    a = world.instances["a"]
    for instance in world.instances.values():
        instance.store.create("U")
        world.soon(instance)
    world.run(5 * SECOND)
    a.crash()
    a.options = NodeOptions(peers=(PeerOptions("b", "b", topics="T"),))
    a.boot()
    world.run(5 * SECOND)
    a.store.publish("U", "k", "one")
    put(world, "a", "k", "one")
    world.run(10 * SECOND)
    assert world.instances["b"].store.records("U") == {}
    a.crash()
    a.options = NodeOptions(peers=(PeerOptions("b", "b"),))
    a.boot()
    world.run(10 * SECOND)
    assert list(world.instances["b"].store.records("U")) == ["k"]


def test_a_change_from_the_future_stops_the_link_and_nothing_is_skipped() -> None:
    world = world_of(("a", "b"))
    a = world.instances["a"]
    put(world, "a", "before", "one")
    world.run(2 * SECOND)
    a.offset = 30 * SECOND
    put(world, "a", "ahead", "two")
    a.offset = 0
    put(world, "a", "behind it", "three")
    world.run(8 * SECOND)
    assert set(payloads(world, "b")) == {"before"}
    [link] = status(a.node).outgoing
    assert link.last_error_reason == types_pb2.ERROR_REASON_CLOCK_SKEW
    world.run(40 * SECOND)
    assert set(payloads(world, "b")) == {"before", "ahead", "behind it"}


class Counting(ModelStore):
    """Counts applied changes."""

    applied = 0

    def apply(
        self,
        name: str,
        *,
        after: int,
        upto: int,
        chunks: Sequence[Packed],
        origins: Sequence[str],
        publishers: Sequence[PublisherMark] = (),
        traces: Sequence[str] = (),
    ) -> Counted:
        self.applied += 1
        return super().apply(name, after=after, upto=upto, chunks=chunks, origins=origins)


def test_an_idle_link_commits_nothing() -> None:
    world = world_of(*both("a", "b"), make=Counting)
    put(world, "a", "k", "one")
    world.run(20 * SECOND)
    store = world.instances["b"].store
    assert isinstance(store, Counting)
    before = store.applied
    assert before
    world.run(20 * SECOND)
    assert store.applied == before


def test_a_node_without_peers_purges_and_does_not_dial() -> None:
    world = world_of(("a", "b"))
    node = Node(world.instances["b"].store, NodeOptions(), random.Random(1))
    node.tick()
    assert node.due() == []
    assert node.gates.sync_peers("T") == 0


# -- instances that lose their data -----------------------------------------------------------------------------------


def lose(world: World, name: str) -> None:
    """The data of an instance are gone; it begins anew, with the topic."""
    restore(world, world.instances[name], Disk())
    world.instances[name].store.create("T")
    commit(world, name)


def test_an_instance_that_lost_its_data_is_heard_by_one_that_never_had_a_change() -> None:
    """R4: the other one asked it to wait until it had everything up to sequence 0, which it stores as not waiting: so
    it asked again each time, and the link stayed down until somebody published at the other end."""
    world = world_of(*both("a", "b"))
    lose(world, "a")
    put(world, "a", "k", "one")
    world.run(30 * SECOND)
    assert payloads(world, "b") == {"k": "one"}


def test_deletes_of_an_instance_after_it_lost_its_data_hold() -> None:
    """purging [3]: the tombstone went by age before the peer had brought the record back: a peer that had not yet been
    heard was not a source to wait for."""
    world = world_of(*both("a", "b"))
    put(world, "a", "k", "before")
    world.run(SECOND)
    world.cut("b", "a")
    lose(world, "a")
    put(world, "a", "k", "after")
    delete(world, "a", "k")
    world.run(3 * GRACE)
    assert world.instances["a"].store.tombstones("T"), "b has asked a to wait, and has not been heard"
    world.cuts.clear()
    world.run(60 * SECOND)
    assert payloads(world, "a") == payloads(world, "b") == {}


def test_writes_of_an_instance_after_it_lost_its_data_are_newer_whatever_its_clock() -> None:
    """K7."""
    world = world_of(*both("a", "b"))
    world.instances["a"].offset = 4 * SECOND
    put(world, "a", "k", "before")
    world.run(SECOND)
    world.cut("b", "a")
    world.instances["a"].offset = 0
    lose(world, "a")
    put(world, "a", "k", "after")
    world.cuts.clear()
    world.run(60 * SECOND)
    assert payloads(world, "a") == payloads(world, "b") == {"k": "after"}
