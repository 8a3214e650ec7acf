"""Secondary indexes through the contract: created, altered, described, declared in the file (rule Q3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from sow.v1 import admin_pb2, admin_pb2_grpc
from tests.support.servers.server import ServerProcess, until

CONFIG: Final = """
[topics.orders]
key = ["/id"]
index = ["/symbol"]
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as made:
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture
def admin(server: ServerProcess) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def indexes(admin: admin_pb2_grpc.AdminServiceStub, topic: str) -> list[tuple[str, bool]]:
    """Path and completeness of the indexes of a topic, after checking that its settings name the same."""
    found = admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name=topic)).topic
    assert list(found.settings.index) == [index.path for index in found.indexes]
    return [(index.path, index.complete) for index in found.indexes]


def test_a_topic_is_created_with_indexes(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    settings = admin_pb2.TopicSettings(index=["/a", "/b/c"])
    created = admin.CreateTopic(admin_pb2.CreateTopicRequest(name="made", settings=settings)).topic
    assert list(created.settings.index) == ["/a", "/b/c"]
    assert [index.complete for index in created.indexes] == [True, True]
    assert indexes(admin, "made") == [("/a", True), ("/b/c", True)]


def test_an_index_is_added_to_a_topic_in_use_and_removed(
    server: ServerProcess, admin: admin_pb2_grpc.AdminServiceStub
) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="made"))
    with server.client() as client, client.publisher("made") as publisher:
        for number in range(5_000):
            publisher.publish({"n": number}, key=str(number))

    def alter(*paths: str) -> list[admin_pb2.IndexStatus]:
        settings = admin_pb2.TopicSettings(index=paths)
        request = admin_pb2.AlterTopicRequest(name="made", settings=settings, update_paths=["index"])
        return list(admin.AlterTopic(request).topic.indexes)

    assert alter("/n") == [admin_pb2.IndexStatus(path="/n", complete=False)]
    until(lambda: indexes(admin, "made") == [("/n", True)], 10, "the index")
    # The line is on its way for a moment after the answer.
    until(lambda: [event["path"] for event in server.events("index_built")] == ["/n"], 10, "the line of the log")
    assert alter() == []
    assert indexes(admin, "made") == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (admin_pb2.TopicSettings(index=["a"]), "index: path 'a' must begin with '/', at 0"),
        (admin_pb2.TopicSettings(index=["/a", "/a"]), "index: /a is there twice"),
        (
            admin_pb2.TopicSettings(index=["/a"], message_type=admin_pb2.MESSAGE_TYPE_BINARY),
            "index: a binary topic has no fields",
        ),
    ],
)
def test_a_wrong_index_is_refused_by_name(
    admin: admin_pb2_grpc.AdminServiceStub, settings: admin_pb2.TopicSettings, message: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        admin.CreateTopic(admin_pb2.CreateTopicRequest(name="made", settings=settings))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")


def test_the_file_adds_and_removes_indexes_of_its_topics(server: ServerProcess) -> None:
    with server.client() as client, client.publisher("orders") as publisher:
        for number in range(3_000):
            publisher.publish({"id": number, "symbol": f"S{number % 7}", "px": number / 3})
    for paths in (["/symbol", "/px"], ["/px"], []):
        assert server.terminate() == 0
        server.configure(CONFIG.replace('["/symbol"]', str(paths)))
        server.start()
        with grpc.insecure_channel(server.address) as channel:
            _await_indexes(admin_pb2_grpc.AdminServiceStub(channel), paths)


def _await_indexes(admin: admin_pb2_grpc.AdminServiceStub, paths: list[str]) -> None:
    until(lambda: indexes(admin, "orders") == [(path, True) for path in paths], 10, "the indexes")
