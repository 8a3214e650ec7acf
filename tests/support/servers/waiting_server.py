"""A server whose start waits before it opens the store, until somebody writes to a named pipe:

python -m tests.support.servers.waiting_server PIPE SERVER_ARGUMENTS…
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from sow_server import __main__
from sow_server.engine.store import Store


def main(arguments: list[str]) -> int:
    """Runs the server with the arguments of this module in front of its own; returns its exit code."""
    pipe, *others = arguments
    opened = Store.open

    def waiting(*given: object, **named: object) -> Store:
        Path(pipe).read_text()
        return opened(*given, **named)  # type: ignore[arg-type]  # as the caller gave them

    with mock.patch.object(Store, "open", waiting):
        return __main__.main(others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
