"""The HTTP endpoint of the metrics: one thread with its own event loop, whatever clients do.

    [1]  There is one thread, and there are at most `CONNECTIONS_MAX` connections, those in a TLS handshake included.
    [2]  One more connection ends another one: of the address that has the most, the oldest that has not sent its
         request, else the oldest. So clients elsewhere do not push out a scrape from the loopback.
    [3]  A handshake and a request must arrive within `REQUEST_SECONDS`, and the answer must be read within
         `ANSWER_SECONDS`. There is one request per connection.

`metrics_pages` makes the answers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from sow_server.config import MetricsConfig, metrics_token, split_address
from sow_server.metrics import Metrics
from sow_server.metrics_pages import MetricsPages, Readiness

log = structlog.get_logger(__name__)

CONNECTIONS_MAX: Final = 64
BACKLOG: Final = 1024
"""Connections that may wait to be accepted. If there is no room, the system of a client tries again after a second."""
REQUEST_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 30.0
REQUEST_BYTES_MAX: Final = 16 * 2**10
"""The most bytes of a request line and its headers. Bodies are not read."""
ACCEPT_PAUSE_SECONDS: Final = 0.1
"""The pause after a connection could not be accepted, because the process has no file descriptors left, for example."""


class ListenError(Exception):
    """The metrics endpoint cannot be opened; the message says why."""


def serve_metrics(settings: MetricsConfig, metrics: Metrics, readiness: Readiness) -> MetricsServer | None:
    """Serves the metrics over HTTP as [metrics] says, on a separate thread; nothing without `listen`.

    Raises ListenError. `close` of the result ends it.
    """
    if not settings.listen:
        return None
    host, port = split_address(settings.listen)
    try:
        token = metrics_token(settings)
    except OSError as error:
        raise ListenError(f"[metrics] token_file: {error.filename}: {error.strerror}") from error
    pages = MetricsPages(metrics.registry, lambda: readiness.reason, token)
    tls = _tls_context(settings)
    try:
        return MetricsServer(host, port, pages.answer, tls)
    except OSError as error:
        message = f"[metrics] listen: cannot listen on {settings.listen} ({error.strerror or error})"
        raise ListenError(message) from error


def _tls_context(settings: MetricsConfig) -> ssl.SSLContext | None:
    if settings.certificate is None or settings.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.certificate, settings.key, password="")
    except (OSError, ValueError) as error:  # the configuration was checked, so the files have changed since
        raise ListenError(f"[metrics] certificate: {settings.certificate} with {settings.key}: {error}") from error
    return context


@dataclass(slots=True)
class _Connection:
    address: str
    has_asked: bool = False
    """Its request has arrived."""


class MetricsServer:
    """Owns the thread, the port and the connections."""

    def __init__(
        self, host: str, port: int, answer: Callable[[bytes], bytes], tls: ssl.SSLContext | None = None
    ) -> None:
        """Listens at once. `answer` makes the answer to a request line and its headers. Raises OSError."""
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.address: Final[tuple[str, int]] = self._socket.getsockname()[:2]
        self._answer = answer
        self._tls = tls
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        """The oldest first."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sow-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, the port and the connections."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        # The end of the runner cancels the tasks of the connections, and each of them closes its own.
        with self._socket, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._stopping.wait()
        accepting.cancel()

    async def _accept(self) -> None:
        """Accepts connections. asyncio's own server would count them only after the handshake ([1])."""
        while True:
            try:
                accepted, address = await self._loop.sock_accept(self._socket)
            except OSError as error:
                log.warning("metrics_accept_failed", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._connections) >= CONNECTIONS_MAX:
                ended = self._least_entitled()
                ended.cancel()
                await asyncio.wait([ended])
            connection = _Connection(str(address[0]))
            task = asyncio.create_task(self._converse(connection, accepted))
            self._connections[task] = connection
            task.add_done_callback(self._connections.pop)
            await asyncio.sleep(0)  # it begins: a task that is cancelled before would not close its socket

    def _least_entitled(self) -> asyncio.Task[None]:
        """The connection that ends for another one ([2])."""
        counts = Counter(connection.address for connection in self._connections.values())
        most = max(counts.values())
        crowd = [task for task, connection in self._connections.items() if counts[connection.address] == most]
        return min(crowd, key=lambda task: self._connections[task].has_asked)

    async def _converse(self, connection: _Connection, accepted: socket.socket) -> None:
        """One request and its answer ([3])."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                reader, writer = await self._streams(accepted)
                head = await reader.readuntil(b"\r\n\r\n")
            connection.has_asked = True
            writer.write(self._answer(head))
            async with asyncio.timeout(ANSWER_SECONDS):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is too slow, is gone, or does not speak HTTP
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _streams(self, accepted: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams of a connection, after its TLS handshake."""
        reader = asyncio.StreamReader(limit=REQUEST_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)
