"""The exceptions of the client: one small tree, built from the server's reasons, never from text (rule X1).

    SowError
    ├── InvalidArgument
    ├── NotFound
    ├── AlreadyExists
    ├── FailedPrecondition
    │   └── ConditionFailed      (.current_version)
    ├── Aborted
    │   └── LeaseLost
    ├── ResourceExhausted
    ├── ResyncRequired           (.bookmark)
    ├── PermissionDenied
    ├── Unavailable
    │   └── ReplicationUnavailable   (.applied)
    ├── DeadlineExceeded
    ├── Cancelled
    ├── DataLoss
    ├── InternalError
    └── PublishFailed            (.refusals, .refused)

`reason` is a name of `sow.v1.ErrorReason` without its prefix, or one of the few that only a client can know:
`UNREACHABLE` (no connection), `STREAM_CUT` (an incomplete answer), `MALFORMED_RESPONSE`, `CLOSED`, `LEASE_LOST`,
`NO_SOW_SERVER`, `OTHER_CLUSTER`, `SERVER_TOO_OLD`, and, when a status carries no reason, the name of its gRPC code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class SowError(Exception):
    """The base of all errors that the client raises on purpose.

    `message` is for people; `reason` is for programs; `details` holds additions of the server, such as `field`;
    `retry_after` is the number of seconds after which the server asks for a retry; None when it does not ask.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        details: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.details: dict[str, str] = dict(details or {})
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.message} ({self.reason})"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments defeat the pickling of exceptions, and these cross process borders (pools, Spark).
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[SowError], args: tuple[object, ...], state: dict[str, object]) -> SowError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class LifetimeIgnoredWarning(UserWarning):
    """A record got a ttl or an expire time that has no effect, because its topic has expiration disabled.

    Python shows it once for each line of a program. `warnings.simplefilter("error", LifetimeIgnoredWarning)` makes it
    an exception, which is raised after the publish. Rule: L3.
    """


class InvalidArgument(SowError):
    """The request, or one of its fields, is invalid in itself."""


class NotFound(SowError):
    """There is no such topic, durable subscription, policy or peer, or no live record of that key."""


class AlreadyExists(SowError):
    """The topic exists, or another instance has the name."""


class FailedPrecondition(SowError):
    """The request is valid, but not in the current state."""


class ConditionFailed(FailedPrecondition):
    """The condition of a write does not hold. `current_version` is 0 when there is no live record. Rule: P3."""

    @property
    def current_version(self) -> int:
        """Version of the live record, 0 when there is none."""
        text = self.details.get("current_version", "0")
        return int(text) if text.isdecimal() else 0


class Aborted(SowError):
    """Not done, or ended, because of something else: another record of the atomic request, an earlier record of the
    stream, or a takeover, rewind or deletion of the durable subscription."""


class LeaseLost(Aborted):
    """The holder of a lease may no longer rely on its keys: it could not renew them in time, or one of them was
    changed, deleted or taken by another. The cause is the error of the last attempt, if there was one.

    Rule: L21.
    """


class ResourceExhausted(SowError):
    """The server is at a limit: a full queue or disk, a backlog quota, a write stall, too large a message or result."""


class ResyncRequired(SowError):
    """The journal does not continue at the subscriber's position: take a new snapshot. Rules: S4, S6."""

    @property
    def bookmark(self) -> str | None:
        """The position that the subscriber had reached; None when it had not begun."""
        return self.details.get("bookmark")


class PermissionDenied(SowError):
    """The server does not allow this client to do that, or does not know the client."""


class Unavailable(SowError):
    """The server cannot be reached (`UNREACHABLE`), is stopping or has stopped writing, or cut the answer."""


class ReplicationUnavailable(Unavailable):
    """A write with durability "replicated" has reached fewer sync peers than required. The `applied` records stay on
    this server, so they need not be written again; 0: nothing was written, or it was written before.

    Rule: P5.
    """

    @property
    def applied(self) -> int:
        """Records that were written on this server."""
        text = self.details.get("applied", "0")
        return int(text) if text.isdecimal() else 0


class DeadlineExceeded(SowError):
    """No answer in time. A write may or may not have been applied."""


class Cancelled(SowError):
    """The call was cancelled."""


class DataLoss(SowError):
    """Stored data failed its checksum."""


class InternalError(SowError):
    """A fault of the server (its log has the details), or an invalid answer."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One record that was not applied, with the reason.

    `index` is its position, from 0, among all records handed to the call or the publisher.
    """

    index: int
    reason: str
    message: str
    current_version: int = 0
    """For CONDITION_FAILED: version of the live record, 0 when there is none."""

    def error(self) -> SowError:
        """The exception for this refusal."""
        details = {"current_version": str(self.current_version)} if self.reason == "CONDITION_FAILED" else {}
        return error_of_reason(self.reason, self.message, details=details)


class PublishFailed(SowError):
    """Records of a publisher or of `publish_many` were refused; all others were applied.

    `refusals` are the first of them (a publisher keeps at most 10,000); `refused` counts all. `reason` is that of the
    first, in an atomic request that of the record because of which the others were refused. `topics` has the refusals
    of each topic, of a publisher to several; there `index` is the position among the records of the topic.
    """

    def __init__(
        self,
        refusals: Sequence[Refusal],
        *,
        refused: int | None = None,
        topics: Mapping[str, tuple[Refusal, ...]] | None = None,
    ) -> None:
        self.refusals = tuple(refusals)
        self.topics: Mapping[str, tuple[Refusal, ...]] = topics or {}
        self.refused = len(self.refusals) if refused is None else refused
        first = next((one for one in self.refusals if one.reason != "ATOMIC_ABORTED"), self.refusals[0])
        which = "the first is" if first is self.refusals[0] else "the cause is"
        where = f"{', '.join(self.topics)}: " if self.topics else ""
        super().__init__(
            f"{where}{self.refused} record{'s were' if self.refused != 1 else ' was'} refused; "
            f"{which} number {first.index}: {first.message}",
            reason=first.reason,
            details={"refused": str(self.refused)},
        )


CLASS_OF_REASON: Mapping[str, type[SowError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "TOPIC_NOT_FOUND": NotFound,
    "TOPIC_NAME_INVALID": InvalidArgument,
    "TOPIC_EXISTS": AlreadyExists,
    "TOPIC_NOT_EMPTY": FailedPrecondition,
    "SET_IN_CONFIG": FailedPrecondition,
    "KEY_NOT_ALLOWED": InvalidArgument,
    "KEY_REQUIRED": InvalidArgument,
    "KEY_FIELD_MISSING": InvalidArgument,
    "KEY_FIELD_NOT_SCALAR": InvalidArgument,
    "KEY_TOO_LARGE": InvalidArgument,
    "KEY_NOT_UTF8": InvalidArgument,
    "PAYLOAD_TOO_LARGE": InvalidArgument,
    "PAYLOAD_MALFORMED": InvalidArgument,
    "REQUEST_TOO_LARGE": InvalidArgument,
    "ATOMIC_TOO_LARGE": InvalidArgument,
    "ATOMIC_ABORTED": Aborted,
    "CONDITION_FAILED": ConditionFailed,
    "LIFETIME_REJECTED": InvalidArgument,
    "LIFETIME_NEGATIVE": InvalidArgument,
    "LIFETIME_TOO_LONG": InvalidArgument,
    "RECORD_NOT_FOUND": NotFound,
    "UNSUPPORTED_FOR_MESSAGE_TYPE": InvalidArgument,
    "FILTER_INVALID": InvalidArgument,
    "PAGE_TOKEN_INVALID": InvalidArgument,
    "PUBLISHER_FENCED": FailedPrecondition,
    "OUTCOME_UNKNOWN": FailedPrecondition,
    "STREAM_BROKEN": Aborted,
    "OVERLOADED": ResourceExhausted,
    "WRITE_STALLED": ResourceExhausted,
    "DISK_FULL": ResourceExhausted,
    "STORE_FAILED": Unavailable,
    "DATA_DAMAGED": DataLoss,
    "STOPPING": Unavailable,
    "INTERNAL": InternalError,
    "ORDER_INVALID": InvalidArgument,
    "RESULT_TOO_LARGE": ResourceExhausted,
    "UNSET_KEY_FIELD": InvalidArgument,
    "BOOKMARK_MALFORMED": InvalidArgument,
    "BOOKMARK_OTHER_EPOCH": ResyncRequired,
    "BOOKMARK_IN_FUTURE": ResyncRequired,
    "BOOKMARK_TOO_OLD": ResyncRequired,
    "NO_JOURNAL": FailedPrecondition,
    "PATTERN_MATCHES_NOTHING": NotFound,
    "RESYNC_REQUIRED": ResyncRequired,
    "TOPIC_DELETED": NotFound,
    "DURABLE_NOT_FOUND": NotFound,
    "DURABLE_IN_USE": FailedPrecondition,
    "DURABLE_TAKEN_OVER": Aborted,
    "DURABLE_DETACHED": Aborted,
    "DURABLE_DIFFERS": FailedPrecondition,
    "POLICY_NOT_FOUND": NotFound,
    "BACKLOG_QUOTA_EXCEEDED": ResourceExhausted,
    "TOPIC_FULL": ResourceExhausted,
    "REPLICATION_UNAVAILABLE": ReplicationUnavailable,
    "PEER_NOT_FOUND": NotFound,
    "PEER_NOT_ACCEPTED": PermissionDenied,
    "PEER_UNAUTHENTICATED": PermissionDenied,
    "PEER_IS_SELF": FailedPrecondition,
    "INSTANCE_NAME_CLASH": AlreadyExists,
    "PROTOCOL_MISMATCH": FailedPrecondition,
    "CLOCK_SKEW": FailedPrecondition,
    "BATCH_DAMAGED": DataLoss,
    "RESEED_PENDING": Unavailable,
    "PEER_BEHIND": FailedPrecondition,
    "TOPIC_DIFFERS": FailedPrecondition,
    "EXPORT_NOT_FOUND": NotFound,
    "RESUME_TOKEN_INVALID": InvalidArgument,
    "LOAD_NOT_FOUND": NotFound,
    "LOAD_COMMITTED": FailedPrecondition,
    "LOAD_INCOMPLETE": FailedPrecondition,
    "LOAD_FAILED": FailedPrecondition,
    "UNIT_DONE": FailedPrecondition,
    "TIME_IN_FUTURE": FailedPrecondition,
    "BACKUP_UNAVAILABLE": FailedPrecondition,
    "BACKUP_EXISTS": AlreadyExists,
    "UNAUTHENTICATED": PermissionDenied,
    "PERMISSION_DENIED": PermissionDenied,
    "LIMIT_EXCEEDED": ResourceExhausted,
    "ACCESS_CHANGED": Unavailable,
    "AUDIT_UNAVAILABLE": Unavailable,
    "READER_LOST": Unavailable,
    "BEHIND": Unavailable,
    "PEER_OTHER_CLUSTER": FailedPrecondition,
    "PEER_EXISTS": AlreadyExists,
    "EXPRESSION_INVALID": InvalidArgument,
    "VIEW_READ_ONLY": FailedPrecondition,
    "VIEW_BUILDING": Unavailable,
    "TOPIC_HAS_VIEWS": FailedPrecondition,
    "TOPIC_ELSEWHERE": FailedPrecondition,
}
"""The exception for each reason. A test compares the table with `sow.v1.ErrorReason`."""

CLASS_OF_CODE: Mapping[str, type[SowError]] = {
    "CANCELLED": Cancelled,
    "UNKNOWN": InternalError,
    "INVALID_ARGUMENT": InvalidArgument,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "FAILED_PRECONDITION": FailedPrecondition,
    "ABORTED": Aborted,
    "OUT_OF_RANGE": InvalidArgument,
    "UNIMPLEMENTED": InternalError,
    "INTERNAL": InternalError,
    "UNAVAILABLE": Unavailable,
    "DATA_LOSS": DataLoss,
}
"""The exception for a gRPC code whose status carries no reason, or a reason that this client does not know."""


def error_of_reason(
    reason: str,
    message: str,
    *,
    code: str = "UNKNOWN",
    details: Mapping[str, str] | None = None,
    retry_after: float | None = None,
) -> SowError:
    """The exception for a reason; `code` (a gRPC code's name) decides for reasons of newer servers."""
    kind = CLASS_OF_REASON.get(reason) or CLASS_OF_CODE.get(code, InternalError)
    return kind(message, reason=reason, details=details, retry_after=retry_after)
