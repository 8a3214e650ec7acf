"""The claim on a data directory, which one process holds at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sow_server.engine.values.database import Locked


class DirectoryClaim:
    """A directory that no other process can claim until it is released, or this process ends. RocksDB takes its own
    lock only when it opens, and the reads and writes before that must be safe, too."""

    def __init__(self, path: Path) -> None:
        """Raises Locked, or OSError where there is no such directory."""
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise Locked(f"{path} is in use") from None
        except OSError:
            pass  # a file system without such locks: RocksDB's own has to do

    def release(self) -> None:
        """Others may claim the directory."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
