"""Runs one query over a cut, batch by batch (rules Q1, Q2, Q4).

    Q-a  All batches come from the one cut, and are judged at its one `now`.
    Q-b  No more than one batch is in memory, whatever the size of the topic.

A `Scan` is used by one thread at a time; its owner closes it. Filters, orders and indexes find their place here:
a plan other than "all keys" or "these keys" is another source of (key, value) rows.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sow_server.engine.codec import HEADER_BYTES, HeaderColumns, header_columns
from sow_server.engine.errors import Reason, StoreError
from sow_server.engine.payloads import Projection
from sow_server.engine.store import Cut, Store
from sow_server.engine.topics import Topic

BATCH_RECORDS_MAX: Final = 10_000
BATCH_BYTES: Final = 2**20
KEYS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked of a topic. `top_n` and `page_size`: 0 for no limit."""

    topic: Topic
    keys: tuple[bytes, ...] = ()
    projection: Projection | None = None
    batch_size: int = 1000
    keys_only: bool = False
    count_only: bool = False
    skip_n: int = 0
    top_n: int = 0
    page_size: int = 0
    page_token: str = ""


class RecordBatch(NamedTuple):
    """Records in columns; `payloads` is None where only keys were asked for."""

    keys: list[bytes]
    payloads: list[bytes] | None
    headers: HeaderColumns


class Footer(NamedTuple):
    """What closes the answer."""

    matched: int
    returned: int
    scanned: int
    next_page_token: str


class Scan:
    """Owns the cut of one query and the position in it."""

    def __init__(self, store: Store, query: Query) -> None:
        """Raises StoreError for options that contradict each other, or a page token of another query."""
        _check(query)
        self._query = query
        start = query.topic.prefix
        if query.page_token:
            start = query.topic.prefix + _read_token(query) + b"\0"
        self._point_keys = sorted(set(query.keys))
        self._next: bytes | None = start
        self._next_point = 0
        self._skip = query.skip_n
        limit = query.top_n or query.page_size
        self._limit = limit or None
        self._matched = self._returned = self._scanned = 0
        self._last_key = b""
        self._store = store
        self.cut: Final[Cut] = store.cut(query.topic)

    def next_batch(self) -> RecordBatch | None:
        """The next records; None when there are no more."""
        if self._query.count_only:
            self._count()
            return None
        while not self._ended():
            keys: list[bytes] = []
            values: list[bytes] = []
            self._read(keys, values)
            self._matched += len(keys)
            if self._skip:
                skipped = min(self._skip, len(keys))
                self._skip -= skipped
                del keys[:skipped], values[:skipped]
            if self._limit is not None and self._returned + len(keys) > self._limit:
                extra = self._returned + len(keys) - self._limit
                self._matched -= extra
                del keys[-extra:], values[-extra:]
                self._next, self._next_point = self._query.topic.prefix, 0  # there is more than was asked for
            if keys:
                self._returned += len(keys)
                self._last_key = keys[-1]
                return self._batch(keys, values)
        return None

    def footer(self) -> Footer:
        """The figures, once there are no more batches."""
        more = self._query.page_size and self._limit == self._returned and self._more()
        token = _write_token(self._query, self._last_key) if more else ""
        return Footer(self._matched, self._returned, self._scanned, token)

    def close(self) -> None:
        """Lets go of the cut."""
        self.cut.close()

    def _ended(self) -> bool:
        return (self._limit is not None and self._returned >= self._limit) or not self._more()

    def _more(self) -> bool:
        return self._next_point < len(self._point_keys) if self._query.keys else self._next is not None

    def _read(self, keys: list[bytes], values: list[bytes]) -> None:
        """Reads a batch's worth of stored records, appending the live ones."""
        size = self._query.batch_size
        if not self._query.keys:
            assert self._next is not None, "asked only while there is more"
            self._next, scanned = self.cut.fill(self._next, size, keys, values)
            self._scanned += scanned
            return
        read = 0
        while self._next_point < len(self._point_keys) and len(keys) < size and read < BATCH_BYTES:
            key = self._point_keys[self._next_point]
            self._next_point += 1
            self._scanned += 1
            value = self.cut.find(key)
            if value is not None:
                keys.append(key)
                values.append(value)
                read += len(value)

    def _count(self) -> None:
        if self._query.keys:
            found = sum(self.cut.find(key) is not None for key in self._point_keys)
            self._scanned = len(self._point_keys)
            self._next_point = len(self._point_keys)
        else:
            found = self._store.count(self._query.topic)
        limit = self._query.top_n or found
        self._matched = found
        self._returned = min(limit, max(0, found - self._query.skip_n))

    def _batch(self, keys: list[bytes], values: list[bytes]) -> RecordBatch:
        payloads: list[bytes] | None = None
        if not self._query.keys_only:
            projection = self._query.projection
            if projection is None:
                payloads = [value[HEADER_BYTES:] for value in values]
            else:
                project = self._query.topic.format.project
                payloads = [project(value[HEADER_BYTES:], projection) for value in values]
        return RecordBatch(keys, payloads, header_columns(values))


def _check(query: Query) -> None:
    def refuse(field: str, message: str) -> StoreError:
        return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)

    if len(query.keys) > KEYS_MAX:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE,
            f"keys: {len(query.keys)} keys are more than the limit of {KEYS_MAX} per request",
            field="keys",
        )
    if not 1 <= query.batch_size <= BATCH_RECORDS_MAX:
        raise refuse("batch_size", f"must be between 1 and {BATCH_RECORDS_MAX}")
    if query.projection is not None and (query.keys_only or query.count_only):
        raise refuse("select", "has no meaning with keys_only or count_only")
    if query.keys_only and query.count_only:
        raise refuse("keys_only", "has no meaning with count_only")
    paging = bool(query.page_size or query.page_token)
    if paging and (query.skip_n or query.top_n or query.count_only):
        raise refuse("page_size", "cannot be combined with skip_n, top_n or count_only")
    if query.page_token and not query.page_size:
        raise refuse("page_size", "is needed with a page_token")
    if paging and query.keys:
        raise refuse("page_size", "cannot be combined with keys")


def _query_hash(query: Query) -> str:
    """What must be the same from page to page: the topic, not how its records are shown."""
    return hashlib.blake2s(query.topic.prefix, digest_size=6).hexdigest()


def _write_token(query: Query, last_key: bytes) -> str:
    text = json.dumps([_query_hash(query), base64.b64encode(last_key).decode()])
    return base64.urlsafe_b64encode(text.encode()).decode()


def _read_token(query: Query) -> bytes:
    try:
        found, key = json.loads(base64.b64decode(query.page_token, altchars=b"-_", validate=True))
        if found != _query_hash(query):
            raise StoreError(Reason.PAGE_TOKEN_INVALID, "page_token: belongs to another query", field="page_token")
        return base64.b64decode(key, validate=True)
    except (ValueError, TypeError, binascii.Error):
        raise StoreError(
            Reason.PAGE_TOKEN_INVALID, "page_token: is not one that a query returned", field="page_token"
        ) from None


def point_keys(keys: Sequence[str]) -> tuple[bytes, ...]:
    """Record keys as they are stored."""
    return tuple(key.encode() for key in keys)
