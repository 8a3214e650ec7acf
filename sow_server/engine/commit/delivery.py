"""The delivery of the answers that the writer gives, a turn at a time.

[1]  Answers are delivered in the order in which they were given, and reports to followers among them.
[2]  An answer that raises keeps no other answer back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from sow_server.engine.commit.queue import QueuedStep, WriteQueue
from sow_server.engine.commit.requests import Job
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import Outcome, Publish

log = structlog.get_logger(__name__)

Deliver = Callable[[Callable[[], None]], object]
"""Runs a callable on the thread that owns the answers, such as `loop.call_soon_threadsafe`."""


class Answers:
    """Owns the answers that are given and not yet delivered. Used by the writer's thread alone."""

    __slots__ = ("_queue", "deliver", "waiting")

    def __init__(self, queue: WriteQueue) -> None:
        self._queue: Final = queue
        self.deliver: Deliver = operator.call
        self.waiting: list[Callable[[], None]] = []
        """Called in this order at the next delivery. Reports to followers are put here, too."""

    def give(self, job: Job, answer: Outcome | StoreError) -> None:
        """Answers a job, which no longer counts for the queue."""
        request = job.request
        if isinstance(answer, StoreError) and isinstance(request, Publish) and request.channel is not None:
            # Passing or not, records after a refused request must not overtake it (rules P6, P7).
            request.channel.broken = True
        job.answered = True
        self._queue.settle(job)
        self.waiting.append(partial(job.pending.settle, answer))

    def give_step(self, queued: QueuedStep, answer: object) -> None:
        """Answers a step, which no longer counts for the queue."""
        self._queue.settle(queued)
        self.waiting.append(partial(queued.pending.settle, answer))

    def refuse(self, job: Job, error: StoreError) -> None:
        """Refuses the rest of a job. Its committed slices stay, and the answer has their number of records."""
        self._queue.remove(job)
        self.give(
            job,
            StoreError(
                error.reason,
                error.message,
                field=error.field,
                retry_after_micros=error.retry_after_micros,
                applied=job.outcome.applied,
                details=error.details,
            ),
        )

    def flush(self) -> bool:
        """One wake-up per turn, not per answer: waking the loop is most of the cost of a small write. False: there are
        none."""
        if not self.waiting:
            return False
        answers, self.waiting = self.waiting, []

        def deliver() -> None:
            for answer in answers:
                try:
                    answer()
                except Exception:
                    log.exception("answer_failed")  # a fault of this callback; the others still have to be called

        self.deliver(deliver)
        return True
