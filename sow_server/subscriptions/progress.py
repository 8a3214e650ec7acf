"""When a subscriber is told how far it has got, and what it is told (rules S5, F6).

[1]  A subscriber hears something at least every `progress_micros`: a frame, or its progress.
[2]  Marks that are due are told between two changes, also while changes come without a pause.
[3]  A subscriber that was told that it is behind is told at once when it has caught up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sow_server.engine.values.clock import GuardedClock
from sow_server.subscriptions.frames import Frame, Progress
from sow_server.subscriptions.marking import Marking


class ProgressReports:
    """Owns the time of the last frame of one subscriber, and the marks of its bookmarks."""

    def __init__(
        self, progress_micros: int, marking: Marking | None, *, clock: GuardedClock, elapsed: Callable[[], int]
    ) -> None:
        """`marking`: makes its bookmarks mean something at other instances. `elapsed`: microseconds of a clock that
        nobody sets."""
        self._progress_micros = progress_micros
        self.marking: Final = marking
        self._clock = clock
        self._elapsed = elapsed
        self._sent_at = elapsed()
        self.told_behind = False
        """True if the last report said that the subscriber is behind [3]."""

    @property
    def elsewhere(self) -> bool:
        """True if the subscriber may have something that this instance lacks."""
        return self.marking is not None and self.marking.elsewhere

    @property
    def next_micros(self) -> int:
        """The elapsed time at which to look again."""
        until = self._sent_at + self._progress_micros
        if self.marking is not None and (look := self.marking.next_micros) is not None:
            until = min(until, look)
        return until

    def sending(self, frame: Frame) -> Frame:
        """The frame, which is sent now."""
        self._sent_at = self._elapsed()
        if self.marking is not None:
            self.marking.sample(self._sent_at)
        return frame

    def has_marks_due(self, position: int) -> bool:
        """True if marks were due when the last frame was sent [2]."""
        return self.marking is not None and self.marking.is_due(position, self._sent_at)

    def is_due(self, position: int) -> bool:
        """True if the subscriber is to be told its position now [1]."""
        elapsed = self._elapsed()
        if elapsed >= self._sent_at + self._progress_micros:
            return True
        return self.marking is not None and self.marking.is_due(position, elapsed)

    def marks(self, position: int) -> str:
        """The end of the bookmark of a position."""
        return "" if self.marking is None else self.marking.tell(position, self._elapsed())

    def report(self, position: int, *, behind: bool) -> Frame:
        """The frame that tells a position, which is sent now."""
        marks, marking = self.marks(position), self.marking
        covers = marking is None or marking.covers
        self.told_behind = behind
        sources = marking is not None and marking.sources
        return self.sending(Progress(position, self._clock.now_micros(), marks, covers, behind, sources))
