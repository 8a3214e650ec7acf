"""Man pages, made from the parsers of the commands: `make man` writes them into build/man/man1.

[1]  A page has the help of its command, word for word: nothing is written twice. `sow.1` is about the command as a
     whole, `sow-COMMAND.1` about one with its subcommands, `sow-server.1` about the server.
[2]  They are not kept in the repository: a wheel has them if the commands can be imported where it is built
     (`tools/wheel_hook.py`).

click-man and argparse-manpage each know one of the two parsers. click-man keeps no blocks such as examples, finds no
command that is imported late, and escapes no line that begins with a dot.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Final

import click

from sow.version import __version__
from sow_cli.command import COMMANDS, sow
from sow_server.__main__ import _parser as server_parser
from tools.docs_command import command_of, context_of, options_of

FOLDER: Final = Path(__file__).resolve().parents[1] / "build" / "man" / "man1"
ENVIRONMENT: Final = {
    "SOW_PAGER, PAGER": "The pager for long results on a terminal. Empty, or cat: none.",
    "SOW_COLORS": "A theme, dark or light, and single styles, such as light:name=1;34.",
    "NO_COLOR, CLICOLOR_FORCE": "No colours, or colours in tables also in a pipe.",
}
"""The variables of `sow` that have no option."""


def pages() -> dict[str, str]:
    """The pages by the names of their files."""
    root = context_of(sow, "sow", None)
    made = {"sow.1": _whole(root), "sow-server.1": _server()}
    for name in COMMANDS:
        made[f"sow-{name}.1"] = "\n".join([*_begin(*command_of(name, root)), *_end("sow")])
    return made


def write(folder: Path = FOLDER) -> list[Path]:
    """Writes the pages into a folder, which is made. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (made := pages()).items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in made]


def _head(name: str, about: str) -> Iterator[str]:
    yield f'.TH "{name.upper()}" "1" "" "sow {__version__}" "sow"'
    yield ".nh\n.ad l"  # no hyphens in names, no gaps between words
    yield f".SH NAME\n{_plain(name)} \\- {_plain(about.rstrip('.'))}"


def _whole(root: click.Context) -> str:
    parts = [*_head("sow", "publish, read and delete records of a SOW server"), ".SH SYNOPSIS", *_usage(sow, root)]
    parts += [".SH DESCRIPTION", *_help(sow.help or ""), ".SH OPTIONS", *_options(options_of(sow, root))]
    parts.append(".SH COMMANDS")
    parts += [_item(f"sow-{name}(1)", command_of(name, root)[0].get_short_help_str(10_000)) for name in COMMANDS]
    parts += [".SH ENVIRONMENT", "Options name the variables that stand for them."]
    parts += [_item(*one) for one in ENVIRONMENT.items()]
    return "\n".join([*parts, *_end("sow-server")])


def _begin(command: click.Command, context: click.Context) -> Iterator[str]:
    """The page of a command, without its end."""
    yield from _head(context.command_path.replace(" ", "-"), command.get_short_help_str(10_000))
    yield ".SH SYNOPSIS"
    yield from _usage(command, context)
    yield ".SH DESCRIPTION"
    yield from _help(command.help or "")
    if not isinstance(command, click.Group):
        yield ".SH OPTIONS"
        yield from _options(options_of(command, context))
        return
    yield ".SH COMMANDS"
    for name in command.list_commands(context):
        one, within = command_of(name, context)
        yield f".SS {_plain(within.command_path)}"
        yield from _usage(one, within)
        yield ".PP"
        yield from _help(one.help or "")
        yield from _options(options_of(one, within))


def _usage(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f".B {_plain(context.command_path)}\n{_plain(' '.join(command.collect_usage_pieces(context)))}"


def _end(other: str) -> Iterator[str]:
    yield f".SH SEE ALSO\n.BR {_plain(other)} (1)\n"


def _server() -> str:
    parser = server_parser()
    about, _, environment = parser.format_help().partition("environment:\n")
    parts = [*_head("sow-server", "serve records: the last value of every key, with lifetimes, over gRPC")]
    parts += [f".SH SYNOPSIS\n.B sow\\-server\n{_plain(' '.join(parser.format_usage().split()[2:]))}"]
    parts += [".SH DESCRIPTION", *_help(f"{parser.description}\n\n{parser.epilog}"), ".SH OPTIONS"]
    parts += [_item(_names(one), one.help or "") for one in parser._actions]  # it has no public list of them
    parts += [".SH ENVIRONMENT", *_help(environment.replace("\n  [", "\n\n["))]
    assert about, "the help begins with the options"
    return "\n".join([*parts, *_end("sow")])


def _names(action: argparse.Action) -> str:
    return ", ".join([f"{name} {action.metavar or ''}".rstrip() for name in action.option_strings])


def _help(text: str) -> Iterator[str]:
    """The paragraphs of a help text. One that begins with a backspace keeps its lines."""
    for paragraph in re.split(r"\n{2,}", cleandoc(text).replace("\x0c", "")):
        yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *map(_plain, paragraph.split("\n")[1:]), ".fi")
        else:
            yield _plain(" ".join(paragraph.split()))


def _options(found: Sequence[tuple[str, str]]) -> list[str]:
    return [_item(*one) for one in found]


def _item(names: str, meaning: str) -> str:
    return f".TP\n\\fB{_plain(names)}\\fR\n{_plain(' '.join(meaning.split()))}"


def _plain(text: str) -> str:
    """A line of text, of which no character has a meaning for roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    escaped = "".join([one if one.isascii() else f"\\[u{ord(one):04X}]" for one in escaped])
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


if __name__ == "__main__":
    print(f"{len(write())} pages are in {FOLDER}; read one with: man -l build/man/man1/sow.1")
