"""Wraps every RPC: admits its caller, times it, counts it, and turns exceptions into statuses (rules A1, X1, X2).

A StoreError ends the call with its own status. Anything else is INTERNAL without details; the log has them. Bytes that
are no message of the method are INVALID_ARGUMENT: gRPC itself would answer UNKNOWN, with a traceback in the log.

    [1]  A method that is not in the table of needs is not served: the server does not start.
    [2]  No handler runs before its caller is admitted.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from sow_server.access.authorizer import Listener, Session
from sow_server.access.caller import Call
from sow_server.access.credentials import Asked, Shown
from sow_server.access.needs import Need, need_of
from sow_server.engine.disk.rocks import Damaged, RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.services.errors import CODES, abort

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = Callable[[Any, Any], Any]
"""A handler of a service: `handler(request, call)`. `request` is an iterator where the client streams."""


class RpcObserver(Protocol):
    """Counts calls (the metrics)."""

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        """A call of `method` ended with the gRPC status `code` (a name such as OK) after `seconds`."""


class Unreadable:
    """Stands for a request whose bytes are no message of its method."""


_UNREADABLE: Final = Unreadable()
_NO_ROOM: Final = Unreadable()
"""Stands for a request that was not parsed, because there is no room for its bytes."""
_KINDS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class InFlight:
    """Bounds the bytes of the requests that are not answered, of all callers together. On the event loop."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0

    def take(self, size: int) -> bool:
        """Takes bytes until `free`; False if there is no room. The first request always has room."""
        if self.bytes and self.bytes + size > self._bytes_max:
            return False
        self.bytes += size
        return True

    def free(self, size: int) -> None:
        """Gives bytes back."""
        self.bytes -= size


class Received(NamedTuple):
    """A request as it arrived: parsed, and its size on the wire. It is counted until `CallAdmission.free`."""

    request: object
    size: int


class CallAdmission:
    """Admits the calls of one listener, and counts them."""

    def __init__(
        self,
        listener: Listener,
        rpcs: RpcObserver,
        in_flight: InFlight,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._authorizer = listener.authorizer
        self._prover = listener.prover
        self._rpcs = rpcs
        self._in_flight = in_flight
        self._sleep = sleep
        self.free: Final = in_flight.free
        """The bytes of a request are no longer held."""
        # The kind that the listener asks for, and no other: reading one costs as much as the rest of the check.
        self._shown = _SHOWN[listener.prover.asks if listener.authorizer.guarded else Asked.NOTHING]

    def reader(self, kind: type[Message]) -> Callable[[bytes], Received]:
        """Parses requests, if there is room for them: their bytes are counted before."""
        parse, in_flight = kind.FromString, self._in_flight

        def read(data: bytes) -> Received:
            size = len(data)
            if not in_flight.take(size):
                return Received(_NO_ROOM, 0)
            try:
                return Received(parse(data), size)
            except DecodeError:
                return Received(_UNREADABLE, size)

        return read

    async def admit(self, method: str, need: Need, context: Context, size: int = 0) -> tuple[Call, Session | None]:
        """Admits a call with a request of `size` bytes. Of many failed attempts of one address, some wait before they
        are refused (rule A1). Raises StoreError."""
        authorizer = self._authorizer
        address = context.peer()
        try:
            return authorizer.admit(self._prover, method, need, self._shown(context), address, context.time_remaining)
        except StoreError as error:
            if error.reason is Reason.UNAUTHENTICATED:
                with authorizer.failures.held(address, size) as seconds:
                    if seconds:
                        await self._sleep(seconds)
            raise

    def finished(self, method: str, admitted: tuple[Call, Session | None] | None, code: str, seconds: float) -> None:
        """A call has ended."""
        self._rpcs.rpc_finished(method, code, seconds)
        if admitted is not None:
            self._authorizer.finished(*admitted, code)

    def left(self, admitted: tuple[Call, Session | None] | None, code: str = "") -> None:
        """A call has ended that is not counted."""
        if admitted is not None:
            self._authorizer.finished(*admitted, code)


_NOTHING_SHOWN: Final = Shown()


def _token_shown(context: Context) -> Shown:
    token = ""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            text = value if isinstance(value, str) else value.decode("latin-1")
            if text[:7] == "Bearer ":
                token = text[7:].strip()
                continue
            scheme, _, rest = text.partition(" ")
            token = rest.strip() if scheme.lower() == "bearer" else ""
    return Shown(token)


def _certificate_shown(context: Context) -> Shown:
    certificates = context.auth_context().get("x509_pem_cert", ())
    return Shown("", next(iter(certificates), b""))


_SHOWN: Final[dict[Asked, Callable[[Context], Shown]]] = {
    Asked.NOTHING: lambda context: _NOTHING_SHOWN,
    Asked.TOKEN: _token_shown,
    Asked.CERTIFICATE: _certificate_shown,
}


def handlers(service: ServiceDescriptor, servicer: object, admission: CallAdmission) -> grpc.GenericRpcHandler:
    """The handlers of a service whose methods take a request and a `Call`. Raises MissingNeed [1]."""
    return _generic(service, servicer, admission.reader, lambda method, handler: _own(method, handler, admission))


def foreign_handlers(
    service: ServiceDescriptor,
    servicer: object,
    admission: CallAdmission,
    context_of: Callable[[Context, Call], Any] = lambda context, call: context,
) -> grpc.GenericRpcHandler:
    """The handlers of a service whose methods take gRPC's context: links, health, reflection. They are admitted as all
    others. `context_of`: the context that the service gets. Raises MissingNeed [1]."""
    return _generic(
        service, servicer, _reader, lambda method, handler: _foreign(method, handler, admission, context_of)
    )


def _generic(
    service: ServiceDescriptor,
    servicer: object,
    reader: Callable[[type[Message]], Callable[[bytes], object]],
    wrapped: Callable[[MethodDescriptor, Handler], Handler],
) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _KINDS[method.client_streaming, method.server_streaming](
                wrapped(method, getattr(servicer, method.name)),
                request_deserializer=reader(GetMessageClass(method.input_type)),
                response_serializer=_written,
            )
            for method in service.methods
        },
    )


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _own(method: MethodDescriptor, handler: Handler, admission: CallAdmission) -> Handler:
    path = _path(method)
    return (_streaming if method.server_streaming else _unary)(path, need_of(path), handler, admission)


def _unary(path: str, need: Need, handler: Handler, admission: CallAdmission) -> Handler:
    name = path.rpartition("/")[2]

    async def guarded(received: Received, context: Context) -> object:
        request, size = received
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        admitted: tuple[Call, Session | None] | None = None
        try:
            admitted = await admission.admit(path, need, context, size)
            readable(request)
            call = admitted[0]
            if not call.counts_bytes:
                return await handler(request, call)
            with call.holding_bytes(size):
                return await handler(request, call)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001  # the last line of defence: logged, and answered as INTERNAL
            known = _known(error, name)
            code = CODES[known.reason]
            await abort(context, known)
        finally:
            admission.free(size)
            admission.finished(name, admitted, code.name, time.perf_counter() - started)

    return guarded


def _streaming(path: str, need: Need, handler: Handler, admission: CallAdmission) -> Handler:
    name = path.rpartition("/")[2]

    # It writes its answers itself. If gRPC took them from a generator, a cancellation during a write would reach gRPC
    # alone, which drops the generator and sends no status.
    async def guarded(received: Received | AsyncIterator[Received], context: Context) -> None:
        arriving = _Arriving(received, admission)
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        admitted: tuple[Call, Session | None] | None = None
        try:
            admitted = await admission.admit(path, need, context, arriving.size)
            call = admitted[0]
            call.runs(_this_task())
            async with aclosing(handler(arriving.request(call), call)) as responses:
                answers = _Answers(context, call)
                async for response in responses:
                    arriving.answered()
                    await answers.write(response)
        except asyncio.CancelledError:
            ended = None if admitted is None else admitted[0].ended
            if ended is None:
                code = grpc.StatusCode.CANCELLED
                raise
            _this_task().uncancel()  # the authorizer has cancelled this task, to end the call with a status
            code = CODES[ended.reason]
            await abort(context, ended)
        except grpc.aio.BaseError:  # the caller has gone, or the server stops
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001  # the last line of defence: logged, and answered as INTERNAL
            known = _known(error, name)
            code = CODES[known.reason]
            await abort(context, known)
        finally:
            arriving.release()
            admission.finished(name, admitted, code.name, time.perf_counter() - started)

    return guarded


class _Answers:
    """Writes the answers of a call, so that it can be ended with a status at any moment."""

    def __init__(self, context: Context, call: Call) -> None:
        self._context = context
        self._call = call
        self._begun = False

    async def write(self, answer: object) -> None:
        """Writes one. Raises StoreError if the call was ended."""
        if self._call.ended is not None:
            raise self._call.ended  # something on the way here has swallowed the cancellation
        if self._begun:
            await self._context.write(answer)
            return
        self._begun = True
        # The first answer brings the headers with it. If its write is cancelled, gRPC forgets that they are under way,
        # sends them a second time with the status, and the core refuses that: the client would wait for ever.
        first = asyncio.ensure_future(self._context.write(answer))
        first.add_done_callback(_heard)
        try:
            await asyncio.shield(first)
        except asyncio.CancelledError:
            await asyncio.wait((first,))
            raise


def _heard(written: asyncio.Future[None]) -> None:
    """Marks an error as seen: the call has another one."""
    if not written.cancelled():
        written.exception()


class _Arriving:
    """The request of a call that answers with a stream, or its requests one after the other; the bytes of one at a time
    are counted. A single request is counted until the first answer."""

    def __init__(self, received: Received | AsyncIterator[Received], admission: CallAdmission) -> None:
        self._received = received
        self._admission = admission
        self._single = isinstance(received, Received)
        self._held = received.size if isinstance(received, Received) else 0

    @property
    def size(self) -> int:
        """The bytes that are counted."""
        return self._held

    def request(self, call: Call) -> object:
        """The request, or an iterator. Raises StoreError for a single one that is `Unreadable`."""
        if isinstance(self._received, Received):
            readable(self._received.request)
            return self._received.request
        return self._requests(self._received, call)

    async def _requests(self, received: AsyncIterator[Received], call: Call) -> AsyncGenerator[object, None]:
        async for request, size in received:
            self._held = size
            try:
                with call.holding_bytes(size):
                    yield request
            finally:
                self.release()

    def answered(self) -> None:
        """The call has an answer."""
        if self._single:
            self.release()

    def release(self) -> None:
        """Gives back the bytes that are counted."""
        held, self._held = self._held, 0
        self._admission.free(held)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "gRPC runs each call in a task"
    return task


def _foreign(
    method: MethodDescriptor, handler: Handler, admission: CallAdmission, context_of: Callable[[Context, Call], Any]
) -> Handler:
    """Wraps a handler of gRPC: a coroutine that answers once, or writes its answers to the context; or an async
    generator."""
    path, name = _path(method), method.name
    need = need_of(path)

    async def end(error: Exception, context: Context) -> None:
        if isinstance(error, grpc.aio.BaseError):
            raise error  # the call has ended already: with its own status, or because the caller has gone
        await abort(context, _unreadable() if isinstance(error, DecodeError) else _known(error, name))

    async def once(request: object, context: Context) -> object:
        admitted: tuple[Call, Session | None] | None = None
        try:
            admitted = await admission.admit(path, need, context, _size(request))
            return await handler(_parsed(request), context_of(context, admitted[0]))
        except Exception as error:  # the last line of defence: logged, and answered as INTERNAL
            await end(error, context)
            raise
        finally:
            admission.left(admitted)

    async def many(request: object, context: Context) -> None:
        admitted: tuple[Call, Session | None] | None = None
        try:
            admitted = await admission.admit(path, need, context, _size(request))
            call = admitted[0]
            call.runs(_this_task())
            async with aclosing(handler(_parsed(request), context_of(context, call))) as responses:
                answers = _Answers(context, call)
                async for response in responses:
                    await answers.write(response)
        except asyncio.CancelledError:
            ended = None if admitted is None else admitted[0].ended
            if ended is None:
                raise
            _this_task().uncancel()
            await abort(context, ended)
        except Exception as error:  # noqa: BLE001  # as above
            await end(error, context)
        finally:
            admission.left(admitted)

    return many if method.server_streaming and inspect.isasyncgenfunction(handler) else once


def _parsed(request: Any) -> Any:
    """A request, or an iterator of requests. Raises DecodeError for one that is `Unreadable`."""
    if isinstance(request, AsyncIterator):
        return _all_parsed(request)
    if request is _UNREADABLE:
        raise DecodeError
    return request


def _size(request: object) -> int:
    return request.ByteSize() if isinstance(request, Message) else 0


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
    if request is _NO_ROOM:
        raise StoreError(
            Reason.OVERLOADED,
            "the requests under way fill the memory for requests; try again later",
            retry_after_micros=MICROS // 10,
        )


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
