"""The client's exceptions: the right class for every reason of the contract, from ErrorInfo, never from text (X1)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import types_pb2
from sow_client import (
    ConditionFailed,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PublishFailed,
    Refusal,
    ResourceExhausted,
    SowError,
    Unavailable,
)
from sow_client._statuses import error_of_status, stream_error
from sow_client.errors import CLASS_OF_CODE, CLASS_OF_REASON, error_of_reason

REASONS = [name.removeprefix("ERROR_REASON_") for name in types_pb2.ErrorReason.keys()[1:]]


class Ended(grpc.RpcError):
    """A call that ended with a status, as the stubs raise it."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, str | bytes]] | None = None
    ) -> None:
        self._code, self._text, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:  # type: ignore[override]  # a narrower type than that of grpc
        return self._metadata


def rich(code: grpc.StatusCode, text: str, *parts: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> Ended:
    """A status with details."""
    details = []
    for part in parts:
        packed = any_pb2.Any()
        packed.Pack(part)
        details.append(packed)
    status = status_pb2.Status(code=code.value[0], message=text, details=details)
    return Ended(code, text, [("grpc-status-details-bin", status.SerializeToString())])


def info(reason: str, domain: str = "sow", **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)


def test_every_reason_of_the_contract_has_its_exception() -> None:
    assert set(CLASS_OF_REASON) ^ set(REASONS) == set(), (
        "CLASS_OF_REASON in clients/sow_client/errors.py and in clients/typescript/src/errors.ts"
    )


def test_every_grpc_code_has_its_exception() -> None:
    assert set(CLASS_OF_CODE) == {code.name for code in grpc.StatusCode} - {"OK"}


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_becomes_its_exception_whatever_the_code_and_the_text_say(reason: str) -> None:
    error = error_of_status(rich(grpc.StatusCode.UNKNOWN, "NOT_FOUND: nonsense", info(reason, field="/id")))
    assert type(error) is CLASS_OF_REASON[reason]
    assert error.reason == reason
    assert error.message == "NOT_FOUND: nonsense"
    assert error.details == {"field": "/id"}


def test_a_refused_record_becomes_the_same_exception_as_a_refused_request() -> None:
    for reason in REASONS:
        assert type(Refusal(0, reason, "no").error()) is CLASS_OF_REASON[reason]


def test_a_reason_of_a_newer_server_falls_back_on_the_code() -> None:
    error = error_of_status(rich(grpc.StatusCode.FAILED_PRECONDITION, "quota", info("QUOTA_ODD")))
    assert type(error) is FailedPrecondition
    assert error.reason == "QUOTA_ODD"


def test_an_error_info_of_another_domain_is_not_ours() -> None:
    error = error_of_status(rich(grpc.StatusCode.PERMISSION_DENIED, "no", info("TOPIC_EXISTS", domain="proxy")))
    assert type(error) is PermissionDenied
    assert error.reason == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable, "UNREACHABLE"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.UNIMPLEMENTED, InternalError, "UNIMPLEMENTED"),
    ],
)
def test_a_status_without_details_is_described_by_its_code(
    code: grpc.StatusCode, kind: type[SowError], reason: str
) -> None:
    error = error_of_status(Ended(code, "somewhere"))
    assert type(error) is kind
    assert error.reason == reason


def test_damaged_details_do_not_hide_the_error() -> None:
    error = error_of_status(Ended(grpc.StatusCode.NOT_FOUND, "gone", [("grpc-status-details-bin", b"\xff\xff")]))
    assert type(error) is NotFound


def test_the_server_s_wish_when_to_try_again_is_handed_on_in_seconds() -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
    error = error_of_status(rich(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", info("OVERLOADED"), retry))
    assert type(error) is ResourceExhausted
    assert error.retry_after == 1.5


def test_a_failed_condition_carries_the_current_version() -> None:
    refused = Refusal(0, "CONDITION_FAILED", "there is one", current_version=17).error()
    assert isinstance(refused, ConditionFailed)
    assert isinstance(refused, FailedPrecondition)
    assert refused.current_version == 17
    from_status = error_of_status(
        rich(grpc.StatusCode.FAILED_PRECONDITION, "x", info("CONDITION_FAILED", current_version="18"))
    )
    assert isinstance(from_status, ConditionFailed)
    assert from_status.current_version == 18


def test_errors_survive_the_way_to_another_process() -> None:
    failed = PublishFailed([Refusal(3, "KEY_REQUIRED", "no key")], refused=7)
    for error in (error_of_reason("TOPIC_EXISTS", "it is there", details={"a": "b"}), failed):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), copy.reason, copy.details) == (str(error), error.reason, error.details)
    assert pickle.loads(pickle.dumps(failed)).refusals == failed.refusals


def test_publish_failed_names_the_first_refusal_and_counts_all() -> None:
    failed = PublishFailed([Refusal(3, "KEY_REQUIRED", "no key")], refused=7)
    assert str(failed) == "7 records were refused; the first is number 3: no key (KEY_REQUIRED)"


def test_an_error_that_is_one_already_stays_itself() -> None:
    error = InvalidArgument("x", reason="INVALID_ARGUMENT")
    assert error_of_status(error) is error


def test_a_stream_that_its_own_client_cancels_does_not_blame_the_program() -> None:
    """A live view told on_interruption, at each move, that it had been "Locally cancelled by application!"."""
    cancelled = stream_error(Ended(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"), "the subscription")
    reset = stream_error(Ended(grpc.StatusCode.INTERNAL, "RST_STREAM"), "the subscription")
    assert (cancelled.reason, reset.reason) == ("STREAM_CUT", "STREAM_CUT")
    assert cancelled.message == "the subscription was cut off before its end"
    assert reset.message == "the subscription (RST_STREAM) was cut off before its end"
