"""Requests that are let in, and the headers that each answer has. It knows no session.

[1]  `Host` must be a name that the console was given, so that no other name that leads here reaches it (rebinding).
[2]  A request that may change something, and every WebSocket, must come from a page of the console: `Origin` is there
     and is one of its own. So no other site logs in, logs out, or opens a socket with somebody's cookie.
[3]  A browser loads nothing from elsewhere, runs no script and no style that is not a file of the console, and shows
     the console in no frame.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`: with it a browser sends `Origin: null` with the console's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Place:
    """The names under which people reach the console."""

    hosts: frozenset[str]
    """As in `Host`, in lower case."""
    secure: bool
    """True: over TLS."""

    @property
    def origins(self) -> frozenset[str]:
        """As in `Origin`."""
        scheme = "https" if self.secure else "http"
        return frozenset(f"{scheme}://{host}" for host in self.hosts)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def place_of(host: str, port: int, *, secure: bool, url: str | None = None) -> Place:
    """The place of a console that listens there; `url`: the address that people use instead, such as a proxy's.

    Raises ValueError where `url` is not an address such as https://console.example."""
    hosts = {_authority(host, port, secure)}
    if is_loopback(host):
        hosts |= {_authority(name, port, secure) for name in ("localhost", "127.0.0.1", "::1")}
    if url is None:
        return Place(frozenset(hosts), secure)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"{url!r} is not an address such as https://console.example")
    secure = parts.scheme == "https"
    return Place(frozenset({_authority(parts.hostname, parts.port or (443 if secure else 80), secure)}), secure)


def refusal(place: Place, *, kind: str, method: str, headers: Headers) -> str:
    """The reason why a request is refused; "": it is not."""
    hosts = headers.getlist("host")
    if len(hosts) != 1 or hosts[0].lower() not in place.hosts:
        return "this console is not known under that name (Host)"
    if "content-length" in headers and "transfer-encoding" in headers:
        return "the request has two lengths"  # a proxy may take the other one, and see other requests
    if kind == "websocket" or method not in SAFE_METHODS:
        origins = headers.getlist("origin")
        if len(origins) != 1 or origins[0].lower() not in place.origins:
            return "the request does not come from a page of this console (Origin)"
    return ""


class Guard:
    """Refuses requests before anything else sees them, and adds the headers to each answer."""

    def __init__(self, app: ASGIApp, place: Place) -> None:
        self._app = app
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        kind = str(scope["type"])
        refused = refusal(self._place, kind=kind, method=str(scope.get("method", "GET")), headers=Headers(scope=scope))
        if refused and kind == "websocket":
            await send({"type": "websocket.close", "code": 4403, "reason": refused})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                # Pages hold data; files of the console may be kept, but are asked about each time.
                headers["Cache-Control"] = "no-cache" if str(scope["path"]).startswith("/static/") else "no-store"
                if self._place.secure:
                    headers["Strict-Transport-Security"] = "max-age=31536000"
            await send(message)

        if refused:
            # The connection ends: what follows on it may be part of the same attempt.
            answer = PlainTextResponse(f"refused: {refused}\n", status_code=403, headers={"Connection": "close"})
            await answer(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


def _authority(host: str, port: int, secure: bool) -> str:
    shown = f"[{host}]" if ":" in host else host.lower()
    return shown if port == (443 if secure else 80) else f"{shown}:{port}"
