"""Lines of the interactive shell: words, operators between them, and the commands that these make.

[1]  Words and quotation marks are those of a POSIX shell. A document that begins with `{` or `[{` is taken as it is.
[2]  Operators stand outside of quotation marks and documents. `;` and the end of a line separate commands. `|` gives
     the output to a program of the system, and has the rest of its command. `>` and `>>` write it to a file.
[3]  An operator that was meant as a part of a filter is an error: `query orders /price > 9` writes no file named 9.
[4]  A line that begins with `.` is for one command: its text has no operators, and keeps its quotation marks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

WIDE: Final = "\\G"
PATH_OPTIONS: Final = frozenset(
    {"--select", "--exclude", "--order-by", "--group-by", "--by", "--unset", "--index", "--key-field"}
)
_SPACE: Final = " \t\r\n"
_OPERATOR: Final = re.compile(r";|\n|\|+|>+|<")
_DOCUMENT: Final = re.compile(r"\[?\s*\{")
_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_FILTER_END: Final = re.compile(r"[/@].*|.*\)", re.DOTALL)
"""A word that may stand in front of the `>` of a filter."""
_FILTER_VALUE: Final = re.compile(r"=.*|[-+]?[.\d]+(?:e[-+]?\d+)?", re.IGNORECASE | re.DOTALL)
"""The rest of `>=`, or a number: no likely name of a file."""


class LineError(Exception):
    """A fault of a line. `position`: in its text, from 0."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True)
class Token:
    """A word or an operator."""

    text: str
    """Without quotation marks."""
    start: int
    end: int
    """Where it stands, with its quotation marks."""
    is_operator: bool = False
    is_quoted: bool = False
    """True if a part of it was in quotation marks, or escaped."""
    open: str = ""
    """The quotation mark, bracket or backslash that the end of the text leaves open; "": none."""


def tokens(text: str, *, operators: bool = True) -> Iterator[Token]:
    """The words and operators of a text ([1], [2])."""
    word, start, quote, quoted, at = "", -1, "", False, 0
    while at < len(text):
        character = text[at]
        if quote != "'" and text.startswith("\\\n", at):  # the line goes on
            at += 2
            continue
        if not quote:
            operator = _OPERATOR.match(text, at) if operators else None
            if operator or character in _SPACE:
                if start >= 0:
                    yield Token(word, start, at, is_quoted=quoted)
                word, start, quoted = "", -1, False
                if operator:
                    yield Token(operator[0], at, operator.end(), is_operator=True)
                at = operator.end() if operator else at + 1
                continue
            if operators and start < 0 and _DOCUMENT.match(text, at):
                end = _document_end(text, at)
                start, word, quoted = at, text[at:end], True
                if end is None:
                    yield Token(word, start, len(text), is_quoted=True, open="{")
                    return
                at = end
                continue
        start = at if start < 0 else start
        at += 1
        if character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote, quoted = character, True
        elif character == "\\" and quote != "'":
            follows = text[at : at + 1]
            if not follows:
                yield Token(word + "\\", start, at, is_quoted=True, open=quote or "\\")
                return
            # In quotation marks only these two are escaped, as POSIX has it.
            word += follows if not quote or follows in '"\\' else "\\" + follows
            at, quoted = at + 1, True
        else:
            word += character
    if start >= 0:
        yield Token(word, start, len(text), is_quoted=quoted, open=quote)


def _document_end(text: str, at: int) -> int | None:
    depth = 0
    for found in _BRACKET.finditer(text, at):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if not depth:
            return found.end()
    return None


def goes_on(text: str) -> bool:
    """True if a text is not complete: the next line belongs to it."""
    found = list(tokens(text, operators=not _is_raw(text)))
    return bool(found) and found[-1].open != ""


def at_cursor(text: str) -> tuple[list[Token], str]:
    """The tokens of the command that a text ends with, and the operator in front of the last ones; "": none."""
    words: list[Token] = []
    operator = ""
    for token in tokens(text, operators=not _is_raw(text)):
        if token.is_operator:
            operator = "" if token.text in ";\n" else token.text
            words = [] if not operator else words
        else:
            words.append(token)
    return words, operator


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command of a line, and where its output goes."""

    words: tuple[str, ...]
    is_wide: bool = False
    """True: a line for each field."""
    program: str = ""
    """The text behind `|`, for the system's shell."""
    file: str = ""
    appends: bool = False


def commands(text: str) -> list[ShellCommand]:
    """The commands of a text that is complete. Raises LineError."""
    if _is_raw(text):
        told = text.strip()
        name, *rest = told.removesuffix(WIDE).split(None, 1)
        return [ShellCommand((name, *map(str.rstrip, rest)), told.endswith(WIDE))]
    found = list(tokens(text))
    if found and (mark := found[-1].open):
        last = found[-1]
        place = last.end - 1 if mark == "\\" else last.start
        raise LineError(
            {"{": "No closing bracket", "\\": "No escaped character"}.get(mark, "No closing quotation"), place
        )
    parts = [
        list(group) for ends, group in groupby(found, lambda one: one.is_operator and one.text in ";\n") if not ends
    ]
    return [_command(text, part) for part in parts]


def _is_raw(text: str) -> bool:
    return text.lstrip().startswith(".")  # [4]


def _command(text: str, part: Sequence[Token]) -> ShellCommand:
    at = next((number for number, one in enumerate(part) if one.is_operator), len(part))
    words, rest = part[:at], part[at:]
    is_wide = bool(words) and text[words[-1].start : words[-1].end] == WIDE
    texts = [one.text for one in words[: len(words) - is_wide]]
    if texts and len(texts[0]) == 1 and words[0].is_quoted:
        texts[0] = text[words[0].start : words[0].end]  # a word such as \q
    made = ShellCommand(tuple(texts), is_wide)
    if not rest:
        return made
    operator, behind = rest[0], rest[1:]
    if operator.text not in ("|", ">", ">>"):
        raise LineError(f"{operator.text} is no operator here: quote it", operator.start)
    if operator.text != "|":
        _refuse_filters(text, words, operator, behind)
    if not made.words:
        raise LineError(f"no command in front of {operator.text}", operator.start)
    if not behind or behind[0].is_operator:
        raise LineError(f"no {'program' if operator.text == '|' else 'file'} behind {operator.text}", operator.end)
    if operator.text == "|":
        return ShellCommand(made.words, is_wide, program=text[behind[0].start : behind[-1].end])
    if len(behind) > 1:
        raise LineError("one file stands behind >, at the end of the command", behind[1].start)
    return ShellCommand(made.words, is_wide, file=behind[0].text, appends=operator.text == ">>")


def _refuse_filters(text: str, words: Sequence[Token], operator: Token, behind: Sequence[Token]) -> None:
    """Raises LineError where `>` looks like one of a filter ([3])."""
    value = text[behind[0].start : behind[0].end] if behind else ""
    meant = bool(_FILTER_VALUE.fullmatch(value))
    if words and not words[-1].is_quoted and _FILTER_END.fullmatch(words[-1].text):
        is_option = len(words) > 1 and words[-2].text in PATH_OPTIONS
        meant = not (is_option or os.path.exists(words[-1].text) or value.startswith(("./", "../")))
    if meant:
        message = f"a filter stands in quotation marks; a file of this name is meant by {operator.text} ./NAME"
        raise LineError(message, operator.start)
