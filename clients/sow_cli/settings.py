"""Options that set topics, and the display of settings.

`none` removes a setting: then a matching policy applies, or the server's default (rule T2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypedDict, TypeVar, cast, get_args

import click

from sow_cli import arguments, display
from sow_cli.arguments import NO_INDEX, NONE
from sow_cli.output import Fact, note
from sow_client import (
    BacklogActionName,
    DurableSettingsArguments,
    MessageTypeName,
    OnMissingName,
    TopicSettings,
    TopicSettingsArguments,
)

Command = TypeVar("Command", bound=Callable[..., object])


class PolicyOptions(TypedDict):
    """The values that click passes for `policy_options`, named as the settings; None: not given."""

    expiration: str | None
    default_ttl: str | None
    min_ttl: str | None
    max_ttl: str | None
    retain_time: str | None
    retain_bytes: int | str | None
    max_age: str | None
    max_bytes: int | str | None
    max_entries: int | str | None
    backlog_ttl: str | None
    backlog_quota_bytes: int | str | None
    backlog_quota_age: str | None
    backlog_quota_entries: int | str | None
    backlog_action: str | None
    delivery_limit: int | str | None
    durable_idle_ttl: str | None
    idle_ttl: str | None
    publish_is_use: bool | None
    only_if_empty: bool | None
    auto_delete: bool | None
    dead_letter: str | None
    dead_letter_by_key: bool | None
    on_missing: str | None
    replicate_durables: bool | None
    max_records: int | str | None
    max_stored_bytes: int | str | None


class TopicOptions(PolicyOptions):
    """The values that click passes for `topic_options`; None, or no element: not given."""

    key: tuple[str, ...]
    message_type: MessageTypeName | None
    journal: bool | None
    index: tuple[str, ...]
    fix_separator: str | None


def _flag(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(f"--{name}/--no-{name}", default=None, help=text)


def _bound(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(name, type=arguments.bound, metavar="DURATION|none", help=text)


def _size(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(name, type=arguments.size, metavar="SIZE|none", help=text)


def _entries(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(name, type=arguments.entries, metavar="N|none", help=text)


_TOPIC_OPTIONS: Final = (
    click.option(
        "--key", multiple=True, metavar="PATH", help="Key field, such as /id; repeat it for a key of several fields."
    ),
    click.option(
        "--message-type",
        type=click.Choice(get_args(MessageTypeName)),
        help="Encoding of the payloads; a new topic has json.",
    ),
    _flag("journal", "Whether changes are journaled; a new topic journals them."),
    click.option(
        "--index",
        type=arguments.index,
        multiple=True,
        metavar="PATH|none",
        help="Field with a secondary index, such as /symbol; repeat it for several. The list replaces the one before; "
        "none removes all.",
    ),
    click.option(
        "--fix-separator",
        type=arguments.separator,
        metavar="CHAR",
        help=r"Between the fields of fix and nvfix: one character, \x01, or SOH, the default.",
    ),
)

_POLICY_OPTIONS: Final = (
    click.option(
        "--expiration",
        type=arguments.expiration,
        metavar="disabled|enabled|reject|DURATION",
        help="enabled, the default: records that carry a lifetime expire. disabled: lifetimes are stored, without "
        "effect. reject: records with a lifetime are refused. A DURATION such as 30s: enabled, and the lifetime of "
        "records that carry none.",
    ),
    _bound("--default-ttl", "The lifetime of records that carry none; the same as --expiration DURATION."),
    _bound("--min-ttl", "Shorter lifetimes are raised to this."),
    _bound("--max-ttl", "Longer lifetimes, and never, are lowered to this."),
    click.option(
        "--retain-time",
        type=arguments.retain_time,
        metavar="DURATION|unlimited|none",
        help="The journal keeps changes at least this long, or --retain-bytes of them, whichever ends first.",
    ),
    click.option(
        "--retain-bytes",
        type=arguments.size,
        metavar="SIZE|unlimited|none",
        help="How much the journal keeps, such as 256MiB, 1GB or 0. Other numbers need a unit.",
    ),
    _bound("--max-age", "Older journal entries are discarded, read or not."),
    _size("--max-bytes", "Journal entries beyond this size are discarded, the oldest first."),
    _entries("--max-entries", "Journal entries beyond this number are discarded, the oldest first."),
    _bound("--backlog-ttl", "Changes that a durable leaves unacknowledged for this long count as acknowledged."),
    _size("--backlog-quota-bytes", "How much a durable may leave unacknowledged."),
    _bound("--backlog-quota-age", "How old an unacknowledged change may be."),
    _entries("--backlog-quota-entries", "How many changes a durable may leave unacknowledged."),
    click.option(
        "--backlog-action",
        type=click.Choice([*get_args(BacklogActionName), NONE]),
        help="The action beyond the quota; default hold. `sow quota set --help` explains each.",
    ),
    click.option(
        "--delivery-limit",
        type=arguments.entries,
        metavar="N|unlimited|none",
        help="A change that was delivered to consumers of a durable this often is set aside.",
    ),
    _bound("--durable-idle-ttl", "A durable that is unused for this long is removed."),
    _bound("--idle-ttl", "A topic that is unused for this long is deleted."),
    _flag("publish-is-use", "Whether a publish counts as a use of the topic; default no."),
    _flag("only-if-empty", "Whether an unused topic is deleted only while it has no records; default no."),
    _flag("auto-delete", "Whether the topic is deleted when its last subscriber leaves; default no."),
    click.option(
        "--dead-letter",
        metavar="TOPIC|none",
        help="Expired records, and changes beyond --delivery-limit, are copied to this topic.",
    ),
    _flag(
        "dead-letter-by-key",
        "Whether a copy has the record's key, so that the last one stays; default topic|key|version.",
    ),
    click.option(
        "--on-missing",
        type=click.Choice([*get_args(OnMissingName), NONE]),
        help="The treatment of dead letters while their topic does not exist; default retain.",
    ),
    _flag(
        "replicate-durables",
        "Whether peers know the durables of the topic, so that consumers go on there; default no. Durables that "
        "are replicated stay so.",
    ),
    _entries("--max-records", "A publish that would add a record beyond this number is refused with TOPIC_FULL."),
    _size(
        "--max-stored-bytes",
        "A publish that would let keys and payloads of the records grow beyond this is refused likewise.",
    ),
)


def policy_options(command: Command) -> Command:
    """Adds an option for each setting that a policy can have."""
    for option in reversed(_POLICY_OPTIONS):
        command = option(command)
    return command


def topic_options(command: Command) -> Command:
    """Adds an option for each setting of a topic."""
    command = policy_options(command)
    for option in reversed(_TOPIC_OPTIONS):
        command = option(command)
    return command


def policy_settings(given: PolicyOptions) -> TopicSettingsArguments:
    """Only the given settings: the server decides the others."""
    names = PolicyOptions.__annotations__
    named = {name: value for name, value in given.items() if name in names and value is not None}
    return cast(TopicSettingsArguments, taken_away(named))


def taken_away(named: Mapping[str, object]) -> dict[str, object]:
    """The settings; None for `none`."""
    return {name: None if value == NONE else value for name, value in named.items()}


def topic_settings(given: TopicOptions) -> TopicSettingsArguments:
    """Only the given settings: the server fills in the others, or leaves them unchanged."""
    settings = policy_settings(given)
    if given["key"]:
        settings["key"] = given["key"]
    if given["message_type"] is not None:
        settings["message_type"] = given["message_type"]
    if given["journal"] is not None:
        settings["journal"] = given["journal"]
    if index := given["index"]:
        if NO_INDEX in index and len(index) > 1:
            raise click.UsageError(f"--index {NO_INDEX} excludes other --index options")
        settings["index"] = () if index == (NO_INDEX,) else index
    if given["fix_separator"] is not None:
        settings["fix_separator"] = given["fix_separator"]
    return settings


def durable_settings(settings: TopicSettingsArguments) -> DurableSettingsArguments:
    """The same options for durables. Wrong usage when one is given that durables do not have."""
    names = DurableSettingsArguments.__annotations__
    given: dict[str, object] = {
        "replicated" if name == "replicate_durables" else name: value for name, value in settings.items()
    }
    for name in given:
        if name not in names:
            raise click.UsageError(f"--{name.replace('_', '-')} is a setting of topics, not of durables")
    return cast(DurableSettingsArguments, given)


# ---- display ----

_SHOWN_APART: Final = frozenset({"key", "message_type", "expiration", "journal", "fix_separator", "index"})
FACT_NAMES: Final = tuple(name for name in TopicSettings.__dataclass_fields__ if name not in _SHOWN_APART)
"""The settings of a topic that `facts` shows."""


def facts(settings: TopicSettings) -> list[Fact]:
    """The settings that a topic may leave to policies, in the order of their declaration."""
    result = []
    for name in FACT_NAMES:
        value = getattr(settings, name)
        is_set = value is not None and value != ""
        result.append(Fact(name, value if is_set else None, shown(name, value) if is_set else "", in_lists=False))
    return result


def warn(warnings: Iterable[str]) -> None:
    """Writes the server's warnings about settings to stderr."""
    for warning in warnings:
        note(f"warning: {warning}")


def shown(name: str, value: str | int | bool) -> str:
    """A setting in the notation of the command line: nothing is rounded."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return display.safe(value)
    if value < 0:
        return "unlimited"
    return display.exact_size(value) if name.endswith("_bytes") else str(value)


def shown_in_force(value: str) -> str:
    """An effective value in a table. A setting without a value, such as no bound, shows as not set."""
    return display.NOT_SET if value in ("", NONE) else display.safe(value)
