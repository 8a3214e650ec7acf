"""The receiver's side of one link: applies changes and seeds, and acknowledges them (rules R3, R6, R12).

    new ──(Hello)──▶ beginning ──(the store has begun)──▶ streaming ──▶ closed
     │                  │            welcomes                             ▲
     └──────────────────┴─────────────────────────────────────────────────┘   `fail`: by the driver, by a tick
                                                                   (silence), by the store (it refused), by a message
                                                                   that breaks the protocol, or by another link that
                                                                   replaces it

A sender whose cursor is usable is welcomed at once. A sender that has to wait gets RESEED_PENDING once that is stored.

    [1]  The cursor moves in the same commit as the changes. Everything acknowledged is durable.
    [2]  Messages reach the store in the order in which they came. Several may be under way: if the store refuses one,
         it refuses the later ones (ports [3]), and the link ends.
    [3]  The cursor skips nothing: changes that begin after it end the link.
    [4]  The sender knows the store's last answer about each topic: a changed answer is sent again.
    [5]  After the end of a link nothing of it reaches the store.
    [6]  A message is checked, field by field, before anything of it is used (`checks`).
    [7]  All that is held of a link is counted: messages that the store has not yet answered by their whole size, not by
         their chunks alone, and answers that the sender does not read. Beyond a bound the driver reads no more.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from sow.v1 import replication_pb2, types_pb2
from sow_peering import (
    TRACES_MAX,
    DurableMark,
    InstanceIdentity,
    MergeCounts,
    Packed,
    PublisherMark,
    Purged,
    SeedRange,
    TopicAnswer,
    TopicKind,
)
from sow_replication.checks import check
from sow_replication.greeting import Begin, Continue, Decision, pending
from sow_replication.link_topics import TopicState
from sow_replication.messages import durable_of, identity_of, instance_of, kind_of, mark_of
from sow_replication.options import NodeOptions
from sow_replication.ports import ANY_CALLER, PeerCaller, Refused, Store
from sow_replication.skew import Skew

MESSAGE_BYTES: Final = 1024
"""That a message holds whatever its size, until the store has answered."""
ANSWERS_MAX: Final = 1_000
"""Answers that wait for the sender to read them. One message of topics may add one for each topic."""


class Parsed(NamedTuple):
    """A message that was checked ([6]), with its parts as values."""

    request: replication_pb2.ReplicateRequest
    size: int
    kinds: dict[str, TopicKind]
    marks: list[PublisherMark]
    durables: list[DurableMark]


def parsed(request: replication_pb2.ReplicateRequest) -> Parsed:
    """Checks a message, and takes its parts out. From any thread: for a message of many parts it takes seconds. Raises
    Refused."""
    check(request)
    topics = request.hello.topics if request.HasField("hello") else request.topics.topics
    return Parsed(
        request,
        MESSAGE_BYTES + request.ByteSize(),
        {topic.name: kind_of(topic) for topic in topics},
        [mark_of(mark) for mark in request.changes.publishers],
        [durable_of(one) for one in request.durables.durables],
    )


class Home(Protocol):
    """The node, as a receiver sees it."""

    @property
    def probe(self) -> int:
        """The probe to send."""

    def greeted(self, receiver: Receiver, hello: replication_pb2.Hello) -> Decision:
        """Decides about a sender. An accepted link replaces another one of the same name."""

    def advanced(self, receiver: Receiver, result: MergeCounts) -> None:
        """Changes were applied, or the cursor has moved."""

    def ended(self, receiver: Receiver) -> None:
        """Ends the link."""


class Receiver:
    """One link from one sender."""

    def __init__(self, store: Store, options: NodeOptions, home: Home, caller: PeerCaller = ANY_CALLER) -> None:
        self._store = store
        self.caller: Final = caller
        self._options = options
        self._home = home
        self.wake: Callable[[], None] = lambda: None
        """Set by the driver."""
        self.failure: Refused | None = None
        """The reason why the link has ended."""

        self.identity: InstanceIdentity | None = None
        """The sender, once it has said Hello."""
        self.topics_pattern = ""
        self.filter = ""
        self.streaming = False
        """True if the sender was welcomed."""
        self._out: deque[replication_pb2.ReplicateResponse] = deque()
        self._kinds: dict[str, TopicKind] = {}
        self._topics_version: int | None = None
        """The version of this instance's topics at the last answers."""
        self._told: dict[str, TopicAnswer] = {}
        self._received = 0
        """The cursor including changes that the store has not yet answered."""
        self.cursor = 0
        """The durable cursor."""
        self._seeds = 0
        """The number of parts of seeds that were merged."""
        self._moved_at = 0
        self._acknowledge = False
        """True if an acknowledgement is due."""
        self._probe_sent = 0
        self._bytes = 0
        self.head = 0
        """The sender's last sequence, as far as it has reported."""
        self._target: tuple[int, int] | None = None
        """A probe that the sender has echoed, and its head at that time."""
        self.satisfied_probe = 0
        """Everything that the sender had when it heard this probe has been applied."""
        self.durables_under_way = 0
        """Messages about durables that the store has not yet answered."""
        self.skew: Final = Skew()
        self._heard_at = store.now_micros()

    @property
    def full(self) -> bool:
        """True if the driver has to wait before it reads on."""
        return self._bytes > 2 * self._options.flight_bytes_max or len(self._out) > ANSWERS_MAX

    def topics(self) -> list[tuple[str, TopicState, str]]:
        """The topics with their states, and the reasons of refusals."""
        return [(name, _state(answer), answer.message) for name, answer in self._told.items()]

    def refusals(self) -> list[str]:
        """The topics that this instance refuses."""
        return [name for name, answer in self._told.items() if _state(answer) is TopicState.REFUSED]

    # -- hearing ----------------------------------------------------------------------------------------------------

    def received(self, request: replication_pb2.ReplicateRequest) -> None:
        """Takes a message of the sender."""
        try:
            message = parsed(request)
        except Refused as fault:
            self.fail(fault)
        else:
            self.take(message)

    def take(self, message: Parsed) -> None:
        """Takes a message of the sender that was parsed elsewhere."""
        if self.failure is not None:
            return
        request = message.request
        self._heard_at = self._store.now_micros()
        kind = request.WhichOneof("message")
        if (kind == "hello") != (self.identity is None) or not (kind == "hello" or self.streaming):
            self._breach(f"{kind} was not expected")
        elif kind == "hello":
            self._greeted(request.hello, message.kinds)
        elif kind == "topics":
            self._take_topics(message.kinds)
        elif kind == "changes":
            self._changes(request.changes, message)
        elif kind == "seed":
            self._seed(request.seed, message.size)
        elif kind == "heartbeat":
            self._heartbeat(request.heartbeat, message.size)
        elif kind == "durables":
            self._take_durables(message)

    def _breach(self, message: str) -> None:
        self.fail(Refused(types_pb2.ERROR_REASON_PROTOCOL_MISMATCH, message))

    def _greeted(self, hello: replication_pb2.Hello, kinds: dict[str, TopicKind]) -> None:
        self.topics_pattern = hello.topics_pattern
        self.filter = hello.filter
        self.head = hello.head_sequence
        self._kinds = kinds
        decision = self._home.greeted(self, hello)
        if isinstance(decision, Refused):
            return self.fail(decision)
        identity = identity_of(hello.instance)
        self.identity = identity
        self.skew.saw(hello.now_micros - self._heard_at)
        returning = self._store.source(identity.name) is not None
        if isinstance(decision, Continue):
            return self._welcome(decision.cursor, decision.cursor, returning=returning)
        if isinstance(decision, Begin):

            def begun(result: MergeCounts | Refused) -> None:
                if isinstance(result, Refused):
                    self.fail(result)
                elif self.failure is None:
                    self._welcome(None, hello.head_sequence, returning=returning)

            self._store.begin(
                identity,
                topics=hello.topics_pattern,
                filter_text=hello.filter,
                cursor=hello.head_sequence,
                missing_is_deleted=decision.missing_is_deleted,
            ).then(begun)
            return None
        self._store.wait_for(identity.name, self._store.head()).then(
            lambda result: self.fail(result if isinstance(result, Refused) else self._pending())
        )
        return None

    def _welcome(self, cursor: int | None, at: int, *, returning: bool) -> None:
        self._received = self.cursor = at
        self._moved_at = self._store.now_micros()
        answers = self._answers()
        self._told = {answer.topic: answer for answer in answers}
        self.streaming = True
        assert self.identity is not None, "the sender has said Hello"
        self._store.durables_left(self.identity.name)
        self._out.append(
            replication_pb2.ReplicateResponse(
                welcome=replication_pb2.Welcome(
                    instance=instance_of(self._store.identity),
                    cursor=cursor,
                    topics=[_message(answer) for answer in answers],
                    returning=returning,
                    now_micros=self._moved_at,
                )
            )
        )
        self.wake()

    def _pending(self) -> Refused:
        assert self.identity is not None, "the sender has said Hello"
        return pending(self._store.identity.name, self.identity.name)

    def _answers(self) -> list[TopicAnswer]:
        assert self.identity is not None, "the sender has said Hello"
        self._topics_version = self._store.topics_version
        permits = self.caller.permits
        kinds: list[TopicKind] = []
        refused: list[TopicAnswer] = []
        for name, kind in self._kinds.items():
            if permits(name):
                kinds.append(kind)
            else:
                refused.append(_not_permitted(name))
        return [*self._store.answers(self.identity.name, kinds), *refused]

    def _take_topics(self, kinds: dict[str, TopicKind]) -> None:
        if kinds == self._kinds and self._store.topics_version == self._topics_version:
            return  # the sender has these answers ([4])
        self._told = {name: answer for name, answer in self._told.items() if kinds.get(name) == self._kinds[name]}
        self._kinds = kinds
        self._tell_topics()

    def _tell_topics(self) -> None:
        """Sends the answers that have changed ([4])."""
        for answer in self._answers():
            told = self._told.get(answer.topic)
            if told is None or _state(told) is not _state(answer):
                self._tell(answer)

    def _tell(self, answer: TopicAnswer) -> None:
        self._told[answer.topic] = answer
        self._out.append(replication_pb2.ReplicateResponse(topic=_message(answer)))
        self.wake()

    def _changes(self, changes: replication_pb2.Changes, message: Parsed) -> None:
        crc = 0
        chunks = [Packed(packed.topic, packed.chunk) for packed in changes.chunks]
        for _, chunk in chunks:
            crc = zlib.crc32(chunk, crc)
        if crc != changes.crc32:
            return self._damaged()
        permitted = [chunk for chunk in chunks if self.caller.permits(chunk.topic)]
        marks = message.marks if len(permitted) == len(chunks) else []
        chunks = permitted
        if changes.after > self._received or changes.upto < changes.after:
            # Changes in between were lost on the way. No operator has to mend that, so the sender soon tries again.
            return self.fail(
                Refused(
                    types_pb2.ERROR_REASON_BATCH_DAMAGED,
                    f"changes begin after {changes.after}, and the cursor is at {self._received}",
                )
            )
        if not self._tell_of(changes.probe, changes.head_sequence, changes.now_micros):
            return None
        if changes.upto < self._received or (changes.upto == self._received and not marks):
            self._acknowledge = True
            self.wake()
        else:
            traces = list(changes.traces[:TRACES_MAX])
            self._apply(changes.after, changes.upto, chunks, list(changes.origins), message.size, marks, traces)
        return None

    def _damaged(self) -> None:
        self.fail(Refused(types_pb2.ERROR_REASON_BATCH_DAMAGED, "a batch does not match its checksum"))

    def _apply(
        self,
        after: int,
        upto: int,
        chunks: list[Packed],
        origins: list[str],
        size: int,
        marks: Sequence[PublisherMark] = (),
        traces: Sequence[str] = (),
    ) -> None:
        assert self.identity is not None, "the sender has said Hello"
        self._received = upto
        self._moved_at = self._store.now_micros()
        self._bytes += size

        def applied(result: MergeCounts | Refused) -> None:
            self._bytes -= size
            if isinstance(result, Refused):
                self.fail(result)
            elif self.failure is None:
                self.cursor = max(self.cursor, upto)
                self._advanced(result)

        self._store.apply(
            self.identity.name,
            after=after,
            upto=upto,
            chunks=chunks,
            origins=origins,
            publishers=marks,
            traces=traces,
        ).then(applied)

    def _seed(self, seed: replication_pb2.Seed, size: int) -> None:
        assert self.identity is not None, "the sender has said Hello"
        chunk = seed.chunk  # each access copies it
        if zlib.crc32(chunk) != seed.crc32:
            return self._damaged()
        name = seed.topic
        if not self.caller.permits(name):
            return self._breach(f"{self.identity.name} may not send {name[:200]}")
        told = self._told.get(name)
        if told is not None and _state(told) is TopicState.SEEDED:
            self._told[name] = TopicAnswer(name, wanted=True)  # the sender seeds changes that its journal has lost
        self._bytes += size

        def merged(result: MergeCounts | Refused) -> None:
            self._bytes -= size
            if isinstance(result, Refused):
                self.fail(result)
            elif self.failure is None:
                self._seeds += 1
                self._advanced(result)
                if seed.last:
                    self._ended_seed(name)

        self._store.merge(
            self.identity.name,
            SeedRange(name, seed.first, seed.last, seed.after_key, seed.upto_key),
            chunk=chunk,
            origins=list(seed.origins),
            purged=Purged(seed.purged_version, seed.purged_origin),
        ).then(merged)
        return None

    def _ended_seed(self, name: str) -> None:
        """Checks whether it was the seed that the store wanted: the topic may have been deleted and created
        meanwhile."""
        kind = self._kinds.get(name)
        if kind is None:
            return  # the topic has left the link meanwhile
        assert self.identity is not None, "the sender has said Hello"
        answer = self._store.answer(self.identity.name, kind) if self.caller.permits(name) else _not_permitted(name)
        if _state(answer) is TopicState.SEEDED:
            self._told[name] = answer
        else:
            self._tell(answer)

    def _advanced(self, result: MergeCounts) -> None:
        if self._target is not None and self.cursor >= self._target[1]:
            self.satisfied_probe = self._target[0]
            self._target = None
        self._acknowledge = True
        self._home.advanced(self, result)
        self.wake()

    def _heartbeat(self, heartbeat: replication_pb2.Heartbeat, size: int) -> None:
        if not self._tell_of(heartbeat.probe, heartbeat.head_sequence, heartbeat.now_micros):
            return
        moved = heartbeat.upto - self._received
        is_due = self._target is not None or self._heard_at - self._moved_at >= self._options.cursor_micros
        if moved >= self._options.cursor_sequences_max or (moved > 0 and is_due):
            self._apply(self._received, heartbeat.upto, [], [], size)
        self._acknowledge = True
        self.wake()

    def _take_durables(self, message: Parsed) -> None:
        """Takes over what the sender tells of its durables."""
        assert self.identity is not None, "the sender has said Hello"
        marks = [one for one in message.durables if self.caller.permits(one.topic)]
        size = message.size
        self._bytes += size
        self.durables_under_way += 1

        def taken(result: MergeCounts | Refused) -> None:
            self._bytes -= size
            self.durables_under_way -= 1
            if isinstance(result, Refused):
                self.fail(result)  # the next link tells of all of them
            self.wake()

        self._store.take_durables(self.identity.name, marks).then(taken)

    def _tell_of(self, probe: int, head: int, now_micros: int) -> bool:
        """False: the probe was never sent, and the link has ended. Tombstones go by the probes that come back."""
        if probe > self._probe_sent:
            self._breach(f"probe: {probe} was never sent")
            return False
        self.head = max(self.head, head)
        self.skew.saw(now_micros - self._heard_at)
        if probe > self.satisfied_probe and self._target is None:
            self._target = (probe, head)
            if self.cursor >= head:
                self.satisfied_probe, self._target = probe, None
        return True

    # -- sending ----------------------------------------------------------------------------------------------------

    def next_message(self) -> replication_pb2.ReplicateResponse | None:
        """The message to send now; None: there is none. One acknowledgement covers everything that is due."""
        if self._out:
            return self._out.popleft()
        if self.failure is not None or not self.streaming:
            return None
        probe = self._home.probe
        if not self._acknowledge and probe == self._probe_sent:
            return None
        self._acknowledge = False
        self._probe_sent = probe
        return replication_pb2.ReplicateResponse(
            acknowledged=replication_pb2.Acknowledged(
                sequence=self.cursor, probe=probe, now_micros=self._store.now_micros(), seeds=self._seeds
            )
        )

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Checks the clock and the topics; to be called about once a second."""
        if self.failure is not None:
            return None
        now = self._store.now_micros()
        if self.full:
            self._heard_at = now  # this end does not read
        if now - self._heard_at >= self._options.silence_micros:
            return self.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "the sender has been silent for too long"))
        if self.streaming and self.identity is not None:
            source = self._store.source(self.identity.name)
            if source is not None and source.wait_for:
                # It must wait since it was welcomed: the link starts anew, also when the sender has nothing to send.
                return self.fail(self._pending())
            if self._store.topics_version != self._topics_version:
                self._tell_topics()
        self.wake()
        return None

    def fail(self, why: Refused) -> None:
        """Ends the link."""
        if self.failure is None:
            self.failure = why
            if self.streaming and self.identity is not None:
                self._store.durables_left(self.identity.name)
            self._out.clear()
            self._home.ended(self)
            self.wake()


def _not_permitted(topic: str) -> TopicAnswer:
    return TopicAnswer(topic, reason=types_pb2.ERROR_REASON_PERMISSION_DENIED, message="this peer may not send it")


def _state(answer: TopicAnswer) -> TopicState:
    if answer.reason != types_pb2.ERROR_REASON_UNSPECIFIED:
        return TopicState.REFUSED
    return TopicState.SEEDING if answer.wanted else TopicState.SEEDED


_STATES: Final = {
    TopicState.REFUSED: replication_pb2.TOPIC_STATE_REFUSED,
    TopicState.SEEDING: replication_pb2.TOPIC_STATE_WANTED,
    TopicState.SEEDED: replication_pb2.TOPIC_STATE_SEEDED,
}


def _message(answer: TopicAnswer) -> replication_pb2.TopicAnswer:
    return replication_pb2.TopicAnswer(
        topic=answer.topic,
        state=_STATES[_state(answer)],
        after_key=answer.after_key,
        reason=types_pb2.ErrorReason.ValueType(answer.reason),
        message=answer.message,
    )
