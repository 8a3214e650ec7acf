"""A gRPC server whose answers the test gives, one step at a time, for tests of a client's requests and its reaction to
answers.

The client runs on a thread of its own; the test takes each call as it comes, and answers it. So nothing here waits for
time to pass.
"""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent import futures
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from sow.contract import CONTRACT
from sow.v1 import admin_pb2

SECONDS_MAX: Final = 20.0
"""Before a hanging test fails; nothing takes as long."""

Trailers = Sequence[tuple[str, str | bytes]]


class Rpc:
    """The server's end of one call."""

    def __init__(self, requests: Iterator[Message], context: grpc.ServicerContext) -> None:
        self._requests = requests
        self._context = context
        self._steps: SimpleQueue[Message | tuple[grpc.StatusCode, str, Trailers]] = SimpleQueue()
        self._ended = threading.Event()
        if not context.add_callback(self._end):
            self._end()

    def take_request(self) -> Any:
        """The next request, once it has come."""
        return next(self._requests)

    def requests_closed(self) -> None:
        """Returns once the client has ended its requests."""
        assert next(self._requests, None) is None

    def send_response(self, response: Message) -> None:
        """Sends one response."""
        self._steps.put(response)

    def terminate(self, trailers: Trailers, code: grpc.StatusCode, details: str) -> None:
        """Ends the call with a status."""
        self._steps.put((code, details, trailers))

    def cancelled(self) -> None:
        """Returns once the client has ended the call."""
        assert self._ended.wait(SECONDS_MAX), "the client has not ended its call"

    def steps(self) -> Iterator[Message]:
        """The responses that the test gives, until it ends the call."""
        while True:
            step = self._steps.get()
            if isinstance(step, Message):
                yield step
                continue
            code, details, trailers = step
            if code is not grpc.StatusCode.OK:
                self._context.set_trailing_metadata(tuple(trailers))
                self._context.abort(code, details)
            return

    def _end(self) -> None:
        self._ended.set()
        self._steps.put((grpc.StatusCode.OK, "", ()))


class ScriptedServer:
    """Serves every method of some services, on a unix socket; each call waits in the queue of its method."""

    def __init__(self, services: Sequence[ServiceDescriptor]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sow")
        self.address = f"unix:{self._folder.name}/sow"
        self._calls: defaultdict[str, SimpleQueue[Rpc]] = defaultdict(SimpleQueue)
        self.describes_itself = True
        """DescribeInstance is answered by itself: clients ask before a request that an older server would not know."""
        self.describes_topics = True
        """DescribeTopic is answered by itself: clients ask before a document whose topic's message type they do not
        know."""
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        for service in services:
            handlers = {method.name: self._handler(method) for method in service.methods}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        assert self._server.add_insecure_port(self.address)
        self._server.start()

    def take(self, method: str) -> Rpc:
        """The next call of a method, once it has come."""
        return self._calls[method].get(timeout=SECONDS_MAX)

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        # On the wire a call with one message is a stream of one, so that one kind of handler serves all methods.
        def serve(requests: Iterator[Message], context: grpc.ServicerContext) -> Iterator[Message]:
            if method.name == "DescribeInstance" and self.describes_itself:
                yield admin_pb2.DescribeInstanceResponse(serving=True, contract=CONTRACT)
                return
            if method.name == "DescribeTopic" and self.describes_topics:
                yield admin_pb2.DescribeTopicResponse()
                return
            rpc = Rpc(requests, context)
            self._calls[method.name].put(rpc)
            yield from rpc.steps()

        request: Any = message_factory.GetMessageClass(method.input_type)
        response: Any = message_factory.GetMessageClass(method.output_type)
        return grpc.stream_stream_rpc_method_handler(serve, request.FromString, response.SerializeToString)
