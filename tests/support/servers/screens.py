"""A program on a terminal, and the screen as its user sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pexpect
import pyte

from tests.support.servers.forked_commands import sow

ROOT: Final = Path(__file__).parents[3]
SECONDS_MAX: Final = 30.0
PYTHONPATH: Final = os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "clients")])
CTRL_C: Final = "\x03"
CTRL_D: Final = "\x04"
TAB: Final = "\t"
UP: Final = "\x1b[A"


class OnScreen:
    """Owns a process on a pseudo-terminal. Every wait has a bound, and running into it shows the screen."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        columns: int = 110,
        lines: int = 40,
    ) -> None:
        self.process: pexpect.spawn[bytes] = pexpect.spawn(
            program,
            list(arguments),
            env=dict(os.environ) | {"PYTHONPATH": PYTHONPATH, "TERM": "xterm-256color"} | dict(variables),
            dimensions=(lines, columns),
            timeout=SECONDS_MAX,
        )
        self.process.delaybeforesend = None
        self._screen = pyte.Screen(columns, lines)
        setattr(self._screen, "write_process_input", self.process.send)  # noqa: B010  # it answers where its cursor is
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """The lines that are not empty, without what prompt_toolkit leaves at their ends."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    @property
    def line(self) -> str:
        """The line with the cursor, up to it."""
        return self._screen.display[self._screen.cursor.y][: self._screen.cursor.x]

    def until(self, wanted: str, *, last: bool = False) -> list[str]:
        """Waits until a line has this text; `last`: the line with the cursor. Returns the screen."""
        give_up = time.monotonic() + SECONDS_MAX
        while not (wanted in self.line if last else any(wanted in line for line in self.lines)):
            assert time.monotonic() < give_up, f"no {wanted!r} on the screen:\n" + "\n".join(self.lines)
            try:
                self._stream.feed(self.process.read_nonblocking(65_536, timeout=1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                raise AssertionError(f"ended without {wanted!r}:\n" + "\n".join(self.lines)) from None
        return self.lines

    def type(self, text: str) -> None:
        """Presses keys."""
        self.process.send(text)

    def end(self) -> int:
        """Waits for the end of the process; returns its exit code, or minus the number of a signal."""
        try:
            while True:
                self._stream.feed(self.process.read_nonblocking(65_536, timeout=SECONDS_MAX))
        except pexpect.EOF:
            pass
        self.process.wait()
        if self.process.signalstatus is not None:
            return -int(self.process.signalstatus)
        assert self.process.exitstatus is not None, "it has ended"
        return int(self.process.exitstatus)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self.process.close(force=True)


def sow_on_screen(*arguments: str, variables: Mapping[str, str]) -> OnScreen:
    """The command `sow` on a terminal."""
    return OnScreen(sow(), arguments, variables)
