"""Connections: the channel's options, TLS, which calls gRPC itself may retry, and how long to wait for a server.

Guarantees:

C1  A call on a server that is not there fails as Unavailable (UNREACHABLE) after about `connect_timeout` seconds, not
    after the call's own deadline: no call is made before there is a connection, and none waits for one.
C2  gRPC repeats a call by itself only where doing it twice is doing it once: reads, acknowledgements, and publishes,
    which carry a position (rule P6). A touch or a delete whose connection breaks is reported: its outcome is not known.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from sow_client._core import MESSAGE_BYTES_MAX, EndedCall, closed, request_too_large, unreachable
from sow_client._records import invalid

DEFAULT_PORT: Final = 7450
RECONNECT_BACKOFF_MS_MAX: Final = 2_000
KEEPALIVE_MS: Final = 30_000
"""A connection without a sign of life for this long, while a call is open, is probed. sow-server allows one probe in
10 s; servers of gRPC that are not told otherwise end the connection at more than one in 300 s."""
KEEPALIVE_TIMEOUT_MS: Final = 15_000
"""An unanswered probe, or data that the other machine does not take, breaks the connection after this time."""
CLOSE_SECONDS_MAX: Final = 1.0
"""How long an interrupted program waits for its connection to close."""
RECONNECT_SECONDS: Final = 0.5
"""How long publishers and subscriptions, which try again and again, wait for a connection in one attempt: closing one
may take that long."""
CAUSE_SECONDS_MAX: Final = 0.2
"""How long may be asked why there is no connection."""

_SOW: Final = "sow.v1.SowService"
_ADMIN: Final = "sow.v1.AdminService"
_SNAPSHOT: Final = "sow.v1.SnapshotService"
_LOAD: Final = "sow.v1.LoadService"
# Calls with one answer only: a stream that gRPC makes again when the server dies under it may never end (1.85). Queries
# are made again by the clients themselves.
_REPEATABLE: Final = (
    (_SOW, "Publish"),
    (_SOW, "Get"),
    (_SOW, "GetPublisher"),
    (_SOW, "Acknowledge"),
    (_SNAPSHOT, "RenewExport"),
    (_SNAPSHOT, "CloseExport"),
    (_ADMIN, "ListTopics"),
    (_ADMIN, "DescribeTopic"),
    (_ADMIN, "GetStatus"),
    (_ADMIN, "GetReplicationStatus"),
    (_ADMIN, "ListPolicies"),
    (_ADMIN, "GetPolicy"),
    (_ADMIN, "ListDurables"),
    (_ADMIN, "DescribeDurable"),
    (_LOAD, "GetLoad"),
    (_LOAD, "ListLoads"),
    (_LOAD, "RenewLoad"),
    (_LOAD, "AbortLoad"),
)
_RETRY_POLICY: Final = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
SERVICE_CONFIG: Final = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": service, "method": method} for service, method in _REPEATABLE],
                "retryPolicy": _RETRY_POLICY,
            }
        ]
    }
)

Options: TypeAlias = list[tuple[str, str | int]]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS towards the server: PEM files. With `certificate` and `key` the client shows who it is (mutual TLS)."""

    ca: str | os.PathLike[str] | None = None
    """Certificates to trust; None: those of the system."""
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None
    """The name that the server's certificate must carry, when it is not the address's."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises InvalidArgument naming the file that cannot be read."""
        if (self.certificate is None) != (self.key is None):
            raise invalid("tls", "certificate and key come together")
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca, "tls.ca"),
            private_key=_read(self.key, "tls.key"),
            certificate_chain=_read(self.certificate, "tls.certificate"),
        )


def _read(path: str | os.PathLike[str] | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(field, f"cannot read {os.fspath(path)}: {error.strerror}") from error


_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\[\]:/\s]+)(?::(?P<port>[0-9]{1,5}))?")


def target(server: str) -> str:
    """The address with its port: `HOST` stands for `HOST:7450`. gRPC's own schemes (`unix:`, `dns:///`) pass."""
    if server.startswith(("unix:", "dns:", "ipv4:", "ipv6:")):
        return server
    match = _ADDRESS.fullmatch(server)
    if match is None or not 0 < int(match["port"] or DEFAULT_PORT) < 65_536:
        raise invalid("server", f"{server!r} is not HOST:PORT")
    return f"{match['host']}:{match['port'] or DEFAULT_PORT}"


def options(server: str, tls: Tls | None) -> Options:
    """Options of a channel to `server`, the same for both clients."""
    result: Options = [
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.service_config", SERVICE_CONFIG),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ]
    if tls is not None and tls.server_name is not None:
        result.append(("grpc.ssl_target_name_override", tls.server_name))
        result.append(("grpc.default_authority", tls.server_name))
    if server.startswith(("127.", "localhost:", "[::1]:")):
        # No proxy leads to this machine, whatever http_proxy says.
        result.append(("grpc.enable_http_proxy", 0))
    return result


def open_channel(server: str, tls: Tls | None) -> grpc.Channel:
    """A channel for the blocking client; it connects at the first call."""
    if tls is None:
        return grpc.insecure_channel(server, options=options(server, tls))
    return grpc.secure_channel(server, tls.credentials(), options=options(server, tls))


def open_aio_channel(server: str, tls: Tls | None) -> grpc.aio.Channel:
    """A channel for the asynchronous client; it connects at the first call."""
    if tls is None:
        return grpc.aio.insecure_channel(server, options=options(server, tls))
    return grpc.aio.secure_channel(server, tls.credentials(), options=options(server, tls))


def close_interrupted(channel: grpc.Channel) -> None:
    """Closes a channel after Ctrl-C, and waits for that no longer than `CLOSE_SECONDS_MAX`.

    Closing waits until each call has ended. A KeyboardInterrupt that comes between two lines of gRPC may leave a call
    that nobody reads the end of: then closing would take for ever, and the program could not be interrupted again.
    """
    thread = threading.Thread(target=channel.close, name="sow-close", daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS_MAX)


_ANY_METHOD: Final = "/grpc.health.v1.Health/Check"
"""Called on a channel that has failed to connect. Such a call fails at once and says why: a refused connection, a
certificate that is not trusted. Nothing else in gRPC's interface tells that."""


def _cause(error: BaseException) -> str:
    """What the call on a channel without a connection tells."""
    if not isinstance(error, EndedCall) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return ""
    return (error.details() or "").rpartition("last error: ")[2]


_Call: TypeAlias = Callable[..., Any]


class Calls:
    """A channel as the generated stubs are given it: each call checks first what gRPC would say less clearly.

    A request that is larger than a message may be is refused before it is sent: gRPC's RESOURCE_EXHAUSTED is one that
    programs retry. A blocking channel that was closed since is told as CLOSED: gRPC raises ValueError.
    """

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel, *, measured: bool) -> None:
        """`measured`: whether the limit is the channel's; one that the program brings has a limit of its own."""
        self._channel = channel
        self._measured = measured
        self._closed_error = ValueError if isinstance(channel, grpc.Channel) else ()

    def unary_unary(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's."""
        return self._checked(self._channel.unary_unary(*arguments, **named), one_request=True)

    def unary_stream(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's."""
        return self._checked(self._channel.unary_stream(*arguments, **named), one_request=True)

    def stream_stream(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's. Requests of a stream are measured by who makes them: an error in between would end the stream."""
        return self._checked(self._channel.stream_stream(*arguments, **named), one_request=False)

    def _checked(self, method: _Call, *, one_request: bool) -> _Call:
        measured, closed_error = self._measured and one_request, self._closed_error

        def call(request: Any, timeout: float | None = None) -> Any:
            if measured and (size := request.ByteSize()) > MESSAGE_BYTES_MAX:
                raise request_too_large(size)
            try:
                return method(request, timeout=timeout)
            except closed_error as error:
                raise closed("client") from error

        return call


class Connection:
    """Knows whether the blocking client's channel is connected (C1). gRPC reports changes on a thread of its own."""

    def __init__(self, channel: grpc.Channel, server: str, connect_timeout: float) -> None:
        self._channel = channel
        self._server = server
        self._timeout = connect_timeout
        self._changed = threading.Condition()
        self._state: grpc.ChannelConnectivity | None = None
        self._watching = False
        self._closed = False
        self._resting = False  # it has lost its connection and nobody has told it to connect

    def close(self) -> None:
        """Ends all waiting for a connection, and the watching: after this the channel may be closed."""
        with self._changed:
            self._closed = True
            watching, self._watching = self._watching, False
            self._changed.notify_all()
        if watching:
            self._channel.unsubscribe(self._observe)
            _await_unwatched(self._channel)

    def await_ready(self, seconds: float | None = None) -> None:
        """Returns once a call can be made. Raises Unavailable (UNREACHABLE) after `connect_timeout`, or `seconds` if
        that is less; Cancelled (CLOSED) when it is closed meanwhile."""
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
                # A channel that lost its connection rests until it is told to connect; subscribing is how one tells it.
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
            raise unreachable(self._server, timeout, self._ask_for_cause() if has_failed else "")

    def _ask_for_cause(self) -> str:
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_ANY_METHOD)
            call(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return _cause(error)
        except ValueError:  # how gRPC says that the channel was closed since
            pass
        return ""  # it has come about

    def _observe(self, state: grpc.ChannelConnectivity) -> None:
        with self._changed:
            self._resting = state is grpc.ChannelConnectivity.IDLE and self._state is not None
            self._state = state
            self._changed.notify_all()


def _ignore(state: grpc.ChannelConnectivity) -> None:
    """Only its subscription matters."""


def _await_unwatched(channel: grpc.Channel) -> None:
    """Returns once gRPC's thread that watches a channel nobody is subscribed to has ended.

    It dies with `ValueError: Cannot invoke RPC: Channel closed!` when it finds the channel closed. gRPC does not tell
    when it has ended but in an attribute of its own. It costs no time: closing would wait for its last look instead.
    """
    give_up = time.monotonic() + CLOSE_SECONDS_MAX
    while getattr(getattr(channel, "_connectivity_state", None), "polling", False) and time.monotonic() < give_up:
        time.sleep(0.002)


class AioConnection:
    """The same for the asynchronous client."""

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
                raise unreachable(self._server, timeout, await self._ask_for_cause() if has_failed else "") from error

    async def _ask_for_cause(self) -> str:
        try:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_ANY_METHOD)
            await call(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return _cause(error)
        return ""  # it has come about


@contextmanager
def unless_closed() -> Iterator[None]:
    """Raises Cancelled (CLOSED) where gRPC says that an asynchronous channel was closed since: by a UsageError, and to
    those who wait for a call by a CancelledError, which they would take for an end of their own."""
    try:
        yield
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        if task_is_cancelled():
            raise
        raise closed("client") from error


def task_is_cancelled() -> bool:
    """Whether a CancelledError is meant for the present task. gRPC raises it also where only a call was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
