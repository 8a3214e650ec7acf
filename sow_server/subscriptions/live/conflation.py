"""Conflation: the newest message of each key, at most once per interval (rules S6 and S15).

[1]  Messages go out in the order of their sequences. Intervals end at multiples of their length by the store's clock,
     and in each there is at most one emission.
[2]  The frames of one emission belong together: the bookmark holds only behind the last of them.
[3]  A subscriber never hears that a record went out of focus that it was never sent. `Row.enters` of a waiting row
     says that the subscriber does not have the record. One that resumes may have more than it knows (`begin_behind`).
[4]  Subscribers that got the same frames in an interval emit equal rows, so they share one `Emission`. A frame belongs
     to the interval in which the first of them got it, and names the emissions that end with it.
[5]  A delta is the difference to the version before the first change of the interval: the subscriber has that one.
     It is made once, at the emission. `Row.told` of a waiting row is that version; None: the record is sent whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from sow_server.subscriptions.frames import ChangeFrame, ChangeOp, ChangeReason, Row, frames_of
from sow_server.subscriptions.live.judging import COMPARING

Key = tuple[str, bytes]
"""A topic's name and a record key."""

EMISSIONS_MAX: Final = 8
"""A frame names at most so many emissions that end with it. Others are not shared."""
COMPARING_NANOS_MAX: Final = 1_000_000
"""An emission with more work of comparing than this is left to a reader thread."""


class Form(NamedTuple):
    """The form of an emission, besides its rows. `delta`: send differences. `told_bytes_max`: at most so many bytes of
    versions to compare with may wait; beyond them records are sent whole."""

    batch_size: int = 1000
    delta: bool = False
    empty_deltas: bool = False
    told_bytes_max: int = 0


class Emission:
    """The rows of one interval. Equal subscribers share it ([4]); any thread may ask for its frames."""

    __slots__ = ("_form", "_frames", "_lock", "after", "bookmark", "rows", "size")

    def __init__(self, rows: list[tuple[Key, Row]], form: Form, *, after: int, bookmark: int) -> None:
        self.rows: Final = rows
        self.after: Final = after
        self.bookmark: Final = bookmark
        self.size: Final = sum([row.size for _, row in rows])
        """Bytes of memory."""
        self._form: Final = form
        self._frames: list[ChangeFrame] | None = None
        self._lock = threading.Lock()

    def is_like(self, other: Emission) -> bool:
        """True if its frames are those of another."""
        return (self.after, self.bookmark, self._form) == (other.after, other.bookmark, other._form) and (
            self.rows == other.rows
        )

    @property
    def is_light(self) -> bool:
        """True if its frames are little work, or made already."""
        return self._frames is not None or not self._form.delta or COMPARING.of(self.size, 1) <= COMPARING_NANOS_MAX

    def frames(self) -> Sequence[ChangeFrame]:
        """Its frames; none if nothing has changed."""
        with self._lock:  # who asks meanwhile would do the same work
            if self._frames is None:
                self._frames = self._made()
            return self._frames

    def _made(self) -> list[ChangeFrame]:
        frames: list[ChangeFrame] = []
        run: list[Row] = []
        of = ""
        for (topic, _), whole in self.rows:
            row = self._difference(whole)
            if row is None:
                continue
            if topic != of:
                frames += self._frames_of(of, run)
                of, run = topic, []
            run.append(row)
        frames += self._frames_of(of, run)
        for frame in frames[:-1]:
            frame.more, frame.bookmark = True, self.after
        return frames

    def _difference(self, row: Row) -> Row | None:
        """The row as a delta; None: nothing has changed [5]."""
        told = row.told
        if told is None:
            return row
        payload, unset_paths, changed = told.format.difference(told.payload, row.payload, told.key_paths)
        if not changed and not self._form.empty_deltas:
            return None
        return row._replace(payload=payload, is_delta=True, unset_paths=tuple(unset_paths), told=None)

    def _frames_of(self, topic: str, rows: list[Row]) -> list[ChangeFrame]:
        # Deltas build on each other, so they are judged when an interval ends, and not again while they wait.
        return frames_of(
            topic,
            rows,
            batch_size=self._form.batch_size,
            after=self.after,
            bookmark=self.bookmark,
            together=True,
            judged=not self._form.delta,
        )


class _Interval:
    """The rows that wait for the end of an interval."""

    __slots__ = ("after", "ends", "is_late", "last", "rows")

    def __init__(self, ends: int, after: int) -> None:
        self.rows: dict[Key, Row] = {}
        self.is_late = False
        """True if it has the rows of several intervals, because its subscriber reads slowly."""
        self.ends = ends
        self.after = after
        """Everything up to here came before its rows."""
        self.last: ChangeFrame | None = None
        """The frame that it ends with."""


class Conflation:
    """Owns the rows that wait for the end of an interval."""

    def __init__(self, interval_micros: int, form: Form, now_micros: Callable[[], int]) -> None:
        """`now_micros`: the store's clock."""
        self._interval: Final = interval_micros
        self._form: Final = form
        self._now_micros: Final = now_micros
        self._whole_upto = 0
        self._resumed_upto = 0
        self._open: _Interval | None = None
        self._ended: _Interval | None = None
        """An interval that was over when a frame of the next one came."""
        self._emission: Emission | None = None
        """The emission that is being made."""
        self._unsent: set[Key] = set()
        """Records that came into focus and were left out because they fell due. The expiry of each follows, and removes
        it from here."""
        self._next_micros = 0
        """The earliest time of the next emission."""
        self._judged_micros = 0
        """The time of the last emission: versions that were due by then were left out of it."""
        self._told_bytes = 0
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._ended or self._emission or (self._open and self._open.rows))

    def begin_behind(self, position: int, *, resumed: bool) -> None:
        """The subscriber starts in the journal, whose end is `position` now. Changes up to there are sent whole.

        `resumed`: it has come with a bookmark. It may have been sent a part of an emission beyond that, perhaps with
        versions that are gone by now. So it may have any record that comes into focus up to there.
        """
        self._whole_upto = position
        self._resumed_upto = position if resumed else 0

    # -- rows that wait ---------------------------------------------------------------------------------------------

    def add(self, frames: Iterable[ChangeFrame]) -> None:
        """Takes frames that came together; each row replaces the waiting row of its key."""
        interval: _Interval | None = None
        arrived = 0
        for frame in frames:
            if interval is None:
                arrived = frame.arrived_micros or self._now_micros()
                interval = self._of(arrived, frame.after)
            if not frame.arrived_micros:
                frame.arrived_micros = arrived
            interval.last = frame
            for row in frame.rows:
                self._add(interval.rows, (frame.topic, row.key), row)

    def _of(self, arrived_micros: int, after: int) -> _Interval:
        """The interval of a frame."""
        ends = self._end_of(arrived_micros)
        current = self._open
        if current is not None and current.rows:
            if arrived_micros < current.ends or current.is_late:
                return current
            if self._ended is not None:
                return self._joined(self._ended, current)
            self._ended = current
        self._open = opened = _Interval(ends, after)
        return opened

    def _joined(self, first: _Interval, second: _Interval) -> _Interval:
        """Two intervals of a slow reader as one."""
        self._ended, self._open = None, first
        first.is_late, first.last = True, second.last
        for key, row in second.rows.items():
            self._forget(row)
            self._add(first.rows, key, row)
        return first

    def _end_of(self, micros: int) -> int:
        return micros - micros % self._interval + self._interval

    def _add(self, rows: dict[Key, Row], key: Key, row: Row) -> None:
        old = rows.pop(key, None)  # the row moves to the end
        told = row.told if row.sequence > self._whole_upto else None
        if old is not None:
            self._forget(old)
            enters = old.enters
            told = None if told is None else old.told
            if row.reason is ChangeReason.TOUCHED and old.reason is not ChangeReason.TOUCHED:
                row = row._replace(reason=ChangeReason.NONE)  # the touch followed an update, or the record had left
        else:
            enters = (row.enters and row.sequence > self._resumed_upto) or key in self._unsent
            if told is not None and self._told_bytes + len(told.payload) > self._form.told_bytes_max:
                told = None
        self._unsent.discard(key)
        if enters and row.op is ChangeOp.OOF:
            return  # it came and went without being sent
        if enters is not row.enters or told is not row.told:
            row = row._replace(enters=enters, told=told)
        rows[key] = row
        self.size += row.size
        if told is not None:
            self._told_bytes += len(told.payload)

    def _forget(self, row: Row) -> None:
        self.size -= row.size
        if row.told is not None:
            self._told_bytes -= len(row.told.payload)

    def left_out(self, topic: str, rows: Iterable[Row]) -> None:
        """Hears of rows that were taken from here and fell due before they were sent (rule J12)."""
        for row in rows:
            if row.enters:
                self._left_out((topic, row.key))

    def _left_out(self, key: Key) -> None:
        """A record that enters was not sent after all. What follows is in the first interval that has a row of it."""
        for interval in (self._ended, self._open):
            waiting = None if interval is None else interval.rows.get(key)
            if interval is None or waiting is None:
                continue
            if waiting.op is ChangeOp.OOF:
                del interval.rows[key]
                self._forget(waiting)
            else:
                interval.rows[key] = waiting._replace(enters=True)
            return
        self._unsent.add(key)

    # -- emissions --------------------------------------------------------------------------------------------------

    def due_at(self) -> int:
        """The earliest time of the next emission, by the store's clock. There is something to emit."""
        waiting = self._ended or self._open
        assert waiting is not None, "something waits"
        return max(waiting.ends, self._next_micros)

    def take(self, *, position: int, now_micros: int) -> Emission:
        """The waiting rows, without those that are due by now (rule J12). `position`: everything up to there was sent.
        Tell `emitted` once its frames are made."""
        taken = self._ended or self._open
        assert taken is not None, "something waits"
        if taken is self._ended:
            self._ended = None
        else:
            self._open = None
        rows = [(key, self._based(row)) for key, row in taken.rows.items() if now_micros < row.skip_from]
        for key, row in taken.rows.items():
            if row.skip_from <= now_micros:
                self._forget(row)
                if row.enters:
                    self._left_out(key)
        self._next_micros, self._judged_micros = self._end_of(now_micros), now_micros
        last = taken.last
        bookmark = position if last is None else max(position, last.bookmark)
        self._emission = emission = self._shared(Emission(rows, self._form, after=taken.after, bookmark=bookmark), last)
        return emission

    def _based(self, row: Row) -> Row:
        """The row, without a version that was itself left out of an emission."""
        if row.told is None or row.told.skip_from > self._judged_micros:
            return row
        self._forget(row)
        whole = row._replace(told=None)
        self.size += whole.size
        return whole

    def emitted(self, emission: Emission) -> None:
        """The frames of the last taken emission are made, and count elsewhere."""
        self._emission = None
        for _, row in emission.rows:
            self._forget(row)

    @staticmethod
    def _shared(emission: Emission, last: ChangeFrame | None) -> Emission:
        """The emission of an equal subscriber, if there was one [4]."""
        if last is None:
            return emission
        for other in last.emissions:
            if isinstance(other, Emission) and other.is_like(emission):
                return other
        if len(last.emissions) < EMISSIONS_MAX:
            last.emissions = (*last.emissions, emission)
        return emission
