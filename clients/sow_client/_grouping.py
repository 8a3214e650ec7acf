"""The expressions of an answer of groups: Python values into the contract's. Pure: no I/O, no clock.

An expression is written with its name behind it, `SUM(/px * /qty) AS notional`, or comes as the value of its name. The
server reads the expressions; here a list of them is only divided.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from sow.v1 import sow_pb2
from sow_client._keys import checked_list
from sow_client._records import invalid

Expressions: TypeAlias = str | Iterable[str] | Mapping[str, str]
"""One or more expressions: a text such as "/account, COUNT(*) AS n", a list of such texts, or expressions by name."""

_PIECE: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | \[(?:[^\]\\]|\\.)*\] | [(),] | [^'"\[(),]+ | .""",
    re.DOTALL | re.VERBOSE,
)
"""A text, a name in brackets, a character that matters here, or what is between them."""
_NAME: Final = re.compile(r"\w[\w.-]*")
_AS: Final = re.compile(r"\sAS(?:\s+|$)", re.IGNORECASE)
_QUOTES: Final = ("'", '"', "[")
_EXCERPT: Final = 36
"""Characters that a message shows on each side of a fault."""


def expressions(given: Expressions | None, field: str) -> list[sow_pb2.NamedExpression]:
    """The named expressions of a request. Raises InvalidArgument or TypeError, which name `field`."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_named(text, field) for text in divided(given)]
    if isinstance(given, Mapping):
        for name, text in given.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise TypeError(f"{field}: {name!r}: {text!r} is not a name and an expression, which both are texts")
        return [sow_pb2.NamedExpression(name=name, expression=text) for name, text in given.items()]
    made: list[sow_pb2.NamedExpression] = []
    for text in checked_list(given, field, of="texts"):
        if not isinstance(text, str):
            raise TypeError(f"{field}: {text!r} is of type {type(text).__name__}; each must be a text")
        made += [_named(part, field) for part in divided(text)]
    return made


def divided(text: str) -> list[str]:
    """The parts between the commas that stand in no parentheses, texts or names."""
    parts, depth = [""], 0
    for piece in _PIECE.findall(text):
        if piece == "," and not depth:
            parts.append("")
            continue
        depth += (piece == "(") - (piece == ")")
        parts[-1] += piece
    return [part.strip() for part in parts]


def _named(text: str, field: str) -> sow_pb2.NamedExpression:
    if not text:
        raise invalid(field, "an expression is empty")
    end = _last_as(text)
    if end is None:
        return sow_pb2.NamedExpression(expression=text)
    begin, place = end
    name = text[place:]
    if _NAME.fullmatch(name) is None:
        first = max(0, place - _EXCERPT)
        shown = " ".join(text[first : place + _EXCERPT].splitlines()).replace("\t", " ")
        raise invalid(
            field,
            f"expected a name after AS at {place}: letters, digits and _, behind the first one also . and -\n"
            f"  {shown}\n  {' ' * (place - first)}^",
        )
    return sow_pb2.NamedExpression(name=name, expression=text[:begin])


def _last_as(text: str) -> tuple[int, int] | None:
    """Where the expression ends, and where its name begins behind the last AS that stands in no parentheses, texts or
    names; None: there is no AS."""
    found, at, depth = None, 0, 0
    for piece in _PIECE.findall(text):
        depth += (piece == "(") - (piece == ")")
        if not depth and piece[0] not in _QUOTES:
            for match in _AS.finditer(piece):
                found = len(text[: at + match.start()].rstrip()), at + match.end()
        at += len(piece)
    return found
