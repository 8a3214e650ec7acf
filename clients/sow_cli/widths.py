"""The widths of the columns of a table that has to fit the terminal.

[1]  A number, a time or a size is never broken over two lines: it would be read as two. Text is broken between words,
     and a long word anywhere.
[2]  Columns that have no room are left out from the end, and whoever shows the table says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

GAP: Final = 2
"""Between two columns."""
_FIGURE_WIDTH_MAX: Final = 32
"""A text that begins with a digit and is longer is no figure: a key, perhaps."""
_FIGURE_STARTS: Final = frozenset("0123456789-+")


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
    from rich.cells import cell_len  # a command that writes no table starts without rich

    def longest(texts: Sequence[str]) -> int:
        return max([cell_len(text) for text in texts], default=0)

    columns = list(zip(*rows, strict=True)) or [()] * len(headings)
    needed, least = [], []
    for heading, cells in zip(headings, columns, strict=True):
        lines = [line for cell in cells for line in cell.split("\n")]
        need = longest(lines)
        if _are_figures(cells) and need <= _FIGURE_WIDTH_MAX:
            unbroken = need
        else:
            unbroken = min(longest([word for line in lines for word in line.split()]), word_width_max)
        needed.append(max(need, cell_len(heading)))
        least.append(max(unbroken, min(longest(heading.split()), word_width_max)))
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
