"""The report of CPU seconds at the end of a test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.cpu import report, used_seconds

BURNS = """
import sys, time
while time.process_time() < 0.2:
    pass
print("burnt", flush=True)
sys.stdin.read()
"""


def test_the_largest_files_come_first_and_the_rest_is_one_line() -> None:
    seconds = {"small": 1.0, "large": 200.0, "medium": 99.0}
    assert report(seconds, 1) == [
        "   200.0 s  large",
        "   100.0 s  2 more",
        "   300.0 s  in all, 50% of the 600 s for the default tests",
    ]
    assert [line.split()[-1] for line in report(seconds, None)[:-1]] == ["large", "medium", "small"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="elsewhere a process counts once it has ended")
def test_a_process_counts_while_it_runs_and_after_its_end() -> None:
    before = used_seconds()
    with subprocess.Popen([sys.executable, "-c", BURNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        running = used_seconds()
    assert running - before > 0.15  # in ticks of 10 ms
    assert used_seconds() - before > 0.15
