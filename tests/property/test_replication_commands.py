"""Instances whose links are removed, added, paused and resumed by command, in the simulation of replication (R14)."""

from __future__ import annotations

import itertools
import random

import pytest

from sow_replication.options import NodeOptions, PeerOptions
from tests.property.test_replication_simulation import (
    FOUND_WITHIN,
    TOPICS,
    Wrong,
    edges,
    fault,
    heal,
    settle,
    write,
)
from tests.support.oracles.examples import lives
from tests.support.simulation.replica_model import ModelStore
from tests.support.simulation.replica_rows import SECOND, Make
from tests.support.simulation.replica_world import Broken, Instance, World

pytestmark = pytest.mark.simulation


def run_changing_seed(seed: int, make: Make = ModelStore) -> None:
    """One random life of instances whose links are removed, added, paused and resumed. In the end all are linked again.
    Raises Wrong."""
    draw = random.Random(seed)
    world = World(seed, make)
    names = [chr(ord("a") + number) for number in range(draw.choice([2, 2, 3, 3, 4]))]
    grace = 10_000 * SECOND
    print(f"seed {seed}: mesh of {len(names)}, links come and go")
    for name in names:
        peers = tuple(PeerOptions(b, b) for a, b in edges("mesh", names) if a == name)
        options = NodeOptions(peers=peers, tombstone_grace_micros=grace, settle_micros=draw.choice([2, 10]) * SECOND)
        world.add(name, options, offset=draw.randint(-SECOND, SECOND))
    instances = list(world.instances.values())
    for instance in instances:
        for topic in TOPICS:
            instance.store.create(topic)
        world.soon(instance)
    rate = draw.choice([0.0, 0.05])
    until = world.now + draw.choice([20, 60]) * SECOND
    while world.now < until:
        world.run(draw.randint(1, 400_000))
        write(world, draw)
        chance = draw.random()
        if chance < rate:
            fault(world, draw)
        elif chance < rate + 0.1:
            change(draw, *draw.sample(instances, 2))
    heal(world)
    for a, b in itertools.permutations(instances, 2):
        link(a, b)
    world.run(60 * SECOND)
    settle(world)


def change(draw: random.Random, a: Instance, b: Instance) -> None:
    """A command, at both ends where it removes or adds."""
    if not (a.up and b.up):
        return
    name, other = a.store.identity.name, b.store.identity.name
    linked = other in a.node.outgoing
    match draw.randrange(4):
        case 0 | 1 if linked:
            a.remove_peer(other)
            b.remove_peer(name)
        case 0 | 1 | 2 if not linked:
            link(a, b)
            link(b, a)
        case 2 | 3 if linked:
            (a.resume if other in a.paused else a.pause)(other)


def link(a: Instance, b: Instance) -> None:
    """Sends to another instance, whatever the present state of the link."""
    other = b.store.identity.name
    if other not in a.node.outgoing:
        a.add_peer(PeerOptions(other, other))
    elif other in a.paused:
        a.resume(other)


@pytest.mark.parametrize("part", range(4))
def test_instances_whose_links_come_and_go_end_equal(seed: int, part: int) -> None:
    """R14, R4: nothing that was deleted is alive again, and nothing is lost that was not dropped into a file."""
    for number in range(lives(12)):
        run_changing_seed((seed + 930_000 + part * 1000 + number) % 2**32)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_lives_with_links_that_come_and_go_end_equal(seed: int, part: int) -> None:
    for number in range(100):
        run_changing_seed((seed + 940_000 + part * 1000 + number) % 2**32)


class ForgetsWhoWasRemoved(ModelStore):
    """Nothing is remembered of a removed peer: it begins as one that has never been here."""

    def remove_peer(self, name: str) -> None:
        def job() -> None:
            self._peers = [peer for peer in self._peers if peer != name]
            self._peer_memory.pop(name, None)
            self.disk.peers.pop(name, None)
            self.disk.sources.pop(name, None)

        self._submit(job)


def test_the_check_finds_an_instance_that_forgets_who_was_removed() -> None:
    """R14."""

    def wrong(number: int) -> bool:
        try:
            run_changing_seed(number, ForgetsWhoWasRemoved)
        except (Wrong, Broken):
            return True
        return False

    assert any(wrong(number) for number in range(FOUND_WITHIN))
