"""Duties of the servicer of exports: the cut is on disk (rules Q6, S7)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sow.v1 import snapshot_pb2
from sow_server.engine.pending import Pending
from sow_server.engine.values.model import Durability, Publish
from sow_server.query.exports import Exports
from sow_server.services.exporting import ServedExport
from sow_server.services.reader_pieces import ReaderPieces
from sow_server.services.snapshot_service import SnapshotService
from tests.support.stores.parts import call_of, no_reader_processes, reading_of
from tests.support.stores.stores import BINARY, Rig

"""Only an error needs one."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("t", BINARY)
    yield rig
    rig.close()


def test_an_export_is_answered_only_once_its_cut_is_on_disk(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash could take back records, and changes followed from its bookmark would be those of another time."""
    publish = Publish("t", [b"1"], keys=["1"], durability=Durability.BUFFERED)
    rig.store.commits.submit(publish)
    rig.turn()
    writer = rig.store.writer
    assert writer.synced_sequence < writer.last_sequence

    async def main() -> snapshot_pb2.OpenExportResponse:
        waiting = asyncio.Event()
        barrier = rig.store.commits.barrier

        def noted() -> Pending[None]:
            waiting.set()
            return barrier()

        monkeypatch.setattr(rig.store.commits, "barrier", noted)
        with ThreadPoolExecutor(1) as readers:
            exports: Exports[ServedExport] = Exports(rig.store.reads)
            processes = no_reader_processes(rig.store, tmp_path)
            pieces = ReaderPieces(readers)
            service = SnapshotService(reading_of(rig.store), rig.store.writes, exports, readers, processes, pieces)
            opening = asyncio.ensure_future(
                service.OpenExport(snapshot_pb2.OpenExportRequest(topic="t"), call_of(rig.store, "OpenExport"))
            )
            await waiting.wait()
            assert not opening.done()
            writer.step()
            return await opening

    response = asyncio.run(main())
    assert response.bookmark == rig.store.instance.bookmark(writer.synced_sequence)
