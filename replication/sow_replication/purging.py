"""Purging the tombstones of an instance, once no older version of their records can come any more (rule R4).

[1]  A tombstone is purged early once every peer has it and then every source's journal has been read up to a head
     that the source had when it had the tombstone itself. So each source has to be a peer for the same topics. Any
     later change from it is newer than the tombstone. A source that is not a peer may still get an older version
     from a third instance and hand it on: with such a source, tombstones are purged by age only. The same holds
     while an accepted source has never come: to an instance that has lost its data every source is new; and while
     there are no links, because they may have been removed and come back (rule R14).
[2]  A tombstone that is purged by age leaves a mark at every peer that has not acknowledged it (`missed`), and at
     every source for which [1] does not hold (`wait_for`), for the time when they come back.
[3]  No tombstone is purged while a peer has to be heard first (RESEED_PENDING): this instance may have lost its
     data, so that the peer is not yet a source and will bring records that have been deleted here since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sow_peering import MergeCounts
from sow_replication.link_states import Incoming, Outgoing, Trouble
from sow_replication.options import NodeOptions
from sow_replication.ports import Refused, Store


class TombstonePurge:
    """Owns what is known of the tombstones that may go. Not safe for threads, as the node."""

    def __init__(
        self,
        store: Store,
        options: NodeOptions,
        outgoing: Mapping[str, Outgoing],
        incoming: Mapping[str, Incoming],
        observe: Callable[[str, dict[str, object]], None],
    ) -> None:
        """`outgoing`, `incoming`: the peers and the sources, by name, at any moment. `observe`: as that of the node."""
        self._store = store
        self._options = options
        self._outgoing = outgoing
        self._incoming = incoming
        self._observe = observe
        self._started_at = store.now_micros()
        self._candidate: tuple[int, int] | None = None
        """A sequence up to which every peer has all tombstones, and the first probe sent after that."""
        self._running = False
        self._trouble = Trouble()
        self._aged_at = 0

    def peer_added(self) -> None:
        """The candidate was chosen without regard to a peer that is there now."""
        self._candidate = None

    def tick(self, now: int, probe: int) -> None:
        """Sends a probe to the sources, and purges the tombstones that may go."""
        sources = [one for one in self._incoming.values() if self._store.source(one.name) is not None]
        self._begin_round(sources, now, probe)
        if self._running or self._candidate is None or any(out.gives_first for out in self._outgoing.values()):
            return
        made_before = now - self._options.tombstone_grace_micros
        unread = [incoming.name for incoming in sources if incoming.read_time < made_before]
        upto, first_probe = self._candidate
        if all(incoming.satisfied_probe >= first_probe for incoming in sources):
            self._candidate = None
            mutual = all(self._is_mutual(incoming.name) for incoming in sources)
            if not mutual or self._awaits_a_source() or self._lacks_refusals(sources) or not self._incoming:
                upto = 0
        elif now - self._aged_at >= min(
            self._options.tombstone_grace_micros // 10, 10 * self._options.heartbeat_micros
        ):
            upto = 0
        else:
            return
        if unread and now - self._started_at < self._options.settle_micros:
            made_before = 0  # they may come soon
            unread = []
        self._aged_at = now
        refusals = [*(out.refusals for out in self._outgoing.values()), *(incoming.refusals for incoming in sources)]
        held = frozenset(name for names in refusals for name in names or ())
        self._run(upto, held, made_before, unread)

    def _begin_round(self, sources: Sequence[Incoming], now: int, probe: int) -> None:
        """Sends a probe, and keeps the acknowledgements of before it."""
        acknowledged = [self._store.peer(name).acknowledged for name in self._outgoing]
        if self._candidate is None:
            self._candidate = (min(acknowledged, default=self._store.head()), probe)
        for incoming in sources:
            if incoming.live is not None:
                out = self._outgoing.get(incoming.name)
                mutual = out is not None and self._is_mutual(incoming.name)
                time = out.acknowledged_time if out is not None and mutual else now
                incoming.covers.append((probe, time))
                incoming.live.wake()

    def _is_mutual(self, name: str) -> bool:
        """True if a source is a peer for the same topics ([1])."""
        source, out = self._store.source(name), self._outgoing.get(name)
        return source is not None and out is not None and out.sends_all(source.topics)

    def _awaits_a_source(self) -> bool:
        """True if an accepted source that is not a peer has never come to these data ([1]). A peer that has not come
        has the tombstone, so it has nothing older to seed."""
        return any(name not in self._outgoing and self._store.source(name) is None for name in self._incoming)

    def _lacks_refusals(self, sources: Sequence[Incoming]) -> bool:
        """True if the refusals of a peer or source are not yet known."""
        return any(out.refusals is None for out in self._outgoing.values()) or any(
            incoming.refusals is None for incoming in sources
        )

    def _run(self, upto: int, held: frozenset[str], made_before: int, unread: Sequence[str]) -> None:
        self._running = True

        def purged(result: MergeCounts | Refused) -> None:
            self._running = False
            if isinstance(result, Refused):
                if not self._trouble.is_like(result):
                    self._observe("purge_failed", {"reason": result.reason, "message": result.message})
                self._trouble.happened(result, self._store.now_micros())
                return
            self._trouble.passed()
            if result.applied:
                for out in self._outgoing.values():
                    if out.sender is not None:
                        out.sender.missed_more()
                self._run(upto, held, made_before, unread)

        self._store.purge(upto, held=held, made_before_micros=made_before, unread=unread).then(purged)
