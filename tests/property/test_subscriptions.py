"""Subscribers against an oracle: random changes, filters, options, positions, slow readers, crashes, administration.

The oracle hears of every change as it is committed, keeps the records itself and evaluates filters with the naive
interpreter. Bounds that are thousands in service are a handful here, so that slices end half-way, queues overflow and
journal readers need many steps all the time. After every step the changes of each subscriber up to its bookmark must
match its request: ordered, unique, complete, filter-exact; and at every quiet moment the state that it has built from
snapshot and messages alone must be what a query shows.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.writer import Writer
from sow_server.engine.disk.layout import DELETE, EXPIRE
from sow_server.engine.journal.builder import ChunkBuilder
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    Delete,
    Durability,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    TopicSettings,
    Touch,
)
from sow_server.filters import Meta, parse
from sow_server.subscriptions import dispatch, groups, replay, snapshot
from sow_server.subscriptions.frames import (
    ChangeFrame,
    ChangeOp,
    ChangeReason,
    Frame,
    Progress,
    Row,
    SnapshotBatch,
    SnapshotBegin,
    SnapshotEnd,
)
from sow_server.subscriptions.request import FROM_NOW, Request, Start, StartKind
from sow_server.subscriptions.subscription import Read, Send, Subscription
from tests.support.examples import examples
from tests.support.naive_filter import NaiveFilter
from tests.support.stores import MINUTE, SECOND, FakeTime, Rig
from tests.support.subscribers import EARLIEST, Subscribers, request

OPTIONS = StoreOptions(
    head_cache_records=4, writer=WriterOptions(commit_records_max=4, sweep_entries_max=3, sequence_reserve=10)
)
KEYED = TopicSettings(key=("/k",), expiration=Expiration.ENABLED, index=("/n",))
GIVEN = TopicSettings(expiration=Expiration.ENABLED)
TOPICS = {"keyed": KEYED, "given": GIVEN, "quiet": GIVEN._replace(journal=False)}
KEYS = ["a", "b", "c"]
FILTERS = [
    "",
    "/n > 2",
    "/n = 1",
    "/n IN (1, 2, 3)",
    "/s = 'x' AND /n < 4",
    "/s = 'x' OR /s = 'y'",
    "/m IS NULL",
    "/m/deep = 1",
    "@key = 'a'",
    "/k = 'b'",
    "NOT /n = 2",
    "/n > 100",
    "@expire_time IS NOT NULL",
]
REFUSALS = (
    Reason.TOPIC_NOT_FOUND,
    Reason.PATTERN_MATCHES_NOTHING,
    Reason.NO_JOURNAL,
    Reason.BOOKMARK_TOO_OLD,
)
PATTERNS = ["keyed|given", "given|new.*", ".*", "quiet|keyed"]

documents = st.fixed_dictionaries(
    {"n": st.integers(0, 4)},
    optional={
        "s": st.sampled_from(["x", "y"]),
        "m": st.one_of(st.none(), st.fixed_dictionaries({"deep": st.integers(0, 1)})),
    },
)
spans = st.sampled_from([1, 1000, SECOND, 5 * SECOND, MINUTE])
lifetimes = st.one_of(
    st.just(ABSENT),
    st.just(ABSENT),
    spans.map(lambda micros: Lifetime(LifetimeKind.TTL, micros)),
    st.just(Lifetime(LifetimeKind.TTL, 0)),
)
topics = st.sampled_from(["keyed", "keyed", "given", "given", "quiet", "new1", "new2"])
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)


class Publishing(NamedTuple):
    topic: str
    records: list[tuple[str, dict[str, object]]]
    lifetime: Lifetime
    atomic: bool
    buffered: bool


class Touching(NamedTuple):
    topic: str
    keys: list[str]
    lifetime: Lifetime


class Deleting(NamedTuple):
    topic: str
    keys: list[str]


class Ticking(NamedTuple):
    micros: int


class Reading(NamedTuple):
    """Subscribers take at most so many frames; the slow ones only when all of them do."""

    frames: int
    slow_too: bool


class Rescuing(NamedTuple):
    """A record is touched just before it is due, and time goes on before anybody hears of it."""

    topic: str
    key: str
    document: dict[str, object]


class Flashing(NamedTuple):
    """A record is there for no time at all, as conflating subscribers see it."""

    topic: str
    key: str
    document: dict[str, object]


class Other(enum.Enum):
    LOOP_TURNS = enum.auto()
    EVERYTHING_IS_DISPATCHED = enum.auto()
    SWEEP = enum.auto()


Operation = Publishing | Touching | Deleting | Rescuing | Flashing | Ticking | Reading | Other
publishes = st.builds(
    Publishing,
    topics,
    st.lists(st.tuples(st.sampled_from(KEYS), documents), min_size=1, max_size=6),
    lifetimes,
    st.sampled_from([False, False, True]),
    st.booleans(),
)
touches = st.builds(Touching, topics, some_keys, lifetimes)
deletes = st.builds(Deleting, topics, some_keys)
rescues = st.builds(Rescuing, topics, st.sampled_from(KEYS), documents)
flashes = st.builds(Flashing, topics, st.sampled_from(KEYS), documents)
others = st.one_of(
    spans.map(Ticking), st.builds(Reading, st.sampled_from([1, 2, 10_000]), st.booleans()), st.sampled_from(list(Other))
)
asks = st.fixed_dictionaries(
    {
        "where": st.sampled_from([*TOPICS, *TOPICS, *PATTERNS, "new1"]),
        "text": st.sampled_from(FILTERS),
        "kind": st.sampled_from(["plain", "oof", "oof", "changes", "delta", "delta oof"]),
        "empty_deltas": st.booleans(),
        "begin": st.sampled_from(["now", "sow", "sow", "sow", "earliest", "time"]),
        "batch_size": st.sampled_from([1, 2, 1000]),
        "conflation": st.sampled_from([0, 0, SECOND]),
        "slow": st.booleans(),
    }
)


def _directory() -> Path:
    """A new directory, in memory where there is such a place: most of the time here goes into opening databases."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))


# --- the oracle ------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A record as the oracle knows it."""

    payload: bytes
    version: int
    publish_time: int
    expire_time: int


class Happened(NamedTuple):
    """One change, with the record that was there before (None: there was no live one)."""

    topic_id: int
    topic: str
    sequence: int
    kind: int
    key: bytes
    record: Known
    """The new record, or the one that went."""
    before: Known | None
    before_sequence: int
    atomic: bool
    commit_time: int


class Oracle:
    """Everything that has ever been committed."""

    def __init__(self) -> None:
        self.history: list[Happened] = []
        self.at: dict[int, Happened] = {}
        self.records: dict[tuple[int, bytes], tuple[Known, int]] = {}

    def committed(self, chunks: list[ChunkBuilder], commit_time: int) -> None:
        for chunk in chunks:
            topic = chunk.topic
            columns = zip(
                chunk.change,
                chunk.keys,
                chunk.payloads,
                chunk.version,
                chunk.publish_time,
                chunk.expire_time,
                strict=True,
            )
            for sequence, (kind, key, payload, version, publish, expire) in enumerate(columns, chunk.first_sequence):
                before, before_sequence = self.records.pop((topic.id, key), (None, 0))
                if kind in (DELETE, EXPIRE):
                    assert before is not None
                    assert before.payload == payload
                    record = before
                else:
                    record = Known(payload, version, publish, expire)
                    self.records[topic.id, key] = record, sequence
                happened = self.at[sequence] = Happened(
                    topic.id,
                    topic.name,
                    sequence,
                    kind,
                    key,
                    record,
                    before,
                    before_sequence,
                    chunk.atomic,
                    commit_time,
                )
                self.history.append(happened)


def matches(text: str, topic: str, key: bytes, record: Known) -> bool:
    """Whether a record matches a filter, by the naive interpreter."""
    if not text:
        return True
    expire_time = None if record.expire_time == NEVER else record.expire_time
    meta = Meta(key.decode(), record.version, record.publish_time, expire_time, topic, 0)
    key_paths: list[tuple[str, ...]] = [("k",)] if topic == "keyed" else []
    return NaiveFilter(json.loads(record.payload), meta, key_paths).matches(parse(text))


# --- a subscriber ----------------------------------------------------------------------------------------------------


Documents = dict[tuple[str, bytes], "dict[str, object] | None"]
"""The records that a subscriber has; None: it cannot know the whole of it, as it came in as a delta."""


@dataclass
class Client:
    """A subscriber that keeps its own state, as a careful user would, and what it was sent, for the check."""

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
    """Where this connection began: what it gets comes after."""
    received: list[tuple[str, Row, bool]] = field(default_factory=list)
    """What came in this connection: topic, row, whether it was of an atomic request."""
    together: list[ChangeFrame] = field(default_factory=list)
    """Frames whose rest has not come yet."""
    greeted: bool = False
    slow: bool = False
    since: int = 0
    """When this connection began: what was due by then it has not been given."""

    @property
    def subscription(self) -> Subscription:
        assert self.connection is not None, "it is connected"
        return self.connection


rare = precondition(lambda self: self.steps % 3 == 0)
"""For rules that must not crowd out traffic: hypothesis chooses among rules evenly."""


class SubscriptionMachine(RuleBasedStateMachine):
    """Drives a store, its subscribers and the oracle side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle()
        self.patches = contextlib.ExitStack()
        for patch in (
            mock.patch.object(dispatch, "SLICE_CHANGES", 3),
            mock.patch.object(dispatch, "BLOCK_CHANGES", 2),
            mock.patch.object(replay, "READ_CHANGES", 3),
            mock.patch.object(replay, "READ_COMMITS", 2),
            mock.patch.object(snapshot, "READ_RECORDS", 2),
            mock.patch.object(snapshot, "FILL_RECORDS_MIN", 1),
        ):
            self.patches.enter_context(patch)
        self.patches.enter_context(mock.patch.object(Writer, "_take_over", self._observed_take_over()))
        self.directory = _directory()
        self.time = FakeTime()
        self.rig = Rig(self.directory, options=OPTIONS, time=self.time)
        self.clients: list[Client] = []
        self.gone: list[Client] = []
        self.names = 0
        self.steps = 0
        self.deleted: set[int] = set()
        self.deleted_at: dict[str, int] = {}
        """Who follows several topics may hear, late, of changes up to here of a topic that is gone; he is not told that
        it is gone, so what he has of it does not count."""
        self.dropping = False

    def _observed_take_over(self) -> Callable[[Writer, Draft], None]:
        original = Writer._take_over

        def take_over(writer: Writer, draft: Draft) -> None:
            original(writer, draft)
            self.oracle.committed(draft.journal.chunks, draft.now)

        return take_over

    def teardown(self) -> None:
        try:
            self.quiet()
            self.rig.close()
        finally:
            self.patches.close()
            shutil.rmtree(self.directory)

    @initialize(
        queue=st.sampled_from([600, 1500, 10**6]),
        effort=st.sampled_from([None, None, 0, 4_000, 10**7]),
        first=st.lists(asks, min_size=1, max_size=4),
    )
    def begin(self, queue: int, effort: int | None, first: list[dict[str, object]]) -> None:
        """`effort`: what a filter may take for a change on the event loop; then every change is looked at closely, and
        slices end in its midst. None: as in service, where all of this is little work."""
        self.queue_bytes_max = queue
        if effort is not None:
            self.patches.enter_context(mock.patch.object(groups, "EFFORT_MAX", -(10**9)))
            self.patches.enter_context(mock.patch.object(dispatch, "EFFORT_MAX", effort))
            self.patches.enter_context(mock.patch.object(dispatch, "LOOK_NANOS", 1))
        for name, settings_ in TOPICS.items():
            self.rig.create_topic(name, settings_)
        # The oracle has to hear of the topic without a journal from its first change on.
        self.rig.topic("quiet").followers += 1
        self._open_hub()
        for ask in first:
            self._subscribe(**ask)  # type: ignore[arg-type]  # by their names

    def _open_hub(self) -> None:
        looks = itertools.count()
        ticks = lambda: next(looks) * dispatch.SLICE_SECONDS / 3  # noqa: E731  # a slice ends at the third look
        self.subscribers = Subscribers(self.rig, ticks=ticks, queue_bytes_max=self.queue_bytes_max)
        self._watch_quiet()

    def _watch_quiet(self) -> None:
        """Somebody follows every topic without a journal at any time, so that the oracle hears of its changes."""
        self.watcher = self.subscribers.hub.subscribe(
            request(self.rig.store, pattern=".*", changes=True, progress=SECOND)
        )

    # -- changes ----------------------------------------------------------------------------------------------------

    @rule(
        traffic=st.lists(
            st.one_of(publishes, publishes, publishes, touches, deletes, rescues, flashes, others),
            min_size=3,
            max_size=12,
        )
    )
    def traffic_passes(self, traffic: list[Operation]) -> None:
        """Changes, and what goes on in between."""
        self._pass(traffic)

    def _pass(self, traffic: list[Operation]) -> None:
        for operation in traffic:
            match operation:
                case Publishing():
                    self._publish(operation)
                case Touching(topic, keys, lifetime):
                    self._run(Touch(self._existing(topic), keys, lifetime))
                case Deleting(topic, keys):
                    self._run(Delete(self._existing(topic), keys))
                case Rescuing(topic, key, document):
                    self._publish(
                        Publishing(topic, [(key, document)], Lifetime(LifetimeKind.TTL, SECOND), False, False)
                    )
                    self._run(Touch(self._existing(topic), [key], Lifetime(LifetimeKind.TTL, MINUTE)))
                    self.time.tick(SECOND)
                case Flashing(topic, key, document):
                    self._run(Delete(self._existing(topic), [key]))
                    self._publish(Publishing(topic, [(key, document)], ABSENT, False, False))
                    self._run(Delete(self._existing(topic), [key]))
                case Ticking(micros):
                    self.time.tick(micros)
                case Reading(frames, slow_too):
                    for client in list(self.clients):
                        if slow_too or not client.slow:
                            self._pump(client, frames)
                case Other.LOOP_TURNS:
                    self.subscribers.loop.turn()
                case Other.EVERYTHING_IS_DISPATCHED:
                    self.subscribers.settle()
                case Other.SWEEP:
                    self.rig.store.sweep()

    def _publish(self, publishing: Publishing) -> None:
        topic = self._existing(publishing.topic)
        keyed = bool(self.rig.topic(topic).settings.key)
        records = publishing.records
        self._run(
            Publish(
                topic,
                [json.dumps({"k": key, **document} if keyed else document).encode() for key, document in records],
                None if keyed else [key for key, _ in records],
                lifetime=publishing.lifetime,
                atomic=publishing.atomic,
                durability=Durability.BUFFERED if publishing.buffered else Durability.FSYNC,
            )
        )

    def _run(self, change: Publish | Touch | Delete) -> None:
        self.rig.run(change)
        self.steps += 1

    def _existing(self, topic: str) -> str:
        return topic if topic in self.rig.store.topics.by_name else "given"

    @rare
    @rule(minutes=st.sampled_from([1, 11]))
    def the_journal_is_pruned(self, minutes: int) -> None:
        self.time.tick(minutes * MINUTE)
        self.rig.prune()

    @rare
    @rule(traffic=st.lists(st.one_of(publishes, touches, deletes), min_size=1, max_size=4))
    def the_journal_is_pruned_while_everybody_is_away(self, traffic: list[Operation]) -> None:
        """Of what comes then, the journal does not know what was before (J1)."""
        self.quiet()
        clients, self.clients = self.clients, []
        for client in clients:
            client.subscription.close()
        self.time.tick(11 * MINUTE)
        self.rig.prune()
        self._pass(traffic)
        for client in clients:
            self._resume(client, len(client.history) - 1)

    # -- topics -----------------------------------------------------------------------------------------------------

    @rare
    @rule(name=st.sampled_from(["new1", "new2"]), journal=st.booleans(), publishing=publishes)
    def create_or_delete_topic(self, name: str, journal: bool, publishing: Publishing) -> None:
        topic = self.rig.store.topics.by_name.get(name)
        if topic is None:
            self.rig.create_topic(name, GIVEN._replace(journal=journal))
            self._publish(publishing._replace(topic=name))
        else:
            self.deleted.add(topic.id)
            self.rig.delete_topic(name)
            self.deleted_at[name] = self.rig.store.writer.last_sequence
            for client in self.clients:
                for state in (client.state, *[state for _, state in client.history]):
                    for key in [key for key in state if key[0] == name]:
                        del state[key]

    @rare
    @rule()
    def journal_is_switched(self) -> None:
        settings_ = self.rig.topic("given").settings
        self.rig.alter_topic("given", journal=not settings_.journal)

    # -- the loop and the disk --------------------------------------------------------------------------------------

    @rare
    @rule()
    def dispatching_is_far_behind(self) -> None:
        self.subscribers.sync()
        with mock.patch.object(dispatch, "BACKLOG_BYTES_MAX", -1):
            self.subscribers.loop.turn()

    @rare
    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        """The server goes down and comes back; subscribers resume at their last bookmarks."""
        self.subscribers.sync()
        self.watcher.close()
        if orderly:
            self.subscribers.hub.stop()
            for client in self.clients:
                self._pump(client, 10_000)
            for client in self.clients:
                client.subscription.close()
            self.rig.reopen()
        else:
            self.rig.crash()
        self._open_hub()
        clients, self.clients = self.clients, []
        for client in clients:
            client.history.append((client.bookmark, dict(client.state)))
            self._resume(client, len(client.history) - 1)

    # -- subscribers ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 6)
    @rule(ask=asks)
    def somebody_subscribes(self, ask: dict[str, object]) -> None:
        self._subscribe(**ask)  # type: ignore[arg-type]  # by their names

    def _subscribe(
        self,
        *,
        where: str,
        text: str,
        kind: str,
        empty_deltas: bool,
        begin: str,
        batch_size: int,
        conflation: int,
        slow: bool,
    ) -> None:
        options: dict[str, int] = {"batch_size": batch_size}
        options |= {"oof": "oof" in kind, "delta": "delta" in kind, "changes": kind == "changes"}
        options["empty_deltas"] = empty_deltas and "delta" in kind
        options["conflation"] = conflation if kind in ("plain", "oof") else 0
        self.names += 1
        client = Client(str(self.names), text, options, slow=slow)
        if where in PATTERNS:
            client.pattern = where
        else:
            client.topic = where
        starts = {
            "earliest": EARLIEST,
            "time": Start(StartKind.TIME, time_micros=self.rig.clock.now_micros() - 3 * SECOND),
        }
        self._connect(client, sow=begin == "sow", start=starts.get(begin, FROM_NOW))

    def _connect(self, client: Client, *, sow: bool, start: Start) -> Reason | None:
        """Subscribes; returns why that was refused."""
        try:
            client.connection = self.subscribers.hub.subscribe(self._asked(client, sow=sow, start=start))
        except StoreError as error:
            if error.reason not in REFUSALS:
                raise
            return error.reason
        client.accepted = {}
        if start.kind in (StartKind.EARLIEST, StartKind.TIME):
            known = self.rig.store.topics.by_id.values()
            client.accepted = {topic.id: topic.statistics.floor_sequence for topic in known}
        client.whole = sow or (client.whole and start.kind is StartKind.BOOKMARK)
        if start.kind is not StartKind.BOOKMARK:
            client.state, client.history = {}, []
        client.received, client.together, client.greeted = [], [], False
        client.since = self.rig.clock.now_micros()
        self.clients.append(client)
        return None

    def _asked(self, client: Client, *, sow: bool, start: Start) -> Request:
        return request(
            self.rig.store,
            topic=client.topic,
            pattern=client.pattern,
            filter=client.filter,
            sow=sow,
            start=start,
            progress=SECOND,
            **client.options,  # type: ignore[arg-type]  # by their names
        )

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 9), back=st.integers(0, 3), stays_away=st.booleans())
    def disconnect(self, which: int, back: int, stays_away: bool) -> None:
        """A subscriber goes, and comes back where it was or at an earlier bookmark, now or later."""
        client = self.clients.pop(which % len(self.clients))
        client.subscription.close()
        client.history.append((client.bookmark, dict(client.state)))
        if stays_away:
            self.gone.append(client)
        else:
            self._resume(client, max(0, len(client.history) - 1 - back))

    @precondition(lambda self: self.gone)
    @rule()
    def come_back(self) -> None:
        client = self.gone.pop()
        self._resume(client, len(client.history) - 1)

    def _resume(self, client: Client, at: int) -> None:
        bookmark, state = client.history[at]
        if bookmark == 0:
            return  # it never got as far as a bookmark
        client.bookmark, client.state = bookmark, dict(state)
        del client.history[at:]
        start = Start(StartKind.BOOKMARK, bookmark=self.rig.store.instance.bookmark(bookmark))
        refused = self._connect(client, sow=False, start=start)
        if refused is Reason.BOOKMARK_TOO_OLD:
            topics = [topic for topic in self.rig.store.topics.by_name.values() if self._follows(client, topic.name)]
            assert any(
                self.rig.store.durable_commits.topic_statistics(topic).floor_sequence > bookmark for topic in topics
            )
        if refused is not None:
            self._connect(client, sow=True, start=FROM_NOW)

    def _pump(self, client: Client, frames: int) -> None:
        subscription = client.subscription
        while frames > 0:
            try:
                step = subscription.step()
            except StoreError as error:
                self._ended(client, error)
                return
            if isinstance(step, Send):
                self._hear(client, step.frame)
                frames -= 1
            elif isinstance(step, Read):
                subscription.took(step.run())
            else:
                return

    def _ended(self, client: Client, error: StoreError) -> None:
        client.subscription.close()
        if error.reason is Reason.STOPPING:
            return
        self.clients.remove(client)
        if error.reason is Reason.TOPIC_DELETED:
            assert client.topic
            assert client.topic.startswith("new")
            return
        assert error.reason is Reason.RESYNC_REQUIRED, error
        self._connect(client, sow=True, start=FROM_NOW)

    # -- what they hear ---------------------------------------------------------------------------------------------

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
        """Nobody is handed a record that is due, but for what was due at its own commit (J12, L7). Deltas build on each
        other, so there it is judged when a change is taken up."""
        if client.options["changes"] or client.options["delta"]:
            return
        now = self.rig.clock.now_micros()
        for row in frame.rows:
            if row.op is ChangeOp.PUT and row.expire_time <= now:
                assert row.expire_time <= self.oracle.at[row.sequence].commit_time

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
        """A record that was not sent is not told out of focus (S6)."""
        happened = self.oracle.at[row.sequence]
        fell_due_before = row.reason is ChangeReason.EXPIRED and row.expire_time <= client.since
        unknown_before = 0 < happened.before_sequence <= self._floor(happened)
        if row.sequence > self.deleted_at.get(topic, 0) and not fell_due_before and not unknown_before:
            assert (topic, row.key) in client.state, (client, happened)

    def _matches_row(self, client: Client, topic: str, row: Row) -> bool:
        return matches(
            client.filter, topic, row.key, Known(row.payload, row.version, row.publish_time, row.expire_time)
        )

    # -- what they should have heard --------------------------------------------------------------------------------

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
        """What came in this connection, up to its bookmark, is what was asked for."""
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
        """What may come for a change, and whether it may also be left out; None: nothing may come."""
        options = client.options
        topic, key, record, before = happened.topic, happened.key, happened.record, happened.before
        # Nobody is told what a topic was like that is gone; and a due put is skipped, now or when its turn came (J12).
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

    # -- quiet moments ----------------------------------------------------------------------------------------------

    @rule()
    def quiet(self) -> None:
        """Everything is swept, durable, dispatched and read: each state is what a query shows."""
        if not hasattr(self, "subscribers"):
            return
        position = -1
        for _ in range(100):
            # A second lets conflated rows go, and progress come.
            self.time.tick(SECOND)
            while self.rig.store.sweep():
                pass
            self.subscribers.settle()
            for client in list(self.clients):
                self._pump(client, 10_000)
            position = self.rig.store.writer.last_sequence
            if all(client.bookmark == position for client in self.clients):
                break
        self.each_has_what_it_asked_for()
        assert self.subscribers.hub.dispatcher.position == position
        for client in self.clients:
            assert client.bookmark == position, client
            assert not client.subscription.behind
            if client.whole and (client.options["oof"] or client.options["changes"]):
                assert client.state == self._queried(client), client

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


def test_every_subscriber_gets_exactly_its_changes() -> None:
    run_state_machine_as_test(
        SubscriptionMachine,
        settings=settings(
            max_examples=examples(60), stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )


@pytest.mark.long
def test_every_subscriber_gets_exactly_its_changes_at_length() -> None:
    run_state_machine_as_test(
        SubscriptionMachine,
        settings=settings(
            max_examples=1500, stateful_step_count=60, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
