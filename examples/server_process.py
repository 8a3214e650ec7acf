"""A sow server in a separate process, for the time of a `with` block, and its configuration.

[1]  No server outlives its block, unless this program is killed with SIGKILL.
[2]  `start` returns when the server has logged `ready`, before any request.
"""

from __future__ import annotations

import fcntl
import json
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

CONFIG_NAME: Final = "sow-demo.toml"
DATA_NAME: Final = "sow-demo-data"
DEFAULT_PORT: Final = 7450
DEFAULT_METRICS_PORT: Final = 9464
HOST: Final = "127.0.0.1"

READY_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 20.0
LOG_LINES_KEPT: Final = 40

COMMAND: Final = [sys.executable, "-m", "sow_server"]


class ServerTrouble(Exception):
    """The server did not start, or did not stop."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a server ended."""

    code: int
    """Exit code; minus the signal's number where a signal ended it."""
    seconds: float


def free_port(wanted: int) -> int:
    """`wanted` if it is free, else another free port."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the server does: closing connections of the last server do no harm
        try:
            probe.bind((HOST, wanted))
        except OSError:
            probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def remove_data(folder: Path, name: str = DATA_NAME) -> None:
    """Removes the data of earlier runs. Raises ServerTrouble if a server still uses them."""
    data = folder / name
    for lock in data.rglob("LOCK"):
        with lock.open("r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ServerTrouble(f"a server is running on {name}; stop it first") from None
    if data.exists():
        shutil.rmtree(data)


class ServerProcess:
    """Owns the process. Only one runs at a time. It may be started again after it was stopped or killed."""

    def __init__(self, folder: Path, config: str = CONFIG_NAME) -> None:
        """`config`: the name of a file in `folder`, where the server runs."""
        self._folder = folder
        self._config = config
        self._process: subprocess.Popen[str] | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES_KEPT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        try:
            process.terminate()
            process.wait(STOP_SECONDS_MAX)
        finally:  # also where a second Ctrl-C cuts the wait short
            process.kill()
            process.wait()

    def start(self) -> float:
        """Starts the server; returns the seconds until it was ready, the interpreter's start included."""
        self._log.clear()
        heard = queue.SimpleQueue[bool]()
        started = time.monotonic()
        self._process = subprocess.Popen(
            [*COMMAND, "--config", self._config], cwd=self._folder, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        assert self._process.stderr is not None, "asked for"
        threading.Thread(target=self._read_log, args=(self._process.stderr, heard), daemon=True).start()
        try:
            ready = heard.get(timeout=READY_SECONDS_MAX)
        except queue.Empty:
            raise ServerTrouble(
                f"the server is not ready after {READY_SECONDS_MAX:.0f} s\n{self._last_words()}"
            ) from None
        if not ready:
            code = self._process.wait(STOP_SECONDS_MAX)
            raise ServerTrouble(f"the server ended with code {code}\n{self._last_words()}")
        return time.monotonic() - started

    def stop(self) -> Exit:
        """SIGTERM: the server stops in order. Raises ServerTrouble when it does not end."""
        process = self._running()
        started = time.monotonic()
        process.terminate()
        try:
            code = process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise ServerTrouble(f"no end {STOP_SECONDS_MAX:.0f} s after SIGTERM\n{self._last_words()}") from None
        return Exit(code, time.monotonic() - started)

    def kill(self) -> None:
        """SIGKILL: the server ends at once. Does not wait. Call it from any thread."""
        self._running().kill()

    def wait(self) -> int:
        """Waits for the end of a killed server; returns its exit code."""
        return self._running().wait(STOP_SECONDS_MAX)

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "not started"
        return self._process

    def _read_log(self, stream: IO[str], heard: queue.SimpleQueue[bool]) -> None:
        """Says True when the server is ready, False when its log has ended."""
        with stream:
            for line in stream:
                self._log.append(line.rstrip())
                if _event(line) == "ready":
                    heard.put(True)
        # The caller cannot check this: the process may still be ending.
        heard.put(False)

    def _last_words(self) -> str:
        return "\n".join(f"  | {line}" for line in self._log)


def _event(line: str) -> object:
    try:
        fields = json.loads(line)
    except ValueError:
        return None  # not a line of the log
    return fields.get("event") if isinstance(fields, dict) else None
