"""Records as a table of HTML, for notebooks. Pure.

[1]  Every text is escaped: a document cannot add an element to the page.
[2]  A table has a bound, whatever the number and the size of the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from html import escape
from itertools import islice
from typing import Any, Final, Protocol

from sow_client._documents import encode_json, not_finite

ROWS_MAX: Final = 20
FIELDS_MAX: Final = 12
TEXT_MAX: Final = 80
"""Characters of a cell."""


class Row(Protocol):
    """A record."""

    @property
    def key(self) -> str: ...

    @property
    def data(self) -> Any: ...

    @property
    def expire_time(self) -> datetime | None: ...


def table(records: Iterable[Row], caption: str) -> str:
    """The first records, with their fields as columns. Documents that are not JSON have the column `payload`."""
    found = list(islice(records, ROWS_MAX + 1))
    shown = found[:ROWS_MAX]
    documents = [record.data for record in shown]
    objects = [document if isinstance(document, dict) else {"payload": document} for document in documents]
    fields = list(islice(dict.fromkeys(name for one in objects for name in one), FIELDS_MAX))
    if not any(documents):
        fields = []  # only keys were asked for
    expires = any(record.expire_time is not None for record in shown)
    head = _row("th", ["key", *fields, *(["expires"] if expires else [])])
    body = [
        _row(
            "td",
            [
                record.key,
                *(_text(one[field]) if field in one else "" for field in fields),
                *([_moment(record)] if expires else []),
            ],
        )
        for record, one in zip(shown, objects, strict=True)
    ]
    more = f"; the first {ROWS_MAX}" if len(found) > ROWS_MAX else ""
    return f"<table><caption>{_cell(caption)}{more}</caption>{head}{''.join(body)}</table>"


def _row(kind: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{_cell(text)}</{kind}>' for text in cells)}</tr>"


def _cell(text: str) -> str:
    return escape(text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return repr(value[:TEXT_MAX])
    differs_in_python = value is None or isinstance(value, bool | dict | list)
    # A number that no float holds may be infinite here, and JSON would have null for it.
    return encode_json(value).decode() if differs_in_python and not_finite(value) is None else str(value)


def _moment(record: Row) -> str:
    return "never" if record.expire_time is None else record.expire_time.isoformat(" ", "seconds")
