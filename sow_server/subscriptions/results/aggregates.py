"""The results of groups, asked again when their records have changed (rules S10 to S12).

[1]  A run of the query shows one cut at a position R. Its results are shown once the commit at R is on disk (S7).
[2]  A run begins only where something has changed behind the R of the last one, and at the earliest `REST` times its
     duration after its end. So it takes a tenth of the time at most.
[3]  If nothing has changed since R, the results are right at every later position that was heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, NEVER
from sow_server.subscriptions.frames import ChangeOp, ChangeReason, Row
from sow_server.subscriptions.results.fed import Asked, FedSource, Surroundings
from sow_server.subscriptions.results.source import Shown
from sow_server.subscriptions.subscription import reached

REST: Final = 9
RESULTS_MAX: Final = 10_000
PASSING: Final = (Reason.READER_LOST, Reason.OVERLOADED)
"""A run that ends so is made again."""


class Run(NamedTuple):
    """The answer to the query, in its order."""

    sequence: int
    """R [1]."""
    keys: Sequence[bytes]
    payloads: Sequence[bytes]
    absent_fields: Sequence[str]


class BeginRun(Protocol):
    """Asks the query."""

    def __call__(self, done: Callable[[Run | StoreError], None]) -> Callable[[], object]:
        """Begins. `done` gets the answer, in another turn of the event loop. The result gives it up."""


@dataclass(frozen=True, slots=True)
class AskedAggregates(Asked):
    """The results of groups as a subscriber asks for them."""

    begin: BeginRun


class AggregateSource(FedSource):
    """Owns the newest run."""

    gives_results = True

    def __init__(self, asked: AskedAggregates, around: Surroundings) -> None:
        """Raises StoreError."""
        self._begin = asked.begin
        self._run: Run | None = None
        self._is_told = False
        """True once the newest run was shown."""
        self._end_run: Callable[[], object] | None = None
        """Gives up the run that is under way."""
        self._because = "first"
        """Why the next run begins."""
        self._began_micros = 0
        self._asks_from = 0
        self._changed_upto = 0
        """The sequence of the last change that was heard of."""
        super().__init__(asked, around)

    def _take(self, row: Row) -> None:
        self._changed_upto = row.sequence

    def _heard(self) -> None:
        if not self._is_right:
            self._change()
            if self._because != "changed":
                self._ask()

    def _missed(self) -> None:
        self._because = "gap"

    @property
    def _is_right(self) -> bool:
        """True if nothing has changed since the newest run."""
        return self._run is not None and self._because == "changed" and self._changed_upto <= self._run.sequence

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Begins a run, unless it is too early [2]."""
        if self._end_run is None and self._around.elapsed() >= self._asks_from:
            why, self._because = self._because, "changed"
            self._began_micros = self._around.elapsed()
            self._end_run = self._begin(lambda run: self._ran(run, why))

    def _ran(self, run: Run | StoreError, why: str) -> None:
        """The query was answered."""
        self._end_run = None
        now = self._around.elapsed()
        took = now - self._began_micros
        self._asks_from = now + REST * took
        self._around.has_read(why, took)
        self.runs += 1
        if isinstance(run, StoreError):
            if run.reason in PASSING:
                self._because, self._asks_from = why, max(self._asks_from, now + MICROS)
            else:
                self._fail(run)
            return
        size = sum(map(len, run.keys)) + sum(map(len, run.payloads))
        if len(run.keys) > RESULTS_MAX or size > self._around.bytes_max:
            self._fail(too_large(self._around.bytes_max))
            return
        self._run, self._is_told = run, False
        self._change()
        self._wake()  # a follower tells it now, if its interval is over

    # -- a source -----------------------------------------------------------------------------------------------------

    def _shown(self, now_micros: int) -> Shown | None:
        run, right = self._run, self._is_right
        if self._end_run is not None or self._together or not self._begun:
            return None
        if run is None or (self._is_told and not right):
            self._ask()
            return None
        if reached(self._feed) < run.sequence:
            return None  # [1]
        self._losses = 0
        self._is_told = True
        rows = [
            Row(ChangeOp.PUT, ChangeReason.NONE, key, payload, 0, 0, NEVER, 0, 0)
            for key, payload in zip(run.keys, run.payloads, strict=True)
        ]
        told = dict(zip(run.keys, run.payloads, strict=True))
        return Shown(reached(self._feed) if right else run.sequence, rows, told, run.absent_fields)

    def _told_why(self) -> None:
        if not self._is_right:
            self._change()  # the newest run is late already, and the next one follows

    def _reason(self, key: bytes, now_micros: int) -> ChangeReason:
        return ChangeReason.NONE

    @property
    def late(self) -> bool:
        return self._end_run is not None or not self._begun or not self._is_right or self._feed.behind

    @property
    def size(self) -> int:
        run = self._run
        return 0 if run is None else sum(map(len, run.keys)) + sum(map(len, run.payloads))

    @property
    def records(self) -> int:
        return 0 if self._run is None else len(self._run.keys)

    def close(self) -> None:
        super().close()
        if self._end_run is not None:
            self._end_run()
            self._end_run = None


def too_large(bytes_max: int) -> StoreError:
    """The error of a result with too many groups, or of too many bytes."""
    return StoreError(
        Reason.RESULT_TOO_LARGE,
        f"group_by: a live result has at most {RESULTS_MAX} groups, and {bytes_max} bytes "
        "([subscriptions] result_bytes_max); ask for fewer with having or top_n",
        field="group_by",
    )
