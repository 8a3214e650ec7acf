"""A client that was made before a fork, and is used in the parent and in the children (rule P10).

Each test is a program of its own: the process of the tests has switched gRPC's support of forks off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from tests.support.servers.server import ROOT, ServerProcess

SECONDS_MAX = 60.0
"""No program takes so long, unless it hangs."""

PROLOGUE = """
import asyncio, multiprocessing, os, sys, threading
from concurrent.futures import ProcessPoolExecutor
from sow_client import NEVER, AsyncClient, Client, ConditionFailed, SowError

SERVER, TOPIC = sys.argv[1:]

def in_child(act, *, by_exit=False):
    # What it returns, or the reason of its error.
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = repr(act())
        except SowError as error:
            said = error.reason
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        if by_exit:
            sys.exit(0)  # with finalizers
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        said = told.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, (status, said)
    return said
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("forks")) as made:
        yield made


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "".join(letter if letter.isalnum() else "." for letter in request.node.name)


def run(server: ServerProcess, topic: str, program: str, **variables: str) -> list[str]:
    """The lines that a program prints."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    paths = [str(ROOT), str(ROOT / "clients"), str(ROOT / "proto")]
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(program), server.address, topic],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2500:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("pool", ["multiprocessing", pytest.param("concurrent.futures", marks=pytest.mark.long)])
def test_what_children_publish_by_the_client_of_their_parent_is_there(
    server: ServerProcess, topic: str, pool: str
) -> None:
    """Story: of 200 publishes in a pool of four 51 records were there. The others had the ids and sequences of the
    parent's client, and were answered as duplicates of each other."""
    program = """
        client = Client(SERVER)
        client.publish(TOPIC, {"by": "parent"}, key="before", ttl=NEVER)

        def publish(number):
            return client.publish(TOPIC, {"n": number}, key=number, ttl=NEVER).duplicate

        fork = multiprocessing.get_context("fork")
        if POOL == "multiprocessing":
            with fork.Pool(4) as pool:
                duplicates = pool.map(publish, range(100), chunksize=5)
        else:
            with ProcessPoolExecutor(4, fork) as pool:
                duplicates = list(pool.map(publish, range(100)))
        client.publish(TOPIC, {"by": "parent"}, key="after", ttl=NEVER)
        print(sum(duplicates), client.count(TOPIC))
    """
    assert run(server, topic, f"POOL = {pool!r}\n" + textwrap.dedent(program)) == ["0 102"]


@pytest.mark.parametrize("how", ["only_if_absent", "lease", pytest.param("only_if_version", marks=pytest.mark.long)])
def test_of_three_forked_workers_that_ask_for_one_lock_one_gets_it(server: ServerProcess, topic: str, how: str) -> None:
    """Story: all three were told that they hold it, with one version."""
    program = """
        client = Client(SERVER)
        first = client.publish(TOPIC, {"by": "nobody"}, key="versioned", ttl=NEVER)

        def ask(worker):
            begin.wait()
            try:
                if HOW == "only_if_absent":
                    client.publish(TOPIC, {"by": "a worker"}, key="lock", ttl=NEVER, only_if_absent=True)
                elif HOW == "only_if_version":
                    client.publish(TOPIC, {"by": "a worker"}, key="versioned", only_if_version=first.version)
                else:
                    lease = client.lease("60s")
                    lease.publish(TOPIC, {"by": "a worker"}, key="leased", only_if_absent=True)
                    end.wait()
                    lease.close()
                return True
            except ConditionFailed:
                if HOW == "lease":
                    end.wait()
                return False

        fork = multiprocessing.get_context("fork")
        begin, end, told = fork.Barrier(3), fork.Barrier(3), fork.SimpleQueue()
        workers = [fork.Process(target=lambda: told.put(ask(number))) for number in range(3)]
        for worker in workers:
            worker.start()
        print(sorted(told.get() for _ in workers))
        for worker in workers:
            worker.join()
        print(client.count(TOPIC))
    """
    left = {"only_if_absent": "2", "lease": "1", "only_if_version": "1"}[how]
    assert run(server, topic, f"HOW = {how!r}\n" + textwrap.dedent(program)) == ["[False, False, True]", left]


OBJECTS = """
    client = Client(SERVER)
    for number in range(3):
        client.publish(TOPIC, {"n": number}, key=number, ttl=NEVER)
    publisher = client.publisher(TOPIC, linger=3600)
    publisher.publish({"n": 1}, key="buffered")
    subscription = client.subscribe(TOPIC)
    durable = client.durable(TOPIC, "durable", start="earliest")
    changed = next(durable)
    view = client.live_view(TOPIC)
    lease = client.lease("60s")
    leased = lease.publish(TOPIC, {"n": 1}, key="leased")
    answer = client.query(TOPIC, batch_size=1)
    next(answer)
    load = client.open_load(TOPIC + ".load")
    stager = client.stage_load(load.id, 0, 1)
    uses = {
        "publish": lambda: publisher.publish({"n": 1}, key="k"), "flush": publisher.flush, "close": publisher.close,
        "next": lambda: next(subscription), "batches": lambda: next(subscription.batches()),
        "end": subscription.close, "take": lambda: next(durable), "acknowledge": lambda: durable.acknowledge(changed),
        "flush durable": durable.flush, "close durable": durable.close, "read": lambda: view["1"],
        "wait": view.wait, "close view": view.close, "hold": lambda: lease.publish(TOPIC, {"n": 2}, key="leased"),
        "check": lease.check, "leave": lease.close, "answer": lambda: list(answer),
        "stage": lambda: stager.stage([b"{}"], keys=["k"]), "flush stager": stager.flush,
    }

    def all_uses():
        said = {}
        for name, use in uses.items():
            try:
                said[name] = repr(use())
            except SowError as error:
                said[name] = error.reason
        return {name: reason for name, reason in said.items() if reason != "FORKED"}, type(lease.lost).__name__

    def drop():
        global publisher, subscription, durable, view, lease, answer, stager, client, uses, changed
        del publisher, subscription, durable, view, lease, answer, stager, client, uses, changed
        import gc
        gc.collect()
"""
AFTERWARDS = """
    with publisher:
        publisher.publish({"n": 2}, key="more")
    print(sorted(next(subscription).key for _ in range(3)))
    lease.check()
    lease.close()
    print(client.count(TOPIC), next(durable).key, len(list(answer)))
    durable.acknowledge(changed)
    for left in durable, stager, subscription, view:
        left.close()
    client.abort_load(load.id)
    client.close()
"""
PARENTS = ["['buffered', 'leased', 'more']", "5 1 3"]


def test_what_follows_or_writes_for_the_parent_says_so_in_the_child_and_the_parent_goes_on(
    server: ServerProcess, topic: str
) -> None:
    """Story: `flush` of a buffered publisher never ended in the child. Each use raises FORKED, and nothing of the
    child's, its end included, is heard of in the parent."""
    program = """
        print(in_child(all_uses))
        print(in_child(drop, by_exit=True))
        print(in_child(lambda: client.count(TOPIC)))
    """
    said = run(server, topic, textwrap.dedent(OBJECTS) + textwrap.dedent(program) + textwrap.dedent(AFTERWARDS))
    assert said == ["({}, 'LeaseLost')", "None", "FORKED", *PARENTS]


def test_with_the_whole_support_of_grpc_a_child_calls_while_the_parent_follows(
    server: ServerProcess, topic: str
) -> None:
    program = """
        def child():
            found = all_uses()
            client.publish(TOPIC + ".child", {"n": 1}, key="k", ttl=NEVER)
            with client.lease("60s") as own, client.publisher(TOPIC + ".child") as stream:
                own.publish(TOPIC + ".child", {"n": 1}, key="own")
                stream.publish({"n": 1}, key="stream")
                stream.flush()
                return found, client.count(TOPIC + ".child")

        print(in_child(child))
    """
    said = run(
        server,
        topic,
        textwrap.dedent(OBJECTS) + textwrap.dedent(program) + textwrap.dedent(AFTERWARDS),
        GRPC_ENABLE_FORK_SUPPORT="1",
    )
    assert said == ["(({}, 'LeaseLost'), 3)", *PARENTS]


@pytest.mark.parametrize("whose", ["call", "look"])
def test_with_the_whole_support_of_grpc_a_fork_waits_for_threads_that_hold_locks_of_calls(
    server: ServerProcess, topic: str, whose: str
) -> None:
    """Story: the test above hung once in some fifty runs. A thread that follows a subscription takes the lock of its
    call each tenth of a second. If the fork came just then, gRPC's handler in the child waited for it for ever, in
    `os.fork` itself. Here the thread holds the lock until the fork waits."""
    program = """
        import time
        from types import SimpleNamespace
        from sow_client import _connection, _ends, _process
        client = Client(SERVER)
        client.publish(TOPIC, {"n": 1}, key="k", ttl=NEVER)
        subscription = client.subscribe(TOPIC)
        (call,) = _ends._ends.calls.values()
        held, forks = threading.Event(), threading.Event()

        def hold():
            with call._state.condition if WHOSE == "call" else _connection._looking:
                held.set()
                forks.wait()

        def sleep(seconds):
            forks.set()
            time.sleep(seconds)

        threading.Thread(target=hold).start()
        held.wait()
        _process.HELD_SECONDS_MAX = 30
        _process.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        print(in_child(lambda: client.count(TOPIC)), forks.is_set())
        client.publish(TOPIC, {"n": 2}, key="k", ttl=NEVER)
        print(next(subscription).key)
        subscription.close()
    """
    said = run(server, topic, f"WHOSE = {whose!r}\n" + textwrap.dedent(program), GRPC_ENABLE_FORK_SUPPORT="1")
    assert said == ["1 True", "k"]


def test_without_any_support_a_child_is_told_at_once(server: ServerProcess, topic: str) -> None:
    """Once the parent has made a client; the first child here needs no support."""
    program = """
        print(in_child(lambda: Client(SERVER).publish(TOPIC, {"n": 1}, key="child", ttl=NEVER).duplicate))
        client = Client(SERVER)
        client.publish(TOPIC, {"n": 1}, key="k", ttl=NEVER)
        print(in_child(lambda: client.count(TOPIC)), client.count(TOPIC))
        print(in_child(lambda: Client(SERVER).count(TOPIC)))
    """
    assert run(server, topic, program, GRPC_ENABLE_FORK_SUPPORT="0") == ["False", "FORKED 2", "FORKED"]


def test_children_of_children_and_clients_that_have_not_been_used_or_were_closed(
    server: ServerProcess, topic: str
) -> None:
    program = """
        client, unused, closed = Client(SERVER), Client(SERVER), Client(SERVER)
        closed.publish(TOPIC, {"n": 1}, key="parent", ttl=NEVER)
        client.publish(TOPIC, {"n": 1}, key="parent", ttl=NEVER)
        closed.close()

        def publish(key):
            return client.publish(TOPIC, {"n": 1}, key=key, ttl=NEVER).duplicate, unused.count(TOPIC)

        print(in_child(lambda: (publish("child"), in_child(lambda: publish("grandchild")))))
        print(in_child(lambda: closed.count(TOPIC)), in_child(client.close), client.count(TOPIC))
        import grpc
        given = Client(channel=grpc.insecure_channel(SERVER))
        print(given.count(TOPIC), in_child(lambda: given.count(TOPIC)))
    """
    assert run(server, topic, program) == ["""((False, 2), '(False, 3)')""", "CLOSED None 3", "3 FORKED"]


def test_a_client_of_several_addresses_searches_anew_in_the_child(server: ServerProcess, topic: str) -> None:
    program = """
        client = Client([SERVER, "127.0.0.1:9"], prefer="random")
        client.publish(TOPIC, {"n": 1}, key="parent", ttl=NEVER)
        export = client.open_export(TOPIC)

        def child():
            client.publish(TOPIC, {"n": 1}, key="child", ttl=NEVER)
            part = client.read_export(export.id, 0)
            return client.count(TOPIC), sum(packed.count for packed in part)

        print(in_child(child))
        client.publish(TOPIC, {"n": 1}, key="parent again", ttl=NEVER)
        print(client.count(TOPIC))
    """
    # The watch of the instance in use is a stream, so gRPC's whole support is needed.
    assert run(server, topic, program, GRPC_ENABLE_FORK_SUPPORT="1") == ["(2, 1)", "3"]


def test_an_asynchronous_client_in_a_child(server: ServerProcess, topic: str) -> None:
    """gRPC's part for asyncio works in the child only of a process that has not begun it."""
    program = """
        KEYS = "leased", "buffered", "after"  # where it begins depends on when the publisher sends

        async def publish(client, key):
            return (await client.publish(TOPIC, {"n": 1}, key=key, ttl=NEVER)).duplicate

        async def once(key):
            async with AsyncClient(SERVER) as client:
                return await publish(client, key)

        with Client(SERVER) as blocking:
            blocking.publish(TOPIC, {"n": 1}, key="parent", ttl=NEVER)
            print(in_child(lambda: asyncio.run(once("child"))))
            print(asyncio.run(once("parent")))
            print(in_child(lambda: asyncio.run(once("child"))))
            print(in_child(lambda: blocking.count(TOPIC)))
    """
    assert run(server, topic, program) == [
        "False",
        "False",
        "FORKED",
        "2",
    ]


def test_what_an_asynchronous_client_of_the_parent_has_made_says_so_in_the_child(
    server: ServerProcess, topic: str
) -> None:
    """gRPC's own handlers of forks are off here: with an open channel of asyncio they may end the child, in `os.fork`
    itself (1.85)."""
    program = """
        KEYS = "leased", "buffered", "after"  # where it begins depends on when the publisher sends

        async def publish(client, key):
            return (await client.publish(TOPIC, {"n": 1}, key=key, ttl=NEVER)).duplicate

        async def opened():
            client = AsyncClient(SERVER)
            await publish(client, "open")
            publisher, lease = client.publisher(TOPIC), client.lease("60s")
            await publisher.publish({"n": 1}, key="buffered")
            await lease.publish(TOPIC, {"n": 1}, key="leased")
            subscription, view = await client.subscribe(TOPIC).__aenter__(), client.live_view(TOPIC)
            await view.open()

            async def uses():
                said = []
                for use in (
                    lambda: publish(client, "child"), lambda: publish(AsyncClient(SERVER), "child"),
                    lambda: publisher.publish({"n": 1}), publisher.flush, publisher.close,
                    lambda: lease.publish(TOPIC, {"n": 1}, key="leased"), lease.close,
                    subscription.__anext__, subscription.close, view.wait, view.close,
                ):
                    try:
                        said.append(await use())
                    except SowError as error:
                        said.append(error.reason)
                return set(said)

            def child():
                with asyncio.Runner() as runner:
                    return runner.run(uses())

            print(in_child(child))
            await publisher.close()
            lease.check()
            print(await publish(client, "after"), (await anext(subscription)).key in KEYS, len(view) > 0)
            await lease.close()
            await view.close()
            await subscription.close()
            await client.close()

        asyncio.run(opened())
    """
    assert run(server, topic, program, GRPC_ENABLE_FORK_SUPPORT="0") == ["{'FORKED'}", "False True True"]


def test_a_fork_while_other_threads_call_is_told_in_the_child(server: ServerProcess, topic: str) -> None:
    """A call of another thread leaves gRPC's locks taken in the child, for ever."""
    program = """
        client = Client(SERVER, timeout=5)
        client.publish(TOPIC, {"n": 1}, key="k", ttl=NEVER)
        over = threading.Event()

        def call():
            while not over.is_set():
                client.get(TOPIC, "k")

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        print({in_child(lambda: client.count(TOPIC)) for _ in range(3)} <= {"FORKED", "1"})
        over.set()
        for thread in threads:
            thread.join()
        print(in_child(lambda: client.count(TOPIC)), client.count(TOPIC))
    """
    assert run(server, topic, program) == ["True", "1 1"]


def test_an_object_that_another_thread_is_making_keeps_no_other_from_hearing_of_the_fork(
    server: ServerProcess, topic: str
) -> None:
    program = """
        from sow_client import _process
        from sow_client._publisher import Sender
        half = Sender.__new__(Sender)
        _process.tell(half)
        client = Client(SERVER)
        client.publish(TOPIC, {"n": 1}, key="parent", ttl=NEVER)
        print(in_child(lambda: client.publish(TOPIC, {"n": 1}, key="child", ttl=NEVER).duplicate))
        client.publish(TOPIC, {"n": 1}, key="parent again", ttl=NEVER)
        print(client.count(TOPIC))
    """
    assert run(server, topic, program) == ["False", "3"]


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_fork_while_a_channel_is_being_closed_is_told_in_the_child(
    server: ServerProcess, topic: str, how: str
) -> None:
    """It is closed in a thread of its own, which holds locks of gRPC as a call does."""
    program = """
        import grpc._channel
        from sow_client import _channel
        client = Client(SERVER)
        client.publish(TOPIC, {"n": 1}, key="k", ttl=NEVER)
        begun, over = threading.Event(), threading.Event()

        def end(*_):
            begun.set()
            over.wait()

        if HOW == "closed":
            threading.Thread(target=_channel.close_aside, args=([end],)).start()
        else:
            grpc._channel._ChannelCallState.__del__ = end
            Client(SERVER)
        begun.wait()
        print(in_child(lambda: client.count(TOPIC)), client.count(TOPIC))
        over.set()
        print(in_child(lambda: client.count(TOPIC)))
    """
    assert run(server, topic, f"HOW = {how!r}\n" + textwrap.dedent(program)) == ["FORKED 1", "1"]


def test_an_asynchronous_client_that_was_made_and_not_used_keeps_no_child_from_one(
    server: ServerProcess, topic: str
) -> None:
    """It opens its channel at its first call. Only that begins gRPC's part for asyncio."""
    program = """
        made = [AsyncClient(SERVER), AsyncClient([SERVER, "127.0.0.1:9"])]

        async def publish(client, key):
            return (await client.publish(TOPIC, {"n": 1}, key=key, ttl=NEVER)).duplicate

        print(in_child(lambda: asyncio.run(publish(AsyncClient(SERVER), "new"))))
        print(*[in_child(lambda: asyncio.run(publish(client, "made"))) for client in made])
        print(asyncio.run(publish(made[0], "parent")))
        print(in_child(lambda: asyncio.run(publish(AsyncClient(SERVER), "late"))))
    """
    assert run(server, topic, program) == ["False", "False False", "False", "FORKED"]
