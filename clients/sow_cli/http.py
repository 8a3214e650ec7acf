"""`sow http`: records over HTTP, which the extra `http` brings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from sow_cli import serving
from sow_cli.session import Session
from sow_client import AsyncClient

_NEEDED: Final = ("starlette", "uvicorn")


@click.command(short_help="Serve records over HTTP.")
@click.option(
    "--listen",
    default="127.0.0.1:7481",
    show_default=True,
    metavar="HOST:PORT",
    help="Where programs connect. Port 0: a free one.",
)
@serving.https_cert_option
@serving.https_key_option
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
    serving.need("sow http", _NEEDED, "http")
    # Here, as these libraries are of an extra, and would double the start-up time of every other command.
    from sow_client._channel import is_local
    from sow_http import app

    host, port = serving.address(listen, https_cert, https_key)
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

    options = app.Options(connect, host, port, https_cert, https_key, origins)
    with serving.told(listen) as announce:
        app.run(options, ready=lambda address: announce(f"serves {session.server} at {address}"))
