"""Replicated durables between the consumers of this instance and its links (rules F14 to F16).

    [1]  A peer is told a position of its own journal: everything that it sent up to there has been acknowledged here.
         The marks of the acknowledged position say so (rule F6); where there are none, no position is told.
    [2]  A position that a peer tells is taken only up to the last commit here at or before the time up to which it has
         acknowledged expiries (rule F7).
    [3]  Where a durable begins anew or is deleted elsewhere, its consumer here is ended first, so that no late
         acknowledgement counts for the new one.

On the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import structlog

from sow_peering import DurableMark, DurablesPart, InstanceIdentity, MergeCounts
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.durables import Durable, DurableEditor, Merged, restarts_by
from sow_server.engine.durables.model import rewinds_of
from sow_server.engine.pending import Pending, answered
from sow_server.engine.values.clock import boot_micros
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.policies import check_durable_settings
from sow_server.subscriptions.durable.holders import Holder, Holders

log = structlog.get_logger(__name__)

STAMP_AHEAD_MICROS: Final = 24 * 3600 * MICROS
"""How far the number of a stamp of a peer may be ahead of the clock: the longest `max_clock_skew`. The next stamp here
is greater, so one from the end of time would leave none for this instance."""
WARNED_MAX: Final = 1000
"""Durables of which a mark that was left out is remembered, so that the log tells of each once."""


class ConsumersHere(Protocol):
    """The part of `Consumers` that replicated durables use."""

    @property
    def holders(self) -> Holders:
        """The places where durables have their consumers."""

    def check_new(self, topic: Topic, filter_text: str) -> None:
        """Raises StoreError if a durable of a topic cannot have this filter."""

    def end_here(self, topic: Topic, name: str, error: StoreError, *, for_good: bool) -> None:
        """Ends the consumer of a durable. `for_good`: none of its acknowledgements counts any more."""

    def is_stale(self, topic: Topic, name: str) -> bool:
        """True if another durable is by now in the place of the one to which the last consumer has attached."""

    def merge(self, run: Callable[[DurableEditor], list[Merged]]) -> Pending[list[Merged]]:
        """Changes durables in one commit. Raises StoreError."""

    def look_at(self, topic: Topic, name: str) -> None:
        """The deadlines of a durable may have changed, or its entries were acknowledged elsewhere."""

    def used_elsewhere(self, keys: Collection[tuple[int, str]]) -> None:
        """These durables had a consumer elsewhere until now."""


class ReplicatedDurables:
    """Tells peers of durables, and takes over what they tell."""

    def __init__(
        self,
        consumers: ConsumersHere,
        reads: Reads,
        writes: Writes,
        *,
        elapsed: Callable[[], int] = boot_micros,
    ) -> None:
        self._consumers = consumers
        self._holders = consumers.holders
        self._topics = reads.topics
        self._durables = reads.durables
        self._commits = writes.commits
        self._cuts = reads.cuts
        self._clock = reads.clock
        self._marks = writes.replicas.marks
        self._elapsed = elapsed
        self._warned: dict[tuple[str, int, str], None] = {}
        self._sampled = 0
        """The version at the last sample."""

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called whenever peers should be told at once."""
        self._holders.wake = wake

    # -- telling ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Changes whenever peers should be told at once."""
        return self._holders.version

    def told(
        self, peer: InstanceIdentity, names: Collection[str], *, after: int, also: Collection[tuple[str, str]]
    ) -> DurablesPart:
        """The replicated durables of topics that have changed, as they are for a peer (`SendingDurables.durables`)."""
        # Also without durables: a new one needs a sample of before it. At once where a consumer has gone: the position
        # where it has ended is the one at which the next one begins.
        self._marks.sample(self._elapsed(), at_once=self._sampled != self.version)
        self._sampled = self.version
        with self._commits.cut_lock:
            upto, changed = self._durables.changes, self._durables.changed_after(after)
        by_name, by_id = self._topics.by_name, self._topics.by_id
        keys = dict.fromkeys(changed)
        keys.update(dict.fromkeys([(by_name[topic].id, name) for topic, name in also if topic in by_name]))
        is_for: dict[int, bool] = {}
        marks: list[DurableMark] = []
        for topic_id, name in keys:
            topic = by_id.get(topic_id)
            if topic is None:
                continue
            if topic_id not in is_for:
                is_for[topic_id] = topic.name in names and peer.name in self._marks.whole([topic])
            durable = self._durables.get(topic_id, name)
            if not is_for[topic_id]:
                continue
            if durable is None:
                buried = self._durables.buried(topic_id, name)
                if buried is not None:
                    marks.append(DurableMark(topic.name, name, buried=buried, removed=True))
            elif durable.replicated:
                marks.append(self._mark(topic, durable, peer))
        return DurablesPart(marks, upto)

    def _mark(self, topic: Topic, durable: Durable, peer: InstanceIdentity) -> DurableMark:
        key = topic.id, durable.name
        holder = self._holders.here(key)
        # The version is that of now: a sample from before the peer began to send the topic whole has an earlier one.
        found = self._marks.at(durable.consumed, (peer.name,), self._marks.version)
        sequence, swept = None, 0
        for epoch, reached in () if found is None else found.sources:
            if found is not None and epoch == peer.epoch:  # another one is that of data which the peer has lost
                sequence, swept = reached, found.swept_micros
        in_use = holder is not None or self._holders.elsewhere(key) is not None
        idle = 0 if in_use else max(0, self._clock.now_micros() - durable.last_use_micros)
        return DurableMark(
            topic.name,
            durable.name,
            durable.filter,
            durable.declared,  # type: ignore[arg-type]  # its values are numbers, flags and None
            durable.born,
            durable.buried,
            rewinds=durable.rewinds,
            sequence=sequence,
            swept_micros=swept,
            idle_micros=idle,
            consumer_since=0 if holder is None else holder.since_micros,
            forced=holder is not None and holder.forced,
        )

    # -- taking over ------------------------------------------------------------------------------------------------

    def take(self, peer: str, marks: Sequence[DurableMark]) -> Pending[MergeCounts]:
        """Takes over what a peer tells. Raises StoreError."""
        taken: list[tuple[Topic, DurableMark, int | None]] = []
        swept: dict[int, int] = {}
        for mark in marks:
            topic = self._topics.by_name.get(mark.topic)
            if topic is None or topic.reserved or not topic.settings.journal or not self._is_sound(peer, topic, mark):
                continue
            self._hear(peer, topic, mark)
            taken.append((topic, mark, self._position(mark, swept)))

        def merge(durables: DurableEditor) -> list[Merged]:
            return [
                durables.merge(topic, mark, position) if self._topics.by_id.get(topic.id) is topic else Merged.NOTHING
                for topic, mark, position in taken
            ]

        def merged(outcomes: list[Merged]) -> MergeCounts:
            for (topic, mark, _), outcome in zip(taken, outcomes, strict=True):
                self._tell_outcome(peer, topic, mark, outcome)
            return MergeCounts()

        return self._consumers.merge(merge).map(merged) if taken else answered(MergeCounts())

    def left(self, peer: str) -> None:
        """Nothing is known of the consumers at a peer."""
        self._consumers.used_elsewhere(self._holders.left(peer))

    def _is_sound(self, peer: str, topic: Topic, mark: DurableMark) -> bool:
        latest = self._clock.now_micros() + STAMP_AHEAD_MICROS
        if max(mark.born.number, mark.buried.number, *[stamp.number for stamp in mark.rewinds]) > latest:
            self._warn(peer, topic, mark.name, "a time of it is too far ahead")
            return False
        if rewinds_of(mark.rewinds) != mark.rewinds:
            self._warn(peer, topic, mark.name, "its rewinds are out of order, or too many")
            return False
        known = self._durables.get(topic.id, mark.name)
        if mark.removed or (known is not None and (known.filter, known.born) == (mark.filter, mark.born)):
            return True
        try:
            check_durable_settings(mark.declared)
            self._consumers.check_new(topic, mark.filter)
        except StoreError as error:
            self._warn(peer, topic, mark.name, error.message)
            return False
        return True

    def _hear(self, peer: str, topic: Topic, mark: DurableMark) -> None:
        """Ends the consumer here where the durable begins anew, or another consumer counts."""
        key = topic.id, mark.name
        known = self._durables.get(*key)
        if known is None or not known.replicated:
            if known is None:
                self._holders.heard(key, _holder(peer, mark), peer)
            return
        stays = self._holders.heard(key, _holder(peer, mark), peer)
        if stays is not None and stays.forced:
            where = f"was taken over by a consumer at {peer}"
            self._end(topic, mark.name, Reason.DURABLE_TAKEN_OVER, where, for_good=True)
        elif stays is not None:
            where = f"has a consumer at {peer}, which came first"
            self._end(topic, mark.name, Reason.DURABLE_IN_USE, where, for_good=False)
        if mark.buried >= known.born:
            self._end(topic, mark.name, Reason.DURABLE_DETACHED, f"has been deleted at {peer}", for_good=True)
        elif not mark.removed and restarts_by(known, mark):
            self._end(topic, mark.name, Reason.DURABLE_DETACHED, f"has been rewound at {peer}", for_good=True)

    def _end(self, topic: Topic, name: str, reason: Reason, what: str, *, for_good: bool) -> None:
        error = StoreError(reason, f"durable: {name} of {topic.name} {what}", field="durable")
        self._consumers.end_here(topic, name, error, for_good=for_good)

    def _position(self, mark: DurableMark, swept: dict[int, int]) -> int | None:
        """The position here up to which everything was acknowledged ([2]); None: it is not known. `swept`: the commits
        that were looked up before, by their times."""
        if mark.sequence is None:
            return None
        last = self._commits.last_sequence
        if mark.swept_micros not in swept:
            cut = self._cuts.journal()
            try:
                swept[mark.swept_micros] = cut.last_upto(mark.swept_micros, last)
            finally:
                cut.close()
        return min(mark.sequence, swept[mark.swept_micros], last)

    def _tell_outcome(self, peer: str, topic: Topic, mark: DurableMark, outcome: Merged) -> None:
        name = mark.name
        if outcome is Merged.NOTHING:
            return
        if outcome is Merged.DIFFERS:
            self._warn(peer, topic, name, "here, a durable of this name has another filter, or is not replicated")
            return
        if outcome is not Merged.MOVED:
            if self._consumers.is_stale(topic, name):  # it has attached while the mark waited for its commit
                what = f"has been replaced by that of {peer}"
                self._end(topic, name, Reason.DURABLE_DETACHED, what, for_good=True)
            log.info("durable_of_peer_taken", topic=topic.name, durable=name, peer=peer, outcome=outcome.name.lower())
            self._holders.changed()  # others hear of it from here
        self._consumers.look_at(topic, name)

    def _warn(self, peer: str, topic: Topic, name: str, cause: str) -> None:
        key = peer, topic.id, name
        if key not in self._warned:
            if len(self._warned) >= WARNED_MAX:
                del self._warned[next(iter(self._warned))]
            self._warned[key] = None
            log.warning("durable_of_peer_left_out", peer=peer, topic=topic.name, durable=name, cause=cause)


def _holder(peer: str, mark: DurableMark) -> Holder | None:
    return Holder(mark.consumer_since, peer, mark.forced) if mark.consumer_since else None
