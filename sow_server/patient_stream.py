"""A stream for the log that never waits for the one who reads it, such as a pipe that nobody reads any more.

[1]  A line that cannot be written at once waits in memory, in order. Beyond a bound, lines are dropped and counted.
[2]  As soon as somebody reads again, what waits is written, and the number of the dropped lines is told.
[3]  The end of the process waits for a second for the reader.
[4]  No thread waits for another one here. A line may come while one is written, also in the same thread: from a
     finalizer that logs, such as that of a task whose exception nobody took. It joins those that wait.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

BYTES_MAX: Final = 2**20
"""Bytes of lines that wait."""
LAST_SECONDS: Final = 1.0


class PatientStream:
    """Owns the lines that wait. From any thread."""

    def __init__(self, stream: TextIO, tell: Callable[[int], None]) -> None:
        """`stream`: one with a descriptor. `tell` is called with the number of lines that were dropped; it may write
        here."""
        self._stream = stream
        self._descriptor = _unblocked(stream.fileno())
        self._tell = tell
        self._waiting: deque[bytes] = deque()
        # No call stands between the reading and the writing of these numbers: so none gets lost.
        self._taken = 0
        self._written = 0
        self._dropped = 0
        self._writing = threading.Lock()
        """That of the thread that writes. Nobody waits for it ([4])."""
        self._draining = threading.Lock()
        """Held as long as a thread waits for the reader."""
        self._ready = self._poll()
        atexit.register(self._end)

    def isatty(self) -> bool:
        """True for a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Writes one or more whole lines, now or later."""
        data = text.encode(errors="backslashreplace")
        size = len(data)
        if self._taken - self._written + size > BYTES_MAX and self._waiting:
            self._dropped += 1
        else:
            self._taken += size
            self._waiting.append(data)
        self._drain(self._ready)
        if self._waiting and self._draining.acquire(blocking=False):
            try:
                threading.Thread(target=self._drain_later, name="log", daemon=True).start()
            except RuntimeError:  # too many threads: the next line tries it again
                self._draining.release()
        return len(text)

    def flush(self) -> None:
        """All is written that can be."""

    def _poll(self) -> select.poll:
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        return ready

    def _drain(self, ready: select.poll) -> None:
        """Writes what can be written, unless another does, and tells the lines that were dropped once none waits."""
        can_write = True
        # Again after the release: a line may have come that left it to this thread.
        while can_write and self._waiting and self._writing.acquire(blocking=False):
            try:
                can_write = self._write_waiting(ready)
            finally:
                self._writing.release()
        if self._dropped and not self._waiting:
            dropped, self._dropped = self._dropped, 0
            self._tell(dropped)

    def _write_waiting(self, ready: select.poll) -> bool:
        """Writes what can be written; returns True if that is all."""
        while self._waiting:
            if not ready.poll(0):
                return False
            first = self._waiting[0]
            try:
                # So much goes into a pipe without waiting, if it is ready.
                written = os.write(self._descriptor, first[: select.PIPE_BUF])
            except BlockingIOError:
                return False
            except OSError:  # the reader has gone, or the disk is full: nothing can be done
                written = len(first)
            self._written += written
            if written < len(first):
                self._waiting[0] = first[written:]
            else:
                self._waiting.popleft()
        return True

    def _drain_later(self) -> None:
        ready = self._poll()
        mine = True
        while mine:
            while self._waiting:
                ready.poll()
                self._drain(ready)
            self._draining.release()
            mine = bool(self._waiting) and self._draining.acquire(blocking=False)

    def _end(self) -> None:
        end = time.monotonic() + LAST_SECONDS
        ready = self._poll()
        while self._waiting and (left := end - time.monotonic()) > 0:
            ready.poll(left * 1000)
            self._drain(ready)


def say(text: str) -> None:
    """Writes whole lines to standard error before the process ends, unless nobody reads them ([3])."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError):  # a stream in memory
        sys.stderr.write(text)
    else:
        PatientStream(sys.stderr, lambda _: None).write(text)


def _unblocked(descriptor: int) -> int:
    """For a terminal, a descriptor that never blocks: it takes any part of a line. Others that use the terminal keep
    what they have."""
    if os.isatty(descriptor):
        with contextlib.suppress(OSError):  # of another user
            return os.open(f"/dev/fd/{descriptor}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    return descriptor
