"""Errors of the server and their statuses."""

from __future__ import annotations

import json

import pytest

from sow_client.errors import InvalidArgument, NotFound, ResourceExhausted, SowError, Unavailable, error_of_reason
from sow_http import problems
from sow_http.problems import Refused
from sow_server.engine.values.errors import Reason


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (error_of_reason("TOPIC_NOT_FOUND", "x"), 404),
        (error_of_reason("CONDITION_FAILED", "x"), 412),
        (error_of_reason("BOOKMARK_TOO_OLD", "x"), 410),
        (error_of_reason("UNAUTHENTICATED", "x"), 401),
        (error_of_reason("PERMISSION_DENIED", "x"), 403),
        (error_of_reason("PAYLOAD_TOO_LARGE", "x"), 413),
        (Unavailable("x", reason="UNREACHABLE"), 503),
        (Refused(415, "x"), 415),
        (SowError("x", reason="OF_A_LATER_SERVER"), 500),
    ],
)
def test_an_error_has_its_status(error: SowError, status: int) -> None:
    assert problems.status_of(error) == status


def test_no_reason_of_the_server_is_a_fault_of_the_door() -> None:
    """Only what is broken inside the server is a 500."""
    broken = {reason.name for reason in Reason if problems.status_of(error_of_reason(reason.name, "x")) == 500}
    assert broken == {"BATCH_DAMAGED", "DATA_DAMAGED", "INTERNAL"}


def test_a_problem_tells_the_reason_the_details_and_when_to_try_again() -> None:
    error = ResourceExhausted("full", reason="BACKLOG", details={"field": "x", "status": "y"}, retry_after=1.2)
    answer = problems.response(error, {"lines": 3})
    told = json.loads(bytes(answer.body))
    assert told == {
        "type": "about:blank",
        "title": "Too Many Requests",
        "status": 429,
        "detail": "full",
        "reason": "BACKLOG",
        "field": "x",
        "lines": 3,
    }, "a detail never takes the place of a member"
    assert (answer.headers["retry-after"], answer.media_type) == ("2", "application/problem+json")
    assert problems.response(error_of_reason("UNAUTHENTICATED", "x")).headers["www-authenticate"] == "Bearer"
    assert "www-authenticate" not in problems.response(NotFound("x", reason="Y")).headers
    assert problems.status_of(InvalidArgument("x", reason="Y")) == 400
