"""A list that is kept: the window of the best records, and the changes since (rules S10 to S12).

opening ──▶ reading ──▶ kept ──▶ reading ──▶ …
                         the window is short: the best records are read anew, from one cut

[1]  The cut of a reading is at a position R. The window is the state at R and all later changes: a row from before R
     is not applied, and rows that arrive while the records are read are kept until then.
[2]  A list is shown only at a position at or behind R, and never in the midst of an atomic request.
[3]  Behind a gap in the changes the records are read anew. Why a record left in such a gap is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, NEVER
from sow_server.subscriptions.frames import ChangeOp, ChangeReason, Row
from sow_server.subscriptions.request import Snapshot
from sow_server.subscriptions.results.difference import rows_of
from sow_server.subscriptions.results.fed import Asked, FedSource, Surroundings
from sow_server.subscriptions.results.source import Shown
from sow_server.subscriptions.results.window import Place, Window
from sow_server.subscriptions.subscription import Read, Send, Wait, reached

WAIT_MICROS: Final = MICROS // 10
"""After how long a reading looks again for memory to sort in."""


class BestRecords(Snapshot, Protocol):
    """The first records in order, as of one cut."""

    @property
    def waits(self) -> bool:
        """True while others hold the memory that it needs to sort in (rule Q2). To be asked again now and then."""


@dataclass(frozen=True, slots=True)
class AskedList(Asked):
    """A list as a subscriber asks for it."""

    best: Callable[[int], BestRecords]
    """Begins to read so many of the first records in order. On the event loop."""
    place: Callable[[Row], Place]
    show: Callable[[Row], Row]
    """The part of a row that the subscriber may see, and wants."""
    skip: int
    top: int


class ListSource(FedSource):
    """Owns the window and the reading."""

    def __init__(self, asked: AskedList, around: Surroundings) -> None:
        """Raises StoreError."""
        self._asked = asked
        self._window = Window(asked.skip, asked.top, around.bytes_max)
        self._upto = 0
        """R of the last reading, as [1] says."""
        self._reading: _Reading | None = None
        self._end_reading: Callable[[], object] = _nothing
        self._kept: dict[bytes, Row] = {}
        """The newest row of each key that has arrived while the records are read."""
        self._kept_size = 0
        self._wants_reading = "first"
        """Why the records have to be read, once the subscription has begun; "": they need not."""
        self._reads_from = 0
        """A window that is short is not read before: reading takes at most half of the time."""
        self._short = False
        """True from the time when the window was found short until the records are read anew."""
        self._gap = False
        """True if changes were missed since the newest result [3]."""
        self._reasons: dict[bytes, ChangeReason] = {}
        """Why records of the newest result have left since."""
        self._absent: Sequence[str] = ()
        self._shown_rows: Mapping[bytes, Row] = {}
        """The rows of the newest result, as they were told."""
        super().__init__(asked, around)

    # -- changes ------------------------------------------------------------------------------------------------------

    def _take(self, row: Row) -> None:
        if row.op is ChangeOp.PUT:
            self._reasons.pop(row.key, None)
        elif self.result is not None and row.key in self.result.told:
            self._reasons[row.key] = row.reason
        if self._reading is not None:
            self._keep(row)
        elif row.sequence > self._upto:
            self._apply(row)

    def _apply(self, row: Row) -> None:
        if row.op is ChangeOp.PUT:
            self._window.put(self._asked.place(row), row)
        else:
            self._window.remove(row.key)

    def _keep(self, row: Row) -> None:
        old = self._kept.pop(row.key, None)
        self._kept[row.key] = row
        self._kept_size += row.size - (0 if old is None else old.size)
        if self._kept_size > self._around.bytes_max:
            raise StoreError(
                Reason.OVERLOADED,
                "order_by: the topic changes faster than it can be read; try again later",
                field="order_by",
                retry_after_micros=1_000_000,
            )

    def _heard(self) -> None:
        if self._wants_reading:
            why, self._wants_reading = self._wants_reading, ""
            self._read_anew(why)
        elif self._window.changed and self._reading is None:
            self._change()

    def _missed(self) -> None:
        self._end_reading()
        self._reading = None
        self._kept, self._kept_size = {}, 0
        self._wants_reading, self._gap = "gap", True

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read_anew(self, why: str) -> None:
        """Begins to read the best records."""
        try:
            snapshot = self._asked.best(self._window.records_max)
        except StoreError as error:
            self._fail(error)
            return
        self._upto = snapshot.begin.sequence
        self._window.begin()
        self._short = False
        self._reading = _Reading(snapshot, self._asked.place, self._window, self._around.elapsed, why, self._read)
        self._end_reading = self._around.drive(self._reading, _ignore, self._fail)

    def _read(self, reading: _Reading) -> None:
        """The best records were read."""
        took = self._around.elapsed() - reading.since_micros
        self._around.has_read(reading.why, took)
        self.runs += 1
        self._reads_from = self._around.elapsed() + took
        self._absent = reading.snapshot.absent_fields
        complete = reading.snapshot.done and not reading.snapshot.truncated
        self._end_reading()
        self._reading = None
        kept, self._kept, self._kept_size = self._kept, {}, 0
        try:
            self._window.loaded(complete=complete)
            for row in kept.values():
                if row.sequence > self._upto:
                    self._apply(row)
        except StoreError as error:
            self._fail(error)
            return
        self._change()

    # -- a source -----------------------------------------------------------------------------------------------------

    def _shown(self, now_micros: int) -> Shown | None:
        if self._reading is not None or self._together or not self._begun:
            return None
        position = reached(self._feed)
        if position < self._upto:
            return None  # [2]
        acts = self._asked.topic.acts
        found = self._window.shown(now_micros if acts else 0)
        if found is None:
            self._short = True
            if self._around.elapsed() >= self._reads_from:
                self._read_anew("short")
            return None
        self._losses, self._short = 0, False
        before, show = self._shown_rows, self._asked.show
        rows: dict[bytes, Row] = {}
        for row in found:
            known = before.get(row.key)
            rows[row.key] = known if known is not None and known.sequence == row.sequence else show(row)
        self._shown_rows = rows
        told = {key: row.sequence for key, row in rows.items()}
        due_from = min([row.expire_time for row in found], default=NEVER) if acts else NEVER
        return Shown(position, list(rows.values()), told, self._absent, due_from)

    def _reason(self, key: bytes, now_micros: int) -> ChangeReason:
        known = self._reasons.get(key)
        if known is not None:
            return known
        if self._asked.topic.acts and self._window.is_due(key, now_micros):
            return ChangeReason.EXPIRED
        return ChangeReason.NONE if self._gap and key not in self._window else ChangeReason.WINDOW

    def _told_why(self) -> None:
        self._reasons.clear()
        self._gap = False

    @property
    def late(self) -> bool:
        return self._reading is not None or self._short or not self._begun or self._feed.behind

    @property
    def size(self) -> int:
        return self._window.size + self._kept_size

    @property
    def records(self) -> int:
        return len(self._window) + len(self._kept)

    def close(self) -> None:
        super().close()
        self._end_reading()


class _Reading:
    """Reads the best records, as a machine."""

    def __init__(
        self,
        snapshot: BestRecords,
        place: Callable[[Row], Place],
        window: Window,
        elapsed: Callable[[], int],
        why: str,
        done: Callable[[_Reading], None],
    ) -> None:
        """`done`: called once all were read."""
        self.snapshot: Final = snapshot
        self.since_micros: Final = elapsed()
        self.why: Final = why
        self.wake: Callable[[], None] = _nothing
        self._place = place
        self._window = window
        self._elapsed = elapsed
        self._done = done
        self._is_over = False

    def step(self) -> Send | Read | Wait:
        """The next step. `done` ends it."""
        if self._is_over:
            return Wait(0)
        return Wait(self._elapsed() + WAIT_MICROS) if self.snapshot.waits else Read(self._read)

    def _read(self) -> list[tuple[Place, Row]]:
        batch = self.snapshot.read()
        return [] if batch is None else [(self._place(row), row) for row in rows_of(batch)]

    def took(self, found: list[tuple[Place, Row]]) -> None:
        """Takes the result of a `Read`."""
        full = self._window.load(found)
        if full or self.snapshot.done:
            self._is_over = True
            self._done(self)

    def close(self) -> None:
        """Releases the cut."""
        self.snapshot.close()


def _nothing() -> None:
    pass


def _ignore(_: object) -> None:
    pass
