"""Connections of tasks: their end, and that nobody waits for it."""

from __future__ import annotations

import gc
import threading
from types import TracebackType

import pytest
from pyspark import TaskContext

from sow_client import ResourceExhausted
from sow_spark import connection
from sow_spark.connection import connect, retried
from sow_spark.options import Connecting

WAIT_SECONDS = 30.0


class SlowToClose:
    """A client whose close takes until `may_close` is set."""

    def __init__(self, *_: object, **__: object) -> None:
        self.may_close = threading.Event()
        self.closed = threading.Event()
        self.ended_by: BaseException | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.may_close.wait(WAIT_SECONDS)
        self.ended_by = error
        self.closed.set()


@pytest.fixture(autouse=True)
def slow_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "Client", SlowToClose)


def test_a_task_does_not_wait_until_its_connection_is_closed() -> None:
    """gRPC takes up to 0.2 s to close a connection. Each plan and each task of a job waited for that."""
    with connect(Connecting()) as client:
        assert isinstance(client, SlowToClose)
    assert not client.closed.is_set()
    client.may_close.set()
    assert client.closed.wait(WAIT_SECONDS)
    assert client.ended_by is None


def test_a_connection_is_closed_too_when_its_task_fails() -> None:
    failure = KeyboardInterrupt()
    clients: list[SlowToClose] = []

    def task() -> None:
        with connect(Connecting()) as client:
            assert isinstance(client, SlowToClose)
            clients.append(client)
            client.may_close.set()
            raise failure

    with pytest.raises(KeyboardInterrupt):
        task()
    (client,) = clients
    assert client.closed.wait(WAIT_SECONDS)
    assert client.ended_by is failure, "after an interrupt the client bounds the time that closing takes"


def test_a_process_does_not_end_before_its_connection_is_closed() -> None:
    """A thread that is in gRPC while the interpreter is taken down may crash the process."""
    with connect(Connecting()) as client:
        assert isinstance(client, SlowToClose)
    (closing,) = [thread for thread in threading.enumerate() if thread.name == "sow-close"]
    assert not closing.daemon
    client.may_close.set()
    closing.join(WAIT_SECONDS)
    assert client.closed.is_set()


def test_the_first_task_of_a_process_keeps_its_modules_out_of_the_search_for_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """given the driver, which is the user's process, and then two tasks of a worker / when they have ended / then
    objects were frozen once, when the first task had imported all that it needs, and after a search for garbage, which
    would stay else. Spark's workers collect garbage after each task, which took 25 ms."""
    frozen: list[str] = []
    task: list[str | None] = [None]
    monkeypatch.setattr(gc, "collect", lambda: frozen.append("collected"))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(str(task[0])))
    monkeypatch.setattr(TaskContext, "get", lambda: task[0])
    connection._keep_imported.cache_clear()
    for task[0] in (None, "first", "second"):
        with connect(Connecting()) as client:
            assert isinstance(client, SlowToClose)
            client.may_close.set()
            assert task[0] != "first" or not frozen
    assert frozen == ["collected", "first"]
    connection._keep_imported.cache_clear()


def test_a_call_waits_for_room_where_others_make_some() -> None:
    """given a server with as many exports as it allows / when the time of retryFor has not passed / then the call is
    repeated; other calls fail at once"""
    clock = [0.0]
    calls = [0]

    def call() -> str:
        calls[0] += 1
        if clock[0] < 30.0:
            raise ResourceExhausted("full", reason="OVERLOADED")
        return "open"

    def pause(seconds: float) -> None:
        clock[0] += seconds

    connecting = Connecting(retry_for_micros=60_000_000)
    assert retried(connecting, call, full=True, now=lambda: clock[0], pause=pause) == "open"
    assert 30.0 <= clock[0] < 33.0
    for full, reason in ((False, "OVERLOADED"), (True, "LIMIT_REACHED")):
        calls[0] = 0

        def refused(reason: str = reason) -> None:
            calls[0] += 1
            raise ResourceExhausted("full", reason=reason)

        with pytest.raises(ResourceExhausted):
            retried(connecting, refused, full=full, now=lambda: clock[0], pause=pause)
        assert calls[0] == 1
    hasty = Connecting(retry_for_micros=0)
    clock[0] = 0.0
    with pytest.raises(ResourceExhausted):
        retried(hasty, call, full=True, now=lambda: clock[0], pause=pause)
