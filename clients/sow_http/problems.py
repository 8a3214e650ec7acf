"""Errors as `application/problem+json` (RFC 9457): one table of statuses, and the reason of the contract."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.responses import Response

from sow_client import errors

_BY_REASON: Final[Mapping[str, int]] = {
    "UNAUTHENTICATED": 401,
    "PAYLOAD_TOO_LARGE": 413,
    "REQUEST_TOO_LARGE": 413,
    "UNIMPLEMENTED": 501,
    "SERVER_TOO_OLD": 501,
}
_BY_CLASS: Final[Mapping[type[errors.SowError], int]] = {
    errors.ConditionFailed: 412,
    errors.InvalidArgument: 400,
    errors.NotFound: 404,
    errors.AlreadyExists: 409,
    errors.FailedPrecondition: 409,
    errors.Aborted: 409,
    errors.ResourceExhausted: 429,
    errors.ResyncRequired: 410,
    errors.PermissionDenied: 403,
    errors.Unavailable: 503,
    errors.Cancelled: 503,
    errors.DeadlineExceeded: 504,
}
"""The status of an error: by its reason, else by the first of its classes that is here; of others 500."""


class Refused(errors.SowError):
    """A request that is refused before the server is asked."""

    def __init__(self, status: int, message: str, *, reason: str = "INVALID_ARGUMENT", field: str = "") -> None:
        super().__init__(message, reason=reason, details={"field": field} if field else {})
        self.status = status


def status_of(error: errors.SowError) -> int:
    """The status of HTTP."""
    if isinstance(error, Refused):
        return error.status
    by_class = next((_BY_CLASS[kind] for kind in type(error).__mro__ if kind in _BY_CLASS), 500)
    return _BY_REASON.get(error.reason, by_class)


def document(error: errors.SowError, more: Mapping[str, object] | None = None) -> dict[str, object]:
    """The members of a problem: the server's details, such as `field`, `position` or `current_version`, are among
    them."""
    status = status_of(error)
    known = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": error.message,
        "reason": error.reason,
    }
    return {**error.details, **(more or {}), **known}


def answer(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None, kind: str = "application/json"
) -> Response:
    """A value as JSON, with an end of the line for terminals."""
    return Response(msgspec.json.encode(value) + b"\n", status, headers, kind)


def response(
    error: errors.SowError, more: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer that tells an error."""
    status, headers = status_of(error), dict(headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    return answer(document(error, more), status, headers, "application/problem+json")
