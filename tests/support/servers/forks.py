"""Servers by fork: a process that has imported the server forks one for each start, which saves the second of imports.

    [1]  A forked server is a process of its own: its id, signals, files and environment are those of a started one.
    [2]  No server outlives the process of the tests: when that ends, the process that forks kills all that are left.

The process that forks has one thread and has opened nothing of gRPC or RocksDB, so a fork of it is sound.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NoReturn

MESSAGE_BYTES_MAX: Final = 1 << 20
WAIT_SECONDS: Final = 60.0
IMPORTED: Final = ("sow_server.app", "sow_server.__main__", "sow_server.logs", "apscheduler.executors.asyncio")
"""Every server would import these."""


class Fork:
    """A forked server, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid = pid
        self._forks = forks

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._forks.code(self.pid)

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        give_up = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired("sow-server", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks servers, and the exit codes of those that have ended."""

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths` is where Python finds the server's packages."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GRPC_VERBOSITY": "NONE"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno())], env=environment, pass_fds=[theirs.fileno()]
            )
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: int
    ) -> Fork:
        """Starts the `main` of a module in a folder, with a log as its standard output and error."""
        wanted = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(folder),
        }
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(wanted).encode()], [log])
            while True:
                pid = self._receive(WAIT_SECONDS)
                assert pid is not None, "the process that forks does not answer"
                if pid:
                    return Fork(self, pid)

    def code(self, pid: int) -> int | None:
        with self._lock:
            while self._receive(0) is not None:
                pass
            return self._codes.get(pid)

    def _receive(self, seconds: float) -> int | None:
        """Takes a message: the process id of a start, 0 after the end of a server, None when nothing came."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return None
        message = json.loads(self._socket.recv(MESSAGE_BYTES_MAX))
        if "code" not in message:
            self._codes.pop(message["pid"], None)  # an id that is used again
            return int(message["pid"])
        self._codes[message["pid"]] = message["code"]
        return 0


@cache
def forks(paths: tuple[str, ...]) -> Forks:
    """The one of this process."""
    return Forks(paths)


# -- in the process that forks ----------------------------------------------------------------------------------------


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # this folder, whose modules nobody imports by their bare names
    for name in IMPORTED:
        importlib.import_module(name)
    # As each of them would, to read its arguments and its configuration.
    importlib.import_module("sow_server.__main__")._parser()
    importlib.import_module("sow_server.config").load(None)
    # A server collects garbage once at its start. It need not visit, nor copy, the pages of what is here already.
    gc.collect()
    gc.freeze()
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    ended.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            ended.recv(4096)
            for pid in list(running):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    running.remove(pid)
                    _tell(requests, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if requests in ready:
            message, logs, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, 1)
            if not message:  # the process of the tests has ended
                break
            wanted = json.loads(message)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for opened in (requests, ended, wake):
                    opened.close()
                _serve(wanted["module"], wanted["arguments"], wanted["environment"], wanted["folder"], logs[0])
            os.close(logs[0])
            running.add(pid)
            _tell(requests, {"pid": pid})
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _tell(requests: socket.socket, message: dict[str, int]) -> None:
    requests.send(json.dumps(message).encode())


def _serve(module: str, arguments: list[str], environment: dict[str, str], folder: str, log: int) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(log, 1)
        os.dup2(log, 2)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        code = importlib.import_module(module).main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
