"""The watch of an event loop, which tests of hostile callers rely on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.servers.watched_server import LoopWatch, occupied

LIMIT_MS = 50.0
WATCHDOG_SECONDS = 30.0


def busy(until: Callable[[], bool] = lambda: True) -> None:
    """Uses twice the limit, and goes on until something holds: a busy machine lets other threads wait."""
    begun, give_up = time.thread_time(), time.monotonic() + WATCHDOG_SECONDS
    while time.thread_time() - begun < 2 * LIMIT_MS / 1_000 or not until():
        assert time.monotonic() < give_up, "it has not come to hold"


async def watched(work: object) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def callback() -> None:
        assert callable(work)
        work()
        done.set()

    loop.call_soon(callback)
    await done.wait()


@pytest.mark.slow
def test_a_callback_that_occupies_the_loop_is_written_down_with_its_stack(tmp_path: Path) -> None:
    """watched_server [1] and [2]"""
    watch = LoopWatch(tmp_path / "occupied", LIMIT_MS)
    watch.run(watched(lambda: busy(until=lambda: watch.has_seen)))
    (one,) = occupied(tmp_path / "occupied")
    assert one.milliseconds >= 2 * LIMIT_MS
    assert any("busy" in line for line in one.stack), str(one)


def test_a_callback_that_only_waits_is_not(tmp_path: Path) -> None:
    """watched_server [1]: a busy machine makes a callback wait."""

    def wait() -> None:
        thread = threading.Thread(target=busy)
        thread.start()
        thread.join(WATCHDOG_SECONDS)

    LoopWatch(tmp_path / "occupied", LIMIT_MS).run(watched(wait))
    assert occupied(tmp_path / "occupied") == []
