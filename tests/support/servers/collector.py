"""A collector of OpenTelemetry in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans as a collector of OpenTelemetry does."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, Span]] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # noqa: N802  # the name of the RPC
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for one in request.resource_spans:
            instance = {entry.key: entry.value.string_value for entry in one.resource.attributes}
            for scope in one.scope_spans:
                self._spans += [(instance["service.instance.id"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def span(self, instance: str, name: str) -> Span:
        (found,) = [span for at, span in self._spans if (at, span.name) == (instance, name)]
        return found

    def close(self) -> None:
        self._server.stop(None)
