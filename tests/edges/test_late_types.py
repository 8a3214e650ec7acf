"""Documents for a publisher that does not know yet which message type its topic has: none is encoded by a guess."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sow_client import Client, InvalidArgument, PublishFailed, Refusal, SowError, Unavailable
from sow_client._publisher_base import PublisherBase
from tests.support.servers.server import PYTHONPATH, ROOT, ServerProcess, free_port, until
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]

PATHS = ":".join([*[str(ROOT / name) for name in ("", "proto", "clients")], *PYTHONPATH])
CONFIG = """
[topics.nvfix]
key = ["/id"]
message_type = "nvfix"
fix_separator = ";"

[topics.packed]
key = ["/id"]
message_type = "msgpack"
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """One that is not started yet."""
    with ServerProcess(tmp_path, CONFIG, port=free_port(), start=False) as made:
        yield made


def payloads(client: Client, topic: str) -> list[bytes]:
    return [record.payload for record in client.query(topic)]


@pytest.mark.parametrize("topic", ["nvfix", "packed"])
def test_without_a_server_a_document_is_refused_and_the_publisher_goes_on_once_there_is_one(
    connect: Connect, server: ServerProcess, topic: str
) -> None:
    with connect(server.address, connect_timeout=0.5) as client:
        publisher = client.publisher(topic)
        with pytest.raises(Unavailable, match=f"not taken, as the message type of {topic} is not known") as caught:
            publisher.publish({"id": "a"})
        assert caught.value.reason == "UNREACHABLE"
        assert publisher.unacknowledged == 0
    server.start()
    with connect(server.address) as client:
        with client.publisher(topic) as publisher:
            publisher.publish({"id": "a", "px": "1=2"})
        assert payloads(client, topic) == [{"nvfix": b"id=a;px=1=2;", "packed": b"\x82\xa2id\xa1a\xa2px\xa31=2"}[topic]]


def test_one_publisher_refuses_and_later_encodes(connect: Connect, server: ServerProcess) -> None:
    with connect(server.address, connect_timeout=0.5) as client:
        publisher = client.publisher("nvfix")
        with pytest.raises(Unavailable):
            publisher.publish({"id": "a", "px": "1=2"})
        server.start()
        with suppress(Unavailable):  # gRPC may still pause after its last try
            publisher.publish({"id": "a", "px": "1=2"})
        client.count("nvfix")
        publisher.publish({"id": "b", "px": "1=2"})
        publisher.close()
        assert payloads(client, "nvfix")[-1] == b"id=b;px=1=2;"
        assert not any(payload.startswith(b"{") for payload in payloads(client, "nvfix"))


def test_a_document_waits_for_the_server_as_records_do(
    connect: Connect, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of this publisher were acknowledged, so it waits for `retry_for` and not for `connect_timeout`."""
    failed = threading.Event()
    delay = PublisherBase._asking_delay

    def told(self: PublisherBase, error: SowError, backoff: object) -> float:
        failed.set()
        return delay(self, error, backoff)  # type: ignore[arg-type]  # as it came

    monkeypatch.setattr(PublisherBase, "_asking_delay", told)
    server.start()
    with connect(server.address, connect_timeout=0.3) as client, futures.ThreadPoolExecutor() as threads:
        publisher = client.publisher("nvfix", retry_for=60)
        publisher.publish(b"id=a")
        publisher.flush()
        server.kill9()
        waiting = threads.submit(publisher.publish, {"id": "b", "px": "1=2"})
        assert failed.wait(30)
        server.start()
        waiting.result(60)
        publisher.close()
        assert payloads(client, "nvfix") == [b"id=a", b"id=b;px=1=2;"]


def test_a_publisher_that_is_aborted_takes_no_document(connect: Connect, server: ServerProcess) -> None:
    with connect(server.address, connect_timeout=0.3) as client:
        publisher = client.publisher("nvfix")
        publisher.abort()
        with pytest.raises(SowError):
            publisher.publish({"id": "a"})


def test_the_type_is_told_by_another_address(connect: Connect, server: ServerProcess) -> None:
    server.start()
    with connect(f"127.0.0.1:{free_port()},{server.address}") as client:
        with client.publisher("nvfix") as publisher:
            publisher.publish({"id": "a", "px": "1=2"})
        assert payloads(client, "nvfix") == [b"id=a;px=1=2;"]


def test_a_topic_that_is_made_later_or_anew_gets_documents_of_its_type(connect: Connect, server: ServerProcess) -> None:
    server.start()
    with connect(server.address) as client:
        publisher = client.publisher("later", linger=60)
        publisher.publish({"id": 1}, key="1")  # there is no topic yet
        client.create_topic("later", message_type="msgpack")
        with pytest.raises(PublishFailed, match="PAYLOAD_MALFORMED"):
            publisher.flush()
        publisher.publish({"id": 1}, key="1")
        publisher.flush()
        assert payloads(client, "later") == [b"\x81\xa2id\x01"]
        client.delete_topic("later")
        client.create_topic("later", message_type="json")
        publisher.publish({"id": 2}, key="2")
        with pytest.raises(PublishFailed, match="PAYLOAD_MALFORMED"):
            publisher.flush()
        publisher.publish({"id": 2}, key="2")
        publisher.close()
        assert payloads(client, "later") == [b'{"id":2}']


@pytest.mark.parametrize("settings", [{"message_type": "nvfix"}, {"message_type": "nvfix", "fix_separator": "|"}])
def test_no_document_of_the_old_type_is_stored_in_a_topic_that_was_made_anew(
    connect: Connect, server: ServerProcess, settings: Any
) -> None:
    """Story: a JSON text with an `=` is a field of nvfix, and so is all of `id=1;q=2` with another separator: it was
    stored, and nobody was told. Each way to publish says so once, and encodes by the new type then."""
    server.start()
    old: Any = {"fix_separator": ";"} if "fix_separator" in settings else {}
    document = {"id": "1", "q": "a=b"}
    with connect(server.address) as client, connect(server.address) as other:
        client.create_topic("t", message_type="nvfix" if old else "json", **old)
        publisher = client.publisher("t", linger=60)
        publisher.publish(document, key="1")
        publisher.flush()
        client.publish("t", document, key="1")
        other.delete_topic("t")
        other.create_topic("t", **settings)

        publisher.publish(document, key="1")
        with pytest.raises(PublishFailed, match="made anew"):
            publisher.flush()
        with pytest.raises(InvalidArgument, match="made anew"):
            client.publish("t", document, key="2")
        assert payloads(client, "t") == []

        publisher.publish(document, key="1")
        publisher.close()
        client.publish("t", document, key="2")
        client.publish_many("t", [document, b"id=3"], keys=["3", "4"])
        separator = settings.get("fix_separator", "\x01")
        right = f"id=1{separator}q=a=b{separator}".encode()
        assert payloads(client, "t") == [right, right, right, b"id=3"]


def test_documents_that_wait_keep_the_type_that_they_were_encoded_for(connect: Connect, server: ServerProcess) -> None:
    """What is buffered while the publisher learns of the new type is told as refused, and not sent as the new one."""
    server.start()
    document = {"id": "1", "q": "a=b"}
    with connect(server.address) as client:
        client.create_topic("t")
        refusals: list[Refusal] = []
        publisher = client.publisher("t", linger=60, batch_records=2, on_refusal=refusals.append)
        publisher.publish(document, key="1")
        publisher.flush()
        client.delete_topic("t")
        client.create_topic("t", message_type="nvfix")
        publisher.publish(document, key="2")
        publisher.publish(document, key="3")  # a batch of two: refused, in a thread
        publisher.publish(document, key="4")  # buffered, as JSON or by the new type
        publisher.publish(document, key="5")
        publisher.close()
        assert {one.reason for one in refusals} == {"PAYLOAD_MALFORMED"}
        assert len(refusals) + client.count("t") == 4
        assert all(payload.startswith(b"id=1") for payload in payloads(client, "t"))


def test_bytes_and_text_of_the_program_are_not_compared(connect: Connect, server: ServerProcess) -> None:
    server.start()
    with connect(server.address) as client:
        client.publish("packed", {"id": 1})
        client.publish("packed", b"\x81\xa2id\x02")
        client.publish_many("packed", [b"\x81\xa2id\x03"])
        with client.publisher("packed") as publisher:
            publisher.publish(b"\x81\xa2id\x04")
            publisher.publish({"id": 5})
        assert sorted(payloads(client, "packed")) == [b"\x81\xa2id" + bytes([n]) for n in range(1, 6)]


def test_a_frame_and_a_delete_ask_for_the_type_again(connect: Connect, server: ServerProcess) -> None:
    """Story: after the first refusal a client published by the new type, and its `publish_frame` never did."""
    pandas = pytest.importorskip("pandas")
    server.start()
    frame = pandas.DataFrame([{"id": "1", "q": "a=b"}])
    with connect(server.address) as client, connect(server.address) as other:

        def make_anew(message_type: Any) -> None:
            other.delete_topic("t")
            other.create_topic("t", key=["/id"], message_type=message_type)

        other.create_topic("t", key=["/id"])
        client.publish("t", {"id": "1"})
        make_anew("nvfix")
        with pytest.raises(PublishFailed, match="made anew"):
            client.publish_frame("t", frame)
        assert client.publish_frame("t", frame) == 1
        assert payloads(client, "t") == [b"id=1\x01q=a=b\x01"]

        make_anew("msgpack")
        other.publish("t", {"id": "1"})
        with pytest.raises(InvalidArgument, match="PAYLOAD_MALFORMED"):
            client.sow_delete("t", data={"id": "1"})
        assert client.sow_delete("t", data={"id": "1"}).deleted == 1


def test_bytes_of_any_kind_are_not_compared(connect: Connect, server: ServerProcess) -> None:
    server.start()
    with connect(server.address) as client, connect(server.address) as other:
        for kind in (bytes, bytearray, memoryview):
            topic = kind.__name__
            client.create_topic(topic)
            client.publish(topic, {"id": 1}, key="1")
            other.delete_topic(topic)
            other.create_topic(topic, message_type="msgpack")
            client.publish(topic, kind(b"\x81\xa2id\x02"), key="2")
            client.publish_many(topic, [kind(b"\x81\xa2id\x03")], keys=["3"])
            assert client.count(topic) == 2, kind


@pytest.mark.parametrize("options", [[], ["--strict"], ["--if-absent"]], ids=" ".join)
def test_the_command_stores_no_row_as_something_else(server: ServerProcess, options: list[str]) -> None:
    """Story: rows of a pipe were JSON, the topic was made anew as nvfix, and the command counted them as published."""
    server.start()
    command = [sys.executable, "-m", "sow_cli", "--server", server.address, "publish", "t", "--as", "csv"]
    command += ["--key-field", "k", "--batch", "1", *options]
    with (
        server.client() as client,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={"PYTHONPATH": PATHS}) as running,
    ):
        assert running.stdin is not None
        client.create_topic("t")
        running.stdin.write(b"k,q\n1,a=b\n")
        running.stdin.flush()
        until(lambda: client.count("t") == 1, 30, "the first row")
        client.delete_topic("t")
        client.create_topic("t", message_type="nvfix")
        _, said = running.communicate(b"2,a=b\n")
        assert running.returncode == 1
        assert b"PAYLOAD_MALFORMED" in said
        assert b"was encoded as 'json'" in said
        assert client.count("t") == 0
