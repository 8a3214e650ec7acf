"""The cells of CSV, with the one thing that the csv module does not tell: whether a cell stood in quotation marks.

[1]  A cell in quotation marks is a `Quoted`, also an empty one: `""` is an empty text, and an empty cell no value.
[2]  A cell may go on over several lines; a row that is no CSV is a `BadRow` in its place, and the next line begins
     another row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

CELL_CHARACTERS_MAX: Final = 32 * 2**20
NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LONE_RETURN: Final = "a carriage return stands inside a cell without quotation marks"
_STARTS: Final = frozenset("-0123456789tfn{[")


class Quoted(str):
    """The text of a cell that is read from quotation marks."""

    __slots__ = ()


class InQuotes(str):
    """A cell to be written, with quotation marks around it and in it."""

    __slots__ = ()

    @classmethod
    def of(cls, text: str) -> InQuotes:
        """The cell of this text."""
        return cls('"' + text.replace('"', '""') + '"')


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no CSV."""

    message: str
    text: str
    """Its text, as it is in the file; empty where a cell is too long."""


Row: TypeAlias = list[str] | BadRow


def text_of(row: list[str], delimiter: str) -> str:
    """The text that a row was read from."""
    return delimiter.join([InQuotes.of(cell) if type(cell) is Quoted else cell for cell in row])


def rows(lines: Iterator[str], delimiter: str) -> Iterator[Row]:
    """The rows of some lines, which come without their line feeds. A line without a character is an empty row."""
    for line in lines:
        text = line.removesuffix("\r")
        if '"' in text:
            yield _row(line, lines, delimiter)
        elif "\r" in text:
            yield BadRow(_LONE_RETURN, text)
        else:
            yield text.split(delimiter) if text else []  # nearly all lines: half the cost of the csv module


def _row(line: str, lines: Iterator[str], delimiter: str) -> Row:
    """The row that begins with this line, and may take further ones."""
    cells: list[str] = []
    taken = [line]
    at = 0
    while True:
        if line.startswith('"', at):
            parts: list[str] = []
            size = 0
            start = at + 1
            while True:
                end = line.find('"', start)
                if end < 0:
                    parts.append(line[start:])
                    size += len(line) - start + 1
                    more = next(lines, None)
                    if more is None:
                        return BadRow("the quotation marks of the last cell are not closed", "\n".join(taken))
                    if size > CELL_CHARACTERS_MAX:
                        return BadRow("a cell is longer than 32 MiB; are its quotation marks closed?", "")
                    parts.append("\n")
                    taken.append(more)
                    line, start = more, 0
                elif line.startswith('"', end + 1):
                    parts.append(line[start : end + 1])
                    start = end + 2
                else:
                    break
            parts.append(line[start:end])
            cells.append(Quoted("".join(parts)))
            at = end + 1
            rest = line[at : at + 2]
            if rest in ("", "\r"):
                return cells
            if rest[0] != delimiter:
                told = f"{delimiter!r} expected after '\"'"
                if len(taken) > 1:
                    told += f"; the row has {len(taken):,} lines: are the quotation marks of its first one closed?"
                return BadRow(told, "\n".join(taken).removesuffix("\r"))
            at += 1
        else:
            end = line.find(delimiter, at)
            cell = line[at:] if end < 0 else line[at:end]
            if end < 0:
                cell = cell.removesuffix("\r")
            if "\r" in cell:
                return BadRow(_LONE_RETURN, "\n".join(taken).removesuffix("\r"))
            cells.append(cell)
            if end < 0:
                return cells
            at = end + 1


def looks_like_a_value(text: str) -> bool:
    """True if a cell without quotation marks is a number, true, false, null, or an object or array of JSON."""
    first = text[:1]
    if first not in _STARTS:
        return False
    if first in "{[":
        return is_json(text)
    return text in ("true", "false", "null") or NUMBER.fullmatch(text) is not None


_NOT_JSON: Final = "not JSON"


def json_fault(data: bytes) -> str:
    """Returns why bytes are not taken as JSON; empty: they are."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except msgspec.DecodeError:
        return _NOT_JSON
    except RecursionError:
        return "nested too deeply"
    return ""


def is_json(text: str | bytes) -> bool:
    """True if a text or bytes are JSON, also where it is nested too deeply to be taken."""
    return json_fault(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")) != _NOT_JSON
