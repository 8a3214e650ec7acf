"""An older client at a newer server, and the other way round, with the descriptors of the last release."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Final

import grpc
import pytest

from sow.v1 import sow_pb2_grpc
from sow_client import Client, FailedPrecondition, InternalError, Unavailable
from tests.support.fakes.echo_server import Held
from tests.support.oracles.old_contract import Forwarder, OldClient, OldServer
from tests.support.servers.server import ServerProcess, until
from tests.support.simulation.clients import Connect, connect
from tests.support.stores.describing import describing

__all__ = ["connect"]  # a fixture

WAIT: Final = 20.0
DESCRIBE: Final = "/sow.v1.AdminService/DescribeInstance"

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


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("min_position", lambda client: client.get("orders", "1", min_position="0123456789ab.1")),
        ("min_position", lambda client: client.count("orders", min_position="0123456789ab.1")),
        ("touch", lambda client: client.get("orders", "1", touch="1h")),
        ("filter", lambda client: list(client.query("orders", "/a = 1"))),
        ("order_by", lambda client: list(client.query("orders", order_by="/a"))),
        ("only", lambda client: client.touch("orders", "1", ttl="1h", only="later")),
        ("versions", lambda client: client.touch("orders", ["1"], ttl="1h", only_if_versions=[7])),
        ("by_keys.versions", lambda client: client.sow_delete("orders", keys=["1"], only_if_versions=[7])),
        ("by_filter", lambda client: client.sow_delete("orders", filter="/a = 1")),
        ("delta", lambda client: client.delta_publish("orders", {"id": "1", "b": 1})),
        ("ttl_mode", lambda client: client.publish("orders", {"id": "1"}, ttl="1h", extend_ttl=True)),
        ("durability", lambda client: client.publish("orders", {"id": "1"}, durability="replicated")),
        ("settings.index", lambda client: client.create_topic("indexed", key=["/id"], index=["/a"])),
        ("settings.max_entries", lambda client: client.alter_topic("orders", max_entries=7)),
        ("settings.max_records", lambda client: client.alter_topic("orders", max_records=7)),
        ("history_micros", lambda client: list(client.watch_figures(history="1h"))),
    ],
)
def test_a_new_client_sends_nothing_that_an_old_server_would_misunderstand(
    old_server: OldServer, connect: Connect, field: str, call: Callable[[Client], object]
) -> None:
    """An older server passes over a field that it does not know: it deleted a record of any version, and answered reads
    of a position that it did not have."""
    with connect(old_server.address) as client:
        before = client.publish("orders", {"id": "1", "a": 1})
        with pytest.raises(FailedPrecondition) as caught:
            call(client)
        assert caught.value.reason == "SERVER_TOO_OLD"
        assert caught.value.details["field"] == field
        assert caught.value.details["server"] == old_server.address
        after = client.get("orders", "1")
        assert after is not None
        assert after.version == before.version
        with pytest.raises(FailedPrecondition):
            call(client)
        assert old_server.asked.count(DESCRIBE) == 1, "once for a connection"


@pytest.mark.parametrize("delta", [True, False])
def test_a_publisher_of_deltas_sends_nothing_to_an_old_server(
    old_server: OldServer, connect: Connect, delta: bool
) -> None:
    with connect(old_server.address) as client:
        publisher = client.publisher("orders", delta=delta)
        publisher.publish({"id": "2"})
        if not delta:
            publisher.close()
            assert DESCRIBE not in old_server.asked, "a client that needs nothing new does not ask"
            return
        with pytest.raises(FailedPrecondition) as caught:
            publisher.flush()
        assert caught.value.reason == "SERVER_TOO_OLD"
        assert caught.value.details["field"] == "delta"
        publisher.abort()


def test_the_contract_is_asked_for_again_on_a_new_connection(server: ServerProcess, connect: Connect) -> None:
    """The server may have been replaced by an older one, at the same address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    today = Forwarder(server.address, port)
    with connect(f"127.0.0.1:{port}") as client:
        client.publish("orders", {"id": "3", "a": 1})
        assert len(list(client.query("orders", "/id = '3'"))) == 1
        today.close()
        connection: Any = client._transport._connection  # the blocking one looks on a thread of its own
        until(lambda: not getattr(connection, "_noted", False), WAIT, "the connection to be gone")
        old = OldServer(server.address, port)
        try:
            with pytest.raises(FailedPrecondition) as caught:
                list(client.query("orders", "/id = '3'"))
            assert caught.value.reason == "SERVER_TOO_OLD"
        finally:
            old.close()


def test_a_publish_of_unknown_outcome_is_not_repeated_at_an_older_instance(
    server: ServerProcess, connect: Connect
) -> None:
    """F12: the older instance does not know what has arrived at the first one, and applied the record once more."""
    store = Held()
    held = grpc.server(futures.ThreadPoolExecutor(8))
    sow_pb2_grpc.add_SowServiceServicer_to_server(store, held)
    held.add_generic_rpc_handlers((describing(),))
    port = held.add_insecure_port("127.0.0.1:0")
    held.start()
    old = OldServer(server.address)
    try:
        with (
            connect(f"127.0.0.1:{port},{old.address}") as client,
            futures.ThreadPoolExecutor() as threads,
        ):
            call = threads.submit(lambda: client.publish("orders", {"id": "unknown"}))
            assert store.entered.wait(WAIT)
            held.stop(None)
            error = call.exception(WAIT)
            assert isinstance(error, Unavailable)
            assert error.reason == "UNREACHABLE", "it may have been applied"
            store.release.set()
            assert client.get("orders", "unknown") is None
            assert client.publish("orders", {"id": "known"}).version, "what was never sent goes on there"
    finally:
        old.close()


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
