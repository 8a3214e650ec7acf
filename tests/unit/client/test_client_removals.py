"""Removals by publishers and in transactions (rule P11), against a server that the test plays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import Cancelled, FailedPrecondition, InvalidArgument, PayloadForm, Published, Transaction
from sow_client._contract import REMOVALS, Needed, needed
from sow_client._lifetimes import lifetime
from sow_client._payloads import Encoding
from sow_client._publish_columns import Removal, checked_columns, row_columns
from sow_client._publish_core import PublishCore, PublisherOptions, StreamDefaults
from sow_client.blocking._transactions import Collected, request_of


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


# ---- transactions ----


def collected(block: Callable[[Transaction], None]) -> list[Collected]:
    """What a transaction sends at the end of its block."""
    sent: list[Collected] = []

    def send(changes: Sequence[Collected]) -> list[Published]:
        sent.extend(changes)
        return []

    with Transaction(send) as change:
        block(change)
    return sent


def test_a_transaction_sends_its_puts_and_removals_as_one_atomic_request() -> None:
    def move(change: Transaction) -> None:
        change.remove("a", only_if_version=7)
        change.publish({"id": "b"}, ttl="1s")
        change.remove(data={"id": "c"})

    request = request_of("orders", collected(move), Encoding(PayloadForm()), "buffered")
    first, second, third = request.records
    assert request.atomic
    assert (first.key, first.remove, first.condition.only_if_version) == ("a", True, 7)
    assert (second.payload, second.remove, second.lifetime.ttl_micros) == (b'{"id":"b"}', False, 1_000_000)
    assert (third.payload, third.remove, third.HasField("key")) == (b'{"id":"c"}', True, False)
    assert needed(request) == Needed("records.remove", 3)


def test_a_transaction_whose_block_raises_sends_nothing_and_is_used_once() -> None:
    def fails(change: Transaction) -> None:
        change.remove("a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        assert collected(fails) is None
    assert collected(lambda change: None) == []
    with Transaction(lambda changes: []) as change:
        pass
    with pytest.raises(Cancelled, match="closed"):
        change.remove("a")
    with pytest.raises(Cancelled, match="closed"):
        change.publish({"id": 1})


@pytest.mark.parametrize("given", [{}, {"key": "a", "data": {"id": 1}}])
def test_a_removal_needs_a_key_or_a_document(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="exactly one of both"):
        collected(lambda change: change.remove(**given))
