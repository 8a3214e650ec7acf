"""Rounds with three cells, of which one has a fault. `make test-robustness CELLS=1` runs hundreds (docs/testing.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.cells import CellsPlan, CellsRound, Phase, Timed, undisturbed


def judge(plan: CellsPlan, folder: Path) -> None:
    """Runs a round, and fails with its problems."""
    outcome = CellsRound(plan, folder).run()
    print(outcome.figures)
    for fault in outcome.history.faults:
        print(fault)
    assert not outcome.problems, "\n".join([outcome.figures, *outcome.problems[:20]])
    assert len(outcome.history.faults) == len(plan.faults)
    assert {op.instance for op in outcome.history.ops if op.outcome == "ok"} == {"a", "b", "c"}
    assert {seen.instance for seen in outcome.history.seen} == {"a", "b", "c"}
    for quiet in (True, False):
        assert min(len(outcome.micros("get", quiet=quiet)), len(outcome.micros("publish", quiet=quiet))) > 20


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "stop", "cut", "stall"])
def test_a_cell_with_a_fault_loses_nothing_and_disturbs_no_other(tmp_path: Path, fault: str) -> None:
    judge(CellsPlan(301, (fault, fault), 1.0), tmp_path)


@pytest.mark.long
def test_a_round_drawn_from_the_seed_keeps_the_guarantees(tmp_path: Path, seed: int) -> None:
    judge(CellsPlan.of(seed), tmp_path)


def test_a_call_that_fails_beside_a_fault_of_another_cell_is_a_problem() -> None:
    phases = [Phase("", 0, 10), Phase("a", 10, 20), Phase("b", 30, 40)]
    told = {
        timed: list(undisturbed([timed], phases))
        for timed in (
            Timed("a", "get", 15, 18, "UNREACHABLE"),
            Timed("a", "get", 9, 11, "UNREACHABLE"),
            Timed("b", "get", 15, 18, ""),
            Timed("b", "get", 15, 18, "UNREACHABLE"),
            Timed("a", "publish", 22, 25, "UNREACHABLE"),
            Timed("c", "publish", 5, 6, "UNREACHABLE"),
        )
    }
    assert [len(found) for found in told.values()] == [0, 0, 0, 1, 1, 1]
