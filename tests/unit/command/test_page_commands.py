"""Every command `sow` that a page shows, in a block or in a sentence, is one that the command line accepts.

Pages whose blocks run have more than this: tests/integration/test_pages.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import click
import pytest

from sow_cli.command import sow
from tools import docs_command
from tools.docs_site import lines_outside_fences

ROOT: Final = Path(__file__).parents[3]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE: Final = docs_command.command()
"""The help texts as pages, by name: their examples are commands, too."""
BLOCK: Final = re.compile(r"^ *```sh\b[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROMPT: Final = re.compile(r"^\$ (sow .*)$", re.MULTILINE)
"""A command in a block that shows its output, too."""
SPAN: Final = re.compile(r"`(sow [^`]+)`")
SEPARATORS: Final = {"|", "||", "&&", ";", "&", "(", ")"}
PROSE: Final = re.compile(r"[…|]|\.\.\.|COMMAND")
"""Marks of a span that is a form of a command, and no command."""


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each call of `sow` in lines of a shell."""
    for line in text.replace("\\\n", " ").split("\n"):
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = [*lexer, ";"]
        except ValueError:  # a quotation over several lines
            continue
        call: list[str] = []
        for word in words:
            if word in SEPARATORS:
                if call and call[0] in ("sow", ".venv/bin/sow"):
                    yield list(before_redirection(call[1:]))
                call = []
            elif call or not re.fullmatch(r"\w+=.*", word):
                call.append(word)


def before_redirection(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word in ("<", ">", ">>", "2>", "<<"):
            return
        yield word


@cache
def shown() -> list[tuple[str, list[str], bool]]:
    """Each command of the pages, with its page, and whether it is whole: a sentence may name its beginning alone."""
    return list(_shown())


def _shown() -> Iterator[tuple[str, list[str], bool]]:
    written = {
        page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
        for page in PAGES
        if page.parent.name != "decisions"  # they tell the past
    }
    for name, text in (written | MADE).items():
        outside = [line for _, line in lines_outside_fences(text)]
        blocks = [
            *BLOCK.findall(text),
            *PROMPT.findall(text),
            *(line[4:] for line in outside if line.startswith("    ")),
        ]
        spans = [span for span in SPAN.findall("\n".join(outside).replace("\n", " ")) if not PROSE.search(span)]
        for part in blocks:
            yield from ((name, call, True) for call in commands(part))
        for part in spans:
            yield from ((name, call, False) for call in commands(part))


def refusal(words: Sequence[str], *, whole: bool = True) -> str | None:
    """Why the command line does not accept these arguments. Files and values that a test cannot know are fine."""
    command: click.Command = sow
    context: click.Context | None = None
    left = list(words)
    name = "sow"
    while True:
        try:
            context = command.make_context(name, left, parent=context)
            if not isinstance(command, click.Group):
                return None
            left = [*context._protected_args, *context.args]
            if not left:
                # The command alone is the interactive shell.
                return None if command is sow or not whole else "a command is missing"
            found, following, left = command.resolve_command(context, left)
            assert found is not None
            assert following is not None
            name, command = found, following
        except click.exceptions.Exit:
            return None  # --help, --version
        except click.MissingParameter as error:
            return error.format_message() if whole else None
        except click.BadParameter:
            return None
        except (click.exceptions.NoArgsIsHelpError, click.BadOptionUsage):
            return "something is missing" if whole else None
        except click.UsageError as error:
            message = error.format_message()
            return None if message.startswith("there is no context") else message


@pytest.mark.parametrize("page", sorted({page for page, _, _ in shown()}))
def test_each_command_of_a_page_is_accepted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # no contexts of whoever runs the test
    monkeypatch.chdir(tmp_path)  # --errors makes its file at once
    refused = [
        (" ".join(words), why) for of, words, whole in shown() if of == page and (why := refusal(words, whole=whole))
    ]
    assert refused == []


def test_there_are_hundreds_and_a_wrong_one_is_found() -> None:
    assert len(shown()) > 400
    assert list(commands("$ A=b sow get t 1 > f | sow count 't x' # sow no\nsow a \\\n b")) == [
        ["get", "t", "1"],
        ["count", "t x"],
        ["a", "b"],
    ]
    assert refusal(["get", "orders", "1", "--nonsense"]) == "No such option '--nonsense'."
    assert refusal(["gett"]) is not None
    assert refusal(["topic", "create"]) is not None
    assert refusal(["--server", "a:1", "get", "orders", "1"]) is None
