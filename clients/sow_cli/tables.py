"""Tables for people: the widths of the columns, and the lines of the rows.

[1]  A number, a time or a size is never broken over two lines: it would be read as two. Text is broken between words,
     and a long word anywhere. In a table that is written while it is read, a row is one line, and text is cut with `…`.
[2]  Columns that have no room are left out from the end, and whoever shows the table says so.
[3]  The widths are known before the first line is written, so a row costs microseconds, and no row waits for another.
[4]  No cell has a character that a terminal would act upon.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from sow_cli import display
from sow_cli.colours import styled
from sow_cli.columns import is_number

GAP: Final = 2
"""Between two columns."""
KEY_WIDTH_MAX: Final = 48
FIELD_WIDTH_MAX: Final = 40
_NOT_A_TERMINAL_WIDTH: Final = 140
_CUT_WIDTH_MIN: Final = 12
"""A column that has less room than it needs is shown only if it has this much."""
_FIGURE_WIDTH_MAX: Final = 32
"""A text that begins with a digit and is longer is no figure: a key, perhaps."""
_FIGURE_STARTS: Final = frozenset("0123456789-+")
_WORD: Final = re.compile(r"\s*\S+\s*")
_GAP: Final = " " * GAP


def list_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, right: Sequence[bool]
) -> tuple[str, int]:
    """A list of results as a table, and how many of its columns it shows. `right`: the columns of numbers."""
    rows = [list(map(display.safe_lines, row)) for row in rows]
    widths = column_widths(headings, rows, width)
    layout = TableLayout(_narrowed(widths, width), frozenset(at for at, one in enumerate(right) if one))
    # A heading of fewer lines than others stands at the bottom.
    above = [styled(line, "heading") for line in layout.folded(headings, at_bottom=True)]
    rule = "─" * (sum(layout.widths) + GAP * (len(layout.widths) - 1))
    below = [line for row in rows for line in layout.folded(row)]
    return "\n".join([*above, rule, *below]) + "\n", len(layout.widths)


def facts_table(facts: Sequence[tuple[str, str]], width: int) -> str:
    """One result: a line for each fact, its name and its value."""
    rows = [(name, display.safe_lines(value)) for name, value in facts]
    widths = _narrowed(column_widths(("", ""), rows, width, word_width_max=24, may_hide=False), width)
    lines = []
    for row in rows:
        parts = (folded(cell, wide) for cell, wide in zip(row, widths, strict=True))
        for name, value in zip_longest(*parts, fillvalue=""):
            lines.append(f"{styled(padded(name, widths[0]), 'heading')}{_GAP}{padded(value, widths[1])}\n")
    return "".join(lines)


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The columns of a table."""

    widths: tuple[int, ...]
    """The widths of the first columns: the others have no room."""
    right: frozenset[int]
    """The columns of numbers."""

    @classmethod
    def of_lines(
        cls, headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, last_grows: bool
    ) -> TableLayout:
        """A layout for these rows and similar ones, of a line each. `last_grows`: the last column takes all the room
        that is left."""
        needed = [max(text_width(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
        numbers = number_columns(rows)
        key_most = min(KEY_WIDTH_MAX, max(_CUT_WIDTH_MIN, width * 3 // 5))  # other columns get some room, too
        widths: list[int] = []
        left = width
        for number, need in enumerate(needed):
            most = key_most if number == 0 else width if number == len(needed) - 1 else FIELD_WIDTH_MAX
            room = left - GAP * bool(number)
            given = min(need, most)
            if given > room:
                if number and room < (need if number in numbers else _CUT_WIDTH_MIN):
                    break  # a number that is cut is another one
                given = room
            widths.append(given)
            left = room - given
        if last_grows and len(widths) == len(needed) and len(needed) - 1 not in numbers:
            widths[-1] += left
        return cls(tuple(widths), numbers)

    def line(self, cells: Sequence[str]) -> str:
        """A line of the table."""
        parts = [fit(cell, width) for cell, width in zip(cells, self.widths, strict=False)]
        for number in self.right:
            if number < len(parts):
                parts[number] = parts[number].rstrip().rjust(self.widths[number])
        return _GAP.join(parts).rstrip()

    def folded(self, cells: Sequence[str], *, at_bottom: bool = False) -> Iterator[str]:
        """The lines of a row whose texts are broken. `at_bottom`: the texts end on one line, rather than begin."""
        columns = [folded(cell, width) for cell, width in zip(cells, self.widths, strict=False)]
        height = max(map(len, columns))
        if at_bottom:
            columns = [[""] * (height - len(column)) + column for column in columns]
        for parts in zip_longest(*columns, fillvalue=""):
            yield _GAP.join(
                [
                    " " * (width - text_width(part)) + part if at in self.right else padded(part, width)
                    for at, (part, width) in enumerate(zip(parts, self.widths, strict=True))
                ]
            )


def number_columns(rows: Sequence[Sequence[str]]) -> frozenset[int]:
    """The columns that have nothing but numbers."""
    return frozenset(
        [
            number
            for number, column in enumerate(zip(*rows, strict=True))
            if any(column) and all(not cell or is_number(cell) for cell in column)
        ]
    )


def column_widths(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    word_width_max: int = 12,
    may_hide: bool = True,
) -> list[int]:
    """The widths of the first columns, as many as fit ([2]); at least of one. A word of more than `word_width_max` may
    be broken. `may_hide`: false where each column has to be shown."""
    columns = list(zip(*rows, strict=True)) or [()] * len(headings)
    needed, least = [], []
    for heading, cells in zip(headings, columns, strict=True):
        lines = [line for cell in cells for line in cell.split("\n")]
        need = _longest(lines)
        if _are_figures(cells) and need <= _FIGURE_WIDTH_MAX:
            unbroken = need
        else:
            unbroken = min(_longest([word for line in lines for word in line.split()]), word_width_max)
        needed.append(max(need, text_width(heading)))
        least.append(max(unbroken, min(_longest(heading.split()), word_width_max)))
    shown = len(headings)
    while may_hide and shown > 1 and sum(least[:shown]) + GAP * (shown - 1) > width:
        shown -= 1
    widths = least[:shown]
    left = max(0, width - sum(widths) - GAP * (shown - 1))
    # The columns that lack least are completed first, so that few are broken.
    for done, number in enumerate(sorted(range(shown), key=lambda one: needed[one] - widths[one])):
        more = min(needed[number] - widths[number], -(-left // (shown - done)))
        widths[number] += more
        left -= more
    return widths


def _are_figures(cells: Sequence[str]) -> bool:
    return any(cells) and all(not cell or cell[0] in _FIGURE_STARTS for cell in cells)


def _longest(texts: Sequence[str]) -> int:
    return max(map(text_width, texts), default=0)


def _narrowed(widths: Sequence[int], width: int) -> tuple[int, ...]:
    """Widths that fit a terminal which is too narrow for what a column needs at least."""
    narrowed = list(widths)
    while sum(narrowed) + GAP * (len(narrowed) - 1) > width and max(narrowed) > 1:
        narrowed[narrowed.index(max(narrowed))] -= 1
    return tuple(narrowed)


def text_width(text: str) -> int:
    """The columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # takes time, and most tables need none of it

    return cell_len(text)


def padded(text: str, width: int) -> str:
    """A text with spaces behind it, up to a width."""
    return text + " " * (width - text_width(text))


def fit(text: str, width: int) -> str:
    """`text` in exactly `width` columns of a terminal."""
    if text.isascii():
        return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"
    from rich.cells import set_cell_size

    length = text_width(text)
    return text + " " * (width - length) if length <= width else set_cell_size(text, width - 1) + "…"


def folded(text: str, width: int) -> list[str]:
    """The lines of a text: broken between words, and a word that is longer than a line anywhere."""
    lines: list[str] = []
    for whole in text.split("\n"):
        line = ""
        for word in _WORD.findall(whole) if text_width(whole) > width else [whole]:
            bare = word.rstrip()
            if text_width(line) + text_width(bare) <= width:
                line += word
                continue
            if line:
                lines.append(line.rstrip())
            *full, line = _pieces(word, width) if text_width(bare) > width else [word]
            lines += full
        lines.append(line.rstrip())
    return lines


def _pieces(word: str, width: int) -> list[str]:
    pieces, room = [""], width
    for character in word.rstrip():
        wide = text_width(character)
        if wide > room and pieces[-1]:
            pieces.append("")
            room = width
        pieces[-1] += character
        room -= wide
    pieces[-1] += word[len(word.rstrip()) :]
    return pieces


def terminal_width() -> int:
    """The terminal's columns; a large number without a terminal, as nothing wraps there."""
    return shutil.get_terminal_size((_NOT_A_TERMINAL_WIDTH, 40)).columns
