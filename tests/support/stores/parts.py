"""Parts of the server on a store, linked as `sow_server.app` links them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sow_server.access.audit import Value
from sow_server.access.caller import Call
from sow_server.access.needs import NEEDS, Action
from sow_server.access.permissions import Decision
from sow_server.cells import Cells
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.doors import Reads
from sow_server.engine.store import Store
from sow_server.metrics import StoreFigures
from sow_server.peer_store import PeerStore
from sow_server.placement import Places, load_placement
from sow_server.prepared import PreparedFile
from sow_server.reader_processes.pool import ReaderOptions, ReaderProcesses
from tests.support.servers.cells import placement


def figures_of(store: Store) -> StoreFigures:
    """The parts of the store that metrics read."""
    return StoreFigures(store.reads, store.writes)


def reading_of(store: Store) -> Reads:
    """The parts of the store that services read through."""
    return store.reads


class NoAccessFile:
    """The authority of calls where there is no access file, and so no denial."""

    def __init__(self, topics: Topics) -> None:
        self.topics = topics
        self.places = None

    def denied(self, call: Call, action: Action, topic: str, decision: Decision) -> None:
        raise AssertionError(f"{call.method} was denied {action} on {topic}")

    def deletes(self, call: Call) -> None:
        raise AssertionError(f"{call.method} has no access file, and so no audit log")


def no_reader_processes(store: Store, folder: Path) -> ReaderProcesses:
    """Every query is answered in this process."""
    options = ReaderOptions(0, folder, block_cache_bytes=0, sort_bytes_max=0, sorts_waiting_max=0)
    return ReaderProcesses(options, store.reads, store.writes, store.beats)


def call_of(store: Store, method: str) -> Call:
    """A call of a caller who may do everything, by the name of the method."""
    path, need = next((path, need) for path, need in NEEDS.items() if path.endswith(f"/{method}"))
    return Call(path, need, NoAccessFile(store.topics))


def peer_store_of(store: Store, *, name: str) -> PeerStore:
    """The store as replication uses it; `name`: of the instance."""
    return PeerStore(
        store.reads,
        store.writes,
        name=name,
    )


class NoCalls:
    """No calls are under way."""

    def placement_changed(self) -> int:
        return 0

    def tell_signal(self, event: str, signal: str, fields: Mapping[str, Value]) -> None:
        raise AssertionError(f"there is no {signal}")


def cells_of(store: Store, folder: Path) -> Cells:
    """A cell with a placement of its own, whose other cell does not answer."""
    path = folder / "placement.toml"
    path.write_text(placement(1, ("elsewhere", "b")))
    places, files = Places("a", path, load_placement(path)), PreparedFile(folder, path)
    cells = Cells(places, ThreadPoolExecutor(1), NoCalls(), store.commits.moved, files)
    cells.heard("b", {"h:1": "UNAVAILABLE"}, 1)
    return cells
