"""TLS that does not come about: each cause has a sentence and a name of its own, in both clients and the command."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from sow_cli.command import sow
from sow_client import Client, Tls, Unavailable
from sow_client._handshakes import looked
from tests.support.servers.certificates import DAY, Authority, Issued
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture

CLOSED = "UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"


class Servers:
    """Empty servers of gRPC on this machine, and the certificates around them."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.other = Authority(folder, "ca"), Authority(folder, "other")
        self.good = self.ca.issue("sow")
        self.old = self.ca.issue("old", begin=-10 * DAY, end=-DAY)
        self.early = self.ca.issue("early", begin=DAY)
        self.desk, self.stranger = self.ca.issue("desk"), self.other.issue("stranger")
        self._running: list[grpc.Server] = []

    def serve(self, certificate: Issued | None, *, asks: bool = False) -> str:
        """The address of a new one. `asks`: for a certificate of the client."""
        server = grpc.server(futures.ThreadPoolExecutor(1))
        if certificate is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            roots = self.ca.file.read_bytes() if asks else None
            pair = (certificate.key.read_bytes(), certificate.pem)
            credentials = grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=asks)
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        self._running.append(server)
        return f"127.0.0.1:{port}"

    def stop(self) -> None:
        for server in self._running:
            server.stop(None)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("tls"))
    yield made
    made.stop()


CASES = {
    "tls_required": "the server speaks TLS only: give the authority of its certificate",
    "tls_not_spoken": "the server does not speak TLS at this address",
    "certificate_expired": "has expired",
    "certificate_not_yet_valid": "is not valid yet",
    "certificate_name": "has another name: connect by that name, or give it",
    "certificate_untrusted": "is of no authority that the client trusts",
    "client_certificate_required": "most likely it asks for a certificate of the client",
    "client_certificate_refused": "most likely it does not accept the client's certificate",
}


def case(servers: Servers, problem: str) -> tuple[str, Tls | None]:
    """The address of a server, and the TLS with which a client meets the problem there."""
    trusting = Tls(ca=servers.ca.file)
    match problem:
        case "tls_required":
            return servers.serve(servers.good), None
        case "tls_not_spoken":
            return servers.serve(None), trusting
        case "certificate_expired":
            return servers.serve(servers.old), trusting
        case "certificate_not_yet_valid":
            return servers.serve(servers.early), trusting
        case "certificate_name":
            return servers.serve(servers.good), Tls(ca=servers.ca.file, server_name="other")
        case "certificate_untrusted":
            return servers.serve(servers.good), Tls(ca=servers.other.file)
        case "client_certificate_required":
            return servers.serve(servers.good, asks=True), trusting
    stranger = servers.stranger
    tls = Tls(ca=servers.ca.file, certificate=stranger.certificate, key=stranger.key)
    return servers.serve(servers.good, asks=True), tls


@pytest.mark.parametrize("problem", CASES)
def test_each_problem_of_tls_has_a_sentence_and_a_name(connect: Connect, servers: Servers, problem: str) -> None:
    """Story: "Socket closed", and a line of OpenSSL's internals."""
    address, tls = case(servers, problem)
    with connect(address, tls=tls, connect_timeout=0.3) as client, pytest.raises(Unavailable) as caught:
        client.get("orders", 1)
    assert caught.value.message.startswith(f"cannot connect to {address} within 0.3 s: ")
    assert CASES[problem] in caught.value.message
    assert "SSL" not in caught.value.message
    assert caught.value.reason == "UNREACHABLE"  # a subscription tries again: a certificate may be renewed
    assert caught.value.details["tls"] == problem
    assert caught.value.details["cause"]


@pytest.mark.parametrize(
    ("problem", "told"), [("certificate_expired", True), ("certificate_untrusted", True), ("tls_required", False)]
)
def test_several_addresses_tell_of_it_where_gRPC_does(servers: Servers, problem: str, told: bool) -> None:  # noqa: N802 - its name
    address, tls = case(servers, problem)
    with Client(f"{address},{address.replace('127.0.0.1', 'localhost')}", tls=tls, connect_timeout=0.3) as client:
        with pytest.raises(Unavailable) as caught:
            client.get("orders", 1)
    assert ("tls" in caught.value.details) is told
    assert (CASES[problem] in caught.value.message) is told
    with Client(f"{address},127.0.0.1:1", tls=tls, connect_timeout=0.3) as client, pytest.raises(Unavailable) as caught:
        client.get("orders", 1)
    assert "tls" not in caught.value.details  # the other address has another cause


def test_the_command_has_an_exit_code_for_it(servers: Servers) -> None:
    address, _ = case(servers, "certificate_expired")
    done = CliRunner().invoke(sow, ["--server", address, "--tls-ca", str(servers.ca.file), "get", "orders", "1"])
    assert done.exit_code == 4
    assert "has expired" in done.stderr
    assert "tls: certificate_expired" in done.stderr


def test_a_file_that_cannot_be_used_is_wrong_usage_of_the_command(servers: Servers) -> None:
    done = CliRunner().invoke(sow, ["--tls-ca", str(servers.good.key), "get", "orders", "1"])
    assert done.exit_code == 2
    assert "sow.key holds no PEM certificates" in done.stderr


def test_only_a_connection_that_the_server_has_ended_is_looked_into(servers: Servers) -> None:
    """See _handshakes [1]."""
    address = servers.serve(servers.good)
    assert looked(address, None, CLOSED) == "tls_required"
    assert looked(address, None, "Connection refused") == ""
    assert looked("unix:/run/sow", None, CLOSED) == ""
    assert looked("sow.example:7450", None, CLOSED, variables={"https_proxy": "http://proxy:3128"}) == ""
    desk = servers.desk
    accepted = Tls(ca=servers.ca.file, certificate=desk.certificate, key=desk.key)
    assert looked(servers.serve(servers.good, asks=True), accepted, CLOSED) == ""
    assert looked(servers.serve(None), None, CLOSED) == ""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    assert looked(address, None, CLOSED) == ""  # nobody listens any more
