"""Statuses into errors (rule X1), and when a failed call is tried again. Pure: no I/O, no clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2, status_pb2

from sow_client.errors import Cancelled, InternalError, SowError, Unavailable, error_of_reason

MESSAGE_BYTES_MAX: Final = 20 * 1024 * 1024
"""The size limit of a message, in both directions, at both ends (rule K8)."""


@runtime_checkable
class EndedCall(Protocol):
    """The common interface of the errors of the blocking and the asynchronous stubs."""

    def code(self) -> grpc.StatusCode | None: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...


STATUS_DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "sow"


def error_of_status(error: BaseException) -> SowError:
    """The exception for the status with which a call ended. ErrorInfo decides its type; the text is only passed on."""
    if isinstance(error, SowError):
        return error
    if not isinstance(error, EndedCall):
        return InternalError(f"the call failed: {error!r}", reason="INTERNAL")
    code = error.code() or grpc.StatusCode.UNKNOWN
    text = error.details() or code.name
    reason, details, retry_after = _details(error.trailing_metadata() or ())
    if reason is None:
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
            # gRPC reports its own limit on messages, at either end, only by its text.
            return error_of_reason("REQUEST_TOO_LARGE", f"the request, or its answer, is too large: {text}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            text = f"the server does not know this call: it is no sow server, or an older one ({text})"
        reason = "UNREACHABLE" if code is grpc.StatusCode.UNAVAILABLE else code.name
    return error_of_reason(reason, text, code=code.name, details=details, retry_after=retry_after)


_TOO_LARGE: Final = "message larger than max"


def reason_of(error: BaseException) -> str | None:
    """The reason that the server gave; None when it gave none, as the transport ended the call."""
    return _details(error.trailing_metadata() or ())[0] if isinstance(error, EndedCall) else None


def never_sent(error: BaseException) -> bool:
    """True if the call certainly never left: there was no connection. gRPC tells it by its text alone. With another
    text the call counts as sent, which is the safe side. Only for calls that gRPC does not repeat by itself."""
    return (
        isinstance(error, EndedCall)
        and error.code() is grpc.StatusCode.UNAVAILABLE
        and reason_of(error) is None
        and (error.details() or "").startswith("failed to connect to all addresses")
    )


_Parsed: TypeAlias = tuple[str | None, dict[str, str], float | None]


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> _Parsed:
    """Reason, details and seconds to wait of a rich status; empty when there is none, or when it is damaged."""
    reason: str | None = None
    details: dict[str, str] = {}
    retry_after: float | None = None
    encoded = next((value for key, value in metadata if key == STATUS_DETAILS_KEY), None)
    if not isinstance(encoded, bytes):
        return reason, details, retry_after
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    try:
        for item in status_pb2.Status.FromString(encoded).details:
            if item.Unpack(info) and info.domain == ERROR_DOMAIN:
                reason = info.reason
                details.update(info.metadata)
            elif item.Unpack(retry):
                retry_after = retry.retry_delay.ToTimedelta().total_seconds()
            elif item.Unpack(bad) and bad.field_violations:
                details.setdefault("field", bad.field_violations[0].field)
    except message.DecodeError:
        return None, {}, None
    return reason, details, retry_after


_TRANSPORT_CODES: Final = frozenset({"CANCELLED", "UNKNOWN", "INTERNAL"})


def call_error(error: BaseException, *, client_closed: bool) -> SowError:
    """The error of a call with one answer. Callers never cancel such a call: CANCELLED without a reason comes from a
    server that stops, or from the client being closed during the call."""
    translated = error_of_status(error)
    if reason_of(error) is None and translated.reason == "CANCELLED" and not isinstance(error, SowError):
        if client_closed:
            return closed("client")
        return Unavailable(f"the server abandoned the call ({translated.message})", reason="UNREACHABLE")
    return translated


def stream_error(error: BaseException, what: str) -> SowError:
    """The error of a stream. Without a reason from the server the connection broke, whatever gRPC's code says."""
    translated = error_of_status(error)
    if reason_of(error) is None and translated.reason in _TRANSPORT_CODES and not isinstance(error, SowError):
        # Cancelled by this client itself, as it moves: gRPC's words would blame the program.
        own = "Locally cancelled by application" in translated.message
        return cut(what if own else f"{what} ({translated.message})")
    return translated


def error_like(error: SowError, message: str, **details: str) -> SowError:
    """The same kind of error with another message and more details."""
    return type(error)(message, reason=error.reason, details=error.details | details, retry_after=error.retry_after)


class AllRefused(Unavailable):
    """Every address has refused. A client that has not reached any of them yet does not try again by itself."""


BACKOFF_SECONDS_FIRST: Final = 0.1
BACKOFF_SECONDS_MAX: Final = 2.0
CUT_REASONS: Final = frozenset({"UNREACHABLE", "STREAM_CUT"})
"""The connection broke, or was never made."""


class Backoff:
    """Decides when to retry, and when to give up. Owns the count of consecutive failures."""

    __slots__ = ("_attempts", "_failing_since")

    def __init__(self) -> None:
        self._failing_since: float | None = None
        self._attempts = 0

    def begin(self, now: float) -> None:
        """An attempt begins. The time to retry runs from the first of consecutive attempts."""
        if self._failing_since is None:
            self._failing_since = now

    def reset(self) -> None:
        """The last attempt has made progress."""
        self._failing_since, self._attempts = None, 0

    def delay(self, error: SowError, *, now: float, jitter: float, limit: float) -> float | None:
        """Seconds to wait before the next attempt; None when it would begin more than `limit` seconds after the first.

        `now` is a monotonic clock in seconds, `jitter` a random number in [0, 1).
        """
        if isinstance(error, AllRefused):
            return None
        if self._failing_since is None:
            self._failing_since = now
        # Half fixed, half random: many clients that were cut off together must not come back together.
        delay = min(BACKOFF_SECONDS_FIRST * 2.0**self._attempts, BACKOFF_SECONDS_MAX) * (0.5 + 0.5 * jitter)
        delay = max(delay, error.retry_after or 0.0)
        self._attempts = min(self._attempts + 1, 16)
        return None if now + delay - self._failing_since > limit else delay


def cut(what: str) -> Unavailable:
    """The error of a stream that ended with status OK, but incomplete."""
    return Unavailable(f"{what} was cut off before its end", reason="STREAM_CUT")


_CLOSED_BY_SERVER: Final = "the server may speak TLS only, or ask for a certificate of an authority that it knows"
_HINTS: Final = (
    ("WRONG_VERSION_NUMBER", "the server does not speak TLS at this address"),
    (
        "unable to get local issuer",
        "the CA file, or without one the system, has no authority of the server's certificate",
    ),
    ("self signed", "the CA file, or without one the system, has no authority of the server's certificate"),
    ("Hostname Verification", "the server's certificate has another name: give server_name (--tls-server-name)"),
    ("Socket closed", _CLOSED_BY_SERVER),
    ("End of TCP stream", _CLOSED_BY_SERVER),
    ("Connection reset", _CLOSED_BY_SERVER),
    ("Expected SETTINGS frame", "no gRPC server, or one that speaks TLS only"),
)
"""Parts of the causes that gRPC names, and their usual meanings in plain words."""


def explained(cause: str) -> str:
    """A cause that gRPC names, with its usual meaning."""
    hint = next((f" ({hint})" for part, hint in _HINTS if part in cause), "")
    return _PLACE.sub("", cause) + hint


_PLACE: Final = re.compile(r"^[A-Z_]+: (?:ipv[46]:\S+: )?")
"""The code and the address in front of a cause."""


def unreachable(server: str, seconds: float, cause: str = "", *, proxy: str = "") -> Unavailable:
    """The error when no connection was made in time; `cause` is empty unless gRPC names one. `proxy`: the variable that
    names a proxy for the connection."""
    why = f": {cause}" if cause else ""
    why += next((f" ({hint})" for part, hint in _HINTS if part in cause), "")
    why += f" (through the proxy of {proxy}; no_proxy lists hosts without it)" if proxy else ""
    shown = round(seconds, 1 if seconds >= 1 else 3)  # the rest of a time of which some milliseconds were used already
    return Unavailable(f"cannot connect to {server} within {shown:g} s{why}", reason="UNREACHABLE")


def request_too_large(size: int, field: str = "request") -> SowError:
    """The error of a request that is larger than every server's limit, found before it is sent (rule K8)."""
    return error_of_reason(
        "REQUEST_TOO_LARGE",
        f"{field}: {size} bytes exceed the limit of {MESSAGE_BYTES_MAX} bytes per message",
        details={"field": field},
    )


def closed(what: str) -> Cancelled:
    """The error of a call on a closed client, publisher or subscription."""
    return Cancelled(f"the {what} is closed", reason="CLOSED")


def malformed(what: str) -> InternalError:
    """The error for an answer that the contract does not allow."""
    return InternalError(f"the server sent {what}", reason="MALFORMED_RESPONSE")
