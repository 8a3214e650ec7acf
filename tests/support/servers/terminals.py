"""`sow` in a process of its own, by fork, against the fake client, on a pseudo-terminal or a pipe."""

from __future__ import annotations

import errno
import os
import pty
import re
import select
import subprocess
import time

from tests.support.servers.forked_commands import commands

SECONDS_MAX = 30.0
FAKES = "sow-on-fakes"
"""The command on the fake client (`tests.support.fakes.sow_on_fakes`)."""
REAL = "sow"
"""The command as it is, for a server."""


def start(
    *arguments: str, stdin: int, stdout: int, stderr: int, program: str = FAKES, **variables: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(commands().programs / program), *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "SOW_PAGER": ""} | variables,
        start_new_session=True,
    )


class Terminal:
    """The other end of the pseudo-terminal that a process runs on."""

    def __init__(self, *arguments: str, program: str = FAKES, **variables: str) -> None:
        self._end, other = pty.openpty()
        self.process = start(*arguments, stdin=other, stdout=other, stderr=other, program=program, **variables)
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
