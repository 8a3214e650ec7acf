"""Sessions on the server for Starlette, FastAPI and other ASGI frameworks that read `scope["session"]`.

app.add_middleware(SessionMiddleware, server="127.0.0.1:7450", lifetime="20m", secure=True)

async def sign_in(request: Request) -> Response:
    request.session.regenerate()
    request.session["user"] = "alice"

[1]  The cookie has a random id of 256 bits and nothing else. An id that the server does not know is never taken over:
     the session gets a new one.
[2]  Each use renews the session; it costs a write only once a quarter of its lifetime has gone. A change is a write.
[3]  Of two requests that change one session at once, the later one to end wins. A session that was ended meanwhile
     stays ended.
[4]  A change is on its way to the disk before the response begins. If it cannot be stored, the request fails.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final, Literal

import msgspec

from sow_client import AsyncClient, ConditionFailed, PermissionDenied
from sow_client._records import Ttl, ttl_micros

MICROS: Final = 1_000_000
_ID: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")

Message = MutableMapping[str, Any]
"""A message or a scope of ASGI, which may hold anything."""
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Session(dict[str, Any]):
    """The values of a session, as JSON has them. An empty session has no record and no cookie."""

    renamed = False

    def regenerate(self) -> None:
        """Gives the session a new id; the old one ends with this request. Call it when somebody signs in, so that an id
        that was known before has no rights."""
        self.renamed = True


class SessionMiddleware:
    """Reads the session before each request, and stores what has changed. Owns the client, which ends with the app."""

    def __init__(
        self,
        app: App,
        *,
        server: str | AsyncClient | None = None,
        topic: str = "sessions",
        lifetime: Ttl = "14d",
        cookie: str = "session",
        path: str = "/",
        same_site: Literal["lax", "strict", "none"] = "lax",
        secure: bool = False,
    ) -> None:
        """`server` is an address as for `AsyncClient`, or a client, which the caller closes. The topic is created at
        the first use. `secure`: the cookie goes over HTTPS only; with `same_site="none"` it must."""
        if not _NAME.fullmatch(cookie):
            raise ValueError(f"cookie: {cookie!r} is no name of letters, digits, '_' and '-'")
        if same_site == "none" and not secure:
            raise ValueError("same_site: browsers take 'none' only with secure=True")
        self._lifetime = ttl_micros(lifetime, "lifetime")
        if self._lifetime < MICROS:
            raise ValueError(f"lifetime: {lifetime!r} is shorter than a second")
        self._app = app
        self._server = server
        self._client = server if isinstance(server, AsyncClient) else AsyncClient(server)
        self._topic = topic
        self._prepared = False
        self._cookie = cookie
        self._flags = f"; Path={path}; HttpOnly; SameSite={same_site.capitalize()}{'; Secure' if secure else ''}"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                if self._client is not self._server:
                    await self._client.close()
            return
        await self._prepare()
        known = self._shown(scope)
        record = None
        if known is not None:
            seconds = self._lifetime / MICROS
            record = await self._client.get(self._topic, known, touch=seconds, touch_below=seconds * 3 / 4)  # [2]
        session = Session(record.data if record is not None and isinstance(record.data, dict) else {})
        before = msgspec.json.encode(session)
        scope["session"] = session

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = await self._stored(session, before, None if record is None else known)
                if cookie is not None:
                    message["headers"] = [*message.get("headers", ()), (b"set-cookie", cookie.encode("latin-1"))]
            await send(message)

        await self._app(scope, receive, sent)

    def _shown(self, scope: Message) -> str | None:
        """The id that the request shows."""
        for name, value in scope["headers"]:
            if name == b"cookie":
                # Not by SimpleCookie, which takes none at all where one of another program is unusual, such as JSON.
                for one in value.decode("latin-1").split(";"):
                    cookie, _, found = one.strip().partition("=")
                    if cookie == self._cookie and _ID.fullmatch(found):
                        return str(found)
        return None

    async def _prepare(self) -> None:
        if not self._prepared:
            with suppress(PermissionDenied):  # who may not create topics uses one that is there
                await self._client.create_topic(self._topic, exist_ok=True, expiration="enabled")
            self._prepared = True

    async def _stored(self, session: Session, before: bytes, known: str | None) -> str | None:
        """Stores the session; returns its cookie. None: the browser keeps what it has."""
        after = msgspec.json.encode(session)
        seconds, value, ended = self._lifetime / MICROS, known, f"{self._cookie}=; Max-Age=0{self._flags}"
        if session and (known is None or session.renamed):
            value = secrets.token_urlsafe(32)  # [1]
            await self._client.publish(self._topic, after, key=value, ttl=seconds, only_if_absent=True)
        elif session and after != before:
            try:
                await self._client.publish(self._topic, after, key=known, ttl=seconds, only_if_present=True)
            except ConditionFailed:
                return ended  # [3]
        if known is not None and (value != known or not session):
            await self._client.sow_delete(self._topic, keys=[known])
        if not session:
            return None if known is None else ended
        return f"{self._cookie}={value}; Max-Age={int(seconds)}{self._flags}"
