"""Removals by publishers and in transactions (rule P11), against a server that the test plays."""

from __future__ import annotations

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import FailedPrecondition, InvalidArgument
from sow_client._contract import REMOVALS
from sow_client._lifetimes import lifetime
from sow_client._publish_columns import Removal, checked_columns, row_columns
from sow_client._publish_core import PublishCore, PublisherOptions, StreamDefaults


def core_of() -> PublishCore:
    options = PublisherOptions(batch_records=10)
    return PublishCore(StreamDefaults("orders"), options, publisher_id="p", publisher_epoch=1)


def test_removals_and_puts_of_one_request_stay_in_their_order() -> None:
    """A removal by key goes among puts without keys."""
    columns = row_columns([b"1", Removal(b"", "a|b"), (b"2", None, lifetime("1s", None)), Removal(b"{}", None)])
    assert columns.payloads == (b"1", b"", b"2", b"{}")
    assert columns.keys == ("", "a|b", "", "")
    assert columns.removals == [False, True, False, True]
    assert list(columns.kinds) == [0, 0, types_pb2.LIFETIME_KIND_TTL, 0]


def test_without_a_removal_the_column_is_left_out() -> None:
    assert checked_columns([b"1", b"2"], None, None, None, [False, False]).cut(0, 2).removals == ()
    assert checked_columns([b"1", b"", b"2"], ["", "a", ""], None, None, [False, True, False]).cut(1, 2).removals == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("removals", "kinds", "message"),
    [
        ([True], None, "removals: has 1 entries for 2 payloads"),
        ([True, 1], None, "removals[1]: is int, not bool"),
        ([False, True], [1, 1], "lifetime_kinds[1]: is of a removal"),
    ],
)
def test_columns_of_removals_are_checked_before_anything_is_sent(
    removals: list[bool], kinds: list[int] | None, message: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        checked_columns([b"1", b""], None, kinds, None if kinds is None else [1, 1], removals)
    assert message in str(refused.value)


def test_a_request_with_removals_waits_for_a_stream_to_a_server_that_knows_them() -> None:
    """_contract [1]: an older server would publish the document. A stream that was opened before the first removal is
    ended, and opened again at once."""
    core = core_of()
    core.plain = False
    core.pending += [b"1", Removal(b"", "a")]
    before = core.needs
    core.seal()
    assert (before, core.needs) == (None, REMOVALS)
    assert (core.next_request(), core.must_reopen) == (None, True)
    core.rewind()
    assert core.retry_delay(FailedPrecondition("cut", reason="CUT"), now=1.0, jitter=0.5) == 0.0
    core.checked = REMOVALS
    request = core.next_request()
    assert request is not None
    assert list(request.remove) == [False, True]
    ack, error = core.acknowledge(sow_pb2.PublishStreamResponse(applied=2, removed=1))
    assert (ack.removed, error) == (1, None)


def test_the_rest_of_a_request_keeps_its_removals() -> None:
    """_publish_core [4]"""
    core = core_of()
    core.plain, core.checked = False, REMOVALS
    core.pending += [b"1", Removal(b"", "a"), Removal(b"", "b"), b"2"]
    core.seal()
    assert core.next_request() is not None
    broken = types_pb2.Refusal(index=2, reason=types_pb2.ERROR_REASON_OVERLOADED)
    core.acknowledge(sow_pb2.PublishStreamResponse(applied=2, refusals=[broken]))
    core.rewind()
    rest = core.next_request()
    assert rest is not None
    assert (list(rest.remove), list(rest.key)) == ([True, False], ["b", ""])
