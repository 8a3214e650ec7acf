"""A page: its facts, which are also its JSON, and the request that they are made for."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeAlias
from urllib.parse import urlencode

from sow_client import AsyncClient
from sow_console.sessions import Session

DEFAULT_SERVER = "127.0.0.1:7450"
"""The server of a command that names none."""

Facts: TypeAlias = Mapping[str, object]
_PLAIN: Final = re.compile(r"[\w@%+:,./-][\w@%+=:,./-]*")
"""Arguments that need no quotes in any shell."""


@dataclass(frozen=True, slots=True)
class View:
    """A look at a page: who looks, at which server, with which arguments."""

    session: Session
    server: str
    servers: tuple[str, ...]
    arguments: Mapping[str, str]
    now: datetime
    allow_writes: bool = False
    is_first: bool = True
    """True if the page is opened; False: it is made anew."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The kinds of files that can be saved, each with the reason why it cannot after all, or an empty text."""

    @property
    def client(self) -> AsyncClient:
        """The person's client of this server."""
        return self.session.client(self.server)

    @property
    def everywhere(self) -> AsyncClient:
        """The person's client of the server whose word about cells counts: it goes to all of them."""
        return self.session.client(self.session.home(self.server))

    def argument(self, name: str, default: str = "") -> str:
        """An argument, without space around it."""
        return self.arguments.get(name, default).strip()

    def command(self, *parts: str) -> str:
        """The command line that shows the same."""
        server = () if self.server == DEFAULT_SERVER else ("--server", self.server)
        return " ".join(map(_quoted, ["sow", *server, *parts]))

    def url(self, page: str, **arguments: str | None) -> str:
        """The address of a page about this server."""
        given = {name: value for name, value in arguments.items() if value}
        return f"/{self.server}/{page}" + (f"?{urlencode(given)}" if given else "")


def operands(*parts: str) -> list[str]:
    """Arguments of a command, the last of it, which are no options even where one begins with `-`."""
    return ["--", *parts] if any(part.startswith("-") for part in parts) else list(parts)


def _quoted(part: str) -> str:
    """An argument for a shell. Control characters are escaped: a key with them would do something to the terminal that
    it is pasted into, and one with a change of the direction of writing would not look as it is."""
    if part.isprintable():
        return part if _PLAIN.fullmatch(part) else _in_quotes(part)
    # No argument can hold a zero: it becomes another text, so the command finds no key, and never that of the begin.
    escapes = {"\0": "\\\\0", "\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "$'" + "".join(escapes.get(one) or (one if one.isprintable() else _escape(one)) for one in part) + "'"


def _in_quotes(part: str) -> str:
    """As people quote: '…', and "…" around apostrophes where that is shorter. A shell that people type into would take
    `!` for one of its former commands inside of "…"."""
    single = "'" + part.replace("'", "'\\''") + "'"
    double = '"' + re.sub(r'([$`"\\])', r"\\\1", part) + '"'
    return single if "!" in part or len(single) <= len(double) else double


def _escape(character: str) -> str:
    return f"\\U{ord(character):08x}" if ord(character) > 0x7F else f"\\x{ord(character):02x}"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the console. Its address is /SERVER/NAME, its JSON is at /SERVER/NAME.json."""

    name: str
    title: str
    key: str
    """The key that leads to it."""
    facts: Callable[[View], Awaitable[Facts]]
    """Raises SowError; the page then shows the error."""
    interval: float = 2.0
    """Seconds between two looks while it is open."""
    twin: Callable[[View], Awaitable[Facts]] | None = None
    """The facts of its JSON, where they are more than those of the page."""
