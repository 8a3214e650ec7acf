"""The values that callers exchange with the store: requests, outcomes, records, settings of topics.

Times are int microseconds since the epoch, ttls int microseconds; `NEVER` is the expire time of a record that never
expires (inside the server only: the wire spells it out, rule L2).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, NamedTuple, TypeAlias, overload

from sow_server.engine.values.errors import Reason, StoreError

NEVER: Final = 2**63 - 1
MICROS: Final = 1_000_000
TTL_MAX_MICROS: Final = 3_653 * 86_400 * MICROS
"""Longest lifetime: ten years with their leap days (rule L18)."""


class MessageType(enum.StrEnum):
    """Encoding of a topic's payloads (rule K2)."""

    JSON = "json"
    MSGPACK = "msgpack"
    FIX = "fix"
    NVFIX = "nvfix"
    BINARY = "binary"


class Expiration(enum.StrEnum):
    """The ways in which a topic's records expire, or do not (rule L3)."""

    DISABLED = "disabled"
    ENABLED = "enabled"
    REJECT = "reject"


class LifetimeKind(enum.IntEnum):
    """The way in which a publisher gives a lifetime (rule L2); numbered as in `sow.v1.LifetimeKind`."""

    ABSENT = 0
    TTL = 1
    EXPIRE_TIME = 2
    NEVER = 3


class Lifetime(NamedTuple):
    """A lifetime as a publisher gives it: `micros` is a ttl or an expire time by `kind`, else 0."""

    kind: LifetimeKind
    micros: int = 0


class LifetimesOfOneKind(Sequence[Lifetime]):
    """A column of lifetimes that are all ttls, or all expire times: numbers instead of an object for each record."""

    __slots__ = ("kind", "micros")

    def __init__(self, kind: LifetimeKind, micros: Sequence[int]) -> None:
        self.kind = kind
        self.micros = micros

    def __len__(self) -> int:
        return len(self.micros)

    @overload
    def __getitem__(self, at: int) -> Lifetime: ...
    @overload
    def __getitem__(self, at: slice) -> LifetimesOfOneKind: ...
    def __getitem__(self, at: int | slice) -> Lifetime | LifetimesOfOneKind:
        if isinstance(at, slice):
            return LifetimesOfOneKind(self.kind, self.micros[at])
        return Lifetime(self.kind, self.micros[at])

    def __iter__(self) -> Iterator[Lifetime]:
        # Does the same as `Lifetime._make`, without a Python call for each entry.
        return map(tuple.__new__, repeat(Lifetime), zip(repeat(self.kind), self.micros, strict=False))


ABSENT: Final = Lifetime(LifetimeKind.ABSENT)
PERMANENT: Final = Lifetime(LifetimeKind.NEVER)


class TtlMode(enum.IntEnum):
    """The effect of an update on the stamp of a live record (rule L6)."""

    RESET = 1
    KEEP = 2
    EXTEND = 3
    """The later of both stamps."""


class TouchOnly(enum.IntEnum):
    """The records that a touch changes (rule L19); numbered as in `sow.v1.TouchOnly`."""

    LATER = 1
    """Those that get a later stamp."""
    EARLIER = 2
    """Those that get an earlier stamp."""
    WITHOUT = 3
    """Those that never expire."""
    WITH = 4
    """Those that have a stamp."""


class Durability(enum.IntEnum):
    """The moment when a write is acknowledged (rule P5); numbered as in `sow.v1.Durability`."""

    FSYNC = 1
    BUFFERED = 2
    REPLICATED = 3
    """The engine treats it as FSYNC; the wait for peers takes place outside of the engine."""


class ConditionKind(enum.IntEnum):
    """The condition on the live record under which a write is applied (rule P3)."""

    IF_ABSENT = 1
    IF_PRESENT = 2
    IF_VERSION = 3


class Condition(NamedTuple):
    """A condition; `version` counts for IF_VERSION only."""

    kind: ConditionKind
    version: int = 0


class PublisherPosition(NamedTuple):
    """The publisher, and the sequence of the request's first record (rule P6)."""

    publisher_id: str
    epoch: int
    first_sequence: int
    unit: int = 0
    """The unit of work to which the records belong; 0: none."""
    unit_done: bool = False
    """True if the request ends its unit."""
    token: int = 0
    """Tells publishers apart that have the same epoch from two instances; 0: none was given (rule F12)."""


class OpenedPublisher(NamedTuple):
    """The answer to a publisher that asked for a new epoch (rule P6)."""

    epoch: int
    unit_done: bool = False
    """The unit that it named is finished already, so no epoch was begun."""
    unit_records: int = 0
    """Records of that unit in the attempt that finished it; 0 if a later unit is finished, too."""
    token: int = 0
    """Belongs to the epoch; 0: none was begun."""


RecordMatcher = Callable[[bytes, bytes], bool]
"""A function that is True if a record is selected, by its record key and its stored value (header and payload)."""


@dataclass(frozen=True, slots=True)
class PermittedRows:
    """The records that a caller may see or write, in a topic where these are not all (rule A4)."""

    judge: Callable[[Sequence[bytes], Sequence[bytes]], Sequence[bool]]
    """From record keys and payloads: whether each of them is one. In columns, because a call for each record would
    cost as much as the test itself."""
    reads_payloads: bool
    """False: the key decides, so a new record is one if the record that it replaces is one, and payloads may be
    anything."""

    def has(self, key: bytes, payload: bytes) -> bool:
        """The same for one record."""
        return self.judge((key,), (payload,))[0]


class PublishChannel:
    """Shared by the requests of one publish stream: once it is broken, no later request of the stream is applied (rule
    P6)."""

    __slots__ = ("broken",)

    def __init__(self) -> None:
        self.broken = False


@dataclass(slots=True, eq=False)
class Publish:
    """Records to put, in columns; every column that is not None is as long as `payloads`."""

    topic: str
    payloads: Sequence[bytes]
    keys: Sequence[str] | None = None
    """With `removals`, an empty text stands for a record without a key."""
    lifetime: Lifetime = ABSENT
    lifetimes: Sequence[Lifetime] | None = None
    ttl_mode: TtlMode = TtlMode.RESET
    conditions: Sequence[Condition | None] | None = None
    durability: Durability = Durability.FSYNC
    atomic: bool = False
    publisher: PublisherPosition | None = None
    channel: PublishChannel | None = None
    want_results: bool = False
    delta: bool = False
    """True if payloads are merged into the live records (rule P2)."""
    unset_paths: Sequence[str] = ()
    """Fields to remove from each record; only with `delta`."""
    encoded_as: str = ""
    """The message type that documents were encoded for, and its separator; empty: they are bytes of the caller's."""
    permits: PermittedRows | None = None
    """Must have each new record, and the live record that it replaces (rule A4); None: all may be written."""
    removals: Sequence[bool] | None = None
    """Which of the records are removals (rule P11): of these, the payload may only give the key. None: none is."""
    removal_permits: PermittedRows | None = None
    """A live record that it does not have, or `permits`, counts as absent for a removal (rule A4)."""
    refused: StoreError | None = None
    """Why each record of this request of a stream is refused, if that was found before it was queued (rule P4)."""


@dataclass(slots=True, eq=False)
class Touch:
    """Keys whose records get a new lifetime, without a payload (rule P8)."""

    topic: str
    keys: Sequence[str]
    lifetime: Lifetime = ABSENT
    condition: Condition | None = None
    durability: Durability = Durability.FSYNC
    permits: PermittedRows | None = None
    """A record that it does not have counts as absent (rule A4)."""
    only: TouchOnly | None = None
    """The records to touch, by their present stamp (rule L19); None: all."""
    atomic: bool = False
    versions: Sequence[int] | None = None
    """A version for each key, which its record must have; None: no such condition."""
    below_micros: int | None = None
    """For a read that renews (rule L20): only records with less left are touched, in one commit. `NEVER` is left of a
    record that never expires. None: all, in as many commits as it takes."""


@dataclass(slots=True, eq=False)
class Delete:
    """Records to delete: by keys, or by a payload whose key is derived as for a publish (rule D1)."""

    topic: str
    keys: Sequence[str | bytes] | None = None
    """Bytes: the key as it is stored, whatever its bytes are."""
    payload: bytes | None = None
    durability: Durability = Durability.FSYNC
    topic_id: int | None = None
    """The topic in which the keys were found. If another topic has its name by now, the delete is refused."""
    matches: RecordMatcher | None = None
    """The condition that a record must still meet when its turn comes; None: no condition (rule D2)."""
    publisher: PublisherPosition | None = None
    """The publisher that deletes: refused once it has begun a later epoch, or its unit is finished (rule P6)."""


class RestampMode(enum.IntEnum):
    """The way in which a restamp changes a lifetime (rule L13); numbered as in `sow.v1.RestampMode`."""

    SET = 1
    CAP = 2
    """The lifetime is a bound: later stamps are lowered to it."""
    CLEAR = 3


@dataclass(slots=True, eq=False)
class Restamp:
    """Keys whose live records get a new lifetime from an administrator, where they have another one (rule L13).

    `topic_id` and `matches` as in `Delete`; `lifetime` is ABSENT with CLEAR.
    """

    topic: str
    keys: Sequence[str | bytes]
    mode: RestampMode
    lifetime: Lifetime = ABSENT
    durability: Durability = Durability.FSYNC
    topic_id: int | None = None
    matches: RecordMatcher | None = None


Request: TypeAlias = Publish | Touch | Delete | Restamp


class Refusal(NamedTuple):
    """One record that was not applied."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs of a refusal
    reason: Reason
    message: str
    current_version: int = 0


class Applied(NamedTuple):
    """One record that was applied. A duplicate has its first version and sequence, or 0 once they are forgotten."""

    key: str
    version: int
    expire_time_micros: int
    sequence: int
    ttl_ignored: bool = False
    duplicate: bool = False
    expire_time_known: bool = True
    """False: the expire time of this duplicate is forgotten."""
    delivered: int | None = None
    """The number of attached subscribers that matched a record that was due at once (rule L7)."""
    removed: bool = False
    """True for a removal that has deleted a record; one that found none has version and sequence 0 (rule P11)."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a request. `results` (one per record) are given only if the request asks for them."""

    durability: Durability = Durability.FSYNC
    applied: int = 0
    duplicates: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    last_version: int = 0
    last_sequence: int = 0
    last_duplicate_version: int = 0
    last_duplicate_sequence: int = 0
    """The sequence of the last duplicate; 0 once they are forgotten."""
    ttls_ignored: int = 0
    """Records that were applied with a lifetime that the topic does not act on (rule L3)."""
    removed: int = 0
    """Applied removals that have deleted a record (rule P11)."""
    refused: StoreError | None = None
    """Why each of its records, or of the last ones, was refused, for a fault of the whole request of a stream."""
    results: list[Applied | Refusal] | None = None


class Record(NamedTuple):
    """A record as stored (rule K6); `key` is the UTF-8 of the record key."""

    key: bytes
    payload: bytes
    version: int
    publish_time_micros: int
    expire_time_micros: int
    origin: int
    sequence: int


class BacklogAction(enum.StrEnum):
    """The reaction of the store beyond a topic's backlog quota (rule J9)."""

    HOLD = "hold"
    REJECT = "reject"
    EVICT = "evict"
    CONFLATE = "conflate"


class OnMissing(enum.StrEnum):
    """The treatment of dead letters while their target does not exist (rule T3)."""

    RETAIN = "retain"
    DROP = "drop"


class Caps(NamedTuple):
    """The most that publishes may make of a topic (rule T6); NEVER: any number."""

    records: int
    size: int
    """Bytes of keys and payloads."""


class TopicSettings(NamedTuple):
    """The settings of a topic. None: no such bound, or unlimited."""

    key: tuple[str, ...] = ()
    message_type: MessageType = MessageType.JSON
    expiration: Expiration = Expiration.DISABLED
    default_ttl_micros: int | None = None
    min_ttl_micros: int | None = None
    max_ttl_micros: int | None = None
    journal: bool = True
    separator: bytes = b"\x01"
    retain_time_micros: int | None = 600 * MICROS
    retain_bytes: int | None = 256 * 2**20
    index: tuple[str, ...] = ()  # type: ignore[assignment]  # hides tuple.index, which nobody needs of settings
    max_age_micros: int | None = None
    max_bytes: int | None = None
    max_entries: int | None = None
    backlog_ttl_micros: int | None = None
    backlog_quota_bytes: int | None = None
    backlog_quota_age_micros: int | None = None
    backlog_action: BacklogAction = BacklogAction.HOLD
    durable_idle_ttl_micros: int | None = None
    idle_ttl_micros: int | None = None
    publish_is_use: bool = False
    only_if_empty: bool = False
    auto_delete: bool = False
    dead_letter: str = ""
    dead_letter_by_key: bool = False
    on_missing: OnMissing = OnMissing.RETAIN
    backlog_quota_entries: int | None = None
    delivery_limit: int | None = None
    """The delivery limit of the topic's durables (rule J15)."""
    replicate_durables: bool = False
    max_records: int | None = None
    """The cap of the topic's stored records (rule T6)."""
    max_stored_bytes: int | None = None
    """The cap of the bytes of their keys and payloads."""

    @property
    def caps(self) -> Caps | None:
        """The caps of the topic; None: it has none."""
        if self.max_records is None and self.max_stored_bytes is None:
            return None
        return Caps(
            NEVER if self.max_records is None else self.max_records,
            NEVER if self.max_stored_bytes is None else self.max_stored_bytes,
        )

    @property
    def has_quota(self) -> bool:
        """True if there is a backlog quota (rule J9)."""
        return (
            self.backlog_quota_bytes is not None
            or self.backlog_quota_age_micros is not None
            or self.backlog_quota_entries is not None
        )

    @property
    def acts_on_expiration(self) -> bool:
        """True if a stamp makes a record expire (rule L7). Stamps that are older than the setting `reject` still
        count."""
        return self.expiration is not Expiration.DISABLED


class DurableSettings(NamedTuple):
    """The settings in force on a durable subscription. None: unlimited, or never."""

    retain_time_micros: int | None = TopicSettings().retain_time_micros
    retain_bytes: int | None = TopicSettings().retain_bytes
    backlog_ttl_micros: int | None = None
    idle_ttl_micros: int | None = None
    delivery_limit: int | None = None
    replicated: bool = False


class TopicStatistics(NamedTuple):
    """Figures of a topic (rule L16)."""

    stored_records: int
    stored_bytes: int
    journal_bytes: int
    journal_entries: int
    floor_sequence: int
    durables: int = 0
    backlog_bytes: int = 0
    """Entries that the slowest durable has not acknowledged (rule J9)."""
    backlog_age_micros: int | None = None
    """The age of the oldest entry of that backlog."""
    tombstones: int = 0
    """Kept for peers (rule R4)."""
    slowest_durable: str = ""
    backlog_entries: int = 0
    """Before its filter."""
    full_refusals: int = 0
    """Records refused because the topic was full, since the start (rule T6)."""
