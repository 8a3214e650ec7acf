"""The figures that all watchers of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sow_server.services import figures
from sow_server.services.figures import OverdueCount
from tests.support.stores.stores import BINARY, SECOND, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("a", BINARY)
    yield rig
    rig.close()


def test_overdue_records_are_counted_once_a_second_for_all_watchers(rig: Rig) -> None:
    """A count of 100,000 takes 0.15 s of a reader thread. Each watcher made its own, up to ten times a second."""
    counts = 0

    class Counted(OverdueCount):
        def _count(self) -> int:
            nonlocal counts
            counts += 1
            return super()._count()

    async def watch() -> list[list[int]]:
        counted = Counted(rig.store.cuts, readers)
        found = [await asyncio.gather(*[counted.at(rig.clock.now_micros()) for _ in range(5)])]
        for key in "12":
            rig.put("a", key, ttl=1)
        rig.time.tick(SECOND - 1)
        found.append([await counted.at(rig.clock.now_micros())])
        rig.time.tick(1)
        found.append([await counted.at(rig.clock.now_micros())])
        return found

    with ThreadPoolExecutor(1) as readers:
        assert asyncio.run(watch()) == [[0] * 5, [0], [2]]
    assert counts == 2


def test_a_count_of_overdue_records_ends_after_so_many_entries(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of records that were refreshed meanwhile were read without end while the sweep was paused."""
    monkeypatch.setattr(figures, "OVERDUE_MAX", 3)
    for number in range(1, 5):
        rig.put("a", str(number), ttl=number)
        rig.put("a", str(number), ttl=10 * SECOND)
    rig.put("a", "overdue", ttl=5)
    rig.time.tick(SECOND)

    async def count() -> int:
        return await OverdueCount(rig.store.cuts, readers).at(0)

    with ThreadPoolExecutor(1) as readers:
        assert asyncio.run(count()) == 0
        monkeypatch.setattr(figures, "OVERDUE_MAX", 5)
        assert asyncio.run(count()) == 1
