"""gRPC servers on several addresses: their bounds, and certificates that are replaced while they serve."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

import sow_client._channel
import sow_server
from sow_server.certificates import EndpointCertificates
from sow_server.config import Config, ListenerAuth, ListenerConfig, ServerConfig
from sow_server.dialling import KEEPALIVE_MS
from sow_server.engine.values.model import MICROS
from sow_server.listening import FILES_MAX, Listeners, ListeningError, connections_of, options
from sow_server.revocations import Revocations
from tests.support.servers.certificates import DAY, Authority, Issued, replace
from tests.support.servers.server import free_port

MIB = 2**20
SECONDS = 20
ANY = "127.0.0.1:0"

Context = grpc.aio.ServicerContext[Any, Any]


def register(server: grpc.aio.Server, listener: ListenerConfig) -> None:
    """Two methods: one tells by which listener the call came, one whether the caller's certificate is revoked."""
    revocations = None
    if listener.revoked is not None and listener.client_ca is not None:
        revocations = Revocations(listener.revoked, listener.client_ca)

    async def where(request: bytes, context: Context) -> bytes:
        return listener.auth.value.encode()

    async def revoked(request: bytes, context: Context) -> bytes:
        assert revocations is not None
        (pem,) = context.auth_context()["x509_pem_cert"]
        return b"revoked" if revocations.is_revoked(pem) else b"fine"

    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Where": grpc.unary_unary_rpc_method_handler(where),
        "Revoked": grpc.unary_unary_rpc_method_handler(revoked),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", methods),))


@asynccontextmanager
async def serving(
    *listeners: ListenerConfig, server: ServerConfig | None = None, link_bytes_max: int = 0
) -> AsyncIterator[tuple[str, ...]]:
    """Serves on the addresses that it gives."""
    config = Config(server=server or ServerConfig(), listener_tables=listeners)
    made = Listeners(config, register, link_bytes_max=link_bytes_max)
    addresses = made.bind()
    await made.start()
    try:
        yield addresses
    finally:
        await made.stop(0)


def credentials(authority: Authority, client: Issued | None = None) -> grpc.ChannelCredentials:
    if client is None:
        return grpc.ssl_channel_credentials(authority.file.read_bytes())
    return grpc.ssl_channel_credentials(authority.file.read_bytes(), client.key.read_bytes(), client.pem)


def channel(address: str, shown: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel with a connection of its own."""
    own = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 * MIB))
    if shown is None:
        return grpc.aio.insecure_channel(address, own)
    return grpc.aio.secure_channel(address, shown, own)


def method(over: grpc.aio.Channel, name: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    return over.unary_unary(f"/t.T/{name}")


async def call(over: grpc.aio.Channel, name: str = "Where", request: bytes = b"") -> str:
    """The answer to a call, or the name of the status that it ends with."""
    try:
        answer = await method(over, name)(request, timeout=SECONDS)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return answer.decode()


async def once(address: str, shown: grpc.ChannelCredentials | None = None, name: str = "Where") -> str:
    async with channel(address, shown) as over:
        return await call(over, name)


async def shown_by(address: str) -> bytes:
    """The certificate that a new connection sees."""
    host, _, port = address.rpartition(":")
    pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
    return ssl.PEM_cert_to_DER_cert(pem)


def der(issued: Issued) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.pem.decode())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


# --- addresses -------------------------------------------------------------------------------------------------------


def test_handlers_know_by_which_listener_a_call_came(authority: Authority) -> None:
    server, client = authority.issue("server"), authority.issue("client")

    async def run() -> list[str]:
        mutual = ListenerConfig(ANY, ListenerAuth.CERTIFICATE, server.certificate, server.key, authority.file)
        async with serving(ListenerConfig(ANY), mutual) as (plain, safe):
            assert plain != safe
            return [
                await once(plain),
                await once(safe, credentials(authority, client)),
                await once(safe, credentials(authority)),
                await once(safe),
            ]

    assert asyncio.run(run()) == ["none", "certificate", "UNAVAILABLE", "UNAVAILABLE"]


@pytest.mark.slow
def test_nothing_is_served_while_a_port_is_taken() -> None:
    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address, free = f"127.0.0.1:{taken.getsockname()[1]}", f"127.0.0.1:{free_port()}"
            config = Config(listener_tables=(ListenerConfig(free), ListenerConfig(address)))
            listeners = Listeners(config, register, link_bytes_max=0)
            with pytest.raises(ListeningError, match=f"cannot listen on {address}"):
                listeners.bind()
            async with channel(free) as over:
                with pytest.raises(grpc.aio.AioRpcError):
                    await method(over, "Where")(b"", timeout=0.5)

    asyncio.run(run())


def test_a_certificate_that_was_broken_since_the_check_is_named(authority: Authority) -> None:
    server = authority.issue("server")
    listener = ListenerConfig(ANY, certificate=server.certificate, key=server.key)
    server.key.write_text("")

    async def run() -> None:
        with pytest.raises(ListeningError, match=r"cannot listen on 127\.0\.0\.1:0: key: .*server\.key holds no"):
            Listeners(Config(listener_tables=(listener,)), register, link_bytes_max=0)

    asyncio.run(run())


@pytest.mark.slow
def test_only_a_listener_with_links_takes_their_large_messages() -> None:
    large = bytes(21 * MIB)

    async def run() -> list[str]:
        without = ListenerConfig(ANY, links=False)
        async with serving(ListenerConfig(ANY), without, link_bytes_max=64 * MIB) as addresses:
            found = []
            for address in addresses:
                async with channel(address) as over:
                    found.append(await call(over, request=large))
            return found

    assert asyncio.run(run()) == ["none", "RESOURCE_EXHAUSTED"]


# --- certificates ----------------------------------------------------------------------------------------------------


def test_new_connections_see_replaced_certificates_and_present_ones_continue(authority: Authority) -> None:
    server = authority.issue("server")
    first = der(server)

    async def run() -> None:
        async with (
            serving(ListenerConfig(ANY, certificate=server.certificate, key=server.key)) as (address,),
            channel(address, credentials(authority)) as present,
        ):
            assert await call(present) == "none"
            assert await shown_by(address) == first
            authority.issue("server")
            assert await shown_by(address) == der(server) != first
            second = der(server)
            assert await call(present) == "none"
            assert await once(address, credentials(authority)) == "none"
            replace(server.key, b"")
            assert await shown_by(address) == second
            assert await once(address, credentials(authority)) == "none"

    asyncio.run(run())


def test_replaced_authorities_decide_on_new_clients(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    accepted = tmp_path / "accepted.pem"
    replace(accepted, authority.file.read_bytes())
    server, old, new = authority.issue("server"), authority.issue("old"), other.issue("new")
    of_old = credentials(authority, old)
    of_new = credentials(authority, new)

    async def run() -> list[str]:
        listener = ListenerConfig(ANY, ListenerAuth.CERTIFICATE, server.certificate, server.key, accepted)
        async with serving(listener) as (address,):
            found = [await once(address, of_old), await once(address, of_new)]
            replace(accepted, other.file.read_bytes())
            return [*found, await once(address, of_old), await once(address, of_new)]

    assert asyncio.run(run()) == ["certificate", "UNAVAILABLE", "UNAVAILABLE", "certificate"]


def test_the_certificate_of_a_call_can_be_looked_up_among_the_revoked_ones(authority: Authority) -> None:
    """The auth context of gRPC has the client's certificate also with credentials that are replaced."""
    server, revoked, fine = map(authority.issue, ("server", "revoked", "fine"))
    crl = authority.folder / "crl.pem"
    replace(crl, authority.revocations([revoked]))

    async def run() -> list[str]:
        listener = ListenerConfig(ANY, ListenerAuth.CERTIFICATE, server.certificate, server.key, authority.file, crl)
        async with serving(listener) as (address,):
            return [await once(address, credentials(authority, one), "Revoked") for one in (revoked, fine)]

    assert asyncio.run(run()) == ["revoked", "fine"]


def test_the_expiry_of_each_file_is_told_with_its_listener(authority: Authority) -> None:
    server = authority.issue("server")

    async def run() -> None:
        mutual = ListenerConfig(ANY, ListenerAuth.CERTIFICATE, server.certificate, server.key, authority.file)
        config = Config(listener_tables=(ListenerConfig("127.0.0.1:1"), mutual))
        expiries = list(Listeners(config, register, link_bytes_max=0).expiries())
        assert [(listener, expiry.file) for listener, expiry in expiries] == [
            (ANY, server.certificate),
            (ANY, authority.file),
        ]
        assert mutual.files is not None
        read = EndpointCertificates(mutual.files, ANY, lambda: datetime.now(UTC)).current
        assert [expiry.at for _, expiry in expiries] == [expiry.at for expiry in read.expiries]

    asyncio.run(run())


def test_a_server_that_starts_with_a_certificate_near_its_end_says_so(authority: Authority) -> None:
    server = authority.issue("server", end=5 * DAY)

    async def run() -> None:
        async with serving(ListenerConfig(ANY, certificate=server.certificate, key=server.key)) as (address,):
            assert await once(address, credentials(authority)) == "none"

    with capture_logs() as logs:
        asyncio.run(run())
    assert [line["event"] for line in logs] == ["certificate_expires"]


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_listener_has_its_own_bound_of_connections() -> None:
    async def run() -> list[str]:
        narrow = ListenerConfig(ANY, max_connections=1)
        async with serving(narrow, ListenerConfig(ANY)) as (one, other), channel(one) as first:
            found = [await call(first)]
            async with channel(one) as second:
                try:
                    await method(second, "Where")(b"", timeout=3)
                    found.append("served")
                except grpc.aio.AioRpcError as error:
                    found.append(error.code().name)
            return [*found, await call(first), await once(other)]

    assert asyncio.run(run()) == ["none", "UNAVAILABLE", "none", "none"]


def test_grpc_knows_every_option_that_is_given_to_it() -> None:
    """Story: gRPC ignores an option that it does not know, without a word. One was misspelt, so a call that waited four
    minutes for its answer was ended as UNAVAILABLE (Too many pings), and all calls of its connection with it."""
    (library,) = Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")
    known = library.read_bytes()
    given = {
        name
        for folder in (sow_server, sow_client)
        for file in Path(next(iter(folder.__path__))).rglob("*.py")
        for name in re.findall(r'\("(grpc\.\w[\w.]*)",', file.read_text())
    }
    assert {name for name, _ in options(ListenerConfig(ANY), ServerConfig(), MIB)} <= given
    assert not [name for name in given if name.encode() + b"\0" not in known]


def test_clients_and_peers_ask_no_more_often_than_the_server_allows() -> None:
    """A connection that asks more often is ended."""
    found = dict(options(ListenerConfig(ANY), ServerConfig(), MIB))
    allowed = found["grpc.http2.min_ping_interval_without_data_ms"]
    assert 2 * allowed <= min(KEEPALIVE_MS, sow_client._channel.KEEPALIVE_MS)


def test_bounds_of_the_server_hold_where_a_listener_has_none() -> None:
    server = ServerConfig(max_connections=7, streams_per_connection_max=5)
    inherited = dict(options(ListenerConfig(ANY), server, MIB))
    assert inherited["grpc.max_allowed_incoming_connections"] == 7
    assert inherited["grpc.max_concurrent_streams"] == 5
    assert inherited["grpc.max_receive_message_length"] == inherited["grpc.max_send_message_length"] == MIB
    own = dict(options(ListenerConfig(ANY, max_connections=3), server, MIB))
    assert own["grpc.max_allowed_incoming_connections"] == 3


def test_connections_leave_half_of_the_files_to_the_store() -> None:
    """Story: connections that said nothing took every file that the process may open; the store could not write any
    more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert connections_of(2) == min(hard if hard > 0 else FILES_MAX, FILES_MAX) // 4
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), "as many as the process can get"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    listener = ListenerConfig(ANY)
    assert dict(options(listener, ServerConfig(), MIB, 100))["grpc.max_allowed_incoming_connections"] == 100
    given = ServerConfig(max_connections=7)
    assert dict(options(listener, given, MIB, 100))["grpc.max_allowed_incoming_connections"] == 7


def test_connections_have_no_age_unless_it_is_set() -> None:
    listener = ListenerConfig(ANY)
    assert not [name for name, _ in options(listener, ServerConfig(), MIB) if "connection" in name]
    aged = dataclasses.replace(ServerConfig(), max_connection_age_micros=3600 * MICROS)
    found = dict(options(listener, aged, MIB))
    assert found["grpc.max_connection_age_ms"] == 3_600_000
    assert found["grpc.max_connection_age_grace_ms"] == 60_000
