"""The server's reports: topics, policies, durable subscriptions, the server itself, its links and its repairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from sow_client._records import Change
from sow_client._setting_values import DurableSettings, SettingValue, TopicSettings


@dataclass(frozen=True, slots=True)
class UnsoundRow:
    """A stored row that no publish could have made. Rule: R13."""

    key: bytes
    """Any bytes; may be empty."""
    reason: str
    """The reason for which a publish of it would be refused, named as in an exception."""
    message: str
    version: int
    origin: str
    """The instance that wrote it."""
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class TopicChecked:
    """The findings of a check of a topic, or its progress. Rule: R13."""

    checked: int
    """Rows that were checked."""
    unsound: int
    """Rows among them that no publish could have made."""
    removed: int
    """Unsound rows that were removed."""
    rows: tuple[UnsoundRow, ...]
    """Some of the unsound ones."""


@dataclass(frozen=True, slots=True)
class TopicStatistics:
    """Figures of a topic; expired records count in none but `overdue_records`. Rule: L16."""

    live_records: int
    stored_bytes: int
    """Key and payload bytes of the stored records, before compression, overdue ones included."""
    overdue_records: int
    """Expired records that are not yet physically removed."""
    journal_bytes: int
    """Bytes of the retained journal, before compression."""
    journal_entries: int
    floor_sequence: int
    """Highest sequence ever discarded from the journal. Rule: J1."""
    durables: int = 0
    """Durable subscriptions."""
    backlog_bytes: int = 0
    """Unacknowledged bytes of the slowest durable, which the backlog quota bounds. Rule: J9."""
    backlog_age: timedelta | None = None
    """Age of the oldest unacknowledged entry; None: there is none."""
    tombstones: int = 0
    """Kept for peers, not yet purged. Rule: R4."""
    slowest_durable: str = ""
    """The slowest durable, which has acknowledged least. Empty: there are no durables."""
    backlog_entries: int = 0
    """Its unacknowledged entries, counted before its filter."""
    full_refusals: int = 0
    """Records refused with TOPIC_FULL since the server's start. Rule: T7."""


@dataclass(frozen=True, slots=True)
class IndexStatus:
    """The state of a secondary index."""

    path: str
    complete: bool
    """True: queries use it. False: it is being built."""


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One setting in force, and its source. Rule: T2."""

    name: str
    """The name of a setting of a topic."""
    value: str
    """In the form of the command line: durations such as `7d`, binary sizes, "unlimited", "never"."""
    origin: str
    """ "topic", "config", "policy NAME", "operator policy NAME" or "default"."""


@dataclass(frozen=True, slots=True)
class ViewDefinition:
    """The definition of a view, in the form of the arguments of `create_view`. Rule: V1."""

    source: str
    """The topic whose records it is made of."""
    group_by: tuple[str, ...] = ()
    """Such as "/account" or "FLOOR(/ts / 60) AS minute"."""
    select: tuple[str, ...] = ()
    """Such as "SUM(/qty) AS qty"."""
    where: str = ""
    """The filter on records of the source; empty: all."""


@dataclass(frozen=True, slots=True)
class ViewStatus:
    """The state of a view. Rule: V6."""

    complete: bool
    """False: it is being built, and reads of it are refused with VIEW_BUILDING."""
    records_read: int
    """Records of the source that the build has read so far."""
    groups: int
    """Its records."""
    ungrouped: int
    """Records of the source that match and are in no group. Rule: Q12."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic on the server."""

    name: str
    settings: TopicSettings
    """The settings in force: values from policies and defaults are filled in. Rule: T2."""
    set_in_config: bool
    """True: declared in the configuration file, which owns it. Rule: K1."""
    create_time: datetime
    statistics: TopicStatistics | None
    """None unless requested."""
    indexes: tuple[IndexStatus, ...] = ()
    """Its secondary indexes, in the order of the settings."""
    effective: tuple[EffectiveSetting, ...] = ()
    """Every setting in force; only in a description of the topic."""
    planned_journal_bytes: int | None = None
    """Bytes of journal to plan storage for: the retained bytes plus the backlog quota; -1: unlimited. Only in a
    description of the topic.

    Rule: T2.
    """
    warnings: tuple[str, ...] = ()
    """Warnings about settings that are probably not intended; only after it was created or altered. Rule: J17."""
    view: ViewDefinition | None = None
    """None: it is no view, or this client may not see its source. Rule: V8."""
    view_status: ViewStatus | None = None
    """The state of a view; None: it is none, or this client may see a part of its records only."""

    @property
    def is_view(self) -> bool:
        """True for a view, as far as this client may know."""
        return self.view is not None or self.view_status is not None


PolicyTargetName: TypeAlias = Literal["topics", "durables"]
"""The kind of object to which a policy applies."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings for all topics, or all durables, whose names match a pattern. Rule: T2."""

    name: str
    pattern: str
    """RE2 expression that the whole name of a topic, or `topic/name` of a durable, must match."""
    priority: int
    """The highest counts; ties: the longest pattern, then the name."""
    applies_to: PolicyTargetName
    operator: bool
    """True: an operator policy. It has only limits, and no other setting can exceed them."""
    settings: Mapping[str, SettingValue]
    """Only the settings that it declares, in the form of `set_policy`."""
    matches: int
    """The number of topics or durables that take a value from it now."""
    warnings: tuple[str, ...] = ()
    """Warnings about settings that are probably not intended; only after it was set. Rule: J17."""


@dataclass(frozen=True, slots=True)
class DurableFigures:
    """Figures of a durable subscription. Unless `exact`, entries are counted before its filter. Rule: J7."""

    total_entries: int
    """Entries that it can read, acknowledged or not."""
    total_bytes: int
    """Their bytes, before compression."""
    unacknowledged_entries: int
    unacknowledged_bytes: int
    """Before compression."""
    oldest_unacknowledged_age: timedelta | None
    """None: every entry is acknowledged."""
    exact: bool
    """True: only entries that match its filter are counted."""
    set_aside_entries: int = 0
    """Entries that were set aside for the delivery limit since it was created. Rule: J15."""


@dataclass(frozen=True, slots=True)
class DurableConsumer:
    """The consumer that is attached to a durable subscription."""

    subscription: str
    """Its id, as `subscriptions` lists it, with the name of its cell in front where there are several."""
    identity: str
    address: str
    since: datetime
    position: str
    """Bookmark: everything up to here has been handed over. Empty, as the next two, if the caller may see only a part
    of the topic."""
    behind: bool
    """True: it is served from the journal."""
    queued_bytes: int
    """Bytes of the changes that wait to be handed over."""


@dataclass(frozen=True, slots=True)
class Durable:
    """A durable subscription on the server. Rules: J2, J7."""

    topic: str
    name: str
    filter: str
    """In canonical form; empty: all records."""
    acknowledged: str
    """Bookmark: everything up to here is acknowledged."""
    earliest: str
    """Bookmark: the earliest position that it can be rewound to."""
    attached: bool
    """True: a consumer is attached."""
    create_time: datetime
    last_use_time: datetime
    """The time when it was last attached or last acknowledged a change."""
    settings: DurableSettings
    """The settings in force."""
    figures: DurableFigures | None
    """None in lists, unless requested."""
    replicated: bool = False
    """True: it is known at the peers, too. Rule: F14."""
    consumer_at: str = ""
    """The instance where a consumer is attached, if that is another one, and the link with it is up."""
    consumer: DurableConsumer | None = None
    """The consumer that is attached here; None: none is, or it is another identity's."""
    pin: bool = False
    """True: a pin; `last_use_time` is when it was last renewed. Rule: J18."""
    owner: str = ""
    """The identity that has created it; empty: nobody in particular. Rule: A7."""
    reader: str = ""
    """The reader of a pin, in its own words."""


@dataclass(frozen=True, slots=True)
class Browsed:
    """Unacknowledged changes of a durable subscription, all or some of them. Rule: J16."""

    entries: tuple[Change, ...]
    """As for a change reader: "put", "delete", "expire"; `delivery_count` is the number of deliveries so far."""
    bookmark: str
    """The position up to which it was searched: for `after` of the next call."""
    complete: bool
    """True: there are no changes after it."""


@dataclass(frozen=True, slots=True)
class Rewound:
    """The new position of a durable subscription. Rule: J6."""

    bookmark: str
    """Everything up to here counts as acknowledged."""
    unacknowledged_entries: int
    """Entries after it, before filtering."""


GapReason: TypeAlias = Literal["discarded", "evicted", "conflated", "backlog_ttl", "delivery_limit", "reset", "unknown"]
"""The reason of a gap: see `Gap`."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Changes that a durable subscription will never get.

    | reason | why |
    |---|---|
    | "discarded" | max_age, max_bytes or max_entries of the topic discarded it |
    | "evicted" | the backlog quota evicted it, or the bound of a consumer without `topic-admin` |
    | "conflated" | the backlog quota replaced it by the snapshot that follows |
    | "backlog_ttl" | it was unacknowledged for too long |
    | "delivery_limit" | it was delivered as often as the delivery limit allows, and was set aside |
    | "reset" | the durable was removed, by a request or because it was idle, and begins anew |
    | "unknown" | a reason that only a newer server knows |

    Rules: J5, J9, J8, J15, J10, J19.
    """

    reason: GapReason
    after: str
    """Bookmark: the gap begins after this position; empty: not known."""
    upto: str
    """Bookmark: the gap ends with this position."""
    entries: int | None
    """The number of missing changes, before filtering; None: not known."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the server."""

    instance: str
    instance_id: str
    journal_epoch: str
    server_version: str
    state: str
    """ "serving" or "failed"."""
    failure: str
    """The reason why writes have stopped; empty while serving."""
    ready_time: datetime
    clock_time: datetime
    """The guarded clock. Rule: L15."""
    sweep_paused: bool
    """True: the clock jumped and sweeping waits for it to come back, or for `accept_clock`."""
    last_sequence: int
    live_records: int
    overdue_records: int
    topics: int
    disk_bytes: int
    """The size of the data directory."""
    disk_free_bytes: int | None = None
    """On its disk. None, as the next one: an older server."""
    disk_size_bytes: int | None = None
    """All bytes of that disk."""


@dataclass(frozen=True, slots=True)
class ClockAccepted:
    """The guarded clock before and after the operator confirmed the wall clock."""

    before: datetime
    after: datetime


@dataclass(frozen=True, slots=True)
class Compacted:
    """Bytes of the data directory before and after a compaction."""

    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class LinkTopic:
    """The state of a topic that is not up to date on a link."""

    topic: str
    state: str
    """ "seeding" or "refused"."""
    message: str
    """The reason for which it was refused."""


@dataclass(frozen=True, slots=True)
class OutgoingLink:
    """A link on which an instance sends. Rules: R1, R8."""

    peer: str
    address: str
    state: str
    """ "connecting", "greeting", "seeding", "streaming", "waiting" (for the next attempt), "refused" or
    "paused"."""
    mode: str
    """ "async", "sync", or "downgraded": sync, but down for longer than `sync_timeout`, or paused."""
    topics_pattern: str
    acknowledged_sequence: int
    """The position of the peer, in the instance's own sequences."""
    lag_sequences: int
    """Sequences that it has not acknowledged."""
    lag: timedelta
    """Age of the oldest change that it has not acknowledged; zero if there is none."""
    skew: timedelta
    """The peer's clock minus the instance's; the delay of messages limits its exactness."""
    since: datetime | None
    """The time since when the link is in this state."""
    last_error: str
    """Empty: none since the link is up."""
    last_error_reason: str
    """As of an exception; empty where there is none."""
    last_error_time: datetime | None
    topics: tuple[LinkTopic, ...]
    """Those that are being seeded, or were refused."""
    origin: str = ""
    """ "file" (the configuration) or "command" (`add_peer`); empty from a server that does not tell it."""


@dataclass(frozen=True, slots=True)
class IncomingLink:
    """A link on which an instance receives. Rules: R3, R4."""

    peer: str
    state: str
    """ "connected", "seeding", "away", or "disabled": what is stored of it cannot be used, see `remove_peer`."""
    cursor: int
    """The position up to which the instance has the sender's changes, in the sender's sequences."""
    head_sequence: int
    """The last sequence that the sender has reported."""
    applied: int
    """Changes that were applied since the process started."""
    superseded: int
    """Changes that lost against a newer version since then."""
    dropped: int
    """Records that were dropped since then because they are dead according to the sender."""
    skew: timedelta
    """The sender's clock minus the instance's."""
    last_error: str
    """Empty: none since the link is up."""
    last_error_reason: str
    """As of an exception; empty where there is none."""
    last_error_time: datetime | None
    topics: tuple[LinkTopic, ...]
    """Those that are being seeded, or were refused."""
    rows_refused: int = 0
    """Rows that were left out since the process started because no publish could have made them."""
    origin: str = ""
    """As of an OutgoingLink."""


@dataclass(frozen=True, slots=True)
class ReplicationStatus:
    """The state of the links of an instance."""

    instance: str
    last_sequence: int
    """The last sequence that is on its disk."""
    outgoing: tuple[OutgoingLink, ...]
    """One per peer: first those of the configuration, in its order."""
    incoming: tuple[IncomingLink, ...]
    """The links, by the sender's name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs between two instances."""

    key: str
    version_here: int
    """0: there is no such record."""
    version_there: int
    """0: there is no such record."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of comparing one topic with a peer. Rule: R10."""

    topic: str
    records: int
    """Records that were compared at this end."""
    differing: int
    """Keys that differ."""
    differences: tuple[Difference, ...]
    """Some of them."""
    left_out: str
    """The reason why the topic was not compared; empty: it was."""
    unreadable_here: int = 0
    """Records that could not be compared because their key is empty or not UTF-8; see `check_topic`."""
    unreadable_there: int = 0
    """The same at the peer."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of repairing one topic, so that two instances have the same records. Rule: R10."""

    topic: str
    differing: int
    """Keys that differed."""
    sent: int
    """Records and tombstones that the peer took over."""
    received: int
    """Records and tombstones that this instance took over."""
    left_out: str
    """The reason why the topic was not repaired; empty: it was."""
    refused: int = 0
    """Records and tombstones that one end left out because no publish could have made them."""


@dataclass(frozen=True, slots=True)
class BackupMade:
    """A backup on the server's machine. Rule: J14."""

    name: str
    """The name of its directory in `[backup] root` of the server."""
    sequence: int
    """The sequence up to which it has everything."""
    bytes: int
    """Bytes, including the files that it shares with the store."""
