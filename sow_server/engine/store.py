"""The store: opens a data directory, builds the parts in one visible order, starts and closes them.

    [1]  A part is handed out only once it is complete: the holder of a `Store` may use every part of it.
    [2]  Everything that was opened is closed: cursors, column families, the lock on the directory.

Changes go through `commits` (and the parts that use it) to the writer's thread. Reads go through `cuts` and may come
from any thread. Without `start` there is no thread, and `run` does one request at a time in the caller's: start-up and
the tests work that way.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from sow_peering.answers import Unanswered
from sow_server.engine.administration.administration import Administration
from sow_server.engine.administration.creating import TopicCreation
from sow_server.engine.administration.parts import Parts
from sow_server.engine.background import Background
from sow_server.engine.catalog.policies_in_force import PoliciesInForce
from sow_server.engine.catalog.rows import load_policies, load_topics
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.commit import letter_posting, tombstones
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.delivery import Deliver
from sow_server.engine.commit.draft import Basis
from sow_server.engine.commit.observers import NoObserver, Observer
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.origins import Origins
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.commit.soundness import SoundnessReports
from sow_server.engine.commit.writer import Writer
from sow_server.engine.core import Core
from sow_server.engine.derived import PlanOf, Views, resume
from sow_server.engine.disk.heads import HeadCache
from sow_server.engine.disk.rocks import Rocks
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.durables import Durables
from sow_server.engine.durables.commits import DurableCommits
from sow_server.engine.following import Beats
from sow_server.engine.loads import LoadOptions, Loads, removal_marks
from sow_server.engine.opening import Accepted, Opened, closed_if_refused, open_database
from sow_server.engine.pending import Pending
from sow_server.engine.reading import Cuts
from sow_server.engine.replicas import ReplicaOptions, Replicas
from sow_server.engine.upkeep import Upkeep
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.database import RocksError, RocksOptions
from sow_server.engine.values.errors import OpenError, StoreError
from sow_server.engine.values.model import MICROS, Outcome, Request
from sow_server.engine.values.policies import NOTHING, Declared

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Bounds and behaviour of the store."""

    instance: str = "sow"
    dynamic_topics: bool = False
    head_cache_records: int = 400_000
    verify_at_start_bytes: int = 16 * 2**20
    publisher_ttl_micros: int = 7 * 86_400 * MICROS
    backup_root: Path | None = None
    """The directory of backups; None: none can be made (rule J14)."""
    defaults: Declared = field(default_factory=lambda: NOTHING)
    """Settings of topics for which neither the topic nor a policy declares a value (rule T2)."""
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)
    plan_of: PlanOf | None = None
    """Compiles the definitions of views; None: the store has none (rule V1)."""
    loads: LoadOptions = field(default_factory=LoadOptions)
    writer: WriterOptions = field(default_factory=WriterOptions)
    rocks: RocksOptions = field(default_factory=RocksOptions)


class Store:
    """The parts of an open store. Make one with `Store.open`."""

    def __init__(self, opened: Opened, clock: GuardedClock, options: StoreOptions, observer: Observer) -> None:
        """Use `Store.open`."""
        rocks = self._rocks = opened.rocks
        self._clock = clock
        self.limits: Final[RequestLimits] = options.writer.limits
        """The limits of records and requests (rule K8)."""
        self.instance: Final = opened.instance

        # Topics, policies, origins.
        self.origins: Final = Origins(rocks, opened.origins, opened.origin)
        self.topics: Final = _load_topics(rocks, self.origins, clock.now_micros())
        policies = PoliciesInForce(load_policies(rocks), options.defaults)
        self.unsound: Final = SoundnessReports()

        # The writer, the ways to it, and reading.
        self.views: Final = Views(rocks, self.topics, options.plan_of)
        self.writer: Final = _make_writer(opened, self.topics, self.views, clock, options, observer)
        self.commits: Final = Commits(self.writer, self.topics, lambda: self.views.seconds)
        self.cuts: Final = Cuts(rocks, clock, self.topics, self.writer, self.unsound)
        core = Core(
            rocks, self.topics, clock, self.commits, self.cuts, self.origins, self.instance, self.limits, self.unsound
        )
        self.beats: Final = Beats(core)
        self.background: Final = Background(core)

        # The followers of topics beside subscribers: other instances, and durables.
        self.replicas: Final = Replicas(core, opened.path, options.replicas, self.writer.sweep)
        for topic in self.topics.by_id.values():
            topic.replicated = self.replicas.shared.covers(topic.name)
        self.views.load()
        self.durables: Final = _make_durables(opened, policies, self.replicas, self.topics)
        self.durable_commits: Final = DurableCommits(core, self.durables)

        # Changes of topics and policies.
        creation = TopicCreation(core, policies, self.background, self.views, covers=self.replicas.shared.covers)
        if options.dynamic_topics:
            self.writer.create_topic = creation.dynamic_step
        self.loads: Final = Loads(
            core, options.loads, create_topic=creation.create_dynamic if options.dynamic_topics else None
        )
        parts = Parts(
            core=core,
            policies=policies,
            sweep=self.writer.sweep,
            background=self.background,
            durables=self.durables,
            replicas=self.replicas,
            loads=self.loads,
            views=self.views,
        )
        self.administration: Final = Administration(
            parts, self.commits, creation, dynamic_topics=options.dynamic_topics
        )
        self.upkeep: Final = Upkeep(
            core,
            opened,
            self.writer,
            self.durables,
            publisher_ttl_micros=options.publisher_ttl_micros,
            verify_at_start_bytes=options.verify_at_start_bytes,
            backup_root=options.backup_root,
        )

        # What the rest of the server holds.
        self.reads: Final = Reads(
            self.cuts, self.origins, self.instance, self.topics, clock, self.durables, self.unsound
        )
        self.writes: Final = Writes(
            self.commits, self.administration, self.durable_commits, self.loads, self.replicas, self.upkeep
        )

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
        """Opens, or makes, the store in the directory `path`. A backup becomes a separate instance there (rule J14);
        `authoritative`: peers adopt its data unchanged. `accept_loss`: continues although the end of the log is missing
        (rule X4). Raises OpenError with one clear message."""
        options = options or StoreOptions()
        clock = clock or GuardedClock()
        opened = open_database(
            path,
            name=options.instance,
            rocks_options=options.rocks,
            verify_at_start_bytes=options.verify_at_start_bytes,
            clock=clock,
            accepted=Accepted(clock=accept_clock, loss=accept_loss, authoritative=authoritative),
        )
        with closed_if_refused(path, opened.rocks):
            store = cls(opened, clock, options, observer or NoObserver())
            store._resolve_settings(path)
            store.upkeep.write_mark()
            return store

    def _resolve_settings(self, path: Path) -> None:
        """The server's defaults may differ from those of the last process. Raises OpenError."""
        resolved = self.administration.resolve_all()
        if resolved is not None:
            try:
                self.finish(resolved)
            except StoreError as error:
                raise OpenError(f"{path}: the settings of topics cannot be stored ({error.message})") from error

    def start(self, deliver: Deliver) -> None:
        """Expires the records that fell due while the store was closed, as far as that is quick (rule L11), and starts
        the writer's thread; answers go through `deliver`."""
        if not self._clock.paused:
            self.writer.sweep_now(entries_max=10_000)
        self.writer.start(deliver)
        self.begin_work()

    def begin_work(self) -> None:
        """Begins the work in the background, and resumes what the last process has not finished. A start does not wait
        for it."""
        self.background.begin()
        resume(self._rocks, self.background, self.views)

    def close(self) -> None:
        """Finishes the queue, syncs, and frees the directory."""
        self.writer.stop()
        if self.writer.queue.failure is None:
            # The next start then has no log to replay. Nothing depends on it: acknowledged changes are in the log.
            with contextlib.suppress(RocksError):
                self._rocks.flush()
        self.upkeep.keep_mark()
        self._rocks.close()

    # -- without the writer's thread --------------------------------------------------------------------------------

    def run(self, request: Request) -> Outcome:
        """Does a change now. Raises StoreError."""
        return self.finish(self.commits.submit(request))

    def finish(self, pending: Pending[T]) -> T:
        """Does now what was queued, and returns the answer of one of these changes. Raises StoreError."""
        self.writer.step()
        answer = pending.given
        if isinstance(answer, StoreError):
            raise answer
        assert not isinstance(answer, Unanswered), "the queue is empty"
        return answer

    def sweep(self) -> int:
        """Expires due records. Returns the index entries visited."""
        return 0 if self._clock.paused else self.writer.sweep_now()

    def sync(self) -> None:
        """Makes all writes durable, as the thread does within moments."""
        self.writer.sync_now()


def _load_topics(rocks: Rocks, origins: Origins, now_micros: int) -> Topics:
    topics = Topics()
    topics.origins = origins
    for topic in load_topics(rocks):
        topic.last_use_micros = now_micros  # its use before the start is unknown (rule T1)
        topics.add(topic)
    return topics


def _make_durables(opened: Opened, policies: PoliciesInForce, replicas: Replicas, topics: Topics) -> Durables:
    return Durables(opened.rocks, lambda: policies.current, replicas.peers.held, topics.lost, by=opened.instance.id)


def _make_writer(
    opened: Opened, topics: Topics, views: Views, clock: GuardedClock, options: StoreOptions, observer: Observer
) -> Writer:
    basis = Basis(
        opened.rocks,
        topics,
        HeadCache(options.head_cache_records),
        opened.origin,
        (removal_marks.on_removed, tombstones.on_removed, letter_posting.on_removed),
        views.hooks,
    )
    return Writer(basis, clock, options=options.writer, observer=observer)
