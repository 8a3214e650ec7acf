"""The simulation of replication on the real store instead of the model (R3 to R7): the same lives, the same end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.property.test_replication_simulation import run_seed
from tests.support.replica_rocks import RocksStore
from tests.support.replica_world import Written


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_lives_on_the_real_store_end_equal_and_with_the_greatest_that_was_written(
    tmp_path: Path, seed: int, part: int
) -> None:
    for number in range(6):
        live(tmp_path / str(number), (seed + 50_000 + part * 1000 + number) % 2**32)


@pytest.mark.long
@pytest.mark.parametrize("part", range(40))
def test_two_thousand_lives_on_the_real_store_end_equal(tmp_path: Path, seed: int, part: int) -> None:
    for number in range(50):
        live(tmp_path / str(number), (seed + 200_000 + part * 1000 + number) % 2**32)


def live(folder: Path, seed: int) -> None:
    """One life of some instances."""
    folder.mkdir()
    stores: list[RocksStore] = []

    def make(
        name: str, now: Callable[[], int], peers: Sequence[str], *, written: Callable[[Written], None]
    ) -> RocksStore:
        stores.append(RocksStore(folder, name, now, peers, written=written))
        return stores[-1]

    try:
        run_seed(seed, make)
    finally:
        for store in stores:
            store.close()
