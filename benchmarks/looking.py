"""The console: the CPU time that it takes for many viewers, and how soon a viewer sees a change and the first rows.

[1]  A viewer says that it has drawn a frame as soon as the frame is there, so no browser asks for more.
[2]  A published document has the moment of its publish in it, by the clock of this machine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import queue
import random
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Origin

from benchmarks.documents import document, documents
from benchmarks.processes import TOPIC, Process, ProcessFailed, SowServer
from benchmarks.publishing import publish
from benchmarks.querying import LOAD_CHUNK
from benchmarks.rows import MILLISECONDS, Figure, Row, Target, percentile
from benchmarks.setting import Setting
from sow_client import Client

PERCENT: Final = "%"
CPU: Final = Target(50.0, f"{PERCENT} of a core", at_least=False)
LAG: Final = Target(500.0, MILLISECONDS, at_least=False)
FIRST_ROWS: Final = Target(500.0, MILLISECONDS, at_least=False)
VIEWERS: Final = 40
VIEWED_ROWS: Final = 500
WIDE_ROWS: Final = 2_000
"""The rows of the one viewer: all rows that a grid may have."""
TICK_SECONDS: Final = 0.02
SETTLE_SECONDS: Final = 3.0
WAIT_SECONDS: Final = 30.0
CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def console(setting: Setting) -> Iterator[Row]:
    """Forty viewers of a few hundred rows; one viewer of fast changes; a visit of a large topic."""
    seconds = setting.size(20, quick=6)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        program = stack.enter_context(_Console(server.address))
        publish(client, documents(range(VIEWED_ROWS)), "buffered")
        yield _many_viewers(setting, client, program, seconds)
        publish(client, documents(range(WIDE_ROWS)), "buffered")
        yield _lag_at_socket(setting, client, program, seconds)
        if (missing := _missing()) is None:
            for rows in (VIEWED_ROWS, WIDE_ROWS):
                yield _lag_in_browser(setting, client, program, rows, seconds)
        else:
            setting.say(missing)
        records = setting.count(1_000_000, quick=100_000)
        setting.say(f"loading {records:,} records")
        for first in range(0, records, LOAD_CHUNK):
            publish(client, documents(range(first, min(first + LOAD_CHUNK, records))), "buffered")
        yield _first_rows_at_socket(setting, program, records)
        if missing is None:
            yield _first_rows_in_browser(setting, program, records)


def _missing() -> str | None:
    """The reason why there is no browser; None: there is one."""
    if CHROMIUM is None:
        return "no Chromium (apt-get install chromium), so only sockets are measured"
    if importlib.util.find_spec("playwright") is None:
        return "no playwright (pip install playwright), so only sockets are measured"
    return None


class _Console(Process):
    """`sow console` on a free port, and sessions in it."""

    def __init__(self, server: str) -> None:
        self._addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._server = server
        arguments = (sys.executable, "-m", "sow_cli", "--server", server, "console", "--listen", "127.0.0.1:0")
        super().__init__(arguments, self._hear)

    def _hear(self, line: str) -> bool:
        if found := re.search(r"http://\S+/open\?code=\S+", line):
            self._addresses.put(found[0])
        return False  # each line is wanted, as each use of an address shows the next one

    def one_time(self) -> str:
        """The next one-time address."""
        try:
            return self._addresses.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            self.check_alive()
            raise ProcessFailed(self._story("it told no address")) from None

    def records_address(self, address: str, rows: int) -> str:
        """The page of records of the topic, as it is under a one-time address."""
        return f"{address.partition('/open')[0]}/{self._server}/records?topic={TOPIC}&rows={rows}"

    def socket(self, rows: int) -> connect:
        """The socket of the page in a session of its own."""
        address = self.one_time()
        answer = httpx.get(address)
        assert answer.status_code == 303, answer.text
        cookie = answer.headers["set-cookie"].partition(";")[0]
        page = self.records_address(address, rows).replace("http:", "ws:").replace("/records?", "/records/live?")
        return connect(
            page,
            origin=Origin(address.partition("/open")[0]),
            additional_headers={"Cookie": cookie},
            max_size=None,
            proxy=None,
        )


class _Load:
    """Random updates at a steady rate from a thread of its own ([2])."""

    def __init__(self, client: Client, keys: int, per_second: int) -> None:
        self._client = client
        self._keys = keys
        self._per_tick = round(per_second * TICK_SECONDS)
        self._stop = threading.Event()
        self.records = 0
        """Published so far."""
        self.late_seconds = 0.0
        """How far it is behind its schedule."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Publishes meanwhile."""
        thread = threading.Thread(target=self._run, name="load")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        draws = random.Random(self._keys)
        due = time.perf_counter()
        while not self._stop.is_set():
            now = time.time_ns() // 1_000
            numbers = draws.choices(range(self._keys), k=self._per_tick)
            self._client.publish_many(TOPIC, [document(number, now) for number in numbers], durability="buffered")
            self.records += self._per_tick
            due += TICK_SECONDS
            self.late_seconds = max(0.0, time.perf_counter() - due)
            self._stop.wait(max(0.0, due - time.perf_counter()))


async def _look(socket: ClientConnection, lags: list[float] | None = None) -> None:
    """Draws frames at once, for ever ([1]); notes the age of each change, if wanted."""
    async for data in socket:
        assert isinstance(data, bytes), "frames are bytes"
        found = re.match(rb'\{"frame":(\d+)', data)
        assert found is not None, data[:80]
        if lags is not None and found[1] != b"1":
            now = time.time_ns() / 1_000
            lags += [(now - json.loads(row[1])["revision"]) / 1_000 for row in json.loads(data).get("rows", ())]
        await socket.send(found[1].decode())


def _many_viewers(setting: Setting, client: Client, program: _Console, seconds: int) -> Row:
    setting.say(f"{VIEWERS} viewers")
    per_second = 1_000
    load = _Load(client, VIEWED_ROWS, per_second)

    async def work() -> tuple[float, float, int]:
        async with asyncio.timeout(seconds + WAIT_SECONDS * 2):
            sockets = [await program.socket(VIEWED_ROWS) for _ in range(VIEWERS)]
            viewers = [asyncio.create_task(_look(socket)) for socket in sockets]
            await asyncio.sleep(SETTLE_SECONDS)
            cpu, begun, records = program.cpu_seconds(), time.perf_counter(), load.records
            await asyncio.sleep(seconds)
            spent, took = program.cpu_seconds() - cpu, time.perf_counter() - begun
            assert not any(viewer.done() for viewer in viewers), "no viewer was sent away"
            for viewer, socket in zip(viewers, sockets, strict=True):
                viewer.cancel()
                await socket.close()
            return spent, took, load.records - records

    with load.running():
        spent, took, records = asyncio.run(work())
    share = Figure(spent / took * 100, PERCENT)
    return Row(
        f"CPU of the console: {VIEWERS} viewers of {VIEWED_ROWS} rows, {per_second:,} changes/s for {seconds} s",
        share,
        judged=share,
        target=CPU,
        note=f"{records / took:,.0f} changes/s; {spent / records / VIEWERS * 1e6:.1f} µs a change and viewer; "
        f"machine: {setting.machine}",
    )


def _lag_row(setting: Setting, case: str, lags: list[float], cpu: float, load: _Load) -> Row:
    figure = Figure(percentile(lags, 0.5), MILLISECONDS)
    return Row(
        case,
        figure,
        judged=figure,
        target=LAG,
        note=f"p99 {percentile(lags, 0.99):.0f}, greatest {max(lags):.0f} ms; CPU of the console {cpu:.0%} of a core; "
        f"the load was {load.late_seconds * 1000:.0f} ms late; machine: {setting.machine}",
    )


def _lag_at_socket(setting: Setting, client: Client, program: _Console, seconds: int) -> Row:
    setting.say("one viewer, at the socket")
    load, lags = _Load(client, WIDE_ROWS, 5_000), list[float]()

    async def work() -> float:
        async with await program.socket(WIDE_ROWS) as socket:
            viewer = asyncio.create_task(_look(socket, lags))
            await asyncio.sleep(SETTLE_SECONDS)
            lags.clear()
            cpu = program.cpu_seconds()
            await asyncio.sleep(seconds)
            assert not viewer.done(), "the viewer was not sent away"
            viewer.cancel()
            return (program.cpu_seconds() - cpu) / seconds

    with load.running():
        cpu = asyncio.run(work())
    return _lag_row(setting, f"lag p50 at the socket: 1 viewer of {WIDE_ROWS:,} rows, 5,000 changes/s", lags, cpu, load)


NEWEST: Final = """() => {
    const names = [...document.querySelectorAll("#grid thead th")].map((one) => one.textContent);
    const column = names.indexOf("/revision") + 1;
    const cells = document.querySelectorAll(`#grid tbody td:nth-child(${column})`);
    return Date.now() - Math.max(...[...cells].map((one) => Number(one.textContent))) / 1000;
}"""
"""The age of the newest change that is drawn, in milliseconds."""


def _lag_in_browser(setting: Setting, client: Client, program: _Console, rows: int, seconds: int) -> Row:
    from playwright.sync_api import sync_playwright  # a browser need not be there

    setting.say(f"one viewer of {rows:,} rows, in Chromium")
    load = _Load(client, WIDE_ROWS, 5_000)
    with sync_playwright() as playwright, load.running():
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        address = program.one_time()
        page.goto(address)
        page.goto(program.records_address(address, rows))
        page.locator("#grid tbody tr").first.wait_for()
        page.wait_for_timeout(SETTLE_SECONDS * 1_000)
        cpu, begun, lags = program.cpu_seconds(), time.perf_counter(), list[float]()
        while (took := time.perf_counter() - begun) < seconds:
            lags.append(float(page.evaluate(NEWEST)))
            page.wait_for_timeout(100)
        share = (program.cpu_seconds() - cpu) / took
        browser.close()
    case = f"age p50 of the newest change drawn in Chromium: {rows:,} of {WIDE_ROWS:,} records, 5,000 changes/s"
    return _lag_row(setting, case, lags, share, load)


def _first_rows_at_socket(setting: Setting, program: _Console, records: int) -> Row:
    setting.say("first rows, at the socket")

    async def visit() -> float:
        opening = program.socket(200)
        begun = time.perf_counter()
        async with await opening as socket:
            assert b'"rows":[' in await socket.recv()
            return (time.perf_counter() - begun) * 1_000

    took = [asyncio.run(visit()) for _ in range(setting.size(15, quick=7))]
    return _first_rows(setting, f"first rows at the socket: 200 of a topic of {records:,} records", took)


def _first_rows_in_browser(setting: Setting, program: _Console, records: int) -> Row:
    from playwright.sync_api import sync_playwright  # a browser need not be there

    setting.say("first rows, in Chromium")
    took = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        address = program.one_time()
        page.goto(address)
        for _ in range(setting.size(15, quick=7)):
            page.goto("about:blank")
            begun = time.perf_counter()
            page.goto(program.records_address(address, 200))
            page.locator("#grid tbody tr").first.wait_for()
            took.append((time.perf_counter() - begun) * 1_000)
        browser.close()
    return _first_rows(setting, f"first rows in Chromium: 200 of a topic of {records:,} records", took)


def _first_rows(setting: Setting, case: str, took: list[float]) -> Row:
    figure = Figure(statistics.median(took), MILLISECONDS)
    return Row(
        f"{case}, median of {len(took)} visits",
        figure,
        judged=figure,
        target=FIRST_ROWS,
        note=f"{min(took):.0f}–{max(took):.0f} ms; machine: {setting.machine}",
    )
