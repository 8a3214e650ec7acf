"""A server whose wall clock is off, for tests of instances that do not agree on the time:

    python -m tests.support.shifted_server OFFSET_MICROS SERVER_ARGUMENTS…

The offset is that of the machine's clock; the guarded clock, and everything else, is the server's own.
"""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

from sow_server.__main__ import main
from sow_server.engine.clock import GuardedClock, wall_micros


def run(offset_micros: int, arguments: list[str]) -> int:
    """Runs the server; returns its exit code."""
    shifted = partial(GuardedClock, wall=lambda: wall_micros() + offset_micros)
    with mock.patch("sow_server.app.GuardedClock", shifted):
        return main(arguments)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
