"""What replication needs of a store, as protocols; the server has the one implementation, tests have others.

Times are microseconds of the store's guarded clock. A `Chunk` is opaque here: the layout of a journal chunk, which only
stores read. Sequences are positions in one instance's journal, and mean nothing in another's.

    PT1  What `read` and `seed` give has been made durable: no power cut takes it back (rule S7).
    PT2  `apply`, `merge` and `begin` are one commit each, the position with what was applied (rule R6). `done` is
         called once it is durable, or with the reason why nothing of it was, on the thread that all calls come from.
    PT3  Cursors do not skip: an `apply` from behind the cursor's place is refused, one from in front of it is
         harmless, and no `apply` moves the cursor back. So several may be under way: when one is refused, so are those
         behind it.
    PT4  While a source has to wait (`SourceState.wait_for`), `apply` and `merge` are refused with RESEED_PENDING.
    PT5  Whatever is applied twice, or in another order than it was written, leaves the greatest (version, origin) of
         each key (rule R3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from sow.v1 import types_pb2

Reason: TypeAlias = types_pb2.ErrorReason.ValueType
"""One of the vocabulary of reasons."""


class Identity(NamedTuple):
    """Who an instance is: name, id, and the epoch of its journal (rule J14)."""

    name: str
    id: str
    epoch: str


class TopicKind(NamedTuple):
    """What matters of a topic between instances (rule R12)."""

    name: str
    key: tuple[str, ...]
    message_type: str
    separator: bytes
    acts: bool
    """Whether it acts on expiration; may differ between instances (rule R2)."""
    journal: bool = True
    """Without a journal there is nothing to ship (rule J1)."""


class Packed(NamedTuple):
    """A chunk of changes, or rows, of one topic."""

    topic: str
    chunk: bytes


class Piece(NamedTuple):
    """Some of the journal, from behind `after` up to `upto`, for one link."""

    after: int
    upto: int
    """What is behind `after` and up to here is either in `chunks` or not for this link."""
    chunks: Sequence[Packed]
    origins: Sequence[str]
    """Names of the instances that the chunks' origins point at."""
    first_commit_micros: int = 0
    """When the first of the commits passed over here was; 0: there was none."""
    last_commit_micros: int = 0
    lost: Sequence[str] = ()
    """Topics of the link of which the journal has been pruned beyond `after`: they have to be seeded."""
    kinds: Sequence[TopicKind] = ()
    """Of the chunks' topics, as they were after the read: changes of another kind than the receiver was told must not
    go to it."""


class SeedPart(NamedTuple):
    """The next rows of a topic, in the order of keys: records, and tombstones."""

    chunk: bytes
    """Empty: there are none."""
    origins: Sequence[str]
    upto_key: bytes
    """The last key of this part. Empty: it reaches to the end of the topic."""
    kinds: Sequence[TopicKind] = ()
    """Of the topic, as in `Piece`."""


class Purged(NamedTuple):
    """The highest version among the purged tombstones of a topic, and its origin; (0, "") when there is none."""

    version: int
    origin: str


NOTHING_PURGED = Purged(0, "")


class PeerState(NamedTuple):
    """What is remembered of a peer that this instance sends to."""

    identity: Identity | None
    """Who it was when it last acknowledged; None: it never has."""
    acknowledged: int
    """Of this instance's sequences; 0: nothing yet."""
    missed: bool
    """Tombstones have been purged by age that it had not acknowledged: what only it has may be dead (rule R4)."""


class SourceState(NamedTuple):
    """What is remembered of an instance that this one receives from."""

    identity: Identity
    cursor: int | None
    """What of its journal has been applied. None: it begins anew, with seeds of everything."""
    wait_for: int
    """Not 0: before its changes are taken, it must have acknowledged this sequence of ours (rule R4)."""
    topics_pattern: str
    filter: str
    """What the link carried when it began. Another pattern or filter: what it carried does not tell what is here."""
    guarded: bool
    """Until all topics that were to be seeded are: rows, of those that are not yet, that this instance does not have,
    and that are not above what it has purged, are dead (rule R4)."""


class TopicAnswer(NamedTuple):
    """What a receiver says of one topic of a link."""

    topic: str
    wanted: bool = False
    """It has to be seeded."""
    after_key: bytes = b""
    """Where its seed goes on."""
    reason: Reason = types_pb2.ERROR_REASON_UNSPECIFIED
    """Not UNSPECIFIED: the topic cannot be taken, and why."""
    message: str = ""


class Applied(NamedTuple):
    """What became of changes or rows."""

    applied: int = 0
    superseded: int = 0
    """Lost against a newer version that was there: what last-writer-wins discards (rule R3)."""
    known: int = 0
    """There already."""
    dropped: int = 0
    """Dead by what the sender, or this instance, has purged: dropped here, or not taken (rule R4)."""
    refused: int = 0
    """Not taken, as no publish could have made them (rule R13)."""


class Refused(Exception):
    """Why a store did not do it: a reason from the one vocabulary, and a message for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


Done: TypeAlias = Callable[[Applied | Refused], None]


class SeedRange(NamedTuple):
    """Which part of a topic's snapshot a chunk is."""

    topic: str
    first: bool
    last: bool
    after_key: bytes
    upto_key: bytes


class Version(NamedTuple):
    """A live record for comparing: its version, and a checksum over version, origin, stamp and payload."""

    key: bytes
    version: int
    checksum: int


class Clock(Protocol):
    """The one clock of an instance."""

    def now_micros(self) -> int:
        """Microseconds since the epoch; never runs backwards (rule L15)."""


class Sending(Protocol):
    """What a store offers the sender of a link. Except `read` and `seed` everything is quick."""

    @property
    def identity(self) -> Identity:
        """Who this instance is."""

    @property
    def authoritative(self) -> bool:
        """Whether its data were restored, and are to be taken as they are (rule J14)."""

    def head(self) -> int:
        """The last sequence that is durable."""

    @property
    def topics_version(self) -> int:
        """Another number whenever what `topics` says may be another. Quick, however many there are."""

    def topics(self, pattern: str) -> list[TopicKind]:
        """The topics whose whole name matches; by name. The reserved ones are never among them."""

    def shares(self, pattern: str, topic: str) -> bool:
        """Whether a link with this pattern carries a topic of this name: one that is there, or would. Quick."""

    def read(self, peer: Identity, after: int, *, topics: Collection[str], filter_text: str, bytes_max: int) -> Piece:
        """The changes of these topics behind `after`, but for those that came from `peer` itself, from its very id and
        epoch (rule R7: one that was restored may have lost what it sent), and for expiries that took place here (rule
        R2; one that came with a seed goes on: the row that it ended may never have been in this journal). About
        `bytes_max`, more for a single large commit. Reads; from any thread."""

    def seed(self, topic: str, after_key: bytes, *, filter_text: str, bytes_max: int) -> SeedPart:
        """The rows behind a key, as they are durable now. Raises Refused when the topic is gone. Reads; from any
        thread."""

    def purged(self, topic: str) -> Purged:
        """What has been purged of the topic's tombstones, ever."""

    def peer(self, name: str) -> PeerState:
        """What is remembered of a peer."""

    def acknowledged(self, name: str, identity: Identity, sequence: int) -> None:
        """The peer has everything up to there, seeds included. Remembered at once, on disk before long; the journal
        behind may go. A sequence below the remembered one is taken, too. When another identity than this one had
        acknowledged before, `missed` is set: what was purged because that one had it may be alive in this one."""

    def reseeded(self, name: str) -> None:
        """The peer has had everything anew: it has missed nothing any more."""


class Receiving(Protocol):
    """What a store offers the receiver of a link."""

    @property
    def identity(self) -> Identity:
        """Who this instance is."""

    def source(self, name: str) -> SourceState | None:
        """What is remembered of a sender, as it is on disk; None: it has never been welcomed."""

    @property
    def topics_version(self) -> int:
        """Another number whenever what `answers` says of the same topics may be another."""

    def answers(self, name: str, topics: Sequence[TopicKind]) -> list[TopicAnswer]:
        """What is wanted of a sender's topics, one answer each, in their order. `topics` are all that the link carries:
        of those which are not among them, or are refused, changes are passed over from now on, so that they have to be
        seeded anew when they come back. That is remembered no later than the next commit that moves the cursor."""

    def answer(self, name: str, topic: TopicKind) -> TopicAnswer:
        """What `answers` says of one of them; nothing is remembered. Quick, however many there are."""

    def begin(
        self, identity: Identity, *, topics_pattern: str, filter_text: str, cursor: int, guarded: bool, done: Done
    ) -> None:
        """From now on the sender is this one, its changes come from behind `cursor` on, and each of its topics has to
        be seeded. What it had to wait for counts no more."""

    def wait_for(self, name: str, sequence: int, done: Done) -> None:
        """Before anything of the sender is taken, it must have acknowledged this sequence of ours."""

    def apply(
        self, name: str, *, after: int, upto: int, chunks: Sequence[Packed], origins: Sequence[str], done: Done
    ) -> None:
        """Applies changes by version, and moves the sender's cursor to `upto`. Topics that this instance refuses are
        passed over, and have to be seeded anew. Answers Refused: CLOCK_SKEW, BATCH_DAMAGED (also when `after` is behind
        the cursor, PT3), RESEED_PENDING (PT4), or what the store has failed with; nothing is applied then."""

    def merge(
        self, name: str, part: SeedRange, *, chunk: bytes, origins: Sequence[str], purged: Purged, done: Done
    ) -> None:
        """Merges rows by version, and remembers how far the topic's seed is: with `first` from here on; else only when
        the part begins at or in front of the place where the seed is. `purged`, not (0, ""): what this instance
        alone has in the range of the part, at or below it, is dropped, and written to a file first. A tombstone takes
        its place, one version above it and by this instance, and goes to the peers: else whoever else has it would keep
        it. What a guarded source brings, and is not taken, leaves such a tombstone, too. And from now on it counts as
        purged here. Refused as in `apply`."""


class Tombstones(Protocol):
    """What is done about tombstones (rule R4)."""

    def purge(
        self, upto: int, *, held: Collection[str], made_before_micros: int, unread: Collection[str], done: Done
    ) -> None:
        """Removes tombstones with sequences up to `upto`, but of the topics `held`, and all those made before a time.
        For the latter it is remembered that the peers which have not acknowledged them (of topics `held`: all peers)
        have missed them, and that the sources `unread` have to wait for them. Bounded; `done` hears how many have gone
        (`applied`), and is to call again until it was 0."""


class Comparing(Protocol):
    """What a store offers for verify and repair (rule R10). All of it reads, from any thread, but `merge_rows`."""

    def checksums(self, topic: str, buckets: int, now_micros: int) -> tuple[list[int], list[int], int]:
        """Sums of checksums modulo 2^64, and numbers, of the records that are not due by then, bucket by bucket; and
        how many were left out, as their key cannot be told in a message (rule R13)."""

    def versions(self, topic: str, buckets: int, wanted: Collection[int], now_micros: int) -> list[Version]:
        """The versions in some buckets, by key."""

    def rows(self, topic: str, keys: Sequence[bytes]) -> tuple[bytes, Sequence[str]]:
        """Records and tombstones of these keys, packed as in a seed, and the origins' names."""

    def check(self, topic: TopicKind) -> TopicAnswer:
        """Whether this instance can take that topic of another instance."""

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], done: Done, *, peer: str) -> None:
        """Merges rows of a peer by version, as local changes would be: they go on to every peer."""


class Store(Sending, Receiving, Tombstones, Comparing, Clock, Protocol):
    """All of it."""
