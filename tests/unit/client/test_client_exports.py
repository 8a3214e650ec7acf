"""How a part of an export is read on when its connection breaks, and when it is whole (_exports [1], [2]); the
arguments."""

from __future__ import annotations

import pytest

from sow.v1 import snapshot_pb2
from sow_client import InternalError, InvalidArgument, NotFound, Unavailable
from sow_client import _exports as exports

Response = snapshot_pb2.ReadExportResponse
CUT = Unavailable("cut", reason="STREAM_CUT")


def core() -> exports.PartCore:
    request = exports.read_request("e", 3, columns=("payload", "key"), lines=True, batch_size=7)
    return exports.PartCore(request, connect_timeout=5.0)


def batch(count: int, token: bytes) -> Response:
    return Response(batch=snapshot_pb2.PackedRecords(count=count, payloads=b"p" * count), resume_token=token)


def footer(returned: int) -> Response:
    return Response(footer=snapshot_pb2.ExportFooter(returned=returned))


def test_a_call_that_is_made_again_goes_on_after_the_last_batch() -> None:
    part = core()
    first = part.request(now=0.0)
    assert (first.resume_token, first.part, first.lines, first.batch_size) == (b"", 3, True, 7)
    records = part.feed(batch(2, b"two"))
    assert records is not None
    assert (records.count, records.payloads) == (2, b"pp")
    assert part.failed(CUT, now=1.0, jitter=0.0) > 0
    assert part.request(now=2.0).resume_token == b"two"
    part.feed(batch(1, b"three"))
    assert part.feed(footer(1)) is None  # a footer counts the records of its own call
    part.finished()


def test_a_stream_without_a_footer_was_cut_off() -> None:
    part = core()
    part.request(now=0.0)
    part.feed(batch(2, b"two"))
    with pytest.raises(Unavailable) as error:
        part.finished()
    assert error.value.reason == "STREAM_CUT"


def test_a_footer_that_counts_other_records_than_came_is_an_error() -> None:
    part = core()
    part.request(now=0.0)
    part.feed(batch(2, b"two"))
    with pytest.raises(InternalError):
        part.feed(footer(3))


def test_retries_are_bounded_and_only_for_temporary_errors() -> None:
    part = core()
    part.request(now=0.0)
    with pytest.raises(Unavailable):
        part.failed(CUT, now=6.0, jitter=0.0)  # it never stood, and that is longer than the wait for a connection
    part.feed(batch(1, b"one"))
    assert part.failed(CUT, now=10.0, jitter=1.0) < 1.0
    assert part.failed(CUT, now=10.0 + exports.READ_RETRY_SECONDS / 2, jitter=1.0) < 1.0
    with pytest.raises(Unavailable):
        part.failed(CUT, now=10.0 + exports.READ_RETRY_SECONDS, jitter=1.0)
    for final in (NotFound("gone", reason="EXPORT_NOT_FOUND"), Unavailable("stopping", reason="STOPPING")):
        fresh = core()
        fresh.request(now=0.0)
        with pytest.raises(type(final)):
            fresh.failed(final, now=0.0, jitter=0.0)


def test_arguments_that_make_no_sense_are_refused() -> None:
    for columns in ("payload", ("price",)):
        with pytest.raises(InvalidArgument):
            exports.read_request("e", 0, columns=columns, lines=False, batch_size=0)
    for part, size in ((-1, 0), (2**32, 0), (0, -1), (0, 100_001)):
        with pytest.raises(InvalidArgument):
            exports.read_request("e", part, columns=("payload",), lines=False, batch_size=size)
    with pytest.raises(InvalidArgument):
        exports.open_request("t", None, parts=-1, lease=None)
