"""The log of a server whose reader does not read: nothing waits for it."""

from __future__ import annotations

import os
import pty
import select
import threading
from collections.abc import Iterator

import pytest

from sow_server.patient_stream import BYTES_MAX, PatientStream

WAIT_SECONDS = 10.0


def read_some(descriptor: int, count: int = 2**16) -> str:
    """What is there, of `count` bytes at most; waits for it."""
    assert select.select([descriptor], [], [], WAIT_SECONDS)[0], "nothing more comes"
    return os.read(descriptor, count).decode()


class Pipe:
    """A pipe as the stream of a log, and what was read from it."""

    def __init__(self) -> None:
        self.reads, writes = os.pipe()
        self.writer = os.fdopen(writes, "w")
        self.told: list[int] = []
        self.stream = PatientStream(self.writer, self._tell)

    def _tell(self, dropped: int) -> None:
        self.told.append(dropped)
        self.stream.write(f"dropped {dropped}\n")

    def read_until(self, last: str) -> list[str]:
        """All lines up to one."""
        text = ""
        while not text.endswith(f"{last}\n"):
            text += read_some(self.reads)
        return text.splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.reads)
    made.writer.close()


def test_lines_go_out_at_once_while_somebody_reads(pipe: Pipe) -> None:
    for number in range(3):
        pipe.stream.write(f"{number}\n")
        assert pipe.read_until(str(number)) == [str(number)]
    assert not pipe.told


def test_lines_that_nobody_reads_wait_in_order_however_long_they_are(pipe: Pipe) -> None:
    """Such a write stopped the event loop, and with it the server, or the supervisor of all cells."""
    lines = [f"{number} {'x' * 30_000}" for number in range(20)]
    for line in lines:
        pipe.stream.write(f"{line}\n")
    pipe.stream.write("é last\n")
    assert pipe.read_until("é last") == [*lines, "é last"]
    assert not pipe.told


def test_lines_beyond_the_bound_are_dropped_whole_and_their_number_is_told(pipe: Pipe) -> None:
    line = "x" * 9_999
    count = 3 * BYTES_MAX // 10_000
    for _ in range(count):
        pipe.stream.write(f"{line}\n")
    text = read_some(pipe.reads, 1)  # somebody reads again
    while "dropped" not in text or not text.endswith("\n"):
        text += read_some(pipe.reads)
    *written, last = text.splitlines()
    assert set(written) == {line}
    assert last == f"dropped {count - len(written)}"
    assert BYTES_MAX // 10_000 <= len(written) < count
    pipe.stream.write("and on\n")
    assert pipe.read_until("and on") == ["and on"]


def test_a_reader_that_has_gone_stops_nothing(pipe: Pipe) -> None:
    os.close(pipe.reads)
    for number in range(3):
        pipe.stream.write(f"{number}\n")
    pipe.reads = os.open(os.devnull, os.O_RDONLY)


def test_a_line_that_comes_while_one_is_written_waits_for_no_lock(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection may run then, and a finalizer logs. It waited for its own thread for ever."""
    write = os.write
    from_finalizer = ["of a finalizer\n"]

    def collecting(descriptor: int, data: bytes) -> int:
        while from_finalizer:
            pipe.stream.write(from_finalizer.pop())
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", collecting)
    writer = threading.Thread(target=pipe.stream.write, args=["one\n"], daemon=True)
    writer.start()
    writer.join(WAIT_SECONDS)
    assert not writer.is_alive()
    assert pipe.read_until("of a finalizer") == ["one", "of a finalizer"]


def test_no_line_is_lost_between_threads_and_a_slow_reader(pipe: Pipe) -> None:
    def write(name: int) -> None:
        for number in range(500):
            pipe.stream.write(f"{name} {number} {'x' * 300}\n")

    writers = [threading.Thread(target=write, args=[name]) for name in range(3)]
    for writer in writers:
        writer.start()
    text = ""
    while text.count("\n") < 1500:
        text += read_some(pipe.reads, 1000)
    for name in range(3):
        found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")]
        assert found == [str(number) for number in range(500)]


def test_a_terminal_that_nobody_reads_holds_nobody_up() -> None:
    """It says that it takes some bytes, and a longer line stopped the server."""
    reads, writes = pty.openpty()
    terminal = os.fdopen(writes, "w")
    stream = PatientStream(terminal, lambda _dropped: None)
    lines = [f"{number} {'x' * 3_000}" for number in range(30)]

    def write() -> None:
        for line in lines:
            stream.write(f"{line}\n")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(WAIT_SECONDS)
    assert not writer.is_alive()
    text = ""
    while text.count("\n") < len(lines):
        text += read_some(reads)
    assert text.splitlines() == lines
    os.close(reads)
    terminal.close()
