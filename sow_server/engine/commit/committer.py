"""The commits of the writer: a draft becomes one batch on disk, and then the committed state.

[1]  The state in memory changes only after the batch is written, under the cut lock: whoever holds the lock sees disk
     and memory between two commits.
[2]  Followers get a commit once it is durable (rule S7), before the answers that wait for the same sync.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Final

import structlog

from sow_server.engine.catalog.rows import topic_row
from sow_server.engine.commit.delivery import Answers
from sow_server.engine.commit.draft import Basis, Draft
from sow_server.engine.commit.expiry import Sweep
from sow_server.engine.commit.failures import as_store_error
from sow_server.engine.commit.letter_copies import Fate
from sow_server.engine.commit.observers import Committed, Follow, Observer
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.passed_on import PassedOnRows
from sow_server.engine.commit.publishers import PublisherCache
from sow_server.engine.commit.queue import WriteQueue
from sow_server.engine.commit.reclaim import Removals
from sow_server.engine.disk.layout import (
    BOUNDS_KEY,
    CLOCK_KEY,
    Reached,
    Reserved,
    decode_bounds,
    encode_bounds,
    encode_reached,
    publisher_key,
)
from sow_server.engine.disk.rocks import META, Batch
from sow_server.engine.stored import i64
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.database import RocksError, Stalled
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

log = structlog.get_logger(__name__)


class Committer:
    """Owns the counters and their bounds on disk, the followers, and the caches that commits change. Used by the
    writer's thread; other threads read the counters, and the rest under the cut lock."""

    def __init__(
        self,
        basis: Basis,
        clock: GuardedClock,
        queue: WriteQueue,
        answers: Answers,
        *,
        options: WriterOptions,
        observer: Observer,
    ) -> None:
        rocks = basis.rocks
        self._basis = basis
        self._rocks = rocks
        self._topics = basis.topics
        self._heads = basis.heads
        self._clock = clock
        self._queue = queue
        self._answers = answers
        self._options = options
        self._observer = observer
        reserved = decode_bounds(rocks.get(META, BOUNDS_KEY))
        self.start_sequence: Final = reserved.sequence
        """The last sequence that may have been used before the start."""
        self._last_version = reserved.version
        self.last_sequence = reserved.sequence
        """The last written sequence."""
        self.synced_sequence = reserved.sequence
        """Everything up to this sequence is durable, so followers may see it (rule S7)."""
        self.unsynced_since: int | None = None
        """When the first commit was written that is not yet durable."""
        self._version_bound = reserved.version
        self._sequence_bound = reserved.sequence
        self.cut_lock: Final = threading.Lock()
        """Held while a commit is written: its holder sees all column families between two commits."""
        self.sweep: Final = Sweep(rocks, basis.topics)
        self.publishers: Final = PublisherCache(lambda name: rocks.get(META, publisher_key(name)), PassedOnRows(rocks))
        self._followers: list[Follow] = []
        self._to_follow: list[Committed] = []
        self.expired_total = 0
        """Expired records that were removed since the start."""
        self.letters_total: Final[dict[str, int]] = dict.fromkeys(Fate, 0)
        """The outcomes of dead letters."""
        self.removals: Final = Removals()
        """Removals that are not yet compacted; under the cut lock."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The bounds up to which versions and sequences are reserved, on disk."""
        return self._version_bound, self._sequence_bound

    def follow(self, follow: Follow) -> None:
        """From the next commit on, tells `follow`, too, of changes. Before the writer starts, or under the cut lock."""
        self._followers.append(follow)

    def new_draft(self) -> Draft:
        """A draft that continues the counters of the last commit."""
        return Draft(
            self._basis,
            now_micros=self._clock.now_micros(),
            last_version=self._last_version,
            next_sequence=self.last_sequence + 1,
        )

    def write(self, draft: Draft, *, sync: bool) -> StoreError | None:
        """Writes a draft, and syncs; adopts its counters. Returns the reason why nothing was written, or None."""
        if self._queue.failure is not None:
            # It failed earlier in this turn: nothing may be written after a gap (writer [3]).
            return self._queue.refusal()
        try:
            self.sweep.lower(draft)
            if draft.new_topics:
                draft.batch.puts[META].update(map(topic_row, draft.new_topics))
            batch = draft.finish()
            if self._rocks.marking:
                batch.note = encode_reached(Reached(draft.next_sequence - 1, draft.now))
            self._reserve(draft)
            self._write_patiently(batch, draft)
        except Stalled as error:
            self._observer.stalled()
            return StoreError(
                Reason.WRITE_STALLED,
                f"the disk cannot keep up, nothing was written: {error}",
                retry_after_micros=MICROS,
            )
        except RocksError as error:
            return self.fail(as_store_error(error))
        except Exception as error:  # writer [5]: perhaps written, perhaps not; the state in memory may be wrong
            log.exception("commit_failed")
            return self.fail(StoreError(Reason.STORE_FAILED, f"a commit met an unexpected error: {error!r}"))
        if self.unsynced_since is None:
            self.unsynced_since = draft.now
        if sync:
            failed = self.sync()
            if failed is not None:
                return failed
        return None

    def _write_patiently(self, batch: Batch, draft: Draft | None = None) -> None:
        """Writes, waiting out short stalls (rocks [6]). The effects of a commit in memory are applied under the cut
        lock."""
        give_up, pause = 0.0, 0.005
        while True:
            try:
                with self.cut_lock:
                    self._rocks.write(batch)
                    if draft is not None:
                        self._take_over(draft)
                return
            except Stalled:
                give_up = give_up or time.monotonic() + self._options.stall_patience_micros / MICROS
                if time.monotonic() >= give_up:
                    raise
                self._observer.stalled()
                time.sleep(pause)
                pause = min(0.1, pause * 2)

    def _take_over(self, draft: Draft) -> None:
        self._last_version = max(self._last_version, draft.next_version - 1)
        self.last_sequence = draft.next_sequence - 1
        self._heads.update(draft.heads, draft.removed)
        for topic in draft.new_topics:
            self._topics.add(topic)
        topics = self._topics.by_id
        self.removals.count(draft, topics)
        for topic_id, figures in draft.statistics.items():
            if (changed := topics.get(topic_id)) is not None:
                emptied = changed.settings.only_if_empty and changed.statistics.records > 0 == figures.records
                changed.statistics = figures
                if emptied:
                    self._topics.lost(changed)
        for publisher_id, publisher in draft.publishers.items():
            self.publishers.keep(publisher_id, publisher)
        self.sweep.committed(draft)
        if self._followers and (draft.journal.chunks or draft.after is not None):
            control = draft.after is not None
            self._to_follow.append(
                Committed(self.last_sequence, draft.now, draft.journal.chunks, control, draft.dropped)
            )
        self.expired_total += len(draft.expire_times)
        for fate, count in draft.counts.items():
            self.letters_total[fate] += count
        for follow in draft.on_commit:
            follow()
        # Some of these hold the draft. It would stay, with all its rows, until the garbage collector comes.
        draft.on_commit.clear()
        if draft.after is not None:
            draft.result = draft.after()

    def _reserve(self, draft: Draft) -> None:
        """Reserves versions and sequences on disk, synced, before a draft uses any beyond the bound (writer [4])."""
        if draft.next_version <= self._version_bound and draft.next_sequence <= self._sequence_bound:
            return
        # Mostly from the clock: if reserved from the next version on, each crash would move versions further ahead of
        # it.
        version = max(
            draft.now + self._options.version_reserve_micros,
            draft.next_version + self._options.version_reserve_micros // 4,
        )
        sequence = max(self._sequence_bound, draft.next_sequence + self._options.sequence_reserve)
        self._write_meta({BOUNDS_KEY: encode_bounds(Reserved(version, sequence)), CLOCK_KEY: i64(draft.now)})
        self._version_bound, self._sequence_bound = version, sequence

    def _write_meta(self, rows: dict[bytes, bytes]) -> None:
        batch = Batch()
        batch.puts[META].update(rows)
        self._write_patiently(batch)
        self._rocks.sync()

    def sync(self) -> StoreError | None:
        """Makes all commits durable, and reports them to the followers. Returns the reason why it failed, or None."""
        try:
            self._rocks.sync()
        except RocksError as error:
            return self.fail(as_store_error(error))
        self.unsynced_since = None
        self.synced_sequence = self.last_sequence
        if self._followers:
            committed, self._to_follow = self._to_follow, []
            # Before the answers of the same turn: a caller with its answer finds that subscribers are about to get
            # their changes.
            self._answers.waiting += [partial(follow, committed, self.synced_sequence) for follow in self._followers]
        return None

    def sync_if_due(self, now: int) -> bool:
        """Makes commits durable that need not be so at once, after a while. Returns whether it was time."""
        since = self.unsynced_since
        if since is None or now - since < self._options.buffered_sync_micros or self._queue.failure is not None:
            return False
        self.sync()
        return True

    def finish(self) -> None:
        """At an orderly stop: syncs, and returns unused reservations."""
        if self._queue.failure is not None:
            return
        try:
            bounds = encode_bounds(Reserved(self._last_version, self.last_sequence))
            self._write_meta({BOUNDS_KEY: bounds, CLOCK_KEY: i64(self._clock.now_micros())})
        except RocksError as error:
            self.fail(as_store_error(error))

    def fail(self, error: StoreError) -> StoreError:
        """Ends writing for good (writer [3]); returns the refusal of everything after it. From any thread."""
        if self._queue.fail(error):
            log.error("writes_stopped", reason=error.reason.name, cause=error.message)
        return self._queue.refusal()
