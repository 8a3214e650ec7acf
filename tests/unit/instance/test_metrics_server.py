"""The connections of the metrics endpoint: bounded, ended in time, with TLS, and none of them stops a scrape."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server import metrics_server
from sow_server.config import MetricsConfig
from sow_server.metrics import Metrics
from sow_server.metrics_pages import Readiness
from sow_server.metrics_server import ListenError, MetricsServer, serve_metrics
from tests.support.servers.metrics_endpoint import (
    SCRAPE,
    Address,
    drips_until_ended,
    idle_connections,
    is_open,
    page,
    said,
)
from tests.support.servers.server import until

ANSWER = b"HTTP/1.1 200 OK\r\n\r\n"
LISTEN = "127.0.0.1:0"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("pems")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=sow "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out certificate.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def trusting(pems: Path) -> ssl.SSLContext:
    """A client's side of TLS that trusts the certificate."""
    return ssl.create_default_context(cafile=pems / "certificate.pem")


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[MetricsServer]:
    """A server with the same answer to everything."""
    server = MetricsServer("127.0.0.1", 0, lambda head: ANSWER, tls)
    with contextlib.closing(server):
        yield server


@pytest.fixture
def tls_context(pems: Path) -> ssl.SSLContext:
    """The server's side of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pems / "certificate.pem", pems / "key.pem")
    return context


# --- as it is configured ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def configured(settings: MetricsConfig) -> Iterator[Address]:
    readiness = Readiness()
    readiness.ready()
    server = serve_metrics(settings, Metrics(), readiness)
    assert server is not None
    with contextlib.closing(server):
        yield server.address


def test_metrics_are_served_where_asked_and_only_there() -> None:
    metrics = Metrics()
    assert serve_metrics(MetricsConfig(), metrics, Readiness()) is None
    with configured(MetricsConfig(listen=LISTEN)) as address:
        assert address[0] == "127.0.0.1"
        status, body = page(address, "/metrics")
        assert status == 200
        assert b"\nsow_write_queue_requests 0.0\n" in body or b"\nsow_build_info" in body
        taken = f"127.0.0.1:{address[1]}"
        with pytest.raises(ListenError, match=rf"\[metrics\] listen: cannot listen on {taken} \("):
            serve_metrics(MetricsConfig(listen=taken), metrics, Readiness())
    with pytest.raises(OSError):
        page(address, "/metrics")


def test_the_token_of_the_file_opens_the_metrics(tmp_path: Path) -> None:
    """X6."""
    file = tmp_path / "token"
    file.write_text("s3cret!\n")
    with configured(MetricsConfig(listen=LISTEN, token_file=file)) as address:
        assert page(address, "/metrics")[0] == 401
        assert page(address, "/metrics", "Authorization: Bearer s3cret!")[0] == 200
        assert page(address, "/readyz") == (200, b"ready\n")


def test_with_a_certificate_it_speaks_tls_only(pems: Path, trusting: ssl.SSLContext) -> None:
    """X6."""
    settings = MetricsConfig(listen=LISTEN, certificate=pems / "certificate.pem", key=pems / "key.pem")
    with configured(settings) as address:
        assert page(address, "/metrics", tls=trusting)[0] == 200
        with contextlib.suppress(ConnectionResetError):
            assert not said(address).startswith(b"HTTP")
        with pytest.raises(ssl.SSLCertVerificationError):
            page(address, "/metrics", tls=ssl.create_default_context())
        assert page(address, "/healthz", tls=trusting) == (200, b"ok\n")


def test_files_that_went_since_the_check_are_named(tmp_path: Path, pems: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(ListenError, match=r"\[metrics\] token_file: .*/gone: No such file"):
        serve_metrics(MetricsConfig(listen=LISTEN, token_file=gone), Metrics(), Readiness())
    with pytest.raises(ListenError, match=r"\[metrics\] certificate: .*/gone with "):
        serve_metrics(MetricsConfig(listen=LISTEN, certificate=gone, key=pems / "key.pem"), Metrics(), Readiness())


# --- clients that do not end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("over_tls", [False, True])
def test_a_slow_loris_is_ended_by_its_time(
    monkeypatch: pytest.MonkeyPatch, tls_context: ssl.SSLContext, over_tls: bool
) -> None:
    """A byte now and then is no request, nor is it a handshake (metrics_server [3])."""
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.1)
    with (
        serving(tls_context if over_tls else None) as server,
        socket.create_connection(server.address, timeout=30) as slow,
    ):
        assert drips_until_ended(slow, 30)


@pytest.mark.slow
def test_a_silent_client_is_ended_by_its_time(monkeypatch: pytest.MonkeyPatch, tls_context: ssl.SSLContext) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.1)
    for tls in (None, tls_context):
        with serving(tls) as server, socket.create_connection(server.address, timeout=30) as silent:
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1) == b""


def test_an_endless_request_is_ended_by_its_length() -> None:
    with serving() as server, socket.create_connection(server.address, timeout=30) as endless:
        with contextlib.suppress(OSError):
            endless.sendall(b"x" * 100_000)
        with contextlib.suppress(ConnectionResetError):
            assert endless.recv(1) == b""


@pytest.mark.slow
def test_an_answer_that_is_not_read_is_ended_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "ANSWER_SECONDS", 0.1)
    begun = threading.Event()

    def long_answer(head: bytes) -> bytes:
        begun.set()
        return b"x" * 2**26

    server = MetricsServer("127.0.0.1", 0, long_answer)
    with contextlib.closing(server), socket.create_connection(server.address, timeout=30) as lazy:
        lazy.sendall(SCRAPE)
        assert begun.wait(30)
        until(lambda: not server._connections, 30, "the connection to end")
        received = 0
        while data := lazy.recv(2**20):
            received += len(data)
        assert 0 < received < 2**26


@pytest.mark.slow
@pytest.mark.parametrize("over_tls", [False, True])
def test_idle_connections_are_bounded_and_do_not_stop_a_scrape(
    monkeypatch: pytest.MonkeyPatch, tls_context: ssl.SSLContext, trusting: ssl.SSLContext, over_tls: bool
) -> None:
    """Story: 500 idle sockets at the metrics port were 500 threads of the server, for as long as they liked. Those that
    do not begin their TLS handshake count, too (metrics_server [1]).
    """
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 60.0)
    before = set(threading.enumerate())  # some may be of other tests, and about to end
    with serving(tls_context if over_tls else None) as server:
        with idle_connections(server.address, 400) as idle:
            assert said(server.address, SCRAPE, trusting if over_tls else None) == ANSWER
            assert len(set(threading.enumerate()) - before) == 1
            assert sum(map(is_open, idle)) <= metrics_server.CONNECTIONS_MAX
            assert not is_open(idle[0]), "the oldest ones go first"
            assert is_open(idle[-1])


def test_clients_elsewhere_do_not_push_out_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that has the most connections loses one, though others are older (metrics_server [2])."""
    monkeypatch.setattr(metrics_server, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 60.0)
    with serving() as server, socket.create_connection(server.address, timeout=30) as scrape:
        scrape.sendall(SCRAPE[:10])
        with idle_connections(server.address, 50, source="127.0.0.2") as idle:
            assert said(server.address) == ANSWER  # all that came before it are counted now
            assert sum(map(is_open, idle)) <= 3
            scrape.sendall(SCRAPE[10:])
            assert scrape.recv(100) == ANSWER


class SlowPages:
    """Keeps an answer, and the endpoint's loop with it, until the test lets it go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def answer(self, head: bytes) -> bytes:
        self.begun.set()
        assert self.go_on.wait(30)
        return ANSWER


def test_connections_that_come_at_once_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: all that came in one turn of the endpoint's loop ended the same one, the oldest. So each turn left as many
    connections behind as had come, less one: 500 at once were more than 400 beyond the bound (metrics_server [1])."""
    monkeypatch.setattr(metrics_server, "CONNECTIONS_MAX", 4)
    slow = SlowPages()
    server = MetricsServer("127.0.0.1", 0, slow.answer)
    with contextlib.closing(server), socket.create_connection(server.address, timeout=30) as scrape:
        scrape.sendall(SCRAPE)
        assert slow.begun.wait(30)
        with idle_connections(server.address, 20) as idle:
            slow.go_on.set()
            assert said(server.address) == ANSWER
            assert sum(map(is_open, idle)) <= 4


def test_a_connection_that_cannot_be_accepted_does_not_end_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have no file descriptors left for a while."""
    with serving() as server:
        accept, failed = server._loop.sock_accept, threading.Event()

        async def failing(listening: socket.socket) -> tuple[socket.socket, Address]:
            if not failed.is_set():
                failed.set()
                raise OSError(24, "Too many open files")
            return await accept(listening)

        monkeypatch.setattr(server._loop, "sock_accept", failing)
        said(server.address)  # the accept that was under way is the loop's own
        assert said(server.address) == ANSWER
        assert failed.is_set()


def test_the_end_of_the_endpoint_ends_its_connections() -> None:
    server = MetricsServer("127.0.0.1", 0, lambda head: ANSWER)
    with idle_connections(server.address, 3) as idle:
        assert said(server.address) == ANSWER
        server.close()
        for connection in idle:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
