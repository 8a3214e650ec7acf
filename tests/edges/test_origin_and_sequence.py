"""`@origin` and `@sequence` filter and sort, in queries, subscriptions, deletes and reader processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from sow_client import Client
from tests.support.servers.server import ServerProcess

CONFIG: Final = """
[server]
instance = "ldn"
reader_processes = 1
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.large]
key = ["/id"]
"""
LARGE: Final = 8_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("metadata"), CONFIG) as made:
        with made.client() as client:
            for number in range(3):
                client.publish("orders", {"id": number}, ttl="1h")
            with client.publisher("large") as publisher:
                for number in range(LARGE):
                    publisher.publish({"id": number})
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


def test_records_are_found_and_sorted_by_their_sequence(client: Client) -> None:
    done = client.publish("orders", {"id": 1}, ttl="1h")
    newest = [record.key for record in client.query("orders", order_by="@sequence DESC")]
    assert newest == ["1", "2", "0"]
    assert [record.key for record in client.query("orders", order_by="@sequence")] == newest[::-1]
    assert [one.key for one in client.query("orders", "@sequence >= :from", {"from": done.sequence})] == ["1"]
    assert {one.sequence for one in client.query("orders", "@sequence = :at", {"at": done.sequence})} == {done.sequence}


def test_records_are_found_by_the_instance_that_wrote_them(client: Client) -> None:
    assert client.count("orders", "@origin = 'ldn'") == 3
    assert client.count("orders", "@ORIGIN BEGINS WITH 'l' AND @origin != 'nyc'") == 3
    assert client.count("orders", "@origin = 'nyc'") == 0
    assert [record.key for record in client.query("orders", order_by="@origin, /id DESC")] == ["2", "1", "0"]


def test_a_reader_process_knows_the_names_of_origins(client: Client, server: ServerProcess) -> None:
    assert client.count("large", "@origin = 'ldn'") == LARGE
    found = list(client.query("large", "@origin != 'nyc' AND @sequence > 0", order_by="@origin, @sequence DESC"))
    assert len(found) == LARGE
    assert found[0].data["id"] == LARGE - 1


def test_subscriptions_and_deletes_judge_them_as_queries_do(client: Client) -> None:
    after = client.publish("orders", {"id": "next"}, ttl="1h").sequence
    with client.subscribe("orders", "@origin = 'ldn' AND @sequence > :after", {"after": after}, oof=True) as changes:
        client.publish("orders", {"id": "next", "n": 1}, ttl="1h")
        change = next(iter(changes))
        assert (change.op, change.key) == ("put", "next")
        # The removed record is the one that was there, with its own sequence.
        assert client.sow_delete("orders", filter="@origin = 'ldn' AND @key = 'next'").deleted == 1
        change = next(iter(changes))
        assert (change.op, change.reason, change.key) == ("oof", "deleted", "next")
