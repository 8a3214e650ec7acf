"""`sow get`, and what `sow query` shares with it: the projection, and the form of shown records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import click

from sow_cli import arguments
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.output import Format, Output, note, raw_option, record_output_option, select_option, selected
from sow_cli.rows import RecordForm
from sow_cli.session import Session
from sow_client import Client

Command = TypeVar("Command", bound=Callable[..., object])


def projection_options(command: Command) -> Command:
    """--select and --exclude."""
    for option in (
        click.option(
            "--exclude",
            type=arguments.comma_separated,
            multiple=True,
            metavar="PATH,…",
            help="All payload fields but these.",
        ),
        select_option,
    ):
        command = option(command)
    return command


min_position_option = click.option(
    "--min-position",
    metavar="BOOKMARK",
    help="Wait up to a second for everything up to this bookmark of a publish or touch, perhaps at another instance; "
    "else the exit code is 1 (BEHIND).",
)


@click.command(short_help="Show the records of some keys.")
@click.argument("topic")
@click.argument("keys", nargs=-1, required=True, type=arguments.key, metavar="KEY...")
@arguments.parts_option
@projection_options
@click.option(
    "--touch", type=arguments.ttl, metavar="DURATION|never", help="Also give the records this lifetime from now on."
)
@click.option(
    "--touch-below",
    type=arguments.duration,
    metavar="DURATION",
    help="With --touch: only records with less left than this.",
)
@min_position_option
@raw_option
@record_output_option
@click.pass_obj
def get(
    session: Session,
    *,
    topic: str,
    keys: tuple[str, ...],
    parts: bool,
    select: tuple[tuple[str, ...], ...],
    exclude: tuple[tuple[str, ...], ...],
    touch: str | None,
    touch_below: str | None,
    min_position: str | None,
    output: Output,
) -> None:
    """Show the records of TOPIC that have these keys.

    One key shows the whole record. The exit code is 1 when a key has no live record; the other records are still shown.
    --raw writes the payload as it was published, byte by byte; of several keys a line feed follows each.

    \b
    Examples:
      sow get orders 1
      sow get orders 1 2 3 --select /id,/price --format csv
      sow get flights LH 400 --parts
      sow get images logo --raw > logo.png
      sow get fix-orders 17 --raw --soh='|'
      sow get sessions alice --touch 20m --touch-below 5m
    """
    keys = arguments.whole_keys(keys, parts=parts)
    if touch_below is not None and touch is None:
        raise click.UsageError("--touch-below needs --touch")
    named, include, leave_out = projected(select, exclude)
    with session.client() as client:
        form = record_form(client, topic, output, select=named, has_lifetime=touch not in (None, "never"))
        records = client.get_many(
            topic,
            list(keys),
            select=include,
            exclude=leave_out,
            touch=touch,
            touch_below=touch_below,
            min_position=min_position,
        )
    now_micros = time.time_ns() // 1_000
    if len(keys) == 1 and records:
        output.record(records[0], form, now_micros)
    elif records or len(keys) > 1:
        output.records([records], form, now_micros=lambda: now_micros)
    stamped = any(record.expire_time_micros is not None for record in records)
    if not form.acts and (touch not in (None, "never") or (output.is_table and stamped)):
        from sow_cli.ignored import remark  # rare, and `get` starts without that module

        remark(topic)
    missing = sorted(set(keys) - {record.key for record in records})
    for key in missing:
        note(f"sow: RECORD_NOT_FOUND: key: there is no live record {key!r}")
    if missing:
        click.get_current_context().exit(SERVER_SAID_NO)


def projected(
    select: tuple[tuple[str, ...], ...], exclude: tuple[tuple[str, ...], ...]
) -> tuple[list[str], list[str] | None, list[str] | None]:
    """The columns that --select names; the fields to ask the server for; the fields to leave out."""
    arguments.refuse_together(("--select", bool(select)), ("--exclude", bool(exclude)))
    named = selected(select)
    fields = [path for path in named if not path.startswith("@")]
    return named, fields or None, [path for some in exclude for path in some] or None


def record_form(
    client: Client,
    topic: str,
    output: Output,
    *,
    keys_only: bool = False,
    select: Sequence[str] = (),
    has_lifetime: bool = False,
) -> RecordForm:
    """Asks the server for the topic's settings, which records do not carry. Lines of keys and bytes as they are need
    none, unless records get a lifetime, which may have no effect."""
    if (keys_only or output.format is Format.RAW) and not (output.is_table or has_lifetime):
        return RecordForm(topic, "binary", keys_only=keys_only, select=tuple(select))
    return RecordForm.of(topic, client.describe_topic(topic).settings, keys_only=keys_only, select=select)
