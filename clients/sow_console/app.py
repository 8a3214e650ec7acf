"""The composition root: routes, log-in, and the server process of the console.

[1]  Nothing but the log-in page, its files and the one-time address answers without a session.
[2]  A request names one of the servers that the console was started with, or that the placement of one of these names
     (rule C23), or there is no such page.
[3]  A token comes in the body of one POST, and is in no address, no page, no cookie and no log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket as sockets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast
from urllib.parse import parse_qs, quote, urlencode

import jinja2
import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from sow_client import SowError, Unavailable, __version__
from sow_client._parameters import parameters_of
from sow_console import documents, live, texts
from sow_console.editing import TEXT_BYTES_MAX
from sow_console.exports import KINDS, Files, Kind, begun
from sow_console.guards import Guard, Place, is_loopback, place_of
from sow_console.pages import PAGES, Page, View, records
from sow_console.sessions import Connect, Session, Sessions, same
from sow_console.writes import CHECKS, WRITES, Write

HERE: Final = Path(__file__).parent
BODY_BYTES_MAX: Final = 32_768
"""The bound of a form; a token has 16 KiB at most."""
EDIT_BODY_BYTES_MAX: Final = 4 * TEXT_BYTES_MAX
"""The bound of a form with a payload, of which a byte may take three."""
SOCKET_MESSAGE_BYTES_MAX: Final = 1_024
"""A browser sends nothing but the numbers of frames."""
CONNECTIONS_MAX: Final = 1_000
STOP_SECONDS: Final = 3
EXPORTS_MAX: Final = 8
"""Files that are made at the same time, each with a piece of records in memory."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options with which the console was started."""

    servers: tuple[str, ...]
    """HOST:PORT of each; pages call these, and those that their placement names."""
    connect: Connect
    host: str = "127.0.0.1"
    port: int = 7480
    """0: a free one."""
    url: str | None = None
    """The address that people use, if that is another one."""
    certificate: Path | None = None
    key: Path | None = None
    """PEM files for TLS to browsers."""
    allow_writes: bool = False
    files: Files | None = None
    """The files of records that people may save; None: none."""

    @property
    def one_time(self) -> bool:
        """True if whoever can read this terminal may look without a token: only this machine reaches the console."""
        return is_loopback(self.host) and self.url is None


class Console:
    """Owns the sessions and answers requests."""

    def __init__(
        self,
        options: Options,
        place: Place,
        *,
        announce: Callable[[str], None] = lambda address: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`announce` gets the one-time address, and another one each time that one was used."""
        self.options = options
        self.place = place
        self.sessions = Sessions(options.servers, options.connect, clock)
        self._announce = announce
        self._sleep = sleep
        self._exports = 0
        self._cookie = "__Host-sow-console" if place.secure else f"sow-console-{options.port}"
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals |= {"pages": list(PAGES.values()), "texts": texts, "version": __version__}

    def announce(self) -> None:
        """Makes a one-time address and tells it."""
        scheme = "https" if self.place.secure else "http"
        shown = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        self._announce(f"{scheme}://{shown}:{self.options.port}/open?code={self.sessions.new_code()}")

    # ---- sessions ----

    def _session(self, connection: HTTPConnection) -> Session | None:
        return self.sessions.find(connection.cookies.get(self._cookie))

    async def _begin(self, request: Request, session: Session, target: str) -> Response:
        """The answer that begins a session; one that was there before ends."""
        if (former := self._session(request)) is not None:
            await self.sessions.end(former)
        response = RedirectResponse(target, status_code=303)
        response.set_cookie(
            self._cookie, session.id, path="/", httponly=True, samesite="strict", secure=self.place.secure
        )
        return response

    async def open(self, request: Request) -> Response:
        """The one-time address."""
        if not self.options.one_time or not self.sessions.use_code(request.query_params.get("code", "")):
            return self._login_page(
                request,
                "This address was used already, or is an old one. The terminal of the console has a new one.",
                403,
            )
        self.announce()
        return await self._begin(request, await self.sessions.begin({}, None), "/")

    async def login(self, request: Request) -> Response:
        """The form for a token, and its answer."""
        if request.method != "POST":
            return self._login_page(request, "")
        form = await _form(request)
        address = request.client.host if request.client else ""
        token = form.get("token", "").strip()
        async with self.sessions.asking:
            identities, problems = await self._identities(token)
        if not identities:
            with self.sessions.failing(address) as seconds:
                await self._sleep(seconds)
            return self._login_page(request, "; ".join(problems) or "No server asks for a token.", 403)
        session = await self.sessions.begin(identities, token)
        return await self._begin(request, session, _local(form.get("next", "")))

    async def _identities(self, token: str) -> tuple[dict[str, str], list[str]]:
        """The names that this token has at the servers, and the reasons of those that do not take it."""
        identities: dict[str, str] = {}
        problems: list[str] = []
        for server in self.sessions.servers:
            try:
                async with self.sessions.client(server, token) as client:
                    if name := (await client.whoami()).name:
                        identities[server] = name
            except SowError as error:
                problems.append(f"{server}: {error.message}")
        return identities, problems

    async def logout(self, request: Request) -> Response:
        """Ends the session."""
        session = self._session(request)
        if session is None:
            return RedirectResponse("/login", status_code=303)
        form = await _form(request)
        if not same(form.get("csrf", ""), session.csrf):
            raise HTTPException(403, "the form is not one of this session (CSRF token)")
        await self.sessions.end(session)
        response = RedirectResponse("/login", status_code=303)
        response.delete_cookie(self._cookie, path="/", secure=self.place.secure, httponly=True, samesite="strict")
        return response

    def _login_page(self, request: Request, problem: str, status: int = 200) -> Response:
        return self._html(
            "login.html",
            status,
            problem=problem,
            next=_local(request.query_params.get("next", "")),
            servers=self.sessions.servers,
            one_time=self.options.one_time,
        )

    # ---- pages ----

    async def home(self, request: Request) -> Response:
        """Leads to the overview of the first server."""
        return RedirectResponse(f"/{quote(self.sessions.servers[0], safe=':[]')}/overview", status_code=303)

    async def page(self, request: Request) -> Response:
        """A page, or its JSON."""
        name, _, ending = request.path_params["page"].partition(".")
        page = PAGES.get(name)
        if page is None or ending not in ("", "json"):
            raise HTTPException(404, "there is no such page")
        session = self._session(request)
        if session is None:
            if ending:
                raise HTTPException(401, "log in first")
            wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"/login?{urlencode({'next': wanted})}", status_code=303)
        server = request.path_params["server"]
        if not await session.knows(server):
            raise HTTPException(404, "there is no such page")
        view = self._view(request, session)
        if (there := await session.place(view.argument("topic"), server)) != server:
            if not ending:
                query = f"?{request.url.query}" if request.url.query else ""
                return RedirectResponse(f"/{quote(there, safe=':[]')}/{name}{query}", status_code=303)
            view = dataclasses.replace(view, server=there)
        try:
            if ending:
                facts = dict(await (page.twin or page.facts)(view))
                return Response(documents.encoded(facts), media_type="application/json")
            content = await self._content(page, view)
        except SowError as error:
            status = 503 if isinstance(error, Unavailable) else 403 if "DENIED" in error.reason else 400
            if ending:
                body = documents.encoded({"error": records.error_of(error)})
                return Response(body, status, media_type="application/json")
            content = self._templates.get_template("error.html").render(view=view, error=error, page=page)
            as_of = None if isinstance(error, Unavailable) else texts.micros(view.now)
            return self._framed(page, view, content, as_of=as_of)
        return self._framed(page, view, content, as_of=texts.micros(view.now))

    async def page_live(self, socket: WebSocket) -> None:
        """The frames of a page."""
        page, session = PAGES.get(socket.path_params["page"]), self._session(socket)
        if session is None or page is None or not await session.knows(socket.path_params["server"]):
            await socket.accept()  # a browser is not told why a socket was not opened, and would try for ever
            await socket.close(live.ENDED, "log in first")
            return
        view = self._view(socket, session)
        source: live.Source
        if page.name == "records":
            source = live.RecordFrames(view.client, records.asked(view.arguments))
        else:
            source = live.PageFrames(
                lambda: self._content(page, self._view(socket, session, is_first=False)), page.interval
            )
        await live.serve(socket, session, source, still=lambda: self.sessions.find(session.id) is not None)

    def _view(self, connection: HTTPConnection, session: Session, *, is_first: bool = True) -> View:
        server = connection.path_params["server"]
        arguments: Mapping[str, str] = dict(connection.query_params)
        allow_writes = self.options.allow_writes
        files = self.options.files
        kinds = {kind: files.missing.get(kind, "") for kind in KINDS} if files else {}
        now = datetime.now(UTC)
        return View(session, server, session.servers, arguments, now, allow_writes, is_first, kinds)

    # ---- files ----

    async def export(self, request: Request) -> Response:
        """The records of a filter as a file, while they are read."""
        session, kind = self._session(request), request.query_params.get("kind", "")
        if session is None:
            return RedirectResponse("/login", status_code=303)
        files = self.options.files
        if files is None or kind not in KINDS or not await session.knows(request.path_params["server"]):
            raise HTTPException(404, "there is no such file")
        if kind in files.missing:
            raise HTTPException(501, files.missing[kind])
        if self._exports >= EXPORTS_MAX:
            raise HTTPException(503, f"{EXPORTS_MAX} files are being made already; try again in a while")
        view = self._view(request, session)
        topic, filter_text = view.argument("topic"), view.argument("filter")
        columns, values = request.query_params.getlist("column"), view.argument("parameters")
        self._exports += 1
        try:
            given = parameters_of(values) if values else None
            pieces = await begun(view.client, files.make, cast(Kind, kind), topic, filter_text, columns, given)
        except (SowError, ValueError) as error:
            self._exports -= 1
            raise HTTPException(400, getattr(error, "message", str(error))) from error
        except BaseException:
            self._exports -= 1
            raise
        name = re.sub("[^A-Za-z0-9_.-]", "_", topic)
        headers = {"Content-Disposition": f'attachment; filename="{name}.{kind}"'}
        return StreamingResponse(self._sent(pieces, session), media_type=KINDS[kind], headers=headers)

    async def _sent(self, pieces: AsyncGenerator[bytes, None], session: Session) -> AsyncGenerator[bytes, None]:
        """The pieces, until the session ends: then the file breaks off."""
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    if session.ended.is_set():
                        raise RuntimeError("the session has ended")
                    yield piece
        finally:
            self._exports -= 1

    # ---- writes ----

    async def check(self, request: Request) -> Response:
        """As `write`, for that which changes nothing."""
        return await self._asked(request, CHECKS)

    async def write(self, request: Request) -> Response:
        """Asks whether a write is wanted, and does it."""
        return await self._asked(request, WRITES)

    async def _asked(self, request: Request, known: Mapping[str, Write]) -> Response:
        wanted, session = known.get(request.path_params["name"]), self._session(request)
        if wanted is None:
            raise HTTPException(404, "there is no such write")
        if session is None:
            return RedirectResponse("/login", status_code=303)
        if not await session.knows(request.path_params["server"]):
            raise HTTPException(404, "there is no such write")
        view = self._view(request, session)
        is_posted = request.method == "POST"
        bytes_max = EDIT_BODY_BYTES_MAX if wanted.long else BODY_BYTES_MAX
        body: Mapping[str, str] = await _form(request, bytes_max) if is_posted else {}
        if is_posted and not same(body.get("csrf", ""), session.csrf):
            raise HTTPException(403, "the form is not one of this session (CSRF token)")
        is_sure = is_posted and not (wanted.long and body.get("look"))
        needed = wanted.fields + (wanted.pinned if is_sure else ())
        form = {**view.arguments, **body}
        given = {name: form.get(name, "") for name in (*needed, *(wanted.options or {}))}
        given = {name: value if name in ("key", *wanted.long) else value.strip() for name, value in given.items()}
        if missing := [name for name in needed if not given[name]]:
            raise HTTPException(400, f"{', '.join(missing)}: is missing")
        done, problem, question = "", "", None
        try:
            if is_sure:
                done = await wanted.do(view, given)
            else:
                question = await wanted.ask(view, given)
        except SowError as error:
            problem = f"{error.reason}: {error.message}"
        page, arguments = wanted.back(given)
        back = view.url(page, **arguments)
        code = 400 if problem else 200
        return self._html(
            "write.html",
            code,
            write=wanted,
            kind="check" if known is CHECKS else "write",
            view=view,
            given=given,
            question=question,
            done=done,
            problem=problem,
            back=back,
        )

    async def _content(self, page: Page, view: View) -> str:
        """The part of a page that is made anew."""
        facts = await page.facts(view)
        return self._templates.get_template(f"{page.name}.html").render(view=view, page=page, **facts)

    def _framed(self, page: Page, view: View, content: str, *, as_of: int | None) -> Response:
        return self._html("frame.html", 200, page=page, view=view, content=Markup(content), as_of=as_of)

    def _html(self, template: str, code: int, **values: object) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(**values), code)

    async def refused(self, request: Request, error: Exception) -> Response:
        """An HTTP error as a page of plain words."""
        assert isinstance(error, HTTPException), "the only kind that this is registered for"
        return self._html("refused.html", error.status_code, status=error.status_code, message=error.detail)


def app_of(console: Console) -> ASGIApp:
    """The application for a server of ASGI."""

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(console.sessions.close)
            sweeping = asyncio.create_task(_sweep(console.sessions), name="sweep of sessions")
            stack.callback(sweeping.cancel)
            yield

    app = Starlette(routes=routes(console), exception_handlers={HTTPException: console.refused}, lifespan=life)
    # Such a redirect names `http`, also behind a proxy that speaks HTTPS, so the filter in the address was plain text.
    app.router.redirect_slashes = False
    return Guard(app, console.place)


def routes(console: Console) -> list[BaseRoute]:
    """All that it answers to."""
    writes = [Route("/{server}/write/{name}", console.write, methods=["GET", "POST"])]
    if not console.options.allow_writes:
        writes = []
    return [
        Route("/", console.home),
        Route("/open", console.open),
        Route("/login", console.login, methods=["GET", "POST"]),
        Route("/logout", console.logout, methods=["POST"]),
        Mount("/static", StaticFiles(directory=HERE / "static")),
        Route("/{server}/export", console.export),
        Route("/{server}/{page}", console.page),
        Route("/{server}/check/{name}", console.check, methods=["GET", "POST"]),
        *writes,
        WebSocketRoute("/{server}/{page}/live", console.page_live),
    ]


def run(options: Options, announce: Callable[[str], None], ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. `announce`: see Console; `ready` gets the address of the console.

    Raises OSError where it cannot listen, and ValueError for an address that is none."""
    family = sockets.AF_INET6 if ":" in options.host else sockets.AF_INET
    with sockets.create_server((options.host, options.port), family=family) as listener:
        options = _with_port(options, listener.getsockname()[1])
        secure = options.certificate is not None
        place = place_of(options.host, options.port, secure=secure, url=options.url)
        console = Console(options, place, announce=announce)
        ready(options.url or min(place.origins, key=lambda origin: options.host not in origin))
        if options.one_time:
            console.announce()
        config = uvicorn.Config(
            app_of(console),
            log_level="error",
            access_log=False,  # addresses hold filters and keys
            proxy_headers=False,
            server_header=False,
            ws="websockets-sansio",
            ws_max_size=SOCKET_MESSAGE_BYTES_MAX,
            # Compression takes a fifth of the CPU time of frames, and spares nothing on the way within this machine.
            ws_per_message_deflate=not options.one_time,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_SECONDS,
            ssl_certfile=options.certificate,
            ssl_keyfile=options.key,
        )
        _Server(config, console.sessions).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends the sessions first: an open socket would hold the end up, and leave its story in the terminal."""

    def __init__(self, config: uvicorn.Config, sessions: Sessions) -> None:
        super().__init__(config)
        self._sessions = sessions

    async def shutdown(self, sockets: list[sockets.socket] | None = None) -> None:
        await self._sessions.close()
        await super().shutdown(sockets)


def _with_port(options: Options, port: int) -> Options:
    return dataclasses.replace(options, port=port)


async def _sweep(sessions: Sessions) -> None:
    while True:
        await asyncio.sleep(60)
        await sessions.sweep()


async def _form(request: Request, bytes_max: int = BODY_BYTES_MAX) -> dict[str, str]:
    """The fields of a form, of a bounded size."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
        raise HTTPException(415, "a form is expected")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise HTTPException(413, "the form is too large")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise HTTPException(413, "the form is too large")
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=100)
    except ValueError as error:
        raise HTTPException(400, "the form cannot be read") from error
    return {name: values[0] for name, values in fields.items()}


def _local(target: str) -> str:
    """A path of this console, never an address elsewhere."""
    is_local = target.startswith("/") and not target.startswith("//") and "\\" not in target and target.isprintable()
    return target if is_local else "/"


def addresses(text: str) -> Sequence[str]:
    """The servers in a list with commas, each as HOST:PORT."""
    found = []
    for one in text.split(","):
        name = one.strip()
        host, colon, port = name.rpartition(":")
        found.append(name if colon and port.isdecimal() and host else f"{name}:7450")
    return list(dict.fromkeys(found))
