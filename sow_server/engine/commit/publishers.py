"""The memory of publishers, so that a retry is never applied twice (rule P6).

A publisher's row holds its epoch, its highest sequence, the refusals among its last 1,000 sequences, the versions and
stamps of its last records, its last finished unit of work, and apart from all that what peers have told of it. The row
is written in the same batch as the records that it covers. Pure, except for the bounded cache.

    [1]  A unit is finished in the batch that holds the last records of its last request, or not at all.
    [2]  A unit is finished only when no record of its last request was refused, however long ago.
    [3]  Once a unit is finished, no record of it or of an earlier unit is applied, even in a new epoch.
    [4]  The answer to a duplicate is the answer of its first attempt, or that this is forgotten: never a guess.
    [5]  A sequence counts as known if its record is here, was refused, or has been replaced by a newer one; or if the
         publisher has begun behind it here, as it does only with what is settled.
    [6]  Of two publishers with one id the one with the greater (epoch, token) wins, and the other one is fenced.
         Their sequences are never compared (rule F12).
    [7]  What a peer tells is kept by peer, and counts only for records of the topics that it was told of (rule F11).
         What it passes on for others is also kept by these topics, each in a row of its own: they say how far those
         others are trusted. So a mark reaches no further at the end of a chain than at its begin, and takes no place of
         what is known of another topic (told [3]).
    [8]  An epoch that a peer tells of is never the one of the row. It fences, and is passed over by the next one, only
         while all topics that the publisher has written here are topics of that peer, and only up to `EPOCH_STEP_MAX`
         above the row's. So peers cannot stop a publisher of other topics, and cannot use up an id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from sow_server.engine.commit.passed_on import PassedOnRows
from sow_server.engine.commit.told import (
    NOTHING_TOLD,
    OUTCOMES_KEPT,
    UNKNOWN_TOPIC,
    Elsewhere,
    PassedOn,
    Told,
    known_upto,
    ranges_of,
    with_range,
    with_told,
    with_topic,
    with_topics,
)
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import OpenedPublisher, PublisherPosition, Refusal

RUNS_KEPT: Final = 32
"""Runs of applied records that are kept: two for each request that a client has under way (16)."""
EPOCH_MAX: Final = 2**63 - 1
EPOCH_STEP_MAX: Final = 2**32
"""An epoch that a peer tells of counts up to so far above the one here. Only clients here raise the one here, so many
tellings reach no further than one."""
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
    """The expire time of all of them. `SEVERAL`: their times differ, and are forgotten. `REMOVED`: all are removals;
    where version and sequence are 0, they have found no record."""

    def grow(self, other: AnsweredRun, *, mixed: bool = False) -> bool:
        """Appends a run that continues this one; False if it does not. `mixed`: it may have other expire times, which
        are forgotten then."""
        count = self.count
        counted = count if self.version else 0  # nothing was changed: the next one has no version either
        alike = other.expire_time_micros == self.expire_time_micros
        if (
            other.first != self.first + count
            or other.version != self.version + counted
            or other.sequence != self.sequence + counted
            or not (alike or mixed)
        ):
            return False
        self.count = count + other.count
        if not alike:
            self.expire_time_micros = SEVERAL
        return True

    def packed(self) -> bytes:
        """As stored: of one size each, so that a publish, which drops the oldest one, is a slice."""
        return _RUN.pack(self.first, self.count, self.version, self.sequence, self.expire_time_micros)


SEVERAL: Final = -1
REMOVED: Final = -2
_RUN: Final = Struct(">qiqqq")


def joined(runs: Sequence[AnsweredRun]) -> list[AnsweredRun]:
    """The same with as few runs as possible, without the expire times of those that were joined."""
    found: list[AnsweredRun] = []
    for run in runs:
        if not (found and found[-1].grow(run, mixed=True)):
            found.append(run)
    return found


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
    token: int = 0
    """The token of the epoch. 0: the epoch has none, and means nothing elsewhere."""
    given: bool = False
    """This instance has given the epoch: a position without a token is one of it."""
    contiguous: int = 0
    """All sequences from 1 to here were decided here. For peers; here `highest_sequence` counts ([5])."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Ranges that were decided here, and begin behind a gap, in rising order."""
    topics: tuple[int, ...] = ()
    """Ids of the topics of the epoch's records that were decided here."""
    earlier: tuple[int, ...] = ()
    """Ids of the topics of the records of earlier epochs that were decided here."""
    told: tuple[Told, ...] = ()
    """The parts of what peers themselves have told, of this epoch or later ones; the newest last."""
    has_passed_on: bool = False
    """Peers have told it for other instances, too: there are rows of that ([7])."""
    passed_on: PassedOn = ()
    """The one of the topic at hand, if it has been read. Not stored with this row."""

    @property
    def rank(self) -> tuple[int, int]:
        """Decides between publishers with one id ([6])."""
        return self.epoch, self.token

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """All sequences that were decided here, in rising order."""
        return ranges_of(self.contiguous, self.ahead)

    def position(self) -> tuple[int, int]:
        """The present epoch, and its highest sequence: with what counts of peers, up to the first gap."""
        heeded = [told for told in self._heard() if self._heeds(told)]
        rank = max([self.rank, *[told.rank for told in heeded]])
        known = [one for told in heeded if told.rank == rank for one in told.ranges]
        return rank[0], known_upto(self.highest_sequence if rank == self.rank else 0, known)

    def elsewhere(self, topic_id: int) -> Elsewhere:
        """The sequences that peers have told of and that count for records of a topic, in this epoch ([7])."""
        heard = self._heard()
        found = heard and [told for told in heard if told.rank == self.rank and topic_id in told.topics]
        if not found:
            return NOTHING_TOLD
        ranges = [one for told in found for one in told.ranges]
        refused = frozenset([one for told in found for one in told.refused])
        return Elsewhere(ranges, refused, max([told.last for told in found]))

    def decided_upto(self, first: int, elsewhere: Elsewhere) -> int:
        """Records from `first` up to this sequence, if it is not below, were decided before."""
        known = self.highest_sequence
        return known_upto(max(known, first - 1), elsewhere.ranges) if elsewhere.ranges else known

    def open(self, unit: int, publisher_id: str, now_micros: int, token: int = 0) -> tuple[Publisher, OpenedPublisher]:
        """The publisher in a new epoch, in which `unit` (0: none) is to be published; unchanged if the unit is
        finished. `token`: a random number for the epoch.

        Raises StoreError INVALID_ARGUMENT if the present epoch is the highest possible one.
        """
        if 0 < unit <= self.unit:
            records = self.unit_records if unit == self.unit else 0
            return self._replace(last_use_micros=now_micros), OpenedPublisher(self.epoch, True, records)
        last = max([self.epoch, *[told.epoch for told in self._heard() if self._heeds(told)]])
        if last >= EPOCH_MAX:
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"publisher_id: {publisher_id!r} has used the last epoch there is; choose another id",
                field="publisher_id",
            )
        begun = self._in_epoch(last + 1, token)
        return begun._replace(last_use_micros=now_micros, given=True), OpenedPublisher(begun.epoch, token=token)

    def admit(self, position: PublisherPosition, count: int, topic_id: int = UNKNOWN_TOPIC) -> Publisher:
        """The publisher as a request of `count` records for a topic, at `position`, finds it.

        Raises StoreError PUBLISHER_FENCED, and UNIT_DONE for records of a finished unit. A request that was decided
        before passes: it is answered as a duplicate, so a client that has missed the answer to the request that
        finished the unit learns the outcome.
        """
        theirs, ours = (position.epoch, self._token_of(position)), (self.epoch, self.token)
        winner = max([ours, *self._ranks_told(topic_id)]) if self.told or self.passed_on else ours
        if theirs < winner:
            by = f"epoch {winner[0]}" if position.epoch < winner[0] else "the same epoch from another instance"
            raise StoreError(
                Reason.PUBLISHER_FENCED,
                f"publisher: epoch {position.epoch} of {position.publisher_id!r} is fenced by {by}",
                field="publisher.publisher_epoch",
            )
        if 0 < position.unit <= self.unit and not self._decided(position, count):
            raise StoreError(
                Reason.UNIT_DONE,
                f"publisher: unit {position.unit} of {position.publisher_id!r} has been published whole before; the"
                f" last unit that is finished is {self.unit}",
                field="publisher.unit",
            )
        return self if theirs == ours else self._in_epoch(*theirs)

    def _token_of(self, position: PublisherPosition) -> int:
        """The token of a position; of a client without tokens, the one of the epoch that it was given here."""
        return position.token or (self.token if self.given and position.epoch == self.epoch else 0)

    def _ranks_told(self, topic_id: int) -> list[tuple[int, int]]:
        """The epochs of peers that fence records of a topic ([8])."""
        found = [told for told in self._heard() if topic_id in told.topics or topic_id in told.others]
        return [told.rank for told in found if self._heeds(told)]

    def _heard(self) -> PassedOn:
        return (*self.told, *self.passed_on) if self.passed_on else self.told

    def _heeds(self, told: Told) -> bool:
        """True if the epoch that a peer has told of counts ([8])."""
        theirs = (*told.topics, *told.others)
        written = (*self.topics, *self.earlier)
        return told.epoch - self.epoch <= EPOCH_STEP_MAX and all(one and one in theirs for one in written)

    def check_acting(self, position: PublisherPosition, topic_id: int) -> None:
        """Called before another operation than publishing, on a topic, in the name of a publisher. Raises StoreError
        PUBLISHER_FENCED, and UNIT_DONE once the unit is finished."""
        # No sequence of it was decided: it has none.
        self.admit(position._replace(first_sequence=self.highest_sequence + 1), 1, topic_id)

    def without_records(self) -> Publisher:
        """The publisher after a loss: of its epoch it is not known which records are here."""
        return Publisher(
            epoch=self.epoch,
            last_use_micros=self.last_use_micros,
            token=self.token,
            given=self.given,
            earlier=self._written(),
            told=tuple([told.without_records() for told in self.told]),
            has_passed_on=self.has_passed_on,
        )

    def _in_epoch(self, epoch: int, token: int) -> Publisher:
        """Sequences begin anew; finished units stay finished ([3])."""
        return Publisher(
            epoch=epoch,
            unit=self.unit,
            unit_records=self.unit_records,
            token=token,
            earlier=self._written(),
            told=tuple([told for told in self.told if told.rank >= (epoch, token)]),
            has_passed_on=self.has_passed_on,
            passed_on=self.passed_on,
        )

    def _written(self) -> tuple[int, ...]:
        """The topics that it has written here, in any epoch."""
        return with_topics(self.earlier, self.topics)

    def _decided(self, position: PublisherPosition, count: int) -> bool:
        """True if all of a request was decided before, in this epoch."""
        same = (position.epoch, self._token_of(position)) == (self.epoch, self.token)
        if not same or position.first_sequence + count - 1 > self.highest_sequence:
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
        from_sequence: int = 0,
        topic_id: int = UNKNOWN_TOPIC,
    ) -> Publisher:
        """The publisher after its sequences from `from_sequence` (0: the next one) up to `to_sequence` have been
        decided; `refusals` are the new ones.

        `applied` new records belong to `unit`, which they finish or do not; they are in `runs`.
        """
        kept = self.refusals
        if kept or refusals:
            oldest = to_sequence - OUTCOMES_KEPT
            kept = tuple(refusal for refusal in (*kept, *refusals) if refusal.index > oldest)
        records = applied + (self.open_records if unit == self.open_unit else 0)
        first = from_sequence or self.highest_sequence + 1
        contiguous, ahead = with_range(self.contiguous, self.ahead, first, to_sequence)
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
            self.token,
            self.given,
            contiguous,
            ahead,
            with_topic(self.topics, topic_id),
            self.earlier,
            self.told,
            self.has_passed_on,
            self.passed_on,
        )

    def learn(
        self,
        told: Told,
        first: int,
        last: int,
        used_micros: int,
        *,
        sends: Callable[[int], bool | None] = lambda topic_id: True,
    ) -> Publisher:
        """The publisher after a peer has told that sequences from `first` to `last` were decided, of which those in
        `told.refused` were not applied. All others are here. The same object if that is nothing new.

        `sends`: whether a topic, by its id, is one of the peer's; None: it has been deleted.
        """
        told = told.with_bounded_topics()
        if not self._is_news(told, first, last, self.passed_on):
            return self
        heard = with_told(self.told, told, first, last, others=self._written(), sends=sends)
        return self if heard is self.told else self.used(used_micros)._replace(told=heard)

    def learn_passed_on(
        self, told: Told, first: int, last: int, *, known: Callable[[Sequence[int]], Mapping[int, PassedOn]]
    ) -> dict[int, PassedOn]:
        """Does as `learn`, with what a peer has passed on for another instance. Each topic has a row of that: returns
        the new rows, by the topics' ids, and none if nothing is new. `known`: the rows of topics, by their ids."""
        told = told.with_bounded_topics()
        rows = known([topic_id for topic_id in told.topics if topic_id != UNKNOWN_TOPIC])
        # Topics that come together have equal rows, mostly: then all of them are one object, and cost as much as one.
        apart = {id(row): row for row in rows.values()}
        if not any(self._is_news(told, first, last, row) for row in apart.values()):
            return {}
        # An epoch that is below the one here now says nothing any more.
        new = {
            number: with_told(tuple([one for one in row if one.rank >= self.rank]), told, first, last)
            for number, row in apart.items()
        }
        return {topic_id: new[id(row)] for topic_id, row in rows.items() if new[id(row)] != row}

    def used(self, at_micros: int) -> Publisher:
        """The publisher after a use at that time."""
        return self._replace(last_use_micros=max(self.last_use_micros, at_micros))

    def _is_news(self, new: Told, first: int, last: int, passed_on: PassedOn) -> bool:
        """True if what a peer tells counts, and is not known yet, here or from peers, of all its topics."""
        if new.rank < self.rank or not new.token:
            return False
        topics = set(new.topics)
        same = [told for told in (*self.told, *passed_on) if told.rank == new.rank and topics <= set(told.topics)]
        known = [one for told in same for one in told.ranges]
        if new.rank == self.rank:
            known += self.ranges
        return known_upto(first - 1, known) < last

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

    def refusal_of(
        self, sequence: int, *, conditional: bool, atomic: bool = False, elsewhere: Elsewhere = NOTHING_TOLD
    ) -> Refusal | None:
        """How a sequence that was seen before was refused; None when it was applied. `elsewhere`: of its topic."""
        for refusal in self.refusals:
            if refusal.index == sequence:
                return refusal
        if sequence in elsewhere.refused and not self._applied_here(sequence):
            return Refusal(sequence, Reason.OUTCOME_UNKNOWN, "publisher: the record was refused at another instance")
        if (conditional or atomic) and sequence <= max(self.highest_sequence, elsewhere.last) - OUTCOMES_KEPT:
            return Refusal(
                sequence, Reason.OUTCOME_UNKNOWN, f"publisher: the outcome of sequence {sequence} is no longer known"
            )
        if conditional and sequence <= elsewhere.last and not self._applied_here(sequence):
            # The condition held there, or did not; the record here may be one that it would not have held for.
            return Refusal(
                sequence,
                Reason.OUTCOME_UNKNOWN,
                f"publisher: sequence {sequence} was decided at another instance, and its condition with it",
            )
        return None

    def _applied_here(self, sequence: int) -> bool:
        return any(0 <= sequence - run.first < run.count for run in self.known_runs())

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
    token: int = 0
    given: bool = False
    contiguous: int = 0
    ahead: tuple[tuple[int, int], ...] = ()
    elsewhere: int = 0
    """Not 0 in a row of an earlier release whose sequences are in part what peers had told."""
    topics: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()
    told: tuple[Told, ...] = ()
    has_passed_on: bool = False
    """Left out where it is false."""


def encode(publisher: Publisher) -> bytes:
    """The stored row."""
    refusals = [
        (refusal.index, int(refusal.reason), refusal.message[:300], refusal.current_version)
        for refusal in publisher.refusals
    ]
    fields = (*publisher[:3], refusals, *publisher[4:_TOPICS], 0, *publisher[_TOPICS:_HAS_PASSED_ON])
    return msgspec.msgpack.encode((*fields, True) if publisher.has_passed_on else fields)


_TOPICS: Final = Publisher._fields.index("topics")
_HAS_PASSED_ON: Final = Publisher._fields.index("has_passed_on")


_decoder: Final[msgspec.msgpack.Decoder[_Row]] = msgspec.msgpack.Decoder(_Row)


def decode(row: bytes) -> Publisher:
    """The publisher of a stored row."""
    found = _decoder.decode(row)
    if found.elsewhere:
        # Which of its sequences peers had told, and which peers, cannot be seen in the row: these are forgotten.
        found.contiguous, found.ahead = 0, ()
        found.refusals = [one for one in found.refusals if one[0] <= found.highest_sequence]
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
        found.token,
        found.given,
        found.contiguous,
        found.ahead,
        found.topics,
        found.earlier,
        # In a row of an earlier release there may be what was passed on: of all topics in one place.
        tuple([told for told in found.told if not told.passed_on]),
        found.has_passed_on,
    )


class PublisherCache:
    """The publishers used last; the others are read from the store. Owned by the writer thread."""

    def __init__(self, read: Callable[[str], bytes | None], passed_on: PassedOnRows) -> None:
        self.passed_on: Final = passed_on
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

    def of_topic(self, publisher_id: str, topic_id: int, staged: Publisher | None = None) -> Publisher:
        """The publisher with all that counts for records of a topic. `staged`: by the commit under way."""
        found = staged or self.find(publisher_id)
        if not found.has_passed_on:
            return found
        return found._replace(passed_on=self.passed_on.of_topic(publisher_id, topic_id))

    def of_all_topics(self, publisher_id: str) -> Publisher:
        """The publisher with all that peers have told of it."""
        found = self.find(publisher_id)
        return found._replace(passed_on=self.passed_on.of_publisher(publisher_id)) if found.has_passed_on else found

    def keep(self, publisher_id: str, publisher: Publisher) -> None:
        """Remembers a publisher that has been committed."""
        self._known[publisher_id] = publisher._replace(passed_on=()) if publisher.passed_on else publisher
        self._known.move_to_end(publisher_id)
        if len(self._known) > _CACHED_MAX:
            self._known.popitem(last=False)

    def forget(self, publisher_id: str) -> None:
        """Forgets a publisher whose rows have been removed."""
        self._known.pop(publisher_id, None)
        self.passed_on.forget(publisher_id)
