"""Reading: single records, and cuts, which show a topic, several, or the journal as they were at one instant.

    [1]  A read never returns a record that has expired at its one `now` (rule L8).
    [2]  A cut sees all column families between two commits (rule Q1).
    [3]  A cut holds files and memory back until it is closed.

Any thread may read. A cut is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, NamedTuple, Protocol

from sow_server.engine.catalog.topics import Topic, Topics, topic_deleted
from sow_server.engine.commit.expiry import OverdueCut, Sweep
from sow_server.engine.commit.passed_on import read_passed_on
from sow_server.engine.commit.publishers import decode as decode_publisher
from sow_server.engine.commit.soundness import SoundnessReports, is_utf8, readable
from sow_server.engine.commit.writer import Writer
from sow_server.engine.disk.layout import PREFIX_BYTES, REARM_KEY, indexed_keys, publisher_key
from sow_server.engine.disk.rocks import COMMITS, INDEXES, JOURNAL, META, RECORDS, Cursor, Rocks
from sow_server.engine.journal.reading import ChunkHeads, JournalCut, Ledger
from sow_server.engine.stored import EXPIRE_TIME, HeaderColumns, header_columns, i64, record_keys
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.fields import Steps
from sow_server.engine.values.model import NEVER

COUNT_CHUNK: Final = 1000
"""Records that are read at a time where they have to be counted one by one."""


Skipped = Callable[[Topic, Sequence[bytes], int], None]
"""Called with the keys that a read of a topic has skipped, and the time."""


@dataclass(frozen=True, slots=True)
class Cut:
    """All records of a topic at one instant. Close it ([3])."""

    topic: Topic
    now_micros: int
    sequence: int
    acts: bool
    records: Cursor
    indexes: Mapping[Steps, IndexCursor] = field(default_factory=dict)
    """The complete ones among the requested indexes (catalog/indexes [3]), by the steps of their paths."""
    total: Total | None = None
    """The number of records, if requested."""
    skipped: Skipped | None = None
    """Rows whose key cannot be put into a message are skipped, and reported here (soundness [2]). None: they are read,
    too."""

    def find(self, key: bytes) -> bytes | None:
        """The stored value of the live record of `key`."""
        if self.skipped is not None and not key.isascii() and not is_utf8(key):  # an index has named it
            self.skipped(self.topic, [key], self.now_micros)
            return None
        value = self.records.find(self.topic.prefix + key)
        if value is None or (self.acts and value[EXPIRE_TIME] <= i64(self.now_micros)):
            return None
        return value

    def fill(
        self,
        start: bytes,
        limit: int,
        keys: list[bytes],
        values: list[bytes],
        *,
        stop: bytes | None = None,
        headers: HeaderColumns | None = None,
    ) -> tuple[bytes | None, int]:
        """Reads the next `limit` stored records from the store key `start` on, up to `stop` (excluded; None: to the end
        of the topic), and appends the live ones, to `headers` too. A caller that needs the headers anyway gets them
        here, because they tell the live ones as well.

        Returns the store key to continue at (None at the end) and the number of stored records read.
        """
        found_keys: list[bytes] = []
        found: list[bytes] = []
        following = self.records.fill(start, stop or self.topic.stop, limit, found_keys, found)
        scanned = len(found_keys)
        columns = None if headers is None else header_columns(found)
        if self.acts and (columns is None or min(columns.expire_time, default=NEVER) <= self.now_micros):
            due = i64(self.now_micros)
            live = [value[EXPIRE_TIME] > due for value in found]
            if False in live:
                found_keys, found = list(compress(found_keys, live)), list(compress(found, live))
        told_keys = record_keys(found_keys)
        if self.skipped is not None and (told := readable(told_keys)) is not None:
            self.skipped(
                self.topic,
                [key for key, is_told in zip(told_keys, told, strict=True) if not is_told],
                self.now_micros,
            )
            told_keys, found = list(compress(told_keys, told)), list(compress(found, told))
        if headers is not None and columns is not None:
            for column, more in zip(headers, columns if len(found) == scanned else header_columns(found), strict=True):
                column.extend(more)
        keys += told_keys
        values += found
        return following, scanned

    def fill_values(
        self, start: bytes, limit: int, values: list[bytes], *, stop: bytes | None = None
    ) -> tuple[bytes | None, int]:
        """As `fill`, without the keys."""
        found: list[bytes] = []
        following, scanned = self.records.fill_values(start, stop or self.topic.stop, limit, found)
        if self.acts:
            due = i64(self.now_micros)
            found = [value for value in found if value[EXPIRE_TIME] > due]
        values += found
        return following, scanned

    def close(self) -> None:
        """Frees it."""
        self.records.close()
        for index in self.indexes.values():
            index.close()
        if self.total is not None:
            self.total.close()


Wanted = tuple[Topic, Collection[Steps]]
"""A topic to cut, and the paths of the indexes that are needed with it."""


class CutSource(Protocol):
    """Opens cuts: the store itself, or a process that follows it."""

    def together(self, wanted: Iterable[Wanted]) -> Sequence[Cut]:
        """The records of several topics at one instant, as `Cuts.together`."""

    def records(
        self,
        topic: Topic,
        index_paths: Collection[Steps] = (),
        *,
        counted: bool = False,
        unreadable: bool = False,
        reads_from: bytes | None = None,
    ) -> Cut:
        """The records of a topic, as `Cuts.records`. `reads_from`: all records from this key on will be read."""


class IndexCursor:
    """One index of a cut, complete as of the cut. Used by one thread at a time; the cut closes it."""

    __slots__ = ("_cursor", "_prefix")

    def __init__(self, prefix: bytes, cursor: Cursor) -> None:
        self._prefix = prefix
        self._cursor = cursor

    def fill(self, start: bytes, stop: bytes, limit: int, keys: list[bytes]) -> bytes | None:
        """Appends the record keys of the next `limit` entries from `start` to `stop` (excluded), as `indexes.interval`
        gives them, in their order; returns where to continue, None at the end.

        One record may have several entries in a range, or in several ranges. The records may be overdue.
        """
        entries: list[bytes] = []
        prefix = self._prefix
        following = self._cursor.fill_keys_before(prefix + start, prefix + stop, limit, entries)
        keys += indexed_keys(entries)
        return None if following is None else following[PREFIX_BYTES:]

    def close(self) -> None:
        """Frees the entries."""
        self._cursor.close()


class Counts(NamedTuple):
    """Records of a topic at one instant."""

    live: int
    overdue: int
    """Expired, and not yet swept."""


class Total:
    """The number of live records of a topic at one instant (rule L16): stored records minus overdue ones."""

    __slots__ = ("_cut", "_now", "_stored", "_sweep", "_topic")

    def __init__(self, topic: Topic, now_micros: int, cut: OverdueCut | Cut | None, sweep: Sweep) -> None:
        """Under the cut lock. `cut`: None where none is overdue, the records where the expiry index is incomplete."""
        self._topic = topic
        self._now = now_micros
        self._stored = topic.statistics.records
        self._cut = cut
        self._sweep = sweep

    def count(self) -> int:
        """The number; called once, and without the cut lock, because it may take a while."""
        if self._cut is None:
            return self._stored
        if isinstance(self._cut, Cut):
            return _count_live(self._cut)
        overdue = self._sweep.overdue(self._now, prefix=self._topic.prefix, at_most=self._stored, cut=self._cut)
        return max(0, self._stored - overdue.get(self._topic.id, 0))

    def close(self) -> None:
        """Frees it, whether it was counted or not."""
        if self._cut is not None:
            self._cut.close()


@dataclass(frozen=True, slots=True)
class ManyCut:
    """All records of several topics at one instant. They share a cursor: read one at a time, and close the whole."""

    now_micros: int
    sequence: int
    records: Cursor
    topics: tuple[Cut, ...]

    def close(self) -> None:
        """Frees the records."""
        self.records.close()


class Cuts:
    """Opens cuts, and reads single records."""

    def __init__(
        self, rocks: Rocks, clock: GuardedClock, topics: Topics, writer: Writer, unsound: SoundnessReports
    ) -> None:
        self._rocks = rocks
        self._clock = clock
        self._topics = topics
        self._writer = writer
        self._unsound = unsound

    def used(self, topic: Topic) -> None:
        """Notes a use of a topic (rule T1); opening a cut does so itself, unless stated otherwise."""
        topic.last_use_micros = self._clock.now_micros()

    def as_of(self, topic: Topic, now_micros: int) -> int:
        """The time at which nothing had expired that a topic shows: for a view before the next expiry of any record,
        which may be overdue and still in it (rule V5)."""
        return now_micros if topic.view is None else min(now_micros, self._writer.sweep.next_due - 1)

    # -- records ----------------------------------------------------------------------------------------------------

    def get(self, topic: Topic, keys: Sequence[bytes]) -> tuple[int, list[bytes | None]]:
        """The stored values of the live records of `keys`, None for those without one, and the `now` of the request,
        which is that of `as_of`."""
        now = topic.last_use_micros = self._clock.now_micros()
        if topic.view is not None:
            now = self.as_of(topic, now)
        # Before the values: were expiration disabled in between, an expired value would pass for a live one (rule L8).
        acts = topic.acts
        prefix = topic.prefix
        values = self._rocks.multi_get(RECORDS, [prefix + key for key in keys])
        if acts:
            due = i64(now)
            values = [value if value is not None and value[EXPIRE_TIME] > due else None for value in values]
        return now, values

    def each(self, topic: Topic, keys: Iterable[bytes]) -> tuple[int, Iterator[bytes | None]]:
        """As `get`, for a few keys: the values are read one by one, so a reader can stop after any of them. All are of
        one instant."""
        now = topic.last_use_micros = self._clock.now_micros()
        if topic.view is not None:
            now = self.as_of(topic, now)
        acts = topic.acts  # before the values, as above
        store_keys = list(map(topic.prefix.__add__, keys))
        due = i64(now)
        if len(store_keys) == 1:  # the usual get, without generators
            value = self._rocks.get(RECORDS, store_keys[0])
            return now, iter((value if value is not None and not (acts and value[EXPIRE_TIME] <= due) else None,))
        values = self._rocks.each(RECORDS, store_keys)
        if not acts:
            return now, values
        return now, (value if value is not None and value[EXPIRE_TIME] > due else None for value in values)

    def records(
        self,
        topic: Topic,
        index_paths: Collection[Steps] = (),
        *,
        counted: bool = False,
        unreadable: bool = False,
        reads_from: bytes | None = None,
    ) -> Cut:
        """The records of a topic, cut between two commits, with its complete indexes on `index_paths`. `counted`: with
        their total. `unreadable`: also the records whose key cannot be put into a message (soundness [2]). `reads_from`
        changes nothing here: a first row that comes from the disk would hold up the writer, which waits for the lock.
        """
        with self._writer.cut_lock:
            return self._cut(topic, index_paths, self._clock.now_micros(), counted=counted, unreadable=unreadable)

    def together(self, wanted: Iterable[Wanted]) -> Sequence[Cut]:
        """The records of several topics, cut between the same two commits and at one `now`, with their complete indexes
        on some paths. Each is closed by itself."""
        with self._writer.cut_lock:
            now = self._clock.now_micros()
            return [self._cut(topic, index_paths, now) for topic, index_paths in wanted]

    def _cut(
        self,
        topic: Topic,
        index_paths: Collection[Steps],
        now_micros: int,
        *,
        counted: bool = False,
        unreadable: bool = False,
    ) -> Cut:
        """Under the cut lock."""
        indexes: dict[Steps, IndexCursor] = {}
        if index_paths:
            indexes = {
                index.steps: IndexCursor(index.prefix, self._rocks.cursor(INDEXES))
                for index in topic.indexes.all
                if index.complete and index.steps in index_paths
            }
        topic.last_use_micros = now_micros
        now = now_micros if topic.view is None else self.as_of(topic, now_micros)
        return Cut(
            topic,
            now,
            self._writer.last_sequence,
            topic.acts,
            self._rocks.cursor(RECORDS),
            indexes,
            self._total(topic, now) if counted else None,
            None if unreadable else self._unsound.skip,
        )

    def many(
        self, choose: Callable[[Collection[Topic]], Sequence[Topic]], *, skipped: Skipped | None = None
    ) -> ManyCut:
        """The records of several topics, cut at one instant; `choose` picks them out of all, quickly. That does not
        count as a use of the topics. `skipped` is called, in place of `unsound`, with the keys that cannot be put into
        a message."""
        with self._writer.cut_lock:
            now, sequence, records = self._clock.now_micros(), self._writer.last_sequence, self._rocks.cursor(RECORDS)
            topics = choose(tuple(self._topics.by_id.values()))
            skips = skipped or self._unsound.skip
            cuts = [
                Cut(topic, self.as_of(topic, now), sequence, topic.acts, records, skipped=skips) for topic in topics
            ]
            return ManyCut(now, sequence, records, tuple(cuts))

    def publisher_position(self, publisher_id: str) -> tuple[int, int]:
        """(epoch, highest sequence) of a publisher, (0, 0) for an unknown one. Not from the event loop."""
        row = self._rocks.get(META, publisher_key(publisher_id))
        if row is None:
            return 0, 0
        known = decode_publisher(row)
        if known.has_passed_on:
            known = known._replace(passed_on=read_passed_on(self._rocks, publisher_id))
        return known.position()

    # -- the journal ------------------------------------------------------------------------------------------------

    def journal(self) -> JournalCut:
        """The journal, cut between two commits."""
        with self._writer.cut_lock:
            return self._journal_cut()

    def _journal_cut(self) -> JournalCut:
        return JournalCut(
            walk=self._rocks.cursor(JOURNAL, fill_cache=False),
            entries=self._rocks.cursor(JOURNAL),
            commits=self._rocks.cursor(COMMITS, fill_cache=False),
            floors={topic.id: topic.statistics.floor_sequence for topic in self._topics.by_id.values()},
        )

    def ledger(self, topic: Topic) -> Ledger:
        """The counts of a topic's journal, cut between two commits. Raises StoreError TOPIC_DELETED."""
        synced = self._writer.synced_sequence
        self.used(topic)
        with self._writer.cut_lock:
            if self._topics.by_id.get(topic.id) is not topic:
                raise topic_deleted(topic)
            return Ledger(self._journal_cut(), ChunkHeads(self._rocks), topic, topic.statistics, synced)

    # -- expiry -----------------------------------------------------------------------------------------------------

    def expiry(self, topics: Collection[Topic]) -> tuple[int, OverdueCut, frozenset[bytes]]:
        """The present time, and the expiry index with the records, cut between two commits, for some topics. And the
        prefixes of all topics whose index is still incomplete, because their expiration has just been enabled."""
        with self._writer.cut_lock:
            cut = self._writer.sweep.overdue_cut(topics)
            rows = self._rocks.cursor(META)
            try:
                rearming = frozenset([key[len(REARM_KEY) :] for key in rows.keys(REARM_KEY, REARM_KEY + b"\xff" * 5)])
            finally:
                rows.close()
            return self._clock.now_micros(), cut, rearming & cut.acting

    # -- numbers ----------------------------------------------------------------------------------------------------

    def count(self, topic: Topic) -> int:
        """Live records of a topic, now."""
        with self._writer.cut_lock:
            total = self._total(topic, self._clock.now_micros())
        return total.count()

    def _total(self, topic: Topic, now_micros: int) -> Total:
        """Under the cut lock: the cut shows the records that count as stored now and that the sweep removes later."""
        sweep = self._writer.sweep
        cut: OverdueCut | Cut | None = None
        if topic.acts and is_rearming(self._rocks, topic):
            # Its expiry index is not complete yet, so its records are read; this lasts for moments after enabling.
            cut = Cut(topic, now_micros, 0, acts=True, records=self._rocks.cursor(RECORDS, fill_cache=False))
        elif topic.acts and sweep.next_due <= now_micros:
            cut = sweep.overdue_cut([topic])
        return Total(topic, now_micros, cut, sweep)

    def counts(self, topics: Collection[Topic] | None = None, *, at_most: int = 2**62) -> dict[int, Counts]:
        """Live and overdue records of topics (None: of all), by topic id, as of one instant (rule L16). Overdue ones
        are counted in one pass until `at_most` are found; those that are not found count as live."""
        with self._writer.cut_lock:
            now, sweep = self._clock.now_micros(), self._writer.sweep
            chosen = tuple(self._topics.by_id.values()) if topics is None else topics
            stored = {topic.id: topic.statistics.records for topic in chosen}
            cut = sweep.overdue_cut(chosen) if sweep.next_due <= now else None
        overdue = {} if cut is None else sweep.overdue(now, at_most=at_most, cut=cut)
        return {
            topic: Counts(max(0, records - (hidden := overdue.get(topic, 0))), hidden)
            for topic, records in stored.items()
        }

    def overdue(self, *, at_most: int, entries_max: int) -> int:
        """Expired records of all topics that are not yet swept, counted until `at_most` are found, or `entries_max`
        entries of the expiry index have been read."""
        now = self._clock.now_micros()
        if self._writer.sweep.next_due > now:
            return 0
        return sum(self._writer.sweep.overdue(now, at_most=at_most, entries_max=entries_max).values())


def is_rearming(rocks: Rocks, topic: Topic) -> bool:
    """True if the topic's expiry index is still incomplete, because its expiration has just been enabled."""
    return rocks.get(META, REARM_KEY + topic.prefix) is not None


def _count_live(cut: Cut) -> int:
    """The live records of a cut, which it closes."""
    count = 0
    following: bytes | None = cut.topic.prefix
    try:
        while following is not None:
            values: list[bytes] = []
            following, _ = cut.fill(following, COUNT_CHUNK, [], values)
            count += len(values)
    finally:
        cut.close()
    return count
