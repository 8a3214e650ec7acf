"""Views against brute force after every commit of random changes: publishes with removals, deltas, touches, deletes,
expiries, restarts, crashes, builds (rules V2, V4, V6)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sow_server.engine.derived import building
from sow_server.engine.derived.view_memory import GroupCache
from sow_server.engine.disk.mark import Bounds
from sow_server.engine.losses import settle
from sow_server.engine.stored import ordered, read_ordered
from sow_server.engine.values.model import (
    ABSENT,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    TopicSettings,
    Touch,
)
from sow_server.filters.aggregate_values import Sum, clean
from tests.support.oracles.examples import examples
from tests.support.stores.stores import SECOND
from tests.support.stores.views import ViewRig

VIEWS = {
    "totals": {"group_by": ["/g"], "select": ["COUNT(*) AS n", "SUM(/v) AS s", "AVG(/v) AS a", "COUNT(/v) AS c"]},
    "extremes": {"group_by": ["/g", "/h"], "select": ["MIN(/v) AS lo", "MAX(/v) AS hi", "MAX(/w) AS most"]},
    "some": {"select": ["SUM(/v) / COUNT(*) AS each", "MAX(/v) AS hi"], "where": "/v > 0"},
    "slim": {"select": ["/v", "/g AS group"], "where": "/h = 1"},
    "keys": {"group_by": ["/g"]},
}
KEYS = [f"k{number}" for number in range(8)]
values = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([0.1, 0.2, -0.1, 1e300, -1e300, 2.5, 2.0, 1, True, None, "", "1", "a", "é", [3], [], {"x": 1}]),
    st.sampled_from([2**60, 2**60 + 1, -(2**70), 0.0, -0.0, "x" * 300]),
)
documents = st.fixed_dictionaries(
    {"g": st.one_of(st.sampled_from(["A", "B", 1, "1", 1.0, True, "true", None, "", "a|b"]), values)},
    optional={"h": st.sampled_from([1, 2, "2"]), "v": values, "w": st.integers(0, 2)},
).map(msgspec.json.encode)
keys = st.sampled_from(KEYS)


class ViewMachine(RuleBasedStateMachine):
    """Drives a store with views."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.rig = ViewRig(self.folder)
        self.made: set[str] = set()

    @initialize(names=st.sets(st.sampled_from(sorted(VIEWS)), min_size=2))
    def some_views(self, names: set[str]) -> None:
        self.rig.create_topic("t", TopicSettings(expiration=Expiration.ENABLED))
        for name in sorted(names):
            self._make(name)

    def _make(self, name: str, *, built: bool = True) -> None:
        self.rig.create_view(name, "t", built=built, **VIEWS[name])  # type: ignore[arg-type]  # as `create_view` takes them
        self.made.add(name)

    @rule(records=st.lists(st.tuples(keys, documents, st.booleans()), min_size=1, max_size=12), atomic=st.booleans())
    def publish(self, records: list[tuple[str, bytes, bool]], atomic: bool) -> None:
        removals = [remove for _, _, remove in records]
        names = [key for key, _, _ in records]
        payloads = [b"" if remove else payload for _, payload, remove in records]
        self.rig.run(Publish("t", payloads, names, atomic=atomic, removals=removals if any(removals) else None))

    @rule(key=keys, document=documents)
    def merge(self, key: str, document: bytes) -> None:
        self.rig.run(Publish("t", [document], [key], delta=True))

    @rule(key=keys, document=documents, seconds=st.integers(1, 5))
    def publish_for_a_while(self, key: str, document: bytes, seconds: int) -> None:
        self.rig.run(Publish("t", [document], [key], lifetime=Lifetime(LifetimeKind.TTL, seconds * SECOND)))

    @rule(names=st.sets(keys, min_size=1))
    def delete(self, names: set[str]) -> None:
        self.rig.run(Delete("t", sorted(names)))

    @rule(key=keys, seconds=st.integers(0, 5))
    def touch(self, key: str, seconds: int) -> None:
        self.rig.run(Touch("t", [key], Lifetime(LifetimeKind.TTL, seconds * SECOND) if seconds else ABSENT))

    @rule(seconds=st.integers(1, 4), sweeps=st.booleans())
    def time_passes(self, seconds: int, sweeps: bool) -> None:
        self.rig.time.tick(seconds * SECOND)
        if sweeps:
            self.rig.store.sweep()

    @rule(requests=st.lists(st.tuples(keys, documents), min_size=2, max_size=5))
    def requests_share_a_commit(self, requests: list[tuple[str, bytes]]) -> None:
        self.rig.run_together([Publish("t", [document], [key]) for key, document in requests])

    @rule(name=st.sampled_from(sorted(VIEWS)), document=documents, key=keys, turns=st.integers(0, 3))
    def a_view_is_made_anew(self, name: str, document: bytes, key: str, turns: int) -> None:
        """While it is built, a record changes."""
        if name in self.made:
            self.rig.delete_topic(name)
        self._make(name, built=False)
        for _ in range(turns):
            self.rig.turn()
        self.rig.run(Publish("t", [document], [key]))

    @rule(how=st.sampled_from(["reopen", "crash", "cut_power"]))
    def restarts(self, how: str) -> None:
        getattr(self.rig, how)()

    @rule()
    def loses_the_end_of_its_log(self) -> None:
        settle(self.rig.store._rocks, Bounds(), {"id": "other", "epoch": "other", "origin": None})
        self.rig.abandon()
        self.rig.open()

    @invariant()
    def views_are_as_brute_force_makes_them(self) -> None:
        for name in self.made:
            self.rig.check(name)

    @invariant()
    def the_journal_of_a_view_leads_to_its_content(self) -> None:
        for name in self.made:
            topic = self.rig.topic(name)
            content = {key: one.payload for key, one in self.rig.stored(name).items()}
            latest = {entry.key: entry for entry in self.rig.journal(name)}
            for key, entry in latest.items():
                assert content.get(key) == (entry.payload if entry.kind == "put" else None)
            if topic.statistics.floor_sequence == topic.statistics.created_sequence:
                assert content.keys() <= latest.keys()

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of two records at a time, and a cache of two groups."""
    monkeypatch.setattr(building, "BUILD_CHUNK", 2)
    monkeypatch.setattr(GroupCache.__init__, "__defaults__", (2, 2**20))


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
def test_views_are_as_brute_force_makes_them_after_every_commit() -> None:
    run_state_machine_as_test(
        ViewMachine,
        settings=settings(
            max_examples=examples(64),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


# --- the parts -------------------------------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-5, 5),
    st.integers(),
    st.builds(lambda power, off: 2**power + off, st.integers(50, 1100), st.integers(-3, 3)),
    st.floats(allow_nan=False),
)
scalars = st.one_of(numbers, st.booleans(), st.text(max_size=6), st.sampled_from(["\0", "a\0", "a\0b", "x" * 256]))


@given(scalars, st.booleans(), st.binary(max_size=3))
def test_a_value_in_order_is_read_back(value: bool | int | float | str, last: bool, behind: bytes) -> None:
    place = ordered(value, integers_last=last)
    found, end = read_ordered(b"?" + place + behind, 1, integers_last=last)
    assert end == 1 + len(place)
    assert type(found) is type(value)
    assert found == value


@given(numbers, numbers, st.booleans())
def test_numbers_in_order_are_in_their_exact_order(one: float, other: float, last: bool) -> None:
    """Planted mistake: an order of the nearest floats makes one of two large integers."""
    first, second = ordered(one, integers_last=last), ordered(other, integers_last=last)
    if one != other:
        assert (first < second) is (one < other)
    elif type(one) is type(other):
        assert first == second
    else:
        assert (first > second) is ((type(one) is int) is last)


@given(st.lists(numbers, max_size=9), st.lists(numbers, max_size=9), st.lists(numbers, max_size=9))
def test_a_sum_that_moves_and_is_kept_is_that_of_what_is_left(
    first: list[float], come: list[float], stay: list[float]
) -> None:
    def types_of(*columns: list[float]) -> set[type]:
        return {type(value) for column in columns for value in column}

    moving, alone = Sum(), Sum()
    moving.add(*clean([*first, *stay]))
    moving.move(come, first, types_of(come, first))
    kept = Sum()
    kept.load(msgspec.msgpack.decode(msgspec.msgpack.encode(moving.dump())))
    alone.add(*clean([*stay, *come]))
    for found in (moving, kept):
        assert (repr(found.total), repr(found.average), found.count) == (
            repr(alone.total),
            repr(alone.average),
            alone.count,
        )
