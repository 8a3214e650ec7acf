"""Whether the parts of a store on disk agree: records, expiry index, secondary indexes, journal, commits, figures.

    [1]  The last journaled change of a key equals the record stored under it, or nothing: version, stamp, sequence and
         payload. With the journal kept whole this is the same as replaying it.
    [2]  Every record that can expire has an entry in the expiry index at or before its stamp, at or above the floor.
    [3]  A topic's figures are those of its rows.
    [4]  A complete index has the entries of all stored records, one that is being built those behind its position.
    [5]  Sequences and versions rise, are given out once, and are reserved; the commits are their total order.

An `Audit` reads on in the journal where it stopped last time, so that auditing a store again and again costs in
proportion to the new entries.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import BOUNDS_KEY
from sow_server.engine.disk.rocks import COMMITS, EXPIRY, META, RECORDS
from sow_server.engine.store import Store
from sow_server.engine.stored import DELETE, EXPIRE, HEADER_BYTES, decode_changes, decode_commit, record, unpack_i64
from sow_server.engine.values.model import NEVER
from tests.support.stores.indexes import check_indexes
from tests.support.stores.stores import journal_rows


class Change(NamedTuple):
    """The last change of a key."""

    removed: bool
    sequence: int
    version: int
    expire_time_micros: int
    payload: bytes


class Audit:
    """Owns all that it has read from the journals of one store, over all its restarts."""

    def __init__(self) -> None:
        self.version_of: dict[int, int] = {}
        """Version by sequence, of every change read."""
        self._sequence_of: dict[int, int] = {}
        self._last_change: dict[str, dict[bytes, Change]] = {}
        self._read_to: dict[str, int] = {}

    def check(self, store: Store) -> None:
        """Raises AssertionError where the parts of an open store do not agree."""
        for topic in store.topics.by_id.values():
            self._read_journal(store, topic)
            self._check_topic(store, topic)
        self._check_index(store)
        check_indexes(store)
        self._check_commits(store)
        bounds = store._rocks.get(META, BOUNDS_KEY) or bytes(16)
        assert max(self._sequence_of, default=0) <= unpack_i64(bounds[:8]), "a version is reserved before it is used"
        assert max(self.version_of, default=0) <= unpack_i64(bounds[8:]), "and so is a sequence"

    def _read_journal(self, store: Store, topic: Topic) -> None:
        floor = store.durable_commits.topic_statistics(topic).floor_sequence
        read_to = self._read_to.get(topic.name, 0)
        if floor > read_to:
            self._last_change[topic.name] = {}  # something was pruned unread
        last_change = self._last_change.setdefault(topic.name, {})
        # The chunk that begins at or before `read_to` has been read whole.
        for key, value in journal_rows(store, topic, read_to):
            changes = decode_changes(unpack_i64(key[4:]), value)
            assert changes.first_sequence > read_to, "chunks do not overlap"
            read_to = changes.first_sequence + len(changes.keys) - 1
            versions, stamps = list(changes.version), list(changes.expire_time_micros)
            previous = list(changes.previous)
            for index, kind in enumerate(changes.change):
                sequence, version, name = changes.first_sequence + index, versions[index], changes.keys[index]
                assert sequence not in self.version_of, "a sequence is given out once"
                self.version_of[sequence] = version
                before = last_change.get(name)
                if kind == EXPIRE:
                    assert stamps[index] <= changes.commit_time_micros, "nothing expires too soon"
                else:
                    assert version not in self._sequence_of, "a version is given out once"
                    self._sequence_of[version] = sequence
                    if before is not None:
                        assert version > before.version, "a version is above the one that it replaces"
                if before is not None and topic.settings.retain_bytes is None:
                    expected = 0 if before.removed else before.sequence
                    assert previous[index] == expected, "a change names the one before it"
                last_change[name] = Change(
                    kind in (DELETE, EXPIRE),
                    sequence,
                    version,
                    stamps[index],
                    changes.payloads[index],
                )
        self._read_to[topic.name] = max(read_to, floor)

    def _check_topic(self, store: Store, topic: Topic) -> None:
        cursor = store._rocks.cursor(RECORDS)
        try:
            rows = [(key[4:], value) for key, value in cursor.rows(topic.prefix, topic.stop)]
        finally:
            cursor.close()
        last_change, floor = self._last_change[topic.name], store.durable_commits.topic_statistics(topic).floor_sequence
        stored = {key: record(key, value) for key, value in rows}
        for key, found in stored.items():
            change = last_change.get(key)
            if change is None:
                assert found.sequence <= floor, f"{key!r} is stored, and its change is not in the journal"
                continue
            told = (change.removed, change.sequence, change.version, change.expire_time_micros, change.payload)
            assert told == (False, found.sequence, found.version, found.expire_time_micros, found.payload), key
        for key, change in last_change.items():
            assert change.removed == (key not in stored), f"the journal has put {key!r}, and it is not stored"
        figures = store.durable_commits.topic_statistics(topic)
        assert figures.stored_records == len(rows)
        assert figures.stored_bytes == sum(len(key) + len(value) - HEADER_BYTES for key, value in rows)
        rows = list(journal_rows(store, topic))
        assert figures.journal_bytes == sum(len(value) for _, value in rows)

    def _check_index(self, store: Store) -> None:
        floor = store.writer.sweep.floor
        cursor = store._rocks.cursor(EXPIRY)
        earliest: dict[bytes, int] = {}
        try:
            for entry in cursor.keys(floor, None):
                earliest.setdefault(entry[8:], unpack_i64(entry[:8]))
        finally:
            cursor.close()
        records = store._rocks.cursor(RECORDS)
        try:
            for key, value in records.rows(b"", None):
                topic = store.topics.by_id.get(int.from_bytes(key[:4], "big"))
                stamp = unpack_i64(value[24:32])
                if topic is not None and topic.acts and stamp != NEVER:
                    assert earliest.get(key, NEVER) <= stamp, f"{key!r} would not be swept when it is due"
        finally:
            records.close()

    def _check_commits(self, store: Store) -> None:
        cursor = store._rocks.cursor(COMMITS)
        try:
            commits = [decode_commit(key, value) for key, value in cursor.rows(b"", None)]
        finally:
            cursor.close()
        listed: Counter[int] = Counter()
        end = 0
        for commit in commits:
            assert commit.first_sequence > end, "commits are in order"
            end = commit.last_sequence
            for run in commit.runs:
                assert commit.first_sequence <= run.first_sequence
                assert run.first_sequence + run.length - 1 <= commit.last_sequence
                listed[run.topic_id] += run.length
        for topic in store.topics.by_id.values():
            assert listed[topic.id] >= store.durable_commits.topic_statistics(topic).journal_entries, (
                "every change is in a commit"
            )
