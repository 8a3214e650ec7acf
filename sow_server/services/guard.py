"""Wraps every RPC: times it, counts it, and turns exceptions into statuses (rules X1, X2).

A StoreError ends the call with its own status. Anything else is INTERNAL without details; the log has them. Bytes that
are no message of the method are INVALID_ARGUMENT: gRPC itself would answer UNKNOWN, with a traceback in the log.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from sow_server.engine.disk.rocks import Damaged, RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services.errors import CODES, abort

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request")
Response = TypeVar("Response")


class RpcObserver(Protocol):
    """Counts calls (the metrics)."""

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        """A call of `method` ended with the gRPC status `code` (a name such as OK) after `seconds`."""


class ObservedService(Protocol):
    """A service whose RPCs are counted."""

    rpcs: RpcObserver


Self = TypeVar("Self", bound=ObservedService)


class Unreadable:
    """Stands for a request whose bytes are no message of its method."""


_UNREADABLE: Final = Unreadable()
_KINDS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def handlers(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """The handlers of a service, as the generated `add_…_to_server` makes them. They differ for requests that do not
    parse: the RPC gets an `Unreadable`, which `unary` and `readable` refuse."""
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _KINDS[method.client_streaming, method.server_streaming](
                getattr(servicer, method.name),
                request_deserializer=_reader(GetMessageClass(method.input_type)),
                response_serializer=_written,
            )
            for method in service.methods
        },
    )


def guarded_handlers(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """The handlers of a service that does not use this module: links, health, reflection. They refuse requests that do
    not parse, and answer unexpected exceptions as our own services do. gRPC itself would answer UNKNOWN, with a
    traceback in the log."""
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _KINDS[method.client_streaming, method.server_streaming](
                _guarded(getattr(servicer, method.name), method.name, answers_once=not method.server_streaming),
                request_deserializer=_reader(GetMessageClass(method.input_type)),
                response_serializer=_written,
            )
            for method in service.methods
        },
    )


def _guarded(handler: Callable[[Any, Context], Any], name: str, *, answers_once: bool) -> Callable[[Any, Context], Any]:
    """Wraps a handler of gRPC: a coroutine that answers once, or writes its answers to the context; or an async
    generator."""

    async def end(error: Exception, context: Context) -> None:
        if isinstance(error, grpc.aio.BaseError):
            raise error  # the call has ended already: with its own status, or because the caller has gone
        await abort(context, _unreadable() if isinstance(error, DecodeError) else _known(error, name))

    async def once(request: object, context: Context) -> object:
        try:
            return await handler(_parsed(request), context)
        except Exception as error:  # the last line of defence: logged, and answered as INTERNAL
            await end(error, context)
            raise

    async def many(request: object, context: Context) -> AsyncGenerator[object, None]:
        try:
            async with aclosing(handler(_parsed(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001  # as above
            await end(error, context)

    return many if not answers_once and inspect.isasyncgenfunction(handler) else once


def _parsed(request: Any) -> Any:
    """A request, or an iterator of requests. Raises DecodeError for one that is `Unreadable`."""
    if isinstance(request, AsyncIterator):
        return _all_parsed(request)
    if request is _UNREADABLE:
        raise DecodeError
    return request


async def _all_parsed(requests: AsyncIterator[object]) -> AsyncGenerator[object, None]:
    async for request in requests:
        yield _parsed(request)


def _reader(kind: type[Message]) -> Callable[[bytes], Message | Unreadable]:
    parse = kind.FromString

    def read(data: bytes) -> Message | Unreadable:
        try:
            return parse(data)
        except DecodeError:
            return _UNREADABLE

    return read


def _written(response: Message | bytes) -> bytes:
    """The bytes of a response; a response for many callers comes as bytes already."""
    return response if isinstance(response, bytes) else response.SerializeToString()


def _unreadable() -> StoreError:
    return StoreError(
        Reason.INVALID_ARGUMENT,
        "request: these bytes are no request of this method, or a text among them is not UTF-8",
        field="request",
    )


def readable(request: object) -> None:
    """Raises StoreError if a request is `Unreadable`."""
    if request is _UNREADABLE:
        raise _unreadable()


def unary(
    handler: Callable[[Self, Request, Context], Awaitable[Response]],
) -> Callable[[Self, Request, Context], Awaitable[Response]]:
    """Wraps a handler that answers once."""

    async def guarded(self: Self, request: Request, context: Context) -> Response:
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        try:
            readable(request)
            return await handler(self, request, context)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001  # the last line of defence: logged, and answered as INTERNAL
            known = _known(error, handler.__name__)
            code = CODES[known.reason]
            await abort(context, known)
        finally:
            self.rpcs.rpc_finished(handler.__name__, code.name, time.perf_counter() - started)

    return guarded


def streaming(
    handler: Callable[[Self, Request, Context], AsyncGenerator[Response, None]],
) -> Callable[[Self, Request, Context], AsyncGenerator[Response, None]]:
    """Wraps a handler that answers with a stream."""

    async def guarded(self: Self, request: Request, context: Context) -> AsyncGenerator[Response, None]:
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        responses = handler(self, request, context)
        try:
            readable(request)
            async for response in responses:
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001  # the last line of defence: logged, and answered as INTERNAL
            known = _known(error, handler.__name__)
            code = CODES[known.reason]
            await abort(context, known)
        finally:
            await responses.aclose()
            self.rpcs.rpc_finished(handler.__name__, code.name, time.perf_counter() - started)

    return guarded


def _known(error: Exception, method: str) -> StoreError:
    match error:
        case StoreError():
            return error
        case Damaged():
            log.error("read_failed", method=method, reason=Reason.DATA_DAMAGED.name, cause=str(error))
            return StoreError(Reason.DATA_DAMAGED, f"stored data is damaged: {error}")
        case RocksError():
            log.error("read_failed", method=method, reason=Reason.STORE_FAILED.name, cause=str(error))
            return StoreError(Reason.STORE_FAILED, f"reading failed: {error}")
    log.error("rpc_failed", method=method, exc_info=error)
    return StoreError(Reason.INTERNAL, "an unexpected fault; the server's log has the details")
