"""One commit under construction: the mechanics of putting, deleting and expiring records.

A `Draft` is plain data until the writer writes its batch; dropping it undoes everything. It mints versions and
sequences from the writer's counters, which the writer takes over only after the write.

    [1]  A record, its expiry entry, its entries in indexes, its journal entry and the topic's figures change in one
         batch.
    [2]  Every record that can expire has an expiry entry at or before its expire time. So an update to a later expire
         time costs no index write: the old entry comes first, and the sweep re-arms it.
    [3]  An overdue record is expired before anything else is done with its key (rule L10).
    [4]  A draft knows no features. They add their rows to removals through the removal hooks, and to the whole through
         the finish hooks, keep their state in `part`, and apply the effects of the commit through `on_commit`. So any
         expiry may change other topics, and even this one (letter_posting [1]).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

from sow_server.engine.catalog.indexes import changed_keys
from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.commit.passed_on import encode_passed_on_rows
from sow_server.engine.commit.publishers import Publisher
from sow_server.engine.commit.publishers import encode as encode_publisher
from sow_server.engine.commit.told import PassedOn
from sow_server.engine.disk.heads import HeadCache
from sow_server.engine.disk.layout import STATISTICS_KEY, publisher_key
from sow_server.engine.disk.rocks import EXPIRY, INDEXES, META, RECORDS, Batch, Rocks
from sow_server.engine.journal.builder import ChunkBuilder, JournalDraft, append_chunks
from sow_server.engine.stored import (
    BURY,
    DELETE,
    EXPIRE,
    EXPIRE_TIME,
    HEADER,
    PAYLOAD,
    TOUCH,
    PublisherNote,
    StoredStatistics,
    encode_statistics,
    header,
    i64,
    read_header,
    u32,
)
from sow_server.engine.values.model import NEVER, PublisherPosition

P = TypeVar("P")


class Draft:
    """The changes of one commit. Used by the writer thread alone, and once."""

    __slots__ = (
        "_cache",
        "_finish_hooks",
        "_later",
        "_looked_up",
        "_parts",
        "_rocks",
        "_values",
        "after",
        "batch",
        "counts",
        "dropped",
        "earliest",
        "expire_times",
        "heads",
        "journal",
        "merge_room",
        "new_topics",
        "next_due",
        "next_sequence",
        "next_version",
        "notes",
        "now",
        "now_bytes",
        "on_commit",
        "origin",
        "passed_on",
        "publishers",
        "removal_hooks",
        "removals",
        "removed",
        "result",
        "statistics",
        "topics",
    )

    def __init__(self, basis: Basis, *, now_micros: int, last_version: int, next_sequence: int) -> None:
        self._rocks = basis.rocks
        self._cache = basis.heads
        self.removal_hooks = basis.removal_hooks
        self._finish_hooks = basis.finish_hooks
        self._parts: dict[type[object], object] = {}
        self._later: list[Callable[[], None]] = []
        """Waits for the end of an atomic request."""
        self._values: dict[bytes, bytes] = {}
        """Stored values that have been read, by store key."""
        self._looked_up: list[list[bytes]] = []
        """Store keys that have been read, whether they have a value or not."""
        self.topics: Final = basis.topics
        self.now = now_micros
        self.now_bytes = i64(now_micros)
        self.next_version = max(now_micros, last_version + 1)
        self.next_sequence = next_sequence
        self.origin = basis.origin
        self.batch = Batch()
        self.journal: Final = JournalDraft()
        self.merge_room = sys.maxsize
        """Bytes of stored records that deltas may still be merged into; below 0 once they have been."""
        self.next_due = NEVER
        """When the next record is overdue, where the writer could sweep it before this commit (caps [4])."""
        self.heads: dict[bytes, bytes | None] = {}
        """Heads after this commit; None for a missing record."""
        self.removed: list[bytes] = []
        """Store keys of the records that it removes."""
        self.removals: dict[tuple[str, int], int] = {}
        """The numbers of removed rows, by column family and topic id; for STAGING by the load's number."""
        self.statistics: dict[int, StoredStatistics] = {}
        self.publishers: dict[str, Publisher] = {}
        self.passed_on: dict[str, dict[int, PassedOn]] = {}
        """The parts that peers have passed on of a publisher, by the topics' ids. Of staged publishers only."""
        self.notes: list[PublisherNote] = []
        """The sequences of publishers that this commit decides, for peers (rule F11)."""
        self.earliest = NEVER
        """The earliest expire time among the expiry entries that this commit puts."""
        self.expire_times: list[int] = []
        """Expire times of the records that this commit expires, for the lag metric."""
        self.counts: dict[str, int] = {}
        """Counts of features that the writer adds to its totals, such as the fates of dead letters."""
        self.new_topics: list[Topic] = []
        """Topics that this commit creates on the way; the writer stores and registers them."""
        self.dropped: list[Topic] = []
        """Topics that this commit deletes."""
        self.on_commit: list[Callable[[], object]] = []
        """Called once the commit is written, before `after`."""
        self.after: Callable[[], object] | None = None
        """The end of a step, such as putting a topic's new settings into force: called before any cut can be opened."""
        self.result: object = None
        """The result of `after`."""

    def part(self, kind: type[P]) -> P:
        """The state of one feature in this draft; made at the first access."""
        found = self._parts.get(kind)
        if not isinstance(found, kind):
            found = self._parts[kind] = kind()
        return found

    # -- reading ----------------------------------------------------------------------------------------------------

    def fetch_heads(self, store_keys: Sequence[bytes]) -> None:
        """Makes `heads` complete for these keys: from the cache, the misses with one list-get."""
        heads = self.heads
        missing = self._cache.find(store_keys, heads)
        if missing:
            # Most are of new records, which cost no line of Python: `heads` has None for them already.
            found = self._rocks.multi_get(RECORDS, missing)
            self._looked_up.append(missing)
            stored = {key: value for key, value in zip(missing, found, strict=True) if value is not None}
            if stored:
                self._values.update(stored)
                heads.update({key: value[HEADER] for key, value in stored.items()})

    def fetch_bodies(self, store_keys: list[bytes]) -> None:
        """Makes `body` cheap for these keys, and `heads` complete."""
        heads, values = self.heads, self._values
        wanted = [key for key in store_keys if key not in values and heads.get(key, b"") is not None]
        for key, value in zip(wanted, self._rocks.multi_get(RECORDS, wanted), strict=True):
            heads.setdefault(key, None if value is None else value[HEADER])
            if value is not None:
                values[key] = value

    def fetch_values(self, store_keys: list[bytes]) -> None:
        """Makes `value` cheap for these keys, the heads of which have been fetched; with one list-get."""
        heads, values = self.heads, self._values
        wanted = [key for key in dict.fromkeys(store_keys) if key not in values and heads[key] is not None]
        for key, value in zip(wanted, self._rocks.multi_get(RECORDS, wanted), strict=True):
            if value is not None:
                values[key] = value

    def read(self, store_keys: list[bytes]) -> dict[bytes, bytes]:
        """The stored values of the keys that have one, each key once. Called before anything is staged."""
        values = dict(zip(store_keys, self._rocks.multi_get(RECORDS, store_keys), strict=True))
        if all(values.values()):  # no stored value is empty
            return values  # type: ignore[return-value]  # there is no None among them
        return {key: value for key, value in values.items() if value is not None}

    def before(self, store_keys: Sequence[bytes]) -> list[bytes | None]:
        """The stored values of keys as they were before this commit."""
        values, looked_up = self._values, set[bytes]().union(*self._looked_up)
        wanted = [key for key in store_keys if key not in values and key not in looked_up]
        read = dict(zip(wanted, self._rocks.multi_get(RECORDS, wanted), strict=True))
        return [values.get(key) or read.get(key) for key in store_keys]

    def rows(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys of a column family, including the puts of this draft, without its deletes."""
        puts = self.batch.puts[family]
        stored = self._rocks.multi_get(family, keys)
        return [puts.get(key, value) for key, value in zip(keys, stored, strict=True)] if puts else stored

    def body(self, store_key: bytes) -> bytes:
        """The payload of an existing record."""
        return self.value(store_key)[PAYLOAD]

    def value(self, store_key: bytes) -> bytes:
        """The stored value, header and payload, of an existing record."""
        value = self.batch.puts[RECORDS].get(store_key) or self._values.get(store_key)
        if value is None:
            value = self._rocks.get(RECORDS, store_key)
            assert value is not None, "a head without a record: the head cache has lost touch with the store"
        return value

    def live_head(self, topic: Topic, key: bytes, store_key: bytes) -> bytes | None:
        """The head of the live record of a fetched key; one that is overdue is expired first ([3])."""
        head = self.heads[store_key]
        if head is not None and topic.acts and head[EXPIRE_TIME] <= self.now_bytes:
            self.expire(topic, key, store_key, head)
            return self.heads[store_key]  # None; or a dead letter has come to this key ([4])
        return head

    # -- changing ---------------------------------------------------------------------------------------------------

    def chunk(self, topic: Topic) -> ChunkBuilder | None:
        """The chunk of the next change of `topic`; None for a topic without followers and journal."""
        return self.journal.chunk(topic, self.next_sequence)

    def put(
        self,
        topic: Topic,
        key: bytes,
        store_key: bytes,
        head: bytes | None,
        payload: bytes,
        *,
        change: int,
        publish_time: int,
        expire_time: int,
        version: int | None = None,
        origin: int | None = None,
        hand_over: bool = False,
        expire_due: bool = True,
    ) -> tuple[int, int]:
        """Puts a record over the live one with `head`; returns its version and sequence. Its version and origin are new
        ones of this instance, unless those of a peer are given.

        A record that is due already is put and expired in this commit (rules L7, R5), unless not `expire_due`: then the
        caller expires it. `hand_over`: the subscribers attached now get it all the same.
        """
        if version is None:
            version, self.next_version = self.next_version, self.next_version + 1
        else:
            self._minted(version)
        origin, sequence = self.origin if origin is None else origin, self.next_sequence
        chunk = self.journal.chunk(topic, sequence)
        old = None if head is None else read_header(head)
        new_head = header(
            origin=origin,
            payload_bytes=len(payload),
            version=version,
            publish_time=publish_time,
            expire_time=expire_time,
            sequence=sequence,
        )
        if chunk is not None:
            chunk.add(
                change,
                key,
                payload,
                version=version,
                publish_time=publish_time,
                expire_time=expire_time,
                origin=origin,
                previous=0 if old is None else old.sequence,
            )
            if chunk.previous_values is not None:
                chunk.previous_values.append(None if head is None else self.value(store_key))
        if topic.indexes.all and change != TOUCH:
            self.reindex(topic, key, None if head is None else self.value(store_key), payload)
        self.heads[store_key] = new_head
        self.batch.puts[RECORDS][store_key] = new_head + payload
        self.next_sequence = sequence + 1
        if old is None:
            self.count(topic, 1, len(key) + len(payload))
        else:
            self.count(topic, 0, len(payload) - old.payload_bytes)
        if topic.acts:
            if expire_time <= self.now:
                if hand_over and chunk is not None:
                    chunk.handed_over.add(sequence)
                if expire_due:
                    self.expire(topic, key, store_key, new_head)
            elif expire_time != NEVER and (old is None or expire_time < old.expire_time_micros):
                self.arm(expire_time, store_key)
        return version, sequence

    def delete(
        self,
        topic: Topic,
        key: bytes,
        store_key: bytes,
        head: bytes,
        *,
        version: int | None = None,
        origin: int | None = None,
    ) -> int:
        """Deletes the live record with `head`; returns the sequence. The delete has a new version (D3, R4), or the
        given one of a peer."""
        return self._remove(
            topic,
            key,
            store_key,
            head,
            change=DELETE,
            version=self._minted(version),
            origin=self.origin if origin is None else origin,
        )

    def bury(self, topic: Topic, key: bytes, store_key: bytes, *, version: int, origin: int) -> None:
        """Notes that a peer has deleted a record that is not here: others may have it (rule R4)."""
        sequence = self.next_sequence
        self._minted(version)
        chunk = self.chunk(topic)
        if chunk is not None:
            chunk.add(BURY, key, b"", version=version, publish_time=0, expire_time=0, origin=origin, previous=0)
            if chunk.previous_values is not None:
                chunk.previous_values.append(None)
        self.next_sequence = sequence + 1
        removed = Removed(BURY, [key], [store_key], [b""], [version], [origin], [0], [sequence])
        for hook in self.removal_hooks:
            hook(self, topic, removed)

    def _minted(self, version: int | None) -> int:
        """A new version, or the given one of a peer, which moves the clock of versions forward (rule K7)."""
        if version is None:
            version = self.next_version
        self.next_version = max(self.next_version, version + 1)
        return version

    def expire(self, topic: Topic, key: bytes, store_key: bytes, head: bytes, *, letters: bool = True) -> None:
        """Expires the overdue record with `head` (rule L10). Without `letters` it leaves no dead letter."""
        due = read_header(head)
        self.expire_times.append(due.expire_time_micros)
        self._remove(
            topic, key, store_key, head, change=EXPIRE, version=due.version, origin=self.origin, letters=letters
        )

    def end_request(self) -> None:
        """All requests have been staged. The dead letters of an atomic one come after it: followers of its topic get
        the request as a whole, and the letters are not part of it."""
        self.journal.end_request()
        later, self._later = self._later, []
        for work in later:
            work()

    def after_request(self, work: Callable[[], None]) -> None:
        """Calls a function now, or after the atomic request that is being staged."""
        if self.journal.atomic:
            self._later.append(work)
        else:
            work()

    def reindex(self, topic: Topic, key: bytes, old: bytes | None, payload: bytes | None) -> None:
        """Turns the index entries of the record with the stored value `old` into those of `payload`; None for no record
        (catalog/indexes [1]). An unchanged field costs no write."""
        decode = topic.decode_indexed
        before = None if old is None else decode(old[PAYLOAD])
        after = None if payload is None else decode(payload)
        puts, deletes = self.batch.puts[INDEXES], self.batch.deletes[INDEXES]
        for index in topic.indexes.all:
            gone, come = changed_keys(index, before, after, key)
            for entry in gone:
                puts.pop(entry, None)
            # All deletes of a batch come before all puts: an entry that is removed and put again in one commit stays.
            deletes += gone
            puts.update(dict.fromkeys(come, b""))

    def arm(self, expire_time: int, store_key: bytes) -> None:
        """Puts an expiry entry ([2])."""
        self.batch.puts[EXPIRY][i64(expire_time) + store_key] = b""
        self.earliest = min(self.earliest, expire_time)

    def _remove(
        self,
        topic: Topic,
        key: bytes,
        store_key: bytes,
        head: bytes,
        *,
        change: int,
        version: int,
        origin: int,
        letters: bool = True,
    ) -> int:
        sequence = self.next_sequence
        old = read_header(head)
        chunk = self.chunk(topic)
        value = b""
        if chunk is not None or topic.indexes.all or topic.hears_removals:
            value = self.value(store_key)
        if chunk is not None:
            chunk.add(
                change,
                key,
                value[PAYLOAD],
                version=version,
                publish_time=old.publish_time_micros,
                expire_time=old.expire_time_micros,
                origin=origin,
                previous=old.sequence,
                removed_version=old.version,
                removed_origin=old.origin,
            )
            if chunk.previous_values is not None:
                chunk.previous_values.append(value)
        if topic.indexes.all:
            self.reindex(topic, key, value, None)
        self.heads[store_key] = None
        self.removed.append(store_key)
        self.batch.puts[RECORDS].pop(store_key, None)
        self.batch.deletes[RECORDS].append(store_key)
        if topic.acts and old.expire_time_micros != NEVER:
            # Its own entry, if there is one, need not wait for the sweep. A later put in this commit wins over this
            # delete.
            entry = head[EXPIRE_TIME] + store_key
            if entry not in self.batch.puts[EXPIRY]:
                self.batch.deletes[EXPIRY].append(entry)
        self.next_sequence = sequence + 1
        self.count(topic, -1, -len(key) - old.payload_bytes)
        if topic.hears_removals:
            by = old.origin if change == EXPIRE else origin  # an expiry has the version of the record, and its writer
            removed = Removed(change, [key], [store_key], [value], [version], [by], [old.sequence], [sequence], letters)
            for hook in self.removal_hooks:
                hook(self, topic, removed)
        return sequence

    def count(self, topic: Topic, records: int, size: int) -> None:
        """Adds to the topic's figures."""
        figures = self.statistics.get(topic.id) or topic.statistics
        if records < 0:
            place = RECORDS, topic.id
            self.removals[place] = self.removals.get(place, 0) - records
        self.statistics[topic.id] = figures.counted(records, size)

    def note_publisher(
        self, position: PublisherPosition, topic: Topic, start: int, stop: int, refused: Sequence[int]
    ) -> None:
        """Notes that records of a request of a staged publisher have been decided."""
        publisher = self.publishers[position.publisher_id]
        if not (publisher.token and topic.replicated and topic.settings.journal):
            return  # no peer could learn of it, or none has the records
        first, last = position.first_sequence + start, position.first_sequence + stop - 1
        note = PublisherNote(
            position.publisher_id, publisher.epoch, publisher.token, first, last, (topic.id,), tuple(refused)
        )
        before = self.notes[-1] if self.notes else None
        if before is not None and before.last + 1 == first and _same_publisher(before, note):
            self.notes[-1] = before._replace(last=last, refused=before.refused + note.refused)
        else:
            self.notes.append(note)

    def figures(self, topic: Topic) -> StoredStatistics:
        """The topic's figures after this commit."""
        return self.statistics.setdefault(topic.id, topic.statistics)

    # -- finishing --------------------------------------------------------------------------------------------------

    def finish(self) -> Batch:
        """The complete batch."""
        for hook in self._finish_hooks:
            hook(self)
        batch = self.batch
        self.next_sequence = append_chunks(
            batch, self.journal.chunks, self.statistics, self.now, self.notes, self.next_sequence
        )
        meta = batch.puts[META]
        for topic_id, figures in self.statistics.items():
            meta[STATISTICS_KEY + u32(topic_id)] = encode_statistics(figures)
        for publisher_id, publisher in self.publishers.items():
            meta[publisher_key(publisher_id)] = encode_publisher(publisher)
        for publisher_id, rows in self.passed_on.items():
            meta |= encode_passed_on_rows(publisher_id, rows)
        return batch


@dataclass(frozen=True, slots=True)
class Basis:
    """The parts of the store that every draft is built on."""

    rocks: Rocks
    topics: Topics
    heads: HeadCache
    """The heads of records that have been read or written lately."""
    origin: int
    """The number of this instance."""
    removal_hooks: Sequence[RemovalHook]
    finish_hooks: Sequence[Callable[[Draft], None]] = ()
    """Called with a draft that is complete but for what follows from all of it, before it takes any reserve."""


def _same_publisher(one: PublisherNote, other: PublisherNote) -> bool:
    return one[:3] == other[:3] and one.topic_ids == other.topic_ids and one.source == other.source


class Removed(NamedTuple):
    """Records of one topic that a draft removes, in columns of equal length; for the hooks."""

    change: int
    """DELETE or EXPIRE of all of them; BURY: a peer has deleted a record that is not here."""
    keys: Sequence[bytes]
    store_keys: Sequence[bytes]
    values: Sequence[bytes]
    """Stored values of the records; empty bytes for BURY."""
    versions: Sequence[int]
    """The versions of the deletes, or of the records that expired."""
    origins: Sequence[int]
    """The numbers of the instances that wrote these versions."""
    previous: Sequence[int]
    """Sequences of the removed records; 0 for BURY."""
    sequences: Sequence[int]
    """The sequences of the removals."""
    letters: bool = True
    """True if records that expire may leave dead letters."""


class RemovalHook(Protocol):
    """Adds the rows of one feature to a draft that removes records. Called for topics with `Topic.hears_removals`, and
    for every BURY; it decides itself whether it applies to the topic."""

    def __call__(self, draft: Draft, topic: Topic, removed: Removed) -> None:
        """The records are removed from the draft already."""
