"""The CPU time of a test run, file by file: a plugin of pytest, which tests/conftest.py registers.

While a file is under test, it is charged with the time of the test process and of all processes below it: servers,
commands, JVMs. A busy machine changes seconds of CPU little, and seconds of a clock much. A run beyond the budget does
not fail: the report shows by how much, and which files take most.

    [1]  A second of a process counts at most once, for one file or for `REST`.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final

import pytest

BUDGET_SECONDS: Final = 600
"""The budget of all default tests: five minutes on two cores that nobody else uses."""
FILES_SHOWN: Final = 15
REST: Final = "(start, imports, collection, end)"
_OUTPUT: Final = "cpu_seconds"
_TICKS = os.sysconf("SC_CLK_TCK")


class CpuTimes:
    """Counts the time of this process. With pytest-xdist, the controller adds the counts of its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._shown = None if config.get_verbosity() > 0 else FILES_SHOWN
        self._controls = bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
        """The controller of pytest-xdist runs no test, and its workers report their times themselves."""
        self._file = REST
        self._counted = 0.0
        self._seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if (file := item.path.relative_to(self._root).as_posix()) != self._file:
            self._turn_to(file)
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._turn_to(REST)
        output: dict[str, dict[str, float]] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output: dict[str, dict[str, float]] = getattr(node, "workeroutput", {})  # a killed worker has none
        for file, taken in output.get(_OUTPUT, {}).items():
            self._seconds[file] += taken

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds")
        for line in report(self._seconds, self._shown):
            terminalreporter.line(line)

    def _turn_to(self, file: str) -> None:
        now = time.process_time() if self._controls else used_seconds()
        # Fewer than before where a process ended that nobody waited for: its seconds are lost, and no file's.
        self._seconds[self._file] += max(0.0, now - self._counted)
        self._file, self._counted = file, now


def report(seconds: Mapping[str, float], shown: int | None) -> list[str]:
    """The files that took most come first; all of them where `shown` is None."""
    total = sum(seconds.values())
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:shown]
    lines = [f"{taken:8.1f} s  {file}" for file, taken in largest]
    if others := len(seconds) - len(largest):
        lines.append(f"{total - sum(taken for _, taken in largest):8.1f} s  {others} more")
    share = total / BUDGET_SECONDS
    lines.append(f"{total:8.1f} s  in all, {share:.0%} of the {BUDGET_SECONDS} s for the default tests")
    return lines


def used_seconds() -> float:
    """The CPU time of this process and of all that it started, whether they have ended or not."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime + _running(os.getpid(), _processes())


def _running(process: int, processes: Mapping[int, list[tuple[int, float]]]) -> float:
    return sum(seconds + _running(child, processes) for child, seconds in processes.get(process, ()))


def _processes() -> Mapping[int, list[tuple[int, float]]]:
    """The running children of each process, each with the seconds of itself and of its ended children. Without /proc it
    is empty, and a process counts when it has ended."""
    processes: dict[int, list[tuple[int, float]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may hold anything: state, parent, …
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended: its parent has its time
        process, parent = int(path.parent.name), int(fields[1])
        processes.setdefault(parent, []).append((process, sum(map(int, fields[11:15])) / _TICKS))
    return processes
