"""Deleting topics (rule T5). A topic's id is never used again, so the sweep drops its entries in the expiry index.

[1]  A deletion takes a sequence. So every position that was a topic's is below the floor of a later topic of the
     same name, also if nothing else is written in between (rule J1).
"""

from __future__ import annotations

from collections.abc import Callable

from sow_server.engine.administration.altering import alterable, seen_views
from sow_server.engine.administration.parts import Parts
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.layout import DELIVER_KEY, INDEX_KEY, REARM_KEY, STATISTICS_KEY, TOPIC_KEY, VIEW_KEY
from sow_server.engine.disk.rocks import INDEXES, JOURNAL, META, RECORDS, VIEWS
from sow_server.engine.values.views import has_views


class DeleteTopic:
    """The step that deletes a topic; answers how many live records it had."""

    def __init__(self, parts: Parts, name: str, *, force: bool, in_config: bool, sees: Callable[[str], bool]) -> None:
        """`sees`: true for a topic that the caller sees, by its name."""
        self._parts = parts
        self._in_config = in_config
        self._sees = sees
        self._name = name
        self._force = force
        self._topic: Topic | None = None
        self._live = 0

    def stage(self, draft: Draft) -> None:
        """Stages the removal of everything that is the topic's. PEER_BEHIND unless forced, TOPIC_NOT_FOUND,
        TOPIC_HAS_VIEWS."""
        topic = alterable(self._parts.core.topics, self._name, in_config=self._in_config)
        if topic.views:
            raise has_views(topic.name, seen_views(topic, self._sees), "delete it")
        if not self._force:
            self._parts.replicas.peers.check_shipped(topic)
        self._live = self._parts.core.cuts.count(topic)
        _stage_deletion(self._parts, draft, topic)
        self._topic = topic

    def committed(self) -> int:
        """Drops it from memory."""
        assert self._topic is not None, "it was staged"
        _forget(self._parts, self._topic)
        return self._live


class DeleteUnused:
    """The step that deletes a topic unless somebody uses it; answers whether it did (rule T1)."""

    def __init__(self, parts: Parts, topic: Topic, is_unused: Callable[[Topic, int], bool]) -> None:
        """`is_unused`: asked when the writer comes to it, of the topic and that time."""
        self._parts = parts
        self._topic = topic
        self._is_unused = is_unused
        self._deletes = False

    def stage(self, draft: Draft) -> None:
        """Stages the deletion of a topic that is unused, that peers do not share, and that has no live records, or may
        have some."""
        parts, topic = self._parts, self._topic
        gone = parts.core.topics.by_id.get(topic.id) is not topic
        self._deletes = not (
            gone
            or topic.replicated
            or topic.views
            or parts.loads.registry.open_on(topic)
            or not self._is_unused(topic, draft.now)
            or (topic.settings.only_if_empty and parts.core.cuts.count(topic))
        )
        if self._deletes:
            _stage_deletion(parts, draft, topic)

    def committed(self) -> bool:
        """Drops it from memory."""
        if self._deletes:
            _forget(self._parts, self._topic)
        return self._deletes


def _stage_deletion(parts: Parts, draft: Draft, topic: Topic) -> None:
    draft.dropped.append(topic)
    draft.next_sequence += 1  # [1]
    draft.batch.ranges += [
        (RECORDS, topic.prefix, topic.stop),
        (JOURNAL, topic.prefix, topic.stop),
        (INDEXES, topic.prefix, topic.stop),
    ]
    if topic.view is not None:
        draft.batch.ranges.append((VIEWS, topic.prefix, topic.stop))
        draft.batch.deletes[META].append(VIEW_KEY + topic.prefix)
    parts.durables.stage_drop(draft, topic)
    parts.replicas.stage_drop(draft, topic)
    parts.loads.registry.stage_fail_all(draft, topic, "the topic was deleted")
    draft.batch.deletes[META] += [INDEX_KEY + index.prefix for index in topic.indexes.all]
    draft.batch.deletes[META] += [
        TOPIC_KEY + topic.prefix,
        STATISTICS_KEY + topic.prefix,
        REARM_KEY + topic.prefix,
        DELIVER_KEY + topic.prefix,
    ]


def _forget(parts: Parts, topic: Topic) -> None:
    parts.views.remove(topic)
    parts.core.topics.remove(topic)
    parts.core.unsound.forget(topic.name)
