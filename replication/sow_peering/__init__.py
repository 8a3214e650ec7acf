"""The values that a store and the links between instances hand to each other.

Pure: this package knows nothing else of the project. The engine returns these values, and `sow_replication` sends and
receives them, so neither of the two has to know the other.

Times are microseconds of the store's clock. A `chunk` is in the layout of a journal chunk, which only stores read.
Sequences are positions in the journal of one instance and mean nothing in the journal of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = [
    "NOTHING_PURGED",
    "NO_STAMP",
    "TRACES_MAX",
    "Checksums",
    "DurableMark",
    "DurablesPart",
    "InstanceIdentity",
    "JournalPart",
    "MergeCounts",
    "Packed",
    "PeerState",
    "PublisherMark",
    "PublisherPart",
    "Purged",
    "RecordVersion",
    "SeedPart",
    "SeedRange",
    "Stamp",
    "TopicAnswer",
    "TopicKind",
]


TRACES_MAX: Final = 32
"""The most traces that travel beside changes."""


class InstanceIdentity(NamedTuple):
    """An instance: its name, its id, and the epoch of its journal (rule J14)."""

    name: str
    id: str
    epoch: str


class TopicKind(NamedTuple):
    """The settings of a topic that matter between instances (rule R12)."""

    name: str
    key: tuple[str, ...]
    message_type: str
    separator: bytes
    acts: bool
    """True if the topic acts on expiration; may differ between instances (rule R2)."""
    journal: bool = True
    """Without a journal there is nothing to ship (rule J1)."""


class TopicAnswer(NamedTuple):
    """The answer of a receiver about one topic of a link."""

    topic: str
    wanted: bool = False
    """The topic has to be seeded."""
    after_key: bytes = b""
    """The key after which its seed continues."""
    reason: int = 0
    """A number of `sow.v1.ErrorReason`. Not 0: the receiver cannot take the topic, for this reason."""
    message: str = ""


class Packed(NamedTuple):
    """A chunk of changes, or of rows, of one topic."""

    topic: str
    chunk: bytes


class PublisherMark(NamedTuple):
    """Sequences of a publisher that an instance knows (rule F11)."""

    publisher_id: str
    epoch: int
    token: int
    first: int
    last: int
    topics: tuple[str, ...]
    """The topics of the records; at least one."""
    refused: tuple[int, ...] = ()
    """The sequences among them that were not applied."""
    used_micros: int = 0
    """The last use of the publisher; 0: just now."""
    whole: bool = False
    """The records are in the rows of the topics, not in the changes that the mark comes with."""

    @property
    def size(self) -> int:
        """Its bytes in a message, about."""
        return 50 + len(self.publisher_id) + sum(map(len, self.topics)) + 5 * len(self.refused)


class PublisherPart(NamedTuple):
    """The marks of the next publishers, as of a sequence."""

    marks: Sequence[PublisherMark]
    upto: int
    """All that they tell of is in the journal up to here, or in rows."""
    last_id: str
    """Where to continue, as the store says it. Empty: these were the last ones."""


class Stamp(NamedTuple):
    """A time, and the id of the instance that has chosen it, so that no two are equal."""

    number: int
    """Microseconds, or more where another stamp was greater already."""
    instance: str


NO_STAMP: Final = Stamp(0, "")


class DurableMark(NamedTuple):
    """A replicated durable as one instance has it, for one other instance, the receiver (rules F14, F15)."""

    topic: str
    name: str
    filter: str = ""
    declared: Mapping[str, int | None] = MappingProxyType({})
    """Settings that were declared, by the names of the store."""
    born: Stamp = NO_STAMP
    buried: Stamp = NO_STAMP
    """Durables of this name that were born up to then have been deleted."""
    removed: bool = False
    """There is none of this name any more; only `buried` counts."""
    rewinds: tuple[Stamp, ...] = ()
    """Its generation: the last rewind at each instance, by the instances' ids."""
    sequence: int | None = None
    """Everything that the receiver sent up to this sequence of its own journal was acknowledged, except expiries with
    an expire time after `swept_micros`. None: no sequence is known."""
    swept_micros: int = 0
    idle_micros: int = 0
    consumer_since: int = 0
    """Not 0: a consumer is attached."""
    forced: bool = False


class DurablesPart(NamedTuple):
    """Replicated durables that have changed."""

    marks: Sequence[DurableMark]
    upto: int
    """The number of the last change that they have."""


class JournalPart(NamedTuple):
    """The changes of a journal after the sequence `after`, up to `upto`, for one link."""

    after: int
    upto: int
    """Every change after `after` and up to here is either in `chunks` or not for this link."""
    chunks: Sequence[Packed]
    origins: Sequence[str]
    """Names of the instances, by the numbers that the chunks use for origins."""
    first_commit_micros: int = 0
    """Time of the first commit in this range; 0: there was no commit."""
    last_commit_micros: int = 0
    lost: Sequence[str] = ()
    """Topics of the link whose journal has been pruned beyond `after`: they have to be seeded."""
    kinds: Sequence[TopicKind] = ()
    """Kinds of the chunks' topics after the read. Where one differs from the kind that the receiver knows, the changes
    must not be sent to it."""
    publishers: Sequence[PublisherMark] = ()
    """The publishers of the changes."""
    traces: Sequence[str] = ()
    """The traces of their commits, at most `TRACES_MAX`, each as the header `traceparent` of W3C."""


class SeedPart(NamedTuple):
    """The next rows of a topic in the order of keys: records and tombstones."""

    chunk: bytes
    """Empty: there are no rows."""
    origins: Sequence[str]
    upto_key: bytes
    """The last key of this part. Empty: the part reaches to the end of the topic."""
    kinds: Sequence[TopicKind] = ()
    """Kind of the topic after the read, as in `JournalPart`."""


class SeedRange(NamedTuple):
    """The range of a topic's keys that a part of its seed covers."""

    topic: str
    first: bool
    last: bool
    after_key: bytes
    upto_key: bytes


class Purged(NamedTuple):
    """The purge mark of a topic: the highest version among its purged tombstones, and the origin of that version."""

    version: int = 0
    """0: no tombstone of the topic has been purged."""
    origin: str = ""


NOTHING_PURGED: Final = Purged()


class MergeCounts(NamedTuple):
    """The numbers of changes or rows of another instance, by outcome."""

    applied: int = 0
    superseded: int = 0
    """A newer version was here: last-writer-wins discards the change (rule R3)."""
    known: int = 0
    """The same version was here."""
    dropped: int = 0
    """Deleted according to the purge mark of the sender or of this instance (rule R4): removed here, or not taken."""
    refused: int = 0
    """Not taken, because no publish could have made them (rule R13)."""


class PeerState(NamedTuple):
    """The stored state of an instance that this one sends to."""

    identity: InstanceIdentity | None = None
    """Its identity at its last acknowledgement; None: it has never acknowledged."""
    acknowledged: int = 0
    """The last sequence of this instance that it has acknowledged; 0: none."""
    missed: bool = False
    """Tombstones that it had not acknowledged were purged by age: records that only it has may be deleted ones (rule
    R4)."""


class Checksums(NamedTuple):
    """Checksums of a topic; the lists have one entry per bucket."""

    sums: list[int]
    """Sums of the records' checksums, modulo 2^64."""
    records: list[int]
    unreadable: int
    """Records of the whole topic that are left out, because a message cannot hold their key (rule R13)."""


class RecordVersion(NamedTuple):
    """A live record for comparing."""

    key: bytes
    version: int
    checksum: int
    """Over version, origin, stamp and payload."""
