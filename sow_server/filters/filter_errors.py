"""Errors in a filter, with its text and a caret at the position."""

from __future__ import annotations

from typing import Final

EXCERPT_CHARACTERS: Final = 72
"""Characters of a long line that a message shows, around the position."""


class FilterError(ValueError):
    """A filter that does not parse, or that is not allowed where it stands.

    `position` counts characters from 0; it is -1 for a fault without a place, such as the length. With a position
    `message` has three lines: the fault and its place, the line of the filter, and a caret below it.
    """

    def __init__(self, what: str, position: int = -1, text: str = "") -> None:
        self.position = position
        self.message = what if position < 0 else _shown(what, position, text)
        super().__init__(self.message)


def _shown(what: str, position: int, text: str) -> str:
    begin = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    line = text[begin : len(text) if end < 0 else end].replace("\t", " ").replace("\r", " ")
    column = position - begin
    where = f"at {position}"
    if "\n" in text:
        where += f" (line {text.count(chr(10), 0, position) + 1}, column {column + 1})"
    first = max(0, min(column - EXCERPT_CHARACTERS // 2, len(line) - EXCERPT_CHARACTERS))
    before, after = "…" if first else "", "…" if first + EXCERPT_CHARACTERS < len(line) else ""
    excerpt = f"{before}{line[first : first + EXCERPT_CHARACTERS]}{after}"
    head, _, tail = what.partition(";")  # the expectation, the place, and only then the advice
    advice = f";{tail}" if tail else ""
    return f"{head} {where}{advice}\n  {excerpt}\n  {' ' * (len(before) + column - first)}^"
