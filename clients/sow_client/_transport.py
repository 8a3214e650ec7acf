"""The parts of a client's way to its server in which threads and tasks really differ, in pairs, by hand. The way itself
is `aio/_moving.py`, from which the blocking one is generated. gRPC reports the state of a blocking channel on a thread
of its own; an asynchronous channel is asked.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, ParamSpec, TypeAlias

import grpc
import grpc.aio

from sow_client import _ends, _failover, _process
from sow_client._addresses import host_and_port
from sow_client._channel import close_aside
from sow_client._connection import cause_of, task_is_cancelled, unless_closed, unless_cut
from sow_client._lines import Cancellable
from sow_client._statuses import EndedCall, error_of_status, explained, reason_of, tls_details, tls_problem, unreachable
from sow_client.errors import SowError, Unavailable

__all__ = ["RECONNECT_SECONDS", "task_is_cancelled", "unless_closed", "unless_cut"]

RECONNECT_SECONDS: Final = 0.5
"""Publishers and subscriptions repeat their attempts, so each attempt waits only this long for a connection. Closing a
publisher or a subscription may take as long."""
GO_BACK_SECONDS: Final = 1.0
"""How long `go_back` looks for the preferred instances."""
LOOK_AGAIN_SECONDS: Final = 1.0
"""While the instance in use does not serve, and no other did, the client looks for one that does no more often."""

HEALTH_OF_SOW: Final = b"\n\x11sow.v1.SowService"
"""The request for the health of sow's service. An older server, which does not describe itself, answers it."""
SERVING: Final = b"\x08\x01"

_Arguments = ParamSpec("_Arguments")
_Found: TypeAlias = Mapping[str, Sequence[str]]


# ---- one search at a time ----


class Turn:
    """The right to search, which one thread has at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def held(self, server: str, seconds: float) -> Iterator[None]:
        """Raises Unavailable (UNREACHABLE) if another search takes longer."""
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            raise unreachable(server, seconds)
        try:
            yield
        finally:
            self._lock.release()


class AioTurn:
    """`Turn` of tasks."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def held(self, server: str, seconds: float) -> AsyncIterator[None]:
        """As `Turn.held`."""
        try:
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
        except TimeoutError as error:
            raise unreachable(server, seconds) from error
        try:
            yield
        finally:
            self._lock.release()


# ---- the end ----


def close_channels(channels: Sequence[grpc.Channel]) -> None:
    """Closes channels, within `CLOSE_SECONDS_MAX` (_channel [2])."""
    close_aside([channel.close for channel in channels])


async def aio_close_channels(channels: Sequence[grpc.aio.Channel]) -> None:
    """Closes channels; an interrupt leaves none of their calls in a bad state."""
    for channel in channels:
        await channel.close()


# ---- the watch of the instance in use ----


class Watch:
    """The call that watches an instance, also before it is made. Dropping its owner ends it."""

    def __init__(self, owner: object) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._call: Cancellable | None = None
        self._finalizer = weakref.finalize(owner, _ends.hand_over, self.cancel)
        self._finalizer.atexit = False
        _process.tell(self)

    def _forked(self) -> None:
        self._finalizer.detach()
        self._lock = threading.Lock()
        self._over = True

    def start(
        self, keep: Callable[_Arguments, None], /, *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> None:
        """Runs a function in a thread."""
        _ends.StreamThread(keep, "sow-watch", self.cancel, args=arguments, kwargs=named).start()

    def begins(self, call: Cancellable) -> bool:
        """The call is made. False: it was cancelled before."""
        with self._lock:
            self._call = call
            over = self._over
        if over:
            call.cancel()
        return not over

    def cancel(self) -> None:
        """Ends the call."""
        self._finalizer.detach()  # else a client that moves often would keep the watches of all instances
        with self._lock:
            self._over = True
            call = self._call
        if call is not None:
            call.cancel()


class AioWatch:
    """`Watch` in a task."""

    def __init__(self, owner: object) -> None:
        self._over = False
        self._call: Cancellable | None = None
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._finalizer = weakref.finalize(owner, self._drop)
        self._finalizer.atexit = False
        _process.tell(self)

    def _forked(self) -> None:
        _process.keep(self._task)
        self._finalizer.detach()
        self._over = True

    def start(
        self,
        keep: Callable[_Arguments, Coroutine[None, None, None]],
        /,
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> None:
        """Runs a coroutine in a task."""
        self._task = self._loop.create_task(keep(*arguments, **named), name="sow-watch")

    def begins(self, call: Cancellable) -> bool:
        """As `Watch.begins`."""
        self._call = call
        if self._over:
            call.cancel()
        return not self._over

    def cancel(self) -> None:
        """Ends the call."""
        self._finalizer.detach()
        self._over = True
        if self._call is not None:
            self._call.cancel()

    def _drop(self) -> None:
        # The garbage collector may run in any thread, and after the end of the loop, which also ends the call.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.cancel)


# ---- addresses and answers ----


def resolved(names: Sequence[str], seconds: float) -> _Found:
    """The IP addresses of names. A resolver may take long, and cannot be interrupted."""
    found: dict[str, Sequence[str]] = {}
    looking = [threading.Thread(target=_look_up, args=(name, found), name="sow-resolve", daemon=True) for name in names]
    for thread in looking:
        thread.start()
    give_up = time.monotonic() + seconds
    for thread in looking:
        thread.join(max(0.0, give_up - time.monotonic()))
    return dict(found)


async def aio_resolved(names: Sequence[str], seconds: float) -> _Found:
    """As `resolved`."""
    found: dict[str, Sequence[str]] = {}
    if names:
        looking = [asyncio.to_thread(_look_up, name, found) for name in names]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*looking)
    return dict(found)


def _look_up(name: str, found: dict[str, Sequence[str]]) -> None:
    host, port = host_and_port(name)
    try:
        found[name] = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # UnicodeError: no label of a name is empty, or longer than 63
        pass  # gRPC looks it up again, and names the cause


def is_unknown(error: BaseException) -> bool:
    """The server does not know the method."""
    return isinstance(error, EndedCall) and error.code() is grpc.StatusCode.UNIMPLEMENTED and reason_of(error) is None


def answer_of(error: grpc.RpcError, address: str, seconds: float) -> SowError:
    """The reason why there is no instance at an address."""
    translated = error_of_status(error)
    if reason_of(error) is not None:
        if translated.reason in _failover.LOSSES:
            return Unavailable(f"{address}: {translated.message}", reason=translated.reason)
        return translated
    if translated.reason in ("UNIMPLEMENTED", "NOT_FOUND"):
        return _failover.no_server(address)
    if translated.reason == "DEADLINE_EXCEEDED":
        return _failover.NoAnswer(f"{address}: no answer within {seconds:.2g} s", reason="UNREACHABLE")
    cause = cause_of(error) or translated.message
    return Unavailable(
        f"{address}: {explained(cause)}", reason="UNREACHABLE", details=tls_details(tls_problem(cause), cause)
    )
