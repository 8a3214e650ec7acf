"""A stream for the log that never waits for the one who reads it, such as a pipe that nobody reads any more.

[1]  A line that cannot be written at once waits in memory, in order. Beyond a bound, lines are dropped and counted.
[2]  As soon as somebody reads again, what waits is written, and the number of the dropped lines is told.
[3]  The end of the process waits for a second for the reader.
"""

from __future__ import annotations

import atexit
import os
import select
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
        self._descriptor = stream.fileno()
        self._tell = tell
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._ready = self._poll()
        self._drainer: threading.Thread | None = None
        atexit.register(self._end)

    def isatty(self) -> bool:
        """True for a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Writes one or more whole lines, now or later."""
        data = text.encode(errors="backslashreplace")
        with self._lock:
            if self._size + len(data) > BYTES_MAX and self._waiting:
                self._dropped += 1
            else:
                self._waiting.append(data)
                self._size += len(data)
            dropped = self._drain(self._ready)
            if self._waiting and self._drainer is None:
                self._drainer = threading.Thread(target=self._drain_later, name="log", daemon=True)
                self._drainer.start()
        self._tell_dropped(dropped)
        return len(text)

    def flush(self) -> None:
        """All is written that can be."""

    def _poll(self) -> select.poll:
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        return ready

    def _drain(self, ready: select.poll) -> int:
        """Writes what can be written; returns how many lines are to be told as dropped."""
        while self._waiting:
            if not ready.poll(0):
                return 0
            try:
                # So much goes into a pipe without waiting, if it is ready.
                written = os.write(self._descriptor, self._waiting[0][: select.PIPE_BUF])
            except BlockingIOError:
                return 0
            except OSError:  # the reader has gone, or the disk is full: nothing can be done
                written = len(self._waiting[0])
            self._size -= written
            if written < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][written:]
            else:
                self._waiting.popleft()
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _drain_later(self) -> None:
        ready = self._poll()
        while True:
            ready.poll()
            with self._lock:
                dropped = self._drain(ready)
                if not self._waiting:
                    self._drainer = None
            # Without the lock: a thread that logs has that of its handler, and waits for this one.
            self._tell_dropped(dropped)
            if self._drainer is not threading.current_thread():
                return

    def _tell_dropped(self, dropped: int) -> None:
        if dropped:
            self._tell(dropped)

    def _end(self) -> None:
        end = time.monotonic() + LAST_SECONDS
        ready = self._poll()
        while self._waiting and (left := end - time.monotonic()) > 0:
            ready.poll(left * 1000)
            with self._lock:
                self._drain(ready)
