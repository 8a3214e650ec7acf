"""The simulation of replication on the real store instead of the model (R3 to R7): the same lives, the same end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.property.test_replication_commands import run_changing_seed
from tests.property.test_replication_simulation import Wrong, run_losing_seed, run_seed
from tests.support.oracles.examples import lives
from tests.support.simulation.replica_rocks import RocksStore
from tests.support.simulation.replica_rows import Make, Written
from tests.support.simulation.replica_world import Broken, Storm

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_lives_on_the_real_store_end_equal_and_with_the_greatest_that_was_written(
    tmp_path: Path, seed: int, part: int
) -> None:
    for number in range(lives(6)):
        live(tmp_path / str(number), (seed + 50_000 + part * 1000 + number) % 2**32)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_one_thousand_lives_on_the_real_store_end_equal(tmp_path: Path, seed: int, part: int) -> None:
    for number in range(50):
        live(tmp_path / str(number), (seed + 200_000 + part * 1000 + number) % 2**32)


@pytest.mark.parametrize("number", [0, *[pytest.param(number, marks=pytest.mark.long) for number in range(1, 101)]])
def test_instances_that_lost_their_data_end_equal_on_the_real_store(tmp_path: Path, seed: int, number: int) -> None:
    """K7."""
    empty = tmp_path / "empty"
    empty.mkdir()
    run = partial(run_losing_seed, empty=lambda: empty)
    live(tmp_path / "life", (seed + 950_000 + number) % 2**32, run=run)


@pytest.mark.parametrize("number", [0, *[pytest.param(number, marks=pytest.mark.long) for number in range(1, 101)]])
def test_instances_whose_links_come_and_go_end_equal_on_the_real_store(tmp_path: Path, seed: int, number: int) -> None:
    """R14."""
    live(tmp_path / "life", (seed + 960_000 + number) % 2**32, run=run_changing_seed)


def live(
    folder: Path, seed: int, kind: type[RocksStore] = RocksStore, *, run: Callable[[int, Make], None] = run_seed
) -> None:
    """One life of some instances."""
    folder.mkdir()
    stores: list[RocksStore] = []

    def make(
        name: str, now: Callable[[], int], peers: Sequence[str], *, written: Callable[[Written], None]
    ) -> RocksStore:
        stores.append(kind(folder, name, now, peers, written=written))
        return stores[-1]

    try:
        run(seed, make)
    finally:
        for store in stores:
            store.close()


# -- mistakes that the simulation has to find -----------------------------------------------------------------------


class AcknowledgesBeforeTheSync(RocksStore):
    """Received changes are acknowledged once they are written.

    Story: with this mistake in the store all tests of replication passed: whatever killed a receiver, the operating
    system kept its writes.
    """

    def _open(self) -> None:
        super()._open()
        commits = self._rig.store.commits
        commits.run_in_rounds = partial(commits.run_in_rounds, sync=False)  # type: ignore[method-assign]  # the mistake


FIRST = 19
"""Seeds in front of this one do not find it."""
FOUND_WITHIN = 10


def test_a_mistake_that_is_planted_in_the_real_store_is_found(tmp_path: Path) -> None:
    for number in range(FIRST, FIRST + FOUND_WITHIN):
        try:
            live(tmp_path / str(number), number, AcknowledgesBeforeTheSync)
        except (Wrong, Storm, Broken) as wrong:
            print(wrong)
            return
    pytest.fail(f"not found within {FOUND_WITHIN} seeds")
