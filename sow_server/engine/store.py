"""The store's only door: open, submit changes, read, administer topics, close.

    S-a  A read never returns a record that has expired at its one `now` (rule L8).
    S-b  A cut sees all column families between two commits (rule Q1).
    S-c  What is open is closed: cursors, column families, the lock on the directory.

Changes go through `submit` and the writer's thread; reads may come from any thread. Without `start` there is no
thread, and `run` does one request at a time in the caller's: start-up and the tests work that way.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Final, TypeVar

import structlog

from sow_server.engine import journal
from sow_server.engine.clock import ClockBehindError, GuardedClock
from sow_server.engine.codec import (
    FORMAT,
    HEADER_BYTES,
    StoredStatistics,
    decode_commit,
    decode_statistics,
    encode_statistics,
    i64,
    settings_from_json,
    settings_to_json,
    u32,
    unpack_i64,
)
from sow_server.engine.errors import OpenError, Reason, StoreError
from sow_server.engine.heads import HeadCache
from sow_server.engine.model import MICROS, NEVER, Delete, Outcome, Publish, TopicSettings, TopicStatistics, Touch
from sow_server.engine.mutations import Job
from sow_server.engine.payloads import BadRecord
from sow_server.engine.publishers import decode as decode_publisher
from sow_server.engine.rocks import (
    COMMITS,
    EXPIRY,
    FAMILIES,
    JOURNAL,
    META,
    RECORDS,
    Batch,
    Cursor,
    Damaged,
    Locked,
    Rocks,
    RocksError,
    RocksOptions,
    disk_bytes,
)
from sow_server.engine.stage import PUBLISHER_KEY, STATISTICS_KEY, Stage
from sow_server.engine.topics import DYNAMIC_SETTINGS, ONLY_WHILE_EMPTY, Topic, Topics, check_name, check_settings
from sow_server.engine.writer import (
    BOUNDS_KEY,
    CLOCK_KEY,
    Control,
    Deliver,
    NoObserver,
    Observer,
    Writer,
    WriterOptions,
)

log = structlog.get_logger(__name__)

TOPIC_KEY: Final = b"topic/"
REARM_KEY: Final = b"rearm/"
FORMAT_KEY: Final = b"format"
INSTANCE_KEY: Final = b"instance"
NEXT_TOPIC_KEY: Final = b"next_topic"
REARM_CHUNK: Final = 1000
PUBLISHERS_CHUNK: Final = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What the store may use, and how it behaves."""

    instance: str = "sow"
    dynamic_topics: bool = False
    head_cache_records: int = 400_000
    verify_at_start_bytes: int = 16 * 2**20
    publisher_ttl_micros: int = 7 * 86_400 * MICROS
    writer: WriterOptions = field(default_factory=WriterOptions)
    rocks: RocksOptions = field(default_factory=RocksOptions)


@dataclass(frozen=True, slots=True)
class Cut:
    """All records of a topic at one instant. Close it: it holds files and memory back."""

    topic: Topic
    now_micros: int
    sequence: int
    acts: bool
    records: Cursor

    def find(self, key: bytes) -> bytes | None:
        """The stored value of the live record of `key`."""
        value = self.records.find(self.topic.prefix + key)
        if value is None or (self.acts and value[24:32] <= i64(self.now_micros)):
            return None
        return value

    def fill(self, start: bytes, limit: int, keys: list[bytes], values: list[bytes]) -> tuple[bytes | None, int]:
        """Appends the live ones of the next `limit` stored records from the store key `start` on.

        Returns the store key to go on at (None: that was all) and the number of stored records read.
        """
        found_keys: list[bytes] = []
        found: list[bytes] = []
        following = self.records.fill(start, self.topic.stop, limit, found_keys, found)
        scanned = len(found_keys)
        if self.acts:
            due = i64(self.now_micros)
            live = [value[24:32] > due for value in found]
            if False in live:
                found_keys, found = list(compress(found_keys, live)), list(compress(found, live))
        keys += [key[4:] for key in found_keys]
        values += found
        return following, scanned

    def close(self) -> None:
        """Lets go of the records."""
        self.records.close()


class Store:
    """Owns the data directory: the database, the topics, the writer. Make one with `Store.open`."""

    def __init__(
        self, path: Path, rocks: Rocks, clock: GuardedClock, options: StoreOptions, observer: Observer
    ) -> None:
        """Use `Store.open`."""
        self._path = path
        self._rocks = rocks
        self._clock = clock
        self._options = options
        self.topics: Final = Topics()
        self.instance_id, self.epoch, self.origins = self._load_instance()
        self._load_topics()
        bounds = rocks.get(META, BOUNDS_KEY) or bytes(16)
        self.writer: Final = Writer(
            rocks,
            self.topics,
            clock,
            options=options.writer,
            origin=self.origins.index(options.instance),
            version_bound=unpack_i64(bounds[:8]),
            sequence_bound=unpack_i64(bounds[8:]),
            create_dynamic=self._create_dynamic if options.dynamic_topics else None,
            observer=observer,
            heads=HeadCache(options.head_cache_records),
        )
        self._threaded = False

    # -- opening and closing ----------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock: GuardedClock | None = None,
        options: StoreOptions | None = None,
        observer: Observer | None = None,
        accept_clock: bool = False,
    ) -> Store:
        """Opens, or makes, the store in the directory `path`. Raises OpenError with one clear message."""
        options = options or StoreOptions()
        clock = clock or GuardedClock()
        database = path / "db"
        marker = path / "SOW"
        try:
            path.mkdir(parents=True, exist_ok=True)
            create = not marker.exists()
            if create and database.exists() and any(database.glob("*.sst")):
                raise OpenError(f"{path}: the file SOW is missing, but there is data; restore it from a backup")
            if create and (database / "CURRENT").exists():
                create = False  # made, but killed before it was marked
            rocks = Rocks(database, options.rocks, create=create)
        except Locked:
            raise OpenError(f"{path}: another sow-server is using this data directory") from None
        except Damaged as error:
            raise OpenError(f"{path}: the data is damaged ({error}); restore it from a backup or a replica") from error
        except (RocksError, OSError) as error:
            raise OpenError(f"{path}: cannot be opened ({error})") from error
        try:
            if create:
                _initialise(rocks, options.instance)
            _check_format(rocks, path, options.instance)
            if not marker.exists():
                _mark(marker)
            if rocks.table_bytes() <= options.verify_at_start_bytes:
                rocks.verify()
            clock.start(_high_water(rocks), accept=accept_clock)
            return cls(path, rocks, clock, options, observer or NoObserver())
        except Damaged as error:
            rocks.close()
            raise OpenError(f"{path}: the data is damaged ({error}); restore it from a backup or a replica") from error
        except ClockBehindError as error:
            rocks.close()
            raise OpenError(f"{path}: {error}") from error
        except BaseException:
            rocks.close()
            raise

    def start(self, deliver: Deliver) -> None:
        """Expires what fell due while the store was closed, as far as that is quick (rule L11), and starts the writer's
        thread; answers go through `deliver`."""
        if not self._clock.paused:
            self.writer.sweep_now(entries_max=10_000)
        self._threaded = True
        self.writer.start(deliver)
        self._resume_rearming()

    def close(self) -> None:
        """Finishes what is queued, syncs, and frees the directory."""
        self.writer.stop()
        if self.writer.failure is None:
            # The next start then has no log to replay. Nothing depends on it: what is acknowledged is in the log.
            with contextlib.suppress(RocksError):
                self._rocks.flush()
        self._rocks.close()

    def _load_instance(self) -> tuple[str, str, tuple[str, ...]]:
        """(id, journal epoch, names of the instances that wrote records: a record's `origin` is an index into them)."""
        row = self._rocks.get(META, INSTANCE_KEY)
        assert row is not None, "_initialise has written it"
        instance = json.loads(row)
        origins: list[str] = instance["origins"]
        if self._options.instance not in origins:
            origins.append(self._options.instance)
            batch = Batch()
            batch.puts[META][INSTANCE_KEY] = json.dumps({**instance, "origins": origins}).encode()
            self._rocks.write(batch)
            self._rocks.sync()
        return instance["id"], instance["epoch"], tuple(origins)

    def _load_topics(self) -> None:
        rows = self._rocks.cursor(META)
        try:
            found = list(rows.rows(TOPIC_KEY, TOPIC_KEY + b"\xff"))
        finally:
            rows.close()
        for key, value in found:
            fields = json.loads(value)
            figures = self._rocks.get(META, STATISTICS_KEY + key[len(TOPIC_KEY) :])
            self.topics.add(
                Topic(
                    int.from_bytes(key[len(TOPIC_KEY) :], "big"),
                    fields["name"],
                    settings_from_json(fields["settings"]),
                    in_config=fields["in_config"],
                    create_time_micros=fields["create_time_micros"],
                    statistics=decode_statistics(figures) if figures else StoredStatistics(),
                )
            )

    # -- changing ---------------------------------------------------------------------------------------------------

    def submit(self, request: Publish | Touch | Delete, done: Callable[[Outcome | StoreError], None]) -> None:
        """Queues a change; `done` hears its outcome once it is as durable as asked. Raises StoreError at once when the
        request cannot be queued."""
        self.writer.submit(Job(request, done))

    def run(self, request: Publish | Touch | Delete) -> Outcome:
        """Without the thread: does a change now. Raises StoreError."""
        answers: list[Outcome | StoreError] = []
        self.submit(request, answers.append)
        self.writer.step()
        if isinstance(answers[0], StoreError):
            raise answers[0]
        return answers[0]

    def sweep(self) -> int:
        """Without the thread: expires what is due. Returns the index entries visited."""
        return 0 if self._clock.paused else self.writer.sweep_now()

    def _control(
        self,
        run: Callable[[Stage], Callable[[], T]],
        done: Callable[[T | StoreError], None],
        *,
        sweep_first: bool = False,
    ) -> None:
        def answered(result: object) -> None:
            done(result)  # type: ignore[arg-type]  # what `run` returned, or a StoreError

        self.writer.submit(Control(run, answered, sweep_first=sweep_first))

    # -- reading ----------------------------------------------------------------------------------------------------

    def get(self, topic: Topic, keys: Sequence[bytes]) -> tuple[int, list[bytes | None]]:
        """The stored values of the live records of `keys`, None for those without one, and the `now` of the request."""
        now = self._clock.now_micros()
        # Before the values: were expiration disabled in between, an expired value would pass for a live one (rule L8).
        acts = topic.acts
        prefix = topic.prefix
        values = self._rocks.multi_get(RECORDS, [prefix + key for key in keys])
        if acts:
            due = i64(now)
            values = [value if value is not None and value[24:32] > due else None for value in values]
        return now, values

    def key_of(self, topic: Topic, payload: bytes) -> bytes:
        """The record key that a topic's key fields give a payload. Raises StoreError."""
        if topic.derive_keys is None:
            raise StoreError(
                Reason.KEY_REQUIRED,
                f"payload: topic {topic.name} has no key fields to derive a key from",
                field="by_payload",
            )
        key = topic.derive_keys([payload])[0]
        if isinstance(key, BadRecord):
            raise StoreError(key.reason, key.message, field="by_payload")
        return key

    def cut(self, topic: Topic) -> Cut:
        """The records of a topic, cut between two commits."""
        with self.writer.cut_lock:
            return Cut(
                topic,
                self._clock.now_micros(),
                self.writer.last_sequence,
                topic.acts,
                self._rocks.cursor(RECORDS),
            )

    def bookmark(self, sequence: int) -> str:
        """A position in this store's journal, as clients see it (rule J14)."""
        return f"{self.epoch}.{sequence}"

    def count(self, topic: Topic) -> int:
        """Live records of a topic: those stored, less the overdue ones (rule L16)."""
        with self.writer.cut_lock:
            stored, now = topic.statistics.records, self._clock.now_micros()
            if not topic.acts:
                return stored
            if self._rocks.get(META, REARM_KEY + topic.prefix) is not None:
                # Its expiry index is not complete yet, so its records are asked; this lasts for moments after enabling.
                return _count_live(Cut(topic, now, 0, acts=True, records=self._rocks.cursor(RECORDS, fill_cache=False)))
            if self.writer.sweep.next_due > now:
                return stored
            # Of the same instant as `stored`: what the sweep removes from here on must still be subtracted.
            cut = self.writer.sweep.overdue_cut()
        overdue = self.writer.sweep.overdue(now, prefix=topic.prefix, at_most=stored, cut=cut)
        return max(0, stored - overdue.get(topic.id, 0))

    def overdue(self, topic: Topic | None = None) -> int:
        """Expired records that are not yet swept, of one topic or of all."""
        counts = self.overdue_by_topic()
        return sum(counts.values()) if topic is None else counts.get(topic.id, 0)

    def overdue_by_topic(self, *, at_most: int = 2**62) -> dict[int, int]:
        """Expired records that are not yet swept, by topic id, counted in one pass until `at_most` are found."""
        now = self._clock.now_micros()
        if self.writer.sweep.next_due > now:
            return {}
        return self.writer.sweep.overdue(now, at_most=at_most)

    def statistics(self, topic: Topic) -> TopicStatistics:
        """Figures of a topic."""
        figures = topic.statistics
        return TopicStatistics(
            figures.records,
            figures.record_bytes,
            figures.journal_bytes,
            figures.journal_entries,
            max(figures.floor_sequence, figures.created_sequence),
        )

    def publisher_position(self, publisher_id: str) -> tuple[int, int]:
        """(epoch, highest sequence) of a publisher, (0, 0) for one that is not known."""
        row = self._rocks.get(META, PUBLISHER_KEY + publisher_id.encode())
        if row is None:
            return 0, 0
        publisher = decode_publisher(row)
        return publisher.epoch, publisher.highest_sequence

    def read_journal(self, topic: Topic, after: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """The journal rows of a topic whose chunk begins after `after`; for checks and, later, for its readers."""
        cursor = self._rocks.cursor(JOURNAL)
        try:
            yield from cursor.rows(topic.prefix + i64(after + 1), topic.stop)
        finally:
            cursor.close()

    def disk_bytes(self) -> int:
        """Bytes of the data directory."""
        return disk_bytes(self._path)

    def write_stalled(self) -> bool:
        """Whether RocksDB is slowing writes down now."""
        return self._rocks.write_stalled()

    # -- topics -----------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        settings: TopicSettings,
        done: Callable[[Topic | StoreError], None],
        *,
        in_config: bool = False,
    ) -> None:
        """Creates a topic. TOPIC_NAME_INVALID, TOPIC_EXISTS, INVALID_ARGUMENT."""
        self._control(lambda stage: self._stage_create(stage, name, settings, in_config=in_config), done)

    def _create_dynamic(self, name: str) -> Control:
        return Control(
            lambda stage: self._stage_create(stage, name, DYNAMIC_SETTINGS, in_config=False), lambda result: None
        )

    def _stage_create(
        self, stage: Stage, name: str, settings: TopicSettings, *, in_config: bool
    ) -> Callable[[], Topic]:
        check_name(name)
        if name in self.topics.by_name:
            raise StoreError(Reason.TOPIC_EXISTS, f"topic: {name} exists already", field="name")
        check_settings(settings)
        topic_id = int.from_bytes(self._rocks.get(META, NEXT_TOPIC_KEY) or u32(1), "big")
        topic = Topic(
            topic_id,
            name,
            settings,
            in_config=in_config,
            create_time_micros=stage.now,
            statistics=StoredStatistics(created_sequence=stage.next_sequence - 1),
        )
        meta = stage.batch.puts[META]
        meta[NEXT_TOPIC_KEY] = u32(topic_id + 1)
        meta[TOPIC_KEY + topic.prefix] = _encode_topic(topic, settings, in_config=in_config)
        meta[STATISTICS_KEY + topic.prefix] = encode_statistics(topic.statistics)

        def after() -> Topic:
            self.topics.add(topic)
            return topic

        return after

    def alter_topic(
        self,
        name: str,
        change: Callable[[TopicSettings], TopicSettings],
        done: Callable[[Topic | StoreError], None],
        *,
        in_config: bool = False,
    ) -> None:
        """Changes settings; stamps never change (rule L12). Disabling expiration first expires what is overdue, in the
        same commit. SET_IN_CONFIG unless `in_config`, TOPIC_NOT_FOUND, TOPIC_NOT_EMPTY, INVALID_ARGUMENT."""

        def stage_alter(stage: Stage) -> Callable[[], Topic]:
            topic = self._alterable(name, in_config=in_config)
            settings = change(topic.settings)
            check_settings(settings)
            for name_of_setting in ONLY_WHILE_EMPTY:
                if getattr(settings, name_of_setting) != getattr(topic.settings, name_of_setting) and self.count(topic):
                    raise StoreError(
                        Reason.TOPIC_NOT_EMPTY,
                        f"{name_of_setting}: changes only while the topic is empty",
                        field=f"settings.{name_of_setting}",
                    )
            meta = stage.batch.puts[META]
            disables = topic.acts and not settings.acts_on_expiration
            enables = settings.acts_on_expiration and not topic.acts
            if disables:
                self.writer.sweep.stage(stage, 2**31)
                stage.batch.deletes[META].append(REARM_KEY + topic.prefix)
            if settings.journal != topic.settings.journal:
                # What is not journaled is as good as discarded: nobody may read across the gap (rule J1).
                stage.chunks = [chunk for chunk in stage.chunks if chunk.topic is not topic]
                stage.batch.ranges.append((JOURNAL, topic.prefix, topic.stop))
                stage.statistics[topic.id] = stage.figures(topic)._replace(
                    journal_entries=0, journal_bytes=0, floor_sequence=stage.next_sequence - 1
                )
            if enables:
                meta[REARM_KEY + topic.prefix] = topic.prefix
            meta[TOPIC_KEY + topic.prefix] = _encode_topic(topic, settings, in_config=in_config)

            def after() -> Topic:
                if disables:
                    self.writer.sweep.swept(stage)
                topic.apply(settings)
                topic.in_config = in_config
                if enables:
                    self._rearm(topic)
                return topic

            return after

        self._control(stage_alter, done, sweep_first=True)

    def delete_topic(self, name: str, done: Callable[[int | StoreError], None]) -> None:
        """Deletes a topic with its records and journal; answers how many live records it had. Its id is never used
        again, so what is left in the expiry index is dropped by the sweep."""

        def stage_delete(stage: Stage) -> Callable[[], int]:
            topic = self._alterable(name, in_config=False)
            live = self.count(topic)
            stage.batch.ranges += [
                (RECORDS, topic.prefix, topic.stop),
                (JOURNAL, topic.prefix, topic.stop),
            ]
            stage.batch.deletes[META] += [
                TOPIC_KEY + topic.prefix,
                STATISTICS_KEY + topic.prefix,
                REARM_KEY + topic.prefix,
            ]

            def after() -> int:
                self.topics.remove(topic)
                return live

            return after

        self._control(stage_delete, done)

    def release_topic(self, name: str, done: Callable[[Topic | StoreError], None]) -> None:
        """A topic that has left the configuration file stays, as if an administrator had created it (rule K1)."""

        def stage_release(stage: Stage) -> Callable[[], Topic]:
            topic = self.topics.find(name)
            stage.batch.puts[META][TOPIC_KEY + topic.prefix] = _encode_topic(topic, topic.settings, in_config=False)

            def after() -> Topic:
                topic.in_config = False
                return topic

            return after

        self._control(stage_release, done)

    def _alterable(self, name: str, *, in_config: bool) -> Topic:
        topic = self.topics.find(name)
        if topic.in_config and not in_config:
            raise StoreError(
                Reason.SET_IN_CONFIG,
                f"topic: {name} is declared in the configuration file; change it there",
                field="name",
            )
        return topic

    def _resume_rearming(self) -> None:
        rows = self._rocks.cursor(META)
        try:
            pending = [key[len(REARM_KEY) :] for key in rows.keys(REARM_KEY, REARM_KEY + b"\xff")]
        finally:
            rows.close()
        for prefix in pending:
            topic = self.topics.by_id.get(int.from_bytes(prefix, "big"))
            if topic is not None:
                self._rearm(topic)

    def _rearm(self, topic: Topic) -> None:
        """Puts the expiry entries of a topic whose expiration has been enabled, chunk by chunk; the position is stored,
        so that a restart goes on. Until then L8 holds all the same: reads judge by the stamp, not by the index."""

        def stage_chunk(stage: Stage) -> Callable[[], bool]:
            row = REARM_KEY + topic.prefix
            start = self._rocks.get(META, row)
            if start is None or topic.name not in self.topics.by_name:
                return lambda: False
            keys: list[bytes] = []
            values: list[bytes] = []
            cursor = self._rocks.cursor(RECORDS, fill_cache=False)
            try:
                following = cursor.fill(start, topic.stop, REARM_CHUNK, keys, values)
            finally:
                cursor.close()
            for key, value in zip(keys, values, strict=True):
                expire_time = unpack_i64(value[24:32])
                if expire_time != NEVER:
                    stage.arm(expire_time, key)
            if following is None:
                stage.batch.deletes[META].append(row)
            else:
                stage.batch.puts[META][row] = following
            return lambda: following is not None

        def chunk_done(more: bool | StoreError) -> None:
            if more is True:
                self._control_quietly(stage_chunk, chunk_done)

        self._control_quietly(stage_chunk, chunk_done)

    def _control_quietly(self, run: Callable[[Stage], Callable[[], T]], done: Callable[[T | StoreError], None]) -> None:
        # Background work: while the store is stopping, failed or overloaded it is simply not done; the next tick or
        # the next start takes it up again.
        with contextlib.suppress(StoreError):
            self._control(run, done)

    # -- upkeep, driven by timers -----------------------------------------------------------------------------------

    def prune(self, done: Callable[[bool | StoreError], None]) -> None:
        """One bounded step of journal pruning, for every topic; answers whether there may be more (rules J3, J11)."""

        def stage_prune(stage: Stage) -> Callable[[], bool]:
            more = False
            for topic in self.topics.by_id.values():
                figures, unfinished = journal.prune(self._rocks, topic, stage.now, stage.batch)
                more = more or unfinished
                if figures != topic.statistics:
                    stage.statistics[topic.id] = figures
            return lambda: more

        def pruned(more: bool | StoreError) -> None:
            if more is False:
                self._control_quietly(stage_commits, lambda _: None)
            done(more)

        def stage_commits(stage: Stage) -> Callable[[], None]:
            journal.prune_commits(self._rocks, self.topics.by_id, stage.batch, stage.next_sequence - 1)
            return lambda: None

        self._control(stage_prune, pruned)

    def forget_publishers(self) -> None:
        """Removes the rows of publishers that have been idle for `publisher_ttl` (rule P6), up to a bound a call."""

        def stage_forget(stage: Stage) -> Callable[[], None]:
            forgotten: list[bytes] = []
            rows = self._rocks.cursor(META, fill_cache=False)
            cut = stage.now - self._options.publisher_ttl_micros
            try:
                for key, value in rows.rows(PUBLISHER_KEY, PUBLISHER_KEY + b"\xff"):
                    if decode_publisher(value).last_use_micros <= cut:
                        forgotten.append(key)
                        if len(forgotten) == PUBLISHERS_CHUNK:
                            break
            finally:
                rows.close()
            stage.batch.deletes[META] += forgotten

            def after() -> None:
                for key in forgotten:
                    self.writer.publishers.forget(key[len(PUBLISHER_KEY) :].decode())

            return after

        self._control_quietly(stage_forget, lambda _: None)

    def mark_clock(self) -> None:
        """Persists the clock's high-water mark (rule L15)."""

        def stage_mark(stage: Stage) -> Callable[[], None]:
            stage.batch.puts[META][CLOCK_KEY] = i64(stage.now)
            return lambda: None

        self._control_quietly(stage_mark, lambda _: None)

    def compact(self) -> None:
        """Compacts everything; long, and without the GIL. Not from the event loop."""
        for family in FAMILIES:
            self._rocks.compact(family)

    def compact_swept(self) -> None:
        """Compacts the expiry index behind the floor: a head full of tombstones is slow to scan, at the next start."""
        floor = self.writer.sweep.floor
        if floor:
            self._rocks.compact(EXPIRY, None, floor)

    def scrub(self, pause: Callable[[], bool]) -> None:
        """Reads everything once, after a start that did not (too large); damage ends writing (rule X3).

        `pause` is called between chunks; it paces the scrub and answers False to end it. Not from the event loop.
        """
        try:
            for family in FAMILIES:
                start = b""
                cursor = self._rocks.cursor(family, fill_cache=False)
                try:
                    while pause():
                        keys = list(cursor.keys(start, None, limit=1000))
                        if not keys:
                            break
                        start = keys[-1] + b"\0"
                    else:
                        return
                finally:
                    cursor.close()
        except Damaged as error:
            self.writer.fail(StoreError(Reason.DATA_DAMAGED, f"stored data is damaged: {error}"))

    @property
    def verified_at_start(self) -> bool:
        """Whether opening has read everything, so that no scrub is needed."""
        return self._rocks.table_bytes() <= self._options.verify_at_start_bytes


def _count_live(cut: Cut) -> int:
    """The live records of a cut, which it closes."""
    count = 0
    following: bytes | None = cut.topic.prefix
    try:
        while following is not None:
            values: list[bytes] = []
            following, _ = cut.fill(following, REARM_CHUNK, [], values)
            count += len(values)
    finally:
        cut.close()
    return count


def payload_of(value: bytes) -> bytes:
    """The payload of a stored value."""
    return value[HEADER_BYTES:]


def _encode_topic(topic: Topic, settings: TopicSettings, *, in_config: bool) -> bytes:
    return json.dumps(
        {
            "name": topic.name,
            "in_config": in_config,
            "create_time_micros": topic.create_time_micros,
            "settings": settings_to_json(settings),
        }
    ).encode()


def _initialise(rocks: Rocks, instance: str) -> None:
    batch = Batch()
    batch.puts[META] = {
        FORMAT_KEY: u32(FORMAT),
        INSTANCE_KEY: json.dumps(
            {"id": uuid.uuid4().hex, "epoch": uuid.uuid4().hex[:12], "origins": [instance]}
        ).encode(),
    }
    rocks.write(batch)
    rocks.sync()


def _check_format(rocks: Rocks, path: Path, instance: str) -> None:
    found = rocks.get(META, FORMAT_KEY)
    if found is None:
        # Killed between making the database and its first row: there is nothing in it yet.
        if any(_first_key(rocks, family) for family in FAMILIES):
            raise OpenError(f"{path}: this is no sow data, or its format is missing")
        _initialise(rocks, instance)
    elif found != u32(FORMAT):
        raise OpenError(
            f"{path}: the data has format {int.from_bytes(found, 'big')}, this version of sow reads format {FORMAT}"
        )


def _first_key(rocks: Rocks, family: str) -> bytes | None:
    cursor = rocks.cursor(family)
    try:
        return next(cursor.keys(b"", None, limit=1), None)
    finally:
        cursor.close()


def _mark(marker: Path) -> None:
    """Writes the file that says that there is data: without it an emptied directory would be taken for a new one."""
    temporary = marker.with_suffix(".new")
    with temporary.open("w") as file:
        file.write(f"sow data, format {FORMAT}, made {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(marker)
    directory = os.open(marker.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _high_water(rocks: Rocks) -> int:
    """The latest time that the data has seen: the clock's mark, or the last commit's time."""
    mark = unpack_i64(rocks.get(META, CLOCK_KEY) or bytes(8))
    commits = rocks.cursor(COMMITS)
    try:
        last = commits.last()
    finally:
        commits.close()
    return max(mark, decode_commit(*last).commit_time_micros if last else 0)
