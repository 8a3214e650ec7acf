"""Lives of instances that replicate, with clients as steps, on the real store: one after the other, in processes.

    make test-lives LIVES=1000 SEED=1 WORKERS=2
    python -m tests.lives --only leases --seed 4711 --lives 1      # one of them again

Life n has the seed SEED + n. The kinds of clients take turns. A life that fails is told with the line that repeats it,
and the next one begins. The exit code tells whether any has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from tests.property import test_holders, test_moving_consumers, test_moving_publishers, test_resumers

KINDS: Final[dict[str, Callable[[int, Path], Counter[str]]]] = {
    "publishers": test_moving_publishers.live,
    "subscribers": test_resumers.live,
    "leases": test_holders.live,
    "durables": test_moving_consumers.live,
}
FIGURE: Final = 1000
"""After so many lives the figures are told. Then the processes end, with whatever their lives have left in memory."""
TOGETHER: Final = 20
"""Lives that a process is given at a time."""
MEMORY: Final = Path("/dev/shm")


class Life(NamedTuple):
    """A kind of clients, and a seed."""

    kind: str
    seed: int


class Lived(NamedTuple):
    """Some lives: the figures of their clients, and the failures with their reasons."""

    figures: Counter[str]
    failures: dict[Life, str]
    cpu_seconds: float


def live(lives: Sequence[Life]) -> Lived:
    """Lives some of them, in this process."""
    figures: Counter[str] = Counter()
    failures: dict[Life, str] = {}
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="lives-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        for number, life in enumerate(lives):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    figures += KINDS[life.kind](life.seed, Path(folder) / str(number))
            except Exception:
                failures[life] = traceback.format_exc()
    return Lived(figures, failures, time.process_time() - began)


def main() -> int:
    """Returns 1 if a life has failed."""
    parser = argparse.ArgumentParser(prog="tests.lives", description=__doc__)
    parser.add_argument("--lives", type=int, default=FIGURE)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", choices=KINDS, action="append", default=[], help="this kind of clients alone")
    given = parser.parse_args()
    kinds = given.only or list(KINDS)
    lives = [Life(kinds[number % len(kinds)], given.seed + number) for number in range(given.lives)]
    failed: dict[Life, str] = {}
    began, done, cpu = time.monotonic(), 0, 0.0
    for start in range(0, len(lives), FIGURE):
        figures: Counter[str] = Counter()
        some = lives[start : start + FIGURE]
        for lived in _shared(some, max(1, given.workers)):
            figures += lived.figures
            cpu += lived.cpu_seconds
            for life, why in lived.failures.items():
                print(f"{why}\n    {_again(life)}", flush=True)
            failed |= lived.failures
        done += len(some)
        told = ", ".join(f"{name} {count}" for name, count in sorted(figures.items()))
        print(f"{done}/{len(lives)} lives, {len(failed)} failed, {cpu / done:.3f} s of CPU each; {told}", flush=True)
    print(f"{done} lives from seed {given.seed} in {time.monotonic() - began:.0f} s, {len(failed)} failed")
    for life in sorted(failed):
        print(f"    {_again(life)}")
    return 1 if failed else 0


def _shared(lives: Sequence[Life], workers: int) -> Iterator[Lived]:
    """Lives them in processes; yields some at a time, as they end."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_be_quiet) as pool:
        parts = [lives[start : start + TOGETHER] for start in range(0, len(lives), TOGETHER)]
        for future in as_completed([pool.submit(live, part) for part in parts]):
            yield future.result()


def _be_quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _again(life: Life) -> str:
    return f"python -m tests.lives --only {life.kind} --seed {life.seed} --lives 1"


if __name__ == "__main__":
    sys.exit(main())
