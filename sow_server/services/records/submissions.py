"""The path of a change to the writer: before it the quota is checked, after it peers are awaited (rules J9, P5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from sow_server.engine.doors import Reads, Writes
from sow_server.engine.pending import Pending
from sow_server.engine.values import model
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Durability, Outcome
from sow_server.services.records.admission import Admission
from sow_server.services.replication import Links

Submitted: TypeAlias = Pending[Outcome] | asyncio.Task[Outcome]
"""The outcome of a change: a task where peers are awaited, which ends with its caller."""

OVERLOAD_PATIENCE_SECONDS: Final = 30.0
"""How long a stream, of a publish or of a change by filter, waits for room in the write queue before it is refused."""


class Submissions:
    """Hands changes to the writer and awaits their outcome. With an admission, publishers wait for their quota first.

    For the writer REPLICATED means FSYNC. The peers are awaited here, outside of the writer's queue (rule P5), so that
    nobody else waits for them and the next requests of a stream are written meanwhile.
    """

    def __init__(self, reads: Reads, writes: Writes, replicas: Links, admission: Admission | None = None) -> None:
        self._commits = writes.commits
        self._topics = reads.topics
        self._replicas = replicas
        self._admission = admission

    def admitted(self, request: model.Request, seconds: float | None) -> Awaitable[Outcome]:
        """The outcome of a change, which waits at most `seconds` for the topic's backlog quota (rule J9). Raises
        StoreError as `submit`."""
        if self._admission is None or self._admission.limited(request) is None:
            return self.submit(request)
        return self._outcome(request, seconds)

    async def _outcome(self, request: model.Request, seconds: float | None) -> Outcome:
        self.check(request.topic, request.durability)
        release = await self._admit(request, seconds)
        try:
            submitted = self._reaching(_released(self._commits.submit(request), release), request)
        except BaseException:
            release()
            raise
        return await submitted

    async def admitted_patiently(self, request: model.Request, seconds: float | None) -> Submitted:
        """As `submit_patiently`, after waiting for the quota."""
        self.check(request.topic, request.durability)
        release = await self._admit(request, seconds)
        try:
            return self._reaching(_released(await self._queue_patiently(request), release), request)
        except BaseException:
            release()
            raise

    async def _admit(self, request: model.Request, seconds: float | None) -> Callable[[], None]:
        admission = self._admission
        topic = None if admission is None else await admission.admit(request, seconds)
        if admission is None or topic is None:
            return _nothing
        return partial(admission.left, topic, request)

    def submit(self, request: model.Request) -> Submitted:
        """Queues a change. Raises StoreError if it cannot be queued, or cannot be as
        durable as requested."""
        if request.durability is not Durability.REPLICATED:
            return self._commits.submit(request)
        self.check(request.topic, request.durability)
        return self._reaching(self._commits.submit(request), request)

    async def submit_patiently(self, request: model.Request) -> Submitted:
        """As `submit`, after waiting for room in the write queue. Meanwhile a stream is not read, which slows the
        client down."""
        self.check(request.topic, request.durability)
        return self._reaching(await self._queue_patiently(request), request)

    def check(self, topic: str, durability: Durability) -> None:
        """Checks, before anything is written, that peers can have the changes. Raises StoreError
        REPLICATION_UNAVAILABLE."""
        if durability is not Durability.REPLICATED:
            return
        found = self._topics.by_name.get(topic)
        if found is not None and not found.settings.journal:
            why = "has no journal"
        elif not self._replicas.sync_peers(topic):
            why = "has no sync peer"
        else:
            return
        raise StoreError(
            Reason.REPLICATION_UNAVAILABLE,
            f"durability: {topic} {why}, so it cannot be replicated; nothing was written",
            field="durability",
        )

    async def reach(self, topic: str, sequence: int, *, applied: int) -> None:
        """Returns once enough peers for REPLICATED have everything up to a sequence (0: nothing was changed). Raises
        StoreError REPLICATION_UNAVAILABLE, which tells how many records were changed here."""
        if not sequence:
            return
        try:
            await self._replicas.replicated(topic, sequence)
        except StoreError as error:
            raise StoreError(
                error.reason,
                error.message,
                retry_after_micros=error.retry_after_micros,
                applied=applied,
                details=error.details,
            ) from error

    def _reaching(self, outcome: Pending[Outcome], request: model.Request) -> Submitted:
        if request.durability is not Durability.REPLICATED:
            return outcome
        return asyncio.get_running_loop().create_task(self._reached(outcome, request.topic))

    async def _reached(self, submitted: Pending[Outcome], topic: str) -> Outcome:
        outcome = await submitted
        sequence = outcome.last_sequence
        if outcome.duplicates:
            # The sequences of an earlier attempt are not remembered, but they are at most the last one.
            sequence = self._commits.last_sequence
        await self.reach(topic, sequence, applied=outcome.applied)
        outcome.durability = Durability.REPLICATED
        return outcome

    async def _queue_patiently(self, request: model.Request) -> Pending[Outcome]:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + OVERLOAD_PATIENCE_SECONDS
        while True:
            try:
                return self._commits.submit(request)
            except StoreError as error:
                if error.reason is not Reason.OVERLOADED or loop.time() > give_up:
                    raise
                await asyncio.sleep(0.005)


def _released(outcome: Pending[Outcome], release: Callable[[], None]) -> Pending[Outcome]:
    if release is not _nothing:
        outcome.then(lambda _: release())
    return outcome


def _nothing() -> None:
    """Releases nothing: there is no quota."""
