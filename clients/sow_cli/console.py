"""`sow console`: starts the console, which the extra `console` brings."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click

from sow_cli import serving
from sow_cli.exporting import RecordFile
from sow_cli.output import Format, selected
from sow_cli.rows import BatchColumns, RecordForm
from sow_cli.session import Session
from sow_client import AsyncClient, InvalidArgument, PackedRecords, TopicSettings

_NEEDED: Final = ("jinja2", "starlette", "uvicorn", "websockets")
_NO_PARQUET: Final = "Parquet needs the Python package pyarrow where the console runs: pip install 'sow[arrow]'"


@click.command(short_help="Look at servers in the browser.")
@click.option(
    "--listen",
    default="127.0.0.1:7480",
    show_default=True,
    metavar="HOST:PORT",
    help="Where browsers connect. Port 0: a free one.",
)
@serving.https_cert_option
@serving.https_key_option
@click.option("--url", metavar="URL", help="The address that people use, where it is another one.")
@click.option("--allow-writes", is_flag=True, help="Let people touch and delete records, and more. Default: only look.")
@click.pass_obj
def console(
    session: Session,
    *,
    listen: str,
    https_cert: Path | None,
    https_key: Path | None,
    url: str | None,
    allow_writes: bool,
) -> None:
    """Serve pages about the servers of --server, a list with commas.

    Each person logs in with a token, which goes with that person's calls, to these servers and to those that their
    placement names. On this machine, without tokens, the terminal shows an address that works once.

    \b
    Examples:
      sow console
      sow --server ldn:7450,nyc:7450 --tls-ca ca.pem console
      sow --server ldn:7450 console --listen 0.0.0.0:443 --https-cert a.pem \\
        --https-key a.key --url https://console.example
    """
    serving.need("the console", _NEEDED, "console")
    # Here, as these libraries are of an extra, and would double the start-up time of every other command.
    from sow_console import app, exports

    host, port = _checked_address(listen, url, https_cert, https_key)
    if session.tls is not None and session.tls.certificate is not None:
        raise click.UsageError("--tls-cert: the console would lend this certificate's rights to whoever opens it")
    if session.token_file is not None:
        click.echo("sow: the token of --token-file is not used: people log in with their own", err=True)

    def connect(server: str, token: str | None) -> AsyncClient:
        # No environment: a token of it would be lent to whoever opens the console.
        return AsyncClient(server, tls=session.tls, token=token, connect_timeout=session.waits, environment={})

    lacks_arrow = importlib.util.find_spec("pyarrow") is None
    options = app.Options(
        tuple(app.addresses(session.server)),
        connect,
        host,
        port,
        url,
        https_cert,
        https_key,
        allow_writes,
        exports.Files(_record_file, {"parquet": _NO_PARQUET} if lacks_arrow else {}),
    )
    try:
        with serving.told(listen) as announce:
            app.run(
                options,
                announce=lambda address: announce(f"to open it here, once: {address}"),
                ready=lambda address: announce(f"serves {', '.join(options.servers)} at {address}"),
            )
    except InvalidArgument as error:
        raise click.ClickException(f"cannot listen on {listen}: {error}") from error
    except ValueError as error:
        raise click.UsageError(f"--url: {error}") from error


def _checked_address(listen: str, url: str | None, https_cert: Path | None, https_key: Path | None) -> tuple[str, int]:
    """The host and the port to listen at. Raises a usage error where tokens would cross the network in plain text, or
    no browser would find the console."""
    from sow_console import guards

    host, port = serving.address(listen, https_cert, https_key)
    if not guards.is_loopback(host) and https_cert is None and not (url or "").startswith("https://"):
        raise click.UsageError(
            "--listen: tokens would cross the network in plain text; give --https-cert and --https-key, or behind a "
            "proxy --url https://…"
        )
    if url is not None and not url.startswith("https://") and not guards.is_loopback(urlsplit(url).hostname or ""):
        raise click.UsageError("--url: tokens would cross the network in plain text; it begins with https://")
    if url is None and host in ("0.0.0.0", "::"):
        raise click.UsageError(
            f"--listen: no browser calls the console {host}; give the address that people use: --url https://…"
        )
    return host, port


class _PackedFile:
    """A file of `sow export`, made of the pieces of an export."""

    def __init__(self, file: RecordFile) -> None:
        self._file = file
        self.looks = file.looks

    def look(self, packed: PackedRecords) -> None:
        self._file.look(BatchColumns.of_packed(packed).payloads)

    def write(self, packed: PackedRecords) -> None:
        self._file.write(BatchColumns.of_packed(packed))

    def close(self) -> None:
        self._file.close()


def _record_file(kind: str, topic: str, settings: TopicSettings, columns: Sequence[str], sink: BytesIO) -> _PackedFile:
    try:
        form = RecordForm.of(topic, settings, select=() if kind == "ndjson" else selected([columns]))
        return _PackedFile(RecordFile(Format(kind), form, sink, csv_safe=True))
    except click.ClickException as error:
        raise ValueError(error.format_message()) from error
