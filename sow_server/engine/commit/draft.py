"""One commit under construction: the mechanics of putting, deleting and expiring records.

A `Draft` is plain data until the writer writes its batch; dropping it undoes everything. It mints versions and
sequences from the writer's counters, which the writer takes over only after the write.

    ST1  A record, its expiry entry, its entries in indexes, its journal entry and the topic's figures change in the one
         batch.
    ST2  Every record that can expire has an expiry entry at or before its expire time. So an update to a later expire
         time costs no index write: the old entry comes first, and the sweep re-arms it.
    ST3  An overdue record is expired before anything else is done with its key (rule L10).
    ST4  The dead letter of an expiry comes with it, in this commit, and with consequences of its own: it may replace an
         overdue record, or be due at once (rule T3). So any expiry may change other topics, and even this one.
    ST5  What goes from a topic that peers share leaves a tombstone in this commit: of the version of the delete, or of
         the record that expired (rule R4).
    ST6  What goes from a topic while a load of it is open is noted for the load in this commit, unless that load has
         removed it, or it has expired and was there before: so that the loaded row does not bring it back.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Final

from sow_server.engine.catalog.indexes import changed_keys
from sow_server.engine.catalog.topics import UNDELIVERED_ID, Topic, Topics, undelivered_topic
from sow_server.engine.commit import dead_letters
from sow_server.engine.commit.dead_letters import HOPS_MAX, Fate
from sow_server.engine.commit.publishers import Publisher
from sow_server.engine.commit.publishers import encode as encode_publisher
from sow_server.engine.disk.heads import HeadCache
from sow_server.engine.disk.layout import (
    BURY,
    DELETE,
    EXPIRE,
    EXPIRE_TIME,
    HEADER,
    HEADER_BYTES,
    PAYLOAD,
    PUBLISH_TIME,
    PUT,
    RECORD_KEY,
    STATISTICS_KEY,
    TOUCH,
    Entry,
    StoredStatistics,
    Tombstone,
    decode_tombstone,
    encode_statistics,
    encode_tombstone,
    header,
    header_columns,
    i64,
    made_key,
    mark_key,
    payload_bytes_total,
    publisher_key,
    read_header,
    u32,
)
from sow_server.engine.disk.rocks import EXPIRY, INDEXES, META, RECORDS, STAGING, TOMBSTONES, Batch, Rocks
from sow_server.engine.journal import chunks as journal
from sow_server.engine.journal.chunks import ChunkBuilder
from sow_server.engine.values import lifetimes
from sow_server.engine.values.model import ABSENT, NEVER

TAKING_SECONDS_MAX: Final = 0.05
"""Of one commit: asking filters who is handed what is due at once. The writer does nothing else meanwhile."""


class Draft:
    """What one commit will change. Used by the writer thread alone, and once."""

    __slots__ = (
        "_cache",
        "_hops",
        "_open_chunk",
        "_rocks",
        "_topics",
        "_unposted",
        "_values",
        "after",
        "also",
        "atomic",
        "batch",
        "chunks",
        "dropped",
        "earliest",
        "expire_times",
        "founded",
        "handed_over",
        "heads",
        "letters",
        "loader",
        "new_origins",
        "next_sequence",
        "next_version",
        "now",
        "now_bytes",
        "origin",
        "publishers",
        "removals",
        "removed",
        "result",
        "source",
        "statistics",
        "taking_seconds",
        "tombstones",
        "unstaged",
    )

    def __init__(
        self,
        rocks: Rocks,
        cache: HeadCache,
        topics: Topics,
        *,
        now_micros: int,
        last_version: int,
        next_sequence: int,
        origin: int,
    ) -> None:
        self._rocks = rocks
        self._cache = cache
        self._topics = topics
        self._hops = 0
        self._unposted: list[tuple[Topic, list[bytes], list[bytes]]] = []
        """Topics, keys and stored values of expired records whose dead letters have to wait for the end of an atomic
        request."""
        self._values: dict[bytes, bytes] = {}
        self.now = now_micros
        self.now_bytes = i64(now_micros)
        self.next_version = max(now_micros, last_version + 1)
        self.next_sequence = next_sequence
        self.origin = origin
        self.batch = Batch()
        self.chunks: list[ChunkBuilder] = []
        self.heads: dict[bytes, bytes | None] = {}
        """Heads as this commit leaves them; None where there is no record."""
        self.removed: list[bytes] = []
        self.removals: dict[int, int] = {}
        """How many records it removes, by topic id."""
        self.statistics: dict[int, StoredStatistics] = {}
        self.publishers: dict[str, Publisher] = {}
        self.earliest = NEVER
        """The earliest expire time among the expiry entries that this commit puts."""
        self.atomic = False
        """Whether all of this commit belongs to one atomic request."""
        self.dropped: list[Topic] = []
        """Topics that this commit deletes."""
        self.after: Callable[[], object] | None = None
        """What else follows from the commit, such as a topic's new settings: done before anybody can see a cut."""
        self.also: list[Callable[[], object]] = []
        """What follows from it besides, whether it is a control or not; done before `after`."""
        self.result: object = None
        """What `after` has returned."""
        self.handed_over: int | None = None
        """Of the record that was put last: how many attached subscribers it is for, if it was due at once."""
        self.taking_seconds = TAKING_SECONDS_MAX
        """What is left of the time that asking for them may take."""
        self.expire_times: list[int] = []
        """Expire times of the records that this commit expires, for the lag metric."""
        self.founded: Topic | None = None
        """The topic `_undelivered`, when this commit makes it."""
        self.letters: dict[Fate, int] = {}
        """What becomes of their dead letters, where they have any."""
        self.source = 0
        """Where the changes come from that are being staged; 0: from here."""
        self.tombstones: dict[bytes, Tombstone] = {}
        """Those that this commit leaves, by store key."""
        self.loader = 0
        """The load that makes these changes; 0: none does."""
        self.unstaged: dict[int, int] = {}
        """How many staged rows go with this commit, by the load's number."""
        self._open_chunk = False
        """Whether the next change may go into the last chunk."""
        self.new_origins: tuple[str, ...] | None = None
        """The names of all instances that wrote records, where this commit knows of more of them."""

    # -- reading ----------------------------------------------------------------------------------------------------

    def fetch_heads(self, store_keys: Sequence[bytes]) -> None:
        """Makes `heads` complete for these keys: from the cache, the misses with one list-get."""
        heads = self.heads
        missing = self._cache.find(store_keys, heads)
        if missing:
            values = self._values
            for key, value in zip(missing, self._rocks.multi_get(RECORDS, missing), strict=True):
                if value is None:
                    heads[key] = None
                else:
                    heads[key] = value[HEADER]
                    values[key] = value

    def fetch_bodies(self, store_keys: list[bytes]) -> None:
        """Makes `body` cheap for these keys, and `heads` complete."""
        wanted = [key for key in store_keys if key not in self._values and key not in self.heads]
        for key, value in zip(wanted, self._rocks.multi_get(RECORDS, wanted), strict=True):
            self.heads[key] = None if value is None else value[HEADER]
            if value is not None:
                self._values[key] = value

    def fetch_values(self, store_keys: list[bytes]) -> None:
        """Makes `value` cheap for these keys, the heads of which have been fetched; with one list-get."""
        heads, values = self.heads, self._values
        wanted = [key for key in dict.fromkeys(store_keys) if key not in values and heads[key] is not None]
        for key, value in zip(wanted, self._rocks.multi_get(RECORDS, wanted), strict=True):
            if value is not None:
                values[key] = value

    def read(self, store_keys: list[bytes]) -> dict[bytes, bytes]:
        """The stored values of those of the keys that have one, each key once. Before anything is staged."""
        values = dict(zip(store_keys, self._rocks.multi_get(RECORDS, store_keys), strict=True))
        return {key: value for key, value in values.items() if value is not None}

    def body(self, store_key: bytes) -> bytes:
        """The payload of a record that is there."""
        return self.value(store_key)[PAYLOAD]

    def value(self, store_key: bytes) -> bytes:
        """The stored value, header and payload, of a record that is there."""
        value = self.batch.puts[RECORDS].get(store_key) or self._values.get(store_key)
        if value is None:
            value = self._rocks.get(RECORDS, store_key)
            assert value is not None, "a head without a record: the head cache has lost touch with the store"
        return value

    def live_head(self, topic: Topic, key: bytes, store_key: bytes) -> bytes | None:
        """The head of the live record of a fetched key; one that is overdue is expired first (ST3)."""
        head = self.heads[store_key]
        if head is not None and topic.acts and head[EXPIRE_TIME] <= self.now_bytes:
            self.expire(topic, key, store_key, head)
            return self.heads[store_key]  # None; or a dead letter has found its way here (ST4)
        return head

    # -- changing ---------------------------------------------------------------------------------------------------

    def chunk(self, topic: Topic) -> ChunkBuilder | None:
        """Where the next change of `topic` is noted; None for a topic that nobody follows and that has no journal."""
        last = self.chunks[-1] if self._open_chunk else None
        if (
            last is not None
            and last.topic is topic
            and last.source == self.source
            and last.first_sequence + len(last.keys) == self.next_sequence
        ):
            return last
        if not topic.settings.journal and not topic.followers:
            return None
        last = ChunkBuilder(
            topic, self.next_sequence, journaled=topic.settings.journal, atomic=self.atomic, source=self.source
        )
        if topic.previous_wanted:
            last.previous_values = []
        self.chunks.append(last)
        self._open_chunk = True
        return last

    def end_chunk(self) -> None:
        """What follows goes into another chunk: it belongs to another request."""
        self._open_chunk = False

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
        published: bool = False,
    ) -> tuple[int, int]:
        """Puts a record over the live one with `head`; returns its version and sequence. Its version and origin are new
        ones of this instance, unless given: those of a peer.

        One that is due already is put and expired in this commit (rules L7, R5). One that is `published` so, and is for
        somebody who is attached, leaves no dead letter.
        """
        self.handed_over = None
        version, origin, sequence = self._minted(version), self.origin if origin is None else origin, self.next_sequence
        chunk = self.chunk(topic)
        new_head = header(
            origin=origin,
            payload_bytes=len(payload),
            version=version,
            publish_time=publish_time,
            expire_time=expire_time,
            sequence=sequence,
        )
        if chunk is not None:
            chunk.change.append(change)
            chunk.version.append(version)
            chunk.publish_time.append(publish_time)
            chunk.expire_time.append(expire_time)
            chunk.origin.append(origin)
            chunk.previous.append(0 if head is None else read_header(head).sequence)
            chunk.removed_version.append(0)
            chunk.removed_origin.append(0)
            chunk.keys.append(key)
            chunk.payloads.append(payload)
            if chunk.previous_values is not None:
                chunk.previous_values.append(None if head is None else self.value(store_key))
        if topic.indexes.all and change != TOUCH:
            self.reindex(topic, key, None if head is None else self.value(store_key), payload)
        self.heads[store_key] = new_head
        self.batch.puts[RECORDS][store_key] = new_head + payload
        self.next_sequence = sequence + 1
        if head is None:
            self.count(topic, 1, len(key) + len(payload))
        else:
            self.count(topic, 0, len(payload) - read_header(head).payload_bytes)
        if topic.acts:
            if expire_time <= self.now:
                taken = self._takers(topic, key, new_head + payload) if published else 0
                self.expire(topic, key, store_key, new_head, letter=not taken)
                if published:
                    self.handed_over = taken  # here, as a dead letter is put, too
            elif expire_time != NEVER and (head is None or expire_time < read_header(head).expire_time_micros):
                self.arm(expire_time, store_key)
        return version, sequence

    def _takers(self, topic: Topic, key: bytes, value: bytes) -> int:
        """How many attached subscribers a record is for; those that were not asked in time do not count."""
        takers = topic.takers
        if takers is None or self.taking_seconds <= 0:
            return 0
        begin = time.perf_counter()
        try:
            return takers(key, value, begin + self.taking_seconds)
        finally:
            self.taking_seconds -= time.perf_counter() - begin

    def put_all(
        self,
        topic: Topic,
        keys: Sequence[bytes],
        store_keys: Sequence[bytes],
        new_heads: list[bytes],
        payloads: Sequence[bytes],
        stamps: Sequence[bytes],
        earliest: int,
    ) -> list[bytes | None]:
        """What `put` does to each record, but for its journal entry and the counters: column by column, so that the
        interpreter runs a few bytecodes a record and C the rest. Nothing here is overdue or due at once.

        `stamps` are the expire times as eight bytes, `earliest` the earliest of them. The chunk that the entries go
        to has been asked for. Returns the heads before, which were fetched; a key that comes twice has had its first
        new head.
        """
        heads, puts = self.heads, self.batch.puts[RECORDS]
        chunk = self.chunks[-1] if self._open_chunk else None
        previous_values = None if chunk is None or chunk.topic is not topic else chunk.previous_values
        old_heads: list[bytes | None] = []
        # One by one, as a key may come twice: then its second old head is its first new one.
        if previous_values is not None or topic.indexes.all:
            for key, store_key, new_head, payload in zip(keys, store_keys, new_heads, payloads, strict=True):
                old_head = heads[store_key]
                old_heads.append(old_head)
                old = None if old_head is None else self.value(store_key)
                if previous_values is not None:
                    previous_values.append(old)
                if topic.indexes.all:
                    self.reindex(topic, key, old, payload)
                heads[store_key] = new_head
                puts[store_key] = new_head + payload
        else:
            for store_key, new_head in zip(store_keys, new_heads, strict=True):
                old_heads.append(heads[store_key])
                heads[store_key] = new_head
            puts.update(zip(store_keys, map(operator.add, new_heads, payloads), strict=True))
        if topic.acts and earliest != NEVER:
            self.arm_all(
                earliest,
                [
                    stamp + store_key
                    for stamp, store_key, head in zip(stamps, store_keys, old_heads, strict=True)
                    if stamp != _NEVER_BYTES and (head is None or stamp < head[EXPIRE_TIME])
                ],
            )
        found = [head for head in old_heads if head is not None]
        size = sum(map(len, payloads)) - payload_bytes_total(found)
        count = len(new_heads)
        if len(found) < count:
            size += sum(len(key) for key, head in zip(keys, old_heads, strict=True) if head is None)
        self.count(topic, count - len(found), size)
        return old_heads

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
        """Deletes the live record with `head`; returns the sequence. The delete has a version of its own (D3, R4), or
        the given one of a peer."""
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
        """Leaves the tombstone of a record that is not here: a peer has deleted it, others may have it (rule R4)."""
        sequence = self.next_sequence
        if topic.loads:
            self._mark(topic, key, sequence)
        self._minted(version)
        chunk = self.chunk(topic)
        if chunk is not None:
            chunk.change.append(BURY)
            chunk.version.append(version)
            chunk.publish_time.append(0)
            chunk.expire_time.append(0)
            chunk.origin.append(origin)
            chunk.previous.append(0)
            chunk.removed_version.append(0)
            chunk.removed_origin.append(0)
            chunk.keys.append(key)
            chunk.payloads.append(b"")
            if chunk.previous_values is not None:
                chunk.previous_values.append(None)
        self.next_sequence = sequence + 1
        self._leave_all(topic, [store_key], [Tombstone(version, sequence, self.now, origin, DELETE)])

    def tombstone(self, store_key: bytes) -> Tombstone | None:
        """The tombstone of a key, as this commit leaves it."""
        found = self.tombstones.get(store_key)
        if found is None and (value := self._rocks.get(TOMBSTONES, store_key)) is not None:
            found = decode_tombstone(value)
        return found

    def may_have_tombstones(self, topic: Topic) -> bool:
        """Whether to look for tombstones of a topic at all."""
        return bool(self.tombstones) or self.figures(topic).tombstones > 0

    def find_tombstones(self, store_keys: list[bytes]) -> set[bytes]:
        """Those of the keys that have a tombstone."""
        found = zip(store_keys, self._rocks.multi_get(TOMBSTONES, store_keys), strict=True)
        return {key for key, value in found if value is not None or key in self.tombstones}

    def _minted(self, version: int | None) -> int:
        """A new version, or the given one of a peer, which moves the clock of versions forward (rule K7)."""
        if version is None:
            version = self.next_version
        self.next_version = max(self.next_version, version + 1)
        return version

    def _leave_all(self, topic: Topic, store_keys: list[bytes], tombstones: list[Tombstone]) -> None:
        puts = self.batch.puts[TOMBSTONES]
        self.tombstones.update(zip(store_keys, tombstones, strict=True))
        for store_key, tombstone in zip(store_keys, tombstones, strict=True):
            puts[store_key] = encode_tombstone(tombstone)
            puts[made_key(tombstone.sequence, store_key)] = b""
        figures = self.figures(topic)
        self.statistics[topic.id] = figures._replace(tombstones=figures.tombstones + len(store_keys))

    def _mark(self, topic: Topic, key: bytes, sequence: int) -> None:
        """Notes for the loads of a topic that were opened before a sequence that this key has lost its record (ST6)."""
        for load, begin_sequence in topic.loads:
            if load != self.loader and sequence > begin_sequence:
                self.batch.puts[STAGING][mark_key(load, key)] = b""

    def expire(self, topic: Topic, key: bytes, store_key: bytes, head: bytes, *, letter: bool = True) -> None:
        """Expires the overdue record with `head` (rule L10)."""
        due = read_header(head)
        value = self.value(store_key) if letter and topic.settings.dead_letter else b""
        self._remove(topic, key, store_key, head, change=EXPIRE, version=due.version, origin=self.origin)
        self.expire_times.append(due.expire_time_micros)
        if value:
            self._post(topic, [key], [value])

    def expire_all(self, topic: Topic, store_keys: list[bytes], values: list[bytes]) -> None:
        """Expires overdue records of one topic, each given once, with their stored values: what `expire` does,
        but column by column. Their expiry entries are the caller's, the sweep's, to delete."""
        count = len(store_keys)
        columns = header_columns(values)
        chunk = self.chunk(topic)
        if chunk is not None:
            chunk.change += bytes((EXPIRE,)) * count
            chunk.version.numbers(columns.version)
            chunk.publish_time.numbers(columns.publish_time)
            chunk.expire_time.numbers(columns.expire_time)
            chunk.origin.constant(self.origin, count)
            chunk.previous.numbers(columns.sequence)
            chunk.removed_version.numbers(columns.version)
            chunk.removed_origin.numbers(columns.origin)
            chunk.keys += [key[RECORD_KEY] for key in store_keys]
            chunk.payloads += [value[PAYLOAD] for value in values]
            if chunk.previous_values is not None:
                chunk.previous_values += values
        if topic.indexes.all:
            for store_key, value in zip(store_keys, values, strict=True):
                self.reindex(topic, store_key[RECORD_KEY], value, None)
        if topic.loads:
            for store_key, changed in zip(store_keys, columns.sequence, strict=True):
                self._mark(topic, store_key[RECORD_KEY], changed)
        self.heads.update(dict.fromkeys(store_keys))
        self.removed += store_keys
        self.batch.deletes[RECORDS] += store_keys
        self.expire_times += columns.expire_time
        sequence = self.next_sequence
        self.next_sequence += count
        stored = sum(map(len, store_keys)) + sum(map(len, values))
        self.count(topic, -count, (4 + HEADER_BYTES) * count - stored)
        if topic.replicated:
            rows = zip(columns.version, range(sequence, sequence + count), columns.origin, strict=True)
            left = [Tombstone(version, at, self.now, origin, EXPIRE) for version, at, origin in rows]
            self._leave_all(topic, store_keys, left)
        if topic.settings.dead_letter:
            self._post(topic, [key[RECORD_KEY] for key in store_keys], values)

    def set_aside(self, topic: Topic, durable: str, entries: Sequence[Entry]) -> None:
        """Puts the dead letters of journal entries that a durable has set aside where they belong (rule J15)."""
        values = [
            header(
                origin=entry.origin,
                payload_bytes=len(entry.payload),
                version=entry.version,
                publish_time=entry.publish_time_micros,
                expire_time=entry.expire_time_micros,
                sequence=0,
            )
            + entry.payload
            for entry in entries
            if entry.change != BURY
        ]
        self._post(topic, [entry.key for entry in entries if entry.change != BURY], values, durable)

    def _post(self, topic: Topic, keys: list[bytes], values: list[bytes], durable: str = "") -> None:
        """Puts the dead letters of records that have just expired, or that a durable has set aside, where they belong
        (ST4)."""
        if self.atomic:
            self._unposted.append((topic, keys, values))
            return
        if self._hops == HOPS_MAX:
            self._note(Fate.DROPPED, len(keys))
            return
        post = dead_letters.post(self._topics, topic, keys, values, durable)
        self._note(Fate.DROPPED, post.dropped)
        self._note(Fate.ENDED, post.ended)
        if not post.keys:
            return
        self._note(post.fate, len(post.keys))
        self._deliver(post.target or self.undelivered(), post.keys, post.payloads)

    def undelivered(self) -> Topic:
        """The store's own topic of dead letters without a target. It is made when it is first asked for."""
        found = self._topics.by_id.get(UNDELIVERED_ID) or self.founded
        if found is None:
            found = self.founded = undelivered_topic(self.now, self.next_sequence - 1)
        return found

    def _deliver(self, target: Topic, keys: list[bytes], payloads: list[bytes]) -> None:
        """Puts copies into their topic, which gives them their lifetime. A record that is there is replaced."""
        expire_time = lifetimes.expire_time(target.settings, ABSENT, self.now)
        store_keys = [target.prefix + key for key in keys]
        self.fetch_heads(store_keys)
        self._hops += 1
        source, self.source = self.source, 0  # whoever sent what expired: the letter is ours
        for key, store_key, payload in zip(keys, store_keys, payloads, strict=True):
            head = self.live_head(target, key, store_key)
            self.put(target, key, store_key, head, payload, change=PUT, publish_time=self.now, expire_time=expire_time)
        self._hops -= 1
        self.source = source

    def deliver_waiting(self, box: Topic, target: Topic, store_keys: list[bytes], values: list[bytes]) -> None:
        """Moves to `target` those of the records of `box`, the store's own topic, that it can take."""
        keys: list[bytes] = []
        payloads: list[bytes] = []
        rivals = {
            key: [box.prefix + other for other in dead_letters.rivals(key[RECORD_KEY], target)] for key in store_keys
        }
        waiting = self.read([other for others in rivals.values() for other in others])
        self.fetch_bodies(store_keys)
        for store_key, value in zip(store_keys, values, strict=True):
            key = dead_letters.waiting_for(store_key[RECORD_KEY], target)
            if key is None:
                continue
            self.delete(box, store_key[RECORD_KEY], store_key, value[HEADER])
            there = target.prefix + key
            self.fetch_heads([there])
            head = self.live_head(target, key, there)
            # What has come to that key since is newer: it would have replaced the copy, had that not been kept waiting.
            # So would a newer copy that is waiting itself, wherever in the order of keys it is.
            others = rivals[store_key]
            outlived = any(waiting[other][PUBLISH_TIME] > value[PUBLISH_TIME] for other in others if other in waiting)
            if not outlived and (head is None or head[PUBLISH_TIME] < value[PUBLISH_TIME]):
                keys.append(key)
                payloads.append(value[PAYLOAD])
        self._note(Fate.DELIVERED, len(keys))
        self._deliver(target, keys, payloads)

    def _note(self, fate: Fate, count: int) -> None:
        if count:
            self.letters[fate] = self.letters.get(fate, 0) + count

    def end_request(self) -> None:
        """All requests have been staged. The dead letters of an atomic one come after it, as it is told as a whole to
        those who follow its topic: they are no part of it."""
        self.atomic = False
        self.end_chunk()
        unposted, self._unposted = self._unposted, []
        for topic, keys, values in unposted:
            self._post(topic, keys, values)

    def reindex(self, topic: Topic, key: bytes, old: bytes | None, payload: bytes | None) -> None:
        """Turns the index entries of the record with the stored value `old` into those of `payload`; None where there
        is no record (IX1). A field that stays as it was costs no write."""
        decode = topic.decode_indexed
        before = None if old is None else decode(old[PAYLOAD])
        after = None if payload is None else decode(payload)
        puts, deletes = self.batch.puts[INDEXES], self.batch.deletes[INDEXES]
        for index in topic.indexes.all:
            gone, come = changed_keys(index, before, after, key)
            for entry in gone:
                puts.pop(entry, None)
            # All deletes of a batch come before all puts: an entry that goes and comes again in one commit stays.
            deletes += gone
            puts.update(dict.fromkeys(come, b""))

    def arm(self, expire_time: int, store_key: bytes) -> None:
        """Puts an expiry entry (ST2)."""
        self.batch.puts[EXPIRY][i64(expire_time) + store_key] = b""
        self.earliest = min(self.earliest, expire_time)

    def arm_all(self, earliest: int, entries: list[bytes]) -> None:
        """Puts expiry entries, whole (`expire time ‖ store key`), none of them before the time `earliest`."""
        if entries:
            self.batch.puts[EXPIRY].update(dict.fromkeys(entries, b""))
            self.earliest = min(self.earliest, earliest)

    def _remove(
        self, topic: Topic, key: bytes, store_key: bytes, head: bytes, *, change: int, version: int, origin: int
    ) -> int:
        sequence = self.next_sequence
        old = read_header(head)
        chunk = self.chunk(topic)
        if chunk is not None:
            chunk.change.append(change)
            chunk.version.append(version)
            chunk.publish_time.append(old.publish_time_micros)
            chunk.expire_time.append(old.expire_time_micros)
            chunk.origin.append(origin)
            chunk.previous.append(old.sequence)
            chunk.removed_version.append(old.version)
            chunk.removed_origin.append(old.origin)
            chunk.keys.append(key)
            value = self.value(store_key)
            chunk.payloads.append(value[PAYLOAD])
            if chunk.previous_values is not None:
                chunk.previous_values.append(value)
        if topic.indexes.all:
            self.reindex(topic, key, self.value(store_key), None)
        if topic.loads:
            self._mark(topic, key, old.sequence if change == EXPIRE else sequence)
        self.heads[store_key] = None
        self.removed.append(store_key)
        self.batch.puts[RECORDS].pop(store_key, None)
        self.batch.deletes[RECORDS].append(store_key)
        if topic.acts and old.expire_time_micros != NEVER:
            # Its own entry, if it has one, need not wait for the sweep. A later put in this commit wins over this.
            entry = head[EXPIRE_TIME] + store_key
            if entry not in self.batch.puts[EXPIRY]:
                self.batch.deletes[EXPIRY].append(entry)
        self.next_sequence = sequence + 1
        self.count(topic, -1, -len(key) - old.payload_bytes)
        if topic.replicated:
            by = (
                old.origin if change == EXPIRE else origin
            )  # the tombstone is of the record that expired, and its writer's
            self._leave_all(topic, [store_key], [Tombstone(version, sequence, self.now, by, change)])
        return sequence

    def count(self, topic: Topic, records: int, size: int) -> None:
        """Adds to the topic's figures."""
        figures = self.figures(topic)
        if records < 0:
            self.removals[topic.id] = self.removals.get(topic.id, 0) - records
        self.statistics[topic.id] = figures._replace(
            records=figures.records + records, record_bytes=figures.record_bytes + size
        )

    def figures(self, topic: Topic) -> StoredStatistics:
        """The topic's figures as this commit leaves them."""
        return self.statistics.setdefault(topic.id, topic.statistics)

    # -- finishing --------------------------------------------------------------------------------------------------

    def finish(self) -> Batch:
        """The complete batch."""
        batch = self.batch
        journal.append(batch, self.chunks, self.statistics, self.now)
        meta = batch.puts[META]
        for topic_id, figures in self.statistics.items():
            meta[STATISTICS_KEY + u32(topic_id)] = encode_statistics(figures)
        for publisher_id, publisher in self.publishers.items():
            meta[publisher_key(publisher_id)] = encode_publisher(publisher)
        return batch


_NEVER_BYTES: Final = i64(NEVER)
