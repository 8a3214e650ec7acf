"""Subscriptions of both clients on a real connection: cuts, restarts, closing, letting go, Ctrl-C, cancelled tasks.

The server runs in this process; it sends the changes of a journal in memory and breaks calls where it is told to.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial

import grpc
import pytest

from sow_client import (
    EARLIEST,
    AsyncClient,
    Cancelled,
    Change,
    Client,
    InvalidArgument,
    NotFound,
    ResyncRequired,
    SowError,
    Subscription,
    Unavailable,
    View,
)
from tests.support.fakes.followed import SECONDS_MAX, Followed, Servers
from tests.support.fakes.subscriptions import TOPIC, Journal, Told, put, refusal
from tests.support.servers.server import until
from tests.support.simulation.clients import Connect, connect
from tests.unit.client.test_client_subscription_core import history, told

__all__ = ["connect"]  # a fixture

END = "end"
"""The key of the last change of a history: there a test stops reading."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """On a unix socket: no other test takes its port. Clients come back without waiting."""
    monkeypatch.setattr("sow_client._statuses.BACKOFF_SECONDS_FIRST", 0.0)
    with tempfile.TemporaryDirectory(prefix="sow") as folder:
        made = Servers(f"unix:{folder}/sow")
        yield made
        made.stop()


@pytest.fixture
def followed(servers: Servers) -> Followed:
    """A server with an empty journal."""
    made = Followed(Journal())
    servers.start(made)
    return made


def ended(journal: Journal) -> Journal:
    """The journal with the change at which reading stops."""
    journal.commit(put(END, {}))
    return journal


def until_end(changes: Iterator[Change]) -> list[Change]:
    """The changes up to the last one."""
    result: list[Change] = []
    for change in changes:
        result.append(change)
        if change.key == END and change.op == "put":
            return result
    raise AssertionError("the iteration ended")


# ---- cuts and restarts ----


@pytest.mark.parametrize("batch_size", [1, 3])
def test_calls_that_break_after_every_number_of_frames(
    connect: Connect, servers: Servers, seed: int, batch_size: int
) -> None:
    """Each call of a subscription gets one frame further than the one before, so every place is broken at."""
    journal = ended(history(seed))
    followed = Followed(journal, cuts=range(1, 200))
    servers.start(followed)
    with connect(servers.address) as client:
        changes = until_end(client.subscribe(TOPIC, start=EARLIEST, batch_size=batch_size))
    assert told(changes) == journal.told()
    assert len(followed.requests) > 3


def test_a_client_tells_that_it_is_interrupted_and_goes_on(connect: Connect, servers: Servers) -> None:
    servers.start(Followed(ended(history(1)), cuts=[3, 3]))
    seen: list[SowError | None] = []
    with connect(servers.address) as client:
        with client.subscribe(TOPIC, start=EARLIEST, batch_size=1, on_interruption=seen.append) as changes:
            until_end(changes)
    assert [interruption and interruption.reason for interruption in seen] == ["UNREACHABLE", None] * 2


def test_a_snapshot_that_breaks_again_and_again_gives_the_state_in_the_end(
    connect: Connect, servers: Servers, seed: int
) -> None:
    journal = ended(history(seed))
    servers.start(Followed(journal, cuts=range(200)))
    seen = []
    with connect(servers.address) as client:
        for change in client.sow_and_subscribe(TOPIC, oof=True, batch_size=1):
            seen.append(change)
            if change.op == "snapshot_end":
                break
    view = View()
    for change in seen:
        view.apply(change)
    assert {key: record.payload for key, record in view.items()} == journal.state()
    assert view.complete
    assert any(change.op == "resync" for change in seen)


def test_a_restart_of_the_server_is_not_noticed(connect: Connect, servers: Servers) -> None:
    followed = Followed(Journal())
    servers.start(followed)
    with connect(servers.address) as client, client.subscribe(TOPIC) as changes:
        followed.commit("a")
        assert next(changes).key == "a"
        servers.stop()
        followed.commit("b")  # while nobody listens
        servers.start(followed)
        followed.commit("c")
        assert [next(changes).key, next(changes).key] == ["b", "c"]
        assert changes.bookmark == "e0.3"
    first, *others = [request.bookmark for request in followed.requests]
    assert (first, set(others)) == ("", {"e0.1"})


def test_a_subscription_is_attached_when_the_call_returns(
    connect: Connect, followed: Followed, servers: Servers
) -> None:
    """A record that the next line publishes is not missed, although nobody has asked for a change yet."""
    with connect(servers.address) as client:
        changes = client.subscribe(TOPIC)
        followed.commit("a")
        assert next(changes).key == "a"
        changes.close()


def test_no_deadline_binds_a_subscription(connect: Connect, followed: Followed, servers: Servers) -> None:
    with connect(servers.address, timeout=0.001) as client, client.subscribe(TOPIC):
        (seconds_left,) = followed.deadlines
        assert seconds_left is None or seconds_left > 1e9


# ---- errors ----


@pytest.mark.parametrize(("reason", "kind"), [("FILTER_INVALID", InvalidArgument), ("TOPIC_NOT_FOUND", NotFound)])
def test_a_refusal_of_the_server_is_raised_by_the_call_itself(
    servers: Servers, reason: str, kind: type[SowError]
) -> None:
    servers.start(Followed(Journal(), refuses=refusal(reason)))

    async def use() -> None:
        async with AsyncClient(servers.address) as client:
            with pytest.raises(kind):
                await client.subscribe(TOPIC).open()
            with pytest.raises(kind):
                async for _ in client.sow_and_subscribe(TOPIC):
                    pass

    with Client(servers.address) as client:
        for subscribe in (client.subscribe, client.sow_and_subscribe):
            with pytest.raises(kind) as caught:
                subscribe(TOPIC, "/a = ")
            assert caught.value.reason == reason
            assert isinstance(caught.value.__cause__, grpc.RpcError)
    asyncio.run(use())


def test_a_server_that_is_not_there_is_unreachable_within_the_connect_timeout(servers: Servers) -> None:
    async def use() -> None:
        async with AsyncClient(servers.address, connect_timeout=0.2) as client:
            with pytest.raises(Unavailable) as caught:
                await client.subscribe(TOPIC).open()
            assert caught.value.reason == "UNREACHABLE"

    started = time.monotonic()
    with Client(servers.address, connect_timeout=0.2) as client, pytest.raises(Unavailable) as caught:
        client.subscribe(TOPIC)
    assert caught.value.reason == "UNREACHABLE"
    asyncio.run(use())
    assert time.monotonic() - started < 5


def test_a_server_that_stays_away_ends_the_command_with_the_bookmark(connect: Connect, servers: Servers) -> None:
    followed = Followed(Journal())
    servers.start(followed)
    followed.commit("a")
    with connect(servers.address, connect_timeout=0.2) as client:
        changes = client.subscribe(TOPIC, start=EARLIEST, retry_for=0.2)
        next(changes)
        servers.stop()
        with pytest.raises(Unavailable) as caught:
            next(changes)
        assert caught.value.details["bookmark"] == "e0.1"
        with pytest.raises(StopIteration):
            next(changes)


def test_a_journal_that_no_longer_reaches_back_is_reported_with_the_bookmark(
    connect: Connect, servers: Servers
) -> None:
    followed = Followed(Journal())
    servers.start(followed)
    followed.commit("a", "b")
    with connect(servers.address) as client:
        changes = client.subscribe(TOPIC, start="e0.0")
        next(changes)
        next(changes)
        servers.stop()
        followed.commit("c", "d")
        followed.journal.floor = 3
        servers.start(followed)
        with pytest.raises(ResyncRequired) as caught:
            next(changes)
        assert (caught.value.bookmark, caught.value.reason) == ("e0.2", "BOOKMARK_TOO_OLD")


# ---- the end ----


def test_closing_from_another_thread_ends_a_wait_for_the_next_change(followed: Followed, servers: Servers) -> None:
    with Client(servers.address) as client, futures.ThreadPoolExecutor() as threads:
        changes = client.subscribe(TOPIC)
        waiting = threads.submit(list, changes)
        followed.wait_for(lambda: followed.idle == 1, "the subscriber to wait")
        changes.close()
        changes.close()
        assert waiting.result(SECONDS_MAX) == []
        followed.wait_for(lambda: followed.active == 0, "the end of the call")
        assert list(changes) == []


def test_closing_ends_the_wait_for_a_connection_too(followed: Followed, servers: Servers) -> None:
    with Client(servers.address, connect_timeout=600) as client, futures.ThreadPoolExecutor() as threads:
        changes = client.subscribe(TOPIC)
        servers.stop()
        waiting = threads.submit(list, changes)
        changes.close()
        assert waiting.result(SECONDS_MAX) == []


def test_leaving_the_block_ends_the_call(connect: Connect, followed: Followed, servers: Servers) -> None:
    with connect(servers.address) as client:
        with client.subscribe(TOPIC):
            followed.wait_for(lambda: followed.active == 1, "the call")
        followed.wait_for(lambda: followed.active == 0, "the end of the call")


@pytest.mark.parametrize("cuts", [(), (1, 1)])
def test_letting_go_of_a_subscription_ends_the_call_without_the_collector(
    servers: Servers, cuts: tuple[int, ...]
) -> None:
    """Story: the error of a call that had broken kept the whole subscription alive, in a cycle with its traceback."""
    followed = Followed(Journal(), cuts=cuts)
    servers.start(followed)

    def first_key(client: Client) -> str:
        for change in client.subscribe(TOPIC, start=EARLIEST):
            return change.key
        raise AssertionError("the iteration ended")

    followed.commit("a")
    with Client(servers.address) as client:
        gc.collect()
        gc.disable()
        try:
            assert first_key(client) == "a"
            followed.wait_for(lambda: followed.active == 0, "the end of the call")
        finally:
            gc.enable()


@pytest.mark.parametrize("cuts", [(), (1, 1)])
def test_letting_go_of_an_asynchronous_subscription_ends_the_call_too(servers: Servers, cuts: tuple[int, ...]) -> None:
    followed = Followed(Journal(), cuts=cuts)
    servers.start(followed)
    followed.commit("a")

    async def first_key(client: AsyncClient) -> str:
        async for change in client.subscribe(TOPIC, start=EARLIEST):
            return change.key
        raise AssertionError("the iteration ended")

    async def use() -> None:
        async with AsyncClient(servers.address) as client:
            gc.collect()
            gc.disable()
            try:
                assert await first_key(client) == "a"
                await asyncio.to_thread(followed.wait_for, lambda: followed.active == 0, "the end of the call")
            finally:
                gc.enable()

    asyncio.run(use())


def test_a_closed_client_says_so_to_its_subscribers(followed: Followed, servers: Servers) -> None:
    client = Client(servers.address)
    changes = client.subscribe(TOPIC)
    with futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(next, changes)
        followed.wait_for(lambda: followed.idle == 1, "the subscriber to wait")
        client.close()
        with pytest.raises(Cancelled) as caught:
            waiting.result(SECONDS_MAX)
    assert caught.value.reason == "CLOSED"
    with pytest.raises(Cancelled):
        client.subscribe(TOPIC)


def test_ctrl_c_while_waiting_is_felt_at_once_and_loses_nothing(followed: Followed, servers: Servers) -> None:
    """A caller may catch it and go on: nobody knows how much of a frame was read, so the call is made again."""
    with Client(servers.address) as client, client.subscribe(TOPIC) as changes, futures.ThreadPoolExecutor() as threads:
        interrupting = threads.submit(interrupt_when, main_thread_waits)
        with pytest.raises(KeyboardInterrupt):
            next(changes)
        interrupting.result(SECONDS_MAX)
        followed.commit("a", "b")
        assert [next(changes).key, next(changes).key] == ["a", "b"]


MAIN = threading.main_thread().ident or 0


def main_thread_waits() -> bool:
    return sys._current_frames()[MAIN].f_code.co_qualname == "_Reader.take"


def interrupt_when(condition: Callable[[], bool]) -> None:
    until(condition, SECONDS_MAX, "the main thread")
    signal.pthread_kill(MAIN, signal.SIGINT)


def test_ctrl_c_at_any_moment_of_a_busy_stream_ends_it_and_the_client(followed: Followed, servers: Servers) -> None:
    """Story: an interrupt between two lines of gRPC left a lock of the channel taken, and closing took for ever."""
    over = threading.Event()
    with futures.ThreadPoolExecutor() as threads:
        publishing = threads.submit(publish_until, followed, over)
        for number in range(8):
            handed_out = [0]
            interrupting = threads.submit(interrupt_when, partial(greater, handed_out, 17 * number))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes anywhere in the block
                with Client(servers.address) as client, client.subscribe(TOPIC, batch_size=1) as changes:
                    for _ in changes:
                        handed_out[0] += 1
            interrupting.result(SECONDS_MAX)
            followed.wait_for(lambda: followed.active == 0, "the end of the call")
        over.set()
        publishing.result(SECONDS_MAX)


def publish_until(followed: Followed, over: threading.Event) -> None:
    while not over.wait(0.0005):
        followed.commit("a")


def greater(counted: list[int], number: int) -> bool:
    return counted[0] > number


def test_a_task_that_is_cancelled_while_waiting_loses_nothing(followed: Followed, servers: Servers) -> None:
    """As `asyncio.wait_for(anext(changes), 1)` does it."""

    async def use() -> list[str]:
        async with AsyncClient(servers.address) as client, client.subscribe(TOPIC) as changes:
            for _ in range(3):
                waiting = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            followed.commit("a", "b")
            return [(await anext(changes)).key, (await anext(changes)).key]

    assert asyncio.run(use()) == ["a", "b"]


def test_closing_ends_a_task_that_waits_for_the_next_change(followed: Followed, servers: Servers) -> None:
    async def use() -> None:
        async with AsyncClient(servers.address) as client:
            changes = client.subscribe(TOPIC)
            await changes.open()

            async def wait() -> list[Change]:
                return [change async for change in changes]

            waiting = asyncio.ensure_future(wait())
            await asyncio.to_thread(followed.wait_for, lambda: followed.idle == 1, "the subscriber to wait")
            await changes.close()
            assert await asyncio.wait_for(waiting, SECONDS_MAX) == []
            await asyncio.to_thread(followed.wait_for, lambda: followed.active == 0, "the end of the call")

    asyncio.run(use())


# ---- memory ----


def test_a_subscriber_that_stops_reading_holds_one_frame_and_the_flow_control_window(servers: Servers) -> None:
    """_subscription_core [4]: 200 frames of 100 KB wait for it, and the server cannot send them all."""
    journal = Journal()
    for number in range(200):
        journal.commit(put("a", {"n": number, "pad": "x" * 100_000}))
    followed = Followed(journal)
    servers.start(followed)
    with Client(servers.address) as client, client.subscribe(TOPIC, start=EARLIEST) as changes:
        next(changes)
        for _ in range(100):  # time passes, and the connection works
            client.get_many(TOPIC, ["a"])
        assert followed.frames < 150
        assert isinstance(changes, Subscription)
        rest = [next(changes) for _ in range(199)]
    assert told(rest)[-1] == Told(200, "a", journal.state()["a"])
