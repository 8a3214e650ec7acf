"""MESSAGE_SIZE() is the length of the payload, wherever filters are, and tells nothing of hidden fields (rule A5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_client import Client
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import ServerProcess

CONFIG: Final = """
[server]
reader_processes = 1
[topics.orders]
key = ["/id"]
[topics.large]
key = ["/id"]
"""
LARGE: Final = 8_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("sizes"), CONFIG) as made:
        with made.client() as client, client.publisher("large") as publisher:
            for number in range(LARGE):
                publisher.publish({"id": number, "text": "x" * (1000 if number == 7 else 1)})
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


def test_queries_counts_subscriptions_and_deletes_know_the_size(client: Client) -> None:
    payloads = {"1": b'{"id": 1}', "2": b'{"id": 2, "a":   "\\u00e9"}'}
    for payload in payloads.values():
        client.publish("orders", payload)
    for key, payload in payloads.items():
        text = f"MESSAGE_SIZE() = {len(payload)}"
        assert [record.key for record in client.query("orders", text)] == [key]
        assert [record.key for record in client.query("orders", f"{text} AND /id > 0")] == [key]
    assert client.count("orders", "MESSAGE_SIZE() > :size", {"size": len(payloads["1"])}) == 1
    with client.sow_and_subscribe("orders", "MESSAGE_SIZE() > 9") as subscription:
        events = iter(subscription)
        assert next(events).key == "2"
        client.publish("orders", {"id": 3})
        client.publish("orders", {"id": 3, "text": "long enough"})
        assert next(event for event in events if getattr(event, "key", None)).key == "3"
    assert client.sow_delete("orders", filter="MESSAGE_SIZE() > 9").deleted == 2
    assert [record.key for record in client.query("orders")] == ["1"]


def test_a_reader_process_knows_the_size(client: Client) -> None:
    assert [record.key for record in client.query("large", "MESSAGE_SIZE() > 900")] == ["7"]
    assert client.count("large", "MESSAGE_SIZE() < 900 AND @sequence > 0") == LARGE - 1
    assert client.count("large", "REGEXP_REPLACE(/text, 'x', '') = ''") == LARGE


def test_it_is_null_for_a_caller_with_hidden_fields(tmp_path: Path) -> None:
    write_access(
        tmp_path,
        identity("half", "half")
        + grant("half", ".*", "read", 'hide = ["/secret"]\n')
        + identity("desk", "desk")
        + grant("desk", ".*", "read", 'rows = "/id = 1"\n'),
    )
    found = {}
    with ServerProcess(tmp_path, f'{GUARDED}[topics.orders]\nkey = ["/id"]\n') as server:
        with client_of(server, "root") as root:
            root.publish_many("orders", [{"id": 1, "secret": "x" * 100}, {"id": 2, "secret": "x" * 200}])
        for name in ("root", "desk", "half"):
            with client_of(server, name) as client:
                texts = ("MESSAGE_SIZE() > 100", "MESSAGE_SIZE() > 0", "MESSAGE_SIZE() IS NULL")
                found[name] = [client.count("orders", text) for text in texts]
    assert found == {"root": [2, 2, 0], "desk": [1, 1, 0], "half": [0, 0, 2]}
