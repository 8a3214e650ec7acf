"""A server with a clock for credentials that a test sets: the file `clock` beside its configuration has the seconds by
which the clock is ahead of the machine's. Failed attempts do not wait, however many there are."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

from sow_server import __main__

FILE = Path("clock")
LOOK_SECONDS = 0.05


def now_micros() -> int:
    """The time by which credentials expire."""
    ahead = float(FILE.read_text()) if FILE.exists() else 0.0
    return time.time_ns() // 1000 + int(ahead * 1_000_000)


def main(arguments: list[str]) -> int:
    """Runs the server; returns its exit code."""
    with (
        mock.patch("sow_server.access_control._now_micros", now_micros),
        mock.patch("sow_server.access_control.LOOK_SECONDS", LOOK_SECONDS),
        mock.patch("sow_server.access.failures.WAIT_SECONDS", 0.0),
    ):
        return __main__.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
