"""Services for operators: health, reflection, metrics, TLS and mutual TLS."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from sow_client import Client, Tls, Unavailable
from tests.support.server import DidNotStart, ServerProcess, free_port, health, until

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
        assert "CERTIFICATE_VERIFY_FAILED" in caught.value.message


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
