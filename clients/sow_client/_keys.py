"""Record keys as a program gives them, and as the server derives them from key fields (rules K3, K4). Pure.

[1]  A number, a bool or a tuple gives the key that the server derives from a document with these values.
[2]  A text is the key itself, as it stands in `Record.key`. In a tuple it is the value of a key field.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from decimal import Decimal
from math import isfinite
from typing import TypeAlias, TypeVar

from sow_client._records import invalid

_Value = TypeVar("_Value")

KeyField: TypeAlias = str | int | float | bool
"""The value of a key field."""

Key: TypeAlias = KeyField | tuple[KeyField, ...]
"""A record key: the text of `Record.key`, or the value of the key field; with several key fields a tuple of all values,
such as ("LH", 400)."""


def key_text(key: Key, field: str = "key") -> str:
    """The record key as a text. Raises InvalidArgument for a value that no key has, also NaN, infinities and an empty
    tuple. `field` names the argument."""
    if type(key) is str:
        return key if key.isascii() else _whole(key, field)
    if not isinstance(key, tuple):
        return _whole(_canonical(key, field), field)
    if not key:
        raise invalid(field, "is an empty tuple; it needs a value for each key field")
    return _whole("|".join([_canonical(one, field).replace("\\", "\\\\").replace("|", "\\|") for one in key]), field)


def _whole(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, f"{reprlib.repr(text)} has half a surrogate pair at character {error.start + 1}") from None
    return text


def share_of(key: Key, shares: int) -> int:
    """The number of the share that has a key, from 0 on, where records are divided by their keys: among servers, or
    among the topics of a family. It is the CRC-32 of the key in UTF-8, modulo the number of shares.

    Raises InvalidArgument for no share, and as `Client.get` for a key that no record has.
    """
    from sow.shares import share_of_key  # few programs need it

    if shares < 1:
        raise invalid("shares", f"{shares} is not at least 1")
    return share_of_key(key_text(key).encode(), shares)


def optional_key(key: Key | None) -> str | None:
    """The key that a publish brings; None: the server derives it."""
    return None if key is None else key_text(key)


def key_texts(keys: Iterable[Key], field: str = "keys") -> list[str]:
    """The record keys as texts."""
    return [key if type(key) is str and key.isascii() else key_text(key, field) for key in checked_list(keys, field)]


def checked_list(values: Iterable[_Value], field: str, *, of: str = "keys") -> Iterable[_Value]:
    """The argument itself. Raises InvalidArgument for one value where a list is wanted, and for a mapping."""
    # A lone text is an iterable of texts too: "abc" would ask for the keys a, b and c.
    # Bytes are an iterable of numbers, and a mapping one of its names.
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping) or not isinstance(values, Iterable):
        raise invalid(field, f"must be a list of {of}; write [{reprlib.repr(values)}]")
    return values


def _canonical(value: object, field: str) -> str:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        # Every scalar of numpy has these, which need not be installed. `item` makes numbers of some of its times.
        value = value.item() if value.dtype.kind in "biufU" else value  # type: ignore[attr-defined]  # of numpy
    if isinstance(value, str):
        return str.__str__(value)  # of an Enum, too, it is the text that its document has
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        if not isfinite(value):
            raise invalid(field, f"{value!r} is no key: NaN and infinities have no form in JSON")
        digits = float.__repr__(value)
        return str(int(Decimal(digits))) if value.is_integer() else digits  # its shortest digits, without an exponent
    if isinstance(value, list) and value:
        raise invalid(field, f"{reprlib.repr(value)} is a list; the key of several fields is a tuple, as ('LH', 400)")
    raise invalid(
        field,
        f"{reprlib.repr(value)} is of type {type(value).__name__}; a key is a text, a number, a bool, or a tuple of "
        "these for several key fields",
    )
