"""The stager of a load without a connection: rows become requests, answers settle them, and cut ones come again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest

from sow.v1 import load_pb2, types_pb2
from sow_client import InternalError, InvalidArgument, LoadPart, PermissionDenied, SowError, Unavailable
from sow_client import _loads as loads
from sow_client._loads import StageCore

GONE: Final = Unavailable("gone", reason="UNREACHABLE")


def core(*, retry_for: float = 60.0) -> StageCore:
    return StageCore("load-1", 3, 7, retry_for=retry_for)


def queued(of: StageCore, *payloads: bytes, **columns: Any) -> list[load_pb2.StageLoadRequest]:
    """The requests of these rows, which are queued."""
    given: dict[str, Any] = {"keys": None, "lifetime": None, "kinds": None, "micros": None} | columns
    requests = list(of.requests(payloads, **given))
    for request in requests:
        of.queue(request)
    return requests


def answer(staged: int, *refused: int) -> load_pb2.StageLoadResponse:
    reason = types_pb2.ERROR_REASON_KEY_REQUIRED
    refusals = [types_pb2.Refusal(index=index, reason=reason, message="no key") for index in refused]
    return load_pb2.StageLoadResponse(staged=staged, refusals=refusals)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(InvalidArgument) as refused:
        call()
    return refused.value.message


# ---- requests ----


def test_rows_are_divided_into_requests_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "REQUEST_ROWS", 2)
    of = core()
    first, second = queued(of, b"a", b"b", b"c", keys=["1", "2", "3"], kinds=[1, 1, 3], micros=[5, 6, 0])
    assert (first.load_id, first.part, first.attempt, first.first_row, second.first_row) == ("load-1", 3, 7, 1, 3)
    assert (list(first.payload), list(first.key)) == ([b"a", b"b"], ["1", "2"])
    assert (list(second.payload), list(second.key)) == ([b"c"], ["3"])
    assert (list(second.lifetime_kind), list(second.lifetime_micros)) == ([3], [0])
    assert first.stager == second.stager != core()._stager


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"keys": ["1"]}, "keys: has 1 entries for 2 payloads"),
        ({"kinds": [1], "micros": [1, 2]}, "lifetime_kinds: has 1 entries for 2 payloads"),
        ({"kinds": [1, 1], "micros": [1]}, "lifetime_micros: has 1 entries for 2 payloads"),
        ({"kinds": [1, 1]}, "lifetime_micros: must be given together with lifetime_kinds"),
        ({"micros": [1, 1]}, "lifetime_micros: must be given together with lifetime_kinds"),
        ({"lifetime": "soon"}, "soon"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_a_row_is_queued(columns: dict[str, Any], message: str) -> None:
    of = core()
    assert message in refusal(lambda: queued(of, b"a", b"b", **columns))
    assert not of.busy


@pytest.mark.parametrize(
    ("part", "attempt", "message"),
    [
        (-1, 0, "part: -1 is not 0 to"),
        (2**32, 0, "part: 4294967296 is not 0 to"),
        (0, -1, "attempt: -1 is not 0 to"),
        (0, 2**64, "attempt: 18446744073709551616 is not 0 to"),
    ],
)
def test_a_part_and_an_attempt_are_numbers_of_their_size(part: int, attempt: int, message: str) -> None:
    assert message in refusal(lambda: StageCore("load-1", part, attempt, retry_for=1.0))


@pytest.mark.parametrize("lease", [timedelta(0), timedelta(seconds=-1), timedelta(days=2)])
def test_a_lease_is_above_zero_and_at_most_a_day(lease: timedelta) -> None:
    assert "is not above zero and at most 24 h" in refusal(lambda: loads.open_request("t", lease))
    assert loads.open_request("t", timedelta(days=1)).lease_micros == 86_400_000_000
    assert loads.open_request("t", None).lease_micros == 0


def test_a_commit_names_its_parts() -> None:
    request = loads.commit_request("load-1", [LoadPart(0, 7, 5)])
    assert [(part.part, part.attempt, part.rows) for part in request.parts] == [(0, 7, 5)]


# ---- answers ----


def test_answers_settle_requests_in_their_order_and_place_refusals_among_all_rows() -> None:
    of = core()
    for payloads in ([b"a", b"b"], [b"c", b"d", b"e"]):
        queued(of, *payloads)
        of.next_request()
    of.settle(answer(1, 1))
    of.settle(answer(1, 0, 2))
    assert (of.staged, of.refused, of.busy) == (2, 3, False)
    assert [(one.index, one.reason) for one in of.refusals] == [
        (1, "KEY_REQUIRED"),
        (2, "KEY_REQUIRED"),
        (4, "KEY_REQUIRED"),
    ]


def test_the_first_refusals_are_kept_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "REFUSALS_KEPT_MAX", 2)
    of = core()
    for _ in range(2):
        queued(of, b"a", b"b")
        of.next_request()
        of.settle(answer(0, 0, 1))
    assert (len(of.refusals), of.refused) == (2, 4)


def test_an_answer_that_does_not_add_up_is_no_answer() -> None:
    of = core()
    with pytest.raises(InternalError, match="an answer to no request"):
        of.settle(answer(1))
    queued(of, b"a", b"b")
    of.next_request()
    with pytest.raises(InternalError, match="an answer for 1 of 2 rows"):
        of.settle(answer(1))
    assert of.staged == 0


@pytest.mark.parametrize("read", [loads.progress, loads.info])
def test_a_phase_that_this_client_does_not_know_is_an_error(read: Callable[[Any], object]) -> None:
    response: Any = load_pb2.CommitLoadResponse if read is loads.progress else load_pb2.GetLoadResponse
    with pytest.raises(InternalError, match="a load in phase 99"):
        read(response(phase=99))


# ---- bounds and cut streams ----


def test_a_stager_has_so_many_requests_and_bytes_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "IN_FLIGHT_MAX", 2)
    of = core()
    found: list[bool] = []
    queued(of, b"a")
    of.next_request()
    found.append(of.room)
    queued(of, b"b")
    found.append(of.room)  # queued and sent ones count
    of.settle(answer(1))
    found.append(of.room)
    monkeypatch.setattr(loads, "IN_FLIGHT_BYTES_MAX", 1)
    found.append(of.room)
    assert found == [True, False, True, False]


def test_requests_of_a_cut_stream_come_again_in_their_order() -> None:
    of = core()
    for payload in (b"a", b"b", b"c"):
        queued(of, payload)
    assert [of.next_request() is not None for _ in range(2)] == [True, True]
    of.settle(answer(1))
    of.rewind()
    again = [request.payload[0] for _ in range(2) if (request := of.next_request()) is not None]
    assert again == [b"b", b"c"]
    assert of.next_request() is None


def test_a_stream_is_opened_again_for_errors_that_pass_and_for_so_long() -> None:
    of = core(retry_for=10.0)
    assert 0 < of.retry_delay(GONE, now=0.0, jitter=0.5) < 10
    with pytest.raises(SowError) as late:
        of.retry_delay(GONE, now=10.1, jitter=0.5)
    assert late.value is GONE
    denied = PermissionDenied("no", reason="PERMISSION_DENIED")
    with pytest.raises(PermissionDenied):
        core().retry_delay(denied, now=0.0, jitter=0.5)


def test_an_answer_begins_the_time_for_retries_anew() -> None:
    of = core(retry_for=10.0)
    of.retry_delay(GONE, now=0.0, jitter=0.5)
    queued(of, b"a")
    of.next_request()
    of.settle(answer(1))
    assert of.retry_delay(GONE, now=100.0, jitter=0.5) < 10
