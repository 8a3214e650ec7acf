"""`sow topics`, `sow topic create|alter|describe|delete|restamp`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Final, TypedDict, TypeVar, Unpack, get_args

import click
from rich.progress import TextColumn

from sow_cli import arguments, display
from sow_cli.arguments import NO_INDEX
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.output import Fact, Output, note, output_option, progress
from sow_cli.session import Session
from sow_client import MessageTypeName, Restamped, RestampMode, Topic, TopicSettingsArguments

Command = TypeVar("Command", bound=Callable[..., object])


class SettingsOptions(TypedDict):
    """What click hands over for `_settings_options`; None, or no element: not given."""

    key: tuple[str, ...]
    message_type: MessageTypeName | None
    expiration: str | None
    min_ttl: str | None
    max_ttl: str | None
    journal: bool | None
    retain_time: str | None
    retain_bytes: int | None
    index: tuple[str, ...]
    separator: str | None


_NAMES: Final = (
    "name",
    "message_type",
    "key",
    "expiration",
    "min_ttl",
    "max_ttl",
    "journal",
    "fix_separator",
    "retain_time",
    "retain_bytes",
    "index",
    "index_building",
    "set_in_config",
    "create_time",
    "live_records",
    "overdue_records",
    "stored_bytes",
    "journal_entries",
    "journal_bytes",
    "floor_sequence",
)


@click.command(short_help="List all topics.")
@output_option
@click.pass_obj
def topics(session: Session, output: Output) -> None:
    """List all topics with their settings and figures.

    \b
    Example:
      sow topics
    """
    with session.client() as client:
        found = client.topics(with_statistics=True)
    output.many([_facts(topic) for topic in found], names=_NAMES, nothing="no topics")


@click.group(short_help="Create, alter, describe, delete, restamp a topic.")
def topic() -> None:
    """Create, alter, describe and delete topics, and restamp their records."""


def _settings_options(command: Command) -> Command:
    options = [
        click.option("--key", multiple=True, metavar="PATH", help="Key path, such as /id; repeat it for several."),
        click.option("--message-type", type=click.Choice(get_args(MessageTypeName)), help="Encoding of the payloads."),
        click.option(
            "--expiration",
            type=arguments.expiration,
            metavar="disabled|enabled|reject|DURATION",
            help="Whether records expire; a DURATION such as 30s is the lifetime of those that carry none.",
        ),
        click.option("--min-ttl", type=arguments.bound, metavar="DURATION|none", help="Shorter lifetimes are raised."),
        click.option("--max-ttl", type=arguments.bound, metavar="DURATION|none", help="Longer lifetimes are lowered."),
        click.option("--journal/--no-journal", default=None, help="Whether changes are journaled."),
        click.option(
            "--retain-time",
            type=arguments.retain_time,
            metavar="DURATION|unlimited",
            help="How long the journal keeps changes.",
        ),
        click.option(
            "--retain-bytes",
            type=arguments.retain_bytes,
            metavar="SIZE|unlimited",
            help="How much the journal keeps, such as 256MiB.",
        ),
        click.option(
            "--index",
            type=arguments.index,
            multiple=True,
            metavar="PATH|none",
            help="Field with a secondary index, such as /symbol; repeat it for several. All others go.",
        ),
        click.option(
            "--separator", type=arguments.separator, metavar="CHAR", help=r"Between fix or nvfix fields, such as \x01."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _settings(given: SettingsOptions) -> TopicSettingsArguments:
    """Only what was given: the server fills in the rest, or leaves it as it is."""
    settings = TopicSettingsArguments()
    if given["key"]:
        settings["key"] = given["key"]
    if given["message_type"] is not None:
        settings["message_type"] = given["message_type"]
    if given["expiration"] is not None:
        settings["expiration"] = given["expiration"]
    if given["min_ttl"] is not None:
        settings["min_ttl"] = _bound(given["min_ttl"])
    if given["max_ttl"] is not None:
        settings["max_ttl"] = _bound(given["max_ttl"])
    if given["journal"] is not None:
        settings["journal"] = given["journal"]
    if given["retain_time"] is not None:
        settings["retain_time"] = given["retain_time"]
    if given["retain_bytes"] is not None:
        settings["retain_bytes"] = given["retain_bytes"]
    if index := given["index"]:
        if NO_INDEX in index and len(index) > 1:
            raise click.UsageError(f"--index {NO_INDEX} excludes other --index options")
        settings["index"] = () if index == (NO_INDEX,) else index
    if given["separator"] is not None:
        settings["fix_separator"] = given["separator"]
    return settings


def _bound(text: str) -> str | None:
    return None if text == "none" else text


@topic.command()
@click.argument("name")
@_settings_options
@output_option
@click.pass_obj
def create(session: Session, output: Output, name: str, **given: Unpack[SettingsOptions]) -> None:
    """Create the topic NAME.

    Without --key every publish supplies the key. Without --expiration records do not expire.

    \b
    Example:
      sow topic create orders --key /id --expiration 30s --max-ttl 1h
    """
    settings = _settings(given)
    with session.client() as client:
        output.one(_facts(client.create_topic(name, **settings)))


@topic.command()
@click.argument("name")
@_settings_options
@output_option
@click.pass_obj
def alter(session: Session, output: Output, name: str, **given: Unpack[SettingsOptions]) -> None:
    """Change settings of the topic NAME; those not given stay as they are.

    Existing records keep their expire times. --key, --message-type and --separator change only while the topic is
    empty. --index names all indexes that there are to be: new ones are built while the topic is in use, see `sow topic
    describe`.

    \b
    Example:
      sow topic alter orders --expiration 5m --max-ttl none
      sow topic alter orders --index /symbol --index /account
    """
    settings = _settings(given)
    if not settings:
        raise click.UsageError("nothing to change: give at least one setting")
    with session.client() as client:
        output.one(_facts(client.alter_topic(name, **settings)))


@topic.command()
@click.argument("name")
@output_option
@click.pass_obj
def describe(session: Session, output: Output, name: str) -> None:
    """Show settings and figures of the topic NAME.

    \b
    Example:
      sow topic describe orders
    """
    with session.client() as client:
        output.one(_facts(client.describe_topic(name)))


@topic.command()
@click.argument("name")
@click.option("-f", "--force", is_flag=True, help="Do not ask.")
@output_option
@click.pass_obj
def delete(session: Session, output: Output, name: str, force: bool) -> None:
    """Delete the topic NAME with its records and its journal.

    Asks first on a terminal; without one it needs --force.

    \b
    Example:
      sow topic delete orders
    """
    confirm(f"Delete topic {name} with all its records and its journal?", force=force)
    with session.client() as client:
        deleted = client.delete_topic(name)
    output.one([Fact("topic", name, name), Fact("deleted_records", deleted, display.count(deleted))])


@topic.command(short_help="Give existing records another lifetime.")
@click.argument("name")
@click.option("--set", "lifetime", type=arguments.duration, metavar="DURATION", help="Records live this long from now.")
@click.option("--cap", type=arguments.duration, metavar="DURATION", help="Only lifetimes that are longer are lowered.")
@click.option("--clear", is_flag=True, help="Records never expire, as far as the topic's --max-ttl allows.")
@click.option("--filter", "wanted", metavar="FILTER", help="Only records that match.")
@click.option("--dry-run", is_flag=True, help="Only count what would be restamped.")
@output_option
@click.pass_obj
def restamp(
    session: Session,
    output: Output,
    name: str,
    lifetime: str | None,
    cap: str | None,
    clear: bool,
    wanted: str | None,
    dry_run: bool,
) -> None:
    """Give existing records of the topic NAME another lifetime, by exactly one of --set, --cap and --clear.

    Many records are done in steps, each record only if it still matches then.

    \b
    Examples:
      sow topic restamp orders --set 1h --filter "/state = 'open'"
      sow topic restamp orders --cap 10m --dry-run
    """
    if (lifetime is not None) + (cap is not None) + clear != 1:
        raise click.UsageError("give exactly one of --set, --cap and --clear")
    mode: RestampMode = "clear" if clear else "set" if cap is None else "cap"
    figures = TextColumn("{task.fields[figures]}")
    with session.client() as client, progress(figures, measured=False) as bar:
        task = bar.add_task("counting" if dry_run else "restamping", total=None, figures="")

        def show(so_far: Restamped) -> None:
            bar.update(task, figures=display.records(so_far.matched if dry_run else so_far.restamped))

        done = client.restamp(name, mode, ttl=lifetime or cap, filter=wanted, dry_run=dry_run, on_progress=show)
    facts = [
        Fact("topic", name, name),
        Fact("matched", done.matched, display.records(done.matched)),
        Fact("restamped", done.restamped, f"{done.restamped:,}" + (" (dry run)" if dry_run else "")),
    ]
    if done.sequence:
        facts.append(Fact("sequence", done.sequence, str(done.sequence)))
    output.one(facts)


def confirm(question: str, *, force: bool) -> None:
    """Asks before something is lost. Without a terminal nobody can answer, so it is wrong usage unless forced."""
    if force:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("without a terminal to ask on this needs --force")
    if not click.confirm(question, err=True):
        note("nothing was done")
        click.get_current_context().exit(SERVER_SAID_NO)


def _facts(topic: Topic) -> list[Fact]:
    settings, figures = topic.settings, topic.statistics
    key = list(settings.key)
    is_fix = settings.message_type in ("fix", "nvfix")
    separator = display.safe(settings.fix_separator)
    owner = "configuration" if topic.set_in_config else "administrator"
    min_ttl, max_ttl, retain_time = (
        None if value is None else str(value) for value in (settings.min_ttl, settings.max_ttl, settings.retain_time)
    )
    building = [index.path for index in topic.indexes if not index.complete]
    facts = [
        Fact("name", topic.name, topic.name, label="topic"),
        Fact("message_type", settings.message_type, settings.message_type, label="type"),
        Fact("key", key, _shown_paths(key) or "(by publisher)"),
        Fact("expiration", str(settings.expiration), str(settings.expiration)),
        Fact("min_ttl", min_ttl, min_ttl or "none", in_lists=False),
        Fact("max_ttl", max_ttl, max_ttl or "none", in_lists=False),
        Fact("journal", settings.journal, "yes" if settings.journal else "no", in_lists=False),
        Fact("fix_separator", settings.fix_separator if is_fix else None, separator if is_fix else "-", in_lists=False),
        Fact("retain_time", retain_time, retain_time or "default", in_lists=False),
        Fact("retain_bytes", settings.retain_bytes, _retained(settings.retain_bytes), in_lists=False),
        Fact("index", list(settings.index), _shown_indexes(topic), in_lists=False),
        Fact("index_building", building or None, _shown_paths(building) or "none", in_lists=False),
        Fact("set_in_config", topic.set_in_config, owner, label="set by"),
        Fact("create_time", topic.create_time.isoformat(), f"{topic.create_time:%Y-%m-%d %H:%M:%S}Z", in_lists=False),
    ]
    if figures is None:
        return facts
    return [
        *facts,
        Fact("live_records", figures.live_records, display.count(figures.live_records), right=True),
        Fact("overdue_records", figures.overdue_records, display.count(figures.overdue_records), right=True),
        Fact("stored_bytes", figures.stored_bytes, display.size(figures.stored_bytes), right=True),
        Fact("journal_entries", figures.journal_entries, display.count(figures.journal_entries), in_lists=False),
        Fact("journal_bytes", figures.journal_bytes, display.size(figures.journal_bytes), right=True),
        Fact("floor_sequence", figures.floor_sequence, str(figures.floor_sequence), in_lists=False),
    ]


def _retained(limit: int | None) -> str:
    return "default" if limit is None else "unlimited" if limit < 0 else display.size(limit)


def _shown_paths(paths: Iterable[str]) -> str:
    return " ".join(display.safe(path) for path in paths)


def _shown_indexes(topic: Topic) -> str:
    """Each index, and whether queries use it already."""
    shown = [f"{display.safe(one.path)} ({'complete' if one.complete else 'being built'})" for one in topic.indexes]
    return ", ".join(shown) or "none"
