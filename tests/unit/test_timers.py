"""The scheduler of the periodic jobs: what an orderly stop leaves in the log."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.stores import Rig
from tests.support.timers import timers


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_a_job_that_the_stop_cancels_is_no_error(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Story: on a busy machine jobs still waited for a thread when the server stopped; that was logged as theirs."""
    release = threading.Event()

    async def stop_while_jobs_wait(readers: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, release.wait)
        jobs = timers(rig, readers, mark_interval_micros=1000)
        jobs.start()
        await asyncio.sleep(0.05)  # jobs fall due, and wait for the only thread
        jobs.stop()
        await asyncio.sleep(0)
        release.set()
        await busy

    with ThreadPoolExecutor(1) as readers, caplog.at_level(logging.ERROR):
        asyncio.run(stop_while_jobs_wait(readers))
    assert not caplog.records
