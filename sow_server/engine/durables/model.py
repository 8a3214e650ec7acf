"""A durable subscription, its gaps and deliveries, and the answers to its changes: values and pure functions."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from sow_peering import NO_STAMP, Stamp
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.policies import NOTHING, Declared

GAPS_MAX: Final = 32
"""Gaps that one row keeps apart; beyond, the newest are told as one."""
REWINDS_MAX: Final = 64
"""Instances of which a durable knows the last rewind; beyond, the oldest rewinds are forgotten."""
STEPS_MAX: Final = 16
"""Steps of deliveries that one row keeps; beyond, those of the fewest deliveries are told as one."""


class GapReason(enum.IntEnum):
    """The reason why entries are missing; numbered as in `sow.v1.GapReason`."""

    DISCARDED = 1
    EVICTED = 2
    CONFLATED = 3
    BACKLOG_TTL = 4
    DELIVERY_LIMIT = 5


class DurableGap(NamedTuple):
    """Entries after `after`, up to `upto`, that are not handed over. `entries`: their number before filtering, 0 where
    it is not known."""

    reason: GapReason
    after: int
    upto: int
    entries: int


class DeliveryStep(NamedTuple):
    """Entries up to `upto`, and after the step in front of it, were handed over `times` times."""

    upto: int
    times: int


Life: TypeAlias = tuple[int, int]
"""The life of a durable at this instance: the time of its creation here, and how often it began anew. Deliveries in
another life of the durable do not count in this one."""


class Durable(NamedTuple):
    """One durable subscription, as its row says.

    Everything up to `position` is acknowledged. `entries` and `bytes` are all that was ever journaled of its topic up
    to there. Entries at or below `floor` are gone for it, even if a longer retention that was set later would cover
    them. `deliveries` has the deliveries of earlier sessions (durables [5]); `handed` is the position up to which the
    last session has handed entries over, once it has ended.
    """

    topic_id: int
    name: str
    filter: str
    position: int
    entries: int
    bytes: int
    create_time_micros: int
    last_use_micros: int
    attached: bool = False
    floor: int = 0
    gaps: tuple[DurableGap, ...] = ()
    declared: Declared = NOTHING
    handed: int = 0
    deliveries: tuple[DeliveryStep, ...] = ()
    set_aside: int = 0
    """Entries that were set aside for the delivery limit."""
    born: Stamp = NO_STAMP
    """When and where it was created, or became replicated (rule F14); NO_STAMP: it is not replicated."""
    buried: Stamp = NO_STAMP
    """Replicated durables of this name that were born up to then have been deleted."""
    rewinds: tuple[Stamp, ...] = ()
    """Its generation: the last rewind at each instance that is known here, by the instances' ids. Positions of
    different generations are never compared."""
    restarts: int = 0
    """How often a durable, or a generation, of another instance has taken the place of the one here."""
    pin: bool = False
    """It is a pin: no consumer has attached since it was made as one."""
    reader: str = ""
    """The reader of a pin, in its own words."""

    @property
    def replicated(self) -> bool:
        """True if it is known at the peers, too."""
        return self.born != NO_STAMP

    @property
    def life(self) -> Life:
        """The same as long as its positions are those of one consumer after the other."""
        return self.create_time_micros, self.restarts

    @property
    def consumed(self) -> int:
        """Everything up to here was acknowledged by consumers: the position, unless limits of this instance have let go
        of entries in front of it, which consumers have not been told yet."""
        return min([self.position, *[gap.after for gap in self.gaps]])

    def delivered(self, sequence: int) -> int:
        """The number of times that earlier sessions have handed over an entry that is not acknowledged."""
        return delivered(self.deliveries, sequence)

    @property
    def order(self) -> tuple[int, str]:
        """Sorts the slowest first."""
        return self.position, self.name


@dataclass(frozen=True, slots=True)
class DurableFigures:
    """The entries that a durable can read (rule J7), before filtering.

    `earliest`: the position that it can be rewound to. `oldest_micros`: the commit time of the first unacknowledged
    entry; None where there is none.
    """

    earliest: int
    total_entries: int
    total_bytes: int
    unacknowledged_entries: int
    unacknowledged_bytes: int
    oldest_micros: int | None


class RemovedDurable(NamedTuple):
    """The name of a durable that was removed."""

    removed_micros: int
    buried: Stamp = NO_STAMP
    """As of a durable. Of one that was deleted, it is when that was born."""
    idle: Stamp = NO_STAMP
    """When it was born, if it was removed only here, because it was idle."""


class Merged(enum.Enum):
    """The outcome of a mark of a replicated durable of another instance."""

    NOTHING = enum.auto()
    """It tells nothing new."""
    MOVED = enum.auto()
    """The position has moved on."""
    CREATED = enum.auto()
    RESTARTED = enum.auto()
    """It begins at another position, because it was rewound there, or created there earlier than here."""
    REMOVED = enum.auto()
    DIFFERS = enum.auto()
    """Another durable has this name here: it has another filter, or is not replicated."""


class DurableBacklog(NamedTuple):
    """The unacknowledged entries of the slowest durable of a topic (rule J9)."""

    name: str
    bytes: int
    oldest_micros: int | None
    entries: int


class AttachedDurable(NamedTuple):
    """The answer to a consumer that attaches."""

    durable: Durable
    created: bool
    reset: bool


class ClearedBacklogs(NamedTuple):
    """The durables that a clearing has changed, and the number of entries that it has acknowledged."""

    durables: tuple[str, ...]
    entries: int


class RewindTo(NamedTuple):
    """The target of a rewind; both None: the earliest position."""

    position: int | None = None
    time_micros: int | None = None


# --- gaps ------------------------------------------------------------------------------------------------------------


def with_gap(gaps: tuple[DurableGap, ...], gap: DurableGap) -> tuple[DurableGap, ...]:
    """Gaps with one more, the newest last. A gap that continues the last one is told with it."""
    if gaps:
        last = gaps[-1]
        # A snapshot follows a conflated gap, and also tells the entries before the gap.
        if last.reason is gap.reason or len(gaps) >= GAPS_MAX:
            reason = last.reason if last.reason is GapReason.CONFLATED else gap.reason
            # The sum with an unknown number is unknown.
            entries = last.entries + gap.entries if last.entries and gap.entries else 0
            return (*gaps[:-1], DurableGap(reason, last.after, gap.upto, entries))
    return (*gaps, gap)


def gap_up_to(gap: DurableGap, position: int) -> DurableGap:
    """The part of a gap at or before a position. The number of its entries is not known."""
    if gap.upto <= position:
        return gap
    # A snapshot in its place would also tell the entries behind the position.
    reason = GapReason.EVICTED if gap.reason is GapReason.CONFLATED else gap.reason
    return DurableGap(reason, gap.after, position, 0)


# --- rewinds ---------------------------------------------------------------------------------------------------------


def rewinds_of(*several: Iterable[Stamp]) -> tuple[Stamp, ...]:
    """The generation that knows all of these rewinds: the last one at each instance."""
    last: dict[str, Stamp] = {}
    for stamp in sorted([stamp for rewinds in several for stamp in rewinds]):
        last[stamp.instance] = stamp
    newest = sorted(last.values())[-REWINDS_MAX:]
    return tuple(sorted(newest, key=lambda stamp: stamp.instance))


# --- deliveries ------------------------------------------------------------------------------------------------------


def delivered(deliveries: Iterable[DeliveryStep], sequence: int) -> int:
    """The number of times that an entry was handed over, by the deliveries of its durable."""
    return next((step.times for step in deliveries if step.upto >= sequence), 0)


def delivered_again(durable: Durable, handed: int) -> tuple[DeliveryStep, ...]:
    """The deliveries of a durable, with those of one more session, which began at its position and has handed over
    entries up to `handed`."""
    if handed <= durable.position:
        return durable.deliveries
    steps: list[DeliveryStep] = []
    reached = durable.position
    for upto, times in durable.deliveries:
        if reached < handed < upto:
            steps.append(DeliveryStep(handed, times + 1))
        steps.append(DeliveryStep(upto, times + (upto <= handed)))
        reached = upto
    if reached < handed:
        steps.append(DeliveryStep(handed, 1))
    merged: list[DeliveryStep] = []
    for step in steps:
        if merged and merged[-1].times == step.times:
            merged.pop()
        merged.append(step)
    while len(merged) > STEPS_MAX:
        del merged[-2]
    return tuple(merged)


# --- refusals --------------------------------------------------------------------------------------------------------


def not_found(topic: Topic, name: str) -> StoreError:
    """The topic has no durable of this name."""
    return StoreError(
        Reason.DURABLE_NOT_FOUND, f"durable: topic {topic.name} has no durable {name[:220]!r}", field="durable"
    )


def detached(topic: Topic, name: str) -> StoreError:
    """A session is not that of the durable's last consumer any more."""
    return StoreError(
        Reason.DURABLE_DETACHED,
        f"session: {name} of {topic.name} has been detached since; attach again",
        field="session",
    )


def in_use(topic: Topic, name: str, *, at: str = "") -> StoreError:
    """The durable has a consumer. `at`: the name of the instance, where that is another one."""
    where = f" at {at}" if at else ""
    return StoreError(
        Reason.DURABLE_IN_USE,
        f"durable: {name} of {topic.name} has a consumer{where}; use force to end its stream",
        field="durable",
        details={"instance": at} if at else {},
    )


def without_gaps(gaps: Iterable[DurableGap], upto: int) -> tuple[DurableGap, ...]:
    """The gaps that are left once everything up to a position counts as consumed."""
    return tuple([gap if gap.after >= upto else gap._replace(after=upto, entries=0) for gap in gaps if gap.upto > upto])


def check_same(topic: Topic, durable: Durable, filter_text: str, declared: Declared | None) -> None:
    """Raises StoreError DURABLE_DIFFERS (rule J2)."""
    if filter_text != durable.filter:
        raise StoreError(
            Reason.DURABLE_DIFFERS,
            f"filter: {durable.name} of {topic.name} has the filter {durable.filter or 'true'!r}, "
            f"and this is {filter_text or 'true'!r}",
            field="filter",
        )
    if declared and dict(declared) != dict(durable.declared):
        raise StoreError(
            Reason.DURABLE_DIFFERS,
            f"durable.settings: {durable.name} of {topic.name} was created with others: {dict(durable.declared)}, "
            f"and these are {dict(declared)}",
            field="durable.settings",
        )
