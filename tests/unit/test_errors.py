"""One vocabulary of reasons: in the contract, in the engine, in the table of status codes, and in the docs."""

from __future__ import annotations

import re
from pathlib import Path

from google.rpc import error_details_pb2

from sow.v1 import types_pb2
from sow_server.engine.errors import Reason, StoreError
from sow_server.services.errors import CODES, DOMAIN, status

ROOT = Path(__file__).parents[2]


def test_the_engine_and_the_contract_have_the_same_reasons() -> None:
    contract = {name.removeprefix("ERROR_REASON_"): number for name, number in types_pb2.ErrorReason.items() if number}
    assert contract == {reason.name: reason.value for reason in Reason}


def test_every_reason_has_a_status_code() -> None:
    assert set(CODES) == set(Reason)


def test_every_reason_is_documented_with_its_status_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert dict(rows) == {reason.name: code.name for reason, code in CODES.items()}


def test_a_status_names_the_reason_the_field_and_when_to_retry() -> None:
    error = StoreError(Reason.OVERLOADED, "full", field="payload", retry_after_micros=1_500_000, applied=7)
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for detail, message in zip(status(error).details, (info, bad, retry), strict=True):
        assert detail.Unpack(message)
    assert (info.domain, info.reason, dict(info.metadata)) == (
        DOMAIN,
        "OVERLOADED",
        {"field": "payload", "applied": "7"},
    )
    assert bad.field_violations[0].field == "payload"
    assert retry.retry_delay.ToMilliseconds() == 1500
