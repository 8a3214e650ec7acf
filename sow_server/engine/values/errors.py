"""The errors of the store.

One vocabulary: `Reason` has the names of `sow.v1.ErrorReason` without the prefix (a test compares them). The
engine raises `StoreError` for a whole request; a single record that is refused travels as a `model.Refusal`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence


class Reason(enum.IntEnum):
    """Reasons, numbered as in `sow.v1.ErrorReason`."""

    INVALID_ARGUMENT = 1
    TOPIC_NOT_FOUND = 2
    TOPIC_NAME_INVALID = 3
    TOPIC_EXISTS = 4
    TOPIC_NOT_EMPTY = 5
    SET_IN_CONFIG = 6
    KEY_NOT_ALLOWED = 7
    KEY_REQUIRED = 8
    KEY_FIELD_MISSING = 9
    KEY_FIELD_NOT_SCALAR = 10
    KEY_TOO_LARGE = 11
    KEY_NOT_UTF8 = 12
    PAYLOAD_TOO_LARGE = 13
    PAYLOAD_MALFORMED = 14
    REQUEST_TOO_LARGE = 15
    ATOMIC_TOO_LARGE = 16
    ATOMIC_ABORTED = 17
    CONDITION_FAILED = 18
    LIFETIME_REJECTED = 19
    LIFETIME_NEGATIVE = 20
    LIFETIME_TOO_LONG = 21
    RECORD_NOT_FOUND = 22
    UNSUPPORTED_FOR_MESSAGE_TYPE = 23
    FILTER_INVALID = 24
    PAGE_TOKEN_INVALID = 25
    PUBLISHER_FENCED = 26
    OUTCOME_UNKNOWN = 27
    STREAM_BROKEN = 28
    OVERLOADED = 29
    WRITE_STALLED = 30
    DISK_FULL = 31
    STORE_FAILED = 32
    DATA_DAMAGED = 33
    STOPPING = 34
    INTERNAL = 35
    ORDER_INVALID = 36
    RESULT_TOO_LARGE = 37
    UNSET_KEY_FIELD = 38
    BOOKMARK_MALFORMED = 39
    BOOKMARK_OTHER_EPOCH = 40
    BOOKMARK_IN_FUTURE = 41
    BOOKMARK_TOO_OLD = 42
    NO_JOURNAL = 43
    PATTERN_MATCHES_NOTHING = 44
    RESYNC_REQUIRED = 45
    TOPIC_DELETED = 46
    DURABLE_NOT_FOUND = 47
    DURABLE_IN_USE = 48
    DURABLE_TAKEN_OVER = 49
    DURABLE_DETACHED = 50
    DURABLE_DIFFERS = 51
    BACKLOG_QUOTA_EXCEEDED = 52
    POLICY_NOT_FOUND = 53
    REPLICATION_UNAVAILABLE = 54
    PEER_NOT_FOUND = 55
    PEER_NOT_ACCEPTED = 56
    PEER_UNAUTHENTICATED = 57
    PEER_IS_SELF = 58
    INSTANCE_NAME_CLASH = 59
    PROTOCOL_MISMATCH = 60
    CLOCK_SKEW = 61
    BATCH_DAMAGED = 62
    RESEED_PENDING = 63
    PEER_BEHIND = 64
    TOPIC_DIFFERS = 65
    EXPORT_NOT_FOUND = 66
    RESUME_TOKEN_INVALID = 67
    LOAD_NOT_FOUND = 68
    LOAD_COMMITTED = 69
    LOAD_INCOMPLETE = 70
    LOAD_FAILED = 71
    UNIT_DONE = 72
    TIME_IN_FUTURE = 73
    BACKUP_UNAVAILABLE = 74
    BACKUP_EXISTS = 75
    UNAUTHENTICATED = 76
    PERMISSION_DENIED = 77
    LIMIT_EXCEEDED = 78
    ACCESS_CHANGED = 79
    AUDIT_UNAVAILABLE = 80
    READER_LOST = 81
    BEHIND = 83
    PEER_OTHER_CLUSTER = 82
    PEER_EXISTS = 88
    TOPIC_FULL = 89
    EXPRESSION_INVALID = 90
    VIEW_READ_ONLY = 91
    VIEW_BUILDING = 92
    TOPIC_HAS_VIEWS = 93
    TOPIC_ELSEWHERE = 94


class StoreError(Exception):
    """A request that the store refuses as a whole.

    `field` names the request's field at fault ("" when there is none); `retry_after_micros` is 0 when waiting does not
    help; `applied` counts the records of the request that were applied although the rest was refused; `details` are for
    programs, such as a position.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        retry_after_micros: int = 0,
        applied: int = 0,
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_micros = retry_after_micros
        self.applied = applied
        self.details: dict[str, str] = dict(details or {})


def no_topic(name: str, remedy: str = "") -> StoreError:
    """There is no topic of that name, as far as the caller sees; the name is told to programs, too. `remedy`: a next
    step for a caller that has not mistyped it."""
    message = f"topic: there is no topic {name!r}" + (f" ({remedy})" if remedy else "")
    return StoreError(Reason.TOPIC_NOT_FOUND, message, field="topic", details={"topic": name})


def with_meant(error: StoreError, meant: Sequence[str]) -> StoreError:
    """A `no_topic` that tells which topics may have been meant."""
    told = no_topic(error.details["topic"]).message
    question = f"; did you mean {' or '.join([repr(name) for name in meant])}?"
    before, _, behind = error.message.partition(told)
    message = before + told + question + behind
    return StoreError(error.reason, message, field=error.field, details=error.details)


class OpenError(Exception):
    """The data directory cannot be opened. The message names the fault and the remedy."""
