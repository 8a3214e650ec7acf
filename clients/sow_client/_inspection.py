"""Looking at a server: requests, and answers into values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Final, Literal, TypeAlias

from sow.v1 import admin_pb2
from sow_client._records import Ttl, datetime_of, invalid, ttl_micros

# ---- the expiry horizon ----

SPANS_MAX: Final = 1_000
LIFETIME_MICROS_MAX: Final = 3_653 * 86_400_000_000
"""Bounds of the server (rules L2, L22): their errors name the field of the wire, and these the argument."""


@dataclass(frozen=True, slots=True)
class TopicDue:
    """The records of one topic that fall due. Rule: L22."""

    topic: str
    overdue: int
    """Records that are overdue and not yet removed; no read returns them."""
    due: tuple[int, ...]
    """Records that fall due in each span of the horizon."""
    next_time: datetime | None
    """When the first of them falls due. None: none was counted."""
    incomplete: bool
    """True: expiration was just enabled, and some records are not counted yet."""


@dataclass(frozen=True, slots=True)
class ExpiryHorizon:
    """Records by when they fall due, of one instant."""

    as_of: datetime
    spans: tuple[timedelta, ...]
    """The end of each span, from `as_of`; the first one begins there, the others where the one before ends."""
    topics: tuple[TopicDue, ...]
    """The topics, by name."""
    complete_upto: datetime
    """Everything that falls due up to here is counted. Before the last end where there was too much to count."""
    exact_upto: datetime
    """The counts of spans that end at or before this are exact. In later ones, entries of the expiry index are counted:
    a record whose lifetime was changed may count at its former time, also twice, and a deleted one may count."""

    @property
    def complete(self) -> bool:
        """True if all spans are counted to their ends."""
        return not self.spans or self.complete_upto >= self.as_of + self.spans[-1]

    @property
    def exact(self) -> bool:
        """True if all that is counted is exact."""
        return not self.spans or self.exact_upto >= min(self.complete_upto, self.as_of + self.spans[-1])


def horizon_request(topic: str | None, spans: Iterable[Ttl], *, exact: bool) -> admin_pb2.GetExpiryHorizonRequest:
    """The request for a horizon."""
    ends = list(spans)
    edges = [ttl_micros(span, "spans") for span in ends]
    for number, end in enumerate(ends):
        if edges[number] <= (edges[number - 1] if number else 0):
            before = f"behind {ends[number - 1]!r}" if number else "is no time from now"
            raise invalid("spans", f"{end!r} {before}; the ends of the spans rise, such as 5m, 2h")
        if edges[number] > LIFETIME_MICROS_MAX:
            raise invalid("spans", f"{end!r} is longer than the longest lifetime, 3653d")
    if len(ends) > SPANS_MAX:
        raise invalid("spans", f"{len(ends)} ends are more than the limit of {SPANS_MAX}")
    return admin_pb2.GetExpiryHorizonRequest(topic=topic or "", edge_micros=edges, exact=exact)


def horizon(response: admin_pb2.GetExpiryHorizonResponse) -> ExpiryHorizon:
    """The horizon."""
    return ExpiryHorizon(
        datetime_of(response.as_of_micros),
        tuple(timedelta(microseconds=edge) for edge in response.edge_micros),
        tuple(
            TopicDue(
                one.topic,
                one.overdue,
                tuple(one.due),
                datetime_of(one.next_micros) if one.HasField("next_micros") else None,
                one.incomplete,
            )
            for one in response.topics
        ),
        datetime_of(response.upto_micros),
        datetime_of(response.exact_upto_micros),
    )


def joined(horizons: Sequence[ExpiryHorizon]) -> ExpiryHorizon:
    """The horizon of several cells, which count from clocks of their own: it is complete, and exact, as far as each of
    theirs is."""
    first, *others = horizons
    if not others:
        return first
    as_of = min(one.as_of for one in horizons)
    return ExpiryHorizon(
        as_of,
        first.spans,
        tuple(sorted((topic for one in horizons for topic in one.topics), key=attrgetter("topic"))),
        as_of + min(one.complete_upto - one.as_of for one in horizons),
        as_of + min(one.exact_upto - one.as_of for one in horizons),
    )


# ---- subscriptions ----


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The list of a live result in the memory of the server.

    Rule: S12.
    """

    records: int
    """Its records, with the reserve behind the last one; or the results of groups."""
    bytes: int
    runs: int
    """How often the records were read, or the query of groups was run, since the list began."""
    followers: int
    """The subscriptions that share it, this one included."""


@dataclass(frozen=True, slots=True)
class ActiveSubscription:
    """A subscription that is under way at a server."""

    id: str
    """Where there are several cells, it has the name of its cell in front, as in "b/u4"."""
    session: str
    """The session of its caller, as `sessions` lists it."""
    identity: str
    address: str
    since: datetime
    topic: str
    """Empty for a pattern of topics."""
    topic_pattern: str
    filter: str
    """As it was given; empty: all records. A longer one is cut short after 999 characters, and "…" follows."""
    durable: str
    """The durable that it consumes; empty: none."""
    position: str
    """Bookmark: everything up to here has been sent."""
    behind: bool
    """True: it is served from the journal, as it began in the past or could not keep up."""
    queued_bytes: int
    """Bytes of the changes that wait to be sent."""
    kept: KeptResult | None = None
    """The list that the server keeps for a live result; None: it is none, or the server is older."""


def subscription(message: admin_pb2.ActiveSubscription) -> ActiveSubscription:
    """A subscription."""
    return ActiveSubscription(
        message.id,
        message.session,
        message.identity,
        message.address,
        datetime_of(message.since_micros),
        message.topic,
        message.topic_pattern,
        message.filter,
        message.durable,
        message.position,
        message.behind,
        message.queued_bytes,
        KeptResult(message.kept.records, message.kept.bytes, message.kept.runs, message.kept.followers)
        if message.HasField("kept")
        else None,
    )


# ---- figures ----

HISTORY_MICROS_MAX: Final = 3_600_000_000
"""Bound of the server (rule X11): its error names the field of the wire."""


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """Figures of one topic."""

    topic: str
    records: int
    """Stored records, overdue ones included."""
    record_bytes: int
    journal_entries: int
    changes_per_second: float
    """The rate of changes of its journal; 0 without one."""
    bytes_per_second: float
    filled: float = 0.0
    """Its records by `max_records`, or their bytes by `max_stored_bytes`, the greater one: 1 is full. 0: no cap.
    Rule: T7."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Figures of one link on which the server sends."""

    peer: str
    state: str
    lag_sequences: int
    lag: timedelta


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """Times of one kind since the last figures."""

    name: str
    """ "commit", from staging to the end of the sync; "expiry", from the expire time of a record to its removal; or the
    name of a call, such as "Publish"."""
    per_second: float
    median: timedelta
    """As near as the buckets of the server's metrics tell."""
    p99: timedelta


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a server at one moment. Rates are averages since the last figures, and 0 in the first ones."""

    as_of: datetime
    elapsed: timedelta
    """Since the last figures; 0: these are the first, behind those of the past."""
    last_sequence: int
    changes_per_second: float
    expired_per_second: float
    queued_requests: int
    """Requests that wait for the writer."""
    queued_bytes: int
    overdue_records: int
    """Expired records that are not yet removed, as of the last second: of the first 100,000 entries of the index."""
    subscriptions: int
    subscriptions_behind: int
    """Those that are served from the journal."""
    subscriptions_queued_bytes: int
    topics_total: int
    topics: tuple[TopicFigures, ...]
    """Those with the most changes, first."""
    links: tuple[LinkFigures, ...]
    latencies: tuple[LatencyFigures, ...] = ()
    """Only those of which there was one since the last figures."""


def watch_request(interval: Ttl, topics_max: int, history: Ttl | None) -> admin_pb2.WatchFiguresRequest:
    """The request for figures."""
    if topics_max < 1:
        raise invalid("topics_max", f"{topics_max} is not above 0")
    past = 0 if history is None else ttl_micros(history, "history")
    if past > HISTORY_MICROS_MAX:
        raise invalid("history", f"{history!r} is longer than what a server keeps, 1h")
    return admin_pb2.WatchFiguresRequest(
        interval_micros=ttl_micros(interval, "interval"), topics_max=topics_max, history_micros=past
    )


def figures(response: admin_pb2.WatchFiguresResponse) -> Figures:
    """The figures."""
    return Figures(
        datetime_of(response.as_of_micros),
        timedelta(microseconds=response.elapsed_micros),
        response.last_sequence,
        response.changes_per_second,
        response.expired_per_second,
        response.queued_requests,
        response.queued_bytes,
        response.overdue_records,
        response.subscriptions,
        response.subscriptions_behind,
        response.subscriptions_queued_bytes,
        response.topics_total,
        tuple(
            TopicFigures(
                one.topic,
                one.records,
                one.record_bytes,
                one.journal_entries,
                one.changes_per_second,
                one.bytes_per_second,
                one.filled,
            )
            for one in response.topics
        ),
        tuple(
            LinkFigures(one.peer, one.state, one.lag_sequences, timedelta(microseconds=one.lag_micros))
            for one in response.links
        ),
        tuple(
            LatencyFigures(
                one.name,
                one.per_second,
                timedelta(microseconds=one.median_micros),
                timedelta(microseconds=one.p99_micros),
            )
            for one in response.latencies
        ),
    )


# ---- the configuration ----


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """One setting of a server's configuration."""

    table: str
    number: int
    """The number of a table that may come several times, such as "server.listeners", from 1. 0: it is there once."""
    key: str
    value: str
    """As TOML. Empty: it is not set, or hidden."""
    origin: str
    """ "default", "file", "environment" or "command line". """
    hidden: bool
    """True: it has a value, which is a secret."""


def settings(response: admin_pb2.GetConfigResponse) -> list[ConfigSetting]:
    """The settings."""
    return [
        ConfigSetting(one.table, one.number, one.key, one.value, one.origin, one.hidden) for one in response.settings
    ]


# ---- the log ----

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
"""The level of a line of a log."""
LINES_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a server's log, without secrets. Rule: X10."""

    time: datetime
    level: str
    """ "debug", "info", "warning", "error" or "critical"."""
    event: str
    logger: str
    """The module that has written it."""
    fields: str
    """The other fields, as the text of a JSON object."""
    missed: int = 0
    """Lines in front of this one that came and went between two answers."""


def log_request(level: str | None, lines_max: int, *, follow: bool) -> admin_pb2.WatchLogRequest:
    """The request for the log."""
    if not 1 <= lines_max <= LINES_MAX:
        raise invalid("lines_max", f"{lines_max} is not between 1 and {LINES_MAX}")
    return admin_pb2.WatchLogRequest(level=level or "", lines_max=lines_max, follow=follow)


def log_lines(response: admin_pb2.WatchLogResponse) -> list[LogLine]:
    """The lines of an answer."""
    return [
        LogLine(
            datetime_of(one.time_micros),
            one.level,
            one.event,
            one.logger,
            one.fields,
            response.missed if index == 0 else 0,
        )
        for index, one in enumerate(response.lines)
    ]
