"""A peer that lies about publishers (rules F11 and F12): what it says counts for its own topics alone.

The peer ldn may send the topic `shared`. The publishers of ops write `private`, and now and then `shared`, so F11 tells
ldn their ids, epochs and tokens.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
import pytest
from google.protobuf.message import Message

from sow.v1 import replication_pb2, replication_pb2_grpc, sow_pb2, types_pb2
from sow_client import Client, OpenedPublisher
from tests.support.oracles.access import GUARDED, client_of, grant, identity, peer, write_access, write_private
from tests.support.servers.server import ServerProcess, until

SECONDS: Final = 60.0
EPOCHS: Final = (2, 1000, 2**32, 2**33, 2**62, 2**63 - 1)
ACCESS: Final = identity("ops", "ops") + grant("ops", "private|shared", "read publish")
TOPICS: Final = ("shared", "private")
_numbers: Final = itertools.count(1)


def server_of(folder: Path, name: str, peers: str, more: str) -> ServerProcess:
    write_access(folder, ACCESS + peers)
    made = ServerProcess(folder, GUARDED.replace("[server]", f'[server]\ninstance = "{name}"') + more)
    with client_of(made, "root") as root:
        for topic in TOPICS:
            root.create_topic(topic, key=["/id"])
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("nyc")
    with server_of(folder, "nyc", peer("ldn", "shared"), '[replication]\naccept = ["ldn"]\n') as made:
        yield made


def sealed(message: Message, number: int) -> replication_pb2.Sealed:
    data = message.SerializeToString()
    return replication_pb2.Sealed(message=data, crc32=zlib.crc32(data, number), number=number)


def mark(publisher_id: str, opened: OpenedPublisher, **lies: Any) -> replication_pb2.PublisherMark:
    told: dict[str, Any] = {"epoch": opened.epoch, "token": opened.token, "topics": ["shared"]} | lies
    return replication_pb2.PublisherMark(publisher_id=f"ops/{publisher_id}", first=1, last=1000, **told)


def tell(server: ServerProcess, marks: Sequence[replication_pb2.PublisherMark], *, each: bool = False) -> None:
    """The peer says this over a link of its own, in one message or one after the other, and awaits that it is taken."""
    instance = replication_pb2.Instance(name="ldn", id="0123456789ab", epoch=f"epoch-{next(_numbers)}")
    shared = replication_pb2.ReplicatedTopic(name="shared", key=["/id"], message_type="json", separator=b"\x01")
    messages = [
        replication_pb2.ReplicateRequest(
            hello=replication_pb2.Hello(
                protocol=1,
                instance=instance,
                topics_pattern="shared",
                topics=[shared],
                now_micros=time.time_ns() // 1_000,
            )
        )
    ]
    parts = [[one] for one in marks] if each else [list(marks)]
    for number, part in enumerate(parts):
        changes = replication_pb2.Changes(after=number, upto=number + 1, publishers=part)
        messages.append(replication_pb2.ReplicateRequest(changes=changes))
    requests: SimpleQueue[replication_pb2.Sealed | None] = SimpleQueue()
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = replication_pb2_grpc.ReplicationServiceStub(channel)
        call = stub.Replicate(iter(requests.get, None), timeout=SECONDS, metadata=(("authorization", "Bearer ldn"),))
        requests.put(sealed(messages.pop(0), 1))
        for response in call:
            heard = replication_pb2.ReplicateResponse.FromString(response.message)
            if heard.HasField("welcome"):
                for number, message in enumerate(messages, 2):
                    requests.put(sealed(message, number))
            if heard.acknowledged.sequence == len(parts):
                break
        requests.put(None)


@dataclass
class Program:
    """The publisher, one request at a time."""

    client: Client
    publisher_id: str
    opened: OpenedPublisher
    sequence: int = 0
    sent: list[str] = field(default_factory=list)

    def publish(self, topic: str) -> sow_pb2.PublishResponse:
        """Publishes a new record."""
        self.sequence += 1
        key = f"{self.publisher_id}.{self.sequence}"
        position = types_pb2.PublisherPosition(
            publisher_id=self.publisher_id,
            publisher_epoch=self.opened.epoch,
            publisher_token=self.opened.token,
            first_sequence=self.sequence,
        )
        request = sow_pb2.PublishRequest(topic=topic, publisher=position, durability=types_pb2.DURABILITY_FSYNC)
        request.records.add(payload=b'{"id": "%s"}' % key.encode())
        response: sow_pb2.PublishResponse = self.client._sow.Publish(request)
        self.sent.append(key)
        return response

    def assert_applied(self, topic: str) -> None:
        """A new record is applied, and is there."""
        response = self.publish(topic)
        assert [(result.duplicate, result.HasField("refusal")) for result in response.results] == [(False, False)]
        assert self.client.get(topic, self.sent[-1]) is not None


def program(client: Client) -> Program:
    publisher_id = f"p{next(_numbers)}"
    return Program(client, publisher_id, client.open_publisher(publisher_id))


def test_a_new_record_of_another_topic_is_no_duplicate(server: ServerProcess) -> None:
    """F11. It was answered as a duplicate, on disk, and was not there."""
    with client_of(server, "ops") as ops:
        p, unknown_here = program(ops), program(ops)
        p.assert_applied("private")
        p.assert_applied("shared")
        tell(server, [mark(one.publisher_id, one.opened) for one in (p, unknown_here)])
        for one in (p, unknown_here):
            one.assert_applied("private")
        # Of its own topic the peer is believed.
        for one in (p, unknown_here):
            assert one.publish("shared").results[0].duplicate
            one.assert_applied("private")
        server.kill9()
        server.start()
        for one in (p, unknown_here):
            one.assert_applied("private")


@pytest.mark.parametrize("token", [1, 2**63 - 1])
def test_no_epoch_from_a_peer_fences_a_publisher_of_other_topics(server: ServerProcess, token: int) -> None:
    """F12. One of 2^62 fenced it, and one of 2^63 - 1 used its id up."""
    with client_of(server, "ops") as ops:
        p, coming = program(ops), program(ops)
        p.assert_applied("private")
        p.assert_applied("shared")
        lies = [mark(one.publisher_id, one.opened, epoch=epoch, token=token) for one in (p, coming) for epoch in EPOCHS]
        tell(server, lies, each=True)
        p.assert_applied("private")
        p.assert_applied("shared")
        coming.assert_applied("private")  # nothing was known of its topics when the peer told
        coming.assert_applied("shared")
        server.kill9()
        server.start()
        p.assert_applied("private")
        again = ops.open_publisher(p.publisher_id)
        assert again.epoch == p.opened.epoch + 1
        assert ops._sow.GetPublisher(sow_pb2.GetPublisherRequest(publisher_id=p.publisher_id)).publisher_epoch == 2
        tell(server, lies)
        assert ops.open_publisher(p.publisher_id).epoch == again.epoch + 1


def test_an_id_is_not_used_up_in_one_step_or_many(server: ServerProcess) -> None:
    """F12. Of a publisher that writes its topic alone the peer is believed, up to a bound."""
    with client_of(server, "ops") as ops:
        p = program(ops)
        p.assert_applied("shared")
        given = p.opened.epoch
        for _ in range(3):
            steps = (*EPOCHS, *[given + number * 2**31 for number in range(60)], given + 2**32)
            tell(server, [mark(p.publisher_id, p.opened, epoch=epoch) for epoch in steps], each=True)
            with pytest.raises(grpc.RpcError, match="is fenced by epoch"):
                p.publish("shared")
            p = Program(ops, p.publisher_id, ops.open_publisher(p.publisher_id))
            assert p.opened.epoch == given + 2**32 + 1
            given = p.opened.epoch
            p.assert_applied("shared")


def test_a_lie_reaches_no_further_at_the_end_of_a_chain(tmp_path: Path) -> None:
    """F11, F12. The instance par trusts nyc with every topic, and nyc passes on what ldn says of `shared`."""
    accepts = '[replication]\naccept = ["nyc"]\n'
    with server_of(tmp_path / "par", "par", peer("nyc"), accepts) as par:
        write_private(tmp_path / "token", "nyc\n")
        knows = f"""[replication]
accept = ["ldn"]
[[replication.peers]]
name = "par"
address = "{par.address}"
token_file = "{tmp_path / "token"}"
"""
        with (
            server_of(tmp_path / "nyc", "nyc", peer("ldn", "shared") + peer("par"), knows) as nyc,
            client_of(nyc, "ops") as ops,
            client_of(par, "ops") as elsewhere,
        ):
            p, here = program(ops), program(elsewhere)
            here.assert_applied("private")
            for topic in ("private", "shared", "private"):
                p.assert_applied(topic)

            def known() -> bool:
                asked = sow_pb2.GetPublisherRequest(publisher_id=p.publisher_id)
                return bool(elsewhere._sow.GetPublisher(asked).highest_sequence == p.sequence)

            # First perhaps by rows, and then by changes.
            for topic in ("private", "shared"):
                until(known, SECONDS, "the publisher to be known at par")
                p.assert_applied(topic)
            until(known, SECONDS, "the publisher to be known at par")
            lies = [
                mark(one.publisher_id, one.opened, epoch=epoch)
                for one in (p, here)
                for epoch in (one.opened.epoch, *EPOCHS)
            ]
            tell(nyc, lies, each=True)
            # What is sent behind them arrives after them.
            p.assert_applied("private")
            until(lambda: elsewhere.get("private", p.sent[-1]) is not None, SECONDS, "the record behind them")
            here.assert_applied("private")
            # The publisher goes on there: what had arrived is known, and a new record is not.
            moved = Program(elsewhere, p.publisher_id, p.opened, p.sequence - 1)
            assert moved.publish("private").results[0].duplicate
            moved.assert_applied("private")
