"""The topics that sources have announced, and which of them this instance takes (rule R12)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sow_peering import TopicAnswer, TopicKind
from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.replicas.sharing import kind_of
from sow_server.engine.values.errors import Reason, StoreError


class AnnouncedTopics:
    """Owns the kinds of topics that each source has announced, until the source leaves."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._kinds: dict[str, dict[str, TopicKind]] = {}

    def announce(self, source: str, kinds: Sequence[TopicKind]) -> bool:
        """A source announces all that it sends. True if they are others than before."""
        before = self._kinds.get(source)
        self._kinds[source] = {kind.name: kind for kind in kinds}
        return before != self._kinds[source]

    def forget(self, source: str) -> None:
        """A source has left."""
        self._kinds.pop(source, None)

    def takeable(self, source: str, name: str) -> Topic | None:
        """The topic of this instance for a source's; None if it has none, or one of another kind."""
        kind = self._kinds.get(source, {}).get(name)
        if kind is None or self._refusal(kind) is not None:
            return None
        return self._topics.by_name[name]

    def acts_alike(self, source: str, topic: Topic) -> bool:
        """True if a source sends a topic now, and expires its records as this instance does."""
        kind = self._kinds.get(source, {}).get(topic.name)
        return kind is not None and kind.acts == topic.acts and self._refusal(kind) is None

    def check(self, kind: TopicKind) -> TopicAnswer:
        """The answer to a topic of another instance: accepted, or the reason against it (rule R12)."""
        refusal = self._refusal(kind)
        if refusal is None:
            return TopicAnswer(kind.name)
        return TopicAnswer(kind.name, reason=refusal.reason, message=refusal.message)

    def _refusal(self, kind: TopicKind) -> StoreError | None:
        """The reason why a topic of another instance is refused (rule R12); None: it is accepted. Both ends show the
        message."""
        topic = self._topics.by_name.get(kind.name)
        if topic is None or topic.reserved:
            return StoreError(Reason.TOPIC_NOT_FOUND, f"there is no topic {kind.name!r} at the receiving end")
        if topic.view is not None:
            return StoreError(Reason.TOPIC_DIFFERS, f"{kind.name} is a view at the receiving end")
        mine = kind_of(topic)
        if not mine.journal or not kind.journal:
            where = "receiving" if kind.journal else "sending"
            return StoreError(Reason.NO_JOURNAL, f"{kind.name} has no journal at the {where} end")
        for field in ("key", "message_type", "separator"):
            here, there = getattr(mine, field), getattr(kind, field)
            if here != there:
                ends = f"{_shown(here)} at the receiving end, {_shown(there)} at the sending one"
                return StoreError(Reason.TOPIC_DIFFERS, f"{kind.name} has {field} = {ends}")
        return None


def _shown(value: object) -> str:
    return json.dumps(value.decode("latin-1") if isinstance(value, bytes) else value)
