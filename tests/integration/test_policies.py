"""Policies and where settings come from, through the real client and server (rules T2, T4)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sow_client import Client, SowError
from tests.support.servers.server import ServerProcess, reason_of

CONFIG: Final = """
[defaults]
retain_time = "1h"
max_entries = 100000
[topics.fixed]
key = ["/id"]
expiration = "30s"
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as made:
        yield made
        assert not made.faults()


def told(client: Client, topic: str) -> dict[str, tuple[str, str]]:
    return {one.name: (one.value, one.origin) for one in client.describe_topic(topic).effective}


def test_a_policy_is_set_shown_listed_and_deleted_and_survives_a_kill(server: ServerProcess) -> None:
    """Pulsar 3, RabbitMQ 1, T2, T4: set, get and remove by pattern; describe tells each value and its origin."""
    with server.client() as client:
        client.create_topic("orders.eu", dead_letter="dlq")
        client.set_policy("orders", r"orders\..*", topics={"expiration": "45s", "retain_bytes": 2**20}, priority=5)
        client.set_policy("cap", ".*", topics={"max_ttl": "20s", "max_age": "3d3m0.5s"}, operator=True)
        client.set_policy("slow", "orders.eu/.*", durables={"idle_ttl": "1d"})
        found = told(client, "orders.eu")
        assert found["default_ttl"] == ("20s", "operator policy cap"), "45s, lowered"
        assert found["retain_bytes"] == ("1MiB", "policy orders")
        assert found["retain_time"] == ("1h", "default")
        assert found["max_entries"] == ("100000", "default")
        assert found["max_age"] == ("3d3m0.5s", "operator policy cap")
        assert found["dead_letter"] == ("dlq", "topic")
        assert told(client, "fixed")["default_ttl"] == ("20s", "operator policy cap")
        assert told(client, "fixed")["key"] == ("/id", "config")
        assert [(one.name, one.operator, one.matches) for one in client.policies()] == [
            ("cap", True, 2),
            ("orders", False, 1),
            ("slow", False, 0),
        ]
        assert client.get_policy("orders").priority == 5
        assert reason_of(lambda: client.get_policy("orders", operator=True)) == "POLICY_NOT_FOUND"
    server.kill9()
    server.start()
    with server.client() as client:
        assert told(client, "orders.eu") == found
        client.delete_policy("cap", operator=True)
        client.delete_policy("slow")
        assert [one.name for one in client.policies()] == ["orders"]
        assert told(client, "orders.eu")["default_ttl"] == ("45s", "policy orders")
        assert told(client, "orders.eu")["max_ttl"] == ("none", "default")
        assert reason_of(lambda: client.delete_policy("cap", operator=True)) == "POLICY_NOT_FOUND"


def test_a_setting_that_a_topic_ceases_to_declare_comes_from_the_next_source(server: ServerProcess) -> None:
    """T2, Pulsar 8: set, and removed again."""
    with server.client() as client:
        client.set_policy("p", ".*", topics={"retain_bytes": 7, "retain_time": "2h"})
        client.create_topic("orders", retain_bytes=2**20)
        assert told(client, "orders")["retain_bytes"] == ("1MiB", "topic")
        client.alter_topic("orders", retain_bytes=None)
        assert told(client, "orders")["retain_bytes"] == ("7B", "policy p")


def test_the_storage_to_plan_for(server: ServerProcess) -> None:
    """Pulsar 9."""
    with server.client() as client:
        client.create_topic("orders", retain_bytes=2**20, backlog_quota_bytes=2**19)
        assert client.describe_topic("orders").planned_journal_bytes == 3 * 2**19
        client.create_topic("open")
        assert client.describe_topic("open").planned_journal_bytes == -1


def test_contradicting_settings_are_refused_with_both_values(server: ServerProcess) -> None:
    """Pulsar 2, Pulsar 5, L4, RabbitMQ 12, T1, T2, X2."""
    with server.client() as client:

        def refusal(**settings: object) -> str:
            with pytest.raises(SowError) as caught:
                client.create_topic("bad", **settings)  # type: ignore[arg-type]  # the point of the test
            assert caught.value.reason == "INVALID_ARGUMENT"
            return str(caught.value)

        assert "retain_time: 0s and retain_bytes 1MiB must both be zero" in refusal(
            retain_time="0s", retain_bytes=2**20
        )
        assert "backlog_quota_bytes: 2KiB is not below retain_bytes, 1KiB" in refusal(
            backlog_quota_bytes=2048, retain_bytes=1024
        )
        assert "idle_ttl: 0s must be above zero" in refusal(idle_ttl="0s")
        assert "min_ttl: 2s is above max_ttl, 1s" in refusal(min_ttl="2s", max_ttl="1s")
        assert "default_ttl: 2s is above max_ttl, 1s" in refusal(expiration="2s", max_ttl="1s")
        assert "dead_letter: bad is the topic itself" in refusal(dead_letter="bad")
        with pytest.raises(SowError) as caught:
            client.set_policy("o", ".*", topics={"retain_bytes": 5}, operator=True)
        assert "retain_bytes: 5B is no limit; an operator policy may set limits only" in str(caught.value)
