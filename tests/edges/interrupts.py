"""Ctrl-C at any point of a constructor or of an opening call leaves nothing half made, in both clients.

test_interrupts.py runs these tests in a process of their own: exceptions at any point would meet whatever threads and
channels the tests before have left, in gRPC, too.

The command is in test_odd_surroundings. Each test counts the points at which an exception of a signal may come, and
raises one at each of them (some, in the default run).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import pytest

from sow.v1 import sow_pb2
from sow_client import AsyncClient, Client, _ends
from sow_client._aio_publisher import AsyncPublisher
from sow_client._aio_subscription import AsyncSubscription
from sow_client._durable import Acknowledgements, DurableCore
from sow_client._ends import Stream
from sow_client._lease_core import LeaseCore
from sow_client._live_view import LiveCore
from sow_client._publisher import Publisher
from sow_client._subscription import Subscription
from sow_client._subscription_core import SubscriptionCore
from sow_client.aio._consuming import AsyncDurableSubscription
from sow_client.aio._following import AsyncLiveView
from sow_client.aio._leasing import AsyncLease
from sow_client.blocking._consuming import DurableSubscription
from sow_client.blocking._following import LiveView
from sow_client.blocking._leasing import Lease
from tests.support.servers.interrupted import Points, points_of, raised_at, spread
from tests.support.servers.server import PYTHONPATH, ROOT, ServerProcess, until

PATHS: Final = [str(ROOT / name) for name in ("", "proto", "clients")]
NOWHERE: Final = "127.0.0.1:1"
POINTS_MAX: Final = 4
"""So many points of each call in the default run."""
IN_A_PROGRAM: Final = """
import sys
from tests.support.servers.interrupted import Points
from sow_cli.__main__ import main
Points(int(sys.argv.pop(1))).begin()
main()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        with process.client() as client:
            client.create_topic("t", key=["/id"], expiration="enabled", default_ttl="1h")
            client.publish_many("t", [{"id": number} for number in range(3)])
            client.durable("t", "d").close()
        yield process


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What finalizers and threads have said."""
    said: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: said.append(f"{found.exc_value!r} in {found.object!r}"))
    monkeypatch.setattr(threading, "excepthook", lambda found: said.append(repr(found.exc_value)))
    return said


def threads() -> set[threading.Thread]:
    """Those of the client; that of the ends stays. A thread whose start an exception has ended may be stuck in the
    first lines of `threading`, before it does anything, or be listed although it never ran: that is Python's."""
    frames = sys._current_frames()
    found = (one for one in threading.enumerate() if one.name.startswith("sow-") and one.name != "sow-ends")
    return {one for one in found if one.is_alive() and has_begun(frames.get(one.ident or 0))}


def has_begun(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "run":
            return True
        frame = frame.f_back
    return False


# ---- constructors ----


def core(request: sow_pb2.SubscribeRequest | None = None) -> SubscriptionCore:
    return SubscriptionCore(request or sow_pb2.SubscribeRequest(topic="t"), retry_for=1, connect_timeout=1)


def durable_core(acknowledgements: Acknowledgements) -> DurableCore:
    return DurableCore(sow_pb2.SubscribeRequest(topic="t"), acknowledgements, retry_for=1, connect_timeout=1)


def live_core() -> LiveCore:
    return LiveCore(sow_pb2.SubscribeRequest(topic="t", sow=True), retry_for=1, connect_timeout=1, tells=False)


def publish_core() -> Any:
    with Client(NOWHERE) as client:
        publisher = client.publisher("t")
        publisher.abort()
    return publisher._core


def never(*_arguments: object, **_named: object) -> Any:
    raise AssertionError("nothing is opened yet")


class Call:
    """A call of gRPC."""

    def cancel(self) -> bool:
        return True


def makers() -> dict[str, Callable[[], object]]:
    acknowledgements = Acknowledgements("t", "d", retry_for=1)
    cores = core(), durable_core(acknowledgements), live_core(), publish_core()
    blocking, asynchronous = Client(NOWHERE), AsyncClient(NOWHERE)
    return {
        "Stream": lambda: Stream(Call()),
        "Subscription": lambda: Subscription(cores[0], never),
        "DurableSubscription": lambda: DurableSubscription(cores[1], never, acknowledgements, never),
        "LiveView": lambda: LiveView(cores[2], never, None),
        "Publisher": lambda: Publisher(cores[3], never),
        "Lease": lambda: Lease(blocking, LeaseCore("10s")),
        "Client": lambda: Client(NOWHERE),
        "Client of many": lambda: Client([NOWHERE, "127.0.0.1:2"]),
        "AsyncSubscription": lambda: AsyncSubscription(cores[0], never),
        "AsyncDurableSubscription": lambda: AsyncDurableSubscription(cores[1], never, acknowledgements, never),
        "AsyncLiveView": lambda: AsyncLiveView(cores[2], never, None),
        "AsyncPublisher": lambda: AsyncPublisher(cores[3], never),
        "AsyncLease": lambda: AsyncLease(asynchronous, LeaseCore("10s")),
        "AsyncClient": lambda: AsyncClient(NOWHERE),
    }


MADE: Final = list(makers())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", MADE)
def test_a_constructor_that_ends_at_any_point_leaves_nothing(
    unraisable: list[str], name: str, error: type[BaseException]
) -> None:
    """Story: a finalizer asked for what the constructor had not reached, and said so on stderr."""

    async def in_a_loop() -> None:
        make = makers()[name]
        make()  # the first one starts the thread of the ends
        for point in range(1, points_of(make) + 1):
            raised = raised_at(point, make, error)
            assert isinstance(raised, error), point
            del raised

    gc.collect()
    unraisable.clear()
    before, calls = threads(), dict(_ends._ends.calls)
    asyncio.run(in_a_loop())
    gc.collect()

    assert unraisable == []
    ended = threading.Event()
    _ends.hand_over(ended.set)  # after all that was handed over before
    assert ended.wait(10)
    assert (threads(), _ends._ends.calls) == (before, calls)


# ---- opening calls ----


def published(client: Client) -> object:
    publisher = client.publisher("t", linger=60)
    publisher.publish(b'{"id": 1}')
    return publisher


OPENED: Final[dict[str, Callable[[Client], object]]] = {
    "subscribe": lambda client: client.subscribe("t"),
    "sow_and_subscribe": lambda client: client.sow_and_subscribe("t"),
    "durable": lambda client: client.durable("t", "d"),
    "live_view": lambda client: client.live_view("t"),
    "publisher": published,
}
"""A lease is not among them: one that nobody closes goes on to be renewed."""


LONG: Final = pytest.mark.parametrize("points_max", [POINTS_MAX, pytest.param(1_000, marks=pytest.mark.long)])
GRPCS: Final = "_Rendezvous.__del__"
"""gRPC's own finalizer fails where an exception has ended its constructor. The call ends all the same."""


def left(other: Client) -> list[object]:
    """What is open: threads, calls and publishers of this process, and subscriptions at the server."""
    consumers = [durable for durable in other.durables("t") if durable.attached]  # also one that is just attaching
    return [*threads(), *_ends._ends.calls, *_ends._ends.unfinished, *other.subscriptions("t"), *consumers]


@LONG
@pytest.mark.parametrize("name", OPENED)
@pytest.mark.filterwarnings("ignore:the publisher to 't' was not closed:ResourceWarning")
def test_a_call_that_ends_at_any_point_leaves_nothing_open(
    server: ServerProcess, unraisable: list[str], name: str, points_max: int
) -> None:
    with server.client() as client, server.client() as other:

        def opened() -> object:
            return OPENED[name](client)

        for point in spread(points_of(opened), points_max):
            raised = raised_at(point, opened)
            del raised
            gc.collect()
            until(lambda: not left(other), 20, f"the end of what point {point} of {name} has left open: {left(other)}")
        opened()
    assert [one for one in unraisable if GRPCS not in one] == []


AIO_OPENED: Final[dict[str, Callable[[AsyncClient], Any]]] = {
    "subscribe": lambda client: client.subscribe("t"),
    "durable": lambda client: client.durable("t", "d"),
    "live_view": lambda client: client.live_view("t"),
    "publisher": lambda client: client.publisher("t"),
    "lease": lambda client: client.lease("10s"),
}


@LONG
@pytest.mark.parametrize("name", AIO_OPENED)
def test_ctrl_c_at_any_point_of_a_task_leaves_nothing_open(
    server: ServerProcess, unraisable: list[str], caplog: pytest.LogCaptureFixture, name: str, points_max: int
) -> None:
    """asyncio cancels the task at its next wait."""

    async def opened(point: int) -> int:
        async with AsyncClient(server.address) as client:
            with Points(point) as points:
                async with AIO_OPENED[name](client) as made:
                    if name in ("publisher", "lease"):
                        await made.publish(*(["t"] * (name == "lease")), b'{"id": 8}')
            return points.passed

    with server.client() as other, caplog.at_level(logging.ERROR, "asyncio"):
        for point in spread(asyncio.run(opened(0)), points_max):
            with contextlib.suppress(KeyboardInterrupt):  # after the last wait nobody is told
                asyncio.run(opened(point))
            gc.collect()
            until(lambda: not left(other), 20, f"the end of what point {point} of {name} has left open: {left(other)}")
    # The rest is asyncio's, whose callbacks a signal ends between two lines, and gRPC's in a loop that was closed.
    ours = [one for one in caplog.text.split("ERROR ") if "sow_client" in one]
    assert (unraisable, ours) == ([], [])


# ---- the command, from its imports on ----


def test_ctrl_c_while_the_command_imports_ends_it(server: ServerProcess) -> None:
    """Nearly all of its start. The points are counted from `main` on: what the interpreter does before is not ours."""
    for point in (2, 40_000, 160_000):
        program = subprocess.run(
            [sys.executable, "-c", IN_A_PROGRAM, str(point), "--server", server.address, "get", "t", "1"],
            env={"PYTHONPATH": ":".join([*PATHS, *PYTHONPATH])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (program.returncode, program.stdout, program.stderr) == (130, "", ""), point
