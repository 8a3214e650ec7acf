"""Conflation: the newest message of each key, at most once per interval (rule S6).

[1]  Messages go out in the order of their sequences, with at least one interval between two emissions.
[2]  The frames of one emission belong together: the bookmark holds only behind the last of them.
[3]  A subscriber never hears that a record went out of focus that it was never sent. `Row.enters` of a waiting row
     says that the subscriber does not have the record.
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
        """Records that came into focus and were left out because they fell due. The expiry of each follows, and removes
        it from here."""
        self._emitted_at: int | None = None
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, frames: Iterable[ChangeFrame]) -> None:
        """Takes rows; each replaces the waiting row of its key."""
        for frame in frames:
            for row in frame.rows:
                self._add((frame.topic, row.key), row)

    def _add(self, key: Key, row: Row) -> None:
        old = self._rows.pop(key, None)  # the row moves to the end
        if old is not None:
            self.size -= old.size
            enters = old.enters
        else:
            enters = row.enters or key in self._unsent
        self._unsent.discard(key)
        if enters and row.op is ChangeOp.OOF:
            return  # it came and went without being sent
        if enters is not row.enters:
            row = row._replace(enters=enters)
        self._rows[key] = row
        self.size += row.size

    def left_out(self, topic: str, rows: Iterable[Row]) -> None:
        """Hears of rows that were taken from here and fell due before they were sent (rule J12)."""
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
        """The earliest elapsed time of the next emission: now, if the last one is at least an interval ago."""
        return elapsed_micros if self._emitted_at is None else self._emitted_at + self._interval

    def take(self, *, after: int, bookmark: int, now_micros: int, elapsed_micros: int) -> list[ChangeFrame]:
        """The waiting rows in frames, without those that are due by now (rule J12)."""
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
