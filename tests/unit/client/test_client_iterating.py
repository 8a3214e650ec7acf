"""Iterating with a limit of time and in batches, and how results show themselves, in both clients."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest

import sow_client
from sow.v1 import sow_pb2, types_pb2
from sow_client import (
    AsyncClient,
    AsyncSubscription,
    Cancelled,
    Change,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    PackedRecords,
    Page,
    QueryFooter,
    QueryHeader,
    QueryResult,
    Record,
    RecordBatch,
    Unavailable,
    View,
    _html,
)
from sow_client._aio_subscription import AioOpenSubscription, AioSubscribeCall
from sow_client._reads import QueryProgress
from sow_client._subscription_core import SubscriptionCore
from tests.support.fakes.called_server import Server, batch, footer, header, loop, script, server
from tests.support.fakes.loops import FakeLoop
from tests.support.fakes.scripted import SECONDS_MAX

__all__ = ["loop", "script", "server"]  # fixtures

PROGRESS = sow_pb2.SubscribeResponse(progress=sow_pb2.Progress(bookmark="e.1"))


def columns(*documents: bytes, first: int = 2) -> types_pb2.RecordColumns:
    count = len(documents)
    return types_pb2.RecordColumns(
        key=[str(number) for number in range(count)],
        payload=documents,
        version=[1] * count,
        publish_time_micros=[1] * count,
        expire_time_micros=[2**63 - 1] * count,
        sequence=range(first, first + count),
        origins=["nyc"],
    )


def changes(*documents: bytes, first: int = 2) -> sow_pb2.SubscribeResponse:
    records = columns(*documents, first=first)
    count = len(documents)
    return sow_pb2.SubscribeResponse(
        changes=sow_pb2.ChangeBatch(
            topic="orders",
            records=records,
            op=[sow_pb2.CHANGE_OP_PUT] * count,
            bookmark=f"e.{first + count - 1}",
        )
    )


# ---- subscriptions ----


def test_waiting_for_a_change_ends_with_the_time_and_loses_nothing(server: Server) -> None:
    """Story: a program that had something else to do at times needed a thread for each subscription."""
    opening = server.begin(lambda: server.client.subscribe("orders"))
    _, rpc = server.take("Subscribe")
    rpc.send_response(PROGRESS)
    subscription = opening.result(SECONDS_MAX)
    assert subscription.next(timeout=0) is None
    assert subscription.next(timeout=0) is None
    rpc.send_response(changes(b"0", b"1"))
    first = subscription.next(timeout=SECONDS_MAX)
    assert first is not None
    assert first.key == "0"
    second = subscription.next()
    assert second is not None
    assert (second.key, subscription.bookmark) == ("1", "e.3")
    assert subscription.next(timeout=0) is None
    rpc.send_response(changes(b"2", first=4))
    assert next(iter(subscription)).record is not None  # another way to read goes on where this one was
    subscription.close()
    rpc.cancelled()
    with pytest.raises(Cancelled):
        subscription.next(timeout=0)


def test_batches_have_the_changes_that_are_at_hand(server: Server) -> None:
    opening = server.begin(lambda: server.client.subscribe("orders"))
    _, rpc = server.take("Subscribe")
    rpc.send_response(PROGRESS)
    subscription = opening.result(SECONDS_MAX)
    empty = next(iter(subscription.batches(timeout=0)))
    assert empty == []
    rpc.send_response(changes(*[b"x"] * 5))
    batches = iter(subscription.batches(3, timeout=SECONDS_MAX))
    assert [change.key for change in next(batches)] == ["0", "1", "2"]
    assert subscription.bookmark == "e.4"
    assert [change.key for change in next(batches)] == ["3", "4"]
    assert subscription.bookmark == "e.6"
    subscription.close()
    assert list(batches) == []


def test_a_batch_without_changes_is_refused(server: Server) -> None:
    opening = server.begin(lambda: server.client.subscribe("orders"))
    _, rpc = server.take("Subscribe")
    rpc.send_response(PROGRESS)
    with opening.result(SECONDS_MAX) as subscription, pytest.raises(InvalidArgument, match="size"):
        next(iter(subscription.batches(0)))


def test_a_call_that_breaks_while_nobody_waits_is_made_again(server: Server) -> None:
    opening = server.begin(lambda: server.client.subscribe("orders"))
    _, rpc = server.take("Subscribe")
    rpc.send_response(PROGRESS)
    subscription = opening.result(SECONDS_MAX)
    assert subscription.next(timeout=0) is None
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "Socket closed")
    waiting = server.begin(lambda: subscription.next(timeout=SECONDS_MAX))
    request, rpc = server.take("Subscribe")
    assert request.bookmark == "e.1"
    rpc.send_response(PROGRESS)
    rpc.send_response(changes(b"0"))
    found = waiting.result(SECONDS_MAX)
    assert found is not None
    subscription.close()


@pytest.mark.slow
def test_the_pause_before_another_call_ends_with_the_time_as_well(server: Server) -> None:
    opening = server.begin(lambda: server.client.subscribe("orders"))
    _, rpc = server.take("Subscribe")
    rpc.send_response(PROGRESS)
    subscription = opening.result(SECONDS_MAX)
    core: Any = getattr(subscription, "_target", subscription)
    core._core.ended = lambda error, **_: 3600.0  # an hour, as a server may ask for
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "Socket closed")
    for _ in range(3):
        assert subscription.next(timeout=0.05) is None
    subscription.close()


def test_a_read_that_nobody_waits_for_ends_with_its_subscription(script: Any) -> None:
    """No task stays, and none complains that nobody has asked for its error."""

    async def use() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with grpc.aio.insecure_channel(script.address) as channel, AsyncClient(channel=channel) as client:
            for _ in range(2):
                subscription = client.subscribe("orders")
                opening = asyncio.create_task(subscription.open())
                rpc = await asyncio.to_thread(script.take, "Subscribe")
                rpc.send_response(PROGRESS)
                await opening
                assert await subscription.next(timeout=0.001) is None
                await subscription.close()
                await asyncio.to_thread(rpc.cancelled)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        assert not complaints

    asyncio.run(use())


def test_closing_ends_a_wait_that_has_a_limit(script: Any) -> None:
    """Story: `close` took away the read that `next` waited for, and `next` raised a TypeError."""

    async def one(subscription: AsyncSubscription) -> None:
        with pytest.raises(Cancelled) as caught:
            await subscription.next(timeout=SECONDS_MAX)
        assert caught.value.reason == "CLOSED"

    async def many(subscription: AsyncSubscription) -> None:
        assert [batch async for batch in subscription.batches(timeout=SECONDS_MAX)] == []

    async def use() -> None:
        async with grpc.aio.insecure_channel(script.address) as channel, AsyncClient(channel=channel) as client:
            for waits in (one, many):
                subscription = client.subscribe("orders")
                opening = asyncio.create_task(subscription.open())
                rpc = await asyncio.to_thread(script.take, "Subscribe")
                rpc.send_response(PROGRESS)
                await opening
                waiting = asyncio.create_task(waits(subscription))
                await asyncio.sleep(0)
                assert subscription._reading is not None
                await subscription.close()
                await waiting

    asyncio.run(use())


class Opener:
    """Opens no call: each attempt fails after 0.3 s."""

    def __init__(self) -> None:
        self.attempts = self.ended = 0

    async def __call__(
        self, request: sow_pb2.SubscribeRequest, /, *, connect_seconds: float | None = None
    ) -> AioSubscribeCall:
        self.attempts += 1
        try:
            await asyncio.sleep(0.3)
        finally:
            self.ended += 1
        raise Unavailable("nobody is there", reason="UNREACHABLE")


def following(opener: AioOpenSubscription, *, stood: bool = False) -> AsyncSubscription:
    """A subscription; `stood`: it was established before."""
    request = sow_pb2.SubscribeRequest(topic="orders", bookmark="e.1")
    core = SubscriptionCore(request, retry_for=2.0, connect_timeout=2.0)
    core.stood = stood
    return AsyncSubscription(core, opener)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    """Runs subscriptions in a time of its own."""
    with asyncio.Runner(loop_factory=FakeLoop) as made:
        monkeypatch.setattr("sow_client._aio_subscription.time", SimpleNamespace(monotonic=made.get_loop().time))
        yield made


@pytest.mark.parametrize("stood", [False, True])
def test_an_attempt_to_connect_lasts_longer_than_one_who_waits_for_less(runner: asyncio.Runner, stood: bool) -> None:
    """Story: each attempt ended with the time of `next`, so a subscription that was asked every 0.1 s neither came back
    nor failed."""
    opener = Opener()

    async def poll() -> None:
        subscription = following(opener, stood=stood)
        for _ in range(100):
            assert await subscription.next(timeout=0.1) is None

    with pytest.raises(Unavailable):
        runner.run(poll())
    assert runner.get_loop().time() < 4.0
    assert opener.ended == opener.attempts > 1


def test_an_attempt_that_nobody_waits_for_ends_with_its_subscription(runner: asyncio.Runner) -> None:
    opener = Opener()

    async def use() -> None:
        closed, dropped, cancelled = following(opener), following(opener), following(opener)
        for one in (closed, dropped):
            assert await one.next(timeout=0.1) is None
        await closed.close()
        gc.collect()
        gc.disable()
        try:
            del one, dropped
        finally:
            gc.enable()
        waiting = asyncio.create_task(cancelled.next(timeout=0.1))
        await asyncio.sleep(0.05)
        assert (opener.attempts, opener.ended) == (3, 2)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await asyncio.sleep(0)
        assert opener.ended == 3
        assert asyncio.get_running_loop().time() < 0.3
        with pytest.raises(Cancelled):
            await closed.next(timeout=0.1)

    runner.run(use())


def test_a_subscription_is_dropped_without_the_collector_after_an_attempt_that_failed(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sow_client._statuses.BACKOFF_SECONDS_FIRST", 0.0)
    opener = Opener()

    async def use() -> None:
        subscription = following(opener)
        gc.collect()
        gc.disable()
        try:
            assert await subscription.next(timeout=0.31) is None
            assert (opener.attempts, opener.ended) == (2, 1)
            reference = weakref.ref(subscription)
            del subscription
            assert reference() is None
        finally:
            gc.enable()

    runner.run(use())


def test_closing_ends_an_attempt_that_is_waited_for(runner: asyncio.Runner) -> None:
    opener = Opener()

    async def use() -> None:
        for timeout in (None, 5.0):
            subscription = following(opener)
            waiting = asyncio.create_task(subscription.next(timeout=timeout))
            await asyncio.sleep(0)
            await subscription.close()
            with pytest.raises(Cancelled):
                await waiting
        assert asyncio.get_running_loop().time() == 0.0

    runner.run(use())


# ---- queries ----


@pytest.mark.slow
def test_a_query_that_takes_too_long_ends_with_its_time(server: Server) -> None:
    result = server.client.query("orders", timeout=0.2)
    call = server.begin(lambda: list(result))
    _, rpc = server.take("Query")
    rpc.send_response(header())
    with pytest.raises(DeadlineExceeded):
        call.result(SECONDS_MAX)
    rpc.cancelled()


# ---- how values show themselves ----


def test_every_public_class_shows_what_it_is() -> None:
    for name in sow_client.__all__:
        kind = getattr(sow_client, name)
        if inspect.isclass(kind) and not issubclass(kind, BaseException | Enum | dict):
            told = is_dataclass(kind) or issubclass(kind, msgspec.Struct) or kind.__repr__ is not object.__repr__
            assert told, f"{name} has no __repr__"


def test_a_client_shows_its_servers_and_no_token() -> None:
    with Client(["a:1", "b:1"], token=None) as client:
        assert repr(client) == "Client('a:1,b:1')"
    assert repr(client) == "Client('a:1,b:1', closed)"
    with Client("127.0.0.1:1", token="s3cret") as client:
        assert "s3cret" not in repr(client)


def test_results_and_subscriptions_show_how_far_they_are(server: Server) -> None:
    result = server.client.query("orders")
    shown: Any = getattr(result, "_target", result)  # of a client of asyncio
    kind = type(shown).__name__
    assert repr(shown) == f"{kind}('orders', not begun)"
    call = server.begin(lambda: list(result))
    server.stream("Query", header(), batch("1", "2"), footer(2))
    call.result(SECONDS_MAX)
    assert repr(shown) == f"{kind}('orders', 2 records of 2 that match)"
    opening = server.begin(lambda: server.client.subscribe("orders", "/price > 9"))
    _, rpc = server.take("Subscribe")
    rpc.send_response(PROGRESS)
    subscription = opening.result(SECONDS_MAX)
    shown = getattr(subscription, "_target", subscription)
    kind = type(shown).__name__
    assert repr(shown) == f"{kind}('orders', filter='/price > 9', bookmark='e.1')"
    subscription.close()
    assert repr(shown).endswith(", closed)")
    publisher = server.client.publisher("orders")
    shown = getattr(publisher, "_target", publisher)
    assert repr(shown).endswith("('orders', 0 records acknowledged, 0 not yet, 0 refused)")


def test_large_values_have_a_short_repr() -> None:
    records = list(RecordBatch("orders", columns(*[b"x" * 1000] * 1000)))
    page = Page(records, "more", QueryHeader("e.1", 1), QueryFooter(1, 1, 1, "more"))
    large = bytes(10**6)
    packed = PackedRecords(9, large, large, large, large, large, large, large, large, large, ("nyc",), large, large)
    for value in (page, RecordBatch("orders", columns(*[b"x"] * 1000)), packed):
        assert len(repr(value)) < 200


# ---- notebooks ----


def of(*documents: bytes) -> list[Record]:
    return list(RecordBatch("orders", columns(*documents)))


def test_a_table_has_fields_as_columns() -> None:
    table = _html.table(of(b'{"id":1,"price":9.5}', b'{"id":2,"notes":["a"]}'), "two")
    assert "<tr><th>key</th><th>id</th><th>price</th><th>notes</th></tr>" in table
    assert "<tr><td>0</td><td>1</td><td>9.5</td><td></td></tr>" in table
    assert "<td>[&quot;a&quot;]</td>" in table
    assert "<caption>two</caption>" in table
    assert "<th>payload</th>" in _html.table(of(b"8=FIX"), "bytes")


def test_a_table_has_the_numbers_that_were_published() -> None:
    """Story: a number beyond a float was a text inside of an array, and infinite ones were null."""
    table = _html.table(of(b'{"a":[1e400],"b":[null,true],"c":{"d":1e99999999999999999999},"e":1e400}'), "large")
    for cell in ("[1E+400]", "[null,true]", "{&#x27;d&#x27;: inf}", "1E+400"):
        assert f"<td>{cell}</td>" in table, cell


def test_nothing_of_a_document_is_an_element_of_the_page() -> None:
    """See _html [1]."""
    evil = "<script>alert(1)</script>"
    document = msgspec.json.encode({evil: evil, "list": [evil], "deep": {evil: evil}})
    record = Record(evil, document, RecordBatch(evil, columns(document)), 0)
    for table in (_html.table([record], evil), record._repr_html_()):
        assert "<script" not in table
        assert "&lt;script&gt;" in table


def test_a_table_has_a_bound() -> None:
    """See _html [2]."""
    wide = msgspec.json.encode({f"field{number}": "x" * 200 for number in range(100)})
    table = _html.table(of(*[wide] * 50), "many")
    assert table.count("<tr>") == 1 + _html.ROWS_MAX
    assert f"many; the first {_html.ROWS_MAX}</caption>" in table
    assert "<caption>all</caption>" in _html.table(of(*[wide] * _html.ROWS_MAX), "all")
    assert table.count("<th>") == 1 + _html.FIELDS_MAX
    assert len(table) < 40_000


def test_a_result_shows_its_first_records_and_gives_them_afterwards() -> None:
    """A notebook shows the result of its last line: that must not use it up."""

    def arriving() -> Any:
        progress.header = QueryHeader("e.1", 1)
        yield RecordBatch("orders", columns(b'{"a":1}', b'{"a":2}'))
        yield RecordBatch("orders", columns(b'{"a":3}'))

    progress = QueryProgress("orders")
    result = QueryResult(progress, arriving())
    for _ in range(2):
        assert "<td>1</td>" in result._repr_html_()
    assert [record.data["a"] for record in result] == [1, 2, 3]
    assert "<td>" not in result._repr_html_()
    progress = QueryProgress("orders")
    result = QueryResult(progress, arriving())
    result._repr_html_()
    assert [len(one) for one in result.batches()] == [2, 1]
    result = QueryResult(progress, arriving())
    next(result)
    result._repr_html_()
    assert [record.data["a"] for record in result] == [2, 3]


def test_views_show_a_table() -> None:
    view = View()
    view.apply(Change("sow", record=of(b'{"id":7}')[0], topic="orders"))
    assert "View(1 records, not complete)" in view._repr_html_()
    assert "<td>7</td>" in view._repr_html_()
