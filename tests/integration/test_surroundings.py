"""Services for operators: health, reflection, metrics, TLS and mutual TLS."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from sow_client import Client, SowError, Tls, Unavailable
from sow_server.metrics_server import CONNECTIONS_MAX, REQUEST_SECONDS
from tests.support.servers.metrics_endpoint import Address, idle_connections, is_open, page, said
from tests.support.servers.server import DidNotStart, ServerProcess, free_port, health, until

SERVICES: Final = ("sow.v1.SowService", "sow.v1.AdminService", "sow.v1.SnapshotService")


# --- health, reflection, metrics -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[ServerProcess]:
    config = (
        f"[server]\ndynamic_topics = true\nstop_grace = '1s'\n[metrics]\nlisten = '127.0.0.1:{metrics_port}'\n"
        "[topics.brief]\nexpiration = 'enabled'\n"
    )
    with ServerProcess(tmp_path_factory.mktemp("surroundings"), config) as made:
        yield made


def test_health_is_known_for_the_whole_and_for_each_service(server: ServerProcess) -> None:
    assert [health(server.address, name) for name in ("", *SERVICES)] == ["SERVING"] * (1 + len(SERVICES))
    with pytest.raises(grpc.RpcError):
        health(server.address, "no.such.Service")


def test_health_can_be_watched_until_the_stop(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, grpc.insecure_channel(server.address) as channel:
        seen: list[int] = []

        def watch() -> None:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                request = health_pb2.HealthCheckRequest(service=SERVICES[0])
                seen.extend(response.status for response in stub.Watch(request))  # type: ignore[attr-defined]  # the stubs do not know that a call iterates
            except grpc.RpcError:
                pass

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        until(lambda: seen, 5, "the first status")
        assert server.terminate() == 0
        watching.join(10)
        assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


def test_reflection_tells_the_services_and_their_messages(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) >= {*SERVICES, "grpc.health.v1.Health"}
        file = database.FindFileContainingSymbol("sow.v1.SowService")
        assert [service.name for service in file.service] == ["SowService"]


def test_metrics_count_events(server: ServerProcess, metrics_port: int) -> None:
    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        }

    def total(pattern: str) -> float:
        return sum(value for name, value in scrape().items() if re.search(pattern, name))

    before = scrape()
    assert any(name.startswith("sow_") for name in before)
    with server.client() as client:
        for number in range(7):
            client.publish("brief", {"n": number}, key=str(number), ttl="50ms")
        for number in range(5):
            client.publish("brief", {"n": number}, key=f"stays-{number}")
        until(lambda: client.status().overdue_records == 0 and client.status().live_records == 5, 5, "the sweep")
    assert total(r"^sow_.*expired.*total") == 7
    assert total(r'^sow_.*live.*topic="brief"') == 5


def endpoint_of(server: ServerProcess) -> Address:
    """Where the metrics of a server are."""
    (event,) = server.events("metrics_served")
    host, _, port = str(event["address"]).rpartition(":")
    return host, int(port)


PORT_OF_ITS_OWN: Final = "[server]\ndynamic_topics = true\nstop_grace = '1m'\n[metrics]\nlisten = '127.0.0.1:0'\n"


def test_five_hundred_idle_connections_do_not_stop_a_scrape(tmp_path: Path) -> None:
    """X6. Story: each of them was a thread of the server, for as long as it liked."""
    with ServerProcess(tmp_path, PORT_OF_ITS_OWN) as server:
        endpoint = endpoint_of(server)
        assert page(endpoint, "/metrics")[0] == 200
        sockets, threads, resident = server.sockets, threads_of(server), server.resident_bytes
        with idle_connections(endpoint, 500) as idle:
            for connection in idle[::2]:
                # Some of those that have been ended already cannot be written to.
                with contextlib.suppress(OSError):
                    connection.sendall(b"GET /metrics HTTP/1.1\r\n")
            started = time.monotonic()
            assert page(endpoint, "/metrics")[0] == 200
            assert time.monotonic() - started < REQUEST_SECONDS
            assert server.sockets <= sockets + CONNECTIONS_MAX + 1
            assert threads_of(server) < threads + 16, "each connection had one; gRPC starts some when it likes"
            assert server.resident_bytes < resident + 16 * 2**20
            assert sum(map(is_open, idle)) <= CONNECTIONS_MAX
        assert not server.faults()


def threads_of(server: ServerProcess) -> int:
    """Threads of the process (Linux)."""
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


def test_a_server_is_ready_until_it_stops_and_alive_until_it_ends(tmp_path: Path) -> None:
    """X6. A publish that a quota holds keeps the stop waiting."""
    held = PORT_OF_ITS_OWN + "[topics.held]\nbacklog_quota_entries = 1\nbacklog_action = 'hold'\n"
    with ServerProcess(tmp_path, held) as server, server.client() as client, ThreadPoolExecutor(1) as threads:
        endpoint = endpoint_of(server)
        assert page(endpoint, "/readyz") == (200, b"ready\n")
        client.durable("held", "d").close()
        client.publish("held", {}, key="1")
        waiting = threads.submit(client.publish, "held", {}, key="2")
        until(lambda: b"sow_publishes_held_total 1.0" in page(endpoint, "/metrics")[1], 10, "the publish to be held")

        server.signal(signal.SIGTERM)

        until(lambda: page(endpoint, "/readyz") == (503, b"stopping\n"), 10, "the server to say that it stops")
        assert page(endpoint, "/healthz") == (200, b"ok\n")
        assert not waiting.done()
        client.close()
        with pytest.raises(SowError):
            waiting.result(30)
        assert server.wait() == 0
        with pytest.raises(OSError):
            page(endpoint, "/healthz")


def test_a_server_that_starts_is_alive_and_not_ready(tmp_path: Path) -> None:
    """X6. The start is stopped where it opens the store."""
    with ServerProcess(tmp_path, PORT_OF_ITS_OWN, start=False) as server:
        server.module = "tests.support.servers.waiting_server"
        os.mkfifo(tmp_path / "go")
        server.first_arguments = [str(tmp_path / "go")]
        server.launch()
        until(lambda: server.events("metrics_served"), 30, "the endpoint")
        endpoint = endpoint_of(server)
        assert page(endpoint, "/readyz") == (503, b"starting\n")
        assert page(endpoint, "/healthz") == (200, b"ok\n")
        assert b"sow_build_info" in page(endpoint, "/metrics")[1]
        (tmp_path / "go").write_text("go")
        server.await_ready()
        until(lambda: page(endpoint, "/readyz") == (200, b"ready\n"), 10, "the page to say so")
        assert server.terminate() == 0
        assert not server.faults()


def test_metrics_with_tls_and_a_token(tmp_path: Path, certificates: Path) -> None:
    """X6. Other machines may reach this address."""
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("s3cret!\n")
    config = (
        "[metrics]\nlisten = '0.0.0.0:0'\ntoken_file = 'token'\n"
        f"certificate = '{certificates}/server.pem'\nkey = '{certificates}/server.key'\n"
    )
    with ServerProcess(tmp_path, config) as server:
        endpoint = ("127.0.0.1", endpoint_of(server)[1])
        tls = ssl.create_default_context(cafile=certificates / "ca.pem")
        assert page(endpoint, "/metrics", tls=tls)[0] == 401
        assert page(endpoint, "/metrics", "Authorization: Bearer s3cret", tls=tls)[0] == 401
        status, body = page(endpoint, "/metrics", "Authorization: Bearer s3cret!", tls=tls)
        assert status == 200
        assert b"\nsow_topics 0.0\n" in body
        assert page(endpoint, "/readyz", tls=tls) == (200, b"ready\n")
        with contextlib.suppress(ConnectionResetError):
            assert not said(endpoint).startswith(b"HTTP")
        assert server.terminate() == 0
        assert not server.faults()
        assert "s3cret" not in server.log


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("listen = '0.0.0.0:0'", "[metrics] listen: 0.0.0.0:0 is reachable from other machines"),
        ("token_file = 'none'", "[metrics] token_file: "),
        ("certificate = 'none'", "[metrics] certificate: also needs key"),
    ],
)
def test_metrics_that_are_not_protected_are_refused_at_the_start_and_by_the_check(
    tmp_path: Path, lines: str, words: str
) -> None:
    """X6."""
    for arguments in ((), ("--check-config",)):
        with ServerProcess(tmp_path, f"[metrics]\n{lines}\n", start=False) as server:
            with pytest.raises(DidNotStart) as refused:
                server.start(*arguments)
            assert refused.value.code == 2
            assert words in refused.value.said
            assert len(refused.value.said.splitlines()) == 1


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, and certificates of it for a server (127.0.0.1) and a client; and another one's."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, and makes the certificates of this test")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    (folder / "server.ext").write_text("subjectAltName = IP:127.0.0.1\nextendedKeyUsage = serverAuth\n")
    (folder / "client.ext").write_text("extendedKeyUsage = clientAuth\n")
    for authority in ("ca", "other-ca"):
        openssl("req", "-x509", *curve, "-subj", f"/CN={authority}", "-days", "2")
        openssl(
            "req", "-x509", *curve, "-subj", f"/CN={authority}", "-days", "2",
            "-keyout", f"{authority}.key", "-out", f"{authority}.pem",
        )  # fmt: skip
    for name, extensions, authority in (
        ("server", "server.ext", "ca"),
        ("client", "client.ext", "ca"),
        ("stranger", "client.ext", "other-ca"),
    ):
        openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
            "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", f"{name}.pem",
        )  # fmt: skip
    return folder


def tls_config(certificates: Path, *, mutual: bool) -> str:
    config = f"[server]\ndynamic_topics = true\n[server.tls]\ncertificate = '{certificates}/server.pem'\n"
    config += f"key = '{certificates}/server.key'\n"
    return config + (f"client_ca = '{certificates}/ca.pem'\n" if mutual else "")


def publishes(server: ServerProcess, tls: Tls | None) -> bool:
    with Client(server.address, tls=tls, connect_timeout=1.5, timeout=5) as client:
        try:
            return client.publish("orders", {"n": 1}, key="1").version > 0
        except Unavailable:
            return False


def test_tls_serves_clients_that_trust_the_authority(tmp_path: Path, certificates: Path) -> None:
    with ServerProcess(tmp_path, tls_config(certificates, mutual=False)) as server:
        assert publishes(server, Tls(ca=certificates / "ca.pem"))
        assert not publishes(server, Tls(ca=certificates / "other-ca.pem"))
        assert not publishes(server, None)
        assert publishes(server, Tls(ca=certificates / "ca.pem"))
        assert server.terminate() == 0
        assert not server.faults()


def test_an_untrusted_certificate_is_named_as_the_cause(tmp_path: Path, certificates: Path) -> None:
    """Story: it looked like a server that is not there; what TLS had to say was in gRPC's log alone."""
    with ServerProcess(tmp_path, tls_config(certificates, mutual=False)) as server:
        tls = Tls(ca=certificates / "other-ca.pem")
        with Client(server.address, tls=tls, connect_timeout=1.5) as client, pytest.raises(Unavailable) as caught:
            client.status()
        assert caught.value.reason == "UNREACHABLE"
        assert "certificate is of no authority that the client trusts" in caught.value.message


def test_mutual_tls_serves_clients_with_a_certificate_of_the_authority(tmp_path: Path, certificates: Path) -> None:
    with ServerProcess(tmp_path, tls_config(certificates, mutual=True)) as server:
        ca = certificates / "ca.pem"
        assert publishes(server, Tls(ca=ca, certificate=certificates / "client.pem", key=certificates / "client.key"))
        assert not publishes(server, Tls(ca=ca))
        stranger = Tls(ca=ca, certificate=certificates / "stranger.pem", key=certificates / "stranger.key")
        assert not publishes(server, stranger)
        assert server.terminate() == 0


def test_a_certificate_that_does_not_match_its_key_is_reported_at_the_start(tmp_path: Path, certificates: Path) -> None:
    config = tls_config(certificates, mutual=False).replace("server.key", "client.key")
    with ServerProcess(tmp_path, config, start=False) as server:
        with pytest.raises(DidNotStart) as refused:
            server.start()
        assert refused.value.code == 2
        assert "tls" in refused.value.said.splitlines()[-1].lower()
