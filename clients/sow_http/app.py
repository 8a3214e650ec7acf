"""The composition root: the one table of routes, the guard in front of it, and the server process.

[1]  `Host` is a name of this door where only this machine reaches it, so no other name does (rebinding).
[2]  A request that names an `Origin` comes from this door, or from a page in the list of --cors.
[3]  An address is UTF-8: a key that cannot be read is refused, and not taken for another one.
"""

from __future__ import annotations

import asyncio
import html
import re
import socket as sockets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote_to_bytes, urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sow_client import AsyncClient, SowError, Unavailable, __version__
from sow_client._channel import is_local
from sow_http import loads, problems, records
from sow_http.callers import Callers, Connect, token_of
from sow_http.events import EVENTS, Events
from sow_http.problems import Refused

CONNECTIONS_MAX: Final = 4_000
STOP_SECONDS: Final = 3
HEAD_BYTES_MAX: Final = 64 * 1024
HEAD_SECONDS: Final = 20
"""A client that has not sent the head of a request by then, or the rest of a body that is refused, loses its
connection."""
UNREAD_SECONDS_MAX: Final = 60
"""A client that takes nothing of what was sent for so long loses its connection, on Linux."""
_Handler: TypeAlias = Callable[[Request, AsyncClient], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Options:
    """The options with which it was started."""

    connect: Connect
    """Makes the client that shows a token."""
    host: str = "127.0.0.1"
    port: int = 7481
    """0: a free one."""
    certificate: Path | None = None
    key: Path | None = None
    origins: tuple[str, ...] = ()
    """The pages that may call from a browser, as `Origin` names them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One row of the table: a path, a method, and its meaning."""

    path: str
    method: str
    summary: str
    handler: _Handler | None  # None: the stream of events
    arguments: Mapping[str, str]
    body: Sequence[str] = ()  # the types of a body
    answer: str = "application/json"


_TOPIC: Final = "/v1/topics/{topic}"
_RECORDS: Final = _TOPIC + "/records"
_RECORD: Final = _RECORDS + "/{key}"
_BODIES: Final = ("application/json", "application/msgpack", "application/octet-stream", "text/plain")
_PUT: Final = partial(records.write, merges=False)
_PATCH: Final = partial(records.write, merges=True)
_MATCH: Final = 'If-Match: "VERSION" is a condition'
_CHANGES: Final = "Changes as server-sent events; Last-Event-ID resumes."
_WRITES: Final = {"ttl": "the lifetime, such as 10m or 90s; none: the topic's default"}
CALLS: Final = (
    Call("/v1/topics", "GET", "The topics and views that the caller may see.", records.topics, {}),
    Call(_RECORD, "GET", "The payload of a record. ETag is its version.", records.get, {}, answer="*/*"),
    Call(_RECORD, "PUT", f"Publish a record. {_MATCH}, as is If-None-Match: *.", _PUT, _WRITES, _BODIES),
    Call(_RECORD, "PATCH", "Merge fields into a record.", _PATCH, _WRITES, _BODIES),
    Call(_RECORD, "DELETE", f"Delete a record. {_MATCH}.", records.delete, {}),
    Call(_RECORDS, "GET", "The live records that match, of one instant.", records.query, records.QUERY),
    Call(_RECORDS, "POST", "Publish each line of the body.", loads.load, loads.LOAD, loads.TYPES),
    Call(_TOPIC + "/count", "GET", "The number of records that match.", records.count, records.COUNT),
    Call(_TOPIC + "/groups", "GET", "A result for each group of records.", records.groups, records.GROUPS),
    Call(_TOPIC + "/changes", "GET", _CHANGES, None, EVENTS, answer="text/event-stream"),
)
"""All that it answers; the description in OpenAPI and the page /docs are made of it."""


class _Endpoint:
    """Answers one path: finds the call by its method, and its client by the token of the request."""

    def __init__(self, events: Events, calls: Sequence[Call]) -> None:
        self._events = events
        self._handlers = {call.method: call.handler for call in calls}
        if get := self._handlers.get("GET"):
            self._handlers["HEAD"] = get

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if request.method not in self._handlers:
                message = f"{request.method}: this address knows {', '.join(self._handlers)}"
                raise Refused(405, message, reason="METHOD_NOT_ALLOWED")
            handler, token = self._handlers[request.method], token_of(request)
            async with self._events.callers.client(token) as client:
                if handler is None:
                    async with self._events.changes(request, token) as stream:
                        await stream(scope, receive, send)
                else:
                    response = await handler(request, client)
                    await response(scope, receive, send)
        except SowError as error:
            # One that comes later breaks the answer off (records [1]): uvicorn ends the connection.
            if scope.get("sow.begun"):
                raise
            allow = {"Allow": ", ".join(self._handlers)} if problems.status_of(error) == 405 else {}
            await problems.response(error, headers=allow)(scope, receive, send)


class _Guard:
    """Refuses requests before anything else sees them ([1] to [3]), and adds headers to each answer."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], origins: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["sow.begun"] = True
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'"
                headers["Cache-Control"] = "no-store"
            await send(message)

        refused = self._refusal(scope)
        answer = self._app if refused is None else problems.response(refused, headers={"Connection": "close"})
        await answer(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or (self._hosts and re.sub(r":\d*$", "", hosts[0]).lower() not in self._hosts):
            return Refused(403, "Host: this door is not known under that name", reason="HOST_UNKNOWN", field="Host")
        own = f"{scope['scheme']}://{hosts[0].lower()}"
        if any(origin.lower() not in (own, *self._origins) and "*" not in self._origins for origin in origins):
            message = f"Origin: pages of {origins[0]} may not call this door; --cors lists those that may"
            return Refused(403, message, reason="ORIGIN_REFUSED", field="Origin")
        if "content-length" in headers and "transfer-encoding" in headers:
            return Refused(400, "the request has two lengths", field="Content-Length")
        try:
            for raw in (scope["raw_path"], scope["query_string"]):
                unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:
            return Refused(400, "the address is not UTF-8, percent-encoded", reason="KEY_NOT_UTF8", field="address")
        return None


def app_of(events: Events, options: Options) -> ASGIApp:
    """The application for a server of ASGI."""

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await events.callers.close()

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "the only kind that this is registered for"
        return problems.response(Refused(error.status_code, "there is no such address; see /docs", reason="NO_ROUTE"))

    async def health(request: Request) -> Response:
        try:
            async with events.callers.client(None) as client:
                await client.whoami()
        except Unavailable as error:
            return problems.response(error)
        except SowError:
            pass  # a server that refuses is there
        return problems.answer({"status": "ok"})

    async def openapi(request: Request) -> Response:
        return problems.answer(description())

    async def docs(request: Request) -> Response:
        return HTMLResponse(page())

    async def root(request: Request) -> Response:
        return RedirectResponse("docs")

    paths = {call.path: [one for one in CALLS if one.path == call.path] for call in CALLS}
    routes = [_route(path, _Endpoint(events, calls)) for path, calls in paths.items()]
    routes += [Route("/", root), Route("/healthz", health), Route("/openapi.json", openapi), Route("/docs", docs)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: failed}, lifespan=life)
    app.router.redirect_slashes = False
    inner: ASGIApp = app
    if options.origins:
        inner = CORSMiddleware(
            app,
            allow_origins=options.origins,
            allow_methods=["GET", "HEAD", "PUT", "PATCH", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "If-Match", "If-None-Match", "Last-Event-ID"],
            expose_headers=[
                *("ETag", "Retry-After"),
                *("X-Sow-Expire-Time", "X-Sow-Publish-Time", "X-Sow-Bookmark", "X-Sow-As-Of"),
            ],
        )
    local = is_local(f"[{options.host}]:1" if ":" in options.host else f"{options.host}:1")
    hosts = frozenset({"localhost", "127.0.0.1", "[::1]", options.host.lower()}) if local else frozenset()
    return _Guard(inner, hosts, frozenset(origin.lower() for origin in options.origins))


def _route(path: str, endpoint: _Endpoint) -> Route:
    """The route of a path. A key may hold slashes, and line breaks, of which `$` would leave out the last ([3])."""
    route = Route(path.replace("{key}", "{key:path}"), endpoint)
    route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z", re.DOTALL)
    return route


def run(options: Options, ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM; `ready` gets its address. Raises OSError where it cannot listen."""
    family = sockets.AF_INET6 if ":" in options.host else sockets.AF_INET
    with sockets.create_server((options.host, options.port), family=family, backlog=1_024) as listener:
        if hasattr(sockets, "TCP_USER_TIMEOUT"):
            listener.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, UNREAD_SECONDS_MAX * 1_000)
        events = Events(Callers(options.connect))
        config = uvicorn.Config(
            app_of(events, options),
            log_level="error",
            access_log=False,  # addresses hold filters and keys
            proxy_headers=False,
            server_header=False,
            ws="none",
            http=_Protocol,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_SECONDS,
            ssl_certfile=options.certificate,
            ssl_keyfile=options.key,
        )
        config.load()  # so that a certificate that is none ends it before it says that it serves
        shown = f"[{options.host}]" if ":" in options.host else options.host
        ready(f"{'https' if options.certificate else 'http'}://{shown}:{listener.getsockname()[1]}")
        _Server(config, events).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends the streams of events first: an open one would hold the end up."""

    def __init__(self, config: uvicorn.Config, events: Events) -> None:
        super().__init__(config)
        self._events = events

    async def shutdown(self, sockets: list[sockets.socket] | None = None) -> None:
        await self._events.close()
        await super().shutdown(sockets)


class _Protocol(H11Protocol):
    """Bounds the wait for a client that owes the head of a request, or a body that nobody reads; `arguments` bounds
    that for a body that is read."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as that of uvicorn
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait(owed=False)

    def _wait(self, *, owed: bool | None = None) -> None:
        theirs, ours = self.conn.their_state, self.conn.our_state
        if owed is None:
            owed = theirs is h11.IDLE or (theirs is h11.SEND_BODY and ours is h11.DONE)
        if self._late is not None and not owed:
            self._late.cancel()
            self._late = None
        elif self._late is None and owed:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)


def is_origin(text: str) -> bool:
    """True for an origin as browsers write it, such as https://app.example, and for *."""
    parts = urlsplit(text)
    return text == "*" or (parts.scheme in ("http", "https") and text == f"{parts.scheme}://{parts.netloc}")


# ---- the description ----


def description() -> dict[str, object]:
    """The document of OpenAPI."""
    paths: dict[str, dict[str, object]] = {}
    for call in CALLS:
        named = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", call.path)
        ]
        asked = [
            {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
            for name, text in call.arguments.items()
        ]
        operation: dict[str, object] = {
            "summary": call.summary,
            "parameters": named + asked,
            "responses": {
                "200": {"description": "done", "content": {call.answer: {}}},
                "default": {"description": "a problem", "content": {"application/problem+json": {}}},
            },
            "security": [{}, {"token": []}],
        }
        if call.body:
            operation["requestBody"] = {"required": True, "content": {kind: {} for kind in call.body}}
        paths.setdefault(call.path, {})[call.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "sow http", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def page() -> str:
    """The page /docs, without scripts and without anything from elsewhere."""
    parts = []
    for call in CALLS:
        rows = "".join(
            f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(text)}" for name, text in call.arguments.items()
        )
        parts.append(
            f"<h2><code>{call.method} {html.escape(call.path)}</code></h2><p>{html.escape(call.summary)}</p>"
            f"<table>{rows}</table>"
        )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>sow http</title>"
        "<style>body{font:16px sans-serif;max-width:50rem;margin:2rem auto}td{padding:.1rem 1rem .1rem 0}</style>"
        f"<h1>sow http {html.escape(__version__)}</h1><p>For programs: <a href=/openapi.json>openapi.json</a></p>"
        + "".join(parts)
    )
