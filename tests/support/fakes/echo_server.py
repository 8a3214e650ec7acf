"""A small SowService in this process for clients to connect to: it can be cut, restarted and made to wait."""

# ruff: noqa: N802 - RPCs have the names of the contract

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from sow.v1 import sow_pb2, sow_pb2_grpc, types_pb2
from tests.support.fakes.called_server import status_details
from tests.support.stores.describing import describing

CUT_AFTER = 7  # requests of a stream, after which the server of the reconnect tests breaks it


class Store(sow_pb2_grpc.SowServiceServicer):
    """Keeps payloads in order and drops repeated ones by publisher sequence (rule P6). Shared by restarted servers."""

    def __init__(self, *, cut_streams: int = 0) -> None:
        self.payloads: list[bytes] = []
        self.highest: dict[str, int] = {}
        self.cuts_left = cut_streams
        self.calls_given_up = 0
        """So many reads the server gives up, as one that stops does."""
        self.entered = threading.Event()
        self.release = threading.Event()
        self._lock = threading.Lock()

    def _apply(self, position: types_pb2.PublisherPosition, payloads: list[bytes]) -> int:
        with self._lock:
            highest = self.highest.get(position.publisher_id, 0)
            fresh = payloads[max(0, highest + 1 - position.first_sequence) :]
            self.payloads += fresh
            self.highest[position.publisher_id] = max(highest, position.first_sequence + len(payloads) - 1)
            return len(fresh)

    def Publish(self, request: sow_pb2.PublishRequest, context: object) -> sow_pb2.PublishResponse:
        self._apply(request.publisher, [record.payload for record in request.records])
        results = [sow_pb2.PublishResult(key="1", version=1, sequence=1) for _ in request.records]
        return sow_pb2.PublishResponse(results=results)

    def PublishStream(
        self, request_iterator: Iterator[sow_pb2.PublishStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.PublishStreamResponse]:
        for number, request in enumerate(request_iterator):
            applied = self._apply(request.publisher, list(request.payload))
            if number == CUT_AFTER and self.cuts_left:
                # Applied, and the answer is lost: the case that sequences are for.
                self.cuts_left -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            yield sow_pb2.PublishStreamResponse(applied=applied, duplicates=len(request.payload) - applied)

    def Get(self, request: sow_pb2.GetRequest, context: grpc.ServicerContext) -> sow_pb2.GetResponse:
        if self.calls_given_up:
            self.calls_given_up -= 1
            context.abort(grpc.StatusCode.CANCELLED, "")
        if request.topic == "slow":
            self.entered.set()
            self.release.wait(10)
        return sow_pb2.GetResponse(records=[types_pb2.Record(key=key, payload=b"{}") for key in request.keys])

    def Query(self, request: sow_pb2.QueryRequest, context: grpc.ServicerContext) -> Iterator[sow_pb2.QueryResponse]:
        if request.topic == "nowhere":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such topic")
        yield sow_pb2.QueryResponse(header=sow_pb2.QueryHeader(bookmark="e:1"))
        count = len(self.payloads)
        if not request.count_only:
            numbers = range(count)
            keys = [str(number) for number in numbers]
            columns = types_pb2.RecordColumns(
                key=keys,
                payload=self.payloads,
                version=numbers,
                publish_time_micros=numbers,
                expire_time_micros=numbers,
                sequence=numbers,
                origins=["a"],
            )
            yield sow_pb2.QueryResponse(batch=columns)
        yield sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(matched=count, returned=count, scanned=count))

    def Subscribe(
        self, request: sow_pb2.SubscribeRequest, context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.SubscribeResponse]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_client_following")

    def Acknowledge(
        self, request: sow_pb2.AcknowledgeRequest, context: grpc.ServicerContext
    ) -> sow_pb2.AcknowledgeResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_client_durable")

    def Rewind(self, request: sow_pb2.RewindRequest, context: grpc.ServicerContext) -> sow_pb2.RewindResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_client_durable")

    def BrowseDurable(
        self, request: sow_pb2.BrowseDurableRequest, context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.BrowseDurableResponse]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_client_durable")

    def ReadHistory(
        self, request: sow_pb2.ReadHistoryRequest, context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.ReadHistoryResponse]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_rpcs")

    def SowDelete(self, request: sow_pb2.SowDeleteRequest, context: object) -> Iterator[sow_pb2.SowDeleteResponse]:
        yield sow_pb2.SowDeleteResponse(matched=1, deleted=1, last_sequence=1)
        yield sow_pb2.SowDeleteResponse(matched=2, deleted=2, last_sequence=2, done=True)

    def Touch(self, request: sow_pb2.TouchRequest, context: object) -> sow_pb2.TouchResponse:
        return sow_pb2.TouchResponse(results=[sow_pb2.PublishResult(key=key, version=2) for key in request.keys])

    def GetPublisher(self, request: sow_pb2.GetPublisherRequest, context: object) -> sow_pb2.GetPublisherResponse:
        return sow_pb2.GetPublisherResponse(publisher_epoch=4)

    def OpenPublisher(self, request: sow_pb2.OpenPublisherRequest, context: object) -> sow_pb2.OpenPublisherResponse:
        return sow_pb2.OpenPublisherResponse(publisher_epoch=5)


class Held(Store):
    """Takes publishes, and does not answer."""

    def Publish(self, request: sow_pb2.PublishRequest, context: object) -> sow_pb2.PublishResponse:
        self.entered.set()
        self.release.wait(10)
        return super().Publish(request, context)


class Unreplicated(Held):
    """Refuses the first publish, because its peers are away, and does not answer the next one."""

    def Publish(self, request: sow_pb2.PublishRequest, context: object) -> sow_pb2.PublishResponse:
        assert isinstance(context, grpc.ServicerContext)
        if not self.release.is_set():
            self.release.set()
            text = "stored here, and at no peer"
            details = status_details(grpc.StatusCode.UNAVAILABLE, "REPLICATION_UNAVAILABLE", text, applied="1")
            context.set_trailing_metadata(details)
            context.abort(grpc.StatusCode.UNAVAILABLE, text)
        self.release.clear()
        return super().Publish(request, context)


def serve(store: Store, address: str) -> grpc.Server:
    server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
    sow_pb2_grpc.add_SowServiceServicer_to_server(store, server)
    server.add_generic_rpc_handlers((describing(),))
    assert server.add_insecure_port(address)
    server.start()
    return server


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def store(address: str) -> Iterator[Store]:
    store = Store()
    server = serve(store, address)
    yield store
    store.release.set()
    server.stop(None).wait()
