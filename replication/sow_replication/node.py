"""All links of an instance: dialling, accepting, purging of tombstones, and REPLICATED.

    [1]  There is at most one link per peer and one per source. A new link of the same sender replaces the old one.
    [2]  A tombstone is purged early once every peer has it and then every source's journal has been read up to a head
         that the source had when it had the tombstone itself. So each source has to be a peer for the same topics. Any
         later change from it is newer than the tombstone. A source that is not a peer may still get an older version
         from a third instance and hand it on: with such a source, tombstones are purged by age only (rule R4). The same
         holds while an accepted source has never come: to an instance that has lost its data every source is new; and
         while there are no links, because they may have been removed and come back (rule R14).
    [3]  A tombstone that is purged by age leaves a mark at every peer that has not acknowledged it (`missed`), and at
         every source for which [2] does not hold (`wait_for`), for the time when they come back.
    [4]  No tombstone is purged while a peer has to be heard first (RESEED_PENDING): this instance may have lost its
         data, so that the peer is not yet a source and will bring records that have been deleted here since.
    [5]  REPLICATED is answered as `gates` says, whenever a peer has made progress or its state has changed.
    [6]  `add`, `remove`, `pause` and `resume` change the links while others run (rule R14). A removed peer is asked
         for nothing and waited for by nothing from then on; a paused sync peer counts as downgraded.

Not safe for threads: all calls come on one. The driver calls `due` and dials, `accept` for a stream that comes, `tick`
about once a second, and `wake` after durable commits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from sow.v1 import replication_pb2, types_pb2
from sow_peering import InstanceIdentity, MergeCounts
from sow_peering.answers import Answer
from sow_replication.backoff import OPERATORS
from sow_replication.gates import Gates
from sow_replication.greeting import Decision, Known, Wait, decide, not_itself
from sow_replication.link_states import Incoming, Outgoing, Trouble
from sow_replication.options import Mode, NodeOptions, PeerOptions
from sow_replication.ports import ANY_CALLER, PeerCaller, Refused, Store
from sow_replication.receiver import Receiver
from sow_replication.sender import Sender

PAUSED: Final = 2**62
"""The time of the next dial of a paused peer: never."""

_UP: Final = ("seeding", "streaming")
"""States of a link on which changes flow."""


class Node:
    """Replication of one instance, without I/O."""

    def __init__(self, store: Store, options: NodeOptions, draw: random.Random) -> None:
        self.store: Final = store
        self.options: Final = options
        self._draw: Final = draw
        self.commanded: Final = set(options.commanded)
        """Names that were added by command."""
        now = store.now_micros()
        self.outgoing: Final = {peer.name: Outgoing(peer, options, draw, now) for peer in options.peers}
        names = dict.fromkeys((*self.outgoing, *options.accept))
        self.incoming: Final = {name: Incoming(name) for name in names}
        self.probe = 0
        self._started_at = now
        self._candidate: tuple[int, int] | None = None
        """A sequence up to which every peer has all tombstones, and the first probe sent after that."""
        self._purging = False
        self._purge_trouble: Final = Trouble()
        self._aged_at = 0
        self._gates = Gates(store, options, self.outgoing, self.settled)
        self._receivers: set[Receiver] = set()
        """All receivers that have not ended, also those whose sender is not yet known."""
        self.observe: Callable[[str, dict[str, object]], None] = lambda event, fields: None
        """Gets the events for the log."""

    # -- sending links ----------------------------------------------------------------------------------------------

    def due(self) -> list[Outgoing]:
        """The peers to dial now."""
        now = self.store.now_micros()
        return [out for out in self.outgoing.values() if out.sender is None and out.next_at_micros <= now]

    def dialled(self, out: Outgoing) -> Sender:
        """Makes the machine for a stream to a peer."""
        assert out.sender is None, "it has a link"
        out.enter("greeting", self.store.now_micros())
        out.sender = Sender(self.store, out.peer, self.options, accepted=self._accepted, progressed=self._progressed)
        return out.sender

    def closed(self, sender: Sender) -> None:
        """A link that this instance dialled has ended: `sender.failure` is the reason."""
        out = self.outgoing.get(sender.peer.name)
        why = sender.failure
        assert why is not None, "it has ended"
        if out is None or out.sender is not sender:
            return
        now = self.store.now_micros()
        if sender.identity is not None:
            out.lacking = sender.link_topics.lacking()
            # A link that ends each time before any progress (its first changes are refused, say) is no success.
            if sender.advanced or now - sender.since_micros >= self.options.backoff_max_micros:
                out.backoff.succeeded()
        out.sender = None
        if why.reason == types_pb2.ERROR_REASON_RESEED_PENDING:
            out.gives_first = True
        if out.paused:
            return
        told = out.trouble.is_like(why)
        out.trouble.happened(why, now)
        out.next_at_micros = now + out.backoff.failed(why.reason)
        out.enter("refused" if why.reason in OPERATORS else "waiting", now)
        if not told:
            self.observe("link_closed", {"peer": out.peer.name, "reason": why.reason, "message": why.message})

    # -- changes of the links ([6]) ---------------------------------------------------------------------------------

    def add(self, peer: PeerOptions) -> Outgoing:
        """Sends to another instance from now on, and accepts links from it. The store knows it already. In the place of
        a peer of that name: its link is made anew."""
        self.accept_from(peer.name)
        before = self.outgoing.get(peer.name)
        if before is not None and before.sender is not None:
            before.sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, f"{peer.name} has other settings now"))
        out = self.outgoing[peer.name] = Outgoing(peer, self.options, self._draw, self.store.now_micros())
        self._candidate = None  # chosen without regard to it
        return out

    def accept_from(self, name: str) -> None:
        """Accepts links from another instance from now on."""
        self.commanded.add(name)
        self.incoming.setdefault(name, Incoming(name))

    def remove(self, name: str) -> None:
        """Ends the links with an instance, in both directions. The store forgets it next, so that nothing of it that is
        under way comes after."""
        why = Refused(types_pb2.ERROR_REASON_UNSPECIFIED, f"{name} was removed by command")
        self.commanded.discard(name)
        out = self.outgoing.pop(name, None)
        incoming = self.incoming.pop(name, None)
        if out is not None and out.sender is not None:
            out.sender.fail(why)
        for receiver in list(self._receivers):
            if receiver.identity is not None and receiver.identity.name == name:
                receiver.fail(why)
        if incoming is not None and incoming.live is not None:
            incoming.live.fail(why)
        self._gates.answer()

    def pause(self, name: str) -> None:
        """Ends the link to a peer, and does not dial it. Its journal is held as if it were away (rule R9)."""
        out = self.outgoing[name]
        now = self.store.now_micros()
        out.paused = True
        out.next_at_micros = PAUSED
        if out.sender is not None:
            out.sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, f"{name} is paused"))
        out.trouble.passed()
        out.enter("paused", now)
        self._look_at(out, now)

    def resume(self, name: str) -> None:
        """Dials a paused peer again."""
        out = self.outgoing[name]
        if out.paused:
            out.paused = False
            out.next_at_micros = out.healthy_at_micros = self.store.now_micros()
            out.enter("connecting", out.next_at_micros)

    def _accepted(self, sender: Sender, identity: InstanceIdentity) -> Refused | None:
        objection = not_itself(self.store.identity, identity)
        if objection is not None:
            return objection
        if identity.name != sender.peer.name:
            return Refused(
                types_pb2.ERROR_REASON_PEER_NOT_FOUND,
                f"{sender.peer.address}: the instance there is {identity.name}, not {sender.peer.name}",
            )
        return None

    def _progressed(self, sender: Sender) -> None:
        out = self.outgoing.get(sender.peer.name)
        if out is None or out.sender is not sender or not sender.streaming:
            return
        now = self.store.now_micros()
        if out.state not in _UP:
            self.observe("link_opened", {"peer": out.peer.name})
        if out.trouble.message:
            out.trouble.passed()
        out.gives_first = False
        out.refusals = sender.link_topics.refusals()
        out.enter("seeding" if sender.link_topics.seeding else "streaming", now)
        self._look_at(out, now)
        self._gates.answer()

    def _look_at(self, out: Outgoing, now: int) -> None:
        """Updates lag and health (rule R8)."""
        head = self.store.head()
        settled = self.settled(out)
        if settled >= head:
            out.behind_since_micros = 0
        elif not out.behind_since_micros:
            out.behind_since_micros = now
        sender = out.sender
        keeps_up = self._keeps_up(out, settled, head, now)
        if sender is not None and sender.streaming:
            if keeps_up:
                out.healthy_at_micros = now
                if out.downgraded:
                    out.downgraded = False
                    self.observe("peer_upgraded", {"peer": out.peer.name})
            else:
                out.healthy_at_micros = max(out.healthy_at_micros, sender.progress_at_micros)
        if (
            out.peer.mode is Mode.SYNC
            and not out.downgraded
            and (out.paused or now - out.healthy_at_micros >= self.options.sync_timeout_micros)
        ):
            out.downgraded = True
            self.observe("peer_downgraded", {"peer": out.peer.name})
            self._gates.answer()

    def _keeps_up(self, out: Outgoing, settled: int, head: int, now: int) -> bool:
        """True if a peer has everything, or everything of a moment ago: under steady writes some changes are always
        under way."""
        keeps_up = settled >= head
        if out.asked is not None and settled >= out.asked[1]:
            keeps_up = keeps_up or now - out.asked[0] <= self.options.heartbeat_micros
            out.asked = None
        if out.asked is None:
            out.asked = (now, head)
        return keeps_up

    def settled(self, out: Outgoing) -> int:
        """The peer has everything of its link up to this sequence."""
        remembered = self.store.peer(out.peer.name).acknowledged
        return max(remembered, out.sender.settled) if out.sender is not None else remembered

    # -- receiving links --------------------------------------------------------------------------------------------

    def accept(self, caller: PeerCaller = ANY_CALLER) -> Receiver:
        """Makes the machine for a stream that has come."""
        receiver = Receiver(self.store, self.options, self, caller)
        self._receivers.add(receiver)
        return receiver

    def greeted(self, receiver: Receiver, hello: replication_pb2.Hello) -> Decision:
        """See `receiver.Home`."""
        name = hello.instance.name
        incoming = self.incoming.get(name)
        live = None if incoming is None else incoming.live
        decision = decide(
            hello,
            Known(
                own=self.store.identity,
                accepted=incoming is not None and receiver.caller.is_named(name),
                live=None if live is None else live.identity,
                row=self.store.source(name),
                disabled=self.store.disabled.get(name, ""),
                sends=self.store.peer(name) if self._mutual(name, hello.topics_pattern) else None,
                head=self.store.head(),
                cluster=self.store.cluster,
            ),
        )
        if incoming is None:
            return decision
        if isinstance(decision, Refused):
            if not incoming.trouble.is_like(decision):
                self.observe("link_refused", {"peer": name, "reason": decision.reason, "message": decision.message})
            incoming.trouble.happened(decision, self.store.now_micros())
        elif not isinstance(decision, Wait):
            incoming.live = receiver
            incoming.trouble.passed()
            incoming.covers.clear()
            out = self.outgoing.get(name)
            if out is not None and out.state == "refused":
                out.next_at_micros = self.store.now_micros()  # it may have been given this one's name just now
            if live is not None:
                live.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, f"{name} has opened another link"))
        return decision

    def _mutual(self, name: str, pattern: str) -> bool:
        """True if this instance sends back to a source everything that the source sends."""
        out = self.outgoing.get(name)
        return out is not None and not out.peer.filter and out.peer.topics in (pattern, ".*")

    def advanced(self, receiver: Receiver, result: MergeCounts) -> None:
        """See `receiver.Home`."""
        incoming = self._incoming_of(receiver)
        if incoming is not None:
            incoming.applied += result.applied
            incoming.superseded += result.superseded
            incoming.dropped += result.dropped
            incoming.rows_refused += result.refused

    def ended(self, receiver: Receiver) -> None:
        """See `receiver.Home`."""
        self._receivers.discard(receiver)
        incoming = self._incoming_of(receiver)
        if incoming is not None:
            self._note(incoming, receiver)
            incoming.live = None
            if receiver.failure is not None:
                incoming.trouble.happened(receiver.failure, self.store.now_micros())
        elif receiver.identity is None and receiver.caller.name is not None and receiver.failure is not None:
            # It has not come as far as its Hello; its credential says which instance it is.
            proved = self.incoming.get(receiver.caller.name)
            if proved is not None and proved.live is None and not proved.trouble.message:
                proved.trouble.happened(receiver.failure, self.store.now_micros())

    def _incoming_of(self, receiver: Receiver) -> Incoming | None:
        if receiver.identity is None:
            return None
        incoming = self.incoming.get(receiver.identity.name)
        return incoming if incoming is not None and incoming.live is receiver else None

    def _note(self, incoming: Incoming, receiver: Receiver) -> None:
        incoming.head = receiver.head
        if receiver.streaming:
            incoming.refusals = receiver.refusals()
        incoming.skew_micros = receiver.skew.micros
        probe = receiver.satisfied_probe
        if probe <= incoming.satisfied_probe:
            return
        incoming.satisfied_probe = probe
        while incoming.covers and incoming.covers[0][0] < probe:
            incoming.covers.popleft()
        if incoming.covers and incoming.covers[0][0] == probe:
            incoming.read_time = max(incoming.read_time, incoming.covers.popleft()[1])

    # -- time -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """To be called after durable commits."""
        for out in self.outgoing.values():
            if out.sender is not None:
                out.sender.wake()

    def tick(self) -> None:
        """Checks the clock; to be called about once a second."""
        now = self.store.now_micros()
        for out in self.outgoing.values():
            if out.sender is not None:
                self._look_after(out.sender)
            self._look_at(out, now)
            self._mark(out, now)
        for receiver in list(self._receivers):
            self._look_after(receiver)
        for incoming in self.incoming.values():
            if incoming.live is not None:
                self._note(incoming, incoming.live)
        self._gates.answer()
        self._purge(now)

    def _look_after(self, machine: Sender | Receiver) -> None:
        """Ticks a machine. If that fails, its link ends, and the other links go on."""
        try:
            machine.tick()
        except Exception as error:  # noqa: BLE001  # logged with its traceback; the link ends
            why = Refused(types_pb2.ERROR_REASON_INTERNAL, f"{type(error).__name__}: {error}")
            self.observe("tick_failed", {"reason": why.reason, "message": why.message, "exc_info": error})
            machine.fail(why)

    def lagging(self, name: str) -> bool:
        """Whether, as far as known, changes are under way between this instance and a peer, in either direction."""
        out, incoming = self.outgoing.get(name), self.incoming.get(name)
        if out is None or incoming is None:
            return False  # it was removed meanwhile
        live = incoming.live
        return self.settled(out) < self.store.head() or (live is not None and live.cursor < live.head)

    # -- tombstones -------------------------------------------------------------------------------------------------

    def _mark(self, out: Outgoing, now: int) -> None:
        if out.mark is not None and self.store.peer(out.peer.name).acknowledged >= out.mark[1]:
            out.acknowledged_time = out.mark[0]
            out.mark = None
        if out.mark is None:
            out.mark = (now, self.store.head())

    def _purge(self, now: int) -> None:
        sources = [incoming for incoming in self.incoming.values() if self._is_source(incoming.name)]
        self._round(sources, now)
        if self._purging or self._candidate is None or any(out.gives_first for out in self.outgoing.values()):
            return
        made_before = now - self.options.tombstone_grace_micros
        unread = [incoming.name for incoming in sources if incoming.read_time < made_before]
        upto, probe = self._candidate
        if all(incoming.satisfied_probe >= probe for incoming in sources):
            self._candidate = None
            mutual = all(self._is_mutual(incoming.name) for incoming in sources)
            if not mutual or self._strangers() or self._unseen(sources) or not self.incoming:
                upto = 0
        elif now - self._aged_at >= min(self.options.tombstone_grace_micros // 10, 10 * self.options.heartbeat_micros):
            upto = 0
        else:
            return
        if unread and now - self._started_at < self.options.settle_micros:
            made_before = 0  # they may come soon
            unread = []
        self._aged_at = now
        refusals = [*(out.refusals for out in self.outgoing.values()), *(incoming.refusals for incoming in sources)]
        held = frozenset(name for names in refusals for name in names or ())
        self._call_purge(upto, held, made_before, unread)

    def _strangers(self) -> bool:
        """True if an accepted source that is not a peer has never come to these data ([2]). A peer that has not come
        has the tombstone, so it has nothing older to seed."""
        return any(name not in self.outgoing and not self._is_source(name) for name in self.incoming)

    def _unseen(self, sources: list[Incoming]) -> bool:
        """True if the refusals of a peer or source are not yet known."""
        return any(out.refusals is None for out in self.outgoing.values()) or any(
            incoming.refusals is None for incoming in sources
        )

    def _call_purge(self, upto: int, held: frozenset[str], made_before: int, unread: list[str]) -> None:
        self._purging = True

        def purged(result: MergeCounts | Refused) -> None:
            self._purging = False
            if isinstance(result, Refused):
                if not self._purge_trouble.is_like(result):
                    self.observe("purge_failed", {"reason": result.reason, "message": result.message})
                self._purge_trouble.happened(result, self.store.now_micros())
                return
            self._purge_trouble.passed()
            if result.applied:
                for out in self.outgoing.values():
                    if out.sender is not None:
                        out.sender.missed_more()
                self._call_purge(upto, held, made_before, unread)

        self.store.purge(upto, held=held, made_before_micros=made_before, unread=unread).then(purged)

    def _round(self, sources: list[Incoming], now: int) -> None:
        """Starts a new probe, and keeps the acknowledgements of before it."""
        acknowledged = [self.store.peer(name).acknowledged for name in self.outgoing]
        self.probe = max(now, self.probe + 1)
        if self._candidate is None:
            self._candidate = (min(acknowledged, default=self.store.head()), self.probe)
        for incoming in sources:
            if incoming.live is not None:
                out = self.outgoing.get(incoming.name)
                mutual = out is not None and self._is_mutual(incoming.name)
                time = out.acknowledged_time if out is not None and mutual else now
                incoming.covers.append((self.probe, time))
                incoming.live.wake()

    def _is_source(self, name: str) -> bool:
        return self.store.source(name) is not None

    def _is_mutual(self, name: str) -> bool:
        source = self.store.source(name)
        return source is not None and self._mutual(name, source.topics)

    # -- REPLICATED -------------------------------------------------------------------------------------------------

    def replicated(self, topic: str, sequence: int) -> Answer[None, Refused]:
        """Answered once the sync peers have the sequence ([5])."""
        return self._gates.replicated(topic, sequence)

    def sync_peers(self, topic: str) -> int:
        """The number of sync peers that are configured for the topic."""
        return self._gates.sync_peers(topic)
