"""The errors of RocksDB, told apart by their texts (rocks [10])."""

from __future__ import annotations

import errno
import os

from sow_server.engine.values.database import Damaged, DiskFull, Failed, Locked, RocksError, Stalled


def translate(error: Exception) -> RocksError:
    """The one place that reads RocksDB's error texts (rocks [10])."""
    if isinstance(error, RocksError):
        return error
    text = " ".join(str(error).split())  # some run over several lines, and a message is one
    low = text.lower()
    if "result incomplete" in low or "write stall" in low:
        return Stalled(text)
    if "lock hold by current process" in low or ("/lock" in low and "temporarily unavailable" in low):
        return Locked(text)
    if low.startswith("corruption") or "checksum mismatch" in low or "corrupted" in low:
        return Damaged(text)
    if os.strerror(errno.ENOSPC).lower() in low or os.strerror(errno.EFBIG).lower() in low or "maxsize" in low:
        return DiskFull(text)
    return Failed(text)
