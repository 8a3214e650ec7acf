"""`sow help`: the help of a command, or a topic, whose text is a page of the documentation.

[1]  The pages are those of `docs`, which the package has as files (pyproject.toml): nothing is written twice.
[2]  A long page is shown up to its first heading, with the list of its sections.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from sow_cli import advice
from sow_cli.colours import VARIABLE, are_shown
from sow_cli.output import Format, Output
from sow_cli.tables import terminal_width

TOPICS: Final = {
    "tour": "cli.md#usual-commands",
    "connecting": "cli.md#connecting",
    "filters": "filters.md",
    "parameters": "filters.md#parameters",
    "aggregates": "filters.md#groups-and-aggregates",
    "keys": "keys.md",
    "lifetimes": "lifetimes.md",
    "output": "cli.md#output",
    "files": "howto/files.md",
    "following": "subscriptions.md",
    "durables": "durables.md",
    "durability": "durability.md",
    "errors": "errors.md",
    "exit-codes": "cli.md#exit-codes",
    "shell": "cli.md#the-interactive-shell",
    "words": "glossary.md",
}
"""The page of each topic, and its section; without one the page from its begin."""
_PAGES: Final = (Path(__file__).parent / "pages", Path(__file__).parents[2] / "docs")
"""The folder of the pages, in the package and in a checkout."""
_LINES_MAX: Final = 100
"""The longest page that is shown as a whole."""
_WIDTH_MAX: Final = 100
_LINK: Final = re.compile(r"\[([^\]\n]+)\]\((?!https?:)[^)\s]*\)")
_CONTENTS: Final = re.compile(r"^- \[[^\]]+\]\(#[^)]*\).*\n", re.MULTILINE)


def _named(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    root = ctx.find_root().command
    assert isinstance(root, click.Group), "it has this command"
    return [name for name in (*root.list_commands(ctx), *TOPICS) if name.startswith(incomplete)]


@click.command("help", short_help="Explain a command, or a topic such as filters.")
@click.argument("words", metavar="[COMMAND|TOPIC] [SECTION]…", nargs=-1, shell_complete=_named)
@click.pass_context
def help(ctx: click.Context, words: tuple[str, ...]) -> None:  # noqa: A001 - the name of the command
    """Explain a command, as its --help does, or a topic. Without either the commands and the topics are listed.

    A long topic has sections, which its first page lists.

    \b
    Examples:
      sow help
      sow help query
      sow help filters
      sow help filters null
    """
    root = ctx.find_root()
    if not words:
        topics = click.wrap_text(", ".join(TOPICS), min(_WIDTH_MAX, terminal_width()), "  ", "  ")
        text = f"{root.get_help()}\n\nTopics, such as `sow help filters`:\n{topics}"
    elif words[0].lower() in TOPICS:
        text = _rendered(_text(words[0].lower(), "-".join(words[1:]).lower()))
    else:
        text = _of_command(root, words)
    output = Output(Format.TABLE)
    output.page()
    output.write(f"{text}\n".encode())


def _of_command(root: click.Context, words: Sequence[str]) -> str:
    ctx = root
    for word in words:
        group = ctx.command
        assert isinstance(group, click.Group), "the last one is left by the break"
        found = group.get_command(ctx, word)
        if found is None:
            known = [*group.list_commands(ctx), *(TOPICS if ctx is root else ())]
            near = " or ".join(map(repr, advice.command_for(word, known)))
            hint = f"Did you mean {near}?" if near else "`sow help` lists commands and topics."
            raise click.UsageError(f"There is no help on {word!r}. {hint}")
        ctx = click.Context(found, ctx, word, **found.context_settings)
        if not isinstance(found, click.Group):
            break
    return ctx.get_help()


def _text(topic: str, section: str) -> str:
    """The text of a topic, in Markdown; `section`: the beginning of the name of a part. Raises UsageError."""
    page, _, begin = TOPICS[topic].partition("#")
    text = next(folder / page for folder in _PAGES if (folder / page).exists()).read_text(encoding="utf-8")
    intro, *parts = _parts(text)
    by_name = {_slug(part): part for part in parts}
    if begin:
        return by_name[begin]
    if section:
        name = next((name for name in by_name if name.startswith(section)), "")
        if not name:
            raise click.UsageError(f"{topic} has no section {section!r}; there are: {', '.join(by_name)}")
        return by_name[name]
    if text.count("\n") <= _LINES_MAX:
        return text
    sections = "\n".join(f"- sow help {topic} {name}" for name in by_name)
    return f"{_CONTENTS.sub('', intro)}\n## Sections\n\n{sections}\n"


def _parts(text: str) -> list[str]:
    """The text in front of the first heading of the second level, then those under each."""
    parts = [""]
    is_code = False
    for line in text.splitlines(keepends=True):
        is_code ^= line.startswith("```")
        if line.startswith("## ") and not is_code:
            parts.append("")
        parts[-1] += line
    return parts


def _slug(part: str) -> str:
    """The name of a section, as the addresses of pages have it."""
    return re.sub(r"[^a-z0-9 -]", "", part.partition("\n")[0].removeprefix("## ").lower()).strip().replace(" ", "-")


def _rendered(text: str) -> str:
    from rich.console import Console
    from rich.markdown import Markdown  # only here, as it takes a quarter of a second

    theme = "ansi_light" if "light" in os.environ.get(VARIABLE, "").split(":") else "ansi_dark"
    width = min(_WIDTH_MAX, terminal_width())
    console = Console(width=width, no_color=not are_shown(), force_terminal=are_shown(), highlight=False)
    with console.capture() as made:
        console.print(Markdown(_LINK.sub(r"\1", text), hyperlinks=False, code_theme=theme))
    return "\n".join(map(str.rstrip, made.get().splitlines()))
