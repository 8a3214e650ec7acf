"""Invalid and hostile requests at a server with an access file, by every kind of caller: only named errors come back,
nothing of what is hidden, and the server lives on."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator
from typing import Final

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from sow.v1 import replication_pb2
from sow_client import Client
from sow_replication.wire import sealed
from tests.fault.test_fuzz import KNOWN, METHODS, OPTIONS, filled, messages, rounds
from tests.support.oracles.access import GUARDED, client_of, grant, identity, peer, write_access
from tests.support.oracles.access_cases import ORDERS, SECRET
from tests.support.oracles.methods import Ended, attempt, opened, reason_of_call
from tests.support.servers.open_streams import Sending
from tests.support.servers.server import ServerProcess
from tests.support.stores.bad_rows import Bad, packed

CANARY: Final = "canary-4711"
"""Stands in everything that the callers may not see: topics, records, fields, durables."""
PEER: Final = "ldn"
CALLERS: Final = ("", "guessed", "nobody", "desk", "watcher", PEER)
ACCESS: Final = (
    identity("nobody")
    + identity("watcher", "watcher")
    + '[[roles.watcher.grants]]\nallow = ["observe"]\n'
    + identity("desk", "desk")
    + grant(
        "desk",
        "given|orders",
        "read consume publish delete create load topic-admin",
        'rows = "/region = \'eu\'"\nhide = ["/secret"]',
    )
    + peer(PEER, "orders")
)
CONFIG: Final = GUARDED.replace("[server]", '[server]\ninstance = "sow"\nreflection = true\ndynamic_topics = true') + (
    f'[replication]\naccept = ["{PEER}"]\n'
)
INSTANCE: Final = replication_pb2.Instance(name=PEER, id="id", epoch="epoch")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    write_access(folder, ACCESS)
    with ServerProcess(folder, CONFIG, start=False) as made:
        made.module = "tests.support.servers.clocked_server"
        made.start()
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture(scope="module")
def root(server: ServerProcess) -> Iterator[Client]:
    with client_of(server, "root") as client:
        client.create_topic("given")
        for name in ("orders", "secret"):
            client.create_topic(name, key=["/id"], expiration="enabled")
        client.publish("given", {"region": "us", "text": CANARY}, key=CANARY)
        client.publish("orders", {"id": CANARY, "region": "us"})
        client.publish("orders", {"id": "eu", "region": "eu", "secret": CANARY})
        client.publish("secret", {"id": CANARY})
        yield client


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address, options=OPTIONS) as made:
        yield made


def sent(channel: grpc.Channel, method: MethodDescriptor, requests: list[bytes], caller: str) -> Ended:
    """Sends raw requests; whatever comes back has a known reason, and nothing that is hidden."""
    ended = attempt(channel, method, requests, token=caller, timeout=3)
    assert ended.code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (method.full_name, caller, ended)
    assert not ended.reason or ended.reason in KNOWN
    if caller in ("", "guessed") and "Health" not in method.full_name:
        if method.name == "GetPlacement":  # cells ask each other without a credential (rule C8), and this one has none
            assert ended.reason in ("UNAUTHENTICATED", "INVALID_ARGUMENT", ""), ended
            assert not any(answer.ByteSize() for answer in ended.answers), ended
        else:
            assert ended.reason == "UNAUTHENTICATED", method.full_name
    assert CANARY not in ended.text
    assert not any(CANARY.encode() in answer.SerializeToString() for answer in ended.answers), (
        method.full_name,
        caller,
    )
    return ended


def assert_well(server: ServerProcess, root: Client) -> None:
    assert server.alive
    assert root.status().state == "serving"
    for topic, key in (("orders", CANARY), ("secret", CANARY), ("given", CANARY)):
        assert root.get(topic, key) is not None, f"{topic} has what nobody but root may change"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_random_bytes_of_every_caller_are_refused_by_name(
    server: ServerProcess, root: Client, channel: grpc.Channel, method: MethodDescriptor, seed: int
) -> None:
    draw = random.Random(seed)
    whole = filled(method.input_type, draw).SerializeToString()
    for caller in CALLERS:
        for _ in range(rounds(2)):
            sent(channel, method, [draw.randbytes(draw.choice((0, 1, 7, 50, 1000))) for _ in range(2)], caller)
            at = draw.randrange(len(whole)) if whole else 0
            damaged = bytes((*whole[:at], draw.randrange(256), *whole[at + 1 :]))
            sent(channel, method, [draw.choice((whole, whole[:at], damaged))], caller)
    assert_well(server, root)


# --- peers -----------------------------------------------------------------------------------------------------------


def method_named(name: str) -> MethodDescriptor:
    (found,) = [method for method in METHODS if method.name == name]
    return found


class Link:
    """A link of the peer that was welcomed, with all topics."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._sending = Sending()
        requests = (message.SerializeToString() for message in self._sending)
        self._call = opened(channel, method_named("Replicate"), requests, token=PEER, timeout=5)
        hello = replication_pb2.Hello(protocol=1, instance=INSTANCE, topics_pattern=".*", topics=[ORDERS, SECRET])
        self.send(replication_pb2.ReplicateRequest(hello=hello))
        self.cursor = self.answer().welcome.cursor

    def send(self, request: Message) -> None:
        """Sends a message."""
        self._sending.send(sealed(request))

    def answer(self) -> replication_pb2.ReplicateResponse:
        """The next answer."""
        return replication_pb2.ReplicateResponse.FromString(next(self._call).message)

    def acknowledged(self, sequence: int) -> None:
        """Awaits the acknowledgement of a sequence."""
        while self.answer().acknowledged.sequence != sequence:
            pass

    def reason(self) -> str:
        """Ends its side, and returns the reason for which the link has ended."""
        self._sending.end()
        with pytest.raises(grpc.RpcError):
            for _ in self._call:
                pass
        assert self._call.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
        return reason_of_call(self._call)


def test_messages_of_a_peer_of_any_content_end_its_link_by_name(
    server: ServerProcess, root: Client, channel: grpc.Channel
) -> None:
    @settings(max_examples=rounds(10))
    @given(st.lists(messages(replication_pb2.ReplicateRequest.DESCRIPTOR), min_size=1, max_size=3))
    def send(requests: list[Message]) -> None:
        link = Link(channel)
        for request in requests:
            link.send(request)
        reason = link.reason()
        assert not reason or reason in KNOWN

    send()
    assert_well(server, root)


@pytest.mark.parametrize("name", ["Checksum", "ListVersions", "FetchRows", "MergeRows"])
def test_requests_of_a_peer_of_any_content_are_refused_by_name(
    server: ServerProcess, root: Client, channel: grpc.Channel, name: str
) -> None:
    kind = replication_pb2.DESCRIPTOR.message_types_by_name[f"{name}Request"]

    @settings(max_examples=rounds(10))
    @given(messages(kind), st.booleans())
    def send(request: Message, itself: bool) -> None:
        if itself:
            request.instance.CopyFrom(INSTANCE)  # type: ignore[attr-defined]  # every one of them has an instance
        sent(channel, method_named(name), [sealed(request).SerializeToString()], PEER)

    send()
    assert_well(server, root)


def test_rows_for_a_topic_that_a_peer_may_not_send_reach_nothing(
    server: ServerProcess, root: Client, channel: grpc.Channel
) -> None:
    """By each way that rows take: a change, a seed, a repair."""
    version = time.time_ns() // 1000 + 1_000_000  # greater than those of the server, which takes it
    chunk = packed([Bad(key=CANARY.encode(), payload=b'{"id":"%s","by":"peer"}' % CANARY.encode(), version=version)])
    crc, origins = zlib.crc32(chunk), [PEER]
    link = Link(channel)
    changes = replication_pb2.Changes(
        after=link.cursor,
        upto=link.cursor + 1,
        chunks=[replication_pb2.Packed(topic="secret", chunk=chunk)],
        origins=origins,
        crc32=crc,
    )
    link.send(replication_pb2.ReplicateRequest(changes=changes))
    link.acknowledged(link.cursor + 1)
    seed = replication_pb2.Seed(topic="secret", first=True, last=True, chunk=chunk, origins=origins, crc32=crc)
    link.send(replication_pb2.ReplicateRequest(seed=seed))
    assert link.reason() == "PROTOCOL_MISMATCH"
    merge = replication_pb2.MergeRowsRequest(instance=INSTANCE, topic=SECRET, chunk=chunk, origins=origins, crc32=crc)
    assert (
        sent(channel, method_named("MergeRows"), [sealed(merge).SerializeToString()], PEER).reason
        == "PERMISSION_DENIED"
    )
    found = root.get("secret", CANARY)
    assert found is not None
    assert b"peer" not in found.payload
