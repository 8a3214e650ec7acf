"""Whether the channel of a client is connected, and why it is not.

[1]  Whoever waits for a connection waits for `connect_timeout` at most, and is told the cause that gRPC names.
[2]  Closing ends each wait.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import grpc
import grpc.aio

from sow_client._channel import proxy_variable
from sow_client._statuses import EndedCall, closed, unreachable

CLOSE_SECONDS_MAX: Final = 1.0
"""The longest time that an interrupted program waits for its connection to close."""
CAUSE_SECONDS_MAX: Final = 0.2
"""The longest time for the question why there is no connection."""

HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
"""Called on a channel that failed to connect. Such a call fails at once and names the cause: a refused connection, a
certificate that is not trusted. gRPC's interface offers no other way to learn the cause."""


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
        self.connected = 0
        """How often it has been connected."""

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
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(HEALTH_CHECK)
            call(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return cause_of(error)
        except ValueError:  # from gRPC: the channel was closed in the meantime
            pass
        return ""  # the channel is connected by now

    def _observe(self, state: grpc.ChannelConnectivity) -> None:
        with self._changed:
            self._resting = state is grpc.ChannelConnectivity.IDLE and self._state is not None
            self.connected += state is grpc.ChannelConnectivity.READY
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
        self.connected = 0
        """How often it has been connected, as far as callers have noticed."""

    def close(self) -> None:
        """The channel's end ends each wait."""

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
                self.connected += 1
            except TimeoutError as error:
                has_failed = self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
                cause = await self._ask_for_cause() if has_failed else ""
                raise unreachable(
                    self._server, timeout, cause, proxy=proxy_variable(self._server, os.environ)
                ) from error

    async def _ask_for_cause(self) -> str:
        try:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(HEALTH_CHECK)
            await call(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return cause_of(error)
        return ""  # the channel is connected by now


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


def task_is_cancelled() -> bool:
    """True when a CancelledError is meant for the current task. gRPC raises it also when only a call was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
