"""The pages of the command `sow`, made from its own parser. Pure.

[1]  A page has the help of its commands, word for word: nothing is written twice.
[2]  The options that `every` command has stand once, on the first page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Final

import click

from sow_cli.command import sow
from tools.docs_text import cell, prose

FOLDER: Final = "reference/command"
WIDTH: Final = 10_000
"""Columns of a terminal on which nothing is wrapped."""


@dataclass(frozen=True, slots=True)
class Group:
    """Commands that stand on one page."""

    title: str
    about: str
    commands: tuple[str, ...]


GROUPS: Final = {
    "topics": Group(
        "Topics and settings",
        "Make topics and views, change their settings, and set policies for many topics. "
        "[Durable subscriptions](../../durables.md) explains retention and quotas.",
        ("topics", "topic", "view", "policy", "retention", "quota"),
    ),
    "write": Group(
        "Writing",
        "Publish, load, change and delete records. [Files](../../howto/files.md) has the rules for files.",
        ("publish", "load", "delete", "touch", "persist", "lease"),
    ),
    "read": Group(
        "Reading",
        "Show, count and export records, and convert filters. [Filters](../../filters.md) has the language of filters, "
        "and [output](../output.md) the forms of a record.",
        ("get", "query", "count", "sql", "due", "export", "filter"),
    ),
    "follow": Group(
        "Following changes",
        "Show the changes of a topic or of one key, now or from then on. [Subscriptions](../../subscriptions.md) has "
        "the rules, and [output](../output.md) the names of each message.",
        ("subscribe", "changes", "history", "durable"),
    ),
    "server": Group(
        "Servers",
        "Watch, check, measure and back up a server, and link it with others. [Operations](../../operations/index.md) "
        "and [replication](../../replication.md) say when.",
        (
            "status",
            "instance",
            "doctor",
            "config",
            "log",
            "compact",
            "accept-clock",
            "replication",
            "backup",
            "cells",
            "console",
            "http",
            "bench",
        ),
    ),
    "access": Group(
        "Access and contexts",
        "Show and end sessions, check permissions, make tokens and certificates, save settings of a connection, and "
        "read about a command or a topic. "
        "[Security](../../security.md) describes credentials and permissions.",
        ("whoami", "auth", "token", "tls", "sessions", "context", "completion", "help"),
    ),
}


def command() -> dict[str, str]:
    """A page for each group, and one in front of them."""
    root = context_of(sow, "sow", None)
    every = options_of(*command_of("whoami", root))
    return {
        f"{FOLDER}/index.md": _first(root, every),
        **{f"{FOLDER}/{name}.md": _page(group, root, every) for name, group in GROUPS.items()},
    }


def context_of(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    return click.Context(command, parent, name, **settings)


def command_of(name: str, parent: click.Context) -> tuple[click.Command, click.Context]:
    assert isinstance(parent.command, click.Group)
    found = parent.command.get_command(parent, name)
    assert found is not None, f"{parent.command_path} {name} is a command"
    return found, context_of(found, name, parent)


def _first(root: click.Context, every: Sequence[tuple[str, str]]) -> str:
    parts = [
        "# The command, option by option\n",
        "Begin with [the command](../../cli.md). These pages are the help texts: `sow COMMAND --help` has the same.\n",
        "| command | meaning |\n|---|---|",
    ]
    for page, group in GROUPS.items():
        for name in group.commands:
            found, _ = command_of(name, root)
            parts.append(f"| [`sow {name}`]({page}.md#sow-{name}) | {_cell(found.get_short_help_str(WIDTH))} |")
    parts += ["", "## sow { #sow }\n", *_help(sow.help or ""), *_options(options_of(sow, root))]
    parts += ["## Options of every command { #every }\n", *_options(every)]
    parts.append("The options of the connection may also stand behind the command.")
    return "\n".join(parts)


def _page(group: Group, root: click.Context, every: Sequence[tuple[str, str]]) -> str:
    parts = [f"# {group.title}\n", f"{group.about}\n"]
    parts.append("Each command also takes [the options of every command](index.md#every).\n")
    for name in group.commands:
        parts += _command(*command_of(name, root), every, level=2)
    return "\n".join(parts)


def _command(
    command: click.Command, context: click.Context, every: Sequence[tuple[str, str]], *, level: int
) -> Iterator[str]:
    path = context.command_path
    yield f"{'#' * level} {path} {{ #{path.replace(' ', '-')} }}\n"
    if isinstance(command, click.Group):
        yield from _help(command.help or "")
        for name in command.list_commands(context):
            yield from _command(*command_of(name, context), every, level=level + 1)
        return
    yield f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield from _help(command.help or "")
    yield from _options([record for record in options_of(command, context) if record not in every])


def _help(text: str) -> Iterator[str]:
    """The paragraphs of a help text. One that begins with a backspace keeps its lines: it is a block."""
    for paragraph in re.split(r"\n{2,}", cleandoc(text).replace("\x0c", "")):
        if not paragraph.startswith("\b"):
            yield prose(" ".join(paragraph.split())) + "\n"
            continue
        lines = paragraph.split("\n")[1:]
        if lines[0].endswith(":") and not lines[0].startswith(" "):
            yield f"{prose(lines[0])}\n"
            lines = lines[1:]
        block = cleandoc("\n" + "\n".join(lines))
        yield f"```{'sh' if ' sow ' in f' {block} ' else 'text'}\n{block}\n```\n"


def _options(records: Sequence[tuple[str, str]]) -> Iterator[str]:
    if records:
        yield "| option | meaning |\n|---|---|"
        yield from (_row(*record) for record in records)
        yield ""


def options_of(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    """The options of the help, each with its meaning."""
    options = (one for one in command.get_params(context) if isinstance(one, click.Option))
    return [record for option in options if (record := option.get_help_record(context)) is not None]


def _row(names: str, meaning: str) -> str:
    return f"| `{names}` | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return cell(prose(text))
