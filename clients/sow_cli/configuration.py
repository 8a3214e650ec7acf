"""`sow config show`: the configuration that a server runs with."""

from __future__ import annotations

import click

from sow_cli import display
from sow_cli.output import Fact, Output, output_option
from sow_cli.session import Session
from sow_client import ConfigSetting


@click.group(short_help="Show the server's configuration.")
def config() -> None:
    """The configuration of the server."""


@config.command(short_help="Show each setting with its origin.")
@click.argument("table", required=False)
@click.option(
    "--changed",
    is_flag=True,
    help="Only settings that are not defaults: of the file, the environment, the command line.",
)
@output_option
@click.pass_obj
def show(session: Session, output: Output, table: str | None, changed: bool) -> None:
    """Show the settings that the server runs with, or those of TABLE, each with its origin: default, file,
    environment or command line. Secrets are left out. `sow topic describe` has the settings of a topic.

    \b
    Examples:
      sow config show
      sow config show storage
      sow config show --changed
    """
    with session.client() as client:
        found = client.config()
    chosen = [one for one in found if table in (None, one.table) and not (changed and one.origin == "default")]
    if table is not None and all(one.table != table for one in found):
        known = ", ".join(dict.fromkeys(one.table for one in found))
        raise click.UsageError(f"the configuration has no table {table!r}, but {known}")
    output.many(
        [_facts(one) for one in chosen],
        names=("table", "number", "key", "value", "origin", "hidden"),
        nothing="all settings are defaults" if changed else "no settings",
    )


def _facts(one: ConfigSetting) -> list[Fact]:
    shown = "(a secret)" if one.hidden else display.safe(one.value) or display.NOT_SET
    place = f"{one.table} {one.number}" if one.number else one.table
    return [
        Fact("table", one.table, place),
        Fact("number", one.number or None, str(one.number or ""), in_lists=False),
        Fact("key", one.key, one.key),
        Fact("value", one.value or None, shown),
        Fact("origin", one.origin, one.origin),
        Fact("hidden", one.hidden, "yes" if one.hidden else "no", in_lists=False),
    ]
