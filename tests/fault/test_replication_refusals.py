"""Links that are refused, and impossible messages (R1, R11, R12)."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest

from sow.v1 import replication_pb2, replication_pb2_grpc
from sow_client import SowError
from sow_replication.wire import opened, reason_name, refused_by, sealed
from tests.fault.replicating import TOPICS, pair
from tests.support.servers.cluster import TOKEN, WAIT_SECONDS, Cluster, Instance
from tests.support.servers.proxy import Proxy
from tests.support.servers.server import until

__all__ = ["pair"]  # a fixture


CLUSTERS: Final = {"a": "blue", "b": "green"}


def impostor(cluster: Cluster, name: str, **changed: str) -> Instance:
    """An instance, not yet started, that is called `name` and sends to b of the cluster."""
    other = Instance(f"impostor {name}", cluster.folder / "impostor")
    token = changed.get("token", TOKEN)
    other.server.configure(
        f'[server]\ninstance = "{name}"\n[replication]\ntoken = "{token}"\n'
        f'[[replication.peers]]\nname = "{changed.get("peer", "b")}"\n'
        f'address = "{changed.get("address", cluster["b"].server.address)}"\n' + TOPICS
    )
    return other


def refused(instance: Instance, peer: str) -> tuple[str, str]:
    """Waits until an instance sees that it is refused: the reason, and the state."""
    until(lambda: instance.out(peer).state == "refused", WAIT_SECONDS, f"{instance.name} to be refused by {peer}")
    link = instance.out(peer)
    return link.last_error_reason, link.state


@contextmanager
def run(instance: Instance) -> Iterator[Instance]:
    """Runs an instance that is none of a cluster's."""
    try:
        instance.server.start()
        yield instance
    finally:
        instance.client.close()
        instance.server.kill9()


def assert_goes_on(cluster: Cluster) -> None:
    """The links of a cluster work."""
    for sender, receiver in cluster.links:
        version = cluster[sender].client.publish("kept", {"n": 1}, key=sender).version

        def arrived(receiver: str = receiver, sender: str = sender, version: int = version) -> bool:
            record = cluster[receiver].client.get("kept", sender)
            return record is not None and record.version == version

        until(arrived, WAIT_SECONDS, f"a change of {sender} to be at {receiver}")


def test_a_second_instance_of_a_name_is_refused_while_the_first_one_goes_on(pair: Cluster) -> None:
    with run(impostor(pair, "a")) as other:
        other.client.publish("kept", {"n": 1}, key="impostor's")
        assert refused(other, "b") == ("INSTANCE_NAME_CLASH", "refused")
        seen = pair.await_in("b", "a", lambda link: link.last_error_reason == "INSTANCE_NAME_CLASH")
        assert seen.state == "connected", "the link of the first one stands"
        assert_goes_on(pair)
        assert pair["b"].client.get("kept", "impostor's") is None


def test_a_peer_of_the_same_name_as_the_receiver_is_refused(pair: Cluster) -> None:
    with run(impostor(pair, "b", peer="a")) as other:
        assert refused(other, "a") == ("INSTANCE_NAME_CLASH", "refused")
        assert_goes_on(pair)


def test_an_instance_whose_peer_is_itself_is_refused(pair: Cluster) -> None:
    """Its own address is refused at the start; by way of another one it dials itself."""
    other = impostor(pair, "c", peer="d")
    with Proxy(other.server.address) as proxy:
        other.server.configure(other.server.config.read_text().replace(pair["b"].server.address, proxy.address))
        with run(other):
            assert refused(other, "d") == ("PEER_IS_SELF", "refused")


def test_an_instance_of_another_cluster_is_refused_for_links_and_comparisons(tmp_path: Path) -> None:
    """R11. An instance without a cluster is accepted."""
    with Cluster(tmp_path, "a", "b", topics=TOPICS, start=False) as pair:
        for name in "ab":
            text = pair[name].server.config.read_text()
            pair[name].server.configure(text.replace(f'"{name}"\n', f'"{name}"\ncluster = "{CLUSTERS[name]}"\n', 1))
        pair.start()
        assert refused(pair["a"], "b") == ("PEER_OTHER_CLUSTER", "refused")
        message = pair["a"].out("b").last_error
        assert "blue" in message
        assert "green" in message
        with pytest.raises(SowError) as caught:
            pair["a"].client.verify_replication("b", ["kept"])
        assert caught.value.reason == "PEER_OTHER_CLUSTER"


def test_a_wrong_token_and_a_stranger_are_refused(pair: Cluster) -> None:
    with run(impostor(pair, "a", token="guessed")) as other:
        assert refused(other, "b") == ("PEER_UNAUTHENTICATED", "refused")
    with run(impostor(pair, "stranger")) as other:
        assert refused(other, "b") == ("PEER_NOT_ACCEPTED", "refused")
    assert_goes_on(pair)


def test_topics_that_are_missing_or_differ_leave_the_link_and_come_once_they_are_right(tmp_path: Path) -> None:
    """R12."""
    more = TOPICS + '[topics.only_here]\n[topics.keyed]\nkey = ["/id"]\n'
    with Cluster(tmp_path, "a", "b", topics=TOPICS, start=False) as cluster:
        cluster.configure("a", topics=more)
        cluster.configure("b", topics=TOPICS + '[topics.keyed]\nkey = ["/other"]\n')
        cluster.start()
        a, b = cluster["a"], cluster["b"]
        a.client.publish("only_here", {"n": 1}, key="1")
        a.client.publish("keyed", {"id": 1})
        link = cluster.await_out("a", "b", lambda link: link.state == "streaming" and len(link.topics) == 2)
        assert {(topic.topic, topic.state) for topic in link.topics} == {("only_here", "refused"), ("keyed", "refused")}
        assert "/other" in next(topic.message for topic in link.topics if topic.topic == "keyed")
        seen = cluster.await_in("b", "a", lambda link: link.state == "connected")
        assert {topic.topic for topic in seen.topics} == {"only_here", "keyed"}
        assert_goes_on(cluster)

        b.client.create_topic("only_here")
        cluster.await_out("a", "b", lambda link: [topic.topic for topic in link.topics] == ["keyed"])
        until(lambda: b.client.get("only_here", "1"), WAIT_SECONDS, "the topic to be seeded")
        assert b.server.terminate() == 0
        cluster.configure("b", topics=more)
        b.server.start()
        cluster.await_equal(topics=("only_here", "keyed", "kept"))


class Sender:
    """A sender by hand: messages as they are, and how the link ends."""

    def __init__(self, instance: Instance, *messages: replication_pb2.ReplicateRequest) -> None:
        self.answers: list[replication_pb2.ReplicateResponse] = []
        with grpc.insecure_channel(instance.server.address) as channel:
            call = replication_pb2_grpc.ReplicationServiceStub(channel).Replicate(
                iter([sealed(message, number) for number, message in enumerate(messages, 1)]),
                metadata=(("authorization", f"Bearer {TOKEN}"),),
                timeout=20,
            )
            try:
                for number, response in enumerate(call, 1):
                    self.answers.append(opened(replication_pb2.ReplicateResponse, response, number))
            except grpc.RpcError as error:
                self.reason = reason_name(refused_by(error, instance.server.address).reason)  # type: ignore[arg-type]  # has the fields that it reads


def hello(name: str = "a", **changed: int) -> replication_pb2.ReplicateRequest:
    """The first message of an instance that nobody has met."""
    return replication_pb2.ReplicateRequest(
        hello=replication_pb2.Hello(
            protocol=changed.get("protocol", 1),
            instance=replication_pb2.Instance(name=name, id="0123456789abcdef", epoch="e"),
            topics_pattern=".*",
            topics=[replication_pb2.ReplicatedTopic(name="kept", message_type="json", separator=b"\x01")],
            head_sequence=100,
            now_micros=time.time_ns() // 1000,
        )
    )


def changes(
    chunk: bytes, *, crc32: int | None = None, after: int = 100, upto: int = 101
) -> replication_pb2.ReplicateRequest:
    """Changes of the topic `kept`."""
    return replication_pb2.ReplicateRequest(
        changes=replication_pb2.Changes(
            after=after,
            upto=upto,
            chunks=[replication_pb2.Packed(topic="kept", chunk=chunk)],
            origins=["a"],
            crc32=zlib.crc32(chunk) if crc32 is None else crc32,
        )
    )


def seed_part(chunk: bytes) -> replication_pb2.ReplicateRequest:
    """A seed of the topic `kept`."""
    return replication_pb2.ReplicateRequest(
        seed=replication_pb2.Seed(
            topic="kept", first=True, last=True, chunk=chunk, crc32=zlib.crc32(chunk), origins=["a"]
        )
    )


BAD: Final[dict[str, tuple[str, list[replication_pb2.ReplicateRequest]]]] = {
    "protocol": ("PROTOCOL_MISMATCH", [hello(protocol=2)]),
    "no hello": ("PROTOCOL_MISMATCH", [changes(b"")]),
    "two hellos": ("PROTOCOL_MISMATCH", [hello(), hello()]),
    "checksum": ("BATCH_DAMAGED", [hello(), changes(b"x" * 100, crc32=1)]),
    "no chunk": ("BATCH_DAMAGED", [hello(), changes(b"x" * 100)]),
    "empty chunk": ("BATCH_DAMAGED", [hello(), changes(b"")]),
    "zeros": ("BATCH_DAMAGED", [hello(), changes(bytes(100))]),
    "a gap": ("BATCH_DAMAGED", [hello(), changes(b"", after=105, upto=106)]),
    "no seed": ("BATCH_DAMAGED", [hello(), seed_part(b"x" * 100)]),
}


def test_impossible_messages_are_refused_with_a_reason_and_not_applied(tmp_path: Path) -> None:
    """Each in a link of its own, beside a link that goes on."""
    with Cluster(tmp_path, "b", "c", topics=TOPICS, links=[("c", "b")], start=False) as cluster:
        b = cluster["b"]
        cluster.configure("b", accepted=("a",))
        cluster.start()
        cluster.await_streaming()
        b.client.publish("kept", {"n": 1}, key="own")
        before = b.state("kept")
        for name, (reason, messages) in BAD.items():
            sender = Sender(b, *messages)
            assert sender.reason == reason, name
            if sender.answers:
                assert sender.answers[0].WhichOneof("message") == "welcome"
                seen = cluster.await_in("b", "a", lambda link: link.state == "away")
                assert seen.last_error_reason == reason, name
            assert b.state("kept") == before, name
        assert_goes_on(cluster)
        b.server.restart()
        assert_goes_on(cluster)
        assert not cluster.faults()
