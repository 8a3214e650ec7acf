"""The log of a server whose reader does not read: nothing waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from sow_server.patient_stream import BYTES_MAX, PatientStream


class Pipe:
    """A pipe as the stream of a log, and what was read from it."""

    def __init__(self) -> None:
        self.reads, writes = os.pipe()
        self.writer = os.fdopen(writes, "w")
        self.told: list[int] = []
        self.has_told = threading.Event()
        self.stream = PatientStream(self.writer, self._tell)

    def _tell(self, dropped: int) -> None:
        self.told.append(dropped)
        self.stream.write(f"dropped {dropped}\n")
        self.has_told.set()

    def read_until(self, last: str) -> list[str]:
        """All lines up to one."""
        text = ""
        while not text.endswith(f"{last}\n"):
            text += os.read(self.reads, 2**16).decode()
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
    first = os.read(pipe.reads, 1).decode()  # somebody reads again
    text = first
    while not pipe.has_told.is_set() or "dropped" not in text:
        text += os.read(pipe.reads, 2**16).decode()
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
