"""`@cached` on a real server, whose time the tests move (sow_client.contrib.caching)."""

from __future__ import annotations

import asyncio
import datetime
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from sow_client import AsyncClient, Client, InvalidArgument, ResourceExhausted, Unavailable
from sow_client.contrib import _clients
from sow_client.contrib.caching import cached
from tests.support.servers.clocked_server import STORE_FILE
from tests.support.servers.forked_commands import PATHS
from tests.support.servers.server import ServerProcess, free_port, until

pytestmark = pytest.mark.slow

CALLERS: Final = 50
PROGRAM: Final = """
import sys, threading, time
from pathlib import Path
from sow_client.contrib import _clients
from sow_client.contrib.caching import cached

@cached("5m", server=sys.argv[1], key=lambda number: f"answer {number}")
def answer(number):
    with open("calls", "a") as calls:
        calls.write(f"{number}\\n")
    if "hang" in sys.argv:
        threading.Event().wait()
    time.sleep(0.3)
    return number * 2

each = 1 if "hang" in sys.argv else 8  # what waits would have requests under way when it is killed
threads = [threading.Thread(target=answer, args=(number,)) for number in (3, 4) for _ in range(each)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(answer(3), answer(4))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), start=False) as made:
        made.module = "tests.support.servers.clocked_server"
        made.start()
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        made.create_topic("cache", exist_ok=True, expiration="enabled")
        made.sow_delete("cache", all=True)
        yield made


def tick(server: ServerProcess, seconds: float) -> None:
    """The server's time passes."""
    file = server.config.parent / STORE_FILE
    before = float(file.read_text()) if file.exists() else 0.0
    beside = file.with_suffix(".new")
    beside.write_text(str(before + seconds))
    os.replace(beside, file)


def test_fifty_threads_at_once_call_the_function_once(client: Client) -> None:
    calls: list[str] = []

    @cached("5m", server=client)
    def price_of(product: str) -> dict[str, Any]:
        calls.append(product)
        time.sleep(0.1)
        return {"product": product, "sizes": (1, 2)}

    with ThreadPoolExecutor(CALLERS) as threads:
        answers = list(threads.map(price_of, ["tea"] * CALLERS))
    assert answers == [{"product": "tea", "sizes": [1, 2]}] * CALLERS, "as JSON has it, also for the one that called"
    assert calls == ["tea"]
    (record,) = client.query("cache")
    assert record.key == f"{price_of.__module__}.{price_of.__qualname__}(product='tea')"  # type: ignore[attr-defined]
    assert record.data == {"value": answers[0]}


def test_fifty_tasks_at_once_call_the_function_once_also_of_an_address(server: ServerProcess, client: Client) -> None:
    calls: list[str] = []

    @cached(300, server=server.address)
    async def price_of(product: str, *more: int, currency: str = "EUR") -> None:
        calls.append(product)
        await asyncio.sleep(0.05)

    async def once() -> list[None]:
        return await asyncio.gather(*[price_of("tea", currency="EUR") for _ in range(CALLERS)])

    assert asyncio.run(once()) == [None] * CALLERS
    assert asyncio.run(once()) == [None] * CALLERS, "in another event loop"
    assert calls == ["tea"]


def test_programs_share_the_answers(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    programs = [start(server, tmp_path) for _ in range(3)]
    assert [program.communicate(timeout=60)[0] for program in programs] == ["6 8\n"] * 3
    assert sorted((tmp_path / "calls").read_text().split()) == ["3", "4"]


def start(server: ServerProcess, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.address, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_caller_that_is_killed_gives_way_when_its_lease_ends(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    calls: list[int] = []

    @cached("5m", server=client, key=lambda number: f"answer {number}")
    def answer(number: int) -> int:
        calls.append(number)
        return number * 2

    program = start(server, tmp_path, "hang")
    until(lambda: (tmp_path / "calls").exists() and client.count("cache") == 2, 30, "the program to call")
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(answer, 3) for _ in range(3)]
        program.kill()
        program.communicate()
        assert not calls
        tick(server, 10)
        assert [one.result(timeout=20) for one in answers] == [6, 6, 6]
    assert calls == [3]


def test_an_answer_ends_by_the_servers_time_and_another_is_made(server: ServerProcess, client: Client) -> None:
    calls: list[int] = []

    @cached("5m", server=client)
    def answer() -> int:
        calls.append(1)
        return len(calls)

    assert [answer(), answer()] == [1, 1]
    tick(server, 299)
    assert answer() == 1
    tick(server, 1)
    assert [answer(), answer()] == [2, 2]
    answer.invalidate()
    answer.invalidate()
    assert answer() == 3


def test_an_error_is_not_kept_and_lets_the_next_caller_try(client: Client) -> None:
    calls: list[int] = []

    @cached("5m", server=client)
    def answer() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise Unavailable("of the function, not of the store", reason="UNREACHABLE")
        return 7

    for _ in range(2):
        with pytest.raises(Unavailable, match="of the function"):
            answer()
        assert client.count("cache") == 0, "the lock is free"
    assert answer() == 7
    assert len(calls) == 3


def test_an_answer_that_is_invalidated_while_it_is_made_is_not_kept(client: Client) -> None:
    """The function reads, somebody changes what it has read and invalidates, and then it returns."""
    price = [1]

    @cached("5m", server=client)
    def price_of(product: str) -> int:
        read = price[0]
        if read == 1:
            price[0] = 2
            price_of.invalidate(product)
        return read

    assert price_of("tea") == 1
    assert client.count("cache") == 0
    assert price_of("tea") == 2


def test_an_answer_that_comes_before_the_lock_is_taken_is_returned(server: ServerProcess, client: Client) -> None:
    class Late(Client):
        """Another caller stores its answer right after this one has found none."""

        def get(self, topic: str, key: Any, **named: Any) -> Any:
            found = super().get(topic, key, **named)
            if found is None:
                client.publish(topic, {"value": "of another"}, key=key)
            return found

    with Late(server.address) as late:

        @cached("5m", server=late)
        def answer() -> str:
            return "its own"

        assert answer() == "of another"
    assert client.count("cache") == 1, "the lock is free"


def test_a_task_that_is_cancelled_frees_the_lock(server: ServerProcess, client: Client) -> None:
    async def program() -> None:
        async with AsyncClient(server.address) as own:
            begun = asyncio.Event()

            @cached("5m", server=own)
            async def answer() -> int:
                begun.set()
                await asyncio.Event().wait()
                return 1

            task = asyncio.create_task(answer())
            await begun.wait()
            task.cancel()
            await asyncio.wait([task])
            assert client.count("cache") == 0
            await answer.invalidate()

    asyncio.run(program())


def test_a_store_that_is_away_is_done_without_or_tells(client: Client) -> None:
    calls: list[int] = []
    nobody = f"127.0.0.1:{free_port()}"

    def answer() -> int:
        calls.append(1)
        return len(calls)

    does_without = cached("5m", server=nobody)(answer)
    assert [does_without(), does_without()] == [1, 2]
    with pytest.raises(Unavailable):
        does_without.invalidate()
    with pytest.raises(Unavailable):
        cached("5m", server=nobody, when_away="raise")(answer)()
    assert len(calls) == 2


def test_a_store_that_is_full_is_done_without(client: Client) -> None:
    client.create_topic("small", expiration="enabled", max_records=1)

    @cached("5m", server=client, topic="small")
    def answer(number: int) -> int:
        return number

    assert [answer(1), answer(2), answer(3)] == [1, 2, 3]
    assert client.count("small") == 1
    with pytest.raises(ResourceExhausted):
        cached("5m", server=client, topic="small", when_away="raise")(answer)(4)


def test_a_store_that_goes_away_during_the_call_costs_no_second_call(tmp_path: Path) -> None:
    calls: list[int] = []
    with ServerProcess(tmp_path / "server") as server, Client(server.address, connect_timeout=0.2) as client:

        @cached("5m", server=client)
        def answer() -> int:
            calls.append(1)
            server.kill9()
            return 1

        assert answer() == 1
        assert calls == [1]


def test_the_topic_is_created_at_the_first_call(client: Client) -> None:
    client.delete_topic("cache", force=True)

    @cached("5m", server=client)
    def answer() -> int:
        return 1

    answer.invalidate()
    assert [answer(), answer()] == [1, 1]
    assert client.count("cache") == 1


def test_event_loops_that_have_ended_hold_no_connection(server: ServerProcess, client: Client) -> None:
    @cached("5m", server=server.address)
    async def answer(value: int) -> int:
        return value

    assert [asyncio.run(answer(value)) for value in range(5)] == list(range(5))
    assert len(_clients._of_loop) <= 1, "that of the last run, until the next one"


def test_methods_and_several_kinds_of_arguments(client: Client) -> None:
    class Shop:
        @cached("5m", server=client, key=lambda self, product: f"price:{product}")
        def price_of(self, product: str) -> str:
            return f"{product} 9.5"

    assert Shop().price_of("tea") == "tea 9.5"  # type: ignore[call-arg, arg-type]  # typed as a function
    assert client.get("cache", "price:tea") is not None

    @cached("5m", server=client)
    def kind_of(value: object, *, also: object = None) -> str:
        return repr(value)

    values = [
        1,
        True,
        "1",
        1.0,
        b"1",
        None,
        [1],
        ("1", 2),
        {"a": 1},
        {1: 1},
        {"1": 1},
        "x" * 5_000,
        "x" * 5_001,
        "ä" * 900,
    ]
    assert [kind_of(value) for value in values] == [repr(value) for value in values]
    assert client.count("cache", "@key CONTAINS 'kind_of'") == len(values)
    assert [kind_of(value=value, also=None) for value in values] == [repr(value) for value in values]
    assert client.count("cache", "@key CONTAINS 'kind_of'") == len(values), "they are the same calls"
    for odd in (datetime.date(2026, 1, 1), object(), [object()], float("nan"), {"a", "b"}, [set()], {"a": {1}}):
        with pytest.raises(TypeError, match=r"@cached: value of .*kind_of is no literal; make a key of it"):
            kind_of(odd)

    @cached("5m", server=client)
    def size_of(**named: object) -> int:
        """Members in another order were another call, so its answer stayed where the other was taken back."""
        return len(named)

    assert size_of(a=1, b={"c": 1, "d": 2}) == 2
    assert size_of(b={"d": 2, "c": 1}, a=1) == 2
    assert client.count("cache", "@key CONTAINS 'size_of'") == 1
    size_of.invalidate(b={"d": 2, "c": 1}, a=1)
    assert client.count("cache", "@key CONTAINS 'size_of'") == 0
    with pytest.raises(TypeError, match="missing a required argument"):
        kind_of()  # type: ignore[call-arg]  # that is the test


def test_what_cannot_be_kept_is_an_error(server: ServerProcess, client: Client) -> None:
    @cached("5m", server=client)
    def answer(value: object) -> object:
        return object() if value is None else float(str(value))

    for value in (None, "nan"):
        with pytest.raises(InvalidArgument, match=r"data: .*(no form in JSON|is NaN)"):
            answer(value)
    assert client.count("cache") == 0

    async def awaited() -> None:
        """It needs another client."""

    with pytest.raises(TypeError, match="server: this function needs an AsyncClient"):
        asyncio.run(cached("5m", server=client)(awaited)())
    with pytest.raises(TypeError, match=r'as @cached\("2m"\)'):
        cached(len)  # type: ignore[arg-type]  # without parentheses, as @cached
    with pytest.raises(ValueError, match="when_away: 'ignore' is neither"):
        cached("5m", when_away="ignore")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(InvalidArgument, match="ttl"):
        cached("5 minutes")
    assert threading.active_count() < CALLERS, "no lease is left that renews itself"
