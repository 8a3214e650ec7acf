"""Bounds on what durables hold back whose owners may only consume (rule J19).

A durable keeps entries of the journal, and with a quota that holds, it makes publishers wait. A caller with
`topic-admin` may want both without end. The durables of others are bounded here; without an access file nothing is.

    [1]  While publishers are held, or refused, the slowest of these durables has to acknowledge a part of the quota in
         each `hold_micros`. Otherwise those beyond the quota lose their oldest entries, as with `evict`.
    [2]  An owner whose durables have lost entries so is passed over for a time: no publisher of the topic waits for any
         of its durables. Those beyond the quota lose entries at each look, which begins the time anew.
    [3]  All durables of an owner together keep at most its limit of bytes. Beyond it the largest backlogs lose their
         oldest entries; entries that the retention of the topic keeps anyway cost nothing, and stay.

Each loss is told to the consumer by a gap. On the dispatcher's thread; `held` and `passed_over` on any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads
from sow_server.engine.durables import Durable, DurableEditor
from sow_server.engine.durables.registry import owner_of
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import MICROS, BacklogAction
from sow_server.subscriptions.durable.batches import DurableChanges
from sow_server.subscriptions.durable.quotas import exceeds

log = structlog.get_logger(__name__)

HOLD_MICROS: Final = 30 * MICROS
HOLD_PARTS: Final = 100
"""A durable that holds publishers acknowledges one in this many parts of the quota in time [1]."""
DISTRUST_HOLDS: Final = 20
"""For so many times `hold_micros` an owner is not waited for again [2]."""
KEPT_PARTS: Final = 10
"""A bound on bytes is restored with one in this many parts to spare [3]."""
TOLD_MICROS: Final = 60 * MICROS
"""Between two lines of the log about the same owner and topic."""
LOOK_DURABLES: Final = 500
"""Durables that one look adds up."""


class Owners(Protocol):
    """Knows what the owners of durables may do. "" is the owner of durables from before the access file."""

    def may_hold(self, owner: str, topic: str) -> bool:
        """True if the owner has `topic-admin` on a topic."""

    def backlog_bytes(self, owner: str) -> int | None:
        """The owner's limit; None: it has none."""


@dataclass(slots=True)
class _Hold:
    """Publishers of a topic are held."""

    since_micros: int
    asked_micros: int
    """When the last publisher was held or refused."""
    entries: int
    """Acknowledged entries and bytes of the slowest of the bounded durables, at the beginning."""
    bytes: int


class Backlogs:
    """Owns the holds, the distrust, and the sums."""

    def __init__(
        self,
        reads: Reads,
        changes: DurableChanges,
        tell: Callable[[Topic, list[str] | StoreError], None],
        *,
        hold_micros: int = HOLD_MICROS,
    ) -> None:
        """`tell`: hears which durables have lost entries."""
        self.owners: Owners | None = None
        """None: nothing is bounded."""
        self._topics = reads.topics
        self._durables = reads.durables
        self._changes = changes
        self._clock = reads.clock
        self._tell = tell
        self._hold_micros = hold_micros
        self._holds: dict[int, _Hold] = {}
        """The holds by topic id."""
        self._distrusted: dict[int, dict[str, int]] = {}
        """Until when, by topic id and owner [2]."""
        self._losses = _Losses()
        self._adding: Iterator[None] | None = None
        """The pass over all durables that is under way [3]."""

    def held(self, topic: Topic) -> None:
        """A publisher of the topic is held, or refused, because of its quota."""
        if self.owners is None:
            return
        now, hold = self._clock.now_micros(), self._holds.get(topic.id)
        if hold is not None:
            hold.asked_micros = now
            return
        slowest = next(iter(self._bounded(topic, self.owners)), None)
        if slowest is not None:
            self._holds[topic.id] = _Hold(now, now, slowest.entries, slowest.bytes)

    def passed_over(self, topic: Topic) -> Collection[str]:
        """The owners whose durables no publisher of a topic waits for [2]."""
        return self._distrusted.get(topic.id, ())

    def look(self) -> None:
        """Acts on what is beyond a bound. To be called every second or so."""
        owners, now = self.owners, self._clock.now_micros()
        if owners is None:
            return
        self._losses.flush(now)
        self._look_at_distrusted(owners, now)
        for topic_id, hold in list(self._holds.items()):
            topic = self._topics.by_id.get(topic_id)
            if topic is None or not _holds(topic) or now - hold.asked_micros >= self._hold_micros:
                del self._holds[topic_id]  # nobody publishes any more
            elif now - hold.since_micros >= self._hold_micros and self._exceeds(topic, now):
                self._look_at(topic, hold, owners, now)
        if self._adding is None:
            self._adding = self._add_up(owners)
        if next(self._adding, self) is self:
            self._adding = None

    def _bounded(self, topic: Topic, owners: Owners) -> list[Durable]:
        """The durables of a topic that publishers wait for, and that may not hold them for long, the slowest first."""
        passed_over = self.passed_over(topic)
        return [
            one
            for one in self._durables.of(topic)
            if (owner := owner_of(one.name)) not in passed_over and not owners.may_hold(owner, topic.name)
        ]

    def _exceeds(self, topic: Topic, now: int) -> bool:
        """True if publishers of a topic wait for durables that they have to wait for."""
        return exceeds(self._durables, topic, now, passed_over=self.passed_over(topic))

    def _look_at(self, topic: Topic, hold: _Hold, owners: Owners, now: int) -> None:
        """Acts on a hold whose time is over [1]."""
        bounded = self._bounded(topic, owners)
        if not bounded:
            return
        slowest = bounded[0]
        if _went_on(topic, slowest.entries - hold.entries, slowest.bytes - hold.bytes):
            self._holds[topic.id] = _Hold(now, hold.asked_micros, slowest.entries, slowest.bytes)
        else:
            del self._holds[topic.id]  # whoever is still held says so
            self._relieve(topic, bounded)

    def _look_at_distrusted(self, owners: Owners, now: int) -> None:
        """Ends the time of owners that are passed over, and bounds their durables meanwhile [2]."""
        left: dict[int, dict[str, int]] = {}
        for topic_id, untils in self._distrusted.items():
            topic = self._topics.by_id.get(topic_id)
            if topic is not None:
                left[topic_id] = {
                    one: until for one, until in untils.items() if until > now and not owners.may_hold(one, topic.name)
                }
        # In one step: publishers read it at the same time.
        self._distrusted = {topic_id: untils for topic_id, untils in left.items() if untils}
        for topic_id, untils in self._distrusted.items():
            topic = self._topics.by_id.get(topic_id)
            if topic is not None and _holds(topic) and exceeds(self._durables, topic, now):
                self._relieve(topic, [one for one in self._durables.of(topic) if owner_of(one.name) in untils])

    def _relieve(self, topic: Topic, chosen: Iterable[Durable]) -> None:
        names = frozenset([one.name for one in chosen])
        self._changes.submit_quietly(_relieve(topic, names)).then(partial(self._relieved, topic))

    def _relieved(self, topic: Topic, names: list[str] | StoreError) -> None:
        now = self._clock.now_micros()
        for name in [] if isinstance(names, StoreError) else names:
            self._losses.note("durable_held_publishers", topic, name, now)
            self._distrusted.setdefault(topic.id, {})[owner_of(name)] = now + DISTRUST_HOLDS * self._hold_micros
        self._tell(topic, names)

    def _add_up(self, owners: Owners) -> Iterator[None]:
        """Adds up what each owner keeps, some durables at a time, and restores the bounds in the end [3]."""
        kept: dict[str, dict[Topic, int]] = {}
        seen = 0
        for topic_id in self._durables.topic_ids():
            topic = self._topics.by_id.get(topic_id)
            slowest = None if topic is None else self._durables.slowest(topic)
            if topic is None or slowest is None or slowest.position >= topic.statistics.last_sequence:
                continue
            for durable in self._durables.of(topic):
                owner, size = owner_of(durable.name), topic.statistics.appended_bytes - durable.bytes
                of_owner = kept.setdefault(owner, {})
                if size > 0 and topic not in of_owner and not owners.may_hold(owner, topic.name):
                    of_owner[topic] = size  # the slowest comes first
                seen += 1
            if seen >= LOOK_DURABLES:
                seen = 0
                yield
        for owner, sizes in kept.items():
            limit = owners.backlog_bytes(owner)
            if limit is not None and sum(sizes.values()) > limit:
                self._restore(owner, sizes, level(sizes.values(), limit - limit // KEPT_PARTS))

    def _restore(self, owner: str, sizes: dict[Topic, int], bytes_max: int) -> None:
        for topic, size in sizes.items():
            if size > bytes_max:
                names = [one.name for one in self._durables.of(topic) if owner_of(one.name) == owner]
                self._changes.submit_quietly(_bound(topic, names, bytes_max)).then(partial(self._evicted, topic))

    def _evicted(self, topic: Topic, names: list[str] | StoreError) -> None:
        now = self._clock.now_micros()
        for name in [] if isinstance(names, StoreError) else names:
            self._losses.note("durable_beyond_backlog_bytes", topic, name, now)
        self._tell(topic, names)


class _Losses:
    """Logs the losses of an owner's durables on a topic: the first at once, the others once a minute as a number."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str, str], tuple[int, int, str]] = {}
        """The time of the last line, the losses since then, and the durable of the last loss, by event, topic and
        owner."""

    def note(self, event: str, topic: Topic, durable: str, now: int) -> None:
        """A durable has lost entries."""
        key = event, topic.name, owner_of(durable)
        if key in self._since:
            told, evictions, _ = self._since[key]
            self._since[key] = told, evictions + 1, durable
        else:
            self._tell(key, now, 1, durable)

    def flush(self, now: int) -> None:
        """Logs the numbers that are due."""
        for key, (told, evictions, durable) in list(self._since.items()):
            if now - told >= TOLD_MICROS:
                if evictions:
                    self._tell(key, now, evictions, durable)
                else:
                    del self._since[key]

    def _tell(self, key: tuple[str, str, str], now: int, evictions: int, durable: str) -> None:
        self._since[key] = now, 0, durable
        event, topic, _ = key
        log.warning(event, topic=topic, durable=durable, evictions=evictions)


def level(sizes: Collection[int], bytes_max: int) -> int:
    """The size to which the largest have to shrink, so that all together are at most `bytes_max`: the small ones keep
    what they have."""
    left = bytes_max
    for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if size * count > left:
            return left // count
        left -= size
    return max(sizes, default=0)


def _holds(topic: Topic) -> bool:
    settings = topic.settings
    return settings.has_quota and settings.backlog_action in (BacklogAction.HOLD, BacklogAction.REJECT)


def _went_on(topic: Topic, entries: int, size: int) -> bool:
    """True if so many acknowledged entries and bytes are enough of the quota."""
    number, bytes_max = topic.settings.backlog_quota_entries, topic.settings.backlog_quota_bytes
    if entries <= 0:
        return False
    if number is not None and entries < number // HOLD_PARTS:
        return False
    return bytes_max is None or size >= bytes_max // HOLD_PARTS


def _relieve(topic: Topic, names: frozenset[str]) -> Callable[[DurableEditor], list[str]]:
    return lambda durables: durables.relieve(topic, names)


def _bound(topic: Topic, names: Collection[str], bytes_max: int) -> Callable[[DurableEditor], list[str]]:
    return lambda durables: durables.bound(topic, names, bytes_max)
