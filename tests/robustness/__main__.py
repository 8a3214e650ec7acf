"""Rounds of robustness, one after the other, in several processes: `make test-robustness ROUNDS=500 SEED=1 WORKERS=2`.

Round n has the seed SEED + n. A round that fails leaves its history and the logs of its servers in a folder, and the
next one begins. The exit code tells whether any has failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as in tests/conftest.py: before anything imports grpc

from tests.robustness.cells import CellsPlan
from tests.robustness.playing import run_and_keep
from tests.robustness.round import Plan

ROUNDS_A_PROCESS = 20
"""A process ends after so many, with whatever its rounds have left in memory."""


def main() -> int:
    """Returns 1 if a round has failed."""
    parser = argparse.ArgumentParser(prog="tests.robustness", description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("robustness-failures"), help="folder for rounds that failed")
    parser.add_argument("--shape", default="")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long the nemesis is at work")
    parser.add_argument("--grace", type=float, default=-1.0, help="seconds that tombstones are kept; 0: the default")
    parser.add_argument("--faults", default="", help="the faults that the nemesis chooses from, with commas")
    parser.add_argument("--cells", action="store_true", help="rounds of three cells, of which one has a fault")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.rounds)
    plans: list[Plan | CellsPlan]
    if given.cells:
        plans = [CellsPlan.of(seed, seconds=given.seconds, faults=given.faults) for seed in seeds]
    else:
        grace_micros = int(given.grace * 1_000_000) if given.grace >= 0 else -1
        plans = [
            Plan.of(seed, shape=given.shape, seconds=given.seconds, grace_micros=grace_micros, faults=given.faults)
            for seed in seeds
        ]
    failed: dict[int, list[str]] = {}
    began = time.monotonic()
    for number, (plan, figures, problems) in enumerate(_played(plans, given.workers, given.keep), 1):
        print(f"{number}/{given.rounds} {figures}", flush=True)
        for problem in problems[:20]:
            print(f"    {problem[:1000]}", flush=True)
        if problems:
            failed[plan.seed] = problems
    kinds = Counter(problem.partition(":")[0] for problems in failed.values() for problem in problems)
    print(f"{given.rounds} rounds from seed {given.seed} in {time.monotonic() - began:.0f} s, {len(failed)} failed")
    for kind, count in kinds.most_common():
        print(f"    {count} × {kind}")
    for seed in sorted(failed):
        cells = "CELLS=1 " * given.cells
        print(f"    make test-robustness {cells}SEED={seed} ROUNDS=1    # its history: {given.keep}/seed-{seed}")
    return 1 if failed else 0


def _played(
    plans: Sequence[Plan | CellsPlan], workers: int, keep: Path
) -> Iterator[tuple[Plan | CellsPlan, str, list[str]]]:
    """Plays the rounds; yields each with its figures and problems as it ends."""
    # A pool of processes for so many rounds at a time, rather than one whose processes end after so many: in Python
    # 3.11 an executor with `max_tasks_per_child` stops for ever once its first processes have had their share.
    for start in range(0, len(plans), ROUNDS_A_PROCESS * workers):
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            some = plans[start : start + ROUNDS_A_PROCESS * workers]
            running = {pool.submit(run_and_keep, plan, keep): plan for plan in some}
            for future in as_completed(running):
                plan = running[future]
                try:
                    yield plan, *future.result()
                except Exception as failure:
                    yield plan, f"seed={plan.seed}", [f"{type(failure).__name__}: {failure}"]


if __name__ == "__main__":
    sys.exit(main())
