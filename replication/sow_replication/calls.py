"""The calls to a peer, over gRPC: what `verify.Peer` promises. A call that fails says why in the one vocabulary."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import grpc

from sow.v1 import replication_pb2, replication_pb2_grpc, types_pb2
from sow_replication.ports import Refused
from sow_replication.wire import refused_by


class Calls:
    """A `verify.Peer` on the stub of a channel. `metadata` goes with each call: our credentials (rule R11)."""

    def __init__(
        self,
        stub: replication_pb2_grpc.ReplicationServiceAsyncStub,
        address: str,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`address`: where the channel goes, for what is said of errors."""
        self._stub = stub
        self._address = address
        self._metadata = tuple(metadata)

    async def checksum(self, request: replication_pb2.ChecksumRequest, /) -> replication_pb2.ChecksumResponse:
        """Raises Refused, as all of these do."""
        try:
            return await self._stub.Checksum(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused_of(error, self._address) from error

    async def list_versions(
        self, request: replication_pb2.ListVersionsRequest, /
    ) -> AsyncGenerator[replication_pb2.ListVersionsResponse, None]:
        """The call is cancelled when this is closed."""
        call = self._stub.ListVersions(request, metadata=self._metadata)
        try:
            async for part in call:
                yield part
        except grpc.aio.AioRpcError as error:
            raise refused_of(error, self._address) from error
        finally:
            call.cancel()

    async def fetch_rows(self, request: replication_pb2.FetchRowsRequest, /) -> replication_pb2.FetchRowsResponse:
        """Records and tombstones."""
        try:
            return await self._stub.FetchRows(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused_of(error, self._address) from error

    async def merge_rows(self, request: replication_pb2.MergeRowsRequest, /) -> replication_pb2.MergeRowsResponse:
        """Merges them."""
        try:
            return await self._stub.MergeRows(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused_of(error, self._address) from error


def refused_of(error: grpc.aio.AioRpcError, address: str) -> Refused:
    """Why a call failed: the peer's reason, or REPLICATION_UNAVAILABLE where it gave none: the transport ended it."""
    refused = refused_by(error, address)
    if refused.reason != types_pb2.ERROR_REASON_UNSPECIFIED:
        return refused
    return Refused(types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE, refused.message)
