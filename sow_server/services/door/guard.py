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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from sow_server.access.authorizer import Listener, Session
from sow_server.access.caller import Call, CallTrace
from sow_server.access.credentials import NO_CLAIM, Asked, Shown
from sow_server.access.failed_attempts import host_of
from sow_server.access.needs import Need, Scope, need_of
from sow_server.engine.commit.pace import CallsUnderWay
from sow_server.engine.values.database import Damaged, RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.turns import CALLER
from sow_server.services.door.capacity import Arrivals, InFlight, Places
from sow_server.services.door.received import (
    UNREADABLE,
    Context,
    Held,
    Reader,
    Received,
    link_reader,
    reader,
    standard_reader,
    unreadable,
)
from sow_server.services.door.statuses import CODES, abort

log = structlog.get_logger(__name__)

Handler: TypeAlias = Callable[[Any, Any], Any]
"""A handler of a service: `handler(request, call)`. `request` is an iterator where the client streams."""

REQUEST_SECONDS: Final = 60.0
"""How long the one request of a call may take to arrive."""
OPEN_REQUEST_SECONDS: Final = 5.0
"""The same for calls without a credential."""
OPEN_REQUESTS_MAX: Final = 50
"""Calls without a credential whose request has not come."""


class RpcObserver(Protocol):
    """Counts calls (the metrics)."""

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        """A call of `method` ended with the gRPC status `code` (a name such as OK) after `seconds`."""


class CallTraces(Protocol):
    """Begins the traces of calls."""

    def began(self, path: str, need: Need, metadata: Iterable[tuple[str, str | bytes]]) -> CallTrace | None:
        """The trace of a call that was admitted; None: it has none."""


_SINGLE_PUBLISHES: Final = frozenset({"/sow.v1.SowService/Publish", "/sow.v1.SowService/Touch"})
"""Methods whose callers wait for a commit of their own. The requests of a stream are queued before they are awaited."""
_KINDS: Final = {False: grpc.stream_unary_rpc_method_handler, True: grpc.stream_stream_rpc_method_handler}
"""The functions that make a handler. The key is True if the server answers with a stream."""


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
        """Parses requests, if there is room for them."""
        return reader(kind, self._in_flight.requests, self._message_bytes_max)

    def link_reader(self, kind: type[Message]) -> Reader:
        """Parses requests of peers."""
        return link_reader(kind, self._in_flight.requests)

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
        arrivals = self._open_arrivals if need.scope in (Scope.OPEN, Scope.TIERED) else self._arrivals
        try:
            received = await arrivals.of(context.read())
        except TimeoutError:
            message = f"request: it has not arrived within {arrivals.seconds:g} s"
            raise StoreError(Reason.INVALID_ARGUMENT, message, field="request") from None
        if received is grpc.aio.EOF:
            raise StoreError(Reason.INVALID_ARGUMENT, "request: the call has none", field="request")
        assert isinstance(received, Received), "a reader made it"
        return received

    def trace(self, path: str, call: Call, context: Context) -> CallTrace | None:
        """The trace of an admitted call, which begins; None: it has none."""
        return (
            None if self._traces is None else self._traces.began(path, call.need, context.invocation_metadata() or ())
        )

    def held(self, call: Call) -> Held:
        """The memory of an admitted call."""
        return Held(self._in_flight, call.address, CALLER.get())

    def counted(self, method: str, code: str, seconds: float) -> None:
        """A call has ended, whether it was admitted or not."""
        self._rpcs.rpc_finished(method, code, seconds)

    def left(self, call: Call, session: Session | None, code: str) -> None:
        """An admitted call has ended."""
        if call.method in _SINGLE_PUBLISHES:
            self._publishes.end()
        if call.trace is not None:
            call.trace.ended(code, call.notes)
        if call.place is not None:
            call.place.leave()
        self._authorizer.finished(call, session, code)


class _Method(NamedTuple):
    """A method as the guard sees it."""

    path: str
    name: str
    need: Need
    own: bool
    """One of ours, whose calls are counted and traced. The others take gRPC's context: links, health, reflection."""
    lasts: bool
    """It answers with a stream, which the server may end."""

    @classmethod
    def of(cls, method: MethodDescriptor, *, own: bool, lasts: bool) -> _Method:
        """Raises MissingNeed [1]."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        return cls(path, method.name, need_of(path), own, lasts)


class _GuardedCall:
    """One call, as the context of a block: admitted at its begin and finished at its end. An error ends the call with
    its status. Within the block, `call` has the caller's rights, and `held` the memory of the call.

    The frame of the block lives on until the caller has taken the status, which may be late. So no variable of it
    holds a request then; the frames that it has called are gone (`_forget_frames`).
    """

    __slots__ = ("_admission", "_admitted", "_code", "_context", "_method", "_session", "_started", "call", "held")

    call: Call
    held: Held
    _session: Session | None

    def __init__(self, admission: CallAdmission, method: _Method, context: Context) -> None:
        self._admission = admission
        self._method = method
        self._context = context
        self._started = time.perf_counter()
        self._admitted = False
        self._code = "OK"
        """The name of the status."""

    async def __aenter__(self) -> _GuardedCall:
        admission, method, context = self._admission, self._method, self._context
        try:
            self.call, self._session = await admission.admit(method.path, method.need, context)
            self.held = admission.held(self.call)
            self._admitted = True
            if method.own:
                self.call.trace = admission.trace(method.path, self.call, context)
            if method.lasts:
                self.call.runs(_this_task())
        except BaseException as error:
            await self._fail(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        del frames  # they hold the request
        if error is None:
            self._finish()
        else:
            await self._fail(error)

    async def _fail(self, error: BaseException) -> None:
        """Raises the error of gRPC that ends the call, if a status does."""
        try:
            await self._end_with_status(error)
        finally:
            self._finish()

    def _finish(self) -> None:
        admission, method, code = self._admission, self._method, self._code
        if self._admitted:
            self.held.release()
        if method.own:
            admission.counted(method.name, code, time.perf_counter() - self._started)
        if self._admitted:
            admission.left(self.call, self._session, code if method.own else "")

    async def _end_with_status(self, error: BaseException) -> None:
        """Returns if there is nobody to tell a status, or gRPC knows it."""
        method = self._method
        if isinstance(error, asyncio.CancelledError):
            known = self.call.ended if self._admitted and method.lasts else None
            if known is None:
                self._code = _CANCELLED
                return
            _this_task().uncancel()  # the authorizer has cancelled this task, to end the call with a status
        elif isinstance(error, grpc.aio.BaseError) and (method.lasts or not method.own):
            self._code = _CANCELLED  # the caller has gone, or the server stops
            return
        elif isinstance(error, Exception):  # the last line of defence: logged, and answered as INTERNAL
            known = self._known(error)
            _forget_frames(error)
        else:
            return
        self._code = CODES[known.reason].name
        await abort(self._context, known)

    def _known(self, error: Exception) -> StoreError:
        method = self._method
        match error:
            case StoreError():
                return self.call.explained(error) if method.own and self._admitted else error
            case DecodeError() if not method.own:
                return unreadable()
            case Damaged():
                log.error("read_failed", method=method.name, reason=Reason.DATA_DAMAGED.name, cause=str(error))
                return StoreError(Reason.DATA_DAMAGED, f"stored data is damaged: {error}")
            case RocksError():
                log.error("read_failed", method=method.name, reason=Reason.STORE_FAILED.name, cause=str(error))
                return StoreError(Reason.STORE_FAILED, f"reading failed: {error}")
        log.error("rpc_failed", method=method.name, exc_info=error)
        return StoreError(Reason.INTERNAL, "an unexpected fault; the server's log has the details")


_CANCELLED: Final = grpc.StatusCode.CANCELLED.name
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


def handlers(service: ServiceDescriptor, parts: Sequence[object], admission: CallAdmission) -> grpc.GenericRpcHandler:
    """The handlers of a service whose methods take a request and a `Call`. Each of its methods is one of exactly one of
    the parts. Raises MissingNeed [1]."""
    return _generic(service, parts, admission.reader, lambda method, handler: _own(method, handler, admission))


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
        [servicer],
        admission.link_reader,
        lambda method, handler: _foreign(method, handler, admission, context_of),
    )


def standard_handlers(service: ServiceDescriptor, servicer: object, admission: CallAdmission) -> grpc.GenericRpcHandler:
    """The same for health and reflection, whose requests are small."""
    return _generic(
        service,
        [servicer],
        standard_reader,
        lambda method, handler: _foreign(method, handler, admission, lambda context, call: context),
    )


def _generic(
    service: ServiceDescriptor,
    parts: Sequence[object],
    reader: Callable[[type[Message]], Reader],
    wrapped: Callable[[MethodDescriptor, Handler], Handler],
) -> grpc.GenericRpcHandler:
    # All take a stream of requests, where the contract has one, too: on the wire it is the same, and so a caller is
    # admitted before its request is read [3].
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _KINDS[method.server_streaming](
                wrapped(method, handler_of(parts, method.name)),
                request_deserializer=reader(GetMessageClass(method.input_type)),
                response_serializer=_written,
            )
            for method in service.methods
        },
    )


def handler_of(parts: Sequence[object], method: str) -> Handler:
    """The method of the part that has it."""
    found: list[Handler] = [getattr(part, method) for part in parts if hasattr(part, method)]
    assert len(found) == 1, f"{len(found)} parts of the service have {method}"
    return found[0]


def _own(method: MethodDescriptor, handler: Handler, admission: CallAdmission) -> Handler:
    guarded = _Method.of(method, own=True, lasts=method.server_streaming)
    if guarded.lasts:
        return _streaming(guarded, handler, admission, many=method.client_streaming)
    return _unary(guarded, handler, admission)


def _unary(method: _Method, handler: Handler, admission: CallAdmission) -> Handler:
    async def answered(guarded: _GuardedCall, context: Context) -> bytes:
        call = guarded.call
        received = await admission.request(method.need, context)
        request, size = guarded.held.take(received), received.size
        del received
        if call.counts_bytes:
            with call.holding_bytes(size):
                answer = _written(await handler(request, call))
        else:
            answer = _written(await handler(request, call))
        guarded.held.sending(answer, context)
        return answer

    async def wrapped(requests: AsyncIterator[Received], context: Context) -> bytes:
        async with _GuardedCall(admission, method, context) as guarded:
            return await answered(guarded, context)

    return wrapped


def _streaming(method: _Method, handler: Handler, admission: CallAdmission, *, many: bool) -> Handler:
    # It writes its answers itself. If gRPC took them from a generator, a cancellation during a write would reach gRPC
    # alone, which drops the generator and sends no status.
    async def wrapped(requests: AsyncIterator[Received], context: Context) -> None:
        async with _GuardedCall(admission, method, context) as guarded, AsyncExitStack() as holding:
            call, held = guarded.call, guarded.held
            if many:
                request: object = _requests(requests, held, call)
            else:
                received = await admission.request(method.need, context)
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
            if call is None and received.request is UNREADABLE:
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
    lasts = method.server_streaming and inspect.isasyncgenfunction(handler)
    described = _Method.of(method, own=False, lasts=lasts)

    async def arrived(requests: AsyncIterator[Received], context: Context, held: Held) -> object:
        if method.client_streaming:
            return _requests(requests, held)
        return held.take(await admission.request(described.need, context))

    async def once(requests: AsyncIterator[Received], context: Context) -> object:
        async with _GuardedCall(admission, described, context) as guarded:
            return await handler(await arrived(requests, context, guarded.held), context_of(context, guarded.call))

    async def many(requests: AsyncIterator[Received], context: Context) -> None:
        async with _GuardedCall(admission, described, context) as guarded:
            request = await arrived(requests, context, guarded.held)
            responses = handler(request, context_of(context, guarded.call))
            del request
            async with aclosing(responses):
                answers = _Answers(context, guarded.call)
                async for response in responses:
                    await answers.write(response)

    return many if lasts else once


def _written(response: Message | bytes) -> bytes:
    """The bytes of a response; a response for many callers comes as bytes already."""
    return response if isinstance(response, bytes) else response.SerializeToString()


def _forget_frames(error: BaseException | None) -> None:
    """Lets go of the frames that an exception has passed, and with them of the request. They hold the exception in
    turn, so only the collector of garbage would free them, which runs once in 100,000 objects: after gigabytes of
    refused requests, if these are large."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
