"""The state of a node's links, for `GetReplicationStatus`."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from sow.v1 import admin_pb2, types_pb2
from sow_replication.link_states import Incoming, Outgoing
from sow_replication.link_topics import TopicState
from sow_replication.node import Node
from sow_replication.options import Mode


def status(node: Node) -> admin_pb2.GetReplicationStatusResponse:
    """The current state of the links."""
    disabled = node.store.disabled
    incoming = {
        name: _incoming(node, incoming)
        for name, incoming in node.incoming.items()
        if name not in disabled
        and (
            incoming.live is not None
            or node.store.source(name) is not None
            or incoming.trouble.message
            or name in node.commanded
        )
    }
    incoming |= {name: disabled_link(name, fault, origin=_origin(node, name)) for name, fault in disabled.items()}
    return admin_pb2.GetReplicationStatusResponse(
        instance=node.store.identity.name,
        last_sequence=node.store.head(),
        outgoing=[_outgoing(node, out) for out in node.outgoing.values()],
        incoming=[link for _, link in sorted(incoming.items())],
    )


def disabled_link(name: str, fault: str, *, origin: str = "file") -> admin_pb2.IncomingLink:
    """A source whose stored state cannot be used."""
    return admin_pb2.IncomingLink(
        peer=name,
        state="disabled",
        last_error=f"its stored state cannot be used: {fault}",
        last_error_reason=types_pb2.ERROR_REASON_DATA_DAMAGED,
        origin=origin,
    )


def lag_micros(node: Node, out: Outgoing) -> int:
    """The age of the oldest change that the peer has not acknowledged; 0: there is none."""
    now = node.store.now_micros()
    if node.settled(out) >= node.store.head():
        return 0
    oldest = out.sender.oldest_commit_micros if out.sender is not None else 0
    since = oldest or out.behind_since_micros
    return max(0, now - since) if since else 0


def _outgoing(node: Node, out: Outgoing) -> admin_pb2.OutgoingLink:
    settled = node.settled(out)
    return admin_pb2.OutgoingLink(
        peer=out.peer.name,
        address=out.peer.address,
        state=out.state,
        mode="downgraded" if out.peer.mode is Mode.SYNC and out.downgraded else out.peer.mode.value,
        topics_pattern=out.peer.topics,
        acknowledged_sequence=settled,
        lag_sequences=max(0, node.store.head() - settled),
        lag_micros=lag_micros(node, out),
        skew_micros=0 if out.sender is None else out.sender.skew.micros,
        last_error=out.trouble.message,
        last_error_time=_time(out.trouble.at_micros),
        last_error_reason=out.trouble.reason,
        since=_time(out.since_micros),
        topics=_topics([] if out.sender is None or not out.sender.streaming else out.sender.link_topics.states()),
        origin=_origin(node, out.peer.name),
    )


def _incoming(node: Node, incoming: Incoming) -> admin_pb2.IncomingLink:
    live = incoming.live
    source = node.store.source(incoming.name)
    cursor = 0 if source is None else source.cursor or 0
    topics = [] if live is None else live.topics()
    state = "away"
    if live is not None:
        cursor = max(cursor, live.cursor)
        state = "seeding" if any(state is TopicState.SEEDING for _, state, _ in topics) else "connected"
    return admin_pb2.IncomingLink(
        peer=incoming.name,
        state=state,
        cursor=cursor,
        head_sequence=incoming.head if live is None else live.head,
        applied=incoming.applied,
        superseded=incoming.superseded,
        dropped=incoming.dropped,
        rows_refused=incoming.rows_refused,
        skew_micros=incoming.skew_micros if live is None else live.skew.micros,
        last_error=incoming.trouble.message,
        last_error_time=_time(incoming.trouble.at_micros),
        last_error_reason=incoming.trouble.reason,
        topics=_topics(topics),
        origin=_origin(node, incoming.name),
    )


def _origin(node: Node, name: str) -> str:
    return "command" if name in node.commanded else "file"


def _topics(topics: Iterable[tuple[str, TopicState, str]]) -> list[admin_pb2.LinkTopic]:
    return [
        admin_pb2.LinkTopic(topic=name, state="refused" if state is TopicState.REFUSED else "seeding", message=message)
        for name, state, message in topics
        if state is not TopicState.SEEDED
    ]


def _time(micros: int) -> Timestamp | None:
    if not micros:
        return None
    time = Timestamp()
    time.FromMicroseconds(micros)
    return time
