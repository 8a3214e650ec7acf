"""What processes of pytest-xdist send of a test, and what ends one that hangs (tests/support/servers/workers)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from tests.support.servers.server import ROOT
from tests.support.servers.workers import SLOW_SECONDS, FewMessages

Outcome = Literal["passed", "failed", "skipped"]
When = Literal["setup", "call", "teardown"]


class Interactor:
    """The plugin of pytest-xdist that sends."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def sendevent(self, name: str, **kwargs: object) -> None:
        self.sent.append(name)


def sent_of(when: When, outcome: Outcome, seconds: float = 0.0) -> list[str]:
    """As pytest-xdist does it: a report is made serializable, gets an index, and is sent."""
    interactor = Interactor()
    config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugins=lambda: [object(), interactor]))
    few = FewMessages(cast(Any, config))
    report = pytest.TestReport("a", ("a", 1, "a"), {}, outcome, None, when, duration=seconds)
    data: dict[str, object] = few.pytest_report_to_serializable(report) or {"report": 1}
    data["item_index"] = 0
    interactor.sendevent("logstart", nodeid="a", location=("a", 1, "a"))
    interactor.sendevent("testreport", data=data)
    interactor.sendevent("logfinish", nodeid="a", location=("a", 1, "a"))
    interactor.sendevent("runtest_protocol_complete", item_index=0, duration=seconds)
    return interactor.sent


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_a_setup_or_teardown_is_sent_if_it_did_not_pass_or_was_slow(when: When) -> None:
    assert sent_of(when, "passed") == ["runtest_protocol_complete"]
    assert sent_of(when, "passed", SLOW_SECONDS) == ["testreport", "runtest_protocol_complete"]
    assert sent_of(when, "failed") == sent_of(when, "skipped") == ["testreport", "runtest_protocol_complete"]


@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped"])
def test_each_outcome_is_sent(outcome: Outcome) -> None:
    assert sent_of("call", outcome) == ["testreport", "runtest_protocol_complete"]


@pytest.mark.slow
def test_a_test_that_hangs_is_named_and_the_others_run(tmp_path: Path) -> None:
    """A run of CI never ended, and told nothing."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.support.servers.workers import HangingTests\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(HangingTests(4, 0))\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import threading, pytest\n"
        "@pytest.mark.long\ndef test_long():\n    threading.Event().wait(4.5)\n"
        "def test_before(): pass\n"
        "def test_hangs():\n    threading.Event().wait()\n"
        "def test_after(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "crashed while running 'test_it.py::test_hangs'" in ended.stdout
    assert "1 failed, 3 passed" in ended.stdout
    assert "in test_hangs" in ended.stderr
    assert ended.stderr.count("Timeout") == 2  # that of the long one, too
