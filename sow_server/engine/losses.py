"""Settles a store that has lost the end of its write-ahead log, once an operator has accepted the loss (rule X4).

RocksDB writes the column families to table files one by one. So after such a loss one family has changes that another
one lacks. The records count; everything else is adapted to them:

    [1]  Figures, expiry entries and indexes are made anew from the records. A record with a newer tombstone is removed:
         its delete was not lost.
    [2]  The journal is discarded, and the epoch and the id of the instance are new: bookmarks are refused, durables are
         told of a gap, peers begin anew with it. Their topics are seeded anew, because the position up to which their
         changes were applied does not tell which of them are left.
    [3]  Versions, sequences and ids of topics continue above all that may have been given out.
    [4]  Loads that had not ended are dropped.
    [5]  Views are made anew: each is built from the records of its source that are left (rule V6).
    [6]  An interrupted settling is done again from the start.
    [7]  Publishers keep their epochs, so that older ones stay fenced. Their sequences and units are forgotten: some of
         the records may be lost, and a retry is applied again rather than taken for a duplicate (rule F12).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from sow_server.engine.commit.passed_on import decode_passed_on, encode_passed_on
from sow_server.engine.commit.publishers import decode as decode_publisher
from sow_server.engine.commit.publishers import encode as encode_publisher
from sow_server.engine.disk.layout import (
    BOUNDS_KEY,
    INDEX_KEY,
    INSTANCE_KEY,
    LOAD_KEY,
    MADE_ORDER,
    MADE_TOPIC,
    NEXT_TOPIC_KEY,
    PASSED_ON_KEY,
    PUBLISHER_KEY,
    REARM_KEY,
    SEED_KEY,
    STATISTICS_KEY,
    SWEEP_FLOOR_KEY,
    TOPIC_KEY,
    VIEW_KEY,
    Tombstone,
    decode_bounds,
    decode_tombstone,
    index_prefix,
)
from sow_server.engine.disk.mark import Bounds
from sow_server.engine.disk.rocks import (
    COMMITS,
    EXPIRY,
    INDEXES,
    JOURNAL,
    META,
    RECORDS,
    STAGING,
    TOMBSTONES,
    VIEWS,
    Batch,
    Rocks,
)
from sow_server.engine.stored import (
    EXPIRE,
    HEADER_BYTES,
    RECORD_KEY,
    TOPIC,
    StoredStatistics,
    decode_statistics,
    encode_statistics,
    i64,
    record,
    u32,
)
from sow_server.engine.values.model import NEVER, Record

MARGIN: Final = 10_000_000
"""The distance above the marked bounds at which versions (10 s) and sequences continue: the mark may be a second
old."""
TOPICS_MARGIN: Final = 1_000
CHUNK: Final = 1_000
_END: Final = b"\xff" * 32


def settle(rocks: Rocks, marked: Bounds, identity: dict[str, str | None]) -> Bounds:
    """Makes the rest of a store fit its records; returns the bounds above which versions and sequences continue.
    `identity`: the new one. Raises RocksError."""
    topics = {key[len(TOPIC_KEY) :]: json.loads(value) for key, value in _rows(rocks, TOPIC_KEY)}
    batch = Batch()
    batch.ranges += [(family, b"", _END) for family in (JOURNAL, COMMITS, EXPIRY, INDEXES, STAGING, VIEWS)]
    batch.ranges += [(RECORDS, prefix, _after(prefix)) for prefix, fields in topics.items() if "view" in fields]
    batch.deletes[META] += [key for prefix in (LOAD_KEY, REARM_KEY, SEED_KEY) for key, _ in _rows(rocks, prefix)]
    batch.deletes[META].append(SWEEP_FLOOR_KEY)
    rocks.write_waiting(batch)
    _settle_rows(rocks, PUBLISHER_KEY, lambda row: encode_publisher(decode_publisher(row).without_records()))
    _settle_rows(
        rocks,
        PASSED_ON_KEY,
        lambda row: encode_passed_on(tuple([told.without_records() for told in decode_passed_on(row)])),
    )
    found = _Found()
    _settle_records(rocks, topics, found)
    _count_tombstones(rocks, found)

    stored = decode_bounds(rocks.get(META, BOUNDS_KEY))
    bounds = Bounds(
        max(stored.version, marked.version, found.version) + MARGIN,
        max(stored.sequence, marked.sequence, found.sequence) + MARGIN,
    )
    by_name = {fields["name"]: prefix for prefix, fields in topics.items()}
    batch = Batch()
    meta = batch.puts[META]
    for prefix, fields in topics.items():
        row = rocks.get(META, STATISTICS_KEY + prefix)
        figures = StoredStatistics() if row is None else decode_statistics(row)
        figures = figures._replace(
            records=found.records[prefix], record_bytes=found.record_bytes[prefix], tombstones=found.tombstones[prefix]
        )
        meta[STATISTICS_KEY + prefix] = encode_statistics(figures.trimmed(bounds.sequence))
        if "view" in fields and (source := by_name.get(fields["view"]["source"])) is not None:
            meta[VIEW_KEY + prefix] = source
        for index_id in fields.get("indexes", {}).values():
            meta[INDEX_KEY + index_prefix(int.from_bytes(prefix, "big"), index_id)] = prefix
    used = max([int.from_bytes(prefix, "big") for prefix in found.prefixes | topics.keys()], default=0)
    next_topic = max(int.from_bytes(rocks.get(META, NEXT_TOPIC_KEY) or u32(1), "big"), used + 1)
    meta[NEXT_TOPIC_KEY] = u32(next_topic + TOPICS_MARGIN)
    meta[BOUNDS_KEY] = i64(bounds.version) + i64(bounds.sequence)
    row = rocks.get(META, INSTANCE_KEY)
    assert row is not None, "opening has written it"
    instance: dict[str, Any] = json.loads(row)
    origins = instance["origins"] + [f"lost-{number}" for number in range(len(instance["origins"]), found.origins)]
    meta[INSTANCE_KEY] = json.dumps(instance | identity | {"origins": origins, "authoritative": False}).encode()
    rocks.write_waiting(batch)
    rocks.sync()
    return bounds


def _after(prefix: bytes) -> bytes:
    """The prefix of the next topic."""
    return u32(int.from_bytes(prefix, "big") + 1)


class _Found:
    """Figures of the records and tombstones that are left."""

    def __init__(self) -> None:
        self.version = 0
        self.sequence = 0
        self.origins = 0
        self.prefixes: set[bytes] = set()
        self.records: Counter[bytes] = Counter()
        self.record_bytes: Counter[bytes] = Counter()
        self.tombstones: Counter[bytes] = Counter()

    def see(self, version: int, sequence: int, origin: int) -> None:
        """Notes numbers that have been given out."""
        self.version = max(self.version, version)
        self.sequence = max(self.sequence, sequence)
        self.origins = max(self.origins, origin + 1)


def _settle_records(rocks: Rocks, topics: dict[bytes, Any], found: _Found) -> None:
    """Puts the expiry entries of all records, and drops the records that are dead, or whose topics are lost."""
    cursor = rocks.cursor(RECORDS, fill_cache=False)
    start: bytes | None = b""
    try:
        while start is not None:
            keys: list[bytes] = []
            values: list[bytes] = []
            start = cursor.fill(start, _END, CHUNK, keys, values)
            batch = Batch()
            dead = rocks.multi_get(TOMBSTONES, keys)
            for key, value, tombstone in zip(keys, values, dead, strict=True):
                one, prefix = record(key[RECORD_KEY], value), key[TOPIC]
                found.see(one.version, one.sequence, one.origin)
                found.prefixes.add(prefix)
                if prefix not in topics or (tombstone is not None and _ends(decode_tombstone(tombstone), one)):
                    batch.deletes[RECORDS].append(key)
                    continue
                found.records[prefix] += 1
                found.record_bytes[prefix] += len(key) - 4 + len(value) - HEADER_BYTES
                if one.expire_time_micros != NEVER:
                    batch.puts[EXPIRY][i64(one.expire_time_micros) + key] = b""
            rocks.write_waiting(batch)
    finally:
        cursor.close()


def _ends(tombstone: Tombstone, one: Record) -> bool:
    """True if a tombstone belongs to this record, or to a later one under its key. An expiry has the record's
    version."""
    return tombstone.version > one.version or (tombstone.version == one.version and tombstone.kind == EXPIRE)


def _count_tombstones(rocks: Rocks, found: _Found) -> None:
    """Counts tombstones as the figures do: by the rows that tell their order, of which a key may have several."""
    cursor = rocks.cursor(TOMBSTONES, fill_cache=False)
    try:
        for key, value in cursor.rows(b"", _END):
            if key.startswith(MADE_ORDER):
                found.tombstones[key[MADE_TOPIC]] += 1
            else:
                tombstone = decode_tombstone(value)
                found.see(tombstone.version, tombstone.sequence, tombstone.origin)
    finally:
        cursor.close()


def _settle_rows(rocks: Rocks, prefix: bytes, settled: Callable[[bytes], bytes]) -> None:
    cursor = rocks.cursor(META)
    start: bytes | None = prefix
    try:
        while start is not None:
            keys: list[bytes] = []
            rows: list[bytes] = []
            start = cursor.fill(start, prefix + b"\xff", CHUNK, keys, rows)
            batch = Batch()
            for key, row in zip(keys, rows, strict=True):
                batch.puts[META][key] = settled(row)
            rocks.write_waiting(batch)
    finally:
        cursor.close()


def _rows(rocks: Rocks, prefix: bytes) -> list[tuple[bytes, bytes]]:
    cursor = rocks.cursor(META)
    try:
        return list(cursor.rows(prefix, prefix + b"\xff"))
    finally:
        cursor.close()
