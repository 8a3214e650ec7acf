"""Record keys: paths, canonical text, composite keys (the K-rules). Pure.

[1]  Different tuples of canonical texts never give the same key: `|` and `\\` inside a text are escaped.
[2]  1, 1.0 and "1" are one key, as in AMPS, which hashes text (rule K4).
[3]  A float has one text, whatever language wrote it: 1.2345678901234568e+20 and 123456789012345680000 are one key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,200}\Z")
OWNED_NAME: Final = re.compile(r"(?:[A-Za-z0-9_.:@-]{1,200}/)?[A-Za-z0-9_.:-]{1,200}\Z")
"""The name of a durable or publisher, after the name of the identity that owns it (rule A7)."""
INSTANCE_NAME: Final = re.compile(r"[A-Za-z0-9.:-][A-Za-z0-9_.:-]{0,99}\Z")
EXACT_MAX: Final = 2**53
"""Up to this bound, on both sides of zero, a float holds every integer."""
_BRACKETED: Final = re.compile(r"\[((?:[^\]\\]|\\.)*)\](?=/|\Z)", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\([\]\\/])")
_TO_ESCAPE: Final = re.compile(r"[\]\\]")
_BACKSLASHED: Final = r"\\\g<0>"


class KeyFieldError(ValueError):
    """A key field's value has no canonical text: it is null, or not a scalar (rule K5)."""

    def __init__(self, *, missing: bool) -> None:
        super().__init__("is missing or null" if missing else "is not a text, a number or a boolean")
        self.missing = missing


def parse_path(path: str) -> tuple[str, ...]:
    """The steps of a path such as `/carrier` or `/a/b`; `/[odd name]` takes a name with slashes or spaces.

    In brackets `\\]`, `\\\\` and `\\/` stand for the character itself; `/[]` is the empty name. `path_text` writes it.

    Raises ValueError with the position of the fault.
    """
    if not path.startswith("/"):
        raise ValueError(f"path {path!r} must begin with '/', at 0")
    steps: list[str] = []
    at = 0
    while at < len(path):
        at += 1  # the slash
        if path.startswith("[", at):
            bracketed = _BRACKETED.match(path, at)
            if bracketed is None:
                raise ValueError(f"path {path!r} has an unclosed '[' at {at}")
            step, after = _ESCAPED.sub(r"\1", bracketed[1]), bracketed.end()
        else:
            end = path.find("/", at)
            after = len(path) if end < 0 else end
            step = path[at:after]
            if not step:
                raise ValueError(f"path {path!r} has an empty step at {at}")
        steps.append(step)
        at = after
    return tuple(steps)


def path_text(steps: Sequence[str]) -> str:
    """The text of a path in settings; the inverse of `parse_path`."""
    return "".join([f"/[{_TO_ESCAPE.sub(_BACKSLASHED, step)}]" if _is_odd(step) else f"/{step}" for step in steps])


def _is_odd(step: str) -> bool:
    return not step or "/" in step or step.startswith("[")


def canonical_text(value: object) -> str:
    """The canonical text of a scalar (rule K4). Raises KeyFieldError for null, objects and arrays."""
    kind = type(value)
    if kind is str:
        return value  # type: ignore[return-value]  # narrowed by `type() is`, which is faster than isinstance here
    if kind is int:
        return str(value)
    if kind is bool:
        return "true" if value else "false"
    if kind is float:
        number: float = value  # type: ignore[assignment]  # as above
        if not number.is_integer():
            return repr(number)
        # A large float stands for many integers. Its shortest digits, with zeros behind, are how most languages write
        # it where they use no exponent ([3]).
        return str(int(number) if -EXACT_MAX <= number <= EXACT_MAX else int(Decimal(repr(number))))
    raise KeyFieldError(missing=value is None)


def escape(text: str) -> str:
    """The canonical text of one field, as it stands in a key."""
    if "\\" in text:
        text = text.replace("\\", "\\\\")
    if "|" in text:
        text = text.replace("|", "\\|")
    return text


def join(texts: list[str]) -> str:
    """The record key of the canonical texts of its fields."""
    return "|".join([escape(text) for text in texts])


def wrong_parts(key_fields: Sequence[str], key: str) -> str:
    """A sentence about a key with another number of parts than there are key fields; "" for any other key."""
    parts, count = len(split(key)), len(key_fields)
    if not count or parts == count:
        return ""
    joined = ", joined by |" if count > 1 else ""
    return (
        f"{key!r:.202} has {parts} part{'s' if parts > 1 else ''}, and a key here has {count}, for "
        f"{', '.join(key_fields)}{joined}; a | within a part is written \\|"
    )


def split(key: str) -> list[str]:
    """The canonical texts of a key; the inverse of `join`."""
    texts: list[str] = []
    text: list[str] = []
    characters = iter(key)
    for character in characters:
        if character == "\\":
            text.append(next(characters, ""))
        elif character == "|":
            texts.append("".join(text))
            text.clear()
        else:
            text.append(character)
    texts.append("".join(text))
    return texts
