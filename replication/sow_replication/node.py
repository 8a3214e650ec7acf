"""All links of an instance: it dials and accepts them, and drives `gates` and `purging`.

    [1]  There is at most one link per peer and one per source. A new link of the same sender replaces the old one.
    [2]  REPLICATED is answered as `gates` says, whenever a peer has made progress or its state has changed.
    [3]  `add`, `remove`, `pause` and `resume` change the links while others run (rule R14). A removed peer is asked
         for nothing and waited for by nothing from then on; a paused sync peer counts as downgraded.

Not safe for threads: all calls come on one. The driver calls `due` and dials, `accept` for a stream that comes, `tick`
about once a second, and `wake` after durable commits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

from sow.v1 import replication_pb2, types_pb2
from sow_peering import InstanceIdentity, MergeCounts
from sow_replication.backoff import OPERATORS
from sow_replication.gates import Gates
from sow_replication.greeting import Decision, Known, Wait, decide, not_itself
from sow_replication.link_states import Incoming, Outgoing
from sow_replication.link_topics import TopicState
from sow_replication.options import Mode, NodeOptions, PeerOptions
from sow_replication.ports import ANY_CALLER, PeerCaller, Refused, Store
from sow_replication.purging import TombstonePurge
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
        self.gates: Final = Gates(store, options, self.outgoing, self.settled)
        self._purge: Final = TombstonePurge(store, options, self.outgoing, self.incoming, self._observed)
        self._receivers: set[Receiver] = set()
        """All receivers that have not ended, also those whose sender is not yet known."""
        self.observe: Callable[[str, dict[str, object]], None] = lambda event, fields: None
        """Gets the events for the log."""

    def _observed(self, event: str, fields: dict[str, object]) -> None:
        """Calls `observe` as it is by now."""
        self.observe(event, fields)

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

    # -- changes of the links ([3]) ---------------------------------------------------------------------------------

    def add(self, peer: PeerOptions) -> Outgoing:
        """Sends to another instance from now on, and accepts links from it. The store knows it already. In the place of
        a peer of that name: its link is made anew."""
        self.accept_from(peer.name)
        before = self.outgoing.get(peer.name)
        if before is not None and before.sender is not None:
            before.sender.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, f"{peer.name} has other settings now"))
        out = self.outgoing[peer.name] = Outgoing(peer, self.options, self._draw, self.store.now_micros())
        self._purge.peer_added()
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
        self.gates.answer()

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
        self.gates.answer()

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
            self.gates.answer()

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
        out = self.outgoing.get(name)
        decision = decide(
            hello,
            Known(
                own=self.store.identity,
                accepted=incoming is not None and receiver.caller.is_named(name),
                live=None if live is None else live.identity,
                row=self.store.source(name),
                disabled=self.store.disabled.get(name, ""),
                sends=self.store.peer(name) if out is not None and out.sends_all(hello.topics_pattern) else None,
                head=self.store.head(),
                cluster=self.store.cluster,
            ),
        )
        if incoming is None:
            return decision
        reason = decision.reason if isinstance(decision, Refused) else types_pb2.ERROR_REASON_RESEED_PENDING
        if out is not None and out.state == "refused" and reason == types_pb2.ERROR_REASON_RESEED_PENDING:
            # It may have been given this one's name just now. Where it has to wait, it even waits for this link.
            out.next_at_micros = self.store.now_micros()
        if isinstance(decision, Refused):
            if not incoming.trouble.is_like(decision):
                self.observe("link_refused", {"peer": name, "reason": decision.reason, "message": decision.message})
            incoming.trouble.happened(decision, self.store.now_micros())
        elif not isinstance(decision, Wait):
            incoming.live = receiver
            incoming.trouble.passed()
            incoming.covers.clear()
            if live is not None:
                live.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, f"{name} has opened another link"))
        return decision

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
        incoming.probe_came_back(receiver.satisfied_probe)

    # -- time -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Lets the links read on. To be called after durable commits."""
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
            out.note_head(now, self.store.head(), self.store.peer(out.peer.name).acknowledged)
        for receiver in list(self._receivers):
            self._look_after(receiver)
        for incoming in self.incoming.values():
            if incoming.live is not None:
                self._note(incoming, incoming.live)
        self.gates.answer()
        self.probe = max(now, self.probe + 1)
        self._purge.tick(now, self.probe)

    def _look_after(self, machine: Sender | Receiver) -> None:
        """Ticks a machine. If that fails, its link ends, and the other links go on."""
        try:
            machine.tick()
        except Exception as error:  # noqa: BLE001  # logged with its traceback; the link ends
            why = Refused(types_pb2.ERROR_REASON_INTERNAL, f"{type(error).__name__}: {error}")
            self.observe("tick_failed", {"reason": why.reason, "message": why.message, "exc_info": error})
            machine.fail(why)

    def probe_sources(self) -> int:
        """Sends all sources another probe, at once; returns it."""
        self.probe = max(self.store.now_micros(), self.probe + 1)
        for incoming in self.incoming.values():
            if incoming.live is not None:
                incoming.live.wake()
        return self.probe

    def lacks(self, probe: int, sources: Iterable[str], topics: Iterable[str]) -> str:
        """The reason why not everything of some topics is here that the sources had when they heard a probe; "":
        everything is. With the probe 0: the reason why they do not send these topics whole."""
        for name in sources:
            incoming = self.incoming.get(name)
            if incoming is None:
                return f"{name} is no source of this instance"
            live = incoming.live
            if live is None or not live.streaming:
                why = incoming.trouble.message
                return f"no link from {name} is up{f': {why}' if why else ''}"
            if live.filter:
                return f"{name} sends only what matches a filter"
            states = {topic: (state, message) for topic, state, message in live.topics()}
            for topic in topics:
                state, message = states.get(topic, (None, ""))
                if state is None:
                    return f"{name} does not send {topic}"
                if state is not TopicState.SEEDED:
                    told = f": {message}" if message else ""
                    return f"{topic} from {name} is {state.name.lower()}{told}"
            out = self.outgoing.get(name)
            if out is None or out.sender is None or not out.sender.streaming or out.sender.link_topics.seeding:
                why = "" if out is None else out.trouble.message
                told = f" ({why})" if why else ""
                return f"nothing goes back to {name} yet{told}, and without that it does not tell of its durables"
            if live.satisfied_probe < probe or live.durables_under_way:
                return f"changes of {name} are under way"
        return ""

    def lagging(self, name: str) -> bool:
        """True if changes are known to be under way between this instance and a peer, in either direction."""
        out, incoming = self.outgoing.get(name), self.incoming.get(name)
        if out is None or incoming is None:
            return False  # it was removed meanwhile
        live = incoming.live
        return self.settled(out) < self.store.head() or (live is not None and live.cursor < live.head)
