"""A topic that moves between two cells of a machine, again and again, while a program publishes to it.

The pause is what that program sees: the longest time between two of its acknowledged records during a move.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.documents import KEY_PATHS, documents
from benchmarks.processes import SowServer, free_port
from benchmarks.rows import MILLISECONDS, Figure, Row, Target
from benchmarks.setting import Setting
from sow_cli.moving import Mover
from sow_cli.session import Session, connect
from sow_client import Client

PAUSE_TARGET: Final = Target(1000, MILLISECONDS, at_least=False)
TOPIC: Final = "orders"


def moves(setting: Setting) -> Iterator[Row]:
    """Moves a topic there and back."""
    records, times = setting.size(10_000, quick=1_000), setting.size(20, quick=2)
    port = free_port()
    more = f'[topics.{TOPIC}]\nkey = {KEY_PATHS}\nexpiration = "enabled"\n'
    with SowServer(setting.directory / "two", more=more, port=port, arguments=("--cells", "2")) as server:
        setting.say(f"{times} moves of {records:,} records")
        with Client(server.address) as client:
            with client.publisher(TOPIC) as publisher:
                for payload in documents(range(records), 1):
                    publisher.publish(payload)
        with _Publishing(server.address) as publishing:
            pauses = []
            for number in range(times):
                publishing.longest = 0.0
                cell = "cell-2" if number % 2 == 0 else "cell-1"
                with Mover(Session(server.address, None, connect), (TOPIC,), cell, lambda line: None) as mover:
                    mover.move()
                publishing.await_records()
                pauses.append(publishing.longest * 1e3)
    median, most = statistics.median(pauses), max(pauses)
    yield Row(
        f"the pause of a program while its topic moves: {times} moves of {records:,} records",
        Figure(most, MILLISECONDS),
        judged=Figure(most, MILLISECONDS),
        target=PAUSE_TARGET,
        note=f"the longest; the median is {median:.0f} ms",
    )


class _Publishing:
    """Publishes one record after the other."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._count = 0
        self.longest = 0.0
        """Seconds between two acknowledged records, at most."""

    def __enter__(self) -> _Publishing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        payload = next(iter(documents(range(1), 2)))
        with Client(self._server) as client:
            before = time.perf_counter()
            while not self._ended.is_set():
                client.publish(TOPIC, payload)
                now = time.perf_counter()
                self.longest = max(self.longest, now - before)
                self._count, before = self._count + 1, now

    def await_records(self) -> None:
        """Returns once more records were acknowledged. Raises RuntimeError if the program has ended."""
        wanted = self._count + 3
        while self._count < wanted:
            if not self._thread.is_alive():
                raise RuntimeError("the program that publishes has ended")
            time.sleep(0.01)
