"""Traces of real servers (rule X8), as a collector receives them: from a publish to a subscriber of another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sow.v1 import sow_pb2, sow_pb2_grpc
from tests.support.servers.collector import Collector
from tests.support.servers.server import ServerProcess, free_port, until

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = "b7ad6b7169203331"
CONFIG: Final = """\
[server]
instance = "{name}"
[tracing]
endpoint = "http://{collector}"
[replication]
token = "agreed"
{links}
[topics.orders]
key = ["/id"]
"""
WAIT_SECONDS: Final = 60.0


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_a_trace_leads_from_a_publish_to_a_subscriber_of_another_instance(tmp_path: Path, collector: Collector) -> None:
    ports = {"a": free_port(), "b": free_port()}
    links = {
        "a": f'[[replication.peers]]\nname = "b"\naddress = "127.0.0.1:{ports["b"]}"\nmode = "sync"\n',
        "b": 'accept = ["a"]\n',
    }
    servers = {
        name: ServerProcess(
            tmp_path / name,
            CONFIG.format(name=name, collector=collector.address, links=links[name]),
            port=ports[name],
        )
        for name in ("b", "a")
    }
    try:
        with servers["b"].client() as at_b, at_b.subscribe("orders") as subscription:
            with servers["a"].client() as at_a:
                until(lambda: _streams(at_a.replication_status().outgoing[0].state), WAIT_SECONDS, "the link")
            _publish(servers["a"].address, ("traceparent", f"00-{TRACE}-{PARENT}-01"))
            assert next(iter(subscription)).key == "1"
        for server in servers.values():
            assert server.terminate() == 0, "which sends the spans"
            assert not server.faults()
    finally:
        for server in servers.values():
            server.kill9()

    publish = collector.span("a", "sow.v1.SowService/Publish")
    commit = collector.span("a", "commit")
    apply = collector.span("b", "apply")
    commit_there = collector.span("b", "commit")
    deliver = collector.span("b", "deliver")
    assert (publish.trace_id.hex(), publish.parent_span_id.hex()) == (TRACE, PARENT)
    assert _links(publish) == {commit.span_id}
    assert _links(commit) == {publish.span_id}
    assert _links(apply) == {commit.span_id}
    assert _links(commit_there) == {apply.span_id}
    assert _links(deliver) == {commit_there.span_id}
    text = str([publish, commit, apply, commit_there, deliver])
    assert "secret-payload" not in text, "X8, tracing [3]"


def _streams(state: str) -> bool:
    return state == "streaming"


def _publish(address: str, *metadata: tuple[str, str]) -> None:
    with grpc.insecure_channel(address) as channel:
        request = sow_pb2.PublishRequest(topic="orders")
        request.records.add(payload=b'{"id": 1, "note": "secret-payload"}')
        sow_pb2_grpc.SowServiceStub(channel).Publish(request, metadata=metadata, timeout=30)


def _links(span: Span) -> set[bytes]:
    return {link.span_id for link in span.links}


def test_a_collector_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    config = CONFIG.format(name="a", collector=f"127.0.0.1:{free_port()}", links="")
    with ServerProcess(tmp_path, config) as server, server.client() as client:
        _publish(server.address, ("traceparent", f"00-{TRACE}-{PARENT}-01"))
        assert client.get("orders", "1") is not None
        assert server.terminate() == 0
        assert not server.faults()
