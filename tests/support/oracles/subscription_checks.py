"""Subscribers side by side with an oracle, which checks that each got the changes that it asked for.

Bounds that are thousands in service are a handful here, so that slices end half-way, queues overflow and journal
readers need many steps all the time. After every step the changes of each subscriber up to its bookmark must match its
request: ordered, unique, complete, filter-exact.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from hypothesis.stateful import RuleBasedStateMachine, invariant

from sow_server.engine.commit.committer import Committer
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import DELETE, EXPIRE, PUT
from sow_server.subscriptions.frames import (
    ChangeFrame,
    ChangeOp,
    Frame,
    Progress,
    Row,
    SnapshotBatch,
    SnapshotBegin,
    SnapshotEnd,
)
from sow_server.subscriptions.journal import replay
from sow_server.subscriptions.live import slices, snapshot
from sow_server.subscriptions.subscription import Subscription
from tests.support.oracles.subscription_oracle import Happened, Known, Oracle, matches
from tests.support.stores.stores import FakeTime, Rig

OPTIONS = StoreOptions(
    head_cache_records=4, writer=WriterOptions(commit_records_max=4, sweep_entries_max=3, sequence_reserve=10)
)

Documents = dict[tuple[str, bytes], "dict[str, object] | None"]
"""The records that a subscriber has; None: it cannot know the whole of it, as it came in as a delta."""


@dataclass
class Client:
    """A subscriber that keeps its own state, as a careful user would; and its frames, for the check."""

    name: str
    filter: str
    options: dict[str, int]
    """By their names; flags are numbers as well."""
    pattern: str = ""
    topic: str = ""
    whole: bool = False
    """Whether its state began with a snapshot."""
    state: Documents = field(default_factory=dict)
    bookmark: int = 0
    history: list[tuple[int, Documents]] = field(default_factory=list)
    """Bookmarks to come back to, with the state there."""
    connection: Subscription | None = None
    accepted: dict[int, int] = field(default_factory=dict)
    """Where the journals of its topics began when it asked for what there is."""
    began: int = 0
    """The position at which this connection began: its changes come after."""
    received: list[tuple[str, Row, bool]] = field(default_factory=list)
    """The rows of this connection: topic, row, whether it was of an atomic request."""
    together: list[ChangeFrame] = field(default_factory=list)
    """Frames whose rest has not come yet."""
    greeted: bool = False
    slow: bool = False
    resumed_upto: int = 0
    """The end of the journal when it came with a bookmark: it may have been sent anything up to there (S6)."""
    since: int = 0
    """The time at which this connection began: it was given nothing that was due by then."""

    @property
    def subscription(self) -> Subscription:
        assert self.connection is not None, "it is connected"
        return self.connection


class SubscriptionChecks(RuleBasedStateMachine):
    """A store, its subscribers and the oracle side by side; each subscriber has the changes that it asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle()
        self.patches = contextlib.ExitStack()
        for patch in (
            mock.patch.object(slices, "SLICE_CHANGES", 3),
            mock.patch.object(slices, "BLOCK_CHANGES", 2),
            mock.patch.object(replay, "READ_CHANGES", 3),
            mock.patch.object(replay, "READ_COMMITS", 2),
            mock.patch.object(snapshot, "READ_RECORDS", 2),
            mock.patch.object(snapshot, "FILL_RECORDS_MIN", 1),
        ):
            self.patches.enter_context(patch)
        self.patches.enter_context(mock.patch.object(Committer, "_take_over", self._observed_take_over()))
        self.directory = Path(tempfile.mkdtemp())
        self.time = FakeTime()
        self.rig = Rig(self.directory, options=OPTIONS, time=self.time)
        self.clients: list[Client] = []
        self.gone: list[Client] = []
        self.names = 0
        self.steps = 0
        self.deleted: set[int] = set()
        self.deleted_at: dict[str, int] = {}
        """A follower of several topics may hear, late, of changes up to here of a topic that is gone. It is not told
        that the topic is gone, so its records of it do not count."""
        self.dropping = False

    def _observed_take_over(self) -> Callable[[Committer, Draft], None]:
        original = Committer._take_over

        def take_over(committer: Committer, draft: Draft) -> None:
            original(committer, draft)
            self.oracle.committed(draft.journal.chunks, draft.now)

        return take_over

    # -- frames -----------------------------------------------------------------------------------------------------

    def _hear(self, client: Client, frame: Frame) -> None:
        durable = self.rig.store.writer.synced_sequence
        match frame:
            case SnapshotBegin(sequence, _):
                assert not client.greeted
                assert sequence <= durable
                client.greeted = True
                client.began = sequence
            case SnapshotBatch(topic, keys, payloads, _):
                for key, payload in zip(keys, payloads, strict=True):
                    assert (topic, key) not in client.state
                    if client.began > self.deleted_at.get(topic, 0):
                        client.state[topic, key] = json.loads(payload)
            case SnapshotEnd(sequence):
                assert sequence == client.began
                self._reached(client, sequence)
            case Progress(sequence, _):
                if not client.greeted:
                    client.greeted = True
                    client.began = sequence
                assert not client.together
                self._reached(client, sequence)
            case ChangeFrame():
                assert client.greeted
                assert frame.rows or client.together or frame.more
                assert [row.sequence for row in frame.rows] == sorted({row.sequence for row in frame.rows})
                assert len(frame.rows) <= client.options["batch_size"]
                assert all(row.sequence <= durable for row in frame.rows)
                self._check_due(client, frame)
                client.together.append(frame)
                if frame.more:
                    return
                for part in client.together:
                    for row in part.rows:
                        client.received.append((part.topic, row, part.atomic))
                        self._apply(client, part.topic, row)
                client.together = []
                self._reached(client, frame.bookmark)

    def _check_due(self, client: Client, frame: ChangeFrame) -> None:
        """Nobody is handed a record that is due, except for one due at its own commit (J12, L7). Deltas build on each
        other, so there it is judged when a change is taken up."""
        if client.options["changes"] or client.options["delta"]:
            return
        now = self.rig.clock.now_micros()
        for row in frame.rows:
            if row.op is ChangeOp.PUT and row.expire_time <= now:
                happened = self.oracle.at[row.sequence]
                assert happened.kind == PUT, "a touch that ends a life is no publish (L7)"
                assert row.expire_time <= happened.commit_time

    def _reached(self, client: Client, bookmark: int) -> None:
        assert bookmark >= client.bookmark or not client.received
        client.bookmark = bookmark
        client.history = [*client.history[-5:], (bookmark, dict(client.state))]

    def _apply(self, client: Client, topic: str, row: Row) -> None:
        state, key = client.state, (topic, row.key)
        if row.op is ChangeOp.OOF and client.options["conflation"] and client.whole:
            self._check_conflated_oof(client, topic, row)
        if row.op is not ChangeOp.PUT or row.sequence <= self.deleted_at.get(topic, 0):
            state.pop(key, None)
            return
        document: dict[str, object] | None = json.loads(row.payload)
        if row.is_delta:
            base = state.get(key)
            if base is None:
                document = None
            else:
                assert document is not None
                document = _merged(base, document)
                for path in row.unset_paths:
                    _remove(document, path[1:].split("/"))
                assert document == json.loads(self.oracle.at[row.sequence].record.payload)
        if client.options["changes"] and not self._matches_row(client, topic, row):
            state.pop(key, None)
        else:
            state[key] = document

    def _check_conflated_oof(self, client: Client, topic: str, row: Row) -> None:
        """A record that was not sent is not told out of focus (S6).

        Its row stands for all changes of the key that were not told since the last one that was. The server cannot know
        whether the client has a record that one of them found there and that fell due before the client came, or was
        put before the floor of the journal. Nor can it know what a client that resumes was sent beyond its bookmark.
        """
        told = (told.sequence for of, told, _ in client.received[:-1] if (of, told.key) == (topic, row.key))
        after = max(told, default=client.began)
        since_then = [
            happened
            for happened in self.oracle.history
            if after < happened.sequence <= row.sequence and (happened.topic, happened.key) == (topic, row.key)
        ]
        fell_due_before = any(
            happened.before is not None and happened.before.expire_time <= client.since for happened in since_then
        )
        unknown_before = any(0 < happened.before_sequence <= self._floor(happened) for happened in since_then)
        resumed = any(happened.sequence <= client.resumed_upto for happened in since_then)
        if row.sequence > self.deleted_at.get(topic, 0) and not (fell_due_before or unknown_before or resumed):
            assert (topic, row.key) in client.state, (client, since_then)

    def _matches_row(self, client: Client, topic: str, row: Row) -> bool:
        return matches(
            client.filter, topic, row.key, Known(row.payload, row.version, row.publish_time, row.expire_time)
        )

    # -- expected frames --------------------------------------------------------------------------------------------

    def _follows(self, client: Client, topic: str) -> bool:
        if client.topic:
            return topic == client.topic
        return {
            "keyed|given": topic in ("keyed", "given"),
            "given|new.*": topic == "given" or topic.startswith("new"),
            ".*": True,
            "quiet|keyed": topic in ("quiet", "keyed"),
        }[client.pattern]

    @invariant()
    def each_has_what_it_asked_for(self) -> None:
        if not hasattr(self, "subscribers"):
            return
        for client in self.clients:
            if client.greeted and not client.options["conflation"]:
                self._check(client)

    def _check(self, client: Client) -> None:
        """The rows of this connection, up to its bookmark, are those that were asked for."""
        now = self.rig.clock.now_micros()
        received = list(client.received)
        for happened in self.oracle.history:
            if not client.began < happened.sequence <= client.bookmark or not self._follows(client, happened.topic):
                continue
            expected = self._expected(client, happened, now)
            came = received and received[0][1].sequence == happened.sequence
            if came:
                topic, row, atomic = received.pop(0)
                assert expected is not None, (client, happened, row)
                ops, _ = expected
                assert row.op in ops, (client, happened, row)
                assert topic == happened.topic
                assert row.key == happened.key
                assert atomic == happened.atomic
                assert (row.version, row.publish_time, row.expire_time) == happened.record[1:]
                if not row.is_delta:
                    assert row.payload == happened.record.payload
            elif expected is not None:
                assert expected[1] or happened.sequence <= client.accepted.get(happened.topic_id, 0), (client, happened)
        assert received == []

    def _expected(self, client: Client, happened: Happened, now: int) -> tuple[tuple[ChangeOp, ...], bool] | None:
        """The row that may come for a change, and whether it may also be left out; None: none may come."""
        options = client.options
        topic, key, record, before = happened.topic, happened.key, happened.record, happened.before
        # Nobody hears of the content of a deleted topic; and a due put is skipped, now or when its turn came (J12).
        lost = happened.topic_id in self.deleted
        due = record.expire_time <= now
        if happened.kind in (DELETE, EXPIRE):
            if not matches(client.filter, topic, key, record):
                return None
            if options["oof"]:
                return (ChangeOp.OOF,), lost
            return (
                ((ChangeOp.DELETE if happened.kind == DELETE else ChangeOp.EXPIRE,), lost)
                if options["changes"]
                else None
            )
        matched = before is not None and matches(client.filter, topic, key, before)
        if matches(client.filter, topic, key, record):
            if options["changes"]:
                return (ChangeOp.PUT,), lost
            unchanged = (
                bool(options["delta"])
                and not options["empty_deltas"]
                and before is not None
                and matched
                and json.loads(before.payload) == json.loads(record.payload)
            )
            # Of an update that changes nothing a delta is sent only where the subscriber may not have the record.
            return (ChangeOp.PUT,), lost or due or unchanged
        if not matched:
            # Below the floor a record counts as having been in focus (J1).
            known = before is None or happened.before_sequence > self._floor(happened)
            if known or not (options["oof"] or options["changes"]):
                return None
            return ((ChangeOp.OOF,) if options["oof"] else (ChangeOp.PUT,)), True
        if options["oof"]:
            return (ChangeOp.OOF,), lost
        return ((ChangeOp.PUT,), lost) if options["changes"] else None

    def _floor(self, happened: Happened) -> int:
        topic = self.rig.store.topics.by_id.get(happened.topic_id)
        return 0 if topic is None else topic.statistics.floor_sequence

    def _queried(self, client: Client) -> Documents:
        return {
            (topic.name, key): json.loads(record.payload)
            for topic in self.rig.store.topics.by_name.values()
            if self._follows(client, topic.name)
            for key, record in self.rig.live(topic.name).items()
            if matches(
                client.filter,
                topic.name,
                key,
                Known(record.payload, record.version, record.publish_time_micros, record.expire_time_micros),
            )
        }


def _merged(base: dict[str, object], delta: dict[str, object]) -> dict[str, object]:
    """A delta message applied as docs/subscriptions.md says: null in it means null."""
    merged = dict(base)
    for name, value in delta.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _remove(document: dict[str, object], steps: list[str]) -> None:
    at: object = document
    for step in steps[:-1]:
        at = at.get(step) if isinstance(at, dict) else None
    if isinstance(at, dict):
        at.pop(steps[-1], None)
