"""Instances that replicate, while processes are killed or stopped, clocks differ, or a disk is full (R3, R6)."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from tests.fault.replicating import BOTH, TOPICS, loads, pair, settled
from tests.support.servers.cluster import Cluster
from tests.support.stores.stores import SECOND

__all__ = ["pair"]  # a fixture


ONE_OF_TWO = ["a", pytest.param("b", marks=pytest.mark.long)]
"""Both take writes and both are sent to: the second one is worth its minute in the long run only."""


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ONE_OF_TWO)
def test_an_instance_that_is_killed_under_load_goes_on_where_it_was(pair: Cluster, seed: int, victim: str) -> None:
    kill_again_and_again(pair, seed, victim, rounds=1)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["a", "b"])
def test_an_instance_that_is_killed_fifty_times_goes_on_where_it_was(pair: Cluster, seed: int, victim: str) -> None:
    kill_again_and_again(pair, seed, victim, rounds=50)


def kill_again_and_again(cluster: Cluster, seed: int, victim: str, rounds: int) -> None:
    (other,) = set(cluster.instances) - {victim}
    with loads(cluster, seed) as running:
        for _ in range(rounds):
            for load in running:
                load.await_more(20)
            cluster[victim].server.kill9()
            next(load for load in running if load.instance.name == other).await_more(40)
            cluster[victim].server.start()
        for load in running:
            load.await_more(20)
    settled(cluster, running)


@pytest.mark.long
@pytest.mark.parametrize("victim", ONE_OF_TWO)
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


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_beyond_the_allowed_skew_a_link_waits_and_skips_nothing_until_the_clocks_agree(
    tmp_path: Path,
) -> None:
    """K7: versions from the far future would win against everything for as long."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS, start=False) as cluster:
        ahead = 60 * SECOND
        cluster["a"].shift(ahead)
        cluster.start()
        cluster.await_streaming()
        cluster["b"].client.publish("kept", {"n": 1}, key="back")
        cluster["a"].client.publish("kept", {"n": 2}, key="ahead")
        out = cluster.await_out("a", "b", lambda link: link.last_error_reason == "CLOCK_SKEW")
        assert "max_clock_skew" in out.last_error
        incoming = cluster.await_in("b", "a", lambda link: link.last_error_reason == "CLOCK_SKEW")
        assert 50 < incoming.skew.total_seconds() < 70
        back = cluster.await_out("b", "a", lambda link: link.state == "streaming" and not link.lag_sequences)
        assert 50 < back.skew.total_seconds() < 70
        assert cluster["a"].client.get("kept", "back") is not None, "a change that is not ahead passes"
        assert cluster["b"].client.get("kept", "ahead") is None
        assert incoming.cursor < cluster["a"].client.replication_status().last_sequence

        cluster["b"].server.terminate()
        cluster["b"].shift(ahead)
        cluster.start("b")
        cluster.await_equal(topics=BOTH)
        assert cluster["b"].client.get("kept", "ahead") is not None
        assert not cluster.faults()


def test_a_link_continues_when_corrected_clocks_reach_the_time_of_its_changes(tmp_path: Path) -> None:
    with Cluster(tmp_path, "a", "b", topics=TOPICS, more='max_clock_skew = "1s"', start=False) as cluster:
        cluster["a"].shift(6 * SECOND)
        cluster.start()
        cluster.await_streaming()
        cluster["a"].client.publish("kept", {"n": 1}, key="ahead")
        cluster.await_out("a", "b", lambda link: link.last_error_reason == "CLOCK_SKEW")
        cluster["a"].server.terminate()
        cluster["a"].shift(0)
        cluster["a"].server.start("--accept-clock")
        cluster.await_equal(topics=BOTH)
        assert cluster["b"].client.get("kept", "ahead") is not None


# --- disks -----------------------------------------------------------------------------------------------------------


def test_when_the_disk_of_the_receiver_is_full_nothing_is_lost(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.client.publish("kept", {"n": 0}, key="0")
    pair.await_streaming()
    largest = max(path.stat().st_size for path in b.server.data.rglob("*") if path.is_file())
    _, hard = resource.prlimit(b.server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(b.server.pid, resource.RLIMIT_FSIZE, (largest + 300_000, hard))
    count = 0
    while not b.server.events("writes_stopped"):
        a.client.publish_many(
            "kept",
            [{"n": n, "pad": "x" * 4000} for n in range(count, count + 50)],
            keys=[str(n) for n in range(count, count + 50)],
        )
        count += 50
        assert count < 20_000
    out = pair.await_out("a", "b", lambda link: link.last_error_reason == "DISK_FULL")
    assert out.lag_sequences > 0
    a.client.publish("kept", {"n": count}, key=str(count))
    assert b.server.terminate() == 0
    b.server.start()  # without the limit
    pair.await_equal(topics=("kept",))
    assert len(b.records("kept")) == count + 1
