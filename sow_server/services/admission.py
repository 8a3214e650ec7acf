"""Publishers before the writer's queue: whether a topic's backlog quota lets them pass (rule J9).

A publish is let pass while the slowest durable's backlog, together with what has been let pass and is not written yet,
is below the quota: so it is exceeded by one request at most. Deletes, sweeps, dead letters and restamps pass; so does
everything where the quota evicts or conflates instead, which `subscriptions.durables` does.
"""

from __future__ import annotations

import asyncio
from typing import Final

from sow_server.engine import model
from sow_server.engine.clock import GuardedClock
from sow_server.engine.errors import Reason, StoreError
from sow_server.engine.model import MICROS, BacklogAction, Publish, Touch
from sow_server.engine.store import Store
from sow_server.engine.topics import Topic
from sow_server.subscriptions.durables import exceeds

POLL_SECONDS: Final = 0.02
"""How often those who wait look whether there is room. One of them looks for all who wait for the same topic."""
ANSWER_SECONDS: Final = 0.2
"""How long before its deadline a publish that waited is refused, so that it hears why."""
RETRY_MICROS: Final = MICROS


class Admission:
    """Owns who waits for room, by topic. On the event loop."""

    def __init__(self, store: Store, clock: GuardedClock) -> None:
        self._store = store
        self._clock = clock
        self._under_way: dict[int, int] = {}
        self._polls: dict[int, asyncio.Task[None]] = {}
        self.held_total = 0
        self.rejected_total = 0

    async def admit(self, request: model.Request, seconds: float | None) -> Topic | None:
        """Waits until a request may pass, at most for `seconds`. Returns the topic whose quota it counts for, and
        then `left` is to be called once it is written; None: there is no quota. Raises StoreError
        BACKLOG_QUOTA_EXCEEDED."""
        topic = self._limited(request)
        if topic is None:
            return None
        if self._exceeds(topic):
            if topic.settings.backlog_action is BacklogAction.REJECT:
                self.rejected_total += 1
                raise _exceeded(topic)
            self.held_total += 1
            await self._wait(topic, seconds)
        self._under_way[topic.id] = self._under_way.get(topic.id, 0) + _size(request)
        return topic

    def left(self, topic: Topic, request: model.Request) -> None:
        """A request that was let pass has been written, or refused."""
        left = self._under_way.get(topic.id, 0) - _size(request)
        if left > 0:
            self._under_way[topic.id] = left
        else:
            self._under_way.pop(topic.id, None)

    def _limited(self, request: model.Request) -> Topic | None:
        if not isinstance(request, Publish | Touch):
            return None
        topic = self._store.topics.by_name.get(request.topic)
        if topic is None:
            return None
        settings = topic.settings
        if settings.backlog_quota_bytes is None and settings.backlog_quota_age_micros is None:
            return None
        return topic if settings.backlog_action in (BacklogAction.HOLD, BacklogAction.REJECT) else None

    def _exceeds(self, topic: Topic) -> bool:
        return exceeds(self._store, topic, self._clock.now_micros(), self._under_way.get(topic.id, 0))

    async def _wait(self, topic: Topic, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        give_up = None if seconds is None else loop.time() + max(0.0, seconds - min(ANSWER_SECONDS, seconds / 2))
        while True:
            poll = self._polls.get(topic.id)
            if poll is None or poll.done():
                poll = self._polls[topic.id] = loop.create_task(self._poll(topic))
            left = None if give_up is None else max(0.0, give_up - loop.time())
            done, _ = await asyncio.wait((poll,), timeout=left)
            # Whoever comes first takes the room; the others wait on.
            if not done:
                raise _exceeded(topic)
            if self._over(topic) or not self._exceeds(topic):
                return

    async def _poll(self, topic: Topic) -> None:
        while self._exceeds(topic) and not self._over(topic):  # noqa: ASYNC110  # time makes room, too
            await asyncio.sleep(POLL_SECONDS)
        del self._polls[topic.id]

    def _over(self, topic: Topic) -> bool:
        """Whether there is nothing to wait for any more: the writer tells the rest."""
        settings = topic.settings
        return (
            topic.id not in self._store.topics.by_id
            or self._store.writer.failure is not None
            or (settings.backlog_quota_bytes is None and settings.backlog_quota_age_micros is None)
            or settings.backlog_action is not BacklogAction.HOLD
        )


def _size(request: model.Request) -> int:
    return sum(map(len, request.payloads)) if isinstance(request, Publish) else 0


def _exceeded(topic: Topic) -> StoreError:
    settings = topic.settings
    quotas = [
        f"{name} {value}"
        for name, value in (
            ("backlog_quota_bytes", settings.backlog_quota_bytes),
            ("backlog_quota_age_micros", settings.backlog_quota_age_micros),
        )
        if value is not None
    ]
    return StoreError(
        Reason.BACKLOG_QUOTA_EXCEEDED,
        f"topic: the slowest durable of {topic.name} has used the quota up ({', '.join(quotas)})",
        field="topic",
        retry_after_micros=RETRY_MICROS,
    )
