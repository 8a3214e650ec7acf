"""Conflation: of each key the newest message, at most once per interval (rule S6).

CO1  Messages go out in the order of the sequences of what they tell; between two emissions lies an interval.
CO2  An emission belongs together: only behind all of it everything up to its bookmark is told.
CO3  A record that has not been sent is not told out of focus. `Row.enters` of a row that waits says that the subscriber
     does not have the record.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sow_server.subscriptions.frames import ChangeFrame, ChangeOp, Row, frames_of

Key = tuple[str, bytes]
"""A topic's name and a record key."""


class Conflation:
    """Owns the rows that wait for the end of an interval."""

    def __init__(self, interval_micros: int, batch_size: int) -> None:
        self._interval: Final = interval_micros
        self._batch_size: Final = batch_size
        self._rows: dict[Key, Row] = {}
        self._unsent: set[Key] = set()
        """Records that came into focus and were left out, as they had fallen due. The expiry of each follows and takes
        it out again."""
        self._emitted_at: int | None = None
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, frames: Iterable[ChangeFrame]) -> None:
        """Takes rows; each replaces the one of its key."""
        for frame in frames:
            for row in frame.rows:
                self._add((frame.topic, row.key), row)

    def _add(self, key: Key, row: Row) -> None:
        old = self._rows.pop(key, None)  # and so it moves to the end
        if old is not None:
            self.size -= old.size
            enters = old.enters
        else:
            enters = row.enters or key in self._unsent
        self._unsent.discard(key)
        if enters and row.op is ChangeOp.OOF:
            return  # it came and went unseen
        if enters is not row.enters:
            row = row._replace(enters=enters)
        self._rows[key] = row
        self.size += row.size

    def left_out(self, topic: str, rows: Iterable[Row]) -> None:
        """Rows that were taken from here have fallen due before they were sent (rule J12)."""
        for row in rows:
            key = topic, row.key
            if not row.enters:
                continue
            waiting = self._rows.get(key)
            if waiting is None:
                self._unsent.add(key)
            elif waiting.op is ChangeOp.OOF:
                del self._rows[key]
                self.size -= waiting.size
            else:
                self._rows[key] = waiting._replace(enters=True)

    def due_at(self, elapsed_micros: int) -> int:
        """When the next emission may be, in elapsed time: at once, when the last one is an interval ago."""
        return elapsed_micros if self._emitted_at is None else self._emitted_at + self._interval

    def take(self, *, after: int, bookmark: int, now_micros: int, elapsed_micros: int) -> list[ChangeFrame]:
        """What waits, in frames, without what has fallen due meanwhile (rule J12)."""
        self._emitted_at = elapsed_micros
        waiting, self._rows, self.size = self._rows, {}, 0
        frames: list[ChangeFrame] = []
        run: list[Row] = []
        of = ""
        for (topic, key), row in waiting.items():
            if now_micros < row.skip_from:
                if topic != of:
                    frames += self._frames(of, run, after, bookmark)
                    of, run = topic, []
                run.append(row)
            elif row.enters:
                self._unsent.add((topic, key))
        frames += self._frames(of, run, after, bookmark)
        for frame in frames[:-1]:
            frame.more, frame.bookmark = True, after
        return frames

    def _frames(self, topic: str, rows: list[Row], after: int, bookmark: int) -> list[ChangeFrame]:
        return frames_of(topic, rows, batch_size=self._batch_size, after=after, bookmark=bookmark, together=True)
