"""Reading by both clients, against a scripted server: requests, results, errors."""

from __future__ import annotations

from datetime import UTC, datetime

import grpc
import grpc.aio
import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import (
    InternalError,
    InvalidArgument,
    NotFound,
    QueryPlan,
    Unavailable,
)
from tests.support.fakes.called_server import (
    Server,
    batch,
    blocking_server,
    footer,
    header,
    loop,
    script,
    server,
)
from tests.support.fakes.scripted import SECONDS_MAX

__all__ = ["blocking_server", "loop", "script", "server"]  # fixtures


RECORD = types_pb2.Record(topic="orders", key="1", payload=b'{"id":1}', version=7, origin="nyc", sequence=3)


def test_get(server: Server) -> None:
    call = server.begin(lambda: server.client.get("orders", "1"))
    request = server.answer("Get", sow_pb2.GetResponse(records=[RECORD], as_of_micros=1))
    record = call.result(SECONDS_MAX)
    assert record is not None
    assert (record.key, record.data, record.version, record.origin) == ("1", {"id": 1}, 7, "nyc")
    assert request == sow_pb2.GetRequest(topic="orders", keys=["1"])


def test_get_of_nothing_is_none(server: Server) -> None:
    call = server.begin(lambda: server.client.get("orders", "1"))
    server.answer("Get", sow_pb2.GetResponse())
    assert call.result(SECONDS_MAX) is None


def test_get_many(server: Server) -> None:
    call = server.begin(lambda: server.client.get_many("orders", ["1", "2"], select=["/id"]))
    request = server.answer("Get", sow_pb2.GetResponse(records=[RECORD]))
    assert [record.key for record in call.result(SECONDS_MAX)] == ["1"]
    assert request.select.include == ["/id"]


def test_get_of_an_unknown_topic(server: Server) -> None:
    call = server.begin(lambda: server.client.get("nowhere", "1"))
    server.refuse("Get", grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")
    with pytest.raises(NotFound) as caught:
        call.result(SECONDS_MAX)
    assert caught.value.reason == "TOPIC_NOT_FOUND"


def test_query(server: Server) -> None:
    result = server.client.query("orders", exclude=["/note"], batch_size=2, skip_n=1, top_n=3)
    assert (result.header, result.footer) == (None, None)
    call = server.begin(lambda: [record.key for record in result])
    request = server.stream("Query", header(), batch("1", "2"), batch("3"), footer(3))
    assert call.result(SECONDS_MAX) == ["1", "2", "3"]
    assert result.header is not None
    assert result.header.bookmark == "e:9"
    assert result.header.as_of == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert result.footer is not None
    assert result.footer.matched == 3
    assert request == sow_pb2.QueryRequest(
        topic="orders", select=sow_pb2.Projection(exclude=["/note"]), batch_size=2, skip_n=1, top_n=3
    )


def test_query_with_a_filter_and_an_order(server: Server) -> None:
    for order_by in ("/price DESC, /symbol", ["/price DESC", "/symbol"]):
        result = server.client.query("orders", "/price > 9", order_by=order_by)
        call = server.begin(lambda: list(result))  # noqa: B023 - it has run before the next one is made
        request = server.stream("Query", header(), footer(0))
        call.result(SECONDS_MAX)
        assert request == sow_pb2.QueryRequest(
            topic="orders", filter="/price > 9", order_by="/price DESC, /symbol", batch_size=1_000
        )


def test_explain(server: Server) -> None:
    call = server.begin(lambda: server.client.explain("orders", "/symbol = 'IBM'", order_by="/price", top_n=3))
    plan = sow_pb2.QueryPlan(
        access=sow_pb2.QueryPlan.ACCESS_INDEX,
        index_path="/symbol",
        probes=1,
        filter="/symbol = 'IBM'",
        order_by="/price ASC",
        index_entries=12,
    )
    last = sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(matched=10, returned=3, scanned=11, plan=plan))
    request = server.stream("Query", header(), last)
    assert call.result(SECONDS_MAX) == QueryPlan(
        access="index",
        index_path="/symbol",
        probes=1,
        index_entries=12,
        scanned=11,
        matched=10,
        returned=3,
        filter="/symbol = 'IBM'",
        order_by="/price ASC",
    )
    assert request == sow_pb2.QueryRequest(
        topic="orders", filter="/symbol = 'IBM'", order_by="/price", top_n=3, explain=True
    )


def test_an_answer_without_the_plan_that_was_asked_for_is_not_believed(server: Server) -> None:
    call = server.begin(lambda: server.client.explain("orders"))
    server.stream("Query", header(), footer(1))
    with pytest.raises(InternalError):
        call.result(SECONDS_MAX)


def test_a_plan_of_a_newer_server_is_unknown(server: Server) -> None:
    call = server.begin(lambda: server.client.explain("orders"))
    plan = sow_pb2.QueryPlan.FromString(bytes([8, 99]))  # access 99
    server.stream("Query", header(), sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(plan=plan)))
    assert call.result(SECONDS_MAX).access == "unknown"


def test_query_by_batches_and_keys_only(server: Server) -> None:
    result = server.client.query("orders", keys=["1"], keys_only=True)
    call = server.begin(lambda: [part.keys for part in result.batches()])
    request = server.stream("Query", header(), batch("1"), footer(1))
    assert call.result(SECONDS_MAX) == [["1"]]
    assert request.keys_only
    assert request.keys == ["1"]


def test_a_query_of_an_unknown_topic(server: Server) -> None:
    call = server.begin(lambda: list(server.client.query("nowhere")))
    server.stream("Query", end=(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND"))
    with pytest.raises(NotFound):
        call.result(SECONDS_MAX)


def test_a_query_that_ends_without_its_footer_was_cut(server: Server) -> None:
    keys: list[str] = []
    call = server.begin(lambda: keys.extend(record.key for record in server.client.query("orders")))
    server.stream("Query", header(), batch("1"))
    with pytest.raises(Unavailable) as caught:
        call.result(SECONDS_MAX)
    assert caught.value.reason == "STREAM_CUT"
    assert keys == ["1"]


def test_a_query_that_breaks_after_records_is_not_mixed_with_another_instant(server: Server) -> None:
    result = server.client.query("orders")
    first = server.begin(lambda: next(result).key)
    _, rpc = server.take("Query")
    rpc.send_response(header())
    rpc.send_response(batch("1"))
    assert first.result(SECONDS_MAX) == "1"
    second = server.begin(lambda: next(result))
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "reset")
    with pytest.raises(Unavailable) as caught:
        second.result(SECONDS_MAX)
    assert caught.value.reason == "STREAM_CUT"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_query_that_breaks_before_its_first_record_is_asked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    for package in ("blocking", "aio"):
        monkeypatch.setattr(f"sow_client.{package}._reading.QUERY_RETRY_SECONDS", 0.0)
    call = server.begin(lambda: [record.key for record in server.client.query("orders")])
    server.stream("Query", header(), end=(code, ""))
    server.stream("Query", header(), batch("1"), footer(1))
    assert call.result(SECONDS_MAX) == ["1"]


def test_leaving_the_loop_ends_the_call(blocking_server: Server) -> None:
    server = blocking_server  # of the asynchronous client only closing the result ends it

    def first_key() -> str:
        for record in server.client.query("orders"):
            return record.key
        raise AssertionError("no record")

    call = server.begin(first_key)
    _, rpc = server.take("Query")
    rpc.send_response(header())
    rpc.send_response(batch("1"))
    assert call.result(SECONDS_MAX) == "1"
    rpc.cancelled()  # returns once the client has cancelled


def test_closing_a_result_ends_the_call(server: Server) -> None:
    result = server.client.query("orders")
    call = server.begin(lambda: next(result).key)
    _, rpc = server.take("Query")
    rpc.send_response(header())
    rpc.send_response(batch("1", "2"))
    call.result(SECONDS_MAX)
    with result:
        pass
    rpc.cancelled()


def test_page(server: Server) -> None:
    call = server.begin(lambda: server.client.page("orders", "/a = 1", page_size=2, page_token="t1"))
    request = server.stream("Query", header(), batch("1", "2"), footer(2, "t2"))
    page = call.result(SECONDS_MAX)
    assert [record.key for record in page.records] == ["1", "2"]
    assert (page.next_page_token, page.header.bookmark) == ("t2", "e:9")
    assert request == sow_pb2.QueryRequest(topic="orders", filter="/a = 1", page_size=2, page_token="t1")
    with pytest.raises(InvalidArgument):
        server.client.page("orders", page_size=0)
    ordered = server.begin(lambda: server.client.page("orders", page_size=2, order_by=["/a DESC", "/b"]))
    assert server.stream("Query", header(), footer(0)).order_by == "/a DESC, /b"
    assert ordered.result(SECONDS_MAX).next_page_token == ""


def test_count(server: Server) -> None:
    call = server.begin(lambda: server.client.count("orders"))
    request = server.stream("Query", header(), footer(42))
    assert call.result(SECONDS_MAX) == 42
    assert request == sow_pb2.QueryRequest(topic="orders", count_only=True)
    filtered = server.begin(lambda: server.client.count("orders", "/price > 9"))
    assert server.stream("Query", header(), footer(7)).filter == "/price > 9"
    assert filtered.result(SECONDS_MAX) == 7
