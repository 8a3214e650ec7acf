"""The HTTP endpoint of the metrics: one thread with its own event loop, whatever clients do.

    [1]  It has one thread and at most `CONNECTIONS_MAX` connections. One more connection ends the oldest one that has
         not yet sent its request; if all have, the new one is ended.
    [2]  A request must arrive within `REQUEST_SECONDS`, and its answer must be read within `ANSWER_SECONDS`. There is
         one request per connection.

prometheus_client makes the answers. `/metrics` is the only path.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import socket
import threading
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

log = structlog.get_logger(__name__)

CONNECTIONS_MAX: Final = 64
REQUEST_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 30.0
REQUEST_BYTES_MAX: Final = 16 * 2**10
"""The most bytes of a request line and its headers. Bodies are not read."""
PATH: Final = "/metrics"


class MetricsServer:
    """Owns the thread, the port and the connections."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Listens at once. Raises OSError."""
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server((str(address[0]), port), family=family, backlog=CONNECTIONS_MAX)
        self.address: Final[tuple[str, int]] = self._socket.getsockname()[:2]
        self._app = make_wsgi_app(registry)
        self._connections = 0
        self._silent: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not sent their request, the oldest first."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sow-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, the port and the connections."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=REQUEST_BYTES_MAX)
        try:
            await self._stopping.wait()
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= CONNECTIONS_MAX:
            ended = next(iter(self._silent), writer)
            self._silent.pop(
                ended, None
            )  # its own task notices later; a connection that comes before that ends another one
            ended.transport.abort()
        self._connections += 1
        self._silent[writer] = None
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            self._silent.pop(writer, None)
            writer.write(self._answer(head))
            async with asyncio.timeout(ANSWER_SECONDS):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._silent.pop(writer, None)
            self._connections -= 1

    def _answer(self, head: bytes) -> bytes:
        lines = io.BytesIO(head)
        try:
            method, target, _ = lines.readline().decode("ascii").split()
            headers = http.client.parse_headers(lines)
            url = urlsplit(target)
        except (ValueError, http.client.HTTPException):
            return _response(HTTPStatus.BAD_REQUEST)
        if url.path != PATH:
            return _response(HTTPStatus.NOT_FOUND, f"metrics are at {PATH}\n".encode())
        started: list[tuple[str, list[tuple[str, str]]]] = []
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": url.path,
            "QUERY_STRING": url.query,
            "HTTP_ACCEPT": headers.get("Accept", ""),
            "HTTP_ACCEPT_ENCODING": headers.get("Accept-Encoding", ""),
        }
        try:
            body = b"".join(self._app(environ, lambda status, fields: started.append((status, fields))))
        except Exception:
            log.exception("scrape_failed")
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR)
        status, fields = started[0]
        return _message(status, fields, body)


def _response(status: HTTPStatus, body: bytes = b"") -> bytes:
    return _message(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")], body)


def _message(status: str, fields: list[tuple[str, str]], body: bytes) -> bytes:
    fields = [*fields, ("Content-Length", str(len(body))), ("Connection", "close")]
    head = "".join([f"HTTP/1.1 {status}\r\n", *[f"{name}: {value}\r\n" for name, value in fields], "\r\n"])
    return head.encode("ascii") + body
