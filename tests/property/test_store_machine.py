"""The store against a model on plain dicts: random requests, clocks, crashes and administration, checked at every step.

Bounds that are thousands in service are a handful here, so that requests are split over commits, sweeps end half-way,
caches overflow and reservations run out all the time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sow_server.engine import background, upkeep
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit import publishers
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.publishers import decode as decode_publisher
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.disk.layout import (
    BOUNDS_KEY,
    HEADER_BYTES,
    PUBLISHER_KEY,
    REARM_KEY,
    changes_head,
    decode_commit,
    unpack_i64,
)
from sow_server.engine.disk.rocks import COMMITS, EXPIRY, INDEXES, JOURNAL, META, RECORDS
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.clock import ClockOptions
from sow_server.engine.values.errors import OpenError, Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    MICROS,
    NEVER,
    PERMANENT,
    TTL_MAX_MICROS,
    Condition,
    ConditionKind,
    Delete,
    Durability,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    OpenedPublisher,
    Outcome,
    Publish,
    PublisherPosition,
    Request,
    Restamp,
    RestampMode,
    TopicSettings,
    Touch,
    TtlMode,
)
from tests.support.examples import examples
from tests.support.indexes import check_indexes
from tests.support.model import Change, Expected, ModelStore, ModelTopic, Wanted
from tests.support.stores import FakeTime, JournalEntry, Rig, journal_rows, replaced

OUTCOMES_KEPT = 6
PAYLOAD_BYTES_MAX = 64
MERGED_BYTES_MAX = 130
OPTIONS = StoreOptions(
    head_cache_records=4,
    writer=WriterOptions(
        commit_records_max=4,
        commit_merged_bytes_max=MERGED_BYTES_MAX,
        limits=RequestLimits(payload_bytes_max=PAYLOAD_BYTES_MAX),
        sweep_entries_max=3,
        version_reserve_micros=40,
        sequence_reserve=10,
    ),
)
TOPICS = {
    "keyed": TopicSettings(key=("/k",), expiration=Expiration.ENABLED, index=("/s",)),
    "dead": TopicSettings(message_type=MessageType.BINARY, expiration=Expiration.ENABLED),
    "given": TopicSettings(
        message_type=MessageType.BINARY, expiration=Expiration.ENABLED, dead_letter="dead", dead_letter_by_key=True
    ),
    "quiet": TopicSettings(expiration=Expiration.ENABLED, journal=False),
}
KEYS = ["a", "b", "c"]
INDEXED = [b'"x"', b"7", b'["x",7.0,"7",true]', b"null", b'{"x":1}']
"""The values of the indexed field of a payload, in turns."""

topics = st.sampled_from(list(TOPICS))
spans = st.sampled_from([1, 7, 1000, MICROS, 5 * MICROS, 20 * MICROS])
lifetimes = st.one_of(
    st.just(ABSENT),
    spans.map(lambda micros: Lifetime(LifetimeKind.TTL, micros)),
    # An expire time is drawn as what it is ahead of now; `_fix` turns it into one.
    st.sampled_from([-5 * MICROS, -1, 0, 1, 5 * MICROS]).map(lambda ahead: Lifetime(LifetimeKind.EXPIRE_TIME, ahead)),
    st.sampled_from(
        [
            PERMANENT,
            Lifetime(LifetimeKind.TTL, 0),
            Lifetime(LifetimeKind.TTL, -1),
            Lifetime(LifetimeKind.TTL, TTL_MAX_MICROS),
            Lifetime(LifetimeKind.TTL, TTL_MAX_MICROS + 1),
        ]
    ),
)
plain_lifetimes = st.one_of(st.just(ABSENT), spans.map(lambda micros: Lifetime(LifetimeKind.TTL, micros)))
conditions = st.one_of(
    st.none(),
    st.sampled_from([Condition(ConditionKind.IF_ABSENT), Condition(ConditionKind.IF_PRESENT)]),
    # The version is drawn as whether it is the right one; `_fix` looks it up.
    st.sampled_from([0, 1]).map(lambda right: Condition(ConditionKind.IF_VERSION, right)),
)


# Stamps are drawn as what they are ahead of now.
wanted = st.one_of(
    st.none(),
    st.builds(Wanted, st.integers(0, 2), st.sampled_from([0, 2 * MICROS, 20 * MICROS, NEVER])),
)
unset_paths = st.sampled_from([(), (), ("/n",), ("/o/x",), ("/o", "/p"), ("/o/z", "/o/y", "/gone"), ("/k",)])


def _directory() -> Path:
    """A new directory, in memory where there is such a place: most of the time here goes into opening databases."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))


rare = precondition(lambda self: self.steps % 5 == 0)
"""For rules that must not crowd out publishing, expiring and sweeping: hypothesis chooses among rules evenly."""


class StoreMachine(RuleBasedStateMachine):
    """Drives a store and the model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            mock.patch.object(background, "REARM_CHUNK", 2),
            mock.patch.object(background, "INDEX_CHUNK", 2),
            mock.patch.object(upkeep, "PRUNE_READS", 1),
            mock.patch.object(publishers, "OUTCOMES_KEPT", OUTCOMES_KEPT),
        ]
        for patch in self.patches:
            patch.start()
        self.directory = _directory()
        self.time = FakeTime()
        self.rig = Rig(self.directory, options=OPTIONS, time=self.time)
        self.model = ModelStore(
            outcomes_kept=OUTCOMES_KEPT, payload_bytes_max=PAYLOAD_BYTES_MAX, merged_bytes_max=MERGED_BYTES_MAX
        )
        self.queued: list[Request] = []
        self.sent: list[Publish] = []
        self.next_sequence: dict[tuple[str, int], int] = {}
        self.last_now = 0
        self.last_journaled = 0
        self.highest_version = 0
        self.pruned: dict[str, dict[bytes, tuple[bytes, int, int, int, int]]] = {}
        """Per topic, what a replay begins with: the state at the floor of its journal."""
        self.payloads = 0
        self.steps = 0

    def teardown(self) -> None:
        try:
            self._flush()
            self.rig.close()
        finally:
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.directory)

    @initialize()
    def create_topics(self) -> None:
        for name in TOPICS:
            self._create(name)

    def _create(self, name: str) -> None:
        self.rig.create_topic(name, TOPICS[name])
        self.model.topics[name] = ModelTopic(TOPICS[name])
        self.pruned[name] = {}

    # -- requests ---------------------------------------------------------------------------------------------------

    @rule(
        topic=topics,
        records=st.lists(st.tuples(st.sampled_from(KEYS), plain_lifetimes), min_size=1, max_size=6),
        lifetime=plain_lifetimes,
        own_lifetimes=st.booleans(),
        hold=st.booleans(),
    )
    def publish_plainly(
        self, topic: str, records: list[tuple[str, Lifetime]], lifetime: Lifetime, own_lifetimes: bool, hold: bool
    ) -> None:
        """As most requests are; the hot path."""
        request = Publish(
            topic,
            [self._payload(topic, key, good=True) for key, _ in records],
            None if TOPICS[topic].key else [key for key, _ in records],
            lifetime=lifetime,
            lifetimes=[own for _, own in records] if own_lifetimes else None,
        )
        self._request(request, hold=hold)

    @rule(
        topic=topics,
        records=st.lists(
            st.tuples(st.sampled_from(KEYS), st.sampled_from([True] * 9 + [False]), lifetimes, conditions),
            min_size=1,
            max_size=7,
        ),
        lifetime=lifetimes,
        own_lifetimes=st.booleans(),
        conditional=st.booleans(),
        ttl_mode=st.sampled_from([TtlMode.RESET, TtlMode.RESET, TtlMode.KEEP]),
        atomic=st.sampled_from([False, False, True]),
        want_results=st.booleans(),
        durability=st.sampled_from(list(Durability)),
        publisher=st.sampled_from([None, None, "p", "q"]),
        epoch_step=st.sampled_from([0, 0, 0, 0, -1, 1]),
        overlap=st.sampled_from([0, 0, 0, 1, 2, 9]),
        unit_step=st.sampled_from([None, 1, 1, 1, 0, -1]),
        unit_done=st.booleans(),
        nothing=st.sampled_from([False, False, True]),
        delta=st.booleans(),
        unset=unset_paths,
        hold=st.booleans(),
    )
    def publish(
        self,
        *,
        topic: str,
        records: list[tuple[str, bool, Lifetime, Condition | None]],
        lifetime: Lifetime,
        own_lifetimes: bool,
        conditional: bool,
        ttl_mode: TtlMode,
        atomic: bool,
        want_results: bool,
        durability: Durability,
        publisher: str | None,
        epoch_step: int,
        overlap: int,
        unit_step: int | None,
        unit_done: bool,
        nothing: bool,
        delta: bool,
        unset: tuple[str, ...],
        hold: bool,
    ) -> None:
        payload = self._delta if delta else self._payload
        request = Publish(
            topic,
            [payload(topic, key, good=good) for key, good, _, _ in records],
            None if TOPICS[topic].key else [key for key, _, _, _ in records],
            lifetime=self._fix(lifetime),
            lifetimes=[self._fix(own) for _, _, own, _ in records] if own_lifetimes else None,
            ttl_mode=ttl_mode,
            conditions=[self._fix_condition(topic, key, own) for key, _, _, own in records] if conditional else None,
            durability=durability,
            atomic=atomic,
            want_results=want_results,
            delta=delta,
            # Without a delta they are refused, so they are rare there.
            unset_paths=unset if delta or self.payloads % 20 == 0 else (),
        )
        if publisher is not None:
            known = self.model.publishers.get(publisher)
            epoch = max(1, (known.epoch if known else 1) + epoch_step)
            following = self.next_sequence.get((publisher, epoch), 1)
            # An atomic request is sent anew or again, never in part.
            first = following if atomic else max(1, following - overlap)
            self.next_sequence[publisher, epoch] = max(following, first + len(records))
            if unit_step is None:
                request.publisher = PublisherPosition(publisher, epoch, first)
            else:
                unit = max(1, (known.unit if known else 0) + unit_step)
                request.publisher = PublisherPosition(publisher, epoch, first, unit, unit_done)
                if unit_done and nothing:
                    request = replace(request, payloads=[], keys=None, lifetimes=None, conditions=None)
            self.sent.append(request)
        self._request(request, hold=hold)

    @rule(publisher=st.sampled_from(["p", "q"]), unit_step=st.sampled_from([None, 1, 0, -1]))
    def open_publisher(self, publisher: str, unit_step: int | None) -> None:
        """Somebody takes a publisher over, perhaps for a unit that is finished (rule P6)."""
        self._flush()
        known = self.model.publishers.get(publisher)
        unit = 0 if unit_step is None else max(0, (known.unit if known else 0) + unit_step)
        answers: list[OpenedPublisher | StoreError] = []
        self.rig.store.commits.open_publisher(publisher, unit, answers.append)
        self.rig.store.writer.step()
        assert answers == [self.model.open_publisher(publisher, unit)]

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 9), hold=st.booleans(), want_results=st.booleans())
    def publish_again(self, which: int, hold: bool, want_results: bool) -> None:
        """A client that has not heard the answer sends the same request again (rule P6)."""
        self._request(replace(self.sent[-1 - which % len(self.sent)], want_results=want_results), hold=hold)

    @rule(
        topic=topics,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        lifetime=lifetimes,
        condition=conditions,
        hold=st.booleans(),
    )
    def touch(self, topic: str, keys: list[str], lifetime: Lifetime, condition: Condition | None, hold: bool) -> None:
        fixed = self._fix_condition(topic, keys[0], condition)
        self._request(Touch(topic, keys, self._fix(lifetime), fixed), hold=hold)

    @rule(
        topic=topics,
        records=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        unset=unset_paths.filter(lambda paths: "/k" not in paths),
        ttl_mode=st.sampled_from(list(TtlMode)),
        hold=st.booleans(),
    )
    def publish_deltas(
        self, topic: str, records: list[str], unset: tuple[str, ...], ttl_mode: TtlMode, hold: bool
    ) -> None:
        """As most of them are: nothing but deltas, some to one record."""
        payloads = [self._delta(topic, key, good=True) for key in records]
        keys = None if TOPICS[topic].key else records
        self._request(Publish(topic, payloads, keys, ttl_mode=ttl_mode, delta=True, unset_paths=unset), hold=hold)

    @rule(topic=topics, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), wanted=wanted, hold=st.booleans())
    def delete(self, topic: str, keys: list[str], wanted: Wanted | None, hold: bool) -> None:
        self._request(Delete(topic, keys, matches=self._fix_wanted(wanted)), hold=hold)

    @rule(
        topic=topics,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        mode=st.sampled_from(list(RestampMode)),
        lifetime=lifetimes,
        wanted=wanted,
        hold=st.booleans(),
    )
    def restamp(
        self, topic: str, keys: list[str], mode: RestampMode, lifetime: Lifetime, wanted: Wanted | None, hold: bool
    ) -> None:
        given = ABSENT if mode is RestampMode.CLEAR else self._fix(lifetime)
        self._request(Restamp(topic, keys, mode, given, matches=self._fix_wanted(wanted)), hold=hold)

    @rule(key=st.sampled_from(KEYS), good=st.sampled_from([True, True, True, False]), hold=st.booleans())
    def delete_by_payload(self, key: str, good: bool, hold: bool) -> None:
        self._request(Delete("keyed", payload=self._payload("keyed", key, good=good)), hold=hold)

    def _request(self, request: Request, *, hold: bool) -> None:
        """Queues a request; unless it is held back for a later one, all that is queued goes to the writer together."""
        self.queued.append(request)
        if not hold:
            self._flush()

    def _flush(self) -> None:
        queued, self.queued = self.queued, []
        if not queued:
            return
        now = self.rig.clock.now_micros()
        expected = [self.model.apply(request, now) for request in queued]
        answers = self.rig.run_together(queued)
        for wanted, answer in zip(expected, answers, strict=True):
            self._check_answer(wanted, answer)

    @staticmethod
    def _check_answer(wanted: Expected, answer: Outcome | StoreError) -> None:
        if isinstance(answer, StoreError):
            assert answer.reason is wanted.refused, answer
        else:
            wanted.check(answer)

    def _payload(self, topic: str, key: str, *, good: bool) -> bytes:
        self.payloads += 1
        if topic == "keyed":
            return b'{"k":"%s","n":%d,"s":%s}' % (key.encode(), self.payloads, self._indexed()) if good else b'{"n":1}'
        if topic == "quiet":
            return b'{"n":%d,"s":%s}' % (self.payloads, self._indexed()) if good else b"{"
        return b"x" * (self.payloads % 5) + b"%d" % self.payloads

    def _delta(self, topic: str, key: str, *, good: bool) -> bytes:
        if topic in ("given", "dead") or not good:
            return self._payload(topic, key, good=good)
        self.payloads += 1
        number = self.payloads
        fields = [
            b'"n":%d' % number,
            b'"o":{"x":%d}' % number,
            b'"o":{"y":%d},"n":null' % number,
            b'"o":null,"p":[%d]' % number,
            b'"o":{"x":null,"z":{"w":null}}',
            b'"s":' + self._indexed(),
        ][number % 6]
        return b'{"k":"%s",%s}' % (key.encode(), fields) if topic == "keyed" else b"{%s}" % fields

    def _indexed(self) -> bytes:
        # Now and then twice the same in a row: an update that leaves its entries.
        return INDEXED[self.payloads * 2 // 3 % len(INDEXED)]

    def _fix(self, lifetime: Lifetime) -> Lifetime:
        if lifetime.kind is LifetimeKind.EXPIRE_TIME:
            return Lifetime(LifetimeKind.EXPIRE_TIME, self.rig.clock.now_micros() + lifetime.micros)
        return lifetime

    def _fix_wanted(self, wanted: Wanted | None) -> Wanted | None:
        if wanted is None or wanted.expires_before == NEVER:
            return wanted
        return replace(wanted, expires_before=self.rig.clock.now_micros() + wanted.expires_before)

    def _fix_condition(self, topic: str, key: str, condition: Condition | None) -> Condition | None:
        if condition is None or condition.kind is not ConditionKind.IF_VERSION:
            return condition
        known = self.model.topics[topic].records.get(key.encode())
        right = condition.version == 1 and known is not None and known.version is not None
        return Condition(ConditionKind.IF_VERSION, known.version if right and known and known.version else 1)

    # -- time -------------------------------------------------------------------------------------------------------

    @rule(micros=spans)
    def time_passes(self, micros: int) -> None:
        self.time.tick(micros)

    @rule(offset=st.sampled_from([-1, 0, 0, 1]))
    def a_deadline_comes(self, offset: int) -> None:
        """Time passes to the next stamp, give or take a microsecond."""
        now = self.rig.clock.now_micros()
        ahead = [
            kept.expire_time_micros - now + offset
            for topic in self.model.topics.values()
            for kept in topic.records.values()
            if 0 < kept.expire_time_micros - now + offset < 3_600 * MICROS
        ]
        if ahead:
            self.time.tick(min(ahead))

    @rare
    @rule(micros=st.sampled_from([-8 * MICROS, -3, 9 * MICROS]))
    def wall_clock_is_set(self, micros: int) -> None:
        """Within bounds: the store's clock is slewed towards it (rule L15)."""
        self.time.step_wall(micros)

    @rare
    @rule()
    def wall_clock_jumps_ahead(self) -> None:
        """Beyond bounds: sweeping stops until an operator agrees, or the clock has come back (rule L15)."""
        self.time.step_wall(ClockOptions().jump_micros + MICROS)

    @precondition(lambda self: self.rig.clock.paused)
    @rule(accepted=st.booleans())
    def jump_ends(self, accepted: bool) -> None:
        if accepted:
            self.rig.clock.accept()
        else:
            self.time.wall_micros = self.rig.clock.now_micros()

    # -- sweeping and pruning ---------------------------------------------------------------------------------------

    @rule()
    def sweep(self) -> None:
        paused = self.rig.clock.paused
        visited = self.rig.store.sweep()
        assert not (paused and visited)
        self._expired_by_sweep()
        now = self.rig.clock.now_micros()
        if not paused:
            assert not any(topic.overdue(now) for topic in self.model.topics.values())

    @precondition(lambda self: not self.rig.clock.paused)
    @rule()
    def sweep_partly(self) -> None:
        before = self.rig.store.writer.expired_total
        visited = self.rig.store.writer.sweep_now(entries_max=1)
        assert visited <= OPTIONS.writer.sweep_entries_max
        # Each may leave a letter, which may meet an overdue record in its place, and be due itself.
        assert self.rig.store.writer.expired_total - before <= 3 * visited
        self._expired_by_sweep()

    def _expired_by_sweep(self) -> None:
        """Tells the model what a sweep has removed, after checking that it was due."""
        now = self.rig.clock.now_micros()
        letters: dict[bytes, bytes] = {}
        for name, topic in self.model.topics.items():
            if name == "dead":
                continue
            stored = self.rig.stored(name)
            gone = [key for key in topic.records if key not in stored]
            overdue = topic.overdue(now)
            assert all(key in overdue for key in gone), "a sweep removes only what is overdue"
            if topic.settings.journal:
                # The journal says in which order.
                new = self.rig.journal(name)[len(topic.journal) :]
                assert sorted(entry.key for entry in new) == sorted(gone)
                gone = [entry.key for entry in new]
            for key in gone:
                if topic.settings.dead_letter:
                    letters[key] = topic.records[key].payload
                topic.remove(key, "expire")
        self._letters_by_sweep(letters, now)

    def _letters_by_sweep(self, letters: dict[bytes, bytes], now: int) -> None:
        """A sweep comes to several topics in any order, so what has become of the dead letters is read in the journal
        of their topic: each has come once, over nothing that is overdue, and else only what was due has changed."""
        dead = self.model.topics["dead"]
        for entry in self.rig.journal("dead")[len(dead.journal) :]:
            if entry.kind == "expire":
                assert entry.key in dead.overdue(now)
                dead.remove(entry.key, "expire")
            else:
                assert entry.kind == "put"
                assert entry.key not in dead.overdue(now)
                assert letters.pop(entry.key) == entry.payload
                self.model.put_letter("dead", entry.key, entry.payload, now)
        assert not letters

    @rare
    @rule(retain_time=st.sampled_from([None, 5 * MICROS, 100 * MICROS]), retain_bytes=st.sampled_from([None, 1, 600]))
    def prune(self, retain_time: int | None, retain_bytes: int | None) -> None:
        for name in TOPICS:
            self._alter(name, retain_time_micros=retain_time, retain_bytes=retain_bytes)
        now = self.rig.clock.now_micros()
        before = {name: (self.rig.journal(name), self._chunks(name)) for name in TOPICS}
        self.rig.prune()
        for name, (entries, chunks) in before.items():
            kept = self._chunks(name)
            assert chunks[len(chunks) - len(kept) :] == kept, "the oldest go first"
            sizes = [size for _, size, _ in chunks]
            removed = len(chunks) - len(kept)
            for index, (_, _, commit_time) in enumerate(chunks):
                too_old = retain_time is not None and commit_time <= now - retain_time
                too_much = retain_bytes is not None and sum(sizes[index:]) > retain_bytes
                if index < removed:
                    assert too_old or too_much
                elif index == removed:
                    assert not too_old
                    assert not too_much
            gone = entries[: len(entries) - len(self.rig.journal(name))]
            self._replay(self.pruned[name], gone)
            del self.model.topics[name].journal[: len(gone)]
            if gone:
                floor = self.rig.store.durable_commits.topic_statistics(self.rig.topic(name)).floor_sequence
                assert floor == gone[-1].sequence
        commits = [decode_commit(*row) for row in self.rig.rows(COMMITS)]
        first_kept = min((chunk[0] for name in TOPICS for chunk in self._chunks(name)), default=None)
        if first_kept is None:
            assert len(commits) <= 1
        else:
            assert not [commit for commit in commits if commit.last_sequence < first_kept]

    def _chunks(self, name: str) -> list[tuple[int, int, int]]:
        """(first sequence, bytes, commit time) of the chunks of a topic's journal."""
        rows = list(journal_rows(self.rig.store, self.rig.topic(name)))
        return [(unpack_i64(key[4:]), len(value), changes_head(value)[1]) for key, value in rows]

    # -- administration ---------------------------------------------------------------------------------------------

    @rare
    @rule(
        topic=topics,
        expiration=st.sampled_from(list(Expiration)),
        default=st.sampled_from([None, None, 0, 3 * MICROS]),
        low=st.sampled_from([None, None, 2 * MICROS]),
        high=st.sampled_from([None, None, 1, 10 * MICROS]),
        interrupted=st.sampled_from([False] * 5 + [True]),
    )
    def alter_topic(
        self,
        topic: str,
        expiration: Expiration,
        default: int | None,
        low: int | None,
        high: int | None,
        interrupted: bool,
    ) -> None:
        self._alter(
            topic,
            interrupted=interrupted,
            expiration=expiration,
            default_ttl_micros=default,
            min_ttl_micros=low,
            max_ttl_micros=high,
        )

    @rare
    @rule(topic=st.sampled_from(["keyed", "given"]))
    def switch_journal(self, topic: str) -> None:
        self._flush()
        # What is overdue goes first, as it would in the change itself, whose journal could not be seen any more.
        self.rig.store.writer.sweep_now()
        self._expired_by_sweep()
        wanted = not self.model.topics[topic].settings.journal
        self._alter(topic, journal=wanted)
        self.model.topics[topic].journal.clear()
        assert self.rig.journal(topic) == []
        self.pruned[topic] = {
            key: (kept.payload, kept.publish_time_micros, kept.expire_time_micros, kept.version, kept.sequence)
            for key, kept in self.rig.stored(topic).items()
        }

    def _alter(self, name: str, *, interrupted: bool = False, **changes: object) -> None:
        """Alters a topic; if `interrupted`, the process is killed before the re-arming that follows is done."""
        self._flush()
        now = self.rig.clock.now_micros()
        topic = self.model.topics[name]
        changed = replaced(topic.settings, changes)
        low, high = changed.min_ttl_micros or 0, changed.max_ttl_micros or TTL_MAX_MICROS
        default = changed.default_ttl_micros
        refused = (
            (default is not None and changed.expiration is not Expiration.ENABLED)
            or low > high
            or (default is not None and not low <= default <= high)
        )  # fmt: skip
        answers: list[object] = []
        self.rig.submit_alter(name, answers.append, changes)
        if interrupted:
            while not answers:  # much that is overdue is swept first, a part in each turn
                self.rig.turn()
        else:
            self.rig.store.writer.step()
        (answer,) = answers
        assert isinstance(answer, StoreError) == refused, answer
        self._expired_by_sweep()
        if isinstance(answer, StoreError):
            assert answer.reason is Reason.INVALID_ARGUMENT
        else:
            if changed.expiration is Expiration.DISABLED:
                assert not topic.overdue(now), "nothing hidden reappears (rule L12)"
            topic.settings = changed
        if interrupted:
            self._restart(self.rig.kill)

    @rare
    @rule(
        topic=st.sampled_from(["keyed", "quiet"]),
        index=st.sampled_from([(), ("/s",), ("/n",), ("/n", "/s")]),
        turns=st.integers(0, 3),
        killed=st.booleans(),
    )
    def alter_indexes(self, topic: str, index: tuple[str, ...], turns: int, killed: bool) -> None:
        """What is left of a build is done between the requests that follow, or by the process that comes next."""
        self._flush()
        answers: list[object] = []
        self.rig.submit_alter(topic, answers.append, {"index": index})
        while not answers:
            self.rig.turn()
        for _ in range(turns):
            if self.rig.store.writer.queue.depth[0]:
                self.rig.turn()
        (answer,) = answers
        assert not isinstance(answer, StoreError), answer
        self._expired_by_sweep()
        self.model.topics[topic].settings = replaced(self.model.topics[topic].settings, {"index": index})
        if killed:
            self._restart(self.rig.kill)

    @rare
    @rule(topic=topics)
    def delete_topic(self, topic: str) -> None:
        self._flush()
        if self.model.topics[topic].settings.dead_letter:
            # What is overdue has its dead letters before, which could not be seen any more.
            self.rig.store.writer.sweep_now()
            self._expired_by_sweep()
        live = len(self.model.topics[topic].live(self.rig.clock.now_micros()))
        assert self.rig.delete_topic(topic) == live
        self._create(topic)

    # -- ends and beginnings ----------------------------------------------------------------------------------------

    @rare
    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        self._restart(self.rig.kill if killed else self.rig.close)

    def _restart(self, end: Callable[[], None]) -> None:
        self._flush()
        # The server's timer does so all the time: across a crash, the clock knows what it has stored, and no more.
        self.rig.store.upkeep.mark_clock()
        for _ in range(self.rig.store.writer.queue.depth[0]):
            self.rig.turn()  # what is queued, and not what follows from it: work in chunks is to be interrupted
        end()
        try:
            self.rig.open()
        except OpenError:
            # The wall clock was set back by more than the store takes (rule L15): an operator says that it is right.
            assert self.time.wall_micros < self.last_now
            self.rig.open(accept_clock=True)
            self.last_now = 0

    # -- what holds at every step -----------------------------------------------------------------------------------

    @invariant()
    def time_does_not_run_backwards(self) -> None:
        self.steps += 1
        now = self.rig.clock.now_micros()
        assert now >= self.last_now
        self.last_now = now

    @invariant()
    def readers_see_the_live_records(self) -> None:
        now = self.rig.clock.now_micros()
        for name, topic in self.model.topics.items():
            live = topic.live(now)
            seen = self.rig.live(name)
            assert list(seen) == sorted(live)
            assert self.rig.live(name, batch=2) == seen
            for key, found in seen.items():
                kept = live[key]
                assert (found.payload, found.publish_time_micros, found.expire_time_micros) == (
                    kept.payload,
                    kept.publish_time_micros,
                    kept.expire_time_micros,
                )
            handle = self.rig.topic(name)
            at, values = self.rig.store.cuts.get(handle, [key.encode() for key in KEYS])
            assert at == now
            assert [value is not None for value in values] == [key.encode() in live for key in KEYS]
            assert self.rig.store.cuts.count(handle) == len(live)
            assert self.rig.store.cuts.overdue(handle) == len(topic.overdue(now))

    @invariant()
    def figures_are_those_of_the_rows(self) -> None:
        for name, topic in self.model.topics.items():
            stored = self.rig.stored(name)
            assert set(stored) == set(topic.records)
            handle = self.rig.topic(name)
            figures = self.rig.store.durable_commits.topic_statistics(handle)
            assert figures.stored_records == len(stored)
            assert figures.stored_bytes == sum(len(key) + len(kept.payload) for key, kept in stored.items())
            chunks = self._chunks(name)
            assert figures.journal_bytes == sum(size for _, size, _ in chunks)
            assert figures.journal_entries == len(topic.journal)
            assert all(first > figures.floor_sequence for first, _, _ in chunks)
            self._check_heads(handle)

    def _check_heads(self, topic: Topic) -> None:
        """builder [3]: a chunk's head counts everything that was ever before it."""
        figures = topic.statistics
        entries, size = figures.trimmed_entries, figures.trimmed_bytes
        for _, value in journal_rows(self.rig.store, topic):
            head = changes_head(value)
            assert (head.entries_before, head.bytes_before) == (entries, size)
            entries, size = entries + head.entries, size + len(value)
        assert (figures.appended_entries, figures.appended_bytes) == (entries, size)

    @invariant()
    def versions_rise_and_are_reserved(self) -> None:
        bounds = dict(self.rig.rows(META, BOUNDS_KEY, BOUNDS_KEY + b"\0"))[BOUNDS_KEY] if self.model.topics else b""
        minted = []
        for name, topic in self.model.topics.items():
            for key, found in self.rig.stored(name).items():
                kept = topic.records[key]
                if kept.version is None:
                    assert found.version > self.highest_version, "a version is issued once (rule K7)"
                    kept.version = found.version
                assert found.version == kept.version
                minted.append((kept.order, found.version, found.sequence))
        minted.sort()
        assert [version for _, version, _ in minted] == sorted({version for _, version, _ in minted})
        assert [sequence for _, _, sequence in minted] == sorted({sequence for _, _, sequence in minted})
        for _, version, sequence in minted:
            assert version <= unpack_i64(bounds[:8])
            assert sequence <= unpack_i64(bounds[8:])
            self.highest_version = max(self.highest_version, version)

    @invariant()
    def journal_tells_the_whole_story(self) -> None:
        told: list[JournalEntry] = []
        for name, topic in self.model.topics.items():
            entries = self.rig.journal(name)
            assert [
                Change(entry.kind, entry.key, entry.payload, entry.publish_time_micros, entry.expire_time_micros)
                for entry in entries
            ] == topic.journal
            told += entries
            if topic.settings.journal:
                state = dict(self.pruned[name])
                self._replay(state, entries)
                assert state == {
                    key: (kept.payload, kept.publish_time_micros, kept.expire_time_micros, kept.version, kept.sequence)
                    for key, kept in self.rig.stored(name).items()
                }
        told.sort()
        sequences = [entry.sequence for entry in told]
        assert len(set(sequences)) == len(sequences), "one total order (rule P7)"
        versions = [entry.version for entry in told if entry.kind != "expire"]
        assert versions == sorted(set(versions)), "versions rise with the sequence (rule K7)"
        new = [sequence for sequence in sequences if sequence > self.last_journaled]
        if new:
            self.last_journaled = new[-1]
        assert self.last_journaled <= self.rig.store.writer.last_sequence

    @staticmethod
    def _replay(state: dict[bytes, tuple[bytes, int, int, int, int]], entries: list[JournalEntry]) -> None:
        """Applies journaled changes to the state before them, checking what each says of the one before it."""
        for entry in entries:
            before = state.get(entry.key)
            assert entry.previous == (0 if before is None else before[4])
            if entry.kind in ("put", "touch"):
                assert entry.removed_version == 0
                assert before is None or entry.version > before[3]
                if entry.kind == "touch":
                    assert before is not None
                    assert before[:2] == (entry.payload, entry.publish_time_micros)
                state[entry.key] = (
                    entry.payload,
                    entry.publish_time_micros,
                    entry.expire_time_micros,
                    entry.version,
                    entry.sequence,
                )
            else:
                assert before is not None, "only what is there is removed, and once"
                assert before[:3] == (entry.payload, entry.publish_time_micros, entry.expire_time_micros)
                assert entry.removed_version == before[3]
                assert (entry.version == before[3]) == (entry.kind == "expire")
                if entry.kind == "expire":
                    assert entry.expire_time_micros <= entry.commit_time_micros
                del state[entry.key]

    @invariant()
    def commits_are_the_total_order(self) -> None:
        commits = [decode_commit(*row) for row in self.rig.rows(COMMITS)]
        runs: dict[int, tuple[int, int]] = {}
        last = 0
        for commit in commits:
            assert commit.first_sequence > last
            last = commit.last_sequence
            for run in commit.runs:
                runs[run.first_sequence] = (run.topic_id, run.length)
        for key, value in self.rig.rows(JOURNAL):
            assert runs[unpack_i64(key[4:])] == (int.from_bytes(key[:4], "big"), changes_head(value).entries)

    @invariant()
    def expiry_index_is_early_enough(self) -> None:
        """draft [2], expiry [1]: what can expire has an entry at or before its stamp, not below the floor; the sweep
        will wake."""
        earliest: dict[bytes, int] = {}
        for expire_time, store_key in self.rig.entries():
            earliest.setdefault(store_key, expire_time)
        assert not self.rig.rows(META, REARM_KEY, REARM_KEY + b"\xff"), "re-arming has run to its end"
        floor = dict(self.rig.rows(META, b"sweep", b"sweep\0")).get(b"sweep", b"")
        assert floor == self.rig.store.writer.sweep.floor
        for name, topic in self.model.topics.items():
            if not topic.acts:
                continue
            prefix = self.rig.topic(name).prefix
            for key, kept in topic.records.items():
                if kept.expire_time_micros != NEVER:
                    assert earliest.get(prefix + key, NEVER) <= kept.expire_time_micros
                    assert self.rig.store.writer.sweep.next_due <= kept.expire_time_micros

    @invariant()
    def indexes_say_what_the_records_say(self) -> None:
        check_indexes(self.rig.store)

    @invariant()
    def head_cache_is_what_is_on_disk(self) -> None:
        cache = self.rig.store.writer.heads
        rows = dict(self.rig.rows(RECORDS))
        existing = {self.rig.topic(name).prefix for name in self.model.topics}
        for key, head in {**cache._old, **cache._young}.items():
            if key[:4] in existing and head is not None:
                assert rows[key][:HEADER_BYTES] == head

    @invariant()
    def sequences_of_publishers_are_remembered(self) -> None:
        for name, publisher in self.model.publishers.items():
            assert self.rig.store.cuts.publisher_position(name) == (publisher.epoch, publisher.highest)
            key = PUBLISHER_KEY + name.encode()
            ((_, row),) = self.rig.rows(META, key, key + b"\0")
            found = decode_publisher(row)
            assert (found.unit, found.unit_records) == (publisher.unit, publisher.unit_records)


QUICK = settings(
    max_examples=examples(80), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(QUICK, max_examples=2_000, stateful_step_count=60)


def test_the_store_agrees_with_the_model() -> None:
    run_state_machine_as_test(StoreMachine, settings=QUICK)


@pytest.mark.long
def test_the_store_agrees_with_the_model_for_long() -> None:
    run_state_machine_as_test(StoreMachine, settings=LONG)


# --- the two paths of a publish --------------------------------------------------------------------------------------


@given(
    commits=st.lists(
        st.tuples(
            topics,
            st.lists(st.tuples(st.sampled_from(KEYS), plain_lifetimes), min_size=1, max_size=6),
            plain_lifetimes,
            st.booleans(),
            spans,
        ),
        min_size=1,
        max_size=8,
    ),
    expiration=st.sampled_from([Expiration.ENABLED, Expiration.DISABLED, Expiration.REJECT]),
)
@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
def test_the_hot_path_writes_the_same_rows_as_the_general_path(
    commits: list[tuple[str, list[tuple[str, Lifetime]], Lifetime, bool, int]], expiration: Expiration
) -> None:
    """Byte for byte, but for the journal: its columns may be packed differently, and must say the same."""
    found: list[object] = []
    for want_results in (False, True):
        directory = _directory()
        rig = Rig(directory)
        try:
            for name, wanted in TOPICS.items():
                rig.create_topic(name, wanted, expiration=expiration)
            for topic, records, lifetime, own, span in commits:
                keys = [key for key, _ in records]
                payloads = [
                    b'{"k":"%s","n":%d,"s":%s}' % (key.encode(), index, INDEXED[index % len(INDEXED)])
                    for index, key in enumerate(keys)
                ]
                given_keys = None if TOPICS[topic].key else keys
                request = Publish(topic, payloads, given_keys, lifetime=lifetime, want_results=want_results)
                request.lifetimes = [lifetime for _, lifetime in records] if own else None
                rig.run(request)
                rig.time.tick(span)
            rows = [row for family in (RECORDS, EXPIRY, COMMITS, INDEXES) for row in rig.rows(family)]
            journals = [rig.journal(name) for name in TOPICS]
            figures = [rig.topic(name).statistics._replace(appended_bytes=0) for name in TOPICS]
            found.append((rows, journals, figures, rig.store.writer.last_sequence))
        finally:
            rig.close()
            shutil.rmtree(directory)
    assert found[0] == found[1]
