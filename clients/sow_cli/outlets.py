"""Places of a command's output other than its own stdout: a file, or a program of the system."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import BinaryIO, cast

from sow_cli.interrupts import Terminated, heeded


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
    program = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert program.stdin is not None, "it is a pipe"
    try:
        with stdout_to(cast(BinaryIO, program.stdin)):
            yield
    finally:
        with suppress(OSError):
            program.stdin.close()
        _wait(program)


def _wait(program: subprocess.Popen[bytes]) -> None:
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
