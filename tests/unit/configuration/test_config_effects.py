"""Knobs whose effect no other test shows: each does what it says, from the file to the part that it is for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sow.v1 import snapshot_pb2
from sow_server import app
from sow_server.access.audit import Part
from sow_server.access_control import AccessControl
from sow_server.config import Config, clock_options, load, store_options
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.commit.pace import CallsUnderWay, SweepPace
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.values.clock import ClockBehindError, GuardedClock, TimeSource
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Publish, PublisherPosition
from sow_server.metrics import Metrics
from sow_server.services.changes_service import ChangesService
from sow_server.services.door.capacity import InFlight
from sow_server.services.door.fair_readers import FairReaders
from sow_server.services.log_tail import LogTail
from tests.support.oracles.access import write_access
from tests.support.servers.configs import Write, write
from tests.support.stores.stores import BINARY, HOUR, MINUTE, SECOND, START, Rig

__all__ = ["write"]  # a fixture

MIB = 2**20
WATCHDOG_SECONDS = 60


# ---- the store ----

Open = Callable[[str], Rig]


@pytest.fixture
def opened(tmp_path: Path, write: Write) -> Iterator[Open]:
    """Opens stores with the options of a configuration."""
    made: list[Rig] = []

    def open_(text: str) -> Rig:
        rig = Rig(tmp_path / f"rig-{len(made)}", options=store_options(load(write(text))))
        made.append(rig)
        rig.create_topic("t", BINARY)
        return rig

    yield open_
    for rig in made:
        rig.close()


def test_table_files_are_verified_at_the_start_up_to_a_size(opened: Open) -> None:
    """[storage] verify_at_start; behind it, the first look is that of the scrub."""
    for size, verified in (("0B", False), ("1MiB", True)):
        rig = opened(f'[storage]\nverify_at_start = "{size}"\n')
        rig.put("t", "1")
        rig.reopen()  # an orderly stop leaves a table file
        assert rig.store.upkeep.verified_at_start is verified


def test_an_idle_publisher_is_remembered_for_its_time(opened: Open) -> None:
    """[storage] publisher_ttl (P6)."""
    for ttl, kept in (("1h", (0, 0)), ("61m", (1, 1))):
        rig = opened(f'[storage]\npublisher_ttl = "{ttl}"\n')
        rig.run(Publish("t", [b"1"], ["1"], publisher=PublisherPosition("p", 1, 1)))
        rig.time.tick(HOUR)
        rig.store.upkeep.forget_publishers()
        rig.store.writer.step()
        assert rig.store.cuts.publisher_position("p") == kept


def staging(rig: Rig, size: int) -> None:
    """Stages one row of this size in a load of its own. Raises StoreError."""
    loads = rig.store.loads
    load = rig.store.finish(loads.open("t", MINUTE)).row.id
    row = Publish("", [bytes(size)], ["1"])
    for piece in loads.staging.prepare(load, 0, 1, 1, row, RequestLimits(), stager=0):
        rig.store.finish(loads.staging.stage(piece))


def test_all_loads_together_stage_no_more_than_is_allowed(opened: Open) -> None:
    """[limits] loads_bytes_max."""
    for size in (1, 2):
        rig = opened(f'[limits]\nloads_bytes_max = "{size}MiB"\n')
        for _ in range(size):
            staging(rig, MIB - 1_000)
        with pytest.raises(StoreError) as refused:
            staging(rig, MIB - 1_000)
        assert refused.value.reason is Reason.REQUEST_TOO_LARGE


def test_loads_leave_some_of_the_disk_free(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """[limits] loads_disk_free_min."""
    for least, has_room in (("5MiB", True), ("6MiB", False)):
        rig = opened(f'[limits]\nloads_disk_free_min = "{least}"\n')
        monkeypatch.setattr(rig.store._rocks, "free_bytes", lambda: 6 * MIB - 1)
        if has_room:
            staging(rig, 100)
            continue
        with pytest.raises(StoreError) as refused:
            staging(rig, 100)
        assert refused.value.reason is Reason.DISK_FULL


def test_a_clock_that_is_too_far_behind_the_data_refuses_the_start(write: Write) -> None:
    """[clock] max_behind (L15)."""
    options = clock_options(load(write('[clock]\nmax_behind = "4s"\n')))

    def start(behind: int) -> GuardedClock:
        clock = GuardedClock(wall=lambda: START - behind, elapsed=lambda: 0, options=options)
        clock.start(START)
        return clock

    assert start(4 * SECOND).now_micros() == START, "time stands still until the clock has caught up"
    with pytest.raises(ClockBehindError):
        start(4 * SECOND + 1)


def test_commits_of_a_long_sweep_pause_beside_publishers(write: Write) -> None:
    """[sweep] busy_pause (L14)."""
    options = store_options(load(write('[sweep]\nbusy_pause = "7ms"\n'))).writer
    pace = SweepPace(options, CallsUnderWay())
    pace.published(START)
    pace.swept(20, START, START + 10, more=True)
    assert pace.not_before() == START + 10 + 7_000


# ---- the audit log ----


def test_so_many_older_files_of_the_audit_log_are_kept(tmp_path: Path) -> None:
    """[access] audit_files (A8)."""
    for files in (1, 3):
        folder = tmp_path / f"{files}"
        write_access(folder, "")
        text = f'[server]\nauth = "token"\n[access]\nfile = "auth.toml"\naudit = "audit.jsonl"\naudit_files = {files}\n'
        (folder / "sow.toml").write_text(text + 'audit_bytes_max = "64KiB"\n')
        with ThreadPoolExecutor(1) as readers:
            control = AccessControl(load(folder / "sow.toml"), Topics(), Metrics(), readers)
            for _ in range(5 * 64 * 1024 // 1_000):
                control.authorizer._audit.write(Part.CALLS, "call", {f"field-{n}": "x" * 200 for n in range(5)})
            control.stop()
        older = sorted(path.name for path in folder.glob("audit-calls.jsonl.*"))
        assert older == [f"audit-calls.jsonl.{number}" for number in range(1, files + 1)]


# ---- the server ----


class Listeners:
    """In place of the network: listeners of a server that is started in this process."""

    def __init__(self) -> None:
        self.graces: list[float] = []

    def add_generic_rpc_handlers(self, handlers: object) -> None: ...

    def expiries(self) -> Iterator[Any]:
        return iter(())

    async def start(self) -> None: ...

    async def stop(self, grace_seconds: float) -> None:
        self.graces.append(grace_seconds)


class Started:
    """What a server has made of its configuration."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.listeners = Listeners()
        self.readers: list[FairReaders] = []
        self.in_flight: list[InFlight] = []
        self.changes: list[ChangesService] = []
        started = self

        class Readers(FairReaders):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                started.readers.append(self)

        class Bytes(InFlight):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                started.in_flight.append(self)

        class Changes(ChangesService):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                started.changes.append(self)

        patch.setattr(app, "FairReaders", Readers)
        patch.setattr(app, "InFlight", Bytes)
        patch.setattr(app, "ChangesService", Changes)
        patch.setattr(app, "_listen", self._listen)
        patch.setattr(app, "_tune_gc", lambda: None)  # it is this process's, too

    def _listen(self, config: Config, register: Any, _links: object) -> tuple[Listeners, tuple[str, ...]]:
        register(self.listeners, config.listeners[0])
        return self.listeners, ("here:1",)

    def run(self, config: Config, act: Callable[[], None] = lambda: None) -> None:
        """Starts a server, acts, and stops it."""

        async def serve() -> None:
            async with AsyncExitStack() as running:
                await app._start(config, LogTail(), TimeSource(), running)
                act()

        asyncio.run(serve())


def test_the_server_hands_its_bounds_to_its_parts(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[server] reader_threads and stop_grace, [limits] in_flight_bytes_max and pin_idle_ttl_max."""
    config = load(
        write(
            f"""
[server]
data_dir = "{tmp_path / "data"}"
reader_threads = 2
reader_processes = 0
stop_grace = "70s"
[limits]
in_flight_bytes_max = "64MiB"
pin_idle_ttl_max = "2h"
"""
        )
    )
    started = Started(monkeypatch)

    def reading() -> None:
        """Two readers work at a time, and the third waits for one of them."""
        (readers,) = started.readers
        begun, go_on = threading.Semaphore(0), threading.Event()

        def read() -> bool:
            begun.release()
            return go_on.wait(WATCHDOG_SECONDS)

        work = [readers.submit(read) for _ in range(3)]
        for _ in range(2):
            assert begun.acquire(timeout=WATCHDOG_SECONDS)
        assert not begun.acquire(blocking=False)
        assert not any(one.done() for one in work)
        go_on.set()
        assert all(one.result(WATCHDOG_SECONDS) for one in work)

    started.run(config, reading)
    assert started.listeners.graces == [70.0]
    (in_flight,) = started.in_flight
    assert in_flight.requests.take("one", 60 * MIB)
    assert not in_flight.requests.take("another", 5 * MIB)
    assert in_flight.requests.take("another", 4 * MIB)
    request = snapshot_pb2.PinJournalRequest(topic="t", name="reader", idle_ttl_micros=2 * HOUR + 1)
    call: Any = SimpleNamespace(topic=lambda _: SimpleNamespace(topic=None))
    with pytest.raises(StoreError, match="this server allows 2h"):
        asyncio.run(started.changes[0].PinJournal(request, call))
