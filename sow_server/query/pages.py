"""Tokens of pages (rule Q4): the place behind the last record of a page, and the query that it belongs to. Pure.

[1]  A token is taken only by the query that returned it: the same topic, filter and order.
[2]  A token that somebody has made up leads to some place of the order, or is refused; it never breaks a sort. It
     grants nothing: the caller's filter decides about each record.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Final, NamedTuple

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.fields import Kind
from sow_server.filters.tree import Metadata, MetadataName
from sow_server.query.ordering import Order, Turned

TOKEN_BYTES_MAX: Final = 256 << 10
"""The bound of the order's values in a token, so that it fits into a message beside everything else."""


class Place(NamedTuple):
    """The place of a record in the order of a query."""

    key: bytes
    sort_keys: tuple[object, ...]
    """As a `Sorter` has them; empty in key order."""


def query_hash(prefix: bytes, filter_text: str, order: Order | None) -> str:
    """Hashes the values that must stay the same from page to page: topic, filter, order, but not the projection."""
    text = filter_text if order is None else f"{filter_text}\0{order.text}"
    return hashlib.blake2s(prefix + text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def write_token(query: str, place: Place) -> str:
    """The token that leads behind `place`. Raises StoreError RESULT_TOO_LARGE."""
    parts: list[object] = [query, base64.b64encode(place.key).decode()]
    if place.sort_keys:
        parts.append([_written(value) for value in place.sort_keys])
    text = json.dumps(parts).encode()
    if place.sort_keys and len(text) > TOKEN_BYTES_MAX:
        raise StoreError(
            Reason.RESULT_TOO_LARGE,
            f"order_by: the values of the last record take more than {TOKEN_BYTES_MAX >> 10} KiB in a page token; order"
            " by shorter fields, or ask without page_size",
            field="order_by",
        )
    return base64.urlsafe_b64encode(text).decode()


def read_token(text: str, query: str, order: Order | None) -> Place:
    """The place that a token leads behind. Raises StoreError PAGE_TOKEN_INVALID ([1] [2])."""
    try:
        found, key, *sort_keys = json.loads(base64.b64decode(text, altchars=b"-_", validate=True))
        if found != query:
            raise StoreError(
                Reason.PAGE_TOKEN_INVALID,
                "page_token: belongs to another query; topic, filter and order must be those of the page before",
                field="page_token",
            )
        values = tuple(_read(value) for value in sort_keys[0]) if sort_keys else ()
        _check(values, order)
        return Place(base64.b64decode(key, validate=True), values)
    except (ValueError, TypeError, RecursionError, OverflowError, binascii.Error):
        raise StoreError(
            Reason.PAGE_TOKEN_INVALID, "page_token: is not one that a query returned", field="page_token"
        ) from None


def _written(value: object) -> list[str]:
    match value:
        case Turned():
            return ["turned", *_written(value.text)]
        case str():
            return ["text", value]
        case bytes():
            return ["key", base64.b64encode(value).decode()]
        case float():
            return ["float", value.hex()]
        case int():
            return ["int", f"{value:x}"]  # decimal digits have a limit in Python
    raise AssertionError(f"no part of a sort key: {value!r}")


def _read(written: list[str]) -> object:
    kind, *rest = written
    if kind == "turned":
        inner = _read(rest)
        if not isinstance(inner, (str, bytes)):
            raise ValueError("only texts are turned")
        return Turned(inner)
    (text,) = rest
    match kind:
        case "text":
            return str(text)
        case "key":
            return base64.b64decode(text, validate=True)
        case "float":
            return float.fromhex(text)
        case "int":
            return int(text, 16)
    raise ValueError(f"unknown kind {kind!r}")


def _check(values: tuple[object, ...], order: Order | None) -> None:
    """Raises ValueError unless the values can be compared with the sort keys of records: with an equal rank, values
    must be of the same kind ([2])."""
    terms = () if order is None else order.terms
    if len(values) != 2 * len(terms):
        raise ValueError("another number of fields")
    for term, rank, value in zip(terms, values[::2], values[1::2], strict=True):
        if not isinstance(rank, int):
            raise ValueError("no rank")
        if abs(rank) == Kind.TEXT:
            turned = isinstance(value, Turned)
            is_key = term.field == Metadata(MetadataName.KEY)
            text = value.text if isinstance(value, Turned) else value
            if turned != (rank < 0) or not isinstance(text, bytes if is_key else str):
                raise ValueError("no text of this field")
        elif not isinstance(value, (int, float)) or value != value:
            raise ValueError("no number")
