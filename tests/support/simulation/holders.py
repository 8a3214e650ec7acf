"""Holders of leases, in the simulation of replication on the real store (rule L21).

The leases are those of the client: `AsyncLease` runs here in the simulation's time, step by step, and its requests take
the way over protobuf into the store of an instance. A holder joins keys, stops without a word, is suspended, or leaves.
Its client goes on at other instances, as one with several addresses does.

The judgement is made where a request arrives, on the records before and after it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, cast

from sow.v1 import sow_pb2, types_pb2
from sow_client._lease_core import CLOCK_FACTOR
from sow_client._records import Deleted
from sow_client.aio._leasing import AsyncLease, AsyncLeasing
from sow_client.errors import LeaseLost, SowError, Unavailable, error_of_reason
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Durability, Outcome, Publish, Touch
from sow_server.services.door.statuses import CODES
from sow_server.services.records.writing import only_versions
from sow_server.services.wire import convert
from tests.support.simulation.lease_clients import LeaseClient, Turn, acting, unreachable
from tests.support.simulation.replica_rows import SECOND, Row
from tests.support.simulation.replica_world import Instance, World
from tests.support.simulation.resumers import store_of

TOPICS: Final = ("T", "U")
KEYS: Final = ("k0", "k1", "k2")
FLIGHT_MICROS: Final = SECOND // 20
"""A request that is under way when its holder stops arrives within this."""
TIMEOUT_SECONDS: Final = 2.0
CLOCK_RATE: Final = 1.05
"""How much faster or slower the clock of a holder runs than those of the instances: a store that approaches the wall
clock runs 5 % fast (rule L15)."""


_Coroutine: TypeAlias = Coroutine[object, object, object]


class Wrong(AssertionError):
    """A promise to a holder, or about its keys, is broken."""


class SameVersion(Exception):
    """Two instances have given two records of a key the same version, as both continue above the version of a third
    whose clock is ahead. A request that names the version is then about either record (rule L21)."""


class Ended(NamedTuple):
    """A lease that nobody renews any more."""

    at: int
    ttl_micros: int


class _Answer:
    """The answer to one call, for which a lease waits."""

    def __await__(self) -> Generator[_Answer, object, object]:
        return (yield self)


@dataclass(eq=False)
class Holder:
    """A program with one lease at a time, from `start` on until the world ends."""

    world: World
    name: str
    draw: random.Random
    at: Instance
    several: bool
    """Whether its client has the addresses of all instances, or of `at` alone."""
    rate: float
    """Of its clock."""
    may_read: bool = True
    """Otherwise it cannot recognize records of which it does not know the version."""
    counts: Counter[str] = field(default_factory=Counter)
    ended: dict[str, Ended] = field(default_factory=dict)
    """By the names of its leases."""
    silent: set[str] = field(default_factory=set)
    """Instances that get nothing from it, and it nothing from them."""
    refusing: set[str] = field(default_factory=set)
    """Instances that refuse its connection."""
    is_ending: bool = False
    """It begins no other lease."""

    def __post_init__(self) -> None:
        self._leases = 0
        self._lease: AsyncLease | None = None
        self._turn: Turn | None = None
        self._suspended_until = 0
        self._call: _Call | None = None  # the renewal, or the end, that is under way
        self._publishing: _Call | None = None  # the publish that is under way; a renewal may begin meanwhile
        self._running: _Call | None = None  # the one of the two that runs
        self._given: dict[tuple[str, str, str], dict[int, int]] = {}
        """By lease, topic and key: the versions that the lease has given, whether or not it knows of them, and when."""
        self._served_lease = ""
        """The name of the lease that has sent the request which is served now."""
        self._is_awaited = False
        """Whether the lease still waits for the answer to it."""
        self._foreign = ""
        """A record that was not the lease's, as a request of its present turn has found."""
        self._judged = False
        """Whether the cause of its loss was looked at."""
        self._excuse = ""
        """The event that has kept it from renewing since it last did."""
        self._told: dict[tuple[str, str], int] = {}
        """By topic and key: the first version that the lease was told of a record that has joined; 0: none yet."""
        self._named: dict[tuple[str, str], int] = {}
        """By topic and key: the versions that the last renewal has named."""
        self._lags = ""
        """The reason why it had to wait, as the last read of its records has shown; empty: none."""
        self._places: set[str] = set()
        """The instances that have served the present turn."""
        self._whole_at: Instance | None = None
        """The instance that has given all its records their stamp."""

    # -- acting -----------------------------------------------------------------------------------------------------

    @property
    def lease_name(self) -> str:
        """The name of its present lease, which all payloads tell."""
        return f"{self.name}.{self._leases}"

    def seconds(self) -> float:
        """Its clock."""
        return self.world.now / SECOND * self.rate

    def start(self) -> None:
        """Acts again and again, at random moments."""
        if self._call is None and self._publishing is None and self.world.now >= self._suspended_until:
            self._act()
        self.world.at(self.world.now + self.draw.randint(1, 300_000), self.start)

    def _act(self) -> None:
        lease = self._lease
        if lease is None:
            if not self.is_ending:
                self._begin()
            return
        self.check()
        chance = self.draw.random()
        if self._lost() is not None or chance < 0.08:
            self._places = set()
            self._run(lease.close(), self._left)
        elif chance < 0.14:
            self._stop("stopped")
        elif chance < 0.18:
            self._suspended_until = self.world.now + int(self.draw.uniform(0.5, 1.5) * self._ttl_micros)
            self._excuse = "it was suspended"
        elif chance < 0.25:
            self.move()
        elif chance < 0.7:
            self._run(
                lease.publish(
                    self.draw.choice(TOPICS),
                    {"by": self.lease_name, "n": self.draw.randrange(3)},
                    key=self.draw.choice(KEYS),
                    only_if_absent=self.draw.random() < 0.8,
                ),
                lambda _: self._joined(),
                publishes=True,
            )

    def move(self) -> None:
        """Its client goes on at another instance, perhaps at one that lags."""
        others = [it for it in self.world.instances.values() if it.up and it is not self.at]
        if self.several and others:
            self.at = self.draw.choice(others)

    def _begin(self) -> None:
        self._leases += 1
        self._foreign, self._judged, self._excuse, self._whole_at = "", False, "", None
        self._told, self._named, self._lags = {}, {}, ""
        self._turn = None
        self._ttl_micros = self.draw.choice([1, 2, 4]) * SECOND
        client = cast("AsyncLeasing", LeaseClient(self))
        with acting(self):
            self._lease = client.lease(self._ttl_micros / SECOND)
        self.counts["begun"] += 1

    def _stop(self, how: str) -> None:
        """The process ends without a word."""
        self.counts[how] += 1
        self.ended[self.lease_name] = Ended(self.world.now, self._ttl_micros)
        for call in self._call, self._publishing:
            if call is not None:
                with acting(self):
                    call.coroutine.close()
        self._lease = self._turn = self._call = self._publishing = None

    def kill(self) -> None:
        """Ends the process, if it has a lease."""
        if self._lease is not None:
            self._stop("killed")

    def _lost(self) -> LeaseLost | None:
        assert self._lease is not None, "it has one"
        with acting(self):
            return self._lease.lost

    def _joined(self) -> None:
        self.counts["joined"] += 1
        if self._places != {self._whole_at.store.identity.name if self._whole_at else ""}:
            first = self._lease is not None and sum(map(len, self._lease._core.held.values())) == 1
            self._whole_at = self.world.instances[min(self._places)] if first and len(self._places) == 1 else None

    def _left(self, _: object) -> None:
        """The end of `close`, with or without LeaseLost."""
        lost = self._lost()
        self.counts["left" if lost is None else "left a lost one"] += 1
        if (
            lost is not None and len(self._places) < 2
        ):  # a client that moves to and fro while it leaves may find neither
            self._judge_loss()
        self.ended[self.lease_name] = Ended(self.world.now, self._ttl_micros)
        self._lease = self._turn = None

    # -- turns ------------------------------------------------------------------------------------------------------

    def begin_turns(self, turn: Turn, seconds: float) -> None:
        """The lease renews by itself from now on, as its ticker has it."""
        if self._turn is None:
            self._turn = turn
            self._turn_in(seconds, self.lease_name)

    def end_turns(self) -> None:
        """The ticker was stopped."""
        self._turn = None

    def _turn_in(self, seconds: float, name: str) -> None:
        def due() -> None:
            if self._turn is None or name != self.lease_name:
                return
            is_locked = self._lease is not None and self._lease._lock.locked()  # a publish renews what it has joined
            if self._call is not None or is_locked or self.world.now < self._suspended_until:
                self.world.at(max(self.world.now + 1_000, self._suspended_until), due)  # it waits for the lock
                return
            self._places = set() if self._publishing is None else self._publishing.places.copy()
            self.counts["renewed during a publish"] += self._publishing is not None
            self._run(self._turn(), lambda wait: self._turned(wait, name))

        self.world.at(self.world.now + max(1, int(seconds / self.rate * SECOND)), due)

    def _turned(self, wait: object, name: str) -> None:
        if wait is None:
            self.counts["lost"] += 1
            self._judge_loss()
            return
        assert isinstance(wait, float), "seconds"
        assert self._lease is not None, "it turns"
        failure = self._lease._core._failure
        if failure is not None:
            self._judge_wait(failure)
        else:
            self.counts["renewed"] += 1
            self._excuse = ""
            self._whole_at = self.world.instances[min(self._places)] if len(self._places) == 1 else None
            self._check_stamps()
        self._turn_in(wait, name)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _run(self, coroutine: _Coroutine, then: Callable[[object], object], *, publishes: bool = False) -> None:
        assert self._call is None, "one at a time, as its lock has it"
        self._foreign = ""
        call = _Call(coroutine, then)
        self._call, self._publishing = (self._call, call) if publishes else (call, self._publishing)
        self._resume(call, None)

    def _resume(self, call: _Call, answer: object) -> None:
        self._running = call
        with acting(self):
            try:
                if isinstance(answer, SowError):
                    call.waits_for = call.coroutine.throw(answer)
                else:
                    call.waits_for = call.coroutine.send(answer)
                return
            except StopIteration as stop:
                result = stop.value
            except SowError as error:
                result = None
                self.counts[error.reason] += 1
                if call.then != self._left:
                    call.then = lambda _: None
                if call is self._publishing and self._lost() is not None:
                    self._judge_loss()  # by what its own renewal has found: the next call looks anew
        if call is self._publishing:
            self._publishing = None
        else:
            self._call = None
        call.then(result)

    async def ask(self, serve: Callable[[Instance], object], at_most: float | None = None) -> object:
        """Sends a request to the instance in use, and waits for the answer. Raises SowError."""
        answer, world, call = _Answer(), self.world, self._running
        assert call is not None, "it asks"

        def answered(value: object) -> None:
            if call not in (self._call, self._publishing) or call.waits_for is not answer:
                return
            if call is self._publishing and self._call is not None:
                world.at(world.now + 1_000, lambda: answered(value))  # it waits for the lock, which the renewal has
            else:
                if isinstance(value, Unavailable | error_of_deadline):
                    self._excuse = str(value)
                self._resume(call, value)

        patience = min(at_most or TIMEOUT_SECONDS, TIMEOUT_SECONDS) / self.rate
        at = self._reached()
        if at is None:
            world.at(world.now + int(patience * SECOND), lambda: answered(unreachable()))
            return await answer
        life, name, lease = at.life, at.store.identity.name, self.lease_name

        def arrive() -> None:
            if not at.up or at.life != life:
                world.at(world.now + world.delay(), lambda: answered(unreachable()))
                return
            if name in self.silent:
                return
            self._served_lease = lease
            self._is_awaited = call in (self._call, self._publishing) and call.waits_for is answer
            call.places.add(name)
            value = self._served(at, serve)
            world.at(world.now + world.delay(), lambda: come_back(value))

        def come_back(value: object) -> None:
            if at.life != life:
                answered(unreachable())
            elif name not in self.silent:
                answered(value)

        world.at(world.now + world.delay(), arrive)
        world.at(world.now + int(patience * SECOND), lambda: answered(error_of_deadline("late", reason="DEADLINE")))
        return await answer

    def _reached(self) -> Instance | None:
        """The instance in use, or another one if that refuses the connection."""
        instances = [self.at, *self.world.instances.values()] if self.several else [self.at]
        for instance in instances:
            if instance.up and instance.store.identity.name not in self.refusing:
                self.at = instance
                return instance
        return None

    def _served(self, at: Instance, serve: Callable[[Instance], object]) -> object:
        """The answer of an instance. One that is fragile crashes in front of its commit, or of its answer."""
        crash = self.draw.choice(["before", "after"]) if at.fragile else ""
        if crash == "before":
            at.crash(power=self.draw.random() < 0.5)
        else:
            self._places.add(at.store.identity.name)
            try:
                value = serve(at)
            except StoreError as error:
                value = error_of_reason(error.reason.name, error.message, code=CODES[error.reason].name)
            at.node.wake()
            self.world.soon(at)
            if not crash:
                return value
            at.crash()
        self.world.at(self.world.now + SECOND, at.boot)
        return unreachable()

    # -- what instances do for it -------------------------------------------------------------------------------------

    def publish(self, at: Instance, request: sow_pb2.PublishRequest) -> sow_pb2.PublishResponse:
        """Takes a record."""
        (record,) = request.records
        outcome = commit(at, convert.publish(request, Durability.FSYNC))
        if not outcome.refusals:
            self._note(at, request.topic, [record.key])
        return sow_pb2.PublishResponse(results=convert.results(outcome))

    def touch(self, at: Instance, request: sow_pb2.TouchRequest) -> sow_pb2.TouchResponse:
        """Renews records, none but the lease's."""
        before = rows_of(at, request.topic, request.keys)
        self._look(request.topic, before)
        if self._is_awaited:
            named = zip(request.keys, request.versions, strict=True)
            self._named.update({(request.topic, key): version for key, version in named})
        outcome = commit(at, convert.touch(request, Durability.FSYNC))
        if not outcome.refusals:
            self._judge_change("renewed", at, request.topic, before)
            self._note(at, request.topic, request.keys)
        return sow_pb2.TouchResponse(results=convert.results(outcome))

    def get(self, at: Instance, request: sow_pb2.GetRequest) -> sow_pb2.GetResponse:
        """Reads records."""
        if not self.may_read:
            raise StoreError(Reason.PERMISSION_DENIED, "get")
        before = rows_of(at, request.topic, request.keys)
        self._look(request.topic, before)
        if self._is_awaited:
            self._lags = self._lag(request.topic, before)
        return sow_pb2.GetResponse(
            records=[
                types_pb2.Record(
                    topic=request.topic,
                    key=key,
                    payload=(row.payload or "").encode(),
                    version=row.version,
                    expire_time_micros=row.stamp,
                    origin=row.origin,
                )
                for key, row in before.items()
                if row is not None
            ]
        )

    def delete(self, at: Instance, topic: str, keys: list[str], versions: list[int] | None) -> Deleted:
        """Deletes records, none but the lease's."""
        before = rows_of(at, topic, keys)
        self._look(topic, before)
        request = Delete(topic, keys)
        if versions is not None:
            only_versions(request, versions)
        outcome = commit(at, request)
        after = rows_of(at, topic, keys)
        self._judge_change("deleted", at, topic, {key: row for key, row in before.items() if after[key] != row})
        return Deleted(outcome.applied, outcome.applied, outcome.last_sequence)

    def hear(self, topic: str, key: str, version: int) -> None:
        """An answer tells the lease a version of a record. If the record has not joined yet, this is the first one."""
        assert self._lease is not None, "it listens"
        has_joined = key in self._lease._core.held.get(topic, ())
        self._told[topic, key] = (has_joined and self._told[topic, key]) or version

    def _note(self, at: Instance, topic: str, keys: Iterable[str]) -> None:
        lease = self._served_lease
        for key, row in rows_of(at, topic, keys).items():
            if owner(row) == lease and row is not None:
                self._given.setdefault((lease, topic, key), {}).setdefault(row.version, self.world.now)

    # -- judging ----------------------------------------------------------------------------------------------------

    def _owns(self, lease: str, topic: str, key: str, row: Row | None) -> bool:
        return owner(row) == lease and self._has_given(lease, topic, key, row)

    def _has_given(self, lease: str, topic: str, key: str, row: Row | None) -> bool:
        """Whether a record has a version that a lease has given: the record is the lease's, or another's (rule L21)."""
        return row is not None and row.version in self._given.get((lease, topic, key), ())

    def _look(self, topic: str, before: dict[str, Row | None]) -> None:
        """Finds out whether the lease may believe that it is lost."""
        lease = self._served_lease
        foreign = [
            f"{topic}/{key}: {row}"
            for key, row in before.items()
            if not self._owns(lease, topic, key, row) or self._came_late(lease, topic, key, row)
        ]
        if self._is_awaited:
            self._foreign = min(foreign, default=self._foreign)

    def _came_late(self, lease: str, topic: str, key: str, row: Row | None) -> bool:
        """Whether a version of which the lease was not told has come after the time of the lease: the clock here is
        behind that of the instance that has given it (rule L21)."""
        known = None if self._lease is None else self._lease._core.held.get(topic, {}).get(key)
        if row is None or known is None or row.version <= known.last:
            return False
        given = self._given[lease, topic, key][row.version]
        return (self.world.now - given) * self.rate >= self._ttl_micros * CLOCK_FACTOR

    def _judge_change(self, what: str, at: Instance, topic: str, before: dict[str, Row | None]) -> None:
        lease = self._served_lease
        for key, row in before.items():
            if owner(row) == lease:
                continue
            if self._has_given(lease, topic, key, row):
                self.world.fail(SameVersion())
            else:
                self.world.fail(Wrong(f"{lease} has {what} {topic}/{key} at {at.store.identity.name}: {row}"))

    def _lag(self, topic: str, rows: dict[str, Row | None]) -> str:
        """The reason why the lease has to wait before it renews these records; empty: none, as all of them are at
        versions that it knows, and the renewal has named others."""
        for key, row in rows.items():
            if row is not None and row.version < self._told[topic, key]:
                return f"{topic}/{key} is from before the lease: {row}"
        if all(row is not None and row.version == self._named.get((topic, key)) for key, row in rows.items()):
            return f"the records of {topic} have come between the renewal and the read, or are of another instance"
        return ""

    def _judge_wait(self, failure: SowError) -> None:
        """A lease waits only where an instance lags so far that it has a record from before the lease (rule L21)."""
        if failure.reason != "BEHIND":
            return  # the event that has caused it is noted
        if not self._lags:
            self.world.fail(Wrong(f"{self.lease_name} waits without a cause: {failure}"))
        self._excuse = self._lags
        self.counts["waited"] += 1

    def _judge_loss(self) -> None:
        """A lease is lost because a record is not its own, or because something kept it from renewing."""
        assert self._lease is not None, "it was lost"
        judged, self._judged = self._judged, True
        if judged or not self.may_read:
            return
        if not self._foreign and not (self._excuse and self.seconds() >= self._lease._core._until):
            self.world.fail(Wrong(f"{self.lease_name} was lost without a cause: {self._lost()}"))

    def _check_stamps(self) -> None:
        """All records of a lease end in one instant (rule L21)."""
        assert self._lease is not None, "it has renewed"
        core = self._lease._core
        for topic, held in core.held.items():
            if self._whole_at is None:
                return
            for key, row in rows_of(self._whole_at, topic, held).items():
                is_own = self._owns(self.lease_name, topic, key, row)
                if is_own and row is not None and row.version == held[key].version:
                    if row.stamp == core._expire_micros:
                        continue
                    self.world.fail(Wrong(f"{self.lease_name}: {topic}/{key} ends at {row.stamp}, others do not"))

    def check(self) -> None:
        """A holder does not rely on its records longer than their instance keeps them (rule L21)."""
        if self._lease is None or self._whole_at is None or self._lost() is not None:
            return
        core = self._lease._core
        if core.held and core._expire_micros and self._whole_at.store.now_micros() >= core._expire_micros:
            self.world.fail(Wrong(f"{self.lease_name} relies on records that have ended: {core.held.keys()}"))


error_of_deadline: Final = type(error_of_reason("DEADLINE_EXCEEDED", "", code="DEADLINE_EXCEEDED"))


@dataclass(eq=False)
class _Call:
    """A coroutine of a lease that waits for an answer."""

    coroutine: _Coroutine
    then: Callable[[object], object]
    waits_for: object = None
    places: set[str] = field(default_factory=set)  # that have served it


def commit(at: Instance, request: Publish | Touch | Delete) -> Outcome:
    """Commits what waits at an instance, and then a request. Raises StoreError."""
    answers: list[Outcome | StoreError] = []
    store = store_of(at)
    store.submit_heard(request, answers.append)
    store.step()
    (answer,) = answers
    if isinstance(answer, StoreError):
        raise answer
    return answer


def rows_of(at: Instance, topic: str, keys: Iterable[str]) -> dict[str, Row | None]:
    """The records of some keys, once everything that waits at an instance is committed."""
    store = store_of(at)
    if store.busy():
        store.step()
    records = store.records(topic)
    return {key: records.get(key) for key in keys}


def owner(row: Row | None) -> str:
    """The name of the lease that has published a record."""
    return "" if row is None or row.payload is None else str(json.loads(row.payload).get("by", ""))


def check_ended(world: World, holders: Iterable[Holder]) -> None:
    """The keys of a lease are alive nowhere once its holder has been away for its lifetime: longer only by the
    difference between the clocks of two instances. Raises Wrong."""
    offsets = [instance.offset for instance in world.instances.values()]
    apart = max(offsets) - min(offsets) + FLIGHT_MICROS
    ended = {name: end for holder in holders for name, end in holder.ended.items()}
    for instance in world.instances.values():
        for topic in TOPICS:
            for key, row in instance.store.records(topic).items():
                end = ended.get(owner(row))
                if end is not None and world.now > end.at + end.ttl_micros + apart:
                    raise Wrong(f"{instance.store.identity.name}: {topic}/{key} of {owner(row)} lives on: {row}, {end}")
