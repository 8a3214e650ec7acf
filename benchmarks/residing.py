"""A server with many records: the time until it is ready again, and its memory."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.documents import documents
from benchmarks.expiring import LOAD_CHUNK, MICROS, load_due
from benchmarks.processes import TOPIC, SowServer
from benchmarks.publishing import publish
from benchmarks.rows import MEBIBYTES, SECONDS, Figure, Row, Target
from benchmarks.setting import Setting
from sow_client import Client

READY_TARGET: Final = Target(3.0, SECONDS, at_least=False)
MEMORY_TARGET: Final = Target(1024.0, MEBIBYTES, at_least=False)
LOOKED_UP: Final = 100
COUNT_SECONDS: Final = 300
"""A count passes five million overdue records while the sweep takes them away: half a minute on a slow machine."""


def restart(setting: Setting) -> Iterator[Row]:
    """Row 7: half of the records fall due while the server is down. Every round starts on a copy of the same data, once
    after an orderly stop and once after SIGKILL."""
    records = setting.count(10_000_000, quick=100_000)
    rounds = 3
    half = records // 2
    home, stopped, killed = (setting.directory / name for name in ("sow", "stopped", "killed"))

    with SowServer(home) as server, Client(server.address) as client:
        setting.say(f"loading {records:,} records")
        begin = time.perf_counter()
        for first in range(0, half, LOAD_CHUNK):
            publish(client, documents(range(first, min(first + LOAD_CHUNK, half))), "buffered")
        spent = time.perf_counter() - begin
        # Time enough to load the other half, to start after SIGKILL, and to stop in order.
        due = time.time() + 3 * spent + 15
        load_due(client, half, round(due * MICROS), over_micros=1, first_number=half)
        time.sleep(0.2)  # BUFFERED is synced within 50 ms, and writes of a killed process stay in any case
        server.kill()
        shutil.copytree(home, killed)
    with SowServer(home) as server, Client(server.address) as client:
        assert client.count(TOPIC) == records, "the killed server lost records"
        spare = due - time.time()
        assert spare > 1, "loaded too late to stop before they are due: the machine is busy, try again"
    shutil.move(home, stopped)
    time.sleep(max(0.0, due - time.time()))

    setting.say(f"{rounds} starts without data")
    empty = []
    for number in range(rounds):
        with SowServer(setting.directory / f"empty-{number}") as server:
            empty.append(server.ready_seconds)
    for how, source in (("an orderly stop", stopped), ("SIGKILL", killed)):
        setting.say(f"{rounds} starts after {how}")
        seconds = []
        for _ in range(rounds):
            shutil.copytree(source, home)
            seconds.append(_start(home, half))
            shutil.rmtree(home)
        ready = Figure(statistics.median(seconds), SECONDS)
        yield Row(
            f"{rounds} starts after {how}, {records:,} records, half of them overdue, none visible",
            ready,
            judged=ready,
            target=READY_TARGET,
            note=f"starts {min(seconds):.2f}–{max(seconds):.2f} s; without data {statistics.median(empty):.2f} s;"
            f" machine: {setting.machine}",
        )


def _start(home: Path, half: int) -> float:
    """Starts on the data and asks at once; seconds from exec to ready."""
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(home))
        client = stack.enter_context(Client(server.address))
        overdue = [str(number) for number in range(half, half + LOOKED_UP)]
        visible = client.get_many(TOPIC, overdue)
        assert not visible, f"{len(visible)} overdue records were visible at the first request"
        counted = client.count(TOPIC, timeout=COUNT_SECONDS)
        assert counted == half, f"{counted} records were counted at the second request, {half} are alive"
        return server.ready_seconds


def memory(setting: Setting) -> Iterator[Row]:
    """Row 8: VmRSS after loading, after updates, and after a query of the whole topic. The greatest of them counts."""
    records = setting.count(10_000_000, quick=200_000)
    with SowServer(setting.directory / "sow") as server, Client(server.address) as client:
        empty = server.resident_mebibytes()
        setting.say(f"loading {records:,} records")
        for first in range(0, records, LOAD_CHUNK):
            publish(client, documents(range(first, min(first + LOAD_CHUNK, records))), "buffered")
        loaded = server.resident_mebibytes()
        setting.say("updates, then a query")
        publish(client, documents(range(0, records, 10), 1), "buffered")
        updated = server.resident_mebibytes()
        read = sum(len(batch.keys) for batch in client.query(TOPIC).batches())
        assert read == records, f"{read} records came"
        queried = server.resident_mebibytes()
        peak = server.resident_peak_mebibytes()
    greatest = Figure(max(loaded, updated, queried), MEBIBYTES)
    yield Row(
        f"VmRSS with {records:,} records",
        greatest,
        judged=greatest,
        target=MEMORY_TARGET,
        note=f"empty {empty:.0f}, loaded {loaded:.0f}, updated {updated:.0f}, queried {queried:.0f},"
        f" VmHWM {peak:.0f} MiB",
    )
