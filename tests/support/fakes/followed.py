"""A server of subscriptions in this process, from a journal in memory, which breaks calls where it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Final, Protocol

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import sow_pb2
from sow_client import SowError
from tests.support.fakes.subscriptions import Journal, put

SECONDS_MAX: Final = 20.0
"""The time before a hanging test fails; nothing takes as long."""


class Followed:
    """Sends subscribers the changes in its journal, and then new ones. Shared by restarted servers.

    The n-th call breaks after as many frames as `cuts` says, until those are used up.
    """

    def __init__(self, journal: Journal, *, cuts: Iterable[int] = (), refuses: SowError | None = None) -> None:
        self.journal = journal
        self.requests: list[sow_pb2.SubscribeRequest] = []
        self.deadlines: list[float | None] = []
        self.refuses = refuses
        self.active = 0
        self.idle = 0
        self.frames = 0
        self._cuts = iter(cuts)
        self._changed = threading.Condition()

    def handlers(self) -> grpc.GenericRpcHandler:
        """The generic handler of a gRPC server."""
        return grpc.method_handlers_generic_handler(
            "sow.v1.SowService",
            {
                "Subscribe": grpc.unary_stream_rpc_method_handler(
                    self.subscribe, sow_pb2.SubscribeRequest.FromString, sow_pb2.SubscribeResponse.SerializeToString
                ),
                "Get": grpc.unary_unary_rpc_method_handler(
                    lambda request, context: sow_pb2.GetResponse(),
                    sow_pb2.GetRequest.FromString,
                    sow_pb2.GetResponse.SerializeToString,
                ),
            },
        )

    def subscribe(
        self, request: sow_pb2.SubscribeRequest, context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.SubscribeResponse]:
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        with self._changed:
            self.active += 1
        context.add_callback(self._wake)
        try:
            yield from self._told(request, context, next(self._cuts, None))
        finally:
            with self._changed:
                self.active -= 1
                self._changed.notify_all()

    def _told(
        self, request: sow_pb2.SubscribeRequest, context: grpc.ServicerContext, cut: int | None
    ) -> Iterator[sow_pb2.SubscribeResponse]:
        sent = 0
        try:
            if self.refuses is not None:
                raise self.refuses
            with self._changed:
                frames, at = self.journal.frames(request), self.journal.last
            while context.is_active():
                for frame in frames:
                    if sent == cut:
                        context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                    sent += 1
                    self.frames += 1
                    yield frame
                with self._changed:
                    self.idle += 1
                    self._changed.notify_all()
                    while (last := self.journal.last) == at and context.is_active():
                        self._changed.wait()
                    self.idle -= 1
                frames, at = self.journal.changes(at, last), last
        except SowError as error:
            info = any_pb2.Any()
            info.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain="sow"))
            status = status_pb2.Status(code=grpc.StatusCode.ABORTED.value[0], message=error.message, details=[info])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(grpc.StatusCode.ABORTED, error.message)

    def commit(self, *keys: str) -> None:
        """Publishes under each key."""
        with self._changed:
            for key in keys:
                self.journal.commit(put(key, {}))
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something about the calls."""
        with self._changed:
            assert self._changed.wait_for(condition, SECONDS_MAX), f"waited for {what}"

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Service(Protocol):
    """The handlers of a server."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """The generic handler of a gRPC server."""


class Servers:
    """Servers on one port, one after another."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._server: grpc.Server | None = None

    def start(self, service: Service) -> None:
        server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((service.handlers(),))
        assert server.add_insecure_port(self.address)
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
