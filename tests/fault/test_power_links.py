"""An instance that loses power right after it has acknowledged a change from another one still has it (P5, R6)."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from sow_server.engine.commit.commits import Commits
from sow_server.engine.pending import Pending
from tests.support.servers.cluster import WAIT_SECONDS, Cluster
from tests.support.servers.power import Power
from tests.support.servers.server import until

PLANTS: Final = "tests.fault.test_power_links"
TOPICS: Final = """
[topics.orders]
key = ["/id"]
retain_time = "2s"
"""
BATCH: Final = 10


def acknowledge_links_before_the_sync() -> None:
    """A mistake to plant: changes from a link are acknowledged once they are written."""
    run: Callable[..., Pending[object]] = Commits.run

    def unsynced(self: Commits, *given: object, sync: bool = True, **more: object) -> Pending[object]:
        return run(self, *given, sync=False, **more)

    Commits.run = unsynced  # type: ignore[method-assign,assignment]  # that is the mistake


class Rounds:
    """Publishes at `a`, cuts the power of `b` once `b` has acknowledged, and looks at `b` while nothing reaches it."""

    def __init__(self, folder: Path, seed: str, *, mode: str, plant: str = "") -> None:
        self.cluster: Final = Cluster(folder, "a", "b", topics=TOPICS, links=[("a", "b")], mode=mode, start=False)
        self._power = Power(self.cluster["b"].server, plant=plant)
        self._replicated = mode == "sync"
        self._draw = random.Random(seed)
        self._expected: dict[str, int] = {}
        """The version of each key that `a` knows to be at `b`."""

    def run(self, count: int) -> None:
        """So many cuts. Raises AssertionError for what `b` does not have any more."""
        with self.cluster as cluster:
            cluster.start()
            cluster.await_streaming()
            for number in range(count):
                self._round(number)
            assert not cluster.faults()

    def _round(self, number: int) -> None:
        a, b = self.cluster["a"], self.cluster["b"]
        sent: dict[str, int] = {}
        for index in range(BATCH):
            document = {"id": f"{number}-{index}", "pad": "x" * self._draw.randrange(500)}
            durability = "replicated" if self._replicated else "fsync"
            done = a.client.publish("orders", document, durability=durability)  # type: ignore[arg-type]  # one of both
            sent[done.key] = done.version
        if not self._replicated:
            until(lambda: a.out("b").lag_sequences == 0, WAIT_SECONDS, "the acknowledgement of all that was published")
        b.server.kill9()
        a.server.signal(signal.SIGSTOP)  # it sends nothing again, nor does it wait longer and longer to connect
        try:
            self._power.drop(self._draw)
            self._expected |= sent
            b.server.start()
            there = {key: record.version for key, record in b.records("orders").items()}
        finally:
            a.server.signal(signal.SIGCONT)
        lost = {key: version for key, version in self._expected.items() if there.get(key) != version}
        assert not lost, f"acknowledged by b, which lacks it: {lost}"
        self.cluster.await_streaming()


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_a_receiver_that_loses_power_keeps_its_acknowledged_changes(tmp_path: Path, seed: int, mode: str) -> None:
    """Story: an acknowledgement before the sync passed all tests: the system keeps the writes of a killed process."""
    Rounds(tmp_path, f"{seed} {mode}", mode=mode).run(2)


def test_a_receiver_that_acknowledges_before_the_sync_is_caught(tmp_path: Path, seed: int) -> None:
    rounds = Rounds(tmp_path, str(seed), mode="sync", plant=f"{PLANTS}:{acknowledge_links_before_the_sync.__name__}")
    with pytest.raises(AssertionError, match="acknowledged by b"):
        rounds.run(12)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_same_for_fifty_cuts(tmp_path: Path, seed: int, mode: str) -> None:
    Rounds(tmp_path, f"{seed} {mode}", mode=mode).run(50)
