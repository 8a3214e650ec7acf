"""The contract of the last release, beside today's: its messages from a descriptor pool of their own, and both ends.

[1]  `OldClient` sends and understands only what the release had.
[2]  `OldServer` passes calls on to a server of today. It drops fields that the release did not have, in requests
     and answers, and calls that it did not have are UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from generate import RELEASE_DESCRIPTORS

HEALTH: Final = "/grpc.health.v1.Health/Check"


def methods() -> dict[str, MethodDescriptor]:
    """The methods of the release, by path."""
    files = FileDescriptorSet.FromString(RELEASE_DESCRIPTORS.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    found: dict[str, MethodDescriptor] = {}
    for file in files.file:
        for service in pool.FindFileByName(file.name).services_by_name.values():
            found |= {f"/{service.full_name}/{method.name}": method for method in service.methods}
    return found


Parser: TypeAlias = Callable[[bytes], Message]


def _parser(kind: type[Message]) -> Parser:
    def parse(data: bytes) -> Message:
        message = kind.FromString(data)
        message.DiscardUnknownFields()
        return message

    return parse


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


class OldClient:
    """Calls by path, with the messages of the release ([1])."""

    def __init__(self, address: str) -> None:
        self.methods: Final = methods()
        self._channel = grpc.insecure_channel(address)

    def close(self) -> None:
        self._channel.close()

    def call(self, path: str, **fields: object) -> Any:
        """A call with one request and one answer."""
        request, parse = self._ends(path, fields)
        return self._channel.unary_unary(f"/sow.v1.{path}", _serialized, parse)(request, timeout=20)

    def stream(self, path: str, **fields: object) -> list[Any]:
        """A call that is answered by a stream."""
        request, parse = self._ends(path, fields)
        return list(self._channel.unary_stream(f"/sow.v1.{path}", _serialized, parse)(request, timeout=20))

    def talk(self, path: str, requests: Iterable[Mapping[str, object]]) -> list[Any]:
        """A call with streams in both directions."""
        ends = [self._ends(path, fields) for fields in requests]
        made = self._channel.stream_stream(f"/sow.v1.{path}", _serialized, ends[0][1])
        return list(made(iter([request for request, _ in ends]), timeout=20))

    def _ends(self, path: str, fields: Mapping[str, object]) -> tuple[Message, Parser]:
        method = self.methods[f"/sow.v1.{path}"]
        request = ParseDict(dict(fields), message_factory.GetMessageClass(method.input_type)())
        return request, _parser(message_factory.GetMessageClass(method.output_type))


class OldServer(grpc.GenericRpcHandler):
    """A server of the release, as far as a client can tell ([2])."""

    def __init__(self, behind: str, port: int = 0) -> None:
        """`behind`: the address of a server of today."""
        self._methods = methods()
        self._channel = grpc.insecure_channel(behind)
        self._server = grpc.server(ThreadPoolExecutor(16), handlers=[self], options=[("grpc.so_reuseport", 0)])
        self.asked: list[str] = []
        """The calls that the release did not have."""
        self.address: Final = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method
        if path == HEALTH:
            return grpc.unary_unary_rpc_method_handler(_passed_on(self._channel.unary_unary(path)))
        method = self._methods.get(path)
        if method is None:
            self.asked.append(path)
            return None
        request = _parser(message_factory.GetMessageClass(method.input_type))
        answer = _parser(message_factory.GetMessageClass(method.output_type))
        if method.client_streaming:
            behind = _passed_on_stream(self._channel.stream_stream(path, _serialized, answer))
            return grpc.stream_stream_rpc_method_handler(behind, request, _serialized)
        if method.server_streaming:
            behind = _passed_on_stream(self._channel.unary_stream(path, _serialized, answer))
            return grpc.unary_stream_rpc_method_handler(behind, request, _serialized)
        one = _passed_on(self._channel.unary_unary(path, _serialized, answer))
        return grpc.unary_unary_rpc_method_handler(one, request, _serialized)


class Forwarder(grpc.GenericRpcHandler):
    """A server of today at another address: it passes on every call with all that is in it."""

    def __init__(self, behind: str, port: int) -> None:
        """`behind`: the address of the server."""
        self._channel = grpc.insecure_channel(behind)
        self._server = grpc.server(ThreadPoolExecutor(16), handlers=[self], options=[("grpc.so_reuseport", 0)])
        assert self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        # On the wire a call with one message is a stream of one.
        return grpc.stream_stream_rpc_method_handler(
            _passed_on_stream(self._channel.stream_stream(handler_call_details.method))
        )


def _passed_on(call: Any) -> Callable[[Any, grpc.ServicerContext], Any]:
    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return call(request, timeout=20)
        except grpc.RpcError as error:
            _abort(context, error)

    return handle


def _passed_on_stream(call: Any) -> Callable[[Any, grpc.ServicerContext], Iterator[Any]]:
    def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from call(request, timeout=60)
        except grpc.RpcError as error:
            _abort(context, error)

    return handle


def _abort(context: grpc.ServicerContext, error: Any) -> None:
    context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
    context.abort(error.code(), error.details() or "")
