"""Runs `sow` in odd surroundings: a process that has imported it forks one for each case.

    python tests/support/oracles/odd_surroundings.py < cases > results

A case is a line of JSON, and so is a result: exit code, stdout, stderr, and the points of the command at which an
interrupt may come, where the case asks for one (see `interrupted`). The process has one thread and has opened
nothing of gRPC, so a fork of it is sound.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from tests.support.servers.interrupted import Points

SECONDS_MAX: Final = 20.0
"""After this time a command has hung."""
LATER: Final = (
    "difflib", "rich.live", "rich.progress", "rich.table", "sow_cli.moving", "sow_client.aio", "sow_console.app",
    "sow_console.exports", "sow_http.app",
)  # fmt: skip
LATER_OF_UVICORN: Final = ("lifespan.on", "loops.auto", "protocols.http.auto", "protocols.websockets.auto")
"""Modules that commands import when they need them."""
STOPPED_AFTER_SECONDS: Final = 1.0
"""A command that runs until it is stopped gets SIGTERM then."""


def main() -> None:
    from sow_cli.command import COMMANDS

    for module in {*COMMANDS.values(), "__main__"}:
        importlib.import_module(f"sow_cli.{module}")
    for module in (*LATER, *map("uvicorn.{}".format, LATER_OF_UVICORN)):
        importlib.import_module(module)  # another user may not be allowed to read them
    for line in sys.stdin:
        print(json.dumps(_ran(json.loads(line))), flush=True)


_passed: Final = memoryview(mmap.mmap(-1, 8)).cast("q")
"""The points that a command has passed. Its process has the same memory."""


def _ran(case: dict[str, Any]) -> dict[str, object]:
    _passed[0] = 0
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # not while the case is made
        pid = os.fork()
        if not pid:
            _run(case, out.fileno(), err.fileno())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        stop_after = case.get("stop_after")
        began, stopped = time.monotonic(), False
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            passed = time.monotonic() - began
            if stop_after is not None and passed > stop_after and not stopped:
                os.kill(pid, case.get("signal", signal.SIGTERM))
                stopped = True
            if passed > SECONDS_MAX:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        out.seek(0)
        err.seek(0)
        said = [one.read().decode(errors="backslashreplace") for one in (out, err)]
        return {"code": os.waitstatus_to_exitcode(ended[1]), "out": said[0], "err": said[1], "points": _passed[0]}


def _run(case: dict[str, Any], out: int, err: int) -> NoReturn:
    code = 99
    traces = os.dup(err)  # also where stderr is closed
    os.set_inheritable(traces, False)
    try:
        os.environ.clear()
        os.environ.update(case["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(case["out"], os.O_WRONLY) if "out" in case else out, 1)
        os.dup2(os.open(case["err"], os.O_WRONLY) if "err" in case else err, 2)
        for number in case.get("closed", ()):
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as the interpreter does
        if case.get("deleted_folder"):
            folder = tempfile.mkdtemp()
            os.chdir(folder)
            Path(folder).rmdir()
        if "user" in case:
            os.setgid(case["user"])
            os.setuid(case["user"])
        sys.argv = ["sow", *[os.fsdecode(bytes.fromhex(one)) for one in case["arguments"]]]
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        except KeyboardInterrupt:
            os._exit(130)
        main = importlib.import_module("sow_cli.__main__").main
        if "interrupt_at" in case:
            Points(case["interrupt_at"], count=partial(_passed.__setitem__, 0)).begin()
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except (OSError, ValueError):
            code = 120  # as the interpreter
    except BaseException:
        os.write(traces, traceback.format_exc().encode())
    os._exit(code)


if __name__ == "__main__":
    main()
