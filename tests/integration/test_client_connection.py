"""Both clients on a real connection to a small server in this process: unreachable, cut, restarted, used by many."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from typing import Any

import grpc
import pytest

from sow.v1 import access_pb2, admin_pb2, load_pb2, snapshot_pb2, sow_pb2
from sow_client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Deleted,
    InvalidArgument,
    NotFound,
    SowError,
    Unavailable,
)
from sow_client._channel import SERVICE_CONFIG, options
from sow_client._publisher import StreamCall
from sow_client._statuses import REFUSED_SECONDS
from tests.support.fakes.echo_server import Store, address, serve, store
from tests.support.simulation.clients import Connect, connect

__all__ = ["address", "connect", "store"]  # fixtures


def test_a_server_that_is_not_there_is_unreachable_within_the_connect_timeout(connect: Connect, address: str) -> None:
    with connect(address, connect_timeout=0.2) as client:
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


def get_once_connected(client: Client) -> None:
    """A busy machine may take longer to connect than the client waits at a time."""
    for _ in range(100):
        with suppress(Unavailable):
            assert client.get("orders", "1") is not None
            return
    pytest.fail("it does not connect")


def test_a_first_call_does_not_wait_where_the_only_address_refuses(connect: Connect, address: str) -> None:
    """F1: it took the whole `connect_timeout`. Publishers and subscriptions do not try again by themselves either. Once
    it was connected, a client waits for its server."""
    with connect(address) as client, futures.ThreadPoolExecutor() as threads:
        publisher = client.publisher("orders")
        publisher.publish(b"{}")
        for call in (lambda: client.get("orders", "1"), lambda: client.subscribe("orders"), publisher.flush):
            with pytest.raises(Unavailable) as caught:
                call()
            assert caught.value.reason == "UNREACHABLE"
            assert "Connection refused" in caught.value.message
            assert "within" not in caught.value.message, "nothing was waited for"
        publisher.abort()
        server = serve(Store(), address)
        get_once_connected(client)
        server.stop(None).wait()
        waiting = threads.submit(client.get, "orders", "1")
        with pytest.raises(futures.TimeoutError):
            waiting.result(2 * REFUSED_SECONDS)
        server = serve(Store(), address)
        assert waiting.result(10) is not None
        server.stop(None).wait()


def test_a_server_that_says_nothing_has_not_refused(connect: Connect, mute: str) -> None:
    with connect(mute) as client, futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(client.get, "orders", "1")
        with pytest.raises(futures.TimeoutError):
            waiting.result(3 * REFUSED_SECONDS)
        client.close()
        with pytest.raises((Cancelled, Unavailable)):
            waiting.result(10)


def test_a_client_finds_a_server_that_comes_up_later_and_one_that_was_restarted(connect: Connect, address: str) -> None:
    store = Store()
    with connect(address, connect_timeout=10) as client, futures.ThreadPoolExecutor() as threads:
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
    files = (sow_pb2, admin_pb2, snapshot_pb2, load_pb2, access_pb2)
    services = {one.full_name: one for file in files for one in file.DESCRIPTOR.services_by_name.values()}
    assert names
    for name in names:
        service = services[name["service"]]
        method = service.FindMethodByName(name["method"])
        assert not method.server_streaming, name
        assert not method.client_streaming, name


def test_a_server_that_went_away_is_unreachable_long_before_the_deadline_of_calls(
    connect: Connect, address: str
) -> None:
    """Calls that waited for a connection by themselves would hang for their whole deadline, here 600 s."""
    server = serve(Store(), address)
    with connect(address, timeout=600, connect_timeout=0.2) as client:
        get_once_connected(client)
        server.stop(None).wait()
        for call in (client.get, client.persist):
            with pytest.raises(Unavailable) as caught:
                call("orders", "1")
            assert caught.value.reason == "UNREACHABLE"


def test_a_closed_client_says_so(connect: Connect, store: Store, address: str) -> None:
    client = connect(address)
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
    monkeypatch.setattr("sow_client._channel.CLOSE_SECONDS_MAX", 0.01)
    never, closing = threading.Event(), threading.Event()
    client = Client(address)
    close = client._transport.lines.present().channel.close

    def stuck() -> None:
        closing.set()
        never.wait(10)
        close()

    monkeypatch.setattr(client._transport.lines.present().channel, "close", stuck)
    with pytest.raises(KeyboardInterrupt):
        with client:
            raise KeyboardInterrupt
    assert closing.wait(10)
    with pytest.raises(Cancelled):
        client.get("orders", "1")
    never.set()


INTERRUPTED = """
import sys
import grpc._channel
from sow_client import Client

def interrupted(state):
    raise KeyboardInterrupt

def use(client):
    client.get("orders", "1")
    grpc._channel._run_channel_spin_thread = interrupted
    next(client.query("orders"))

address, how = sys.argv[1:]
try:
    if how == "drop":
        use(Client(address))
    elif how == "with":
        with Client(address) as client:
            use(client)
    else:
        client = Client(address)
        try:
            use(client)
        finally:
            if how == "close":
                client.close()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", ["drop", "close", "with", "keep"])
def test_a_program_ends_after_an_interrupt_between_two_lines_of_grpc(store: Store, address: str, how: str) -> None:
    """Story: Ctrl-C came when gRPC had made a call, and not yet the thread that reads its end. Closing the channel then
    waited for ever, also when the program dropped its client, or ended (_channel [2])."""
    command = [sys.executable, "-c", INTERRUPTED, address, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_only_calls_without_a_bound_of_their_own_look_for_the_cause(
    connect: Connect, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: a look at the server took seconds more, also of a renewal of a lease that had to fail in time
    (_connection [1])."""
    looked: list[str] = []

    def look(server: str, tls: object, cause: str) -> str:
        looked.append(cause)
        return ""

    monkeypatch.setattr("sow_client._connection._looked", look)
    with connect(address, connect_timeout=0.05) as client:
        publisher = client.publisher("orders", retry_for=0.0)
        publisher.publish(b"{}")
        with pytest.raises(Unavailable):
            publisher.flush()
        publisher.abort()
        assert not looked
        with pytest.raises(Unavailable):
            client.get("orders", "1")
        assert len(looked) == 1


def test_a_client_that_is_closed_while_it_looks_for_the_cause_says_so(
    connect: Connect, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See _connection [2]."""
    looks, may_go = threading.Event(), threading.Event()

    def look(server: str, tls: object, cause: str) -> str:
        looks.set()
        assert may_go.wait(10)
        return ""

    monkeypatch.setattr("sow_client._connection._looked", look)
    client = connect(address, connect_timeout=0.05)
    with futures.ThreadPoolExecutor() as threads:
        call = threads.submit(client.get, "orders", "1")
        assert looks.wait(10)
        client.close()
        may_go.set()
        error = call.exception(10)
    assert isinstance(error, Cancelled)
    assert error.reason == "CLOSED"


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_publisher_gives_up_a_server_that_says_nothing_after_the_connect_timeout(connect: Connect, mute: str) -> None:
    """Story: a publisher opened its stream without waiting for a connection, and gRPC waits 20 s for this one
    (_moving [1])."""
    with connect(mute, connect_timeout=0.2) as client:
        publisher = client.publisher("orders")
        publisher.publish(b"{}")
        with futures.ThreadPoolExecutor() as threads:
            flushed = threads.submit(publisher.flush)
            try:
                assert isinstance(flushed.exception(10), Unavailable)
            finally:
                publisher.abort()


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
    client = Client(mute, connect_timeout=600)
    inside = Asked(client)
    with futures.ThreadPoolExecutor() as threads:
        call = threads.submit(client.get, "orders", "1")
        assert inside.waits.wait(10)
        client.close()
        error = call.exception(10)
        assert isinstance(error, Cancelled)
        assert error.reason == "CLOSED"


class Asked:
    """The channel inside gRPC's, as the client's connection asks it."""

    def __init__(self, client: Client) -> None:
        connection: Any = client._transport._connection
        self._inside, connection._inside = connection._inside, self
        self.waits = threading.Event()
        self.looks = threading.Semaphore(0)

    def check_connectivity_state(self, try_to_connect: bool) -> object:
        try:
            return self._inside.check_connectivity_state(try_to_connect)
        finally:
            self.looks.release()

    def watch_connectivity_state(self, state: object, deadline: float) -> object:
        self.waits.set()
        return self._inside.watch_connectivity_state(state, deadline)


def test_closing_a_client_waits_for_nothing(store: Store, address: str) -> None:
    """Story: gRPC's own watch of a channel goes in steps of 0.2 s, and closing waited for the end of one."""
    client = Client(address)
    inside = Asked(client)
    assert client.get("orders", "1") is not None
    channel: Any = client._transport.lines.present().channel
    assert not channel._connectivity_state.polling, "nobody has asked gRPC to watch it"
    inside.waits.clear()
    client.close()
    assert not inside.waits.is_set()


def test_a_program_that_closes_no_client_ends_its_thread_before_the_interpreter_goes(
    store: Store, address: str
) -> None:
    """Story: an interrupted program sometimes never ended. A thread inside gRPC dies where it is when the interpreter
    is taken apart, and what it has locked stays locked."""
    program = f"""
import atexit, threading
# Before the client's, so it runs after that.
atexit.register(lambda: print([one.name for one in threading.enumerate()], flush=True))
from sow_client import Client
client = Client("{address}")
client.get("orders", "1")
assert client._transport._connection.follow() == 1
print(threading.active_count(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    threads, at_the_end = done.stdout.splitlines()
    assert int(threads) > 1
    assert at_the_end == "['MainThread']"


def test_a_thread_looks_for_lost_connections_once_their_number_matters_and_ends_with_the_client(
    store: Store, address: str
) -> None:
    """gRPC may connect anew by itself, in a call that it repeats: then no call of the client has noticed (rule N6)."""
    client = Client(address)
    inside = Asked(client)
    connection: Any = client._transport._connection
    assert client.get("orders", "1") is not None
    assert connection._following is None, "it costs a thread"
    assert connection.follow() == 1
    while inside.looks.acquire(blocking=False):
        pass
    assert inside.looks.acquire(timeout=10)
    thread: Any = connection._following
    client.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_client_that_is_dropped_does_not_stay_because_its_connection_is_looked_at(store: Store, address: str) -> None:
    client = Client(address)
    connection: Any = client._transport._connection
    assert client.get("orders", "1") is not None
    assert connection.follow() == 1
    thread = connection._following
    del client, connection
    thread.join(10)
    assert not thread.is_alive()


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


def test_the_error_names_the_reason_for_no_connection(connect: Connect, address: str) -> None:
    """Story: a refused connection, a wrong name and a certificate that is not trusted all looked the same."""
    with connect(address, connect_timeout=0.5) as client, pytest.raises(Unavailable) as caught:
        client.get("orders", "1")
    assert caught.value.message.startswith(f"cannot connect to {address} within 0.5 s: ")
    assert "refused" in caught.value.message


def test_lingering_records_are_not_retried_without_pause_while_disconnected(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: only sealed requests counted as something to try again for, so with records that lingered the publisher
    opened stream after stream without a rest, and never gave up."""
    tries = 0
    # On a channel of the user's own nobody waits for a connection before a stream is opened.
    with grpc.insecure_channel(address) as channel, Client(channel=channel, connect_timeout=0.3) as client:
        opens = client._open_stream

        def counted(*given: Any) -> StreamCall:
            nonlocal tries
            tries += 1
            return opens(*given)

        monkeypatch.setattr(client, "_open_stream", counted)
        publisher = client.publisher("orders", linger=600)
        try:
            publisher.publish(b"{}")
            assert publisher._sender._thread is not None
            publisher._sender._thread.join(5)
            assert not publisher._sender._thread.is_alive()
            with pytest.raises(Unavailable):
                publisher.flush()
        finally:
            publisher.abort()
    assert tries < 10


def test_a_call_that_takes_too_long_is_a_deadline_and_not_an_unreachable_server(
    connect: Connect, store: Store, address: str
) -> None:
    with connect(address, timeout=0.3) as client:
        with pytest.raises(DeadlineExceeded):
            client.get("slow", "1")
        assert store.entered.is_set()


def test_a_call_that_a_stopping_server_gives_up_is_made_again_and_then_unreachable(
    connect: Connect, store: Store, address: str
) -> None:
    """Story: gRPC ends it with CANCELLED, as if the caller had, and that was the error."""
    with connect(address) as client:
        store.calls_given_up = 1
        assert client.get("orders", "1") is not None
        store.calls_given_up = 2
        with pytest.raises(Unavailable) as refused:
            client.get("orders", "1")
        assert refused.value.reason == "UNREACHABLE"


def test_a_publisher_survives_cuts_and_a_restart_with_every_record_once_and_in_order(
    connect: Connect, address: str
) -> None:
    """The answers to applied requests are lost again and again; the server drops repeated records (rule P6)."""
    store = Store(cut_streams=5)
    server = serve(store, address)
    total = 3_000
    with connect(address) as client:
        with client.publisher("orders", batch_records=20, publisher_id="loader") as publisher:
            for number in range(total):
                if number == total // 2:
                    server.stop(None).wait()
                    server = serve(store, address)
                publisher.publish(str(number))
        assert publisher.acknowledged == total
    assert store.payloads == [str(number).encode() for number in range(total)]
    assert store.cuts_left == 0
    assert store.highest == {"loader": total}
    assert publisher.duplicates > 0
    server.stop(None).wait()


def test_threads_that_publish_at_once_lose_nothing(store: Store, address: str) -> None:
    """Sequences of one publisher id that overtake each other would be dropped as retries."""
    with Client(address) as client, futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: client.publish("orders", str(number)), range(400)))
    assert sorted(store.payloads) == sorted(str(number).encode() for number in range(400))
    assert len(store.highest) <= 8


def test_every_kind_of_call_on_a_connection(connect: Connect, store: Store, address: str) -> None:
    steps: list[Deleted] = []
    with connect(address) as client, futures.ThreadPoolExecutor() as threads:
        list(threads.map(lambda number: client.publish("orders", str(number)), range(20)))
        many = client.publish_many("orders", [b"a", b"b"])
        assert [outcome.key for outcome in many] == ["1", "1"]
        result = client.query("orders")
        assert len(list(result)) == 22
        assert result.footer is not None
        assert result.footer.matched == 22
        assert [len(batch) for batch in client.query("orders").batches()] == [22]
        with client.query("orders") as left_early:
            assert next(left_early).key == "0"
        assert client.page("orders", page_size=5).next_page_token == ""
        assert client.count("orders") == 22
        record = client.get("orders", "7")
        assert record is not None
        assert record.key == "7"
        assert len(client.get_many("orders", ["1", "2"])) == 2
        assert client.touch("orders", "1", ttl="1s").version == 2
        assert len(client.touch("orders", ["1", "2"])) == 2
        assert client.persist("orders", "1").key == "1"
        assert client.sow_delete("orders", all=True, on_progress=steps.append) == Deleted(2, 2, 2)
        assert len(steps) == 2
        with pytest.raises(NotFound):
            list(client.query("nowhere"))
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


@pytest.mark.parametrize(
    ("server", "proxied"),
    [
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("[0:0:0:0:0:0:0:1]:1", False),
        ("localhost:1", False),
        ("localhost.evil.example:1", True),
        ("127.0.0.1.evil.example:1", True),
        ("10.0.0.1:1", True),
    ],
)
def test_only_what_is_this_machine_for_sure_gets_a_token_in_plain_text_and_through_no_proxy(
    server: str, proxied: bool
) -> None:
    """Story: another spelling of ::1 was taken for this machine by the check, and not by the option that keeps
    http_proxy away, so the token went to the proxy."""
    assert (("grpc.enable_http_proxy", 0) not in options(server, None)) is proxied
    if proxied:
        with pytest.raises(InvalidArgument, match="over TLS only"):
            Client(server, token="s3cret")
    else:
        Client(server, token="s3cret").close()
