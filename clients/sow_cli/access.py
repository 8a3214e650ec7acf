"""`sow whoami`, `sow auth`, `sow token`, `sow sessions`: credentials and permissions."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

import click

from sow_cli import arguments, display, joined
from sow_cli.output import Fact, Output, moment, output_option
from sow_cli.session import Session
from sow_client import ActiveSubscription, CallerSession
from sow_client._cells import in_cell

TOKEN_BYTES: Final = 32


def _facts(values: Mapping[str, str | int | datetime | None]) -> list[Fact]:
    return [
        moment(name, value) if isinstance(value, datetime) else Fact(name, value, "" if value is None else str(value))
        for name, value in values.items()
    ]


@click.command(short_help="Show who the server takes this caller for.")
@output_option
@click.pass_obj
def whoami(session: Session, output: Output) -> None:
    """Show the identity of the caller, its roles and the limits that apply. The fingerprint is the begin of the SHA-256
    of its token or certificate.

    \b
    Example:
      sow whoami
    """
    with session.client() as client:
        found = client.whoami()
    if not found.name:
        click.echo("this server has no access file: everybody who reaches it may do everything", err=True)
    output.one(
        _facts(
            {
                "identity": found.name,
                "credential": found.credential,
                "fingerprint": found.fingerprint,
                "expires": found.expires,
                "roles": ", ".join(found.roles),
                **found.limits,
            }
        )
    )


@click.group(short_help="Check and reload permissions.")
def auth() -> None:
    """Permissions of the server's access file."""


@auth.command(short_help="Tell whether an identity may do something, and which line decides.")
@click.argument("identity")
@click.argument("action")
@click.argument("topic", default="")
@click.option(
    "--record",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Decide about this record, by the rows of the grants.",
)
@click.option("--key", default="", help="The key of the record, where it is not in the record.")
@output_option
@click.pass_context
def check(
    context: click.Context, output: Output, identity: str, action: str, topic: str, record: Path | None, key: str
) -> None:
    """Tell whether IDENTITY may do ACTION on TOPIC, and which line of the access file decides. Changes nothing.

    The exit code is 1 if it may not. Actions on the server have no TOPIC. The caller needs the action operator.

    \b
    Examples:
      sow auth check desk-eu publish orders --record order.json
      sow auth check ops operator
    """
    session: Session = context.obj
    with session.client() as client:
        found = client.check_access(identity, action, topic, record=record, key=key)
    output.one(
        _facts(
            {
                "allowed": found.allowed,
                "explanation": found.explanation,
                "decided_by": found.decided_by,
                "rows": found.rows,
                "hidden": ", ".join(found.hidden),
            }
        )
    )
    if not found.allowed:
        context.exit(1)


@auth.command(name="reload", short_help="Read the access file again.")
@output_option
@click.pass_obj
def reload_access(session: Session, output: Output) -> None:
    """Read the access file again: all of it, or nothing if it has a fault. The caller needs the action operator.

    \b
    Example:
      sow auth reload
    """
    with session.client() as client:
        identities, ended = client.reload_access()
    output.one(_facts({"identities": identities, "ended_calls": ended}))


@click.group(short_help="Make tokens.")
def token() -> None:
    """Bearer tokens."""


@token.command(short_help="Make a new token.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="A new file for the token; only its owner can read it.",
)
def new(out: Path) -> None:
    """Make a token of 256 random bits, and print the line for the access file. The token itself is in FILE only.

    \b
    Example:
      sow token new --out desk.token
    """
    made = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(made + "\n")
    except OSError as error:
        raise click.UsageError(f"{out}: {error.strerror}") from error
    click.echo(f'token_sha256 = "{hashlib.sha256(made.encode()).hexdigest()}"')


@click.command(short_help="List the callers with calls under way, or end one's.")
@click.option("--subscriptions", is_flag=True, help="List each subscription: its caller, filter, position and queue.")
@click.option("--topic", metavar="TOPIC", help="With --subscriptions: only those of this topic.")
@click.option("--end", metavar="ID", help="End the calls of this session, or this subscription.")
@joined.here_option
@output_option
@click.pass_obj
def sessions(
    session: Session, output: Output, subscriptions: bool, topic: str | None, end: str | None, here: bool
) -> None:
    """List the callers with calls under way: since when, from where, with which calls. Where there are several cells,
    an id has the name of its cell in front.

    With --subscriptions, `kept` is the list that the server keeps for a live result: its records with the reserve
    behind the last one, their bytes, and how often they were read. Equal lists are kept once (`kept_for` in JSON).

    A connection without calls is not known to the server. A client whose session or subscription was ended may come
    again: to keep it out, remove its credential from the access file and use `sow auth reload`. Listing needs the
    action observe, --end the action operator.

    \b
    Examples:
      sow sessions
      sow sessions --subscriptions --topic orders
      sow sessions --end s17
      sow sessions --end b/u4
    """
    if topic is not None and not subscriptions:
        raise click.UsageError("--topic needs --subscriptions")
    arguments.refuse_together(("--end", end is not None), ("--subscriptions", subscriptions))
    with session.client() as client:
        if end is not None and end.rpartition("/")[2].startswith("u"):
            client.end_subscription(end)
            output.one(_facts({"ended_calls": 1}))
        elif end is not None:
            output.one(_facts({"ended_calls": client.end_session(end)}))
        elif subscriptions and topic is not None and not here:
            shown = list(map(_subscription, client.subscriptions(topic)))
            output.many(shown, names=_SUBSCRIPTION, nothing="no subscriptions")
        elif subscriptions:
            followers = joined.asked(client, lambda one: one.subscriptions(topic), here=here)
            shown = [_subscription(one, cell) for cell, answer in followers.in_cells() for one in answer]
            output.many(shown, names=_SUBSCRIPTION, nothing="no subscriptions")
            followers.end()
        else:
            callers = joined.asked(client, lambda one: one.sessions(), here=here)
            shown = [_session(one, cell) for cell, answer in callers.in_cells() for one in answer]
            names = ("id", "identity", "credential", "address", "since_micros", "calls")
            output.many(shown, names=names, nothing="nobody is connected")
            callers.end()


_SUBSCRIPTION: Final = (
    "id",
    "session",
    "identity",
    "address",
    "since_micros",
    "topic",
    "topic_pattern",
    "filter",
    "durable",
    "position",
    "behind",
    "queued_bytes",
    "kept_records",
    "kept_bytes",
    "runs",
    "kept_for",
)


def _subscription(found: ActiveSubscription, cell: str = "") -> list[Fact]:
    id_, session = in_cell(cell, found.id), in_cell(cell, found.session)
    queued, kept = found.queued_bytes, found.kept
    kept_text = "" if kept is None else f"{kept.records:,}, {display.size(kept.bytes)}, {kept.runs:,} runs"
    return [
        Fact("id", id_, id_),
        Fact("session", session, session),
        Fact("identity", found.identity, display.safe(found.identity)),
        Fact("address", found.address, display.safe(found.address), in_lists=False),
        moment("since", found.since),
        Fact("topic", found.topic or None, display.safe(found.topic or found.topic_pattern)),
        Fact("topic_pattern", found.topic_pattern or None, display.safe(found.topic_pattern), in_lists=False),
        Fact("filter", found.filter or None, display.safe(found.filter)),
        Fact("durable", found.durable or None, display.safe(found.durable)),
        Fact("position", found.position, display.safe(found.position)),
        Fact("behind", found.behind, "yes" if found.behind else "no"),
        Fact("queued_bytes", queued, display.size(queued), column="queued"),
        Fact("kept_records", kept.records if kept else None, kept_text, column="kept"),
        Fact("kept_bytes", kept.bytes if kept else None, "", in_lists=False),
        Fact("runs", kept.runs if kept else None, "", in_lists=False),
        Fact("kept_for", kept.followers if kept else None, "", in_lists=False),
    ]


def _session(found: CallerSession, cell: str) -> list[Fact]:
    return _facts(
        {
            "id": in_cell(cell, found.id),
            "identity": found.identity,
            "credential": found.credential,
            "address": found.address,
            "since": found.since,
            "calls": ", ".join(f"{method} {count}" for method, count in found.calls.items()),
        }
    )
