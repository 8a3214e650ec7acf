"""Channels: address, TLS, the options of gRPC, and the calls that gRPC may repeat by itself.

[1]  gRPC repeats a call by itself only where a repetition changes nothing: reads, acknowledgements, and publishes,
     which carry a position (rule P6). A touch or a delete whose connection breaks is reported as an error, because
     its outcome is not known.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from sow_client._records import invalid
from sow_client._statuses import MESSAGE_BYTES_MAX, closed, request_too_large

DEFAULT_PORT: Final = 7450
DEFAULT_SERVER: Final = f"127.0.0.1:{DEFAULT_PORT}"
RECONNECT_BACKOFF_MS_MAX: Final = 2_000
KEEPALIVE_MS: Final = 30_000
"""A connection that is silent for this long while a call is open is probed. sow-server allows one probe in 10 s; gRPC
servers with default settings end the connection at more than one in 300 s."""
KEEPALIVE_TIMEOUT_MS: Final = 15_000
"""An unanswered probe, or data that the server's machine does not accept, breaks the connection after this time."""

_SOW: Final = "sow.v1.SowService"
_ADMIN: Final = "sow.v1.AdminService"
_SNAPSHOT: Final = "sow.v1.SnapshotService"
_LOAD: Final = "sow.v1.LoadService"
_ACCESS: Final = "sow.v1.AccessService"
# Calls with one answer only: a stream that gRPC repeats when the server dies under it may never end (gRPC 1.85). The
# clients repeat queries themselves.
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
    (_ACCESS, "WhoAmI"),
    (_ACCESS, "CheckAccess"),
    (_ACCESS, "ListSessions"),
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
    """TLS to the server: PEM files. With `certificate` and `key` the client proves its identity (mutual TLS)."""

    ca: str | os.PathLike[str] | None = None
    """Certificates to trust; None: the system's."""
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None
    """The name in the server's certificate, when it differs from the host in the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises InvalidArgument with the name of a file that cannot be read."""
        if (self.certificate is None) != (self.key is None):
            raise invalid("tls", "certificate and key must be given together")
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
    """The address with its port: `HOST` means `HOST:7450`. Addresses with a gRPC scheme (`unix:`, `dns:///`) stay."""
    if server.startswith(("unix:", "dns:", "ipv4:", "ipv6:")):
        return server
    match = _ADDRESS.fullmatch(server)
    if match is None or not 0 < int(match["port"] or DEFAULT_PORT) < 65_536:
        raise invalid("server", f"{server!r} is not HOST:PORT")
    return f"{match['host']}:{match['port'] or DEFAULT_PORT}"


def options(server: str, tls: Tls | None) -> Options:
    """The options of a channel to `server`; both clients use the same."""
    result: Options = [
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.service_config", SERVICE_CONFIG),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # A connection of its own: gRPC would share one among all clients of a process, and with it the server's bound
        # of calls on a connection (rule N4), so that the subscriptions of one client could stop another.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is not None and tls.server_name is not None:
        result.append(("grpc.ssl_target_name_override", tls.server_name))
        result.append(("grpc.default_authority", tls.server_name))
    if server.startswith(("127.", "localhost:", "[::1]:")):
        # A connection to this machine needs no proxy, whatever http_proxy says.
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


Token: TypeAlias = "str | os.PathLike[str] | Callable[[], str]"
"""A bearer token: the text itself, a file that holds it, or a function that gives it. A file is read again when it has
changed, and a function is called before each call: so a token can be renewed while the client runs."""


class Bearer:
    """Gives the metadata that shows a token."""

    def __init__(self, token: Token) -> None:
        self._token = token
        self._stamp: tuple[int, int] | None = None
        self._read = ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of the next call. Raises InvalidArgument if the file cannot be read."""
        return (("authorization", f"Bearer {self._text()}"),)

    def _text(self) -> str:
        if isinstance(self._token, str):
            return self._token
        if callable(self._token):
            return self._token()
        path = Path(self._token)
        try:
            state = path.stat()
            stamp = (state.st_mtime_ns, state.st_ino)
            if stamp != self._stamp:
                if state.st_mode & 0o077:
                    raise invalid("token", f"other users may read {path}; run: chmod 600 {path}")
                self._read = path.read_text(encoding="utf-8").strip()
                self._stamp = stamp
        except OSError as error:
            raise invalid("token", f"cannot read {path}: {error.strerror}") from error
        return self._read


def bearer(token: Token | None, server: str, tls: Tls | None) -> Bearer | None:
    """The bearer of a token for a server. Raises InvalidArgument where anybody in between could read it."""
    if token is None:
        return None
    if tls is None and not _is_local(server):
        raise invalid("token", f"is not sent in plain text to {server}, which is on another machine: set tls")
    found = Bearer(token)
    if not callable(token):
        found.metadata()  # a file that cannot be read is told at once
    return found


def _is_local(server: str) -> bool:
    if server.startswith("unix:"):
        return True
    match = _ADDRESS.fullmatch(server)
    host = "" if match is None else match["host"].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_Call: TypeAlias = Callable[..., Any]


class CheckedChannel:
    """A channel for the generated stubs. Each call first checks for two mistakes that gRPC reports less clearly.

    A request above the size limit of messages is refused before it is sent: programs would retry gRPC's own
    RESOURCE_EXHAUSTED. A blocking channel that is closed already raises Cancelled (CLOSED) instead of ValueError.
    """

    def __init__(
        self, channel: grpc.Channel | grpc.aio.Channel, *, measured: bool, bearer: Bearer | None = None
    ) -> None:
        """`measured`: check the size of requests. False for a channel of the program's, which has its own limit.
        `bearer`: the token that each call shows."""
        self._channel = channel
        self._bearer = bearer
        self._measured = measured
        self._closed_error = ValueError if isinstance(channel, grpc.Channel) else ()

    def unary_unary(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's."""
        return self._checked(self._channel.unary_unary(*arguments, **named), one_request=True)

    def unary_stream(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's."""
        return self._checked(self._channel.unary_stream(*arguments, **named), one_request=True)

    def stream_stream(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's. The maker of a stream's requests checks their size: an error here would end the stream."""
        return self._checked(self._channel.stream_stream(*arguments, **named), one_request=False)

    def _checked(self, method: _Call, *, one_request: bool) -> _Call:
        measured, closed_error, bearer = self._measured and one_request, self._closed_error, self._bearer

        def call(request: Any, timeout: float | None = None) -> Any:
            if measured and (size := request.ByteSize()) > MESSAGE_BYTES_MAX:
                raise request_too_large(size)
            try:
                if bearer is None:
                    return method(request, timeout=timeout)
                return method(request, timeout=timeout, metadata=bearer.metadata())
            except closed_error as error:
                raise closed("client") from error

        return call
