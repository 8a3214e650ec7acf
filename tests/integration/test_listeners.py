"""Listeners of a real server (rules N1, N4), and clients that keep to no bound."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from sow.v1 import replication_pb2, replication_pb2_grpc, sow_pb2, sow_pb2_grpc
from sow_client import Client, Tls, Unavailable
from tests.support.servers.certificates import Authority
from tests.support.servers.http2 import RawClient
from tests.support.servers.server import DYNAMIC, ServerProcess, free_port, health, until

STREAMS_MAX: Final = 256
AT_ONCE: Final = 10.0
"""Seconds in which a busy machine answers whom it answers at once."""
SUBSCRIBE: Final = "/sow.v1.SowService/Subscribe"


def test_every_listener_serves_the_same_data_in_its_own_way(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    server_files, client_files = authority.issue("server"), authority.issue("client")
    plain, mutual, metrics = free_port(), free_port(), free_port()
    config = (
        "[server]\ndynamic_topics = true\n[replication]\naccept = ['other']\n"
        f"[metrics]\nlisten = '127.0.0.1:{metrics}'\n"
        f"[[server.listeners]]\nlisten = '127.0.0.1:{plain}'\nlinks = false\n"
        f"[[server.listeners]]\nlisten = '127.0.0.1:{mutual}'\nclient_ca = 'ca.pem'\n"
        f"certificate = '{server_files.certificate}'\nkey = '{server_files.key}'\n"
    )
    with ServerProcess(tmp_path, config, port=plain) as server:
        (ready,) = server.events("ready")
        assert ready["address"] == f"127.0.0.1:{plain}"
        assert ready["addresses"] == [f"127.0.0.1:{plain}", f"127.0.0.1:{mutual}"]
        shown = Tls(ca=authority.file, certificate=client_files.certificate, key=client_files.key)
        with server.client() as client:
            client.publish("orders", {"n": 1}, key="1")
        with Client(f"127.0.0.1:{mutual}", tls=shown) as client:
            assert client.get("orders", "1") is not None
        bare = Tls(ca=authority.file)
        with Client(f"127.0.0.1:{mutual}", tls=bare, connect_timeout=1.5) as client, pytest.raises(Unavailable):
            client.status()
        assert _links_answer(f"127.0.0.1:{plain}", None) is grpc.StatusCode.UNIMPLEMENTED
        assert _links_answer(f"127.0.0.1:{mutual}", shown) is not grpc.StatusCode.UNIMPLEMENTED
        assert not _reflects(f"127.0.0.1:{plain}"), "a listener asks clients who they are"
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=AT_ONCE) as response:
            expiry = f'{{file="{server_files.certificate}",listener="127.0.0.1:{mutual}"}}'
            assert f"sow_certificate_expiry_timestamp_seconds{expiry} " in response.read().decode()
        assert server.terminate() == 0
        assert not server.faults()


def _links_answer(address: str, tls: Tls | None) -> grpc.StatusCode:
    with grpc.insecure_channel(address) if tls is None else grpc.secure_channel(address, tls.credentials()) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            replication_pb2_grpc.ReplicationServiceStub(channel).Checksum(replication_pb2.Sealed(), timeout=AT_ONCE)
    code: grpc.StatusCode = refused.value.code()
    return code


def _reflects(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            return bool(ProtoReflectionDescriptorDatabase(channel).get_services())
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            raise


# --- one connection does not lock out the rest -----------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, DYNAMIC) as made, made.client() as client:
        client.publish("orders", {"n": 1}, key="1")
        yield made


def _others_are_served(server: ServerProcess) -> None:
    assert health(server.address) == "SERVING"
    with server.client(timeout=AT_ONCE) as client:
        assert client.get("orders", "1") is not None


def test_idle_streams_of_one_connection_do_not_lock_out_others(server: ServerProcess) -> None:
    """Story: 2,000 idle streams on one connection took all of `max_concurrent_rpcs`, and Get and health failed."""
    request = sow_pb2.SubscribeRequest(topic="orders")
    with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        grpc.channel_ready_future(channel).result(AT_ONCE)  # from here on, calls are sent in their order
        stub = sow_pb2_grpc.SowServiceStub(channel)
        calls = [stub.Subscribe(request) for _ in range(STREAMS_MAX + 50)]
        for call in calls[:STREAMS_MAX]:
            next(call)
        _others_are_served(server)
        calls[0].cancel()
        next(calls[STREAMS_MAX])  # it waited in the client for another one to end
        for call in calls:
            call.cancel()
    assert not server.faults()


@pytest.mark.parametrize(
    ("allowed", "answer"), [(False, grpc.StatusCode.UNIMPLEMENTED), (True, grpc.StatusCode.NOT_FOUND)]
)
def test_compressed_requests_are_refused_unless_the_server_allows_them(
    tmp_path: Path, allowed: bool, answer: grpc.StatusCode
) -> None:
    """A small message could become 20 MiB in memory before anything counts its bytes."""
    request = sow_pb2.GetRequest(topic="orders", keys=["a" * 10_000])
    with (
        ServerProcess(tmp_path, DYNAMIC + f"compression = {str(allowed).lower()}\n") as server,
        grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        sow_pb2_grpc.SowServiceStub(channel).Get(request, timeout=AT_ONCE)
    assert refused.value.code() is answer


def test_clients_of_one_process_have_a_bound_each(tmp_path: Path) -> None:
    """Story: gRPC shares one connection among all channels of a process, so one client's subscriptions, as many as a
    connection may have, let the calls of another wait without end."""
    with (
        ServerProcess(tmp_path, DYNAMIC + "streams_per_connection_max = 3\n") as server,
        server.client() as first,
        server.client(timeout=AT_ONCE) as second,
        ExitStack() as opened,
    ):
        second.publish("orders", {"n": 1}, key="1")
        for _ in range(3):
            assert next(opened.enter_context(first.sow_and_subscribe("orders"))).op == "sow"
        assert second.get("orders", "1") is not None


def test_streams_beyond_the_bound_are_refused_before_they_are_calls(server: ServerProcess) -> None:
    """A client that ignores the bound gets no further than one that keeps to it."""
    with RawClient(server.address) as client:
        client.open(SUBSCRIBE, sow_pb2.SubscribeRequest(topic="orders").SerializeToString(), 2_100)
        until(lambda: client.refused == 2_100 - STREAMS_MAX, 20, "the streams beyond the bound to be refused")
        _others_are_served(server)
        with server.client() as other:
            assert other.status().state == "serving"
    assert server.alive
    assert not server.faults()


def test_streams_that_are_opened_and_reset_without_end_are_refused(server: ServerProcess) -> None:
    """A reset ends a stream for the count of HTTP/2, but not its call, which costs the server a task of its own."""
    count = 20_000
    with RawClient(server.address) as client:
        client.open(SUBSCRIBE, sow_pb2.SubscribeRequest(topic="orders").SerializeToString(), count, reset=True)
        _others_are_served(server)
        assert client.refused > count / 2
    _others_are_served(server)
