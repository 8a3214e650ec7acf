"""Times to wait: what programs give as one, what it bounds, and why it was too short."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator

import pytest

from sow_client import EARLIEST, AsyncClient, Client, DeadlineExceeded, InvalidArgument
from tests.support.servers.server import ServerProcess

STREAMS_MAX = 3
WRONG = (-1, -0.5, -math.inf, math.nan, "5", True, -(10**400))
LONG = (math.inf, 1e10, 10**400)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = f"[server]\nstreams_per_connection_max = {STREAMS_MAX}\n\n[topics.t]\nkey = ['/id']\n"
    with ServerProcess(tmp_path_factory.mktemp("server"), config) as process:
        with process.client() as client:
            client.publish_many("t", [{"id": number} for number in range(50)])
        yield process


CALLS: dict[str, Callable[[Client, float], object]] = {
    "client timeout": lambda client, wait: Client(timeout=wait),
    "client connect_timeout": lambda client, wait: Client(connect_timeout=wait),
    "asynchronous client timeout": lambda client, wait: AsyncClient(timeout=wait),
    "query timeout": lambda client, wait: client.query("t", timeout=wait),
    "count timeout": lambda client, wait: client.count("t", timeout=wait),
    "page timeout": lambda client, wait: client.page("t", page_size=1, timeout=wait),
    "explain timeout": lambda client, wait: client.explain("t", timeout=wait),
    "subscribe retry_for": lambda client, wait: client.subscribe("t", retry_for=wait),
    "live_view retry_for": lambda client, wait: client.live_view("t", retry_for=wait),
    "durable retry_for": lambda client, wait: client.durable("t", "d", retry_for=wait),
    "publisher retry_for": lambda client, wait: client.publisher("t", retry_for=wait),
    "publisher linger": lambda client, wait: client.publisher("t", linger=wait),
    "stage_load retry_for": lambda client, wait: client.stage_load("one", 0, 0, retry_for=wait),
    "commit_load retry_for": lambda client, wait: client.commit_load("one", [], retry_for=wait),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_time_that_is_none_is_refused_by_name(server: ServerProcess, call: str) -> None:
    with server.client() as client:
        for wrong in WRONG:
            with pytest.raises(InvalidArgument) as refused:
                CALLS[call](client, wrong)  # type: ignore[arg-type]  # it is refused
            assert refused.value.details["field"] == call.rsplit(maxsplit=1)[-1]


def test_waits_of_streams_are_refused_by_name(server: ServerProcess) -> None:
    with server.client() as client, client.subscribe("t") as changes, client.live_view("t") as view:
        for wrong in WRONG:
            with pytest.raises(InvalidArgument, match="timeout"):
                changes.next(wrong)  # type: ignore[arg-type]  # it is refused
            with pytest.raises(InvalidArgument, match="timeout"):
                next(changes.batches(timeout=wrong))  # type: ignore[arg-type]  # it is refused
            with pytest.raises(InvalidArgument, match="seconds"):
                view.wait(wrong)  # type: ignore[arg-type]  # it is refused


@pytest.mark.parametrize("long", [*LONG, None])
def test_a_long_time_is_no_bound(server: ServerProcess, long: float | None) -> None:
    with Client(server.address, timeout=long, connect_timeout=long) as client:
        assert client.count("t", timeout=long) == len(list(client.query("t", timeout=long))) == 50
        with client.subscribe("t", start=EARLIEST, retry_for=math.inf if long is None else long) as changes:
            assert changes.next(long) is not None
        with client.live_view("t") as view:
            assert view.wait(long)


@pytest.mark.parametrize("long", [*LONG, None])
def test_a_long_time_is_no_bound_in_asyncio(server: ServerProcess, long: float | None) -> None:
    async def run() -> None:
        async with AsyncClient(server.address, timeout=long, connect_timeout=long) as client:
            assert await client.count("t", timeout=long) == 50
            async with client.subscribe("t", start=EARLIEST) as changes:
                assert await changes.next(long) is not None
            async with client.live_view("t") as view:
                assert await view.wait(long)

    asyncio.run(run())


def test_a_call_behind_the_bound_of_its_connection_says_so(server: ServerProcess) -> None:
    """Story: a program with as many subscriptions as the connection has places heard "Deadline Exceeded" alone."""
    with Client(server.address, timeout=0.3) as client:
        changes = [client.subscribe("t") for _ in range(STREAMS_MAX)]
        calls: tuple[Callable[[], object], ...] = (
            lambda: client.get("t", "1"),
            lambda: client.count("t"),
            lambda: client.page("t", page_size=1),
            lambda: client.explain("t"),
            lambda: list(client.query("t", timeout=0.3)),
            lambda: client.publish("t", {"id": 1}),
        )
        for call in calls:
            with pytest.raises(DeadlineExceeded, match=r"3 streams .* streams_per_connection_max .* \(rule N4\)"):
                call()
        changes[0].close()
        assert client.count("t", timeout=30) == 50


def test_a_call_behind_the_bound_says_so_in_asyncio(server: ServerProcess) -> None:
    async def run() -> None:
        async with AsyncClient(server.address, timeout=0.3) as client:
            held = [await client.subscribe("t").__aenter__() for _ in range(STREAMS_MAX)]
            for call in (client.get("t", "1"), client.count("t"), client.count("t", timeout=0.1)):
                with pytest.raises(DeadlineExceeded, match=r"streams_per_connection_max .* \(rule N4\)"):
                    await call
            await held[0].close()

    asyncio.run(run())
