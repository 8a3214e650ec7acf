"""Duties of the servicer of loads and the tasks behind it: a committed load is applied, whoever is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sow.v1 import load_pb2
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.loads import LoadPhase
from sow_server.engine.pending import Pending, answered
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services import load_service
from sow_server.services.load_jobs import LoadJobs
from sow_server.services.load_service import LoadService
from sow_server.services.records.admission import Admission
from tests.support.stores.parts import call_of
from tests.support.stores.stores import BINARY, Rig

"""Only an error needs one."""


class Served:
    """A rig behind a servicer of loads."""

    def __init__(self, rig: Rig, readers: ThreadPoolExecutor) -> None:
        self.rig = rig
        self.loading = LoadJobs(
            rig.store.reads,
            rig.store.writes,
            Admission(rig.store.reads, rig.store.writes),
            readers,
        )
        self.service = LoadService(rig.store.writes, self.loading, readers, RequestLimits(), dynamic_topics=False)

    async def done(self, awaited: Awaitable[object]) -> object:
        """Lets the writer work until something is done."""
        task = asyncio.ensure_future(awaited)
        await self.until(task.done)
        return await task

    async def open(self) -> str:
        """Opens a load."""
        opened = await self.done(
            self.service.OpenLoad(load_pb2.OpenLoadRequest(topic="t"), call_of(self.rig.store, "OpenLoad"))
        )
        assert isinstance(opened, load_pb2.OpenLoadResponse)
        return opened.load_id

    async def ended(self, load: str) -> None:
        """Returns when a load has ended."""
        found = self.rig.store.loads.registry.find(load)
        await self.until(lambda: bool(found.row.end_micros))

    async def until(self, holds: Callable[[], bool], *, steps: bool = True) -> None:
        """Lets everybody work (the writer with `steps`) until something holds."""
        while not holds():
            if steps:
                self.rig.store.writer.step()
            await asyncio.sleep(0)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("t", BINARY)
    rig.put("t", "old")
    yield rig
    rig.close()


def run(rig: Rig, test: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(2) as readers:
            served = Served(rig, readers)
            try:
                await test(served)
            finally:
                await served.loading.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_commit_without_a_waiting_caller_is_applied(rig: Rig) -> None:
    async def test(served: Served) -> None:
        load = await served.open()
        stream = served.service.CommitLoad(
            load_pb2.CommitLoadRequest(load_id=load), call_of(served.rig.store, "CommitLoad")
        )
        first = asyncio.ensure_future(anext(stream))
        await served.until(lambda: rig.store.writer.queue.depth[0] > 0, steps=False)
        first.cancel()
        await asyncio.wait([first])
        await served.ended(load)
        assert rig.live("t") == {}

    run(rig, test)


def test_a_load_that_could_not_even_be_failed_is_taken_up_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something stops its task: it is not left alone until the next start."""
    monkeypatch.setattr("sow_server.services.load_jobs.RETRY_SECONDS", 0)
    refusals = [StoreError(Reason.DATA_DAMAGED, "one block"), StoreError(Reason.WRITE_STALLED, "for long")]

    async def test(served: Served) -> None:
        load = await served.open()
        with monkeypatch.context() as patched:

            def refused(step: object, **_: object) -> Pending[object]:
                return answered(refusals.pop(0))

            stream = served.service.CommitLoad(
                load_pb2.CommitLoadRequest(load_id=load), call_of(served.rig.store, "CommitLoad")
            )
            await served.done(anext(stream))
            await served.ended(load)
            found = rig.store.loads.registry.find(load)
            assert found.row.phase is LoadPhase.DONE
            again = await served.open()
            commit = asyncio.ensure_future(
                anext(
                    served.service.CommitLoad(
                        load_pb2.CommitLoadRequest(load_id=again), call_of(served.rig.store, "CommitLoad")
                    )
                )
            )
            await served.until(lambda: rig.store.writer.queue.depth[0] > 0, steps=False)
            patched.setattr(rig.store.commits, "run", refused)
            rig.store.writer.step()
            await commit
            await served.until(lambda: not (refusals or served.loading._tasks), steps=False)
        assert rig.store.loads.registry.find(again).row.working
        served.loading.look_after()
        await served.ended(again)
        assert rig.store.loads.registry.find(again).row.phase is LoadPhase.DONE

    run(rig, test)


def test_damage_under_one_record_fails_the_load_where_writing_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(served: Served) -> None:
        load = await served.open()

        def damaged(self: Draft, store_keys: list[bytes]) -> None:
            raise StoreError(Reason.DATA_DAMAGED, "stored data is damaged: a block")

        monkeypatch.setattr(Draft, "fetch_bodies", damaged)
        stream = served.service.CommitLoad(
            load_pb2.CommitLoadRequest(load_id=load), call_of(served.rig.store, "CommitLoad")
        )
        await served.done(anext(stream))
        await served.ended(load)
        assert rig.store.loads.registry.find(load).row.phase is LoadPhase.FAILED

    run(rig, test)


def test_streams_together_take_no_more_memory_than_there_is_room_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are read only as others have been staged, and one that is cut off gives its room back."""
    monkeypatch.setattr(load_service, "ROOM_BYTES", 3000)
    taken = 0

    async def test(served: Served) -> None:
        load = await served.open()

        async def requests(part: int) -> AsyncIterator[load_pb2.StageLoadRequest]:
            nonlocal taken
            for row in range(3):
                taken += 1
                yield load_pb2.StageLoadRequest(
                    load_id=load, part=part, attempt=1, first_row=row + 1, key=[str(row)], payload=[bytes(1000)]
                )

        def stream(part: int) -> AsyncIterator[load_pb2.StageLoadResponse]:
            return served.service.StageLoad(requests(part), call_of(served.rig.store, "StageLoad"))

        async def read(part: int) -> int:
            return len([response async for response in stream(part)])

        cut = stream(9)
        waiting = asyncio.ensure_future(anext(cut))
        await served.until(lambda: taken == 3, steps=False)
        waiting.cancel()
        await asyncio.wait([waiting])
        room = served.service._room
        assert room._taken == 0
        streams = [asyncio.ensure_future(read(part)) for part in range(5)]
        while not all(task.done() for task in streams):
            assert room._taken <= 3000
            rig.store.writer.step()
            await asyncio.sleep(0)
        assert [task.result() for task in streams] == [3] * 5
        assert room._taken == 0

    run(rig, test)
