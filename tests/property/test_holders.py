"""Leases at several instances, through crashes, cut links, clocks that differ and holders that stop (rule L21).

The simulation of replication on the real store, with holders as steps.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from sow_client import _lease_core
from sow_client._lease_core import Held, Joining, LeaseCore
from sow_server.engine.values.model import Durability, Lifetime, LifetimeKind, Touch, TouchOnly
from sow_server.services.wire import convert
from tests.property.test_replication_simulation import differing, edges, fault
from tests.support.oracles.examples import lives
from tests.support.simulation.holders import CLOCK_RATE, KEYS, TOPICS, Holder, SameVersion, Wrong, check_ended
from tests.support.simulation.lease_clients import simulated_leases
from tests.support.simulation.movers import set_apart
from tests.support.simulation.replica_rocks import stores_in
from tests.support.simulation.replica_rows import SECOND, Make
from tests.support.simulation.replica_world import World, options_of
from tests.support.simulation.resumers import store_of

pytestmark = pytest.mark.simulation

SEEDS = 144
SECONDS: Final = 15


def build(seed: int, make: Make) -> tuple[World, list[Holder]]:
    """Two or three instances that are all linked, and three holders that want the same keys."""
    draw = random.Random(seed)
    world = World(seed, make)
    names = ["a", "b", "c"][: draw.choice([2, 3])]
    links = edges("mesh", names)
    print(f"seed {seed}: mesh of {len(names)}, leases")
    for name in names:
        options = options_of(name, links, draw, seed_bytes=(1, 100_000))
        world.add(name, options, offset=draw.choice([0, draw.randint(-SECOND, SECOND)]))
    instances = list(world.instances.values())
    for instance in instances:
        for topic in TOPICS:
            instance.store.create(topic)
        instance.store.step()
        world.soon(instance)
    world.run(2 * SECOND)
    holders = [
        Holder(
            world,
            f"h{number}",
            random.Random(f"{seed}.{number}"),
            draw.choice(instances),
            several=draw.random() < 0.7,
            rate=draw.uniform(1 / CLOCK_RATE, CLOCK_RATE),
            may_read=draw.random() < 0.9,
        )
        for number in range(3)
    ]
    return world, holders


def disturb(world: World, draw: random.Random, holders: list[Holder]) -> None:
    """Somebody else changes a key; an instance is alone for a while, and holders go there, or away; a holder loses its
    way to an instance, or gets it back."""
    holder, name = draw.choice(holders), draw.choice(list(world.instances))
    match draw.randrange(8):
        case 3 | 4:
            set_apart(world, world.instances[name], draw.choice([SECOND // 3, SECOND, 3 * SECOND]))
            for other in holders:
                world.at(world.now + draw.randint(0, SECOND), other.move)
        case 0:
            store = store_of(world.instances[name])
            topic, key = draw.choice(TOPICS), draw.choice(KEYS)
            if not world.instances[name].up:
                return
            if draw.random() < 0.3:
                store.publish(topic, key, "another", SECOND)
            elif draw.random() < 0.5:
                store.delete(topic, key)
            else:
                ends = Lifetime(LifetimeKind.TTL, draw.randint(1, SECOND))
                store._submit(Touch(topic, [key], ends, only=TouchOnly.EARLIER, durability=Durability.BUFFERED))
            world.soon(world.instances[name])
        case 1:
            holder.silent.add(name)
        case 2:
            holder.refusing.add(name)
        case _:
            holder.silent.clear()
            holder.refusing.clear()


def live(seed: int, folder: Path) -> Counter[str]:
    """One life of some instances and the holders of leases. Raises Wrong."""
    with stores_in(folder) as make, simulated_leases():
        world, holders = build(seed, make)
        try:
            run(world, random.Random(seed + 1), holders)
        except SameVersion:
            holders[0].counts["same version"] += 1  # from here on nothing is promised
        return sum([holder.counts for holder in holders], Counter())


def run(world: World, draw: random.Random, holders: list[Holder]) -> None:
    """The life. Raises Wrong, and SameVersion."""
    for holder in holders:
        holder.start()
    rate = draw.choice([0.0, 0.03, 0.08])
    until = world.now + SECONDS * SECOND
    while world.now < until:
        world.run(draw.randint(1, 400_000))
        for holder in holders:
            holder.check()
        check_ended(world, holders)
        if draw.random() < rate:
            fault(world, draw)
        if draw.random() < 0.3:
            disturb(world, draw, holders)
    settle(world, holders)


def settle(world: World, holders: list[Holder]) -> None:
    """Heals everything; holders leave, or stop. In the end no key of theirs is left, and all instances are equal."""
    world.heal()
    for instance in world.instances.values():
        instance.fragile = instance.exposed = False
        world.soon(instance)
    for holder in holders:
        holder.is_ending = True
        holder.silent.clear()
        holder.refusing.clear()
    for second in range(120):
        world.run(SECOND)
        check_ended(world, holders)
        if second == 5:
            for holder in holders:
                holder.kill()
        if second > 15 and world.lag() == 0:
            break
    else:
        raise AssertionError("it is never quiet")
    for instance in world.instances.values():
        for topic in TOPICS:
            if records := instance.store.records(topic):
                raise Wrong(f"{instance.store.identity.name} still has {records}")
    if found := differing(world):
        raise Wrong(found)


def test_leases_end_with_their_holders_and_not_before(tmp_path: Path, seed: int) -> None:
    """L21."""
    total: Counter[str] = Counter()
    for number in range(lives(SEEDS)):
        total += live((seed + 970_000 + number) % 2**32, tmp_path / str(number))
    print(total)
    assert all(
        total[what] for what in ("renewed", "renewed during a publish", "stopped", "left", "lost", "CONDITION_FAILED")
    )


@pytest.mark.parametrize("life_seed", [7421])
def test_a_life_that_was_judged_wrongly(tmp_path: Path, life_seed: int) -> None:
    """7421: a publish found its lease lost, at an instance that lacked a record; it was judged when the holder left."""
    live(life_seed, tmp_path / "life")


# -- mistakes that the simulation has to find -----------------------------------------------------------------------

FOUND_WITHIN: Final = 20
"""Lives."""


def found(folder: Path, first: int = 0) -> bool:
    """Whether a planted mistake is found. `first`: the seed of the first life."""
    for number in range(first, first + FOUND_WITHIN):
        try:
            live(number, folder / str(number))
        except Wrong as wrong:
            print(wrong)
            return True
    return False


def test_a_holder_that_counts_the_time_of_the_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L15, L21."""
    monkeypatch.setattr(_lease_core, "CLOCK_FACTOR", 1.0)
    assert found(tmp_path, first=1)


def test_a_lease_that_knows_no_earlier_versions_of_its_own_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L21. The story is at `test_an_instance_that_lags_has_an_earlier_version_which_is_the_leases`."""

    def forgets(self: Held, version: int) -> None:
        self.version = self.first = self.last = version

    monkeypatch.setattr(Held, "take", forgets)
    assert found(tmp_path, first=42)  # one life in eight finds it


def test_a_lease_that_takes_its_own_publish_for_that_of_another_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L21. The story is at `test_a_publish_under_way_may_have_replaced_a_record_that_is_renewed`."""
    joins = LeaseCore.joins

    def forgets(self: LeaseCore, topic: str, payload: bytes, now: float) -> Joining:
        joining = joins(self, topic, payload, now)
        self.left(joining)
        return joining

    monkeypatch.setattr(LeaseCore, "joins", forgets)
    assert found(tmp_path, first=41)  # one life in twenty finds it


def test_a_touch_that_ignores_versions_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L19, L21."""
    monkeypatch.setattr(convert, "versions", lambda given, keys, field: None)
    assert found(tmp_path)
