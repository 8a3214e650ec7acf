"""The command `sow`: the options that name the server, and the list of subcommands.

A subcommand gets a `Session` through `click.pass_obj`. It opens the session's client only when it needs the server, so
`--help` and usage errors need none. Tests pass their own way to connect as `obj`.

[1]  A subcommand is imported when it is run, or listed in the help: `sow get` starts without the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Final

import click

from sow_cli import connection
from sow_cli.exits import RootGroup

COMMANDS: Final = {
    "help": "helping",
    "topics": "topics",
    "topic": "topics",
    "view": "views",
    "publish": "publishing",
    "load": "loading",
    "get": "records",
    "query": "queries",
    "count": "queries",
    "sql": "sql",
    "history": "history",
    "changes": "changes",
    "export": "exporting",
    "delete": "deleting",
    "touch": "lifetimes",
    "persist": "lifetimes",
    "lease": "leasing",
    "due": "due",
    "filter": "filters",
    "subscribe": "subscribing",
    "durable": "durables",
    "policy": "policies",
    "retention": "policies",
    "quota": "policies",
    "replication": "replication",
    "backup": "replication",
    "cells": "placement",
    "status": "server",
    "instance": "server",
    "doctor": "doctor",
    "config": "configuration",
    "log": "server_log",
    "compact": "server",
    "accept-clock": "server",
    "console": "console",
    "http": "http",
    "bench": "bench",
    "whoami": "access",
    "auth": "access",
    "token": "access",
    "tls": "tls",
    "sessions": "access",
    "context": "contexts",
    "completion": "completion",
}
"""The module of each subcommand, in the order of the help. The module has it under its name, with _ for -."""
WITHOUT_SERVER: Final = frozenset({"context", "completion", "filter", "help", "tls"})


class Sow(RootGroup):
    """The subcommands, imported one by one ([1])."""

    prepares: Callable[[click.Command], None] | None = None
    """Done with each subcommand that is imported, where values are completed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As click's, in the order of `COMMANDS`, so that related ones stand together."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """As click's."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            found = getattr(import_module(f"sow_cli.{COMMANDS[cmd_name]}"), cmd_name.replace("-", "_"))
            self.add_command(connection.connected(found, connects=cmd_name not in WITHOUT_SERVER), cmd_name)
            if self.prepares is not None:
                self.prepares(found)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, which compares a mistyped name with the commands that are imported: here with none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from sow_cli import advice

            if args[0].startswith("-") or not (meant := advice.command_for(args[0], list(COMMANDS))):
                raise
            names = " or ".join(f"'{name}'" for name in meant)
            raise click.UsageError(f"No such command '{args[0]}'. Did you mean {names}?", ctx) from error


@click.group(
    cls=Sow,
    params=list(connection.connection_options()),
    # For --version and for the shell, which need the options of the connection and no subcommand.
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="The options of the connection may stand before the command or after it. A context is made by `sow context "
    "add`; `sow context show` has the settings that count.",
)
@click.option(
    "--version",
    "shows_version",
    is_flag=True,
    help="Show the version of this command, and of the server if it answers within half a second.",
)
@click.pass_context
def sow(ctx: click.Context, *, shows_version: bool) -> None:
    """Publish, read and delete records of a SOW server: the last value of every key, with lifetimes.

    Without a command, on a terminal, an interactive shell begins.

    Results go to stdout, as a table on a terminal and as NDJSON in a pipe (--format of each command, or SOW_FORMAT);
    everything else goes to stderr.

    Exit codes: 0 done, 1 the server refused, 2 wrong usage, 3 the server is not reachable, 4 no secure
    connection, 130 Ctrl-C, 143 SIGTERM.
    """
    connection.begin(ctx)
    if shows_version:
        from sow_cli import server

        server.show_versions(connection.settle(ctx))
        ctx.exit()
    if ctx.invoked_subcommand is None:
        if sys.stdin.isatty() and sys.stdout.isatty():
            ctx.exit(_shell(ctx))
        if connection.given(ctx):
            ctx.fail("Missing command.")
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


if connection.COMPLETE_VARIABLE in os.environ:
    from sow_cli.completion import Names, Values  # it also knows bash better than click does

    sow.prepares = Values(Names()).prepare
    sow.prepares(sow)


def _shell(ctx: click.Context) -> int:
    try:
        from sow_cli.shell import run_shell
    except ModuleNotFoundError as error:
        if error.name != "prompt_toolkit":
            raise
        ctx.fail("the interactive shell needs prompt_toolkit: pip install prompt_toolkit")
    return run_shell(ctx, sow, connection.connect_of(ctx))
