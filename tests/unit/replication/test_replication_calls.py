"""The calls of verify and repair over gRPC: answers and failures; the peer is a server in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from sow.v1 import replication_pb2, replication_pb2_grpc, types_pb2
from sow_replication.calls import Calls
from sow_replication.ports import Refused
from sow_replication.wire import opened, refused_by, sealed
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services.door.statuses import abort


class Peer(replication_pb2_grpc.ReplicationServiceServicer):
    """Gives the answers that a test sets."""

    def __init__(self) -> None:
        self.error: StoreError | None = None
        self.waits = False
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.metadata: dict[str, str | bytes] = {}
        self.loses = False
        """A message of a list vanishes on the way."""
        self.damage: Callable[[replication_pb2.Sealed], replication_pb2.Sealed] = lambda answer: answer

    async def _answer(self, context: Any) -> None:  # Any: a context of each method's own types
        self.metadata = dict(context.invocation_metadata())
        if self.error is not None:
            await abort(context, self.error)
        if self.waits:
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()

    def Replicate(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802  # the contract's name
        raise AssertionError("no link is opened here")

    def _sealed(self, message: Message, number: int = 0) -> replication_pb2.Sealed:
        return self.damage(sealed(message, number))

    async def Checksum(self, request: Any, context: Any) -> replication_pb2.Sealed:  # noqa: N802  # as above
        await self._answer(context)
        asked = opened(replication_pb2.ChecksumRequest, request)
        return self._sealed(replication_pb2.ChecksumResponse(checksum=[asked.buckets]))

    async def ListVersions(self, request: Any, context: Any) -> AsyncIterator[replication_pb2.Sealed]:  # noqa: N802  # as above
        opened(replication_pb2.ListVersionsRequest, request)
        yield self._sealed(replication_pb2.ListVersionsResponse(key=["1"]), 1)
        await self._answer(context)
        if not self.loses:
            yield self._sealed(replication_pb2.ListVersionsResponse(key=["2"]), 2)
        yield self._sealed(replication_pb2.ListVersionsResponse(key=["3"]), 3)

    async def FetchRows(self, request: Any, context: Any) -> replication_pb2.Sealed:  # noqa: N802  # as above
        await self._answer(context)
        opened(replication_pb2.FetchRowsRequest, request)
        return self._sealed(replication_pb2.FetchRowsResponse(chunk=b"chunk", origins=["a"]))

    async def MergeRows(self, request: Any, context: Any) -> replication_pb2.Sealed:  # noqa: N802  # as above
        await self._answer(context)
        opened(replication_pb2.MergeRowsRequest, request)
        return self._sealed(replication_pb2.MergeRowsResponse(applied=3))


async def listed(calls: Calls) -> list[str]:
    """The keys of all parts."""
    return [key async for part in calls.list_versions(replication_pb2.ListVersionsRequest()) for key in part.key]


CALLS: list[Callable[[Calls], Awaitable[object]]] = [
    lambda calls: calls.checksum(replication_pb2.ChecksumRequest(buckets=7)),
    listed,
    lambda calls: calls.fetch_rows(replication_pb2.FetchRowsRequest()),
    lambda calls: calls.merge_rows(replication_pb2.MergeRowsRequest()),
]


def using(use: Callable[[Calls, Peer, grpc.aio.Server], Awaitable[None]]) -> None:
    """Runs `use` with calls to a peer."""

    async def run() -> None:
        peer = Peer()
        server = grpc.aio.server()
        replication_pb2_grpc.add_ReplicationServiceServicer_to_server(peer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = replication_pb2_grpc.ReplicationServiceStub(channel)  # the asynchronous one is a name for types
            await use(Calls(stub, address, [("token", "secret")]), peer, server)
        await server.stop(None)

    asyncio.run(run())


def test_answers_come_back_and_credentials_go_along() -> None:
    async def use(calls: Calls, peer: Peer, server: grpc.aio.Server) -> None:
        expected = [
            replication_pb2.ChecksumResponse(checksum=[7]),
            ["1", "2", "3"],
            replication_pb2.FetchRowsResponse(chunk=b"chunk", origins=["a"]),
            replication_pb2.MergeRowsResponse(applied=3),
        ]
        for call, answer in zip(CALLS, expected, strict=True):
            peer.metadata = {}
            assert await call(calls) == answer
            assert peer.metadata["token"] == "secret"

    using(use)


def test_an_answer_with_a_flipped_bit_is_refused() -> None:
    """Story: an origin's name that was wrong by one bit was merged by a repair, and stayed."""

    def flipped(answer: replication_pb2.Sealed) -> replication_pb2.Sealed:
        message = bytearray(answer.message)
        message[-1] ^= 1
        return replication_pb2.Sealed(message=bytes(message), crc32=answer.crc32, number=answer.number)

    async def use(calls: Calls, peer: Peer, server: grpc.aio.Server) -> None:
        peer.damage = flipped
        for call in CALLS:
            with pytest.raises(Refused) as error:
                await call(calls)
            assert error.value.reason == types_pb2.ERROR_REASON_BATCH_DAMAGED

    using(use)


def test_a_list_of_which_a_message_is_missing_is_refused() -> None:
    async def use(calls: Calls, peer: Peer, server: grpc.aio.Server) -> None:
        peer.loses = True
        with pytest.raises(Refused, match="message 3 came instead of message 2"):
            await listed(calls)

    using(use)


@pytest.mark.parametrize("reason", [Reason.TOPIC_NOT_FOUND, Reason.RESULT_TOO_LARGE])
def test_a_refusal_keeps_its_reason(reason: Reason) -> None:
    async def use(calls: Calls, peer: Peer, server: grpc.aio.Server) -> None:
        peer.error = StoreError(reason, "that is why")
        for call in CALLS:
            with pytest.raises(Refused) as error:
                await call(calls)
            assert (error.value.reason, error.value.message) == (reason.value, "that is why")

    using(use)


def test_a_peer_that_goes_away_is_unavailable() -> None:
    async def use(calls: Calls, peer: Peer, server: grpc.aio.Server) -> None:
        peer.waits = True
        asked = [asyncio.ensure_future(call(calls)) for call in CALLS]
        await peer.waiting.wait()
        await server.stop(None)

        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, Refused)
            assert answer.reason == types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE

    using(use)


@pytest.mark.parametrize(
    ("code", "details", "told"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            (
                "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
                "Failed to connect to remote host: Connection refused"
            ),
            "cannot reach ldn:7450: connection refused",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "errors resolving ldn:7450: [field:hostname lookup error:address failed: Domain name not found]",
            "cannot reach ldn:7450: domain name not found",
        ),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "the connection to ldn:7450 was lost: Socket closed"),
        (grpc.StatusCode.UNIMPLEMENTED, "no", "ldn:7450 does not answer as an instance does: no"),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", "the connection to ldn:7450 was lost"),
        (grpc.StatusCode.INTERNAL, "bug", "the call to ldn:7450 failed (INTERNAL): bug"),
    ],
)
def test_messages_of_the_transport_become_words(code: grpc.StatusCode, details: str, told: str) -> None:
    """It read "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:…"."""
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)

    refused = refused_by(error, "ldn:7450")

    assert (refused.reason, refused.message) == (types_pb2.ERROR_REASON_UNSPECIFIED, told)


def test_a_list_without_a_reader_is_cancelled() -> None:
    """Or the peer would go on with it for nobody."""

    async def use(calls: Calls, peer: Peer, server: grpc.aio.Server) -> None:
        peer.waits = True
        parts = calls.list_versions(replication_pb2.ListVersionsRequest())
        await anext(parts)
        await peer.waiting.wait()

        await parts.aclose()

        await asyncio.wait_for(peer.cancelled.wait(), 30)

    using(use)
