"""A snapshot in an order, by both clients: a query, and a subscription from its bookmark (S1). And `behind` (S5)."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from sow.v1 import sow_pb2
from sow_client import Change, FailedPrecondition, InvalidArgument, Subscription
from tests.support.fakes.called_server import Server, footer, loop, script, server, status_details
from tests.support.fakes.scripted import SECONDS_MAX, Rpc
from tests.support.fakes.subscriptions import columns

__all__ = ["loop", "script", "server"]  # fixtures

VIEW = b"all of it"


def header(sequence: int) -> sow_pb2.QueryResponse:
    return sow_pb2.QueryResponse(header=sow_pb2.QueryHeader(bookmark=f"e.{sequence}", as_of_micros=1))


def records(*keys: str) -> sow_pb2.QueryResponse:
    return sow_pb2.QueryResponse(batch=columns([(key, b"{}", 1) for key in keys]))


def more_match(matched: int, returned: int) -> sow_pb2.QueryResponse:
    response = footer(matched)
    response.footer.returned = returned
    return response


def progress(sequence: int, *, behind: bool) -> sow_pb2.SubscribeResponse:
    return sow_pb2.SubscribeResponse(progress=sow_pb2.Progress(bookmark=f"e.{sequence}", behind=behind))


def change(key: str, sequence: int) -> sow_pb2.SubscribeResponse:
    changes = sow_pb2.ChangeBatch(
        topic="orders", op=[sow_pb2.CHANGE_OP_PUT], records=columns([(key, b"{}", sequence)]), bookmark=f"e.{sequence}"
    )
    return sow_pb2.SubscribeResponse(changes=changes)


def view_is_asked(server: Server) -> sow_pb2.SubscribeRequest:
    """The client asks what it may see, and wants no more."""
    request, rpc = server.take("Subscribe")
    rpc.send_response(sow_pb2.SubscribeResponse(snapshot_begin=sow_pb2.SnapshotBegin(bookmark="e.7", view=VIEW)))
    rpc.cancelled()
    assert isinstance(request, sow_pb2.SubscribeRequest)
    return request


def subscribed(server: Server, sequence: int) -> Rpc:
    """The subscription from a position."""
    request, rpc = server.take("Subscribe")
    assert (request.sow, request.bookmark, request.view, request.oof) == (False, f"e.{sequence}", VIEW, True)
    assert (request.filter, request.conflation_micros) == ("/price > 9", 1_000_000)
    return rpc


def begun(server: Server, sequence: int) -> Rpc:
    """The same, with its first frame."""
    rpc = subscribed(server, sequence)
    rpc.send_response(progress(sequence, behind=False))
    return rpc


def told(changes: list[Change]) -> list[tuple[str, str | None, str | None]]:
    return [(one.op, one.key, one.reason) for one in changes]


def ask(server: Server, count: int) -> Any:
    """Begins to read; the result is the subscription with the first changes of it."""

    def read() -> tuple[Subscription, list[Change]]:
        changes = server.client.sow_and_subscribe(
            "orders", "/price > 9", order_by="/price DESC", top_n=2, oof=True, conflation="1s", select=["/price"]
        )
        return changes, [next(changes) for _ in range(count)]

    return server.begin(read)


def test_the_records_come_in_order_and_the_changes_after_the_query(server: Server) -> None:
    reading = ask(server, 4)
    asked = view_is_asked(server)
    assert (asked.topic, asked.sow, asked.snapshot_max, list(asked.select.include)) == ("orders", True, 1, ["/price"])
    # The server may refuse any of its options: before the first record.
    assert (asked.filter, asked.oof, asked.conflation_micros) == ("/price > 9", True, 1_000_000)
    query = server.stream("Query", header(8), records("b"), records("a"), more_match(3, 2))
    assert (query.order_by, query.top_n, query.filter) == ("/price DESC", 2, "/price > 9")
    assert query.select.include == ["/price"]
    rpc = subscribed(server, 8)
    rpc.send_response(progress(8, behind=True))
    rpc.send_response(change("c", 9))
    changes, seen = reading.result(SECONDS_MAX)
    assert told(seen) == [
        ("sow", "b", None), ("sow", "a", None), ("snapshot_end", "", "truncated"), ("put", "c", None)
    ]  # fmt: skip
    assert changes.bookmark == "e.9"
    rpc.send_response(progress(9, behind=False))
    rpc.send_response(change("d", 10))
    assert server.begin(lambda: next(changes)).result(SECONDS_MAX).key == "d"
    assert not changes.behind
    closing = server.begin(changes.close)
    rpc.cancelled()
    closing.result(SECONDS_MAX)


def test_a_break_within_the_query_is_a_new_query_and_a_resync(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sow_client._statuses.BACKOFF_SECONDS_FIRST", 0.0)
    reading = ask(server, 5)
    view_is_asked(server)
    server.stream("Query", header(8), records("b"), end=(grpc.StatusCode.UNAVAILABLE, "STOPPING"))
    begun(server, 8).cancelled()
    view_is_asked(server)
    server.stream("Query", header(11), records("c"), footer(1))
    rpc = begun(server, 11)
    rpc.send_response(change("d", 12))
    changes, seen = reading.result(SECONDS_MAX)
    assert told(seen) == [
        ("sow", "b", None), ("resync", "", None), ("sow", "c", None), ("snapshot_end", "", None), ("put", "d", None)
    ]  # fmt: skip
    server.begin(changes.close).result(SECONDS_MAX)


def test_a_break_after_the_query_goes_on_without_another(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the journal does not go on there, another query follows."""
    monkeypatch.setattr("sow_client._statuses.BACKOFF_SECONDS_FIRST", 0.0)
    reading = ask(server, 4)
    view_is_asked(server)
    server.stream("Query", header(8), footer(0))
    rpc = begun(server, 8)
    rpc.send_response(change("d", 9))
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "gone")
    code = grpc.StatusCode.OUT_OF_RANGE
    subscribed(server, 9).terminate(status_details(code, "BOOKMARK_TOO_OLD", "no"), code, "no")
    view_is_asked(server)
    server.stream("Query", header(20), footer(0))
    begun(server, 20)
    changes, seen = reading.result(SECONDS_MAX)
    assert told(seen) == [
        ("snapshot_end", "", None), ("put", "d", None), ("resync", "", None), ("snapshot_end", "", None)
    ]  # fmt: skip
    assert changes.bookmark == "e.20"
    server.begin(changes.close).result(SECONDS_MAX)


def test_a_topic_without_a_journal_is_refused_before_the_first_record(server: Server) -> None:
    """S1: all records came, and then the refusal."""
    reading = ask(server, 1)
    view_is_asked(server)
    _, answer = server.take("Query")
    for response in (header(7), records("a"), footer(1)):
        answer.send_response(response)
    code = grpc.StatusCode.FAILED_PRECONDITION
    subscribed(server, 7).terminate(status_details(code, "NO_JOURNAL", "no"), code, "no")
    with pytest.raises(FailedPrecondition) as caught:
        reading.result(SECONDS_MAX)
    assert caught.value.reason == "NO_JOURNAL"
    answer.cancelled()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"topic": "orders", "top_n": 2}, "top_n"),
        ({"topic_pattern": "o.*", "order_by": "/price"}, "order_by"),
        ({"topic": "orders", "order_by": "/price", "snapshot_max": 2}, "snapshot_max"),
        ({"topic": "orders", "order_by": "/price", "top_n": 0}, "top_n"),
    ],
)
def test_options_that_do_not_go_together(server: Server, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field}: ") as caught:
        server.client.sow_and_subscribe(**arguments)
    assert caught.value.reason == "INVALID_ARGUMENT"
