"""The life of durables against a model that remembers every change: whatever happens, in whatever order, and whenever
the process is killed, positions, gaps, figures, deliveries and the journal's floor follow the rules (J2 to J11, J15,
J16)."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sow_server.engine.durables import ClearedBacklogs, RewindTo
from sow_server.engine.durables import Durable as Row
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import BacklogAction, Publish, TopicSettings
from sow_server.subscriptions.request import FROM_NOW
from tests.support.oracles.examples import examples
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, Subscribers

NAMES = ("a", "b", "desk/a")
FILTERS = {"a": "", "b": "", "desk/a": "/px > 1"}
TOPIC = "orders"


@dataclass(frozen=True)
class Chunk:
    """A commit: the sequences of its entries, and which match the filter."""

    first: int
    last: int
    time: int
    size: int
    matching: frozenset[int]


@dataclass
class Durable:
    """A durable according to the rules."""

    position: int
    used: int
    gone: int = 0
    gaps: list[tuple[str, int, int, int]] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)
    """Up to where each session that counts has handed entries over."""
    handed: int = 0
    """The same of the last one, which counts when another consumer comes."""
    set_aside: int = 0

    def times(self, sequence: int) -> int:
        return sum(upto >= sequence for upto in self.sessions)


class Lives(RuleBasedStateMachine):
    """One topic, up to three durables, and a clock that only this test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="durables-"))
        self.rig = Rig(self.folder)
        self.settings = TopicSettings(retain_time_micros=60 * SECOND, retain_bytes=None, delivery_limit=1)
        self.rig.create_topic(TOPIC, self.settings)
        self.subscribers = Subscribers(self.rig)
        self.chunks: list[Chunk] = []
        self.durables: dict[str, Durable] = {}
        self.removed: set[str] = set()
        self.floor = 0

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder)

    # -- the model --------------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        return self.rig.clock.now_micros()

    def _entries(self, after: int, upto: int = 2**62) -> list[int]:
        return [
            sequence
            for chunk in self.chunks
            for sequence in range(chunk.first, chunk.last + 1)
            if after < sequence <= upto
        ]

    def _size(self, after: int) -> int:
        return sum(chunk.size for chunk in self.chunks if chunk.last > after)

    @property
    def last(self) -> int:
        return self.chunks[-1].last if self.chunks else 0

    def _outside(self, time: int | None, size: int | None) -> int:
        """The last entry that is outside these bounds, by looking at all of them; 0: none is."""
        outside = 0
        for index, chunk in enumerate(self.chunks):
            newer = sum(other.size for other in self.chunks[index:])
            if (time is not None and chunk.time <= self.now - time) or (size is not None and newer > size):
                outside = chunk.last
        return outside

    def _retained(self) -> int:
        return self._outside(self.settings.retain_time_micros, self.settings.retain_bytes)

    def _gone(self, durable: Durable) -> int:
        """The position up to which it cannot read: acknowledged and not retained."""
        durable.gone = max(durable.gone, min(durable.position, self._retained()), self.floor)
        return durable.gone

    def _let_go(self) -> None:
        """The floor rises to what nobody holds (durables [3])."""
        held = min([self._retained(), *[durable.position for durable in self.durables.values()]])
        self.floor = max([self.floor, *self._entries(self.floor, held)])

    def _before_next(self, durable: Durable, sequence: int) -> int:
        """Up to where nothing comes after a sequence, if that skips anything: after a crash the next one is far ahead
        (rule K7)."""
        after = self._entries(sequence)
        return after[0] - 1 if after and self._entries(durable.position, sequence) else sequence

    def _skip(self, durable: Durable, upto: int, reason: str) -> None:
        entries = len(self._entries(durable.position, upto))
        if upto > durable.position:
            if entries:
                gap = (reason, durable.position, upto, entries)
                if durable.gaps and durable.gaps[-1][0] == reason:
                    before = durable.gaps.pop()
                    gap = (reason, before[1], upto, before[3] + entries if before[3] else 0)
                durable.gaps.append(gap)
            durable.position = upto

    def _discard(self) -> None:
        """Entries beyond the hard limits go, also those that durables have not reached."""
        limits = self._outside(self.settings.max_age_micros, self.settings.max_bytes)
        if self.settings.max_entries is not None:
            beyond = self._entries(0)[: -self.settings.max_entries]
            limits = max([limits, *beyond])
        held = min([self._retained(), *[durable.position for durable in self.durables.values()]])
        if limits > max(held, self.floor):
            for durable in self.durables.values():
                self._skip(durable, limits, "DISCARDED")
            self.floor = limits

    def _limited(self) -> bool:
        found = self.settings
        return (found.max_age_micros, found.max_bytes, found.max_entries) != (None, None, None)

    # -- steps ------------------------------------------------------------------------------------------------------

    @rule(pxs=st.lists(st.integers(1, 2), min_size=1, max_size=4), size=st.sampled_from([1, 300]))
    def publish(self, pxs: list[int], size: int) -> None:
        before = self.rig.topic(TOPIC).statistics.appended_bytes
        payloads = [b'{"px":%d,"x":"%s"}' % (px, b"x" * size) for px in pxs]
        outcome = self.rig.run(Publish(TOPIC, payloads, [f"k{number}" for number in range(len(pxs))]))
        first = outcome.last_sequence - len(pxs) + 1
        matching = frozenset(sequence for sequence, px in enumerate(pxs, first) if px > 1)
        grown = self.rig.topic(TOPIC).statistics.appended_bytes - before
        self.chunks.append(Chunk(first, outcome.last_sequence, self.now, grown, matching))

    @rule(seconds=st.sampled_from([1, 10, 30, 60]))
    def time_passes(self, seconds: int) -> None:
        for durable in self.durables.values():
            self._gone(durable)
        self.rig.time.tick(seconds * SECOND)

    @rule(
        name=st.sampled_from(NAMES),
        early=st.booleans(),
        share=st.floats(0, 1),
        again=st.booleans(),
    )
    def consume(self, name: str, early: bool, share: float, again: bool) -> None:
        """Attaches, takes all there is, acknowledges some of it, and goes away. `again`: it is the consumer of before,
        whose connection broke."""
        if self._limited():
            self._discard()
        start = EARLIEST if early else FROM_NOW
        durable = self.durables.get(name)
        again = again and durable is not None
        follower = self.subscribers.attach(TOPIC, name, filter=FILTERS[name], start=start, expected=again)
        if durable is not None and not again:
            durable.sessions.append(durable.handed)
            durable.handed = 0
            self._set_aside(name, durable)
        begun = follower.begun
        assert begun.created == (durable is None)
        assert begun.reset == (durable is None and name in self.removed)
        if durable is None:
            position = self.floor if early else begun.sequence
            assert early or not self._entries(begun.sequence)
            durable = self.durables[name] = Durable(position, self.now)
            self.removed.discard(name)
        assert begun.sequence == durable.position
        told = sorted(durable.gaps, key=lambda gap: gap[0] == "CONFLATED")
        assert follower.gaps() == told
        conflated = any(gap[0] == "CONFLATED" for gap in told)
        expected = self._entries(durable.position)
        if FILTERS[name]:
            matching = set().union(*[chunk.matching for chunk in self.chunks])
            expected = [sequence for sequence in expected if sequence in matching]
        sent = self.rig.store.writer.last_sequence
        if conflated:
            assert follower.got() == []
            assert "SnapshotEnd" in follower.kinds()
            handed = sent
        else:
            assert follower.got() == expected
            assert follower.times() == [durable.times(sequence) + 1 for sequence in expected]
            handed = expected[-1] if expected else durable.position
        chosen = expected[: round(share * len(expected))] if not conflated else []
        upto = chosen[-1] if chosen else (sent if conflated and share > 0.5 else durable.position)
        follower.acknowledge(upto)
        durable.gaps = [gap for gap in durable.gaps if gap[2] > upto]
        before, durable.used = durable.position, self.now
        durable.position = max(durable.position, upto)
        if upto >= handed:
            # It may move over entries that the filter left out (consumer_registry [3]).
            followed = self.rig.store.durables.find(self.rig.topic(TOPIC), name).position
            assert upto <= followed <= sent
            assert not [sequence for sequence in expected if upto < sequence <= followed]
            durable.position = followed
        if durable.position > before:
            self._let_go()
        follower.close()
        self.subscribers.settle()
        durable.handed = max(durable.handed, handed)

    @rule(name=st.sampled_from(NAMES), times=st.integers(2, 4))
    def fail(self, name: str, times: int) -> None:
        """A consumer that comes back, and acknowledges nothing, again and again."""
        for _ in range(times):
            self.consume(name, early=True, share=0.0, again=False)

    def _set_aside(self, name: str, durable: Durable) -> None:
        """The first entry that it would be handed, if that was handed over as often as it may be."""
        limit = self.settings.delivery_limit
        waiting = self._wanted(name, durable.position)
        conflated = any(gap[0] == "CONFLATED" for gap in durable.gaps)
        if limit is not None and waiting and durable.times(waiting[0]) >= limit and not conflated:
            durable.position = waiting[0] - 1
            self._skip(durable, waiting[0], "DELIVERY_LIMIT")
            durable.set_aside += 1
            self._let_go()

    def _wanted(self, name: str, after: int) -> list[int]:
        matching = set().union(*[chunk.matching for chunk in self.chunks])
        return [sequence for sequence in self._entries(after) if not FILTERS[name] or sequence in matching]

    @precondition(lambda self: self.durables)
    @rule(data=st.data(), entries_max=st.sampled_from([1, 3, 1000]))
    def browse(self, data: st.DataObject, entries_max: int) -> None:
        """Page by page, all that is not acknowledged; it changes nothing."""
        name = data.draw(st.sampled_from(sorted(self.durables)))
        self.subscribers.settle()
        durable, seen, times, position = self.durables[name], list[int](), list[int](), 0
        while True:
            rows, delivered, position = self.subscribers.browse(TOPIC, name, after=position, entries_max=entries_max)
            if not rows:
                break
            seen += [row.sequence for row in rows]
            times += delivered
        # A record that matched before and does not now matters, too: the previous value tells.
        assert set(self._wanted(name, durable.position)) <= set(seen) <= set(self._entries(durable.position))
        assert FILTERS[name] or seen == self._entries(durable.position)
        assert times == [durable.times(sequence) + (sequence <= durable.handed) for sequence in seen]

    @precondition(lambda self: self.durables)
    @rule(data=st.data(), kind=st.sampled_from(["earliest", "position", "time"]))
    def rewind(self, data: st.DataObject, kind: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.durables)))
        if self._limited():
            self._discard()
        durable = self.durables[name]
        gone = self._gone(durable)
        to, expected = RewindTo(), gone
        if kind == "position":
            expected = data.draw(st.integers(0, durable.position + 2))
            to = RewindTo(position=expected)
        elif kind == "time":
            time = self.now - data.draw(st.integers(0, 90)) * SECOND
            later = [chunk.first for chunk in self.chunks if chunk.time >= time and chunk.last > gone]
            expected = min(durable.position, max(gone, later[0] - 1 if later else durable.position))
            to = RewindTo(time_micros=time)
        topic = self.rig.topic(TOPIC)

        def move() -> tuple[int, int]:
            answers: list[tuple[Row, int] | StoreError] = []
            self.subscribers.consumers.rewind(topic, name, to, force=False).then(answers.append)
            row, unacknowledged = self.subscribers.answer(answers)
            return row.position, unacknowledged

        if kind == "position" and not gone <= expected <= durable.position:
            with pytest.raises(StoreError) as refused:
                move()
            reason = Reason.BOOKMARK_TOO_OLD if expected < gone else Reason.INVALID_ARGUMENT
            assert refused.value.reason is reason
            return
        position, entries = move()
        if kind == "earliest":
            # Between two entries there is more than one position; the same entries can be read from each.
            assert self._entries(position) == self._entries(gone)
            expected = position
        assert (position, entries) == (expected, len(self._entries(expected)))
        if position != durable.position:
            durable.position = position
            self._let_go()
        # An entry that is handed over again is no gap any more; how much of one is left is not known.
        durable.gaps = [
            gap if gap[2] <= position else ("EVICTED" if gap[0] == "CONFLATED" else gap[0], gap[1], position, 0)
            for gap in durable.gaps
            if gap[1] < position
        ]
        durable.used, durable.sessions, durable.handed = self.now, [], 0

    @precondition(lambda self: self.durables)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["", *sorted(self.durables)]))
        topic = self.rig.topic(TOPIC)
        answers: list[ClearedBacklogs | StoreError] = []
        self.subscribers.consumers.clear(topic, name).then(answers.append)
        cleared = self.subscribers.answer(answers)
        chosen = [durable for other, durable in self.durables.items() if name in ("", other)]
        assert cleared.entries == sum(len(self._entries(durable.position)) for durable in chosen)
        moved = False
        for durable in chosen:
            moved = moved or self.last > durable.position
            durable.position, durable.gaps, durable.used = max(durable.position, self.last), [], self.now
        if moved:
            self._let_go()

    @precondition(lambda self: self.durables)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.durables)))
        topic = self.rig.topic(TOPIC)
        answers: list[Row | StoreError] = []
        self.subscribers.consumers.delete(topic, name, force=False).then(answers.append)
        assert self.subscribers.answer(answers).position == self.durables[name].position
        del self.durables[name]
        self.removed.add(name)
        self._let_go()

    @rule()
    def prune(self) -> None:
        self.rig.prune()
        self._discard()
        self._let_go()

    @rule()
    def scan(self) -> None:
        """The entries that the slowest leaves out, if it is the one with the filter."""
        slowest = min(self.durables, key=lambda name: (self.durables[name].position, name), default=None)
        self.subscribers.settle()
        self.subscribers.scan()
        if slowest is not None and FILTERS[slowest]:
            durable = self.durables[slowest]
            matching = set().union(*[chunk.matching for chunk in self.chunks])
            # A record that matched before and does not now matters to it, too: the previous value tells.
            position = self.rig.store.durables.find(self.rig.topic(TOPIC), slowest).position
            assert position >= durable.position
            assert not [sequence for sequence in self._entries(durable.position, position) if sequence in matching]
            if position > durable.position:
                durable.position = position
                self._let_go()

    @rule(
        changes=st.fixed_dictionaries(
            {},
            optional={
                "retain_time_micros": st.sampled_from([None, 20 * SECOND, 60 * SECOND, 120 * SECOND]),
                "retain_bytes": st.sampled_from([None, 700, 3000]),
                "max_age_micros": st.sampled_from([None, 90 * SECOND]),
                "max_bytes": st.sampled_from([None, 4000]),
                "max_entries": st.sampled_from([None, 3, 8]),
                "delivery_limit": st.sampled_from([None, 1, 2]),
            },
        )
    )
    def settings_change(self, changes: dict[str, int | None]) -> None:
        for durable in self.durables.values():
            self._gone(durable)
        self.rig.alter_topic(TOPIC, changes)
        self.settings = self.rig.topic(TOPIC).settings

    @rule(quota=st.sampled_from([500, 2000]), action=st.sampled_from([BacklogAction.EVICT, BacklogAction.CONFLATE]))
    def relieve(self, quota: int, action: BacklogAction) -> None:
        if self.settings.retain_bytes is not None and quota >= self.settings.retain_bytes:
            return  # refused: a quota is below an explicit retention
        self.rig.alter_topic(TOPIC, backlog_quota_bytes=quota, backlog_action=action)
        self.subscribers.upkeep()
        moved = False
        for durable in self.durables.values():
            if self._size(durable.position) >= quota:
                if action is BacklogAction.CONFLATE:
                    self._skip(durable, self.last, "CONFLATED")
                else:
                    evicted = self._before_next(durable, self._outside(None, quota - quota // 10))
                    self._skip(durable, max(durable.position, evicted), "EVICTED")
                moved = True
        if moved:
            self._let_go()
        self.rig.alter_topic(TOPIC, backlog_quota_bytes=None)

    @rule(seconds=st.sampled_from([15, 45]))
    def backlog_ttl(self, seconds: int) -> None:
        self.rig.alter_topic(TOPIC, backlog_ttl_micros=seconds * SECOND)
        self.subscribers.upkeep()
        moved = False
        for durable in self.durables.values():
            due = self._before_next(durable, self._outside(seconds * SECOND, None))
            moved = moved or due > durable.position
            self._skip(durable, due, "BACKLOG_TTL")
        if moved:
            self._let_go()
        self.rig.alter_topic(TOPIC, backlog_ttl_micros=None)

    @rule(seconds=st.sampled_from([30, 100]))
    def idle(self, seconds: int) -> None:
        self.rig.alter_topic(TOPIC, durable_idle_ttl_micros=seconds * SECOND)
        self.subscribers.upkeep()
        gone = [name for name, durable in self.durables.items() if durable.used + seconds * SECOND <= self.now]
        for name in gone:
            del self.durables[name]
            self.removed.add(name)
        if gone:
            self._let_go()
        self.rig.alter_topic(TOPIC, durable_idle_ttl_micros=None)

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        if orderly:
            self.rig.reopen()
        else:
            self.rig.crash()
        self.subscribers = Subscribers(self.rig)
        self.subscribers.settle()

    # -- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def rows_are_what_the_rules_say(self) -> None:
        topic = self.rig.topic(TOPIC)
        found = {durable.name: durable for durable in self.rig.store.durables.of(topic)}
        assert set(found) == set(self.durables)
        for name, durable in self.durables.items():
            row = found[name]
            assert row.position == durable.position, (row, durable)
            assert [(gap.reason.name, *gap[1:]) for gap in row.gaps] == durable.gaps, (row, durable)
            assert not row.attached
            assert row.set_aside == durable.set_aside
        counted = {owner: self.rig.store.durables.count_owned(owner) for owner in ("desk", "other")}
        assert counted == {"desk": int("desk/a" in self.durables), "other": 0}
        order = [durable.order for durable in self.rig.store.durables.of(topic)]
        assert order == sorted(order)

    @invariant()
    def figures_are_counted_alike(self) -> None:
        topic = self.rig.topic(TOPIC)
        for name, durable in self.durables.items():
            _, figures, _ = self.rig.store.durable_commits.figures(topic, name)
            unacknowledged = self._entries(durable.position)
            assert figures.total_entries == len(self._entries(self._gone(durable)))
            assert figures.unacknowledged_entries == len(unacknowledged)
            assert figures.unacknowledged_bytes == self._size(durable.position)
            times = [chunk.time for chunk in self.chunks if chunk.last > durable.position]
            assert figures.oldest_micros == (times[0] if times else None)

    @invariant()
    def the_floor_is_where_it_should_be_and_everything_above_it_is_there(self) -> None:
        assert self.rig.topic(TOPIC).statistics.floor_sequence == self.floor
        cut = self.rig.store.cuts.journal()
        try:
            kept = list(
                itertools.chain.from_iterable(
                    range(changes.first_sequence, changes.first_sequence + len(changes.keys))
                    for changes in cut.changes(self.rig.topic(TOPIC), self.floor, 2**62)
                )
            )
        finally:
            cut.close()
        assert [sequence for sequence in kept if sequence > self.floor] == self._entries(self.floor)
        assert self.rig.topic(TOPIC).statistics.journal_entries == len(self._entries(self.floor))


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


@pytest.mark.long
def test_many_other_lives() -> None:
    run_state_machine_as_test(Lives, settings=settings(max_examples=500, stateful_step_count=30, deadline=None))
