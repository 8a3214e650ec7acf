"""Clients of two linked instances, one of which is killed: they go on at the other one (rules F1, F2, F5, F7, L21)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_client import Change, Client, ResyncRequired, SowError, Unavailable
from tests.support.servers.cluster import WAIT_SECONDS, Cluster
from tests.support.servers.server import until
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture

pytestmark = pytest.mark.one_client

TOPICS: Final = "[topics.orders]\nkey = ['/id']\nexpiration = 'enabled'\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "a", "b", topics=TOPICS) as cluster:
        cluster.await_streaming()
        yield cluster


def addresses(cluster: Cluster) -> str:
    return ",".join(cluster[name].server.address for name in "ab")


def await_sent(cluster: Cluster, client: Client, key: str) -> None:
    """Waits until b has what the client has published at a."""
    until(lambda: cluster["b"].client.get("orders", key) is not None, WAIT_SECONDS, f"{key} is at b")


def epoch_of(cluster: Cluster, name: str) -> str:
    return cluster[name].client.status().journal_epoch


@pytest.mark.parametrize("way", ["subscribe", "sow_and_subscribe"])
def test_a_subscription_goes_on_elsewhere_without_a_resync(connect: Connect, cluster: Cluster, way: str) -> None:
    """F2, F7: no change is missing, also one that comes before the call has been made again."""
    there = epoch_of(cluster, "b")
    interruptions: list[SowError | None] = []
    with connect(addresses(cluster)) as client:
        client.publish("orders", {"id": "before"})
        await_sent(cluster, client, "before")
        following = getattr(client, way)("orders", oof=True, progress="100ms", on_interruption=interruptions.append)
        if way == "sow_and_subscribe":
            assert [next(following).op for _ in range(2)] == ["sow", "snapshot_end"]
        client.publish("orders", {"id": "first"})
        change = next(following)
        assert (change.op, change.key) == ("put", "first")
        await_sent(cluster, client, "first")
        while f";{there}." not in (following.bookmark or ""):
            client.publish("orders", {"id": "more"})
            assert next(following).key == "more"
        cluster["a"].server.kill9()
        cluster["b"].client.publish("orders", {"id": "last"})
        seen: list[Change] = []
        while not seen or seen[-1].key != "last":
            seen.append(next(following))
        assert {change.op for change in seen} == {"put"}, "no resync"
        assert following.bookmark.startswith(there)
        assert client.instance is not None
        assert client.instance.name == "b"
        assert len(interruptions) == 2
        following.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_live_view_is_right_elsewhere_although_its_instance_never_comes_back(
    connect: Connect, cluster: Cluster, lost: bool
) -> None:
    """F5. `lost`: the killed instance had told a change that it had not sent. A view that went on by its bookmark kept
    that record for ever."""
    there = cluster["b"].client
    with connect(addresses(cluster)) as client:
        client.publish("orders", {"id": "1"})
        await_sent(cluster, client, "1")
        with client.live_view("orders", progress="100ms") as view:
            until(lambda: f";{epoch_of(cluster, 'b')}." in (view.position or ""), WAIT_SECONDS, "marks")
            if lost:
                cluster.proxies["a", "b"].close()
                client.publish("orders", {"id": "unsent"})
                until(lambda: "unsent" in view.copy(), WAIT_SECONDS, "it is told")
            cluster["a"].server.kill9()
            there.publish("orders", {"id": "2"})
            until(
                lambda: (
                    view.current
                    and {key: record.version for key, record in view.copy().items()}
                    == {record.key: record.version for record in there.query("orders")}
                ),
                WAIT_SECONDS,
                "the view has what its instance has",
            )
            assert set(view.copy()) == {"1", "2"}


def test_a_lease_is_renewed_elsewhere(connect: Connect, cluster: Cluster) -> None:
    """L21: the holder keeps its records when the instance is killed that had them, and leaving deletes them."""
    with connect(addresses(cluster)) as client:
        with client.lease("6s") as lease:
            lease.publish("orders", {"id": "held"}, only_if_absent=True)
            await_sent(cluster, client, "held")
            before = cluster["b"].client.get("orders", "held")
            assert before is not None
            cluster["a"].server.kill9()

            def renewed() -> bool:
                record = cluster["b"].client.get("orders", "held")
                assert record is not None
                assert before.expire_time_micros is not None
                return record.expire_time_micros != before.expire_time_micros

            until(renewed, WAIT_SECONDS, "it is renewed at b")
            lease.check()
        assert cluster["b"].client.get("orders", "held") is None


def test_clocks_that_differ_by_a_minute_stop_a_link_with_a_clear_error_and_lose_nothing(
    connect: Connect, tmp_path: Path
) -> None:
    """K7, F1, F5: the bad input of somebody who has set up the machines. Clients go on at both instances."""
    minute = 60_000_000
    with Cluster(tmp_path, "a", "b", topics=TOPICS, start=False) as cluster:
        cluster["b"].shift(minute)
        cluster.start()
        cluster.await_streaming([("a", "b")])
        with connect(addresses(cluster)) as client, client.live_view("orders") as view:
            client.publish("orders", {"id": "at a"}, ttl="1h")
            done = cluster["b"].client.publish("orders", {"id": "at b"}, ttl="1h")
            link = cluster.await_out("b", "a", lambda link: link.last_error_reason == "CLOCK_SKEW")
            assert "clock" in link.last_error
            with pytest.raises(Unavailable) as behind:
                client.get("orders", "at b", min_position=done.bookmark)
            assert behind.value.reason == "BEHIND", "no answer that lacks it passes for a complete one"
            await_sent(cluster, client, "at a")
            cluster["a"].server.kill9()
            assert client.get("orders", "at b") is not None
            until(lambda: view.current and view.keys() == {"at a", "at b"}, WAIT_SECONDS, "the view is that of b")
            cluster["a"].shift(minute)  # the clocks agree again
            cluster.start("a")
            cluster.await_equal(topics=["orders"])
            assert cluster["a"].records("orders").keys() == {"at a", "at b"}


def test_a_client_of_a_wiped_instance_is_told_so_and_loses_nothing(connect: Connect, cluster: Cluster) -> None:
    """F5, F10: a bookmark and a position of data that are gone."""
    with connect(cluster["a"].server.address) as client, client.live_view("orders") as view:
        done = client.publish("orders", {"id": "1"})
        following = client.sow_and_subscribe("orders", oof=True)
        assert [next(following).op for _ in range(2)] == ["sow", "snapshot_end"]
        await_sent(cluster, client, "1")
        cluster["a"].server.kill9()
        cluster["a"].wipe()
        cluster.start("a")
        cluster.await_streaming()
        with pytest.raises(ResyncRequired) as other:
            client.subscribe("orders", start=done.bookmark)
        assert other.value.reason == "BOOKMARK_OTHER_EPOCH"
        with pytest.raises(Unavailable) as behind:
            client.get("orders", "1", min_position=done.bookmark)
        assert behind.value.reason == "BEHIND"
        assert "no link brings changes" in behind.value.message
        assert next(following).op == "resync"
        following.close()
        until(lambda: view.current and view.keys() == {"1"}, WAIT_SECONDS, "the view has what b has sent back")
        assert cluster["a"].state("orders") == cluster["b"].state("orders")
