"""The audit log: one JSON object a line, in files that only the server's user can read (rule A8).

[1]  No payload, no token and no text of a filter is ever written. A text longer than TEXT_MAX is cut.
[2]  A line is with the operating system when `write` returns. If it cannot be written, `write` says so, and
     calls that must be told are refused.
[3]  A line that was written in part is never continued: the next one begins on a line of its own.
[4]  A file that was moved away or removed, as logrotate does, is followed by a new one at the next line. No signal is
     needed.
[5]  Each part of the log has files of its own: no number of lines of one pushes out a line of another.
[6]  A line about access that is taken away has room in advance, so it is never refused for want of a disk. It is in the
     log once that can be written again.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

import structlog

from sow_server.engine.values.model import MICROS

log = structlog.get_logger(__name__)

PRIVATE: Final = 0o600
TEXT_MAX: Final = 200
"""Characters of a text in a line: the names that callers give would make lines as long as they like [1]."""
RESERVE_BYTES: Final = 256 * 2**10
"""Room for the some 500 lines of [6]."""

Value = str | int | bool


class Part(enum.Enum):
    """A part of the audit log, by who can make it grow [5]. The value ends the name of its file."""

    ADMINISTRATION = ""
    """Calls of administrators, and reloads."""
    CALLS = "-calls"
    """Calls of others that the log has: deletes, loads, links; with `audit_reads` all calls."""
    REFUSALS = "-refused"
    """Denials and failed authentications; a flood is told as a number (`tally`)."""


class Outcome(enum.StrEnum):
    """The outcomes of writing a line."""

    WRITTEN = "written"
    RESERVED = "reserved"
    """It waits in the reserve [6]."""
    FAILED = "failed"


class Audit(Protocol):
    """Hears of everything that is audited."""

    def write(self, part: Part, event: str, fields: Mapping[str, Value], *, reserved: bool = False) -> bool:
        """Writes one line; False if that is impossible. `reserved`: the line may use the room kept in advance [6]."""

    def catch_up(self) -> None:
        """Writes the lines that wait in the reserve, if that is possible again. To be called every second or so."""

    def close(self) -> None:
        """Closes the files."""


class AuditObserver(Protocol):
    """Counts lines (the metrics)."""

    def audited(self, event: str, outcome: Outcome) -> None:
        """A line about an event was written, or could not be."""


class NoAudit:
    """Without an access file there are no decisions to tell."""

    def write(self, part: Part, event: str, fields: Mapping[str, Value], *, reserved: bool = False) -> bool:
        """Writes nothing."""
        return True

    def catch_up(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Closes nothing."""


class AuditLog:
    """Owns the files of all parts, and the reserve. Event loop only."""

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
        """`path`: of the part ADMINISTRATION; the others lie beside it. A path that is no file, such as a pipe, gets
        all parts. `bytes_max`: of one file; `files`: how many older ones of each part are kept; `write`: the system's.
        Raises OSError."""
        self._observer = observer
        self._now_micros = now_micros
        is_file = path.is_file() or not path.exists()
        self._files = {part: _Lines(path_of(path, part) if is_file else path, bytes_max, files, write) for part in Part}
        at = path.resolve()  # on the disk that gets full
        self._reserve = _Reserve(at.with_name(f"{at.name}.reserve")) if is_file else None
        self.catch_up()

    def write(self, part: Part, event: str, fields: Mapping[str, Value], *, reserved: bool = False) -> bool:
        """Writes one line; False if that is impossible, for example on a full disk."""
        moment = datetime.fromtimestamp(self._now_micros() / MICROS, UTC)
        shown = {name: _cut(value) for name, value in fields.items()}
        line = json.dumps({"time": moment.isoformat(timespec="microseconds"), "event": event, **shown})
        data = line.encode() + b"\n"
        if part is Part.ADMINISTRATION:
            self.catch_up()  # its lines are in the order of their times
        if self._files[part].append(data):
            outcome = Outcome.WRITTEN
        elif reserved and self._reserve is not None and self._reserve.put(data):
            outcome = Outcome.RESERVED
        else:
            outcome = Outcome.FAILED
            if reserved:  # the last resort: its caller goes on without a line in the log
                log.error("audit_line_failed", line=line)
        self._observer.audited(event, outcome)
        return outcome is not Outcome.FAILED

    def catch_up(self) -> None:
        """Moves the lines that wait in the reserve into the log. After a crash in between they are there twice."""
        if self._reserve is None or not self._reserve.lines:
            return
        waiting = self._reserve.lines.splitlines(keepends=True)
        moved = list(itertools.takewhile(self._files[Part.ADMINISTRATION].append, waiting))
        if moved:
            self._reserve.drop(sum(map(len, moved)))

    def close(self) -> None:
        """Closes the files."""
        self.catch_up()
        for lines in self._files.values():
            lines.close()
        if self._reserve is not None:
            self._reserve.close()


def path_of(path: Path, part: Part) -> Path:
    """The file of a part: `audit.jsonl`, `audit-calls.jsonl`, `audit-refused.jsonl`."""
    return path.with_name(f"{path.stem}{part.value}{path.suffix}")


def _cut(value: Value) -> Value:
    return f"{value[:TEXT_MAX]}…" if isinstance(value, str) and len(value) > TEXT_MAX else value


class _Lines:
    """Owns the file of one part, and keeps older files beside it as NAME.1, NAME.2 …

    No handler of `logging` is under it: its stream keeps what it could not write, and writes it later, although [2] its
    caller was refused (decision 62).
    """

    def __init__(self, path: Path, bytes_max: int, files: int, write: Callable[[int, bytes], int]) -> None:
        """Raises OSError."""
        self._path = path
        self._bytes_max = bytes_max
        self._files = files
        self._write = write
        self._file = -1
        self._torn = False
        """True if the file ends within a line [3]."""
        self._open()

    def append(self, lines: bytes) -> bool:
        """Writes whole lines; False if that is impossible."""
        try:
            self._append(lines)
        except OSError:
            self.close()  # the next line opens it anew, and looks how it ends
            return False
        return True

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _append(self, lines: bytes) -> None:
        size = self._current()
        if size and size + len(lines) > self._bytes_max:
            self._rotate()
        data = b"\n" + lines if self._torn else lines
        # One call a line: two servers that share a file by mistake mix whole lines, and a short write is rare.
        while data:
            written = self._write(self._file, data)
            self._torn = written < len(data)
            data = data[written:]

    def _current(self) -> int:
        """Opens the file if it is not open, or no longer the one at the path [4]. Returns its size. Raises OSError."""
        if self._file >= 0:
            if _is_at(self._path, self._file):
                return _size(os.fstat(self._file))
            self.close()
        self._open()
        return _size(os.fstat(self._file))

    def _open(self) -> None:
        # For reading, too: only so can it be seen whether the last line is whole.
        self._file = _opened(self._path, os.O_APPEND)
        try:
            size = _size(os.fstat(self._file))
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


class _Reserve:
    """Owns a file whose room is taken in advance [6]: line feeds, over which lines are written. So a full disk has
    room for them, unless the file system writes each block to a new place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self.lines = b""
        """Those that wait."""
        if not self._is_ready():
            log.warning("audit_reserve_failed", file=str(path))

    def put(self, line: bytes) -> bool:
        """Keeps a line; False if that is impossible."""
        if not self._is_ready() or len(self.lines) + len(line) > RESERVE_BYTES:
            return False
        try:
            self._overwrite(len(self.lines), line)
        except OSError:
            return False
        self.lines += line
        return True

    def drop(self, size: int) -> None:
        """Lets the first lines go, of so many bytes."""
        self.lines = self.lines[size:]
        with contextlib.suppress(OSError):  # after a crash they would be in the log twice
            if self._is_ready():
                self._overwrite(0, self.lines + b"\n" * size)

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _is_ready(self) -> bool:
        """Opens the file and takes its room, if that is still to be done."""
        try:
            if self._file >= 0 and _is_at(self._path, self._file):
                return True
            self.close()
            self._file = _opened(self._path)
            found = os.pread(self._file, RESERVE_BYTES, 0)
            waiting = self.lines or (found.rstrip(b"\n") + b"\n").lstrip(b"\n")
            missing = RESERVE_BYTES - len(found)
            if missing:
                self._overwrite(len(found), b"\n" * missing)
            self._overwrite(0, waiting)
            os.fsync(self._file)
        except OSError:
            self.close()
            return False
        self.lines = waiting
        return True

    def _overwrite(self, offset: int, data: bytes) -> None:
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written


def _opened(path: Path, flags: int = 0) -> int:
    """Opens a private file, which need not be there yet. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, PRIVATE)
    try:
        state = os.fstat(file)
        if stat.S_ISREG(state.st_mode) and stat.S_IMODE(state.st_mode) != PRIVATE:
            os.fchmod(file, PRIVATE)
    except OSError:
        os.close(file)
        raise
    return file


def _is_at(path: Path, file: int) -> bool:
    """True if an open file is the one at a path."""
    try:
        at, opened = os.stat(path), os.fstat(file)
    except FileNotFoundError:
        return False
    return (at.st_dev, at.st_ino) == (opened.st_dev, opened.st_ino)


def _size(state: os.stat_result) -> int:
    return state.st_size if stat.S_ISREG(state.st_mode) else 0
