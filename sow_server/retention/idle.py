"""Topics that nobody uses are deleted: after `idle_ttl`, or when the last subscriber has left (rule T1).

A use is a subscription for as long as it is attached, a get or a query, and that somebody declares the topic again; a
publish only where the topic says so. When a topic was used is kept in memory, so a start counts as a use, as does a
change of its `idle_ttl`.

    ID1  A topic is deleted after at least its `idle_ttl`, and some seconds later at most.
    ID2  The decision is the writer's, on the topic as it is in its turn: a use that came before wins.
    ID3  Cost is in proportion to the topics that may be due: looking costs nothing before the earliest of them is, and
         all topics are gone over only every `SCAN_TICKS`, or when there are others.
    ID4  Topics of the configuration file are never deleted, nor is anything while the clock is in doubt (rule L15) or
         the server stops: the subscribers that it sends away have not left.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from sow_server.engine.clock import GuardedClock
from sow_server.engine.errors import StoreError
from sow_server.engine.model import MICROS, NEVER
from sow_server.engine.store import Store
from sow_server.engine.topics import Topic

log = structlog.get_logger(__name__)

TICK_SECONDS: Final = 1
SCAN_TICKS: Final = 10
DELETIONS_MAX: Final = 100
"""Topics that one tick asks the writer to delete: each costs it a synced commit."""
LOOK_AGAIN_MICROS: Final = 10 * MICROS
"""When a topic is looked at again that is due, but not empty."""


class Cause(enum.StrEnum):
    """Why a topic was deleted."""

    IDLE = "idle"
    LEFT = "left"
    """By its last subscriber."""


class IdleTopics:
    """Knows which topics may be due. On one thread, the event loop's, driven once a second."""

    def __init__(self, store: Store, clock: GuardedClock) -> None:
        self._store = store
        self._clock = clock
        self._stopped = False
        self._seen: Mapping[int, Topic] = {}
        self._until_scan = 0
        self._ttls: dict[int, int] = {}
        """By topic id, as of the last scan."""
        self._idle: list[Topic] = []
        self._auto: list[Topic] = []
        self._earliest = NEVER
        """No topic is due before; it may be later, as uses are not noted here."""
        self._asked: set[int] = set()
        self.deleted_total: Final = dict.fromkeys(Cause, 0)

    def stop(self) -> None:
        """The server stops: nothing is deleted any more."""
        self._stopped = True

    def tick(self) -> None:
        """Deletes what is due."""
        if self._stopped or self._clock.paused:
            return
        now = self._clock.now_micros()
        self._until_scan -= 1
        if self._until_scan <= 0 or self._store.topics.by_id is not self._seen:
            self._scan(now)
        if now >= self._earliest:
            self._look(now)
        for topic in self._auto:
            if self._left(topic, now) and not _guarded(topic):
                self._delete(topic, self._left, Cause.LEFT)

    def _scan(self, now: int) -> None:
        """Finds the topics that may be deleted some time."""
        self._seen, self._until_scan = self._store.topics.by_id, SCAN_TICKS
        known, self._ttls = self._ttls, {}
        self._idle, self._auto = [], []
        for topic in self._seen.values():
            settings = topic.settings
            if settings.idle_ttl_micros is None and not settings.auto_delete:
                continue
            if topic.in_config or topic.reserved:
                continue
            if settings.auto_delete:
                self._auto.append(topic)
            if settings.idle_ttl_micros is not None:
                self._idle.append(topic)
                ttl = self._ttls[topic.id] = settings.idle_ttl_micros
                if known.get(topic.id) != ttl:
                    topic.last_use_micros = now
        self._earliest = now

    def _look(self, now: int) -> None:
        """Deletes what is due of `_idle`, and finds out when the next of them is."""
        earliest = NEVER
        for topic in self._idle:
            if topic.id in self._asked:
                continue
            ttl = topic.settings.idle_ttl_micros
            if ttl is None:
                continue  # the next scan leaves it out
            due = (now if topic.followers else topic.last_use_micros) + ttl
            if due <= now:
                if _guarded(topic):
                    due = now + LOOK_AGAIN_MICROS
                elif len(self._asked) < DELETIONS_MAX:
                    self._delete(topic, _unused, Cause.IDLE)
                    due = now + LOOK_AGAIN_MICROS
            earliest = min(earliest, due)
        self._earliest = earliest

    def _left(self, topic: Topic, now: int) -> bool:
        """Whether all subscribers have left; a durable one that is away has not."""
        return (
            topic.settings.auto_delete
            and topic.was_followed
            and _may_go(topic)
            and not self._store.durables.count(topic)
        )

    def _delete(self, topic: Topic, due: Callable[[Topic, int], bool], cause: Cause) -> None:
        if topic.id in self._asked or len(self._asked) >= DELETIONS_MAX:
            return

        def done(deleted: bool | StoreError) -> None:
            self._asked.discard(topic.id)
            if deleted is True:
                self.deleted_total[cause] += 1
                log.info("unused_topic_deleted", topic=topic.name, cause=cause.value)

        self._asked.add(topic.id)
        try:
            self._store.delete_unused(topic, due, done)
        except StoreError:  # the store is stopping or has failed
            self._asked.discard(topic.id)


def _guarded(topic: Topic) -> bool:
    """Whether content keeps a topic. The writer has the last word on that, but costs a synced commit each time."""
    return topic.settings.only_if_empty and topic.statistics.records > 0


def _may_go(topic: Topic) -> bool:
    return not (topic.followers or topic.in_config or topic.reserved)


def _unused(topic: Topic, now: int) -> bool:
    """Whether nobody has used a topic for its `idle_ttl`."""
    ttl = topic.settings.idle_ttl_micros
    return ttl is not None and _may_go(topic) and topic.last_use_micros + ttl <= now
