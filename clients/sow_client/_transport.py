"""A client's way to its server: the channel, whether it is connected, and how it is closed.

    [1]  A call to a server that is not there fails as Unavailable (UNREACHABLE) after about `connect_timeout` seconds,
         not after the call's own deadline: calls are made only on a channel that is connected.

`Transport` and `AioTransport` are written by hand. Threads and tasks differ here: gRPC reports the state of a blocking
channel on a thread of its own; an asynchronous channel is asked.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

import grpc
import grpc.aio

from sow_client._channel import (
    CheckedChannel,
    Tls,
    bearer,
    open_aio_channel,
    open_channel,
    proxy_variable,
    target,
)
from sow_client._statuses import EndedCall, closed, unreachable
from sow_client._tokens import Token

CLOSE_SECONDS_MAX: Final = 1.0
"""The longest time that an interrupted program waits for its connection to close."""
RECONNECT_SECONDS: Final = 0.5
"""Publishers and subscriptions repeat their attempts, so each attempt waits only this long for a connection. Closing a
publisher or a subscription may take as long."""
CAUSE_SECONDS_MAX: Final = 0.2
"""The longest time for the question why there is no connection."""

_ANY_METHOD: Final = "/grpc.health.v1.Health/Check"
"""Called on a channel that failed to connect. Such a call fails at once and names the cause: a refused connection, a
certificate that is not trusted. gRPC's interface offers no other way to learn the cause."""


class Transport:
    """The channel of a blocking client. A channel that the program brings is used as it is, and stays open."""

    def __init__(
        self,
        server: str,
        tls: Tls | None,
        connect_timeout: float,
        channel: grpc.Channel | None,
        token: Token | None = None,
    ) -> None:
        self.server = target(server)
        self.is_closed = False
        shown = None if channel is not None else bearer(token, self.server, tls)
        self.is_own = channel is None
        """The client opened the channel, watches it, and closes it."""
        self._channel = open_channel(self.server, tls) if channel is None else channel
        self._connection = Connection(self._channel, self.server, connect_timeout) if self.is_own else None
        self.calls = cast(grpc.Channel, CheckedChannel(self._channel, measured=self.is_own, bearer=shown))
        """The channel as the generated stubs get it."""

    def await_ready(self, seconds: float | None = None) -> None:
        """Returns once a call can be made. `seconds` and `connect_timeout` both bound the wait.

        Raises Unavailable (UNREACHABLE), or Cancelled (CLOSED) when the client is closed.
        """
        if self.is_closed:
            raise closed("client")
        if self._connection is not None:
            self._connection.await_ready(seconds)

    def close(self) -> None:
        """Closes the channel; calls in progress end."""
        self._stop_watching()
        if self.is_own:
            self._channel.close()

    def leave(self, error: BaseException | None) -> None:
        """Closes the channel at the end of a `with` block, which `error` may have ended.

        After Ctrl-C it waits no longer than `CLOSE_SECONDS_MAX`. Closing waits until each call has ended, and a
        KeyboardInterrupt between two lines of gRPC may leave a call whose end nobody reads. Closing would then take for
        ever, and the program could not be interrupted again.
        """
        if error is None or isinstance(error, Exception):
            self.close()
            return
        self._stop_watching()
        if self.is_own:
            thread = threading.Thread(target=self._channel.close, name="sow-close", daemon=True)
            thread.start()
            thread.join(CLOSE_SECONDS_MAX)

    def _stop_watching(self) -> None:
        self.is_closed = True
        if self._connection is not None:
            self._connection.close()


class AioTransport:
    """The channel of an asynchronous client. A channel that the program brings is used as it is, and stays open."""

    def __init__(
        self,
        server: str,
        tls: Tls | None,
        connect_timeout: float,
        channel: grpc.aio.Channel | None,
        token: Token | None = None,
    ) -> None:
        self.server = target(server)
        self.is_closed = False
        shown = None if channel is not None else bearer(token, self.server, tls)
        self.is_own = channel is None
        """The client opened the channel, and closes it."""
        self._channel = open_aio_channel(self.server, tls) if channel is None else channel
        self._connection = AioConnection(self._channel, self.server, connect_timeout) if self.is_own else None
        self.calls = cast(grpc.aio.Channel, CheckedChannel(self._channel, measured=self.is_own, bearer=shown))
        """The channel as the generated stubs get it."""

    async def await_ready(self, seconds: float | None = None) -> None:
        """As `Transport.await_ready`."""
        if self.is_closed:
            raise closed("client")
        if self._connection is not None:
            await self._connection.await_ready(seconds)

    async def close(self) -> None:
        """Closes the channel; calls in progress end."""
        self.is_closed = True
        if self.is_own:
            await self._channel.close()

    async def leave(self, error: BaseException | None) -> None:
        """Closes the channel at the end of an `async with` block, however it ended."""
        await self.close()


class Connection:
    """Knows whether a blocking channel is connected. gRPC reports changes on a thread of its own."""

    def __init__(self, channel: grpc.Channel, server: str, connect_timeout: float) -> None:
        self._channel = channel
        self._server = server
        self._timeout = connect_timeout
        self._changed = threading.Condition()
        self._state: grpc.ChannelConnectivity | None = None
        self._watching = False
        self._closed = False
        self._resting = False  # the connection was lost, and nobody has asked the channel to connect since

    def close(self) -> None:
        """Ends each wait for a connection, and stops watching. The channel may be closed afterwards."""
        with self._changed:
            self._closed = True
            watching, self._watching = self._watching, False
            self._changed.notify_all()
        if watching:
            self._channel.unsubscribe(self._observe)
            _await_unwatched(self._channel)

    def await_ready(self, seconds: float | None = None) -> None:
        """Returns once a call can be made.

        Raises Unavailable (UNREACHABLE) after `connect_timeout`, or after `seconds` if that is less; Cancelled (CLOSED)
        when the client is closed during the wait.
        """
        if self._state is grpc.ChannelConnectivity.READY:
            return
        with self._changed:
            if self._closed:
                raise closed("client")
            watching, self._watching = self._watching, True
            resting, self._resting = self._resting, False
            if not watching:
                self._channel.subscribe(self._observe, try_to_connect=True)
            elif resting:
                # A channel that lost its connection rests until it is asked to connect. Subscribing asks it.
                self._channel.subscribe(_ignore, try_to_connect=True)
                self._channel.unsubscribe(_ignore)
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        with self._changed:
            over = self._changed.wait_for(
                lambda: self._closed or self._state is grpc.ChannelConnectivity.READY, timeout
            )
            is_closed, has_failed = self._closed, self._state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        if is_closed:
            raise closed("client")
        if not over:
            cause = self._ask_for_cause() if has_failed else ""
            raise unreachable(self._server, timeout, cause, proxy=proxy_variable(self._server, os.environ))

    def _ask_for_cause(self) -> str:
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_ANY_METHOD)
            call(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return _cause(error)
        except ValueError:  # from gRPC: the channel was closed in the meantime
            pass
        return ""  # the channel is connected by now

    def _observe(self, state: grpc.ChannelConnectivity) -> None:
        with self._changed:
            self._resting = state is grpc.ChannelConnectivity.IDLE and self._state is not None
            self._state = state
            self._changed.notify_all()


def _ignore(state: grpc.ChannelConnectivity) -> None:
    """Does nothing: only the subscription matters."""


def _await_unwatched(channel: grpc.Channel) -> None:
    """Returns once gRPC's watching thread of a channel without subscribers has ended.

    The thread dies with `ValueError: Cannot invoke RPC: Channel closed!` when it finds the channel closed. Only a
    private attribute of gRPC tells when it has ended. Waiting here costs no time: closing would wait for that thread.
    """
    give_up = time.monotonic() + CLOSE_SECONDS_MAX
    while getattr(getattr(channel, "_connectivity_state", None), "polling", False) and time.monotonic() < give_up:
        time.sleep(0.002)


class AioConnection:
    """Knows whether an asynchronous channel is connected, by asking it."""

    def __init__(self, channel: grpc.aio.Channel, server: str, connect_timeout: float) -> None:
        self._channel = channel
        self._server = server
        self._timeout = connect_timeout

    async def await_ready(self, seconds: float | None = None) -> None:
        """As `Connection.await_ready`."""
        ready = grpc.ChannelConnectivity.READY
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        with unless_closed():
            if self._channel.get_state() is ready:
                return
            try:
                async with asyncio.timeout(timeout):
                    while (state := self._channel.get_state(try_to_connect=True)) is not ready:
                        await self._channel.wait_for_state_change(state)
            except TimeoutError as error:
                has_failed = self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
                cause = await self._ask_for_cause() if has_failed else ""
                raise unreachable(
                    self._server, timeout, cause, proxy=proxy_variable(self._server, os.environ)
                ) from error

    async def _ask_for_cause(self) -> str:
        try:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_ANY_METHOD)
            await call(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return _cause(error)
        return ""  # the channel is connected by now


def _cause(error: BaseException) -> str:
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


def task_is_cancelled() -> bool:
    """True when a CancelledError is meant for the current task. gRPC raises it also when only a call was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
