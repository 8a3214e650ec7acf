"""Serves a subscriber from the journal: one that starts in the past, or one that cannot keep up (rules S4, S6, J1).

[1]  A step reads a bounded number of changes, for a bounded time unless its filter is slow, from one cut of the
     journal, and never beyond the durable position. It reads an atomic request as a whole.
[2]  Changes that the journal has discarded since the last step are noticed before anything is read: `JournalGap`.
[3]  Several topics are read in their total order, by walking the commits.
[4]  A chunk becomes rows in columns (`row_columns`) for a subscriber that gets every change, or the puts whose payload
     matches. Otherwise each change is judged by itself (`focus`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads
from sow_server.engine.journal.reading import JournalCut
from sow_server.engine.stored import Changes, Commit
from sow_server.subscriptions.changes import changes_of
from sow_server.subscriptions.frames import (
    COLUMN_ROW_BYTES,
    FRAME_BYTES,
    ChangeFrame,
    Row,
    RowColumns,
    within,
)
from sow_server.subscriptions.journal.row_columns import PUTS, columns_of, gets_all, gets_matches
from sow_server.subscriptions.live import focus
from sow_server.subscriptions.live.matching import VersionMatcher
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

    def __init__(self, reads: Reads, view: View, *, topic: Topic | None, follows: Callable[[Topic], bool]) -> None:
        """`topic`: the only one; None: all topics that `follows` accepts."""
        self._cuts = reads.cuts
        self._all_topics = reads.topics
        self._clock = reads.clock
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
        self._columns: RowColumns | None = None
        """Either these or `_rows` are the rows of the frame that has begun."""
        self._size = 0
        self._looked_at = 0
        self._give_up = time.perf_counter() + READ_SECONDS
        self._enough = False
        self._topic: Topic | None = None
        self._wants = Wants()

    @property
    def full(self) -> bool:
        """True if this is enough for one step."""
        return self._enough or self._looked_at >= READ_CHANGES or self._size >= FRAME_BYTES

    def add(
        self, cut: JournalCut, topic: Topic, changes: Changes, view: tuple[VersionMatcher, Wants], start: int
    ) -> int:
        """Adds a chunk from index `start` on, an atomic one as a whole. Returns the sequence that was reached."""
        wants = view[1]
        before = changes.first_sequence + start - 1
        if self._topic is not topic or changes.atomic:
            self._end_frame(before)
        self._topic, self._wants = topic, wants
        count = len(changes.keys)
        stop = count if changes.atomic else min(count, start + READ_CHANGES - self._looked_at)
        reached = self._add_columns(topic, changes, view, start, stop)
        if reached is None:
            reached = self._add_one_by_one(cut, topic, changes, view, start, stop)
        self._looked_at += stop - start
        if changes.atomic:
            self._end_frame(reached, after=before, atomic=True)
        return reached

    def _add_columns(
        self, topic: Topic, changes: Changes, view: tuple[VersionMatcher, Wants], start: int, stop: int
    ) -> int | None:
        """Adds changes in columns, as many as there is room for; None: they have to be looked at one by one [4]."""
        matcher, wants = view
        before = changes.first_sequence + start - 1
        choice: list[bool] | None = None
        if gets_all(matcher, wants):
            if not changes.atomic:
                taken = within(changes.keys[start:stop], changes.payloads[start:stop], FRAME_BYTES - self._size)
                if self._looked_at and start + taken < len(changes.keys):
                    # The next step takes the chunk from its beginning: otherwise it would decode it again for the rest.
                    self._enough = True
                    return before
                stop = start + taken
        elif gets_matches(wants) and (judge := matcher.of_payloads(topic)) is not None:
            choice = self._judged(changes, start, stop, judge)
            stop = start + len(choice)
        else:
            return None
        rows = columns_of(topic, changes, start, stop, wants, self._now, choice)
        if rows is None:
            return None
        if self._rows or (self._columns is not None and self._columns.falls_due != rows.falls_due):
            self._end_frame(before)
        self._columns = rows if self._columns is None else self._columns.joined(rows)
        self._size += sum(rows.sizes)
        return changes.first_sequence + stop - 1

    def _judged(self, changes: Changes, start: int, stop: int, judge: Callable[[bytes], bool]) -> list[bool]:
        """One value for each change: True if it is a put that matches. An atomic chunk is judged whole, others as far
        as there is time and room."""
        choice: list[bool] = []
        room = FRAME_BYTES - self._size
        for kind, payload in zip(changes.change[start:stop], changes.payloads[start:stop], strict=True):
            chosen = kind in PUTS and judge(payload)
            choice.append(chosen)
            if chosen:
                room -= COLUMN_ROW_BYTES + len(payload)
            self._enough = time.perf_counter() >= self._give_up
            if (self._enough or room <= 0) and not changes.atomic:
                break
        return choice

    def _add_one_by_one(
        self,
        cut: JournalCut,
        topic: Topic,
        changes: Changes,
        view: tuple[VersionMatcher, Wants],
        start: int,
        stop: int,
    ) -> int:
        matcher, wants = view
        reached = changes.first_sequence + start - 1
        if self._columns is not None:
            self._end_frame(reached)
        for change in changes_of(
            topic,
            changes,
            start=start,
            stop=stop,
            find=lambda sequence: cut.entry(topic, sequence),
            buried=matcher.elsewhere,
        ):
            reached = change.sequence
            row = focus.row_of(change, wants, matcher, self._now)
            if row is not None:
                self._rows.append(row)
                self._size += row.size
            self._enough = time.perf_counter() >= self._give_up
            if (self._enough or self._size >= FRAME_BYTES) and not changes.atomic:
                return reached
        return changes.first_sequence + stop - 1  # also past changes that nobody is told

    def frames(self, position: int) -> list[ChangeFrame]:
        """All frames; they have everything up to `position`."""
        self._end_frame(position)
        return self._frames

    def _end_frame(self, bookmark: int, *, after: int = 0, atomic: bool = False) -> None:
        rows = self._rows if self._columns is None else self._columns
        if rows:
            assert self._topic is not None, "rows are of a topic"
            self._frames += self._wants.frames(self._topic.name, rows, after=after, bookmark=bookmark, atomic=atomic)
        self._rows, self._columns = [], None
