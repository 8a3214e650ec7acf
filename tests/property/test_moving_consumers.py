"""Consumers of replicated durables, in the simulation of replication on the real store (rules F14 to F17).

One consumer after the other, at any instance, through crashes, cut links, power cuts, expiries and rewinds: in the end
it was handed every record that has a key of its own, and has exactly the records of the instance that it is at.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.property.test_replication_simulation import edges, write
from tests.support.oracles.examples import lives
from tests.support.simulation.moving_consumers import ConsumedStore, MovingConsumer, make_store
from tests.support.simulation.replica_rocks import RocksStore
from tests.support.simulation.replica_rows import SECOND
from tests.support.simulation.replica_world import World, options_of
from tests.support.simulation.resumers import KINDS, Kind

pytestmark = pytest.mark.simulation

SEEDS = 48
KEYS = [f"k{number}" for number in range(8)]
CONSUMED = (Kind(), *[kind for kind in KINDS if not kind.delta and not kind.conflation])


class Skipped(AssertionError):
    """A consumer was not handed something."""


def build(seed: int, folder: Path, stores: list[RocksStore], kind: type[ConsumedStore]) -> World:
    draw = random.Random(seed)
    world = World(seed, make_store(kind, folder, stores))
    names = ["a", "b", "c"][: draw.choice([2, 3, 3])]
    shape = draw.choice(["mesh", "mesh", "line both ways"])
    links = edges(shape, names)
    print(f"seed {seed}: {shape} of {len(names)}")
    for name in names:
        options = options_of(name, links, draw)
        world.add(name, options, offset=draw.randint(-4 * SECOND, 4 * SECOND))
    for instance in world.instances.values():
        for topic in ("T", "U"):
            instance.store.create(topic)
        world.soon(instance)
    world.run(4 * SECOND)
    return world


def disturb(world: World, draw: random.Random) -> None:
    """Cuts, kills and power cuts."""
    instance, other = draw.sample(list(world.instances.values()), 2)
    a, b = instance.store.identity.name, other.store.identity.name
    match draw.randrange(4):
        case 0 | 1:
            world.cut(a, b)
            if draw.random() < 0.7:
                world.cut(b, a)
            after = draw.choice([1, 5, 20]) * SECOND
            world.at(world.now + after, lambda: world.cuts.difference_update({(a, b), (b, a)}))
        case 2 if instance.up:
            instance.crash(power=draw.random() < 0.3)
            world.at(world.now + draw.choice([0, 2, 25]) * SECOND, instance.boot)
        case _:
            for wire in world.wires:  # a connection resets
                if wire.source is instance:
                    wire.cut()


def live(seed: int, folder: Path, stored: type[ConsumedStore] = ConsumedStore) -> Counter[str]:
    """One life of some instances and of one consumer. Returns what it went through. Raises Skipped."""
    folder.mkdir()
    stores: list[RocksStore] = []
    try:
        world = build(seed, folder, stores, stored)
        draw = random.Random(seed + 1)
        instances = list(world.instances.values())
        consumer = MovingConsumer(
            world, draw.choice(CONSUMED), draw.choice(instances), random.Random(f"{seed}.consumer")
        )
        unique: set[str] = set()
        rate = draw.choice([0.02, 0.05])
        until = world.now + draw.choice([15, 30, 60]) * SECOND
        while world.now < until:
            world.run(draw.randint(1, 400_000))
            write(world, draw, keys=KEYS)
            instance = draw.choice(instances)
            if instance.up and draw.random() < 0.6:
                unique.add(f"u{len(unique)}")
                instance.store.publish("T", f"u{len(unique) - 1}", f"p{draw.randrange(4)}")
                world.soon(instance)
            if draw.random() < rate:
                disturb(world, draw)
            if draw.random() < 0.5:
                consumer.pump()
            if draw.random() < 0.05:
                consumer.leave()
            if draw.random() < 0.01:
                consumer.rewind()
        settle(world, consumer)
        if not consumer.counts["gaps"] and (found := consumer.trouble(unique)):
            raise Skipped(found)
        return consumer.counts
    finally:
        for store in stores:
            store.close()


def settle(world: World, consumer: MovingConsumer) -> None:
    """Heals everything, and waits until it is quiet and the consumer has acknowledged everything."""
    world.heal()
    for instance in world.instances.values():
        if not instance.up:
            instance.boot()
        for topic in ("T", "U"):
            instance.store.create(topic)  # its creation may have died with the process
        world.soon(instance)
    quiet = 0
    for _ in range(200):
        world.run(SECOND)
        consumer.pump(moves=False)
        quiet = quiet + 1 if world.lag() == 0 and not consumer.idle else 0
        if quiet == 12:
            break
    else:
        raise AssertionError("it is never quiet")
    for instance in world.instances.values():
        instance.store.sweep()
        instance.store.step()
    consumer.pump(moves=False)


def test_consumers_are_handed_everything(tmp_path: Path, seed: int) -> None:
    """Lives go on until somebody has moved: in two lives it once happened that nobody did."""
    total: Counter[str] = Counter()
    number = 0
    while number < lives(SEEDS) or (not total["moved"] and number < SEEDS):
        own = (seed + 500_000 + number) % 2**32
        try:
            total += live(own, tmp_path / str(number))
        except AssertionError as error:
            raise type(error)(f"seed {own}: {error}") from error
        number += 1
    print(total)
    assert total["moved"] > 0
