"""Loads of a topic while others publish to it, touch, delete and let expire, with crashes anywhere: until its commit a
load changes nothing; then the topic holds its rows, except where others have changed records since it was opened."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft, Removed
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.disk.layout import mark_key
from sow_server.engine.disk.rocks import STAGING
from sow_server.engine.loads import (
    Load,
    LoadOptions,
    LoadPart,
    LoadPhase,
    LoadWork,
    RowsToStage,
    applying,
    removal_marks,
    staging,
)
from sow_server.engine.pending import Pending
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import ABSENT, NEVER, Delete, Lifetime, LifetimeKind, Publish, Touch
from tests.support.stores.stores import BINARY, SECOND, Rig

LEASE = 100 * SECOND
KEYS = [f"k{number}" for number in range(4)]
keys = st.sampled_from(KEYS)
ttls = st.sampled_from([None, 0, SECOND, 10 * SECOND])
staged_rows = st.lists(st.tuples(keys, ttls), min_size=2, max_size=6)


@dataclass(slots=True)
class Live:
    """A record of the model."""

    payload: bytes
    expire_time: int


@dataclass(slots=True)
class Attempt:
    """The staged rows of an attempt, and its requests."""

    rows: dict[str, tuple[bytes, int | None]] = field(default_factory=dict)
    handed: int = 0
    last: tuple[int, list[tuple[str, bytes, int | None]]] | None = None


@dataclass(slots=True)
class Modelled:
    """A load of the model."""

    id: str
    lease_end: int
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    """Keys that others have changed, or removed, since it was opened."""
    expected: dict[str, tuple[bytes, int | None]] | None = None
    """The rows that its commit applies."""
    parts: list[LoadPart] = field(default_factory=list)
    applied: set[str] = field(default_factory=set)
    superseded: set[str] = field(default_factory=set)
    held: LoadWork | None = None
    """Read, and not applied yet."""


class LoadsMachine(RuleBasedStateMachine):
    """Drives a store, and computes beside it the records that the topic must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="sow-loads-"))
        self.rig = Rig(
            self.folder,
            options=StoreOptions(
                head_cache_records=3,
                loads=LoadOptions(open_max=2),
                writer=WriterOptions(commit_records_max=3, sweep_entries_max=3),
            ),
        )
        self.rig.create_topic("t", BINARY, index=())
        self.live: dict[str, Live] = {}
        self.loads: list[Modelled] = []
        self.number = 0

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder)

    # -- helpers ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        return self.rig.clock.now_micros()

    def alive(self) -> dict[str, Live]:
        return {key: record for key, record in self.live.items() if record.expire_time > self.now}

    def payload(self) -> bytes:
        self.number += 1
        return str(self.number).encode()

    def changed(self, key: str, by: Modelled | None = None) -> None:
        for load in self.loads:
            if load is not by:
                load.touched.add(key)

    def real(self, load: Modelled) -> Load:
        return self.rig.store.loads.registry.find(load.id)

    def heard(self, started: Pending[Load]) -> Load:
        return self.rig.store.finish(started)

    def staging(self) -> list[Modelled]:
        return [load for load in self.loads if load.expected is None]

    def committed(self) -> list[Modelled]:
        return [load for load in self.loads if load.expected is not None]

    # -- others -----------------------------------------------------------------------------------------------------

    @rule(rows=st.lists(st.tuples(keys, ttls), min_size=1, max_size=4))
    def publish(self, rows: list[tuple[str, int | None]]) -> None:
        payloads = [self.payload() for _ in rows]
        given = [ABSENT if ttl is None else Lifetime(LifetimeKind.TTL, ttl) for _, ttl in rows]
        self.rig.run(Publish("t", payloads, [key for key, _ in rows], lifetimes=given))
        for (key, ttl), payload in zip(rows, payloads, strict=True):
            self.live[key] = Live(payload, NEVER if ttl is None else self.now + ttl)
            self.changed(key)

    @rule(key=keys, ttl=st.sampled_from([SECOND, 10 * SECOND]))
    def touch(self, key: str, ttl: int) -> None:
        outcome = self.rig.run(Touch("t", [key], Lifetime(LifetimeKind.TTL, ttl)))
        assert outcome.applied == (key in self.alive())
        if key in self.alive():
            self.live[key].expire_time = self.now + ttl
            self.changed(key)

    @rule(chosen=st.lists(keys, min_size=1, max_size=3, unique=True))
    def delete(self, chosen: list[str]) -> None:
        outcome = self.rig.run(Delete("t", chosen))
        assert outcome.applied == len(self.alive().keys() & set(chosen))
        for key in self.alive().keys() & set(chosen):
            del self.live[key]
            self.changed(key)

    @rule(micros=st.sampled_from([1, SECOND, 10 * SECOND]), swept=st.booleans(), upkept=st.booleans())
    def tick(self, micros: int, swept: bool, upkept: bool) -> None:
        self.rig.time.tick(micros)
        if swept:
            self.rig.store.sweep()
        if not upkept:
            return
        self.rig.store.loads.upkeep()
        self.rig.store.writer.step()
        self.loads = [load for load in self.loads if load.expected is not None or load.lease_end > self.now]

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        if orderly:
            self.rig.reopen()
        else:
            self.rig.crash()
        for load in self.loads:
            load.held = None
            load.lease_end = self.now + LEASE

    # -- loads ------------------------------------------------------------------------------------------------------

    @initialize(rows=staged_rows, staged=staged_rows)
    def begin(self, rows: list[tuple[str, int | None]], staged: list[tuple[str, int | None]]) -> None:
        self.publish(rows)
        self.open()
        self.stage_rows(self.loads[0], (0, 1), staged, cut=0, again=False)

    @rule()
    def open(self) -> None:
        def start() -> Load:
            return self.heard(self.rig.store.loads.open("t", LEASE))

        if len(self.loads) == 2 or self.committed():
            with pytest.raises(StoreError) as refused:
                start()
            assert refused.value.reason is Reason.OVERLOADED
        else:
            self.loads.append(Modelled(start().row.id, self.now + LEASE))

    def pieces(
        self, load: Modelled, attempt: tuple[int, int], first: int, rows: list[tuple[str, bytes, int | None]]
    ) -> list[RowsToStage]:
        request = Publish(
            "",
            [payload for _, payload, _ in rows],
            [key for key, _, _ in rows],
            lifetimes=[ABSENT if ttl is None else Lifetime(LifetimeKind.TTL, ttl) for _, _, ttl in rows],
        )
        return self.rig.store.loads.staging.prepare(load.id, *attempt, first, request, RequestLimits())

    @precondition(lambda self: self.staging())
    @rule(
        data=st.data(),
        attempt=st.tuples(st.integers(0, 1), st.integers(1, 2)),
        rows=staged_rows,
        cut=st.integers(0, 2),
        again=st.booleans(),
    )
    def stage(
        self,
        data: st.DataObject,
        attempt: tuple[int, int],
        rows: list[tuple[str, int | None]],
        cut: int,
        again: bool,
    ) -> None:
        """`cut`: so many pieces are staged, then the connection breaks and the request comes again. `again`: the
        request before comes once more, late."""
        self.stage_rows(data.draw(st.sampled_from(self.staging())), attempt, rows, cut=cut, again=again)

    def stage_rows(
        self, load: Modelled, attempt: tuple[int, int], rows: list[tuple[str, int | None]], *, cut: int, again: bool
    ) -> None:
        made = load.attempts.setdefault(attempt, Attempt())
        if again and made.last is not None:
            for piece in self.pieces(load, attempt, *made.last):
                self.heard(self.rig.store.loads.staging.stage(piece))
        given = [(key, self.payload(), ttl) for key, ttl in rows]
        made.last = (made.handed + 1, given)
        for piece in self.pieces(load, attempt, *made.last)[:cut]:
            self.heard(self.rig.store.loads.staging.stage(piece))
        for piece in self.pieces(load, attempt, *made.last):
            self.heard(self.rig.store.loads.staging.stage(piece))
        made.handed += len(given)
        made.rows.update({key: (payload, ttl) for key, payload, ttl in given})
        load.lease_end = self.now + LEASE

    @precondition(lambda self: self.staging())
    @rule(data=st.data(), aborted=st.booleans())
    def end_badly(self, data: st.DataObject, aborted: bool) -> None:
        if aborted:
            self.abort(data)
        else:
            self.gap(data)

    def gap(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.staging()))
        handed = load.attempts[0, 1].handed if (0, 1) in load.attempts else 0
        (piece,) = self.pieces(load, (0, 1), handed + 2, [("k0", b"x", None)])
        with pytest.raises(StoreError) as refused:
            self.heard(self.rig.store.loads.staging.stage(piece))
        assert refused.value.reason is Reason.LOAD_INCOMPLETE

    def abort(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.staging()))
        self.heard(self.rig.store.loads.abort(load.id))
        self.loads.remove(load)

    @precondition(lambda self: self.staging())
    @rule(data=st.data(), wrong=st.booleans())
    def commit(self, data: st.DataObject, wrong: bool) -> None:
        self.commit_load(data, data.draw(st.sampled_from(self.staging())), wrong=wrong)

    def commit_load(self, data: st.DataObject, load: Modelled, *, wrong: bool) -> None:
        parts = {part: attempt for part, attempt in load.attempts if data.draw(st.integers(0, 5))}
        named = [LoadPart(part, attempt, load.attempts[part, attempt].handed) for part, attempt in parts.items()]
        if wrong and named:
            one_less = [named[0]._replace(rows=named[0].rows - 1), *named[1:]]
            with pytest.raises(StoreError) as refused:
                self.heard(self.rig.store.loads.commit(load.id, one_less))
            assert refused.value.reason is Reason.LOAD_INCOMPLETE
        self.heard(self.rig.store.loads.commit(load.id, named))
        load.parts = named
        load.expected = {}
        for part in sorted(parts):
            load.expected.update(load.attempts[part, parts[part]].rows)

        self.commit_again(load)

    def commit_again(self, load: Modelled) -> None:
        assert self.heard(self.rig.store.loads.commit(load.id, load.parts)) is self.real(load)
        with pytest.raises(StoreError) as refused:
            self.heard(self.rig.store.loads.commit(load.id, [*load.parts, LoadPart(9, 9, 0)]))
        assert refused.value.reason is Reason.LOAD_COMMITTED
        with pytest.raises(StoreError) as refused:
            self.heard(self.rig.store.loads.abort(load.id))
        assert refused.value.reason is Reason.LOAD_COMMITTED

    @precondition(lambda self: any(load.held is None for load in self.committed()))
    @rule(data=st.data(), more=st.integers(0, 2))
    def read(self, data: st.DataObject, more: int) -> None:
        """Applies some chunks, and reads another one."""
        load = data.draw(st.sampled_from([load for load in self.committed() if load.held is None]))
        load.held = self.rig.store.loads.applying.read(self.real(load))
        for _ in range(more):
            if load in self.loads and load.held is not None:
                self.apply_held(load, twice=False)
                if load in self.loads:
                    load.held = self.rig.store.loads.applying.read(self.real(load))

    @precondition(lambda self: any(load.held is not None for load in self.committed()))
    @rule(data=st.data(), twice=st.booleans())
    def apply(self, data: st.DataObject, twice: bool) -> None:
        load = data.draw(st.sampled_from([load for load in self.committed() if load.held is not None]))
        self.apply_held(load, twice=twice)

    def apply_held(self, load: Modelled, *, twice: bool) -> None:
        chunk, load.held = load.held, None
        assert chunk is not None
        assert load.expected is not None
        real = self.real(load)
        if twice:  # the one that asked has not heard, and asks again
            self.heard(self.rig.store.loads.applying.apply(chunk))
            before = real.row
            self.heard(self.rig.store.loads.applying.apply(chunk))
            assert real.row == before
        else:
            self.heard(self.rig.store.loads.applying.apply(chunk))
        for key in [key.decode() for key in chunk.keys]:
            if chunk.phase is LoadPhase.APPLYING:
                assert key not in load.applied | load.superseded
                if key in load.touched:
                    load.superseded.add(key)
                else:
                    payload, ttl = load.expected[key]
                    load.applied.add(key)
                    self.live[key] = Live(payload, NEVER if ttl is None else self.now + ttl)
                    self.changed(key, by=load)
            elif key in self.alive() and key not in load.touched | load.applied:
                del self.live[key]
                self.changed(key, by=load)
        if real.row.phase is LoadPhase.DELETING:
            assert load.applied | load.superseded == load.expected.keys()
        if real.row.phase is LoadPhase.DONE:
            self.assert_done(load, real)
            self.loads.remove(load)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.loads))
        if load.expected is None:
            self.commit_load(data, load, wrong=False)
        while load in self.loads:
            if load.held is None:
                load.held = self.rig.store.loads.applying.read(self.real(load))
            self.apply_held(load, twice=False)

    def assert_done(self, load: Modelled, real: Load) -> None:
        assert load.expected is not None
        figures = real.row.figures
        assert figures.staged == sum(part.rows for part in load.parts)
        assert figures.applied == len(load.applied)
        assert figures.superseded == len(load.superseded)
        assert figures.repeated == figures.staged - len(load.expected)
        assert self.alive().keys() <= load.touched | load.applied
        assert real.staged_bytes == real.staged_rows == 0

    # -- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def the_topic_holds_what_it_should(self) -> None:
        found = self.rig.live("t")
        expected = self.alive()
        assert {key.decode(): (row.payload, row.expire_time_micros) for key, row in found.items()} == {
            key: (record.payload, record.expire_time) for key, record in expected.items()
        }

    @invariant()
    def nothing_is_left_of_loads_that_are_over(self) -> None:
        numbers = {int(load.id.rpartition(".")[2]) for load in self.loads}
        staged = {int.from_bytes(key[:4], "big") for key, _ in self.rig.rows(STAGING)}
        assert staged <= numbers
        assert {load.row.id for load in self.rig.store.loads.registry.all() if load.row.open} == {
            load.id for load in self.loads
        }


EXAMPLES = max(1, settings().max_examples // 10)
"""Two, and two hundred in the nightly profile: each is a store of its own, opened several times."""
SETTINGS = settings(
    max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)

PLANTED = settings(SETTINGS, max_examples=1000, phases=(Phase.generate,))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that everything takes several commits, and reads end within the rows of one key."""
    monkeypatch.setattr(applying, "APPLY_ROWS", 2)
    monkeypatch.setattr(staging, "STAGE_ROWS", 2)
    monkeypatch.setattr(applying, "READ_ROWS", 2)
    monkeypatch.setattr(applying, "SCAN_RECORDS", 3)


def test_a_load_replaces_the_content_and_changes_by_others_win() -> None:
    run_state_machine_as_test(LoadsMachine, settings=SETTINGS)


def no_mark(draft: Draft, topic: Topic, removed: Removed) -> None:
    """The mistake: removals by others are not noted."""


def mark_all(draft: Draft, topic: Topic, removed: Removed) -> None:
    """The mistake: expired records count as removed by others."""
    for load, _ in topic.loads:
        for key in removed.keys:
            draft.batch.puts[STAGING][mark_key(load, key)] = b""


@pytest.mark.long
@pytest.mark.parametrize("mistake", [no_mark, mark_all])
def test_the_machine_finds_planted_mistakes_in_marks(mistake: Callable[..., None]) -> None:
    with mock.patch.object(removal_marks, "on_removed", mistake), pytest.raises(AssertionError):
        run_state_machine_as_test(LoadsMachine, settings=PLANTED)
