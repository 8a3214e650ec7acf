"""The receiver's side of one link: applies what comes, and says how far it is (rules R3, R6, R12).

    new ──(Hello)──▶ beginning ──(the store has begun)──▶ streaming ──▶ closed
     │                  │            welcomes                             ▲
     └──────────────────┴─────────────────────────────────────────────────┘   `fail`: the driver, a tick (silence), the
                                                                   store (it refused), a message that breaks the
                                                                   protocol, or another link in place of this one

A sender whose cursor is usable is welcomed at once; one that has to wait is told so (RESEED_PENDING) once that is
stored.

    RV1  The cursor moves with what is applied, in one commit of the store. What is acknowledged is durable.
    RV2  Messages reach the store in the order in which they came. Several may be under way: when the store refuses one,
         it refuses those behind it (PT3 of the ports), and the link is over.
    RV3  The cursor never passes over anything: changes that begin behind it end the link.
    RV4  What is told of a topic is what the store last answered, and it is told again when that has changed.
    RV5  After a link is over, nothing of it is given to the store.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from sow.v1 import replication_pb2, types_pb2
from sow_peering import Identity, MergeCounts, Packed, Purged, SeedRange, TopicAnswer, TopicKind
from sow_replication.greeting import Begin, Continue, Decision, pending
from sow_replication.options import NodeOptions
from sow_replication.ports import Refused, Store
from sow_replication.sender import TopicState, instance
from sow_replication.skew import Skew


class Home(Protocol):
    """The node, as a receiver sees it."""

    @property
    def probe(self) -> int:
        """What to say as a probe."""

    def greeted(self, receiver: Receiver, hello: replication_pb2.Hello) -> Decision:
        """Decides about a sender. When the link is to be, it takes the place of another one of this name."""

    def advanced(self, receiver: Receiver, result: MergeCounts) -> None:
        """Something was applied, or the cursor has moved."""

    def ended(self, receiver: Receiver) -> None:
        """The link is over."""


class Receiver:
    """One link from one sender."""

    def __init__(self, store: Store, options: NodeOptions, home: Home) -> None:
        self._store = store
        self._options = options
        self._home = home
        self.wake: Callable[[], None] = lambda: None
        """Set by the driver."""
        self.failure: Refused | None = None
        """Why the link is over."""

        self.identity: Identity | None = None
        """The sender, once it has said Hello."""
        self.topics_pattern = ""
        self.filter = ""
        self.streaming = False
        """Whether the sender was welcomed."""
        self._out: deque[replication_pb2.ReplicateResponse] = deque()
        self._kinds: dict[str, TopicKind] = {}
        self._topics_version: int | None = None
        """Of this instance's topics when they were asked last."""
        self._told: dict[str, TopicAnswer] = {}
        self._received = 0
        """The cursor, with what the store has been given."""
        self.cursor = 0
        """The cursor: durable."""
        self._seeds = 0
        """Parts that were merged."""
        self._moved_at = 0
        self._acknowledge = False
        """Whether there is something to acknowledge."""
        self._probe_sent = 0
        self._bytes = 0
        self.head = 0
        """The sender's last sequence that it has told."""
        self._target: tuple[int, int] | None = None
        """A probe that the sender has echoed, and its head then."""
        self.satisfied_probe = 0
        """All that the sender had when it heard this probe has been applied."""
        self.skew: Final = Skew()
        self._heard_at = store.now_micros()

    @property
    def bytes_under_way(self) -> int:
        """What the store has been given, and has not answered. Read no more while it is above the flight."""
        return self._bytes

    @property
    def full(self) -> bool:
        """Whether the driver is to wait before it reads on."""
        return self._bytes > 2 * self._options.flight_bytes_max

    def topics(self) -> list[tuple[str, TopicState, str]]:
        """The topics, how each stands, and why it was refused."""
        return [(name, _state(answer), answer.message) for name, answer in self._told.items()]

    def refusals(self) -> list[str]:
        """The topics that this instance does not take."""
        return [name for name, answer in self._told.items() if _state(answer) is TopicState.REFUSED]

    # -- hearing ----------------------------------------------------------------------------------------------------

    def received(self, request: replication_pb2.ReplicateRequest) -> None:
        """A message of the sender."""
        if self.failure is not None:
            return
        self._heard_at = self._store.now_micros()
        kind = request.WhichOneof("message")
        if (kind == "hello") != (self.identity is None) or not (kind == "hello" or self.streaming):
            self._breach(f"{kind} was not expected")
        elif kind == "hello":
            self._greeted(request.hello)
        elif kind == "topics":
            self._take_topics(request.topics.topics)
        elif kind == "changes":
            self._changes(request.changes)
        elif kind == "seed":
            self._seed(request.seed)
        elif kind == "heartbeat":
            self._heartbeat(request.heartbeat)

    def _breach(self, message: str) -> None:
        self.fail(Refused(types_pb2.ERROR_REASON_PROTOCOL_MISMATCH, message))

    def _greeted(self, hello: replication_pb2.Hello) -> None:
        self.topics_pattern = hello.topics_pattern
        self.filter = hello.filter
        self.head = hello.head_sequence
        decision = self._home.greeted(self, hello)
        if isinstance(decision, Refused):
            return self.fail(decision)
        identity = Identity(hello.instance.name, hello.instance.id, hello.instance.epoch)
        self.identity = identity
        self.skew.saw(hello.now_micros - self._heard_at)
        returning = self._store.source(identity.name) is not None
        if isinstance(decision, Continue):
            return self._welcome(hello, decision.cursor, decision.cursor, returning=returning)
        if isinstance(decision, Begin):

            def begun(result: MergeCounts | Refused) -> None:
                if isinstance(result, Refused):
                    self.fail(result)
                elif self.failure is None:
                    self._welcome(hello, None, hello.head_sequence, returning=returning)

            self._store.begin(
                identity,
                topics=hello.topics_pattern,
                filter_text=hello.filter,
                cursor=hello.head_sequence,
                missing_is_deleted=decision.missing_is_deleted,
                done=begun,
            )
            return None
        self._store.wait_for(
            identity.name,
            self._store.head(),
            lambda result: self.fail(result if isinstance(result, Refused) else self._pending()),
        )
        return None

    def _welcome(self, hello: replication_pb2.Hello, cursor: int | None, at: int, *, returning: bool) -> None:
        self._received = self.cursor = at
        self._moved_at = self._store.now_micros()
        self._kinds = {topic.name: kind_of(topic) for topic in hello.topics}
        answers = self._answers()
        self._told = {answer.topic: answer for answer in answers}
        self.streaming = True
        self._out.append(
            replication_pb2.ReplicateResponse(
                welcome=replication_pb2.Welcome(
                    instance=instance(self._store.identity),
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
        return self._store.answers(self.identity.name, list(self._kinds.values()))

    def _take_topics(self, topics: Iterable[replication_pb2.ReplicatedTopic]) -> None:
        kinds = {topic.name: kind_of(topic) for topic in topics}
        self._told = {name: answer for name, answer in self._told.items() if kinds.get(name) == self._kinds[name]}
        self._kinds = kinds
        self._tell_topics()

    def _tell_topics(self) -> None:
        """Says what has changed (RV4)."""
        for answer in self._answers():
            told = self._told.get(answer.topic)
            if told is None or _state(told) is not _state(answer):
                self._tell(answer)

    def _tell(self, answer: TopicAnswer) -> None:
        self._told[answer.topic] = answer
        self._out.append(replication_pb2.ReplicateResponse(topic=_message(answer)))
        self.wake()

    def _changes(self, changes: replication_pb2.Changes) -> None:
        crc = 0
        size = 0
        chunks = [Packed(packed.topic, packed.chunk) for packed in changes.chunks]
        for _, chunk in chunks:
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
        if crc != changes.crc32:
            return self._damaged()
        if changes.after > self._received or changes.upto < changes.after:
            # Something in between got lost on the way; nothing that an operator has to mend, so it is tried again soon.
            return self.fail(
                Refused(
                    types_pb2.ERROR_REASON_BATCH_DAMAGED,
                    f"changes behind {changes.after}, with the cursor at {self._received}",
                )
            )
        self._tell_of(changes.probe, changes.head_sequence, changes.now_micros)
        if changes.upto <= self._received:
            self._acknowledge = True
            self.wake()
        else:
            self._apply(changes.after, changes.upto, chunks, list(changes.origins), size)
        return None

    def _damaged(self) -> None:
        self.fail(Refused(types_pb2.ERROR_REASON_BATCH_DAMAGED, "a batch does not match its checksum"))

    def _apply(self, after: int, upto: int, chunks: list[Packed], origins: list[str], size: int) -> None:
        assert self.identity is not None, "the sender has said Hello"
        self._received = upto
        self._moved_at = self._store.now_micros()
        self._bytes += size

        def done(result: MergeCounts | Refused) -> None:
            self._bytes -= size
            if isinstance(result, Refused):
                self.fail(result)
            elif self.failure is None:
                self.cursor = max(self.cursor, upto)
                self._advanced(result)

        self._store.apply(self.identity.name, after=after, upto=upto, chunks=chunks, origins=origins, done=done)

    def _seed(self, seed: replication_pb2.Seed) -> None:
        assert self.identity is not None, "the sender has said Hello"
        chunk = seed.chunk  # a copy, each time
        if zlib.crc32(chunk) != seed.crc32:
            return self._damaged()
        name = seed.topic
        told = self._told.get(name)
        if told is not None and _state(told) is TopicState.SEEDED:
            self._told[name] = TopicAnswer(name, wanted=True)  # the sender seeds what it has lost; it knows
        size = len(chunk)
        self._bytes += size

        def done(result: MergeCounts | Refused) -> None:
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
            done=done,
        )
        return None

    def _ended_seed(self, name: str) -> None:
        """Whether it was the seed that the store wanted: the topic may have been deleted and created on the way."""
        kind = self._kinds.get(name)
        if kind is None:
            return  # it has left meanwhile
        assert self.identity is not None, "the sender has said Hello"
        answer = self._store.answer(self.identity.name, kind)
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

    def _heartbeat(self, heartbeat: replication_pb2.Heartbeat) -> None:
        self._tell_of(heartbeat.probe, heartbeat.head_sequence, heartbeat.now_micros)
        moved = heartbeat.upto - self._received
        if moved >= self._options.cursor_sequences_max or (
            moved > 0 and self._heard_at - self._moved_at >= self._options.cursor_micros
        ):
            self._apply(self._received, heartbeat.upto, [], [], 0)
        self._acknowledge = True
        self.wake()

    def _tell_of(self, probe: int, head: int, now_micros: int) -> None:
        self.head = max(self.head, head)
        self.skew.saw(now_micros - self._heard_at)
        if probe > self.satisfied_probe and self._target is None:
            self._target = (probe, head)
            if self.cursor >= head:
                self.satisfied_probe, self._target = probe, None

    # -- sending ----------------------------------------------------------------------------------------------------

    def next_message(self) -> replication_pb2.ReplicateResponse | None:
        """What to send now. One acknowledgement says all that there is to acknowledge."""
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
        """Looks at the clock and the topics; about once a second."""
        if self.failure is not None:
            return None
        now = self._store.now_micros()
        if self.full:
            self._heard_at = now  # it is not listened to
        if now - self._heard_at >= self._options.silence_micros:
            return self.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "nothing was heard of the sender"))
        if self.streaming and self.identity is not None:
            source = self._store.source(self.identity.name)
            if source is not None and source.wait_for:
                # It has to, since it was welcomed: it begins anew, also when it has nothing to send.
                return self.fail(self._pending())
            if self._store.topics_version != self._topics_version:
                self._tell_topics()
        self.wake()
        return None

    def fail(self, why: Refused) -> None:
        """The link is over."""
        if self.failure is None:
            self.failure = why
            self._out.clear()
            self._home.ended(self)
            self.wake()


def kind_of(topic: replication_pb2.ReplicatedTopic) -> TopicKind:
    """A topic from its message."""
    return TopicKind(topic.name, tuple(topic.key), topic.message_type, topic.separator, topic.acts_on_expiration)


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
