"""The store against a model on plain dicts: random requests, clocks, crashes and administration."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from sow_server.engine.commit import alternating, puts
from sow_server.engine.disk.rocks import COMMITS, EXPIRY, INDEXES, RECORDS
from sow_server.engine.stored import decode_commit
from sow_server.engine.values.clock import ClockOptions
from sow_server.engine.values.errors import OpenError, Reason, StoreError
from sow_server.engine.values.model import (
    MICROS,
    TTL_MAX_MICROS,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    PublisherPosition,
    Touch,
    TtlMode,
)
from tests.support.oracles.examples import examples
from tests.support.oracles.store_checks import KEYS, OPTIONS, TOPICS
from tests.support.stores.store_requests import (
    INDEXED,
    StoreRequests,
    plain_lifetimes,
    removals,
    spans,
    topics,
    with_removals,
)
from tests.support.stores.stores import Rig, replaced

rare = precondition(lambda self: self.steps % 5 == 0)
"""For rules that must not crowd out publishing, expiring and sweeping: hypothesis chooses among rules evenly."""


class StoreMachine(StoreRequests):
    """Drives a store and the model side by side."""

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
        """Tells the model the keys that a sweep has removed, after checking that they were due."""
        now = self.rig.clock.now_micros()
        letters: dict[bytes, bytes] = {}
        for name, topic in self.model.topics.items():
            if name == "dead":
                continue
            stored = self.rig.stored(name)
            gone = [key for key in topic.records if key not in stored]
            overdue = topic.overdue(now)
            assert all(key in overdue for key in gone), "a sweep removes only overdue records"
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
        """A sweep comes to several topics in any order, so the journal of the dead letters' topic tells
        their outcome: each has come once, over nothing that is overdue, and otherwise only due records have changed."""
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
        # Overdue records go first, as they would in the change itself, whose journal could not be seen any more.
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
        """The rest of a build is done between the requests that follow, or by the next process."""
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
            # Overdue records have their dead letters before, which could not be seen any more.
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
        # The server's timer does so all the time: across a crash, the clock knows only its stored time.
        self.rig.store.upkeep.mark_clock()
        for _ in range(self.rig.store.writer.queue.depth[0]):
            self.rig.turn()  # the queued work without its consequences: work in chunks is to be interrupted
        end()
        try:
            self.rig.open()
        except OpenError:
            # The wall clock was set back by more than the store takes (rule L15): an operator says that it is right.
            assert self.time.wall_micros < self.last_now
            self.rig.open(accept_clock=True)
            self.last_now = 0


QUICK = settings(
    max_examples=examples(80), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(QUICK, max_examples=2_000, stateful_step_count=60)


@pytest.mark.slow
def test_the_store_agrees_with_the_model() -> None:
    run_state_machine_as_test(StoreMachine, settings=QUICK)


@pytest.mark.long
def test_the_store_agrees_with_the_model_for_long() -> None:
    run_state_machine_as_test(StoreMachine, settings=LONG)


# --- programs that were found ----------------------------------------------------------------------------------------


@contextmanager
def side_by_side() -> Iterator[StoreMachine]:
    """A machine whose steps a test takes itself."""
    machine = StoreMachine()
    try:
        machine.create_topics()
        yield machine
    finally:
        machine.teardown()


def deltas(*payloads: bytes, sequence: int = 0) -> Publish:
    """An atomic request to "keyed"."""
    request = Publish("keyed", list(payloads), None, delta=True, atomic=True, want_results=True)
    if sequence:
        request.publisher = PublisherPosition("p", 1, sequence)
    return request


LARGE = b'{"k":"a","n":1,"t":"%s"}' % (b"x" * 30)
"""A payload of 50 bytes: three of them are beyond the bound of 130."""


@pytest.mark.parametrize("keys", [["a", "b"], ["a", "a", "b"], ["a", "b", "c", "d"]])
def test_an_atomic_touch_of_many_bytes_is_refused_by_both(keys: list[str]) -> None:
    """L19. Story: the model knew the bound of bytes for deltas alone."""
    with side_by_side() as machine:
        for key in ("a", "b", "c"):
            machine._request(Publish("keyed", [LARGE.replace(b"a", key.encode(), 1)]), hold=False)
        machine._request(Touch("keyed", keys, Lifetime(LifetimeKind.TTL, MICROS), atomic=True), hold=False)
        assert len(machine.model.topics["keyed"].overdue(machine.rig.clock.now_micros() + MICROS)) == (
            2 if len(keys) == 2 else 0
        )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_an_atomic_delta_to_a_record_that_grows_is_refused_by_both(count: int) -> None:
    """P2. Story: the model counted the records that were stored before the request."""
    with side_by_side() as machine:
        machine._request(deltas(LARGE, *[b'{"k":"a","n":2}'] * count), hold=False)
        assert len(machine.model.topics["keyed"].records) == (1 if count < 3 else 0)


@pytest.mark.parametrize("sequence", [1, 2, 3])
def test_a_retry_to_records_that_have_grown_has_its_answer_from_both(sequence: int) -> None:
    """P6. Story: the model refused it, as it would refuse a new request."""
    with side_by_side() as machine:
        machine._request(deltas(b'{"k":"a","n":1}', *[b'{"k":"a","n":2}'] * 2, sequence=1), hold=False)
        machine._request(Publish("keyed", [LARGE]), hold=False)
        machine._request(deltas(*[b'{"k":"a","n":3}'] * 3, sequence=sequence), hold=False)


# --- the two paths of a publish --------------------------------------------------------------------------------------


@given(
    commits=st.lists(
        st.tuples(
            topics,
            st.lists(st.tuples(st.sampled_from(KEYS), plain_lifetimes), min_size=1, max_size=6),
            plain_lifetimes,
            st.booleans(),
            spans,
            removals,
        ),
        min_size=1,
        max_size=8,
    ),
    expiration=st.sampled_from([Expiration.ENABLED, Expiration.DISABLED, Expiration.REJECT]),
    ttl_mode=st.sampled_from([TtlMode.RESET, TtlMode.EXTEND]),
)
@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
def test_the_hot_path_writes_the_same_rows_as_the_general_path(
    commits: list[tuple[str, list[tuple[str, Lifetime]], Lifetime, bool, int, list[tuple[bool, bool]] | None]],
    expiration: Expiration,
    ttl_mode: TtlMode,
) -> None:
    """Byte for byte, but for the journal: its columns may be packed differently, and must say the same."""
    found: list[object] = []
    columns = mock.patch.object(puts, "PLAIN_RECORDS_MIN", 1)
    in_runs = mock.patch.object(alternating, "RUN_RECORDS_MIN", 0)
    for want_results, *patches in ((False, columns), (False, columns, in_runs), (True,)):
        directory = Path(tempfile.mkdtemp())
        rig = Rig(directory)
        try:
            for name, wanted in TOPICS.items():
                rig.create_topic(name, wanted, expiration=expiration)
            for topic, records, lifetime, own, span, removed in commits:
                keys = [key for key, _ in records]
                payloads = [
                    b'{"k":"%s","n":%d,"s":%s}' % (key.encode(), index, INDEXED[index % len(INDEXED)])
                    for index, key in enumerate(keys)
                ]
                given_keys = None if TOPICS[topic].key else keys
                request = Publish(topic, payloads, given_keys, lifetime=lifetime, want_results=want_results)
                request.lifetimes = [lifetime for _, lifetime in records] if own else None
                request.ttl_mode = ttl_mode
                with_removals(request, keys, removed)
                with ExitStack() as stack:
                    for patch in patches:
                        stack.enter_context(patch)
                    rig.run(request)
                rig.time.tick(span)
            rows = [row for family in (RECORDS, EXPIRY, COMMITS, INDEXES) for row in rig.rows(family)]
            journals = [rig.journal(name) for name in TOPICS]
            figures = [rig.topic(name).statistics._replace(appended_bytes=0) for name in TOPICS]
            found.append((rows, journals, figures, rig.store.writer.last_sequence))
        finally:
            rig.close()
            shutil.rmtree(directory)
    assert found[0] == found[1] == found[2]
