"""Both clients on a real connection to a small server in this process: unreachable, cut, restarted, used by many."""

# ruff: noqa: N802 - RPCs have the names of the contract

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from sow.v1 import admin_pb2, load_pb2, snapshot_pb2, sow_pb2, sow_pb2_grpc, types_pb2
from sow_client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Deleted,
    InvalidArgument,
    NotFound,
    Published,
    SowError,
    Unavailable,
)
from sow_client._channel import SERVICE_CONFIG
from sow_client._publisher import StreamCall

CUT_AFTER = 7  # requests of a stream, after which the server of the reconnect tests breaks it


class Store(sow_pb2_grpc.SowServiceServicer):
    """Keeps payloads in order and drops repeated ones by publisher sequence (rule P6). Shared by restarted servers."""

    def __init__(self, *, cut_streams: int = 0) -> None:
        self.payloads: list[bytes] = []
        self.highest: dict[str, int] = {}
        self.cuts_left = cut_streams
        self.calls_given_up = 0
        """So many reads the server gives up, as one that stops does."""
        self.entered = threading.Event()
        self.release = threading.Event()
        self._lock = threading.Lock()

    def _apply(self, position: types_pb2.PublisherPosition, payloads: list[bytes]) -> int:
        with self._lock:
            highest = self.highest.get(position.publisher_id, 0)
            fresh = payloads[max(0, highest + 1 - position.first_sequence) :]
            self.payloads += fresh
            self.highest[position.publisher_id] = max(highest, position.first_sequence + len(payloads) - 1)
            return len(fresh)

    def Publish(self, request: sow_pb2.PublishRequest, context: object) -> sow_pb2.PublishResponse:
        self._apply(request.publisher, [record.payload for record in request.records])
        results = [sow_pb2.PublishResult(key="1", version=1, sequence=1) for _ in request.records]
        return sow_pb2.PublishResponse(results=results)

    def PublishStream(
        self, request_iterator: Iterator[sow_pb2.PublishStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.PublishStreamResponse]:
        for number, request in enumerate(request_iterator):
            applied = self._apply(request.publisher, list(request.payload))
            if number == CUT_AFTER and self.cuts_left:
                # Applied, and the answer is lost: the case that sequences are for.
                self.cuts_left -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            yield sow_pb2.PublishStreamResponse(applied=applied, duplicates=len(request.payload) - applied)

    def Get(self, request: sow_pb2.GetRequest, context: grpc.ServicerContext) -> sow_pb2.GetResponse:
        if self.calls_given_up:
            self.calls_given_up -= 1
            context.abort(grpc.StatusCode.CANCELLED, "")
        if request.topic == "slow":
            self.entered.set()
            self.release.wait(10)
        return sow_pb2.GetResponse(records=[types_pb2.Record(key=key, payload=b"{}") for key in request.keys])

    def Query(self, request: sow_pb2.QueryRequest, context: grpc.ServicerContext) -> Iterator[sow_pb2.QueryResponse]:
        if request.topic == "nowhere":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such topic")
        yield sow_pb2.QueryResponse(header=sow_pb2.QueryHeader(bookmark="e:1"))
        count = len(self.payloads)
        if not request.count_only:
            numbers = range(count)
            keys = [str(number) for number in numbers]
            columns = types_pb2.RecordColumns(
                key=keys,
                payload=self.payloads,
                version=numbers,
                publish_time_micros=numbers,
                expire_time_micros=numbers,
                sequence=numbers,
                origins=["a"],
            )
            yield sow_pb2.QueryResponse(batch=columns)
        yield sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(matched=count, returned=count, scanned=count))

    def Subscribe(
        self, request: sow_pb2.SubscribeRequest, context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.SubscribeResponse]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_client_following")

    def Acknowledge(
        self, request: sow_pb2.AcknowledgeRequest, context: grpc.ServicerContext
    ) -> sow_pb2.AcknowledgeResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_client_durable")

    def Rewind(self, request: sow_pb2.RewindRequest, context: grpc.ServicerContext) -> sow_pb2.RewindResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_client_durable")

    def BrowseDurable(
        self, request: sow_pb2.BrowseDurableRequest, context: grpc.ServicerContext
    ) -> Iterator[sow_pb2.BrowseDurableResponse]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "see test_client_durable")

    def SowDelete(self, request: sow_pb2.SowDeleteRequest, context: object) -> Iterator[sow_pb2.SowDeleteResponse]:
        yield sow_pb2.SowDeleteResponse(matched=1, deleted=1, last_sequence=1)
        yield sow_pb2.SowDeleteResponse(matched=2, deleted=2, last_sequence=2, done=True)

    def Touch(self, request: sow_pb2.TouchRequest, context: object) -> sow_pb2.TouchResponse:
        return sow_pb2.TouchResponse(results=[sow_pb2.PublishResult(key=key, version=2) for key in request.keys])

    def GetPublisher(self, request: sow_pb2.GetPublisherRequest, context: object) -> sow_pb2.GetPublisherResponse:
        return sow_pb2.GetPublisherResponse(publisher_epoch=4)

    def OpenPublisher(self, request: sow_pb2.OpenPublisherRequest, context: object) -> sow_pb2.OpenPublisherResponse:
        return sow_pb2.OpenPublisherResponse(publisher_epoch=5)


def serve(store: Store, address: str) -> grpc.Server:
    server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
    sow_pb2_grpc.add_SowServiceServicer_to_server(store, server)
    assert server.add_insecure_port(address)
    server.start()
    return server


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def store(address: str) -> Iterator[Store]:
    store = Store()
    server = serve(store, address)
    yield store
    store.release.set()
    server.stop(None).wait()


def test_a_server_that_is_not_there_is_unreachable_within_the_connect_timeout(address: str) -> None:
    with Client(address, connect_timeout=0.2) as client:
        for call in (lambda: client.get("orders", "1"), lambda: list(client.query("orders"))):
            with pytest.raises(Unavailable) as caught:
                call()
            assert caught.value.reason == "UNREACHABLE"
        publisher = client.publisher("orders")
        publisher.publish(b"{}")
        with pytest.raises(Unavailable) as stopped:
            publisher.flush()
        assert stopped.value.reason == "UNREACHABLE"
        assert stopped.value.details["unacknowledged"] == "1"
        publisher.abort()


def test_a_server_that_is_not_there_is_unreachable_for_the_asynchronous_client_too(address: str) -> None:
    async def use() -> None:
        async with AsyncClient(address, connect_timeout=0.2) as client:
            with pytest.raises(Unavailable) as caught:
                await client.get("orders", "1")
            assert caught.value.reason == "UNREACHABLE"
            publisher = client.publisher("orders")
            await publisher.publish(b"{}")
            with pytest.raises(Unavailable) as stopped:
                await publisher.flush()
            assert stopped.value.details["unacknowledged"] == "1"
            await publisher.abort()

    asyncio.run(use())


def test_a_client_finds_a_server_that_comes_up_later_and_one_that_was_restarted(address: str) -> None:
    store = Store()
    with Client(address, connect_timeout=10) as client, futures.ThreadPoolExecutor() as threads:
        early = threads.submit(client.get, "orders", "1")
        server = serve(store, address)
        assert early.result(10) is not None
        server.stop(None).wait()
        server = serve(store, address)
        assert client.get("orders", "1") is not None
        assert client.publish("orders", b"{}").version == 1
        server.stop(None).wait()


def test_grpc_repeats_no_call_whose_answer_is_a_stream() -> None:
    """A query whose server was killed waited for ever, now and then: a stream that gRPC itself makes again may not end,
    and a query has no deadline."""
    config = json.loads(SERVICE_CONFIG)
    names = [name for method in config["methodConfig"] for name in method["name"]]
    files = (sow_pb2, admin_pb2, snapshot_pb2, load_pb2)
    services = {one.full_name: one for file in files for one in file.DESCRIPTOR.services_by_name.values()}
    assert names
    for name in names:
        service = services[name["service"]]
        method = service.FindMethodByName(name["method"])
        assert not method.server_streaming, name
        assert not method.client_streaming, name


def test_a_server_that_went_away_is_unreachable_long_before_the_deadline_of_calls(address: str) -> None:
    """Calls that waited for a connection by themselves would hang for their whole deadline, here 600 s."""
    server = serve(Store(), address)
    with Client(address, timeout=600, connect_timeout=0.2) as client:
        client.get("orders", "1")
        server.stop(None).wait()
        for call in (client.get, client.persist):
            with pytest.raises(Unavailable) as caught:
                call("orders", "1")
            assert caught.value.reason == "UNREACHABLE"


def test_a_closed_client_says_so(store: Store, address: str) -> None:
    client = Client(address)
    client.get("orders", "1")
    publisher = client.publisher("orders")
    client.close()
    publisher.publish(b"{}")
    calls: list[Callable[[], object]] = [lambda: client.get("orders", "1"), client.query("orders").__next__]
    for call in (*calls, publisher.flush):
        with pytest.raises(Cancelled) as caught:
            call()
        assert caught.value.reason == "CLOSED"
    publisher.abort()


def test_a_client_that_ctrl_c_leaves_does_not_wait_for_ever_for_its_connection_to_close(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: an interrupt cut a call of gRPC in two, and closing the channel waited for the end of that call."""
    monkeypatch.setattr("sow_client._transport.CLOSE_SECONDS_MAX", 0.01)
    never, closing = threading.Event(), threading.Event()
    client = Client(address)
    close = client._transport._channel.close

    def stuck() -> None:
        closing.set()
        never.wait(10)
        close()

    monkeypatch.setattr(client._transport._channel, "close", stuck)
    with pytest.raises(KeyboardInterrupt):
        with client:
            raise KeyboardInterrupt
    assert closing.wait(10)
    with pytest.raises(Cancelled):
        client.get("orders", "1")
    never.set()


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_publisher_gives_up_a_server_that_says_nothing_after_the_connect_timeout(mute: str) -> None:
    """Story: a publisher opened its stream without waiting for a connection, and gRPC waits 20 s for this one
    (_transport [1])."""
    with Client(mute, connect_timeout=0.2) as client:
        publisher = client.publisher("orders")
        publisher.publish(b"{}")
        with futures.ThreadPoolExecutor() as threads:
            flushed = threads.submit(publisher.flush)
            try:
                assert isinstance(flushed.exception(10), Unavailable)
            finally:
                publisher.abort()


def test_an_asynchronous_publisher_gives_it_up_too(mute: str) -> None:
    async def use() -> None:
        async with AsyncClient(mute, connect_timeout=0.2) as client:
            publisher = client.publisher("orders")
            await publisher.publish(b"{}")
            try:
                with pytest.raises(Unavailable):
                    await asyncio.wait_for(publisher.flush(), 10)
            finally:
                await publisher.abort()

    asyncio.run(use())


def test_an_asynchronous_publisher_that_still_asks_for_its_epoch_is_aborted_at_once(mute: str) -> None:
    """Story: leaving the block by an exception waited for the answer about the publisher id, up to `timeout`."""

    async def use() -> None:
        async with AsyncClient(mute, connect_timeout=600) as client:
            publisher = client.publisher("orders", publisher_id="loader", batch_records=1)
            await publisher.publish(b"{}")
            await asyncio.sleep(0)  # its task begins
            await asyncio.wait_for(publisher.abort(), 10)
            with pytest.raises(Cancelled) as caught:
                await publisher.publish(b"{}")
            assert caught.value.reason == "CLOSED"

    asyncio.run(use())


def test_closing_a_client_ends_the_wait_for_its_connection(mute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: who waited went on waiting for `connect_timeout`, and was then told of an unreachable server."""
    waiting = threading.Event()
    client = Client(mute, connect_timeout=600)
    subscribe = client._transport._channel.subscribe

    def subscribed(observe: Callable[[grpc.ChannelConnectivity], None], *, try_to_connect: bool) -> None:
        subscribe(observe, try_to_connect=try_to_connect)
        waiting.set()

    monkeypatch.setattr(client._transport._channel, "subscribe", subscribed)
    with futures.ThreadPoolExecutor() as threads:
        call = threads.submit(client.get, "orders", "1")
        assert waiting.wait(10)
        client.close()
        error = call.exception(10)
        assert isinstance(error, Cancelled)
        assert error.reason == "CLOSED"


class SlowlyWatched:
    """gRPC's channel as its watching thread sees it; it takes its time before it looks at the state once more."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.between = threading.Event()
        self.go_on = threading.Event()
        self.slow = False

    def check_connectivity_state(self, try_to_connect: bool) -> object:
        return self._channel.check_connectivity_state(try_to_connect)

    def watch_connectivity_state(self, state: object, deadline: float) -> object:
        if self.slow:
            self.between.set()
            assert self.go_on.wait(10)
        return self._channel.watch_connectivity_state(state, deadline)


def test_closing_a_client_whose_connection_is_being_looked_at_leaves_no_error_in_a_thread(
    store: Store, address: str
) -> None:
    """gRPC's thread that watches a channel died with ValueError: Cannot invoke RPC: Channel closed! It showed when the
    server went away just as the client was closed; pytest fails a test in which a thread dies."""
    client = Client(address)
    inside: Any = client._transport._channel
    watched = inside._connectivity_state.channel = SlowlyWatched(inside._connectivity_state.channel)
    assert client.get("orders", "1") is not None
    watched.slow = True
    assert watched.between.wait(10)
    with futures.ThreadPoolExecutor() as threads:
        closing = threads.submit(client.close)
        threading.Timer(0.05, watched.go_on.set).start()
        closing.result(10)
    assert not inside._connectivity_state.polling


def test_closing_a_client_from_another_thread_ends_all_its_calls(store: Store, address: str) -> None:
    """Streams and calls under way end as CLOSED or as cut, and nothing is left in a background thread."""
    client = Client(address)
    publisher = client.publisher("orders", retry_for=0.2)
    publisher.publish(b"{}")
    publisher.flush()
    stager = client.stage_load("load", 1, 1, retry_for=0.2)
    stager.stage([b"{}"])
    query = client.query("orders")
    with futures.ThreadPoolExecutor() as threads:
        asks = threads.submit(client.get, "slow", "1")
        assert store.entered.wait(10)
        threads.submit(client.close).result(10)
        error = asks.exception(10)
        assert isinstance(error, Cancelled)
        assert error.reason == "CLOSED"
    publisher.publish(b"{}")
    calls: list[Callable[[], object]] = [
        publisher.flush,
        stager.flush,
        query.__next__,
        lambda: client.subscribe("orders"),
        lambda: client.durable("orders", "one"),
        lambda: list(client.read_export("x", 0)),
        lambda: client.sow_delete("orders", keys=["1"]),
        lambda: client.commit_load("load", []),
        lambda: client.verify_replication("peer"),
    ]
    for call in calls:
        with pytest.raises(SowError) as caught:
            call()
        assert caught.value.reason in {"CLOSED", "STREAM_CUT", "UNIMPLEMENTED"}, call
    publisher.abort()
    stager.abort()


# ---- messages that are too large (rule K8) ----


def too_large() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Calls with a message beyond 20 MiB, of both clients."""
    text = "x" * (21 * 2**20)
    yield "publish", lambda client: client.publish("orders", text)
    yield "delta", lambda client: client.delta_publish("orders", text.encode())
    yield "many", lambda client: client.publish_many("orders", ["{}"] * 3 + [text])
    yield "get", lambda client: client.get("orders", text)
    yield "touch", lambda client: client.touch("orders", ["a" * 3000] * 7500)
    yield "delete by keys", lambda client: client.sow_delete("orders", keys=[text])
    yield "delete by filter", lambda client: client.sow_delete("orders", filter=text)
    yield "delete by document", lambda client: client.sow_delete("orders", data=text)
    yield "count", lambda client: client.count("orders", text)
    yield "page", lambda client: client.page("orders", text, page_size=1)
    yield "explain", lambda client: client.explain("orders", text)
    yield "restamp", lambda client: client.restamp("orders", "clear", filter=text)
    yield "policy", lambda client: client.set_policy("p", text, topics={"max_ttl": "1h"})


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(store: Store, address: str) -> None:
    """It was a bare RESOURCE_EXHAUSTED of gRPC, which programs try again."""
    calls = dict(too_large())

    def refused(name: str, error: BaseException | None) -> None:
        assert isinstance(error, InvalidArgument), name
        assert (error.reason, error.details["field"]) == ("REQUEST_TOO_LARGE", "request"), name

    with Client(address) as client:
        for name, call in calls.items():
            with pytest.raises(SowError) as caught:
                call(client)
            refused(name, caught.value)

    async def use() -> None:
        async with AsyncClient(address) as aio:
            for name in ("publish", "get", "count"):
                with pytest.raises(SowError) as caught:
                    await calls[name](aio)
                refused(name, caught.value)

    asyncio.run(use())
    assert store.payloads == [b"{}"] * 3  # of publish_many, which sends what comes before


def test_streams_with_a_message_that_is_too_large_are_refused_before_it_is_sent(store: Store, address: str) -> None:
    text = "x" * (21 * 2**20)
    with Client(address) as client:
        calls: list[Callable[[], object]] = [
            client.query("orders", text).__next__,
            lambda: client.subscribe("orders", text),
            lambda: client.durable("orders", "one", text),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument) as refused:
                call()
            assert refused.value.reason == "REQUEST_TOO_LARGE"
        stager = client.stage_load("load", 0, 0)
        with client.publisher("orders") as publisher:
            rows: list[tuple[str, Callable[[], object]]] = [
                ("PAYLOAD_TOO_LARGE", lambda: publisher.publish(text)),
                ("KEY_TOO_LARGE", lambda: publisher.publish(b"{}", key=text)),
                ("PAYLOAD_TOO_LARGE", lambda: publisher.publish_columns([text.encode()])),
                ("KEY_TOO_LARGE", lambda: publisher.publish_columns([b"{}"], keys=[text])),
                ("PAYLOAD_TOO_LARGE", lambda: stager.stage([text.encode()])),
                ("KEY_TOO_LARGE", lambda: stager.stage([b"{}"], keys=[text])),
            ]
            for reason, row in rows:
                with pytest.raises(InvalidArgument) as refused:
                    row()
                assert refused.value.reason == reason
        stager.abort()


def test_long_keys_do_not_make_a_message_of_a_publisher_too_large(store: Store, address: str) -> None:
    """Only payloads were counted: 1,000 keys of 30 KB ended the publisher, instead of being refused one by one."""
    keys = [f"{number}{'k' * 30_000}" for number in range(1000)]
    with Client(address) as client, client.publisher("orders") as publisher:
        for key in keys:
            publisher.publish(b"{}", key=key)
        publisher.publish_columns([b"{}"] * 1000, keys=keys)
    assert (publisher.applied, len(store.payloads)) == (2000, 2000)
    with Client(address) as client:
        assert len(client.publish_many("orders", [b"{}"] * 1000, keys=keys)) == 1000


def test_an_oversized_answer_and_the_limit_of_another_server_give_the_same_error(address: str) -> None:
    """gRPC says RESOURCE_EXHAUSTED of its own limits, at either end, and nothing but a text that tells why."""

    class Large(Store):
        def Get(self, request: sow_pb2.GetRequest, context: object) -> sow_pb2.GetResponse:
            return sow_pb2.GetResponse(records=[types_pb2.Record(key="1", payload=bytes(21 * 2**20))])

    server = serve(Large(), address)  # which takes no message beyond 4 MiB, gRPC's default
    try:
        with Client(address) as client:
            for call in (
                lambda: client.get("orders", "1"),
                lambda: client.publish("orders", bytes(5 * 2**20)),
                client.query("orders", "x" * (5 * 2**20)).__next__,
            ):
                with pytest.raises(InvalidArgument) as refused:
                    call()
                assert refused.value.reason == "REQUEST_TOO_LARGE"
            publisher = client.publisher("orders")
            publisher.publish(bytes(5 * 2**20))
            with pytest.raises(InvalidArgument) as refused:
                publisher.flush()
            assert refused.value.reason == "REQUEST_TOO_LARGE"
            publisher.abort()
    finally:
        server.stop(None).wait()


def test_closing_an_asynchronous_client_ends_all_waiting_calls(mute: str, store: Store, address: str) -> None:
    """Story: it was a UsageError of gRPC for a task that waited for a connection and, worse, a CancelledError for one
    that waited for an answer: that task ended without a word, as if it had been cancelled itself (aio [1])."""

    async def use() -> None:
        connecting = AsyncClient(mute, connect_timeout=600)
        waits = asyncio.create_task(connecting.get("orders", "1"))
        await asyncio.sleep(0)
        asking = AsyncClient(address)
        asks = asyncio.create_task(asking.get("slow", "1"))
        assert await asyncio.to_thread(store.entered.wait, 10)
        for client, task in ((connecting, waits), (asking, asks)):
            await client.close()
            with pytest.raises(Cancelled) as caught:
                await asyncio.wait_for(task, 10)
            assert caught.value.reason == "CLOSED"

    asyncio.run(use())


def test_a_task_that_is_cancelled_stays_cancelled(store: Store, address: str) -> None:
    async def use() -> None:
        async with AsyncClient(address) as client:
            asks = asyncio.create_task(client.get("slow", "1"))
            assert await asyncio.to_thread(store.entered.wait, 10)
            asks.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asks

    asyncio.run(use())


def test_the_error_names_the_reason_for_no_connection(address: str) -> None:
    """Story: a refused connection, a wrong name and a certificate that is not trusted all looked the same."""

    async def use() -> str:
        async with AsyncClient(address, connect_timeout=0.5) as client:
            with pytest.raises(Unavailable) as caught:
                await client.get("orders", "1")
            return caught.value.message

    with Client(address, connect_timeout=0.5) as client, pytest.raises(Unavailable) as caught:
        client.get("orders", "1")
    for message in (caught.value.message, asyncio.run(use())):
        assert message.startswith(f"cannot connect to {address} within 0.5 s: ")
        assert "refused" in message


def test_lingering_records_are_not_retried_without_pause_while_disconnected(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: only sealed requests counted as something to try again for, so with records that lingered the publisher
    opened stream after stream without a rest, and never gave up."""
    tries = 0
    # On a channel of the user's own nobody waits for a connection before a stream is opened.
    with grpc.insecure_channel(address) as channel, Client(channel=channel, connect_timeout=0.3) as client:
        opens = client._open_stream

        def counted(requests: Iterator[sow_pb2.PublishStreamRequest]) -> StreamCall:
            nonlocal tries
            tries += 1
            return opens(requests)

        monkeypatch.setattr(client, "_open_stream", counted)
        publisher = client.publisher("orders", linger=600)
        try:
            publisher.publish(b"{}")
            assert publisher._thread is not None
            publisher._thread.join(5)
            assert not publisher._thread.is_alive()
            with pytest.raises(Unavailable):
                publisher.flush()
        finally:
            publisher.abort()
    assert tries < 10


def test_a_call_that_takes_too_long_is_a_deadline_and_not_an_unreachable_server(store: Store, address: str) -> None:
    with Client(address, timeout=0.3) as client:
        with pytest.raises(DeadlineExceeded):
            client.get("slow", "1")
        assert store.entered.is_set()


def test_a_call_that_a_stopping_server_gives_up_is_made_again_and_then_unreachable(store: Store, address: str) -> None:
    """Story: gRPC ends it with CANCELLED, as if the caller had, and that was the error."""

    async def use() -> None:
        async with AsyncClient(address) as client:
            store.calls_given_up = 1
            assert await client.get("orders", "1") is not None
            store.calls_given_up = 2
            with pytest.raises(Unavailable) as refused:
                await client.get("orders", "1")
            assert refused.value.reason == "UNREACHABLE"

    with Client(address) as client:
        store.calls_given_up = 1
        assert client.get("orders", "1") is not None
        store.calls_given_up = 2
        with pytest.raises(Unavailable) as refused:
            client.get("orders", "1")
        assert refused.value.reason == "UNREACHABLE"
    asyncio.run(use())


def test_a_publisher_survives_cuts_and_a_restart_with_every_record_once_and_in_order(address: str) -> None:
    """The answers to applied requests are lost again and again; the server drops repeated records (rule P6)."""
    store = Store(cut_streams=5)
    server = serve(store, address)
    total = 3_000
    with Client(address) as client:
        with client.publisher("orders", batch_records=20) as publisher:
            for number in range(total):
                if number == total // 2:
                    server.stop(None).wait()
                    server = serve(store, address)
                publisher.publish(str(number))
        assert publisher.acknowledged == total
    assert store.payloads == [str(number).encode() for number in range(total)]
    assert store.cuts_left == 0
    assert publisher.duplicates > 0
    server.stop(None).wait()


def test_an_asynchronous_publisher_survives_them_too(address: str) -> None:
    store = Store(cut_streams=5)
    server = serve(store, address)
    total = 3_000

    async def use() -> None:
        async with AsyncClient(address) as client:
            async with client.publisher("orders", batch_records=20, publisher_id="loader") as publisher:
                for number in range(total):
                    await publisher.publish(str(number))
            assert publisher.acknowledged == total
            assert publisher.duplicates > 0

    asyncio.run(use())
    assert store.payloads == [str(number).encode() for number in range(total)]
    assert store.highest == {"loader": total}
    server.stop(None).wait()


def test_threads_that_publish_at_once_lose_nothing(store: Store, address: str) -> None:
    """Sequences of one publisher id that overtake each other would be dropped as retries."""
    with Client(address) as client, futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: client.publish("orders", str(number)), range(400)))
    assert sorted(store.payloads) == sorted(str(number).encode() for number in range(400))
    assert len(store.highest) <= 8


def test_the_asynchronous_client_behaves_like_the_blocking_one(store: Store, address: str) -> None:
    async def use() -> None:
        steps: list[Deleted] = []
        async with AsyncClient(address) as client:
            await asyncio.gather(*(client.publish("orders", str(number)) for number in range(20)))
            many = await client.publish_many("orders", [b"a", b"b"])
            assert [outcome.key for outcome in many if isinstance(outcome, Published)] == ["1", "1"]
            result = client.query("orders")
            records = [record async for record in result]
            assert len(records) == 22
            assert result.footer is not None
            assert result.footer.matched == 22
            assert [len(batch) async for batch in client.query("orders").batches()] == [22]
            async with client.query("orders") as left_early:
                async for record in left_early:
                    assert record.key == "0"
                    break
            assert (await client.page("orders", page_size=5)).next_page_token == ""
            assert await client.count("orders") == 22
            record_or_none = await client.get("orders", "7")
            assert record_or_none is not None
            assert record_or_none.key == "7"
            assert len(await client.get_many("orders", ["1", "2"])) == 2
            assert (await client.touch("orders", "1", ttl="1s")).version == 2
            assert len(await client.touch("orders", ["1", "2"])) == 2
            assert (await client.persist("orders", "1")).key == "1"
            assert await client.sow_delete("orders", all=True, on_progress=steps.append) == Deleted(2, 2, 2)
            assert len(steps) == 2
            with pytest.raises(NotFound):
                _ = [record async for record in client.query("nowhere")]

    asyncio.run(use())
    assert len(store.payloads) == 22


def test_a_lingering_record_of_an_asynchronous_publisher_is_sent(store: Store, address: str) -> None:
    async def use() -> None:
        async with AsyncClient(address) as client:
            settled = asyncio.Event()
            async with client.publisher("orders", linger=0.0, on_ack=lambda ack: settled.set()) as publisher:
                await publisher.publish(b"{}")
                await asyncio.wait_for(settled.wait(), 10)

    asyncio.run(use())
    assert store.payloads == [b"{}"]


def test_an_asynchronous_publisher_that_waits_for_room_lets_the_loop_rest(address: str) -> None:
    """Story: with `linger=0` overdue records were checked again and again until there was room."""
    store = Store()

    async def use() -> None:
        looked = 0
        settled = asyncio.Event()
        async with AsyncClient(address, connect_timeout=60) as client:
            publisher = client.publisher(
                "orders",
                linger=0.0,
                batch_records=2,
                max_in_flight=1,
                on_ack=lambda ack: settled.set() if publisher.acknowledged == 3 else None,
            )
            lingered = publisher._lingered

            def counted() -> None:
                nonlocal looked
                looked += 1
                lingered()

            publisher._lingered = counted  # type: ignore[method-assign]  # counts the calls
            for number in range(3):
                await publisher.publish(str(number))
            for _ in range(1_000):
                await asyncio.sleep(0)
            assert looked < 10
            server = serve(store, address)
            await asyncio.wait_for(settled.wait(), 10)
            await publisher.close()
            server.stop(None).wait()

    asyncio.run(use())
    assert store.payloads == [b"0", b"1", b"2"]
