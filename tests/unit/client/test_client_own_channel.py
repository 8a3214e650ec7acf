"""The blocking client on a channel that its user made: here one of grpcio-testing, without any network.

The client runs on a thread of its own and the test is the server, one step at a time, so nothing here waits for time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc_testing
import pytest

from sow.v1 import sow_pb2
from sow_client import Client, NotFound, Unavailable
from tests.support.fakes.called_server import PUBLISHED, RESULT, SOW, batch, header, status_details
from tests.support.fakes.scripted import SECONDS_MAX

_Value = TypeVar("_Value")


class Caller:
    """A client on the test's channel, and a thread that makes its calls."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.channel = grpc_testing.channel([SOW], grpc_testing.strict_real_time())
        self.client = Client(channel=self.channel)
        self._threads = threads

    def begin(self, call: Callable[[], _Value]) -> Future[_Value]:
        return self._threads.submit(call)

    def take(self, method: str) -> tuple[Any, Any]:
        """The request of the next call of a method, and the server's end of that call."""
        _, request, rpc = self.channel.take_unary_unary(SOW.methods_by_name[method])
        return request, rpc

    def take_query(self) -> Any:
        """The server's end of the next query."""
        _, _, rpc = self.channel.take_unary_stream(SOW.methods_by_name["Query"])
        return rpc


@pytest.fixture
def caller() -> Iterator[Caller]:
    with ThreadPoolExecutor(1) as threads:
        yield Caller(threads)


def test_a_call_goes_over_the_channel_and_its_answer_comes_back(caller: Caller) -> None:
    publishing = caller.begin(lambda: caller.client.publish("orders", b'{"id":1}'))
    request, rpc = caller.take("Publish")
    rpc.terminate(sow_pb2.PublishResponse(results=[RESULT]), (), grpc.StatusCode.OK, "")

    assert publishing.result(SECONDS_MAX) == PUBLISHED
    assert request.topic == "orders"
    assert [record.payload for record in request.records] == [b'{"id":1}']


def test_a_status_is_raised_with_its_reason_and_details(caller: Caller) -> None:
    reading = caller.begin(lambda: caller.client.get("nowhere", "1"))
    _, rpc = caller.take("Get")
    details = status_details(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND", "no", topic="nowhere")
    rpc.terminate(None, details, grpc.StatusCode.NOT_FOUND, "no")

    with pytest.raises(NotFound) as caught:
        reading.result(SECONDS_MAX)
    assert (caught.value.reason, caught.value.details) == ("TOPIC_NOT_FOUND", {"topic": "nowhere"})


def test_a_query_that_breaks_gives_its_records_and_then_the_error(caller: Caller) -> None:
    records = caller.client.query("orders")
    first = caller.begin(lambda: next(records).key)
    rpc = caller.take_query()
    rpc.send_response(header())
    rpc.send_response(batch("1"))
    assert first.result(SECONDS_MAX) == "1"

    second = caller.begin(lambda: next(records))
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "reset")
    with pytest.raises(Unavailable) as caught:
        second.result(SECONDS_MAX)
    assert caught.value.reason == "STREAM_CUT"


def test_leaving_a_query_early_cancels_its_call(caller: Caller) -> None:
    def read_one() -> str:
        with caller.client.query("orders") as records:
            return next(records).key

    reading = caller.begin(read_one)
    rpc = caller.take_query()
    rpc.send_response(header())
    rpc.send_response(batch("1", "2"))

    assert reading.result(SECONDS_MAX) == "1"
    rpc.cancelled()  # returns once the client has cancelled the call
