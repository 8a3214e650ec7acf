"""The caps of a topic against a model: a publish of a client is refused exactly if it would let the live content grow
beyond a cap, however its records are put, and after any crash (rules T6, T7)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sow_server.engine.commit import puts
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import Lifetime, LifetimeKind, Outcome, Publish
from tests.support.oracles.examples import examples
from tests.support.stores.stores import BINARY, SECOND, Rig

KEYS = [f"k{number}" for number in range(6)]
keys = st.sampled_from(KEYS)
payloads = st.sampled_from([b"", b"1", b"123", b"123456"])
ttls = st.sampled_from([None, None, 0, SECOND, 5 * SECOND])
records = st.lists(st.tuples(keys, payloads, ttls), min_size=1, max_size=6)
caps = st.fixed_dictionaries(
    {"max_records": st.none() | st.integers(1, 5), "max_stored_bytes": st.none() | st.integers(1, 24)}
)

Stored = dict[str, tuple[bytes, int | None]]
"""Payloads and expire times by key."""


class CapsMachine(RuleBasedStateMachine):
    """Drives a capped topic and its model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.live: Stored = {}
        self.caps: dict[str, int | None] = {"max_records": None, "max_stored_bytes": None}
        self.rig = Rig(self.folder, options=StoreOptions(writer=WriterOptions(sweep_entries_max=2)), syncs=False)

    @initialize(caps=caps)
    def begin(self, caps: dict[str, int | None]) -> None:
        self.rig.create_topic("t", BINARY, caps)
        self.rig.create_topic("other", BINARY)
        self.caps = caps

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder)

    # -- the model --------------------------------------------------------------------------------------------------

    def _forget_overdue(self) -> None:
        now = self.rig.clock.now_micros()
        self.live = {key: one for key, one in self.live.items() if one[1] is None or one[1] > now}

    def _fits(self, before: Stored, after: Stored) -> bool:
        for cap, had, has in (
            (self.caps["max_records"], len(before), len(after)),
            (self.caps["max_stored_bytes"], _size(before), _size(after)),
        ):
            if cap is not None and has > max(cap, had):
                return False
        return True

    def _with(self, live: Stored, key: str, payload: bytes, ttl: int | None) -> Stored:
        after = dict(live)
        if ttl == 0:
            after.pop(key, None)
        else:
            after[key] = payload, None if ttl is None else self.rig.clock.now_micros() + ttl
        return after

    def _expected(self, given: list[tuple[str, bytes, int | None]]) -> list[int]:
        """Applies a publish whose records stand alone; returns the refused ones."""
        full = []
        for index, one in enumerate(given):
            after = self._with(self.live, *one)
            if self._fits(self.live, after):
                self.live = after
            else:
                full.append(index)
        return full

    # -- rules ------------------------------------------------------------------------------------------------------

    @rule(given=records, results=st.booleans())
    def publish(self, given: list[tuple[str, bytes, int | None]], results: bool) -> None:
        self._forget_overdue()
        outcome = self.rig.run(_request(given, want_results=results))
        assert _full(outcome) == self._expected(given)

    @rule(given=records)
    def publish_atomically(self, given: list[tuple[str, bytes, int | None]]) -> None:
        self._forget_overdue()
        after = self.live
        for one in given:
            after = self._with(after, *one)
        outcome = self.rig.run(_request(given, atomic=True))
        if self._fits(self.live, after):
            assert not outcome.refusals
            self.live = after
        else:
            assert outcome.applied == 0
            assert len(_full(outcome)) == 1
            assert len(outcome.refusals) == len(given)

    @rule(several=st.lists(records, min_size=2, max_size=3))
    def publish_together(self, several: list[list[tuple[str, bytes, int | None]]]) -> None:
        """They share a commit."""
        self._forget_overdue()
        for given, outcome in zip(several, self.rig.run_together(list(map(_request, several))), strict=True):
            assert isinstance(outcome, Outcome)
            assert _full(outcome) == self._expected(given)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self._forget_overdue()
        assert self.rig.delete("t", key).applied == (key in self.live)
        self.live.pop(key, None)

    @rule(key=keys, ttl=st.sampled_from([SECOND, 9 * SECOND]))
    def touch(self, key: str, ttl: int) -> None:
        self._forget_overdue()
        outcome = self.rig.touch("t", key, ttl=ttl)
        assert bool(outcome.refusals) == (key not in self.live)
        if key in self.live:
            self.live[key] = self.live[key][0], self.rig.clock.now_micros() + ttl

    @rule(micros=st.sampled_from([1, SECOND, 5 * SECOND]))
    def time_passes(self, micros: int) -> None:
        self.rig.time.tick(micros)

    @rule(key=keys)
    def another_topic_has_overdue_records(self, key: str) -> None:
        """They are swept on the way, and take no room here."""
        self.rig.put("other", key, ttl=1)

    @rule()
    def sweep(self) -> None:
        self.rig.store.writer.sweep_now(1)

    @rule(caps=caps)
    def alter(self, caps: dict[str, int | None]) -> None:
        self.rig.alter_topic("t", caps)
        self.caps = caps

    @rule()
    def crash(self) -> None:
        self.rig.crash()

    @invariant()
    def the_content_and_its_figures_agree(self) -> None:
        if "t" not in self.rig.store.topics.by_name:
            return
        self._forget_overdue()
        assert {key.decode(): one.payload for key, one in self.rig.live("t").items()} == {
            key: payload for key, (payload, _) in self.live.items()
        }
        stored = self.rig.stored("t")
        figures = self.rig.topic("t").statistics
        assert figures.records == len(stored)
        assert figures.record_bytes == sum(len(key) + len(one.payload) for key, one in stored.items())


def _size(live: Stored) -> int:
    return sum(len(key) + len(payload) for key, (payload, _) in live.items())


def _request(
    given: list[tuple[str, bytes, int | None]], *, atomic: bool = False, want_results: bool = False
) -> Publish:
    never = Lifetime(LifetimeKind.NEVER)
    return Publish(
        "t",
        [payload for _, payload, _ in given],
        [key for key, _, _ in given],
        lifetimes=[never if ttl is None else Lifetime(LifetimeKind.TTL, ttl) for _, _, ttl in given],
        atomic=atomic,
        want_results=want_results,
    )


def _full(outcome: Outcome) -> list[int]:
    return [one.index for one in outcome.refusals if one.reason is Reason.TOPIC_FULL]


@pytest.mark.slow
def test_a_publish_is_refused_exactly_if_it_would_exceed_a_cap() -> None:
    """T6, T7. Two records are put column by column already, so that short publishes meet both ways."""
    with mock.patch.object(puts, "PLAIN_RECORDS_MIN", 2):
        run_state_machine_as_test(
            CapsMachine,
            settings=settings(
                max_examples=examples(80),
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
