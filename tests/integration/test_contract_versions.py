"""An older client at a newer server, and the other way round, with the descriptors of the last release."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator

import pytest

from sow_client import Client, InternalError
from tests.support.old_contract import OldClient, OldServer
from tests.support.server import ServerProcess

TOPICS = '[topics.orders]\nkey = ["/id"]\nexpiration = "enabled"\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("versions"), TOPICS) as server:
        yield server


@pytest.fixture
def old_client(server: ServerProcess) -> Iterator[OldClient]:
    client = OldClient(server.address)
    yield client
    client.close()


@pytest.fixture
def old_server(server: ServerProcess) -> Iterator[OldServer]:
    old = OldServer(server.address)
    yield old
    old.close()


def test_an_old_client_publishes_reads_and_deletes_at_a_new_server(old_client: OldClient) -> None:
    topic = {"topic": "orders"}
    row = json.dumps({"id": "old", "a": 1}).encode()
    done = old_client.call(
        "SowService/Publish",
        **topic,
        records=[{"payload": _base64(row)}],
        lifetime={"ttl_micros": "3600000000"},
        durability=1,
    )
    assert done.results[0].version > 0
    assert done.results[0].expire_time_micros > 0
    requests = [{**topic, "payload": [_base64(json.dumps({"id": f"s{number}"}).encode())]} for number in range(1, 4)]
    answers = old_client.talk("SowService/PublishStream", requests)
    assert answers
    assert not any(answer.refusals for answer in answers)
    found = old_client.call("SowService/Get", **topic, keys=["old", "s1", "none"])
    assert [record.key for record in found.records] == ["old", "s1"]
    assert found.records[0].payload == row
    read = old_client.stream("SowService/Query", **topic)
    assert {key for answer in read for key in answer.batch.key} >= {"old", "s1", "s2", "s3"}
    touched = old_client.call("SowService/Touch", **topic, keys=["old"], lifetime={"never": True})
    assert touched.results[0].version > done.results[0].version
    deleted = old_client.stream("SowService/SowDelete", **topic, by_keys={"keys": ["old", "s1"]})
    assert deleted[-1].deleted == 2
    assert not old_client.call("SowService/Get", **topic, keys=["old", "s1"]).records


def test_an_old_client_administers_a_new_server(old_client: OldClient) -> None:
    made = old_client.call("AdminService/CreateTopic", name="made", settings={"key": ["/id"], "expiration": 2})
    assert made.topic.name == "made"
    altered = old_client.call(
        "AdminService/AlterTopic",
        name="made",
        settings={"default_ttl": "30s"},
        update_paths=["default_ttl"],
    )
    assert altered.topic.settings.default_ttl.seconds == 30
    assert old_client.call("AdminService/DescribeTopic", name="made").topic.settings.key == ["/id"]
    assert "made" in [topic.name for topic in old_client.call("AdminService/ListTopics").topics]
    assert old_client.call("AdminService/GetStatus").state == "serving"
    old_client.call("AdminService/DeleteTopic", name="made")


def test_a_new_client_does_at_an_old_server_what_that_can_do(old_server: OldServer) -> None:
    with Client(old_server.address) as client:
        assert client.publish("orders", {"id": "new", "a": 1}, ttl="1h").expire_time is not None
        with client.publisher("orders") as publisher:
            for number in range(10):
                publisher.publish({"id": f"n{number}"})
        assert client.get("orders", "new") is not None
        assert {record.key for record in client.query("orders")} >= {"new", "n0", "n9"}
        client.touch("orders", ["new"], ttl="2h")
        assert client.sow_delete("orders", keys=["new"]).deleted == 1
        client.create_topic("made-by-new", key=["/id"])
        assert "made-by-new" in [topic.name for topic in client.topics()]
        client.delete_topic("made-by-new")
        assert client.status().state == "serving"
        found = client.describe_instance()  # an old server does not describe itself
        assert (found.name, found.serving) == ("", True)


def test_a_new_client_says_what_an_old_server_lacks(old_server: OldServer) -> None:
    """None of these calls may look like a success, or like a fault of the caller."""

    def publisher() -> None:
        with client.publisher("orders", publisher_id="p") as publisher:
            publisher.publish({"id": 1})

    with Client(old_server.address) as client:
        calls: dict[str, Callable[[], object]] = {
            "SowService/Subscribe": lambda: next(iter(client.subscribe("orders"))),
            "SowService/OpenPublisher": publisher,
            "AdminService/GetReplicationStatus": client.replication_status,
            "AdminService/AddPeer": lambda: client.add_peer("x", "127.0.0.1:1"),
            "AdminService/ListPolicies": client.policies,
            "AdminService/Backup": lambda: client.backup("b"),
            "AccessService/WhoAmI": client.whoami,
        }
        for path, call in calls.items():
            with pytest.raises(InternalError, match="an older one") as caught:
                call()
            assert caught.value.reason == "UNIMPLEMENTED"
            assert f"/sow.v1.{path}" in old_server.asked


def _base64(payload: bytes) -> str:
    return base64.b64encode(payload).decode()
