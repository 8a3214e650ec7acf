"""Reads files that a configuration names.

[1]  They are regular files. A pipe that nobody writes to, or a device, would hold the reader, and each later reload
     with it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path) -> bytes:
    """The bytes of a file. Raises OSError, also for what is no regular file ([1])."""
    # Without blocking: to open a pipe would wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return file.read()
