"""Clients that use up a server, with a credential and without (rules N4, N5). `test_listeners` has one connection."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import Client
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.http2 import RawClient
from tests.support.servers.server import ServerProcess, health, until

MIB: Final = 2**20
GET: Final = "/sow.v1.SowService/Get"
WATCH: Final = "/grpc.health.v1.Health/Watch"
OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
SECONDS: Final = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    write_access(tmp_path, identity("desk", "desk") + grant("desk", "orders", "read publish"))
    config = GUARDED.replace("[server]\n", "[server]\nmax_concurrent_rpcs = 300\n")
    with ServerProcess(tmp_path, config) as made:
        with client_of(made, "root") as root:
            root.create_topic("orders", key=["/id"])
        yield made
        assert not made.faults()


def assert_serves(server: ServerProcess) -> None:
    assert health(server.address) == "SERVING"
    with Client(server.address, token="desk", timeout=SECONDS) as client:
        assert client.count("orders") >= 0


def test_calls_without_a_request_and_a_credential_take_no_place(server: ServerProcess) -> None:
    """Story: gRPC waits for the request before it asks who calls, so eight connections with calls that sent nothing
    took every place of a listener, for ever, without any credential; health failed, too."""
    with ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(RawClient(server.address)).begin(GET, 250)
        assert_serves(server)


def test_an_administrator_finds_room_beside_callers_that_fill_the_server(server: ServerProcess) -> None:
    """Story: who held all places could not be ended by anybody. One caller gets four fifths of them."""
    with ExitStack() as opened, client_of(server, "root") as root:
        for _ in range(2):
            opened.enter_context(RawClient(server.address)).begin(GET, 200, token="desk")
        with pytest.raises(grpc.RpcError) as refused, grpc.insecure_channel(server.address, OPTIONS) as channel:
            sow_pb2_grpc.SowServiceStub(channel).Get(
                sow_pb2.GetRequest(topic="orders", keys=["1"]), metadata=(("authorization", "Bearer desk"),)
            )
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert health(server.address) == "SERVING"
        assert sum(session.calls.get("Get", 0) for session in root.sessions()) == 240
        assert root.status().state == "serving"
    until(lambda: _counts(server), SECONDS, "the places to be free again")


def _counts(server: ServerProcess) -> bool:
    with grpc.insecure_channel(server.address, OPTIONS) as channel:
        try:
            sow_pb2_grpc.SowServiceStub(channel).Get(
                sow_pb2.GetRequest(topic="orders", keys=["1"]), metadata=(("authorization", "Bearer desk"),)
            )
        except grpc.RpcError:
            return False
    return True


def test_watchers_of_health_are_few_and_cost_little(server: ServerProcess) -> None:
    """Story: health needs no credential, and a watched name of 18 MiB stayed in memory as long as it was watched; forty
    of them took two gigabytes."""
    before = server.resident_bytes
    with grpc.insecure_channel(server.address, OPTIONS) as channel:
        for number in range(8):
            with pytest.raises(grpc.RpcError) as refused:
                next(watch_of(channel, f"{number}" + "x" * 18 * MIB))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert server.resident_bytes - before < 100 * MIB
    with RawClient(server.address) as watcher:
        watcher.open(WATCH, b"", 250)
        assert_serves(server)


def test_a_watcher_that_leaves_does_not_make_others_deaf(server: ServerProcess) -> None:
    """Story: the library forgot a service with the first watcher that left, so a load balancer that watched it, too,
    did not hear of the stop. Nobody needs a credential for that."""
    with grpc.insecure_channel(server.address, OPTIONS) as first, grpc.insecure_channel(server.address) as second:
        stays = watch_of(first)
        assert next(stays).status == health_pb2.HealthCheckResponse.SERVING
        leaves = watch_of(second)
        assert next(leaves).status == health_pb2.HealthCheckResponse.SERVING
        leaves.cancel()
        assert_serves(server)
        server.terminate()
        assert next(stays).status == health_pb2.HealthCheckResponse.NOT_SERVING


def watch_of(channel: grpc.Channel, service: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the stubs do not know its methods
    return stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=60)


def test_answers_that_nobody_reads_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Story: a hundred gets of 16 MiB, none of which was read, took 1.7 GB over one connection. Here 120 MB of answers
    are asked for, and the connection may hold 16 MiB."""
    keys = ["1", "2"]
    write_access(tmp_path, identity("desk", "desk") + grant("desk", "orders", "read publish"))
    with ServerProcess(tmp_path, GUARDED + '\n[limits]\nin_flight_bytes_max = "64MiB"\n') as server:
        with client_of(server, "root") as root:
            root.create_topic("orders", key=["/id"])
            for key in keys:
                root.publish("orders", {"id": key, "pad": "x" * 1_000_000})
            before = server.resident_bytes
            with RawClient(server.address) as client:
                asked = sow_pb2.GetRequest(topic="orders", keys=keys).SerializeToString()
                client.open(GET, asked, 60, token="desk")
                until(lambda: not _gets(root), 180, "all gets to be answered or refused")
                assert server.resident_bytes - before < 80 * MIB
                assert_serves(server)
        assert_serves(server)
        assert not server.faults()


def test_a_get_of_many_large_records_is_refused_before_it_has_read_all(server: ServerProcess) -> None:
    """Story: a get read all of its records, and then looked at their size; 2,000 times the same key took 2 GB."""
    with client_of(server, "root") as root:
        root.publish("orders", {"id": "big", "pad": "x" * 1_000_000})
    before = server.resident_bytes
    asked = sow_pb2.GetRequest(topic="orders", keys=["big"] * 2_000)
    with grpc.insecure_channel(server.address, OPTIONS) as channel, pytest.raises(grpc.RpcError) as refused:
        sow_pb2_grpc.SowServiceStub(channel).Get(asked, timeout=60, metadata=(("authorization", "Bearer desk"),))
    assert "REQUEST_TOO_LARGE" in str(refused.value.trailing_metadata())
    assert _peak_bytes(server) - before < 200 * MIB


def _peak_bytes(server: ServerProcess) -> int:
    """The most memory that the server has ever had."""
    (line,) = re.findall(r"VmHWM:\s+([0-9]+) kB", Path(f"/proc/{server.pid}/status").read_text())
    return int(line) * 1024


def _gets(root: Client) -> int:
    """The gets under way."""
    return sum(session.calls.get("Get", 0) for session in root.sessions())


def test_connections_that_say_nothing_end_and_leave_files_to_the_store(tmp_path: Path) -> None:
    """Story: see `test_connections_leave_half_of_the_files_to_the_store`; the connections stayed for two minutes."""
    host, plain = "127.0.0.1", "[server]\ndynamic_topics = true\nmax_connections = 40\n"
    with ServerProcess(tmp_path, plain) as server, server.client() as client, ExitStack() as opened:
        client.publish("orders", {"n": 1}, key="1")
        before = server.sockets
        for _ in range(400):
            address = (host, int(server.address.rpartition(":")[2]))
            opened.enter_context(socket.create_connection(address, timeout=SECONDS))
        client.publish("orders", {"n": 2}, key="2")
        until(lambda: server.sockets - before < 50, SECONDS, "the connections beyond the bound to be closed")
        until(lambda: server.sockets <= before, 60, "the silent connections to be closed")
        until(lambda: _is_healthy(server), SECONDS, "the server to take connections again")
        assert not server.faults()


def _is_healthy(server: ServerProcess) -> bool:
    try:
        return health(server.address) == "SERVING"
    except grpc.RpcError:
        return False


def test_requests_of_refused_callers_are_not_read(server: ServerProcess) -> None:
    """Story: a request of 20 MiB was in memory, and parsed, before anybody asked who sends it."""
    before = server.resident_bytes
    request = sow_pb2.PublishRequest(topic="orders", records=[sow_pb2.PublishRecord(payload=b"x" * 18 * MIB)])
    with grpc.insecure_channel(server.address, OPTIONS) as channel:
        publish = sow_pb2_grpc.SowServiceStub(channel).Publish
        calls = [publish.future(request, timeout=SECONDS) for _ in range(16)]
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
    assert server.resident_bytes - before < 144 * MIB
