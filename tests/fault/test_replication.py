"""Instances that replicate, while processes, networks, disks and clocks fail (rules R1 to R12): real servers, real
connections, and proxies that cut, delay, stall and damage what goes between them."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from sow_client import Client, DurabilityName, SowError
from tests.support.cluster import WAIT_SECONDS, Cluster, Instance
from tests.support.server import until

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
SECOND: Final = 1_000_000


class Load(threading.Thread):
    """Writes at one instance until it is told to stop: puts, deletes, touches, with lifetimes and without.

    Under shared keys all loads write, so of these it can only be said that all instances have to agree. Keys of its own
    nobody else writes: there it knows what has to be there. One whose last write was not answered is used no more.
    """

    def __init__(self, instance: Instance, draw: random.Random, *, replicated: bool = False) -> None:
        super().__init__(name=f"load at {instance.name}", daemon=True)
        self.instance: Final = instance
        self.acknowledged = 0
        self.refused: set[str] = set()
        """Reasons for which a write was not acknowledged."""
        self.expected: dict[str, set[int | None]] = {}
        """By key of its own: what may be there. None: nothing."""
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
        there = {key: record.data["n"] for key, record in instance.records("orders").items()}  # type: ignore[index]  # a JSON object
        wrong = {key: (there.get(key), may_be) for key, may_be in self.expected.items() if there.get(key) not in may_be}
        assert not wrong, f"at {instance.name}: what is there, and what may be"


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
    """After a quiet time all are equal, and have what was acknowledged (rule R3)."""
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


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["a", "b"])
def test_an_instance_that_is_killed_under_load_goes_on_where_it_was(pair: Cluster, seed: int, victim: str) -> None:
    kill_again_and_again(pair, seed, victim, rounds=3)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["a", "b"])
def test_an_instance_that_is_killed_fifty_times_goes_on_where_it_was(pair: Cluster, seed: int, victim: str) -> None:
    kill_again_and_again(pair, seed, victim, rounds=50)


def kill_again_and_again(cluster: Cluster, seed: int, victim: str, rounds: int) -> None:
    (other,) = set(cluster.instances) - {victim}
    with loads(cluster, seed) as running:
        for _ in range(rounds):
            for load in running:
                load.await_more(50)
            cluster[victim].server.kill9()
            next(load for load in running if load.instance.name == other).await_more(100)
            cluster[victim].server.start()
        for load in running:
            load.await_more(50)
    settled(cluster, running)


@pytest.mark.parametrize("victim", ["a", "b"])
def test_an_instance_that_is_stopped_under_load_catches_up_when_it_goes_on(
    pair: Cluster, seed: int, victim: str
) -> None:
    (other,) = set(pair.instances) - {victim}
    with loads(pair, seed) as running:
        for _ in range(3):
            for load in running:
                load.await_more(50)
            pair[victim].server.signal(signal.SIGSTOP)
            try:
                next(load for load in running if load.instance.name == other).await_more(100)
                pair.await_out(other, victim, lambda link: link.lag_sequences > 0)
            finally:
                pair[victim].server.signal(signal.SIGCONT)
        for load in running:
            load.await_more(50)
    settled(pair, running)


def test_what_was_acknowledged_as_replicated_survives_the_loss_of_the_instance_that_took_it(
    tmp_path: Path, seed: int
) -> None:
    """P5, R8; and the instance, once it is back without its data, gets all of it again."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS, mode="sync") as cluster:
        cluster.await_streaming()
        with loads(cluster, seed, "a", replicated=True) as running:
            running[0].await_more(300)
            cluster["a"].server.kill9()
        cluster["a"].wipe()
        running[0].check(cluster["b"])
        cluster["a"].server.start()
        settled(cluster, running)


# --- networks --------------------------------------------------------------------------------------------------------


def test_links_that_are_cut_in_the_middle_of_messages_go_on_where_they_were(pair: Cluster, seed: int) -> None:
    cut_again_and_again(pair, seed, rounds=12)


@pytest.mark.long
def test_links_that_are_cut_two_hundred_times_go_on_where_they_were(pair: Cluster, seed: int) -> None:
    cut_again_and_again(pair, seed, rounds=200)


def cut_again_and_again(cluster: Cluster, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    with loads(cluster, seed) as running:
        for _ in range(rounds):
            sender, receiver = draw.choice(cluster.links)
            proxy = cluster.proxies[sender, receiver]
            before = len(cluster[sender].server.events("link_closed"))
            proxy.cut_after(draw.randrange(1, 4000))
            until(
                lambda: len(cluster[sender].server.events("link_closed")) > before,  # noqa: B023  # of this round
                WAIT_SECONDS,
                "the link to be cut",
            )
            cluster.await_out(sender, receiver, lambda link: link.state == "streaming")
    settled(cluster, running)


def test_a_slow_network_delays_and_nothing_else(tmp_path: Path, seed: int) -> None:
    with Cluster(tmp_path, "a", "b", topics=TOPICS, mode="sync") as cluster:
        for proxy in cluster.proxies.values():
            proxy.delay(0.05)
        cluster.await_streaming()
        started = time.monotonic()
        cluster["a"].client.publish("kept", {"n": 1}, key="1", durability="replicated")
        assert time.monotonic() - started >= 0.1, "there and back"
        assert cluster["b"].client.get("kept", "1") is not None
        with loads(cluster, seed) as running:
            for load in running:
                load.await_more(150)
        settled(cluster, running)


def test_a_link_that_passes_nothing_is_given_up_and_comes_back(pair: Cluster, seed: int) -> None:
    """No end hears of it that the connection is dead: the silence tells them."""
    proxy = pair.proxies["a", "b"]
    with loads(pair, seed) as running:
        proxy.stall()
        given_up = pair.await_out("a", "b", lambda link: link.state not in ("streaming", "seeding"))
        assert given_up.last_error
        pair.await_in("b", "a", lambda link: link.state == "away" and link.last_error != "")
        assert pair["b"].out("a").state == "streaming", "the other direction goes on"
        proxy.mend()
        for load in running:
            load.await_more(50)
    settled(pair, running)


def test_damaged_bytes_are_never_applied_and_the_link_comes_back(pair: Cluster, seed: int) -> None:
    damage_again_and_again(pair, seed, rounds=8)


@pytest.mark.long
def test_two_hundred_damaged_bytes_are_never_applied(pair: Cluster, seed: int) -> None:
    damage_again_and_again(pair, seed, rounds=200)


def damage_again_and_again(cluster: Cluster, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    with loads(cluster, seed) as running:
        for _ in range(rounds):
            sender, receiver = draw.choice(cluster.links)
            proxy = cluster.proxies[sender, receiver]
            before = len(cluster[sender].server.events("link_closed"))
            # Behind what opens the connection: after a damaged token the next attempt takes half a minute.
            proxy.damage_after(draw.randrange(1500, 5000), 1 << draw.randrange(8))
            until(lambda: not proxy.armed, WAIT_SECONDS, "a byte to be damaged")  # noqa: B023  # of this round
            # It may be one that nobody reads, such as of a ping; or one that has the other end wait for more.
            passed = proxy.bytes_forward + 3000
            until(
                lambda: len(cluster[sender].server.events("link_closed")) > before or proxy.bytes_forward > passed,  # noqa: B023
                WAIT_SECONDS,
                "somebody to notice",
            )
            proxy.cut()
            cluster.await_out(sender, receiver, lambda link: link.state == "streaming")
    settled(cluster, running)
