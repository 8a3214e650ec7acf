"""Consumers of a replicated durable that go on at other instances, in the simulation of replication on the real store.

A consumer does what a client does: it acknowledges some of what it was handed, leaves or loses its instance, and goes
on at another one. It keeps what it was handed, as a database would, and forgets nothing when it moves.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sow_server.engine.durables import Durable, RewindTo
from sow_server.engine.values.bookmarks import Position
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services.wire.topic_filters import AskedView, TopicFilters
from sow_server.subscriptions.durable.consumer import Attachment, Consumer
from sow_server.subscriptions.durable.consumer_registry import Consumers
from sow_server.subscriptions.durable.replicated import ReplicatedDurables
from sow_server.subscriptions.frames import ChangeFrame, ChangeOp, DurableBegin, Frame, GapNotice, Progress
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.request import Start, StartKind
from sow_server.subscriptions.subscription import Read, Send
from tests.support.simulation.replica_rocks import RocksStore
from tests.support.simulation.replica_rows import Written
from tests.support.simulation.replica_world import Instance, World
from tests.support.simulation.resumers import Kind
from tests.support.stores.subscribers import request

TOPIC: Final = "T"
NAME: Final = "d"
EARLIEST: Final = Start(StartKind.EARLIEST)
PASSING: Final = frozenset(
    {
        Reason.DURABLE_IN_USE,
        Reason.DURABLE_DETACHED,
        Reason.DURABLE_TAKEN_OVER,
        Reason.DURABLE_NOT_FOUND,
        Reason.TOPIC_NOT_FOUND,
        Reason.RESYNC_REQUIRED,
    }
)
"""Errors after which a consumer tries again, here or elsewhere."""


class ConsumedStore(RocksStore):
    """The real store with its consumers, which tell and hear of replicated durables through its links."""

    consumers: Consumers
    replicated: ReplicatedDurables

    def _open(self) -> None:
        super()._open()
        store, clock = self._rig.store, self._rig.clock
        now = clock.now_micros
        hub = Hub(
            store.reads,
            store.writes,
            lambda run: run(),
            elapsed=now,
        )
        self.consumers = Consumers(
            store.reads,
            store.writes,
            hub,
            lambda text, part: TopicFilters(store.cuts, AskedView(text), 1000, lambda topic: part).view,
            instance=self._name,
        )
        self._durables = self.replicated = ReplicatedDurables(
            self.consumers,
            store.reads,
            store.writes,
            elapsed=now,
        )

    @property
    def epoch(self) -> str:
        return self._rig.store.instance.epoch

    @property
    def row(self) -> Durable | None:
        """The durable of the tests, as it is here."""
        topic = self._rig.store.topics.by_name.get(TOPIC)
        return None if topic is None else self._rig.store.durables.get(topic.id, NAME)


def consumed(instance: Instance) -> ConsumedStore:
    """The store of an instance."""
    assert isinstance(instance.store, ConsumedStore)
    return instance.store


@dataclass
class MovingConsumer:
    """One consumer of the durable `d` of the topic T."""

    world: World
    kind: Kind
    at: Instance
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.seen: set[str] = set()
        """Keys that it was handed since the last rewind."""
        self.view: dict[str, dict[str, object]] = {}
        self._views: dict[str, dict[str, dict[str, object] | None]] = {}
        """By instance and key: the last that this instance has handed over of a key; None: a removal."""
        self.rewound = False
        self._told: dict[str, int] = {}
        self._consumer: Consumer | None = None
        self._asking: tuple[Instance, int] | None = None
        self._life = -1
        self._bookmark = 0
        self._unacknowledged = False

    @property
    def idle(self) -> bool:
        return self._consumer is None

    def pump(self, *, moves: bool = True) -> None:
        """Takes what there is, and acknowledges some of it. `moves`: it may look for another instance."""
        if self._consumer is not None and not (self.at.up and self.at.life == self._life):
            self._consumer = None  # the connection is gone
            self.counts["lost"] += 1
        if self._asking is not None and not (self._asking[0].up and self._asking[0].life == self._asking[1]):
            self._asking = None
        if self._consumer is None:
            if self._asking is None and (not moves or self.draw.random() < 0.7):
                self._attach(moves=moves)
            return
        try:
            self._take(self._consumer)
        except StoreError as error:
            self.counts[error.reason.name] += 1
            self._consumer.close()
            self._consumer = None
            if error.reason not in PASSING:
                raise
            return
        if self._unacknowledged and (not moves or self.draw.random() < 0.5):
            self._acknowledge(self._consumer, everything=not moves or self.draw.random() < 0.7)

    def leave(self) -> None:
        """Ends its call, and forgets to acknowledge."""
        if self._consumer is not None and self.at.up and self.at.life == self._life:
            self._consumer.close()
            self.world.soon(self.at)
        self._consumer = None

    def rewind(self) -> None:
        """Asks for everything anew, at any instance."""
        at = self.draw.choice(list(self.world.instances.values()))
        store = consumed(at)
        if not at.up or store.row is None:
            return
        life = at.life

        def done(result: object) -> None:
            if not isinstance(result, StoreError) and at.life == life:
                self.counts["rewound"] += 1
                self.rewound = True
                self.seen = set()

        topic = store._rig.store.topics.by_name[TOPIC]
        store.consumers.rewind(topic, NAME, RewindTo(), force=True).then(done)
        self.world.soon(at)

    def _attach(self, *, moves: bool) -> None:
        instances = [instance for instance in self.world.instances.values() if instance.up]
        if not instances:
            return
        if not self.at.up or (moves and self.draw.random() < 0.6):
            before = self.at
            self.at = self.draw.choice(instances)
            self.counts["moved"] += before is not self.at
        at, life = self.at, self.at.life
        kind, store = self.kind, consumed(at)

        def done(result: Consumer | StoreError) -> None:
            if self._asking != (at, life) or at.life != life:
                return
            self._asking = None
            if isinstance(result, StoreError):
                self.counts[result.reason.name] += 1
                assert result.reason in PASSING, result
                return
            self._consumer, self._life, self._unacknowledged = result, life, False

        self._asking = at, life
        told = tuple([Position(epoch, sequence) for epoch, sequence in self._told.items()])
        attachment = Attachment(NAME, expected=bool(told), declared={"replicated": True}, told=told[-8:])
        try:
            asked = request(
                store._rig.store, topic=TOPIC, filter=kind.filter, oof=kind.oof, changes=kind.changes, start=EARLIEST
            )
            store.consumers.attach(asked, attachment).then(done)
            self.world.soon(at)
        except StoreError as error:
            self._asking = None
            self.counts[error.reason.name] += 1
            if error.reason not in PASSING:
                raise

    def _acknowledge(self, consumer: Consumer, *, everything: bool) -> None:
        store, position = consumed(self.at), self._bookmark
        if not everything:
            position = self.draw.randint(0, position)
        else:
            self._unacknowledged = False
        topic = consumer.topic
        try:
            store.consumers.acknowledge(topic, NAME, consumer.session, position)
            self.world.soon(self.at)
        except StoreError as error:
            self.counts[error.reason.name] += 1
            if error.reason not in PASSING:
                raise

    def _take(self, consumer: Consumer) -> None:
        for _ in range(10_000):
            match consumer.step():
                case Send(frame):
                    self._hear(frame)
                case Read(run):
                    consumer.took(run())
                    self.world.soon(self.at)
                case _:
                    return
        raise AssertionError("the subscription has no end")

    def _hear(self, frame: Frame) -> None:
        match frame:
            case DurableBegin(sequence):
                self._bookmark = sequence
            case GapNotice():
                self.counts["gaps"] += 1
            case Progress(sequence):
                self._told[consumed(self.at).epoch] = self._bookmark = sequence
                if frame.covers:
                    self._told = {consumed(self.at).epoch: sequence}
            case ChangeFrame():
                self._hear_changes(frame)
                if not frame.more:
                    self._bookmark = frame.bookmark
                self._told.pop(consumed(self.at).epoch, None)
                self._told[consumed(self.at).epoch] = frame.rows[-1].sequence if frame.rows else self._bookmark
                self._unacknowledged = True
            case _:
                pass

    def _hear_changes(self, frame: ChangeFrame) -> None:
        here = self._views.setdefault(self.at.store.identity.name, {})
        for row in frame.rows:
            key = row.key.decode()
            self.counts["handed"] += 1
            here[key] = None
            if row.op is ChangeOp.PUT:
                self.seen.add(key)
                document = json.loads(row.payload)
                if self.kind.wants(document):  # a change reader decides by itself
                    here[key] = document
            self.view.pop(key, None)
            if (found := here[key]) is not None:
                self.view[key] = found

    def trouble(self, unique: set[str]) -> str:
        """The keys that it was never handed, and the difference between its view and its instance; empty: none.
        `unique`: keys of records that are never changed."""
        name = self.at.store.identity.name
        rows = self.at.store.records(TOPIC)
        documents = {key: json.loads(row.payload or "{}") for key, row in rows.items()}
        wanted = {key: document for key, document in documents.items() if self.kind.wants(document)}
        skipped = (unique & wanted.keys()) - self.seen
        if skipped:
            return f"the consumer at {name} has skipped {sorted(skipped)}; {dict(self.counts)}"
        if not (self.kind.oof or self.kind.changes) or wanted == self.view:
            return ""
        # An instance does not repeat what it has handed over, though one that lags has handed over older changes since.
        here = self._views.get(name, {})
        wrong = {key for key in self.view.keys() | wanted.keys() if self.view.get(key) != wanted.get(key)}
        wrong = {key for key in wrong if key not in here or here[key] != wanted.get(key)}
        if not wrong:
            self.counts["older since"] += 1
            return ""
        missed = {key: wanted[key] for key in sorted(wrong & wanted.keys())}
        stale = {key: self.view[key] for key in sorted(wrong - wanted.keys())}
        return f"the consumer at {name} has missed {missed}, and keeps {stale}; {dict(self.counts)}"


def make_store(kind: type[ConsumedStore], folder: Path, stores: list[RocksStore]) -> Callable[..., ConsumedStore]:
    """Makes the stores of a world."""

    def make(
        name: str, now: Callable[[], int], peers: Sequence[str], *, written: Callable[[Written], None]
    ) -> ConsumedStore:
        made = kind(folder, name, now, peers, written=written)
        stores.append(made)
        return made

    return make
