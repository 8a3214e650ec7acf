"""Replicated durables at real servers: their consumers lose their instance, and go on at another one (F14 to F17)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_client import Change, Client, Durable, FailedPrecondition, NotFound, SowError
from tests.support.servers.cluster import WAIT_SECONDS, Cluster
from tests.support.servers.server import until
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture

pytestmark = pytest.mark.one_client

TOPICS: Final = "[topics.orders]\nkey = ['/id']\nexpiration = 'enabled'\nretain_time = '1h'\n"
IN_FILE: Final = f"{TOPICS}replicate_durables = true\n"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "a", "b", "c", topics=TOPICS) as cluster:
        cluster.await_streaming()
        yield cluster
        assert not cluster.faults()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "a", "b", topics=TOPICS) as cluster:
        cluster.await_streaming()
        yield cluster


def addresses(cluster: Cluster, names: str) -> str:
    return ",".join([cluster[name].server.address for name in names])


def described(cluster: Cluster, name: str) -> Durable | None:
    try:
        return cluster[name].client.describe_durable("orders", "billing")
    except NotFound:
        return None


def backlog(cluster: Cluster, name: str) -> int | None:
    found = described(cluster, name)
    return None if found is None or found.figures is None else found.figures.unacknowledged_entries


def keys(changes: list[Change]) -> list[str]:
    return [change.key for change in changes]


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.long)])
def test_no_entry_is_skipped_however_often_the_instance_in_use_is_killed(
    connect: Connect, three: Cluster, kills: int
) -> None:
    """F14, F17: a consumer of three instances, of which the one that it uses is killed again and again, while others
    publish at all of them."""
    seen: list[str] = []
    published = 0
    moved: list[SowError | None] = []
    with connect(addresses(three, "abc")) as client:
        with client.durable(
            "orders", "billing", replicated=True, progress="100ms", on_interruption=moved.append
        ) as durable:
            assert durable.created
            for number in range(kills):
                assert client.instance is not None
                used = client.instance.name
                for name in "abc":
                    for _ in range(20):
                        three[name].client.publish("orders", {"id": f"{published}"})
                        published += 1
                three.await_streaming()
                while len(set(seen)) < published - 15 * (number % 2):
                    change = next(durable)
                    seen += keys([change])
                    if len(seen) % 3 == 0:
                        durable.acknowledge(change)
                three[used].server.kill9()
                while client.instance.name == used:
                    left = three["abc".replace(used, "")[0]].client
                    left.publish("orders", {"id": f"{published}"})
                    published += 1
                    change = next(durable)
                    seen += keys([change])
                three.start(used)
                three.await_streaming()
            while len(set(seen)) < published:
                change = next(durable)
                seen += keys([change])
                durable.acknowledge(change)
            assert not durable.reset
            assert durable.gap is None
    assert set(seen) == {f"{number}" for number in range(published)}
    assert len(moved) >= 2 * kills


def test_a_stop_tells_the_last_acknowledgements(connect: Connect, pair: Cluster) -> None:
    """F14: nothing comes again."""
    with connect(pair["a"].server.address) as client:
        with client.durable("orders", "billing", replicated=True, start="earliest") as durable:
            for number in range(10):
                pair["b"].client.publish("orders", {"id": f"{number}"})
            for _ in range(10):
                durable.acknowledge(next(durable))
            durable.flush()
            assert pair["a"].server.terminate() == 0
    assert backlog(pair, "b") == 0


def test_a_second_consumer_is_refused_at_another_instance_and_told_where_the_first_is(
    connect: Connect, pair: Cluster
) -> None:
    """F15."""
    there = pair["b"].client
    with connect(pair["a"].server.address) as client:
        with client.durable("orders", "billing", replicated=True):
            until(lambda: (found := described(pair, "b")) is not None and found.consumer_at == "a", WAIT_SECONDS, "b")
            found = described(pair, "b")
            assert found is not None
            assert (found.replicated, found.attached) == (True, False)
            with pytest.raises(FailedPrecondition) as refused:
                there.durable("orders", "billing")
            assert (refused.value.reason, refused.value.details["instance"]) == ("DURABLE_IN_USE", "a")
            for call in (
                lambda: there.rewind("orders", "billing", "earliest"),
                lambda: there.delete_durable("orders", "billing"),
            ):
                with pytest.raises(FailedPrecondition):
                    call()
        until(lambda: (found := described(pair, "b")) is not None and not found.consumer_at, WAIT_SECONDS, "it left")
    with there.durable("orders", "billing") as durable:
        assert not durable.created


def test_an_acknowledgement_of_an_entry_of_another_instance_acknowledges_nothing_else(
    connect: Connect, pair: Cluster
) -> None:
    """F17: it comes again."""
    with connect(addresses(pair, "ab")) as client:
        with client.durable("orders", "billing", replicated=True, progress="100ms") as durable:
            for number in range(5):
                client.publish("orders", {"id": f"{number}"})
            handed = [next(durable) for _ in range(5)]
            pair.await_streaming()
            pair["a"].server.kill9()
            pair["b"].client.publish("orders", {"id": "5"})
            again = [next(durable)]
            for change in handed:
                durable.acknowledge(change)
            durable.flush()
            assert backlog(pair, "b") == 6
            while again[-1].key != "5":
                again.append(next(durable))
            assert keys(again) == [f"{number}" for number in range(6)]
            durable.acknowledge(again[-1])
            durable.flush()
            assert backlog(pair, "b") == 0


def test_a_durable_that_exists_becomes_replicated_by_a_policy_and_by_the_file(tmp_path: Path) -> None:
    """F14."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS) as cluster:
        cluster.await_streaming()
        for name in ("billing", "other"):
            cluster["a"].client.durable("orders", name, start="earliest").close()
        cluster["a"].client.set_policy("go-on", "orders/billing", durables={"replicated": True})
        until(lambda: described(cluster, "b") is not None, WAIT_SECONDS, "billing is at b")
        assert [one.name for one in cluster["b"].client.durables("orders")] == ["billing"]
        assert cluster["a"].server.terminate() == 0
        cluster.configure("a", topics=IN_FILE)
        cluster.start("a")
        until(lambda: len(cluster["b"].client.durables("orders")) == 2, WAIT_SECONDS, "the other one is at b")


def test_a_deletion_travels(connect: Connect, pair: Cluster) -> None:
    """F16."""
    client: Client = pair["a"].client
    client.durable("orders", "billing", replicated=True).close()
    until(lambda: (found := described(pair, "b")) is not None and not found.consumer_at, WAIT_SECONDS, "it is at b")
    pair["b"].client.delete_durable("orders", "billing")
    until(lambda: described(pair, "a") is None, WAIT_SECONDS, "it has gone at a")
    with connect(addresses(pair, "ab")) as other:
        with other.durable("orders", "billing", replicated=True) as durable:
            assert (durable.created, durable.reset) == (True, True)


def test_a_durable_that_is_not_replicated_stays_where_it_is(pair: Cluster) -> None:
    pair["a"].client.durable("orders", "billing").close()
    pair["a"].client.durable("orders", "other", replicated=True).close()
    until(lambda: len(pair["b"].client.durables("orders")) == 1, WAIT_SECONDS, "the replicated one is at b")
    assert [one.name for one in pair["b"].client.durables("orders")] == ["other"]
