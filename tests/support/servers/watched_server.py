"""A server whose event loop is watched: it writes down what has occupied the loop for long.

python -m tests.support.servers.watched_server FILE MILLISECONDS SERVER_ARGUMENTS…

[1]  A callback counts by the CPU time of the loop's own thread. A machine that is busy with other things, and threads
     that hold the interpreter, make no callback longer.
[2]  Each line of FILE is one callback of at least so many milliseconds, with the stack that a second thread saw while
     it ran. FILE exists once the loop runs, and has what came before the answer to any later call.
[3]  The loop is asyncio's own, since that of uvloop shows no callback. The callbacks are the server's, and the same.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import json
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

from sow_server import __main__

T = TypeVar("T")

LOOK_SECONDS: Final = 0.002
FRAMES_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Occupied:
    """One callback that occupied the loop for long."""

    milliseconds: float
    """CPU time of the loop's thread."""
    wall: float
    """Milliseconds from its begin to its end."""
    callback: str
    stack: tuple[str, ...]
    """Seen while it ran, the innermost last. Empty: it was not seen."""

    def __str__(self) -> str:
        return "\n".join([f"{self.milliseconds:.0f} ms (wall {self.wall:.0f} ms): {self.callback}", *self.stack])


def occupied(file: Path) -> list[Occupied]:
    """What a watched server has written down so far."""
    found = []
    for line in file.read_text().splitlines():
        fields = json.loads(line)
        found.append(Occupied(**fields | {"stack": tuple(fields["stack"])}))
    return found


class LoopWatch:
    """Owns the file, and the thread that looks."""

    def __init__(self, file: Path, milliseconds: float) -> None:
        self._file = file
        self._seconds = milliseconds / 1_000
        self._lock = threading.Lock()
        self._begun: float | None = None
        """The CPU time of the loop's thread when its callback began. None: it runs none."""
        self._stack: tuple[str, ...] = ()
        self._loop_thread = 0

    @property
    def has_seen(self) -> bool:
        """Whether the stack of the present callback has been seen."""
        return bool(self._stack)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Instead of `asyncio.run`."""
        self._loop_thread = threading.get_ident()
        self._file.write_text("")
        threading.Thread(target=self._look, args=(time.pthread_getcpuclockid(self._loop_thread),), daemon=True).start()
        with mock.patch.object(asyncio.events.Handle, "_run", self._watched(asyncio.events.Handle._run)):
            return asyncio.run(main)

    def _watched(self, run: Any) -> Any:
        def watched(handle: asyncio.Handle) -> None:
            wall, begun = time.perf_counter(), time.thread_time()
            self._begun = begun
            try:
                run(handle)
            finally:
                self._begun = None
                spent = time.thread_time() - begun
                if spent >= self._seconds and threading.get_ident() == self._loop_thread:
                    self._write(handle, spent, time.perf_counter() - wall)
                elif self._stack:
                    self._stack = ()  # it is not that of a later callback

        return watched

    def _write(self, handle: asyncio.Handle, spent: float, wall: float) -> None:
        with self._lock:
            stack, self._stack = self._stack, ()
        line = {
            "milliseconds": spent * 1e3,
            "wall": wall * 1e3,
            "callback": repr(handle)[:300],
            "stack": stack[-FRAMES_SHOWN:],
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _look(self, clock: int) -> None:
        seen: float | None = None
        while True:
            time.sleep(LOOK_SECONDS)
            begun = self._begun
            if begun is None or begun == seen or time.clock_gettime(clock) - begun < self._seconds / 2:
                continue
            frames = traceback.extract_stack(sys._current_frames().get(self._loop_thread))
            stack = tuple(f"{one.filename}:{one.lineno} {one.name}" for one in frames if "asyncio" not in one.filename)
            with self._lock:
                if self._begun == begun:
                    self._stack, seen = stack, begun


def main(arguments: list[str]) -> int:
    """Runs the server with the arguments of this module in front of its own; returns its exit code."""
    file, milliseconds, *others = arguments
    with mock.patch("sow_server.app.uvloop.run", LoopWatch(Path(file), float(milliseconds)).run):
        return __main__.main(others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
