"""A scripted server and a client of each kind, for tests of the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import admin_pb2, sow_pb2, types_pb2
from sow_client import (
    AsyncClient,
    Client,
    Published,
)
from tests.support.fakes.scripted import Rpc, ScriptedServer
from tests.support.simulation.clients import CLIENT_KINDS, EventLoop, blocking

_Value = TypeVar("_Value")
SOW = sow_pb2.DESCRIPTOR.services_by_name["SowService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


class Server:
    """The test's end of a client's calls."""

    def __init__(self, client: Client, script: ScriptedServer) -> None:
        self.client = client
        self._script = script
        self._threads = ThreadPoolExecutor()

    def answers_descriptions(self) -> None:
        """From now on the test answers DescribeTopic."""
        self._script.describes_topics = False

    def begin(self, call: Callable[[], _Value]) -> Future[_Value]:
        """Starts a call of the client."""
        return self._threads.submit(call)

    def answer(self, method: str, response: Message) -> Any:
        """Answers a call with one response; returns its request."""
        request, rpc = self.take(method)
        rpc.send_response(response)
        rpc.terminate((), grpc.StatusCode.OK, "")
        return request

    def refuse(self, method: str, code: grpc.StatusCode, reason: str, text: str = "no", **metadata: str) -> Any:
        """Answers a call with a status; returns its request."""
        request, rpc = self.take(method)
        rpc.terminate(status_details(code, reason, text, **metadata), code, text)
        return request

    def stream(self, method: str, *responses: Message, end: tuple[grpc.StatusCode, str] | None = None) -> Any:
        """Answers a call with a stream; returns its request. `end`: a status and reason instead of OK."""
        request, rpc = self.take(method)
        for response in responses:
            rpc.send_response(response)
        if end is None:
            rpc.terminate((), grpc.StatusCode.OK, "")
        else:
            rpc.terminate(status_details(end[0], end[1], "no") if end[1] else (), end[0], "no")
        return request

    def take(self, method: str) -> tuple[Any, Rpc]:
        """The next call of a method with one request, and that request."""
        rpc = self._script.take(method)
        return rpc.take_request(), rpc

    def publish_stream(self) -> Rpc:
        """The server's side of a publisher's stream."""
        return self._script.take("PublishStream")

    def stop(self) -> None:
        self._threads.shutdown()


def status_details(code: grpc.StatusCode, reason: str, text: str, **metadata: str) -> tuple[tuple[str, bytes], ...]:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="sow", metadata=metadata))
    status = status_pb2.Status(code=code.value[0], message=text, details=[packed])
    return (("grpc-status-details-bin", status.SerializeToString()),)


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    """Where the asynchronous clients run."""
    with EventLoop() as made:
        yield made


@pytest.fixture
def script() -> Iterator[ScriptedServer]:
    """The server that they all call."""
    with ScriptedServer([SOW, ADMIN]) as made:
        yield made


@pytest.fixture(params=CLIENT_KINDS)
def server(request: pytest.FixtureRequest, script: ScriptedServer, loop: EventLoop) -> Iterator[Server]:
    """The server of a client, of each kind."""
    if request.param == "Client":
        with grpc.insecure_channel(script.address) as channel:
            made = Server(Client(channel=channel), script)
            yield made
            made.stop()
        return
    aio = loop.make(lambda: grpc.aio.insecure_channel(script.address))
    made = Server(blocking(loop, loop.make(lambda: AsyncClient(channel=aio))), script)
    yield made
    made.stop()
    loop.run(aio.close)


@pytest.fixture
def blocking_server(script: ScriptedServer) -> Iterator[Server]:
    """The server of a blocking client."""
    with grpc.insecure_channel(script.address) as channel:
        made = Server(Client(channel=channel), script)
        yield made
        made.stop()


RESULT = sow_pb2.PublishResult(key="1", version=7, expire_time_micros=5_000_000, sequence=3)
PUBLISHED = Published("1", 7, 5_000_000, 3, ttl_ignored=False, duplicate=False)


def refused(reason: str, *, index: int = 0, current_version: int = 0) -> types_pb2.Refusal:
    value = types_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
    return types_pb2.Refusal(index=index, reason=value, message="no", current_version=current_version)


def header() -> sow_pb2.QueryResponse:
    return sow_pb2.QueryResponse(header=sow_pb2.QueryHeader(bookmark="e:9", as_of_micros=1_000_000))


def batch(*keys: str) -> sow_pb2.QueryResponse:
    numbers = [1] * len(keys)
    return sow_pb2.QueryResponse(
        batch=types_pb2.RecordColumns(
            key=keys,
            payload=[b"{}" for _ in keys],
            version=numbers,
            publish_time_micros=numbers,
            expire_time_micros=numbers,
            sequence=numbers,
            origins=["nyc"],
        )
    )


def footer(matched: int = 0, token: str = "") -> sow_pb2.QueryResponse:
    return sow_pb2.QueryResponse(
        footer=sow_pb2.QueryFooter(matched=matched, returned=matched, scanned=matched, next_page_token=token)
    )
