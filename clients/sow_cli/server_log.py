"""`sow log`: the last lines of a server's log, and those that follow."""

from __future__ import annotations

from typing import Final, cast

import click
import msgspec

from sow_cli import display
from sow_cli.colours import styled
from sow_cli.output import Format, Output, output_option
from sow_cli.session import Session
from sow_client import LogLevel, LogLine

_STYLES: Final = {"warning": "warning", "error": "error", "critical": "error"}


@click.command(short_help="Show the server's log.")
@click.option("-f", "--follow", is_flag=True, help="Go on with the lines that are written later, until Ctrl-C.")
@click.option(
    "--level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"]),
    help="Only lines of this level or a worse one.",
)
@click.option(
    "--lines", type=click.IntRange(1, 1_000), default=100, show_default=True, help="The last lines to begin with."
)
@output_option
@click.pass_obj
def log(session: Session, output: Output, *, follow: bool, level: str | None, lines: int) -> None:
    """Show the last lines of the server's log, which keeps 1,000 of them. Secrets are left out.

    \b
    Examples:
      sow log --follow
      sow log --level warning --lines 20
    """
    if output.format not in (Format.TABLE, Format.NDJSON):
        raise click.UsageError("a log has lines: use --format table or ndjson")
    if not follow:
        output.page()
    with session.client() as client:
        for line in client.watch_log(cast("LogLevel | None", level), lines_max=lines, follow=follow):
            if output.format is Format.NDJSON:
                output.write(_json(line))
            else:
                output.write(_row(line).encode() + b"\n")


def _json(line: LogLine) -> bytes:
    found: dict[str, object] = {
        "time_micros": round(line.time.timestamp() * 1e6),
        "level": line.level,
        "event": line.event,
        "logger": line.logger,
        "fields": msgspec.Raw(line.fields.encode()),
    }
    if line.missed:
        found["missed"] = line.missed
    return msgspec.json.encode(found) + b"\n"


def _row(line: LogLine) -> str:
    """A line for people."""
    fields: dict[str, object] = msgspec.json.decode(line.fields or "{}")
    told = " ".join(
        f"{display.safe(name)}={display.safe(value if isinstance(value, str) else msgspec.json.encode(value).decode())}"
        for name, value in fields.items()
    )
    level = styled(f"{line.level:<8}", _STYLES.get(line.level))
    missed = f"({line.missed:,} lines missed)\n" if line.missed else ""
    return f"{missed}{line.time:%Y-%m-%d %H:%M:%S}Z {level} {display.safe(line.event)} {told}".rstrip()
