"""The one table from the store's reasons to gRPC status codes, and the status of an error (rule X1)."""

from __future__ import annotations

from typing import Final, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from sow_server.engine.values.errors import Reason, StoreError

DOMAIN: Final = "sow"
MESSAGE_BYTES_MAX: Final = 1000
"""A longer message is cut; such a message quotes the request. The trailers carry a message three times: twice in the
details and once percent-encoded. A client that gets trailers beyond 8 KiB reports only that they are too large, and the
reason is lost."""
_BAD_REQUEST: Final = grpc.StatusCode.INVALID_ARGUMENT

CODES: Final[dict[Reason, grpc.StatusCode]] = {
    Reason.INVALID_ARGUMENT: _BAD_REQUEST,
    Reason.TOPIC_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.TOPIC_NAME_INVALID: _BAD_REQUEST,
    Reason.TOPIC_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.TOPIC_NOT_EMPTY: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SET_IN_CONFIG: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.KEY_NOT_ALLOWED: _BAD_REQUEST,
    Reason.KEY_REQUIRED: _BAD_REQUEST,
    Reason.KEY_FIELD_MISSING: _BAD_REQUEST,
    Reason.KEY_FIELD_NOT_SCALAR: _BAD_REQUEST,
    Reason.KEY_TOO_LARGE: _BAD_REQUEST,
    Reason.KEY_NOT_UTF8: _BAD_REQUEST,
    Reason.PAYLOAD_TOO_LARGE: _BAD_REQUEST,
    Reason.PAYLOAD_MALFORMED: _BAD_REQUEST,
    Reason.REQUEST_TOO_LARGE: _BAD_REQUEST,
    Reason.ATOMIC_TOO_LARGE: _BAD_REQUEST,
    Reason.ATOMIC_ABORTED: grpc.StatusCode.ABORTED,
    Reason.CONDITION_FAILED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LIFETIME_REJECTED: _BAD_REQUEST,
    Reason.LIFETIME_NEGATIVE: _BAD_REQUEST,
    Reason.LIFETIME_TOO_LONG: _BAD_REQUEST,
    Reason.RECORD_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.UNSUPPORTED_FOR_MESSAGE_TYPE: _BAD_REQUEST,
    Reason.FILTER_INVALID: _BAD_REQUEST,
    Reason.PAGE_TOKEN_INVALID: _BAD_REQUEST,
    Reason.PUBLISHER_FENCED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.OUTCOME_UNKNOWN: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STREAM_BROKEN: grpc.StatusCode.ABORTED,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.WRITE_STALLED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DISK_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STORE_FAILED: grpc.StatusCode.UNAVAILABLE,
    Reason.DATA_DAMAGED: grpc.StatusCode.DATA_LOSS,
    Reason.STOPPING: grpc.StatusCode.UNAVAILABLE,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
    Reason.ORDER_INVALID: _BAD_REQUEST,
    Reason.EXPRESSION_INVALID: _BAD_REQUEST,
    Reason.RESULT_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.UNSET_KEY_FIELD: _BAD_REQUEST,
    Reason.BOOKMARK_MALFORMED: _BAD_REQUEST,
    Reason.BOOKMARK_OTHER_EPOCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.BOOKMARK_IN_FUTURE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.BOOKMARK_TOO_OLD: grpc.StatusCode.OUT_OF_RANGE,
    Reason.NO_JOURNAL: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PATTERN_MATCHES_NOTHING: grpc.StatusCode.NOT_FOUND,
    Reason.RESYNC_REQUIRED: grpc.StatusCode.OUT_OF_RANGE,
    Reason.TOPIC_DELETED: grpc.StatusCode.NOT_FOUND,
    Reason.DURABLE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.DURABLE_IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.DURABLE_TAKEN_OVER: grpc.StatusCode.ABORTED,
    Reason.DURABLE_DETACHED: grpc.StatusCode.ABORTED,
    Reason.DURABLE_DIFFERS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TOPIC_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.BACKLOG_QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.POLICY_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.REPLICATION_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.PEER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.PEER_NOT_ACCEPTED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.PEER_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PEER_IS_SELF: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.INSTANCE_NAME_CLASH: grpc.StatusCode.ALREADY_EXISTS,
    Reason.PROTOCOL_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.CLOCK_SKEW: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.BATCH_DAMAGED: grpc.StatusCode.DATA_LOSS,
    Reason.RESEED_PENDING: grpc.StatusCode.UNAVAILABLE,
    Reason.PEER_BEHIND: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TOPIC_DIFFERS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.EXPORT_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.RESUME_TOKEN_INVALID: _BAD_REQUEST,
    Reason.LOAD_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.LOAD_COMMITTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LOAD_INCOMPLETE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LOAD_FAILED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.UNIT_DONE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TIME_IN_FUTURE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.BACKUP_UNAVAILABLE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.BACKUP_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.ACCESS_CHANGED: grpc.StatusCode.UNAVAILABLE,
    Reason.AUDIT_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.READER_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.BEHIND: grpc.StatusCode.UNAVAILABLE,
    Reason.PEER_OTHER_CLUSTER: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PEER_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.VIEW_READ_ONLY: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.VIEW_BUILDING: grpc.StatusCode.UNAVAILABLE,
    Reason.TOPIC_HAS_VIEWS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TOPIC_ELSEWHERE: grpc.StatusCode.FAILED_PRECONDITION,
}


NOT_REPEATED: Final = frozenset({Reason.REPLICATION_UNAVAILABLE, Reason.BEHIND})
"""UNAVAILABLE, but gRPC must not retry on its own: the write has been carried out on this instance, or the read has
waited here as long as it should."""


def status(error: StoreError) -> status_pb2.Status:
    """The status with its details: ErrorInfo always, BadRequest with a field, RetryInfo if waiting helps."""
    details: list[any_pb2.Any] = []

    def add(detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        details.append(packed)

    metadata = dict(error.details)
    if error.field:
        metadata["field"] = error.field
    if error.applied:
        metadata["applied"] = str(error.applied)
    add(error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN, metadata=metadata))
    message = _cut(error.message)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        add(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_micros:
        delay = Duration()
        delay.FromMicroseconds(error.retry_after_micros)
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    code: int = CODES[error.reason].value[0]
    return status_pb2.Status(code=code, message=message, details=details)


def _cut(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return message
    return encoded[: MESSAGE_BYTES_MAX - len("…".encode())].decode(errors="ignore") + "…"


async def abort(context: grpc.aio.ServicerContext[object, object], error: StoreError) -> NoReturn:
    """Ends a call with the error's status and details."""
    told = status(error)
    trailing: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", told.SerializeToString())]
    if error.reason in NOT_REPEATED:
        trailing.append(("grpc-retry-pushback-ms", "-1"))
    await context.abort(CODES[error.reason], told.message, tuple(trailing))
    raise AssertionError("abort has raised")
