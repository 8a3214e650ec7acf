"""What pytest and pytest-xdist do for each test, less of it. tests/conftest.py registers these plugins.

There are thousands of tests, and most take a millisecond. For each, pytest-xdist sent seven messages, which took as
long as such a test, and pytest started and ended a thread that would print the stacks of a test that hangs.

    [1]  A process of pytest-xdist sends the outcome of a test, and that it is complete. It sends a report of a setup or
         a teardown that passed only if it belongs into a list of the slowest.
    [2]  If a test takes more than `HANGS_SECONDS`, the stacks of all threads are printed, and its process ends. So
         pytest-xdist names the test as failed, and goes on with another process. A test with the mark `long` may go on.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import Final

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

HANGS_SECONDS: Final = 300
SLOW_SECONDS: Final = 0.1
_ALARM_SECONDS: Final = 60
"""How long the tests that follow share an alarm: each alarm is a thread."""
_UNSENT: Final[Mapping[str, object]] = {"unsent": True}
"""Stands for a report that is not sent."""


class OneSession(LoadFileScheduling):  # type: ignore[misc]  # xdist has no annotations
    """Files go to processes whole, and all of Spark's to one: each process with one of them would start a JVM."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return "tests/spark" if scope.startswith("tests/spark/") else scope


class HangingTests:
    """Ends a test that hangs ([2]); `faulthandler_timeout` of pytest would take a thread for each test.

    Story: one test waited for ever, printed its stacks far above the end of the output, and no run of it ended."""

    def __init__(self, seconds: float = HANGS_SECONDS, shared_seconds: float = _ALARM_SECONDS) -> None:
        self._seconds = seconds
        self._shared_seconds = shared_seconds
        # Nothing captures the output yet, so these are the errors of the run.
        self._stderr = os.dup(2)
        self._set = -float("inf")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        may_go_on = item.get_closest_marker("long") is not None
        if may_go_on or (now := time.monotonic()) - self._set >= self._shared_seconds:
            # The test after a long one has an alarm of its own.
            self._set = -float("inf") if may_go_on else now
            seconds = self._seconds + self._shared_seconds
            faulthandler.dump_traceback_later(seconds, exit=not may_go_on, file=self._stderr)
        return (yield)

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._stderr)


class FewMessages:
    """Keeps a process of pytest-xdist from sending what nobody reads ([1])."""

    def __init__(self, config: pytest.Config) -> None:
        for plugin in config.pluginmanager.get_plugins():
            if hasattr(plugin, "sendevent"):
                self._send: Callable[..., None] = plugin.sendevent
                plugin.sendevent = self._send_needed

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_to_serializable(self, report: object) -> dict[str, object] | None:
        if isinstance(report, pytest.TestReport) and not _needed(report):
            return dict(_UNSENT)
        return None

    def _send_needed(self, name: str, **kwargs: object) -> None:
        data = kwargs.get("data")
        if name in ("logstart", "logfinish") or (isinstance(data, dict) and "unsent" in data):
            return
        self._send(name, **kwargs)


def _needed(report: pytest.TestReport) -> bool:
    return report.when == "call" or not report.passed or report.duration >= SLOW_SECONDS
