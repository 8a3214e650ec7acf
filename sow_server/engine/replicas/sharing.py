"""The topics that links between instances carry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Final

from sow_peering import TopicKind
from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.values.patterns import is_quick, matcher

compiled: Final = functools.lru_cache(maxsize=200)(matcher)
"""Asked for each publish that wants to be REPLICATED, and before and after a source begins. Raises PatternError."""
ALL_TOPICS: Final = ".*"


@functools.lru_cache(maxsize=200)
def covering(pattern: str) -> str:
    """The pattern that decides which topics a source shares: its own if that is quick, else that of all topics. All
    topics of this instance are matched on the writer's thread when a source begins, and a peer chose the pattern. A
    topic too many costs tombstones, a topic that is missed would cost deletes. Raises PatternError."""
    return pattern if is_quick(pattern) else ALL_TOPICS


class SharedTopics:
    """Decides which topics are shared, by the patterns of all links."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._covers: list[Callable[[str], bool]] = []

    def cover(self, patterns: Iterable[str]) -> None:
        """Sets the patterns of all links, in either direction. Each has been compiled before: that of a source when it
        was read from its row, and before it is stored."""
        self._covers = [compiled(pattern) for pattern in sorted(set(patterns))]

    def covers(self, name: str) -> bool:
        """True if peers send or receive a topic of this name. None of them shares a view (rule V9)."""
        topic = self._topics.by_name.get(name)
        if topic is not None and topic.view is not None:
            return False
        return not name.startswith("_") and any(covers(name) for covers in self._covers)

    def shares(self, pattern: str, name: str) -> bool:
        """True if a link with this pattern carries a topic of this name, which may not exist yet."""
        topic = self._topics.by_name.get(name)
        carried = topic is None or (topic.settings.journal and topic.view is None)
        return carried and not name.startswith("_") and compiled(pattern)(name)

    def matching(self, pattern: str) -> list[TopicKind]:
        """The topics whose whole name matches, by name; the store's own and views are never among them."""
        matches = compiled(pattern)
        by_name = self._topics.by_name
        topics = [topic for topic in by_name.values() if not topic.reserved and topic.view is None]
        return sorted(kind_of(topic) for topic in topics if matches(topic.name))

    def kinds(self, names: Collection[str]) -> list[TopicKind]:
        """The kinds of the existing topics with these names."""
        by_name = self._topics.by_name
        return [kind_of(by_name[name]) for name in sorted(names) if name in by_name]


def kind_of(topic: Topic) -> TopicKind:
    """The settings of a topic that matter between instances (rule R12)."""
    settings = topic.settings
    return TopicKind(
        topic.name,
        settings.key,
        settings.message_type.value,
        settings.separator,
        topic.acts,
        settings.journal,
    )
