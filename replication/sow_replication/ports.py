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
from typing import Protocol, TypeAlias

from sow.v1 import types_pb2
from sow_peering import (
    Checksums,
    Identity,
    JournalPart,
    MergeCounts,
    Packed,
    PeerState,
    Purged,
    RecordVersion,
    SeedPart,
    SeedRange,
    TopicAnswer,
    TopicKind,
)

Reason: TypeAlias = types_pb2.ErrorReason.ValueType
"""One of the vocabulary of reasons."""


class SourceState(Protocol):
    """The stored state of an instance that this one receives from."""

    @property
    def identity(self) -> Identity:
        """The source."""

    @property
    def topics(self) -> str:
        """The topics pattern of the link when it began. With another pattern or filter the state does not tell which
        rows are here."""

    @property
    def filter(self) -> str:
        """The filter of the link when it began."""

    @property
    def cursor(self) -> int:
        """The last sequence of its journal that has been applied."""

    @property
    def wait_for(self) -> int:
        """Not 0: before its changes are taken, it must have acknowledged this sequence of ours (rule R4)."""

    @property
    def missing_is_deleted(self) -> bool:
        """True until every topic is seeded. Until then, a row that this instance lacks and whose version is at or below
        its purge mark counts as deleted (rule R4)."""


class Refused(Exception):
    """Why a store did not do it: a reason from the one vocabulary, and a message for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


Done: TypeAlias = Callable[[MergeCounts | Refused], None]


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

    def read(
        self, peer: Identity, after: int, *, topics: Collection[str], filter_text: str, bytes_max: int
    ) -> JournalPart:
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
        self, identity: Identity, *, topics: str, filter_text: str, cursor: int, missing_is_deleted: bool, done: Done
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

    def checksums(self, topic: str, buckets: int, now_micros: int) -> Checksums:
        """Sums of checksums modulo 2^64, and numbers, of the records that are not due by then, bucket by bucket; and
        how many were left out, as their key cannot be told in a message (rule R13)."""

    def versions(self, topic: str, buckets: int, wanted: Collection[int], now_micros: int) -> list[RecordVersion]:
        """The versions in some buckets, by key."""

    def rows(self, topic: str, keys: Sequence[bytes]) -> tuple[bytes, Sequence[str]]:
        """Records and tombstones of these keys, packed as in a seed, and the origins' names."""

    def check(self, topic: TopicKind) -> TopicAnswer:
        """Whether this instance can take that topic of another instance."""

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], done: Done, *, peer: str) -> None:
        """Merges rows of a peer by version, as local changes would be: they go on to every peer."""


class Store(Sending, Receiving, Tombstones, Comparing, Clock, Protocol):
    """All of it."""
