"""A real server in a process of its own, for tests: start it, talk to it, end it in every way there is, read its log.

with ServerProcess(tmp_path, "[topics.orders]\\nkey = ['/id']") as server, server.client() as client:
    client.publish("orders", {"id": 1})
    server.kill9()
    server.start()

[1]  The process is ended, by its id, whatever becomes of the test; at the latest when the interpreter ends.
[2]  Every wait has a bound, and running into it shows the log.
[3]  The log of a test that fails is part of its report, once a `conftest.py` imports `pytest_runtest_makereport`.
[4]  With `pytest --cells N` it is N cells that serve one name space (`spread`), in a process each. Signals go to all of
     them; `pid` and the events of its life, such as `ready`, are those of the first.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sow_client import AsyncClient, Client, SowError, Tls
from tests.support.servers import spread
from tests.support.servers.forks import forks

START_SECONDS: Final = 120.0
"""Long: where the machine is busy with other things, a start takes as long as it takes."""
STOP_SECONDS: Final = 30.0
LOG_BYTES_SHOWN: Final = 8_000
ROOT: Final = Path(__file__).parents[3]
DYNAMIC: Final = "[server]\ndynamic_topics = true\n"
"""The configuration of a server without a file: the first publish creates a topic."""
PYTHONPATH: Final = tuple(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
LIFE: Final = frozenset({"starting", "ready", "stopping", "stopped"})
"""Events that each cell of a server has ([4])."""
MEASURED: Final = "COVERAGE_PROCESS_CONFIG" in os.environ
"""Coverage is measured: servers are started, not forked, and end in order, as one that is killed reports nothing."""

Event = dict[str, object]
"""A line of the log."""

_running: set[ServerProcess] = set()
_ended: dict[ServerProcess, None] = {}


def unmeasured() -> dict[str, str]:
    """The environment for a process whose imports a test looks at: coverage would import some itself."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS_")}


class DidNotStart(Exception):
    """The server ended instead of becoming ready. Has its exit code and its output."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"exit {code}: {said}")
        self.code = code
        self.said = said


class ServerProcess:
    """Owns a server process, its folder (configuration, data, log), and its port, which a restart keeps."""

    def __init__(
        self, folder: Path, config: str = DYNAMIC, *, arguments: Sequence[str] = (), port: int = 0, start: bool = True
    ) -> None:
        """`config` is TOML; where it listens and keeps its data is set by this class. A configuration with listeners
        sets their addresses itself, and `port` is the one of the first."""
        folder.mkdir(parents=True, exist_ok=True)
        self.data = folder / "data"
        self.config = folder / "sow.toml"
        self._placement = self.data / "placement.toml"
        self.arguments = list(arguments)
        self.module = "sow_server.__main__"
        """Its `main` is what runs."""
        self.first_arguments: list[str] = []
        """Arguments of `main` in front of the server's own."""
        self._logs = [folder / "server.log"]
        """That of each cell."""
        self._port = port
        self._process: spread.Started | None = None
        self._log_starts = [0]
        self.configure(config)
        if start:
            self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if MEASURED and self._process is not None and self.alive:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill9()

    # -- its life ---------------------------------------------------------------------------------------------------

    def configure(self, config: str) -> None:
        """Writes another configuration, for the next start."""
        self.config.write_text(config)
        self.config.chmod(0o600)  # it may have a token (rule X5)
        self._has_listeners = "[[server.listeners]]" in config
        self._cells = 0 if spread.is_for_one_server(config) else spread.cells_wanted()

    def start(self, *arguments: str) -> None:
        """Starts it and returns once it is ready. Raises DidNotStart."""
        chosen = self._port == 0
        for attempt in range(1, 6):
            if chosen:
                self._port = free_port(max(1, self._cells))
            try:
                self.launch(*arguments)
                self.await_ready()
                return
            except DidNotStart as error:
                # Another test may have taken the port since.
                if not chosen or attempt == 5 or "cannot listen" not in error.said:
                    raise

    def launch(self, *arguments: str) -> None:
        """Starts it and does not wait."""
        assert self._process is None, "it runs already"
        of = 0 if "--cells" in self.arguments else self._cells
        if self._port == 0:
            self._port = free_port(max(1, of))
        self._logs = [self.config.with_name(f"server{number or ''}.log") for number in range(max(1, of))]
        self._log_starts = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        listen = [] if self._has_listeners else ["--listen", self.address]
        given = [*self.first_arguments, "--config", str(self.config), "--data-dir", str(self.data), *listen]
        given += [*self.arguments, *arguments]
        if not of:
            self._process = self._started(given, self._logs[0])
        else:
            self.data.mkdir(mode=0o700, exist_ok=True)
            spread.place(self._placement, self.config, self.data, listen, of)
            self._process = spread.Together(
                [
                    self._started([*given, "--cells", str(of), "--cell", f"cell-{number}"], log)
                    for number, log in enumerate(self._logs, 1)
                ]
            )
        _running.add(self)

    def _started(self, given: Sequence[str], output: Path) -> spread.Started:
        # This checkout, whatever is installed.
        paths = (str(ROOT), str(ROOT / "proto"), str(ROOT / "replication"), *PYTHONPATH)
        folder = self.config.parent
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if len(self._logs) > 1:
            environment |= spread.environment(self.config.read_text(), folder)
        with output.open("ab") as log:
            if MEASURED:
                command = [sys.executable, "-m", self.module, *given]
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
                )
            return forks(paths).start(self.module, given, environment, folder, log.fileno())

    def await_ready(self) -> None:
        """Waits until it is ready. Raises DidNotStart."""
        until(lambda: self._is_ready() or not self.alive, START_SECONDS, "the server to be ready")
        if not self._is_ready():
            raise DidNotStart(self._end(), self.said)

    def _is_ready(self) -> bool:
        return all(_events(text, "ready") for text in self._said())

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill9(self) -> None:
        """Kills it, if it is running, and waits for the end of its reader processes, which use its folder."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)  # so it starts none while they are listed
            readers = [child for pid in self.pids for child in _children(pid)]
            self._process.kill()
            self._end()
            with contextlib.suppress(AssertionError):
                until(lambda: not any(map(_runs, readers)), 5, "its reader processes to end")
            for pid in filter(_runs, readers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def restart(self, *arguments: str) -> None:
        """An orderly stop and a start, on the same port."""
        assert self.terminate() == 0
        self.start(*arguments)

    def signal(self, number: int) -> None:
        """Sends a signal."""
        assert self._process is not None, "it is not running"
        self._process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Waits for the end of the process; returns its exit code."""
        until(lambda: not self.alive, seconds, "the server to end")
        return self._end()

    def _end(self) -> int:
        assert self._process is not None, "it is not running"
        code = self._process.wait(STOP_SECONDS)
        self._process = None
        _running.discard(self)
        _ended[self] = None
        return code

    # -- identity ---------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None, "it is not running"
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The ids of all its processes: one, unless it has cells ([4])."""
        assert self._process is not None, "it is not running"
        process = self._process
        return [one.pid for one in process.processes] if isinstance(process, spread.Together) else [process.pid]

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._port}"

    def address_of(self, topic: str) -> str:
        """Host and port for stubs that ask for a topic, as they follow none: those of its cell, where there are
        several ([4])."""
        if len(self._logs) == 1:
            return self.address
        return spread.address_of(topic, self._placement.read_text())

    @property
    def resident_bytes(self) -> int:
        """Memory that its processes have in RAM (Linux)."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids)
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def sockets(self) -> int:
        """Sockets that the process has open (Linux)."""
        found = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                found += os.readlink(link).startswith("socket:")
            except FileNotFoundError:  # closed meanwhile
                continue
        return found

    def client(self, *, timeout: float = 30.0, tls: Tls | None = None) -> Client:
        """A new blocking client."""
        return Client(self.address, timeout=timeout, tls=tls)

    def async_client(self, *, timeout: float = 30.0) -> AsyncClient:
        """A new asynchronous client, for the running loop."""
        return AsyncClient(self.address, timeout=timeout)

    # -- output -----------------------------------------------------------------------------------------------------

    @property
    def said(self) -> str:
        """Its output since its last start."""
        return "".join(self._said())

    def _said(self) -> list[str]:
        found = []
        for path, start in zip(self._logs, self._log_starts, strict=True):
            with path.open("rb") as log:
                log.seek(start)
                found.append(log.read().decode(errors="replace"))
        return found

    @property
    def log(self) -> str:
        """Its output since its first start."""
        return "".join(path.read_text(errors="replace") for path in self._logs if path.exists())

    def events(self, name: str | None = None) -> list[Event]:
        """The complete log lines since its last start, of one event or all."""
        home, *others = self._said()
        return _events(home, name) + [
            event for text in others for event in _events(text, name) if event.get("event") not in LIFE
        ]

    def faults(self) -> list[str]:
        """Log lines that tell of a fault of the server's own."""
        words = ("Traceback", "rpc_failed", "request_failed", "writer_died", '"unexpected"', "never retrieved")
        lines = [line for line in self.log.splitlines() if any(word in line for word in words)]
        return lines + [line for line in self.log.splitlines() if '"level": "critical"' in line]


def _events(text: str, name: str | None) -> list[Event]:
    found: list[Event] = []
    for line in text.split("\n")[:-1]:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if name is None or event.get("event") == name:
            found.append(event)
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children(parent: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended meanwhile
        if int(ppid) == parent and state != "Z":
            found.append(int(status.parent.name))
    return found


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Waits until `condition` holds; fails after `seconds`, saying that it waited for `what`."""
    begin = time.monotonic()
    while not condition():
        if (waited := time.monotonic() - begin) > seconds:
            raise AssertionError(f"waited {seconds:g} s for {what}")
        # The longer it takes, the less often it is asked, which takes CPU time from what it waits for.
        time.sleep(min(max(0.01, waited / 20), 0.05))


def reason_of(call: Callable[[], object]) -> str:
    """The reason for which the server refuses a call."""
    with pytest.raises(SowError) as refused:
        call()
    return refused.value.reason


def health(address: str, service: str = "") -> str:
    """The status of a service in the health service; the empty name is the whole server."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)  # type: ignore[attr-defined]  # not in its stubs
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def free_port(several: int = 1) -> int:
    """A port that nothing listens on, nor on the ones behind it, from below the range out of which the system gives
    ports to connections: a server that is killed must find it free when it comes back."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randrange(20_000, 32_000)
        if all(map(_is_free, range(port, port + several))):
            return port
    raise AssertionError("no free port in a hundred")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@atexit.register
def _end_all() -> None:
    for server in list(_running):
        server.kill9()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the logs of the servers that run, or have ended in this test, to the report of one that fails ([3])."""
    report = yield
    if report.failed:
        for server in {**dict.fromkeys(_running), **_ended}:
            report.sections.append((f"log of the server on {server.address}", server.log[-LOG_BYTES_SHOWN:]))
    if report.when == "teardown":
        _ended.clear()
    return report
