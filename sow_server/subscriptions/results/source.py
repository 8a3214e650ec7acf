"""The newest result of one query, for all who follow it (rules S11, S12).

[1]  Results have rising numbers. A result is right at its position.
[2]  A result is made when a follower asks for it, at most once for a change. So nobody works for a list that nobody
     reads.
[3]  The frames from one result to the newest are made once, for all followers that were told the same.
[4]  Results and frames are made on the event loop, in a time that grows with the rows. So a source rests after it: a
     short `conflation`, long lists and many of them make results late, and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import NEVER
from sow_server.subscriptions.frames import ChangeFrame, ChangeReason, Row
from sow_server.subscriptions.results.difference import Result, Told, change_frames, difference

REST: Final = 9
"""The event loop rests from making results so many times as long as it took: those of one source take a tenth of its
time at most, and those of all take half."""
LEFT_SPARE: Final = 1_000
"""Records that have left are remembered up to a few results' worth, and so many more. Then those are forgotten that no
follower has."""


class SourceFollower(Protocol):
    """One that is told a result."""

    @property
    def told(self) -> Told | None:
        """The last result that it took; None: none yet."""

    def wake(self) -> None:
        """Tells that there may be something new."""


class Shown(NamedTuple):
    """A result as it is now."""

    sequence: int
    rows: Sequence[Row]
    told: Told
    absent_fields: Sequence[str] = ()
    due_from: int = NEVER
    """When the first of its rows falls due: from then on it is not told as it is (rule J12)."""


class Source(ABC):
    """Owns the newest result and the list of its followers. On the event loop."""

    gives_results = False
    """True if the rows are results of groups."""

    def __init__(
        self,
        topic: str,
        interval_micros: int,
        now_micros: Callable[[], int],
        elapsed: Callable[[], int],
        sources: Callable[[], int],
    ) -> None:
        """`interval_micros`: the followers are told at most once in it. `now_micros`: the store's clock. `elapsed`:
        microseconds of a clock that nobody sets. `sources`: the number of all."""
        self.topic: Final = topic
        self._interval: Final = interval_micros
        self._now_micros: Final = now_micros
        self._elapsed: Final = elapsed
        self._source_count: Final = sources
        self._rest_until = 0
        """No other result is made before [4]."""
        self.runs = 0
        """How often its records were read, or its query was run."""
        self.result: Result | None = None
        self.error: StoreError | None = None
        """The error with which it has ended."""
        self.followers: Final[dict[SourceFollower, None]] = {}
        self._changed_at: int | None = None
        """Since when the newest result may not be right any more."""
        self._due = 0
        """When the newest result may be told to those who follow."""
        self._due_from = NEVER
        """When the first of its rows falls due."""
        self._left: dict[bytes, ChangeReason] = {}
        """Why records have left that a follower may have."""
        self._frames: dict[tuple[int, int], Sequence[ChangeFrame]] = {}
        """Those that end with the newest result, by the number of the first one and the size of a frame [3]."""

    # -- of a kind of sources -----------------------------------------------------------------------------------------

    @abstractmethod
    def _shown(self, now_micros: int) -> Shown | None:
        """The result as it is now; None: it is not known now."""

    @abstractmethod
    def _reason(self, key: bytes, now_micros: int) -> ChangeReason:
        """The reason why a record of the newest result is not in the next one."""

    @abstractmethod
    def _told_why(self) -> None:
        """The reasons were asked for. Those to come belong to the next result."""

    @property
    @abstractmethod
    def reached(self) -> int:
        """Everything up to here has been looked at."""

    @property
    @abstractmethod
    def late(self) -> bool:
        """True if changes from before are still to be looked at."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of memory."""

    @property
    @abstractmethod
    def records(self) -> int:
        """Records, or results of groups, that are kept."""

    @abstractmethod
    def close(self) -> None:
        """Releases everything: nobody follows any more."""

    # -- following ----------------------------------------------------------------------------------------------------

    def due_at(self, number: int) -> int | None:
        """When something new may be told to one that was told the result of a number; None: there is nothing."""
        if self.result is not None and self.result.number != number:
            return self._due
        return None if self._changed_at is None else max(self.end_of_interval(self._changed_at), self._rest_until)

    def newest(self, now_micros: int) -> Result | None:
        """The newest result; None: there is none yet, or rows of it have fallen due (rule J12) and the next one is not
        known."""
        before = self.result
        if self._changed_at is None and before is not None and now_micros < self._due_from:
            return before
        began = self._elapsed()
        shown = None if before is not None and now_micros < self._rest_until else self._shown(now_micros)
        if shown is None:
            return before if now_micros < self._due_from else None
        due = 0 if self._changed_at is None else self.end_of_interval(self._changed_at)
        self._changed_at, self._due_from = None, shown.due_from
        if before is not None and list(before.told.items()) == list(shown.told.items()):
            self.result = replace(before, sequence=shown.sequence, now_micros=now_micros)
            self._told_why()
            self._rest(began)
            return self.result
        number = 1 if before is None else before.number + 1
        self.result = Result(number, shown.sequence, now_micros, shown.rows, shown.told, shown.absent_fields)
        self._due = due
        self._frames = {}
        if before is not None:
            self._remember(before, self.result, now_micros)
        self._told_why()
        self._rest(began)
        return self.result

    def is_right_at(self, result: Result, sequence: int) -> bool:
        """True if the newest result is known to be right at a position or behind it."""
        return result.sequence >= sequence or (self._changed_at is None and not self.late and self.reached >= sequence)

    def _rest(self, began: int) -> None:
        """Work on the event loop has ended that began at this time [4]."""
        rest = (self._elapsed() - began) * max(REST, 2 * self._source_count())
        self._rest_until = max(self._rest_until, self._now_micros()) + rest

    def _remember(self, before: Result, result: Result, now_micros: int) -> None:
        """Keeps the reasons of the records that have left."""
        for key in before.told:
            if key not in result.told:
                self._left[key] = self._reason(key, now_micros)
        if len(self._left) > 4 * len(result.told) + LEFT_SPARE:
            told = {key for follower in self.followers for key in follower.told or ()}
            self._left = {key: why for key, why in self._left.items() if key in told}

    def frames(self, told: Told, number: int, result: Result, after: int, batch_size: int) -> Sequence[ChangeFrame]:
        """The frames that lead from the result of a number, which was `told` at the position `after`, to the newest."""
        known = self._frames.get((number, batch_size))
        if known is None:
            began = self._elapsed()
            found = difference(told, result, self._why)
            known = change_frames(
                self.topic,
                found,
                after=after,
                bookmark=result.sequence,
                batch_size=batch_size,
                results=self.gives_results,
            )
            self._frames[number, batch_size] = known
            self._rest(began)
        return known

    def _why(self, key: bytes) -> ChangeReason:
        return self._left.get(key, ChangeReason.NONE)

    def _change(self) -> None:
        """The newest result may not be right any more."""
        if self._changed_at is None:
            self._changed_at = self._now_micros()
            self._wake()

    def _fail(self, error: StoreError) -> None:
        """It ends with an error."""
        if self.error is None:
            self.error = error
            self.close()
            self._wake()

    def _wake(self) -> None:
        for follower in list(self.followers):
            follower.wake()

    def end_of_interval(self, micros: int) -> int:
        """The end of the interval of a time."""
        return micros - micros % self._interval + self._interval
