"""The pages of the metrics endpoint: the bytes of a request become the bytes of its answer. There is no I/O here.

    [1]  `/metrics` needs the bearer token where one is set. `/healthz` and `/readyz` need none; they tell neither data
         nor settings.
    [2]  Every request gets one answer, and the connection ends with it. No answer repeats parts of the request.

http.server parses the requests and writes the answers, prometheus_client writes the metrics.
"""

from __future__ import annotations

import hmac
import io
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

log = structlog.get_logger(__name__)

METHODS: Final = ("GET", "HEAD")
_TEXT: Final = ("Content-Type", "text/plain; charset=utf-8")

Fields: TypeAlias = Iterable[tuple[str, str]]


class Readiness:
    """Tells whether the server is ready. The event loop sets it, and the thread of the metrics endpoint reads it."""

    def __init__(self) -> None:
        self.reason = "starting"
        """Why it is not ready; "": it is."""

    def ready(self) -> None:
        """All parts have started."""
        self.reason = ""

    def failed(self, name: str) -> None:
        """Writing has ended for good (rule X3); `name` is the reason of the error."""
        self.reason = f"the store has failed: {name}"

    def stopping(self) -> None:
        """The server takes no new calls from now on."""
        self.reason = "stopping"


class MetricsPages:
    """Answers requests."""

    def __init__(self, registry: CollectorRegistry, reason: Callable[[], str], token: str = "") -> None:
        """`reason` tells why the server is not ready, "" if it is; `token`: "" where `/metrics` needs none."""
        self._metrics_app = make_wsgi_app(registry)
        self._reason = reason
        self._token = token.encode("ascii")
        self._pages = {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness}

    def answer(self, head: bytes) -> bytes:
        """The answer to a request line with its headers; b"" where there is no request at all. Bodies are not read."""
        exchange = _Exchange(head)
        if exchange.parse_request():
            self._respond(exchange)
        return exchange.wfile.getvalue()

    def _respond(self, exchange: _Exchange) -> None:
        try:
            url = urlsplit(exchange.path)
        except ValueError:
            exchange.send_error(HTTPStatus.BAD_REQUEST)
            return
        page = self._pages.get(url.path)
        if page is None:
            exchange.reply(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}\n".encode())
        elif exchange.command not in METHODS:
            exchange.reply(HTTPStatus.METHOD_NOT_ALLOWED, fields=[("Allow", ", ".join(METHODS))])
        else:
            page(exchange, url.query)

    def _health(self, exchange: _Exchange, query: str) -> None:
        exchange.reply(HTTPStatus.OK, b"ok\n")

    def _readiness(self, exchange: _Exchange, query: str) -> None:
        if reason := self._reason():
            exchange.reply(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n".encode())
        else:
            exchange.reply(HTTPStatus.OK, b"ready\n")

    def _metrics(self, exchange: _Exchange, query: str) -> None:
        if not self._may_read(exchange):
            exchange.reply(
                HTTPStatus.UNAUTHORIZED,
                b"needs the token of [metrics] token_file\n",
                [("WWW-Authenticate", 'Bearer realm="sow metrics"')],
            )
            return
        started: list[tuple[str, list[tuple[str, str]]]] = []
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/metrics",
            "QUERY_STRING": query,
            "HTTP_ACCEPT": exchange.headers.get("Accept", ""),
            "HTTP_ACCEPT_ENCODING": exchange.headers.get("Accept-Encoding", ""),
        }
        try:
            body = b"".join(self._metrics_app(environ, lambda status, fields: started.append((status, fields))))
        except Exception:
            log.exception("scrape_failed")
            exchange.reply(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        status, fields = started[0]
        exchange.reply(HTTPStatus(int(status.split()[0])), body, fields)

    def _may_read(self, exchange: _Exchange) -> bool:
        if not self._token:
            return True
        scheme, _, given = exchange.headers.get("Authorization", "").partition(" ")
        # In constant time: the time of the answer must not tell how much of a guess was right.
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token)
        return is_right and scheme.lower() == "bearer"


class _Exchange(BaseHTTPRequestHandler):
    """One request and its answer on bytes: the parser and the writer of the standard library, without its sockets."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # with the base's, HTTP/0.9, answers would have no head
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = _TEXT[1]

    def __init__(self, head: bytes) -> None:
        # Without the base's __init__, which would serve a socket.
        self.rfile = io.BytesIO(head)
        self.wfile: io.BytesIO = io.BytesIO()
        self.raw_requestline = self.rfile.readline()

    def reply(self, status: HTTPStatus, body: bytes = b"", fields: Fields = (_TEXT,)) -> None:
        """Writes the answer; the body only where the method has one."""
        self.send_response(status)
        for name, value in (*fields, ("Content-Length", str(len(body))), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers with an error. The base's message would repeat the request ([2])."""
        super().send_error(code)

    def handle_expect_100(self) -> bool:
        """Bodies are not read, so the final answer is the only one."""
        return True

    def version_string(self) -> str:
        """The header `Server`, without versions."""
        return "sow"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the base's
        """Requests are not logged."""
