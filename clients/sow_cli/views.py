"""`sow view create|list|describe|delete`: topics whose records follow from those of another topic (rules V1 to V9)."""

from __future__ import annotations

import time
from typing import Final

import click

from sow_cli import arguments, display, joined, settings
from sow_cli.output import Fact, Output, note, output_option, telling
from sow_cli.session import Session
from sow_cli.topics import confirm
from sow_client import AlreadyExists, Client, Topic, TopicSettingsArguments

_NAMES: Final = (
    "name",
    "source",
    "where",
    "group_by",
    "select",
    "complete",
    "records_read",
    "groups",
    "ungrouped",
    "set_in_config",
)
_LOOK_SECONDS: Final = 0.2
"""How often `--wait` looks."""


@click.group(short_help="Create, list, describe, delete a view.")
def view() -> None:
    """Create, list, describe and delete views: topics whose records follow from those of another topic, kept right with
    each change.

    A view is read as every topic, such as with `sow subscribe --sow --oof`. Nothing is published to it.
    """


@view.command(short_help="Create a view.")
@click.argument("name")
@click.option("--source", required=True, metavar="TOPIC", help="The topic whose records the view is made of.")
@click.option("--where", metavar="FILTER", help="Only records of the source that match.")
@click.option(
    "--group-by",
    multiple=True,
    metavar="PATH,…",
    help="A record for each group of records with equal values; an expression needs AS NAME (repeatable).",
)
@click.option(
    "--select",
    multiple=True,
    metavar="EXPRESSION AS NAME,…",
    help="The values of each record: COUNT(*), COUNT(x), SUM, AVG, MIN, MAX, and expressions of these. Without groups "
    "and aggregates: fields and expressions of each record of the source (repeatable).",
)
@click.option(
    "--index",
    type=arguments.index,
    multiple=True,
    metavar="PATH",
    help="A field of the view with a secondary index, such as /qty (repeatable).",
)
@click.option("--journal/--no-journal", default=None, help="Whether changes of the view are journaled; default yes.")
@click.option(
    "--retain-time",
    type=arguments.retain_time,
    metavar="DURATION|unlimited",
    help="The journal of the view keeps changes at least this long.",
)
@click.option(
    "--retain-bytes",
    type=arguments.size,
    metavar="SIZE|unlimited",
    help="Or so many bytes of them, whichever ends first.",
)
@click.option(
    "--if-not-exists",
    is_flag=True,
    help="A view that exists stays as it is, with exit code 0; a definition that differs is a remark on stderr.",
)
@click.option("--wait", is_flag=True, help="End when the view can be read, and not before.")
@output_option
@click.pass_obj
def create(
    session: Session,
    *,
    output: Output,
    name: str,
    source: str,
    where: str | None,
    group_by: tuple[str, ...],
    select: tuple[str, ...],
    index: tuple[str, ...],
    journal: bool | None,
    retain_time: str | None,
    retain_bytes: int | str | None,
    if_not_exists: bool,
    wait: bool,
) -> None:
    """Create the view NAME of the records of another topic.

    It is built from the records that are there; until it is complete, reads of it are refused with VIEW_BUILDING. From
    then on each commit changes the source and the view together. To change a definition, delete the view and create it
    again.

    \b
    Examples:
      sow view create positions --source orders --where "/open" \\
          --group-by /account --select "SUM(/qty) AS qty, MAX(/px) AS high"
      sow view create slim --source orders \\
          --select "/account, /px * /qty AS notional"
    """
    wanted = _settings(index, journal, retain_time, retain_bytes)
    with session.client() as client:
        try:
            made = client.create_view(name, source=source, where=where, group_by=group_by, select=select, **wanted)
        except AlreadyExists:
            if not if_not_exists:
                raise
            made = client.describe_topic(name)
            there = made.view
            same = there is not None and (there.source, there.where) == (source, where or "")
            remark = "" if same else ", with another definition"
            note(f"{name} exists already, and stays as it is{remark}")
        if wait:
            made = _awaited(client, made)
    output.one(_facts(made))
    settings.warn(made.warnings)


def _settings(
    index: tuple[str, ...], journal: bool | None, retain_time: str | None, retain_bytes: int | str | None
) -> TopicSettingsArguments:
    wanted: TopicSettingsArguments = {}
    if index:
        wanted["index"] = index
    if journal is not None:
        wanted["journal"] = journal
    if retain_time is not None:
        wanted["retain_time"] = retain_time
    if retain_bytes is not None:
        wanted["retain_bytes"] = retain_bytes
    return wanted


def _awaited(client: Client, topic: Topic) -> Topic:
    """The view, once it is complete."""
    with telling("building") as tell:
        while topic.view_status is not None and not topic.view_status.complete:
            tell(display.records(topic.view_status.records_read))
            time.sleep(_LOOK_SECONDS)
            topic = client.describe_topic(topic.name)
    return topic


@view.command("list", short_help="List all views.")
@click.argument("source", required=False)
@joined.here_option
@output_option
@click.pass_obj
def list_views(session: Session, output: Output, source: str | None, here: bool) -> None:
    """List the views of the topic SOURCE, or all views, with their definitions.

    \b
    Examples:
      sow view list
      sow view list orders --format json
    """
    with session.client() as client:
        found = joined.asked(client, lambda one: one.topics(), here=here)
    rows = found.rows(lambda topics: (_facts(one) for one in topics if _is_view_of(one, source)), ordered_by=1)
    output.many(rows, names=found.names(_NAMES), nothing="no views")
    found.end()


def _is_view_of(topic: Topic, source: str | None) -> bool:
    return topic.is_view and (source is None or (topic.view is not None and topic.view.source == source))


@view.command(short_help="Show the definition and the state of a view.")
@click.argument("name")
@output_option
@click.pass_obj
def describe(session: Session, output: Output, name: str) -> None:
    """Show the definition of the view NAME, and how far it is built. `sow topic describe` shows its settings.

    \b
    Example:
      sow view describe positions
    """
    with session.client() as client:
        output.one(_facts(_found(client, name)))


@view.command(short_help="Delete a view.")
@click.argument("name")
@click.option("-f", "--force", is_flag=True, help="Do not ask.")
@output_option
@click.pass_obj
def delete(session: Session, output: Output, name: str, force: bool) -> None:
    """Delete the view NAME. Its source stays as it is.

    The command asks first on a terminal; without a terminal it needs --force. Its subscribers end with TOPIC_DELETED,
    and its durables go.

    \b
    Example:
      sow view delete positions
    """
    confirm(f"Delete view {name}? Its source stays.", force=force)
    with session.client() as client:
        _found(client, name)
        deleted = client.delete_topic(name)
    output.one([Fact("view", name, name), Fact("deleted_records", deleted, display.count(deleted))])


def _found(client: Client, name: str) -> Topic:
    """The view of this name. Raises UsageError for a topic that is none."""
    found = client.describe_topic(name)
    if not found.is_view:
        raise click.UsageError(f"{name} is a topic, and no view; see `sow topic --help`")
    return found


def _facts(topic: Topic) -> list[Fact]:
    definition, status = topic.view, topic.view_status
    facts = [Fact("name", topic.name, topic.name, label="view")]
    if definition is not None:
        facts += [
            Fact("source", definition.source, definition.source),
            Fact("where", definition.where or None, display.safe(definition.where) or display.NOT_SET),
            Fact("group_by", list(definition.group_by), display.safe(", ".join(definition.group_by))),
            Fact("select", list(definition.select), display.safe(", ".join(definition.select))),
        ]
    if status is not None:
        facts += [
            Fact("complete", status.complete, "yes" if status.complete else "being built"),
            Fact("records_read", status.records_read, display.count(status.records_read), in_lists=False),
            Fact("groups", status.groups, display.count(status.groups), label="records", right=True),
            Fact("ungrouped", status.ungrouped, display.count(status.ungrouped), right=True),
        ]
    owner = "configuration" if topic.set_in_config else "administrator"
    return [*facts, Fact("set_in_config", topic.set_in_config, owner, label="set by")]
