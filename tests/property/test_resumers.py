"""Subscribers go on at other instances, through crashes, cut links and expiries: nothing is missed (rules F6 to F9).

The simulation of replication on the real store, with resumers as steps: in the end, when all is quiet, each has exactly
the records of the instance that it is at.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.property.test_replication_simulation import edges, fault, write
from tests.support.oracles.examples import lives
from tests.support.simulation.replica_rocks import stores_in
from tests.support.simulation.replica_rows import SECOND, Make
from tests.support.simulation.replica_world import World, options_of
from tests.support.simulation.resumers import KINDS, Kind, Resumer

pytestmark = pytest.mark.simulation

SEEDS = 96
KEYS = [f"k{number}" for number in range(16)]
INTERVALS_MAX = 20
"""So many may pass with a change in each: expiries alone are left, of few keys."""


class Missed(AssertionError):
    """A resumer has not what its instance has."""


def build(seed: int, make: Make, kinds: Sequence[Kind]) -> tuple[World, list[Resumer]]:
    draw = random.Random(seed)
    world = World(seed, make)
    names = ["a", "b", "c"][: draw.choice([2, 3, 3])]
    shape = draw.choice(["mesh", "mesh", "line both ways", "ring", "ring both ways"])
    links = edges(shape, names)
    print(f"seed {seed}: {shape} of {len(names)}, subscribers")
    for name in names:
        options = options_of(name, links, draw)
        world.add(name, options, offset=draw.randint(-4 * SECOND, 4 * SECOND))
    for instance in world.instances.values():
        for topic in ("T", "U"):
            instance.store.create(topic)
        world.soon(instance)
    world.run(2 * SECOND)
    instances = list(world.instances.values())
    resumers = [
        Resumer(world, kind, draw.choice(instances), random.Random(f"{seed}.{n}")) for n, kind in enumerate(kinds)
    ]
    return world, resumers


def live(seed: int, folder: Path, kinds: Sequence[Kind] = KINDS) -> Counter[str]:
    """One life of some instances and their resumers. Returns how often they moved. Raises Missed."""
    with stores_in(folder) as make:
        world, resumers = build(seed, make, kinds)
        draw = random.Random(seed + 1)
        rate = draw.choice([0.02, 0.05])
        until = world.now + draw.choice([15, 30, 60]) * SECOND
        while world.now < until:
            world.run(draw.randint(1, 400_000))
            write(world, draw, keys=KEYS)
            if draw.random() < rate:
                fault(world, draw)
            for resumer in resumers:
                if draw.random() < 0.5:
                    resumer.pump()
                if draw.random() < 0.03:
                    resumer.leave()
        settle(world, resumers)
        return sum([resumer.moved for resumer in resumers], Counter())


def settle(world: World, resumers: list[Resumer]) -> None:
    """Heals everything, waits until it is quiet, and looks. Raises Missed."""
    world.heal()
    for instance in world.instances.values():
        instance.fragile = instance.exposed = False
        if not instance.up:
            instance.boot()
        world.soon(instance)
    quiet = 0
    for _ in range(200):
        world.run(SECOND)
        for resumer in resumers:
            resumer.pump()
        quiet = quiet + 1 if world.lag() == 0 else 0
        if quiet == 5:
            break
    else:
        raise AssertionError("it is never quiet")
    connect(resumers)
    # An instance whose clock is ahead may have told an expiry that is still to come at the others (F8).
    offsets = [instance.offset for instance in world.instances.values()]
    world.run(max(offsets) - min(offsets))
    look(world, resumers)


def look(world: World, resumers: Sequence[Resumer]) -> None:
    """Compares what each has been told with its instance, once nothing is still to come to it. Raises Missed.

    An expiry of the last second comes to a resumer that conflates when its interval has ended, and not before (S6).
    Others may fall due meanwhile.
    """
    for _ in range(INTERVALS_MAX):
        for instance in world.instances.values():
            instance.store.sweep()
            instance.store.step()
        connect(resumers)
        for resumer in resumers:
            resumer.pump()
        if not any(resumer.waits for resumer in resumers):
            break
        world.run(SECOND)
    else:
        raise Missed("changes are kept back beyond their intervals")
    for resumer in resumers:
        if found := resumer.trouble():
            raise Missed(found)


def connect(resumers: Sequence[Resumer]) -> None:
    """Waits until each has a subscription."""
    for resumer in resumers:
        while resumer.idle:
            resumer.pump()


def test_resumers_miss_nothing(tmp_path: Path, seed: int) -> None:
    for number in range(lives(SEEDS)):
        print(live((seed + 300_000 + number) % 2**32, tmp_path / str(number)))


def test_the_end_of_an_interval_is_awaited(tmp_path: Path) -> None:
    with stores_in(tmp_path / "stores") as make:
        conflating = next(kind for kind in KINDS if kind.conflation)
        world, (resumer,) = build(1, make, [conflating])
        connect([resumer])
        resumer.at.store.publish("T", "k", "p1", ttl_micros=4 * SECOND)
        world.soon(resumer.at)
        world.run(3 * SECOND)
        resumer.pump()
        assert list(resumer.view) == ["k"]
        ends_in = SECOND - resumer.at.store.now_micros() % SECOND
        world.run(SECOND + ends_in // 2)
        resumer.at.store.sweep()
        resumer.at.store.step()
        resumer.pump()
        assert resumer.waits
        look(world, [resumer])
        assert not resumer.view
