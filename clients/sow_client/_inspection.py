"""Looking at a server: requests, and answers into values. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sow.v1 import admin_pb2
from sow_client._records import Ttl, datetime_of, ttl_micros

# ---- the expiry horizon ----


@dataclass(frozen=True, slots=True)
class TopicDue:
    """The records of one topic that fall due (rule L22)."""

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
    """By name."""
    complete_upto: datetime
    """Everything that falls due up to here is counted. Before the last end where there was too much to count."""

    @property
    def complete(self) -> bool:
        """Whether all spans are counted to their ends."""
        return not self.spans or self.complete_upto >= self.as_of + self.spans[-1]


def horizon_request(topic: str | None, spans: Iterable[Ttl], *, exact: bool) -> admin_pb2.GetExpiryHorizonRequest:
    """The request for a horizon."""
    edges = [ttl_micros(span, "spans") for span in spans]
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
    )


# ---- subscriptions ----


@dataclass(frozen=True, slots=True)
class ActiveSubscription:
    """A subscription that is under way at the server."""

    id: str
    session: str
    """Of its caller, as `sessions` lists it."""
    identity: str
    address: str
    since: datetime
    topic: str
    """Empty for a pattern of topics."""
    topic_pattern: str
    filter: str
    """As it was given; empty: all records."""
    durable: str
    """The durable that it consumes; empty: none."""
    position: str
    """Bookmark: everything up to here has been sent."""
    behind: bool
    """True: it is served from the journal, as it began in the past or could not keep up."""
    queued_bytes: int
    """Bytes of the changes that wait to be sent."""


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
    )
