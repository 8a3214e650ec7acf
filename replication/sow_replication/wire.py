"""How a refusal travels between instances: status, and ErrorInfo with its reason (rule X1)."""

from __future__ import annotations

from typing import Final, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import types_pb2
from sow_replication.ports import Reason, Refused

DOMAIN: Final = "sow"
PREFIX: Final = "ERROR_REASON_"
DETAILS: Final = "grpc-status-details-bin"
MESSAGE_CHARACTERS_MAX: Final = 500
"""A longer message is cut: trailers beyond 8 KiB do not arrive."""
_CODES: Final[dict[Reason, grpc.StatusCode]] = {
    types_pb2.ERROR_REASON_UNSPECIFIED: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_STOPPING: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_STORE_FAILED: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_RESEED_PENDING: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_PEER_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    types_pb2.ERROR_REASON_PEER_NOT_ACCEPTED: grpc.StatusCode.PERMISSION_DENIED,
    types_pb2.ERROR_REASON_PEER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    types_pb2.ERROR_REASON_TOPIC_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    types_pb2.ERROR_REASON_BATCH_DAMAGED: grpc.StatusCode.DATA_LOSS,
    types_pb2.ERROR_REASON_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    types_pb2.ERROR_REASON_INTERNAL: grpc.StatusCode.INTERNAL,
}


async def abort(context: grpc.aio.ServicerContext[object, object], refused: Refused) -> NoReturn:
    """Ends a call with a refusal."""
    code = _CODES.get(refused.reason, grpc.StatusCode.FAILED_PRECONDITION)
    message = refused.message[:MESSAGE_CHARACTERS_MAX]
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason_name(refused.reason), domain=DOMAIN))
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message, details=[detail])
    await context.abort(code, message, ((DETAILS, status.SerializeToString()),))
    raise AssertionError("abort has raised")


def refused_by(error: grpc.aio.AioRpcError) -> Refused:
    """What a call has ended with."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS and isinstance(value, bytes):
            info = error_details_pb2.ErrorInfo()
            try:
                details = status_pb2.Status.FromString(value).details
            except DecodeError:
                continue
            for detail in details:
                if (
                    detail.Unpack(info)
                    and info.domain == DOMAIN
                    and PREFIX + info.reason in types_pb2.ErrorReason.DESCRIPTOR.values_by_name
                ):
                    return Refused(types_pb2.ErrorReason.Value(PREFIX + info.reason), error.details() or "")
    return Refused(types_pb2.ERROR_REASON_UNSPECIFIED, f"{error.code().name}: {error.details()}")


def reason_name(reason: Reason) -> str:
    """As it travels: without the prefix."""
    return types_pb2.ErrorReason.Name(reason).removeprefix(PREFIX)
