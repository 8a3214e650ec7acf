"""Several instances, a bad network, crashes: when all is quiet, all is equal, and nothing dead is alive (R3 to R7).

The whole of it runs in one process under one injected clock, over a model of a store; `run_seed` takes another one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import pytest

from sow.v1 import types_pb2
from sow_peering import InstanceIdentity, JournalPart, MergeCounts, Packed, PublisherMark
from sow_replication.options import NodeOptions, PeerOptions
from sow_replication.ports import Counted, Refused
from sow_replication.purging import TombstonePurge
from sow_replication.receiver import Receiver
from tests.support.oracles.examples import lives
from tests.support.simulation.replica_model import ModelStore
from tests.support.simulation.replica_rows import SECOND, Backup, Disk, Make, ModelSource, Row
from tests.support.simulation.replica_world import Broken, Instance, Storm, World

pytestmark = pytest.mark.simulation

LATE = True
SEEDS = 200
TOPICS = ("T", "U")
KEYS = [f"k{number}" for number in range(8)]


class Wrong(AssertionError):
    """A fault that the simulation has found."""


def edges(kind: str, names: list[str]) -> list[tuple[str, str]]:
    """The links, from sender to receiver."""
    ring = list(zip(names, [*names[1:], names[0]], strict=True))
    line = list(itertools.pairwise(names))
    if kind == "ring":
        return ring
    if kind == "ring both ways":
        return sorted({*ring, *[(b, a) for a, b in ring]})
    if kind == "line":
        return line
    if kind == "line both ways":
        return [*line, *[(b, a) for a, b in line]]
    if kind == "fan-out":
        return [(names[0], name) for name in names[1:]]
    assert kind == "mesh"
    return [(a, b) for a in names for b in names if a != b]


TWO_WAY = ("ring both ways", "line both ways", "mesh")
KINDS = ("ring", "ring both ways", "line", "line both ways", "fan-out", "mesh", "mesh")


def build(seed: int, make: Make) -> World:
    draw = random.Random(seed)
    world = World(seed, make)
    names = [chr(ord("a") + number) for number in range(draw.choice([2, 2, 3, 3, 4, 5]))]
    kind = draw.choice(KINDS)
    links = edges(kind, names)
    # Where links go one way only, an instance that was away for longer than the grace learns of dead keys, but those
    # beyond it are not (docs: R4): `repair` is for that.
    grace = draw.choice([15, 40, 10_000] if kind in TWO_WAY else [10_000]) * SECOND
    print(f"seed {seed}: {kind} of {len(names)}, grace {grace // SECOND} s")
    for name in names:
        options = NodeOptions(
            peers=tuple(PeerOptions(b, b) for a, b in links if a == name),
            accept=tuple(a for a, b in links if b == name),
            tombstone_grace_micros=grace,
            settle_micros=10 * SECOND,
            flight_bytes_max=draw.choice([300, 2_000, 100_000]),
            flight_messages_max=draw.choice([1, 4, 32]),
            read_bytes_max=draw.choice([1, 300, 100_000]),
            seed_bytes_max=draw.choice([1, 200, 100_000]),
            cursor_sequences_max=draw.choice([3, 1000]),
        )
        world.add(name, options, offset=draw.randint(-SECOND, SECOND))
    # A topic that is missing somewhere for longer than the grace comes as it is elsewhere (docs/replication.md): what
    # was deleted on one side of the gap is not known to be dead on the other, and nobody's data are dropped for that.
    late = LATE and draw.random() < 0.3 and grace == 10_000 * SECOND
    for instance in world.instances.values():
        for topic in TOPICS:
            if not (late and topic == "U" and draw.random() < 0.5):
                instance.store.create(topic)
        world.soon(instance)
    return world


def disturb(world: World, draw: random.Random, seconds: int) -> None:
    """Writes, cuts, crashes, power cuts, prunings."""
    rates = draw.choice([0.0, 0.03, 0.1])
    until = world.now + seconds * SECOND
    while world.now < until:
        world.run(draw.randint(1, 400_000))
        write(world, draw)
        if draw.random() < rates:
            fault(world, draw)
    for instance in world.instances.values():
        # Nobody repeats a write that is lost now.
        instance.fragile = rates > 0 and draw.random() < 0.3
        instance.exposed = rates > 0 and draw.random() < 0.1


def write(world: World, draw: random.Random, instance: Instance | None = None, keys: Sequence[str] = KEYS) -> None:
    instance = instance or draw.choice(list(world.instances.values()))
    if not instance.up:
        return
    store, topic, key = instance.store, draw.choice(TOPICS), draw.choice(keys)
    for _ in range(draw.choice([1, 1, 1, 5])):
        match draw.randrange(10):
            case 0 | 1 | 2:
                store.publish(topic, key, f"p{draw.randrange(1000)}")
            case 3:
                store.publish(topic, key, f"q{draw.randrange(1000)}", draw.choice([0, 1, 3, 10, 60, 9_000]) * SECOND)
            case 4:
                store.delta(topic, key, f"d{draw.randrange(100)}")
            case 5 | 6 | 7:
                store.delete(topic, key)
            case 8:
                store.touch(topic, key, draw.choice([1, 5, 30, 9_000]) * SECOND)
            case _:
                store.sweep()
        key = draw.choice(keys)
    world.soon(instance)


def fault(world: World, draw: random.Random) -> None:
    instances = list(world.instances.values())
    instance, other = draw.sample(instances, 2)
    a, b = instance.store.identity.name, other.store.identity.name
    match draw.randrange(6):
        case 0 | 1:
            world.cut(a, b)
            if draw.random() < 0.7:
                world.cut(b, a)
            after = draw.choice([1, 5, 20, 60]) * SECOND
            world.at(world.now + after, lambda: world.cuts.difference_update({(a, b), (b, a)}))
        case 2 if draw.random() < 0.5:
            instance.fragile = True
        case 2 if draw.random() < 0.7:
            instance.exposed = True
        case 2:
            if instance.up:
                instance.crash(power=draw.random() < 0.5)
                life = instance.life

                def boot() -> None:
                    if not instance.up and instance.life == life:
                        instance.boot()

                world.at(world.now + draw.choice([0, 2, 25]) * SECOND, boot)
        case 3:
            for wire in world.wires:  # a connection resets
                if wire.source is instance:
                    wire.cut()
        case _:
            if instance.up:
                instance.store.prune(instance.store.head() - draw.choice([0, 0, 5, 50]))
                world.soon(instance)


def settle(world: World) -> None:
    """Heals everything, and waits until it is quiet. Raises Wrong."""
    heal(world)
    if not world.run_until(lambda: world.lag() == 0 and not trouble(world), 180 * SECOND):
        raise Wrong(f"not quiet: lag {world.lag()}; {trouble(world)}")
    world.run(5 * SECOND)
    found = trouble(world)
    if found or world.lag():
        raise Wrong(found or "lag again")


def heal(world: World) -> None:
    """Ends all faults, and lets time pass until all is due."""
    world.heal()
    world.run(5 * SECOND)
    for instance in world.instances.values():
        instance.fragile = instance.exposed = False
        if not instance.up:
            instance.boot()
        for topic in TOPICS:
            instance.store.create(topic)
        world.soon(instance)
    world.run(70 * SECOND)


def trouble(world: World) -> str:
    """The differences from the expected state; empty: none."""
    sees: dict[str, set[str]] = {name: set() for name in world.instances}
    for name in world.instances:
        for reached in world.reaches(name):
            sees[reached].add(name)
    dropped = {pair for instance in world.instances.values() for pair in instance.store.dropped()}
    greatest: dict[tuple[str, str, str], Row] = {}
    for written in world.history:
        for name, seen in sees.items():
            if written.instance in seen:
                at = (name, written.topic, written.key)
                if at not in greatest or written.row.rank > greatest[at].rank:
                    greatest[at] = written.row
    for name, instance in world.instances.items():
        for topic in TOPICS:
            records = instance.store.records(topic)
            for key in KEYS:
                row = greatest.get((name, topic, key))
                alive = row is not None and row.payload is not None
                if row is not None and 0 < row.stamp <= instance.store.now_micros():
                    alive = False
                wanted = row if alive else None
                found = records.get(key)
                if found == wanted:
                    continue
                if (topic, key) not in dropped:
                    return f"{name}: {topic}/{key} is {found}, and not {wanted}"
                if found is not None and row is not None and found.rank < row.rank and row.payload is None:
                    return f"{name}: {topic}/{key} is {found}, though {row} deleted it"
            for other, it in world.instances.items():
                theirs = it.store.records(topic)
                if other in sees[name] and name in sees[other] and theirs != records:
                    return f"{topic} differs at {name} and {other}: {sorted(records.items() ^ theirs.items())}"
    return ""


def run_seed(seed: int, make: Make = ModelStore) -> None:
    """One random life of some instances. Raises Wrong."""
    world = build(seed, make)
    draw = random.Random(seed + 1)
    disturb(world, draw, draw.choice([20, 40, 80]))
    settle(world)


@pytest.mark.parametrize("part", range(4))
def test_all_instances_end_with_the_greatest_written_versions(seed: int, part: int) -> None:
    for number in range(lives(SEEDS // 4)):
        run_seed((seed + part * 1000 + number) % 2**32)


@pytest.mark.long
@pytest.mark.parametrize("part", range(100))
def test_ten_thousand_lives_end_equal(seed: int, part: int) -> None:
    for number in range(100):
        run_seed((seed + 100_000 + part * 1000 + number) % 2**32)


# -- instances that lose their data ---------------------------------------------------------------------------------


@dataclass
class Owners:
    """Keys that one instance each writes, and what of them must not be lost."""

    world: World
    since: dict[str, int] = field(default_factory=dict)
    """By instance that lost its data: the place in the history where it began anew."""
    survivors: dict[tuple[str, str], int] = field(default_factory=dict)
    """By topic and key of such an instance: the place of the newest write that anyone had after the last loss."""

    def places(self) -> dict[tuple[str, str, tuple[int, str]], int]:
        """Where each write is in the history."""
        return {(it.topic, it.key, it.row.rank): place for place, it in enumerate(self.world.history)}

    def loses(self, loser: Instance) -> None:
        """The data of an instance are lost. The others keep their records of such keys."""
        self.since[loser.store.identity.name] = len(self.world.history)
        places = self.places()
        self.survivors = {(it.topic, it.key): -1 for it in self.world.history if it.instance in self.since}
        for other in self.world.instances.values():
            if other is loser:
                continue
            for topic in TOPICS:
                for key, row in (other.store.tombstones(topic) | other.store.records(topic)).items():
                    if (topic, key) in self.survivors:
                        place = places.get((topic, key, row.rank), -1)
                        self.survivors[topic, key] = max(self.survivors[topic, key], place)

    def expected(self) -> dict[tuple[str, str], int]:
        """The place of the write of each key that all instances have to have, or a later one."""
        found = dict(self.survivors)
        for place, it in enumerate(self.world.history):
            if place >= self.since.get(it.instance, 0):
                found[it.topic, it.key] = max(found.get((it.topic, it.key), -1), place)
        return found

    def trouble(self) -> str:
        """The differences from the expected state; empty: none."""
        places = self.places()
        dropped = {pair for it in self.world.instances.values() for pair in it.store.dropped()}
        for name, instance in self.world.instances.items():
            now = instance.store.now_micros()
            for (topic, key), least in self.expected().items():
                if (topic, key) in dropped or least < 0:
                    continue
                later = [it.row for it in self.world.history[least:] if (it.topic, it.key) == (topic, key)]
                row = instance.store.records(topic).get(key)
                if row is None:
                    fine = any(it.payload is None or 0 < it.stamp <= now for it in later)
                else:
                    fine = places[topic, key, row.rank] >= least
                if not fine:
                    return f"{name}: {topic}/{key} is {row}, and not {later[0]} or a later one"
        return differing(self.world)


def differing(world: World) -> str:
    """Which of the instances that hear of each other hold different records; empty: none."""
    reached = {name: world.reaches(name) for name in world.instances}
    for topic in TOPICS:
        for a, b in itertools.combinations(world.instances, 2):
            if b in reached[a] and a in reached[b]:
                here, there = (world.instances[name].store.records(topic) for name in (a, b))
                if here != there:
                    return f"{topic} differs at {a} and {b}: {sorted(here.items() ^ there.items())}"
    return ""


def run_losing_seed(seed: int, make: Make = ModelStore, empty: Callable[[], Backup] = Disk) -> None:
    """One random life of instances of which some lose their data. Their clocks differ by seconds, and each writes keys
    of its own. Raises Wrong."""
    draw = random.Random(seed)
    world = World(seed, make)
    names = [chr(ord("a") + number) for number in range(draw.choice([2, 3, 3, 4]))]
    # Tombstones do not go by age here, and nobody stands between two others: where outages beyond the grace, or several
    # losses, come together, an instance may bring what nobody knows any more to be dead.
    kind, grace = "mesh", 10_000 * SECOND
    print(f"seed {seed}: {kind} of {len(names)}, grace {grace // SECOND} s, data are lost")
    for name in names:
        peers = tuple(PeerOptions(b, b) for a, b in edges(kind, names) if a == name)
        accept = tuple(a for a, b in edges(kind, names) if b == name)
        options = NodeOptions(
            peers=peers, accept=accept, tombstone_grace_micros=grace, settle_micros=draw.choice([2, 10]) * SECOND
        )
        world.add(name, options, offset=draw.randint(-4 * SECOND, 4 * SECOND))
    owners = Owners(world)
    instances = list(world.instances.values())
    for instance in instances:
        for topic in TOPICS:
            instance.store.create(topic)
        world.soon(instance)
    until = world.now + draw.choice([20, 60]) * SECOND
    while world.now < until:
        world.run(draw.randint(1, 400_000))
        instance = draw.choice(instances)
        if not instance.up:
            continue
        write(world, draw, instance, [f"{instance.store.identity.name}{number}" for number in range(3)])
        chance = draw.random()
        if chance < 0.05:
            fault(world, draw)
        elif chance < 0.07:
            lose(world, draw, owners, instance, empty())
    heal(world)
    if not world.run_until(lambda: world.lag() == 0 and not owners.trouble(), 300 * SECOND):
        raise Wrong(f"not quiet: lag {world.lag()}; {owners.trouble()}")


def lose(world: World, draw: random.Random, owners: Owners, instance: Instance, backup: Backup) -> None:
    """An instance begins anew with empty data, a little later, and with a clock that may be behind the one before."""
    instance.crash()
    instance.offset = draw.randint(-4 * SECOND, 4 * SECOND)
    owners.loses(instance)
    instance.store.restore(backup)
    for topic in TOPICS:
        instance.store.create(topic)
    world.at(world.now + draw.choice([0, 2, 20]) * SECOND, instance.boot)


@pytest.mark.parametrize("part", range(2))
def test_an_instance_that_lost_its_data_keeps_earlier_rows_elsewhere_and_writes_newer_ones(
    seed: int, part: int
) -> None:
    """K7, R3, R4: an instance that was wiped wrote with a clock that was behind, and the earlier write under its name,
    which came back from a peer with a greater version, replaced the newer one everywhere."""
    for number in range(lives(16)):
        run_losing_seed((seed + 900_000 + part * 1000 + number) % 2**32)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_lives_with_lost_data_end_equal(seed: int, part: int) -> None:
    for number in range(100):
        run_losing_seed((seed + 910_000 + part * 1000 + number) % 2**32)


class Watched(ModelStore):
    """Raises Wrong where a subscriber would be told an older version of a key than before."""

    told: dict[tuple[int, str, str], Row]

    def _put(self, topic: str, key: str, row: Row, via: InstanceIdentity | None, *, own: bool = False) -> None:
        self.__dict__.setdefault("told", {})
        before = self.told.get((self._lives, topic, key))
        if before is not None and row.payload is not None and row.rank < before.rank:
            raise Wrong(f"{self.identity.name} tells {topic}/{key} as {row} after {before}")
        super()._put(topic, key, row, via, own=own)
        self.told[self._lives, topic, key] = self.disk.topics[topic].rows[key].row


def run_ring_seed(seed: int) -> None:
    """One random life of a ring of one direction, in which instances are away, and lose their data. Raises Wrong."""
    draw = random.Random(seed)
    world = World(seed, Watched)
    names = ["a", "b", "c"]
    for name, receiver in edges("ring", names):
        accept = tuple(a for a, b in edges("ring", names) if b == name)
        options = NodeOptions(peers=(PeerOptions(receiver, receiver),), accept=accept, settle_micros=2 * SECOND)
        world.add(name, options, offset=draw.randint(-SECOND, SECOND))
    instances = list(world.instances.values())
    for instance in instances:
        for topic in TOPICS:
            instance.store.create(topic)
        world.soon(instance)
    until = world.now + 60 * SECOND
    while world.now < until:
        world.run(draw.randint(1, 400_000))
        instance = draw.choice(instances)
        if not instance.up:
            continue
        write(world, draw, instance)
        chance = draw.random()
        if chance < 0.05:
            instance.crash()
            if chance < 0.02:
                instance.store.restore(Disk())
                for topic in TOPICS:
                    instance.store.create(topic)
            world.at(world.now + draw.choice([0, 2, 20]) * SECOND, instance.boot)
    heal(world)
    world.run(60 * SECOND)


def test_no_instance_of_a_ring_shows_an_older_version_than_before(seed: int) -> None:
    """R4. The story is at `test_a_tombstone_stays_while_a_sender_has_not_come_since_the_data_were_lost`."""
    for number in range(lives(10)):
        run_ring_seed((seed + 920_000 + number) % 2**32)


# -- mistakes that the simulation has to find -----------------------------------------------------------------------


class CursorOutsideTheBatch(ModelStore):
    """The cursor is stored when the changes are queued."""

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
        counted = super().apply(name, after=after, upto=upto, chunks=chunks, origins=origins)
        for disk in (self.disk, self._synced):
            self._move(disk.sources[name], upto)
        return counted

    def _skips(self, row: ModelSource, after: int) -> bool:
        return False


class ExpiryMintsAVersion(ModelStore):
    """The tombstone of an expiry is newer than the record."""

    def _grace_tombstone(self, row: Row) -> Row:
        return super()._grace_tombstone(row)._replace(version=self._mint(), origin=self.identity.name)


class StampsAnew(ModelStore):
    """The receiver gives a record the rest of its life again."""

    def _stored(self, change: Row) -> Row:
        return change._replace(stamp=change.stamp + 1_000) if change.stamp else change


class PurgesTooEarly(ModelStore):
    """A tombstone goes whoever may not have it."""

    def _purge(self, upto: int, held: Collection[str], made_before_micros: int, unread: Collection[str]) -> MergeCounts:
        return super()._purge(self.disk.head, (), made_before_micros, unread)


class AppliesWhatIsOlder(ModelStore):
    """The last write wins."""

    def _wins(self, change: Row, kept: Row) -> bool:
        return change.rank != kept.rank


class SkipsWhatWasRefused(ModelStore):
    """Changes behind a batch that was refused are applied."""

    refusals = 0

    def _skips(self, row: ModelSource, after: int) -> bool:
        return False

    def _refusal(self, row: ModelSource, changes: Sequence[Row]) -> Refused | None:
        self.refusals += 1
        if self.refusals % 20 == 0:
            return Refused(types_pb2.ERROR_REASON_CLOCK_SKEW, "a change is from the future")
        return super()._refusal(row, changes)


class ForgetsWhatItLost(ModelStore):
    """Changes that the journal has lost are not told."""

    def read(
        self, peer: InstanceIdentity, after: int, *, topics: Collection[str], filter_text: str, bytes_max: int
    ) -> JournalPart:
        piece = super().read(peer, after, topics=topics, filter_text=filter_text, bytes_max=bytes_max)
        return piece._replace(lost=())


class AcknowledgesBeforeTheSync(ModelStore):
    """A received change is acknowledged once it is written."""

    def _submit_for(self, job: Callable[[], MergeCounts | Refused]) -> Counted:
        asked = self._sync_asked
        counted = super()._submit_for(job)
        self._sync_asked = asked
        return counted


class ShipsBeforeTheSync(ModelStore):
    """Peers are sent changes that a power cut takes back."""

    def head(self) -> int:
        return self.disk.head

    def _readable(self) -> int:
        return self.disk.head


MISTAKES: tuple[type[ModelStore], ...] = (
    CursorOutsideTheBatch,
    ExpiryMintsAVersion,
    StampsAnew,
    PurgesTooEarly,
    AppliesWhatIsOlder,
    SkipsWhatWasRefused,
    ForgetsWhatItLost,
    AcknowledgesBeforeTheSync,
    ShipsBeforeTheSync,
)
FOUND_WITHIN = 100
"""Seeds."""
FIRST = {
    CursorOutsideTheBatch: 38,
    ExpiryMintsAVersion: 5,
    StampsAnew: 3,
    PurgesTooEarly: 5,
    SkipsWhatWasRefused: 25,
    ForgetsWhatItLost: 2,
    AcknowledgesBeforeTheSync: 29,
    ShipsBeforeTheSync: 197,
}
"""The first seed that is tried, where those in front of it do not find a mistake: they cost seconds."""


SLOW_TO_FIND = {AppliesWhatIsOlder, SkipsWhatWasRefused}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=mistake.__name__, marks=[pytest.mark.long] if mistake in SLOW_TO_FIND else [])
        for mistake in MISTAKES
    ],
)
def test_a_planted_mistake_is_found(mistake: type[ModelStore]) -> None:
    assert found(mistake), f"not found within {FOUND_WITHIN} seeds"


def found(make: type[ModelStore] = ModelStore, first: int = 0) -> bool:
    """Whether the simulation finds a mistake. `first`: as in `FIRST`, for one that is none of a store."""
    first = FIRST.get(make, first)
    for number in range(first, first + FOUND_WITHIN):
        try:
            run_seed(number, make)
        except (Wrong, Storm, Broken) as wrong:
            print(f"seed {number}: {wrong}")
            return True
    return False


class KeepsTheGreaterOfItsLives(ModelStore):
    """An instance's writes from before it lost its data count by their versions alone (K7)."""

    def _put(self, topic: str, key: str, row: Row, via: InstanceIdentity | None, *, own: bool = False) -> None:
        super()._put(topic, key, row, via)


@pytest.mark.long
def test_the_check_finds_an_instance_that_reapplies_its_own_lost_rows() -> None:
    def wrong(number: int) -> bool:
        try:
            run_losing_seed(number, KeepsTheGreaterOfItsLives)
        except Wrong:
            return True
        return False

    assert any(wrong(number) for number in range(FOUND_WITHIN))


def test_a_node_that_forgets_senders_that_have_not_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """See purging [1]."""
    monkeypatch.setattr(TombstonePurge, "_awaits_a_source", lambda self: False)

    def wrong(number: int) -> bool:
        try:
            run_ring_seed(number)
        except Wrong:
            return True
        return False

    assert any(wrong(number) for number in range(FOUND_WITHIN))


def test_a_node_that_does_not_wait_until_its_sources_have_been_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """See purging [1]."""
    monkeypatch.setattr(Receiver, "satisfied_probe", property(lambda it: 2**62, lambda it, probe: None), raising=False)
    assert found(first=15)
