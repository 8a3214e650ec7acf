"""Changes of many records of one topic, column by column: the same result as one record after the other.

The interpreter runs only a few bytecodes per record, and C the rest. Property tests compare the two ways.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft, Removed
from sow_server.engine.disk.rocks import EXPIRY, RECORDS
from sow_server.engine.stored import (
    DELETE,
    EXPIRE,
    EXPIRE_TIME,
    HEADER_BYTES,
    PAYLOAD,
    PUT,
    HeaderColumns,
    Numbers,
    header_columns,
    i64,
    payload_bytes_each,
    record_keys,
    sequences,
)
from sow_server.engine.values.model import NEVER

_NEVER_BYTES: Final = i64(NEVER)


class Puts(NamedTuple):
    """Records of one topic to put, in columns of equal length. A column that is one number is the same for all."""

    keys: Sequence[bytes]
    store_keys: Sequence[bytes]
    new_heads: Sequence[bytes]
    payloads: Sequence[bytes]
    stamps: Sequence[bytes]
    """The expire times as eight bytes."""
    earliest: int
    """The earliest of them."""
    version: Numbers
    publish_time: Numbers
    expire_time: Numbers
    origin: Numbers


def put_all(draft: Draft, topic: Topic, puts: Puts) -> None:
    """Puts fetched records, as `Draft.put` does each. No record here is overdue or due at once. The caller advances the
    counters of versions."""
    keys, store_keys, new_heads, payloads = puts.keys, puts.store_keys, puts.new_heads, puts.payloads
    heads, rows = draft.heads, draft.batch.puts[RECORDS]
    chunk = draft.chunk(topic)
    previous_values = None if chunk is None else chunk.previous_values
    old_heads: list[bytes | None] = []
    # One by one, because a key may occur twice: then its second old head is its first new one.
    if previous_values is not None or topic.indexes.all:
        for key, store_key, new_head, payload in zip(keys, store_keys, new_heads, payloads, strict=True):
            old_head = heads[store_key]
            old_heads.append(old_head)
            old = None if old_head is None else draft.value(store_key)
            if previous_values is not None:
                previous_values.append(old)
            if topic.indexes.all:
                draft.reindex(topic, key, old, payload)
            heads[store_key] = new_head
            rows[store_key] = new_head + payload
    else:
        for store_key, new_head in zip(store_keys, new_heads, strict=True):
            old_heads.append(heads[store_key])
            heads[store_key] = new_head
        rows.update(zip(store_keys, map(operator.add, new_heads, payloads), strict=True))
    if chunk is not None:
        chunk.add_columns(
            PUT,
            keys,
            payloads,
            version=puts.version,
            publish_time=puts.publish_time,
            expire_time=puts.expire_time,
            origin=puts.origin,
            previous=sequences(old_heads),
        )
    if topic.acts and puts.earliest != NEVER:
        arm_all(
            draft,
            puts.earliest,
            [
                stamp + store_key
                for stamp, store_key, head in zip(puts.stamps, store_keys, old_heads, strict=True)
                if stamp != _NEVER_BYTES and (head is None or stamp < head[EXPIRE_TIME])
            ],
        )
    found = [head for head in old_heads if head is not None]
    size = sum(map(len, payloads)) - sum(payload_bytes_each(found))
    count = len(new_heads)
    if not found:
        size += sum(map(len, keys))
    elif len(found) < count:
        size += sum(len(key) for key, head in zip(keys, old_heads, strict=True) if head is None)
    draft.count(topic, count - len(found), size)
    draft.next_sequence += count


def expire_all(draft: Draft, topic: Topic, store_keys: list[bytes], values: list[bytes]) -> None:
    """Expires overdue records, each given once, with their stored values, as `Draft.expire` does each. The caller, the
    sweep, deletes their expiry entries."""
    columns = header_columns(values)
    draft.expire_times += columns.expire_time
    _remove_all(draft, topic, store_keys, values, columns, change=EXPIRE, versions=columns.version)


def delete_all(draft: Draft, topic: Topic, store_keys: list[bytes], values: list[bytes]) -> None:
    """Deletes live records, each given once, with their stored values, as `Draft.delete` does each."""
    versions = range(draft.next_version, draft.next_version + len(store_keys))
    draft.next_version = versions.stop
    if puts := draft.batch.puts[RECORDS]:
        for store_key in store_keys:
            puts.pop(store_key, None)
    disarm_all(draft, topic, store_keys, values)
    _remove_all(draft, topic, store_keys, values, header_columns(values), change=DELETE, versions=versions)


def _remove_all(
    draft: Draft,
    topic: Topic,
    store_keys: list[bytes],
    values: list[bytes],
    columns: HeaderColumns,
    *,
    change: int,
    versions: range | array[int],
) -> None:
    count, sequence = len(store_keys), draft.next_sequence
    keys = record_keys(store_keys)
    chunk = draft.chunk(topic)
    if chunk is not None:
        chunk.add_columns(
            change,
            keys,
            [value[PAYLOAD] for value in values],
            version=versions,
            publish_time=columns.publish_time,
            expire_time=columns.expire_time,
            origin=draft.origin,
            previous=columns.sequence,
            removed_version=columns.version,
            removed_origin=columns.origin,
        )
        if chunk.previous_values is not None:
            chunk.previous_values += values
    if topic.indexes.all:
        for key, value in zip(keys, values, strict=True):
            draft.reindex(topic, key, value, None)
    draft.heads.update(dict.fromkeys(store_keys))
    draft.next_sequence += count
    minted = range(sequence, sequence + count)
    removed_all(draft, topic, keys, store_keys, values, columns, versions, minted, change=change)


def removed_all(
    draft: Draft,
    topic: Topic,
    keys: list[bytes],
    store_keys: list[bytes],
    values: list[bytes],
    columns: HeaderColumns,
    versions: Sequence[int],
    minted: Sequence[int],
    *,
    change: int,
) -> None:
    """Notes that records are gone, for all but the journal and the indexes. `columns`: the headers of their `values`.
    `minted`: the sequences of the removals."""
    count = len(keys)
    draft.removed += store_keys
    draft.batch.deletes[RECORDS] += store_keys
    draft.count(topic, -count, HEADER_BYTES * count - sum(map(len, keys)) - sum(map(len, values)))
    if topic.hears_removals:
        by = columns.origin if change == EXPIRE else [draft.origin] * count
        removed = Removed(change, keys, store_keys, values, versions, by, columns.sequence, minted)
        for hook in draft.removal_hooks:
            hook(draft, topic, removed)


def disarm_all(draft: Draft, topic: Topic, store_keys: list[bytes], values: list[bytes]) -> None:
    """Deletes the expiry entries of deleted records, as `Draft.delete` does each. If this commit also puts that entry,
    the put wins."""
    if topic.acts:
        stamps = [value[EXPIRE_TIME] for value in values]
        draft.batch.deletes[EXPIRY] += [
            stamp + store_key for stamp, store_key in zip(stamps, store_keys, strict=True) if stamp != _NEVER_BYTES
        ]


def arm_all(draft: Draft, earliest: int, entries: list[bytes]) -> None:
    """Puts expiry entries, whole (`expire time ‖ store key`), none of them before the time `earliest`."""
    if entries:
        draft.batch.puts[EXPIRY].update(dict.fromkeys(entries, b""))
        draft.earliest = min(draft.earliest, earliest)
