"""The frames that wait to be sent to one subscriber, in their order.

[1]  A change that a reader thread has to judge first keeps its place: frames behind it wait for it.
[2]  `size` counts everything that waits, so that a subscription can bound its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from sow_server.subscriptions.frames import ChangeFrame
from sow_server.subscriptions.live.conflation import Conflation
from sow_server.subscriptions.live.judging import Unjudged


class Outbox:
    """Owns the frames of changes that wait to be sent, to be judged, or for the journal to catch up with them."""

    def __init__(self, conflation: Conflation | None) -> None:
        self.conflation: Final = conflation
        """Takes the rows of all frames that are ready, if the subscriber wants them conflated."""
        self._ready: deque[ChangeFrame] = deque()
        self._unjudged: deque[ChangeFrame | Unjudged] = deque()
        """Changes to be judged, and the frames behind them."""
        self._held: deque[ChangeFrame | Unjudged] = deque()
        """Frames that came while the subscription reads older changes from the journal."""
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return self._size + (0 if self.conflation is None else self.conflation.size)

    @property
    def unjudged_after(self) -> int | None:
        """The position before the first change that is not judged yet; None: all are judged."""
        return self._unjudged[0].after if self._unjudged else None

    def add(self, frames: Sequence[ChangeFrame | Unjudged]) -> None:
        """Adds frames behind all others."""
        judged: list[ChangeFrame] = []
        for frame in frames:
            if self._unjudged or isinstance(frame, Unjudged):
                self._unjudged.append(frame)
                self._size += frame.size
            else:
                judged.append(frame)
        if judged:
            self._add_judged(judged)

    def _add_judged(self, frames: Sequence[ChangeFrame]) -> None:
        if self.conflation is not None:
            self.conflation.add(frames)
        else:
            self.add_ready(frames)

    def add_ready(self, frames: Sequence[ChangeFrame]) -> None:
        """Adds frames to be sent as they are."""
        self._ready += frames
        self._size += sum([frame.size for frame in frames])

    def take(self, now_micros: int) -> ChangeFrame | None:
        """Takes the first frame, without the records that are due by now (rule J12). None: no frame is ready."""
        if not self._ready:
            return None
        whole = self._ready.popleft()
        self._size -= whole.size
        frame = whole.at(now_micros)
        if frame is not whole and self.conflation is not None:
            self.conflation.left_out(whole.topic, [row for row in whole.rows if row.skip_from <= now_micros])
        return frame

    # -- judging ----------------------------------------------------------------------------------------------------

    def judging(self, now_micros: int) -> Callable[[], list[ChangeFrame]] | None:
        """The work of judging the first change, for a reader thread; give its result to `add_result`. None: frames
        only waited behind a change, and are ready now."""
        first = self._unjudged[0]
        if isinstance(first, Unjudged):
            return lambda: first.judge(now_micros)
        together: list[ChangeFrame] = []
        while self._unjudged and isinstance(frame := self._unjudged[0], ChangeFrame):
            self._unjudged.popleft()
            self._size -= frame.size
            together.append(frame)
            if not frame.more:  # an atomic request is of one interval
                self._add_judged(together)
                together = []
        return None

    def add_result(self, frames: Sequence[ChangeFrame]) -> None:
        """Replaces the first unjudged change by its frames."""
        self._size -= self._unjudged.popleft().size
        self._add_judged(frames)

    # -- frames that came too early ---------------------------------------------------------------------------------

    def hold(self, frames: Sequence[ChangeFrame | Unjudged], size: int) -> None:
        """Keeps frames of `size` bytes until `release`."""
        self._held += frames
        self._size += size

    def release(self) -> None:
        """Adds the held frames: the subscription has caught up with them."""
        held = list(self._held)
        self.drop_held()
        self.add(held)

    def drop_held(self) -> None:
        """Drops the held frames: the journal has their changes, too."""
        self._size -= sum([frame.size for frame in self._held])
        self._held.clear()

    def clear(self) -> None:
        """Drops everything."""
        self._ready.clear()
        self._unjudged.clear()
        self._held.clear()
