"""Server processes: each in its own directory on a free loopback port, ended by its process id.

[1]  Leaving the `with` ends the process: SIGTERM first, SIGKILL if it does not end.
[2]  If a process does not start, the error has its last output.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.documents import KEY_PATHS

T = TypeVar("T")

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 60.0
LINES_KEPT: Final = 40
TOPIC: Final = "records"

CONFIG: Final = """\
[server]
listen = "127.0.0.1:{port}"
data_dir = "{data_dir}"
instance = "{instance}"
{server}
[metrics]
listen = "127.0.0.1:{metrics_port}"

[log]
format = "json"

[topics.{topic}]
key = {key}
expiration = "enabled"
{more}"""


class NotInstalled(Exception):
    """A peer is not installed. The text says how to install it."""


class ProcessFailed(Exception):
    """A process did not start, or ended by itself."""


def program(name: str, package: str) -> str:
    """The path of a peer's program. Raises NotInstalled, naming the Debian package."""
    path = shutil.which(name)
    if path is None:
        raise NotInstalled(f"{name} not installed (apt-get install {package})")
    return path


def free_port() -> int:
    """A loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Process:
    """Owns one child process and its output."""

    def __init__(self, arguments: Sequence[str], is_ready: Callable[[str], bool] | None = None) -> None:
        """Starts it. `is_ready` recognises the line that says it is ready."""
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._ready = threading.Event()
        self._is_ready = is_ready
        self.ready_seconds = 0.0
        """Seconds from exec to the line that said it was ready."""
        self._begun = time.perf_counter()
        self._command = " ".join(arguments)[:200]
        self._child = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        # The pipe is read to its end; otherwise a server with much output would block on it.
        self._reader = threading.Thread(target=self._read, name=f"output-{self._child.pid}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None, "opened as a pipe"
        for line in self._child.stdout:
            self._lines.append(line.rstrip())
            if self._is_ready is not None and not self._ready.is_set() and self._is_ready(line):
                self.ready_seconds = time.perf_counter() - self._begun
                self._ready.set()

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Waits for the line that says it is ready."""
        deadline = time.monotonic() + seconds
        while not self._ready.wait(0.05):
            self.check_alive()
            if time.monotonic() > deadline:
                raise ProcessFailed(self._story(f"not ready after {seconds:.0f} s"))

    def wait_until(self, answers: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Waits until `answers` is true, for servers whose output does not say it."""
        deadline = time.monotonic() + seconds
        while not answers():
            self.check_alive()
            if time.monotonic() > deadline:
                raise ProcessFailed(self._story(f"no answer after {seconds:.0f} s"))
            time.sleep(0.02)

    def check_alive(self) -> None:
        """Raises ProcessFailed when it has ended."""
        code = self._child.poll()
        if code is not None:
            self._reader.join(1)
            raise ProcessFailed(self._story(f"ended with code {code}"))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def last_line(self) -> str:
        """The last line of its output so far. Empty: there is none."""
        return self._lines[-1] if self._lines else ""

    def resident_mebibytes(self) -> float:
        """VmRSS."""
        return self._status_kibibytes("VmRSS") / 1024

    def resident_peak_mebibytes(self) -> float:
        """VmHWM."""
        return self._status_kibibytes("VmHWM") / 1024

    def _status_kibibytes(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise ProcessFailed(self._story(f"has no {name}"))

    def cpu_seconds(self) -> float:
        """User and system time so far of all its threads, compaction included, and of the reader processes of a
        server."""
        return sum(time.clock_gettime(_cpu_clock(pid)) for pid in (self.pid, *_children(self.pid)))

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._child.kill()
        self._child.wait()
        self._reader.join(1)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if the process does not end [1]."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._reader.join(1)

    def _story(self, what: str) -> str:
        return "\n".join([f"{self._command}: {what}", *self._lines])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _children(pid: int) -> list[int]:
    """The processes that a process has started, and that run."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def _cpu_clock(pid: int) -> int:
    """The clock of the CPU time of a process on Linux, in nanoseconds: `/proc` counts in hundredths of a second.

    The kernel makes its id so (MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED); Python has no clock_getcpuclockid.
    """
    return (~pid << 3) | 2


class CpuMeter:
    """CPU time that a server and this process, its client, spend inside `measured`.

    Unlike a rate it does not depend on other users of the machine, and it shows on which side the work is.
    """

    def __init__(self, server: Process) -> None:
        self._server = server
        self._server_seconds = self._client_seconds = 0.0
        self._records = 0

    def measured(self, records: int, run: Callable[[], T]) -> T:
        """Runs the work, which is about this number of records."""
        server, client = self._server.cpu_seconds(), time.process_time()
        result = run()
        self._server_seconds += self._server.cpu_seconds() - server
        self._client_seconds += time.process_time() - client
        self._records += records
        return result

    def __str__(self) -> str:
        server, client = (
            seconds / self._records * 1e6 if self._records else 0.0
            for seconds in (self._server_seconds, self._client_seconds)
        )
        return f"CPU a record: server {server:.1f} µs, client {client:.1f} µs"


class SowServer(Process):
    """The server under test, as users start it, with one topic keyed by `/id` that expires."""

    def __init__(
        self,
        directory: Path,
        *,
        server: str = "",
        more: str = "",
        instance: str = "sow",
        port: int | None = None,
        arguments: Sequence[str] = (),
        program: Path = Path(sys.executable),
    ) -> None:
        """Starts it on `directory`, which keeps its data, and waits until it is ready.

        `server`: further keys of the table [server]. `more`: further tables of its configuration. `port`: the port that
        others expect; None: any. `arguments`: further ones. `program`: the Python whose `sow_server` runs.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if port is None else port
        self.metrics_port = free_port()
        config = directory / "sow.toml"
        config.write_text(
            CONFIG.format(
                port=self.port,
                metrics_port=self.metrics_port,
                data_dir=directory / "data",
                instance=instance,
                server=server,
                topic=TOPIC,
                key=KEY_PATHS,
                more=more,
            )
        )
        # -P: the package that is installed for `program`, not one in the current directory.
        super().__init__([str(program), "-P", "-m", "sow_server", "--config", str(config), *arguments], _says_ready)
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """Its address."""
        return f"127.0.0.1:{self.port}"

    def metrics(self) -> Metrics:
        """Its present metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            return Metrics(answer.read().decode())


def _says_ready(line: str) -> bool:
    try:
        event = json.loads(line)
    except ValueError:
        return False  # a traceback, or a library that prints
    return isinstance(event, dict) and event.get("event") == "ready"


class Metrics:
    """One reading of a server's metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str) -> float:
        """The value of a sample, summed over its labels."""
        values = [sample.value for sample in self._samples if sample.name == name]
        if not values:
            raise LookupError(f"the server has no metric {name}")  # perhaps renamed: 0 would look like a result
        return sum(values)

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound, summed over its labels. Empty if it has none yet."""
        counts: dict[float, float] = {}
        for sample in self._samples:
            if sample.name == f"{name}_bucket":
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
        return counts
