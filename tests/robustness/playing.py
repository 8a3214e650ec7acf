"""Plays a round of either kind, and keeps what one that failed leaves. Processes of a pool import this."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.robustness.cells import CellsPlan, CellsRound
from tests.robustness.round import Plan, Round


def run_and_keep(plan: Plan | CellsPlan, kept: Path) -> tuple[str, list[str]]:
    """Runs a round; returns its figures and its problems. One that failed leaves its history and logs in `kept`."""
    folder = Path(tempfile.mkdtemp(prefix="sow-round-"))
    try:
        outcome = CellsRound(plan, folder).run() if isinstance(plan, CellsPlan) else Round(plan, folder).run()
        if outcome.problems:
            target = kept / f"seed-{plan.seed}"
            shutil.rmtree(target, ignore_errors=True)
            outcome.history.save(target)
            (target / "plan.json").write_text(json.dumps(asdict(plan)))
            (target / "problems.txt").write_text("\n".join(outcome.problems) + "\n")
            for log in folder.glob("*/server.log"):
                shutil.copy(log, target / f"{log.parent.name}.log")
        return outcome.figures, outcome.problems
    finally:
        shutil.rmtree(folder, ignore_errors=True)
