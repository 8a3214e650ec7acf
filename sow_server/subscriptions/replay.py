"""Serves a subscriber from the journal: one that starts in the past, or one that cannot keep up (rules S4, S6, J1).

[1]  A step reads a bounded number of changes, for a bounded time unless its filter is slow, from one cut of the
     journal, and never beyond the durable position. It reads an atomic request as a whole.
[2]  Changes that the journal has discarded since the last step are noticed before anything is read: `JournalGap`.
[3]  Several topics are read in their total order, by walking the commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.disk.layout import Changes, Commit
from sow_server.engine.journal.reading import JournalCut
from sow_server.engine.reading import Cuts
from sow_server.engine.values.clock import GuardedClock
from sow_server.subscriptions import focus
from sow_server.subscriptions.changes import changes_of
from sow_server.subscriptions.frames import FRAME_BYTES, ChangeFrame, Row, frames_of
from sow_server.subscriptions.matching import VersionMatcher
from sow_server.subscriptions.request import Wants

READ_CHANGES: Final = 2000
READ_COMMITS: Final = 1000
READ_SECONDS: Final = 0.05
"""Limits of one step, so that a reader thread is not held for long."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one step: all changes up to `position`."""

    frames: list[ChangeFrame]
    position: int


@dataclass(frozen=True, slots=True)
class JournalGap:
    """The journal of a topic does not reach back to the position. It has the changes after `earliest`; None: there is
    no journal."""

    topic: str
    earliest: int | None


View = Callable[[Topic], "tuple[VersionMatcher, Wants] | None"]


class Replay:
    """Reads the journal for one subscriber. One thread at a time."""

    def __init__(
        self,
        cuts: Cuts,
        topics: Topics,
        clock: GuardedClock,
        view: View,
        *,
        topic: Topic | None,
        follows: Callable[[Topic], bool],
    ) -> None:
        """`topic`: the only one; None: all topics that `follows` accepts."""
        self._cuts = cuts
        self._all_topics = topics
        self._clock = clock
        self._view = view
        self._topic = topic
        self._follows = follows

    def read(self, position: int, upto: int, accepted: Mapping[int, int]) -> Replayed | JournalGap:
        """The next changes after `position`. `accepted`: floors, by topic id, below which nothing is missed."""
        cut = self._cuts.journal()
        try:
            gap = self._gap(cut, position, accepted)
            if gap is not None:
                return gap
            return self._read(cut, position, upto)
        finally:
            cut.close()

    def _gap(self, cut: JournalCut, position: int, accepted: Mapping[int, int]) -> JournalGap | None:
        for topic in self._topics():
            if not topic.settings.journal:
                return JournalGap(topic.name, None)
            floor = cut.floors.get(topic.id, 0)
            if floor > position and floor > accepted.get(topic.id, 0):
                return JournalGap(topic.name, floor)
        return None

    def _topics(self) -> Iterator[Topic]:
        if self._topic is not None:
            yield self._topic
        else:
            for topic in self._all_topics.by_id.values():
                if self._follows(topic) and self._view(topic) is not None:
                    yield topic

    def _read(self, cut: JournalCut, position: int, upto: int) -> Replayed:
        found = _FrameCollector(self._clock.now_micros())
        commits = 0
        for step in self._steps(cut, position, upto):
            if isinstance(step, Commit):
                # The whole commit has been walked, whether or not any of it was wanted.
                position = max(position, step.last_sequence)
                commits += 1
                if commits >= READ_COMMITS:
                    break
                continue
            topic, changes = step
            view = self._view(topic)
            if view is None:
                continue
            discarded = max(position, cut.floors.get(topic.id, 0))
            start = max(0, discarded + 1 - changes.first_sequence)
            position = found.add(cut, topic, changes, view, start)
            if found.full:
                break
        else:
            position = upto
        return Replayed(found.frames(position), position)

    def _steps(self, cut: JournalCut, position: int, upto: int) -> Iterator[tuple[Topic, Changes] | Commit]:
        """The chunks to read. When commits are walked, each commit follows its chunks."""
        if self._topic is not None:
            for changes in cut.changes(self._topic, position, upto):
                yield self._topic, changes
            return
        topics = self._all_topics.by_id
        for commit in cut.commits(position, upto):
            for run in commit.runs:
                topic = topics.get(run.topic_id)
                if topic is None or run.first_sequence + run.length - 1 <= position or not self._follows(topic):
                    continue
                # Its discarded chunks are below an accepted floor.
                found = cut.chunk(topic, run.first_sequence)
                if found is not None:
                    yield topic, found
            yield commit


class _FrameCollector:
    """Collects rows into frames."""

    def __init__(self, now_micros: int) -> None:
        self._now = now_micros
        self._frames: list[ChangeFrame] = []
        self._rows: list[Row] = []
        self._size = 0
        self._looked_at = 0
        self._give_up = time.perf_counter() + READ_SECONDS
        self._late = False
        self._topic: Topic | None = None
        self._wants = Wants()

    @property
    def full(self) -> bool:
        """Whether this is enough for one step."""
        return self._late or self._looked_at >= READ_CHANGES or self._size >= FRAME_BYTES

    def add(
        self, cut: JournalCut, topic: Topic, changes: Changes, view: tuple[VersionMatcher, Wants], start: int
    ) -> int:
        """Adds a chunk from index `start` on, an atomic one as a whole. Returns the sequence that was reached."""
        matcher, wants = view
        before = changes.first_sequence + start - 1
        if self._topic is not topic or changes.atomic:
            self._end_frame(before)
        self._topic, self._wants = topic, wants
        count = len(changes.keys)
        stop = count if changes.atomic else min(count, start + READ_CHANGES - self._looked_at)
        reached = before
        for change in changes_of(
            topic, changes, start=start, stop=stop, find=lambda sequence: cut.entry(topic, sequence)
        ):
            reached = change.sequence
            row = focus.row_of(change, wants, matcher, self._now)
            if row is not None:
                self._rows.append(row)
                self._size += row.size
            self._late = time.perf_counter() >= self._give_up
            if (self._late or self._size >= FRAME_BYTES) and not changes.atomic:
                break
        else:
            reached = changes.first_sequence + stop - 1  # also past changes that nobody is told
        self._looked_at += stop - start
        if changes.atomic:
            self._end_frame(reached, after=before, atomic=True)
        return reached

    def frames(self, position: int) -> list[ChangeFrame]:
        """All frames; they have everything up to `position`."""
        self._end_frame(position)
        return self._frames

    def _end_frame(self, bookmark: int, *, after: int = 0, atomic: bool = False) -> None:
        if self._rows:
            assert self._topic is not None, "rows are of a topic"
            wants = self._wants
            self._frames += frames_of(
                self._topic.name,
                self._rows,
                batch_size=wants.batch_size,
                after=after,
                bookmark=bookmark,
                together=atomic,
                atomic=atomic,
                judged=not (wants.changes or wants.delta),
            )
            self._rows = []
