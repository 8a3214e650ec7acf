"""Texts of the code in the form of Markdown."""

from __future__ import annotations

import re
from typing import Final

_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
_SPECIAL: Final = re.compile(r"(?<!\w)_|_(?!\w)|[*\[\]]")


def cell(text: str) -> str:
    """A text in a cell of a table: on one line, with its bars escaped outside of code."""
    parts = " ".join(text.split()).split("`")  # every second one is code, in which a bar does no harm
    return "`".join(part if number % 2 else part.replace("|", "&#124;") for number, part in enumerate(parts))


def prose(text: str) -> str:
    """A text for a terminal: options become code, and no other character has a meaning of Markdown."""
    parts = text.split("`")
    return "`".join(part if number % 2 else _plain(part) for number, part in enumerate(parts))


def _plain(text: str) -> str:
    escaped = _SPECIAL.sub(r"\\\g<0>", text).replace("<", "&lt;")  # Python-Markdown knows no backslash in front of it
    return _OPTION.sub(r"`\g<0>`", escaped)
