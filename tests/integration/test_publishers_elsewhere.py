"""Publishers that lose their instance and go on at another one, with real servers (rules F11 to F13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import Client, FailedPrecondition, Published
from tests.support.servers.cluster import Cluster

TOPIC = "[topics.orders]\nkey = ['/id']\n"
RECORDS = 400


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "a", "b", topics=TOPIC) as cluster:
        cluster.await_streaming()
        yield cluster


def addresses(cluster: Cluster) -> str:
    return ",".join([instance.server.address for instance in cluster.instances.values()])


def publish(client: Client, first: int, *ids: str, condition: bool = False) -> sow_pb2.PublishResponse:
    """A request as a publisher would send it again."""
    request = sow_pb2.PublishRequest(
        topic="orders",
        publisher=types_pb2.PublisherPosition(
            publisher_id="p", publisher_epoch=1, publisher_token=7, first_sequence=first
        ),
    )
    for one in ids:
        record = request.records.add(payload=b'{"id": "%s"}' % one.encode())
        if condition:
            record.condition.only_if_absent = True
    response: sow_pb2.PublishResponse = client._sow.Publish(request)
    return response


def duplicates(response: sow_pb2.PublishResponse) -> list[bool]:
    return [result.duplicate for result in response.results]


def test_a_retry_at_the_other_instance_is_a_duplicate(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    publish(a.client, 1, "1", "2")
    pair.await_streaming()
    a.server.kill9()
    assert duplicates(publish(b.client, 1, "1", "2", "3")) == [True, True, False]
    b.server.kill9()
    pair.start("b")
    assert duplicates(publish(b.client, 1, "1", "2", "3")) == [True, True, True]
    refused = publish(b.client, 1, "1", condition=True).results[0].refusal
    assert refused.reason == types_pb2.ERROR_REASON_OUTCOME_UNKNOWN


def test_publishers_of_before_the_link_are_known_once_it_has_seeded(tmp_path: Path) -> None:
    with Cluster(tmp_path, "a", "b", topics=TOPIC, start=False) as cluster:
        cluster.start("a")
        publish(cluster["a"].client, 1, "1", "2")
        cluster.start("b")
        cluster.await_streaming()
        # What comes behind the publishers on the link arrives after them.
        publish(cluster["a"].client, 3, "3")
        cluster.await_equal()
        cluster["a"].server.kill9()
        assert duplicates(publish(cluster["b"].client, 2, "2", "3", "4")) == [True, True, False]


def test_an_opened_publisher_moves_with_its_epoch_and_token(pair: Cluster) -> None:
    with Client(addresses(pair)) as client:
        opened = client.open_publisher("p")
        assert opened.token
        with client.publisher(
            "orders", publisher_id="p", epoch=opened.epoch, token=opened.token, batch_records=1
        ) as publisher:
            publisher.publish({"id": "1"})
            publisher.flush()
            pair.await_streaming()
            pair["a"].server.kill9()
            publisher.publish({"id": "2"})
            publisher.flush()
        assert (publisher.applied, publisher.duplicates) == (2, 0)
        # An older epoch is fenced there, too.
        assert client.open_publisher("p").epoch == opened.epoch + 1
        late = client.publisher("orders", publisher_id="p", epoch=opened.epoch, token=opened.token)
        late.publish({"id": "3"})
        with pytest.raises(FailedPrecondition) as fenced:
            late.flush()
        assert fenced.value.reason == "PUBLISHER_FENCED"
        late.abort()


@pytest.mark.parametrize(("names", "durability"), [("ab", "fsync"), ("abc", "replicated")])
def test_nothing_that_a_publisher_hands_over_is_lost_with_its_instance(
    tmp_path: Path, names: str, durability: Literal["fsync", "replicated"]
) -> None:
    """Its instance is killed while it publishes. REPLICATED: all of it is at the others then, and otherwise once the
    instance is back."""
    everything = {f"{number}" for number in range(RECORDS)} | {f"s{number}" for number in range(11)}
    with Cluster(tmp_path, *names, topics=TOPIC, mode="sync", more='sync_timeout = "500ms"') as cluster:
        cluster.await_streaming()
        with Client(addresses(cluster)) as client:
            for number in range(10):  # single publishes, before and after
                assert isinstance(client.publish("orders", {"id": f"s{number}"}), Published)
            with client.publisher("orders", durability=durability, batch_records=5) as publisher:
                for number in range(RECORDS):
                    publisher.publish({"id": f"{number}"})
                    if number == RECORDS // 2:
                        cluster["a"].server.kill9()
            assert publisher.acknowledged == RECORDS
            assert publisher.refused == 0
            assert isinstance(client.publish("orders", {"id": "s10"}), Published)
            if durability == "replicated":
                assert {record.key for record in client.query("orders")} == everything
        cluster.start("a")
        cluster.await_equal()
        assert cluster["b"].records("orders").keys() == everything
