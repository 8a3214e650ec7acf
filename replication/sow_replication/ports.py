"""The store as replication needs it, as protocols. The server has the one implementation; tests have others.

Times are microseconds of the store's guarded clock. A chunk is opaque here: it has the layout of a journal chunk, which
only stores read. Sequences are positions in one instance's journal and mean nothing in another's.

    [1]  The results of `read` and `seed` are durable: no power cut takes them back (rule S7).
    [2]  `apply`, `merge` and `begin` are one commit each, which also stores the position (rule R6). The answer comes on
         the thread that makes all calls, once the commit is durable, or is the reason why nothing was applied.
    [3]  Cursors do not skip. An `apply` that begins after the cursor is refused, one that begins before it is harmless,
         and no `apply` moves the cursor back. So several may be under way: if one is refused, so are the later ones.
    [4]  While a source has to wait (`SourceState.wait_for`), `apply` and `merge` are refused with RESEED_PENDING.
    [5]  Changes that are applied twice, or in another order than they were written, leave the greatest (version,
         origin) of each key (rule R3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sow.v1 import types_pb2
from sow_peering import (
    Checksums,
    DurableMark,
    DurablesPart,
    InstanceIdentity,
    JournalPart,
    MergeCounts,
    Packed,
    PeerState,
    PublisherMark,
    PublisherPart,
    Purged,
    RecordVersion,
    SeedPart,
    SeedRange,
    TopicAnswer,
    TopicKind,
)
from sow_peering.answers import Answer


@dataclass(frozen=True, slots=True)
class PeerCaller:
    """The instance at the other end of a call, as its credential says (rule R11)."""

    name: str | None = None
    """Its name; None: it has proved none, so it may use any name that is accepted."""
    permits: Callable[[str], bool] = lambda topic: True
    """True if it may send a topic, and compare it, by the topic's name."""

    def is_named(self, name: str) -> bool:
        """True if it may use a name."""
        return self.name is None or self.name == name


ANY_CALLER = PeerCaller()


Reason: TypeAlias = types_pb2.ErrorReason.ValueType
"""A number of `sow.v1.ErrorReason`."""


class SourceState(Protocol):
    """The stored state of an instance that this one receives from."""

    @property
    def identity(self) -> InstanceIdentity:
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
    """A refusal of a store: a reason of `sow.v1.ErrorReason`, and a message for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


Counted: TypeAlias = Answer[MergeCounts, Refused]
"""The answer of a change."""


class Clock(Protocol):
    """The clock of an instance."""

    def now_micros(self) -> int:
        """Microseconds since the epoch; never runs backwards (rule L15)."""


class Sending(Protocol):
    """The store for the sender of a link. All methods are quick, except `read` and `seed`."""

    @property
    def identity(self) -> InstanceIdentity:
        """This instance."""

    @property
    def cluster(self) -> str:
        """The cluster of this instance; empty: none."""

    @property
    def authoritative(self) -> bool:
        """True if its data were restored and count as they are (rule J14)."""

    def head(self) -> int:
        """The last sequence that is durable."""

    @property
    def topics_version(self) -> int:
        """A number that changes whenever the result of `topics` may have changed. Quick, however many topics there
        are."""

    def topics(self, pattern: str) -> list[TopicKind]:
        """The topics whose whole name matches, in the order of names, without reserved ones."""

    def shares(self, pattern: str, topic: str) -> bool:
        """True if a link with this pattern carries, or would carry, a topic of this name. Quick."""

    def read(
        self, peer: InstanceIdentity, after: int, *, topics: Collection[str], filter_text: str, bytes_max: int
    ) -> JournalPart:
        """The changes of these topics after the sequence `after`; about `bytes_max`, more for a single large commit.

        Left out are changes that came from `peer` with the same id and epoch (rule R7; a restored peer may have lost
        the changes that it sent), and expiries that took place here (rule R2). An expiry that came with a seed is
        included: the row that it ended may never have been in this journal. Blocks; from any thread."""

    def seed(self, topic: str, after_key: bytes, *, filter_text: str, bytes_max: int) -> SeedPart:
        """The durable rows after a key. Raises Refused when the topic has been deleted. Blocks; from any thread."""

    def publishers(self, topics: Collection[str], after_id: str) -> PublisherPart:
        """The durable marks of publishers, of these topics alone, behind an earlier part. Blocks; from any thread."""

    def purged(self, topic: str) -> Purged:
        """The purge mark of the topic."""

    def peer(self, name: str) -> PeerState:
        """The stored state of a peer."""

    def acknowledged(self, name: str, identity: InstanceIdentity, sequence: int) -> None:
        """The peer has everything up to the sequence, seeds included. In force at once, on disk within seconds; the
        journal up to there may be pruned. A sequence below the stored one is accepted, too. If another identity had
        acknowledged before, `missed` is set: records whose tombstones were purged because that one had them may be
        alive in this one."""

    def reseeded(self, name: str) -> None:
        """The peer has been seeded anew with everything: clears `missed`."""


class LinkTexts(Protocol):
    """The languages of the patterns and filters of links. From any thread."""

    def pattern_fault(self, text: str) -> str:
        """The reason why a text is no pattern; empty: it is one."""

    def filter_fault(self, text: str) -> str:
        """The reason why a text is no filter; empty: it is one."""


class Receiving(Protocol):
    """The store for the receiver of a link."""

    @property
    def identity(self) -> InstanceIdentity:
        """This instance."""

    @property
    def cluster(self) -> str:
        """The cluster of this instance; empty: none."""

    def source(self, name: str) -> SourceState | None:
        """The stored state of a sender; None: it has never been welcomed, or is disabled."""

    @property
    def disabled(self) -> Mapping[str, str]:
        """Senders whose stored state cannot be used, by name, each with the fault. Nothing of them is taken until an
        operator removes that state (rule R14)."""

    @property
    def topics_version(self) -> int:
        """A number that changes whenever the answers about the same topics may have changed."""

    def answers(self, name: str, topics: Sequence[TopicKind]) -> list[TopicAnswer]:
        """One answer per topic of a sender, in their order. `topics` are all topics of the link. From now on, changes
        of any other topic, and of refused ones, are skipped, so such a topic has to be seeded when it comes back. This
        is stored with the next commit that moves the cursor, at the latest."""

    def answer(self, name: str, topic: TopicKind) -> TopicAnswer:
        """The answer about one topic; stores nothing. Quick, however many topics there are."""

    def begin(
        self,
        identity: InstanceIdentity,
        *,
        topics: str,
        filter_text: str,
        cursor: int,
        missing_is_deleted: bool,
    ) -> Counted:
        """Starts anew with a sender: its changes continue after `cursor`, and each of its topics has to be seeded.
        Clears `wait_for`."""

    def wait_for(self, name: str, sequence: int) -> Counted:
        """From now on nothing of the sender is taken until it has acknowledged this sequence of ours."""

    def apply(
        self,
        name: str,
        *,
        after: int,
        upto: int,
        chunks: Sequence[Packed],
        origins: Sequence[str],
        publishers: Sequence[PublisherMark] = (),
        traces: Sequence[str] = (),
    ) -> Counted:
        """Applies changes by version, and moves the sender's cursor to `upto`. Topics that this instance refuses are
        skipped and have to be seeded later; then, or if a single change is refused, `publishers` count for nothing.
        `traces`: as in `JournalPart`; they are for observers, and have no effect on the changes.
        The answer may be Refused, and then nothing was applied: CLOCK_SKEW,
        BATCH_DAMAGED (also when `after` lies beyond the cursor, [3]), RESEED_PENDING ([4]), or an error of the
        store."""

    def merge(self, name: str, part: SeedRange, *, chunk: bytes, origins: Sequence[str], purged: Purged) -> Counted:
        """Merges rows of a seed by version, and stores its progress: with `first` from here on, else only when the part
        begins at or before the place that the seed has reached.

        With a purge mark in `purged`, a record that only this instance has in the range of the part, and whose version
        is at or below the mark, is dropped. It is written to a file first. A tombstone takes its place, one version
        above it and by this instance, and is sent to the peers, because another instance that has the record would keep
        it. A row that is not taken under `missing_is_deleted` leaves such a tombstone, too. The mark then holds here as
        well. Refused as in `apply`."""


class SendingDurables(Protocol):
    """Replicated durables for the sender of a link (rules F14, F15)."""

    @property
    def durables_version(self) -> int:
        """Changes whenever a consumer has come or gone, or a durable begins anew. Quick."""

    @property
    def topics_version(self) -> int:
        """As of `Sending`. When it has changed, other durables may be for a peer."""

    def durables(
        self, peer: InstanceIdentity, topics: Collection[str], *, after: int, also: Collection[tuple[str, str]]
    ) -> DurablesPart:
        """The replicated durables that have changed since the change `after` (-1: all), and those in `also`, by topic
        and name: of those of these topics that the peer sends whole, as they are for this peer. To be called about once
        a second. Costs in proportion to what it returns."""


class ReceivingDurables(Protocol):
    """Replicated durables for the receiver of a link."""

    def take_durables(self, name: str, marks: Sequence[DurableMark]) -> Counted:
        """Takes over what a sender tells of its durables. A mark that cannot be taken is left out, and logged."""

    def durables_left(self, name: str) -> None:
        """The link with a sender begins, or has ended: nothing is known of its consumers."""


class Tombstones(Protocol):
    """The store for purging tombstones (rule R4)."""

    def purge(self, upto: int, *, held: Collection[str], made_before_micros: int, unread: Collection[str]) -> Counted:
        """Removes tombstones: those with sequences up to `upto`, except of the topics `held`, and all that were made
        before `made_before_micros`. For the latter it stores that peers which have not acknowledged them have missed
        them (all peers, for topics `held`), and that the sources `unread` have to wait. Bounded: answers the number
        of removed tombstones (`applied`), and the caller repeats the call until it is 0."""


class Comparing(Protocol):
    """The store for verify and repair (rule R10). All methods except `merge_rows` block, and may be called from any
    thread."""

    def checksums(self, topic: str, buckets: int, now_micros: int) -> Checksums:
        """Checksums of the records that are not due by `now_micros`, by bucket."""

    def versions(self, topic: str, buckets: int, wanted: Collection[int], now_micros: int) -> list[RecordVersion]:
        """The versions of the records in some buckets, in the order of keys."""

    def rows(self, topic: str, keys: Sequence[bytes], bytes_max: int | None = None) -> tuple[bytes, Sequence[str]]:
        """Records and tombstones of these keys, packed as in a seed, and the names of origins. Raises Refused
        RESULT_TOO_LARGE for several keys whose records have more than `bytes_max` bytes."""

    def check(self, topic: TopicKind) -> TopicAnswer:
        """The answer whether this instance can take a topic of another instance."""

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], *, peer: str) -> Counted:
        """Merges rows of a peer by version. Like local changes, they are sent to every peer."""


class Store(LinkTexts, Sending, Receiving, SendingDurables, ReceivingDurables, Tombstones, Comparing, Clock, Protocol):
    """All of these together."""
