"""The registry: all loads of the store. The writer's thread changes it, after commits; any thread reads it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import LOAD_KEY, attempts_range, decode_attempt, read_attempt_key
from sow_server.engine.disk.rocks import META, STAGING, Batch, Rocks
from sow_server.engine.loads.model import (
    Load,
    LoadPhase,
    LoadRow,
    decode_load,
    encode_load,
    load_failed,
    load_not_found,
)
from sow_server.engine.stored import u32
from sow_server.engine.values.errors import Reason, StoreError

log = structlog.get_logger(__name__)


class LoadRegistry:
    """Owns the loads in memory. Its `stage_…` methods put changes of loads on a draft."""

    def __init__(self, core: Core) -> None:
        """Loads that were being staged go on, with leases that begin anew. Those of another epoch end: the store was
        restored."""
        self._clock = core.clock
        self._topics = core.topics
        self._by_number: dict[int, Load] = {}
        rocks, now = core.rocks, core.clock.now_micros()
        batch = Batch()
        for key, value in _rows(rocks, META, LOAD_KEY, LOAD_KEY + b"\xff"):
            row = decode_load(value)
            if row.phase is LoadPhase.STAGING and row.epoch != core.instance.epoch:
                batch.deletes[META].append(key)
                batch.ranges.append((STAGING, u32(row.number), u32(row.number + 1)))
                continue
            load = self._by_number[row.number] = Load(row, now + row.lease_micros)
            if row.open:
                for attempt, counts in _rows(rocks, STAGING, *attempts_range(row.number)):
                    load.count(read_attempt_key(attempt), decode_attempt(counts))
        if batch.ranges:
            rocks.write_waiting(batch)
        for topic in core.topics.by_id.values():
            self._watch(topic)

    # -- reading: any thread ----------------------------------------------------------------------------------------

    def all(self) -> Sequence[Load]:
        """All loads, ended ones included, in the order of opening."""
        return tuple(self._by_number.values())

    def working(self) -> Sequence[Load]:
        """The loads that are committed and not at their end."""
        return [load for load in self.all() if load.row.working]

    def open_on(self, topic: Topic) -> bool:
        """True if a load of a topic has not ended."""
        return any(load.row.open and load.row.topic_id == topic.id for load in self.all())

    def find(self, load_id: str) -> Load:
        """The load that clients call so. Raises StoreError LOAD_NOT_FOUND."""
        _, _, number = load_id.rpartition(".")
        load = self._by_number.get(int(number)) if number.isdecimal() and len(number) < 12 else None
        if load is None or load.row.id != load_id:
            raise load_not_found(load_id)
        return load

    def open_of(self, owner: str) -> int:
        """The number of loads of an identity that have not ended."""
        return sum(load.row.open and load.row.owner == owner for load in self.all())

    def holds(self, load: Load) -> bool:
        """True if a load is still known."""
        return self._by_number.get(load.row.number) is load

    def check_staging(self, load: Load) -> None:
        """Raises StoreError for a load that takes no rows."""
        if not self.holds(load):
            self.find(load.row.id)
        if load.row.phase is LoadPhase.FAILED:
            raise load_failed(load, load.row.failure)
        if load.row.phase is not LoadPhase.STAGING:
            raise StoreError(Reason.LOAD_COMMITTED, "load_id: the load is committed", field="load_id")

    @property
    def staged_bytes(self) -> int:
        """Bytes that all loads have staged."""
        return sum([load.staged_bytes for load in self.all()])

    def renew(self, load_id: str) -> Load:
        """Begins the lease of a load anew. Raises StoreError LOAD_NOT_FOUND."""
        load = self.find(load_id)
        load.renew(self._clock.now_micros())
        return load

    # -- changing: the writer's thread ------------------------------------------------------------------------------

    def add(self, load: Load, topic: Topic) -> None:
        """Adds a load that was opened, after the commit."""
        self._by_number[load.row.number] = load
        self._watch(topic)

    def stage_row(self, draft: Draft, row: LoadRow) -> None:
        """Puts the row of a load; `take_over` follows after the commit."""
        draft.batch.puts[META][LOAD_KEY + u32(row.number)] = encode_load(row)

    def take_over(self, load: Load, row: LoadRow) -> None:
        """Takes over the new row of a load, after the commit."""
        phase_changed, was_open = row.phase is not load.row.phase, load.row.open
        load.row = row
        if row.end_micros:
            load.attempts, load.named = {}, None
            load.staged_rows = load.staged_bytes = 0
        if phase_changed:
            self._watch_again(row, ended=was_open and not row.open)

    def stage_forget(self, draft: Draft, load: Load) -> None:
        """Removes a load, its row and its staged rows; `forget` follows after the commit."""
        self.stage_unstaged(draft, load)
        draft.batch.deletes[META].append(LOAD_KEY + u32(load.row.number))

    def forget(self, load: Load) -> None:
        """Forgets a load, after the commit that has removed it."""
        self._by_number.pop(load.row.number, None)
        self._watch_again(load.row, ended=load.row.open)

    def stage_unstaged(self, draft: Draft, load: Load) -> None:
        """Removes all staged rows of a load."""
        number = load.row.number
        draft.batch.ranges.append((STAGING, u32(number), u32(number + 1)))
        puts = draft.batch.puts[STAGING]  # of a batch they come after its ranges
        for key in [key for key in puts if key.startswith(u32(number))]:
            del puts[key]
        if load.staged_rows:
            draft.removals[STAGING, number] = load.staged_rows

    def stage_failed(self, draft: Draft, load: Load, why: str) -> LoadRow:
        """Ends a load that cannot go on. Returns its row, for `take_over` after the commit."""
        self.stage_unstaged(draft, load)
        log.error("load_failed", load=load.row.id, topic=load.row.topic, cause=why)
        row = load.row._replace(
            phase=LoadPhase.FAILED, failure=why, figures=load.figures, position=b"", end_micros=draft.now
        )
        self.stage_row(draft, row)
        return row

    def stage_fail_all(self, draft: Draft, topic: Topic, why: str) -> None:
        """Ends all loads of a topic that cannot take their rows any more."""
        for load in self.all():
            if load.row.open and load.row.topic_id == topic.id:
                draft.on_commit.append(partial(self.take_over, load, self.stage_failed(draft, load, why)))

    def _watch(self, topic: Topic) -> None:
        """Sets the loads for which commits note removals by others (loads [4])."""
        topic.loads = tuple(
            (row.number, row.begin_sequence)
            for row in (load.row for load in self._by_number.values())
            if row.topic_id == topic.id and row.phase in (LoadPhase.STAGING, LoadPhase.APPLYING)
        )

    def _watch_again(self, row: LoadRow, *, ended: bool) -> None:
        if (topic := self._topics.by_id.get(row.topic_id)) is not None:
            self._watch(topic)
            if ended:  # it has used the topic until now (rule T1)
                topic.last_use_micros = self._clock.now_micros()
                self._topics.lost(topic)


def _rows(rocks: Rocks, family: str, start: bytes, stop: bytes) -> list[tuple[bytes, bytes]]:
    cursor = rocks.cursor(family, fill_cache=False)
    try:
        return list(cursor.rows(start, stop))
    finally:
        cursor.close()
