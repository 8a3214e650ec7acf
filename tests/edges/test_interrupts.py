"""Runs the tests of interrupts.py in a process of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.servers.server import ROOT

CASES = "tests/edges/interrupts.py"


def run(which: str) -> subprocess.CompletedProcess[str]:
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", which, CASES]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_an_interrupt_at_any_point_leaves_nothing_half_made(which: str) -> None:
    done = run(which)
    if done.returncode < 0:
        done = run(which)  # CPython 3.11 itself may crash where a trace function raises
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
