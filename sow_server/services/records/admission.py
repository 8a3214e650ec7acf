"""Holds or refuses publishes before the writer's queue while a topic's backlog quota is used up (rule J9).

A publish passes while the slowest durable's backlog, together with the publishes that have passed and are not written
yet, is below the quota. So at most one request exceeds the quota. Deletes, sweeps, dead letters and restamps always
pass. If the quota evicts or conflates instead, every request passes, see `durable.quotas`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values import model
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, BacklogAction, Publish, Touch
from sow_server.engine.values.policies import public_name, show
from sow_server.subscriptions.durable.quotas import exceeds

POLL_SECONDS: Final = 0.02
"""How often waiting publishes check for room. One of them checks for all that wait for the same topic."""
ANSWER_SECONDS: Final = 0.25
"""A waiting publish is refused this long before its deadline, so that the answer with the reason reaches the client in
time. On a busy machine 0.05 s were too little. A longer time would refuse publishes that may still find room."""
ANSWER_PART: Final = 10
"""A deadline shorter than this many times ANSWER_SECONDS leaves one part in this many for the answer."""
RETRY_MICROS: Final = MICROS


class Admission:
    """Owns the waiting publishes, by topic. On the event loop."""

    def __init__(
        self,
        reads: Reads,
        writes: Writes,
        held: Callable[[Topic], None] = lambda topic: None,
        *,
        passed_over: Callable[[Topic], Collection[str]] = lambda topic: (),
    ) -> None:
        """`held`: hears that a publish of a topic is held or refused, again and again as long as it waits.
        `passed_over`: the owners of durables that no publish of a topic waits for (rule J19)."""
        self._held = held
        self._passed_over = passed_over
        self._topics = reads.topics
        self._durables = reads.durables
        self._commits = writes.commits
        self._clock = reads.clock
        self._under_way: dict[int, tuple[int, int]] = {}
        """Entries and bytes that have passed and are not written yet, by topic id."""
        self._polls: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, int] = {}
        """The number of waiting publishes, by topic id. The check for room ends when nobody waits any more."""
        self.held_total = 0
        self.rejected_total = 0

    async def admit(self, request: model.Request, seconds: float | None) -> Topic | None:
        """Waits until a request may pass, for at most `seconds`. Returns the topic whose quota it counts for; call
        `left` once it is written. Returns None if there is no quota. Raises StoreError BACKLOG_QUOTA_EXCEEDED."""
        loop = asyncio.get_running_loop()
        give_up = (
            None if seconds is None else loop.time() + max(0.0, seconds - min(ANSWER_SECONDS, seconds / ANSWER_PART))
        )
        held = False
        # The settings may change during the wait, and the name may belong to another topic afterwards.
        while (topic := self.limited(request)) is not None and self._exceeds(topic):
            if self._commits.failure is not None:
                break  # the writer will refuse the request with this failure
            if topic.settings.backlog_action is BacklogAction.REJECT:
                self.rejected_total += 1
                self._held(topic)
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
        """Notes that an admitted request has been written or refused."""
        (entries, size), (fewer, smaller) = self._under_way.get(topic.id, (0, 0)), _size(request)
        if entries > fewer:
            self._under_way[topic.id] = entries - fewer, size - smaller
        else:
            self._under_way.pop(topic.id, None)

    def limited(self, request: model.Request) -> Topic | None:
        """The topic whose quota bounds a request at this moment. None: there is none, and `admit` returns at once."""
        if not isinstance(request, _LIMITED):
            return None
        topic = self._topics.by_name.get(request.topic)
        if topic is None:
            return None
        settings = topic.settings
        if not settings.has_quota:
            return None
        return topic if settings.backlog_action in (BacklogAction.HOLD, BacklogAction.REJECT) else None

    def _exceeds(self, topic: Topic) -> bool:
        under_way = self._under_way.get(topic.id, (0, 0))
        return exceeds(self._durables, topic, self._clock.now_micros(), under_way, passed_over=self._passed_over(topic))

    async def _wait(self, topic: Topic, give_up: float | None) -> None:
        """Waits until there may be room, or no reason to wait. The first to wake takes the room; the others wait on."""
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
            # It polls: a quota may bound the age, and nothing signals that time has passed.
            while topic.id in self._waiting and self._exceeds(topic) and not self._over(topic):
                self._held(topic)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            del self._polls[topic.id]

    def _over(self, topic: Topic) -> bool:
        """True if there is no reason to wait for this topic any more."""
        settings = topic.settings
        return (
            topic.id not in self._topics.by_id
            or self._commits.failure is not None
            or not settings.has_quota
            or settings.backlog_action is not BacklogAction.HOLD
        )


_LIMITED: Final = (Publish, Touch)
"""Requests that a quota holds or refuses."""


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
