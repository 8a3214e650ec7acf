"""Subscribers that go on at other instances by their bookmarks, in the simulation of replication on the real store.

A resumer keeps a view of the records, as a client does: whatever it is told, and nothing else. When its instance is
gone, or without a cause, it goes on at another one by its last bookmark. Where the bookmark is refused, it takes a
snapshot.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.frames import ChangeFrame, ChangeOp, Frame, Progress, SnapshotBatch, SnapshotEnd
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.request import FROM_NOW, Start, StartKind
from sow_server.subscriptions.subscription import Read, Send, Subscription, reached
from tests.support.simulation.replica_rocks import RocksStore
from tests.support.simulation.replica_rows import SECOND
from tests.support.simulation.replica_world import Instance, World
from tests.support.stores.subscribers import request

NEW_SNAPSHOT: Final = frozenset(
    {Reason.BOOKMARK_OTHER_EPOCH, Reason.BOOKMARK_TOO_OLD, Reason.BOOKMARK_IN_FUTURE, Reason.RESYNC_REQUIRED}
)


@dataclass(frozen=True)
class Kind:
    """The messages that a resumer asks for, and the records that it wants."""

    filter: str = ""
    wants: Callable[[dict[str, object]], bool] = lambda document: True
    oof: bool = False
    changes: bool = False
    delta: bool = False
    conflation: int = 0


def _is_p(document: dict[str, object]) -> bool:
    return str(document.get("p", "")).startswith("p")


KINDS: Final = (
    Kind(oof=True),
    Kind(changes=True),
    Kind("/p BEGINS WITH 'p'", _is_p, oof=True),
    Kind("/p BEGINS WITH 'p'", _is_p, changes=True),
    Kind("/p = 'p1' OR /p = 'p2'", lambda document: document.get("p") in ("p1", "p2"), oof=True),
    Kind("/p = 'p1'", lambda document: document.get("p") == "p1", oof=True),
    Kind(oof=True, delta=True),
    Kind("/p BEGINS WITH 'p'", _is_p, oof=True, conflation=SECOND),
)


@dataclass
class Resumer:
    """One subscriber to the topic T."""

    world: World
    kind: Kind
    at: Instance
    draw: random.Random
    moved: Counter[str] = field(default_factory=Counter)
    """How often it went on, or took a snapshot, and why."""

    def __post_init__(self) -> None:
        self.view: dict[str, dict[str, object]] = {}
        self.bookmark = ""
        self.covered = True
        self._marks = ""
        self._subscription: Subscription | None = None
        self._life = -1

    def pump(self) -> None:
        """Takes what there is; goes on elsewhere when its instance is gone, and now and then without a cause."""
        if not self.at.up or self.at.life != self._life:
            self._subscription = None  # the connection is gone
        if self._subscription is None and self.draw.random() < 0.7:
            self._connect()
        if self._subscription is None:
            return
        try:
            self._take(self._subscription)
        except StoreError as error:
            self._subscription.close()
            self._subscription = None
            if error.reason not in NEW_SNAPSHOT:
                raise
            self._forget(error.reason)

    @property
    def idle(self) -> bool:
        """Whether it has no subscription, and must be asked to make one."""
        return self._subscription is None

    @property
    def waits(self) -> bool:
        """Whether changes of its instance are still to come: those of an interval that has not ended (rule S6)."""
        assert self._subscription is not None, "it is not idle"
        return reached(self._subscription) < store_of(self.at)._rig.store.writer.synced_sequence

    def leave(self) -> None:
        """Ends the call, as a client does whose connection breaks."""
        if self._subscription is not None and self.at.up and self.at.life == self._life:
            self._subscription.close()
        self._subscription = None

    def _connect(self) -> None:
        instances = [instance for instance in self.world.instances.values() if instance.up]
        if not instances:
            return
        if not self.at.up or self.draw.random() < 0.6:
            self.at = self.draw.choice(instances)
        self._life = self.at.life
        hub = hub_of(self.at)
        kind = self.kind
        start = Start(StartKind.BOOKMARK, bookmark=self.bookmark) if self.bookmark else FROM_NOW
        try:
            asked = request(
                store_of(self.at)._rig.store,
                topic="T",
                filter=kind.filter,
                sow=not self.bookmark,
                oof=kind.oof,
                changes=kind.changes,
                delta=kind.delta,
                conflation=kind.conflation,
                start=start,
            )
            self._subscription = hub.subscribe(asked)
            self.moved["on" if self.bookmark else "snapshot"] += 1
        except StoreError as error:
            if error.reason not in NEW_SNAPSHOT:
                raise
            self._forget(error.reason)

    def _forget(self, reason: Reason) -> None:
        self.moved[reason.name] += 1
        self.bookmark = self._marks = ""
        self.view = {}

    def _take(self, subscription: Subscription) -> None:
        for _ in range(10_000):
            match subscription.step():
                case Send(frame):
                    self._hear(frame)
                case Read(run):
                    subscription.took(run())
                case _:
                    return
        raise AssertionError("the subscription has no end")

    def _hear(self, frame: Frame) -> None:
        instance = store_of(self.at)._rig.store.instance
        match frame:
            case SnapshotBatch(_, keys, payloads, _):
                for key, payload in zip(keys, payloads, strict=True):
                    self.view[key.decode()] = json.loads(payload)
            case SnapshotEnd(sequence, marks) | Progress(sequence, _, marks):
                self._marks = marks
                self.bookmark = instance.bookmark(sequence) + marks
                self.covered = not isinstance(frame, Progress) or frame.covers
            case ChangeFrame():
                self._hear_changes(frame)
                if not frame.more:
                    self.bookmark = instance.bookmark(frame.bookmark) + self._marks

    def _hear_changes(self, frame: ChangeFrame) -> None:
        for row in frame.rows:
            key = row.key.decode()
            if row.op is not ChangeOp.PUT:
                self.view.pop(key, None)
                continue
            document = json.loads(row.payload)
            if row.is_delta:
                assert key in self.view, f"a delta for {key}, which it was never told"
                before = self.view[key]
                gone = {path.removeprefix("/") for path in row.unset_paths}
                document = {name: value for name, value in before.items() if name not in gone} | document
            if self.kind.wants(document):
                self.view[key] = document
            else:
                self.view.pop(key, None)  # a change reader decides by itself

    def trouble(self) -> str:
        """The difference between its view and its instance; empty: none."""
        rows = store_of(self.at).records("T")
        documents = {key: json.loads(row.payload or "{}") for key, row in rows.items()}
        wanted = {key: document for key, document in documents.items() if self.kind.wants(document)}
        if wanted == self.view:
            return ""
        name = self.at.store.identity.name
        missed = {key: value for key, value in wanted.items() if self.view.get(key) != value}
        stale = {key: value for key, value in self.view.items() if key not in wanted}
        return f"a resumer at {name} has missed {missed}, and keeps {stale}; {self.bookmark}; {dict(self.moved)}"


def store_of(instance: Instance) -> RocksStore:
    """The real store of an instance."""
    assert isinstance(instance.store, RocksStore)
    return instance.store


_hubs: dict[str, tuple[object, Hub]] = {}


def hub_of(instance: Instance) -> Hub:
    """The hub of an instance's open store: another one after each crash."""
    name, rig = instance.store.identity.name, store_of(instance)._rig
    found = _hubs.get(name)
    if found is None or found[0] is not rig.store:
        store = rig.store
        hub = Hub(
            store.reads,
            store.writes,
            lambda run: run(),
            elapsed=instance.store.now_micros,
        )
        found = _hubs[name] = (store, hub)
    return found[1]
