"""The lines of a TOML file, for messages, and names in it that are too long to be parsed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_HEADING: Final = re.compile(r"""\s*(?:\[\[((?:[^]"']|"[^"]*"|'[^']*')+)\]\]|\[((?:[^]["']|"[^"]*"|'[^']*')+)\])""")
DOTS_MAX: Final = 50
_KEY_PART: Final = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_MANY_DOTS: Final = re.compile(rf"(?:\.[ \t]*+{_KEY_PART}[ \t]*+){{{DOTS_MAX}}}")
_OF_LINES: Final = re.compile(r"""\"{3}|'{3}""")
_COMMENT: Final = re.compile(r"^[ \t]*#.*", re.MULTILINE)


def many_dots(text: str) -> int | None:
    """The place of a name with `DOTS_MAX` dots or more; None: there is none. tomllib takes the square of their number:
    hours for a megabyte. A name within a text counts, too, as only the parser tells texts from keys. A line that is a
    comment does not, such as `# -.-.-.-`: in a file without texts of several lines it is known by its begin."""
    found = _MANY_DOTS.search(text)
    if found is not None and not _OF_LINES.search(text):
        found = _MANY_DOTS.search(_COMMENT.sub(lambda comment: " " * len(comment[0]), text))
    return None if found is None else found.start()


def end_of(text: str) -> tuple[int, int]:
    """The line and the column behind a text, from 1."""
    return text.count("\n") + 1, len(text) - text.rfind("\n")


class TomlPlaces:
    """The lines of the headings of a file: TOML values do not know theirs."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        """`text`: that of the file, where it is known."""
        self._name = path.name
        self._lines: dict[str, list[int]] = {}
        if text is None:
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:  # it was removed since it was read; its lines are for messages only
                text = ""
        for number, line in enumerate(text.splitlines(), 1):
            if (heading := _HEADING.match(line)) is not None:
                name = re.sub(r"[\s\"']", "", heading[1] or heading[2])
                self._lines.setdefault(name, []).append(number)

    def line(self, name: str, index: int = 0) -> int | None:
        """The line of the heading `[name]`, or of the heading `[[name]]` number `index`, from 0."""
        lines = self._lines.get(re.sub(r"[\s\"']", "", name), [])
        return lines[index] if index < len(lines) else None

    def of(self, name: str, index: int) -> str:
        """The place of the heading `[[name]]` number `index`, from 0."""
        line = self.line(name, index)
        return f"{self._name}{'' if line is None else f':{line}'} {name}[{index}]"
