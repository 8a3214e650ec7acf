"""Clients of two linked instances, one of which is killed: they go on at the other one (rules F1, F2, F5, F7, L21)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_client import Change, Client, SowError
from tests.support.clients import Connect, connect
from tests.support.cluster import WAIT_SECONDS, Cluster
from tests.support.server import until

__all__ = ["connect"]  # a fixture

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
