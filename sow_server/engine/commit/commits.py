"""The way of every change into the writer: requests, steps, steps in rounds, and the committed state.

[1]  Everything that was queued is answered exactly once: with the answer, or with the StoreError that refused it. A
     change that cannot be queued raises StoreError at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.observers import Follow
from sow_server.engine.commit.pace import CallsUnderWay
from sow_server.engine.commit.publishers import PublisherCache
from sow_server.engine.commit.queue import QueuedStep
from sow_server.engine.commit.requests import Job
from sow_server.engine.commit.steps import Nothing, Round, Staged, Step, StepInRounds
from sow_server.engine.commit.writer import Writer
from sow_server.engine.pending import Pending
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import OpenedPublisher, Outcome, Request
from sow_server.engine.values.turns import CALLER, SERVER

T = TypeVar("T")


class Commits:
    """The interface of the writer for the parts of the store and for the server."""

    def __init__(self, writer: Writer, topics: Topics, derived: Callable[[], float] = float) -> None:
        """`derived`: how many seconds of commits views have taken."""
        self._writer = writer
        self._submit = writer.queue.submit
        self._topics = topics
        self._derived = derived

    # -- queueing ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Pending[Outcome]:
        """Queues a request; the answer comes once it is as durable as asked. Raises StoreError."""
        job = Job(request)
        self._submit(job)
        return job.pending

    def run(
        self,
        step: Step[T],
        *,
        sweep_first: bool = False,
        size: int = 0,
        sync: bool = True,
        caller: str | None = None,
        topic: str = "",
    ) -> Pending[T]:
        """Queues a step; its answer comes once it is on disk. Raises StoreError. `caller`, `topic`: as `QueuedStep`.

        `sweep_first`: overdue records are expired before, in separate commits. A step with a `size` counts for the
        bounds of the queue like a publish of so many bytes. Without `sync` it is as durable as a BUFFERED publish.
        """
        queued = QueuedStep(step, sweep_first=sweep_first, size=size, sync=sync, caller=caller, topic=topic)
        self._submit(queued)
        return queued.pending

    def run_quietly(self, step: Step[T]) -> Pending[T]:
        """As `run`, for background work: if the step cannot be queued, nothing happens, and no answer comes. The next
        tick of a timer, or the next start, resumes the work."""
        try:
            return self.run(step, caller=SERVER)
        except StoreError:
            return Pending()

    def run_in_rounds(
        self,
        step: StepInRounds[T],
        *,
        sweep_first: bool = True,
        sync: bool = True,
        caller: str | None = None,
        topic: str = "",
    ) -> Pending[T]:
        """Queues a step that may need commits before its own. Other items get their turn between the rounds. Raises
        StoreError when the first round cannot be queued. The rest: as `run`, for each round."""
        one_round = Round(step)
        whole: Pending[T] = Pending()
        for_whom = CALLER.get() if caller is None else caller  # an answer is no longer in the caller's task

        def round_done(result: T | Staged | StoreError) -> None:
            if not isinstance(result, Staged):
                whole.settle(result)
                return
            try:
                run_round()
            except StoreError as error:
                whole.settle(error)

        def run_round() -> None:
            queued = self.run(one_round, sweep_first=sweep_first, sync=sync, caller=for_whom, topic=topic)
            queued.then(round_done)

        run_round()
        return whole

    def refuse_elsewhere(self, refusal: Callable[[str], StoreError | None]) -> None:
        """From now on, requests for topics are refused for which `refusal`, called by the writer's thread, says why.
        So are steps that name such a topic. Before the writer starts. After a change of what it says, and `moved`, none
        of the others is under way."""
        self._writer.elsewhere = refusal

    def moved(self) -> Pending[None]:
        """Answered once no request for a topic that lives elsewhere is under way: those that had begun are on disk.
        Raises StoreError."""
        # Behind all changes of durables that have been queued, as these are of the same caller and name no topic.
        return self.run_in_rounds(Moved(self._writer), sweep_first=False, caller=SERVER)

    def barrier(self) -> Pending[None]:
        """Answered once every commit whose staging had begun before is durable. Requests that are staged later heed the
        followers that a topic has now. Raises StoreError."""
        return self.run(Nothing())

    def open_publisher(self, publisher_id: str, unit: int, *, token: int = 0) -> Pending[OpenedPublisher]:
        """Begins the next epoch of a publisher, unless `unit` (0: none) is finished (rule P6). `token`: a random number
        that tells this epoch from an equal one of another instance."""
        return self.run(OpenPublisher(self._writer.publishers, publisher_id, unit, token))

    @property
    def calls(self) -> CallsUnderWay:
        """The calls that publish single requests: the sweep gives way to them (rule L14)."""
        return self._writer.calls

    @property
    def busy(self) -> bool:
        """True if somebody published a short time ago. From any thread."""
        return self._writer.busy()

    # -- the committed state -----------------------------------------------------------------------------------

    @property
    def cut_lock(self) -> threading.Lock:
        """Held while a commit is written: its holder sees all column families between two commits."""
        return self._writer.cut_lock

    @property
    def last_sequence(self) -> int:
        """The last written sequence."""
        return self._writer.last_sequence

    @property
    def start_sequence(self) -> int:
        """The last sequence that may have been used before the start."""
        return self._writer.start_sequence

    @property
    def synced_sequence(self) -> int:
        """Everything up to this sequence is durable, so followers may see it (rule S7)."""
        return self._writer.synced_sequence

    @property
    def next_due(self) -> int:
        """When the next record is overdue, as far as the sweep knows; each expires at that time or later."""
        return self._writer.sweep.next_due

    @property
    def derived_seconds(self) -> float:
        """The time of commits that views have taken since the start."""
        return self._derived()

    @property
    def failure(self) -> StoreError | None:
        """The reason why writing has ended; None while it continues."""
        return self._writer.queue.failure

    @property
    def queue_depth(self) -> tuple[int, int]:
        """(requests, bytes) that wait or are under way."""
        return self._writer.queue.depth

    @property
    def publishers(self) -> PublisherCache:
        """Positions of publishers, for steps on the writer's thread."""
        return self._writer.publishers

    @property
    def expired_total(self) -> int:
        """Expired records that were removed since the start."""
        return self._writer.expired_total

    @property
    def letters_total(self) -> Mapping[str, int]:
        """Dead letters of expired records since the start, by their fate."""
        return self._writer.letters_total

    def follow(self, follow: Follow) -> None:
        """From the next commit on, tells `follow`, too, of changes. Before the writer starts, or under the cut lock."""
        self._writer.follow(follow)

    def follow_topics(self, follow: Callable[[Collection[Topic]], None]) -> int:
        """Between two commits: `follow` sets the numbers of followers of topics (`Topic.followers`,
        `.previous_wanted`). Returns the last written sequence."""
        with self._writer.cut_lock:
            follow(tuple(self._topics.by_id.values()))
            return self._writer.last_sequence


class Moved:
    """The step that awaits the end of requests for topics that have moved: one that has begun is not refused."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def stage(self, draft: Draft) -> Staged:
        """Stages nothing."""
        return Staged.AGAIN if self._writer.leaves else Staged.DONE

    def committed(self) -> None:
        """Has no effects."""


class OpenPublisher:
    """The step that begins the next epoch of a publisher, unless its unit is finished; answers its position."""

    def __init__(self, publishers: PublisherCache, publisher_id: str, unit: int, token: int) -> None:
        self._publishers = publishers
        self._publisher_id = publisher_id
        self._unit = unit
        self._token = token
        self._opened: OpenedPublisher | None = None

    def stage(self, draft: Draft) -> None:
        """Stages the publisher's row."""
        found = self._publishers.of_all_topics(self._publisher_id)
        publisher, self._opened = found.open(self._unit, self._publisher_id, draft.now, self._token)
        draft.publishers[self._publisher_id] = publisher

    def committed(self) -> OpenedPublisher:
        """The position to continue from."""
        assert self._opened is not None, "it was staged"
        return self._opened
