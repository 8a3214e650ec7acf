"""The connection of a subcommand to the server: address, TLS files, and the time allowed to connect."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from sow_cli import display
from sow_client import Client, FailoverPublish, Instance, InvalidArgument, Prefer, SowError, Tls

if TYPE_CHECKING:
    from sow_client import AsyncClient

DEFAULT_PORT: Final = 7450
DEFAULT_SERVER: Final = f"127.0.0.1:{DEFAULT_PORT}"
NEAR_NAMES_MAX: Final = 1_000
"""Names that are compared with a mistyped one; each takes up to 0.1 ms."""
_SCHEMES: Final = ("unix:", "dns:", "ipv4:", "ipv6:")


@dataclass(frozen=True, slots=True)
class Session:
    """The server that this invocation talks to."""

    server: str
    tls: Tls | None
    connect: Connect
    token_file: Path | None = None
    prefer: Prefer = "first"
    failover_publish: FailoverPublish = "again"
    waits: float | None = None
    """How many seconds to wait for a server, also for one that refuses. None: as a client does by itself (rule F1)."""

    @property
    def command(self) -> str:
        """The beginning of a command to the same server, for hints."""
        tls = self.tls or Tls()
        given = {
            "--server": None if self.server == DEFAULT_SERVER else self.server,
            "--tls-ca": tls.ca,
            "--tls-cert": tls.certificate,
            "--tls-key": tls.key,
            "--tls-server-name": tls.server_name,
            "--token-file": self.token_file,
            "--prefer": None if self.prefer == "first" else self.prefer,
            "--failover-publish": None if self.failover_publish == "again" else self.failover_publish,
        }
        return shlex.join(["sow", *(part for name, value in given.items() if value for part in (name, str(value)))])

    def hint(self, error: SowError) -> str:
        """A next step for a caller without access, or with a part of a key; "": the message says all."""
        if fields := error.details.get("key_fields", ""):
            ways = ": with | between, or as arguments of their own with --parts" if "," in fields else ""
            return f"a key of this topic has the values of {display.safe(fields)}{ways}"
        if error.reason == "UNAUTHENTICATED" and self.token_file is None and (self.tls is None or not self.tls.key):
            return "no credential was given; see --token-file (SOW_TOKEN_FILE), or --tls-cert and --tls-key"
        if error.reason == "PERMISSION_DENIED":
            return "`sow auth check IDENTITY ACTION TOPIC` tells an operator which line of the access file decides"
        return ""

    def client(self) -> Client:
        """A client that is not connected yet; use it in a `with` block. A bad address or TLS file is wrong usage."""
        try:
            return self.connect(self)
        except InvalidArgument as error:
            raise click.UsageError(error.message) from error

    def of_one(self) -> Session:
        """A session with the instance that a list of addresses leads to, for work that must not move to another one."""
        if "," not in self.server:
            return self
        with self.client() as client:
            used = client.describe_instance()
        click.echo(f"sow: uses {display.safe(used.shown)}, and no other", err=True)
        tls = self.tls
        if tls is not None and used.host and not tls.server_name:
            tls = replace(tls, server_name=used.host)  # the certificate has the name that the address was found by
        return replace(self, server=used.address, tls=tls)

    def async_client(self) -> AsyncClient:
        """A client for an event loop, with the same credentials. A bad address or TLS file is found by `client`."""
        from sow_client import AsyncClient  # few commands have an event loop

        return AsyncClient(
            self.server,
            tls=self.tls,
            token=self.token_file,
            connect_timeout=self.waits,
            prefer=self.prefer,
            failover_publish=self.failover_publish,
            environment={},
        )


def near_names(topic: str, names: Iterable[str]) -> list[str]:
    """The names that resemble a mistyped one, the best one first. Among very many names nothing is guessed."""
    # Only names of about its length can: with others, `difflib` would take seconds for 100,000 topics.
    least, most = 0.6 * len(topic), len(topic) / 0.6
    near = [name for name in names if least <= len(name) <= most and name != topic]
    return [] if len(near) > NEAR_NAMES_MAX else difflib.get_close_matches(topic, near, n=2, cutoff=0.75)


def host_and_port(address: str) -> tuple[str, int] | None:
    """The parts of an address that a client accepts, with the port that it means where it has none. None: it has a
    scheme of gRPC."""
    if address.startswith(_SCHEMES):
        return None
    if address.endswith("]") or ":" not in address:
        return address.strip("[]"), DEFAULT_PORT
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


Connect: TypeAlias = Callable[[Session], Client]


def connect(session: Session) -> Client:
    """Makes the real client; tests replace it by a fake."""
    return Client(
        session.server,
        tls=session.tls,
        token=session.token_file,
        connect_timeout=session.waits,
        prefer=session.prefer,
        failover_publish=session.failover_publish,
        on_failover=tell_move,
        environment={},  # the options have taken what they want of it
    )


def tell_move(left: Instance, used: Instance, reason: str) -> None:
    """Tells a person that another instance is in use from now on."""
    click.echo(f"sow: went on at {display.safe(used.shown)}; left {display.safe(left.shown)} ({reason})", err=True)
