"""The writes that wait for sync peers (REPLICATED; rules R8, P5).

[1]  A write is answered once every sync peer that covers its topic and is not downgraded has its sequence. It is
     refused when fewer than `min_sync_peers` are left.
[2]  Writes are answered in the order of their sequences, topic by topic.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping

from sow.v1 import types_pb2
from sow_peering.answers import Answer
from sow_replication.link_states import Outgoing
from sow_replication.options import Mode, NodeOptions
from sow_replication.ports import Refused, Store


class Gates:
    """Owns the writes that wait."""

    def __init__(
        self,
        store: Store,
        options: NodeOptions,
        outgoing: Mapping[str, Outgoing],
        settled: Callable[[Outgoing], int],
    ) -> None:
        """`outgoing`: the peers, by name, at any moment. `settled`: up to where a peer has everything of its link."""
        self._store = store
        self._options = options
        self._outgoing = outgoing
        self._settled = settled
        self._waiting: dict[str, list[tuple[int, int, Answer[None, Refused]]]] = {}
        """The waiting writes of each topic, in a heap by sequence, because there may be very many."""
        self._made = itertools.count()

    def replicated(self, topic: str, sequence: int) -> Answer[None, Refused]:
        """Answered once the sync peers have the sequence [1]."""
        gate: Answer[None, Refused] = Answer()
        heapq.heappush(self._waiting.setdefault(topic, []), (sequence, next(self._made), gate))
        self._answer_of(topic)
        return gate

    def sync_peers(self, topic: str) -> int:
        """The number of sync peers that are configured for the topic."""
        return len(self._sync(topic))

    def answer(self) -> None:
        """Answers the writes that need not wait any more: a peer has made progress, or is in another state."""
        for topic in list(self._waiting):
            self._answer_of(topic)

    def _sync(self, topic: str) -> list[Outgoing]:
        sync = [out for out in self._outgoing.values() if out.peer.mode is Mode.SYNC]
        return [out for out in sync if self._store.shares(out.peer.topics, topic)]

    def _answer_of(self, topic: str) -> None:
        gates = self._waiting[topic]
        counted = [out for out in self._sync(topic) if not out.downgraded and self._takes(out, topic)]
        reached = [self._reached(out, topic) for out in counted]
        wanted = max(self._options.min_sync_peers, 1)
        while gates and (len(counted) < wanted or gates[0][0] <= min(reached)):
            sequence, _, gate = heapq.heappop(gates)
            if len(counted) >= wanted:
                gate.settle(None)
                continue
            have = sum(sequence <= upto for upto in reached)
            gate.settle(
                Refused(
                    types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE,
                    f"the write is stored here; {have} of {wanted} required sync peers have it",
                )
            )
        if not gates:
            del self._waiting[topic]

    def _takes(self, out: Outgoing, topic: str) -> bool:
        """False if the peer refuses the topic."""
        return out.sender is None or not out.sender.link_topics.refused(topic)

    def _reached(self, out: Outgoing, topic: str) -> int:
        """The sequence up to which the peer has a topic."""
        # The acknowledged sequence does not cover topics that the peer refuses, nor those that are being seeded.
        if out.sender is not None and out.sender.identity is not None:
            has_topic = out.sender.link_topics.is_seeded(topic)
        else:
            has_topic = out.lacking is not None and topic not in out.lacking
        return self._settled(out) if has_topic else 0
