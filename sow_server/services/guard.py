"""Wraps every RPC: admits its caller, times it, counts it, and turns exceptions into statuses (rules A1, X1, X2).

A StoreError ends the call with its own status. Anything else is INTERNAL without details; the log has them. Bytes that
are no message of the method are INVALID_ARGUMENT: gRPC itself would answer UNKNOWN, with a traceback in the log.

    [1]  A method that is not in the table of needs is not served: the server does not start.
    [2]  No handler runs before its caller is admitted.
    [3]  No request is read before its caller is admitted, and the place of a call is kept for a bounded time until it
         has come.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from sow_server.access.authorizer import Listener, Session
from sow_server.access.caller import Call, CallTrace
from sow_server.access.credentials import NO_CLAIM, Asked, Shown
from sow_server.access.failures import host_of
from sow_server.access.needs import Need, Scope, need_of
from sow_server.engine.commit.pace import CallsUnderWay
from sow_server.engine.values.database import Damaged, RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.turns import CALLER
from sow_server.services.capacity import Arrivals, InFlight, Places, no_room, unread
from sow_server.services.errors import CODES, abort

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = Callable[[Any, Any], Any]
"""A handler of a service: `handler(request, call)`. `request` is an iterator where the client streams."""

REQUEST_SECONDS: Final = 60.0
"""How long the one request of a call may take to arrive."""
OPEN_REQUEST_SECONDS: Final = 5.0
"""The same for calls without a credential."""
OPEN_REQUESTS_MAX: Final = 50
"""Calls without a credential whose request has not come."""
STANDARD_BYTES_MAX: Final = 4096
"""Bytes of a request of health and reflection."""
LARGE_BYTES: Final = 64 * 2**10
"""Bytes of a message from which on it counts for its connection."""


class RpcObserver(Protocol):
    """Counts calls (the metrics)."""

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        """A call of `method` ended with the gRPC status `code` (a name such as OK) after `seconds`."""


class CallTraces(Protocol):
    """Begins the traces of calls."""

    def began(self, path: str, need: Need, metadata: Iterable[tuple[str, str | bytes]]) -> CallTrace | None:
        """The trace of a call that was admitted; None: it has none."""


class Unreadable:
    """Stands for a request whose bytes are no message of its method."""


Reader: TypeAlias = "Callable[[bytes], Received]"
_UNREADABLE: Final = Unreadable()
_NO_ROOM: Final = Unreadable()
"""Stands for a request that was not parsed, because there is no room for its bytes."""
_TOO_LARGE: Final = Unreadable()
_SINGLE_PUBLISHES: Final = frozenset({"/sow.v1.SowService/Publish", "/sow.v1.SowService/Touch"})
"""Methods whose callers wait for a commit of their own. The requests of a stream are queued before they are awaited."""
_KINDS: Final = {False: grpc.stream_unary_rpc_method_handler, True: grpc.stream_stream_rpc_method_handler}
"""By whether the server answers with a stream."""


class Received(NamedTuple):
    """A request as it arrived: parsed, and its size on the wire. It is counted until `Held.release`."""

    request: object
    size: int


class CallAdmission:
    """Admits the calls of one listener, and counts them."""

    def __init__(
        self,
        listener: Listener,
        rpcs: RpcObserver,
        in_flight: InFlight,
        *,
        calls_max: int,
        message_bytes_max: int,
        publishes: CallsUnderWay,
        traces: CallTraces | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`calls_max`: calls at a time. `message_bytes_max`: of one request; links may send larger ones.
        `publishes`: counts the calls that publish single requests."""
        self._authorizer = listener.authorizer
        self._prover = listener.prover
        # The kind that the listener asks for, and no other: reading one costs as much as the rest of the check.
        self._shown = _SHOWN[listener.prover.asks]
        self._rpcs = rpcs
        self._traces = traces
        self._in_flight = in_flight
        self._places = Places(calls_max, shared=listener.authorizer.enforces)
        self._message_bytes_max = message_bytes_max
        self._publishes = publishes
        self._sleep = sleep
        self._arrivals = Arrivals(REQUEST_SECONDS)
        self._open_arrivals = Arrivals(OPEN_REQUEST_SECONDS, OPEN_REQUESTS_MAX)

    def reader(self, kind: type[Message]) -> Reader:
        """Parses requests, if there is room for them: their bytes are counted before."""
        parse, requests, bytes_max = kind.FromString, self._in_flight.requests, self._message_bytes_max

        def read(data: bytes) -> Received:
            size = len(data)
            if size > bytes_max:
                return Received(_TOO_LARGE, 0)
            if not requests.take(CALLER.get(), size):
                return Received(_NO_ROOM, 0)
            try:
                return Received(parse(data), size)
            except DecodeError:
                return Received(_UNREADABLE, size)

        return read

    def link_reader(self, kind: type[Message]) -> Reader:
        """Parses requests of peers. They are counted, and there is always room: a peer has its own bounds, and would
        come again."""
        parse, requests = kind.FromString, self._in_flight.requests

        def read(data: bytes) -> Received:
            requests.add(CALLER.get(), len(data))
            try:
                return Received(parse(data), len(data))
            except DecodeError:
                return Received(_UNREADABLE, len(data))

        return read

    def standard_reader(self, kind: type[Message]) -> Reader:
        """Parses requests that have nothing but a name. Callers without a credential send them, too."""
        parse = kind.FromString

        def read(data: bytes) -> Received:
            if len(data) > STANDARD_BYTES_MAX:
                return Received(_TOO_LARGE, 0)
            try:
                return Received(parse(data), 0)
            except DecodeError:
                return Received(_UNREADABLE, 0)

        return read

    async def admit(self, method: str, need: Need, context: Context) -> tuple[Call, Session | None]:
        """Admits a call, whose request is not read yet. Of many failed attempts of one address, some wait before they
        are refused (rule A1). Raises StoreError."""
        authorizer = self._authorizer
        address = context.peer()
        try:
            call, session = authorizer.admit(
                self._prover, method, need, self._shown(context), address, context.time_remaining
            )
        except StoreError as error:
            if error.reason is Reason.UNAUTHENTICATED:
                with authorizer.failures.held(address, 0) as seconds:
                    if seconds:
                        await self._sleep(seconds)
            raise
        # `anonymous` proves nothing: it is as many callers as there are hosts. Without an access file none has a name.
        caller = host_of(address) if call.credential == NO_CLAIM.kind or not call.owner else call.owner
        try:
            call.place = self._places.enter(need, address, caller)
        except StoreError as error:
            authorizer.finished(call, session, CODES[error.reason].name)
            raise
        CALLER.set(caller)
        if method in _SINGLE_PUBLISHES:
            self._publishes.begin()
        return call, session

    async def request(self, need: Need, context: Context) -> Received:
        """The one request of a call. It is read only now: callers that are not admitted send nothing into memory, and
        none keeps its place without sending one. Raises StoreError."""
        arrivals = self._open_arrivals if need.scope is Scope.OPEN else self._arrivals
        try:
            received = await arrivals.of(context.read())
        except TimeoutError:
            message = f"request: it has not arrived within {arrivals.seconds:g} s"
            raise StoreError(Reason.INVALID_ARGUMENT, message, field="request") from None
        if received is grpc.aio.EOF:
            raise StoreError(Reason.INVALID_ARGUMENT, "request: the call has none", field="request")
        assert isinstance(received, Received), "a reader made it"
        return received

    def traces(self, path: str, call: Call, context: Context) -> None:
        """Begins the trace of an admitted call, if it has one."""
        if self._traces is not None:
            call.trace = self._traces.began(path, call.need, context.invocation_metadata() or ())

    def held(self, call: Call) -> Held:
        """The memory of an admitted call."""
        return Held(self._in_flight, call.address, CALLER.get())

    def finished(self, method: str, admitted: tuple[Call, Session | None] | None, code: str, seconds: float) -> None:
        """A call has ended."""
        self._rpcs.rpc_finished(method, code, seconds)
        self.left(admitted, code)

    def left(self, admitted: tuple[Call, Session | None] | None, code: str = "") -> None:
        """A call that is not counted has ended."""
        if admitted is not None:
            call, session = admitted
            if call.method in _SINGLE_PUBLISHES:
                self._publishes.end()
            if call.trace is not None:
                call.trace.ended(code, call.notes)
            if call.place is not None:
                call.place.leave()
            self._authorizer.finished(call, session, code)


class Held:
    """The memory that one call holds. Small messages are not worth counting for each connection."""

    __slots__ = ("_arrived", "_caller", "_connection", "_in_flight", "_kept")

    def __init__(self, in_flight: InFlight, connection: str, caller: str) -> None:
        self._in_flight = in_flight
        self._connection = connection
        self._caller = caller
        self._arrived = self._kept = 0

    def take(self, received: Received) -> object:
        """A request that a reader has counted. Raises StoreError if it is `Unreadable`, or if there is no room."""
        size = self._arrived = received.size
        if size > LARGE_BYTES:
            if not self._in_flight.kept.take(self._connection, self._caller, size):
                raise no_room()
            self._kept = size
        readable(received.request)
        return received.request

    def answered(self) -> None:
        """The call has an answer. Its request counts for its connection alone, if it is large: it may be kept."""
        if self._arrived:
            arrived, self._arrived = self._arrived, 0
            self._in_flight.requests.free(self._caller, arrived)

    def release(self) -> None:
        """The request is no longer held."""
        self.answered()
        if self._kept:
            kept, self._kept = self._kept, 0
            self._in_flight.kept.free(self._connection, self._caller, kept)

    def sending(self, answer: bytes, context: Context) -> None:
        """Holds the only answer of a call until the client has taken it. Raises StoreError."""
        size = len(answer)
        if size <= LARGE_BYTES:
            return
        kept, connection, caller = self._in_flight.kept, self._connection, self._caller
        if not kept.take(connection, caller, size):
            raise unread()
        context.add_done_callback(lambda _: kept.free(connection, caller, size))  # type: ignore[arg-type]  # a protocol in the stubs that no function fits


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
    shown = context.auth_context()
    certificate, chain = (next(iter(shown.get(name, ())), b"") for name in ("x509_pem_cert", "x509_pem_cert_chain"))
    return Shown("", certificate, chain)


def _both_shown(context: Context) -> Shown:
    return _certificate_shown(context)._replace(token=_token_shown(context).token)


_SHOWN: Final[dict[Asked, Callable[[Context], Shown]]] = {
    Asked.NOTHING: lambda context: _NOTHING_SHOWN,
    Asked.TOKEN: _token_shown,
    Asked.CERTIFICATE: _certificate_shown,
    Asked.BOTH: _both_shown,
}


def handlers(service: ServiceDescriptor, servicer: object, admission: CallAdmission) -> grpc.GenericRpcHandler:
    """The handlers of a service whose methods take a request and a `Call`. Raises MissingNeed [1]."""
    return _generic(service, servicer, admission.reader, lambda method, handler: _own(method, handler, admission))


def link_handlers(
    service: ServiceDescriptor,
    servicer: object,
    admission: CallAdmission,
    context_of: Callable[[Context, Call], Any],
) -> grpc.GenericRpcHandler:
    """The handlers of the service of links, whose methods take gRPC's context. They are admitted as all others.
    `context_of`: the context that the service gets. Raises MissingNeed [1]."""
    return _generic(
        service,
        servicer,
        admission.link_reader,
        lambda method, handler: _foreign(method, handler, admission, context_of),
    )


def standard_handlers(service: ServiceDescriptor, servicer: object, admission: CallAdmission) -> grpc.GenericRpcHandler:
    """The same for health and reflection, whose requests are small."""
    return _generic(
        service,
        servicer,
        admission.standard_reader,
        lambda method, handler: _foreign(method, handler, admission, lambda context, call: context),
    )


def _generic(
    service: ServiceDescriptor,
    servicer: object,
    reader: Callable[[type[Message]], Reader],
    wrapped: Callable[[MethodDescriptor, Handler], Handler],
) -> grpc.GenericRpcHandler:
    # All take a stream of requests, where the contract has one, too: on the wire it is the same, and so a caller is
    # admitted before its request is read [3].
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _KINDS[method.server_streaming](
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
    need = need_of(path)
    if method.server_streaming:
        return _streaming(path, need, handler, admission, many=method.client_streaming)
    return _unary(path, need, handler, admission)


def _unary(path: str, need: Need, handler: Handler, admission: CallAdmission) -> Handler:
    name = path.rpartition("/")[2]

    async def wrapped(requests: AsyncIterator[Received], context: Context) -> object:
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        admitted: tuple[Call, Session | None] | None = None
        held: Held | None = None
        request: object = None
        answer = b""
        try:
            admitted = await admission.admit(path, need, context)
            call = admitted[0]
            admission.traces(path, call, context)
            held = admission.held(call)
            received = await admission.request(need, context)
            request, size = held.take(received), received.size
            del received
            if call.counts_bytes:
                with call.holding_bytes(size):
                    answer = _written(await handler(request, call))
            else:
                answer = _written(await handler(request, call))
            held.sending(answer, context)
            return answer
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001  # the last line of defence: logged, and answered as INTERNAL
            known = _known(error, name, admitted)
            code = CODES[known.reason]
            _forget_frames(error)
            request, answer = None, b""
            await abort(context, known)
        finally:
            if held is not None:
                held.release()
            admission.finished(name, admitted, code.name, time.perf_counter() - started)

    return wrapped


def _streaming(path: str, need: Need, handler: Handler, admission: CallAdmission, *, many: bool) -> Handler:
    name = path.rpartition("/")[2]

    # It writes its answers itself. If gRPC took them from a generator, a cancellation during a write would reach gRPC
    # alone, which drops the generator and sends no status.
    async def wrapped(requests: AsyncIterator[Received], context: Context) -> None:
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        admitted: tuple[Call, Session | None] | None = None
        held: Held | None = None
        try:
            admitted = await admission.admit(path, need, context)
            call = admitted[0]
            admission.traces(path, call, context)
            call.runs(_this_task())
            held = admission.held(call)
            async with AsyncExitStack() as holding:
                if many:
                    request: object = _requests(requests, held, call)
                else:
                    received = await admission.request(need, context)
                    request = held.take(received)
                    holding.enter_context(call.holding_bytes(received.size))
                    del received
                responses = await holding.enter_async_context(aclosing(handler(request, call)))
                del request
                answers = _Answers(context, call)
                async for response in responses:
                    if not many:
                        held.answered()
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
            known = _known(error, name, admitted)
            code = CODES[known.reason]
            _forget_frames(error)
            await abort(context, known)
        finally:
            if held is not None:
                held.release()
            admission.finished(name, admitted, code.name, time.perf_counter() - started)

    return wrapped


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


async def _requests(
    requests: AsyncIterator[Received], held: Held, call: Call | None = None
) -> AsyncGenerator[object, None]:
    """The requests of a call, of which the bytes of one at a time are counted. For one that is `Unreadable` it raises
    StoreError; without a `call`, for services that do not know of it, DecodeError."""
    async for received in requests:
        try:
            if call is None and received.request is _UNREADABLE:
                raise DecodeError
            request = held.take(received)
            if call is None:
                yield request
            else:
                with call.holding_bytes(received.size):
                    yield request
        finally:
            held.release()


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
        known = _unreadable() if isinstance(error, DecodeError) else _known(error, name)
        _forget_frames(error)
        await abort(context, known)

    async def arrived(requests: AsyncIterator[Received], context: Context, held: Held) -> object:
        if method.client_streaming:
            return _requests(requests, held)
        return held.take(await admission.request(need, context))

    async def once(requests: AsyncIterator[Received], context: Context) -> object:
        admitted: tuple[Call, Session | None] | None = None
        held: Held | None = None
        try:
            admitted = await admission.admit(path, need, context)
            held = admission.held(admitted[0])
            return await handler(await arrived(requests, context, held), context_of(context, admitted[0]))
        except Exception as error:  # the last line of defence: logged, and answered as INTERNAL
            await end(error, context)
            raise
        finally:
            if held is not None:
                held.release()
            admission.left(admitted)

    async def many(requests: AsyncIterator[Received], context: Context) -> None:
        admitted: tuple[Call, Session | None] | None = None
        held: Held | None = None
        try:
            admitted = await admission.admit(path, need, context)
            call = admitted[0]
            call.runs(_this_task())
            held = admission.held(call)
            request = await arrived(requests, context, held)
            async with aclosing(handler(request, context_of(context, call))) as responses:
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
            if held is not None:
                held.release()
            admission.left(admitted)

    return many if method.server_streaming and inspect.isasyncgenfunction(handler) else once


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
        raise no_room()
    if request is _TOO_LARGE:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE, "request: it is larger than requests of this method may be", field="request"
        )


def _forget_frames(error: BaseException | None) -> None:
    """Lets go of the frames that an exception has passed, and with them of the request. They hold the exception in
    turn, so only the collector of garbage would free them, which runs once in 100,000 objects: after gigabytes of
    refused requests, if these are large."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _known(error: Exception, method: str, admitted: tuple[Call, Session | None] | None = None) -> StoreError:
    match error:
        case StoreError():
            return error if admitted is None else admitted[0].explained(error)
        case Damaged():
            log.error("read_failed", method=method, reason=Reason.DATA_DAMAGED.name, cause=str(error))
            return StoreError(Reason.DATA_DAMAGED, f"stored data is damaged: {error}")
        case RocksError():
            log.error("read_failed", method=method, reason=Reason.STORE_FAILED.name, cause=str(error))
            return StoreError(Reason.STORE_FAILED, f"reading failed: {error}")
    log.error("rpc_failed", method=method, exc_info=error)
    return StoreError(Reason.INTERNAL, "an unexpected fault; the server's log has the details")
