"""A server whose caller lets everybody read and write new files, as a careless service file may:

python -m tests.support.servers.umask_server SERVER_ARGUMENTS…
"""

from __future__ import annotations

import os
import sys

from sow_server import __main__


def main(arguments: list[str]) -> int:
    """Runs the server; returns its exit code."""
    os.umask(0)
    return __main__.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
