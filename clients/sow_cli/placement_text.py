"""The text of a placement file, and that of the next one (rule C15). Pure."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any, Final


def matches(pattern: str, topic: str) -> bool:
    """True if a pattern of a placement matches the whole name of a topic."""
    try:
        return re.fullmatch(pattern, topic) is not None
    except re.error:
        return False  # RE2 knows what this does not


def escaped(topic: str) -> str:
    """The pattern that matches this topic alone."""
    return topic.replace(".", r"\.")  # no other character of a name means anything in a pattern


def addresses_of(text: str) -> object:
    """The addresses of the cells, for a comparison."""
    return tomllib.loads(text)["cells"]


def cell_in(text: str, topic: str) -> str:
    """The cell of a topic by this text."""
    values = tomllib.loads(text)
    for entry in values.get("topics", []):
        if matches(entry["pattern"], topic):
            return str(entry["cell"])
    return str(values["default"])


_VERSION: Final = re.compile(r"^(version[ \t]*=[ \t]*)\d+", re.MULTILINE)
_HEADING: Final = re.compile(r"^[ \t]*\[\[[ \t]*topics[ \t]*\]\]", re.MULTILINE)


def moved_text(text: str, topics: Sequence[str], cell: str) -> str:
    """The placement file after a move: with the next version, and an entry in front that places the topics. Comments
    stay, unless the form of the file does not allow an edit."""
    pattern = "|".join(escaped(topic) for topic in sorted(topics))
    before = tomllib.loads(text)
    entry = {"pattern": pattern, "cell": cell}
    others = [one for one in before.get("topics", []) if one["pattern"] != pattern]
    wanted = {**before, "version": before["version"] + 1, "topics": [entry, *others]}
    edited = _VERSION.sub(rf"\g<1>{wanted['version']}", text, count=1)
    edited = re.sub(_entry(re.escape(pattern), '[^"\n]*'), "", edited)  # that of an earlier move of the same topics
    heading = _HEADING.search(edited)
    at = len(edited) if heading is None else heading.start()
    edited = f"{edited[:at]}{'' if edited[:at].endswith(chr(10)) else chr(10)}{_entry(pattern, cell)}{edited[at:]}"
    try:
        if tomllib.loads(edited) == wanted:
            return edited
    except tomllib.TOMLDecodeError:
        pass
    return _written(wanted)


def _entry(pattern: str, cell: str) -> str:
    brackets = ("\\[\\[", "\\]\\]") if cell.startswith("[^") else ("[[", "]]")
    return f"{brackets[0]}topics{brackets[1]}\npattern = '{pattern}'\ncell = \"{cell}\"\n"


def _written(values: dict[str, Any]) -> str:
    lines = [f"version = {values['version']}", f"default = {_quoted(values['default'])}", "[cells]"]
    lines += [f"{_quoted(name)} = [{', '.join(map(_quoted, servers))}]" for name, servers in values["cells"].items()]
    for entry in values["topics"]:
        lines += ["[[topics]]", f"pattern = {_quoted(entry['pattern'])}", f"cell = {_quoted(entry['cell'])}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A text as TOML writes it: JSON's form of a text is one of TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
