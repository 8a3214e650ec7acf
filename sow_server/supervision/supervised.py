"""A cell's side of its supervisor: the cell stops in order once that process has gone, however it ended.

[1]  The supervisor holds the writing end of a pipe, which nobody writes to; every cell waits at the reading end. The
     kernel closes the writing end with the process, also after SIGKILL and in a container. A signal for the death of a
     parent (PR_SET_PDEATHSIG) would come too early, with the end of the thread that started the cell, or never, when
     the supervisor ended before the cell asked for it.
[2]  A cell logs JSON, and the events that the supervisor follows. The supervisor chooses the lines that go out, and
     their format.
[3]  All cells have the configuration that the supervisor has read, whenever they start: the text is in a file without a
     name, whose descriptor they get.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading

from sow_server.config import LogConfig


def stop_with(descriptor: int) -> None:
    """From now on this process gets SIGTERM once nobody holds the other end of a pipe."""
    threading.Thread(target=_wait, args=(descriptor,), name="supervisor", daemon=True).start()


def config_text(descriptor: int) -> str:
    """The configuration that the supervisor has read ([3])."""
    # Not from the position, which all processes share.
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


def log_config(config: LogConfig) -> LogConfig:
    """How a cell logs ([2])."""
    return dataclasses.replace(config, format="json", level="debug" if config.level == "debug" else "info")


def _wait(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGTERM)
