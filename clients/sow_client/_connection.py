"""The connection of a client's channel: it waits until the channel is connected, or finds the cause why it is not.

[1]  Whoever waits for a connection waits for `connect_timeout` at most, or for less if he says so. Then he is told the
     cause that gRPC names, which adds `CAUSE_SECONDS_MAX` at most. Where he has set no bound of his own, and the cause
     leaves open whether TLS is at fault, a look at the server adds the time to resolve its name, and at most
     `LOOK_SECONDS_MAX` for each of its addresses and each step of the handshake (_handshakes).
[2]  A client that was given no `connect_timeout`, and has not been connected yet, does not wait on where the server
     refuses twice (rule F1). A server that says nothing has not refused.
[3]  Closing ends each wait for a connection, and waits for none itself. Only a look is not cut short ([1]).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import grpc
import grpc.aio

from sow_client import _process
from sow_client._channel import Tls, proxy_variable
from sow_client._flags import Flag
from sow_client._statuses import REFUSED_SECONDS, EndedCall, closed, cut, unreachable
from sow_client.errors import SowError

CAUSE_SECONDS_MAX: Final = 0.2
"""The longest time for the question why there is no connection."""

WAIT_SECONDS: Final = 0.05
"""How long a wait for a connection goes on before it looks whether the client is closed."""
FOLLOW_SECONDS: Final = 0.05
"""How often lost connections are looked for, where that matters. gRPC repeats a call 80 ms after it has lost one."""
FOLLOWED_SECONDS_MAX: Final = 1.0
"""How long the end of a program waits for such a look."""

HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
"""Called on a channel that failed to connect, and may be connecting again just now. Such a call fails at once and names
the cause: a refused connection, a certificate that is not trusted. gRPC's interface offers no other way to learn it."""


# As gRPC's inside counts the states.
_READY: Final = 2
_FAILED: Final = 3


class Connection:
    """Knows whether a blocking channel is connected, by asking it.

    gRPC would also report each change, from a thread that waits for the next one in steps of 0.2 s. Closing a channel
    waits for the end of such a step, so every program paid for it. The channel inside gRPC's answers at once.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        server: str,
        connect_timeout: float,
        tls: Tls | None = None,
        *,
        patient: bool = True,
    ) -> None:
        """`patient`: without [2]."""
        self._channel = channel
        self._patient = patient
        self._inside: _Inside = channel._channel  # type: ignore[attr-defined]  # the public one has no question
        self._server = server
        self._tls = tls
        self._timeout = connect_timeout
        self._closed = Flag()
        self._changing = threading.Lock()  # for the three below
        self._noted = False  # this connection is among the connected ones
        self._connected = 0
        self._following: threading.Thread | None = None

    def follow(self) -> int:
        """The number of times that it has been connected. Whoever asks compares: a thread looks for lost connections
        from then on, as gRPC may connect anew by itself, in a call that it repeats."""
        if self._following is None:
            with self._changing:
                if self._following is None:  # else another thread was faster
                    following = threading.Thread(target=_follow, args=(weakref.ref(self), self._closed), daemon=True)
                    _followers[following] = self._closed  # before: an interrupt may come when it runs already
                    following.start()
                    self._following = following
        return self._connected

    @property
    def connected(self) -> int:
        """The number of times that it has been connected, as far as callers have noticed."""
        return self._connected + (not self._noted)  # a connection counts once the next call has looked for it

    @property
    def is_ready(self) -> bool:
        """True if a call can be made now. Raises ValueError on a closed channel."""
        ready = self._inside.check_connectivity_state(False) == _READY
        if ready is not self._noted:
            with self._changing:
                if ready is not self._noted:  # else another thread has counted it
                    self._noted = ready
                    self._connected += ready
        return ready

    def close(self) -> None:
        """Ends each wait for a connection. The channel may be closed afterwards."""
        self._closed.set()

    def await_ready(self, seconds: float | None = None, *, looks: bool) -> None:
        """Returns once a call can be made.

        Raises Unavailable (UNREACHABLE) after `connect_timeout`, or after `seconds` if that is less; Cancelled (CLOSED)
        when the client is closed during the wait. `looks`: it may take longer, to find the cause ([1]).
        """
        try:
            if self.is_ready:
                return
            timeout = self._timeout if seconds is None else min(seconds, self._timeout)
            began = time.monotonic()
            give_up = began + timeout
            # A channel without a connection, or that has lost it, rests until it is asked to connect.
            while (state := self._inside.check_connectivity_state(True)) != _READY:
                if self._closed.is_set():
                    raise closed("client")
                if (left := give_up - time.monotonic()) <= 0:
                    raise self._failure(timeout, self._ask_for_cause(), looks=looks)
                if self._has_failed(state, began) and (cause := self._ask_for_cause()):
                    raise self._failure(None, cause, looks=looks)
                with _process.inside_grpc():
                    self._inside.watch_connectivity_state(state, time.time() + min(left, WAIT_SECONDS))
            _ = self.is_ready
        except ValueError as error:  # from gRPC: the channel was closed in the meantime
            raise closed("client") from error

    def _has_failed(self, state: int, began: float) -> bool:
        """True if the wait has ended without a connection ([2])."""
        may_end = not self._patient and not self._connected and state == _FAILED
        return may_end and time.monotonic() - began >= REFUSED_SECONDS

    def _failure(self, seconds: float | None, cause: str, *, looks: bool) -> SowError:
        problem = _looked(self._server, self._tls, cause) if looks and cause else ""
        if self._closed.is_set():
            return closed("client")
        return unreachable(
            self._server, seconds, cause, problem=problem, proxy=proxy_variable(self._server, os.environ)
        )

    def _ask_for_cause(self) -> str:
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(HEALTH_CHECK)
            call(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return cause_of(error)
        return ""  # the channel is connected by now


class _Inside(Protocol):
    """The channel inside a channel of gRPC."""

    def check_connectivity_state(self, try_to_connect: bool, /) -> int:
        """The state."""

    def watch_connectivity_state(self, last: int, deadline: float, /) -> object:
        """Returns once the state is another one than `last`, or at `deadline`, of `time.time`."""


class _Followers(weakref.WeakKeyDictionary[threading.Thread, Flag]):
    """The threads that follow connections, and what ends them. A forked child has none."""

    def _forked(self) -> None:
        _process.keep(*list(self.items()))
        self.clear()


_followers: Final = _Followers()
_process.tell(_followers)
_looking: Final = threading.Lock()
"""Held during each look (_process [6])."""
_process.hold_at_fork(lambda: [_looking])


@atexit.register
def _end_followers() -> None:
    """At the end of a program that has not closed its clients. A thread that is inside gRPC while the interpreter is
    taken apart would die there, and whatever it has locked would stay locked."""
    for following, over in list(_followers.items()):
        over.set()
        if following.is_alive():
            following.join(FOLLOWED_SECONDS_MAX)


def _follow(connection: weakref.ref[Connection], closed: Flag) -> None:
    """Notes lost connections. It does not refer to the client, so dropping the last reference to a client ends it."""
    while not closed.wait(FOLLOW_SECONDS) and (followed := connection()) is not None:
        try:
            with _looking:
                _ = followed.is_ready
        except ValueError:  # from gRPC: the channel is closed
            return
        del followed


class AioConnection:
    """Knows whether an asynchronous channel is connected, by asking it."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        server: str,
        connect_timeout: float,
        tls: Tls | None = None,
        *,
        patient: bool = True,
    ) -> None:
        """`patient`: without [2]."""
        self._channel = channel
        self._patient = patient
        self._server = server
        self._tls = tls
        self._timeout = connect_timeout
        self._closed = False
        self._connected = 0

    @property
    def connected(self) -> int:
        """The number of times that it has been connected, as far as callers have noticed."""
        return self._connected

    def follow(self) -> int:
        """As `connected`: no other thread makes calls meanwhile."""
        return self._connected

    def close(self) -> None:
        """The channel's end ends each wait."""
        self._closed = True

    async def await_ready(self, seconds: float | None = None, *, looks: bool) -> None:
        """As `Connection.await_ready`."""
        ready = grpc.ChannelConnectivity.READY
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        with unless_closed():
            if self._channel.get_state() is ready:
                return
            give_up = time.monotonic() + timeout
            may_end = not self._patient and not self._connected
            while (left := give_up - time.monotonic()) > 0:
                if await self._connected_within(min(left, REFUSED_SECONDS) if may_end else left):
                    return
                has_failed = self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
                if may_end and left > REFUSED_SECONDS and has_failed and (cause := await self._ask_for_cause()):
                    raise await self._failure(None, cause, looks=looks)
            raise await self._failure(timeout, await self._ask_for_cause(), looks=looks)

    async def _connected_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while (state := self._channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    await self._channel.wait_for_state_change(state)
        except TimeoutError:
            return False
        self._connected += 1
        return True

    async def _failure(self, seconds: float | None, cause: str, *, looks: bool) -> SowError:
        problem = await asyncio.to_thread(_looked, self._server, self._tls, cause) if looks and cause else ""
        if self._closed:
            return closed("client")
        return unreachable(
            self._server, seconds, cause, problem=problem, proxy=proxy_variable(self._server, os.environ)
        )

    async def _ask_for_cause(self) -> str:
        try:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(HEALTH_CHECK)
            await call(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return cause_of(error)
        return ""  # the channel is connected by now


def _looked(server: str, tls: Tls | None, cause: str) -> str:
    from sow_client._handshakes import looked  # lazily: a connection that is made needs none of it

    return looked(server, tls, cause)


def cause_of(error: BaseException) -> str:
    """The cause that a call on a channel without a connection names; empty when it names none."""
    if not isinstance(error, EndedCall) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return ""
    return (error.details() or "").rpartition("last error: ")[2]


@contextmanager
def unless_closed() -> Iterator[None]:
    """Raises Cancelled (CLOSED) where gRPC reports that an asynchronous channel was closed.

    gRPC reports it by a UsageError, and to tasks that wait for a call by a CancelledError, which such a task would take
    for its own cancellation.
    """
    try:
        yield
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        if task_is_cancelled():
            raise
        raise closed("client") from error


@contextmanager
def unless_cut(what: str) -> Iterator[None]:
    """Raises Unavailable (STREAM_CUT) where gRPC tells a task by a CancelledError that its call has ended."""
    try:
        yield
    except asyncio.CancelledError as error:
        if task_is_cancelled():
            raise
        raise cut(what) from error


def task_is_cancelled() -> bool:
    """True when a CancelledError is meant for the current task. gRPC raises it also when only a call was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
