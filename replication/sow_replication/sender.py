"""The sender's side of one link: reads the journal and seeds, and sends them within a window (rules R2, R4, R6, R7).

    greeting ──(Welcome)──▶ streaming ──▶ closed
        │                                   ▲
        └───────────────────────────────────┘   `fail`: by the driver (the stream broke), by a tick (silence), by a
                                                message that breaks the protocol or names another instance

The states of its topics are those of `link_topics`.

    [1]  Changes are sent in the order of the journal, each read from the end of the last one. Parts of seeds alternate
         with them.
    [2]  A seed is read after the reads that left its topic out: no change falls between them.
    [3]  Where the journal has lost changes of a topic, the first part of that topic's seed is sent before any message
         that moves the receiver's cursor over the lost changes. So a receiver that fails in between knows that it needs
         the seed.
    [4]  Messages are sent while the window has room. One more message is ready, and one read is under way.
    [5]  The store hears of an acknowledgement only while no topic is seeding or pending, and only up to the head at
         which the topics were last looked at: up to there the peer has everything. Tombstones, the other direction and
         REPLICATED rely on that.
    [6]  A head goes out with a probe only after everything that was read before that head. A receiver that has applied
         all earlier messages then has everything that this instance had (rule R4). A probe is answered at once, as
         topics that move wait for it (rule C16).
    [7]  Publishers are sent once all topics are seeded, and again after each seed: as of a sequence, and behind all
         changes up to it (rule F11).
    [8]  Replicated durables are told of topics that are seeded, see `durable_marks`.

The driver runs the result of `next_read` on a reader thread and hands the outcome to `took`, sends the messages of
`next_message`, and gets a `wake` whenever either may have something new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from sow.v1 import replication_pb2, types_pb2
from sow_peering import InstanceIdentity, JournalPart, PublisherPart, SeedPart, TopicKind
from sow_replication.checks import check
from sow_replication.durable_marks import DurableTeller
from sow_replication.link_topics import LinkTopic, LinkTopics, TopicState
from sow_replication.messages import PROTOCOL, identity_of, instance_of, mark_message, topic_of
from sow_replication.options import NodeOptions, PeerOptions
from sow_replication.ports import Refused, Store
from sow_replication.publisher_marks import PublishersToSend
from sow_replication.reads import Fetched, JournalRead, PublishersRead, Read, Seed, SeedRead
from sow_replication.skew import Skew
from sow_replication.window import Window


class _Ready(NamedTuple):
    """A message that waits for room in the window."""

    request: replication_pb2.ReplicateRequest | None
    """None: there is nothing to send; only `upto` moves."""
    size: int
    upto: int
    """The last sequence of changes; 0 for a part of a seed."""
    committed_micros: int
    echo: _Echo | None
    topic: str
    seed: Seed | None
    ends: bool
    """True if it is the last part of the seed."""


class _Echo(NamedTuple):
    """The answer to a probe ([6])."""

    probe: int
    head: int


class Sender:
    """One link to one peer."""

    def __init__(
        self,
        store: Store,
        peer: PeerOptions,
        options: NodeOptions,
        *,
        accepted: Callable[[Sender, InstanceIdentity], Refused | None],
        progressed: Callable[[Sender], None],
    ) -> None:
        """`accepted` gets the identity of the receiver and may object; `progressed` is called after an
        acknowledgement."""
        self.peer: Final = peer
        self._store = store
        self._options = options
        self._accepted = accepted
        self._progressed = progressed
        self.wake: Callable[[], None] = lambda: None
        """Set by the driver."""
        self.failure: Refused | None = None
        """The reason why the link has ended."""

        self.identity: InstanceIdentity | None = None
        """The receiver, once it has answered."""
        self._control: deque[replication_pb2.ReplicateRequest] = deque()
        self._hello_head = store.head()
        self._watched_head = self._hello_head
        """The head when the topics were last looked at: a topic that is not among `link_topics` was created later."""
        self.link_topics: Final = LinkTopics(self._matching())
        self._returning = False

        self._read_upto = 0
        self._sent_upto = 0
        self._topics_version: int | None = None
        """The version of the topics at that look."""
        self._changes_upto = 0
        """The end of the changes that were sent last. Changes that were skipped since need no message, and the receiver
        may not know of them, so the next changes begin here."""
        self._cursor = 0
        """The receiver's cursor at its last acknowledgement."""
        self._began_at = 0
        """The cursor at Welcome."""
        self._told = -1
        """The last acknowledgement that the store has heard of."""
        self._reading: Read | None = None
        self._seed_turn = False
        self._publishers = PublishersToSend(is_filtered=bool(peer.filter))
        self._ready: deque[_Ready] = deque()
        self._held: tuple[_Ready, set[str]] | None = None
        """Changes that wait, and the topics whose seeds have to begin first ([3])."""
        self._window = Window(options)
        self._probe = 0
        """The last probe of the receiver."""
        self._echo = _Echo(0, 0)
        self._probe_echoed = 0
        """The last probe that was sent back."""
        self._durables = DurableTeller(store)
        self._missed_mark: int | None = None
        """The sequence that the peer has to acknowledge before `missed` is cleared."""
        self.skew: Final = Skew()
        now = store.now_micros()
        self.since_micros = now
        self._heard_at = now
        self._sent_at = now
        self.progress_at_micros = now
        """The last time when something was acknowledged, or when nothing was waiting for an acknowledgement."""
        self._control.append(self._hello())

    # -- its state -------------------------------------------------------------------------------------------------

    @property
    def streaming(self) -> bool:
        """True if the receiver has welcomed it and it has not ended."""
        return self.identity is not None and self.failure is None

    @property
    def settled(self) -> int:
        """The peer has everything of this link up to this sequence. Ahead of its cursor where the changes in between
        are not for the link."""
        if not self.streaming or self.link_topics.seeding:
            return max(self._told, 0)
        return self._cursor if self._window.has_changes else max(self._cursor, self._sent_upto)

    @property
    def oldest_commit_micros(self) -> int:
        """The commit time of the oldest change under way; 0: there is none."""
        if oldest := self._window.oldest_commit_micros:
            return oldest
        return next((ready.committed_micros for ready in self._ready if ready.committed_micros), 0)

    @property
    def advanced(self) -> bool:
        """True if anything that was sent over this link was acknowledged."""
        return self._cursor > self._began_at or self._window.merged > 0

    # -- reading ----------------------------------------------------------------------------------------------------

    def next_read(self) -> Read | None:
        """The read to run now; its result goes to `took`."""
        if not self.streaming or self._reading is not None or self._ready:
            return None
        self._reading = self._choose_read()
        return self._reading

    def _choose_read(self) -> Read | None:
        if self._held is not None:
            names = self._held[1]
        else:
            names = self.link_topics.with_unread_seeds()
        head = self._store.head()
        after_id = None if self.link_topics.seeding or self._held is not None else self._publishers.next_after
        # Changes and seeds alternate, changes first. One read more than the window holds is ready when there is room.
        if self._held is None and head > self._read_upto and not ((names or after_id is not None) and self._seed_turn):
            self._seed_turn = True
            assert self.identity is not None, "it is streaming"
            return JournalRead(
                self._store,
                self.identity,
                self._read_upto,
                self.link_topics.with_changes(),
                self.peer.filter,
                self._options.read_bytes_max,
                head,
                self._publishers.answered(self._probe, self._echo.probe),
            )
        self._seed_turn = False
        for name in sorted(names):
            seed = self.link_topics.by_name[name].seed
            assert seed is not None, "chosen for it"
            return SeedRead(self._store, name, seed, seed.after_key, self.peer.filter, self._options.seed_bytes_max)
        if after_id is not None:
            return PublishersRead(self._store, self.link_topics.seeded(), after_id)
        return None

    def took(self, result: Fetched | Refused) -> None:
        """Takes the result of the read under way."""
        read = self._reading
        assert read is not None, "nothing was to be read"
        self._reading = None
        if self.failure is not None:
            return
        part = None if isinstance(result, Refused) else result.part
        if part is not None and not isinstance(part, PublisherPart) and self.link_topics.has_another_kind(part.kinds):
            self._watch_topics()  # the receiver is told first, and then this is read again
        elif isinstance(read, SeedRead):
            self._took_seed(read, result)
        elif isinstance(result, Refused):
            self.fail(result)
        elif isinstance(read, PublishersRead):
            assert isinstance(part, PublisherPart), "the result of this read"
            if not self.link_topics.seeding:
                self._publishers.took(read.after_id, part)
                self._push_publishers()
        else:
            assert isinstance(part, JournalPart), "the result of this read"
            self._took_changes(read, part, result.message)
            self._push_publishers()

    def _push_publishers(self) -> None:
        """Sends publishers behind the changes that they tell of."""
        part = None if self._held is not None else self._publishers.due(self._read_upto)
        if part is None:
            return
        if part.marks:
            changes = replication_pb2.Changes(upto=self._read_upto, publishers=map(mark_message, part.marks))
            message = replication_pb2.ReplicateRequest(changes=changes)
            echo = _Echo(self._publishers.answered(self._probe, self._echo.probe), self._store.head())
            self._push(_Ready(message, message.ByteSize(), self._read_upto, 0, echo, "", None, False))
        self.wake()

    def _took_changes(
        self, read: JournalRead, piece: JournalPart, message: replication_pb2.ReplicateRequest | None
    ) -> None:
        self._read_upto = piece.upto
        ready = _Ready(
            message,
            sum([len(chunk) for _, chunk in piece.chunks]),
            piece.upto,
            piece.first_commit_micros if piece.chunks else 0,
            _Echo(read.probe, read.head),
            "",
            None,
            False,
        )
        topics = self.link_topics.by_name
        lost = {name for name in piece.lost if name in topics and topics[name].takes_changes}
        if lost:
            for name in lost:
                self._start_seed(topics[name], b"", lost=True)
            self._held = (ready, lost)
        else:
            self._push(ready)

    def _took_seed(self, read: SeedRead, result: Fetched | Refused) -> None:
        topic = self.link_topics.by_name.get(read.topic)
        if topic is None or topic.seed is not read.seed:
            return  # the topic has left, or its seed begins anew
        seed = read.seed
        if isinstance(result, Refused):
            if result.reason != types_pb2.ERROR_REASON_TOPIC_NOT_FOUND:
                self.fail(result)
                return
            # The topic was deleted. The receiver is told at once: if the topic were back at the next look, the receiver
            # would take it for the one that it has already asked for, and would not ask again.
            del self.link_topics.by_name[read.topic]
            self._announce()
            self._seed_begun(read.topic)
            return
        part = result.part
        assert isinstance(part, SeedPart), "the result of this read"
        last = not part.upto_key
        seed.read = last
        message = result.message
        assert message is not None, "a part without rows also moves the seed"
        # Looked at for each part: tombstones before it were sent as tombstones.
        if (self._returning or seed.lost) and self._store.peer(self.peer.name).missed:
            purged = self._store.purged(read.topic)
            message.seed.purged_version = purged.version
            message.seed.purged_origin = purged.origin
        seed.after_key = part.upto_key
        self._push(_Ready(message, len(part.chunk), 0, 0, None, read.topic, seed, last))
        self._seed_begun(read.topic)

    def _seed_begun(self, name: str) -> None:
        """The seed of a topic has begun, or will not begin: changes wait for it no longer."""
        if self._held is not None:
            ready, names = self._held
            names.discard(name)
            if not names:
                self._held = None
                self._push(ready)

    def _push(self, ready: _Ready) -> None:
        self._ready.append(ready)
        self._pass_over()
        self.wake()

    def _pass_over(self) -> None:
        """Skips changes that are not for the link: they need no message and no room in the window."""
        passed = False
        while self._ready and self._ready[0].request is None:
            ready = self._ready.popleft()
            self._sent_upto = max(self._sent_upto, ready.upto)
            assert ready.echo is not None, "changes have one"
            self._echo = ready.echo
            passed = True
        if passed and not self._window.has_changes:
            self._progressed(self)  # no acknowledgement will report it

    # -- sending ----------------------------------------------------------------------------------------------------

    def next_message(self) -> replication_pb2.ReplicateRequest | None:
        """The message to send now; None: there is none."""
        if self.failure is not None:
            return None
        now = self._store.now_micros()
        if self.identity is not None and self._durables.hurries:
            self.tell_durables()
        if self._control:
            self._sent_at = now
            return self._control.popleft()
        if self.identity is None:
            return None
        if self._ready and self._window.has_room(self._ready[0].size):
            self._sent_at = now
            return self._send(self._ready.popleft(), now)
        due = now - self._sent_at >= self._options.heartbeat_micros
        has_sent_all = self._reading is None and self._held is None and not self._ready and self._publishers.are_sent
        if has_sent_all and (due or self._probe > self._echo.probe):
            self._echo = _Echo(self._probe, self._store.head())
            self.tell_durables()  # the peer has them before the answer to the probe
            if self._control:
                self._sent_at = now
                return self._control.popleft()
        if due or self._echo.probe > self._probe_echoed:
            self._sent_at = now
            self._probe_echoed = self._echo.probe
            return replication_pb2.ReplicateRequest(
                heartbeat=replication_pb2.Heartbeat(
                    head_sequence=self._echo.head,
                    upto=self._sent_upto,
                    now_micros=now,
                    probe=self._echo.probe,
                )
            )
        return None

    def _send(self, ready: _Ready, now: int) -> replication_pb2.ReplicateRequest:
        request = ready.request
        assert request is not None, "the others were skipped"
        if not self._window.has_changes:
            self.progress_at_micros = now
        if ready.seed is None:
            assert ready.echo is not None, "changes have one"
            self._echo = ready.echo
            self._probe_echoed = ready.echo.probe
            changes = request.changes
            changes.after = self._changes_upto
            self._sent_upto = self._changes_upto = ready.upto
            changes.head_sequence = ready.echo.head
            changes.probe = ready.echo.probe
            changes.now_micros = now
            self._window.send_changes(ready.size, ready.upto, ready.committed_micros)
        else:
            part = self._window.send_part(ready.size)
            if ready.ends:
                ready.seed.last_part = part
        self._pass_over()
        self.wake()  # there is room to read ahead
        return request

    def _hello(self) -> replication_pb2.ReplicateRequest:
        identity = self._store.identity
        source = self._store.source(self.peer.name)
        return replication_pb2.ReplicateRequest(
            hello=replication_pb2.Hello(
                protocol=PROTOCOL,
                instance=instance_of(identity, self._store.cluster),
                topics_pattern=self.peer.topics,
                filter=self.peer.filter,
                topics=list(map(topic_of, self.link_topics.kinds)),
                head_sequence=self._hello_head,
                now_micros=self._store.now_micros(),
                waiting=source is not None and source.wait_for != 0,
                authoritative=self._store.authoritative,
            )
        )

    # -- hearing ----------------------------------------------------------------------------------------------------

    def received(self, response: replication_pb2.ReplicateResponse) -> None:
        """Takes a message of the receiver, which is checked before anything of it is used."""
        try:
            check(response)
        except Refused as fault:
            self.fail(fault)
        else:
            self.take(response)

    def take(self, response: replication_pb2.ReplicateResponse) -> None:
        """Takes a message of the receiver that was checked elsewhere."""
        if self.failure is not None:
            return
        self._heard_at = self._store.now_micros()
        kind = response.WhichOneof("message")
        if (kind == "welcome") != (self.identity is None):
            self.fail(Refused(types_pb2.ERROR_REASON_PROTOCOL_MISMATCH, f"{kind} was not expected"))
        elif kind == "welcome":
            self._welcomed(response.welcome)
        elif kind == "acknowledged":
            self._acknowledged(response.acknowledged)
        elif kind == "topic":
            self._answered(response.topic)
        self.wake()

    def _welcomed(self, welcome: replication_pb2.Welcome) -> None:
        identity = identity_of(welcome.instance)
        objection = self._accepted(self, identity)
        if objection is not None:
            return self.fail(objection)
        begins = not welcome.HasField("cursor")
        cursor = self._hello_head if begins else welcome.cursor
        if cursor > self._hello_head:
            return self.fail(
                Refused(types_pb2.ERROR_REASON_PROTOCOL_MISMATCH, f"cursor: {cursor} is ahead of the journal")
            )
        self.identity = identity
        self.skew.saw(welcome.now_micros - self._heard_at)
        self.since_micros = self._heard_at
        self._returning = welcome.returning
        self._began_at = self._cursor = self._read_upto = self._sent_upto = self._changes_upto = cursor
        self._echo = _Echo(0, cursor)
        for answer in welcome.topics:
            self._answered(answer)
        remembered = self._store.peer(self.peer.name)
        if begins or remembered.identity != identity:
            # Our changes that it has come from its earlier data, or from a link with another pattern or filter: none
            # of them counts until it is seeded ([5]).
            self._store.acknowledged(self.peer.name, identity, 0 if begins or self.link_topics.seeding else cursor)
        self._watch_missed()
        self._tell()
        return None

    def _acknowledged(self, message: replication_pb2.Acknowledged) -> None:
        self.skew.saw(message.now_micros - self._heard_at)
        self._probe = max(self._probe, message.probe)
        if message.sequence > self._sent_upto or message.seeds > self._window.parts:
            return self.fail(
                Refused(types_pb2.ERROR_REASON_PROTOCOL_MISMATCH, "the acknowledged messages were never sent")
            )
        self._cursor = max(self._cursor, message.sequence)
        if self._window.acknowledged(self._cursor, message.seeds):
            self.progress_at_micros = self._heard_at
        self.link_topics.acknowledge_seeds(self._window.merged)
        self._tell()
        return None

    def _tell(self) -> None:
        """Tells the store the acknowledged sequence ([5])."""
        if not self.link_topics.seeding:
            sequence = min(self._cursor, self._watched_head)
            if sequence > self._told:
                assert self.identity is not None, "it has acknowledged"
                self._told = sequence
                self._store.acknowledged(self.peer.name, self.identity, sequence)
            if self._missed_mark is not None and self._told >= self._missed_mark and not self.link_topics.refusals():
                self._missed_mark = None
                self._store.reseeded(self.peer.name)
        self._progressed(self)

    def _answered(self, answer: replication_pb2.TopicAnswer) -> None:
        topic = self.link_topics.by_name.get(answer.topic)
        if topic is None:
            return  # the topic has left the link meanwhile
        if answer.state == replication_pb2.TOPIC_STATE_REFUSED:
            if topic.takes_changes:  # of one that is refused from the beginning nothing was sent
                self._publishers.begin_again()
            topic.refuse(answer.message)
            self._seed_begun(answer.topic)
        elif answer.state == replication_pb2.TOPIC_STATE_WANTED:
            if not (answer.after_key and topic.seed is not None and topic.seed.lost):
                self._start_seed(topic, answer.after_key, lost=False)
        elif topic.seed is None:
            topic.state = TopicState.SEEDED
            self._publishers.begin_again()

    def _start_seed(self, topic: LinkTopic, after_key: bytes, *, lost: bool) -> None:
        topic.begin_seed(after_key, lost=lost)
        self._publishers.begin_again()

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Checks the clock and the topics; to be called about once a second."""
        if self.failure is not None:
            return None
        now = self._store.now_micros()
        if now - self._heard_at >= self._options.silence_micros:
            return self.fail(Refused(types_pb2.ERROR_REASON_UNSPECIFIED, "the peer has been silent for too long"))
        if self.identity is not None:
            self._watch_topics()
            self._watch_missed()
            self._tell()
            self.tell_durables()
        self.wake()
        return None

    def tell_durables(self) -> None:
        """Tells of the durables that have changed ([8]); also the last thing on a link that ends in order."""
        if self.identity is not None and self.failure is None:
            seeded = self.link_topics.seeded()
            self._control.extend(self._durables.messages(self.identity, seeded, self._store.now_micros()))

    def _watch_topics(self) -> None:
        self._watched_head = self._store.head()
        version = self._store.topics_version
        if version == self._topics_version:
            return
        self._topics_version = version
        kinds = self._matching()
        if kinds == self.link_topics.kinds:
            return
        for name in self.link_topics.replace(kinds):
            self._seed_begun(name)
        self._announce()

    def _announce(self) -> None:
        """Tells the receiver the topics of the link."""
        topics = list(map(topic_of, self.link_topics.kinds))
        self._control.append(replication_pb2.ReplicateRequest(topics=replication_pb2.Topics(topics=topics)))

    def _watch_missed(self) -> None:
        if self._missed_mark is None and self._store.peer(self.peer.name).missed:
            self._missed_mark = self._store.head()

    def missed_more(self) -> None:
        """Tombstones may have been purged that the peer has not acknowledged."""
        self._missed_mark = None
        if self.streaming:
            self._watch_missed()

    def _matching(self) -> list[TopicKind]:
        return [kind for kind in self._store.topics(self.peer.topics) if kind.journal]

    def fail(self, why: Refused) -> None:
        """Ends the link."""
        if self.failure is None:
            self.failure = why
            self.wake()
