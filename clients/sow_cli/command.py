"""The command `sow`: the options that name the server, and the list of subcommands.

A subcommand gets a `Session` through `click.pass_obj`. It opens the session's client only when it needs the server, so
`--help` and usage errors need none. Tests pass their own way to connect as `obj`.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from sow_cli import (
    access,
    bench,
    durables,
    leasing,
    policies,
    publishing,
    records,
    replication,
    server,
    subscribing,
    topics,
)
from sow_cli.exits import RootGroup
from sow_cli.session import DEFAULT_SERVER, Connect, Session, connect
from sow_client import FailoverPublish, Prefer, Tls

_EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(
    cls=RootGroup,
    # For --version, which needs the options of the connection and no subcommand.
    invoke_without_command=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--server",
    "address",
    default=DEFAULT_SERVER,
    envvar="SOW_SERVER",
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT[,…]",
    help="Address of the server, or of several instances: the first that serves is used.",
)
@click.option(
    "--prefer",
    type=click.Choice(get_args(Prefer)),
    default="first",
    envvar="SOW_PREFER",
    show_default=True,
    show_envvar=True,
    help="Of several instances: the order of the list, or one that is drawn.",
)
@click.option(
    "--failover-publish",
    type=click.Choice(get_args(FailoverPublish)),
    default="again",
    envvar="SOW_FAILOVER_PUBLISH",
    show_default=True,
    show_envvar=True,
    help="Records that a lost instance may have: publish them again elsewhere, or fail.",
)
@click.option(
    "--tls-ca",
    type=_EXISTING_FILE,
    envvar="SOW_TLS_CA",
    show_envvar=True,
    metavar="FILE",
    help="PEM certificates to trust; turns TLS on.",
)
@click.option(
    "--tls-cert",
    type=_EXISTING_FILE,
    envvar="SOW_TLS_CERT",
    show_envvar=True,
    metavar="FILE",
    help="PEM certificate of this client; turns TLS on.",
)
@click.option(
    "--tls-key",
    type=_EXISTING_FILE,
    envvar="SOW_TLS_KEY",
    show_envvar=True,
    metavar="FILE",
    help="PEM key of --tls-cert.",
)
@click.option(
    "--token-file",
    type=_EXISTING_FILE,
    envvar="SOW_TOKEN_FILE",
    show_envvar=True,
    metavar="FILE",
    help="A file with the token to show.",
)
@click.option(
    "--tls-server-name",
    envvar="SOW_TLS_SERVER_NAME",
    show_envvar=True,
    metavar="NAME",
    help="Name to expect in the server's certificate; turns TLS on.",
)
@click.option(
    "--version",
    "shows_version",
    is_flag=True,
    help="Show the version of this command, and of the server if it is reachable.",
)
@click.pass_context
def sow(
    ctx: click.Context,
    *,
    address: str,
    prefer: Prefer,
    failover_publish: FailoverPublish,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_server_name: str | None,
    token_file: Path | None,
    shows_version: bool,
) -> None:
    """Publish, read and delete records of a SOW server: the last value of every key, with lifetimes.

    Results go to stdout, as a table on a terminal and as NDJSON in a pipe (--format of each command); everything
    else goes to stderr.

    Exit codes: 0 done, 1 the server refused, 2 wrong usage, 3 the server is not reachable, 130 Ctrl-C, 143 SIGTERM.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together: give both or none")
    tls = None
    if tls_ca or tls_cert or tls_server_name:
        tls = Tls(ca=tls_ca, certificate=tls_cert, key=tls_key, server_name=tls_server_name)
    replacement: Connect | None = ctx.obj
    ctx.obj = Session(address, tls, replacement or connect, token_file, prefer, failover_publish)
    if shows_version:
        server.show_versions(ctx.obj)
        ctx.exit()
    if ctx.invoked_subcommand is None:
        ctx.fail("Missing command.")


for _command in (
    topics.topics,
    topics.topic,
    publishing.publish,
    records.get,
    records.query,
    records.count,
    records.delete,
    records.touch,
    records.persist,
    leasing.lease,
    subscribing.subscribe,
    durables.durable,
    policies.policy,
    policies.retention,
    policies.quota,
    replication.replication,
    replication.backup,
    server.status,
    server.instance,
    server.compact,
    server.accept_clock,
    bench.bench,
    access.whoami,
    access.auth,
    access.token,
    access.sessions,
):
    sow.add_command(_command)
