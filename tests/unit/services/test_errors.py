"""One vocabulary of reasons: in the contract, in the engine, in the table of status codes, and in the docs."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import admin_pb2, types_pb2
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services.door.received import Context
from sow_server.services.door.statuses import CODES, DOMAIN, MESSAGE_BYTES_MAX, abort, status
from sow_server.services.wire import settings_convert

ROOT = Path(__file__).parents[3]


def test_the_engine_and_the_contract_have_the_same_reasons() -> None:
    contract = {name.removeprefix("ERROR_REASON_"): number for name, number in types_pb2.ErrorReason.items() if number}
    reasons = {reason.name: reason.value for reason in Reason}
    assert contract.items() ^ reasons.items() == set(), (
        "ErrorReason in proto/sow/v1/types.proto (then `make proto`) and Reason in sow_server/engine/values/errors.py"
    )


def test_every_reason_has_a_status_code() -> None:
    missing = [f"    Reason.{reason.name}: grpc.StatusCode.…," for reason in Reason if reason not in CODES]
    assert missing == [], "CODES in sow_server/services/door/statuses.py needs these lines"


def test_every_reason_is_documented_with_its_status_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    documented = {reason.name: code.name for reason, code in CODES.items()}
    missing = [f"| `{reason}` | {code} | (meaning) | (what to do) |" for reason, code in documented.items() - rows]
    assert missing == [], "docs/errors.md needs these lines"
    assert dict(rows).keys() - documented.keys() == set(), "docs/errors.md has these, which are no reasons"


def test_every_reason_is_in_a_test() -> None:
    words: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        words.update(re.findall(r"[A-Z0-9_]+", path.read_text()))
    untested = [reason.name for reason in Reason if reason.name not in words]
    assert untested == [], "a test provokes each of these, and looks at its reason"


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


@pytest.mark.parametrize("text", ["x" * 20_000, "é" * 10_000, "\n" * 5_000])
def test_an_error_that_quotes_much_arrives_with_its_reason(text: str) -> None:
    """X1: the size of trailers that a client accepts is bounded; beyond that it said RESOURCE_EXHAUSTED, whatever it
    was."""

    async def refuse(request: bytes, context: Context) -> NoReturn:
        await abort(context, StoreError(Reason.INVALID_ARGUMENT, f"select: {text}", field="select"))

    async def call() -> grpc.aio.AioRpcError:
        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(refuse, request_deserializer=bytes, response_serializer=bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Refuse": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask = channel.unary_unary("/test/Refuse", request_serializer=bytes, response_deserializer=bytes)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(b"")
                return caught.value
        finally:
            await server.stop(0)

    error = asyncio.run(call())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    told = status_pb2.Status.FromString(dict(error.trailing_metadata() or ())["grpc-status-details-bin"])
    assert len(told.message.encode()) <= MESSAGE_BYTES_MAX
    assert f"select: {text}".startswith(told.message.removesuffix("…"))
    info = error_details_pb2.ErrorInfo()
    assert told.details[0].Unpack(info)
    assert (info.reason, dict(info.metadata)) == ("INVALID_ARGUMENT", {"field": "select"})


@pytest.mark.parametrize("field", ["message_type", "expiration"])
def test_a_setting_that_this_server_does_not_know_is_named(field: str) -> None:
    """X2."""
    settings = admin_pb2.TopicSettings()
    setattr(settings, field, 99)
    with pytest.raises(StoreError) as caught:
        settings_convert.settings(settings)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, f"settings.{field}")
    assert "99" in caught.value.message


def test_a_write_stored_here_and_a_read_that_has_waited_are_not_retried_without_the_caller() -> None:
    """P5, F10: gRPC's own retries repeat UNAVAILABLE. But the write has been done, and the read has waited its second:
    with its repeats it took up to 9 seconds. Another reason is retried."""
    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = json.dumps({"methodConfig": [{"name": [{"service": "test"}], "retryPolicy": policy}]})
    calls: list[Reason] = []

    async def refuse(request: bytes, context: Context) -> NoReturn:
        reason = Reason[request.decode()]
        calls.append(reason)
        await abort(context, StoreError(reason, "no", applied=3))

    async def call() -> list[int]:
        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(refuse, request_deserializer=bytes, response_serializer=bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Refuse": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        found = []
        try:
            options = [("grpc.service_config", config)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                ask = channel.unary_unary("/test/Refuse", request_serializer=bytes, response_deserializer=bytes)
                for reason in (Reason.STOPPING, Reason.REPLICATION_UNAVAILABLE, Reason.BEHIND):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await ask(reason.name.encode())
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                    found.append(calls.count(reason))
        finally:
            await server.stop(0)
        return found

    assert asyncio.run(call()) == [3, 1, 1]
