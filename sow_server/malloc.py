"""Settings of the C library's allocator: it gives unused memory back to the system. Only glibc has these functions;
with another library the calls here do nothing.

Each thread has its own arena, which keeps freed memory for the next time. After many large queries that amounts to
hundreds of megabytes of unused memory.
"""

from __future__ import annotations

import ctypes
from typing import Final

M_MMAP_THRESHOLD: Final = -3  # of malloc.h
MMAP_BYTES: Final = 512 * 2**10
"""Allocations from this size on go back to the system when they are freed. By default glibc raises this limit up to 32
MiB as large messages come and go; after many of them a server keeps twice the memory that it uses."""
M_TRIM_THRESHOLD: Final = -1  # of malloc.h
TRIM_BYTES: Final = 4 * 2**20
"""Free memory at the end of a heap that is kept. Setting only the other limit would fix this one at 128 KiB, and the
memory of each message would come from the system again, page by page."""

_LIBRARY: Final = ctypes.CDLL(None)


def tune() -> None:
    """Sets the limits. To be called before there are threads."""
    mallopt = getattr(_LIBRARY, "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def trim() -> None:
    """Gives all free whole pages of all threads back to the system. It takes milliseconds, during which an allocating
    thread may have to wait. So call it rarely, and on a thread other than the event loop's (the GIL is not held)."""
    malloc_trim = getattr(_LIBRARY, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
