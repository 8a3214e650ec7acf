"""Publishers that go on at other instances, in the simulation of replication on the real store (rules F11 to F13).

Each life forces the moments at which a retry may be mistaken: an answer is lost, an instance is cut off while programs
with one id begin on both sides, and an instance has no topic for the changes that arrive.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from sow_peering import NOTHING_PURGED, InstanceIdentity, PublisherMark, SeedRange
from sow_server.engine.commit.publishers import Publisher
from sow_server.engine.commit.told import TOLD_OF_PEER_MAX, Told
from tests.property.test_replication_commands import change, link
from tests.property.test_replication_simulation import edges
from tests.support.oracles.examples import lives
from tests.support.simulation.movers import Lost, Mover, divide, set_apart
from tests.support.simulation.replica_rocks import stores_in
from tests.support.simulation.replica_rows import SECOND, Backup, Make
from tests.support.simulation.replica_world import Instance, World, options_of
from tests.support.simulation.resumers import store_of

pytestmark = pytest.mark.simulation

SEEDS = 96
SECONDS: Final = 10
TOPICS: Final = ("T", "U")
Fault: TypeAlias = Callable[[World, random.Random], None]
"""Does harm now and then."""


def build(seed: int, make: Make) -> tuple[World, list[Mover]]:
    """Some instances, and two publishers."""
    draw = random.Random(seed)
    world = World(seed, make)
    names = ["a", "b", "c"][: draw.choice([2, 3])]
    shape = draw.choice(["mesh", "line both ways"])
    links = edges(shape, names)
    print(f"seed {seed}: {shape} of {len(names)}, publishers")
    for name in names:
        options = options_of(name, links, draw, seed_bytes=(1, 100_000))
        world.add(name, options)
    instances = list(world.instances.values())
    for instance in instances:
        for topic in TOPICS:
            instance.store.create(topic)
        world.soon(instance)
    dropped: set[str] = set()
    movers = [
        Mover(world, name, draw.choice(instances), random.Random(f"{seed}.{name}"), TOPICS, dropped)
        for name in ("one", "two")
    ]
    return world, movers


def replace_topic(world: World, draw: random.Random, movers: list[Mover]) -> None:
    """An instance loses a topic, and gets it again a moment later. Changes that were under way are left out in between,
    and the requests that they are of come there again."""
    instance, topic = draw.choice(list(world.instances.values())), "U"
    early, late = draw.randint(10, 100) * 1_000, draw.randint(10, 100) * 1_000
    for mover in movers:
        mover.be_drawn(topic, instance, world.now + early + late + SECOND // 2)

    def drop() -> None:
        if instance.up:
            instance.store.step()
            movers[0].dropped.update(instance.store.records(topic))
            world.dropped.add((instance.store.identity.name, topic))
            instance.store.drop_topic(topic)
            instance.store.step()
            world.soon(instance)

    def create() -> None:
        if instance.up:
            set_apart(world, instance, SECOND // 4)
            instance.store.create(topic)
            world.soon(instance)

    world.at(world.now + early, drop)
    world.at(world.now + early + late, create)


def live(seed: int, folder: Path, fault: Fault | None = None) -> Counter[str]:
    """One life of some instances and two publishers. Raises Lost."""
    draw = random.Random(seed + 1)
    fault = fault or draw.choice(FAULTS)
    drops = draw.random() < 0.5
    with stores_in(folder) as make:
        world, movers = build(seed, make)
        for mover in movers:
            mover.start()
        until = world.now + SECONDS * SECOND
        while world.now < until:
            world.run(draw.randint(1, 400_000))
            fault(world, draw)
            chance = draw.random()
            if chance < 0.06:
                divide(world, draw, movers)
            elif drops and chance < 0.12:
                replace_topic(world, draw, movers)
        settle(world, movers, fault, drops=drops)
        return sum([mover.counts for mover in movers], Counter())


def kills(world: World, draw: random.Random) -> None:
    """Instances are killed, and links are cut: nothing that was written is lost."""
    if draw.random() < 0.04:
        instance = draw.choice(list(world.instances.values()))
        if instance.up:
            instance.crash()
            world.at(world.now + draw.randint(1, 5) * SECOND, instance.boot)
    if draw.random() < 0.03:
        names = list(world.instances)
        world.cut(draw.choice(names), draw.choice(names))
    if draw.random() < 0.03:
        world.cuts.clear()


def power_cuts(world: World, draw: random.Random) -> None:
    """As `kills`, and records that were not synced may be lost."""
    kills(world, draw)
    if draw.random() < 0.02:
        instance = draw.choice(list(world.instances.values()))
        if instance.up:
            instance.crash(power=True)
            world.at(world.now + SECOND, instance.boot)


def comings_and_goings(world: World, draw: random.Random) -> None:
    """As `kills`. Journals are pruned, and links come and go by command, so instances are seeded anew."""
    kills(world, draw)
    if draw.random() < 0.05:
        instance = draw.choice(list(world.instances.values()))
        if instance.up:
            instance.store.prune(instance.store.head() - draw.choice([0, 5]))
            world.soon(instance)
    if draw.random() < 0.08:
        change(draw, *draw.sample(list(world.instances.values()), 2))


def restores(world: World, draw: random.Random) -> None:
    """As `kills`, and instances are restored from backups: what only they had since is lost."""
    kills(world, draw)
    if draw.random() < 0.02:
        instance = draw.choice(list(world.instances.values()))
        if instance.up:
            backup = instance.store.backup()
            world.at(world.now + draw.randint(1, 5 * SECOND), lambda: restore(world, instance, backup))


def restore(world: World, instance: Instance, backup: Backup) -> None:
    if instance.up:
        instance.crash()
        instance.store.restore(backup)
        world.at(world.now + SECOND, instance.boot)


FAULTS: Final = (kills, power_cuts, comings_and_goings, restores)
FINDS: Final[dict[Fault, tuple[int, ...]]] = {kills: (10,)}
"""Seeds of lives that have found a planted mistake: that epochs are compared without their tokens."""


def settle(world: World, movers: list[Mover], fault: Fault, *, drops: bool) -> None:
    """Heals everything, and waits until it is quiet. Where nothing was lost, every instance has every record then, and
    knows it."""
    world.heal()
    if fault is comings_and_goings:
        for one, other in itertools.permutations(world.instances.values(), 2):
            link(one, other)
    for instance in world.instances.values():
        for topic in TOPICS:
            instance.store.create(topic)  # its creation may have died with the process
        world.soon(instance)
    for mover in movers:
        mover.is_ending = True
    quiet = 0
    for _ in range(200):
        world.run(SECOND)
        quiet = quiet + 1 if world.lag() == 0 and all(mover.is_quiet for mover in movers) else 0
        if quiet == 3:
            break
    else:
        raise AssertionError("it is never quiet")
    for mover in movers:
        for request in mover.settled[-3:]:
            for instance in world.instances.values():
                if fault is not restores:
                    mover.judge(instance, request)
                if fault in (kills, comings_and_goings) and not drops:
                    mover.check_known(instance, request)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_that_counts_as_applied_is_there(tmp_path: Path, seed: int, fault: Fault) -> None:
    """F11, F12."""
    total: Counter[str] = Counter()
    for number in (*FINDS.get(fault, ()), *range(seed, seed + lives(SEEDS // 4))):
        total += live(number % 2**32, tmp_path / str(number), fault)
    print(total)
    assert total["known"] > 0


# -- a peer that lies ----------------------------------------------------------------------------------------------

LIAR: Final = InstanceIdentity("liar", "0123456789ab", "0123456789ab")
"""It may send the topic T, or that and many others, and never U."""
MANY: Final = ("T", *[f"L{number}" for number in range(TOLD_OF_PEER_MAX + 2)])


def lie(world: World, draw: random.Random, movers: list[Mover], sent: Sequence[str]) -> None:
    """The liar tells an instance of what the publishers have not sent, or not to these topics. The others pass that
    on."""
    at = draw.choice(list(world.instances.values()))
    known = [(mover.publisher_id, mover.position) for mover in movers if mover.position is not None]
    if not at.up or not known:
        return
    replicas = store_of(at)._rig.store.replicas

    def done(_: object) -> None:
        pass

    if LIAR.name not in replicas.sources.by_name:
        pattern = "|".join(sent)
        replicas.sources.begin(LIAR, topics=pattern, filter_text="", cursor=0, missing_is_deleted=False).then(done)
        at.store.step()
    replicas.sources.answers(LIAR.name, replicas.shared.kinds(sent))
    if len(sent) > 1 and draw.random() < 0.3:
        # Once it has sent a topic whole, it may also pass on what it says that others have told.
        part = SeedRange(draw.choice(sent), True, True, b"", b"")
        replicas.changes.merge(LIAR.name, part, chunk=b"", origins=[], purged=NOTHING_PURGED).then(done)
    lies = []
    for publisher_id, position in known:
        first = max(1, position.first_sequence + draw.randint(-5, 5))
        step = draw.choice([0, 0, 0, 1, 2**32, 2**62])
        lies.append(
            PublisherMark(
                publisher_id,
                position.epoch + step,
                position.token if draw.random() < 0.8 else draw.randint(1, 2**62),
                draw.choice([1, first]),
                first + draw.randint(0, 50),
                tuple(draw.sample(sent, draw.randint(1, 3))) if len(sent) > 1 else ("T",),
                (first,) if draw.random() < 0.2 else (),
                whole=draw.random() < 0.3,
            )
        )
    replicas.changes.apply(LIAR.name, after=0, upto=0, chunks=[], origins=[], publishers=lies).then(done)
    world.soon(at)


LIVES_WITH_LIES: Final[dict[tuple[str, ...], tuple[int, ...]]] = {("T",): (3339375576,), MANY: ()}
"""By the topics that the liar may send: seeds of lives that have found a mistake, that what is passed on of different
topics shares the places of a peer."""


@pytest.mark.parametrize("sent", LIVES_WITH_LIES, ids=["one topic", "many topics"])
def test_a_peer_that_lies_about_one_topic_loses_and_fences_nothing_of_another(
    tmp_path: Path, seed: int, sent: tuple[str, ...]
) -> None:
    """F11, F12, along lines and in meshes."""
    total: Counter[str] = Counter()
    for number in {*LIVES_WITH_LIES[sent], *range(seed, seed + lives(16))}:
        draw = random.Random(number)
        with stores_in(tmp_path / str(number)) as make:
            world, movers = build(number % 2**32, make)
            for instance, topic in itertools.product(world.instances.values(), sent[1:]):
                instance.store.create(topic)
            for mover in movers:
                mover.topics = ("U",)
                mover.start()
            until = world.now + SECONDS * SECOND
            while world.now < until:
                world.run(draw.randint(1, 200_000))
                lie(world, draw, movers, sent)
                kills(world, draw)
            settle(world, movers, kills, drops=False)
            total += sum([mover.counts for mover in movers], Counter())
    print(total)
    assert total["known"] > 0
    assert total["PUBLISHER_FENCED"] == 0


# -- mistakes that the simulation has to find -----------------------------------------------------------------------

FOUND_WITHIN: Final = 20
"""Lives; each third one finds it."""


def test_sequences_of_another_program_in_the_same_epoch_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F12. Story: this simulation judged inside of the store's answers, whose exceptions are caught and logged, so it
    never failed."""
    learn = Publisher.learn

    def mistaken(self: Publisher, told: Told, *more: Any, **options: Any) -> Publisher:
        same = told.epoch == self.epoch and told.token > self.token
        return learn(self, told._replace(token=self.token) if same else told, *more, **options)

    monkeypatch.setattr(Publisher, "learn", mistaken)
    for number in range(2, FOUND_WITHIN):  # the first two do not find it
        try:
            live(number, tmp_path / str(number))
        except Lost as lost:
            print(lost)
            return
    pytest.fail(f"not found within {FOUND_WITHIN} lives")
