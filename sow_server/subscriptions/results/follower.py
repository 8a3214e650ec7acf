"""One follower of a live result, as a machine that is driven step by step (rules S10, S11).

opening ──▶ snapshot ──▶ live
the source has a result   the differences, at the ends of intervals

[1]  It holds no queue: it remembers which rows it was told, and gets the difference to the newest result.
[2]  `position`: the rows that it was told are the result at this position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.model import MICROS
from sow_server.subscriptions.frames import ChangeFrame, Frame, Progress, SnapshotBatch, SnapshotBegin, SnapshotEnd
from sow_server.subscriptions.results.difference import Result, Told, snapshot_batches
from sow_server.subscriptions.results.fed import Asked
from sow_server.subscriptions.results.source import Source
from sow_server.subscriptions.subscription import Send, Step, Wait

LOOK_MICROS: Final = MICROS // 50
"""An interval may be shorter, and a source wakes its followers."""


class LiveResult:
    """One follower. Owns the place up to which it was told."""

    def __init__(
        self,
        source: Source,
        *,
        asked: Asked,
        least: int,
        progress_micros: int,
        batch_size: int,
        clock: GuardedClock,
        elapsed: Callable[[], int],
        closed: Callable[[LiveResult], None],
    ) -> None:
        """`least`: its snapshot is right there at least."""
        self.source: Final = source
        self.wake: Callable[[], None] = _nothing
        self._view = asked.view
        self._expires = asked.topic.acts
        self._least = least
        self._progress_micros = progress_micros
        self._batch_size = batch_size
        self._clock = clock
        self._elapsed = elapsed
        self._closed = closed
        self._frames: deque[Frame] = deque()
        self.told: Told | None = None
        self._number = 0
        """The number of the result that it was told."""
        self._end = 0
        """The position once all frames are sent."""
        self.position = 0
        self._next_micros = 0
        """Nothing is told before."""
        self._sent_at = elapsed()
        self._told_late = False
        self._is_closed = False
        source.followers[self] = None

    @property
    def queued_bytes(self) -> int:
        """Memory of the frames that wait to be sent."""
        return sum([_size(frame) for frame in self._frames])

    @property
    def behind(self) -> bool:
        """True if the result is not known up to now."""
        return self.source.late

    def step(self) -> Step:
        """The next step. Raises StoreError at the end."""
        if self.source.error is not None:
            raise self.source.error
        if self._frames:
            return self._send(self._frames.popleft())
        now = self._clock.now_micros()
        if self.told is None:
            result = self.source.newest(now)
            if result is None or not self.source.is_right_at(result, self._least):
                return self._wait(self._later(now), now, reports=False)
            self._begin(result)
            return self._send(self._frames.popleft())
        due = self.source.due_at(self._number)
        if due is not None:
            due = max(due, self._next_micros)
            if due <= now:
                if self._tell(self.told, now):
                    self._next_micros = self.source.end_of_interval(now)
                    return self._send(self._frames.popleft())
                # The source is reading: it is asked again later, unless it wakes all before.
                due = self._later(now) if self.source.due_at(self._number) is not None else None
        if self._elapsed() >= self._sent_at + self._progress_micros or (self._told_late and not self.source.late):
            return self._send(self._progress(now))
        return self._wait(due, now, reports=True)

    def _later(self, now_micros: int) -> int:
        """When to ask the source again for something that it does not know now."""
        return max(self.source.end_of_interval(now_micros), now_micros + LOOK_MICROS)

    def _begin(self, result: Result) -> None:
        """The snapshot."""
        begin = SnapshotBegin(result.sequence, result.now_micros, self._view, self._expires)
        self._frames.append(begin)
        self._frames += snapshot_batches(
            self.source.topic, result.rows, self._batch_size, results=self.source.gives_results
        )
        self._frames.append(SnapshotEnd(result.sequence, absent_fields=result.absent_fields))
        self._took(result)

    def _tell(self, told: Told, now_micros: int) -> bool:
        """Makes the frames of the difference to the newest result; False: there are none."""
        result = self.source.newest(now_micros)
        if result is None:
            return False
        if result.number != self._number:
            self._frames += self.source.frames(told, self._number, result, self.position, self._batch_size)
        self._took(result)
        if not self._frames:
            self.position = self._end
        return bool(self._frames)

    def _took(self, result: Result) -> None:
        self.told, self._number = result.told, result.number
        self._end = max(self.position, result.sequence)  # the result that was told may be right at a later position

    def _progress(self, now_micros: int) -> Frame:
        late = self.source.late
        if self.source.due_at(self._number) is None and not late:
            self.position = self._end = max(self.position, self.source.reached)
        self._told_late = late
        return Progress(self.position, now_micros, behind=late)

    def _send(self, frame: Frame) -> Send:
        self._sent_at = self._elapsed()
        if not self._frames:
            self.position = self._end
        return Send(frame)

    def _wait(self, due: int | None, now_micros: int, *, reports: bool) -> Wait:
        elapsed = self._elapsed()
        until = self._sent_at + self._progress_micros if reports else elapsed + self._progress_micros
        if due is not None:
            until = min(until, elapsed + due - now_micros)
        return Wait(max(until, elapsed))

    def took(self, result: object) -> None:
        """It has no reads."""
        raise AssertionError(f"it reads nothing, and got a {type(result).__name__}")

    def close(self) -> None:
        """It follows no more."""
        if not self._is_closed:
            self._is_closed = True
            self._frames.clear()
            del self.source.followers[self]
            self._closed(self)


def _size(frame: Frame) -> int:
    if isinstance(frame, SnapshotBatch):
        return sum(map(len, frame.payloads))
    return frame.size if isinstance(frame, ChangeFrame) else 0


def _nothing() -> None:
    pass
