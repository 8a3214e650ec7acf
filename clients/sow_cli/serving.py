"""Options and checks of the commands that serve callers of their own: `sow console` and `sow http`."""

from __future__ import annotations

import importlib.util
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

_EXISTING_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)

https_cert_option: Final = click.option(
    "--https-cert", type=_EXISTING_FILE, metavar="FILE", help="PEM certificate shown to callers; turns HTTPS on."
)
https_key_option: Final = click.option(
    "--https-key", type=_EXISTING_FILE, metavar="FILE", help="PEM key of --https-cert."
)


def need(what: str, libraries: Sequence[str], extra: str) -> None:
    """Raises ClickException with the libraries of an extra that are missing."""
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise click.ClickException(f"{what} needs {', '.join(missing)}; install them: pip install 'sow[{extra}]'")


def address(listen: str, https_cert: Path | None, https_key: Path | None) -> tuple[str, int]:
    """The host and the port of --listen. Raises UsageError, also for half a pair of certificate and key."""
    host, colon, port = listen.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise click.UsageError(f"--listen: {listen!r} is not HOST:PORT, such as 127.0.0.1:7480")
    if (https_cert is None) != (https_key is None):
        raise click.UsageError("--https-cert and --https-key belong together: give both or none")
    return host, int(port)


@contextmanager
def told(listen: str) -> Iterator[Callable[[str], None]]:
    """Tells what keeps a server from listening. Gives the function that announces a server which listens: an error from
    there on is none of its address."""
    listens = False

    def announce(text: str) -> None:
        nonlocal listens
        listens = True
        click.echo(text)

    try:
        yield announce
    except ssl.SSLError as error:
        raise click.UsageError(
            f"--https-cert, --https-key: they are no PEM certificate and its key: {error}"
        ) from error
    except OSError as error:
        if listens:
            raise
        raise click.ClickException(f"cannot listen on {listen}: {error}") from error
