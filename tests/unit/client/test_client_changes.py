"""The client's requests and answers about ranges of changes; when a reading is made again."""

from __future__ import annotations

import struct
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from sow.v1 import snapshot_pb2
from sow_client import _statuses
from sow_client._changes import (
    READ_RETRY_SECONDS,
    ReadChangesCore,
    pin_request,
    plan_request,
    read_request,
    unpacked,
)
from sow_client._packed import PackedRecords
from sow_client._records import EARLIEST
from sow_client.errors import InternalError, InvalidArgument, ResyncRequired, SowError, Unavailable, error_of_reason


def core() -> ReadChangesCore:
    return ReadChangesCore(
        read_request("t", "e.1", "e.9", "/n > 1", columns=("key", "op"), lines=True, batch_size=5, history="e.0")
    )


def batch(bookmark: str) -> snapshot_pb2.ReadChangesResponse:
    return snapshot_pb2.ReadChangesResponse(batch=snapshot_pb2.PackedRecords(count=1), bookmark=bookmark)


FOOTER = snapshot_pb2.ReadChangesResponse(footer=snapshot_pb2.ExportFooter(returned=1))


def test_starts_of_a_plan() -> None:
    def of(start: object) -> snapshot_pb2.PlanChangesRequest:
        return plan_request("t", start, None, 0, 0, 0)  # type: ignore[arg-type]  # wrong ones, too

    assert of("e.5").bookmark == "e.5"
    assert of("earliest").earliest
    assert of(EARLIEST).earliest
    assert of("latest").latest
    assert of(datetime(2026, 1, 1, tzinfo=UTC)).start_time_micros == 1_767_225_600_000_000
    for wrong in (datetime(2026, 1, 1), 7, None):  # noqa: DTZ001  # without a time zone: the point
        with pytest.raises(InvalidArgument):
            of(wrong)


def test_a_pin_has_the_requested_lease() -> None:
    assert pin_request("t", "n", "e.1", None, "").idle_ttl_micros == 0
    assert pin_request("t", "n", "e.1", "5m", "").idle_ttl_micros == 300_000_000
    assert pin_request("t", "n", "e.1", None, "a query").reader == "a query"


def test_columns_are_names() -> None:
    for wrong in (["price"], "payload"):
        with pytest.raises(InvalidArgument):
            read_request("t", "e.1", "e.9", None, columns=wrong, lines=False, batch_size=0, history=None)


def test_an_empty_list_of_keys_is_refused() -> None:
    """On the wire it asked for the changes of all keys."""
    for keys, wanted in ((None, []), (["a"], ["a"])):
        request = read_request(
            "t", "e.1", "e.9", None, columns=("key",), lines=False, batch_size=0, history=None, keys=keys
        )
        assert request.keys == wanted
    with pytest.raises(InvalidArgument) as refused:
        read_request("t", "e.1", "e.9", None, columns=("key",), lines=False, batch_size=0, history=None, keys=[])
    assert refused.value.details["field"] == "keys"


def test_a_reading_that_is_cut_off_goes_on_after_the_last_batch() -> None:
    """_changes [1]."""
    reading = core()
    first = reading.request(now=0.0)
    assert (first.start_bookmark, first.end_bookmark, first.history_bookmark) == ("e.1", "e.9", "e.0")
    found = reading.batch(batch("e.4"))
    assert found is not None
    assert found.count == 1
    assert reading.ended(_statuses.cut("x"), now=1.0, jitter=0.0) > 0
    again = reading.request(now=2.0)
    assert (again.start_bookmark, again.history_bookmark, again.filter) == ("e.4", "e.0", "/n > 1")
    assert first.start_bookmark == "e.1", "a request on its way stays as it is"
    assert not reading.done
    assert reading.batch(FOOTER) is None
    assert reading.done


@pytest.mark.parametrize("error", [None, _statuses.cut("x"), error_of_reason("STOPPING", "x")])
def test_a_reading_gives_up_after_a_while_in_which_nothing_came(error: SowError | None) -> None:
    reading = core()
    reading.request(now=0.0)
    reading.ended(error, now=READ_RETRY_SECONDS / 2, jitter=0.0)
    reading.batch(batch("e.2"))
    reading.request(now=READ_RETRY_SECONDS)
    reading.ended(error, now=READ_RETRY_SECONDS * 1.5, jitter=0.0)
    reading.request(now=READ_RETRY_SECONDS * 1.6)
    with pytest.raises(Unavailable):
        reading.ended(error, now=READ_RETRY_SECONDS * 2, jitter=0.0)


def test_a_refusal_is_not_asked_for_again() -> None:
    with pytest.raises(ResyncRequired):
        core().ended(error_of_reason("BOOKMARK_TOO_OLD", "x"), now=0.0, jitter=0.0)


def test_answers_that_make_no_sense() -> None:
    for response in (snapshot_pb2.ReadChangesResponse(), batch("")):
        with pytest.raises(InternalError):
            core().batch(response)


def test_columns_that_do_not_fit_together_are_no_changes() -> None:
    whole = PackedRecords(
        count=1,
        payloads=b"{}",
        payload_offsets=struct.pack("<2i", 0, 2),
        keys=b"a",
        key_offsets=struct.pack("<2i", 0, 1),
        versions=struct.pack("<q", 5),
        publish_times=struct.pack("<q", 6),
        expire_times=struct.pack("<q", 2**63 - 1),
        sequences=struct.pack("<q", 7),
        origins=b"",
        origin_names=("nyc",),
        ops=b"\x03",
        reasons=b"\x00",
    )
    (change,) = unpacked("t", whole)
    assert (change.op, change.topic, change.record, change.bookmark) == ("delete", "t", None, None)
    assert change.previous is not None
    assert (change.previous.key, change.previous.sequence, change.previous.origin) == ("a", 7, "nyc")
    wrong: list[dict[str, Any]] = [
        {"versions": b""},
        {"sequences": b"123"},
        {"ops": b""},
        {"ops": b"\x63"},
        {"keys": b"\xff"},
    ]
    for columns in wrong:
        with pytest.raises(InternalError):
            unpacked("t", replace(whole, **columns))
