"""Peers that pose as another one, or reach beyond their topics, in each method of the links (rule A3)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
import pytest
from google.protobuf.message import Message

from sow.v1 import replication_pb2, replication_pb2_grpc
from tests.support.oracles.access import GUARDED, client_of, peer, write_access
from tests.support.servers.server import ServerProcess

SECONDS: Final = 20.0
CONFIG: Final = GUARDED.replace("[server]", '[server]\ninstance = "nyc"') + '[replication]\naccept = ["ldn", "par"]\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("nyc")
    write_access(folder, peer("ldn", "orders") + peer("par"))
    with ServerProcess(folder, CONFIG) as made, client_of(made, "root") as root:
        for topic in ("orders", "secret"):
            root.create_topic(topic, key=["/id"], expiration="disabled")
            root.publish(topic, {"id": "1"})
        yield made


def sealed(message: Message, number: int = 0) -> replication_pb2.Sealed:
    data = message.SerializeToString()
    crc = zlib.crc32(data, number)
    return replication_pb2.Sealed(message=data, crc32=crc, number=number)


def named(name: str) -> replication_pb2.Instance:
    return replication_pb2.Instance(name=name, id="0123456789ab", epoch="0123456789ab")


def topic_of(name: str) -> replication_pb2.ReplicatedTopic:
    return replication_pb2.ReplicatedTopic(name=name, key=["/id"], message_type="json")


def checksum(name: str, topic: str) -> Message:
    return replication_pb2.ChecksumRequest(instance=named(name), topic=topic_of(topic), buckets=1)


def list_versions(name: str, topic: str) -> Message:
    return replication_pb2.ListVersionsRequest(instance=named(name), topic=topic, buckets=1, bucket=[0])


def fetch_rows(name: str, topic: str) -> Message:
    return replication_pb2.FetchRowsRequest(instance=named(name), topic=topic, key=["1"])


def merge_rows(name: str, topic: str) -> Message:
    return replication_pb2.MergeRowsRequest(instance=named(name), topic=topic_of(topic))


METHODS: Final = {
    "Checksum": checksum,
    "ListVersions": list_versions,
    "FetchRows": fetch_rows,
    "MergeRows": merge_rows,
}


def outcome(server: ServerProcess, method: str, request: Message, token: str) -> str:
    """The name of the status that a call ends with."""
    with grpc.insecure_channel(server.address) as channel:
        call: Any = getattr(replication_pb2_grpc.ReplicationServiceStub(channel), method)
        try:
            answer = call(sealed(request), timeout=SECONDS, metadata=(("authorization", f"Bearer {token}"),))
            if method == "ListVersions":
                list(answer)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code.name
    return "OK"


@pytest.mark.parametrize("method", METHODS)
def test_a_peer_asks_as_itself_and_for_its_topics_alone(server: ServerProcess, method: str) -> None:
    """The token of ldn proves the name ldn, and its topics are orders; par has all topics."""
    request: Callable[[str, str], Message] = METHODS[method]
    assert outcome(server, method, request("par", "secret"), "par") not in ("PERMISSION_DENIED", "UNAUTHENTICATED")
    assert outcome(server, method, request("ldn", "orders"), "ldn") not in ("PERMISSION_DENIED", "UNAUTHENTICATED")
    for name, topic, token in (
        ("par", "orders", "ldn"),
        ("ldn", "orders", "par"),
        ("ldn", "secret", "ldn"),
        ("ldn", "absent", "ldn"),
        ("nyc", "orders", "ldn"),
        ("", "orders", "ldn"),
        ("ldn", "orders", "root"),
    ):
        assert outcome(server, method, request(name, topic), token) == "PERMISSION_DENIED", (name, topic, token)
    assert outcome(server, method, request("ldn", "orders"), "guessed") == "UNAUTHENTICATED"


def test_a_link_begins_under_the_name_of_its_credential_alone(server: ServerProcess) -> None:
    hello = replication_pb2.ReplicateRequest(
        hello=replication_pb2.Hello(protocol=1, instance=named("par"), topics_pattern=".*")
    )
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = replication_pb2_grpc.ReplicationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Replicate(iter([sealed(hello, 1)]), timeout=SECONDS, metadata=(("authorization", "Bearer ldn"),)))
    assert refused.value.code() is not grpc.StatusCode.UNAUTHENTICATED
    assert "PEER_NOT_ACCEPTED" in str(refused.value.trailing_metadata())
