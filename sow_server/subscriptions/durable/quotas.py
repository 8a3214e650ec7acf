"""The quotas of backlogs: when one is reached, and what is done where it takes entries away (rule J9).

A quota that holds or refuses publishes acts where they come in (`services.records.admission`). One that evicts or
conflates acts here.

[1]  Only topics whose quota evicts or conflates are looked at, so a look costs nothing for others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads
from sow_server.engine.durables import DurableEditor
from sow_server.engine.durables.registry import Durables
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import BacklogAction
from sow_server.subscriptions.durable.batches import DurableChanges


class Quotas:
    """Owns the topics with a quota that evicts or conflates. On the dispatcher's thread."""

    def __init__(
        self, reads: Reads, changes: DurableChanges, tell: Callable[[Topic, list[str] | StoreError], None]
    ) -> None:
        """`tell`: hears which durables have lost entries."""
        self._topics = reads.topics
        self._durables = reads.durables
        self._changes = changes
        self._tell = tell
        self._relieved: dict[int, None] = {}
        """The ids of these topics."""

    def watch(self, topic: Topic) -> None:
        """Notes whether the quota of a topic with durables evicts or conflates."""
        settings = topic.settings
        if settings.has_quota and settings.backlog_action in (BacklogAction.EVICT, BacklogAction.CONFLATE):
            self._relieved[topic.id] = None

    def forget(self, topic: Topic) -> None:
        """Looks at a topic no more, until `watch`."""
        self._relieved.pop(topic.id, None)

    def look(self, now_micros: int) -> None:
        """Relieves the topics whose backlog has reached its quota."""
        for topic_id in list(self._relieved):
            topic = self._topics.by_id.get(topic_id)
            if topic is None:
                del self._relieved[topic_id]
            elif exceeds(self._durables, topic, now_micros):
                self._changes.submit_quietly(_relieve(topic)).then(partial(self._tell, topic))


def exceeds(
    durables: Durables,
    topic: Topic,
    now_micros: int,
    under_way: tuple[int, int] = (0, 0),
    *,
    passed_over: Collection[str] = (),
) -> bool:
    """True if a topic's backlog, with the entries and bytes `under_way` to it, has reached its quota (rule J9).
    `passed_over`: owners whose durables do not count (rule J19)."""
    settings = topic.settings
    size, age, number = settings.backlog_quota_bytes, settings.backlog_quota_age_micros, settings.backlog_quota_entries
    backlog = durables.backlog(topic, passed_over)
    if backlog is None:
        return False
    if size is not None and backlog.bytes + under_way[1] >= size:
        return True
    if number is not None and backlog.entries + under_way[0] >= number:
        return True
    return age is not None and backlog.oldest_micros is not None and now_micros - backlog.oldest_micros >= age


def _relieve(topic: Topic) -> Callable[[DurableEditor], list[str]]:
    return lambda durables: durables.relieve(topic)
