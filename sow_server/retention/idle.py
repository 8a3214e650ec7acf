"""Topics that nobody uses are deleted: after `idle_ttl`, or when the last subscriber has left (rule T1).

A use is a subscription for as long as it is attached, a get or a query, and that somebody declares the topic again; a
publish only where the topic says so. When a topic was used is kept in memory, so a start counts as a use, as does a
change of its `idle_ttl`.

    ID1  A topic is deleted after at least its `idle_ttl`, and as soon as the event loop has time for it then.
    ID2  The decision is the writer's, on the topic as it is in its turn: a use that came before wins.
    ID3  Cost is in proportion to the topics that may be due and to those whose settings have changed. Uses are not
         noted: the deadline of a topic that was used meanwhile is found to be later when it is looked at.
    ID4  Topics of the configuration file are never deleted, nor is anything while the clock is in doubt (rule L15) or
         the server stops: the subscribers that it sends away have not left.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.store import Store
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import MICROS, NEVER

log = structlog.get_logger(__name__)

DELETIONS_MAX: Final = 100
"""Topics that the writer is asked to delete at a time: each costs it a synced commit."""
LOOK_AGAIN_MICROS: Final = 10 * MICROS
"""When a topic is looked at again that is due, but was refused by the writer: peers share it, or a load is open."""


class Cause(enum.StrEnum):
    """Why a topic was deleted."""

    IDLE = "idle"
    LEFT = "left"
    """By its last subscriber."""


class IdleTopics:
    """Knows when the next topic may be due. On one thread, the event loop's, but for what it hears."""

    def __init__(self, store: Store, clock: GuardedClock) -> None:
        self._store = store
        self._clock = clock
        self._stopped = False
        self._heard: deque[Topic] = deque()
        """Topics whose settings may have changed, or that may have been left. Added to on any thread."""
        self._ttls: dict[int, int] = {}
        """By topic id, as they were heard of last: another one begins the time anew."""
        self._due: dict[int, int] = {}
        """When each topic that has an `idle_ttl`, or was refused, is looked at next."""
        self._heap: list[tuple[int, int]] = []
        """The same as (time, topic id). An entry that is not in `_due` has been replaced."""
        self._asked: set[int] = set()
        self._left_over: dict[int, Topic] = {}
        """Topics to delete that are beyond `DELETIONS_MAX`."""
        self.wake: Callable[[], None] = lambda: None
        """Called when `tick` has something to do earlier than it said."""
        self.deleted_total: Final = dict.fromkeys(Cause, 0)
        store.topics.watch(lambda topic, _: self._heard.append(topic))
        self._heard.extend(store.topics.by_id.values())

    def stop(self) -> None:
        """The server stops: nothing is deleted any more."""
        self._stopped = True

    def tick(self) -> int:
        """Deletes what is due. Returns when the next topic may be."""
        if self._stopped or self._clock.paused:
            return NEVER
        now = self._clock.now_micros()
        while self._left_over and len(self._asked) < DELETIONS_MAX:
            self._look(self._left_over.pop(next(iter(self._left_over))), now)
        while self._heard:
            self._hear(self._heard.popleft(), now)
        while self._heap and self._heap[0][0] <= now:
            due, topic_id = heapq.heappop(self._heap)
            if self._due.get(topic_id) != due:
                continue
            del self._due[topic_id]
            found = self._store.topics.by_id.get(topic_id)
            if found is not None:
                self._look(found, now)
        return self._heap[0][0] if self._heap else NEVER

    def _hear(self, topic: Topic, now: int) -> None:
        """Takes note of the settings of a topic, and looks at it."""
        ttl = topic.settings.idle_ttl_micros
        gone = self._store.topics.by_id.get(topic.id) is not topic
        if gone or topic.in_config or topic.reserved or (ttl is None and not topic.settings.auto_delete):
            self._ttls.pop(topic.id, None)
            self._due.pop(topic.id, None)
            return
        if ttl is None:
            self._ttls.pop(topic.id, None)
        elif self._ttls.get(topic.id) != ttl:
            self._ttls[topic.id] = ttl
            topic.last_use_micros = now
        self._look(topic, now)

    def _look(self, topic: Topic, now: int) -> None:
        """Deletes a topic if it is due; if not, notes when it may be."""
        if topic.id in self._asked:
            return  # what comes of it looks again
        cause = self._cause(topic, now)
        if cause is not None:
            if not _kept_by_content(topic):
                self._delete(topic, cause)
            return  # if it is not empty: it is heard of once it is
        ttl = topic.settings.idle_ttl_micros
        if ttl is not None:
            self._look_at(topic, (now if topic.followers else topic.last_use_micros) + ttl)

    def _cause(self, topic: Topic, now: int) -> Cause | None:
        """Why a topic is due now, but for what it holds; None: it is not."""
        if self._left(topic, now):
            return Cause.LEFT
        return Cause.IDLE if _unused(topic, now) else None

    def _look_at(self, topic: Topic, due: int) -> None:
        if self._due.get(topic.id) != due:
            self._due[topic.id] = due
            heapq.heappush(self._heap, (due, topic.id))

    def _left(self, topic: Topic, now: int) -> bool:
        """Whether all subscribers have left; a durable one that is away has not."""
        return (
            topic.settings.auto_delete
            and topic.was_followed
            and _may_go(topic)
            and not self._store.durables.count(topic)
        )

    def _delete(self, topic: Topic, cause: Cause) -> None:
        if len(self._asked) >= DELETIONS_MAX:
            self._left_over[topic.id] = topic
            return

        def done(deleted: bool | StoreError) -> None:
            self._asked.discard(topic.id)
            if deleted is True:
                self.deleted_total[cause] += 1
                log.info("unused_topic_deleted", topic=topic.name, cause=cause.value)
            else:
                self._refused(topic)
            if self._left_over or deleted is not True:
                self.wake()

        self._asked.add(topic.id)
        try:
            self._store.delete_unused(topic, self._left if cause is Cause.LEFT else _unused, done)
        except StoreError:  # the store is overloaded, stopping or has failed
            self._asked.discard(topic.id)
            self._refused(topic)

    def _refused(self, topic: Topic) -> None:
        """The writer has not deleted a topic: it was used meanwhile, or something else keeps it."""
        if self._store.topics.by_id.get(topic.id) is not topic:
            return
        now = self._clock.now_micros()
        if self._cause(topic, now) is None:
            self._look(topic, now)
        else:
            self._look_at(topic, now + LOOK_AGAIN_MICROS)


def _kept_by_content(topic: Topic) -> bool:
    """Whether content keeps a topic. The writer has the last word on that, but costs a synced commit each time."""
    return topic.settings.only_if_empty and topic.statistics.records > 0


def _may_go(topic: Topic) -> bool:
    return not (topic.followers or topic.in_config or topic.reserved)


def _unused(topic: Topic, now: int) -> bool:
    """Whether nobody has used a topic for its `idle_ttl`."""
    ttl = topic.settings.idle_ttl_micros
    return ttl is not None and _may_go(topic) and topic.last_use_micros + ttl <= now
