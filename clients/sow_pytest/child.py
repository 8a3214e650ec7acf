"""The server in its process: `python -m sow_pytest.child SERVER_ARGUMENTS`, as `ServerOfSession` starts it.

Each line on standard input is a number of microseconds by which the store's time moves forward; the answer is a line on
standard output. When the input ends, whoever started the server has ended, and the server stops.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Final

from sow_server import __main__
from sow_server.engine.values.clock import TimeSource, boot_micros, wall_micros

STOP_SECONDS: Final = 10.0
"""The time that an orderly stop has, once nobody is there any more."""


class Ahead:
    """Owns the microseconds by which the store is ahead of the machine."""

    def __init__(self) -> None:
        self.micros = 0

    def source(self) -> TimeSource:
        """The moved time. Elapsed time moves as well, so that the clock takes it for no jump (rule L15)."""
        return TimeSource(wall=lambda: wall_micros() + self.micros, elapsed=lambda: boot_micros() + self.micros)

    def obey(self) -> None:
        """Moves as the lines of standard input say, until they end."""
        for line in sys.stdin:
            self.micros += int(line)
            sys.stdout.write("moved\n")
            sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_SECONDS)
        os._exit(1)


def main() -> int:
    """Runs the server; returns its exit code."""
    ahead = Ahead()
    threading.Thread(target=ahead.obey, name="sow-pytest", daemon=True).start()
    return __main__.main(sys.argv[1:], time_source=ahead.source())


if __name__ == "__main__":
    sys.exit(main())
