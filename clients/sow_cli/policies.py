"""`sow policy …`, and two groups of settings with their own commands: `sow retention …`, `sow quota …`.

`retention` and `quota` work on a topic, or, with a pattern, on a policy whose name is made from the pattern. `set`
replaces all settings of the group: a setting that is not given is no longer set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, Unpack, cast, get_args

import click

from sow_cli import arguments, display, settings
from sow_cli.output import Fact, Output, output_option
from sow_cli.session import Session
from sow_client import BacklogActionName, Client, Policy, TopicSettingsArguments

_NAMES: Final = ("name", "pattern", "priority", "applies_to", "operator", "matches", "settings")
_POLICY_NAME_LENGTH_MAX: Final = 200

_operator = click.option(
    "--operator", is_flag=True, help="An operator policy: limits that no other setting can exceed."
)


@click.group(short_help="Set, get, list, delete a policy: settings by pattern.")
def policy() -> None:
    """Set, get, list and delete policies: settings for all topics, or durable subscriptions, of a pattern."""


@policy.command("set", short_help="Set a policy.")
@click.argument("name")
@click.argument("pattern")
@click.option(
    "--priority",
    type=click.IntRange(-(2**31), 2**31 - 1),
    default=0,
    metavar="N",
    help="Of several policies that match, the one with the highest priority counts; default 0.",
)
@_operator
@click.option("--durables", is_flag=True, help="For durable subscriptions: PATTERN matches TOPIC/NAME.")
@settings.policy_options
@output_option
@click.pass_obj
def set_policy(
    session: Session,
    output: Output,
    name: str,
    pattern: str,
    priority: int,
    operator: bool,
    durables: bool,
    **given: Unpack[settings.PolicyOptions],
) -> None:
    """Set the policy NAME for all topics whose whole name matches PATTERN, a regular expression (RE2).

    It replaces the policy of that name. A topic takes those settings from it that the topic does not set itself. Limits
    are the strictest of topic, policy and operator policy. With --durables the settings are --retain-time,
    --retain-bytes, --backlog-ttl, --idle-ttl, --delivery-limit and --replicate-durables.

    \b
    Examples:
      sow policy set short 'tmp\\..*' --retain-time 1m --max-ttl 1h
      sow policy set cap '.*' --operator --max-ttl 7d --max-bytes 10GiB
      sow policy set idle 'orders/.*' --durables --idle-ttl 7d
    """
    wanted = settings.policy_settings(given)
    if not wanted:
        raise click.UsageError("nothing to set: give at least one setting")
    if durables:
        of_durables = settings.durable_settings(wanted)
        with session.client() as client:
            done = client.set_policy(name, pattern, durables=of_durables, priority=priority, operator=operator)
    else:
        with session.client() as client:
            done = client.set_policy(name, pattern, topics=wanted, priority=priority, operator=operator)
    output.one(_facts(done))
    settings.warn(done.warnings)


@policy.command("get", short_help="Show a policy.")
@click.argument("name")
@_operator
@output_option
@click.pass_obj
def get_policy(session: Session, output: Output, name: str, operator: bool) -> None:
    """Show the policy NAME.

    \b
    Example:
      sow policy get short
    """
    with session.client() as client:
        output.one(_facts(client.get_policy(name, operator=operator)))


@policy.command("list", short_help="List all policies.")
@output_option
@click.pass_obj
def list_policies(session: Session, output: Output) -> None:
    """List all policies: operator policies first, then by priority.

    \b
    Example:
      sow policy list
    """
    with session.client() as client:
        found = client.policies()
    output.many([_facts(one) for one in found], names=_NAMES, nothing="no policies")


@policy.command("delete", short_help="Delete a policy.")
@click.argument("name")
@_operator
@output_option
@click.pass_obj
def delete_policy(session: Session, output: Output, name: str, operator: bool) -> None:
    """Delete the policy NAME; its settings then come from the next policy or default.

    \b
    Example:
      sow policy delete short
    """
    with session.client() as client:
        client.delete_policy(name, operator=operator)
    output.one([Fact("name", name, display.safe(name), label="deleted"), _kind(operator)])


def policies_that_differ(some: Iterable[Policy], others: Iterable[Policy]) -> list[str]:
    """The names of policies that two servers do not have in the same form, or that one of them lacks."""
    ones, twos = ({(one.name, one.operator): replace(one, matches=0) for one in found} for found in (some, others))
    return sorted(
        {name for name, operator in ones.keys() | twos.keys() if ones.get(key := (name, operator)) != twos.get(key)}
    )


def _facts(one: Policy) -> list[Fact]:
    said = ", ".join(f"{name} = {settings.shown(name, value)}" for name, value in one.settings.items())
    return [
        Fact("name", one.name, display.safe(one.name), label="policy"),
        Fact("pattern", one.pattern, display.safe(one.pattern)),
        Fact("priority", one.priority, str(one.priority)),
        Fact("applies_to", one.applies_to, one.applies_to),
        _kind(one.operator),
        Fact("matches", one.matches, display.count(one.matches)),
        Fact("settings", dict(one.settings), said or display.NOT_SET),
    ]


def _kind(operator: bool) -> Fact:
    return Fact("operator", operator, "yes" if operator else "no")


# ---- retention and quotas ----

_RETENTION: Final = ("retain_time", "retain_bytes", "max_age", "max_bytes", "max_entries")
_QUOTA: Final = (
    "backlog_quota_bytes",
    "backlog_quota_age",
    "backlog_quota_entries",
    "backlog_action",
    "backlog_ttl",
    "delivery_limit",
)

_topic = click.argument("topic", required=False)
_pattern = click.option("--pattern", metavar="REGEX", help="For all topics whose whole name matches, by a policy.")
_priority = click.option(
    "--priority",
    type=int,
    default=0,
    metavar="N",
    help="With --pattern: of several policies that match, the one with the highest priority counts; default 0.",
)


@click.group(short_help="Set, get, remove the retention of the journal.")
def retention() -> None:
    """Set, get and remove the journal retention of a topic, or of all topics of a pattern.

    The settings of a pattern are a policy named `retention.` and the pattern. A character that a name cannot have
    becomes : and its code, so that of 'tmp-.*' is `retention.tmp-.:2a`.
    """


@retention.command("set", short_help="Set how much of the journal is kept.")
@_topic
@_pattern
@_priority
@click.option(
    "--time",
    "retain_time",
    type=arguments.retain_time,
    metavar="DURATION|unlimited",
    help="Keep changes at least this long, or --bytes of them, whichever ends first.",
)
@click.option(
    "--bytes",
    "retain_bytes",
    type=arguments.size,
    metavar="SIZE|unlimited",
    help="Keep changes up to this size, or for --time, whichever ends first.",
)
@click.option(
    "--max-age",
    type=arguments.duration,
    metavar="DURATION",
    help="Keep changes at most this long, acknowledged or not.",
)
@click.option("--max-bytes", type=arguments.size, metavar="SIZE", help="Keep at most this much.")
@click.option("--max-entries", type=arguments.entries, metavar="N", help="Keep at most this many changes.")
@output_option
@click.pass_obj
def set_retention(
    session: Session,
    *,
    output: Output,
    topic: str | None,
    pattern: str | None,
    priority: int,
    retain_time: str | None,
    retain_bytes: int | str | None,
    max_age: str | None,
    max_bytes: int | str | None,
    max_entries: int | str | None,
) -> None:
    """Set how much of the journal of TOPIC is kept. A setting that is not given is no longer set.

    With --time 0s --bytes 0 acknowledged changes are not kept. Only one of them being zero is refused.

    \b
    Examples:
      sow retention set orders --time 1h --bytes 1GiB
      sow retention set --pattern 'tmp\\..*' --time 0s --bytes 0B --max-age 1d
    """
    given = {
        "retain_time": retain_time,
        "retain_bytes": retain_bytes,
        "max_age": max_age,
        "max_bytes": max_bytes,
        "max_entries": max_entries,
    }
    _set(session, output, "retention", topic, pattern, priority, given)


@click.group(short_help="Set, get, remove quotas of unacknowledged changes.")
def quota() -> None:
    """Set, get and remove the backlog quota of durable subscriptions, of a topic or of a pattern.

    The settings of a pattern are a policy named `quota.` and the pattern. A character that a name cannot have becomes
    : and its code, so that of 'tmp-.*' is `quota.tmp-.:2a`.
    """


@quota.command("set", short_help="Set how much may be unacknowledged.")
@_topic
@_pattern
@_priority
@click.option("--bytes", "quota_bytes", type=arguments.size, metavar="SIZE", help="How much may be unacknowledged.")
@click.option(
    "--age",
    "quota_age",
    type=arguments.duration,
    metavar="DURATION",
    help="How old the oldest unacknowledged change may be.",
)
@click.option(
    "--entries", "quota_entries", type=arguments.entries, metavar="N", help="How many changes may be unacknowledged."
)
@click.option(
    "--action", type=click.Choice(get_args(BacklogActionName)), help="The action beyond the quota; default hold."
)
@click.option(
    "--ttl", "backlog_ttl", type=arguments.duration, metavar="DURATION", help="Older changes count as acknowledged."
)
@click.option(
    "--delivery-limit",
    type=arguments.entries,
    metavar="N|unlimited",
    help="Set aside a change that was delivered to consumers this often.",
)
@output_option
@click.pass_obj
def set_quota(
    session: Session,
    *,
    output: Output,
    topic: str | None,
    pattern: str | None,
    priority: int,
    quota_bytes: int | str | None,
    quota_age: str | None,
    quota_entries: int | str | None,
    action: BacklogActionName | None,
    backlog_ttl: str | None,
    delivery_limit: int | str | None,
) -> None:
    """Set how much the slowest durable subscription of TOPIC may leave unacknowledged.

    A setting that is not given is no longer set. Beyond the quota publishes wait (hold) or are refused (reject), the
    oldest changes count as acknowledged (evict), or the current records replace all of them (conflate). A quota must be
    below the retention of the same kind.

    \b
    Examples:
      sow quota set orders --bytes 64MiB --action reject
      sow quota set orders --entries 10000 --action reject --delivery-limit 5
      sow quota set --pattern 'eu-.*' --age 1h --ttl 2h
    """
    given = {
        "backlog_quota_bytes": quota_bytes,
        "backlog_quota_age": quota_age,
        "backlog_quota_entries": quota_entries,
        "backlog_action": action,
        "backlog_ttl": backlog_ttl,
        "delivery_limit": delivery_limit,
    }
    _set(session, output, "quota", topic, pattern, priority, given)


_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {"retention": _RETENTION, "quota": _QUOTA}


def policy_name(group: str, pattern: str) -> str:
    """The name of the policy for a pattern. Characters that a name cannot hold, and `:`, become `:` and their hex
    code."""
    escaped = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f":{byte:02x}" for byte in match[0].encode()), pattern)
    name = f"{group}.{escaped}"
    if len(name) > _POLICY_NAME_LENGTH_MAX:
        raise click.UsageError("the pattern is too long to make a name of; use sow policy set")
    return name


def _one_of(topic: str | None, pattern: str | None) -> None:
    if (topic is None) == (pattern is None):
        raise click.UsageError("give exactly one of TOPIC and --pattern")


def _set(
    session: Session,
    output: Output,
    group: str,
    topic: str | None,
    pattern: str | None,
    priority: int,
    given: Mapping[str, object],
) -> None:
    _one_of(topic, pattern)
    if all(value is None for value in given.values()):
        raise click.UsageError("nothing to set: give at least one option")
    wanted = cast(TopicSettingsArguments, settings.taken_away(given))
    if pattern is not None:
        name = policy_name(group, pattern)
        with session.client() as client:
            done = client.set_policy(name, pattern, topics=wanted, priority=priority)
        output.one(_of_policy(done))
        settings.warn(done.warnings)
    elif topic is not None:
        with session.client() as client:
            altered = client.alter_topic(topic, **wanted)
            output.one(_of_topic(client, group, topic))
        settings.warn(altered.warnings)


def _add_get_and_remove(to: click.Group, what: str) -> None:
    """Adds the two commands that both groups have; `what` names the things that the first one shows."""
    group = str(to.name)

    @to.command(
        "get",
        short_help="Show the settings in force, or those for a pattern.",
        help=_help(f"Show {what}, with the sources; or the settings for a pattern.", f"{group} get"),
    )
    @_topic
    @_pattern
    @output_option
    @click.pass_obj
    def get(session: Session, output: Output, topic: str | None, pattern: str | None) -> None:
        _one_of(topic, pattern)
        if pattern is not None:
            name = policy_name(group, pattern)
            with session.client() as client:
                output.one(_of_policy(client.get_policy(name)))
        elif topic is not None:
            with session.client() as client:
                output.one(_of_topic(client, group, topic))

    removed = "Remove the settings of TOPIC, or of a pattern: then policies or the server's defaults count."

    @to.command("remove", short_help="Remove the settings.", help=_help(removed, f"{group} remove"))
    @_topic
    @_pattern
    @output_option
    @click.pass_obj
    def remove(session: Session, output: Output, topic: str | None, pattern: str | None) -> None:
        _one_of(topic, pattern)
        if pattern is not None:
            name = policy_name(group, pattern)
            with session.client() as client:
                client.delete_policy(name)
            output.one([Fact("pattern", pattern, display.safe(pattern)), Fact("policy", name, name, label="deleted")])
        elif topic is not None:
            nothing = cast(TopicSettingsArguments, dict.fromkeys(_GROUPS[group]))
            with session.client() as client:
                client.alter_topic(topic, **nothing)
                output.one(_of_topic(client, group, topic))


def _help(text: str, command: str) -> str:
    return f"{text}\n\n\b\nExample:\n  sow {command} orders"


_add_get_and_remove(retention, "the retention of the journal of TOPIC")
_add_get_and_remove(quota, "the backlog quota of TOPIC")


def _of_topic(client: Client, group: str, topic: str) -> list[Fact]:
    """The effective settings in the command's notation, with their origins."""
    effective = {one.name: one for one in client.describe_topic(topic).effective if one.name in _GROUPS[group]}
    facts = [Fact("topic", topic, display.safe(topic))]
    for name, one in effective.items():
        facts.append(Fact(name, one.value, f"{settings.shown_in_force(one.value)}  (from {display.safe(one.origin)})"))
    origins = {name: one.origin for name, one in effective.items()}
    return [*facts, Fact("origins", origins, "")]


def _of_policy(one: Policy) -> list[Fact]:
    """The settings that are set, in the command's notation."""
    facts = [
        Fact("pattern", one.pattern, display.safe(one.pattern)),
        Fact("policy", one.name, display.safe(one.name)),
        Fact("priority", one.priority, str(one.priority)),
        Fact("matches", one.matches, display.count(one.matches)),
    ]
    for name, value in one.settings.items():
        facts.append(Fact(name, settings.shown(name, value), settings.shown(name, value)))
    return facts
