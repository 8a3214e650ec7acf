"""What follows a topic with parameters goes on at another instance with the same ones, whatever its text holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sow_client import Change
from tests.support.servers.cluster import WAIT_SECONDS, Cluster
from tests.support.servers.server import until
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]

TOPICS: Final = "[topics.orders]\nkey = ['/id']\nexpiration = 'enabled'\nretain_time = '1h'\n"
USER: Final = "O'Neil' OR /id != '"
FILTER: Final = "/by = :user AND /n < :most"
PARAMETERS: Final = {"user": USER, "most": 123456789012345678901234567890}
RIGHT: Final = {"by": USER, "n": 18446744073709551617}
WRONG: Final[tuple[dict[str, Any], ...]] = (
    {"by": "O'Neil", "n": 1},
    {"by": USER, "n": 123456789012345678901234567890},
    {"n": 1},
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "a", "b", topics=TOPICS) as cluster:
        cluster.await_streaming()
        yield cluster


def publish(cluster: Cluster, name: str, key: str) -> None:
    """One record that matches, after those that do not."""
    for number, document in enumerate(WRONG):
        cluster[name].client.publish("orders", {"id": f"{key}-{number}", **document})
    cluster[name].client.publish("orders", {"id": key, **RIGHT})


def followed(client: Any, way: str) -> Any:
    if way == "durable":
        return client.durable("orders", "billing", FILTER, PARAMETERS, replicated=True, progress="100ms")
    return getattr(client, way)("orders", FILTER, PARAMETERS, progress="100ms")


@pytest.mark.parametrize(
    ("connect", "way"),
    [("Client", "subscribe"), ("AsyncClient", "sow_and_subscribe"), ("Client", "durable"), ("AsyncClient", "durable")],
    indirect=["connect"],
)
def test_a_follower_with_parameters_is_served_by_the_peer_that_is_left(
    connect: Connect, cluster: Cluster, way: str
) -> None:
    """F2, F17, Q9: `a` is killed, and `b` sends what matches, and nothing else."""
    addresses = ",".join(cluster[name].server.address for name in "ab")
    with connect(addresses) as client:
        following = followed(client, way)
        following.open()  # the asynchronous one is opened by its first use
        publish(cluster, "a", "first")
        until(lambda: cluster["b"].client.get("orders", "first") is not None, WAIT_SECONDS, "the first one at b")
        seen: list[Change] = []
        read_until(following, seen, "first", durable=way == "durable")
        if way == "durable":
            following.flush()
            until(lambda: described(cluster, "b") is not None, WAIT_SECONDS, "the durable at b")
            assert described(cluster, "b").filter == described(cluster, "a").filter, "with its values"
        there = cluster["b"].client.status().journal_epoch
        while way == "subscribe" and f";{there}." not in (following.bookmark or ""):  # F7: without it, no place at b
            client.publish("orders", {"id": "first", **RIGHT})
            read_until(following, seen, "first", durable=False)
        cluster["a"].server.kill9()
        publish(cluster, "b", "last")
        read_until(following, seen, "last", durable=way == "durable")
        assert client.instance is not None
        assert client.instance.name == "b"
        assert {change.key for change in seen if change.record is not None} == {"first", "last"}
        following.close()


def described(cluster: Cluster, name: str) -> Any:
    found = [one for one in cluster[name].client.durables("orders") if one.name == "billing"]
    return found[0] if found else None


def read_until(following: Any, seen: list[Change], key: str, *, durable: bool) -> None:
    while True:
        change = next(following)
        seen.append(change)
        if durable:
            following.acknowledge(change)
        if change.op in ("put", "sow") and change.key == key:
            return


def test_a_live_view_with_parameters_shows_the_records_of_the_peer_that_is_left(
    connect: Connect, cluster: Cluster
) -> None:
    """F4, Q9."""
    publish(cluster, "a", "first")
    until(lambda: cluster["b"].client.get("orders", "first") is not None, WAIT_SECONDS, "the first one at b")
    addresses = ",".join(cluster[name].server.address for name in "ab")
    with connect(addresses) as client, client.live_view("orders", FILTER, PARAMETERS) as view:
        assert set(view.keys()) == {"first"}
        cluster["a"].server.kill9()
        publish(cluster, "b", "last")
        until(
            lambda: "last" in view.keys(),  # noqa: SIM118 - the asynchronous one is a proxy here
            WAIT_SECONDS,
            "the last one in the view",
        )
        assert set(view.keys()) == {"first", "last"}
