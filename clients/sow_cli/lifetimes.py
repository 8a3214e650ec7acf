"""`sow touch`, `sow persist`: new lifetimes for records that exist."""

from __future__ import annotations

from datetime import datetime
from typing import get_args

import click

from sow_cli import arguments
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.ignored import count_ignored, remark, remark_if_past, told_in_remarks
from sow_cli.one_record import published_facts
from sow_cli.output import Output, note, output_option
from sow_cli.session import Session
from sow_client import Client, Published, Refusal, TouchOnlyName


@click.command(short_help="Renew or change lifetimes.")
@click.argument("topic")
@click.argument("keys", nargs=-1, required=True, type=arguments.key, metavar="KEY...")
@arguments.parts_option
@click.option("--ttl", type=arguments.ttl, metavar="DURATION|never", help="New lifetime from now on, such as 30s.")
@click.option("--expire-at", type=arguments.instant, metavar="TIME", help="When to expire: 2030-01-31T12:00:00Z.")
@click.option(
    "--only",
    type=click.Choice(get_args(TouchOnlyName)),
    help="Only records that get a later or an earlier expire time, or records without or with one.",
)
@arguments.if_version_option("Once for each KEY: only if its record has this version.")
@click.option("--atomic", is_flag=True, help="All records or none, in one commit.")
@output_option
@click.pass_obj
def touch(
    session: Session,
    *,
    topic: str,
    keys: tuple[str, ...],
    parts: bool,
    ttl: str | None,
    expire_at: datetime | None,
    only: TouchOnlyName | None,
    versions: tuple[int, ...],
    atomic: bool,
    output: Output,
) -> None:
    """Renew or change the lifetime of records of TOPIC; their payloads stay.

    Without --ttl and --expire-at they get the topic's lifetime for records that carry none; a topic that has none
    needs one of the two. `sow persist` takes lifetimes away. The answer has the new expire time. The exit code is 1
    when a key has no live record or its record is refused, also by --only; the others change, unless --atomic is given.

    \b
    Examples:
      sow touch sessions alice --ttl 20m
      sow touch sessions alice bob --atomic
      sow touch sessions alice --expire-at 2030-01-31T12:00:00Z
      sow touch sessions alice --ttl 20m --only later
    """
    arguments.refuse_together(("--ttl", ttl is not None), ("--expire-at", expire_at is not None))
    keys = arguments.whole_keys(keys, parts=parts)
    arguments.check_versions(versions, keys)
    with session.client() as client, told_in_remarks():
        if ttl is None and expire_at is None:
            _check_default(client, topic)
        if expire_at is not None:
            remark_if_past(client.describe_topic(topic), expire_at)
        outcomes = client.touch(
            topic,
            list(keys),
            ttl=ttl,
            expire_at=expire_at,
            only=only,
            only_if_versions=versions or None,
            atomic=atomic,
        )
    _write_outcomes(output, topic, keys, outcomes)


def _check_default(client: Client, topic: str) -> None:
    """A touch without a lifetime would make records permanent where the topic has none to give."""
    settings = client.describe_topic(topic).settings
    if settings.expiration in ("disabled", "enabled", "reject") and settings.max_ttl is None:
        raise click.UsageError(
            f"topic {topic} has no default lifetime: give --ttl DURATION or --expire-at TIME; "
            f"`sow persist {topic} KEY` makes records permanent"
        )


@click.command(short_help="Take lifetimes away.")
@click.argument("topic")
@click.argument("keys", nargs=-1, required=True, type=arguments.key, metavar="KEY...")
@arguments.parts_option
@output_option
@click.pass_obj
def persist(session: Session, topic: str, keys: tuple[str, ...], parts: bool, output: Output) -> None:
    """Remove the lifetime of records of TOPIC: they never expire, unless the topic has a maximum lifetime.

    The exit code is 1 when a key has no live record.

    \b
    Example:
      sow persist sessions alice
    """
    keys = arguments.whole_keys(keys, parts=parts)
    with session.client() as client:
        outcomes = client.touch(topic, list(keys), ttl="never")
    _write_outcomes(output, topic, keys, outcomes)


def _write_outcomes(output: Output, topic: str, keys: tuple[str, ...], outcomes: list[Published | Refusal]) -> None:
    done = [published_facts(topic, one) for one in outcomes if isinstance(one, Published)]
    refused = [one for one in outcomes if isinstance(one, Refusal)]
    if len(keys) == 1 and done:
        output.one(done[0])
    elif done:
        output.many(done, names=_OUTCOME_NAMES, nothing="")
    if count_ignored(outcomes):
        remark(topic)
    for refusal in refused:
        note(f"{keys[refusal.index]}: {refusal.reason}: {refusal.message}")
    if any(refusal.reason == "INVALID_ARGUMENT" for refusal in refused):  # keys with too few or too many parts
        note("  hint: the parts of one key are arguments of their own with --parts, or one argument with | between")
    if refused:
        click.get_current_context().exit(SERVER_SAID_NO)


_OUTCOME_NAMES = ("topic", "key", "version", "expire_time_micros", "sequence")
