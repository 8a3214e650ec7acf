"""Statuses into errors (rule X1), and when a failed call is tried again. Pure: no I/O, no clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2, status_pb2

from sow_client.errors import Cancelled, DeadlineExceeded, InternalError, SowError, Unavailable, error_of_reason

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


REFUSED_SECONDS: Final = 0.25
"""In this time gRPC has tried to connect at least twice: its first pause is a tenth of a second."""

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


TLS_PROBLEMS: Final[Mapping[str, str]] = {
    "tls_required": "the server speaks TLS only: give the authority of its certificate (Tls(ca=...), --tls-ca, "
    "SOW_TLS_CA)",
    "tls_not_spoken": "the server does not speak TLS at this address: leave out Tls, --tls-ca, SOW_TLS_*",
    "certificate_expired": "the server's certificate, or that of its authority, has expired",
    "certificate_not_yet_valid": "the server's certificate is not valid yet, by the clock of this machine",
    "certificate_name": "the server's certificate has another name: connect by that name, or give it "
    "(Tls(server_name=...), --tls-server-name, SOW_TLS_SERVER_NAME)",
    "certificate_untrusted": "the server's certificate is of no authority that the client trusts: the CA file "
    "(Tls(ca=...), --tls-ca, SOW_TLS_CA), or without one the system, does not have it",
    "client_certificate_required": "the server ended the connection after the handshake: most likely it asks for a "
    "certificate of the client (Tls(certificate=..., key=...), --tls-cert and --tls-key)",
    "client_certificate_refused": "the server ended the connection after the handshake: most likely it does not accept "
    "the client's certificate, which has expired, was revoked, or is of an authority that the server does not know",
}
"""The problems of TLS, as `details["tls"]` names them, and what to do about each."""

_TLS_CAUSES: Final = (
    ("WRONG_VERSION_NUMBER", "tls_not_spoken"),
    ("certificate has expired", "certificate_expired"),
    ("certificate is not yet valid", "certificate_not_yet_valid"),
    ("Hostname Verification", "certificate_name"),
    ("CERTIFICATE_VERIFY_FAILED", "certificate_untrusted"),  # and all other faults of the chain
)
_DOUBTS: Final = ("Socket closed", "End of TCP stream", "Connection reset", "Broken pipe", "Expected SETTINGS frame")
_DOUBT: Final = "the server may speak TLS only, ask for a certificate of an authority that it knows, or speak no gRPC"


def tls_problem(cause: str) -> str:
    """The problem of TLS that a cause of gRPC names; empty: none."""
    return next((problem for part, problem in _TLS_CAUSES if part in cause), "")


def is_open_to_doubt(cause: str) -> bool:
    """True if the server has ended the connection, for a reason that gRPC does not report."""
    return any(part in cause for part in _DOUBTS)


def explained(cause: str) -> str:
    """A cause that gRPC names, with its usual meaning."""
    problem = tls_problem(cause)
    if problem:
        return TLS_PROBLEMS[problem]
    return _PLACE.sub("", cause) + (f" ({_DOUBT})" if is_open_to_doubt(cause) else "")


_PLACE: Final = re.compile(r"^[A-Z_]+:\s*(?:ipv[46]:\S+: )?")
"""The code and the address in front of a cause."""


def tls_details(problem: str, cause: str) -> dict[str, str]:
    """The details of an error because of which no connection was made."""
    return {"tls": problem, "cause": _PLACE.sub("", cause)} if problem else {}


def unreachable(
    server: str, seconds: float | None, cause: str = "", *, problem: str = "", proxy: str = ""
) -> Unavailable:
    """The error when no connection was made in time; `cause` is empty unless gRPC names one. `seconds`: None where
    nobody waits longer, as the server has refused. `problem`: one of TLS that was found behind the cause. `proxy`: the
    variable that names a proxy for the connection."""
    problem = problem or tls_problem(cause)
    why = f": {TLS_PROBLEMS[problem] if problem else explained(cause)}" if cause else ""
    why += f" (through the proxy of {proxy}; no_proxy lists hosts without it)" if proxy else ""
    details = tls_details(problem, cause)
    if seconds is None:
        return AllRefused(f"cannot connect to {server}{why}", reason="UNREACHABLE", details=details)
    shown = round(seconds, 1 if seconds >= 1 else 3)  # the rest of a time of which some milliseconds were used already
    return Unavailable(f"cannot connect to {server} within {shown:g} s{why}", reason="UNREACHABLE", details=details)


def request_too_large(size: int, field: str = "request") -> SowError:
    """The error of a request that is larger than every server's limit, found before it is sent (rule K8)."""
    return error_of_reason(
        "REQUEST_TOO_LARGE",
        f"{field}: {size} bytes exceed the limit of {MESSAGE_BYTES_MAX} bytes per message",
        details={"field": field},
    )


def crowded(message: str, streams: int) -> str:
    """The message of a call whose time is over, where its connection answers no other call either."""
    return (
        f"{message}: {streams} streams of this client are open on its connection, and it answers no further call. "
        "Calls beyond the server's streams_per_connection_max wait until one of them ends (rule N4)"
    )


def out_of_time(what: str) -> DeadlineExceeded:
    """The error of a wait whose time is over."""
    return DeadlineExceeded(f"{what} did not end in time", reason="DEADLINE_EXCEEDED")


def closed(what: str) -> Cancelled:
    """The error of a call on a closed client, publisher or subscription."""
    return Cancelled(f"the {what} is closed", reason="CLOSED")


def malformed(what: str) -> InternalError:
    """The error for an answer that the contract does not allow."""
    return InternalError(f"the server sent {what}", reason="MALFORMED_RESPONSE")
