"""Instances that replicate over proxies that cut, delay, stall and damage the traffic between them (R1, R6)."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.fault.replicating import TOPICS, loads, pair, settled
from tests.support.servers.cluster import WAIT_SECONDS, Cluster
from tests.support.servers.server import until

__all__ = ["pair"]  # a fixture


def test_links_that_are_cut_in_the_middle_of_messages_go_on_where_they_were(pair: Cluster, seed: int) -> None:
    cut_again_and_again(pair, seed, rounds=6)


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


@pytest.mark.long
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


@pytest.mark.long
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
    damage_again_and_again(pair, seed, rounds=4)


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
                lambda: len(cluster[sender].server.events("link_closed")) > before or proxy.bytes_forward > passed,  # noqa: B023  # called before the loop goes on
                WAIT_SECONDS,
                "somebody to notice",
            )
            proxy.cut()
            cluster.await_out(sender, receiver, lambda link: link.state == "streaming")
    settled(cluster, running)
