"""The deadlines of durables: `backlog_ttl` acknowledges old entries, `idle_ttl` removes a durable (rules J8, J10).

    [1]  Deadlines that come due shortly after one was acted on share a commit: a durable rests for STEP_MICROS, and for
         RETRY_MICROS after the writer refused.
    [2]  A durable with a consumer is in use, also with one at another instance. That use is stored now and then: the
         link with that instance may end, and so may this process.

On the dispatcher's thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import Final

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads
from sow_server.engine.durables import Durable, DurableEditor
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import MICROS, NEVER
from sow_server.subscriptions.durable.batches import DurableChanges
from sow_server.subscriptions.durable.holders import Holders, Key

log = structlog.get_logger(__name__)

STEP_MICROS: Final = MICROS // 20
"""How long a durable rests after a deadline was acted on, so that deadlines which come due meanwhile share a commit."""
RETRY_MICROS: Final = MICROS
"""The same after the writer refused."""


class Deadlines:
    """Owns when to look at each durable with a `backlog_ttl` or an `idle_ttl` next."""

    def __init__(
        self,
        reads: Reads,
        changes: DurableChanges,
        holders: Holders,
        attached: Collection[Key],
        *,
        tell: Callable[[Topic, list[str] | StoreError], None],
        gone: Callable[[Key], None],
    ) -> None:
        """`attached`: the durables with a consumer here, at any moment. `tell`: hears which durables may have lost
        entries; `gone`: of which there is no row any more."""
        self._topics = reads.topics
        self._durables = reads.durables
        self._clock = reads.clock
        self._changes = changes
        self._holders = holders
        self._attached = attached
        self._tell = tell
        self._gone = gone
        self._heap: list[tuple[int, int, str]] = []
        self._due: dict[Key, int] = {}
        """The times in the heap that count."""
        self.wake: Callable[[], None] = lambda: None
        """Called when a deadline comes before all that were known."""

    def look_at(self, topic: Topic, durable: Durable, *, not_before: int = 0) -> None:
        """Notes the next deadline of a durable."""
        settings = self._durables.settings(topic, durable)
        now, key = self._clock.now_micros(), (topic.id, durable.name)
        due: list[int] = []
        if settings.idle_ttl_micros is not None:
            idle_since = now if key in self._attached else durable.last_use_micros
            elsewhere = self._holders.elsewhere(key) is not None  # [2]
            due.append(idle_since + (settings.idle_ttl_micros // 2 if elsewhere else settings.idle_ttl_micros))
        if settings.backlog_ttl_micros is not None:
            oldest = self._durables.oldest(topic, durable.position)
            due.append((now if oldest is None else oldest) + settings.backlog_ttl_micros)
        if not due:
            self._due.pop(key, None)
            return
        when = max(min(due), not_before)
        if self._due.get(key) != when:
            self._due[key] = when
            heapq.heappush(self._heap, (when, *key))
            if self._heap[0] == (when, *key):
                self.wake()

    def act(self, now_micros: int) -> int:
        """Acts on the deadlines that have come. Returns the time of the next one. Costs in proportion to their
        number."""
        heap, due = self._heap, self._due
        while heap and heap[0][0] <= now_micros:
            when, topic_id, name = heapq.heappop(heap)
            key = topic_id, name
            if due.get(key) != when:
                continue  # replaced by a newer entry
            del due[key]
            topic = self._topics.by_id.get(topic_id)
            durable = None if topic is None else self._durables.get(topic_id, name)
            if topic is None or durable is None:
                self._gone(key)
            else:
                self._fall_due(topic, durable, now_micros)
        return heap[0][0] if heap else NEVER

    def used(self, keys: Collection[Key]) -> None:
        """Stores that durables were in use elsewhere until now [2]."""
        for topic_id, name in keys:
            topic, found = self._topics.by_id.get(topic_id), self._durables.get(topic_id, name)
            if topic is None or found is None or self._durables.settings(topic, found).idle_ttl_micros is None:
                continue
            self._changes.submit_quietly(_use(topic, name))

    def _fall_due(self, topic: Topic, durable: Durable, now: int) -> None:
        settings = self._durables.settings(topic, durable)
        key = topic.id, durable.name
        idle, ttl = settings.idle_ttl_micros, settings.backlog_ttl_micros

        def again(result: object) -> None:
            found = self._durables.get(*key)
            if found is not None and topic.id in self._topics.by_id:
                pause = RETRY_MICROS if isinstance(result, StoreError) else STEP_MICROS
                self.look_at(topic, found, not_before=self._clock.now_micros() + pause)
                self._tell(topic, [durable.name])
            else:
                self._gone(key)

        try:
            if idle is not None and self._holders.elsewhere(key) is not None:
                if durable.last_use_micros + idle // 2 <= now:
                    self._changes.submit(_use(topic, durable.name)).then(again)
                    return
            elif idle is not None and key not in self._attached and durable.last_use_micros + idle <= now:
                self._changes.submit(lambda durables: _remove_idle(durables, topic, durable.name, idle)).then(again)
                return
            if ttl is not None:
                oldest = self._durables.oldest(topic, durable.position)
                if oldest is not None and oldest + ttl <= now:
                    self._changes.submit(lambda durables: durables.expire_backlog(topic, durable.name)).then(again)
                    return
            self.look_at(topic, durable)
        except StoreError as error:
            again(error)  # the writer takes no changes now


def _use(topic: Topic, name: str) -> Callable[[DurableEditor], None]:
    return lambda durables: durables.use(topic, name)


def _remove_idle(durables: DurableEditor, topic: Topic, name: str, idle_ttl_micros: int) -> None:
    """Removes a durable that has not been used for its `idle_ttl` (rule J10), if that still holds."""
    found = durables.get(topic, name)
    if found is not None and not found.attached and found.last_use_micros + idle_ttl_micros <= durables.now:
        log.info("durable_idle", topic=topic.name, durable=name)
        durables.remove(topic, name, idle=True)
