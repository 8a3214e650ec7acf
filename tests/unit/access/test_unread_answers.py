"""An answer whose client does not read holds a bounded number of bytes (rule N5; answering [3], pool, queries)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.values.model import Publish
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query.sort_memory import SortMemory
from sow_server.services.records.queries import SHORT_BYTES, SHORT_RECORDS, Queries
from tests.support.stores.parts import reading_of
from tests.support.stores.stores import Rig

HELD_MAX = 4 * 2**20
RECORDS = 60
SECONDS = 20.0


class Long:
    """A reader process that takes queries, or none; and how much was held when it was asked."""

    def __init__(self, queries: int, readers: Executor) -> None:
        self.left = queries
        self.readers = readers
        self.running = 1
        self.sorts = SortMemory()
        self.asked_at: list[int] = []
        self.closed = 0
        self.sequence, self.now_micros = 7, 1

    async def ask(self, granted: Granted, request: sow_pb2.QueryRequest) -> Long | None:
        await asyncio.get_running_loop().run_in_executor(self.readers, int)  # in the middle of a piece it differs
        self.asked_at.append(held_bytes())
        async with asyncio.timeout(SECONDS):  # a piece that is under way ends first
            while self.sorts.held_bytes:  # noqa: ASYNC110  # a thread gives it back
                await asyncio.sleep(0)
        self.left -= 1
        return self if self.left >= 0 else None

    async def messages(self) -> AsyncGenerator[bytes, None]:
        yield b"long"

    def close(self) -> None:
        self.closed += 1


def held_bytes() -> int:
    """The bytes of all payloads, messages and stored values that are alive: texts and bytes that have many of a letter.

    `gc` does not know of bytes, but of the lists, tuples, frames and generators that refer to them.
    """
    gc.collect()
    found: dict[int, int] = {}
    for holder in gc.get_objects():
        for one in gc.get_referents(holder):
            if type(one) is bytes and len(one) > 50_000 and one.count(b"y") > len(one) // 2:
                found[id(one)] = len(one)
    return sum(found.values())


@pytest.fixture
def readers() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:  # work that is given to it runs after the piece ahead
        yield made


def filled(path: Path, size: int, records: int = RECORDS) -> Rig:
    rig = Rig(path)
    rig.create_topic("t")
    for number in range(records):
        rig.run(Publish("t", [b"y" * size], keys=[f"{number:04}"]))
    return rig


@pytest.mark.slow
@pytest.mark.parametrize(("size", "processes"), [(100_000, 0), (1_000_000, 0), (1_000_000, 1)])
def test_a_query_that_nobody_reads_holds_a_few_pieces(
    tmp_path: Path, readers: Executor, size: int, processes: int
) -> None:
    """Story: a query kept 3,000 records before it sent the first: three such queries took a gigabyte."""
    rig, long = filled(tmp_path, size, RECORDS if size < 1_000_000 else 20), Long(processes, readers)

    async def scenario() -> None:
        queries = Queries(reading_of(rig.store), readers, SortMemory(), long)
        answer = queries.answer(Granted(rig.topic("t"), UNRESTRICTED), sow_pb2.QueryRequest(topic="t"))
        assert sow_pb2.QueryResponse.FromString(await anext(answer)).header.as_of_micros
        for _ in range(3):
            message = await anext(answer)
            await asyncio.get_running_loop().run_in_executor(readers, int)
            assert held_bytes() <= HELD_MAX + len(message)
            if processes:
                assert message == b"long"
                assert held_bytes() == 0, "of the answer that was begun here, nothing is left"
                break
        await answer.aclose()
        await asyncio.get_running_loop().run_in_executor(readers, int)
        assert max(long.asked_at) <= HELD_MAX
        assert len(long.asked_at) == 1
        assert long.closed == processes

    asyncio.run(scenario())
    rig.close()


def test_a_query_of_few_bytes_and_records_asks_no_reader_process(tmp_path: Path, readers: Executor) -> None:
    rig, long = filled(tmp_path, SHORT_BYTES // 10, 5), Long(1, readers)
    assert SHORT_RECORDS > 5

    async def scenario() -> None:
        queries = Queries(reading_of(rig.store), readers, SortMemory(), long)
        found = [
            one async for one in queries.answer(Granted(rig.topic("t"), UNRESTRICTED), sow_pb2.QueryRequest(topic="t"))
        ]
        assert sow_pb2.QueryResponse.FromString(found[-1]).footer.returned == 5
        assert long.asked_at == []

    asyncio.run(scenario())
    rig.close()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
def test_a_sort_gives_its_memory_back_before_a_reader_process_sorts(
    tmp_path: Path, readers: Executor, processes: int
) -> None:
    """Story: it kept the memory, and the turn, while its query waited for memory in the reader process; all others
    waited for it. Where no reader process takes the query after all, it begins anew here."""
    rig, long, records = filled(tmp_path, 10, 0), Long(processes, readers), SHORT_RECORDS + 1_500
    rig.run(Publish("t", [b"y"] * records, keys=[f"{number:04}" for number in range(records)]))

    async def scenario() -> None:
        queries = Queries(reading_of(rig.store), readers, long.sorts, long)
        request = sow_pb2.QueryRequest(topic="t", order_by="@key DESC")
        found = [one async for one in queries.answer(Granted(rig.topic("t"), UNRESTRICTED), request)]
        assert len(long.asked_at) == 1
        assert long.closed == processes
        if not processes:
            footer = sow_pb2.QueryResponse.FromString(found[-1]).footer
            assert footer.matched == footer.returned == records

    asyncio.run(scenario())
    rig.close()
