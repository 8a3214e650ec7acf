"""The calls to a peer over gRPC, as `verify.PeerCalls`. A failed call raises Refused with its reason.

Requests and answers are sealed like the messages of a link: rows with a flipped bit must not be merged."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from sow.v1 import replication_pb2, replication_pb2_grpc, types_pb2
from sow_replication.checks import checked
from sow_replication.ports import Refused
from sow_replication.wire import opened, refused_by, sealed

M = TypeVar("M", bound=Message)


class Calls:
    """A `verify.PeerCalls` on the stub of a channel. `metadata` goes with each call: our credentials (rule R11)."""

    def __init__(
        self,
        stub: replication_pb2_grpc.ReplicationServiceAsyncStub,
        address: str,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`address`: the target of the channel, for error messages."""
        self._stub = stub
        self._address = address
        self._metadata = tuple(metadata)

    async def checksum(self, request: replication_pb2.ChecksumRequest, /) -> replication_pb2.ChecksumResponse:
        """Raises Refused, like all of these methods."""
        return await self._answer(self._stub.Checksum, request, replication_pb2.ChecksumResponse)

    async def list_versions(
        self, request: replication_pb2.ListVersionsRequest, /
    ) -> AsyncGenerator[replication_pb2.ListVersionsResponse, None]:
        """The call is cancelled when this is closed."""
        call = self._stub.ListVersions(sealed(request), metadata=self._metadata)
        numbers = itertools.count(1)
        try:
            async for part in call:
                yield checked(opened(replication_pb2.ListVersionsResponse, part, next(numbers)))
        except grpc.aio.AioRpcError as error:
            raise refused_of(error, self._address) from error
        finally:
            call.cancel()

    async def fetch_rows(self, request: replication_pb2.FetchRowsRequest, /) -> replication_pb2.FetchRowsResponse:
        """Records and tombstones."""
        return await self._answer(self._stub.FetchRows, request, replication_pb2.FetchRowsResponse)

    async def merge_rows(self, request: replication_pb2.MergeRowsRequest, /) -> replication_pb2.MergeRowsResponse:
        """Merges them."""
        return await self._answer(self._stub.MergeRows, request, replication_pb2.MergeRowsResponse)

    async def _answer(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[replication_pb2.Sealed, replication_pb2.Sealed],
        request: Message,
        kind: type[M],
    ) -> M:
        try:
            answer = await method(sealed(request), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused_of(error, self._address) from error
        return checked(opened(kind, answer))


def refused_of(error: grpc.aio.AioRpcError, address: str) -> Refused:
    """The reason why a call failed: the peer's, or REPLICATION_UNAVAILABLE where the transport ended the call."""
    refused = refused_by(error, address)
    if refused.reason != types_pb2.ERROR_REASON_UNSPECIFIED:
        return refused
    return Refused(types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE, refused.message)
