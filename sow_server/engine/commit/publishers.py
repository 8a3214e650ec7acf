"""The memory of publishers, so that a retry is never applied twice (rule P6).

A publisher's row holds its epoch, its highest sequence, the refusals among its last 1,000 sequences, the versions and
stamps of its last records, and its last finished unit of work. The row is written in the same batch as the records that
it covers. Pure, except for the bounded cache.

    [1]  A unit is finished in the batch that holds the last records of its last request, or not at all.
    [2]  A unit is finished only when no record of its last request was refused, however long ago.
    [3]  Once a unit is finished, no record of it or of an earlier unit is applied, even in a new epoch.
    [4]  The answer to a duplicate is the answer of its first attempt, or that this is forgotten: never a guess.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import OpenedPublisher, PublisherPosition, Refusal

OUTCOMES_KEPT: Final = 1000
"""Refusals are kept for this many of a publisher's last sequences."""
RUNS_KEPT: Final = 32
"""Runs of applied records that are kept: two for each request that a client has under way (16)."""
EPOCH_MAX: Final = 2**63 - 1
_CACHED_MAX: Final = 10_000


@dataclass(slots=True)
class AnsweredRun:
    """Records that were applied one after the other: the next one has the next publisher sequence, version and journal
    sequence. A run is the part of a request in one commit, if no record in between was refused or expired."""

    # Not frozen: `_put_each` makes one grow record by record.
    first: int
    """Publisher sequence of its first record."""
    count: int
    version: int
    sequence: int
    expire_time_micros: int
    """Of all of them; `SEVERAL`: they differ, and are forgotten."""

    def grow(self, other: AnsweredRun) -> bool:
        """Appends a run that continues this one; False if it does not."""
        count = self.count
        if (
            other.first != self.first + count
            or other.version != self.version + count
            or other.sequence != self.sequence + count
            or other.expire_time_micros != self.expire_time_micros
        ):
            return False
        self.count = count + other.count
        return True

    def packed(self) -> bytes:
        """As stored: of one size each, so that a publish, which drops the oldest one, is a slice."""
        return _RUN.pack(self.first, self.count, self.version, self.sequence, self.expire_time_micros)


SEVERAL: Final = -1
_RUN: Final = Struct(">qiqqq")


def _packed(before: bytes, runs: Sequence[AnsweredRun]) -> bytes:
    """The last runs, as stored."""
    if before:
        # The records of a stream in one commit are one run, even of many requests.
        last = AnsweredRun(*_RUN.unpack_from(before, len(before) - _RUN.size))
        if last.grow(runs[0]):
            before = before[: -_RUN.size]
            runs = [last, *runs[1:]]
    return (before + b"".join([run.packed() for run in runs[-RUNS_KEPT:]]))[-RUNS_KEPT * _RUN.size :]


class Publisher(NamedTuple):
    """One publisher, as stored; a refusal's index is its publisher sequence here."""

    epoch: int = 0
    highest_sequence: int = 0
    last_use_micros: int = 0
    refusals: tuple[Refusal, ...] = ()
    unit: int = 0
    """The last finished unit; 0: none."""
    unit_records: int = 0
    """The number of its records, in the attempt that finished it."""
    open_unit: int = 0
    """The unit of the epoch's last records."""
    open_records: int = 0
    """The number of its records that were applied in this epoch."""
    refused_sequence: int = 0
    """The highest sequence of the epoch that was refused: it is known for longer than the refusal itself ([2])."""
    runs: bytes = b""
    """The last runs of records that were applied in this epoch, packed ([4])."""

    def open(self, unit: int, publisher_id: str, now_micros: int) -> tuple[Publisher, OpenedPublisher]:
        """The publisher in a new epoch, in which `unit` (0: none) is to be published; unchanged if the unit is
        finished.

        Raises StoreError INVALID_ARGUMENT if the present epoch is the highest possible one.
        """
        if 0 < unit <= self.unit:
            records = self.unit_records if unit == self.unit else 0
            return self._replace(last_use_micros=now_micros), OpenedPublisher(self.epoch, True, records)
        if self.epoch >= EPOCH_MAX:
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"publisher_id: {publisher_id!r} has used the last epoch there is; choose another id",
                field="publisher_id",
            )
        begun = self._in_epoch(self.epoch + 1)
        return begun._replace(last_use_micros=now_micros), OpenedPublisher(begun.epoch)

    def admit(self, position: PublisherPosition, count: int) -> Publisher:
        """The publisher as a request of `count` records at `position` finds it.

        Raises StoreError PUBLISHER_FENCED, and UNIT_DONE for records of a finished unit. A request that was decided
        before passes: it is answered as a duplicate, so a client that has missed the answer to the request that
        finished the unit learns the outcome.
        """
        if position.epoch < self.epoch:
            raise StoreError(
                Reason.PUBLISHER_FENCED,
                f"publisher: epoch {position.epoch} of {position.publisher_id!r} is fenced by epoch {self.epoch}",
                field="publisher.publisher_epoch",
            )
        if 0 < position.unit <= self.unit and not self._decided(position, count):
            raise StoreError(
                Reason.UNIT_DONE,
                f"publisher: unit {position.unit} of {position.publisher_id!r} has been published whole before; the"
                f" last unit that is finished is {self.unit}",
                field="publisher.unit",
            )
        return self if position.epoch == self.epoch else self._in_epoch(position.epoch)

    def check_acting(self, position: PublisherPosition) -> None:
        """Called before another operation than publishing in the name of a publisher. Raises StoreError
        PUBLISHER_FENCED, and UNIT_DONE once the unit is finished."""
        # No sequence of it was decided: it has none.
        self.admit(position._replace(first_sequence=self.highest_sequence + 1), 1)

    def _in_epoch(self, epoch: int) -> Publisher:
        """Sequences begin anew; finished units stay finished ([3])."""
        return Publisher(epoch=epoch, unit=self.unit, unit_records=self.unit_records)

    def _decided(self, position: PublisherPosition, count: int) -> bool:
        """Whether all of a request was decided before, in this epoch."""
        if position.epoch != self.epoch or position.first_sequence + count - 1 > self.highest_sequence:
            return False
        # A request without records has no sequence to check; about the last unit its answer is correct.
        return count > 0 or position.unit == self.unit

    def advance(
        self,
        to_sequence: int,
        refusals: list[Refusal],
        now_micros: int,
        *,
        unit: int = 0,
        applied: int = 0,
        finishes: bool = False,
        runs: Sequence[AnsweredRun] = (),
    ) -> Publisher:
        """The publisher after its sequences up to `to_sequence` have been decided; `refusals` are the new ones.

        `applied` new records belong to `unit`, which they finish or do not; they are in `runs`.
        """
        kept = self.refusals
        if kept or refusals:
            oldest = to_sequence - OUTCOMES_KEPT
            kept = tuple(refusal for refusal in (*kept, *refusals) if refusal.index > oldest)
        records = applied + (self.open_records if unit == self.open_unit else 0)
        return Publisher(
            self.epoch,
            max(self.highest_sequence, to_sequence),
            now_micros,
            kept,
            unit if finishes else self.unit,
            records if finishes else self.unit_records,
            unit,
            records,
            max([self.refused_sequence, *[refusal.index for refusal in refusals]]),
            _packed(self.runs, runs) if runs else self.runs,
        )

    def check_finish(self, position: PublisherPosition) -> None:
        """Called before a request that ends its unit is applied. Raises StoreError OUTCOME_UNKNOWN if one of its
        records was refused in an earlier attempt that is too long ago for its answer to show it ([2])."""
        if position.first_sequence <= self.refused_sequence <= self.highest_sequence - OUTCOMES_KEPT:
            raise StoreError(
                Reason.OUTCOME_UNKNOWN,
                f"publisher: sequence {self.refused_sequence} was refused, and it is no longer known why; unit"
                f" {position.unit} is not finished",
                field="publisher.unit_done",
            )

    def refusal_of(self, sequence: int, *, conditional: bool) -> Refusal | None:
        """How a sequence that was seen before was refused; None when it was applied."""
        for refusal in self.refusals:
            if refusal.index == sequence:
                return refusal
        if conditional and sequence <= self.highest_sequence - OUTCOMES_KEPT:
            return Refusal(
                sequence, Reason.OUTCOME_UNKNOWN, f"publisher: the outcome of sequence {sequence} is no longer known"
            )
        return None

    def known_runs(self) -> list[AnsweredRun]:
        """The runs of applied records that are kept, the newest first."""
        return [AnsweredRun(*fields) for fields in _RUN.iter_unpack(self.runs)][::-1]


class _Row(msgspec.Struct, array_like=True):
    """A stored row. New fields are only added at the end, with a default: older rows are shorter."""

    epoch: int
    highest_sequence: int
    last_use_micros: int
    refusals: list[tuple[int, int, str, int]]
    unit: int = 0
    unit_records: int = 0
    open_unit: int = 0
    open_records: int = 0
    refused_sequence: int = 0
    runs: bytes = b""


def encode(publisher: Publisher) -> bytes:
    """The stored row."""
    refusals = [
        (refusal.index, int(refusal.reason), refusal.message[:300], refusal.current_version)
        for refusal in publisher.refusals
    ]
    return msgspec.msgpack.encode((*publisher[:3], refusals, *publisher[4:]))


_decoder: Final[msgspec.msgpack.Decoder[_Row]] = msgspec.msgpack.Decoder(_Row)


def decode(row: bytes) -> Publisher:
    """The publisher of a stored row."""
    found = _decoder.decode(row)
    return Publisher(
        found.epoch,
        found.highest_sequence,
        found.last_use_micros,
        tuple([Refusal(index, Reason(why), text, at) for index, why, text, at in found.refusals]),
        found.unit,
        found.unit_records,
        found.open_unit,
        found.open_records,
        found.refused_sequence,
        found.runs,
    )


class PublisherCache:
    """The publishers used last; the others are read from the store. Owned by the writer thread."""

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        self._read = read
        self._known: OrderedDict[str, Publisher] = OrderedDict()

    def find(self, publisher_id: str) -> Publisher:
        """The publisher, or a new one."""
        publisher = self._known.get(publisher_id)
        if publisher is None:
            row = self._read(publisher_id)
            return Publisher() if row is None else decode(row)
        self._known.move_to_end(publisher_id)
        return publisher

    def keep(self, publisher_id: str, publisher: Publisher) -> None:
        """Remembers a publisher that has been committed."""
        self._known[publisher_id] = publisher
        self._known.move_to_end(publisher_id)
        if len(self._known) > _CACHED_MAX:
            self._known.popitem(last=False)

    def forget(self, publisher_id: str) -> None:
        """Forgets a publisher whose row has been removed."""
        self._known.pop(publisher_id, None)
