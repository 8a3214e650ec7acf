"""The links of a node over gRPC: dials peers, answers incoming streams, ticks.

One task per peer dials and drives its `Sender` while there is a stream. An incoming stream is driven in its own call.
Everything runs on one event loop, except the reads, which run on `readers`. All decisions are made in the machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError

from sow.v1 import admin_pb2, replication_pb2, replication_pb2_grpc, types_pb2
from sow_peering import TopicKind
from sow_replication.calls import Calls
from sow_replication.checks import check, check_texts, checked
from sow_replication.greeting import not_accepted, of_other_cluster
from sow_replication.link_states import Outgoing
from sow_replication.node import Node
from sow_replication.options import SECOND, PeerOptions
from sow_replication.ports import ANY_CALLER, LinkTexts, PeerCaller, Refused
from sow_replication.reads import Fetched, Read
from sow_replication.receiver import Parsed, Receiver, parsed
from sow_replication.repair import fetch_rows, merge_rows, repair
from sow_replication.sender import Sender
from sow_replication.status import status
from sow_replication.verify import Means, checksum, list_versions, verify
from sow_replication.wire import abort, opened, reason_name, refused_by, sealed

log = structlog.get_logger(__name__)

NO_TOKENS: Final[Mapping[str, str]] = MappingProxyType({})
QUICK_BYTES_MAX: Final = 2048
"""A message up to this size has few parts, so it is checked on the event loop; a larger one may have so many that it
takes seconds, so a reader thread does it."""
IDLE_SECONDS: Final = 1.0
"""The longest time that a dialling task waits before it checks again."""

Stub: TypeAlias = "replication_pb2_grpc.ReplicationServiceAsyncStub"
Context: TypeAlias = grpc.aio.ServicerContext[object, object]
T = TypeVar("T")
Asking = TypeVar(
    "Asking",
    replication_pb2.ChecksumRequest,
    replication_pb2.ListVersionsRequest,
    replication_pb2.FetchRowsRequest,
    replication_pb2.MergeRowsRequest,
)


class Replication:
    """Replication of one instance, running."""

    def __init__(
        self,
        node: Node,
        *,
        readers: Executor,
        channel: Callable[[PeerOptions], grpc.aio.Channel],
        token: str = "",
        tokens: Mapping[str, str] = NO_TOKENS,
    ) -> None:
        """`token`: peers must present it, and it is presented to them; empty: none. `tokens`: other tokens to present,
        by the name of the peer."""
        self.node: Final = node
        self._readers = readers
        self._channel = channel
        self._token = token
        self._tokens = dict(tokens)
        self._ticking: asyncio.Task[None] | None = None
        self._dialling: dict[str, asyncio.Task[None]] = {}
        """Keyed by the name of the peer."""
        self._stopped = asyncio.Event()
        self._leaving = False
        """True if links end once they have nothing to send."""
        self.servicer: Final = Servicer(node, readers, token, self._stopped)

    async def start(self) -> None:
        """Starts to dial the peers."""
        self._ticking = asyncio.create_task(self._tick())
        for out in self.node.outgoing.values():
            self._dial(out)

    def _dial(self, out: Outgoing) -> None:
        self._dialling[out.peer.name] = asyncio.create_task(self._keep(out))

    def stop_receiving(self) -> None:
        """Ends the links on which others send, and takes no new ones. Sending goes on, for writes that wait for
        REPLICATED."""
        self._stopped.set()
        self.servicer.stop()

    async def stop(self) -> None:
        """Ends all links. Peers hear before of the last acknowledgements of durables, if they take them soon."""
        self._stopped.set()
        await self._leave()
        tasks = [*self._dialling.values(), *([] if self._ticking is None else [self._ticking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.servicer.stop()

    async def _leave(self) -> None:
        self._leaving = True
        leaving = [
            self._dialling[out.peer.name]
            for out in self.node.outgoing.values()
            if out.sender is not None and out.sender.streaming and out.peer.name in self._dialling
        ]
        for out in self.node.outgoing.values():
            if out.sender is not None:
                out.sender.tell_durables()
                out.sender.wake()
        if leaving:
            await asyncio.wait(leaving, timeout=self.node.options.farewell_micros / SECOND)

    async def add(self, peer: PeerOptions, token: str) -> None:
        """Sends to another instance from now on (node [3]). `token`: to present to it; empty: the common one."""
        self._tokens.pop(peer.name, None)
        if token:
            self._tokens[peer.name] = token
        out = self.node.add(peer)
        await self._hang_up(peer.name)
        if not self._stopped.is_set():
            self._dial(out)

    async def remove(self, name: str) -> None:
        """Ends the links with an instance (node [3])."""
        self.node.remove(name)
        self._tokens.pop(name, None)
        await self._hang_up(name)

    async def _hang_up(self, name: str) -> None:
        task = self._dialling.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def sync_peers(self, topic: str) -> int:
        """The number of sync peers that are configured for the topic; 0: REPLICATED cannot be reached."""
        return self.node.gates.sync_peers(topic)

    async def replicated(self, topic: str, sequence: int) -> None:
        """Returns once the sync peers have the sequence. Raises Refused (REPLICATION_UNAVAILABLE)."""
        await self.node.gates.replicated(topic, sequence)

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """The current state of the links."""
        return status(self.node)

    def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        """Compares with a peer. Raises Refused."""
        store = self.node.store
        return self._comparing(
            request.peer, lambda peer, kinds, means: verify(store, peer, kinds, request, means=means)
        )

    def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        """Repairs the differences to a peer. Raises Refused."""
        store = self.node.store
        return self._comparing(
            request.peer, lambda peer, kinds, means: repair(store, peer, kinds, request, means=means)
        )

    async def _comparing(
        self, name: str, compare: Callable[[Calls, list[TopicKind], Means], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        """The responses of a comparison with a peer, over a channel of its own."""
        out = self.node.outgoing.get(name)
        if out is None:
            raise Refused(types_pb2.ERROR_REASON_PEER_NOT_FOUND, f"peer: no peer {name[:200]!r} is configured")
        means = Means(
            run=partial(_in_thread, self._readers),
            sleep=asyncio.sleep,
            lagging=partial(self.node.lagging, name),
            filter_text=out.peer.filter,
        )
        async with self._channel(out.peer) as channel:
            calls = Calls(self._stub(channel), out.peer.address, self._metadata(name))
            async with aclosing(compare(calls, self.node.store.topics(out.peer.topics), means)) as responses:
                async for response in responses:
                    yield response

    def _stub(self, channel: grpc.aio.Channel) -> Stub:
        stub: Stub = replication_pb2_grpc.ReplicationServiceStub(channel)
        return stub

    # -- tasks ------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.node.options.heartbeat_micros / SECOND)
            try:
                self.node.tick()
            except Exception:  # ticks go on whatever one of them raises
                log.exception("replication_tick_failed")

    async def _keep(self, out: Outgoing) -> None:
        """Dials a peer, again and again."""
        while not self._leaving:
            wait = (out.next_at_micros - self.node.store.now_micros()) / SECOND
            if wait > 0:
                # The store's clock may stand still or be slewed, so it is read again now and then.
                await asyncio.sleep(min(wait, IDLE_SECONDS))
                continue
            sender = self.node.dialled(out)
            try:
                async with self._channel(out.peer) as channel:
                    await self._drive(sender, self._stub(channel), self._metadata(out.peer.name))
            except Refused as refused:  # its credentials cannot be read
                sender.fail(refused)
            except Exception as error:  # a bug here must not end replication for good
                log.exception("replication_link_failed", peer=out.peer.name)
                sender.fail(_internal(error))
            finally:
                sender.fail(Refused(types_pb2.ERROR_REASON_STOPPING, "the instance is stopping"))
                self.node.closed(sender)

    def _metadata(self, peer: str) -> tuple[tuple[str, str], ...]:
        token = self._tokens.get(peer, self._token)
        return (("authorization", f"Bearer {token}"),) if token else ()

    async def _drive(self, sender: Sender, stub: Stub, metadata: tuple[tuple[str, str], ...]) -> None:
        call = stub.Replicate(metadata=metadata)
        wakened = asyncio.Event()

        def wake() -> None:
            wakened.set()
            if sender.failure is not None:
                call.cancel()  # this ends a write that is stuck because the peer does not read

        sender.wake = wake
        hearing = asyncio.create_task(_hear(call, sender, self._readers))
        connecting = asyncio.create_task(call.wait_for_connection())
        numbers = itertools.count(1)
        try:
            # A write waits for the connection, for ever if the call is cancelled before the connection is up.
            await asyncio.wait([connecting, hearing], return_when=asyncio.FIRST_COMPLETED)
            while sender.failure is None:
                wakened.clear()
                message = sender.next_message()
                read = sender.next_read()
                if read is not None:
                    self._read(sender, read)
                if message is not None:
                    if not await _written(call, sealed(message, next(numbers))):
                        await asyncio.wait([hearing])  # it gets the reason
                elif read is None and self._leaving:
                    await call.done_writing()
                    await asyncio.wait([hearing])  # the peer ends the link once it has taken everything
                elif read is None:
                    await wakened.wait()
        finally:
            hearing.cancel()
            connecting.cancel()
            call.cancel()
            await asyncio.gather(hearing, connecting, return_exceptions=True)

    def _read(self, sender: Sender, read: Read) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._readers, _run, read)

        def took(done: asyncio.Future[Fetched | Refused]) -> None:
            if done.cancelled():
                return
            try:
                sender.took(done.result())
            except Exception as error:  # otherwise the error would be lost, and the link would stand still
                log.exception("replication_read_failed", peer=sender.peer.name)
                sender.fail(_internal(error))

        future.add_done_callback(took)


def _run(read: Read) -> Fetched | Refused:
    try:
        return read.run()
    except Refused as refused:
        return refused
    except Exception as error:  # the link ends and is tried again
        log.exception("replication_read_failed")
        return _internal(error)


async def _written(
    call: grpc.aio.StreamStreamCall[replication_pb2.Sealed, replication_pb2.Sealed], message: replication_pb2.Sealed
) -> bool:
    """True if the stream has taken a message; False when the stream has ended."""
    try:
        await call.write(message)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return False
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # this instance is stopping
        return False  # the call was cancelled, not this task
    return True


async def _hear(
    call: grpc.aio.StreamStreamCall[replication_pb2.Sealed, replication_pb2.Sealed],
    sender: Sender,
    readers: Executor,
) -> None:
    try:
        numbers = itertools.count(1)
        async for response in call:
            parse = partial(_answer, response, next(numbers))
            quick = response.ByteSize() <= QUICK_BYTES_MAX
            sender.take(parse() if quick else await _in_thread(readers, parse))
        sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "the peer has ended the link"))
    except grpc.aio.AioRpcError as error:
        sender.fail(refused_by(error, sender.peer.address))
    except Refused as damaged:
        sender.fail(damaged)
    except Exception as error:  # the link ends and is tried again
        log.exception("replication_receive_failed", peer=sender.peer.name)
        sender.fail(_internal(error))


def _answer(response: replication_pb2.Sealed, number: int) -> replication_pb2.ReplicateResponse:
    """A message of a receiver, checked. Raises Refused."""
    return checked(opened(replication_pb2.ReplicateResponse, response, number))


def _internal(error: Exception) -> Refused:
    return Refused(types_pb2.ERROR_REASON_INTERNAL, f"{type(error).__name__}: {error}")


def _parsed(request: replication_pb2.Sealed, number: int, texts: LinkTexts | None) -> Parsed:
    """A message of a sender, checked. `texts`: for a greeting; None: one would be refused. Raises Refused."""
    message = opened(replication_pb2.ReplicateRequest, request, number)
    if texts is not None and message.HasField("hello"):
        check_texts(message, texts)
    return parsed(message)


class Servicer(replication_pb2_grpc.ReplicationServiceServicer):
    """The service that peers call."""

    def __init__(self, node: Node, readers: Executor, token: str, stopped: asyncio.Event) -> None:
        self._node = node
        self._run = partial(_in_thread, readers)
        self._token = f"Bearer {token}".encode() if token else b""
        self._stopped = stopped
        self._receivers: set[Receiver] = set()

    def stop(self) -> None:
        """Ends the incoming links."""
        for receiver in list(self._receivers):
            receiver.fail(Refused(types_pb2.ERROR_REASON_STOPPING, "the instance is stopping"))

    async def _check(self, context: Context) -> None:
        """Ends a call without the right token (rule R11), unless its caller is known otherwise, and every call once
        this instance is stopping."""
        if self._stopped.is_set():
            await abort(context, Refused(types_pb2.ERROR_REASON_STOPPING, "the instance is stopping"))
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        shown = given.encode() if isinstance(given, str) else given
        if self._token and caller_of(context).name is None and not hmac.compare_digest(shown, self._token):
            name = self._node.store.identity.name
            await abort(
                context,
                Refused(
                    types_pb2.ERROR_REASON_PEER_UNAUTHENTICATED,
                    f"{name} expects a token, and this call had none or another one",
                ),
            )

    async def Replicate(
        self, request_iterator: AsyncIterator[replication_pb2.Sealed], context: Context
    ) -> AsyncIterator[replication_pb2.Sealed]:
        await self._check(context)
        receiver = self._node.accept(caller_of(context))
        self._receivers.add(receiver)
        wakened, room = asyncio.Event(), asyncio.Event()

        def wake() -> None:
            wakened.set()
            room.set()

        receiver.wake = wake
        hearing = asyncio.create_task(self._take(request_iterator, receiver, room))
        numbers = itertools.count(1)
        try:
            while True:
                wakened.clear()
                message = receiver.next_message()
                if message is not None:
                    yield sealed(message, next(numbers))
                elif receiver.failure is not None:
                    break
                else:
                    await wakened.wait()
                room.set()  # an answer has gone out
        finally:
            receiver.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "the link has ended"))
            self._receivers.discard(receiver)
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        why, sender = receiver.failure, receiver.identity
        if why.reason != types_pb2.ERROR_REASON_RESEED_PENDING:  # the sender tries again until that has passed
            log.info(
                "link_ended",
                peer=(receiver.caller.name or "") if sender is None else sender.name,
                reason="" if why.reason == types_pb2.ERROR_REASON_UNSPECIFIED else reason_name(why.reason),
                message=why.message,
            )
        await abort(context, receiver.failure)

    async def _take(
        self, requests: AsyncIterator[replication_pb2.Sealed], receiver: Receiver, room: asyncio.Event
    ) -> None:
        try:
            numbers = itertools.count(1)
            async for request in requests:
                texts = self._node.store if receiver.identity is None else None
                parse = partial(_parsed, request, next(numbers), texts)
                quick = texts is None and request.ByteSize() <= QUICK_BYTES_MAX
                receiver.take(parse() if quick else await self._run(parse))
                while receiver.full and receiver.failure is None:
                    room.clear()
                    await room.wait()
            receiver.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "the sender has ended the link"))
        except Refused as refused:
            receiver.fail(refused)
        except DecodeError:
            receiver.fail(Refused(types_pb2.ERROR_REASON_BATCH_DAMAGED, "the received bytes are no message"))
        except Exception as error:  # the link ends, and the sender comes back
            log.exception("replication_receive_failed")
            receiver.fail(_internal(error))

    async def Checksum(self, request: replication_pb2.Sealed, context: Context) -> replication_pb2.Sealed:
        asked = await self._asked(replication_pb2.ChecksumRequest, request, context)
        async with self._reasons(context):
            return sealed(await checksum(self._node.store, asked, run=self._run))

    async def ListVersions(
        self, request: replication_pb2.Sealed, context: Context
    ) -> AsyncIterator[replication_pb2.Sealed]:
        asked = await self._asked(replication_pb2.ListVersionsRequest, request, context)
        numbers = itertools.count(1)
        async with self._reasons(context), aclosing(list_versions(self._node.store, asked, run=self._run)) as found:
            async for response in found:
                yield sealed(response, next(numbers))

    async def FetchRows(self, request: replication_pb2.Sealed, context: Context) -> replication_pb2.Sealed:
        asked = await self._asked(replication_pb2.FetchRowsRequest, request, context)
        async with self._reasons(context):
            return sealed(await fetch_rows(self._node.store, asked, run=self._run))

    async def MergeRows(self, request: replication_pb2.Sealed, context: Context) -> replication_pb2.Sealed:
        asked = await self._asked(replication_pb2.MergeRowsRequest, request, context)
        async with self._reasons(context):
            return sealed(await merge_rows(self._node.store, asked))

    async def _asked(self, kind: type[Asking], request: replication_pb2.Sealed, context: Context) -> Asking:
        """The request of a call. Ends the call if the caller is not accepted or the request is damaged."""
        await self._check(context)
        async with self._reasons(context):
            asked = opened(kind, request)
            caller = caller_of(context)
            if asked.instance.name not in self._node.incoming or not caller.is_named(asked.instance.name):
                raise not_accepted(self._node.store.identity, asked.instance.name)
            store = self._node.store
            if (objection := of_other_cluster(store.identity, store.cluster, asked.instance)) is not None:
                raise objection
            topic = _topic_of(asked)
            if not caller.permits(topic):
                raise Refused(
                    types_pb2.ERROR_REASON_PERMISSION_DENIED, f"{asked.instance.name} may not compare {topic[:200]}"
                )
            check(asked)
        return asked

    @contextlib.asynccontextmanager
    async def _reasons(self, context: Context) -> AsyncIterator[None]:
        """Turns a refusal into the status of the call."""
        try:
            yield
        except Refused as refused:
            await abort(context, refused)


def _topic_of(asked: Asking) -> str:
    match asked:
        case replication_pb2.ChecksumRequest() | replication_pb2.MergeRowsRequest():
            return asked.topic.name
        case _:
            return asked.topic


def caller_of(context: Context) -> PeerCaller:
    """The caller that the server has put on the context of a call; anybody, where it has not."""
    found = getattr(context, "peer_caller", ANY_CALLER)
    assert isinstance(found, PeerCaller), "the server puts one there"
    return found


async def _in_thread(readers: Executor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(readers, work)
