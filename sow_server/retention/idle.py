"""Deletes topics that nobody uses: after `idle_ttl`, or when the last subscriber has left (rule T1).

Uses of a topic: an attached subscription, a get, a query, and declaring the topic again; a publish only if the topic
says so. The time of the last use is kept in memory, so a start counts as a use, and so does a change of `idle_ttl`.

    [1]  A topic is deleted after at least its `idle_ttl`, as soon as the event loop has time for it.
    [2]  The writer decides, on the topic as it is then: an earlier use wins.
    [3]  The cost is in proportion to the topics that may be due and to those whose settings have changed. Uses are not
         queued: when a deadline comes, a topic that was used meanwhile gets a later one.
    [4]  Topics of the configuration file are never deleted. Nothing is deleted while the clock is in doubt (rule L15)
         or the server stops: subscribers that the server sends away have not left.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import MICROS, NEVER

log = structlog.get_logger(__name__)

DELETIONS_MAX: Final = 100
"""Deletions that the writer has at a time: each costs a synced commit."""
LOOK_AGAIN_MICROS: Final = 10 * MICROS
"""How long to wait with a due topic that the writer has refused to delete: peers share it, or a load is open."""


class Cause(enum.StrEnum):
    """The reason why a topic was deleted."""

    IDLE = "idle"
    LEFT = "left"
    """Its last subscriber left."""


class IdleTopics:
    """Knows when the next topic may be due. On one thread, the event loop's, except for its watcher of topics."""

    def __init__(self, reads: Reads, writes: Writes) -> None:
        topics = self._topics = reads.topics
        self._durables = reads.durables
        self._administration = writes.administration
        self._clock = reads.clock
        self._stopped = False
        self._heard: deque[Topic] = deque()
        """Topics whose settings may have changed, or whose last subscriber may have left. Any thread may append."""
        self._ttls: dict[int, int] = {}
        """The last known `idle_ttl` of each topic, by id; a new value starts the time anew."""
        self._due: dict[int, int] = {}
        """When to look at each topic next that has an `idle_ttl`, or that was refused."""
        self._heap: list[tuple[int, int]] = []
        """The same as (time, topic id). An entry that differs from `_due` has been replaced."""
        self._asked: set[int] = set()
        self._left_over: dict[int, Topic] = {}
        """Topics to delete, beyond `DELETIONS_MAX`."""
        self.wake: Callable[[], None] = lambda: None
        """Called when `tick` has work earlier than it said."""
        self.deleted_total: Final = dict.fromkeys(Cause, 0)
        topics.watch(lambda topic, _: self._heard.append(topic))
        self._heard.extend(topics.by_id.values())

    def stop(self) -> None:
        """Deletes nothing any more: the server stops."""
        self._stopped = True

    def tick(self) -> int:
        """Deletes the topics that are due. Returns when the next one may be."""
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
            found = self._topics.by_id.get(topic_id)
            if found is not None:
                self._look(found, now)
        return self._heap[0][0] if self._heap else NEVER

    def _hear(self, topic: Topic, now: int) -> None:
        """Notes the settings of a topic, and looks at it."""
        ttl = topic.settings.idle_ttl_micros
        gone = self._topics.by_id.get(topic.id) is not topic
        if gone or topic.declaration.in_config or topic.reserved or (ttl is None and not topic.settings.auto_delete):
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
            return  # the answer of the writer looks again
        cause = self._cause(topic, now)
        if cause is not None:
            if not _kept_by_content(topic):
                self._delete(topic, cause)
            return  # a topic with records is looked at again once it is empty
        ttl = topic.settings.idle_ttl_micros
        if ttl is not None:
            self._look_at(topic, (now if topic.followers or topic.views else topic.last_use_micros) + ttl)

    def _cause(self, topic: Topic, now: int) -> Cause | None:
        """Why a topic is due now, apart from its records; None: it is not due."""
        if self._left(topic, now):
            return Cause.LEFT
        return Cause.IDLE if _unused(topic, now) else None

    def _look_at(self, topic: Topic, due: int) -> None:
        if self._due.get(topic.id) != due:
            self._due[topic.id] = due
            heapq.heappush(self._heap, (due, topic.id))

    def _left(self, topic: Topic, now: int) -> bool:
        """True if all subscribers have left; a detached durable has not left."""
        return topic.settings.auto_delete and topic.was_followed and _may_go(topic) and not self._durables.count(topic)

    def _delete(self, topic: Topic, cause: Cause) -> None:
        if len(self._asked) >= DELETIONS_MAX:
            self._left_over[topic.id] = topic
            return

        def decided(deleted: bool | StoreError) -> None:
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
            deleting = self._administration.delete_unused(topic, self._left if cause is Cause.LEFT else _unused)
        except StoreError:  # the store is overloaded, stopping or has failed
            self._asked.discard(topic.id)
            self._refused(topic)
        else:
            deleting.then(decided)

    def _refused(self, topic: Topic) -> None:
        """Hears that the writer has not deleted a topic: it was used meanwhile, or something else keeps it."""
        if self._topics.by_id.get(topic.id) is not topic:
            return
        now = self._clock.now_micros()
        if self._cause(topic, now) is None:
            self._look(topic, now)
        else:
            self._look_at(topic, now + LOOK_AGAIN_MICROS)


def _kept_by_content(topic: Topic) -> bool:
    """True if its records keep a topic. The writer decides it again, but each time costs a synced commit."""
    return topic.settings.only_if_empty and topic.statistics.records > 0


def _may_go(topic: Topic) -> bool:
    return not (topic.followers or topic.views or topic.declaration.in_config or topic.reserved)


def _unused(topic: Topic, now: int) -> bool:
    """True if a topic has not been used for its `idle_ttl`."""
    ttl = topic.settings.idle_ttl_micros
    return ttl is not None and _may_go(topic) and topic.last_use_micros + ttl <= now
