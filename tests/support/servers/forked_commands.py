"""Commands by fork, for shells and for Spark: a process that has imported what they import forks one for each call.

A page of the documentation has dozens of commands, and a new interpreter for each would import for 0.3 s of CPU time.
Spark starts a new interpreter for each stream of a query, and for each kind of a query's plans, batches and commits. It
imports for 0.7 s: also what Spark ships as sources only, which it compiles each time.

    [1]  A forked command is a process of its own, with the arguments, folder, environment and open files of the caller.
    [2]  The program that a shell starts in its place ends with its exit code, and hands on SIGINT and SIGTERM.
    [3]  No command outlives the program in its place, nor the process that forks: that kills those that are left when
         the process of the tests ends.

The process that forks has one thread and has opened nothing of gRPC or RocksDB, so a fork of it is sound.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, Self

ROOT: Final = Path(__file__).parents[3]
PATHS: Final = (str(ROOT), *(str(ROOT / name) for name in ("proto", "clients", "replication", "spark_connector")))
MEASURED: Final = "COVERAGE_PROCESS_CONFIG" in os.environ
"""Coverage is measured: commands are started, not forked, as it counts nothing in a fork that ends at once."""
MESSAGE_BYTES_MAX: Final = 200_000
MODULES: Final = {
    "sow": "sow_cli.__main__",
    "sow-server": "sow_server.__main__",
    "sow-on-fakes": "tests.support.fakes.sow_on_fakes",
}
PYTHON: Final = "python"
"""A program that is called with `-m MODULE` or `-c TEXT`, and arguments."""
IMPORTED: Final = ("sow_cli.command", "sow_cli.records", "sow_server.app", "tests.support.fakes.sow_on_fakes")
"""What every command would import. Some import more when they run."""
SHIM: Final = """\
#!{python} -IS
import sys
from _signal import SIG_BLOCK, SIG_DFL, SIG_UNBLOCK, SIGINT, SIGTERM, pthread_sigmask, signal
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_SEQPACKET, SOL_SOCKET, socket
from posix import environ, getcwdb, kill, getpid
handed_on = (SIGINT, SIGTERM)
pthread_sigmask(SIG_BLOCK, handed_on)  # the command may run before its id is here
service = socket(AF_UNIX, SOCK_SEQPACKET)
service.connect({address!r})
arguments = [word.encode(sys.getfilesystemencoding(), "surrogateescape") for word in sys.argv[1:]]
variables = [name + b"=" + value for name, value in environ.items()]
wanted = [{program!r}, getcwdb(), b"%d" % len(arguments), *arguments, *variables]
files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
service.sendmsg([b"\\0".join(wanted)], [(SOL_SOCKET, SCM_RIGHTS, files)])
pid = int(service.recv(100))
for number in handed_on:
    signal(number, lambda number, frame: kill(pid, number))
pthread_sigmask(SIG_UNBLOCK, handed_on)
code = int(service.recv(100) or b"1")
if code < 0:
    signal(-code, SIG_DFL)
    kill(getpid(), -code)
sys.exit(code)
"""
"""It imports nothing that is a file: `json` and `socket` would take more time than the command."""


class ForkedCommands:
    """Owns the process that forks. `install` makes the commands known to shells."""

    def __init__(
        self,
        folder: Path,
        paths: Sequence[str],
        *,
        programs: Sequence[str] = tuple(MODULES),
        imported: Sequence[str] = IMPORTED,
    ) -> None:
        """`folder` gets the socket, and the programs in `programs`: a short path. `paths` is where Python finds the
        packages, and `imported` what each command would import."""
        self.programs: Final = folder / "programs"
        self._address = str(folder / "commands")
        ours, theirs = socket.socketpair()
        self._alive = ours
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GRPC_VERBOSITY": "NONE"}
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._address)
            listener.listen(16)
            descriptors = [listener.fileno(), theirs.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), *map(str, descriptors), *imported],
                env=environment,
                pass_fds=descriptors,
            )
        self.programs.mkdir()
        self.install(self.programs, programs)

    def install(self, folder: Path, programs: Sequence[str] = tuple(MODULES)) -> None:
        """Writes programs into a folder, for PATH."""
        for program in programs:
            path = folder / program
            if MEASURED and program == PYTHON:
                path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            elif MEASURED:
                paths = os.pathsep.join(PATHS)
                path.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{sys.executable}" -m {MODULES[program]} "$@"\n')
            else:
                path.write_text(SHIM.format(python=sys.executable, address=self._address, program=program.encode()))
            path.chmod(0o755)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all commands."""
        self._alive.close()
        self._process.wait()


@cache
def commands() -> ForkedCommands:
    """The one of this process, for all of its tests."""
    # The path of a socket has at most 107 bytes, and those of pytest may be longer.
    folder = tempfile.TemporaryDirectory(prefix="sow-commands-")
    made = ForkedCommands(Path(folder.name), PATHS)
    atexit.register(folder.cleanup)
    atexit.register(made.close)
    return made


def sow() -> str:
    """The program `sow`, by fork, to start in place of `python -m sow_cli`."""
    return str(commands().programs / "sow")


# -- in the process that forks ----------------------------------------------------------------------------------------


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    alive = socket.socket(fileno=int(sys.argv[2]))
    del sys.path[0]  # this folder, whose modules nobody imports by their bare names
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is here already is not visited, nor its pages copied, by a collection in a command
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    callers: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, alive, ended, *callers.values()], [], [])
        if alive in ready:
            break
        if ended in ready:
            ended.recv(4096)
            for pid in list(callers):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    with callers.pop(pid) as caller:
                        _tell(caller, os.waitstatus_to_exitcode(status))
        for pid, caller in callers.items():
            if caller in ready:
                os.kill(pid, signal.SIGKILL)  # the program in its place was killed [3]
        if listener in ready:
            caller, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(caller, MESSAGE_BYTES_MAX, 3)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for opened in (listener, alive, ended, wake, caller, *callers.values()):
                    opened.close()
                _run(message, files)
            for file in files:
                os.close(file)
            callers[pid] = caller
            _tell(caller, pid)
    for pid in callers:
        os.kill(pid, signal.SIGKILL)


def _tell(caller: socket.socket, number: int) -> None:
    try:
        caller.send(b"%d" % number)
    except OSError:
        pass  # its shell was killed


def _run(message: bytes, files: list[int]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        program, folder, count, *words = message.split(b"\0")
        variables = words[int(count) :]
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(os.fsdecode(variable).split("=", 1) for variable in variables)  # type: ignore[misc]  # pairs
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        _open_standard_files()
        sys.argv = [program.decode(), *map(os.fsdecode, words[: int(count)])]
        if sys.argv[0] == PYTHON:
            _run_python()
            code = 0
        else:
            code = importlib.import_module(MODULES[sys.argv[0]]).main() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_python() -> None:
    """As the interpreter does with `-m MODULE` or `-c TEXT`."""
    _, option, text, *arguments = sys.argv
    sys.argv = [option, *arguments]
    if option == "-m":
        sys.modules.pop(text, None)  # where another module has imported it, runpy would warn
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    else:
        exec(text, {"__name__": "__main__"})


def _open_standard_files() -> None:
    """As the interpreter at its start. Those of the process that forks still hold whether its files could be sought:
    where these were files and the caller's are a terminal, the next wrapper around one fails."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # likewise
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115  # likewise


if __name__ == "__main__":
    main()
