"""`sow` in a process of its own, against the fake client, on a pseudo-terminal or a pipe."""

from __future__ import annotations

import errno
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
SECONDS_MAX = 30.0
# It waits in short steps: a signal that comes just before the system call would be seen only after it.
PROGRAM = """
import sys, time
from sow_cli.command import sow
from tests.support.fakes.fake_client import FakeClient
client = FakeClient()
client.add("orders", records=[{"id": one, "text": "x" * 100} for one in range(3)])
from tests.support.fakes.fake_results import Row
client.add("hostile").rows["\\x1b[2J"] = Row('{"id":"\\x7f\\x9b31m"}'.encode(), 1, None, 1)
client.add("many", records=[{"id": one, "text": "x" * 1000} for one in range(3000)])
def status():
    print("waiting", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.05)
client.status = status
sow(prog_name="sow", obj=lambda session: client)
"""


REAL = "from sow_cli.command import sow; sow(prog_name='sow')"
"""The command as it is, for a server; in place of PROGRAM."""


def start(*arguments: str, stdin: int, stdout: int, stderr: int, program: str = PROGRAM) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "clients")])
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=os.environ | {"PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        start_new_session=True,
    )


class Terminal:
    """The other end of the pseudo-terminal that a process runs on."""

    def __init__(self, *arguments: str, program: str = PROGRAM) -> None:
        self._end, other = pty.openpty()
        self.process = start(*arguments, stdin=other, stdout=other, stderr=other, program=program)
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


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
