"""Texts of cells as values.

[1]  A number keeps its digits.
[2]  A text that is no value of its column's type makes its record bad. It never becomes another value.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from sow_cli import cells
from sow_cli.cells import Quoted
from sow_client._payloads import packed_value

ColumnType: TypeAlias = Literal["text", "number", "int", "bool", "json"]
COLUMN_TYPES: Final[tuple[ColumnType, ...]] = get_args(ColumnType)
CellType: TypeAlias = Literal["text", "number", "int", "bool", "json", "value", "any", "base64", "time", "msgpack"]
"""Those of columns, and `value` and `any`: of a CSV of an export, where a cell in quotation marks is a text. A cell
without them is a number, true, false or JSON; with `any` it may be a text as well. The others are in files of --errors
alone: `base64`, bytes that are no UTF-8; `time`, a time that JSON takes as a text; `msgpack`, in base64 the MessagePack
of a value that JSON does not have."""
Convert: TypeAlias = Callable[[str], object]
"""Makes the value of a text, or None for an empty one that is none. Raises ValueError."""

_INT: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
NO_UTF8: Final = "a text is no UTF-8; see --encoding"


def is_json(text: bytes) -> bool:
    """True if bytes are JSON."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def bytes_of(cell: str) -> bytes:
    """The bytes of a cell, as they are in the file."""
    return cell.encode("utf-8", "surrogateescape")


def _number(text: str) -> object:
    if not text:
        return None  # `""`: some programs quote all cells, also empty ones
    if not cells.NUMBER.fullmatch(text):
        raise ValueError("not a number")
    return msgspec.Raw(text.encode())


def _int(text: str) -> object:
    if not text:
        return None
    if not _INT.fullmatch(text):
        raise ValueError("not a whole number")
    return msgspec.Raw(text.encode())


def _bool(text: str) -> object:
    if not text:
        return None
    if text not in ("true", "false"):
        raise ValueError("not true or false")
    return text == "true"


def _json(text: str) -> object:
    if not text:
        return None
    data = bytes_of(text)
    if not is_json(data):
        raise ValueError("not JSON")
    return msgspec.Raw(data)


def _any(cell: str) -> object:
    """In quotation marks it is a text, or an object or an array: the text of one stands in `_payload` (kept [1])."""
    if type(cell) is Quoted:
        return msgspec.Raw(bytes_of(cell)) if cell[:1] in ("{", "[") and cells.is_json(cell) else str(cell)
    return msgspec.Raw(bytes_of(cell)) if cells.looks_like_a_value(cell) else cell


def _value(cell: str) -> object:
    value = _any(cell)
    if type(cell) is not Quoted and type(value) is not msgspec.Raw:
        raise ValueError("not a number, true, false or JSON")
    return value


def _base64(text: str) -> object:
    try:
        return base64.b64decode(text, validate=True).decode()
    except UnicodeDecodeError:
        raise ValueError(NO_UTF8) from None
    except ValueError:
        raise ValueError("not base64; a text needs no entry in types") from None


def _time(text: str) -> object:
    for kind in (datetime, date, time):
        try:
            kind.fromisoformat(text)
        except ValueError:
            continue
        return text
    raise ValueError("not a time in ISO 8601")


def _msgpack(text: str) -> object:
    try:
        return packed_value(base64.b64decode(text, validate=True))
    except ValueError:
        raise ValueError("not MessagePack in base64; another value needs no entry in types") from None


CONVERT: Final[Mapping[CellType, Convert]] = {
    "text": str,
    "number": _number,
    "int": _int,
    "bool": _bool,
    "json": _json,
    "value": _value,
    "any": _any,
    "base64": _base64,
    "time": _time,
    "msgpack": _msgpack,
}
