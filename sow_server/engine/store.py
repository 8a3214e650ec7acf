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
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from sow_server.engine.catalog.indexes import NO_INDEXES, Index, Indexes, altered, entry_keys
from sow_server.engine.catalog.topics import (
    ONLY_WHILE_EMPTY,
    UNDELIVERED,
    UNDELIVERED_ID,
    Topic,
    Topics,
    check_name,
    check_settings,
)
from sow_server.engine.commit import dead_letters, letters, tombstones
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.origins import Origins
from sow_server.engine.commit.publishers import decode as decode_publisher
from sow_server.engine.commit.reclaim import deserving
from sow_server.engine.commit.requests import Job, Limits, payload_key
from sow_server.engine.commit.soundness import Reports
from sow_server.engine.commit.steps import StagedBy, Step
from sow_server.engine.commit.writer import Deliver, NoObserver, Observer, Writer, WriterOptions
from sow_server.engine.disk import backups
from sow_server.engine.disk.heads import HeadCache
from sow_server.engine.disk.layout import (
    ACCEPTED_KEY,
    BOUNDS_KEY,
    CLOCK_KEY,
    DELIVER_KEY,
    EXPIRE_TIME,
    FORMAT,
    FORMAT_KEY,
    INDEX_KEY,
    INSTANCE_KEY,
    MADE_ORDER,
    NEXT_TOPIC_KEY,
    OPERATOR_POLICY_KEY,
    PAYLOAD,
    POLICY_KEY,
    PUBLISHER_KEY,
    REARM_KEY,
    RECORD_KEY,
    STATISTICS_KEY,
    TOPIC_KEY,
    Commit,
    StoredStatistics,
    decode_bounds,
    decode_commit,
    decode_statistics,
    encode_statistics,
    i64,
    index_prefix,
    policy_key,
    settings_from_json,
    settings_to_json,
    u32,
    unpack_i64,
)
from sow_server.engine.disk.mark import MARK, Bounds, Differs, LogsMissing, Mark, Marker, check
from sow_server.engine.disk.mark import load as load_mark
from sow_server.engine.disk.mark import save as save_mark
from sow_server.engine.disk.rocks import (
    COMMITS,
    EXPIRY,
    FAMILIES,
    INDEXES,
    JOURNAL,
    META,
    RECORDS,
    TOMBSTONES,
    Batch,
    Claim,
    Damaged,
    Locked,
    Rocks,
    RocksError,
    RocksOptions,
    disk_bytes,
    first_log_needed,
)
from sow_server.engine.durables import Durable, DurableEditor, DurableFigures, Durables, prune_topic
from sow_server.engine.formats.payloads import index_paths
from sow_server.engine.journal.reading import ChunkHeads, JournalCut, Ledger
from sow_server.engine.journal.retention import prune_commits
from sow_server.engine.loads import removal_marks
from sow_server.engine.loads.loads import LoadOptions, Loads
from sow_server.engine.losses import settle
from sow_server.engine.reading import Cut, Cuts, ManyCut, Skipped, is_rearming
from sow_server.engine.replicas.replicas import MADE_END, ReplicaOptions, Replicas
from sow_server.engine.values.clock import ClockBehindError, GuardedClock
from sow_server.engine.values.errors import OpenError, Reason, StoreError
from sow_server.engine.values.fields import Steps
from sow_server.engine.values.model import (
    MICROS,
    NEVER,
    OnMissing,
    OpenedPublisher,
    Outcome,
    Request,
    TopicSettings,
    TopicStatistics,
)
from sow_server.engine.values.policies import (
    NOTHING,
    Declared,
    Effective,
    Policies,
    Policy,
    PolicyTarget,
    check_policy,
    declared_from_json,
    declared_of,
    declared_to_json,
    decode_policy,
    durable_origins,
    encode_policy,
    resolve_topic,
    tidy,
)

log = structlog.get_logger(__name__)

REARM_CHUNK: Final = 1000
REARM_ROUND: Final = 10_000
"""Expiry entries after which a commit takes no further topic that is to be disabled while it is re-armed."""
INDEX_CHUNK: Final = 1000
LETTERS_CHUNK: Final = 250
PRUNE_TOPICS: Final = 100
"""Topics that one step of pruning looks at, most of which cost no read."""
PRUNE_READS: Final = 32
"""Topics that one step of pruning reads, so that it never holds publishers up for long."""
PUBLISHERS_CHUNK: Final = 1000
RECLAIM_BYTES: Final = 128 * 2**20
"""Table files that one part of a compaction is about: seconds, for which a stop has to wait."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What the store may use, and how it behaves."""

    instance: str = "sow"
    dynamic_topics: bool = False
    head_cache_records: int = 400_000
    verify_at_start_bytes: int = 16 * 2**20
    publisher_ttl_micros: int = 7 * 86_400 * MICROS
    defaults: Declared = field(default_factory=lambda: NOTHING)
    """Settings of topics that neither they nor a policy declare (rule T2)."""
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)
    loads: LoadOptions = field(default_factory=LoadOptions)
    writer: WriterOptions = field(default_factory=WriterOptions)
    rocks: RocksOptions = field(default_factory=RocksOptions)


class Store:
    """Owns the data directory: the database, the topics, the writer. Make one with `Store.open`."""

    def __init__(
        self,
        path: Path,
        rocks: Rocks,
        clock: GuardedClock,
        options: StoreOptions,
        observer: Observer,
        marker: Marker,
    ) -> None:
        """Use `Store.open`."""
        self._path = path
        self._marker = marker
        self._marking_failed = False
        self._rocks = rocks
        self._clock = clock
        self._options = options
        self.topics: Final = Topics()
        self.instance_id, self.epoch, names, own, self.authoritative = self._load_instance()
        """`authoritative`: the data of this epoch were restored, and are to be taken as they are (rule J14)."""
        self.origins: Final = Origins(rocks, names, own)
        self._backing_up = threading.Lock()
        self.policies = self._load_policies()
        """Replaced by the writer thread, after the commit that stored the change."""
        self.unsound: Final = Reports()
        bounds = decode_bounds(rocks.get(META, BOUNDS_KEY))
        self.writer: Final = Writer(
            rocks,
            self.topics,
            clock,
            options=options.writer,
            origin=own,
            version_bound=bounds.version,
            sequence_bound=bounds.sequence,
            create_dynamic=self._create_dynamic if options.dynamic_topics else None,
            topic_row=_topic_row,
            removal_hooks=(removal_marks.on_removed, tombstones.on_removed, letters.on_removed),
            observer=observer,
            heads=HeadCache(options.head_cache_records),
        )
        self.commits: Final = Commits(self.writer)
        self.cuts: Final = Cuts(rocks, clock, self.topics, self.writer, self.unsound)
        self.replicas: Final = Replicas(
            rocks,
            path,
            options.replicas,
            commits=self.commits,
            topics=self.topics,
            cuts=self.cuts,
            origins=self.origins,
            unsound=self.unsound,
            limits=options.writer.limits,
        )
        self.durables: Final = Durables(rocks, lambda: self.policies, self.replicas.held, self.topics.lost)
        self._load_topics()
        self.loads: Final = Loads(
            rocks,
            clock,
            options.loads,
            commits=self.commits,
            topics=self.topics,
            epoch=self.epoch,
            create_topic=self.create_dynamic if options.dynamic_topics else None,
        )
        self._threaded = False
        self._work_begun = False
        self._pruned_to = 0
        """The topic that the last step of pruning ended with; 0: the next step begins at the first."""
        self._first_kept: dict[int, int] = {}
        """By topic: the first sequence that it retains, as this round of pruning has found it."""
        self.created: Callable[[Topic], None] = lambda topic: None
        """Hears of a new topic before anybody can publish to it: on the writer's thread, under the cut lock."""

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
        accept_loss: bool = False,
        authoritative: bool = False,
    ) -> Store:
        """Opens, or makes, the store in the directory `path`. A backup becomes an instance of its own there (rule J14);
        `authoritative`: one whose data peers take as they are. `accept_loss`: goes on where the end of the log is
        missing (rule X4). Raises OpenError with one clear message."""
        options = options or StoreOptions()
        clock = clock or GuardedClock()
        database = path / backups.DATABASE
        marker = path / backups.MARKER
        claim: Claim | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            claim = Claim(path)
            create = not marker.exists()
            marked = load_mark(path)
            if create and (marked is not None or (database.exists() and any(_tables_and_logs(database)))):
                raise OpenError(f"{path}: the file SOW is missing, but there is data; restore it from a backup")
            if create and (database / "CURRENT").exists():
                create = False  # made, but killed before it was marked
            if marked is not None:
                marked = _held_against_mark(path, marked, accept_loss=accept_loss)
            elif (path / MARK).exists():
                log.warning("mark_unreadable", data_dir=str(path), effect="whether all is there cannot be told")
            rocks = Rocks(database, options.rocks, create=create, claim=claim)
            claim = None
        except Locked:
            raise OpenError(f"{path}: another sow-server is using this data directory") from None
        except Damaged as error:
            raise OpenError(f"{path}: the data is damaged ({error}); restore it from a backup or a replica") from error
        except (RocksError, OSError) as error:
            raise OpenError(f"{path}: cannot be opened ({error})") from error
        finally:
            if claim is not None:
                claim.release()
        try:
            if create:
                _initialise(rocks)
            _check_format(rocks, path)
            if not marker.exists():
                _mark(marker)
            backups.remove_unfinished(path)
            if rocks.table_bytes() <= options.verify_at_start_bytes:
                rocks.verify()
            if marked is not None and marked.accepted_after is not None:
                settle(rocks, marked.bounds, _new_identity())
            if backups.is_backup(path):
                _restore(rocks, path, authoritative=authoritative)
            elif authoritative and not _instance(rocks).get("authoritative", False):
                raise OpenError(
                    f"{path}: --authoritative is for the first start on a backup, and this is none; restore it again, "
                    "or leave the option out"
                )
            clock.start(_high_water(rocks), accept=accept_clock)
            if accept_clock:
                _accept_clock(rocks, clock.now_micros())
            store = cls(path, rocks, clock, options, observer or NoObserver(), Marker(path, marked))
            store._resolve_at_open()
            store._write_mark()
            return store
        except Damaged as error:
            rocks.close()
            raise OpenError(f"{path}: the data is damaged ({error}); restore it from a backup or a replica") from error
        except (RocksError, OSError) as error:
            rocks.close()
            raise OpenError(f"{path}: cannot be opened ({error})") from error
        except ClockBehindError as error:
            rocks.close()
            raise OpenError(f"{path}: {error}") from error
        except BaseException:
            rocks.close()
            raise

    @property
    def limits(self) -> Limits:
        """Of records and requests (rule K8)."""
        return self._options.writer.limits

    def start(self, deliver: Deliver) -> None:
        """Expires what fell due while the store was closed, as far as that is quick (rule L11), and starts the writer's
        thread; answers go through `deliver`."""
        if not self._clock.paused:
            self.writer.sweep_now(entries_max=10_000)
        self._threaded = True
        self.writer.start(deliver)
        self._resume_work()

    def close(self) -> None:
        """Finishes what is queued, syncs, and frees the directory."""
        self.writer.stop()
        if self.writer.failure is None:
            # The next start then has no log to replay. Nothing depends on it: what is acknowledged is in the log.
            with contextlib.suppress(RocksError):
                self._rocks.flush()
        self.keep_mark()
        self._rocks.close()

    def keep_mark(self) -> None:
        """Writes down, outside of the database, what of it is on disk (rule X4): once a second, and not from the event
        loop, as it syncs."""
        try:
            self._write_mark()
        except (OSError, ValueError) as error:  # the latter: somebody has changed a file under the database
            if not self._marking_failed:
                self._marking_failed = True
                log.error("mark_failed", cause=str(error), effect="a loss at the end of the log may go unnoticed")
        else:
            self._marking_failed = False

    def _write_mark(self) -> None:
        writer = self.writer
        sequence, bounds = writer.synced_sequence, writer.bounds
        # Between two commits: of a write that fails half-way RocksDB takes back what it has added to a log. One may
        # have failed just before, and that is known once the logs are synced.
        with writer.cut_lock:
            sizes = self._marker.log_sizes()
        self._marker.write(sizes, sequence, Bounds(*bounds), lambda: writer.failure is None)

    def _load_instance(self) -> tuple[str, str, tuple[str, ...], int, bool]:
        """(id, journal epoch, names of the instances that wrote records: a record's `origin` is an index into them,
        the index of this instance, whether the data are authoritative). Data that were made or restored get an index of
        their own, and so does an instance with another name, so that what was written before, under the same name, can
        be told from what it writes now (rule K7). Data from before there was such an index have none."""
        instance = _instance(self._rocks)
        origins: list[str] = instance["origins"]
        name, origin = self._options.instance, instance.get("origin")
        if origin is None or origins[origin] != name:
            origin = len(origins)
            origins.append(name)
            batch = Batch()
            batch.puts[META][INSTANCE_KEY] = json.dumps({**instance, "origins": origins, "origin": origin}).encode()
            self._rocks.write_waiting(batch)
            self._rocks.sync()
        return instance["id"], instance["epoch"], tuple(origins), origin, instance.get("authoritative", False)

    def _load_topics(self) -> None:
        rows = self._rocks.cursor(META)
        try:
            found = list(rows.rows(TOPIC_KEY, TOPIC_KEY + b"\xff"))
        finally:
            rows.close()
        for key, value in found:
            fields = json.loads(value)
            topic_id, settings = int.from_bytes(key[len(TOPIC_KEY) :], "big"), settings_from_json(fields["settings"])
            figures = self._rocks.get(META, STATISTICS_KEY + key[len(TOPIC_KEY) :])
            self.topics.add(
                Topic(
                    topic_id,
                    fields["name"],
                    settings,
                    in_config=fields["in_config"],
                    # Data from before there were policies has no more than what is in force.
                    declared=declared_from_json(fields["declared"]) if "declared" in fields else declared_of(settings),
                    dynamic=fields.get("dynamic", False),
                    create_time_micros=fields["create_time_micros"],
                    statistics=decode_statistics(figures) if figures else StoredStatistics(),
                    # Data from before there were indexes has neither.
                    indexes=self._load_indexes(
                        topic_id, settings, fields.get("indexes", {}), fields.get("next_index", NO_INDEXES.next_id)
                    ),
                )
            )
        for topic in self.topics.by_id.values():
            topic.replicated = self.replicas.covers(topic.name)
        now = self._clock.now_micros()
        for topic in self.topics.by_id.values():
            topic.last_use_micros = now  # of what was before the start nothing is known (rule T1)

    def _load_indexes(self, topic_id: int, settings: TopicSettings, ids: Mapping[str, int], next_id: int) -> Indexes:
        found: list[Index] = []
        for path, steps in _index_paths(settings):
            prefix = index_prefix(topic_id, ids[path])
            complete = self._rocks.get(META, INDEX_KEY + prefix) is None
            found.append(Index(ids[path], path, steps, prefix, complete))
        return Indexes(tuple(found), next_id)

    # -- changing ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, done: Callable[[Outcome | StoreError], None]) -> None:
        """Queues a change; `done` hears its outcome once it is as durable as asked. Raises StoreError at once when the
        request cannot be queued."""
        self.writer.submit(Job(request, done))

    def run(self, request: Request) -> Outcome:
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

    def sync(self) -> None:
        """Without the thread: makes what is written durable, as the thread does within moments."""
        self.writer.sync_now()

    def open_publisher(
        self, publisher_id: str, unit: int, done: Callable[[OpenedPublisher | StoreError], None]
    ) -> None:
        """Begins the next epoch of a publisher, unless `unit` (0: none) is finished; `done` hears of it once it is on
        disk (rule P6)."""

        def stage_open(draft: Draft) -> Callable[[], OpenedPublisher]:
            publisher, opened = self.writer.publishers.find(publisher_id).open(unit, publisher_id, draft.now)
            draft.publishers[publisher_id] = publisher
            return lambda: opened

        self.commits.run(StagedBy(stage_open), done)

    # -- reading ----------------------------------------------------------------------------------------------------

    def get(self, topic: Topic, keys: Sequence[bytes]) -> tuple[int, list[bytes | None]]:
        """See `Cuts.get`."""
        return self.cuts.get(topic, keys)

    def cut(
        self, topic: Topic, index_paths: Collection[Steps] = (), *, counted: bool = False, unreadable: bool = False
    ) -> Cut:
        """See `Cuts.records`."""
        return self.cuts.records(topic, index_paths, counted=counted, unreadable=unreadable)

    def cut_many(
        self, choose: Callable[[Collection[Topic]], Sequence[Topic]], *, skipped: Skipped | None = None
    ) -> ManyCut:
        """See `Cuts.many`."""
        return self.cuts.many(choose, skipped=skipped)

    def journal_cut(self) -> JournalCut:
        """See `Cuts.journal`."""
        return self.cuts.journal()

    def journal_ledger(self, topic: Topic) -> Ledger:
        """See `Cuts.ledger`."""
        return self.cuts.ledger(topic)

    def count(self, topic: Topic) -> int:
        """See `Cuts.count`."""
        return self.cuts.count(topic)

    def overdue(self, topic: Topic | None = None) -> int:
        """See `Cuts.overdue`."""
        return self.cuts.overdue(topic)

    def overdue_by_topic(self, *, at_most: int = 2**62) -> dict[int, int]:
        """See `Cuts.overdue_by_topic`."""
        return self.cuts.overdue_by_topic(at_most=at_most)

    def key_of(self, topic: Topic, payload: bytes) -> bytes:
        """The record key that a topic's key fields give a payload. Raises StoreError."""
        return payload_key(topic, payload)

    def used(self, topic: Topic) -> None:
        """Somebody uses a topic (rule T1)."""
        topic.last_use_micros = self._clock.now_micros()

    def follow_topics(self, follow: Callable[[Collection[Topic]], None]) -> int:
        """Between two commits: `follow` sets how many follow which topics (`Topic.followers`, `.previous_wanted`).
        Returns the last written sequence."""
        with self.writer.cut_lock:
            follow(tuple(self.topics.by_id.values()))
            return self.writer.last_sequence

    def barrier(self, done: Callable[[object], None]) -> None:
        """`done` hears (perhaps a StoreError) once every commit whose staging had begun before is durable; what is
        staged later heeds the followers that a topic has now. Raises StoreError at once when nothing can be queued."""
        self.commits.barrier(done)

    def bookmark(self, sequence: int) -> str:
        """A position in this store's journal, as clients see it (rule J14)."""
        return f"{self.epoch}.{sequence}"

    def statistics(self, topic: Topic) -> TopicStatistics:
        """Figures of a topic."""
        figures, backlog = topic.statistics, self.durables.backlog(topic)
        oldest = None if backlog is None else backlog.oldest_micros
        return TopicStatistics(
            figures.records,
            figures.record_bytes,
            figures.journal_bytes,
            figures.journal_entries,
            max(figures.floor_sequence, figures.created_sequence),
            self.durables.count(topic),
            0 if backlog is None else backlog.bytes,
            None if oldest is None else max(0, self._clock.now_micros() - oldest),
            figures.tombstones,
            "" if backlog is None else backlog.name,
            0 if backlog is None else backlog.entries,
        )

    def publisher_position(self, publisher_id: str) -> tuple[int, int]:
        """(epoch, highest sequence) of a publisher, (0, 0) for one that is not known."""
        row = self._rocks.get(META, PUBLISHER_KEY + publisher_id.encode())
        if row is None:
            return 0, 0
        publisher = decode_publisher(row)
        return publisher.epoch, publisher.highest_sequence

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
        declared: Declared,
        done: Callable[[Topic | StoreError], None],
        *,
        in_config: bool = False,
    ) -> None:
        """Creates a topic that declares these settings. TOPIC_NAME_INVALID, TOPIC_EXISTS, INVALID_ARGUMENT."""
        self.commits.run(StagedBy(lambda draft: self._stage_create(draft, name, declared, in_config=in_config)), done)

    @property
    def makes_topics(self) -> bool:
        """Whether the first publish to a topic creates it (rule K1)."""
        return self._options.dynamic_topics

    def create_dynamic(self, name: str, done: Callable[[Topic | StoreError], None]) -> None:
        """Creates a topic as the first publish to it does. TOPIC_NAME_INVALID, TOPIC_EXISTS."""
        self.commits.run(self._create_dynamic(name), done)

    def _create_dynamic(self, name: str) -> Step[Topic]:
        return StagedBy(lambda draft: self._stage_create(draft, name, NOTHING, dynamic=True))

    def _stage_create(
        self, draft: Draft, name: str, declared: Declared, *, in_config: bool = False, dynamic: bool = False
    ) -> Callable[[], Topic]:
        check_name(name)
        if (found := self.topics.by_name.get(name)) is not None:
            found.last_use_micros = draft.now  # who declares it again is about to use it (rule T1)
            raise StoreError(Reason.TOPIC_EXISTS, f"topic: {name} exists already", field="name")
        declared = tidy(declared)
        check_settings(declared, topic=name, in_config=in_config)
        settings = self._resolve(name, declared, self.policies, in_config=in_config, dynamic=dynamic).settings
        self._check_dead_letters(draft, name, settings, declared)
        topic_id = int.from_bytes(self._rocks.get(META, NEXT_TOPIC_KEY) or u32(1), "big")
        topic = Topic(
            topic_id,
            name,
            settings,
            in_config=in_config,
            create_time_micros=draft.now,
            statistics=StoredStatistics(created_sequence=draft.next_sequence - 1),
            indexes=altered(NO_INDEXES, topic_id, _index_paths(settings), keep=False, complete=True),
            declared=declared,
            dynamic=dynamic,
        )
        topic.replicated = self.replicas.covers(name)
        meta = draft.batch.puts[META]
        meta[NEXT_TOPIC_KEY] = u32(topic_id + 1)
        meta[TOPIC_KEY + topic.prefix] = _encode_topic(
            topic, settings, topic.indexes, declared=declared, in_config=in_config, dynamic=dynamic
        )
        meta[STATISTICS_KEY + topic.prefix] = encode_statistics(topic.statistics)
        waiting = self._stage_waiting(draft, topic)

        def after() -> Topic:
            self.created(topic)
            self.topics.add(topic)
            if waiting:
                self._deliver(topic)
            return topic

        return after

    def alter_topic(
        self,
        name: str,
        change: Callable[[Declared], Declared],
        done: Callable[[Topic | StoreError], None],
        *,
        in_config: bool = False,
    ) -> None:
        """Changes what a topic declares; stamps never change (rule L12). Disabling expiration first expires what is
        overdue, in the same commit. SET_IN_CONFIG unless `in_config`, TOPIC_NOT_FOUND, TOPIC_NOT_EMPTY,
        INVALID_ARGUMENT."""

        def stage_alter(draft: Draft) -> Callable[[], Topic] | None:
            topic = self._alterable(name, in_config=in_config)
            declared = tidy(change(topic.declared))
            check_settings(declared, topic=name, in_config=in_config)
            return self._stage_settings(
                draft, topic, declared, in_config=in_config, dynamic=topic.dynamic and not in_config
            )

        self._control_in_rounds(stage_alter, done)

    def release_topic(self, name: str, done: Callable[[Topic | StoreError], None]) -> None:
        """A topic that has left the configuration file stays, as if an administrator had created it (rule K1)."""

        def stage_release(draft: Draft) -> Callable[[], Topic] | None:
            topic = self.topics.find(name)
            return self._stage_settings(draft, topic, topic.declared, in_config=False, dynamic=topic.dynamic)

        self._control_in_rounds(stage_release, done)

    def _control_in_rounds(
        self, stage_change: Callable[[Draft], Callable[[], T] | None], done: Callable[[T | StoreError], None]
    ) -> None:
        """A control that may need commits before its own: while `stage_change` returns None, what it has staged is
        committed, and it is called again. What is overdue is expired first, in commits of its own."""

        def stage_round(draft: Draft) -> Callable[[], T | None]:
            return stage_change(draft) or (lambda: None)

        def round_done(result: T | StoreError | None) -> None:
            if result is not None:
                done(result)
                return
            try:
                self.commits.run(StagedBy(stage_round), round_done, sweep_first=True)
            except StoreError as error:
                done(error)

        self.commits.run(StagedBy(stage_round), round_done, sweep_first=True)

    def _stage_settings(
        self, draft: Draft, topic: Topic, declared: Declared, *, in_config: bool, dynamic: bool
    ) -> Callable[[], Topic] | None:
        """Stages new settings of one topic; None: what is staged has to be committed first, see `_control_in_rounds`.
        TOPIC_NOT_EMPTY."""
        settings = self._resolve(topic.name, declared, self.policies, in_config=in_config, dynamic=dynamic).settings
        self._check_dead_letters(draft, topic.name, settings, declared)
        for name_of_setting in ONLY_WHILE_EMPTY:
            if getattr(settings, name_of_setting) != getattr(topic.settings, name_of_setting) and self.count(topic):
                raise StoreError(
                    Reason.TOPIC_NOT_EMPTY,
                    f"{name_of_setting}: changes only while the topic is empty",
                    field=f"settings.{name_of_setting}",
                )
        if not self._stage_expiration(draft, [(topic, settings)]):
            return None
        refounded = _refounds(topic, settings)
        if refounded and draft.figures(topic).records:
            raise StoreError(
                Reason.TOPIC_NOT_EMPTY, "topic: is not empty any more: dead letters have just come to it", field="name"
            )
        if refounded:
            self.replicas.stage_refound(draft, topic)
            self.loads.stage_fail_all(draft, topic, "the topic takes records of another kind now")
        if refounded or settings.journal != topic.settings.journal:
            # What is not journaled is as good as discarded: nobody may read across the gap (rule J1). Nor may
            # anybody read changes whose payloads and keys are of another kind.
            for chunk in draft.journal.chunks:
                if chunk.topic is topic:
                    chunk.journaled = False
            draft.batch.ranges.append((JOURNAL, topic.prefix, topic.stop))
            draft.statistics[topic.id] = draft.figures(topic).trimmed(draft.next_sequence - 1)
        with DurableEditor(self.durables, draft, self.topics.by_id) as durables:
            if refounded or settings.journal != topic.settings.journal:
                durables.reset(topic)
            else:
                durables.freeze(topic)
        waiting = refounded and self._stage_waiting(draft, topic)
        indexes = self._stage_indexes(draft, topic, settings)
        draft.batch.puts[META][TOPIC_KEY + topic.prefix] = _encode_topic(
            topic, settings, indexes, declared=declared, in_config=in_config, dynamic=dynamic
        )

        def after() -> Topic:
            topic.declared, topic.in_config, topic.dynamic = declared, in_config, dynamic
            before = topic.indexes
            self._settled(draft, [(topic, settings, indexes)])
            if waiting:
                self._deliver(topic)
            for new in _others(indexes, before):
                if not new.complete:
                    self._build(topic, new)
            return topic

        return after

    def _stage_expiration(self, draft: Draft, changes: Sequence[tuple[Topic, TopicSettings]]) -> bool:
        """Stages what new settings mean for what expires (rule L12): before a topic is disabled, or takes records of
        another kind, what is overdue goes, and with enabling its expiry index begins to be filled. False: commit this,
        and stage it anew."""
        emptied = [topic for topic, settings in changes if _empties(topic, settings)]
        rearming = [topic for topic in emptied if is_rearming(self._rocks, topic)]
        for topic in rearming:
            # What is overdue and not in the expiry index yet would reappear: re-arming is brought to its end first.
            self._stage_rearm(draft, topic)
            if len(draft.batch.puts[EXPIRY]) >= REARM_ROUND:
                break
        if rearming:
            return False
        if emptied:
            self.writer.sweep.stage(draft, 2**31)
        for topic, settings in changes:
            if settings.acts_on_expiration and not topic.acts:
                draft.batch.puts[META][REARM_KEY + topic.prefix] = topic.prefix
        return True

    def _settled(self, draft: Draft, changes: Sequence[tuple[Topic, TopicSettings, Indexes]]) -> None:
        """After the commit: takes new settings into force."""
        enabled: list[Topic] = []
        swept = False
        for topic, settings, indexes in changes:
            swept = swept or _empties(topic, settings)
            if settings.acts_on_expiration and not topic.acts:
                enabled.append(topic)
            topic.apply(settings, indexes)
            self.topics.settled(topic)
        self.topics.version += 1
        if swept:
            self.writer.sweep.swept(draft)
        self._rearm(iter(enabled))

    def delete_topic(self, name: str, done: Callable[[int | StoreError], None], *, force: bool = False) -> None:
        """Deletes a topic with its records, indexes and journal; answers how many live records it had. Its id is never
        used again, so what is left in the expiry index is dropped by the sweep. PEER_BEHIND unless `force` (rule T5).
        """
        found = self.topics.by_name.get(name)

        def stage_delete(draft: Draft) -> Callable[[], int]:
            topic = self._alterable(name, in_config=False)
            if not force:
                self.replicas.check_shipped(topic)
            return self._stage_delete(draft, topic)

        # What is overdue would have its dead letters by now, had the sweep been a moment faster.
        self.commits.run(
            StagedBy(stage_delete),
            done,
            sweep_first=found is not None and bool(found.settings.dead_letter),
        )

    def delete_unused(
        self, topic: Topic, unused: Callable[[Topic, int], bool], done: Callable[[bool | StoreError], None]
    ) -> None:
        """Deletes a topic if, when the writer comes to it, `unused` says so, of the topic and that time, it has no live
        records or may have some (rule T1), and peers do not share it (rule T5). Answers whether it was deleted."""

        def stage_unused(draft: Draft) -> Callable[[], bool]:
            gone = self.topics.by_id.get(topic.id) is not topic
            if gone or topic.replicated or self.loads.open_on(topic) or not unused(topic, draft.now):
                return lambda: False
            if topic.settings.only_if_empty and self.count(topic):
                return lambda: False
            after = self._stage_delete(draft, topic)

            def deleted() -> bool:
                after()
                return True

            return deleted

        self.commits.run(StagedBy(stage_unused), done, sweep_first=bool(topic.settings.dead_letter))

    def _stage_delete(self, draft: Draft, topic: Topic) -> Callable[[], int]:
        live = self.count(topic)
        draft.dropped.append(topic)
        draft.batch.ranges += [
            (RECORDS, topic.prefix, topic.stop),
            (JOURNAL, topic.prefix, topic.stop),
            (INDEXES, topic.prefix, topic.stop),
        ]
        self.durables.stage_drop(draft, topic)
        self.replicas.stage_drop(draft, topic)
        self.loads.stage_fail_all(draft, topic, "the topic was deleted")
        draft.batch.deletes[META] += [INDEX_KEY + index.prefix for index in topic.indexes.all]
        draft.batch.deletes[META] += [
            TOPIC_KEY + topic.prefix,
            STATISTICS_KEY + topic.prefix,
            REARM_KEY + topic.prefix,
            DELIVER_KEY + topic.prefix,
        ]

        def after() -> int:
            self.topics.remove(topic)
            self.unsound.forget(topic.name)
            return live

        return after

    def _alterable(self, name: str, *, in_config: bool) -> Topic:
        topic = self.topics.find(name)
        if topic.reserved:
            check_name(name)
        if topic.in_config and not in_config:
            raise StoreError(
                Reason.SET_IN_CONFIG,
                f"topic: {name} is declared in the configuration file; change it there",
                field="name",
            )
        return topic

    def _stage_indexes(self, draft: Draft, topic: Topic, settings: TopicSettings) -> Indexes:
        """Stages what new settings mean for the indexes of a topic: the entries of one that goes are removed; one that
        comes is complete where no record is stored, else it is to be built. Returns the indexes as they will be."""
        before = topic.indexes
        stored = draft.statistics.get(topic.id, topic.statistics).records
        # A document that is read differently has other entries. There can be overdue ones, though none is live.
        keep = (settings.message_type, settings.separator) == (topic.settings.message_type, topic.settings.separator)
        after = altered(before, topic.id, _index_paths(settings), keep=keep, complete=stored == 0)
        for gone in _others(before, after):
            draft.batch.ranges.append((INDEXES, gone.prefix, gone.stop))
            draft.batch.deletes[META].append(INDEX_KEY + gone.prefix)
        for new in _others(after, before):
            if not new.complete:
                draft.batch.puts[META][INDEX_KEY + new.prefix] = topic.prefix
        return after

    # -- policies ---------------------------------------------------------------------------------------------------

    def set_policy(self, policy: Policy, done: Callable[[Policy | StoreError], None]) -> None:
        """Sets a policy, in the place of the one of its name, and with it the settings of the topics that it is about,
        in one commit (rule T4). INVALID_ARGUMENT."""

        def stage_set(draft: Draft) -> Callable[[], Policy] | None:
            check_policy(policy)
            after = self._stage_policies(draft, self.policies.including(policy))
            if after is None:
                return None
            draft.batch.puts[META][policy_key(policy.name, operator=policy.operator)] = encode_policy(policy)

            def set_in_force() -> Policy:
                after()
                return policy

            return set_in_force

        self._control_in_rounds(stage_set, done)

    def delete_policy(self, name: str, done: Callable[[Policy | StoreError], None], *, operator: bool) -> None:
        """Deletes a policy; answers it. What it has set takes its next source. POLICY_NOT_FOUND."""

        def stage_delete(draft: Draft) -> Callable[[], Policy] | None:
            policy = self.policies.find(name, operator=operator)
            after = self._stage_policies(draft, self.policies.without(policy))
            if after is None:
                return None
            draft.batch.deletes[META].append(policy_key(policy.name, operator=policy.operator))

            def gone() -> Policy:
                after()
                return policy

            return gone

        self._control_in_rounds(stage_delete, done)

    def effective(self, topic: Topic) -> Effective:
        """The settings of a topic with their origins."""
        return self._resolve(
            topic.name, topic.declared, self.policies, in_config=topic.in_config, dynamic=topic.dynamic
        )

    def policy_matches(self) -> Counter[tuple[PolicyTarget, str]]:
        """How many topics, and durables, take something from each origin, see `Effective`; looks at all of them."""
        policies, taken = self.policies, Counter[tuple[PolicyTarget, str]]()
        for topic in tuple(self.topics.by_id.values()):
            taken.update({(PolicyTarget.TOPICS, origin) for origin in self.effective(topic).origins.values()})
            if policies.of(PolicyTarget.DURABLES):
                for durable in self.durables.of(topic):
                    _, origins = durable_origins(topic.settings, topic.name, durable.name, durable.declared, policies)
                    taken.update({(PolicyTarget.DURABLES, origin) for origin in origins.values()})
        return taken

    def _resolve(
        self, name: str, declared: Declared, policies: Policies, *, in_config: bool, dynamic: bool
    ) -> Effective:
        if name == UNDELIVERED:  # the store's own: nobody else has a say in it
            return resolve_topic(name, declared)
        return resolve_topic(name, declared, policies, self._options.defaults, in_config=in_config, dynamic=dynamic)

    def _stage_policies(self, draft: Draft, policies: Policies) -> Callable[[], None] | None:
        """Stages the settings of all topics as `policies` make them; None as in `_stage_settings`. One commit for all:
        so a crash leaves no topic behind, and it is short, some 50 µs a topic that changes."""
        changed = set(policies) ^ set(self.policies)
        changes: list[tuple[Topic, TopicSettings]] = []
        for topic in self.topics.by_id.values():
            if changed and not any(policy.matches(topic.name) for policy in changed):
                continue
            resolved = self._resolve(
                topic.name, topic.declared, policies, in_config=topic.in_config, dynamic=topic.dynamic
            )
            if resolved.settings != topic.settings:
                changes.append((topic, resolved.settings))
        if not self._stage_expiration(draft, changes):
            return None
        # Retention may be longer from now on: what is gone for a durable stays gone.
        touched = {topic.id for topic, _ in changes}
        if policies.of(PolicyTarget.DURABLES) != self.policies.of(PolicyTarget.DURABLES):
            touched.update(self.durables.topic_ids())
        touched &= self.topics.by_id.keys()
        with DurableEditor(self.durables, draft, self.topics.by_id) as durables:
            for topic_id in touched:
                durables.freeze(self.topics.by_id[topic_id])
        for topic, settings in changes:
            draft.batch.puts[META][TOPIC_KEY + topic.prefix] = _encode_topic(
                topic,
                settings,
                topic.indexes,
                declared=topic.declared,
                in_config=topic.in_config,
                dynamic=topic.dynamic,
            )

        def after() -> None:
            self.policies = policies
            # A policy sets nothing that an index depends on.
            self._settled(draft, [(topic, settings, topic.indexes) for topic, settings in changes])
            for topic_id in touched.difference([topic.id for topic, _ in changes]):
                self.topics.settled(self.topics.by_id[topic_id])

        return after

    def _resolve_at_open(self) -> None:
        """The server's defaults may be others than the last process had. Raises OpenError."""
        if all(self.effective(topic).settings == topic.settings for topic in self.topics.by_id.values()):
            return

        def stage_all(draft: Draft) -> Callable[[], bool] | None:
            after = self._stage_policies(draft, self.policies)
            if after is None:
                return None

            def resolved() -> bool:
                after()
                return True

            return resolved

        answers: list[bool | StoreError] = []
        self._control_in_rounds(stage_all, answers.append)
        self.writer.step()
        if isinstance(answers[0], StoreError):
            raise OpenError(f"{self._path}: the settings of topics cannot be stored ({answers[0].message})")

    def _load_policies(self) -> Policies:
        found: list[Policy] = []
        cursor = self._rocks.cursor(META)
        try:
            for prefix, operator in ((POLICY_KEY, False), (OPERATOR_POLICY_KEY, True)):
                for key, row in cursor.rows(prefix, prefix + b"\xff"):
                    found.append(decode_policy(key[len(prefix) :].decode(), row, operator=operator))
        finally:
            cursor.close()
        return Policies(found)

    # -- durables ---------------------------------------------------------------------------------------------------

    def change_durables(self, change: Callable[[DurableEditor], T], done: Callable[[T | StoreError], None]) -> None:
        """Changes durables in one commit; `done` hears what `change` has returned, or raised. Raises StoreError at once
        when nothing can be queued."""

        def stage_change(draft: Draft) -> Callable[[], T]:
            with DurableEditor(self.durables, draft, self.topics.by_id) as durables:
                result = change(durables)
            return lambda: result

        self.commits.run(StagedBy(stage_change), done)

    def durable_figures(self, topic: Topic, name: str) -> tuple[Durable, DurableFigures, int]:
        """A durable, its figures, and the `now` of both. Raises StoreError. Not on the event loop."""
        (found,), now = self._figures_of(topic, lambda: [self.durables.find(topic, name)])
        return *found, now

    def durables_figures(self, topic: Topic) -> tuple[list[tuple[Durable, DurableFigures]], int]:
        """As `durable_figures`, of all durables of a topic, by name."""
        return self._figures_of(topic, lambda: sorted(self.durables.of(topic), key=lambda durable: durable.name))

    def _figures_of(
        self, topic: Topic, find: Callable[[], list[Durable]]
    ) -> tuple[list[tuple[Durable, DurableFigures]], int]:
        """One cut for all of them, so that their figures agree with each other."""
        with self.writer.cut_lock:
            found, statistics = find(), topic.statistics
            heads, now = ChunkHeads(self._rocks), self._clock.now_micros()
            heads.open()
        try:
            return [(one, self.durables.figures(topic, one, statistics, heads, now)) for one in found], now
        finally:
            heads.close()

    def forget_durables(self) -> None:
        """Forgets the names of durables that were removed long ago."""

        def stage_forget(draft: Draft) -> Callable[[], None]:
            self.durables.forget_removed(draft)
            return lambda: None

        self.commits.run_quietly(StagedBy(stage_forget), lambda _: None)

    # -- what takes more than one commit ----------------------------------------------------------------------------

    def _resume_work(self) -> None:
        """Takes up what the last process did not finish, and what the configuration has asked for since: a start does
        not wait for either."""
        self._work_begun = True
        self._rearm(iter([topic for topic in self.topics.by_id.values() if is_rearming(self._rocks, topic)]))
        for topic in self.topics.by_id.values():
            if self._rocks.get(META, DELIVER_KEY + topic.prefix) is not None:
                self._deliver(topic)
            for index in topic.indexes.all:
                if not index.complete:
                    self._build(topic, index)

    def _rearm(self, topics: Iterator[Topic]) -> None:
        """Puts the expiry entries of topics whose expiration has been enabled, of one after the other: a policy may
        enable thousands, which the writer's queue would not take at once. Until they are there L8 holds all the same:
        reads judge by the stamp, not by the index."""
        topic = next(topics, None)
        if topic is not None:
            self._in_chunks(
                topic,
                REARM_KEY + topic.prefix,
                lambda draft: self._stage_rearm(draft, topic),
                then=lambda: self._rearm(topics),
            )

    def _stage_rearm(self, draft: Draft, topic: Topic) -> Callable[[], bool]:
        def stage_entries(keys: list[bytes], values: list[bytes]) -> None:
            for key, value in zip(keys, values, strict=True):
                expire_time = unpack_i64(value[EXPIRE_TIME])
                if expire_time != NEVER:
                    draft.arm(expire_time, key)

        return self._stage_chunk(
            draft, topic, REARM_KEY + topic.prefix, REARM_CHUNK, stage_entries, finished=lambda: None
        )

    def _build(self, topic: Topic, index: Index) -> None:
        """Puts the entries of the records that were there before the index. What changes meanwhile has its entries from
        the change (catalog/indexes [1]), so that after the last chunk all are there (catalog/indexes [2])."""

        row = INDEX_KEY + index.prefix

        def stage_build(draft: Draft) -> Callable[[], bool]:
            def stage_entries(keys: list[bytes], values: list[bytes]) -> None:
                decode, entries = topic.decode_indexed, draft.batch.puts[INDEXES]
                for key, value in zip(keys, values, strict=True):
                    entries.update(dict.fromkeys(entry_keys(index, decode(value[PAYLOAD]), key[RECORD_KEY]), b""))

            return self._stage_chunk(draft, topic, row, INDEX_CHUNK, stage_entries, finished)

        def finished() -> None:
            built = [other._replace(complete=True) if other.id == index.id else other for other in topic.indexes.all]
            topic.indexes = topic.indexes._replace(all=tuple(built))
            log.info("index_built", topic=topic.name, path=index.path)

        self._in_chunks(topic, row, stage_build)

    def _check_dead_letters(self, draft: Draft, name: str, settings: TopicSettings, declared: Declared) -> None:
        """For new settings of a topic: what they say of dead letters has to go together with other topics (rule T3)."""
        dead_letters.check(self.topics, name, settings, declared)
        if settings.dead_letter and settings.on_missing is OnMissing.RETAIN:
            letters.undelivered(draft)  # from now on it can be watched

    def _stage_waiting(self, draft: Draft, topic: Topic) -> bool:
        """For a topic that is new, or takes other payloads now: True when dead letters may have waited for it, so that
        `_deliver` has to follow."""
        box = letters.existing_undelivered(draft)
        if box is None or not draft.statistics.get(box.id, box.statistics).records:
            return False
        draft.batch.puts[META][DELIVER_KEY + topic.prefix] = box.prefix + dead_letters.undelivered_prefix(topic.name)
        return True

    def _deliver(self, topic: Topic) -> None:
        """Moves the dead letters that have waited for a topic, and that it can take, out of `_undelivered`."""
        box, row = self.topics.by_id[UNDELIVERED_ID], DELIVER_KEY + topic.prefix
        stop = box.prefix + dead_letters.undelivered_stop(topic.name)

        def stage_delivery(draft: Draft) -> Callable[[], bool]:
            def stage_letters(keys: list[bytes], values: list[bytes]) -> None:
                letters.deliver_waiting(draft, box, topic, keys, values)

            return self._stage_chunk(draft, box, row, LETTERS_CHUNK, stage_letters, lambda: None, stop=stop)

        self._in_chunks(topic, row, stage_delivery)

    def _stage_chunk(
        self,
        draft: Draft,
        topic: Topic,
        row: bytes,
        count: int,
        stage_records: Callable[[list[bytes], list[bytes]], None],
        finished: Callable[[], None],
        *,
        stop: bytes | None = None,
    ) -> Callable[[], bool]:
        """Does something for the next `count` stored records of a topic; what it returns, for `Draft.after`, says
        whether there may be more.

        The position is stored in the meta row `row`, so that a restart goes on. The row goes with the last commit, with
        which `finished` is called as `Draft.after` is; or with what it was for, which ends the work.
        """
        start = self._rocks.get(META, row)
        if start is None:
            return lambda: False
        keys: list[bytes] = []
        values: list[bytes] = []
        cursor = self._rocks.cursor(RECORDS, fill_cache=False)
        try:
            following = cursor.fill(start, stop or topic.stop, count, keys, values)
        finally:
            cursor.close()
        stage_records(keys, values)
        if following is not None:
            draft.batch.puts[META][row] = following
            return lambda: True
        draft.batch.deletes[META].append(row)

        def after() -> bool:
            finished()
            return False

        return after

    def _in_chunks(
        self,
        topic: Topic,
        row: bytes,
        stage_chunk: Callable[[Draft], Callable[[], bool]],
        *,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Does something for all stored records of a topic, with `_stage_chunk`, in commits between those of others;
        and `then` something else, also when it cannot be done."""
        if not self._work_begun:
            return  # the row is there, and `_resume_work` finds it

        def chunk_done(more: bool | StoreError) -> None:
            if more is True or (isinstance(more, StoreError) and more.reason is Reason.WRITE_STALLED):
                self.commits.run_quietly(StagedBy(stage_chunk), chunk_done)
            elif isinstance(more, StoreError) and more.reason is not Reason.STOPPING:
                # The next start takes it up again.
                log.warning("work_interrupted", topic=topic.name, row=row.hex(), reason=more.reason.name)
                then()
            elif more is False:
                then()

        self.commits.run_quietly(StagedBy(stage_chunk), chunk_done)

    # -- upkeep, driven by timers -----------------------------------------------------------------------------------

    def prune(self, done: Callable[[bool | StoreError], None]) -> None:
        """One bounded step of journal pruning; answers whether there may be more: when not, every topic has had its
        turn (rules J3, J11). A topic that cannot be pruned is logged, and the others are."""
        self.commits.run(StagedBy(self._stage_prune), done)

    def _stage_prune(self, draft: Draft) -> Callable[[], bool]:
        topics = self.topics.by_id
        begins = self._pruned_to == 0
        if begins:
            self._first_kept.clear()
        ids = [topic_id for topic_id in topics if topic_id > self._pruned_to]  # in the order of creation
        looked_at = 0
        heads_before = ChunkHeads.opened_total
        for topic_id in ids[:PRUNE_TOPICS]:
            looked_at += 1
            first = prune_topic(self.durables, draft, topics, topics[topic_id])
            if first is not None:
                self._first_kept[topic_id] = first
            if ChunkHeads.opened_total - heads_before >= PRUNE_READS:
                break
        more = looked_at < len(ids)
        reached = ids[looked_at - 1] if more else 0
        if not more:
            # A topic that has got its first entries since its turn keeps what was not yet there.
            firsts = [first for topic_id, first in self._first_kept.items() if topic_id in topics]
            firsts += [
                topic.statistics.floor_sequence + 1
                for topic_id, topic in topics.items()
                if topic_id not in self._first_kept and draft.statistics.get(topic_id, topic.statistics).journal_entries
            ]
            prune_commits(self._rocks, firsts, draft.batch, draft.next_sequence - 1)

        def after() -> bool:
            self._pruned_to = reached
            return more

        return after

    def forget_publishers(self) -> None:
        """Removes the rows of publishers that have been idle for `publisher_ttl` (rule P6), in bounded steps between
        the commits of others."""
        self._forget_publishers(PUBLISHER_KEY)

    def _forget_publishers(self, start: bytes) -> None:
        """One step, and then the next: looks at `PUBLISHERS_CHUNK` rows from `start` on."""

        def stage_forget(draft: Draft) -> Callable[[], bytes | None]:
            keys: list[bytes] = []
            rows: list[bytes] = []
            cursor = self._rocks.cursor(META, fill_cache=False)
            try:
                following = cursor.fill(start, PUBLISHER_KEY + b"\xff", PUBLISHERS_CHUNK, keys, rows)
            finally:
                cursor.close()
            cut = draft.now - self._options.publisher_ttl_micros
            idle = [key for key, row in zip(keys, rows, strict=True) if decode_publisher(row).last_use_micros <= cut]
            draft.batch.deletes[META] += idle

            def after() -> bytes | None:
                for key in idle:
                    self.writer.publishers.forget(key[len(PUBLISHER_KEY) :].decode())
                return following

            return after

        def forgotten(following: bytes | StoreError | None) -> None:
            if isinstance(following, bytes):
                self._forget_publishers(following)

        self.commits.run_quietly(StagedBy(stage_forget), forgotten)

    def mark_clock(self) -> None:
        """Persists the clock's high-water mark (rule L15)."""

        def stage_mark(draft: Draft) -> Callable[[], None]:
            draft.batch.puts[META][CLOCK_KEY] = i64(draft.now)
            return lambda: None

        self.commits.run_quietly(StagedBy(stage_mark), lambda _: None)

    def backup(self, directory: Path) -> backups.Made:
        """Makes a backup in a directory that is not there yet: everything up to one sequence (rule J14). Raises
        StoreError: INVALID_ARGUMENT where the directory cannot be, OVERLOADED while another one is made. Long, and not
        from the event loop."""
        if self.writer.failure is not None:
            raise self.writer.failure
        if not self._backing_up.acquire(blocking=False):
            raise StoreError(Reason.OVERLOADED, "another backup is being made", retry_after_micros=10 * MICROS)
        try:
            return backups.make(self._path, directory, instance=self._options.instance, checkpoint=self._checkpoint)
        finally:
            self._backing_up.release()

    def _checkpoint(self, path: Path) -> int:
        self._rocks.flush()
        with self.writer.cut_lock:  # between two commits, so that the sequence is known
            self._rocks.checkpoint(path)
            return self.writer.last_sequence

    def compact(self) -> None:
        """Compacts everything; long, and without the GIL. Not from the event loop."""
        for family in FAMILIES:
            self._rocks.compact(family)

    def reclaim(self, at_least: int, go_on: Callable[[], bool]) -> int:
        """Compacts what deserves it (rule L17), if so many records, journal entries or expiry
        entries have been removed: part by part, while `go_on` says so. Returns the number of parts.

        Long, and without the GIL; not from the event loop. One at a time. Raises RocksError.
        """
        with self.writer.cut_lock:
            counts, sweep_floor = self.writer.removals.counts(), self.writer.sweep.floor
        done = 0
        first_commit, first_tombstone = self._first(COMMITS, b"") or b"", self._first(TOMBSTONES, MADE_ORDER)
        tasks = deserving(counts, self.topics.by_id, sweep_floor, first_commit, first_tombstone or MADE_END, at_least)
        for task in tasks:
            for family, ranges in task.ranges.items():
                for begin, end in self._rocks.parts(ranges, RECLAIM_BYTES):
                    if not go_on():
                        return done
                    self._rocks.compact(family, begin, end)
                    done += 1
            with self.writer.cut_lock:
                self.writer.removals.compacted(task)
        if done:
            self._rocks.flush()  # what is in no table file yet, of any family, keeps the logs
        return done

    def _first(self, family: str, start: bytes) -> bytes | None:
        """The first key from a place on: what lies before was let go."""
        cursor = self._rocks.cursor(family, fill_cache=False)
        try:
            return next(cursor.keys(start, None, limit=1), None)
        finally:
            cursor.close()

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
        except RocksError:
            log.exception("scrub_failed")  # nobody waits for its result

    @property
    def verified_at_start(self) -> bool:
        """Whether opening has read everything, so that no scrub is needed."""
        return self._rocks.table_bytes() <= self._options.verify_at_start_bytes


def payload_of(value: bytes) -> bytes:
    """The payload of a stored value."""
    return value[PAYLOAD]


def _index_paths(settings: TopicSettings) -> list[tuple[str, Steps]]:
    """The paths of the indexes as they are written, and their steps."""
    return list(zip(settings.index, index_paths(settings), strict=True))


def _others(some: Indexes, than: Indexes) -> list[Index]:
    """Those of the one that are not in the other."""
    ids = {index.id for index in than.all}
    return [index for index in some.all if index.id not in ids]


def _refounds(topic: Topic, settings: TopicSettings) -> bool:
    """Whether a topic will take records of another kind: with other keys, or of another type (rule K1)."""
    return any(getattr(settings, name) != getattr(topic.settings, name) for name in ONLY_WHILE_EMPTY)


def _empties(topic: Topic, settings: TopicSettings) -> bool:
    """Whether what is overdue has to go before these settings: else it would reappear (rule L12), or leave a dead
    letter of the wrong kind."""
    return topic.acts and (not settings.acts_on_expiration or _refounds(topic, settings))


def _topic_row(topic: Topic) -> tuple[bytes, bytes]:
    """The meta row of a topic as it is."""
    return TOPIC_KEY + topic.prefix, _encode_topic(
        topic, topic.settings, topic.indexes, declared=topic.declared, in_config=topic.in_config, dynamic=topic.dynamic
    )


def _encode_topic(
    topic: Topic, settings: TopicSettings, indexes: Indexes, *, declared: Declared, in_config: bool, dynamic: bool
) -> bytes:
    return json.dumps(
        {
            "name": topic.name,
            "in_config": in_config,
            "dynamic": dynamic,
            "declared": declared_to_json(declared),
            "create_time_micros": topic.create_time_micros,
            "settings": settings_to_json(settings),
            "indexes": {index.path: index.id for index in indexes.all},
            "next_index": indexes.next_id,
        }
    ).encode()


def _initialise(rocks: Rocks) -> None:
    batch = Batch()
    batch.puts[META] = {
        FORMAT_KEY: u32(FORMAT),
        INSTANCE_KEY: json.dumps(_new_identity() | {"origins": []}).encode(),
    }
    rocks.write_waiting(batch)
    rocks.sync()


def _instance(rocks: Rocks) -> dict[str, Any]:
    """The row that says who this instance is."""
    row = rocks.get(META, INSTANCE_KEY)
    assert row is not None, "_initialise has written it"
    instance: dict[str, Any] = json.loads(row)
    return instance


def _restore(rocks: Rocks, path: Path, *, authoritative: bool) -> None:
    """Makes a backup an instance of its own: bookmarks of the one it was made of are refused from now on, and peers
    begin anew with it (rule J14). Durables keep their positions, which are in the data. Killed in between, it is done
    again."""
    instance = _instance(rocks) | _new_identity() | {"authoritative": authoritative}
    batch = Batch()
    batch.puts[META][INSTANCE_KEY] = json.dumps(instance).encode()
    rocks.write_waiting(batch)
    rocks.sync()
    backups.taken(path)
    log.warning("backup_restored", data_dir=str(path), epoch=instance["epoch"], authoritative=authoritative)


def _new_identity() -> dict[str, str | None]:
    """Who the instance is from now on. `origin`: it gets another number for what it writes, see `_load_instance`."""
    return {"id": uuid.uuid4().hex, "epoch": uuid.uuid4().hex[:12], "origin": None}


def _check_format(rocks: Rocks, path: Path) -> None:
    found = rocks.get(META, FORMAT_KEY)
    if found is None:
        # Killed between making the database and its first row: there is nothing in it yet.
        if any(_first_key(rocks, family) for family in FAMILIES):
            raise OpenError(f"{path}: this is no sow data, or its format is missing")
        _initialise(rocks)
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


def _tables_and_logs(database: Path) -> Iterator[Path]:
    """The files of a database that hold data, if it has lost the others."""
    yield from database.glob("*.sst")
    if not (database / "CURRENT").exists():
        yield from (path for path in database.glob("*.log") if path.stat().st_size)


def _held_against_mark(path: Path, marked: Mark, *, accept_loss: bool) -> Mark:
    """Holds a database against its mark; returns the mark, with the loss that is accepted. Raises OpenError."""
    if marked.accepted_after is not None:
        return marked  # a start that was to settle it has been interrupted
    try:
        check(path, marked, lambda: first_log_needed(path / backups.DATABASE))
    except Differs as error:
        raise OpenError(f"{path}: the data is damaged ({error}); restore it from a backup or a replica") from error
    except LogsMissing as error:
        if not accept_loss:
            raise OpenError(
                f"{path}: the end of the log is missing ({error}); restore it from a backup or a replica, or start "
                "once with --accept-loss to go on without"
            ) from error
        marked = replace(marked, number=marked.number + 1, accepted_after=error.after)
        save_mark(path, marked)
        log.warning(
            "loss_accepted", data_dir=str(path), after_sequence=error.after, upto=marked.sequence, what=str(error)
        )
    return marked


def _mark(marker: Path) -> None:
    """Writes the file that says that there is data: without it an emptied directory would be taken for a new one."""
    temporary = marker.with_suffix(".new")
    with temporary.open("w") as file:
        file.write(f"sow data, format {FORMAT}, made {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(marker)
    backups.sync_directory(marker.parent)


def _high_water(rocks: Rocks) -> int:
    """The latest time that the data has seen: the clock's mark, or the last commit's time, unless an operator has said
    since that it was wrong."""
    mark = unpack_i64(rocks.get(META, CLOCK_KEY) or bytes(8))
    last = _last_commit(rocks)
    if last is None or last.last_sequence <= unpack_i64(rocks.get(META, ACCEPTED_KEY) or bytes(8)):
        return mark
    return max(mark, last.commit_time_micros)


def _accept_clock(rocks: Rocks, now_micros: int) -> None:
    """Remembers that the clock is right, whatever times the commits so far have: also for the starts that follow."""
    last = _last_commit(rocks)
    batch = Batch()
    batch.puts[META][CLOCK_KEY] = i64(now_micros)
    batch.puts[META][ACCEPTED_KEY] = i64(0 if last is None else last.last_sequence)
    rocks.write_waiting(batch)
    rocks.sync()


def _last_commit(rocks: Rocks) -> Commit | None:
    commits = rocks.cursor(COMMITS)
    try:
        last = commits.last()
    finally:
        commits.close()
    return None if last is None else decode_commit(*last)
