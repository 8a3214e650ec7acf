"""The addresses that the server listens on: one gRPC server for each, all with the same services behind them.

[1]  A handler knows by which listener a call came, because handlers are registered for each listener separately.
[2]  All ports are bound before any of them serves: a start that is refused has answered nobody.
[3]  Bounds hold for each listener by itself, so that clients of one cannot use up the calls of another.
[4]  A connection can use up its own streams alone. A client that opens more of them than it may, or opens and
     resets them without end, has them refused before they become calls.
[5]  A new connection sees the certificates that are in the files by then (`certificates`).
[6]  Connections leave files for the store, which could not write without them. Those that say nothing end soon.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias

import grpc

from sow_server.access.failed_attempts import HELD_MAX
from sow_server.certificates import CertificateFault, CertificateSet, EndpointCertificates, Expiry
from sow_server.config import Config, ListenerConfig, ServerConfig
from sow_server.engine.values.model import MICROS
from sow_server.services.door.capacity import RESERVED_CALLS

Register: TypeAlias = Callable[[grpc.aio.Server, ListenerConfig], None]
"""Adds the handlers to the server of a listener."""

LOOK_SECONDS: Final = 60.0
"""How often certificates are looked at for the log and the metrics; each new connection looks, too."""
HANDSHAKE_MS: Final = 10_000
"""How long a client may take for TLS and the preface of HTTP/2."""
PING_MS_MIN: Final = 5_000
"""A client may ask once in this time whether the connection is alive. Peers ask every 10 s, clients less often."""
FILES_MAX: Final = 1_000_000
"""Where the system has no limit of open files."""
_IDENTITY_ALONE: Final = 1
_MILLI: Final = MICROS // 1000


class ListeningError(Exception):
    """An address or its certificates cannot be used: one message with the reason."""


class Listeners:
    """Owns the gRPC servers. The methods are to be called in the order bind, start, stop."""

    def __init__(self, config: Config, register: Register, *, link_bytes_max: int) -> None:
        """`link_bytes_max`: the largest message between instances; 0: there are none. Raises ListeningError."""
        self._listeners = tuple(
            _Listener.of(listener, config, register, link_bytes_max) for listener in config.listeners
        )
        self._looking: asyncio.Task[None] | None = None

    def bind(self) -> tuple[str, ...]:
        """Opens all ports ([2]); returns the addresses, with the actual ports. Raises ListeningError."""
        return tuple(listener.bind() for listener in self._listeners)

    async def start(self) -> None:
        """Serves from now on."""
        for listener in self._listeners:
            await listener.server.start()
        self._looking = asyncio.create_task(self._look())

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls on all addresses, and ends those that still run after `grace_seconds`."""
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*(listener.server.stop(grace_seconds) for listener in self._listeners))

    def expiries(self) -> Iterator[tuple[str, Expiry]]:
        """Each file with certificates that are in use, with the address that uses it."""
        for listener in self._listeners:
            if listener.certificates is not None:
                for expiry in listener.certificates.current.expiries:
                    yield listener.config.listen, expiry

    async def _look(self) -> None:
        while True:
            for listener in self._listeners:
                if listener.certificates is not None:
                    listener.certificates.refresh()
            await asyncio.sleep(LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class _Listener:
    config: ListenerConfig
    server: grpc.aio.Server
    certificates: EndpointCertificates | None

    @classmethod
    def of(cls, config: ListenerConfig, whole: Config, register: Register, link_bytes_max: int) -> _Listener:
        message_bytes_max = (link_bytes_max if config.links else 0) or whole.limits.message_bytes_max
        server = grpc.aio.server(
            options=options(config, whole.server, message_bytes_max, connections_of(len(whole.listeners))),
            # A call is refused by its method and its caller, so that health and administrators have places of their
            # own; here all are stopped, for the case that calls come faster than they are refused.
            maximum_concurrent_rpcs=(config.max_concurrent_rpcs or whole.server.max_concurrent_rpcs)
            + RESERVED_CALLS
            + HELD_MAX,
        )
        register(server, config)
        try:
            certificates = None if config.files is None else EndpointCertificates(config.files, config.listen, _now)
        except CertificateFault as fault:
            raise ListeningError(f"cannot listen on {config.listen}: {fault.key}: {fault}") from fault
        return cls(config, server, certificates)

    def bind(self) -> str:
        listen = self.config.listen
        try:
            port = (
                self.server.add_insecure_port(listen)
                if self.certificates is None
                else self.server.add_secure_port(listen, credentials(self.certificates))
            )
        except RuntimeError:
            port = 0
        if port == 0:
            raise ListeningError(
                f"cannot listen on {listen}: perhaps the port is taken, or the address is not of this machine"
            )
        return f"{listen.rpartition(':')[0]}:{port}"


def connections_of(listeners: int) -> int:
    """The connections that each of so many listeners may have, if the configuration does not say: half of the files
    that the process may open are for all of them together [6]. Also allows the process as many files as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    return max(1, files // 2 // listeners)


def options(
    listener: ListenerConfig, server: ServerConfig, message_bytes_max: int, connections_max: int | None = None
) -> Sequence[tuple[str, int]]:
    """The options of gRPC for a listener. `connections_max`: the bound if the configuration has none."""
    found = [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        # A client that vanished without a word holds a cut or a stream open: it is asked every minute.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # A client asks, too, while it waits for an answer. By gRPC's default of five minutes the fourth time would end
        # its connection, and all its calls with it.
        ("grpc.http2.min_ping_interval_without_data_ms", PING_MS_MIN),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail instead of sharing it
        ("grpc.max_concurrent_streams", server.streams_per_connection_max),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # Streams that were reset count until their calls are gone, and beyond the bound new ones are refused at once.
        # It is gRPC's default, without which the bound is of no use against resets ([4]); so it is written here.
        ("grpc.http.overload_protection", 1),
    ]
    if not server.compression:
        # One byte of a compressed message may become a thousand in memory, before any bound of ours sees it.
        found.append(("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ALONE))
    connections_max = listener.max_connections or server.max_connections or connections_max
    if connections_max is not None:
        found.append(("grpc.max_allowed_incoming_connections", connections_max))
    if server.max_connection_age_micros is not None:
        found.append(("grpc.max_connection_age_ms", server.max_connection_age_micros // _MILLI))
        found.append(("grpc.max_connection_age_grace_ms", server.max_connection_age_grace_micros // _MILLI))
    return found


def credentials(certificates: EndpointCertificates) -> grpc.ServerCredentials:
    """Credentials that follow the files: gRPC asks before each TLS handshake, on a thread of its own ([5])."""
    used = certificates.current

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        found = certificates.refresh()
        if found is used:
            return None  # no change
        used = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        newer,  # type: ignore[arg-type]  # the stubs do not know that None means no change
        require_client_authentication=used.authorities is not None,
    )


def _configuration(found: CertificateSet) -> grpc.ServerCertificateConfiguration:
    authorities = None if found.authorities is None else found.authorities.pem
    return grpc.ssl_server_certificate_configuration([(found.pair.key, found.pair.certificate)], authorities)


def _now() -> datetime:
    return datetime.now(UTC)
