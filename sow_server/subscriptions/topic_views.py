"""The topics that a subscription follows, and how it sees each of them: its filter and its wants.

    [1]  A topic is seen through one view for as long as the subscription lives, except after `rejoin`.
    [2]  A subscription to a pattern follows topics that appear later, too. A topic that does not fit its request has no
         view, and is passed over.

`follows` and `view` from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sow_server.engine.catalog.topics import Topic, topic_deleted
from sow_server.engine.doors import Reads
from sow_server.engine.values.errors import StoreError
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.live.snapshot import SeveralTopics
from sow_server.subscriptions.request import Request, Snapshot, Wants


class TopicViews:
    """Owns the views of the topics of one subscription."""

    def __init__(
        self,
        request: Request,
        reads: Reads,
        *,
        topic: Topic | None,
        matches: Callable[[str], bool],
        elsewhere: bool,
    ) -> None:
        """`topic`: the only one; None: all whose name `matches`. `elsewhere`: the subscriber has come from another
        instance, and is told of every record that leaves."""
        self._request = request
        self._topics = reads.topics
        self._cuts = reads.cuts
        self._topic = topic
        self._matches = matches
        self.several: Final = topic is None
        self.elsewhere = elsewhere
        self._views: dict[int, tuple[VersionMatcher, Wants] | None] = {}

    def follows(self, topic: Topic) -> bool:
        """True if the subscription follows a topic."""
        if self._topic is not None:
            return topic is self._topic
        return self._matches(topic.name) and self._request.permits(topic)

    def present(self) -> frozenset[int]:
        """The ids of the topics of the pattern that exist; none for a single topic."""
        if self._topic is not None:
            return frozenset()
        return frozenset([topic.id for topic in list(self._topics.by_id.values()) if self.follows(topic)])

    def view(self, topic: Topic) -> tuple[VersionMatcher, Wants] | None:
        """The filter and the wants for a topic; None if the topic does not fit the request."""
        # Two threads may ask at once; both get equal results.
        try:
            return self._views[topic.id]
        except KeyError:
            found = self._views[topic.id] = self._view(topic)
            return found

    def _view(self, topic: Topic) -> tuple[VersionMatcher, Wants] | None:
        try:
            view = self._request.view(topic)
        except StoreError:
            if self._topic is not None:
                raise
            return None  # the name of a topic of another kind matches
        return VersionMatcher(view.filter, elsewhere=self.elsewhere), self._request.wants(view)

    def check(self) -> None:
        """Raises StoreError if the writer has just deleted the only topic, or changed it so that the request does not
        fit any more. A registered subscription hears of later changes."""
        topic = self._topic
        if topic is not None:
            if topic.id not in self._topics.by_id:
                raise topic_deleted(topic)
            self.view(topic)

    def snapshot(self) -> Snapshot:
        """A snapshot of the topics, by one cut."""
        if self._topic is not None:
            return self._request.snapshot(self._topic)
        cut = self._cuts.many(lambda topics: [topic for topic in topics if self.follows(topic)])
        return SeveralTopics(cut, self.view, self._request.name)

    def rejoin(self) -> None:
        """This instance has everything that the subscriber was told elsewhere: its views are those of any other."""
        self.elsewhere = False
        self._views = {}
