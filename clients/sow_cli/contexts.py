"""`sow context`: saves the settings that lead to a server under a name."""

from __future__ import annotations

import os
from typing import Final

import click

from sow_cli.connection import CONTEXT_VARIABLE, DEFAULTS, Source, found_settings, given, session_of
from sow_cli.context_files import FILES, NAMES, ContextFiles, checked_name
from sow_cli.output import RESULT_FORMATS, Fact, Output, note, output_option
from sow_cli.session import connect


def _files() -> ContextFiles:
    return ContextFiles(os.environ)


@click.group(short_help="Save servers, TLS files and tokens under names.")
def context() -> None:
    """Contexts: settings that lead to a server, saved under a name.

    A setting comes from the first of these that has it: its option, the context that --context names, its variable such
    as SOW_SERVER, the context of SOW_CONTEXT or in use, the default. Each setting is looked up by itself.

    A context is a file, $XDG_CONFIG_HOME/sow/contexts/NAME.toml, where $XDG_CONFIG_HOME is ~/.config if it is not set.
    It may be edited; its keys are server, prefer, failover_publish, tls_ca, tls_cert, tls_key, tls_server_name,
    token_file and format. A fault ends a command with code 2, and names the file and the line. A file that others may
    read or write is refused, as it decides where a token goes. The Python client reads no contexts.
    """


@context.command(short_help="Save a context.")
@click.argument("name")
@click.option(
    "--format",
    "saved_format",
    type=click.Choice([one.value for one in RESULT_FORMATS]),
    help="The default of --format where this context is used.",
)
@click.option("--use", "uses", is_flag=True, help="Use it from now on.")
@click.option("--replace", is_flag=True, help="Replace a context of that name.")
@click.pass_context
def add(ctx: click.Context, name: str, saved_format: str | None, uses: bool, replace: bool) -> None:
    """Save the options of the connection that are given here as the context NAME: --server, --prefer,
    --failover-publish, --tls-ca, --tls-cert, --tls-key, --tls-server-name, --token-file.

    Only its owner can read the file. It has the whole paths of files, and never the token itself.

    \b
    Examples:
      sow context add local --server 127.0.0.1:7450 --use
      sow context add prod --server ldn:7450,nyc:7450 --tls-ca ca.pem
      sow context add scripts --server ldn:7450 --format ndjson
    """
    files = _files()
    if not replace and checked_name(name) in files.names():
        raise click.UsageError(f"there is a context {name!r} already; --replace replaces it")
    try:
        options = [(key, given(ctx)[key]) for key in NAMES if key in given(ctx)]
        chosen: dict[str, str] = {key: os.path.abspath(value) if key in FILES else value for key, value in options}
    except FileNotFoundError as error:
        raise click.UsageError("the current folder was deleted: give absolute paths of files") from error
    if "context" in given(ctx):
        raise click.UsageError("--context and a new context exclude each other")
    if saved_format is not None:
        chosen["format"] = saved_format
    if not chosen:
        raise click.UsageError("a context has settings: give at least --server")
    with_defaults = {"server": Source(DEFAULTS["server"], "")} | {
        key: Source(value, "") for key, value in chosen.items()
    }
    session_of(with_defaults, connect).client().close()  # a bad address or file is found now; it does not connect
    files.write(name, chosen)
    if uses:
        files.use(name)
    used = uses or files.current() == name
    note(f"saved {name}; " + ("it is in use" if used else f"`sow context use {name}` uses it from now on"))


@context.command(short_help="Use a context from now on.")
@click.argument("name", required=False)
@click.option("--none", "nothing", is_flag=True, help="Use no context.")
def use(name: str | None, nothing: bool) -> None:
    """Use the context NAME from now on, where neither --context nor SOW_CONTEXT names another one.

    \b
    Examples:
      sow context use prod
      sow context use --none
    """
    if (name is None) is not nothing:
        raise click.UsageError("give NAME or --none")
    files = _files()
    if name is not None:
        files.read(name)
    files.use(name or "")
    note(f"{name} is in use" if name else "no context is in use")
    if os.environ.get(CONTEXT_VARIABLE) and os.environ[CONTEXT_VARIABLE] != name:
        note(f"{CONTEXT_VARIABLE}={os.environ[CONTEXT_VARIABLE]} counts before it")


@context.command("list", short_help="List all contexts.")
@output_option
def list_contexts(output: Output) -> None:
    """List all contexts; the star marks the one in use. Only a --format behind the command counts.

    \b
    Example:
      sow context list
    """
    files = _files()
    used = os.environ.get(CONTEXT_VARIABLE) or files.current()
    rows = []
    for name in files.names():
        try:
            found = files.read(name)
        except click.UsageError as error:
            note(f"sow: {error.message}")
            continue
        facts = [Fact("name", name, name), Fact("used", name == used, "*" if name == used else "")]
        rows.append(facts + [Fact(key, found.get(key), found.get(key, "")) for key in _LISTED])
    output.many(rows, names=("name", "used", *_LISTED), nothing="no contexts; `sow context add` saves one")


_LISTED: Final = ("server", "tls_ca", "token_file", "format")


@context.command(short_help="Show a context, or the settings that count now.")
@click.argument("name", required=False)
@output_option
@click.pass_context
def show(ctx: click.Context, name: str | None, output: Output) -> None:
    """Show the context NAME; without NAME, each setting that counts now and where it comes from. Only a --format behind
    the command counts.

    \b
    Examples:
      sow context show
      sow context show prod
    """
    if name is None:
        found = found_settings(ctx)
    else:
        found = {key: Source(value, f"context {name}") for key, value in _files().read(name).items()}
    rows = [
        [
            Fact("setting", key, key),
            Fact("value", found[key].value, found[key].value),
            Fact("source", found[key].source, found[key].source),
        ]
        for key in NAMES
        if key in found
    ]
    output.many(rows, names=("setting", "value", "source"), nothing="no settings")


@context.command(short_help="Remove a context.")
@click.argument("name")
def remove(name: str) -> None:
    """Remove the context NAME. The files that it names stay.

    \b
    Example:
      sow context remove prod
    """
    _files().remove(name)
    note(f"removed {name}")
