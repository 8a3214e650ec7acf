"""Rounds of robustness: a few seconds of faults on a cluster of real processes, and the judgement of what clients
saw. `make test-robustness` runs hundreds, and says how to repeat one (docs/testing.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.round import SECOND, Plan, Round


def judge(plan: Plan, folder: Path) -> None:
    """Runs a round, and fails with its problems and the command that repeats it."""
    outcome = Round(plan, folder).run()
    print(outcome.figures)
    for fault in outcome.history.faults:
        print(fault)
    assert not outcome.problems, "\n".join([outcome.figures, *outcome.problems[:20]])
    assert any(op.outcome == "ok" for op in outcome.history.ops)
    assert outcome.history.seen
    assert outcome.history.faults


def test_a_mesh_with_damaged_and_refused_links_and_kills_keeps_the_guarantees(tmp_path: Path) -> None:
    judge(Plan(101, "mesh", 60 * SECOND, False, True, 1.2, ("damage", "refuse", "kill"), "a"), tmp_path)


def test_a_line_in_which_an_instance_loses_its_data_keeps_replicated_writes(tmp_path: Path) -> None:
    judge(Plan(102, "line", 0, True, True, 1.2, ("wipe", "cut", "stop"), "a"), tmp_path)


@pytest.mark.long
def test_a_round_drawn_from_the_seed_keeps_the_guarantees(tmp_path: Path, seed: int) -> None:
    judge(Plan.of(seed, seconds=2.0), tmp_path)
