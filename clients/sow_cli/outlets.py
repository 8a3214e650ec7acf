"""Places of a command's output other than its own stdout: a file, a program of the system, or the pager.

[1]  A pager gets a finite result on a terminal, once that is longer than the screen. Remarks to stderr come behind it.
[2]  A pager that is left early ends the command quietly, with exit code 0.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from io import TextIOWrapper
from typing import BinaryIO, Final, cast

import click

from sow_cli import display
from sow_cli.interrupts import Terminated, heeded
from sow_cli.wide import WideLines

PAGERS: Final = ("SOW_PAGER", "PAGER")
"""Variables that name the pager; the first that is set counts. Empty, or `cat`: none."""


@contextmanager
def stdout_to(out: BinaryIO) -> Iterator[None]:
    """In the block, stdout is this stream, which stays open."""
    before = sys.stdout
    sys.stdout = TextIOWrapper(out, encoding="utf-8", errors="replace", write_through=True)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError, ValueError):  # its reader is gone
            sys.stdout.detach()
        sys.stdout = before


@contextmanager
def into_file(path: str, *, appends: bool) -> Iterator[None]:
    """In the block, stdout is a file, made anew or continued. Raises OSError."""
    with open(path, "ab" if appends else "wb", buffering=0) as file, stdout_to(cast(BinaryIO, file)):
        yield


@contextmanager
def into_program(*words: str) -> Iterator[None]:
    """In the block, stdout is the input of a program, whose end is waited for."""
    sys.stdout.flush()
    program = _started(words)
    try:
        with stdout_to(cast(BinaryIO, program.stdin)):
            yield
    finally:
        _wait(program)


def _started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdin=subprocess.PIPE, env={"LESS": "FRX", **os.environ})


def _wait(program: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a program that has got all of its input."""
    assert program.stdin is not None, "it is a pipe"
    if isinstance(sys.exc_info()[1], Terminated):  # the command ends, and nobody may be there to leave the program
        program.terminate()
    with suppress(OSError):
        program.stdin.close()
    while True:
        try:
            program.wait()
        except KeyboardInterrupt as interrupt:  # the program gets it from the terminal, too, and may go on
            if isinstance(interrupt, Terminated):
                program.terminate()
                raise
            heeded()
        else:
            return


def page() -> None:
    """From now on until the command ends, a terminal gets its output through the pager, where there is one ([1])."""
    if not isinstance(sys.stdout.buffer, _Pages) and _is_terminal() and (words := _pager()):
        click.get_current_context().with_resource(_paged(words))


def _is_terminal() -> bool:
    try:
        return os.isatty(sys.stdout.fileno())
    except OSError:  # no file
        return False


def _pager() -> list[str]:
    """The words of the pager; none: there is none."""
    name = next((name for name in PAGERS if name in os.environ), "")
    try:
        words = shlex.split(os.environ[name]) if name else ["less"] if os.environ.get("TERM") != "dumb" else []
    except ValueError:
        words = [os.environ[name]]  # no program has such a name
    if not words or words == ["cat"] or shutil.which(words[0]):
        return words if words != ["cat"] else []
    if name:
        click.echo(f"sow: {name}: there is no program {display.safe(words[0])}; see --no-pager", err=True)
    return []


@contextmanager
def _paged(words: Sequence[str]) -> Iterator[None]:
    end = sys.stdout.buffer
    pages = _Pages(end.out if isinstance(end, WideLines) else cast(BinaryIO, end), words)
    remarks = io.StringIO()
    try:
        with redirect_stderr(remarks), ExitStack() as stack:
            stack.callback(pages.finish)
            if isinstance(end, WideLines):
                stack.enter_context(end.onto(cast(BinaryIO, pages)))
            else:
                stack.enter_context(stdout_to(cast(BinaryIO, pages)))
            yield
    finally:
        sys.stderr.write(remarks.getvalue())


class _Pages(io.RawIOBase):
    """A terminal, and in front of it the pager once more has come than the screen shows."""

    def __init__(self, terminal: BinaryIO, words: Sequence[str]) -> None:
        super().__init__()
        self._terminal = terminal
        self._words = words
        self._held = b""
        self._program: subprocess.Popen[bytes] | None = None
        self._is_left = False
        self._is_unpaged = False

    def isatty(self) -> bool:
        """Yes: control characters of the data are no less harmful in a pager."""
        return True

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: object) -> int:
        """Ends the command once the pager is left ([2])."""
        taken = bytes(data)  # type: ignore[call-overload]  # any buffer
        if self._is_left:
            return len(taken)
        self._held += taken
        if self._program is None and not self._is_unpaged and self._rows() >= shutil.get_terminal_size().lines:
            try:
                self._program = _started(self._words)
            except OSError as error:  # a script without its interpreter, and the like
                self._is_unpaged = True
                click.echo(
                    f"sow: cannot start {display.safe(self._words[0])}: {error.strerror}; see --no-pager", err=True
                )
        if self._is_unpaged:
            self.finish()
        if self._program is not None:
            assert self._program.stdin is not None, "it is a pipe"
            try:
                self._program.stdin.write(self._held)
                self._program.stdin.flush()
            except BrokenPipeError:
                self._is_left = True
                raise click.exceptions.Exit(0) from None
            self._held = b""
        return len(taken)

    def _rows(self) -> int:
        width = shutil.get_terminal_size().columns
        return sum(max(1, -(-len(line) // width)) for line in self._held.splitlines())

    def finish(self) -> None:
        """Shows what is held, and waits until the pager is left."""
        if self._program is not None:
            _wait(self._program)
            return
        self._terminal.write(self._held)
        self._terminal.flush()
        self._held = b""
