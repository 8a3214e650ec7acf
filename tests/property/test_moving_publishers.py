"""Publishers that go on at other instances, in the simulation of replication on the real store (rules F11 to F13).

Each record has a key of its own, which nobody else writes. So an answer is judged on the spot: the record must be at
the instance that gave it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

from sow_replication.options import NodeOptions, PeerOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Durability, OpenedPublisher, Outcome, Publish, PublisherPosition
from tests.property.test_replication_commands import change, link
from tests.property.test_replication_simulation import edges
from tests.support.examples import examples
from tests.support.replica_rocks import RocksStore
from tests.support.replica_rows import SECOND, Backup, Written
from tests.support.replica_world import Instance, World
from tests.support.resumers import store_of

SEEDS = 24
Fault: TypeAlias = Callable[[World, random.Random], None]
"""Does harm now and then."""


class Lost(AssertionError):
    """A record counts as applied where it is not, or is applied twice where it is known."""


@dataclass
class Mover:
    """A publisher: one request at a time, repeated until it is answered, perhaps by another instance."""

    world: World
    name: str
    publisher_id: str
    at: Instance
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lives = 0
        self.position: PublisherPosition | None = None
        self.request: Publish | None = None
        self.settled: list[Publish] = []
        """Of its epoch."""
        self._asked_at: tuple[Instance, int] | None = None

    def pump(self) -> None:
        """Asks, unless an answer is still to come."""
        if self._asked_at is not None and (self._asked_at[0].life != self._asked_at[1] or not self._asked_at[0].up):
            self._asked_at = None  # the connection is gone, and whether the request was applied is unknown
        if self._asked_at is None and self.draw.random() < 0.7:
            if not self.at.up or self.draw.random() < 0.2:
                self.at = self.draw.choice(list(self.world.instances.values()))
            if self.at.up:
                self.ask(self.at)

    def leave(self) -> None:
        """Its connection breaks, so it goes elsewhere."""
        self._asked_at = None
        self.at = self.draw.choice(list(self.world.instances.values()))

    def ask(self, at: Instance) -> None:
        self._asked_at = asked = at, at.life
        if self.position is None:
            self._open(at, asked)
            return
        if self.request is None:
            self.request = self._next()
        request = self.request

        def heard(answer: Outcome | StoreError) -> None:
            if self._asked_at is asked:
                self._asked_at = None
                self._heard(at, request, answer)

        store_of(at)._submit_heard(request, heard)
        self.world.soon(at)

    def _open(self, at: Instance, asked: tuple[Instance, int]) -> None:
        def opened(answer: OpenedPublisher | StoreError) -> None:
            if self._asked_at is asked and isinstance(answer, OpenedPublisher):
                self._asked_at = None
                self.position = PublisherPosition(self.publisher_id, answer.epoch, 1, token=answer.token)

        token = self.draw.randint(1, 2**60)
        store_of(at)._rig.store.commits.open_publisher(self.publisher_id, 0, opened, token=token)
        self.world.soon(at)

    def _next(self) -> Publish:
        assert self.position is not None, "it is open"
        self.lives += 1
        keys = [f"{self.name}.{self.lives}.{number}" for number in range(self.draw.randint(1, 3))]
        payloads = [json.dumps({"p": key}).encode() for key in keys]
        return Publish(self.draw.choice("TTU"), payloads, keys, publisher=self.position, durability=Durability.FSYNC)

    def _heard(self, at: Instance, request: Publish, answer: Outcome | StoreError) -> None:
        if isinstance(answer, StoreError):
            self.counts[answer.reason.name] += 1
            if answer.reason is Reason.PUBLISHER_FENCED:
                self.position, self.request, self.settled = None, None, []
            return
        assert not answer.refusals, answer
        self.judge(at, request)
        self.counts["applied"] += answer.applied
        self.counts["known"] += answer.duplicates
        self.settled.append(request)
        self.request = None
        assert self.position is not None, "it has published"
        self.position = self.position._replace(first_sequence=self.position.first_sequence + len(request.payloads))

    def check_known(self, at: Instance, request: Publish) -> None:
        """A retry is a duplicate everywhere, unless another program has taken the id over. Raises Lost."""
        answers: list[Outcome | StoreError] = []
        store_of(at)._submit_heard(request, answers.append)
        at.store.step()
        (answer,) = answers
        if isinstance(answer, Outcome) and answer.applied:
            raise Lost(f"{self.name}: {request.keys} was applied again at {at.store.identity.name}")

    def judge(self, at: Instance, request: Publish) -> None:
        """All records of an answered request are there. Raises Lost."""
        there = at.store.records(request.topic)
        assert request.keys is not None, "all have one"
        missing = [key for key in request.keys if key not in there]
        if missing:
            raise Lost(f"{self.name}: {missing} of {request.topic} count as applied at {at.store.identity.name}")


def live(seed: int, folder: Path, *, fault: Fault) -> Counter[str]:
    """One life of some instances and two publishers. Raises Lost."""
    folder.mkdir()
    stores: list[RocksStore] = []
    draw = random.Random(seed)

    def make(
        name: str, now: Callable[[], int], peers: Sequence[str], *, written: Callable[[Written], None]
    ) -> RocksStore:
        stores.append(RocksStore(folder, name, now, peers, written=written))
        return stores[-1]

    try:
        world = World(seed, make)
        names = ["a", "b", "c"][: draw.choice([2, 3])]
        links = edges(draw.choice(["mesh", "line both ways"]), names)
        for name in names:
            options = NodeOptions(
                peers=tuple(PeerOptions(b, b) for a, b in links if a == name),
                accept=tuple(a for a, b in links if b == name),
                tombstone_grace_micros=10_000 * SECOND,
                settle_micros=10 * SECOND,
                seed_bytes_max=draw.choice([1, 100_000]),
                cursor_sequences_max=draw.choice([3, 1000]),
            )
            world.add(name, options)
        late = draw.choice([None, *names])
        for name, instance in world.instances.items():
            instance.store.create("T")
            if name != late:
                instance.store.create("U")
            world.soon(instance)
        shared = draw.random() < 0.3  # two programs take one id, and fence each other
        movers = [
            Mover(
                world,
                name,
                "p" if shared else name,
                draw.choice(list(world.instances.values())),
                random.Random(f"{seed}.{name}"),
            )
            for name in ("one", "two")
        ]
        for number in range(200):
            world.run(draw.randint(1, 400_000))
            if number == 100 and late is not None:
                world.instances[late].store.create("U")
                world.soon(world.instances[late])
            fault(world, draw)
            for mover in movers:
                mover.pump()
                if draw.random() < 0.15:
                    mover.leave()
        settle(world, movers, fault)
        return sum([mover.counts for mover in movers], Counter())
    finally:
        for store in stores:
            store.close()


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
    """As `kills`, and what was not synced may be lost."""
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


def settle(world: World, movers: list[Mover], fault: Fault) -> None:
    """Heals everything, and waits until it is quiet. Where nothing was lost, every instance has every record then, and
    knows it."""
    world.heal()
    if fault is comings_and_goings:
        for one, other in itertools.permutations(world.instances.values(), 2):
            link(one, other)
    for instance in world.instances.values():
        instance.store.create("U")  # its creation may have died with the process
        world.soon(instance)
    quiet = 0
    for _ in range(200):
        world.run(SECOND)
        for mover in movers:
            if mover.request is not None and mover._asked_at is None:
                mover.pump()
        quiet = quiet + 1 if world.lag() == 0 else 0
        if quiet == 8:
            break
    else:
        raise AssertionError("it is never quiet")
    for mover in movers:
        for request in mover.settled[-3:]:
            for instance in world.instances.values():
                if fault is not restores:
                    mover.judge(instance, request)
                if fault in (kills, comings_and_goings):
                    mover.check_known(instance, request)


@pytest.mark.parametrize("fault", [kills, power_cuts, comings_and_goings, restores])
def test_a_record_that_counts_as_applied_is_there(tmp_path: Path, seed: int, fault: Fault) -> None:
    total: Counter[str] = Counter()
    for number in range(examples(SEEDS // 2)):
        try:
            total += live((seed + number) % 2**32, tmp_path / str(number), fault=fault)
        except AssertionError as error:
            raise AssertionError(f"seed {(seed + number) % 2**32}: {error}") from error
    print(total)
    assert total["known"] > 0
