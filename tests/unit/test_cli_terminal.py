"""Behaviour that only a real process shows: a terminal, a pipe whose reader goes away, Ctrl-C.

Each test runs `sow` in a separate process, against the fake client, on a pseudo-terminal or a pipe.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals", allow_module_level=True)

import pty

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 30.0
# It waits in short steps: a signal that comes just before the system call would be seen only after it.
PROGRAM = """
import sys, time
from sow_cli.command import sow
from tests.support.fake_client import FakeClient
client = FakeClient()
client.add("orders", records=[{"id": one, "text": "x" * 100} for one in range(3)])
from tests.support.fake_results import Row
client.add("hostile").rows["\\x1b[2J"] = Row('{"id":"\\x7f\\x9b31m"}'.encode(), 1, None, 1)
client.add("many", records=[{"id": one, "text": "x" * 1000} for one in range(3000)])
def status():
    print("waiting", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.05)
client.status = status
sow(prog_name="sow", obj=lambda session: client)
"""


def start(*arguments: str, stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "clients")])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=os.environ | {"PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        start_new_session=True,
    )


class Terminal:
    """The other end of the pseudo-terminal that a process runs on."""

    def __init__(self, *arguments: str) -> None:
        self._end, other = pty.openpty()
        self.process = start(*arguments, stdin=other, stdout=other, stderr=other)
        os.close(other)
        self.text = ""

    def read_until(self, wanted: str | None) -> str:
        """Reads until `wanted` appears; None: until the process has closed its end."""
        deadline = time.monotonic() + SECONDS_MAX
        while wanted is None or wanted not in self.text:
            assert select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
            try:
                data = os.read(self._end, 65_536)
            except OSError as error:
                if error.errno != errno.EIO:  # how Linux says that nobody has the other end open
                    raise
                data = b""
            if not data:
                assert wanted is None, self.text
                break
            self.text += data.decode()
        return self.text

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS_MAX)
        os.close(self._end)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_on_a_terminal_a_query_is_a_table_of_its_width(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("query", "orders"))

    lines = plain(terminals[0].read_until(None)).splitlines()

    assert lines[0].startswith("key  expires  published")
    assert [len(line) for line in lines[1:4]] == [80, 80, 80]
    assert lines[4].startswith("3 records, as of ")


@pytest.mark.parametrize("output_format", ["ndjson", "csv", "json", "table"])
def test_a_terminal_gets_no_control_characters_of_the_data(terminals: list[Terminal], output_format: str) -> None:
    """X7."""
    terminals.append(Terminal("query", "hostile", "--format", output_format))

    text = plain(terminals[0].read_until(None))

    assert "x1b[2J" in text or "u001b[2J" in text
    assert re.findall("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text) == []
    assert "x9b31m" in text or "u009b31m" in text


def test_a_pipe_gets_the_bytes_of_the_data() -> None:
    """X7."""
    process = start(
        "query", "hostile", "--format", "ndjson",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    data, _ = process.communicate(timeout=SECONDS_MAX)
    assert b'"payload":{"id":"\x7f\xc2\x9b31m"}}\n' in data


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_deleting_everything_asks_on_a_terminal(terminals: list[Terminal], answer: str, code: int) -> None:
    terminals.append(Terminal("delete", "orders", "--all"))
    terminals[0].read_until("Delete every record of topic orders? [y/N]: ")

    terminals[0].type(answer)

    text = plain(terminals[0].read_until(None))
    assert terminals[0].process.wait(SECONDS_MAX) == code
    assert (re.search("deleted +3", text) is not None) is (code == 0)
    assert ("nothing was done" in text) is (code == 1)


def test_publishing_a_file_shows_progress_on_a_terminal(terminals: list[Terminal], tmp_path: Path) -> None:
    file = tmp_path / "orders.ndjson"
    file.write_bytes(b'{"id":1}\n{"price":2}\n' + b"".join(b'{"id":%d}\n' % one for one in range(20_000)))
    terminals.append(Terminal("publish", "orders", str(file)))

    text = plain(terminals[0].read_until(None))

    assert terminals[0].process.wait(SECONDS_MAX) == 1
    assert "publishing" in text
    assert "100%" in text
    assert "line 2: KEY_FIELD_MISSING: key field /id is missing or null" in text
    assert "20,001 records" in text


def test_ctrl_c_ends_a_command_that_waits(terminals: list[Terminal]) -> None:
    terminals.append(Terminal("status"))
    terminals[0].read_until("waiting")

    terminals[0].process.send_signal(signal.SIGINT)

    assert terminals[0].process.wait(SECONDS_MAX) == 130
    assert "Traceback" not in terminals[0].read_until(None)


@pytest.mark.parametrize("output_format", ["ndjson", "csv", "json", "table"])
def test_a_reader_that_goes_away_ends_the_command_quietly(output_format: str) -> None:
    process = start(
        "query", "many", "--format", output_format,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline()

    process.stdout.close()

    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(SECONDS_MAX) == 0
