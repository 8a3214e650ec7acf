"""`sow topics`, `sow topic list|create|alter|describe|delete|restamp|check`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final, Unpack

import click

from sow_cli import arguments, display, joined, settings
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.filter_parameters import Values, param_option
from sow_cli.ignored import remark_on_fields
from sow_cli.output import Fact, Output, length, moment, note, output_option, telling
from sow_cli.session import Session
from sow_client import (
    AlreadyExists,
    EffectiveSetting,
    Restamped,
    RestampMode,
    Topic,
    TopicChecked,
    TopicSettings,
    TopicSettingsArguments,
    UnsoundRow,
)

_NAMES: Final = (
    "name",
    "message_type",
    "key",
    "expiration",
    *settings.FACT_NAMES,
    "journal",
    "fix_separator",
    "index",
    "index_building",
    "view",
    "set_in_config",
    "create_time_micros",
    "live_records",
    "overdue_records",
    "stored_bytes",
    "journal_entries",
    "journal_bytes",
    "floor_sequence",
    "durables",
    "backlog_bytes",
    "backlog_age_micros",
    "backlog_entries",
    "slowest_durable",
    "tombstones",
    "full_refusals",
)


KEY_CHARACTERS_SHOWN: Final = 60
"""The width of the key of an unsound row in a table."""


@click.command(short_help="List all topics.")
@joined.here_option
@output_option
@click.pass_obj
def topics(session: Session, output: Output, here: bool) -> None:
    """List all topics with their settings and figures, of all cells where there are several.

    `sow topic list` is the same command.

    \b
    Examples:
      sow topics
      sow topic list --format json
    """
    with session.client() as client:
        found = joined.asked(client, lambda one: one.topics(with_statistics=True), here=here)
    rows = found.rows(lambda topics: map(_facts, topics), ordered_by=1)
    output.many(rows, names=found.names(_NAMES), nothing="no topics")
    found.end()


@click.group(short_help="List, create, alter, describe, delete, restamp, check topics.")
def topic() -> None:
    """List, create, alter, describe and delete topics, restamp and check their records."""


topic.add_command(topics, "list")


@topic.command(short_help="Create a topic.")
@click.argument("name")
@click.option(
    "--if-not-exists",
    is_flag=True,
    help="A topic that exists stays as it is, with exit code 0; settings that differ are a remark on stderr.",
)
@settings.topic_options
@output_option
@click.pass_obj
def create(
    session: Session, output: Output, name: str, if_not_exists: bool, **given: Unpack[settings.TopicOptions]
) -> None:
    """Create the topic NAME.

    Without --key every publish supplies the key. Records that are published with a lifetime expire, unless --expiration
    says otherwise. A setting that is not given comes from a policy that matches the topic, or else it is the server's
    default.

    \b
    Examples:
      sow topic create orders --key /id --expiration 30s --max-ttl 1h
      sow topic create venues --key /carrier --key /flight
      sow topic create images --message-type binary
      sow topic create orders --key /id --if-not-exists
    """
    wanted = settings.topic_settings(given)
    with session.client() as client:
        try:
            created = client.create_topic(name, **wanted)
        except AlreadyExists:
            if not if_not_exists:
                raise
            created = client.describe_topic(name)
            note(f"topic {name} exists already, and stays as it is{_different(created, wanted)}")
    output.one(_facts(created))
    settings.warn(created.warnings)


def _different(there: Topic, wanted: TopicSettingsArguments) -> str:
    """Names the settings of a topic that are not as they were wanted."""
    asked = dict(wanted)
    if "default_ttl" in asked:
        asked["expiration"] = asked.pop("default_ttl")
    given = {name: value for name, value in asked.items() if value is not None}
    meant = TopicSettings(**given)  # type: ignore[arg-type]  # names of its fields
    names = [name for name in given if getattr(there.settings, name) != getattr(meant, name)]
    if not names:
        return ""
    told = (f"{name} = {_setting(there.settings, name)}, not {_setting(meant, name)}" for name in names)
    return f", with other settings than these: {'; '.join(told)}"


def _setting(values: TopicSettings, name: str) -> str:
    value = getattr(values, name)
    if isinstance(value, tuple):
        return " ".join(map(display.safe, value)) or display.NOT_SET
    return display.NOT_SET if value is None else settings.shown(name, value)


@topic.command(short_help="Change settings of a topic.")
@click.argument("name")
@settings.topic_options
@output_option
@click.pass_obj
def alter(session: Session, output: Output, name: str, **given: Unpack[settings.TopicOptions]) -> None:
    """Change settings of the topic NAME; settings that are not given stay unchanged.

    Existing records keep their expire times; `sow topic restamp` changes them. The value none takes a setting away:
    then a policy that matches the topic counts, or the server's default. --key, --message-type and --fix-separator
    change only while the topic is empty. --index names all indexes that the topic is to have. New indexes are built
    while the topic is in use; queries use an index once it is complete, which `sow topic describe` shows.

    \b
    Examples:
      sow topic alter orders --expiration 5m --max-ttl none
      sow topic alter orders --index /symbol --index /account
    """
    wanted = settings.topic_settings(given)
    if not wanted:
        raise click.UsageError("nothing to change: give at least one setting")
    with session.client() as client:
        altered = client.alter_topic(name, **wanted)
    output.one(_facts(altered))
    settings.warn(altered.warnings)


@topic.command(short_help="Show settings and figures of a topic.")
@click.argument("name")
@output_option
@click.pass_obj
def describe(session: Session, output: Output, name: str) -> None:
    """Show settings and figures of the topic NAME: the effective values and their origins.

    A setting comes from the topic, the configuration, a policy, an operator policy, or the server's defaults. The
    planned bytes of the journal are those to have room for on the disk.

    \b
    Example:
      sow topic describe orders
    """
    with session.client() as client:
        described = client.describe_topic(name)
    facts = [*_facts(described), *_planned(described)]
    effective = described.effective
    if output.is_table:
        apart = {one.name for one in effective} & {*settings.FACT_NAMES, "journal", "fix_separator"}
        output.one([fact for fact in facts if fact.name not in apart])
        output.many([_effective(one) for one in effective], names=(), nothing="")
        return
    nested = [{"name": one.name, "value": one.value, "origin": one.origin} for one in effective]
    output.one([*facts, Fact("effective", nested, "")])


@topic.command(short_help="Delete a topic.")
@click.argument("name")
@click.option("-f", "--force", is_flag=True, help="Do not ask.")
@click.option("--unshipped", is_flag=True, help="Also while a peer has not received all changes; it never will.")
@click.option("--here", is_flag=True, help="Delete the copy that is left here of a topic that lives in another cell.")
@output_option
@click.pass_obj
def delete(session: Session, *, output: Output, name: str, force: bool, unshipped: bool, here: bool) -> None:
    """Delete the topic NAME with its records and its journal, on this server only.

    The command asks first on a terminal; without a terminal it needs --force. --force does not cover other instances:
    while a peer has not received all changes of the topic, the deletion needs --unshipped.

    \b
    Example:
      sow topic delete orders
    """
    copy = "the copy here of " if here else ""
    confirm(f"Delete {copy}topic {name} with all its records and its journal?", force=force)
    with session.client() as client:
        deleted = client.delete_topic(name, force=unshipped, here=here)
    output.one([Fact("topic", name, name), Fact("deleted_records", deleted, display.count(deleted))])


@topic.command(short_help="Give existing records another lifetime.")
@click.argument("name")
@click.option("--set", "lifetime", type=arguments.duration, metavar="DURATION", help="Records live this long from now.")
@click.option(
    "--cap", type=arguments.duration, metavar="DURATION", help="Longer lifetimes, and never, are lowered to this."
)
@click.option("--clear", is_flag=True, help="Records never expire, unless the topic has a --max-ttl.")
@click.option("--filter", "wanted", metavar="FILTER", help="Only records that match.")
@param_option
@click.option("--dry-run", is_flag=True, help="Only count what would be restamped.")
@output_option
@click.pass_obj
def restamp(
    session: Session,
    *,
    output: Output,
    name: str,
    lifetime: str | None,
    cap: str | None,
    clear: bool,
    wanted: str | None,
    parameters: Values | None,
    dry_run: bool,
) -> None:
    """Give existing records of the topic NAME another lifetime, by exactly one of --set, --cap and --clear.

    Many records are restamped in steps, each record only if it still matches at its step. If the connection breaks,
    the steps that are done stay done.

    \b
    Examples:
      sow topic restamp orders --set 1h --filter "/state = 'open'"
      sow topic restamp orders --cap 10m --dry-run
    """
    if (lifetime is not None) + (cap is not None) + clear != 1:
        raise click.UsageError("give exactly one of --set, --cap and --clear")
    mode: RestampMode = "clear" if clear else "set" if cap is None else "cap"
    with session.client() as client, telling("counting" if dry_run else "restamping") as tell:

        def show(so_far: Restamped) -> None:
            tell(display.records(so_far.matched if dry_run else so_far.restamped))

        done = client.restamp(
            name,
            mode,
            ttl=lifetime or cap,
            filter=wanted,
            parameters=parameters,
            dry_run=dry_run,
            on_progress=show,
        )
    facts = [
        Fact("topic", name, name),
        Fact("matched", done.matched, display.records(done.matched)),
        Fact("restamped", done.restamped, f"{done.restamped:,}" + (" (dry run)" if dry_run else "")),
    ]
    if done.sequence:
        facts.append(Fact("sequence", done.sequence, str(done.sequence)))
    output.one(facts)
    remark_on_fields(done.absent_fields)


def confirm(question: str, *, force: bool) -> None:
    """Asks before data is lost. Without a terminal nobody can answer, so it is wrong usage unless forced."""
    if force:
        return
    if not _can_ask():
        raise click.UsageError("there is no terminal to ask on; give --force")
    if not click.confirm(display.safe(question), err=True):
        note("nothing was done")
        click.get_current_context().exit(SERVER_SAID_NO)


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _facts(topic: Topic) -> list[Fact]:
    values, figures = topic.settings, topic.statistics
    key = list(values.key)
    is_fix = values.message_type in ("fix", "nvfix")
    separator = display.safe(values.fix_separator) if is_fix else display.NOT_SET
    owner = "configuration" if topic.set_in_config else "administrator"
    building = [index.path for index in topic.indexes if not index.complete]
    facts = [
        Fact("name", topic.name, topic.name, label="topic"),
        Fact("message_type", values.message_type, values.message_type, label="type"),
        Fact("key", key, _shown_paths(key) or "(by publisher)"),
        Fact("expiration", str(values.expiration), str(values.expiration)),
        *settings.facts(values),
        Fact("journal", values.journal, "yes" if values.journal else "no", in_lists=False),
        Fact(
            "fix_separator",
            values.fix_separator if is_fix else None,
            separator if is_fix else display.NOT_SET,
            in_lists=False,
        ),
        Fact("index", list(values.index), _shown_indexes(topic), in_lists=False),
        Fact("index_building", building or None, _shown_paths(building) or display.NOT_SET, in_lists=False),
        _view(topic),
        moment("create_time", topic.create_time, in_lists=False),
    ]
    set_by = Fact("set_in_config", topic.set_in_config, owner, label="set by")  # the first to go where there is no room
    if figures is None:
        return [*facts, set_by]
    return [
        *facts,
        Fact("live_records", figures.live_records, display.count(figures.live_records), right=True),
        Fact("overdue_records", figures.overdue_records, display.count(figures.overdue_records), right=True),
        Fact("stored_bytes", figures.stored_bytes, display.size(figures.stored_bytes), right=True),
        Fact("journal_entries", figures.journal_entries, display.count(figures.journal_entries), in_lists=False),
        Fact("journal_bytes", figures.journal_bytes, display.size(figures.journal_bytes), right=True),
        Fact("floor_sequence", figures.floor_sequence, str(figures.floor_sequence), in_lists=False),
        Fact("durables", figures.durables, display.count(figures.durables), in_lists=False),
        Fact("backlog_bytes", figures.backlog_bytes, display.exact_size(figures.backlog_bytes), in_lists=False),
        length("backlog_age", figures.backlog_age, in_lists=False),
        Fact("backlog_entries", figures.backlog_entries, display.count(figures.backlog_entries), in_lists=False),
        Fact(
            "slowest_durable",
            figures.slowest_durable or None,
            display.safe(figures.slowest_durable) or display.NOT_SET,
            in_lists=False,
        ),
        Fact("tombstones", figures.tombstones, display.count(figures.tombstones), in_lists=False),
        Fact("full_refusals", figures.full_refusals, display.count(figures.full_refusals), in_lists=False),
        set_by,
    ]


def _view(topic: Topic) -> Fact:
    """The definition and the state of a view, in one."""
    definition, status = topic.view, topic.view_status
    value: dict[str, str | int | bool] = {}
    shown: list[str] = []
    if definition is not None:
        groups, selected = ", ".join(definition.group_by), ", ".join(definition.select)
        value |= {"source": definition.source, "where": definition.where, "group_by": groups, "select": selected}
        by = f" by {groups}" if groups else ""
        where = f" where {definition.where}" if definition.where else ""
        shown.append(display.safe(f"of {definition.source}{by}: {selected or 'whole records'}{where}"))
    if status is not None:
        value |= {"complete": status.complete, "records_read": status.records_read}
        value |= {"groups": status.groups, "ungrouped": status.ungrouped}
        shown.append("complete" if status.complete else f"being built, {display.records(status.records_read)} read")
    return Fact("view", value or None, "; ".join(shown), in_lists=False)


def _planned(topic: Topic) -> list[Fact]:
    planned = topic.planned_journal_bytes
    if planned is None:
        return []
    return [Fact("planned_journal_bytes", planned, settings.shown("planned_journal_bytes", planned))]


def _effective(one: EffectiveSetting) -> list[Fact]:
    return [
        Fact("name", one.name, one.name, label="setting"),
        Fact("value", one.value, settings.shown_in_force(one.value)),
        Fact("origin", one.origin, display.safe(one.origin), label="from"),
    ]


def _shown_paths(paths: Iterable[str]) -> str:
    return " ".join(display.safe(path) for path in paths)


def _shown_indexes(topic: Topic) -> str:
    """Each index, with the information whether queries use it already."""
    shown = [f"{display.safe(one.path)} ({'complete' if one.complete else 'being built'})" for one in topic.indexes]
    return ", ".join(shown) or display.NOT_SET


@topic.command(short_help="Find rows that no publish could have made.")
@click.argument("name")
@click.option("--repair", is_flag=True, help="Remove these rows, here and at the peers.")
@click.option(
    "--rows",
    "rows_max",
    type=click.IntRange(0, 100_000),
    default=100,
    show_default=True,
    metavar="N",
    help="Rows to list.",
)
@output_option
@click.pass_obj
@click.pass_context
def check(ctx: click.Context, session: Session, output: Output, name: str, *, repair: bool, rows_max: int) -> None:
    """Check the topic NAME for rows that no publish could have made. The exit code is 1 when such rows remain.

    Such rows came from another instance. Their key is not UTF-8, empty or too long; their payload is not of the topic's
    message type, has another key or is too large; or a version or time is impossible. Queries skip rows whose key
    cannot be shown.

    \b
    Examples:
      sow topic check orders
      sow topic check orders --repair
    """
    with session.client() as client, telling("checking") as tell:

        def show(so_far: TopicChecked) -> None:
            tell(display.records(so_far.checked))

        done = client.check_topic(name, repair=repair, rows_max=rows_max, on_progress=show)
    facts = [
        Fact("topic", name, display.safe(name)),
        Fact("checked", done.checked, display.count(done.checked)),
        Fact("unsound", done.unsound, display.count(done.unsound)),
        Fact("removed", done.removed, display.count(done.removed)),
    ]
    if output.is_table:
        output.one(facts)
        if done.rows:
            output.many([_unsound(row) for row in done.rows], names=(), nothing="")
    else:
        output.one([*facts, Fact("rows", [_nested(row) for row in done.rows], "")])
    if done.unsound > done.removed:
        ctx.exit(SERVER_SAID_NO)


def _nested(row: UnsoundRow) -> dict[str, str | int]:
    return {
        "key": row.key.decode(errors="backslashreplace"),
        "reason": row.reason,
        "message": row.message,
        "version": row.version,
        "origin": row.origin,
        "payload_bytes": row.payload_bytes,
    }


def _unsound(row: UnsoundRow) -> list[Fact]:
    key = row.key.decode(errors="backslashreplace")
    shown = key if len(key) <= KEY_CHARACTERS_SHOWN else key[:KEY_CHARACTERS_SHOWN] + "…"
    return [
        Fact("key", key, display.safe(shown)),
        Fact("reason", row.reason, row.reason),
        Fact("message", row.message, display.safe(row.message)),
        Fact("version", row.version, str(row.version), right=True),
        Fact("origin", row.origin, display.safe(row.origin)),
        Fact("payload_bytes", row.payload_bytes, display.count(row.payload_bytes), right=True),
    ]
