"""The console for tests: its application over fake clients, and the command `sow console` in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self, cast

import httpx
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from sow_client import AsyncClient, Identity, Instance, PermissionDenied, Placement, Status, Topic
from sow_console.app import Console, Options, app_of
from sow_console.guards import place_of
from tests.support.servers.forked_commands import sow

SERVER: Final = "ldn.example:7450"
HOST: Final = "127.0.0.1:7480"
NO_AUTHORITIES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""The console has no TLS here. Each client of httpx would read all authorities of the machine, which takes 20 ms."""


class FakeClient:
    """A client of a server that knows some tokens; it notes who asked."""

    def __init__(self, server: str, token: str | None, console: FakeConsole) -> None:
        self.server = server
        self.token = token
        self._console = console
        self.closed = False

    def _caller(self) -> str:
        name = self._console.identities.get(self.token or "")
        if name is None:
            raise PermissionDenied("the token belongs to no identity", reason="UNAUTHENTICATED")
        self._console.calls.append((self.server, name))
        return name

    async def whoami(self) -> Identity:
        if self._console.answers is not None:
            await self._console.answers.wait()
        return Identity(self._caller(), "token", "", None, (), {})

    async def describe_instance(self) -> Instance:
        return Instance(self.server, "", "", "", "", serving=True, server_version="0.1.0")

    async def placement(self) -> Placement:
        return Placement("")

    async def status(self) -> Status:
        raise PermissionDenied("it needs observe", reason="PERMISSION_DENIED")

    async def topics(self, *, with_statistics: bool = False) -> list[Topic]:
        self._caller()
        return []

    @property
    def here(self) -> Self:
        return self

    async def in_each_cell(self, ask: Callable[[FakeClient], Awaitable[object]]) -> dict[str, object]:
        return {"": await ask(self)}

    def servers_of(self, topic: str) -> str:
        return self.server

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *about: object) -> None:
        await self.close()


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class FakeConsole:
    """The application, the fake clients that it made, and what it announced."""

    def __init__(self, identities: Mapping[str, str], *, host: str = "127.0.0.1", url: str | None = None) -> None:
        self.clock = Clock()
        self.identities = identities
        """The names by their tokens."""
        self.answers: asyncio.Event | None = None
        """Set: the servers answer at a log-in. None: they always do."""
        self.clients: list[FakeClient] = []
        self.calls: list[tuple[str, str]] = []
        self.announced: list[str] = []
        self.slept: list[float] = []
        """The waits of answers to log-ins."""

        def made(server: str, token: str | None) -> AsyncClient:
            self.clients.append(FakeClient(server, token, self))
            return cast(AsyncClient, self.clients[-1])

        async def sleep(seconds: float) -> None:
            if seconds:
                self.slept.append(seconds)

        options = Options((SERVER,), made, host=host, url=url)
        place = place_of(host, options.port, secure=False, url=url)
        self.console = Console(options, place, announce=self.announced.append, clock=self.clock, sleep=sleep)
        self.app = app_of(self.console)


class RunningConsole:
    """A `sow console` in a process, and requests to it as a browser makes them."""

    def __init__(self, address: str, code: str, process: subprocess.Popen[str]) -> None:
        self.address = address
        self.process = process
        self._code = code
        self._used = False
        self.host = address.removeprefix("http://")

    def browser(self) -> httpx.Client:
        """A browser that is not logged in."""
        return httpx.Client(base_url=self.address, timeout=30, verify=NO_AUTHORITIES)

    def opened(self) -> httpx.Client:
        """A browser that has opened the one-time address."""
        found = self.browser()
        assert found.get(self.one_time()).headers["location"] == "/"
        return found

    def one_time(self) -> str:
        """The one-time address; it is to be used before it is asked for again."""
        if self._used:
            assert self.process.stdout is not None
            self._code = _code(self.process.stdout.readline())
        self._used = True
        return self._code

    def logged_in(self, token: str) -> httpx.Client:
        """A browser in which this token was given."""
        found = self.browser()
        answer = found.post("/login", data={"token": token}, headers={"Origin": self.address})
        assert answer.status_code == 303, answer.text
        return found

    def socket(self, browser: httpx.Client, path: str) -> ClientConnection:
        """The socket that a page of the browser opens."""
        cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        return connect(
            f"ws://{self.host}{path}",
            origin=Origin(self.address),
            additional_headers={"Cookie": cookies},
            max_size=None,
            proxy=None,
        )


@contextmanager
def running_console(servers: str, *options: str, token_file: Path | None = None) -> Iterator[RunningConsole]:
    """Starts `sow console` for servers on a free port. `token_file`: that of its environment."""
    process = subprocess.Popen(
        [sow(), "--server", servers, "console", "--listen", "127.0.0.1:0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | ({} if token_file is None else {"SOW_TOKEN_FILE": str(token_file)}),
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        if token_file is not None:
            assert "is not used" in first
            first = process.stdout.readline()
        found = re.match(r"serves .* at (http://127\.0\.0\.1:\d+)$", first)
        assert found, first + process.stdout.read()
        yield RunningConsole(found[1], _code(process.stdout.readline()), process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()


def _code(line: str) -> str:
    found = re.search(r"/open\?code=\S+", line)
    assert found, line
    return found[0]
