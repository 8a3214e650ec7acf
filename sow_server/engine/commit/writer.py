"""The single writer: turns queued requests into atomic commits, in order.

[1]  A request is acknowledged only after its records are as durable as it asked (rule P5).
[2]  Expiries pass through this writer like any other change, in separate commits.
[3]  A commit that fails on input or output ends all writing (rule X3): queued and later requests are refused, reads go
     on. A stalled commit is tried again, unchanged, and refused when the stall lasts.
[4]  Versions and sequences are reserved on disk before they are used (rule K7).
[5]  No exception ends the thread silently: an unexpected one fails its own request, or the store.

              submit                    commit failed
  serving ─────────────────▶ serving ───────────────────▶ failed
     └──────── stop: drains the queue, syncs ───▶ stopped ◀┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from sow_server.engine.commit import first_publish
from sow_server.engine.commit.caps import SweepFirst
from sow_server.engine.commit.committer import Committer
from sow_server.engine.commit.delivery import Answers, Deliver
from sow_server.engine.commit.draft import Basis, Draft
from sow_server.engine.commit.failures import as_store_error, broken_stream
from sow_server.engine.commit.mutations import (
    fetch_heads,
    fetch_values,
    stage_aborted,
    stage_decided,
    stage_job,
    stage_refused,
)
from sow_server.engine.commit.observers import Follow, Observer
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.pace import CallsUnderWay, SweepPace
from sow_server.engine.commit.queue import QueuedStep, WriteQueue
from sow_server.engine.commit.requests import AtomicAborted, Job, Slice, prepare
from sow_server.engine.commit.steps import Step, TopicStep
from sow_server.engine.commit.work import Room, atomic_too_large, merge_room
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.database import RocksError
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, Durability, Publish

log = structlog.get_logger(__name__)

AT_FAULT: Final = (
    Reason.TOPIC_NOT_FOUND,
    Reason.TOPIC_ELSEWHERE,
    Reason.KEY_REQUIRED,
    Reason.KEY_NOT_ALLOWED,
    Reason.VIEW_READ_ONLY,
)
"""A topic or its keys are at fault: the records of such a request are refused, and the stream goes on (rule P4)."""
ASIDE_MAX: Final = 32
"""Items that do not fit into a commit before it is written as it is: to look at each costs its keys and its heads."""


class Writer:
    """Owns the write queue and the turns of its items. Its thread is the only one that writes."""

    def __init__(self, basis: Basis, clock: GuardedClock, *, options: WriterOptions, observer: Observer) -> None:
        self._topics = basis.topics
        self._clock = clock
        self._options = options
        self._observer = observer
        self.create_topic: Callable[[str], TopicStep] | None = None
        """The step that creates a topic at the first publish to it; None: a publish creates none. Set before any."""
        self.elsewhere: Callable[[str], StoreError | None] | None = None
        """The refusal of a topic that lives in another cell (rule C4); None: there are no cells. Set before any."""
        self.queue: Final = WriteQueue(
            requests_max=options.queue_requests_max, bytes_max=options.queue_bytes_max, shared=options.queue_shared
        )
        self._answers: Final = Answers(self.queue)
        committer = Committer(basis, clock, self.queue, self._answers, options=options, observer=observer)
        self.committer: Final = committer
        self.heads: Final = basis.heads
        self.sweep: Final = committer.sweep
        self.publishers: Final = committer.publishers
        self.calls: Final = CallsUnderWay()
        self.calls.wake = self.queue.wake
        self._pace: Final = SweepPace(options, self.calls)
        self.busy: Final[Callable[[], bool]] = lambda: self._pace.busy(clock.now_micros())
        """Returns True if somebody published a short time ago. From any thread."""
        self._merge_room: Final = merge_room(options)
        self._one_each = 0
        """So many commits take one job each: staging some together has failed, and the one at fault is among them."""
        self._thread: threading.Thread | None = None

        # The committed state, for callers.
        self.cut_lock: Final = committer.cut_lock
        self.start_sequence: Final = committer.start_sequence
        self.letters_total: Final = committer.letters_total
        self.removals: Final = committer.removals
        self.follow: Final[Callable[[Follow], None]] = committer.follow
        self.fail: Final[Callable[[StoreError], StoreError]] = committer.fail
        """Ends writing from outside, too: a check of the data has found damage."""

    @property
    def last_sequence(self) -> int:
        """The last written sequence."""
        return self.committer.last_sequence

    @property
    def synced_sequence(self) -> int:
        """Everything up to this sequence is durable, so followers may see it (rule S7)."""
        return self.committer.synced_sequence

    @property
    def bounds(self) -> tuple[int, int]:
        """The bounds up to which versions and sequences are reserved, on disk."""
        return self.committer.bounds

    @property
    def expired_total(self) -> int:
        """Expired records that were removed since the start."""
        return self.committer.expired_total

    # -- running ----------------------------------------------------------------------------------------------------

    def start(self, deliver: Deliver) -> None:
        """Starts the thread; answers go through `deliver`."""
        self._answers.deliver = deliver
        self._thread = threading.Thread(target=self._run, name="sow-writer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuses new requests, finishes queued ones, syncs, and ends the thread."""
        if not self.queue.stop():
            return
        if self._thread is not None:
            self._thread.join()
        else:
            self.step()
        self.committer.finish()

    def step(self) -> None:
        """Without a thread (start-up, tests): processes the whole queue, then returns."""
        while self.queue.take(0):
            if not self._turn():
                break
            if not len(self.queue):
                self._answers.flush()  # an answer may queue more
        self._answers.flush()

    def sweep_now(self, entries_max: int | None = None) -> int:
        """Without a thread: sweeps due records, in bounded commits. Returns the entries visited."""
        visited = 0
        while self.queue.failure is None and self.sweep.next_due <= self._clock.now_micros():
            step = self._sweep_once(self._options.sweep_entries_max)
            visited += step
            if step == 0 or (entries_max is not None and visited >= entries_max):
                break
        return visited

    def sync_now(self) -> None:
        """Without a thread: syncs the writes that are not yet durable."""
        if self.committer.unsynced_since is not None and self.queue.failure is None:
            self.committer.sync()
            self._answers.flush()

    def _run(self) -> None:
        try:
            now, paused = self._clock.look()
            while True:
                if self.queue.take(self._wait_micros(now, paused=paused)) and not self._turn():
                    break
                answered = self._answers.flush()  # before the sweep: they have waited long enough
                now, paused = self._do_due(after_answers=answered)
        except BaseException as error:  # [5]: whatever the exception, no caller may wait for a writer that has ended
            log.exception("writer_died")
            self.fail(StoreError(Reason.STORE_FAILED, f"the writer met an unexpected error: {error!r}"))
        finally:
            self._refuse_all()
            self._answers.flush()

    def _do_due(self, *, after_answers: bool) -> tuple[int, bool]:
        """Sweeps, and syncs BUFFERED commits, if it is time. Returns the last look at the clock: one is enough for all
        this, and for the wait behind it."""
        now, paused = self._clock.look()
        if not paused and self._sweep_if_due(now, after_answers=after_answers):
            now, paused = self._clock.look()
        if self.committer.sync_if_due(now):
            self._answers.flush()
            now, paused = self._clock.look()
        return now, paused

    def _wait_micros(self, now: int, *, paused: bool) -> int:
        """How long the writer may sleep when nothing is queued."""
        if len(self.queue):
            return 0
        wait = MICROS
        if self.queue.failure is None:
            if not paused:
                due = max(self.sweep.next_due, self._pace.next_micros)
                wait = min(wait, (due if due > now else self._pace.not_before()) - now)
            if (since := self.committer.unsynced_since) is not None:
                wait = min(wait, since + self._options.buffered_sync_micros - now)
        return max(0, wait)

    def _turn(self) -> bool:
        """Does the next step, or commits the next jobs. False: stop."""
        item = self.queue.next()
        if item is None:
            return not self.queue.stopped
        if self.queue.failure is not None:
            self._refuse_all()
        elif isinstance(item, QueuedStep):
            self._do_step(item)
        else:
            self._commit_next(item)
        return True

    # -- jobs -------------------------------------------------------------------------------------------------------

    def _commit_next(self, first: Job) -> None:
        """Chooses the jobs of the next commit, by turns, with how many records of each, and commits them. Refused jobs
        are answered here. `first`: the one whose turn it is."""
        queue = self.queue
        room = Room(self._options)
        chosen: list[tuple[Job, int]] = []
        draft: Draft | None = None
        aside: list[Job | QueuedStep] = []
        """Items that wait for a later commit, in their turns."""
        job: Job | QueuedStep | None = first
        while job is not None and len(aside) < ASIDE_MAX:
            # Whether the topic of a job is created may depend on the outcome of the others.
            if not isinstance(job, Job) or (
                chosen and (job.alone or first_publish.creates(self.create_topic, self._topics, job))
            ):
                aside.append(job)
                job = queue.next(aside)
                continue
            if not self._ready(job):
                job = queue.next(aside)
                continue
            if job.refused is not None:
                if not chosen:
                    self._refuse_records(job, job.refused)
                    break
                aside.append(job)  # its publisher's records before it are among them
                job = queue.next(aside)
                continue
            if job.swept_micros and self.sweep.next_due <= job.swept_micros:
                if chosen:
                    aside.append(job)
                    job = queue.next(aside)
                    continue
                self._sweep_for(job)
                break
            if draft is None or not chosen:
                draft = self.committer.new_draft()  # only now: to make the first one ready may have taken a commit
            left = job.left
            try:
                fits = room.take(draft, job, first=not chosen)
            except Exception as error:  # noqa: BLE001  # damage under one key, or a refusal ([5])
                if not chosen and job.alone and (part := stage_decided(draft, job, self.publishers)) is not None:
                    queue.taken(job, 1.0)
                    self._finish_jobs(draft, [(job, part)], time.perf_counter())
                    return
                self._answers.refuse(job, as_store_error(error))
                job = queue.next(aside)
                continue
            if fits is None:
                aside.append(job)
            else:
                records, share = fits
                chosen.append((job, records))
                if records < left:
                    queue.kept(job, share)
                    break
                queue.taken(job, share)
                if job.alone or self._one_each or not room.left:
                    break
            job = queue.next(aside)
        if aside:
            queue.begin_next(aside, [job for job, _ in chosen])
        if draft is not None and chosen:
            self._commit_jobs(draft, chosen)

    def _ready(self, job: Job) -> bool:
        """Finds the job's topic and derives its keys; a refused job is answered. Other items may have come between two
        parts of a job: then its topic may have other settings, or be gone."""
        request, topic, job.refused = job.request, job.topic, None
        if isinstance(request, Publish) and request.channel is not None and self._ends_broken(job):
            return False
        # Once more, as it may have moved since the request was let in. One that has begun goes on to its end: to the
        # caller the refusal says that nothing was applied, and it repeats all of it in the other cell.
        if self.elsewhere is not None and not job.position and (moved := self.elsewhere(request.topic)) is not None:
            return self._refuse(job, moved)
        if topic is not None:
            if self._topics.by_id.get(topic.id) is topic:
                if job.settings is topic.settings:
                    return True
            elif job.position:
                job.topic = None
                message = f"topic: {topic.name} was deleted meanwhile"
                return self._refuse(job, StoreError(Reason.TOPIC_NOT_FOUND, message, field="topic"))
        try:
            if isinstance(request, Publish) and request.refused is not None:
                raise request.refused
            create = self.create_topic
            creation = None if create is None else first_publish.creation(create, self._topics, request)
            if creation is not None:
                refused = first_publish.refused(self.committer.new_draft, job, creation, self._options, self.publishers)
                if refused is not None:
                    draft = self.committer.new_draft()
                    draft.publishers.update(refused.publishers)
                    error = self.committer.write(draft, sync=request.durability is not Durability.BUFFERED)
                    self.queue.taken(job, 1.0)
                    self._answers.give(job, error or refused.outcome)
                    return False
                created = self._run_step(creation)
                if isinstance(created, StoreError):
                    raise created
            prepare(job, self._topics.find(request.topic), self._options.limits)
        except StoreError as error:
            return self._refuse(job, error)
        except Exception as error:  # [5]: a fault of ours fails its own request
            log.exception("request_failed", topic=request.topic)
            self._answers.refuse(job, StoreError(Reason.INTERNAL, f"internal error: {type(error).__name__}"))
            return False
        return True

    @property
    def leaves(self) -> bool:
        """True while the rest of a request waits whose topic has moved. Writer's thread only."""
        elsewhere = self.elsewhere
        return elsewhere is not None and any(elsewhere(job.request.topic) for job in self.queue.begun)

    def _refuse(self, job: Job, error: StoreError) -> bool:
        """Refuses a job that cannot be prepared. True: it is one of a stream, and its topic or its keys are at fault.
        Then its records are to be refused in their turn, and the stream goes on (rule P4)."""
        request = job.request
        at_fault = error.reason in AT_FAULT
        if isinstance(request, Publish) and request.channel is not None and request.payloads and at_fault:
            job.refused = error
            return True
        self._answers.refuse(job, error)
        return False

    def _refuse_records(self, job: Job, error: StoreError) -> None:
        draft = self.committer.new_draft()
        try:
            part = stage_refused(draft, job, error, self.publishers)
        except StoreError as fenced:
            self._answers.refuse(job, fenced)
            return
        self.queue.taken(job, 1.0)
        job.outcome.refused = error
        self._finish_jobs(draft, [(job, part)], time.perf_counter())

    def _commit_jobs(self, draft: Draft, chosen: list[tuple[Job, int]]) -> None:
        """Commits slices of jobs together. One that is refused when it is staged is answered, and the others go on."""
        started = time.perf_counter()
        draft.journal.atomic = chosen[0][0].alone
        draft.merge_room = self._options.commit_merged_bytes_max if draft.journal.atomic else self._merge_room
        self._one_each = max(0, self._one_each - 1)
        parts: list[tuple[Job, Slice]] = []
        rest: dict[str, list[Job]] = {}
        """The rest of each caller's job that was cut short, and the caller's jobs behind it."""
        refused = False
        try:
            due = self.sweep.next_due
            if due > draft.now or not self._clock.paused:
                draft.next_due = due
            fetch_heads(draft, chosen)
            fetch_values(draft, chosen)
            for job, count in chosen:
                if rest and (behind := rest.get(job.caller)) is not None:
                    behind.append(job)
                    continue
                if draft.merge_room <= 0 and job.delta is not None and parts:
                    rest[job.caller] = [job]
                    continue
                if job.answered or (refused and self._ends_broken(job)):
                    continue
                begun = draft.next_sequence
                try:
                    part = stage_job(draft, job, count, self.publishers)
                except StoreError as error:
                    if draft.next_sequence != begun or job.alone:
                        raise
                    self._answers.refuse(job, error)
                    refused = True
                    continue
                if part.count < count:
                    if job.alone:
                        raise atomic_too_large(job, self._options)
                    rest[job.caller] = [job]
                parts.append((job, part))
            draft.end_request()
        except AtomicAborted as aborted:
            self._abort(chosen[0][0], aborted)
            return
        except SweepFirst as waiting:
            # Nothing has been written. The others go on without it, and it has its turn after the sweep.
            waiting.job.swept_micros = draft.now
            self.queue.put_back([job for job, _ in chosen if not job.answered])
            return
        except Exception as error:  # noqa: BLE001  # damage under one key, or a fault of ours ([5])
            if len(chosen) == 1:
                self._answers.refuse(chosen[0][0], as_store_error(error))
                return
            # Nothing has been written. With a commit for each, the one at fault is found.
            self._one_each = len(chosen)
            self.queue.put_back([job for job, _ in chosen if not job.answered])
            return
        for caller, jobs in rest.items():
            self.queue.put_back(jobs)
            self.queue.charge(caller, 1.0)
        if parts:
            self._finish_jobs(draft, parts, started)

    def _ends_broken(self, job: Job) -> bool:
        """Answers a job whose stream has had a refusal; False: there was none."""
        if isinstance(job.request, Publish) and (channel := job.request.channel) is not None and channel.broken:
            self._answers.refuse(job, broken_stream(job))
            return True
        return False

    def _finish_jobs(self, draft: Draft, parts: list[tuple[Job, Slice]], started: float) -> None:
        fsync = False
        for job, _ in parts:
            fsync |= job.request.durability is not Durability.BUFFERED
        error = self.committer.write(draft, sync=fsync)
        if error is not None:
            for job, _ in parts:
                self._answers.refuse(job, error)
            return
        records, published = 0, False
        for job, part in parts:
            job.merge(part)
            published |= not job.is_part
            job.outcome.durability = Durability.FSYNC if fsync else Durability.BUFFERED
            records += part.applied
            if part.applied and isinstance(job.request, Publish):
                assert job.topic is not None, "the job has been prepared"
                if job.topic.settings.publish_is_use:
                    job.topic.last_use_micros = draft.now
            if job.caps is not None and part.refusals and job.topic is not None:
                job.topic.full_refusals += sum(one.reason is Reason.TOPIC_FULL for one in part.refusals)
            if job.left == 0:
                self._answers.give(job, job.outcome)
        if published:
            self._pace.published(draft.now)
        self._observer.committed(records, time.perf_counter() - started)

    def _abort(self, job: Job, aborted: AtomicAborted) -> None:
        """Answers an atomic request of which nothing was applied, and remembers that for its publisher."""
        draft = self.committer.new_draft()
        part = stage_aborted(draft, job, aborted, self.publishers)
        self._finish_jobs(draft, [(job, part)], time.perf_counter())

    # -- steps and the sweep ----------------------------------------------------------------------------------------

    def _do_step(self, queued: QueuedStep) -> None:
        self.queue.remove(queued)
        if self.elsewhere is not None and queued.topic and (moved := self.elsewhere(queued.topic)) is not None:
            self._answers.give_step(queued, moved)  # it has moved since the call was let in, as with a request
            return
        if queued.sweep_first and not self._swept_for(queued):
            self.queue.put_last(queued)
            self.queue.charge(queued.caller, 1.0)
            return
        begun = time.perf_counter()
        result = self._run_step(queued.step, sync=queued.sync)
        # It has had a whole commit, or more if it took longer.
        micros = (time.perf_counter() - begun) * MICROS
        self.queue.charge(queued.caller, max(1.0, micros / self._options.commit_work_micros))
        self._answers.give_step(queued, result)

    def _swept_for(self, queued: QueuedStep) -> bool:
        """Sweeps overdue records before a step; False: there are too many for one turn (rule L14). Records that fall
        due meanwhile do not delay the step any further.
        """
        queued.begun_micros = min(queued.begun_micros, self._clock.now_micros())
        visited = self.sweep_now(self._options.sweep_entries_max)
        if visited and self.sweep.next_due <= queued.begun_micros and not (self.queue.stopping or self.queue.failure):
            return False
        self.sweep_now()
        return True

    def _sweep_for(self, job: Job) -> None:
        """Sweeps a part of the overdue records that stand in the way of a job, which keeps its place (caps [4])."""
        if self._clock.paused or not self.sweep_now(self._options.sweep_entries_max):
            job.swept_micros = None  # paused, stalled, or there was none: it is decided with the records that are there
        self.queue.charge(job.caller, 1.0)

    def _run_step(self, step: Step[object], *, sync: bool = True) -> object:
        """Stages and commits a step; returns its answer, or the StoreError that refused it."""
        draft = self.committer.new_draft()
        try:
            step.stage(draft)
            draft.after = step.committed
            return self.committer.write(draft, sync=sync) or draft.result
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001  # [5]: as above
            return as_store_error(error)

    def _sweep_if_due(self, now: int, *, after_answers: bool) -> bool:
        """Sweeps once, unless the sweep has to wait. Returns whether it did."""
        if self.sweep.next_due > now or self.queue.failure is not None or self._pace.not_before() > now:
            return False
        if after_answers and not self.calls and self._options.sweep_busy_pause_micros:
            # The event loop sends them. It would have to wait for the GIL, if the sweep had it already.
            time.sleep(self._options.sweep_busy_pause_micros / MICROS)
            now = self._clock.now_micros()
        visited = self._sweep_once(self._pace.entries_max(now))
        more = visited > 0 and self.sweep.next_due <= now
        self._pace.swept(visited, now, self._clock.now_micros(), more=more)
        return True

    def _sweep_once(self, entries_max: int) -> int:
        draft = self.committer.new_draft()
        try:
            visited = self.sweep.stage(draft, entries_max)
        except RocksError as error:
            self.fail(as_store_error(error))
            return 0
        if visited and self.committer.write(draft, sync=False) is not None:
            return 0  # stalled or failed: tried again later, or never
        if draft.expire_times:
            # Measured after the commit: the lag ends when the record is removed, not when the sweep reads it.
            now = self._clock.now_micros()
            self._observer.expired([now - due for due in draft.expire_times])
        return visited

    # -- failing and answering --------------------------------------------------------------------------------------

    def _refuse_all(self) -> None:
        """Refuses everything queued, after a failure or a stop."""
        self.queue.take(0)
        failed = self.queue.failure is not None
        error = self.queue.refusal() if failed else StoreError(Reason.STOPPING, "the server is stopping")
        while (item := self.queue.next()) is not None:
            if isinstance(item, Job):
                self._answers.refuse(item, error)
            else:
                self.queue.remove(item)
                self._answers.give_step(item, error)
