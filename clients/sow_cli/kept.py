"""Decides which records columns keep whole, so that an exported file is published as the same records.

[1]  A record that its columns do not give back as it was stands whole in one more column, `_payload`: a field of FIX
     that is there twice, bytes that are no UTF-8, a null beside records without the field.
[2]  Such a row has the record twice. If the two differ, somebody has changed one of them, and the row is refused: to
     take either would lose a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from math import isfinite
from typing import Final

import msgspec

from sow_cli.cells import is_json
from sow_cli.columns import is_text, text
from sow_cli.lines import BadLine
from sow_cli.rows import RecordForm
from sow_client import InvalidArgument, PayloadForm

_QUOTE: Final = ord('"')
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


class CsvKept:
    """Knows the fields of all records of a CSV, and which records their texts keep ([1])."""

    def __init__(self, form: RecordForm) -> None:
        self._form = form
        self._payloads = form.payloads
        self._numbers: dict[str, int] = {}
        self._texts: set[str] = set()
        self._others: set[str] = set()
        self.lacks = False
        """True: a record is not kept by its columns."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the fields, in the order in which they came."""
        return list(self._numbers)

    @property
    def mixed(self) -> frozenset[str]:
        """The fields that are a text in one record and another value in another one."""
        return frozenset(self._texts & self._others)

    def look(self, payloads: Iterable[bytes]) -> None:
        """Learns the fields of these payloads."""
        numbers, texts, others = self._numbers, self._texts, self._others
        for payload in payloads:
            found = self._payloads.fields(payload)
            for name, value in (found or {}).items():  # without further calls where it can be: once for each cell
                if name not in numbers:
                    numbers[name] = len(numbers)
                if type(value) is msgspec.Raw:
                    data = bytes(value)
                    if data[0] == _QUOTE:
                        texts.add(name)
                    elif data != b"null":
                        others.add(name)
                elif value is not None:
                    (texts if is_text(value) else others).add(name)
            if not self.lacks:
                self.lacks = not self._keeps(payload, found)

    def keeps(self, payload: bytes) -> bool:
        """True if the columns give this payload back."""
        return self._keeps(payload, self._payloads.fields(payload))

    def _keeps(self, payload: bytes, found: Mapping[str, object] | None) -> bool:
        if found is None:
            return False
        match self._form.message_type:
            case "json":
                if b"null" in payload and any(map(_is_null, found.values())):
                    return False
                if (b'"{' in payload or b'"[' in payload) and any(map(_is_text_of_json, found.values())):
                    return False
                # A half of a surrogate pair, which JSON can spell, has no UTF-8.
                return _SURROGATE.search(payload) is None or all(map(_is_utf8, found.values()))
            case "msgpack":
                return all(
                    value is not None and is_plain(value) and not _is_text_of_json(value) for value in found.values()
                )
        order = [self._numbers[name] for name in found]
        try:
            return order == sorted(order) and named_payload(found, self._payloads) == payload
        except (BadLine, UnicodeError):
            return False


def _is_null(value: object) -> bool:
    return isinstance(value, msgspec.Raw) and bytes(value) == b"null"


def _is_text_of_json(value: object) -> bool:
    """True if a text looks like an object or an array, as which it would be read."""
    shown = text(value) if is_text(value) else ""
    return shown is not None and shown[:1] in ("{", "[") and is_json(shown)


def _is_utf8(value: object) -> bool:
    try:
        (text(value) or "").encode()
    except (UnicodeError, msgspec.MsgspecError):
        return False
    return True


def is_plain(value: object) -> bool:
    """True if JSON has a value of MessagePack, with its type."""
    match value:
        case dict():
            return all(isinstance(name, str) and is_plain(one) for name, one in value.items())
        case list():
            return all(map(is_plain, value))
        case float():
            return isfinite(value)
    return value is None or type(value) in (str, int, bool)


def named_payload(document: Mapping[str, object], form: PayloadForm) -> bytes:
    """The payload of fix and nvfix with these fields. Raises BadLine."""
    try:
        return form.encode({name: _plain_text(value) for name, value in document.items()})
    except InvalidArgument as error:
        column = error.details.get("path", "").removeprefix("/")
        message = error.message.removeprefix("data: ")
        raise BadLine(error.reason, f"column {column}: {message}" if column else message) from error


def _plain_text(value: object) -> str:
    """A value as the text of a field of fix."""
    if isinstance(value, str):
        return value
    data = _encode(value)
    return str(msgspec.json.decode(data)) if data[:1] == b'"' else data.decode()  # of dates, the text itself


def agree(value: object, cell: object, *, typed: bool) -> bool:
    """True if a cell shows this field of a record ([2]). A column may have changed the type, such as 1 to 1.0, or to
    the text of a value. `typed`: fields have types, so that no number shows a text."""
    is_shown_as_text = is_text(value) and not isinstance(value, float)  # of which JSON has a text for NaN alone
    if typed and is_shown_as_text and _is_scalar(cell):
        return False
    if text(value) == (bytes(cell).decode("utf-8", "replace") if isinstance(cell, msgspec.Raw) else cell):
        return True
    if isinstance(value, msgspec.Raw) and not is_shown_as_text and isinstance(cell, str) and is_json(cell):
        cell = msgspec.Raw(cell.encode("utf-8", "surrogateescape"))  # of a number or an array another spelling
    try:
        found, shown = [msgspec.json.decode(one) if isinstance(one, msgspec.Raw) else one for one in (value, cell)]
        return _alike(found, shown) or _alike(PayloadForm.in_columns(found), shown)
    except msgspec.MsgspecError:
        return False  # a number that Python does not have


def _is_scalar(cell: object) -> bool:
    """True if a cell is a number, true or false. An object or an array may stand for a text of JSON."""
    if isinstance(cell, msgspec.Raw):
        return bytes(cell)[:1] not in (b"{", b"[")
    return isinstance(cell, (bool, int, float, Decimal))


def _alike(value: object, cell: object) -> bool:
    if isinstance(value, dict) and isinstance(cell, dict):
        return all(_alike(value.get(name), cell.get(name)) for name in value.keys() | cell.keys())
    if isinstance(value, list) and isinstance(cell, list):
        return len(value) == len(cell) and all(map(_alike, value, cell))
    if isinstance(value, bool) is isinstance(cell, bool) and (value == cell or (value != value and cell != cell)):
        return True
    return isinstance(cell, str) and text(value) == cell
