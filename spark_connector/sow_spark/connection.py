"""Clients made of options, for the driver and for tasks, and retries.

Each planner process and each task opens its own client and closes it at its end, because connections cannot be pickled.

    [1]  A task does not wait for its connection to close. gRPC ends the thread that watches a connection after up to
         0.2 s, and closing waits for it. A task of 100,000 records takes about as long.
    [2]  With several addresses the tasks of a job, or of a micro-batch, use the instance that the driver used for it:
         exports, loads, bookmarks, epochs and units of work belong to one instance (rule F2).
    [3]  After each task Spark's worker process looks for garbage among all objects. The modules that it has imported
         are never garbage, so the first task of a process takes them out of that search at its end. They made it 25 ms
         long, a tenth of a task of 100,000 records.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from pyspark import TaskContext

from sow_client import Client, NotFound, PermissionDenied, ResourceExhausted, Tls, Unavailable
from sow_spark.options import Connecting

FIRST_PAUSE_SECONDS: Final = 0.1
PAUSE_SECONDS_MAX: Final = 2.0

_Answer = TypeVar("_Answer")


@contextmanager
def connect(connecting: Connecting) -> Iterator[Client]:
    """A client for these options. It connects at its first call. At the end of the block it is closed on a thread of
    its own [1]."""
    client = _client(connecting)
    ended_by: BaseException | None = None
    try:
        yield client
    except BaseException as error:
        ended_by = error
        raise
    finally:
        # The process does not end before the thread: gRPC must not be in use while the interpreter is taken down.
        closing = threading.Thread(target=client.__exit__, args=(None, ended_by, None), name="sow-close", daemon=False)
        closing.start()
        if TaskContext.get() is not None:
            _keep_imported()


@cache
def _keep_imported() -> None:
    """Once in a process: what it holds by now is not looked through again [3]. What is garbage goes before, as it would
    stay until the process ends."""
    gc.collect()
    gc.freeze()


def kept(connecting: Connecting, client: Client, topic: str = "") -> Connecting:
    """The same, at the instance that a client of the driver uses [2] for a topic; "": for several topics, which are in
    the cell of the option `server` (rule C3)."""
    instance = client.instance_of(topic)
    if instance is None:
        return in_cell(connecting, client, topic)  # one instance, by the option `server` or by its cell
    return replace(
        connecting, server=instance.address, tls_server_name=connecting.tls_server_name or instance.host or None
    )


def in_cell(connecting: Connecting, client: Client, topic: str) -> Connecting:
    """The same, in the cell of a topic, for which the client has made a call (rule C10)."""
    servers = client.servers_of(topic)
    return connecting if servers == client.servers_of("") else replace(connecting, server=servers)


def cell_of(connecting: Connecting, topic: str) -> Connecting:
    """The same, in the cell of a topic, about which it asks. Raises SowError, but not where there is no such topic."""
    with connect(connecting) as client:
        with suppress(NotFound, PermissionDenied):  # the call for which it is asked tells
            retried(connecting, lambda: client.describe_topic(topic))
        return in_cell(connecting, client, topic)


def _client(connecting: Connecting) -> Client:
    tls = None
    if connecting.tls:
        tls = Tls(
            ca=connecting.tls_ca,
            certificate=connecting.tls_certificate,
            key=connecting.tls_key,
            server_name=connecting.tls_server_name,
        )
    return Client(
        connecting.server,
        tls=tls,
        token=None if connecting.token_file is None else Path(connecting.token_file),
        timeout=connecting.timeout_micros / 1e6,
        connect_timeout=connecting.connect_timeout_micros / 1e6,
        environment={},  # the options say all: an executor may have other variables than the driver
    )


def retried(
    connecting: Connecting,
    call: Callable[[], _Answer],
    *,
    full: bool = False,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> _Answer:
    """Returns the result of `call`, and repeats the call while the server is Unavailable, for the option `retryFor`.

    Only for calls that may be made twice. With `full` also while the server has no room (OVERLOADED), which others may
    make. Any other exception of `call` is passed on at once.
    """
    give_up = now() + connecting.retry_for_micros / 1e6
    seconds = FIRST_PAUSE_SECONDS
    while True:
        try:
            return call()
        except (Unavailable, ResourceExhausted) as error:
            if not isinstance(error, Unavailable) and not (full and error.reason == "OVERLOADED"):
                raise
            # Random, so that the tasks of a job do not come back all at once.
            wait = max(seconds * random.uniform(0.5, 1.0), error.retry_after or 0.0)
            if now() + wait > give_up:
                raise
            pause(wait)
            seconds = min(seconds * 2, PAUSE_SECONDS_MAX)
