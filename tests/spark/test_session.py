"""The command line that the pipelines of examples/spark share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from examples.spark import session
from tests.support.servers.server import ROOT

FAILED = """[STREAM_FAILED] Query [id = 8e, runId = 4e] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR]
  File "x.py", line 7, in bad
    try: {}[1]
KeyError: 1

The above exception was the direct cause of the following exception:

sow_spark.errors.SowSourceError: UNREACHABLE: cannot connect to x; check it
 SQLSTATE: 39000
=== Streaming Query ==="""


@pytest.mark.parametrize("words", [["state_topic"], ["shares", "k"], ["state_servers", "f"], ["state_lake", "f"]])
def test_a_command_without_its_words_tells_its_usage(words: list[str]) -> None:
    """It ended with a trace; without servers, one divided by their number, and one ran for nobody."""
    name, *others = words
    command = [sys.executable, "-m", f"examples.spark.{name}", *others]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"usage: .venv/bin/python -m examples.spark.{name} ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [OSError("no such folder"), KeyError("gone")])
def test_only_errors_of_the_surroundings_become_sentences(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises((SystemExit, KeyError)) as told:
        session.command(main)
    assert type(told.value) is (SystemExit if isinstance(error, OSError) else KeyError)
    assert error.args == told.value.args


def test_the_cause_of_a_failed_query_is_told() -> None:
    assert session.cause(FAILED) == "UNREACHABLE: cannot connect to x; check it"
    assert session.cause("[PATH_NOT_FOUND] Path does not exist: x.\nJVM") == "[PATH_NOT_FOUND] Path does not exist: x."
