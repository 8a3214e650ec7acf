"""Staging: rows of a load are checked as a publish would check them, and stored where nobody sees them (loads [5])."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.requests import Job, RequestLimits, prepare
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import AttemptCounts, attempt_key, encode_attempt, staged_keys, staged_value
from sow_server.engine.disk.rocks import STAGING
from sow_server.engine.formats.payloads import BadRecord
from sow_server.engine.loads.model import PARTS_MAX, Load, LoadOptions, load_failed
from sow_server.engine.loads.registry import LoadRegistry
from sow_server.engine.pending import Pending
from sow_server.engine.values import lifetimes
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.lifetimes import LifetimeError
from sow_server.engine.values.model import ABSENT, Lifetime, LifetimeKind, Publish, Refusal

STAGE_ROWS: Final = 250
"""Rows that one commit stages: it is not synced, so that small ones cost little, and a publish waits for one."""
ATTEMPTS_MAX: Final = 2 * PARTS_MAX
"""Attempts of a load whose counts are kept in memory."""


@dataclass(frozen=True, slots=True)
class RowsToStage:
    """Rows of one attempt that one commit stages: checked, with keys and values as they will be stored."""

    load: Load
    topic: Topic
    part: int
    attempt: int
    first_row: int
    rows: int
    """Refused ones included."""
    positions: Sequence[int]
    """The positions of the rows that are not refused."""
    keys: Sequence[bytes]
    values: Sequence[bytes]
    refusals: Sequence[Refusal]
    """With their indexes in the whole request."""
    size: int = 0
    stager: int = 0
    """The stager of the rows; 0: not told."""


class LoadStaging:
    """Checks rows on a reader's thread (`prepare`), and stages them through the writer (`stage`)."""

    def __init__(self, core: Core, registry: LoadRegistry, options: LoadOptions) -> None:
        self._registry = registry
        self._rocks = core.rocks
        self._clock = core.clock
        self._options = options
        self._commits = core.commits
        self._topics = core.topics

    def prepare(
        self,
        load_id: str,
        part: int,
        attempt: int,
        first_row: int,
        request: Publish,
        limits: RequestLimits,
        *,
        stager: int = 0,
    ) -> list[RowsToStage]:
        """Checks rows as a publish would, and splits them into commits. `request` is the publish of these rows; its
        topic does not count. Not on the event loop. Raises StoreError."""
        load = self._registry.find(load_id)
        self._registry.check_staging(load)
        self._check_disk()
        topic = self._topics.by_id.get(load.row.topic_id)
        if topic is None:
            raise load_failed(load, "its topic was deleted")
        job = Job(request)
        prepare(job, topic, limits)
        now = self._clock.now_micros()
        common, bad_common = request.lifetime, _lifetime_fault(topic, request.lifetime, now)
        own = list(request.lifetimes or ())
        faults = {given: _lifetime_fault(topic, given, now) for given in set(own)}
        prepared: list[RowsToStage] = []
        for start in range(0, len(job.keys), STAGE_ROWS):
            positions: list[int] = []
            keys: list[bytes] = []
            values: list[bytes] = []
            refusals: list[Refusal] = []
            stop = min(start + STAGE_ROWS, len(job.keys))
            for index in range(start, stop):
                key, given = job.keys[index], own[index] if own else ABSENT
                lifetime, fault = (common, bad_common) if given.kind is LifetimeKind.ABSENT else (given, faults[given])
                if isinstance(key, BadRecord):
                    refusals.append(Refusal(index, key.reason, key.message))
                elif fault is not None:
                    refusals.append(Refusal(index, fault.reason, fault.message))
                else:
                    positions.append(first_row + index)
                    keys.append(key)
                    values.append(staged_value(lifetime.kind, lifetime.micros, request.payloads[index]))
            prepared.append(
                RowsToStage(
                    load,
                    topic,
                    part,
                    attempt,
                    first_row + start,
                    stop - start,
                    positions,
                    staged_keys(load.row.number, keys, part, attempt),
                    values,
                    refusals,
                    sum(map(len, values)) + sum(map(len, keys)),
                    stager,
                )
            )
        return prepared

    def stage(self, rows: RowsToStage) -> Pending[Load]:
        """Stages rows, as durable as a BUFFERED publish; their `positions` count as staged then. LOAD_NOT_FOUND,
        LOAD_COMMITTED, LOAD_FAILED, REQUEST_TOO_LARGE; LOAD_INCOMPLETE where rows before them are missing. Raises
        StoreError at once where the step cannot be queued."""
        return self._commits.run(StageRows(self._registry, self._options, rows), size=rows.size, sync=False)

    def _check_disk(self) -> None:
        """Raises StoreError DISK_FULL while there is still room: a full disk would end all writing (rule X3)."""
        staged, free = self._registry.staged_bytes, self._rocks.free_bytes()
        if free - staged < self._options.disk_free_min:
            raise StoreError(
                Reason.DISK_FULL,
                f"payload: the disk has {free} bytes left, and applying the staged rows of all loads takes {staged};"
                f" {self._options.disk_free_min} have to stay free, so no more rows are staged",
                field="payload",
            )


class StageRows:
    """The step that stages rows of one attempt."""

    def __init__(self, registry: LoadRegistry, options: LoadOptions, rows: RowsToStage) -> None:
        self._registry = registry
        self._options = options
        self._rows = rows
        self._after = AttemptCounts()
        self._now = 0

    def stage(self, draft: Draft) -> None:
        """Puts the rows that the attempt has not seen, and its counts."""
        rows, load = self._rows, self._rows.load
        self._now = draft.now
        before = self._after = self._check(load)
        if rows.first_row + rows.rows - 1 > before.seen:
            new = [position > before.seen for position in rows.positions]
            keys, values = list(compress(rows.keys, new)), list(compress(rows.values, new))
            draft.batch.puts[STAGING].update(zip(keys, values, strict=True))
            size = sum(map(len, keys)) + sum(map(len, values))
            staged_bytes = self._registry.staged_bytes
            if staged_bytes + size > self._options.staged_bytes_max:
                raise StoreError(
                    Reason.REQUEST_TOO_LARGE,
                    f"payload: loads have staged {staged_bytes} bytes, and no more than"
                    f" {self._options.staged_bytes_max} are allowed; commit or abort one",
                    field="payload",
                )
            seen = rows.first_row + rows.rows - 1
            self._after = AttemptCounts(seen, before.staged + len(keys), before.bytes + size, rows.stager)
            counts_key = attempt_key(load.row.number, rows.part, rows.attempt)
            draft.batch.puts[STAGING][counts_key] = encode_attempt(self._after)

    def _check(self, load: Load) -> AttemptCounts:
        """The counts of the attempt so far. Raises StoreError where it cannot take these rows."""
        rows = self._rows
        self._registry.check_staging(load)
        attempt = rows.part, rows.attempt
        before = load.attempts.get(attempt, AttemptCounts())
        if attempt not in load.attempts and len(load.attempts) >= ATTEMPTS_MAX:
            raise StoreError(
                Reason.REQUEST_TOO_LARGE,
                f"attempt: {ATTEMPTS_MAX} attempts have staged rows of this load, as many as there may be",
                field="attempt",
            )
        if before.seen and before.stager != rows.stager:
            raise StoreError(
                Reason.LOAD_INCOMPLETE,
                f"attempt: another stager has staged {before.seen} rows as attempt {rows.attempt} at part"
                f" {rows.part}; choose another number for each attempt",
                field="attempt",
            )
        if rows.first_row > before.seen + 1:
            raise StoreError(
                Reason.LOAD_INCOMPLETE,
                f"first_row: attempt {rows.attempt} at part {rows.part} sends row {rows.first_row}, and"
                f" {before.seen} have come",
                field="first_row",
            )
        return before

    def committed(self) -> Load:
        """Counts the rows, and renews the lease."""
        rows, load = self._rows, self._rows.load
        load.count((rows.part, rows.attempt), self._after)
        rows.topic.last_use_micros = self._now
        load.renew(self._now)
        return load


def _lifetime_fault(topic: Topic, lifetime: Lifetime, now_micros: int) -> LifetimeError | None:
    try:
        lifetimes.expire_time(topic.settings, lifetime, now_micros)
    except LifetimeError as error:
        return error
    return None
