"""Signals of a process that stops."""

from __future__ import annotations

import asyncio
import signal


def ignore_reloads() -> None:
    """From now on SIGHUP does nothing, also after the end of the event loop. There is nothing left to read again, and
    by default the signal, which the end of a terminal sends, too, would end the process in the middle of its stop."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
