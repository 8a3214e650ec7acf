"""Two instances that replicate, and loads of writes at them; afterwards both have all that was acknowledged.

`pair` is a fixture for test modules to import.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from sow_client import Client, DurabilityName, SowError
from tests.support.servers.cluster import WAIT_SECONDS, Cluster, Instance
from tests.support.servers.server import until

TOPICS: Final = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
retain_time = "2s"
[topics.kept]
retain_time = "2s"
"""
BOTH: Final = ("orders", "kept")
KEYS: Final = 40
CALL_SECONDS: Final = 5.0
REST_SECONDS: Final = 0.005
"""Between two writes of a load: the point is to fail in the middle of it, not to keep the machine busy."""


class Load(threading.Thread):
    """Writes at one instance until it is told to stop: puts, deletes, touches, with lifetimes and without.

    Under shared keys all loads write, so of these it can only be said that all instances have to agree. Keys of its own
    nobody else writes: there it knows the expected values. One whose last write was not answered is used no more.
    """

    def __init__(self, instance: Instance, draw: random.Random, *, replicated: bool = False) -> None:
        super().__init__(name=f"load at {instance.name}", daemon=True)
        self.instance: Final = instance
        self.acknowledged = 0
        self.refused: set[str] = set()
        """Reasons for which a write was not acknowledged."""
        self.expected: dict[str, set[int | None]] = {}
        """The values that may be under each of its own keys; None: no record."""
        self._draw = draw
        self._replicated = replicated
        self._ending = threading.Event()
        self._number = 0
        self._names = [f"{instance.name}-{index}" for index in range(KEYS)]
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self.instance.server.client(timeout=CALL_SECONDS) as client:
                while not self._ending.wait(REST_SECONDS):
                    self._write(client)
        except BaseException as failure:
            self._failure = failure
            raise

    def end(self) -> None:
        """Returns once it has stopped."""
        self._ending.set()
        self.join(60)
        assert not self.is_alive()
        assert self._failure is None

    def await_more(self, count: int) -> None:
        """Waits until it has so many more writes acknowledged."""
        goal = self.acknowledged + count
        until(lambda: self.acknowledged >= goal or not self.is_alive(), WAIT_SECONDS, f"{count} writes: {self.name}")
        assert self.is_alive()

    def _write(self, client: Client) -> None:
        draw = self._draw
        self._number += 1
        place = draw.randrange(KEYS)
        own = draw.random() < 0.5
        key = self._names[place] if own else f"shared-{place}"
        may_be: set[int | None] = {self._number}
        action = draw.random()
        if action < 0.2:
            may_be = {None}
        elif action < 0.5:
            may_be.add(None)
        elif action < 0.6 and not own:
            may_be = set()
        try:
            self._act(client, key, action, own=own)
        except SowError as error:
            self.refused.add(error.reason or type(error).__name__)
            if own:
                self.expected[key] = self.expected.get(key, {None}) | may_be
                self._names[place] = f"{self.instance.name}-{place}-{self._number}"
            return
        self.acknowledged += 1
        if own:
            self.expected[key] = may_be

    def _act(self, client: Client, key: str, action: float, *, own: bool) -> None:
        durability: DurabilityName = "replicated" if self._replicated else "fsync"
        document = {"id": key, "n": self._number, "pad": "x" * self._draw.randrange(200)}
        if action < 0.2:
            client.sow_delete("orders", keys=[key], durability=durability)
        elif action < 0.5:
            lifetime = self._draw.choice(["300ms", "1s", "1h"])
            client.publish("orders", document, ttl=lifetime, durability=durability)
        elif action < 0.6 and not own:
            client.touch("orders", key, ttl="30s", durability=durability)
        else:
            client.publish("orders", document, durability=durability)

    def check(self, instance: Instance) -> None:
        """Holds that all that was acknowledged is at an instance."""
        there = {key: record.data["n"] for key, record in instance.records("orders").items()}
        wrong = {key: (there.get(key), may_be) for key, may_be in self.expected.items() if there.get(key) not in may_be}
        assert not wrong, f"at {instance.name}: found, and expected"


@contextmanager
def loads(cluster: Cluster, seed: int, *names: str, replicated: bool = False) -> Iterator[list[Load]]:
    """Writes at instances, all unless some are named; ends with the block."""
    chosen = names or tuple(cluster.instances)
    running = [Load(cluster[name], random.Random(f"{seed} {name}"), replicated=replicated) for name in chosen]
    for load in running:
        load.start()
    try:
        yield running
    finally:
        for load in running:
            load.end()


def settled(cluster: Cluster, running: list[Load]) -> None:
    """After a quiet time all are equal, and have every acknowledged write (rule R3)."""
    cluster.await_equal(topics=("orders",))
    for load in running:
        assert load.acknowledged
        for instance in cluster.instances.values():
            load.check(instance)
    assert not cluster.faults()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    """Two instances that send to each other."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS) as cluster:
        cluster.await_streaming()
        yield cluster
