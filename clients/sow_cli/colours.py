"""Colours on stdout: whether there are any, and which.

[1]  `--color` comes first, then NO_COLOR, then CLICOLOR_FORCE and FORCE_COLOR. Without them a terminal has colours,
     unless it is dumb, or CLICOLOR is 0.
[2]  SOW_COLORS has a theme, `dark` or `light`, and single styles behind it, as codes of SGR: `light:name=1;34`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import click

VARIABLE: Final = "SOW_COLORS"
DARK: Final[Mapping[str, str]] = {
    "heading": "1",
    "faint": "2",
    "name": "36",
    "text": "32",
    "number": "33",
    "word": "35",
    "added": "32",
    "removed": "31",
    "expired": "33",
    "bar": "36",
    "negative": "31",
    "warning": "33",
    "error": "31",
}
"""The styles, for dark terminals. `name`, `text`, `number` and `word` are parts of JSON."""
THEMES: Final[Mapping[str, Mapping[str, str]]] = {
    "dark": DARK,
    # Yellow and cyan cannot be read on white.
    "light": {**DARK, "name": "34", "bar": "34", **dict.fromkeys(("number", "expired", "warning"), "38;5;130")},
}
_CODES: Final = re.compile(r"[0-9]{0,3}(?:;[0-9]{1,3})*")
_TEXT: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'  # it never goes back: a text may have megabytes
_JSON: Final = re.compile(rf"(?P<name>{_TEXT}(?=\s*:))|(?P<text>{_TEXT})|(?P<number>-?\d[\d.eE+-]*)|(?P<word>\w+)")


def are_shown() -> bool:
    """True if stdout has colours ([1])."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.color is not None:  # --color
        return ctx.color
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("CLICOLOR_FORCE", "FORCE_COLOR")):
        return True
    is_plain = os.environ.get("TERM", "").lower() in ("dumb", "unknown") or os.environ.get("CLICOLOR") == "0"
    return sys.stdout.isatty() and not is_plain


def styled(text: str, style: str | None) -> str:
    """A text for stdout: where it has colours in a style of the theme; None: in none."""
    if style is None or not text or not are_shown():
        return text
    return _in_style(text, styles(os.environ.get(VARIABLE, ""))[style])


def json(text: str) -> str:
    """JSON in the styles of its parts. The text has whole parts, and no control characters."""
    if not are_shown():
        return text
    found = styles(os.environ.get(VARIABLE, ""))
    return _JSON.sub(lambda part: _in_style(part[0], found[str(part.lastgroup)]), text)


def _in_style(text: str, codes: str) -> str:
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text


@lru_cache(maxsize=4)
def styles(given: str) -> Mapping[str, str]:
    """The styles that SOW_COLORS asks for ([2]). Raises UsageError."""
    found = dict(DARK)
    for part in filter(None, given.split(":")):
        name, is_style, codes = part.partition("=")
        if not is_style and name in THEMES:
            found.update(THEMES[name])
        elif is_style and name in found and _CODES.fullmatch(codes):
            found[name] = codes
        else:
            known = f"{' or '.join(THEMES)}, or a style such as name=1;34; styles are {', '.join(found)}"
            raise click.UsageError(f"{VARIABLE}: {part!r} is not {known}")
    return found
