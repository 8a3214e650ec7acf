"""The audit log: one JSON object a line, in a file that only the server's user can read (rule A8).

[1]  No payload, no token and no text of a filter is ever written.
[2]  A line is with the operating system when `write` returns. If it cannot be written, `write` says so, and
     administrative calls are refused.
[3]  A line that was written in part is never continued: the next one begins on a line of its own.
[4]  A file that was moved away or removed, as logrotate does, is followed by a new one at the next line. No signal is
     needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from sow_server.engine.values.model import MICROS

PRIVATE: Final = 0o600

Value = str | int | bool


class Audit(Protocol):
    """Hears of everything that is audited."""

    def write(self, event: str, fields: Mapping[str, Value]) -> bool:
        """Writes one line; False if that is impossible."""

    def close(self) -> None:
        """Closes the file."""


class AuditObserver(Protocol):
    """Counts lines (the metrics)."""

    def audited(self, event: str, *, written: bool) -> None:
        """A line about an event was written, or could not be."""


class NoAudit:
    """Without an access file there are no decisions to tell."""

    def write(self, event: str, fields: Mapping[str, Value]) -> bool:
        """Writes nothing."""
        return True

    def close(self) -> None:
        """Closes nothing."""


class AuditLog:
    """Owns the file: writes the lines, and keeps older files beside it as NAME.1, NAME.2 … Event loop only."""

    def __init__(
        self,
        path: Path,
        *,
        bytes_max: int,
        files: int,
        now_micros: Callable[[], int],
        observer: AuditObserver,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """`bytes_max`: of one file; `files`: how many older ones are kept; `write`: the system's. Raises OSError."""
        self._observer = observer
        self._path = path
        self._bytes_max = bytes_max
        self._files = files
        self._now_micros = now_micros
        self._write = write
        self._file = -1
        self._torn = False
        """Whether the file ends within a line [3]."""
        self._open()

    def write(self, event: str, fields: Mapping[str, Value]) -> bool:
        """Writes one line; False if that is impossible, for example on a full disk."""
        moment = datetime.fromtimestamp(self._now_micros() / MICROS, UTC)
        line = json.dumps({"time": moment.isoformat(timespec="microseconds"), "event": event, **fields})
        try:
            self._append(line.encode() + b"\n")
        except OSError:
            self.close()  # the next line opens it anew, and looks how it ends
            self._observer.audited(event, written=False)
            return False
        self._observer.audited(event, written=True)
        return True

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _append(self, line: bytes) -> None:
        size = self._current()
        if size and size + len(line) > self._bytes_max:
            self._rotate()
        data = b"\n" + line if self._torn else line
        # One call a line: two servers that share a file by mistake mix whole lines, and a short write is rare.
        while data:
            written = self._write(self._file, data)
            self._torn = written < len(data)
            data = data[written:]

    def _current(self) -> int:
        """Opens the file if it is not open, or no longer the one at the path [4]. Returns its size. Raises OSError."""
        if self._file >= 0:
            with contextlib.suppress(FileNotFoundError):
                at, opened = os.stat(self._path), os.fstat(self._file)
                if (at.st_dev, at.st_ino) == (opened.st_dev, opened.st_ino):
                    return _size(opened)
            self.close()
        self._open()
        return _size(os.fstat(self._file))

    def _open(self) -> None:
        # For reading, too: only so can it be seen whether the last line is whole.
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            state = os.fstat(self._file)
            if stat.S_ISREG(state.st_mode) and stat.S_IMODE(state.st_mode) != PRIVATE:
                os.fchmod(self._file, PRIVATE)
            size = _size(state)
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        except OSError:
            self.close()
            raise

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        os.replace(self._path, self._numbered(1))
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _size(state: os.stat_result) -> int:
    return state.st_size if stat.S_ISREG(state.st_mode) else 0
