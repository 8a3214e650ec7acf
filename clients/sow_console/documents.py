"""Payloads as text, and JSON for the browser. Pure.

[1]  A number of a payload keeps its text: nothing here turns it into a float, and nothing in the browser does. Integers
     beyond 2^53 and decimals such as 9.50 are shown as they were published.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

import msgspec

from sow_client import Record

Leaves: TypeAlias = dict[str, str]
"""The fields of a document by their paths, each as the text of its JSON; an array is one field."""
DEPTH_MAX: Final = 32
"""Deeper objects are one field."""
SHOWN_BYTES_MAX: Final = 262_144
"""The bound of a payload that is shown whole. Only the beginning of a larger one is shown, without its fields."""
BEGIN_BYTES: Final = 1_000


class _Number(str):
    """The text of a number."""

    __slots__ = ()


def shown(record: Record) -> bytes:
    """The payload as JSON, if it has fields, else as it is."""
    return record.form.json(record.payload) or record.payload


def text(payload: bytes) -> str:
    """The payload as text; bytes that are not UTF-8 are escaped."""
    return payload.decode("utf-8", "backslashreplace")


def leaves(payload: bytes) -> Leaves | None:
    """The fields of a JSON object; None: it is no JSON object."""
    if payload.lstrip(b" \t\r\n")[:1] != b"{":
        return None
    try:
        document = json.loads(payload, parse_int=_Number, parse_float=_Number)
    except (ValueError, RecursionError):
        return None
    return dict(_walk(document, "", 0)) if isinstance(document, dict) else None


def pretty(payload: bytes) -> str:
    """The payload for reading: a JSON object with a field a line, anything else as its text, large ones cut."""
    if len(payload) > SHOWN_BYTES_MAX:
        return begin(payload, SHOWN_BYTES_MAX)
    try:
        if payload.lstrip(b" \t\r\n")[:1] == b"{":
            return msgspec.json.format(payload, indent=2).decode("utf-8", "backslashreplace")
    except (ValueError, RecursionError):
        pass  # it merely begins like JSON
    return text(payload)


def begin(payload: bytes, byte_count: int = BEGIN_BYTES) -> str:
    """The text of the first bytes, and how many there are in all."""
    return f"{payload[:byte_count].decode('utf-8', 'backslashreplace')} … ({len(payload):,} bytes)"


def row(record: Record, *, whole: bool = True) -> list[object]:
    """A record as the grid of the browser gets it. Numbers beyond 2^53 travel as text. `whole`: a payload of at most
    SHOWN_BYTES_MAX comes as it is; otherwise, and of a larger one, its begin."""
    payload = shown(record) if len(record.payload) <= SHOWN_BYTES_MAX else record.payload
    small = len(payload) <= (SHOWN_BYTES_MAX if whole else BEGIN_BYTES)
    return [
        record.key,
        text(payload) if small else begin(payload),
        record.publish_time_micros,
        record.expire_time_micros,
        str(record.version),
        record.origin,
        str(record.sequence),
    ]


def twin(record: Record, *, whole: bool = True) -> dict[str, object]:
    """A record in the JSON of a page: with its payload as JSON, if it has fields; None if not `whole`."""
    payload: object = None
    if whole:
        found = shown(record)
        payload = msgspec.Raw(found) if _is_json(found) else text(found)
    return {
        "key": record.key,
        "payload": payload,
        "payload_bytes": len(record.payload),
        "publish_time": record.publish_time,
        "expire_time": record.expire_time,
        "version": record.version,
        "origin": record.origin,
        "sequence": record.sequence,
    }


def encoded(value: object) -> bytes:
    """JSON of plain values, dataclasses and times."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _is_json(payload: bytes) -> bool:
    """True if it may stand in a JSON text: an object without NaN, in UTF-8."""
    try:
        msgspec.json.decode(payload, type=msgspec.Raw)
        payload.decode()
    except (ValueError, RecursionError):
        return False
    return payload.lstrip(b" \t\r\n")[:1] == b"{"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(type(value).__name__)


def _walk(document: Mapping[str, object], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        path = f"{prefix}/{name.replace('~', '~0').replace('/', '~1')}"
        if isinstance(value, dict) and value and depth < DEPTH_MAX:
            yield from _walk(value, path, depth + 1)
        else:
            yield path, _source(value)


def _source(value: object) -> str:
    """The JSON of a value, in which numbers are as they were."""
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, dict):
        return (
            "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{_source(one)}" for key, one in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(_source, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
