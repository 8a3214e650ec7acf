"""Durables and the writer: changes of durables as steps, and figures that agree with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.durables.editor import DurableEditor
from sow_server.engine.durables.model import Durable, DurableFigures
from sow_server.engine.durables.registry import Durables
from sow_server.engine.journal.reading import ChunkHeads
from sow_server.engine.pending import Pending
from sow_server.engine.values.model import TopicStatistics
from sow_server.engine.values.turns import SERVER

T = TypeVar("T")


class DurableCommits:
    """Changes durables, and reads their figures."""

    def __init__(self, core: Core, durables: Durables) -> None:
        self._rocks = core.rocks
        self._clock = core.clock
        self._commits = core.commits
        self._topics = core.topics
        self._durables = durables

    def change(self, change: Callable[[DurableEditor], T]) -> Pending[T]:
        """Changes durables in one commit; answers the result of `change`, or the StoreError that it raised. Raises
        StoreError at once when nothing can be queued."""
        # In the order in which they are asked for, whoever asks: a detachment comes before the next attachment.
        return self._commits.run(ChangeDurables(self._durables, self._topics, change), caller=SERVER)

    def forget_removed(self) -> None:
        """Forgets the names of durables that were removed long ago."""
        self._commits.run_quietly(ForgetRemoved(self._durables))

    def figures(self, topic: Topic, name: str) -> tuple[Durable, DurableFigures, int]:
        """A durable, its figures, and the `now` of both. Raises StoreError. Not on the event loop."""
        (found,), now = self._figures_of(topic, lambda: [self._durables.find(topic, name)])
        return *found, now

    def all_figures(self, topic: Topic) -> tuple[list[tuple[Durable, DurableFigures]], int]:
        """As `figures`, of all durables of a topic, by name."""
        return self._figures_of(topic, lambda: sorted(self._durables.of(topic), key=lambda durable: durable.name))

    def _figures_of(
        self, topic: Topic, find: Callable[[], list[Durable]]
    ) -> tuple[list[tuple[Durable, DurableFigures]], int]:
        """One cut for all of them, so that their figures agree with each other."""
        with self._commits.cut_lock:
            found, statistics = find(), topic.statistics
            heads, now = ChunkHeads(self._rocks), self._clock.now_micros()
            heads.open()
        try:
            return [(one, self._durables.figures(topic, one, statistics, heads, now)) for one in found], now
        finally:
            heads.close()

    def topic_statistics(self, topic: Topic) -> TopicStatistics:
        """Figures of a topic, the backlog of its durables included."""
        figures, backlog = topic.statistics, self._durables.backlog(topic)
        oldest = None if backlog is None else backlog.oldest_micros
        return TopicStatistics(
            figures.records,
            figures.record_bytes,
            figures.journal_bytes,
            figures.journal_entries,
            max(figures.floor_sequence, figures.created_sequence),
            self._durables.count(topic),
            0 if backlog is None else backlog.bytes,
            None if oldest is None else max(0, self._clock.now_micros() - oldest),
            figures.tombstones,
            "" if backlog is None else backlog.name,
            0 if backlog is None else backlog.entries,
            topic.full_refusals,
        )


class ChangeDurables(Generic[T]):
    """The step that changes durables; answers the result of the function that does it."""

    def __init__(self, durables: Durables, topics: Topics, change: Callable[[DurableEditor], T]) -> None:
        self._durables = durables
        self._topics = topics
        self._change = change
        self._results: list[T] = []

    def stage(self, draft: Draft) -> None:
        """Stages the changes. Raises the errors of the function."""
        with DurableEditor(self._durables, draft, self._topics.by_id) as editor:
            self._results = [self._change(editor)]

    def committed(self) -> T:
        """The result of the function."""
        return self._results[0]


class ForgetRemoved:
    """The step that forgets durables that were removed long ago."""

    def __init__(self, durables: Durables) -> None:
        self._durables = durables

    def stage(self, draft: Draft) -> None:
        """Stages the removal of their rows."""
        self._durables.forget_removed(draft)

    def committed(self) -> None:
        """The registry has its own part in the draft."""
