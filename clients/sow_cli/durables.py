"""`sow durable list|describe|browse|rewind|clear-backlog|delete`: managing durable subscriptions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import starmap
from typing import Final

import click

from sow_cli import arguments, display, joined, settings
from sow_cli.messages import TopicForms, message_writer
from sow_cli.output import Fact, Output, length, moment, note, output_option
from sow_cli.session import Session
from sow_cli.topics import confirm
from sow_client import Client, Durable, DurableConsumer
from sow_client._cells import in_cell

_NAMES: Final = (
    "topic",
    "name",
    "filter",
    "acknowledged",
    "earliest",
    "attached",
    "replicated",
    "consumer_at",
    "consumer",
    "consumer_address",
    "consumer_since_micros",
    "pin",
    "owner",
    "reader",
    "create_time_micros",
    "last_use_time_micros",
    "retain_time",
    "retain_bytes",
    "backlog_ttl",
    "idle_ttl",
    "delivery_limit",
    "total_entries",
    "total_bytes",
    "unacknowledged_entries",
    "unacknowledged_bytes",
    "oldest_unacknowledged_age_micros",
    "set_aside_entries",
    "exact",
)


@click.group(short_help="List, describe, rewind, clear, delete a durable subscription.")
def durable() -> None:
    """List, describe, rewind, clear and delete durable subscriptions. `sow subscribe --durable` consumes one."""


@durable.command("list", short_help="List durable subscriptions.")
@click.argument("topic", required=False)
@click.option("--pins", is_flag=True, help="Only pins, with their owner, their reader and their last renewal.")
@joined.here_option
@output_option
@click.pass_obj
def list_durables(session: Session, output: Output, topic: str | None, pins: bool, here: bool) -> None:
    """List the durable subscriptions of TOPIC, or of all topics, with their unacknowledged entries.

    Entries are counted before the filter. A pin keeps the journal for a reader of ranges, such as a stream of Spark.
    `sow durable delete` removes a pin, too.

    \b
    Examples:
      sow durable list orders
      sow durable list --pins
    """
    with session.client() as client:
        found = joined.of_topic(client, topic, lambda one: one.durables(topic, with_figures=True), here=here)
    found = replace(found, answers=dict(zip(found.answers, starmap(_with_ids, found.in_cells()), strict=True)))
    rows = found.rows(
        lambda durables: (_facts(one, as_pin=pins) for one in durables if one.pin or not pins), ordered_by=2
    )
    output.many(rows, names=found.names(_NAMES), nothing="no pins" if pins else "no durable subscriptions")
    found.end()


@durable.command(short_help="Show position, settings and backlog.")
@click.argument("topic")
@click.argument("name")
@click.option("--exact", is_flag=True, help="Read the entries, and count only those that match its filter.")
@output_option
@click.pass_obj
def describe(session: Session, output: Output, topic: str, name: str, exact: bool) -> None:
    """Show the durable subscription NAME of TOPIC: its position and its unacknowledged entries.

    Entries are counted before the filter, which costs nothing; with --exact, after it.

    \b
    Examples:
      sow durable describe orders billing
      sow durable describe orders billing --exact
    """
    with session.client() as client:
        output.one(_facts(client.describe_durable(topic, name, exact=exact)))


@durable.command(short_help="Show the unacknowledged changes.")
@click.argument("topic")
@click.argument("name")
@click.option(
    "--max",
    "entries_max",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    metavar="N",
    help="At most N changes.",
)
@click.option("--after", metavar="BOOKMARK", help="Only changes after this position.")
@output_option
@click.pass_obj
def browse(session: Session, output: Output, topic: str, name: str, entries_max: int, after: str | None) -> None:
    """Show the unacknowledged changes of the durable subscription NAME of TOPIC, the oldest first, and consume nothing.

    It works while a consumer is attached. Each change shows how often it was delivered so far, and in a table when it
    was published. If there may be more changes, stderr has the command that continues. In a pipe the lines are those of
    `sow subscribe --changes`.

    \b
    Examples:
      sow durable browse orders billing --max 10
      sow durable browse orders billing --format ndjson
    """
    with session.client() as client:
        found = client.durable_browse(topic, name, entries_max=entries_max, after=after)
        writer = message_writer(output, TopicForms(client), several_topics=False, browsed=True)
        output.page()
        for change in found.entries:
            writer.write(change)
        writer.finish()
    if not found.entries and found.complete and output.is_table:
        note("no unacknowledged changes")
    if not found.complete:
        rest = shlex.join([topic, name, "--max", str(entries_max), "--after", found.bookmark])
        note(f"there may be more: {session.command} durable browse {rest}")


@durable.command(short_help="Move the position back.")
@click.argument("topic")
@click.argument("name")
@click.argument("to", metavar="earliest|BOOKMARK|SEQUENCE|TIME", type=arguments.position)
@click.option("--force", is_flag=True, help="Also while a consumer is attached; its stream ends.")
@output_option
@click.pass_obj
def rewind(session: Session, output: Output, topic: str, name: str, to: str | datetime, force: bool) -> None:
    """Move the durable subscription NAME of TOPIC back, so that retained changes come again.

    It moves after a BOOKMARK or a SEQUENCE, to the first change at or after a TIME, or to the earliest retained change.

    \b
    Examples:
      sow durable rewind orders billing earliest
      sow durable rewind orders billing 2026-01-31T12:00:00Z --force
    """
    with session.client() as client:
        done = client.rewind(topic, name, _place(client, to), force=force)
    left = done.unacknowledged_entries
    output.one(
        [
            Fact("topic", topic, display.safe(topic)),
            Fact("name", name, display.safe(name), label="durable"),
            Fact("bookmark", done.bookmark, display.safe(done.bookmark)),
            Fact("unacknowledged_entries", left, display.count(left)),
        ]
    )


def _place(client: Client, to: str | datetime) -> str | datetime:
    """A sequence as a bookmark."""
    if isinstance(to, str) and to.isascii() and to.isdecimal():
        return f"{client.status().journal_epoch}.{to}"
    return to


@durable.command("clear-backlog", short_help="Acknowledge the whole backlog.")
@click.argument("topic")
@click.argument("name", required=False)
@click.option("-f", "--force", is_flag=True, help="Do not ask.")
@output_option
@click.pass_obj
def clear_backlog(session: Session, output: Output, topic: str, name: str | None, force: bool) -> None:
    """Acknowledge the whole backlog of the durable subscription NAME of TOPIC; without NAME, of all of them.

    Consumers will not get these changes. The command asks first on a terminal; without a terminal it needs --force.

    \b
    Examples:
      sow durable clear-backlog orders billing
      sow durable clear-backlog orders --force
    """
    whose = f"durable subscription {name}" if name is not None else "every durable subscription"
    confirm(f"Mark all changes of topic {topic} acknowledged for {whose}?", force=force)
    with session.client() as client:
        cleared = client.clear_backlog(topic, name)
    output.one(
        [
            Fact("topic", topic, display.safe(topic)),
            Fact("name", name, display.safe(name or ""), label="durable"),
            Fact("acknowledged_entries", cleared, display.count(cleared)),
        ]
    )


@durable.command(short_help="Delete a durable subscription.")
@click.argument("topic")
@click.argument("name")
@click.option("-f", "--force", is_flag=True, help="Do not ask, and also delete while a consumer is attached.")
@output_option
@click.pass_obj
def delete(session: Session, output: Output, topic: str, name: str, force: bool) -> None:
    """Delete the durable subscription NAME of TOPIC with its position.

    The command asks first on a terminal; without a terminal it needs --force.

    \b
    Example:
      sow durable delete orders billing
    """
    confirm(f"Delete durable subscription {name} of topic {topic}?", force=force)
    with session.client() as client:
        client.delete_durable(topic, name, force=force)
    output.one([Fact("topic", topic, display.safe(topic)), Fact("name", name, display.safe(name), label="deleted")])


def _with_ids(cell: str, durables: Sequence[Durable]) -> list[Durable]:
    """The durables of a cell, with the ids of their consumers as `sow sessions` has them."""
    return [
        one if one.consumer is None
        else replace(one, consumer=replace(one.consumer, subscription=in_cell(cell, one.consumer.subscription)))
        for one in durables
    ]  # fmt: skip


def _consumer(found: DurableConsumer | None) -> list[Fact]:
    who = "" if found is None else found.identity or found.subscription
    address = "" if found is None else found.address
    return [
        Fact("consumer", who or None, display.safe(who) or display.NOT_SET, in_lists=False),
        Fact("consumer_address", address or None, display.safe(address) or display.NOT_SET, in_lists=False),
        moment("consumer_since_micros", None if found is None else found.since, in_lists=False),
    ]


def _attached(one: Durable) -> str:
    """The consumer, as far as the caller may know it."""
    if not one.attached:
        return "no"
    found = one.consumer
    return "yes" if found is None else display.safe(found.identity or found.subscription) or "yes"


def _facts(one: Durable, *, as_pin: bool = False) -> list[Fact]:
    """`as_pin`: for a list of pins, which has other columns."""
    facts = [
        Fact("topic", one.topic, display.safe(one.topic)),
        Fact("name", one.name, display.safe(one.name), label="durable"),
        Fact("filter", one.filter or None, display.safe(one.filter) or display.NOT_SET, in_lists=not as_pin),
        Fact("acknowledged", one.acknowledged, display.safe(one.acknowledged), column="acked up to"),
        Fact("earliest", one.earliest or None, display.safe(one.earliest), in_lists=False),
        Fact("attached", one.attached, _attached(one), column="consumer", in_lists=not as_pin),
        Fact("replicated", one.replicated, "yes" if one.replicated else "no", in_lists=False),
        Fact("consumer_at", one.consumer_at or None, display.safe(one.consumer_at) or display.NOT_SET, in_lists=False),
        *_consumer(one.consumer),
        Fact("pin", one.pin, "yes" if one.pin else "no", in_lists=False),
        Fact("owner", one.owner or None, display.safe(one.owner) or display.NOT_SET, in_lists=as_pin),
        Fact("reader", one.reader or None, display.safe(one.reader) or display.NOT_SET, in_lists=as_pin),
        moment("create_time", one.create_time, label="created", in_lists=False),
        moment("last_use_time", one.last_use_time, label="last use", in_lists=as_pin),
    ]
    for name in ("retain_time", "retain_bytes", "backlog_ttl", "idle_ttl", "delivery_limit"):
        value = getattr(one.settings, name)
        facts.append(
            Fact(name, value, display.NOT_SET if value is None else settings.shown(name, value), in_lists=False),
        )
    figures = one.figures
    if figures is None:
        return facts
    entries, size = figures.unacknowledged_entries, figures.unacknowledged_bytes
    counted = "those that match its filter" if figures.exact else "before its filter"
    return [
        *facts,
        Fact("total_entries", figures.total_entries, display.count(figures.total_entries), in_lists=False),
        Fact("total_bytes", figures.total_bytes, display.exact_size(figures.total_bytes), in_lists=False),
        Fact("unacknowledged_entries", entries, display.count(entries), column="unacked"),
        Fact("unacknowledged_bytes", size, display.exact_size(size), column="bytes"),
        length("oldest_unacknowledged_age", figures.oldest_unacknowledged_age, column="oldest"),
        Fact("set_aside_entries", figures.set_aside_entries, display.count(figures.set_aside_entries), in_lists=False),
        Fact("exact", figures.exact, counted, label="counted", in_lists=False),
    ]
