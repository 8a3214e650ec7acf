"""Other instances and backups (rules R1 to R13, J14): arguments into requests, responses into values. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from sow.v1 import admin_pb2, types_pb2
from sow_client import _lifetimes, _reads
from sow_client._records import invalid
from sow_client._reports import (
    BackupMade,
    Difference,
    IncomingLink,
    LinkTopic,
    OutgoingLink,
    Repaired,
    ReplicationStatus,
    TopicChecked,
    UnsoundRow,
    Verified,
)

KEYS_MAX = 2**32 - 1
ROWS_MAX = 100_000


def status(response: admin_pb2.GetReplicationStatusResponse) -> ReplicationStatus:
    """The state of the links of an instance."""
    return ReplicationStatus(
        instance=response.instance,
        last_sequence=response.last_sequence,
        outgoing=tuple(_outgoing(link) for link in response.outgoing),
        incoming=tuple(_incoming(link) for link in response.incoming),
    )


def _outgoing(link: admin_pb2.OutgoingLink) -> OutgoingLink:
    return OutgoingLink(
        peer=link.peer,
        address=link.address,
        state=link.state,
        mode=link.mode,
        topics_pattern=link.topics_pattern,
        acknowledged_sequence=link.acknowledged_sequence,
        lag_sequences=link.lag_sequences,
        lag=timedelta(microseconds=link.lag_micros),
        skew=timedelta(microseconds=link.skew_micros),
        since=_lifetimes.moment(link.since) if link.HasField("since") else None,
        last_error=link.last_error,
        last_error_reason=_reason(link.last_error_reason),
        last_error_time=_lifetimes.moment(link.last_error_time) if link.HasField("last_error_time") else None,
        topics=_topics(link.topics),
        origin=link.origin,
    )


def _incoming(link: admin_pb2.IncomingLink) -> IncomingLink:
    return IncomingLink(
        peer=link.peer,
        state=link.state,
        cursor=link.cursor,
        head_sequence=link.head_sequence,
        applied=link.applied,
        superseded=link.superseded,
        dropped=link.dropped,
        rows_refused=link.rows_refused,
        skew=timedelta(microseconds=link.skew_micros),
        last_error=link.last_error,
        last_error_reason=_reason(link.last_error_reason),
        last_error_time=_lifetimes.moment(link.last_error_time) if link.HasField("last_error_time") else None,
        topics=_topics(link.topics),
        origin=link.origin,
    )


def _topics(topics: Iterable[admin_pb2.LinkTopic]) -> tuple[LinkTopic, ...]:
    return tuple(LinkTopic(one.topic, one.state, one.message) for one in topics)


def check_request(topic: str, *, repair: bool, rows_max: int) -> admin_pb2.CheckTopicRequest:
    """Looks for rows that no publish could have made."""
    if not 0 <= rows_max <= ROWS_MAX:
        raise invalid("rows_max", f"{rows_max} is not 0 to {ROWS_MAX}")
    return admin_pb2.CheckTopicRequest(name=topic, repair=repair, rows_max=rows_max)


def topic_checked(before: TopicChecked, response: admin_pb2.CheckTopicResponse) -> TopicChecked:
    """The figures after another response."""
    rows = [
        UnsoundRow(row.key, _reason(row.reason), row.message, row.version, row.origin, row.payload_bytes)
        for row in response.rows
    ]
    return TopicChecked(response.checked, response.unsound, response.removed, (*before.rows, *rows))


NOTHING_CHECKED = TopicChecked(0, 0, 0, ())


def _reason(value: types_pb2.ErrorReason.ValueType) -> str:
    """A reason's name; "" when there is none, its number when only a newer server knows it."""
    if value == types_pb2.ERROR_REASON_UNSPECIFIED:
        return ""
    try:
        return types_pb2.ErrorReason.Name(value).removeprefix("ERROR_REASON_")
    except ValueError:
        return str(int(value))


def verify_request(peer: str, topics: Iterable[str] | None, keys_max: int) -> admin_pb2.VerifyReplicationRequest:
    """Compares with a peer."""
    if not 0 <= keys_max <= KEYS_MAX:
        raise invalid("keys_max", f"{keys_max} is not 0 to {KEYS_MAX}")
    return admin_pb2.VerifyReplicationRequest(peer=named(peer), topics=_chosen(topics), keys_max=keys_max)


def verified(response: admin_pb2.VerifyReplicationResponse) -> Verified:
    """The findings about one topic."""
    return Verified(
        topic=response.topic,
        records=response.records,
        differing=response.differing,
        differences=tuple(Difference(one.key, one.version_here, one.version_there) for one in response.differences),
        left_out=response.left_out,
        unreadable_here=response.unreadable_here,
        unreadable_there=response.unreadable_there,
    )


def add_request(
    name: str,
    address: str,
    *,
    accept: bool,
    topics_pattern: str,
    sync: bool,
    filter_text: str,
    ca: str,
    certificate: str,
    key: str,
    token_file: str,
    replace: bool,
) -> admin_pb2.AddPeerRequest:
    """The request for a new peer."""
    return admin_pb2.AddPeerRequest(
        name=named(name),
        address=address,
        accept=accept,
        topics_pattern=topics_pattern,
        sync=sync,
        filter=filter_text,
        ca=ca,
        certificate=certificate,
        key=key,
        token_file=token_file,
        replace=replace,
    )


def repair_request(peer: str, topics: Iterable[str] | None) -> admin_pb2.RepairReplicationRequest:
    """The request for a repair."""
    return admin_pb2.RepairReplicationRequest(peer=named(peer), topics=_chosen(topics))


def repaired(response: admin_pb2.RepairReplicationResponse) -> Repaired:
    """The repairs of one topic."""
    return Repaired(
        response.topic, response.differing, response.sent, response.received, response.left_out, response.refused
    )


def backup_made(response: admin_pb2.BackupResponse) -> BackupMade:
    """A backup that was made."""
    return BackupMade(response.name, response.sequence, response.bytes)


def named(peer: str) -> str:
    """The name of a peer. Raises InvalidArgument for an empty one."""
    if not peer:
        raise invalid("peer", "is empty")
    return peer


def _chosen(topics: Iterable[str] | None) -> list[str]:
    """An empty list would mean all topics on the wire, so it is refused."""
    if topics is None:
        return []
    chosen = _reads.texts(topics, "topics") or []
    if not chosen:
        raise invalid("topics", "is empty; leave it out for all")
    return list(chosen)
