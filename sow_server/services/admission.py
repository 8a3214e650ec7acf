"""Publishers before the writer's queue: whether a topic's backlog quota lets them pass (rule J9).

A publish is let pass while the slowest durable's backlog, together with what has been let pass and is not written yet,
is below the quota: so it is exceeded by one request at most. Deletes, sweeps, dead letters and restamps pass; so does
everything where the quota evicts or conflates instead, which `subscriptions.consumers` does.
"""

from __future__ import annotations

import asyncio
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.store import Store
from sow_server.engine.values import model
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, BacklogAction, Publish, Touch
from sow_server.engine.values.policies import public_name, show
from sow_server.subscriptions.consumers import exceeds

POLL_SECONDS: Final = 0.02
"""How often those who wait look whether there is room. One of them looks for all who wait for the same topic."""
ANSWER_SECONDS: Final = 0.25
"""How long before its deadline a publish that waited is refused, so that it hears why: time for the answer to arrive,
also on a busy machine, where 0.05 s were too little. No more, as there might be room until then."""
ANSWER_PART: Final = 10
"""Of a deadline that is shorter than ten times that, this part is left."""
RETRY_MICROS: Final = MICROS


class Admission:
    """Owns who waits for room, by topic. On the event loop."""

    def __init__(self, store: Store, clock: GuardedClock) -> None:
        self._store = store
        self._clock = clock
        self._under_way: dict[int, tuple[int, int]] = {}
        """Entries and bytes that have been let pass and are not written yet."""
        self._polls: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, int] = {}
        """How many wait for the room of a topic: nobody looks for those that have gone away."""
        self.held_total = 0
        self.rejected_total = 0

    async def admit(self, request: model.Request, seconds: float | None) -> Topic | None:
        """Waits until a request may pass, at most for `seconds`. Returns the topic whose quota it counts for, and
        then `left` is to be called once it is written; None: there is no quota. Raises StoreError
        BACKLOG_QUOTA_EXCEEDED."""
        loop = asyncio.get_running_loop()
        give_up = (
            None if seconds is None else loop.time() + max(0.0, seconds - min(ANSWER_SECONDS, seconds / ANSWER_PART))
        )
        held = False
        # While it waits the settings may change, or the topic may be another one by then.
        while (topic := self._limited(request)) is not None and self._exceeds(topic):
            if self._store.writer.failure is not None:
                break  # the writer tells it
            if topic.settings.backlog_action is BacklogAction.REJECT:
                self.rejected_total += 1
                raise _exceeded(topic)
            self.held_total += not held
            held = True
            await self._wait(topic, give_up)
        if topic is None:
            return None
        (entries, size), (more, larger) = self._under_way.get(topic.id, (0, 0)), _size(request)
        self._under_way[topic.id] = entries + more, size + larger
        return topic

    def left(self, topic: Topic, request: model.Request) -> None:
        """A request that was let pass has been written, or refused."""
        (entries, size), (fewer, smaller) = self._under_way.get(topic.id, (0, 0)), _size(request)
        if entries > fewer:
            self._under_way[topic.id] = entries - fewer, size - smaller
        else:
            self._under_way.pop(topic.id, None)

    def _limited(self, request: model.Request) -> Topic | None:
        if not isinstance(request, Publish | Touch):
            return None
        topic = self._store.topics.by_name.get(request.topic)
        if topic is None:
            return None
        settings = topic.settings
        if not settings.has_quota:
            return None
        return topic if settings.backlog_action in (BacklogAction.HOLD, BacklogAction.REJECT) else None

    def _exceeds(self, topic: Topic) -> bool:
        return exceeds(self._store, topic, self._clock.now_micros(), self._under_way.get(topic.id, (0, 0)))

    async def _wait(self, topic: Topic, give_up: float | None) -> None:
        """Until there seems to be room, or nothing to wait for. Whoever comes first takes the room; the others wait
        on."""
        loop = asyncio.get_running_loop()
        poll = self._polls.get(topic.id)
        if poll is None or poll.done():
            poll = self._polls[topic.id] = loop.create_task(self._poll(topic))
        left = None if give_up is None else max(0.0, give_up - loop.time())
        self._waiting[topic.id] = self._waiting.get(topic.id, 0) + 1
        try:
            done, _ = await asyncio.wait((poll,), timeout=left)
        finally:
            self._waiting[topic.id] -= 1
            if not self._waiting[topic.id]:
                del self._waiting[topic.id]
        if not done:
            raise _exceeded(topic)

    async def _poll(self, topic: Topic) -> None:
        try:
            while topic.id in self._waiting and self._exceeds(topic) and not self._over(topic):  # noqa: ASYNC110  # age is in it: time sets no event
                await asyncio.sleep(POLL_SECONDS)
        finally:
            del self._polls[topic.id]

    def _over(self, topic: Topic) -> bool:
        """Whether there is nothing to wait for here any more."""
        settings = topic.settings
        return (
            topic.id not in self._store.topics.by_id
            or self._store.writer.failure is not None
            or not settings.has_quota
            or settings.backlog_action is not BacklogAction.HOLD
        )


def _size(request: model.Request) -> tuple[int, int]:
    """The entries and bytes that a request may add to a backlog."""
    if isinstance(request, Publish):
        return len(request.payloads), sum(map(len, request.payloads))
    return (len(request.keys), 0) if isinstance(request, Touch) else (0, 0)


def _exceeded(topic: Topic) -> StoreError:
    settings = topic.settings
    quotas = [
        f"{public_name(field)} {show(field, value)}"
        for field in ("backlog_quota_entries", "backlog_quota_bytes", "backlog_quota_age_micros")
        if (value := getattr(settings, field)) is not None
    ]
    return StoreError(
        Reason.BACKLOG_QUOTA_EXCEEDED,
        f"topic: the slowest durable of {topic.name} has used up the quota ({', '.join(quotas)})",
        field="topic",
        retry_after_micros=RETRY_MICROS,
    )
