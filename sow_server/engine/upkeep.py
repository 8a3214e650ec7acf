"""Upkeep: work requested by timers and operators: pruning, forgetting, reclaiming, scrubbing, backups, marks.

[1]  Changes of rows are bounded steps, so that publishers never wait for long. The long rest never runs on the
     event loop, and can be ended between its parts.
[2]  Upkeep that cannot be done now (the store is stopping, has failed or is overloaded) is left to the next tick.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.publishers import PublisherCache
from sow_server.engine.commit.publishers import decode as decode_publisher
from sow_server.engine.commit.reclaim import deserving
from sow_server.engine.commit.writer import Writer
from sow_server.engine.core import Core
from sow_server.engine.disk import backups
from sow_server.engine.disk.layout import (
    CLOCK_KEY,
    MADE_ORDER,
    PASSED_ON_KEY,
    PLACEMENT_KEY,
    PUBLISHER_KEY,
    passed_on_prefix,
    passed_on_topic,
)
from sow_server.engine.disk.mark import Bounds
from sow_server.engine.disk.rocks import COMMITS, FAMILIES, META, TOMBSTONES, Rocks, disk_bytes
from sow_server.engine.durables import Durables, prune_topic
from sow_server.engine.journal.reading import ChunkHeads
from sow_server.engine.journal.retention import prune_commits
from sow_server.engine.opening import Opened
from sow_server.engine.pending import Pending
from sow_server.engine.replicas.tombstone_purge import MADE_END
from sow_server.engine.stored import i64
from sow_server.engine.values.database import Damaged, RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

log = structlog.get_logger(__name__)

PRUNE_TOPICS: Final = 100
"""Topics that one step of pruning visits, most of which cost no read."""
PRUNE_READS: Final = 32
"""Topics that one step of pruning reads, so that it never delays publishers for long."""
PUBLISHERS_CHUNK: Final = 1000
"""Rows of publishers that one step of forgetting visits."""
RECLAIM_BYTES: Final = 128 * 2**20
"""Table files of one part of a compaction: some seconds, for which a stop has to wait."""
SCRUB_KEYS: Final = 1000
"""Keys that a scrub reads between two pauses."""


class Disk(NamedTuple):
    """A disk, in bytes."""

    free: int
    size: int


class KeptPlacement(NamedTuple):
    """The placement of cells that was in force last (rule C25)."""

    version: int
    digest: str
    cells: int
    """Their number."""


class Upkeep:
    """Does the upkeep of a store."""

    def __init__(
        self,
        core: Core,
        opened: Opened,
        writer: Writer,
        durables: Durables,
        *,
        publisher_ttl_micros: int,
        verify_at_start_bytes: int,
        backup_root: Path | None,
    ) -> None:
        self._path = opened.path
        self._rocks = core.rocks
        self._writer = writer
        self._commits = core.commits
        self._topics = core.topics
        self._marker = opened.marker
        self._marking_failed = False
        self._instance = core.instance.name
        self._publisher_ttl_micros = publisher_ttl_micros
        self._verify_at_start_bytes = verify_at_start_bytes
        self._pruning = Pruning(core, durables)
        self._backup_root = backup_root
        self._backing_up = threading.Lock()

    # -- steps ------------------------------------------------------------------------------------------------------

    def prune(self) -> Pending[bool]:
        """One bounded step of journal pruning; answers whether there may be more: when not, every topic has had its
        turn (rules J3, J11). A topic that cannot be pruned is logged, and the others are pruned."""
        return self._commits.run(self._pruning)

    def forget_publishers(self) -> None:
        """Removes the rows of publishers that have been idle for `publisher_ttl` (rule P6), and rows of what was passed
        on of topics that have been deleted, in bounded steps between the commits of others."""
        self._forget_publishers(PUBLISHER_KEY, PUBLISHER_KEY)
        cursor = self._rocks.cursor(META, fill_cache=False)
        try:
            passed_on = list(cursor.keys(PASSED_ON_KEY, PASSED_ON_KEY + b"\xff", limit=1))
        finally:
            cursor.close()
        if passed_on:
            self._forget_publishers(PASSED_ON_KEY, passed_on[0])

    def _forget_publishers(self, prefix: bytes, start: bytes) -> None:
        step = ForgetPublishers(self._rocks, self._commits.publishers, prefix, start, self._publisher_ttl_micros)

        def forgotten(following: bytes | StoreError | None) -> None:
            if isinstance(following, bytes):
                self._forget_publishers(prefix, following)

        self._commits.run_quietly(step).then(forgotten)

    def mark_clock(self) -> None:
        """Persists the clock's high-water mark (rule L15)."""
        self._commits.run_quietly(MarkClock())

    # -- the placement of cells -------------------------------------------------------------------------------------

    def placement(self) -> KeptPlacement | None:
        """The placement that was in force last; None: there was none."""
        row = self._rocks.get(META, PLACEMENT_KEY)
        return None if row is None else KeptPlacement(**json.loads(row))

    def keep_placement(self, placement: KeptPlacement | None) -> Pending[None]:
        """Remembers the placement that is in force from now on; None: there is none any more."""
        return self._commits.run(_KeepPlacement(placement))

    # -- the mark outside of the database ---------------------------------------------------------------------------

    def keep_mark(self) -> None:
        """Records, outside of the database, how much of it is on disk (rule X4): once a second, and not from the event
        loop, as it syncs."""
        try:
            self.write_mark()
        except (OSError, ValueError) as error:  # the latter: somebody has changed a file under the database
            if not self._marking_failed:
                self._marking_failed = True
                log.error("mark_failed", cause=str(error), effect="a loss at the end of the log may go unnoticed")
        else:
            self._marking_failed = False

    def write_mark(self) -> None:
        """As `keep_mark`. Raises OSError, ValueError."""
        writer = self._writer
        sequence, bounds = writer.synced_sequence, writer.bounds
        # Between two commits: if a write fails half-way, RocksDB removes its bytes from the log. A write may have
        # failed just before, which is known once the logs are synced.
        with writer.cut_lock:
            sizes = self._marker.log_sizes()
        self._marker.write(sizes, sequence, Bounds(*bounds), lambda: writer.queue.failure is None)

    # -- backups ----------------------------------------------------------------------------------------------------

    def backup(self, name: str) -> backups.Made:
        """Makes a backup in a new directory below the root: everything up to one sequence (rule J14). Raises
        StoreError, also BACKUP_UNAVAILABLE without a root and OVERLOADED while another one is made. Long, and not from
        the event loop."""
        if self._backup_root is None:
            raise StoreError(
                Reason.BACKUP_UNAVAILABLE, "backups are turned off; set root in [backup] of the server's configuration"
            )
        if (failure := self._writer.queue.failure) is not None:
            raise StoreError(failure.reason, "the store has stopped writing, and makes no backup; see the server's log")
        if not self._backing_up.acquire(blocking=False):
            raise StoreError(Reason.OVERLOADED, "another backup is being made", retry_after_micros=10 * MICROS)
        try:
            return backups.make(
                self._path, self._backup_root, name, instance=self._instance, checkpoint=self._checkpoint
            )
        finally:
            self._backing_up.release()

    def _checkpoint(self, path: Path) -> int:
        self._rocks.flush()
        with self._writer.cut_lock:  # between two commits, so that the sequence is known
            self._rocks.checkpoint(path)
            return self._writer.last_sequence

    # -- space ------------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Compacts everything; long, and without the GIL. Not from the event loop."""
        for family in FAMILIES:
            self._rocks.compact(family)

    def reclaim(self, at_least: int, go_on: Callable[[], bool]) -> int:
        """Compacts the ranges that deserve it (rule L17), if so many records, journal entries or expiry entries have
        been removed: part by part, while `go_on` returns True. Returns the number of parts.

        Long, and without the GIL; not from the event loop. One at a time. Raises RocksError.
        """
        writer = self._writer
        with writer.cut_lock:
            counts, sweep_floor = writer.removals.counts(), writer.sweep.floor
        done = 0
        first_commit, first_tombstone = self._first(COMMITS, b"") or b"", self._first(TOMBSTONES, MADE_ORDER)
        tasks = deserving(counts, self._topics.by_id, sweep_floor, first_commit, first_tombstone or MADE_END, at_least)
        for task in tasks:
            for family, ranges in task.ranges.items():
                for begin, end in self._rocks.parts(ranges, RECLAIM_BYTES):
                    if not go_on():
                        return done
                    self._rocks.compact(family, begin, end)
                    done += 1
            with writer.cut_lock:
                writer.removals.compacted(task)
        if done:
            self._rocks.flush()  # rows that are in no table file yet, of any family, keep the logs
        return done

    def _first(self, family: str, start: bytes) -> bytes | None:
        """The first key of a place; the rows before it were discarded."""
        cursor = self._rocks.cursor(family, fill_cache=False)
        try:
            return next(cursor.keys(start, None, limit=1), None)
        finally:
            cursor.close()

    def disk_bytes(self) -> int:
        """Bytes of the data directory."""
        return disk_bytes(self._path)

    def disk(self) -> Disk:
        """The disk of the data directory; free for this user."""
        found = shutil.disk_usage(self._path)
        return Disk(found.free, found.total)

    def write_stalled(self) -> bool:
        """True if RocksDB is slowing writes down now."""
        return self._rocks.write_stalled()

    # -- scrubbing --------------------------------------------------------------------------------------------------

    def scrub(self, pause: Callable[[], bool]) -> None:
        """Reads everything once, after a start that did not (too large); damage ends writing (rule X3).

        `pause` is called between chunks; it paces the scrub and answers False to end it. Not from the event loop.
        """
        try:
            for family in FAMILIES:
                if not self._scrub_family(family, pause):
                    return
        except Damaged as error:
            self._writer.fail(StoreError(Reason.DATA_DAMAGED, f"stored data is damaged: {error}"))
        except RocksError:
            log.exception("scrub_failed")  # nobody waits for its result

    def _scrub_family(self, family: str, pause: Callable[[], bool]) -> bool:
        """Reads a column family; False: it was ended."""
        start = b""
        while pause():
            # A cursor for each chunk: an open one keeps every file and memtable of its time, and this takes minutes.
            cursor = self._rocks.cursor(family, fill_cache=False)
            try:
                keys = list(cursor.keys(start, None, limit=SCRUB_KEYS))
            finally:
                cursor.close()
            if not keys:
                return True
            start = keys[-1] + b"\0"
        return False

    @property
    def verified_at_start(self) -> bool:
        """True if opening has read everything, so that no scrub is needed."""
        return self._rocks.table_bytes() <= self._verify_at_start_bytes


class Pruning:
    """The step of journal pruning; one for all its rounds. Answers whether there may be more in this round."""

    def __init__(self, core: Core, durables: Durables) -> None:
        self._rocks = core.rocks
        self._topics = core.topics
        self._durables = durables
        self._pruned_to: int | None = None
        """The topic that the last step ended with; None: the next step begins at the first."""
        self._first_kept: dict[int, int] = {}
        """The first retained sequence that this round has found, keyed by topic."""
        self._reached: int | None = None
        """The topic that the staged step ends with; None: it ends the round."""

    def stage(self, draft: Draft) -> None:
        """Stages the pruning of the next topics, and at the end of a round that of the commits."""
        topics = self._topics.by_id
        if self._pruned_to is None:
            self._first_kept.clear()
        # Sorted, because the store's own topic has the lowest id and may be the last created.
        ids = sorted(topic_id for topic_id in topics if self._pruned_to is None or topic_id > self._pruned_to)
        looked_at = 0
        heads_before = ChunkHeads.opened_total
        for topic_id in ids[:PRUNE_TOPICS]:
            looked_at += 1
            first = prune_topic(self._durables, draft, topics, topics[topic_id])
            if first is not None:
                self._first_kept[topic_id] = first
            if ChunkHeads.opened_total - heads_before >= PRUNE_READS:
                break
        more = looked_at < len(ids)
        self._reached = ids[looked_at - 1] if more else None
        if not more:
            # A topic that got its first entries after its turn keeps them.
            firsts = [first for topic_id, first in self._first_kept.items() if topic_id in topics]
            firsts += [
                topic.statistics.floor_sequence + 1
                for topic_id, topic in topics.items()
                if topic_id not in self._first_kept and draft.statistics.get(topic_id, topic.statistics).journal_entries
            ]
            prune_commits(self._rocks, firsts, draft.batch, draft.next_sequence - 1)

    def committed(self) -> bool:
        """True if there may be more."""
        self._pruned_to = self._reached
        return self._reached is not None


class ForgetPublishers:
    """The step that visits some rows of publishers, and removes publishers that have been idle for long; or some rows
    of what was passed on, and removes those of topics that have been deleted. Answers the row to continue at; None:
    that was all."""

    def __init__(self, rocks: Rocks, cache: PublisherCache, prefix: bytes, start: bytes, ttl_micros: int) -> None:
        self._rocks = rocks
        self._cache = cache
        self._prefix = prefix
        self._start = start
        self._ttl_micros = ttl_micros
        self._idle: list[str] = []
        self._following: bytes | None = None

    def stage(self, draft: Draft) -> None:
        """Stages the removals."""
        keys: list[bytes] = []
        rows: list[bytes] = []
        cursor = self._rocks.cursor(META, fill_cache=False)
        try:
            self._following = cursor.fill(self._start, self._prefix + b"\xff", PUBLISHERS_CHUNK, keys, rows)
        finally:
            cursor.close()
        if self._prefix == PASSED_ON_KEY:
            topics = draft.topics.by_id
            draft.batch.deletes[META] += [key for key in keys if passed_on_topic(key) not in topics]
            return
        idle_since = draft.now - self._ttl_micros
        self._idle = []
        for key, row in zip(keys, rows, strict=True):
            publisher = decode_publisher(row)
            if publisher.last_use_micros > idle_since:
                continue
            publisher_id = key[len(PUBLISHER_KEY) :].decode()
            self._idle.append(publisher_id)
            draft.batch.deletes[META].append(key)
            if publisher.has_passed_on:
                prefix = passed_on_prefix(publisher_id)
                draft.batch.ranges.append((META, prefix, prefix + b"\xff" * 5))

    def committed(self) -> bytes | None:
        """Forgets them in memory, too."""
        for publisher_id in self._idle:
            self._cache.forget(publisher_id)
        return self._following


class _KeepPlacement:
    """The step that writes the placement that is in force."""

    def __init__(self, placement: KeptPlacement | None) -> None:
        self._placement = placement

    def stage(self, draft: Draft) -> None:
        """Stages the row."""
        if self._placement is None:
            draft.batch.deletes[META].append(PLACEMENT_KEY)
        else:
            draft.batch.puts[META][PLACEMENT_KEY] = json.dumps(self._placement._asdict()).encode()

    def committed(self) -> None:
        """Has no effects."""


class MarkClock:
    """The step that writes the clock's high-water mark."""

    def stage(self, draft: Draft) -> None:
        """Stages the row."""
        draft.batch.puts[META][CLOCK_KEY] = i64(draft.now)

    def committed(self) -> None:
        """Has no effects."""
