"""A network of instances under one clock: streams that arrive late or never, crashes, power cuts."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from sow.v1 import replication_pb2, types_pb2
from sow_peering import InstanceIdentity
from sow_replication.link_topics import TopicState
from sow_replication.node import Node
from sow_replication.options import NodeOptions, PeerOptions
from sow_replication.ports import Refused
from sow_replication.reads import Fetched, Read
from sow_replication.receiver import Receiver
from sow_replication.sender import Sender
from tests.support.simulation.replica_model import ModelStore
from tests.support.simulation.replica_rows import SECOND, Make, SimulatedStore, Written

M = TypeVar("M", replication_pb2.ReplicateRequest, replication_pb2.ReplicateResponse)


class Wire:
    """One stream: its messages arrive in order, later, or never."""

    def __init__(self, world: World, sender: Sender, receiver: Receiver, source: Instance, target: Instance) -> None:
        self.world = world
        self.sender = sender
        self.receiver = receiver
        self.source = source
        self.target = target
        self.broken = False
        self.seeded: frozenset[str] = frozenset()
        """Topics that the receiver has told are seeded, when it acknowledged last."""
        self._arrivals = {True: 0, False: 0}
        sender.wake = lambda: world.soon(source)
        receiver.wake = lambda: world.soon(target)

    @property
    def ends(self) -> tuple[str, str]:
        """The names of receiver and sender."""
        return self.target.store.identity.name, self.source.store.identity.name

    def later(self, forward: bool, action: Callable[[], None]) -> None:
        at = max(self._arrivals[forward], self.world.now + self.world.delay())
        self._arrivals[forward] = at

        def arrive() -> None:
            if not self.broken:
                action()

        self.world.at(at, arrive)

    def cut(self) -> None:
        """Messages under way are lost; each end hears of it when it does."""
        if self.broken:
            return
        self.broken = True
        gone = Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "the connection is gone")
        for machine, home in ((self.sender, self.source), (self.receiver, self.target)):
            # Some notice at once, some only by the silence.
            delay = self.world.random.choice([0, self.world.delay(), 30 * SECOND])
            self.world.at(self.world.now + delay, partial(self.world.end, machine, home, gone))


class Instance:
    """A store and its node; crashes take all but the store's disk."""

    def __init__(self, world: World, store: SimulatedStore, options: NodeOptions, offset: int) -> None:
        self.world = world
        self.store = store
        self.options = options
        self.offset = offset
        self.up = True
        self.life = 0
        self.fragile = False
        """Whether it crashes in front of its next commit, or loses power in front of its next sync."""
        self.exposed = False
        """Whether it loses power right after it has told another one its content, or the changes that it was given."""
        self.paused: set[str] = set()
        self.node = Node(store, options, world.random)

    def add_peer(self, peer: PeerOptions) -> None:
        """Sends to another instance from now on, by command (rule R14)."""
        self.options = replace(self.options, peers=(*self.options.peers, peer))
        self.store.add_peer(peer.name)
        self.store.step()
        self.node.add(peer)
        self.world.soon(self)

    def remove_peer(self, name: str) -> None:
        """Forgets another instance."""
        self.options = replace(
            self.options,
            peers=tuple(peer for peer in self.options.peers if peer.name != name),
            accept=tuple(other for other in self.options.accept if other != name),
        )
        self.paused.discard(name)
        self.node.remove(name)
        self.store.remove_peer(name)
        self.store.step()
        self.node.wake()
        self.world.soon(self)

    def pause(self, name: str) -> None:
        """Sends nothing to a peer."""
        self.paused.add(name)
        self.node.pause(name)
        self.world.soon(self)

    def resume(self, name: str) -> None:
        """Sends to a peer again."""
        self.paused.discard(name)
        self.node.resume(name)
        self.world.soon(self)

    def boot(self) -> None:
        if self.up:
            return
        self.up = True
        self.fragile = self.exposed = False
        self.life += 1
        self.node = Node(self.store, self.options, self.world.random)
        for name in self.paused:
            self.node.pause(name)
        self.world.at(self.world.now, self.tick)

    def crash(self, *, power: bool = False) -> None:
        self.up = False
        self.life += 1
        self.world.lost += self.store.crash(power=power)
        self.world.check_promises(self)
        self.world.check_lost()
        for wire in list(self.world.wires):
            if self in (wire.source, wire.target):
                wire.cut()
                machine = wire.sender if wire.source is self else wire.receiver
                machine.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "crashed"))

    def tick(self) -> None:
        life = self.life

        def again() -> None:
            if self.up and self.life == life:
                self.node.tick()
                self.store.sweep()
                self.store.save()
                self.world.soon(self)
                self.world.at(self.world.now + SECOND, again)

        again()


EVENTS_MAX = 200_000
"""Of one life; some 35,000 are the most that one has had."""


class Storm(AssertionError):
    """There is no end to it."""


class Broken(AssertionError):
    """A receiver lacks changes that it has acknowledged."""


class Promise(NamedTuple):
    """The changes that a receiver has acknowledged to a source."""

    receiver: InstanceIdentity
    source: InstanceIdentity
    sequence: int


class World:
    """Instances, their network, and time."""

    def __init__(self, seed: int, make: Make = ModelStore) -> None:
        self.random = random.Random(seed)
        self.now = 1_700_000_000 * SECOND
        self.instances: dict[str, Instance] = {}
        self.wires: list[Wire] = []
        self.cuts: set[tuple[str, str]] = set()
        """Directed: who cannot reach whom."""
        self.history: list[Written] = []
        self.lost: list[Written] = []
        """The writes lost in power cuts, in the last seconds."""
        self._lost_until = 0
        self.dropped: set[tuple[str, str]] = set()
        """Instances and topics that were deleted there: the acknowledgements of their seeds mean nothing any more."""
        self._make = make
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._pending: set[str] = set()
        self._committing: set[str] = set()
        self._syncing: set[str] = set()
        self._promises: dict[tuple[str, str], Promise] = {}
        """By the names of receiver and source."""
        self.reading_micros = 3_000
        self.delay_max = 40_000

    def add(self, name: str, options: NodeOptions, offset: int = 0) -> Instance:
        store = self._make(
            name,
            lambda: self.now + self.instances[name].offset if name in self.instances else self.now + offset,
            [peer.name for peer in options.peers],
            written=self.history.append,
        )
        instance = self.instances[name] = Instance(self, store, options, offset)
        self.at(self.now + self.random.randrange(SECOND), instance.tick)
        return instance

    def delay(self) -> int:
        return self.random.randint(100, self.delay_max)

    def at(self, time: int, action: Callable[[], None]) -> None:
        number = next(self._numbers)
        if number == EVENTS_MAX:
            raise Storm(f"{number} events, and no end: something goes round and round")
        heapq.heappush(self._events, (time, number, action))

    def fail(self, error: Exception) -> None:
        """Ends the life with an error, from a place where exceptions are caught."""

        def end() -> None:
            raise error

        self.at(self.now, end)

    def soon(self, instance: Instance) -> None:
        """Something may be to be done at an instance."""
        name = instance.store.identity.name
        if name not in self._pending:
            self._pending.add(name)
            self.at(self.now, lambda: self._pump(instance))

    def run(self, micros: int) -> None:
        until = self.now + micros
        while self._events and self._events[0][0] <= until:
            time, _, action = heapq.heappop(self._events)
            self.now = max(self.now, time)
            action()
        self.now = until

    def run_until(self, holds: Callable[[], bool], micros: int) -> bool:
        for _ in range(micros // SECOND):
            if holds():
                return True
            self.run(SECOND)
        return holds()

    # -- driving ----------------------------------------------------------------------------------------------------

    def _pump(self, instance: Instance) -> None:
        self._pending.discard(instance.store.identity.name)
        if not instance.up:
            return
        self._dial(instance)
        for wire in list(self.wires):
            if wire.source is instance:
                self._pump_sender(wire)
            if wire.target is instance:
                self._pump_receiver(wire)
        self._commit(instance)
        self._sync(instance)

    def _commit(self, instance: Instance) -> None:
        name = instance.store.identity.name
        if not instance.store.busy() or name in self._committing:
            return
        self._committing.add(name)

        def commit() -> None:
            self._committing.discard(name)
            if instance.fragile and instance.up:
                instance.crash(power=self.random.random() < 0.5)
                self.at(self.now + SECOND, instance.boot)
            if instance.up and instance.store.step(sync=False):
                self.check_lost()
                instance.node.wake()
                self.soon(instance)

        self.at(self.now + self.random.randint(100, 10_000), commit)

    def _sync(self, instance: Instance) -> None:
        """A write that nobody waits for becomes durable within 50 ms (rule P5)."""
        name = instance.store.identity.name
        if name in self._syncing or not instance.store.unsynced():
            return
        self._syncing.add(name)

        def sync() -> None:
            self._syncing.discard(name)
            if not instance.up or not instance.store.unsynced():
                return
            if instance.fragile and self.random.random() < 0.3:
                instance.crash(power=True)
                self.at(self.now + SECOND, instance.boot)
                return
            instance.store.sync()
            instance.node.wake()
            self.soon(instance)

        self.at(self.now + self.random.randint(100, 50_000), sync)

    def _dial(self, instance: Instance) -> None:
        for out in instance.node.due():
            target = self.instances[out.peer.name]
            sender = instance.node.dialled(out)
            if not target.up or self._is_cut(instance, target):
                sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "no route"))
                instance.node.closed(sender)
                continue
            self.wires.append(Wire(self, sender, target.node.accept(), instance, target))
        waiting = [out.next_at_micros for out in instance.node.outgoing.values() if out.sender is None]
        if waiting:
            when = min(waiting)
            self.at(when - instance.offset + 1, lambda: self.soon(instance))

    def _is_cut(self, a: Instance, b: Instance) -> bool:
        pair = (a.store.identity.name, b.store.identity.name)
        return pair in self.cuts

    def cut(self, a: str, b: str) -> None:
        """`a` does not reach `b` any more."""
        self.cuts.add((a, b))
        for wire in list(self.wires):
            if (wire.source.store.identity.name, wire.target.store.identity.name) == (a, b):
                wire.cut()

    def notice_cuts(self) -> None:
        """All ends hear at once that their streams are over, rather than by the silence."""
        gone = Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "the connection is gone")
        for wire in list(self.wires):
            if wire.broken:
                self.end(wire.sender, wire.source, gone)
                self.end(wire.receiver, wire.target, gone)

    def heal(self) -> None:
        self.cuts.clear()
        for instance in self.instances.values():
            if not instance.up:
                instance.boot()

    def _pump_sender(self, wire: Wire) -> None:
        sender, home = wire.sender, wire.source
        read = sender.next_read()
        if read is not None:
            self._read(wire, read)
        while True:
            request = sender.next_message()
            if request is None:
                break
            wire.later(True, partial(self._arrive, wire, _copy(request)))
            if request.WhichOneof("message") in ("changes", "seed"):
                self._expose(home)
        if sender.failure is not None:
            home.node.closed(sender)
            self._hang_up(wire, wire.receiver, wire.target, forward=True)

    def _read(self, wire: Wire, read: Read) -> None:
        home, life = wire.source, wire.source.life
        started = self.now + self.random.randrange(self.reading_micros)

        def run() -> None:
            if home.life != life:
                return
            result: Fetched | Refused
            try:
                result = read.run()
            except Refused as refused:
                result = refused

            def done() -> None:
                if home.life == life:
                    wire.sender.took(result)
                    self.soon(home)

            self.at(self.now + self.random.randrange(self.reading_micros), done)

        self.at(started, run)

    def _expose(self, instance: Instance) -> None:
        if not instance.exposed:
            return
        instance.exposed = False
        life = instance.life

        def cut() -> None:
            if instance.up and instance.life == life:
                instance.crash(power=True)
                self.at(self.now + SECOND, instance.boot)

        self.at(self.now + self.random.randrange(20_000), cut)

    def _arrive(self, wire: Wire, request: replication_pb2.ReplicateRequest) -> None:
        if request.HasField("hello"):
            told = self._promises.get(wire.ends)
            if told is not None and told.source[1:] != (request.hello.instance.id, request.hello.instance.epoch):
                del self._promises[wire.ends]  # it is another one, and begins anew
        wire.receiver.received(request)
        self.soon(wire.target)

    def _pump_receiver(self, wire: Wire) -> None:
        receiver = wire.receiver
        while True:
            response = receiver.next_message()
            if response is None:
                break
            if response.HasField("acknowledged") and receiver.identity is not None:
                self._promises[wire.ends] = Promise(
                    wire.target.store.identity, receiver.identity, response.acknowledged.sequence
                )
                wire.seeded = _seeded(receiver)
                self._expose(wire.target)
            wire.later(False, partial(self._answer, wire, _copy(response)))
        if receiver.failure is not None:
            self._hang_up(wire, wire.sender, wire.source, forward=False)

    def _answer(self, wire: Wire, response: replication_pb2.ReplicateResponse) -> None:
        wire.sender.received(response)
        self.soon(wire.source)

    def end(self, machine: Sender | Receiver, home: Instance, why: Refused) -> None:
        """One end hears that the stream is over."""
        machine.fail(why)
        self.soon(home)

    def _hang_up(self, wire: Wire, other: Sender | Receiver, home: Instance, *, forward: bool) -> None:
        """One end is over: the other one hears why, unless the wire is broken."""
        failure = wire.receiver.failure if not forward else wire.sender.failure
        assert failure is not None, "one end is over"
        if other.failure is None:
            wire.later(forward, partial(self.end, other, home, failure))
        elif wire in self.wires:
            wire.source.node.closed(wire.sender)  # a node that has crashed since does not know it any more
            self.wires.remove(wire)
            self.soon(wire.source)

    # -- properties -------------------------------------------------------------------------------------------------

    def check_promises(self, instance: Instance) -> None:
        """After a crash a receiver still has all that it has acknowledged (receiver [1], rule R6).

        Senders let go of their journal and of tombstones by that, and tell publishers that their records are
        REPLICATED (rule P5). Raises Broken.
        """
        store = instance.store
        for (name, other), promise in self._promises.items():
            if (name, store.identity) != (store.identity.name, promise.receiver):
                continue
            source = store.source(other)
            if source is None or source.identity != promise.source or (source.cursor or 0) < promise.sequence:
                raise Broken(f"{name} has acknowledged {promise}, and has {source}")
        for wire in self.wires:
            if wire.target is not instance or wire.receiver.failure is not None or not wire.seeded:
                continue
            kinds = {kind.name: kind for kind in wire.source.store.topics(".*")}
            assert wire.receiver.identity is not None, "it has acknowledged"
            for topic in sorted(wire.seeded & _seeded(wire.receiver) & set(kinds)):
                dropped = (store.identity.name, topic) in self.dropped
                if not dropped and store.answer(wire.receiver.identity.name, kinds[topic]).wanted:
                    raise Broken(f"{store.identity.name} has acknowledged the seed of {topic}, and lacks it")

    def check_lost(self) -> None:
        """No instance has a change that a power cut took from its origin (rule S7). Raises Broken."""
        if not self.lost:
            return
        self._lost_until = self._lost_until or self.now + SECOND
        for instance in self.instances.values():
            for topic in {written.topic for written in self.lost}:
                rows = {**instance.store.records(topic), **instance.store.tombstones(topic)}
                for written in self.lost:
                    if written.topic == topic and rows.get(written.key) == written.row:
                        raise Broken(f"{instance.store.identity.name} has what {written.instance} has lost: {written}")
        if self.now > self._lost_until:  # messages under way have arrived, or never will
            self.lost, self._lost_until = [], 0

    def reaches(self, a: str) -> set[str]:
        """Where the changes of an instance get to, when all is well."""
        seen = {a}
        todo = [a]
        while todo:
            for out in self.instances[todo.pop()].options.peers:
                if out.name not in seen:
                    seen.add(out.name)
                    todo.append(out.name)
        return seen

    def lag(self) -> int:
        """Sequences that peers have not acknowledged."""
        total = 0
        for instance in self.instances.values():
            for out in instance.node.outgoing.values():
                total += max(0, instance.store.head() - instance.node.settled(out))
                total += 0 if out.state == "streaming" else 1
        return total


def _seeded(receiver: Receiver) -> frozenset[str]:
    return frozenset(name for name, state, _ in receiver.topics() if state is TopicState.SEEDED)


def _copy(message: M) -> M:
    return type(message).FromString(message.SerializeToString())


def options_of(
    name: str, links: Sequence[tuple[str, str]], draw: random.Random, *, seed_bytes: Sequence[int] = (1, 200, 100_000)
) -> NodeOptions:
    """The options of an instance that has these links. Some seeds go in small pieces, some cursors are stored often."""
    return NodeOptions(
        peers=tuple(PeerOptions(b, b) for a, b in links if a == name),
        accept=tuple(a for a, b in links if b == name),
        tombstone_grace_micros=10_000 * SECOND,
        settle_micros=10 * SECOND,
        seed_bytes_max=draw.choice(seed_bytes),
        cursor_sequences_max=draw.choice([3, 1000]),
    )
