"""A server with clocks that a test sets: the file `clock` beside its configuration has the seconds by which the clock
for credentials is ahead of the machine's, and `store_clock` those for the store's. Failed attempts do not wait, however
many there are."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

from sow_server import __main__
from sow_server.engine.values.clock import TimeSource, boot_micros, wall_micros

FILE = Path("clock")
STORE_FILE = Path("store_clock")
LOOK_SECONDS = 0.05


def now_micros() -> int:
    """The time by which credentials expire."""
    return time.time_ns() // 1000 + _ahead_micros(FILE)


def _ahead_micros(file: Path) -> int:
    return int(float(file.read_text()) * 1_000_000) if file.exists() else 0


def main(arguments: list[str]) -> int:
    """Runs the server; returns its exit code."""
    shifted = TimeSource(
        wall=lambda: wall_micros() + _ahead_micros(STORE_FILE),
        elapsed=lambda: boot_micros() + _ahead_micros(STORE_FILE),
    )
    with (
        mock.patch("sow_server.access_control._now_micros", now_micros),
        mock.patch("sow_server.access_control.LOOK_SECONDS", LOOK_SECONDS),
        mock.patch("sow_server.access.failed_attempts.WAIT_SECONDS", 0.0),
    ):
        return __main__.main(arguments, time_source=shifted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
