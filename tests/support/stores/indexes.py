"""Records with indexed fields, and whether the indexes of a store agree with its records (catalog/indexes [2],
catalog/indexes [3])."""

from __future__ import annotations

import json

from sow_server.engine.catalog.indexes import entry_keys
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import INDEX_KEY
from sow_server.engine.disk.rocks import INDEXES, META, RECORDS
from sow_server.engine.formats.topic_formats import index_paths
from sow_server.engine.store import Store
from sow_server.engine.stored import HEADER_BYTES
from sow_server.engine.values.model import Lifetime, LifetimeKind, Publish
from tests.support.stores.stores import Rig


def check_indexes(store: Store) -> None:
    """Raises AssertionError unless a complete index of an open store has exactly the entries of all stored records, one
    that is being built none but those, and all of them behind its position; and nothing else is there."""
    left = set(_rows(store, INDEXES))
    positions = dict(_rows(store, META, INDEX_KEY, INDEX_KEY + b"\xff"))
    for topic in store.topics.by_id.values():
        assert [index.path for index in topic.indexes.all] == list(topic.settings.index)
        assert [index.steps for index in topic.indexes.all] == index_paths(topic.settings)
        expected = _expected(store, topic)
        for index in topic.indexes.all:
            found = {entry for entry, _ in left if entry.startswith(index.prefix)}
            left -= {(entry, b"") for entry in found}
            position = positions.pop(INDEX_KEY + index.prefix, None)
            assert index.complete == (position is None)
            wanted = expected[index.path]
            if position is None:
                assert found == wanted.keys(), index.path
            else:
                assert found <= wanted.keys(), index.path
                assert {entry for entry, store_key in wanted.items() if store_key < position} <= found, index.path
    assert not left, "entries of no index"
    assert not positions, "a build of no index"


def _expected(store: Store, topic: Topic) -> dict[str, dict[bytes, bytes]]:
    """By the path of each index: the store key by entry."""
    expected: dict[str, dict[bytes, bytes]] = {index.path: {} for index in topic.indexes.all}
    for store_key, value in _rows(store, RECORDS, topic.prefix, topic.stop):
        document = topic.format.decode(value[HEADER_BYTES:])
        for index in topic.indexes.all:
            for entry in entry_keys(index, document, store_key[4:]):
                expected[index.path][entry] = store_key
    return expected


def _rows(store: Store, family: str, start: bytes = b"", stop: bytes | None = None) -> list[tuple[bytes, bytes]]:
    cursor = store._rocks.cursor(family)
    try:
        return list(cursor.rows(start, stop))
    finally:
        cursor.close()


def put(rig: Rig, *documents: dict[str, object], topic: str = "orders", ttl: int | None = None) -> None:
    """Publishes documents in one request; eight and more go the hot path."""
    lifetime = Lifetime(LifetimeKind.ABSENT) if ttl is None else Lifetime(LifetimeKind.TTL, ttl)
    outcome = rig.run(Publish(topic, [json.dumps(document).encode() for document in documents], lifetime=lifetime))
    assert not outcome.refusals


def entries(rig: Rig) -> int:
    """How many entries are on disk."""
    return len(rig.rows(INDEXES))
