"""How a subcommand reaches the server: address, TLS files, and how long it may take to get there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import click

from sow_client import Client, InvalidArgument, Tls

DEFAULT_SERVER: Final = "127.0.0.1:7450"
CONNECT_SECONDS_MAX: Final = 3.0
"""A person waits at the other end: longer than this, and the server counts as not reachable (exit code 3)."""


@dataclass(frozen=True, slots=True)
class Session:
    """Which server this invocation talks to."""

    server: str
    tls: Tls | None
    connect: Connect

    def client(self) -> Client:
        """A client that is not connected yet; use it in a `with` block. A bad address or TLS file is wrong usage."""
        try:
            return self.connect(self)
        except InvalidArgument as error:
            raise click.UsageError(error.message) from error


Connect: TypeAlias = Callable[[Session], Client]


def connect(session: Session) -> Client:
    """The real thing; tests put a fake in its place."""
    return Client(session.server, tls=session.tls, connect_timeout=CONNECT_SECONDS_MAX)
