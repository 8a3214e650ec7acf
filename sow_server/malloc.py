"""The allocator of the C library: when it gives memory back to the system. Only glibc has what is asked here; with
another one nothing is done.

Threads have arenas of their own, and each keeps what was freed for the next time. After many large queries that is
hundreds of megabytes that nobody uses.
"""

from __future__ import annotations

import ctypes
from typing import Final

M_MMAP_THRESHOLD: Final = -3  # of malloc.h
MMAP_BYTES: Final = 512 * 2**10
"""Allocations from this size on go back to the system when they are freed. Left alone, glibc raises its limit to 32 MiB
as large messages come and go, and after a flood of them a server keeps twice the memory that it uses."""
M_TRIM_THRESHOLD: Final = -1  # of malloc.h
TRIM_BYTES: Final = 4 * 2**20
"""Free memory at the end of a heap that is not given back. Setting the other one fixes this one, at 128 KiB; then the
memory of each message would come fresh from the system, page by page."""

_LIBRARY: Final = ctypes.CDLL(None)


def tune() -> None:
    """Before there are threads: which allocations go back when they are freed."""
    mallopt = getattr(_LIBRARY, "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def trim() -> None:
    """Gives back all whole pages that are free, of all threads. Takes milliseconds, in which each thread may have to
    wait for a moment when it allocates; so from a thread, off the event loop (the GIL is not held), and not often."""
    malloc_trim = getattr(_LIBRARY, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
