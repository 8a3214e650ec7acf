"""`sow http`: records over HTTP, which the extra `http` brings."""

from __future__ import annotations

import importlib.util
import ssl
from pathlib import Path
from typing import Final

import click

from sow_cli.session import Session
from sow_client import AsyncClient

_NEEDED: Final = ("starlette", "uvicorn")
_EXISTING_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Serve records over HTTP.")
@click.option(
    "--listen",
    default="127.0.0.1:7481",
    show_default=True,
    metavar="HOST:PORT",
    help="Where programs connect. Port 0: a free one.",
)
@click.option("--https-cert", type=_EXISTING_FILE, metavar="FILE", help="PEM certificate; turns HTTPS on.")
@click.option("--https-key", type=_EXISTING_FILE, metavar="FILE", help="PEM key of --https-cert.")
@click.option("--behind-proxy", is_flag=True, help="A proxy in front of it speaks HTTPS, and nobody else reaches it.")
@click.option("--cors", "origins", multiple=True, metavar="ORIGIN", help="A site whose pages may call; repeatable.")
@click.pass_obj
def http(
    session: Session,
    *,
    listen: str,
    https_cert: Path | None,
    https_key: Path | None,
    behind_proxy: bool,
    origins: tuple[str, ...],
) -> None:
    """Let curl, browsers, Grafana and any language read, write and follow records of --server.

    A caller shows a token as Authorization: Bearer TOKEN. It goes with that caller's calls, and no other token does.
    The page /docs lists the addresses, /openapi.json describes them.

    \b
    Examples:
      sow http
      sow --server ldn:7450 --tls-ca ca.pem http --listen 0.0.0.0:443 \\
        --https-cert a.pem --https-key a.key --cors https://app.example
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"sow http needs {', '.join(missing)}; install them: pip install 'sow[http]'")
    # Here, as these libraries are of an extra, and would double the start-up time of every other command.
    from sow_client._channel import is_local
    from sow_http import app

    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise click.UsageError(f"--listen: {listen!r} is not HOST:PORT, such as 127.0.0.1:7481")
    if (https_cert is None) != (https_key is None):
        raise click.UsageError("--https-cert and --https-key belong together: give both or none")
    if not is_local(listen) and https_cert is None and not behind_proxy:
        raise click.UsageError(
            "--listen: tokens would cross the network in plain text; give --https-cert and --https-key, or "
            "--behind-proxy"
        )
    for origin in origins:
        if not app.is_origin(origin):
            raise click.UsageError(f"--cors: {origin!r} is no origin such as https://app.example")
    if session.tls is not None and session.tls.certificate is not None:
        raise click.UsageError("--tls-cert: this certificate's rights would be lent to every caller")
    if session.token_file is not None:
        click.echo("sow: the token of --token-file is not used: callers show their own", err=True)

    def connect(token: str | None) -> AsyncClient:
        # No environment: a token of it would be lent to callers that show none.
        return AsyncClient(
            session.server,
            tls=session.tls,
            token=token,
            connect_timeout=session.waits,
            prefer=session.prefer,
            failover_publish=session.failover_publish,
            environment={},
        )

    options = app.Options(connect, host.strip("[]"), int(port), https_cert, https_key, origins)
    try:
        app.run(options, ready=lambda address: click.echo(f"serves {session.server} at {address}"))
    except ssl.SSLError as error:
        raise click.UsageError(
            f"--https-cert, --https-key: they are no PEM certificate and its key: {error}"
        ) from error
    except OSError as error:
        raise click.ClickException(f"cannot listen on {listen}: {error}") from error
