"""The form of messages and refusals between instances: messages are sealed by a checksum, and a refusal is a status
with the reason in an ErrorInfo (rule X1)."""

from __future__ import annotations

import re
import zlib
from typing import Final, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import replication_pb2, types_pb2
from sow_replication.ports import Reason, Refused

M = TypeVar("M", bound=Message)
DOMAIN: Final = "sow"
PREFIX: Final = "ERROR_REASON_"
DETAILS: Final = "grpc-status-details-bin"
MESSAGE_CHARACTERS_MAX: Final = 500
"""Longer messages are cut, because trailers beyond 8 KiB do not arrive."""
_NUMBER_MAX: Final = 2**32 - 1
_UNREACHABLE: Final = re.compile(
    r"failed to connect to all addresses; last error: [A-Z_]+: (?:ipv[46]:\S+: )?"
    r"(?:Failed to connect to remote host: )?|errors resolving .*: "
)
"""The text that gRPC puts before the reason why it could not connect."""
_BROKEN_WRITE: Final = "Internal error from Core"
"""The text of gRPC for a write after the end of the call, when the status has not yet been read."""
_CODES: Final[dict[Reason, grpc.StatusCode]] = {
    types_pb2.ERROR_REASON_UNSPECIFIED: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_STOPPING: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_STORE_FAILED: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_RESEED_PENDING: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_PEER_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    types_pb2.ERROR_REASON_PEER_NOT_ACCEPTED: grpc.StatusCode.PERMISSION_DENIED,
    types_pb2.ERROR_REASON_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
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


def refused_by(error: grpc.aio.AioRpcError, address: str) -> Refused:
    """The reason why a call to an address ended. UNSPECIFIED: the peer gave no reason, so the transport ended the
    call."""
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
    return Refused(types_pb2.ERROR_REASON_UNSPECIFIED, _transport(error.code(), error.details() or "", address))


def _transport(code: grpc.StatusCode, details: str, address: str) -> str:
    """A message of gRPC about a connection, in words for an operator. Messages of an unknown form are repeated."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{address} does not answer as an instance does: {details}"
    if code is grpc.StatusCode.INTERNAL and details == _BROKEN_WRITE:
        return f"the connection to {address} was lost"
    if code is not grpc.StatusCode.UNAVAILABLE:
        return f"the call to {address} failed ({code.name}): {details}"
    unreachable = _UNREACHABLE.search(details)
    if unreachable is None:
        return f"the connection to {address} was lost: {details}"
    why = details[unreachable.end() :].rstrip("]")
    return f"cannot reach {address}: {why[:1].lower()}{why[1:]}"


def reason_name(reason: Reason) -> str:
    """The name of a reason as in an ErrorInfo: without the prefix."""
    return types_pb2.ErrorReason.Name(reason).removeprefix(PREFIX)


def sealed(message: Message, number: int = 0) -> replication_pb2.Sealed:
    """Seals a message. `number` counts the messages of a direction; 0: they are not numbered."""
    written = message.SerializeToString()
    number &= _NUMBER_MAX
    return replication_pb2.Sealed(message=written, crc32=zlib.crc32(written, number), number=number)


def opened(kind: type[M], given: replication_pb2.Sealed, number: int = 0) -> M:
    """Opens a sealed message that came at this position. Raises Refused (BATCH_DAMAGED)."""
    if zlib.crc32(given.message, given.number) != given.crc32:
        raise Refused(types_pb2.ERROR_REASON_BATCH_DAMAGED, "a message does not match its checksum")
    if given.number not in (0, number & _NUMBER_MAX):
        missing = f"message {given.number} came instead of message {number}"
        raise Refused(types_pb2.ERROR_REASON_BATCH_DAMAGED, missing)
    try:
        return kind.FromString(given.message)
    except DecodeError:
        raise Refused(types_pb2.ERROR_REASON_BATCH_DAMAGED, "a message cannot be read") from None
