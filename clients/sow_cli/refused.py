"""Lines of the file of --errors: records that were refused, to be mended and read again.

[1]  A record is kept as it was, in one of these: `payload`, with its key and its expire time; `text`, a document that
     is no JSON; `whole`, the line of a record that could not be read; `row`, of a table. Where these are no text,
     `base64` has the bytes, and is not read again.
[2]  A row has the values that were read, by the names of the columns. Texts among `types` are no values of the types of
     their columns. They are tried again, as is a row whose text is no CSV.
[3]  Read again without a change, each of them is refused again.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from typing import Final

import click
import msgspec
from rich.cells import cell_len

from sow_cli import cells, display
from sow_cli.cell_values import CONVERT, CellType
from sow_cli.cells import BadRow, Quoted
from sow_cli.lines import BadLine, Item, is_refused
from sow_cli.row_records import NULL, Reading, RecordMaker, Target

_CARET_BEFORE: Final = 50
_CARET_AFTER: Final = 20
"""Characters that are shown around a fault."""
_TOLD: Final = ("file", "line", "record", "reason", "message", "column")
_decode_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text: Final = msgspec.json.Decoder(str).decode


class _Row(msgspec.Struct):
    row: dict[str, msgspec.Raw] | str
    columns: Sequence[str] = ()
    types: Mapping[str, CellType] = {}
    nulls: Sequence[str] = ()
    delimiter: str = ","


class RowReader:
    """Makes records of lines that have a `row` ([2])."""

    def __init__(self, reading: Reading, target: Target) -> None:
        self._reading = reading
        self._target = target
        self._decode = msgspec.json.Decoder(_Row).decode
        self._maker: RecordMaker | None = None  # of the line before: mostly all have the same columns

    def __call__(self, line: bytes) -> Item:
        """The record of a line. Raises BadLine, and msgspec.DecodeError."""
        told = self._decode(line)
        if isinstance(told.row, str):
            return self._record(told.columns, self._of_text(told.row, told))
        values = [self._value(name, bytes(one), told) for name, one in told.row.items()]
        return self._record(list(told.row), values)

    def _record(self, names: Sequence[str], values: Sequence[object]) -> Item:
        maker = self._maker
        if maker is None or maker.names != names:
            try:
                maker = self._maker = RecordMaker(names, self._reading, self._target)
            except click.UsageError as error:
                raise BadLine("PAYLOAD_MALFORMED", error.message) from error
        return maker.record(values)

    def _value(self, name: str, value: bytes, told: _Row) -> object:
        if value == b"null":
            return NULL if name in told.nulls else None
        if value[:1] != b'"':
            return msgspec.Raw(value)
        return _converted(name, _decode_text(value) or Quoted(""), told.types)  # an empty text is that of `""`

    def _of_text(self, text: str, told: _Row) -> list[object]:
        # A return at the end stays one: it may be the fault.
        lines = f"{text}\r" if text.endswith("\r") else text
        rows = list(cells.rows(iter(lines.split("\n")), told.delimiter))
        row = rows[0]
        if isinstance(row, BadRow):
            raise BadLine("PAYLOAD_MALFORMED", f"no CSV: {row.message}")
        if len(rows) > 1:
            raise BadLine("PAYLOAD_MALFORMED", f"the text has {len(rows)} rows; make a line of each")
        if len(row) != len(told.columns):
            message = f"has {len(row)} cells for {len(told.columns)} columns"
            raise BadLine("PAYLOAD_MALFORMED", message)
        return [
            _converted(name, cell, told.types) if cell or type(cell) is Quoted else None
            for name, cell in zip(told.columns, row, strict=True)
        ]


def _converted(name: str, text: str, types: Mapping[str, CellType]) -> object:
    try:
        return CONVERT[types.get(name, "text")](text)
    except ValueError as error:
        raise BadLine("PAYLOAD_MALFORMED", f"column {name}: {text[:40]!r} is {error}") from None


def fault_position(data: bytes) -> int | None:
    """The character, from 0, at which a text stops being JSON; None: it is JSON, or no text."""
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        return error.pos
    except (ValueError, RecursionError):
        pass
    return None


def pointed_at(data: bytes) -> str:
    """A text that is no JSON, around its fault, with a caret below that; empty where there is no such fault."""
    position = fault_position(data) if data else None
    if position is None:
        return ""
    text = data.decode()
    start = max(0, position - _CARET_BEFORE)
    before, after = display.safe(text[start:position]), display.safe(text[position : position + _CARET_AFTER])
    before = f"…{before}" if start else before
    return f"  {before}{after}\n  {' ' * cell_len(before)}^\n"


def kept(record: Item | BadLine | None, of_json: bool) -> Mapping[str, object]:
    """A record in the file of --errors ([1]). `of_json`: the records of the topic are JSON."""
    if record is None:
        return {}
    if isinstance(record, Item) and record.removes:
        # Read again, it is a removal without --op-field.
        return _metadata(record) | {"op": "delete"} | ({} if record.key else dict(kept(Item(record.data), of_json)))
    if isinstance(record, Item):
        return _metadata(record) | (_document(record.data) if of_json else {"payload": _base64(record.data)})
    if not record.text:
        return record.kept
    try:
        text = record.text.decode()
    except UnicodeDecodeError:
        return {"base64": _base64(record.text)}
    if not record.of_record:
        return _document(record.text) if of_json else {"payload": text}
    if cells.json_fault(record.text):
        return _text("whole", record.text, text)
    if is_refused(record.text):  # once more: the line is as it was
        return {name: one for name, one in _decode_members(record.text).items() if name not in _TOLD}
    return {"whole": msgspec.Raw(record.text)}


def _metadata(item: Item) -> dict[str, object]:
    stamp = item.expire_time_micros  # perhaps of more than 64 bits, which msgspec does not write
    found = {"key": item.key, "expire_time_micros": None if stamp is None else msgspec.Raw(str(stamp).encode())}
    return {name: value for name, value in found.items() if value is not None}


def _document(data: bytes) -> dict[str, object]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"base64": _base64(data)}
    if fault_position(data) is None and not cells.json_fault(data):
        return {"payload": msgspec.Raw(data)}
    return _text("text", data, text)


def _text(name: str, data: bytes, text: str) -> dict[str, object]:
    position = fault_position(data)
    return {name: text} if position is None else {name: text, "column": position + 1}


def _base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()
