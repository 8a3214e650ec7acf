"""The server as a process that inherits those of its children, as process 1 of a container does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

from sow_server import __main__

PR_SET_CHILD_SUBREAPER: Final = 36


def main(arguments: Sequence[str] | None = None) -> int:
    """As that of the server."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    return __main__.main(arguments)
