"""Conflation: of each key the newest message, at most once per interval (rule S6).

CO1  Messages go out in the order of the sequences of what they tell; between two emissions lies an interval.
CO2  An emission belongs together: only behind all of it everything up to its bookmark is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sow_server.subscriptions.frames import ChangeFrame, Row, frames_of


class Conflation:
    """Owns the rows that wait for the end of an interval."""

    def __init__(self, interval_micros: int, batch_size: int) -> None:
        self._interval: Final = interval_micros
        self._batch_size: Final = batch_size
        self._rows: dict[tuple[str, bytes], Row] = {}
        self._emitted_at: int | None = None
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, frames: Iterable[ChangeFrame]) -> None:
        """Takes rows; each replaces the one of its key."""
        rows = self._rows
        for frame in frames:
            for row in frame.rows:
                key = frame.topic, row.key
                old = rows.pop(key, None)  # and so it moves to the end
                if old is not None:
                    self.size -= old.size
                rows[key] = row
                self.size += row.size

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
        for (topic, _), row in waiting.items():
            if now_micros < row.skip_from:
                if topic != of:
                    frames += self._frames(of, run, after, bookmark)
                    of, run = topic, []
                run.append(row)
        frames += self._frames(of, run, after, bookmark)
        for frame in frames[:-1]:
            frame.more, frame.bookmark = True, after
        return frames

    def _frames(self, topic: str, rows: list[Row], after: int, bookmark: int) -> list[ChangeFrame]:
        return frames_of(topic, rows, batch_size=self._batch_size, after=after, bookmark=bookmark, together=True)
