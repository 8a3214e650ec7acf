"""Instances that lost their data or were away, the readers of a replica, and sync peers that are down (R8, R9)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest

from sow_client import Change, ReplicationUnavailable
from tests.fault.replicating import BOTH, TOPICS, loads, pair, settled
from tests.support.servers.cluster import SLACK_MICROS, WAIT_SECONDS, Cluster
from tests.support.servers.server import reason_of, until

__all__ = ["pair"]  # a fixture


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_replicated_writes_survive_the_loss_of_the_instance_that_accepted_them(tmp_path: Path, seed: int) -> None:
    """P5, R8; and the instance, once it is back without its data, gets all of it again."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS, mode="sync") as cluster:
        cluster.await_streaming()
        with loads(cluster, seed, "a", replicated=True) as running:
            running[0].await_more(100)
            cluster["a"].server.kill9()
        cluster["a"].wipe()
        running[0].check(cluster["b"])
        cluster["a"].server.start()
        settled(cluster, running)


def test_an_instance_that_lost_its_data_is_seeded_anew_under_load(pair: Cluster, seed: int) -> None:
    a, b = pair["a"], pair["b"]
    b.client.publish("kept", {"n": 1}, key="from b")
    pair.await_streaming()
    with loads(pair, seed, "a") as running:
        running[0].await_more(100)
        b.server.kill9()
        b.wipe()
        running[0].await_more(30)
        b.server.start()
        running[0].await_more(50)
    settled(pair, running)
    assert a.client.get("kept", "from b") is not None, "an empty instance has not deleted anything"
    assert b.client.get("kept", "from b") is not None


def test_an_instance_that_was_away_for_too_long_for_the_journal_is_seeded_under_load(tmp_path: Path, seed: int) -> None:
    """R9: the journal is kept up to `peer_max_lag_bytes`; deletes and renewals of the time away are in the seed."""
    with Cluster(
        tmp_path,
        "a",
        "b",
        topics=TOPICS.replace('"2s"', '"0s"\nretain_bytes = "0B"'),
        more='peer_max_lag_bytes = "1MiB"',
    ) as cluster:
        cluster.await_streaming()
        a, b = cluster["a"], cluster["b"]
        gone = [str(n) for n in range(100)]
        a.client.publish_many("kept", [{"n": n} for n in range(200)], keys=[str(n) for n in range(200)])
        cluster.await_streaming()
        position = cluster.await_in("b", "a", lambda link: link.cursor > 0).cursor
        b.server.kill9()
        a.client.sow_delete("kept", keys=gone)
        with loads(cluster, seed, "a") as running:

            def pruned() -> bool:
                a.client.publish_many("kept", [{"pad": "x" * 5000}] * 40, keys=["pad"] * 40)
                statistics = a.client.describe_topic("kept").statistics
                assert statistics is not None
                return statistics.floor_sequence > position

            until(pruned, WAIT_SECONDS, "the journal to be pruned beyond the cursor")
            b.server.start()
            running[0].await_more(100)
        settled(cluster, running)
        cluster.await_equal(topics=BOTH)
        there = b.records("kept")
        assert not there.keys() & set(gone)
        assert len(there) == 101


READ: Final = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
dead_letter = "dead"
[topics.dead]
expiration = "enabled"
"""


# --- the state of a replica ------------------------------------------------------------------------------------------


def key_of(change: Change) -> str:
    """The key of the record that a change is about."""
    record = change.record or change.previous
    assert record is not None
    return record.key


def test_subscribers_durables_and_dead_letters_at_a_replica(tmp_path: Path) -> None:
    """A subscriber at b hears what happens at a, and b's own expiries; its durables and letters are its own."""
    with Cluster(tmp_path, "a", "b", topics=READ, links=[("a", "b")]) as cluster:
        cluster.await_streaming()
        a, b = cluster["a"], cluster["b"]
        durable = b.client.durable("orders", "consumer", changes=True)
        with b.client.subscribe("orders", "/px > 10", oof=True) as following:
            first = a.client.publish("orders", {"id": "1", "px": 20})
            a.client.publish("orders", {"id": "1", "px": 5})
            a.client.publish("orders", {"id": "2", "px": 30})
            a.client.sow_delete("orders", keys=["2"])
            short = a.client.publish("orders", {"id": "3", "px": 40}, ttl="2s")
            heard = [next(following) for _ in range(5)]
            a.server.kill9()  # so that nothing but b itself makes it expire there
            heard.append(next(following))
            assert time.time_ns() // 1000 >= (short.expire_time_micros or 0) - SLACK_MICROS
        assert [(change.op, change.reason, key_of(change)) for change in heard] == [
            ("put", None, "1"),
            ("oof", "match", "1"),
            ("put", None, "2"),
            ("oof", "deleted", "2"),
            ("put", None, "3"),
            ("oof", "expired", "3"),
        ]
        assert heard[0].record is not None
        assert heard[0].record.version == first.version

        with durable:
            delivered = [next(durable) for _ in range(6)]
        assert [(change.op, key_of(change)) for change in delivered] == [
            ("put", "1"),
            ("put", "1"),
            ("put", "2"),
            ("delete", "2"),
            ("put", "3"),
            ("expire", "3"),
        ]

        (letter,) = b.records("dead").values()
        a.server.start()
        until(lambda: a.records("dead"), WAIT_SECONDS, "a letter at a, of its own")
        cluster.await_streaming()
        assert a.records("dead").keys() == b.records("dead").keys() == {letter.key}

        # A condition is judged where the write comes.
        b.client.publish("orders", {"id": "4", "px": 1}, only_if_absent=True)
        a.client.publish("orders", {"id": "4", "px": 2}, only_if_absent=True)
        until(lambda: b.records("orders")["4"].data == {"id": "4", "px": 2}, WAIT_SECONDS, "a's, the later one, to win")
        assert reason_of(lambda: b.client.publish("orders", {"id": "4"}, only_if_absent=True)) == "CONDITION_FAILED"
        assert not cluster.faults()


# --- sync peers ------------------------------------------------------------------------------------------------------


def test_a_sync_peer_that_is_down_is_downgraded_and_counts_again_when_it_has_caught_up(tmp_path: Path) -> None:
    """R8: until the time is out, writes wait; then they are told; the write stands all the same."""
    with Cluster(
        tmp_path, "a", "b", topics=TOPICS, links=[("a", "b")], mode="sync", more='sync_timeout = "1s"'
    ) as cluster:
        cluster.await_streaming()
        a, b = cluster["a"], cluster["b"]
        a.client.publish("kept", {"n": 1}, key="1", durability="replicated")
        assert b.client.get("kept", "1") is not None
        b.server.kill9()
        started = time.monotonic()
        with pytest.raises(ReplicationUnavailable) as told:
            a.client.publish("kept", {"n": 2}, key="2", durability="replicated")
        assert time.monotonic() - started > 0.5, "it waited for the peer"
        assert told.value.reason == "REPLICATION_UNAVAILABLE"
        assert told.value.applied == 1
        assert a.client.get("kept", "2") is not None
        assert a.out("b").mode == "downgraded"
        assert a.server.events("peer_downgraded")
        started = time.monotonic()
        with pytest.raises(ReplicationUnavailable):
            a.client.publish("kept", {"n": 3}, key="3", durability="replicated")
        assert time.monotonic() - started < 0.5, "nobody waits for it any more"
        a.client.publish("kept", {"n": 4}, key="4")
        b.server.start()
        cluster.await_out("a", "b", lambda link: link.mode == "sync")
        assert a.server.events("peer_upgraded")
        assert set(b.records("kept")) == {"1", "2", "3", "4"}
        a.client.publish("kept", {"n": 5}, key="5", durability="replicated")
        assert b.client.get("kept", "5") is not None
        assert not cluster.faults()
