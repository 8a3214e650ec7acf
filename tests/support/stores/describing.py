"""The one method of an instance by which a client knows it, for servers that a test makes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import grpc

from sow.contract import CONTRACT
from sow.v1 import admin_pb2

WATCH_SECONDS_MAX: Final = 20.0


def describing(name: str = "held", *, contract: int = CONTRACT) -> grpc.GenericRpcHandler:
    """DescribeInstance of an instance that serves, whatever becomes of it."""

    def describe(
        request: admin_pb2.DescribeInstanceRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.DescribeInstanceResponse]:
        yield admin_pb2.DescribeInstanceResponse(name=name, id=name, serving=True, contract=contract)
        if request.watch:
            over = threading.Event()
            context.add_callback(over.set)
            over.wait(WATCH_SECONDS_MAX)

    handler = grpc.unary_stream_rpc_method_handler(
        describe,
        request_deserializer=admin_pb2.DescribeInstanceRequest.FromString,
        response_serializer=admin_pb2.DescribeInstanceResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("sow.v1.AdminService", {"DescribeInstance": handler})
