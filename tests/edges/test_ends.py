"""The ends of what a program does not close: streams in reference cycles, at exit, and publishers with records."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from sow.v1 import sow_pb2
from sow_client import EARLIEST, AsyncClient, Client, _ends
from sow_client._ends import Stream
from sow_client._subscription import SubscribeCall, _Reader
from tests.support.servers.server import PYTHONPATH, ROOT, ServerProcess

PATHS = [str(ROOT / name) for name in ("", "proto", "clients", "replication", "spark_connector")]
EXITING = """
import sys
from sow_client import Client
client = Client(sys.argv[1])
held = [client.subscribe("t") for _ in range(60)] + [client.live_view("t") for _ in range(60)]
rows = [iter(client.query("t", batch_size=1)) for _ in range(20)]
begun = [next(one) for one in rows]
cycle = [held, rows]
cycle.append(cycle)
print("open", flush=True)
"""
PUBLISHING = """
import sys
from sow_client import Client
client = Client(sys.argv[1])
publisher = client.publisher(sys.argv[2], linger=600, retry_for=600)
for number in range(500):
    publisher.publish(b'{"id": %d}' % number)  # a mapping would wait for a server that tells the topic's type
print("published", flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        with process.client() as client:
            client.create_topic("t", key=["/id"])
            client.publish_many("t", [{"id": number} for number in range(50)])
        yield process


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    """A program, which has to end by itself."""
    return subprocess.run(
        [sys.executable, *command],
        env={"PYTHONPATH": ":".join([*PATHS, *PYTHONPATH]), "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def published(server: ServerProcess, topic: str, mode: str = "always") -> subprocess.CompletedProcess[str]:
    return ran("-W", mode, "-c", PUBLISHING, server.address, topic)


def count(server: ServerProcess, topic: str) -> int:
    with server.client() as client:
        return client.count(topic)


def made(server: ServerProcess, topic: str) -> str:
    with server.client() as client:
        client.create_topic(topic, key=["/id"])
    return topic


@pytest.mark.parametrize("rounds", [25, pytest.param(600, marks=pytest.mark.long)])
def test_streams_that_a_collection_ends_stop_no_thread(server: ServerProcess, rounds: int) -> None:
    """Story: a finalizer cancelled a call, and waited for a lock of gRPC that the interrupted code held."""
    program = ran(str(Path(__file__).with_name("dropped.py")), server.address, str(rounds))

    assert (program.returncode, program.stdout) == (0, "ended\n"), program.stderr[-8_000:]


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])
def test_a_program_ends_with_open_streams(server: ServerProcess, times: int) -> None:
    for _ in range(times):
        program = ran("-c", EXITING, server.address)
        assert (program.returncode, program.stdout, program.stderr) == (0, "open\n", "")


def test_a_finalizer_leaves_the_end_of_a_call_to_another_thread() -> None:
    """A call is cancelled under locks that the code may hold which the collector has interrupted."""
    ended: SimpleQueue[int] = SimpleQueue()

    class Call:
        def cancel(self) -> None:
            ended.put(threading.get_ident())

    stream = Stream(Call())
    del stream

    assert ended.get(timeout=30) != threading.get_ident()


def test_a_dropped_subscription_ends_at_the_server(server: ServerProcess) -> None:
    with server.client() as client:
        held = [client.subscribe("t") for _ in range(3)]
        assert len(client.subscriptions("t")) == 3

        del held
        gc.collect()

        for _ in range(1_000):
            if not client.subscriptions("t"):
                break
        assert not client.subscriptions("t")


def test_the_end_of_a_program_sends_the_records_of_a_publisher(server: ServerProcess) -> None:
    program = published(server, made(server, "exits"))

    assert program.returncode == 0
    assert (
        "ResourceWarning: the publisher to 'exits' was not closed: 500 records were sent at its end" in program.stderr
    )
    assert count(server, "exits") == 500


def test_the_end_of_a_program_tells_which_records_were_not_sent(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        made(server, "gone")
        server.kill9()
        program = published(server, "gone")

    assert program.returncode == 0
    assert "the publisher to 'gone' was not closed: 500 records may not have been sent" in program.stderr


def test_a_durable_that_was_closed_can_be_attached_again_at_once(server: ServerProcess) -> None:
    """J2. Story: the end of a call was handed to a thread, the next call came before it, and the durable had a
    consumer. Another time the instance heard of the next call before it heard of the end."""
    topic = made(server, "again")
    with server.client() as client, server.client() as other:
        client.publish(topic, {"id": 1})
        for turn in range(100):
            with (client, other)[turn % 2].durable(topic, "one", start=EARLIEST) as durable:
                assert next(iter(durable)).key == "1"


def test_a_durable_that_was_closed_can_be_attached_again_at_once_in_asyncio(server: ServerProcess) -> None:
    topic = made(server, "again_aio")

    async def consume() -> None:
        async with server.async_client() as client:
            await client.publish(topic, {"id": 1})
            for _ in range(100):
                async with client.durable(topic, "one", start=EARLIEST) as durable:
                    assert (await anext(durable)).key == "1"

    asyncio.run(consume())


def test_a_dropped_publisher_sends_its_records(server: ServerProcess) -> None:
    topic = made(server, "drops")
    with server.client() as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        publisher = client.publisher(topic, linger=600)
        for number in range(10):
            publisher.publish({"id": number})

        del publisher
        gc.collect()

        told: list[warnings.WarningMessage] = []
        for _ in range(10_000):
            told = [one for one in caught if "'drops'" in str(one.message)]
            if client.count(topic) == 10 and told:  # asks each time: a call is the pause of this loop
                break
        assert client.count(topic) == 10
    assert "was not closed: 10 records were sent at its end" in str(told[0].message)
    assert (told[0].category, told[0].filename) == (ResourceWarning, __file__)


def test_a_dropped_publisher_of_many_topics_sends_their_records(server: ServerProcess) -> None:
    topics = [made(server, f"drops.{number}") for number in range(3)]
    with server.client() as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        publisher = client.topics_publisher(linger=600)
        for topic in topics:
            publisher.publish(topic, {"id": 1})

        del publisher
        gc.collect()

        told: list[warnings.WarningMessage] = []
        for _ in range(10_000):
            told = [one for one in caught if "'drops.0'" in str(one.message)]
            if [*map(client.count, topics)] == [1, 1, 1] and told:  # asks each time, as above
                break
        assert [*map(client.count, topics)] == [1, 1, 1]
    assert "was not closed: 3 records were sent at its end" in str(told[0].message)
    assert (told[0].category, told[0].filename) == (ResourceWarning, __file__)


def test_a_publisher_that_has_nothing_to_send_is_dropped_without_a_word(server: ServerProcess) -> None:
    with server.client() as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        publisher = client.publisher("t")
        publisher.publish({"id": 1})
        publisher.flush()
        thread = publisher._sender._thread
        assert thread is not None

        del publisher
        gc.collect()
        thread.join(30)

        assert not thread.is_alive()
    assert [one for one in caught if one.category is ResourceWarning] == []


def test_an_asynchronous_publisher_tells_which_records_were_not_sent(server: ServerProcess) -> None:
    async def left() -> None:
        client = AsyncClient(server.address)
        publisher = client.publisher("t", linger=600)
        await publisher.publish({"id": 1})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(left())
        gc.collect()

    told = [str(one.message) for one in caught if one.category is ResourceWarning]
    assert any("the publisher to 't' was not closed: 1 records may not have been sent" in one for one in told), told


def test_an_asynchronous_client_belongs_to_the_loop_of_its_first_call(server: ServerProcess) -> None:
    """Story: gRPC bound the channel to another loop than that of `asyncio.run`."""
    for addresses in (server.address, f"{server.address},127.0.0.1:1"):
        client = AsyncClient(addresses)

        async def counted(client: AsyncClient = client) -> int:
            async with client:
                return await client.count("t")

        assert asyncio.run(counted()) == 50


def test_the_blocking_and_the_asynchronous_client_end_alike_without_a_call(server: ServerProcess) -> None:
    async def ended() -> None:
        async with AsyncClient(server.address):
            pass

    with Client(server.address):
        pass
    asyncio.run(ended())


def test_a_subscription_whose_start_was_interrupted_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: its thread ran already and made the call, so its durable had a consumer when the program asked again."""
    start = threading.Thread.start
    threads: list[threading.Thread] = []
    calls: list[sow_pb2.SubscribeRequest] = []

    def interrupted(thread: threading.Thread) -> None:
        threads.append(thread)
        start(thread)
        raise KeyboardInterrupt

    def subscribe(request: sow_pb2.SubscribeRequest) -> SubscribeCall:
        calls.append(request)
        raise AssertionError

    reader = _Reader(subscribe, sow_pb2.SubscribeRequest(), 0.0)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.start()
    reader.cancel()
    threads[0].join(30)

    assert not calls
    assert not threads[0].is_alive()


@pytest.mark.parametrize(
    ("error", "runs"),
    [(RuntimeError("can't start new thread"), False), (KeyboardInterrupt(), False), (KeyboardInterrupt(), True)],
    ids=["refused", "before", "after"],
)
@pytest.mark.parametrize("what", ["sow-publisher", "sow-stager", "sow-acknowledge", "sow-subscription", "sow-ends"])
def test_a_thread_that_could_not_be_started_is_started_by_the_next_use(
    server: ServerProcess, what: str, error: BaseException, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: a program without room for another thread went on once there was room. The flush of its publisher never
    ended. After Ctrl-C in the start of a consumer, its durable was in use until the program ended."""
    topic = made(server, f"{what[4:]}.{type(error).__name__}.{runs}")
    start, left = threading.Thread.start, [error]

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != what or not left:
            return start(thread)
        if runs:
            start(thread)
        raise left.pop()

    with server.client() as client:
        use: Callable[[], object]
        again: Callable[[], object]
        check: Callable[[], object] = list
        if what == "sow-publisher":
            publisher = client.publisher(topic)
            use, again = partial(publisher.publish, {"id": 1}), publisher.flush
            check = publisher.close
        elif what == "sow-stager":
            stager = client.stage_load(client.open_load(topic).id, 0, 1)
            use = again = partial(stager.stage, [b'{"id": 1}'])
            check = stager.close
        elif what == "sow-acknowledge":
            client.publish(topic, {"id": 1})
            durable = client.durable(topic, "d", start="earliest")
            use = again = partial(durable.acknowledge, next(durable))
            check = durable.flush
        elif what == "sow-subscription":
            use = again = lambda: client.durable(topic, "d").close()
        else:
            monkeypatch.setattr(_ends, "_ends", _ends._Ends())
            use = again = lambda: list(client.query("t"))
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(type(error)):
            use()
        again()

        check()
        if what == "sow-publisher":
            assert client.count(topic) == 1
        elif what == "sow-ends":
            ended = threading.Event()
            _ends.hand_over(ended.set)
            assert ended.wait(30)
