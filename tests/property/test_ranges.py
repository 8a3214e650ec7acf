"""Ranges of changes against an oracle: random histories, limits, splits, filters, pruning and crashes in between.

Every plan ends with a commit. The changes that are read, in pieces of any size, are the naive filter of all changes
between two positions. A second read gives the same, or is refused.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sow_server.engine.commit.committer import Committer
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import DELETE, EXPIRE, TOUCH
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Lifetime, LifetimeKind, Publish, TopicSettings, Touch
from sow_server.query.filtering import record_filter
from sow_server.subscriptions.frames import ChangeOp, ChangeReason
from sow_server.subscriptions.journal import ranges
from sow_server.subscriptions.journal.ranges import (
    KeyShare,
    RangeBounds,
    RangeLimits,
    RangePlan,
    RangeReader,
    plan_range,
)
from sow_server.subscriptions.request import Start, StartKind
from tests.support.oracles.subscription_oracle import KEYED, Happened, Oracle, matches
from tests.support.simulation.subscription_traffic import FILTERS, KEYS, documents, lifetimes
from tests.support.stores.stores import MINUTE, SECOND, Rig

# Commits of several requests, so that one has several chunks of the topic.
OPTIONS = StoreOptions(head_cache_records=4, writer=WriterOptions(commit_records_max=20, sequence_reserve=10))
SETTINGS = KEYED._replace(retain_time_micros=MINUTE, retain_bytes=None)
OTHER = TopicSettings()


class Row(NamedTuple):
    """One change, as a reader gets it."""

    sequence: int
    op: int
    why: int
    key: bytes
    payload: bytes
    version: int
    expire_time: int


class World:
    """A store, and everything that has ever been committed to it."""

    def __init__(self) -> None:
        self.oracle = Oracle()
        self.commits: list[list[tuple[int, int]]] = []
        """Of each commit the first and the last sequences of the topic's chunks."""
        self.patches = ExitStack()
        original = Committer._take_over

        def take_over(committer: Committer, draft: Draft) -> None:
            original(committer, draft)
            self.oracle.committed(draft.journal.chunks, draft.now)
            self.commits.append(
                [
                    (chunk.first_sequence, chunk.first_sequence + len(chunk.keys) - 1)
                    for chunk in draft.journal.chunks
                    if chunk.topic.name == "keyed"
                ]
            )

        self.patches.enter_context(mock.patch.object(Committer, "_take_over", take_over))
        self.patches.enter_context(mock.patch.object(ranges, "READ_CHANGES", 3))
        self.directory = Path(tempfile.mkdtemp())
        self.rig = Rig(self.directory, options=OPTIONS)
        self.rig.create_topic("keyed", SETTINGS)
        self.rig.create_topic("other", OTHER)
        self.read_before: list[tuple[int, int, str, list[Row]]] = []

    def close(self) -> None:
        self.rig.close()
        self.patches.close()
        shutil.rmtree(self.directory)

    @property
    def floor(self) -> int:
        return self.rig.topic("keyed").statistics.floor_sequence

    @property
    def last(self) -> int:
        return self.rig.store.writer.last_sequence

    def plan(self, start: int, limits: RangeLimits) -> RangePlan:
        begin = Start(StartKind.BOOKMARK)
        return plan_range(
            self.rig.store.cuts, self.rig.store.instance, self.rig.topic("keyed"), begin, start, None, limits
        )

    def entries(self, start: int, end: int) -> int:
        return sum(event.topic == "keyed" and start < event.sequence <= end for event in self.oracle.history)

    def naive(self, start: int, end: int, text: str, history: int | None) -> Iterator[Row]:
        known = max(self.floor, 0 if history is None else history)
        for event in self.oracle.history:
            if event.topic == "keyed" and start < event.sequence <= end and _concerns(event, text, known):
                op = {DELETE: ChangeOp.DELETE, EXPIRE: ChangeOp.EXPIRE}.get(event.kind, ChangeOp.PUT)
                why = ChangeReason.TOUCHED if event.kind == TOUCH else ChangeReason.NONE
                record = event.record
                yield Row(event.sequence, op, why, event.key, record.payload, record.version, record.expire_time)

    def read(
        self, start: int, end: int, text: str, history: int | None, batch_size: int, share: KeyShare | None = None
    ) -> list[Row]:
        """Reads a range, and goes on by another reader after each piece, as after a cut connection."""
        topic = self.rig.topic("keyed")
        wanted = record_filter(topic, text, 0, allow_now=False) if text else None
        found: list[Row] = []
        position = start
        while position < end:
            reader = RangeReader(
                self.rig.store.reads,
                topic,
                wanted,
                RangeBounds(position, end, history),
                batch_size=batch_size,
                share=share,
            )
            piece = reader.read()
            assert position < piece.position <= end
            position = piece.position
            columns, headers = piece.columns, piece.columns.headers
            assert len(columns.keys) <= batch_size
            found += map(
                Row,
                headers.sequence,
                columns.ops,
                columns.reasons,
                columns.keys,
                columns.payloads,
                headers.version,
                headers.expire_time,
            )
        return found


def _concerns(event: Happened, text: str, known_after: int) -> bool:
    if matches(text, "keyed", event.key, event.record):
        return True
    if event.kind in (DELETE, EXPIRE) or event.before is None:
        return False
    return event.before_sequence <= known_after or matches(text, "keyed", event.key, event.before)


Operation = Callable[[World], object]


def _publish(records: list[tuple[str, dict[str, object]]], lifetime: Lifetime, atomic: bool, topic: str) -> Operation:
    def run(world: World) -> None:
        payloads = [b'{"k":"%s",%s' % (key.encode(), _json(document)) for key, document in records]
        keys = None if topic == "keyed" else [key for key, _ in records]
        world.rig.run(Publish(topic, payloads, keys, lifetime=lifetime, atomic=atomic))

    return run


def _json(document: dict[str, object]) -> bytes:
    return json.dumps(document).encode()[1:]


def _together(many: list[list[tuple[str, dict[str, object]]]]) -> Operation:
    """Requests that share a commit, of two topics in turn: so it has several chunks of one."""

    def run(world: World) -> None:
        requests: list[Publish] = []
        for records in many:
            payloads = [b'{"k":"%s",%s' % (key.encode(), _json(document)) for key, document in records]
            requests += [Publish("keyed", payloads), Publish("other", [b"{}"], ["x"])]
        world.rig.run_together(requests)

    return run


def _tick(micros: int) -> Operation:
    def run(world: World) -> None:
        world.rig.time.tick(micros)
        world.rig.store.sweep()
        world.rig.store.writer.step()

    return run


some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)
records = st.lists(st.tuples(st.sampled_from(KEYS), documents), min_size=1, max_size=6)
operations = st.one_of(
    st.builds(_publish, records, lifetimes, st.booleans(), st.sampled_from(["keyed", "keyed", "keyed", "other"])),
    st.builds(_together, st.lists(records, min_size=2, max_size=4)),
    some_keys.map(lambda keys: lambda world: world.rig.run(Delete("keyed", keys))),
    st.builds(
        lambda keys, lifetime: lambda world: world.rig.run(Touch("keyed", keys, lifetime)),
        some_keys,
        st.sampled_from([Lifetime(LifetimeKind.TTL, SECOND), Lifetime(LifetimeKind.NEVER)]),
    ),
    st.sampled_from([SECOND, 5 * SECOND, 20 * SECOND]).map(_tick),
    st.sampled_from([lambda world: world.rig.prune(), lambda world: world.rig.crash()]),
)
checks = st.fixed_dictionaries(
    {
        "back": st.integers(0, 40),
        "entries": st.sampled_from([0, 0, 1, 2, 5, 9]),
        "size": st.sampled_from([0, 0, 0, 1, 300, 700]),
        "parts": st.integers(1, 5),
        "text": st.sampled_from(FILTERS),
        "batch_size": st.sampled_from([1, 2, 4, 100]),
        "known": st.booleans(),
    }
)


# A third of the examples of a profile: every example opens a database, and checks some of its history several times.
@pytest.mark.slow
@settings(
    max_examples=max(1, settings().max_examples // 3),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(st.tuples(st.lists(operations, min_size=1, max_size=8), checks), min_size=2, max_size=6))
def test_ranges_are_the_naive_filter_of_the_whole_history(
    steps: list[tuple[list[Operation], dict[str, object]]],
) -> None:
    world = World()
    try:
        for traffic, ask in steps:
            for operation in traffic:
                operation(world)
            check(world, **ask)  # type: ignore[arg-type]  # by their names
        for start, end, text, before in world.read_before:
            if start < world.floor:
                with pytest.raises(StoreError) as refused:
                    world.read(start, max(end, start + 1), text, start, 3)
                assert refused.value.reason is Reason.BOOKMARK_TOO_OLD
            else:
                assert world.read(start, end, text, start, 3) == before, "the same when it is read again"
    finally:
        world.close()


def check(
    world: World, *, back: int, entries: int, size: int, parts: int, text: str, batch_size: int, known: bool
) -> None:
    start = max(world.last - back, 0)
    created = world.rig.topic("keyed").statistics.created_sequence
    earliest = max(world.floor, created)
    if start < earliest:
        with pytest.raises(StoreError) as refused:
            world.plan(start, RangeLimits())
        assert refused.value.reason is Reason.BOOKMARK_TOO_OLD
        start = earliest
    whole = world.plan(start, RangeLimits())
    assert whole.end == whole.head >= start
    assert whole.entries == world.entries(start, whole.head)
    found = world.plan(start, RangeLimits(entries, size, parts))
    held = world.entries(start, found.end)
    assert (found.start, found.entries) == (start, held)
    assert found.entries_left == whole.entries - held
    assert found.entries > 0 or whole.entries == 0
    _check_end(world, found, entries, size)
    assert list(found.part_ends) == sorted(set(found.part_ends))
    assert found.part_ends[-1:] == ((found.end,) if found.entries else ())
    rows: list[Row] = []
    begin = start
    for end in found.part_ends:
        _check_whole(world, start, end)
        assert world.entries(begin, end) > 0
        # One that is planned by the part, with the history of the whole.
        rows += world.read(begin, end, text, None if known else start, batch_size)
        begin = end
    assert rows == list(world.naive(start, found.end, text, None if known else start))
    shares = [
        world.read(start, found.end, text, None if known else start, batch_size, KeyShare(number, 2))
        for number in range(2)
    ]
    assert sorted(shares[0] + shares[1]) == rows
    assert {row.key for row in shares[0]}.isdisjoint(row.key for row in shares[1])
    assert all(share == sorted(share) for share in shares)
    if not known:
        world.read_before.append((start, found.end, text, rows))


def _check_whole(world: World, start: int, end: int) -> None:
    for commit in world.commits:
        inside = [first <= end for first, last in commit if last > start]
        assert len(set(inside)) <= 1, "a commit is on one side of an end"
        assert not any(max(first, start + 1) <= end < last for first, last in commit), "no chunk is split"


def _check_end(world: World, found: RangePlan, entries: int, size: int) -> None:
    _check_whole(world, found.start, found.end)
    if not found.entries_left or not (entries or size):
        return
    commits = [
        commit for commit in world.commits if any(found.start < last and first <= found.end for first, last in commit)
    ]
    if len(commits) > 1:
        assert not entries or found.entries <= entries
        assert not size or found.bytes <= size
    following = next(
        last for commit in world.commits for last in [max([last for _, last in commit], default=0)] if last > found.end
    )
    more = plan_range(
        world.rig.store.cuts,
        world.rig.store.instance,
        world.rig.topic("keyed"),
        Start(StartKind.BOOKMARK),
        found.start,
        following,
        RangeLimits(),
    )
    assert (entries and more.entries > entries) or (size and more.bytes > size), "one commit more would be too much"
