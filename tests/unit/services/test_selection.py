"""The records that a filter selects for a change are read ahead of the change (rule D2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sow_server.access.caller import Granted
from sow_server.engine.values.model import Delete, Durability, Publish
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query import sieve
from sow_server.services.records.selection import BUSY_RECORDS, CHANGE_RECORDS, selected
from tests.support.stores.stores import Rig

T = TypeVar("T")
RECORDS = 2 * CHANGE_RECORDS + 500


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step ends early because the machine is busy."""
    monkeypatch.setattr(sieve, "JUDGING_SECONDS", 60.0)


class CountedReaders(ThreadPoolExecutor):
    """Counts what it is given to run."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given = 0

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self.given += 1
        return super().submit(fn, *args, **kwargs)


def test_the_next_records_are_read_while_the_caller_changes_the_last_ones(tmp_path: Path) -> None:
    """D2: the cut is of one instant, so reading ahead finds no other records."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    keys = [f"{number:05}" for number in range(RECORDS)]
    rig.run(Publish("orders", [b"x"] * RECORDS, keys, durability=Durability.BUFFERED))
    found: list[bytes] = []
    given: list[int] = []

    async def change(readers: CountedReaders) -> None:
        granted = Granted(rig.topic("orders"), UNRESTRICTED)
        async with aclosing(selected(rig.store.cuts, readers, granted, "@key != 'x'")) as batches:
            async for batch, _, absent in batches:
                assert absent == ()
                given.append(readers.given)
                found.extend(batch)
                rig.run(Delete("orders", [key.decode() for key in batch]))

    with CountedReaders() as readers:
        asyncio.run(change(readers))
    assert [key.decode() for key in found] == keys
    # The filter is compiled and the query planned first; then each batch comes with the step behind it under way.
    assert given == [4, 5, 6]
    assert not rig.live("orders")
    rig.close()


def test_beside_publishers_all_but_the_first_batch_are_small(tmp_path: Path) -> None:
    """D2, L14: a publish waits for the commit of a batch. Up to 1,000 records go in one commit even so."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    keys = [f"{number:05}" for number in range(RECORDS)]
    rig.run(Publish("orders", [b"x"] * RECORDS, keys, durability=Durability.BUFFERED))
    sizes: list[int] = []

    async def change(readers: ThreadPoolExecutor) -> None:
        granted = Granted(rig.topic("orders"), UNRESTRICTED)
        found = selected(rig.store.cuts, readers, granted, "@key != 'x'", busy=lambda: len(sizes) < 4)
        async with aclosing(found) as batches:
            async for batch, _, _ in batches:
                sizes.append(len(batch))

    with ThreadPoolExecutor(1) as readers:
        asyncio.run(change(readers))
    assert sizes == [CHANGE_RECORDS, BUSY_RECORDS, BUSY_RECORDS, BUSY_RECORDS, 750]
    rig.close()
