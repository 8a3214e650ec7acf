"""The calls to a peer, over gRPC: what `verify.Peer` promises. A call that fails says why in the one vocabulary."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Final

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import replication_pb2, replication_pb2_grpc, types_pb2
from sow_replication.ports import Reason, Refused

ERROR_DOMAIN: Final = "sow"
STATUS_KEY: Final = "grpc-status-details-bin"


class Calls:
    """A `verify.Peer` on the stub of a channel. `metadata` goes with each call: our credentials (rule R11)."""

    def __init__(
        self, stub: replication_pb2_grpc.ReplicationServiceAsyncStub, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._stub = stub
        self._metadata = tuple(metadata)

    async def checksum(self, request: replication_pb2.ChecksumRequest, /) -> replication_pb2.ChecksumResponse:
        """Raises Refused, as all of these do."""
        try:
            return await self._stub.Checksum(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused_of(error) from error

    async def list_versions(
        self, request: replication_pb2.ListVersionsRequest, /
    ) -> AsyncGenerator[replication_pb2.ListVersionsResponse, None]:
        """The call is cancelled when this is closed."""
        call = self._stub.ListVersions(request, metadata=self._metadata)
        try:
            async for part in call:
                yield part
        except grpc.aio.AioRpcError as error:
            raise refused_of(error) from error
        finally:
            call.cancel()

    async def fetch_rows(self, request: replication_pb2.FetchRowsRequest, /) -> replication_pb2.FetchRowsResponse:
        """Records and tombstones."""
        try:
            return await self._stub.FetchRows(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused_of(error) from error

    async def merge_rows(self, request: replication_pb2.MergeRowsRequest, /) -> replication_pb2.MergeRowsResponse:
        """Merges them."""
        try:
            return await self._stub.MergeRows(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise refused_of(error) from error


def refused_of(error: grpc.aio.AioRpcError) -> Refused:
    """Why a call failed: the peer's reason, or REPLICATION_UNAVAILABLE where it gave none: the transport ended it."""
    text = error.details() or error.code().name
    reason = _reason(error)
    if reason is None:
        return Refused(types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE, f"the call failed ({error.code().name}): {text}")
    return Refused(reason, text)


def _reason(error: grpc.aio.AioRpcError) -> Reason | None:
    encoded = next((value for key, value in error.trailing_metadata() if key == STATUS_KEY), None)
    if not isinstance(encoded, bytes):
        return None
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(encoded).details:
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                return types_pb2.ErrorReason.Value(f"ERROR_REASON_{info.reason}")
    except (message.DecodeError, ValueError):  # ValueError: a reason of a later release
        return None
    return None
