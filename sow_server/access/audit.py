"""The audit log: one JSON object a line, in a file that only the server's user can read (rule A8).

[1]  No payload, no token and no text of a filter is ever written.
[2]  A line is with the operating system when `write` returns. If it cannot be written, `write` says so, and
     administrative calls are refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

MICROS: Final = 1_000_000

Value = str | int | bool


class AuditLog:
    """Writes the lines, and rotates the files. Event loop only."""

    def __init__(self, path: Path, *, bytes_max: int, files: int, now_micros: Callable[[], int]) -> None:
        """`bytes_max`: of one file; `files`: how many older ones are kept. Raises OSError."""
        self._handler = _PrivateFile(path, maxBytes=bytes_max, backupCount=files, encoding="utf-8")
        self._now_micros = now_micros
        self.lines_total = 0
        self.failures_total = 0

    def write(self, event: str, fields: Mapping[str, Value]) -> bool:
        """Writes one line; False if that is impossible, for example on a full disk."""
        moment = datetime.fromtimestamp(self._now_micros() / MICROS, UTC)
        line = json.dumps({"time": moment.isoformat(timespec="microseconds"), "event": event, **fields})
        try:
            self._handler.handle(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None))
        except OSError:
            self.failures_total += 1
            self._handler.reopen()
            return False
        self.lines_total += 1
        return True

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._handler.close()


class NoAudit(AuditLog):
    """Without an access file there are no decisions to tell."""

    def __init__(self) -> None:
        self.lines_total = self.failures_total = 0

    def write(self, event: str, fields: Mapping[str, Value]) -> bool:
        """Writes nothing."""
        return True

    def close(self) -> None:
        """Closes nothing."""


class _PrivateFile(RotatingFileHandler):
    """Files with mode 0600, and errors that the caller hears of."""

    def _open(self) -> Any:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=opener)  # the handler closes it

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # its name in the library
        raise  # noqa: PLE0704  # called in an except block: logging would print and go on

    def reopen(self) -> None:
        """Opens the file anew with the next line: a line that was half written must not be continued."""
        with contextlib.suppress(OSError, ValueError):
            if self.stream is not None:
                self.stream.close()
        self.stream = None
