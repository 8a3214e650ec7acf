"""Channels: address, TLS, the options of gRPC, and the calls that gRPC may repeat by itself.

[1]  gRPC repeats a call by itself only where a repetition changes nothing: reads, acknowledgements, and publishes,
     which carry a position (rule P6). A get that renews (rule L20) may do so twice. A touch or a delete whose
     connection breaks is reported as an error, because its outcome is not known.
[2]  The end of a channel waits until each of its calls has ended. An exception that a signal raises between two lines
     of gRPC may leave a call whose end nobody reads, and the wait takes for ever. So a channel of a blocking client is
     closed in a thread, and the program waits `CLOSE_SECONDS_MAX` at most. One that the program drops is closed in
     a thread for which nobody waits (_ends [1]).
[3]  In a forked child the streams of the parent raise FORKED, and nothing ends or drops them (_process [2]).
"""

from __future__ import annotations

import _thread
import asyncio
import ipaddress
import json
import os
import re
import ssl
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

import grpc
import grpc._channel
import grpc.aio

from sow_client import _ends, _process
from sow_client._records import invalid
from sow_client._statuses import MESSAGE_BYTES_MAX, closed, request_too_large
from sow_client._tokens import Bearer, Token
from sow_client.errors import FailedPrecondition

DEFAULT_PORT: Final = 7450
CONNECT_SECONDS: Final = 5.0
"""The wait for a connection, unless the program gives another one."""
DEFAULT_SERVER: Final = f"127.0.0.1:{DEFAULT_PORT}"
RECONNECT_BACKOFF_MS_MAX: Final = 200
"""A client looks for its server only when it needs it, and a server that is back should not look gone then: a first
call ends where connections were refused for REFUSED_SECONDS (rule F1)."""
KEEPALIVE_MS: Final = 30_000
"""A connection that is silent for this long while a call is open is probed. sow-server allows one probe in 5 s; gRPC
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
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def _service_config(attempts_max: int, *without: tuple[str, str]) -> str:
    return json.dumps(
        {
            "methodConfig": [
                {
                    "name": [{"service": name[0], "method": name[1]} for name in _REPEATABLE if name not in without],
                    "retryPolicy": _RETRY_POLICY | {"maxAttempts": attempts_max},
                }
            ]
        }
    )


SERVICE_CONFIG: Final = _service_config(5)
SERVICE_CONFIG_OF_MANY: Final = _service_config(2, (_SOW, "Publish"))
"""The configuration of a client with several addresses: the next one is nearer than a third attempt at this one. The
client has to know whether a publish was sent, and repeats it itself."""
CLOSE_SECONDS_MAX: Final = 1.0
"""The longest time that a program waits for its channels to close ([2])."""
IDLE_MS: Final = 5_000
"""A channel of several that has no calls for this long closes its connection."""

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
        """Reads the files. Raises InvalidArgument with the name of a file that cannot be used."""
        if (self.certificate is None) != (self.key is None):
            raise invalid("tls", "certificate and key must be given together")
        roots = _read(self.ca, "tls.ca")
        key = _read(self.key, "tls.key")
        certificate = _read(self.certificate, "tls.certificate")
        self._check()
        return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=certificate)

    def _check(self) -> None:
        """gRPC does not tell which file is at fault, only that the connection cannot be made."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("ALL:@SECLEVEL=0")  # gRPC decides which keys are too short
        if self.ca is not None:
            try:
                context.load_verify_locations(cafile=self.ca)
            except (ssl.SSLError, ValueError) as error:
                raise invalid("tls.ca", f"{os.fspath(self.ca)} holds no PEM certificates") from error
        if self.certificate is not None and self.key is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_password)
            except (ssl.SSLError, ValueError) as error:
                certificate, key = os.fspath(self.certificate), os.fspath(self.key)
                raise invalid(
                    "tls.key", f"{key} is no PEM key, without a password, of the certificate {certificate}"
                ) from error


def _no_password() -> str:
    """For a key with a password, which gRPC cannot use: without this, the terminal would be asked for it."""
    return ""


def _read(path: str | os.PathLike[str] | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(field, f"cannot read {os.fspath(path)}: {error.strerror}") from error


ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\[\]:/\s]+)(?::(?P<port>[0-9]{1,5}))?")


def target(server: str) -> str:
    """The address with its port: `HOST` means `HOST:7450`. Addresses with a gRPC scheme (`unix:`, `dns:///`) stay."""
    if server.startswith(("unix:", "dns:", "ipv4:", "ipv6:")):
        return server
    match = ADDRESS.fullmatch(server)
    if match is None or not 0 < int(match["port"] or DEFAULT_PORT) < 65_536:
        raise invalid("server", f"{server!r} is not HOST:PORT")
    return f"{match['host']}:{match['port'] or DEFAULT_PORT}"


def options(server: str, tls: Tls | None, *, host: str = "", of_many: bool = False) -> Options:
    """The options of a channel to `server`; both clients use the same.

    `host`: the name that `server` is one address of. `of_many`: the channel is one of several of its client.
    """
    result: Options = [
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.service_config", SERVICE_CONFIG_OF_MANY if of_many else SERVICE_CONFIG),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # A connection of its own: gRPC would share one among all clients of a process, and with it the server's bound
        # of calls on a connection (rule N4), so that the subscriptions of one client could stop another.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if of_many:
        result.append(("grpc.client_idle_timeout_ms", IDLE_MS))
    server_name = host if tls is None or tls.server_name is None else tls.server_name
    if tls is not None and server_name:
        result.append(("grpc.ssl_target_name_override", server_name))
        result.append(("grpc.default_authority", server_name))
    if is_local(server) or host:  # a name is looked up here only where no proxy looks it up
        # A connection to this machine needs no proxy, whatever http_proxy says; and a proxy would read its token.
        result.append(("grpc.enable_http_proxy", 0))
    return result


def proxy_variable(server: str, variables: Mapping[str, str]) -> str:
    """The variable that makes gRPC connect through a proxy; "": there is none, or it is not for this server."""
    match = ADDRESS.fullmatch(server)
    if match is None or is_local(server):
        return ""
    without = variables.get("no_grpc_proxy") or variables.get("no_proxy") or ""
    if any(match["host"].endswith(name.strip()) for name in without.split(",") if name.strip()):
        return ""
    return next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if variables.get(name)), "")


def open_channel(server: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.Channel:
    """A channel for the blocking client; it connects at the first call. Raises FailedPrecondition (FORKED)."""
    _process.uses_grpc()
    if threads_are_greenlets():
        from grpc.experimental.gevent import init_gevent  # lazily: it loads gevent

        # Else a greenlet that waits inside gRPC would stop all others, those among them that read for it. It may be
        # called again.
        init_gevent()
    if credentials is None:
        channel = grpc.insecure_channel(server, options=options)
    else:
        channel = grpc.secure_channel(server, credentials, options=options)
    _ends.ready()
    channel._call_state.__class__ = _Dropped  # type: ignore[attr-defined]  # gRPC offers no other way
    return channel


class _Dropped(grpc._channel._ChannelCallState):
    """The object by which gRPC closes a channel that was dropped. The channel itself may be gone by then."""

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else modules lose what they import, and the connection ends with the process
            _ends.hand_over(partial(_thread.start_new_thread, _inside, (super().__del__,)))


def close_aside(closings: Iterable[Callable[[], object]]) -> None:
    """Runs the ends of channels in threads of their own, and waits for them ([2]). At the end of the program, when no
    thread can be started any more, the connections end with the process."""
    give_up = time.monotonic() + CLOSE_SECONDS_MAX
    ends = []
    with suppress(RuntimeError):
        for close in closings:
            end = _thread.allocate_lock()
            end.acquire()
            _thread.start_new_thread(_close, (close, end))
            ends.append(end)
    for end in ends:
        end.acquire(timeout=max(0.0, give_up - time.monotonic()))


def _inside(end: Callable[[], object]) -> None:
    with _process.inside_grpc():  # a fork meanwhile knows of it, as of other threads in gRPC
        end()


def _close(close: Callable[[], object], end: _thread.LockType) -> None:
    try:
        _inside(close)
    finally:
        end.release()


def aio_open_channel(server: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.aio.Channel:
    """A channel for the asynchronous client; it connects at the first call. Raises FailedPrecondition (GEVENT)."""
    if threads_are_greenlets():
        raise FailedPrecondition(
            "gevent has replaced threads by greenlets, in which gRPC's part for asyncio never ends: use Client",
            reason="GEVENT",
        )
    return cast(grpc.aio.Channel, _AioChannel(server, credentials, options))


class _AioChannel:
    """A channel that is opened by its first call. gRPC binds a channel to an event loop when it is made, and where none
    runs it takes another one than that of the calls."""

    def __init__(self, server: str, credentials: grpc.ChannelCredentials | None, options: Options) -> None:
        self._opening = partial(_aio_open, server, credentials, options)
        self._channel: grpc.aio.Channel | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._channel is None:
            asyncio.get_running_loop()  # raises RuntimeError where none runs
            self._channel = self._opening()
        return getattr(self._channel, name)

    async def close(self) -> None:
        """As gRPC's."""
        if self._channel is not None:
            await self._channel.close()


def _aio_open(server: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.aio.Channel:
    _process.uses_grpc(asynchronous=True)
    if credentials is None:
        return grpc.aio.insecure_channel(server, options=options)
    return grpc.aio.secure_channel(server, credentials, options=options)


def threads_are_greenlets() -> bool:
    """The program has called gevent's `monkey.patch_all`, or the part of it for threads."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and monkey.is_module_patched("threading")


def credentials_of(tls: Tls | None) -> grpc.ChannelCredentials | None:
    """Reads the files of TLS; None: plain text. Raises InvalidArgument."""
    if tls is None:
        return None
    if not isinstance(tls, Tls):
        raise invalid("tls", f'expected Tls(ca="ca.pem"), or Tls() for the system\'s authorities, found {tls!r}')
    return tls.credentials()


_Call: TypeAlias = Callable[..., Any]


def bearer(token: Token | None, server: str, tls: Tls | None) -> Bearer | None:
    """The bearer of a token for a server. Raises InvalidArgument where anybody in between could read it."""
    if token is None:
        return None
    if tls is None and not is_local(server):
        raise invalid(
            "token",
            f"goes to another machine, {server}, over TLS only: give the authority of its certificate "
            "(Tls(ca=...), --tls-ca, SOW_TLS_CA)",
        )
    return Bearer(token)


def is_local(server: str) -> bool:
    if server.startswith("unix:"):
        return True
    match = ADDRESS.fullmatch(server)
    host = "" if match is None else match["host"].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_SERVER_VARIABLE: Final = "SOW_SERVER"
_TOKEN_VARIABLE: Final = "SOW_TOKEN_FILE"
_TLS_VARIABLES: Final = ("SOW_TLS_CA", "SOW_TLS_CERT", "SOW_TLS_KEY", "SOW_TLS_SERVER_NAME")


class Named(NamedTuple):
    """A server and the credentials for it, as the environment names them."""

    server: str
    tls: Tls | None
    token: Path | None


def from_environment(variables: Mapping[str, str]) -> Named:
    """Server, TLS and file of the token, as the variables of the command `sow` name them. An empty one is none."""
    ca, certificate, key, server_name = (variables.get(name) or None for name in _TLS_VARIABLES)
    tls = Tls(ca, certificate, key, server_name) if ca or certificate or key or server_name else None
    token = variables.get(_TOKEN_VARIABLE)
    return Named(variables.get(_SERVER_VARIABLE) or DEFAULT_SERVER, tls, Path(token) if token else None)


PREFER_VARIABLE: Final = "SOW_PREFER"
FAILOVER_PUBLISH_VARIABLE: Final = "SOW_FAILOVER_PUBLISH"


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
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed_error = ValueError if isinstance(channel, grpc.Channel) else ()

    def unary_unary(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's."""
        return self._checked(self._channel.unary_unary(*arguments, **named), one_request=True)

    def unary_stream(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's."""
        return self._streamed(self._checked(self._channel.unary_stream(*arguments, **named), one_request=True))

    def stream_stream(self, *arguments: Any, **named: Any) -> _Call:
        """As gRPC's. The maker of a stream's requests checks their size: an error here would end the stream."""
        return self._streamed(self._checked(self._channel.stream_stream(*arguments, **named), one_request=False))

    def _streamed(self, method: _Call) -> _Call:
        kind = _ends.Stream if isinstance(self._channel, grpc.Channel) else AioStream

        def call(request: Any, timeout: float | None = None) -> Any:
            stream = kind(method(request, timeout=timeout))
            self._streams.add(stream)
            return stream

        return call

    @property
    def open_streams(self) -> int:
        """Calls with a stream of answers that have not ended."""
        return sum(not stream.done() for stream in list(self._streams))

    def _checked(self, method: _Call, *, one_request: bool) -> _Call:
        measured, closed_error, bearer = self._measured and one_request, self._closed_error, self._bearer

        thread, inside = threading.get_ident, _process.inside

        def call(request: Any, timeout: float | None = None) -> Any:
            if measured and (size := request.ByteSize()) > MESSAGE_BYTES_MAX:
                raise request_too_large(size)
            inside.add(me := thread())
            try:
                if bearer is None:
                    return method(request, timeout=timeout)
                return method(request, timeout=timeout, metadata=bearer.metadata())
            except closed_error as error:
                raise closed("client") from error
            finally:
                inside.discard(me)

        return call


class AioStream:
    """A call of asyncio with a stream of answers, of the process that made it ([3])."""

    def __init__(self, call: Any) -> None:
        self._call = call
        _process.tell(self)

    def _forked(self) -> None:
        _process.keep(self._call)
        self._call = _process.ParentsCall()

    def cancel(self) -> object:
        """As gRPC's."""
        return self._call.cancel()

    def done(self) -> bool:
        """As gRPC's."""
        return bool(self._call.done())

    def __aiter__(self) -> AioStream:
        return self

    async def __anext__(self) -> Any:
        response = await self._call.read()
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return response

    async def read(self) -> Any:
        """As gRPC's."""
        return await self._call.read()
