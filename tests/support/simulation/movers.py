"""Publishers that go on at other instances, in the simulation of replication on the real store.

A mover sends requests without waiting for the answers, as a client does. When its connection is gone it sends again, in
order, whatever was not answered: perhaps elsewhere, and perhaps while the first instance is telling the others. The
worst moment is forced often: a request is committed, and its answer is lost.

Each record has a key of its own, which nobody else writes. So an answer is judged on the spot: the record must be at
the instance that gave it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Durability,
    OpenedPublisher,
    Outcome,
    Publish,
    PublishChannel,
    PublisherPosition,
)
from tests.support.simulation.replica_rows import SECOND
from tests.support.simulation.replica_world import Instance, World
from tests.support.simulation.resumers import store_of

UNANSWERED_MAX: Final = 3
"""Requests under way."""
PAUSE_MICROS_MAX: Final = 150_000
LOST_ANSWERS: Final = 0.15
REMOVING: Final = 0.3
"""The part of the requests that have removals, too."""


class Lost(AssertionError):
    """A record counts as applied where it is not, or is applied twice where it is known."""


@dataclass(eq=False)
class _Connection:
    """A stream to one life of an instance."""

    at: Instance
    life: int
    channel: PublishChannel = field(default_factory=PublishChannel)
    sent: int = 0
    """How many of the unanswered requests it has got."""
    answered_until: int = 0
    """When its last answer arrives: the next one is not earlier."""

    @property
    def is_up(self) -> bool:
        return self.at.up and self.at.life == self.life


@dataclass(eq=False)
class Mover:
    """One publisher, from `start` on until the world ends."""

    world: World
    name: str
    at: Instance
    draw: random.Random
    topics: tuple[str, ...]
    dropped: set[str]
    """Keys whose records were dropped with their topic, at some instance."""
    counts: Counter[str] = field(default_factory=Counter)
    settled: list[Publish] = field(default_factory=list)
    """Of its epoch, the oldest first."""
    is_ending: bool = False
    """It makes no new requests."""

    def __post_init__(self) -> None:
        self.publisher_id = self.name
        self._removes = random.Random(self.name)  # its own, so that lives without removals stay as they were
        self._programs = 0
        self._requests = 0
        self.position: PublisherPosition | None = None
        self._unanswered: list[Publish] = []
        self._connection: _Connection | None = None
        self._drawn: tuple[str, Instance, int] | None = None
        self._kept_until = 0

    def start(self) -> None:
        """Acts again and again, at random moments."""
        self._act()
        pause = self.draw.choice([1, 1_000, PAUSE_MICROS_MAX])
        self.world.at(self.world.now + self.draw.randint(0, pause), self.start)

    def leave(self, at: Instance | None = None) -> None:
        """Its connection breaks: answers under way are lost, and it goes elsewhere."""
        self._connection = None
        if at is not None or self.world.now >= self._kept_until:
            self.at = at or self.draw.choice(list(self.world.instances.values()))

    def become(self, publisher_id: str, at: Instance, until: int) -> None:
        """Ends, and begins as another program with this id, at an instance where it stays for a time."""
        self.leave(at)
        self.publisher_id = publisher_id
        self.position, self._unanswered, self.settled = None, [], []
        self._kept_until = until

    def be_drawn(self, topic: str, at: Instance, until: int) -> None:
        """Until then it publishes mostly to a topic. Once a record of that is committed elsewhere, it goes to an
        instance that is about to lose the topic, and to get it again."""
        self._drawn = topic, at, until
        if self.at is at:
            self.leave(self.draw.choice([it for it in self.world.instances.values() if it is not at]))

    @property
    def is_quiet(self) -> bool:
        """Whether every request is answered."""
        return not self._unanswered

    # -- asking -----------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        if self._connection is not None and not self._connection.is_up:
            self._connection = None
        if self._connection is None:
            if not self.at.up:
                self.at = self.draw.choice(list(self.world.instances.values()))
            if not self.at.up:
                return
            self._connection = _Connection(self.at, self.at.life)
            if self.position is None:
                self._open(self._connection)
        elif self.position is not None:
            self._send(self._connection, self.position)

    def _open(self, connection: _Connection) -> None:
        def opened(answer: OpenedPublisher | StoreError) -> None:
            if self._connection is connection and isinstance(answer, OpenedPublisher):
                self.position = PublisherPosition(self.publisher_id, answer.epoch, 1, token=answer.token)

        token = self.draw.randint(1, 2**60)
        store_of(connection.at)._rig.store.commits.open_publisher(self.publisher_id, 0, token=token).then(opened)
        self.world.soon(connection.at)

    def _send(self, connection: _Connection, position: PublisherPosition) -> None:
        if connection.sent == len(self._unanswered):
            if self.is_ending or len(self._unanswered) == UNANSWERED_MAX:
                return
            self._unanswered.append(self._next(position))
        request = replace(self._unanswered[connection.sent], channel=connection.channel)
        connection.sent += 1
        store_of(connection.at).submit_heard(request, lambda answer: self._committed(connection, request, answer))
        self.world.soon(connection.at)

    def _next(self, position: PublisherPosition) -> Publish:
        self._requests += 1
        keys = [f"{self.name}.{self._requests}.{number}" for number in range(self.draw.randint(1, 3))]
        payloads = [json.dumps({"p": key}).encode() for key in keys]
        removals: list[bool] | None = None
        if self._removes.random() < REMOVING:
            # A record that is put and removed, and one that never was.
            keys += [gone := f"{self.name}.{self._requests}.gone", gone, f"{self.name}.{self._requests}.none"]
            payloads += [b"{}", b"", b""]
            removals = [False] * (len(keys) - 2) + [True, True]
        topic = self.draw.choice(self.topics)
        if self._is_drawn and self._drawn is not None and self.draw.random() < 0.7:
            topic = self._drawn[0]
        self.position = position._replace(first_sequence=position.first_sequence + len(keys))
        return Publish(topic, payloads, keys, publisher=position, durability=Durability.FSYNC, removals=removals)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _committed(self, connection: _Connection, request: Publish, answer: Outcome | StoreError) -> None:
        if isinstance(answer, Outcome) and not answer.refusals:
            try:
                self.judge(connection.at, request)
            except Lost as lost:
                self.world.fail(lost)  # the store catches the exceptions of those whom it answers
                return
            self.counts["applied"] += answer.applied
            self.counts["known"] += answer.duplicates
        if self._connection is not connection:
            return  # nobody listens any more
        if isinstance(answer, Outcome) and self._is_drawn and self._drawn is not None:
            topic, at, _ = self._drawn
            if request.topic == topic and connection.at is not at:
                self.leave(at)
                return
        if self.draw.random() < LOST_ANSWERS:
            self.leave()
            return
        connection.answered_until = max(connection.answered_until, self.world.now + self.world.delay())

        def arrive() -> None:
            if self._connection is connection:
                self._heard(request, answer)

        self.world.at(connection.answered_until, arrive)

    def _heard(self, request: Publish, answer: Outcome | StoreError) -> None:
        assert self._connection is not None, "it listens"
        if isinstance(answer, StoreError) or answer.refusals:
            reason = answer.reason if isinstance(answer, StoreError) else answer.refusals[0].reason
            self.counts[reason.name] += 1
            self._connection = None  # the stream ends
            if reason is Reason.PUBLISHER_FENCED:
                self._programs += 1
                self.become(f"{self.name}.{self._programs}", self.at, 0)
            elif not self._is_drawn and self.draw.random() < 0.5:
                self.leave()
            return
        first = self._unanswered.pop(0)
        assert first.publisher == request.publisher, "answers come in order"
        self._connection.sent -= 1
        self.settled.append(request)

    @property
    def _is_drawn(self) -> bool:
        return self._drawn is not None and self.world.now < self._drawn[2]

    # -- judging ----------------------------------------------------------------------------------------------------

    def judge(self, at: Instance, request: Publish) -> None:
        """All records of an answered request are there that it has not removed. Raises Lost."""
        assert request.keys is not None, "all have one"
        there = set(keys_of(at, request.topic, request.keys))
        missing = set(_kept(request)) - there - self.dropped
        if missing:
            raise Lost(f"{self.name}: {missing} of {request.topic} count as applied at {at.store.identity.name}")

    def check_known(self, at: Instance, request: Publish) -> None:
        """A retry is a duplicate everywhere, unless another program has taken the id over: who fences it passes on
        nothing of it (rule F13). Raises Lost."""
        if self._is_fenced(request):
            return
        answers: list[Outcome | StoreError] = []
        store_of(at).submit_heard(replace(request, channel=None), answers.append)
        at.store.step()
        (answer,) = answers
        if isinstance(answer, Outcome) and answer.applied:
            raise Lost(f"{self.name}: {request.keys} was applied again at {at.store.identity.name}")

    def _is_fenced(self, request: Publish) -> bool:
        """True if an instance knows of a later epoch, or of an equal one that wins."""
        position = request.publisher
        assert position is not None, "all requests of a mover have one"
        known = [
            store_of(instance)._rig.store.writer.publishers.of_all_topics(position.publisher_id)
            for instance in self.world.instances.values()
        ]
        return max([one.rank for one in known]) > (position.epoch, position.token)


def _kept(request: Publish) -> list[str]:
    """The keys that have a record after a request."""
    assert request.keys is not None, "all have one"
    removals = request.removals or [False] * len(request.keys)
    gone = {key for key, removes in zip(request.keys, removals, strict=True) if removes}
    return [key for key in request.keys if key not in gone]


def keys_of(at: Instance, topic: str, keys: Iterable[str]) -> list[str]:
    """The keys that have a record at an instance."""
    rig = store_of(at)._rig
    return [key for key in keys if topic in rig.store.topics.by_name and rig.get(topic, key) is not None]


def divide(world: World, draw: random.Random, movers: list[Mover]) -> None:
    """An instance is alone for a moment, and meanwhile two programs begin with one id: one there, one elsewhere. Both
    get the same epoch."""
    alone, other = draw.sample(list(world.instances.values()), 2)
    if alone.up and other.up:
        apart = draw.choice([SECOND // 10, SECOND // 2, SECOND])
        set_apart(world, alone, apart)
        until = world.now + apart + SECOND // 4
        movers[0].become(f"both.{world.now}", alone, until)
        movers[1].become(f"both.{world.now}", other, until)


def set_apart(world: World, alone: Instance, micros: int) -> None:
    """Cuts an instance off from all others for a time."""
    name = alone.store.identity.name
    pairs = {(name, other) for other in world.instances} | {(other, name) for other in world.instances}
    for pair in sorted(pairs):
        world.cut(*pair)

    def join() -> None:
        world.cuts.difference_update(pairs)
        world.notice_cuts()

    world.at(world.now + micros, join)
