"""The live table and a watched query on a real terminal, against a real server that goes away and comes back."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals", allow_module_level=True)

import pexpect
import pyte

from tests.support.servers.forked_commands import sow
from tests.support.servers.server import ServerProcess

SECONDS_MAX = 60.0
WIDTH, HEIGHT = 100, 20


class Screen:
    """`sow` on a terminal of its own, and what a person sees there."""

    def __init__(self, address: str, *arguments: str) -> None:
        self.process = pexpect.spawn(
            sow(),
            ["--server", address, *arguments],
            env={**os.environ, "TERM": "xterm", "SOW_PAGER": ""},
            dimensions=(HEIGHT, WIDTH),
            timeout=SECONDS_MAX,
        )
        self._screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """Reads until the screen is as wanted."""
        deadline = time.monotonic() + SECONDS_MAX
        while not seen(self.lines):
            assert time.monotonic() < deadline, "\n".join(self.lines)
            try:
                self._stream.feed(cast("bytes", self.process.read_nonblocking(65_536, timeout=1)))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert seen(self.lines), "\n".join(self.lines)
        return self.lines

    def interrupt(self) -> list[str]:
        """Ctrl-C, typed; returns what stays on the screen."""
        self.process.sendcontrol("c")
        while True:
            try:
                self._stream.feed(cast("bytes", self.process.read_nonblocking(65_536, timeout=SECONDS_MAX)))
            except pexpect.EOF:
                break
        self.process.close()
        return self.lines


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, "[topics.orders]\nkey = ['/id']\n") as server:
        yield server


def publish(server: ServerProcess, *prices: float) -> None:
    with server.client() as client:
        for number, price in enumerate(prices, 9):
            client.publish("orders", {"id": number, "price": price})


def test_the_live_table_outlives_a_server_and_leaves_nothing_behind(server: ServerProcess) -> None:
    """An interruption left its remarks above the table, and Ctrl-C a `^C` in it. The server keeps the two rows, so the
    command does not know of the third record."""
    publish(server, 1.5, 30, 7)
    screen = Screen(server.address, "subscribe", "orders", "--sow", "--order-by", "/price DESC", "--top", "2")
    shown = screen.until(lambda lines: len(lines) == 4 and lines[0].startswith("2 records · "))
    assert [line.split() for line in shown[1:3]] == [["key", "expires", "id", "price"], ["10", "never", "10", "30"]]
    assert shown[3].split() == ["11", "never", "11", "7"]

    server.kill9()
    # The terminal may be read in the middle of a frame, so the number of lines is waited for, too.
    screen.until(lambda lines: lines[0].startswith("disconnected since ") and len(lines) == len(shown))

    server.start()
    publish(server, 99)
    back = screen.until(lambda lines: len(lines) == len(shown) and lines[2].split()[0] == "9")
    assert back[0].startswith("2 records · ")

    last = screen.interrupt()
    assert (len(last), last[0][:12]) == (len(shown), back[0][:12])
    assert not any("^C" in line or "reconnecting" in line or "Traceback" in line for line in last)
    assert screen.process.exitstatus == 130


def test_a_watched_query_shows_each_new_answer(server: ServerProcess) -> None:
    publish(server, 1.5)
    screen = Screen(server.address, "query", "orders", "--watch", "100ms")
    screen.until(lambda lines: bool(lines) and lines[0].startswith("1 record, as of "))
    publish(server, 2, 3, 4)
    shown = screen.until(lambda lines: lines[0].startswith("3 records, as of "))
    assert [line.split()[-1] for line in shown[2:]] == ["3", "4", "2"], "keys as the server sorts them"
    screen.process.kill(signal.SIGTERM)
    last = screen.until(lambda lines: not screen.process.isalive())
    assert last[0].startswith("3 records, as of ")


def test_results_of_groups_are_a_live_table(server: ServerProcess) -> None:
    publish(server, 1.5, 30)
    screen = Screen(server.address, "subscribe", "orders", "--sow", "--aggregate", "COUNT(*) AS n, MAX(/price) AS top")
    shown = screen.until(lambda lines: len(lines) == 3 and lines[2].split()[-2:] == ["2", "30"])
    assert shown[1].split()[-2:] == ["n", "top"]
    publish(server, 99)
    screen.until(lambda lines: len(lines) == 3 and lines[2].split()[-2:] == ["2", "99"])
    screen.interrupt()
    assert screen.process.exitstatus == 130


def test_the_course_of_the_rates_stays_below_the_lines_of_a_watched_status(server: ServerProcess) -> None:
    screen = Screen(server.address, "status", "--watch", "100ms")
    screen.until(lambda lines: any("max" in line for line in lines))
    publish(server, 1.5, 30, 7)
    lines = screen.until(lambda lines: any("█" in line for line in lines))
    assert lines[0].split()[:3] == ["time", "changes/s", "expired/s"]
    last = screen.interrupt()
    assert [line.split()[0] for line in last[-3:]] == ["changes/s", "expired/s", "queue"]
    assert [line for line in last if line.startswith("changes/s")] == last[-3:-2], "once"
    assert not any("^C" in line or "Traceback" in line for line in last)
    assert screen.process.exitstatus == 130
