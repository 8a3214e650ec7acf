"""The metrics of the links with other instances, from the state that a node reports. Pure.

The number of series grows with the peers, and not with their topics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from sow.v1 import admin_pb2, types_pb2
from sow_server.engine.values.model import MICROS

OUT: Final = "out"
IN: Final = "in"
OUT_STATES: Final = ("connecting", "greeting", "seeding", "streaming", "waiting", "refused")
IN_STATES: Final = ("connected", "seeding", "away", "disabled")
"""States of links. All are always shown, so that an alert has a series to look at."""
TOPIC_STATES: Final = ("seeding", "refused")


def link_metrics(status: admin_pb2.GetReplicationStatusResponse) -> Iterator[Metric]:
    """The metrics of every link of a status."""

    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=labels)

    state = gauge("sow_replication_link", "1 for the current state of a link.", "direction", "peer", "state")
    error = gauge(
        "sow_replication_link_error", "1: the last error of the link has this reason.", "direction", "peer", "reason"
    )
    behind = gauge("sow_replication_lag_sequences", "Changes that the receiver does not have yet.", "direction", "peer")
    lag = gauge("sow_replication_lag_seconds", "Age of the oldest change that a peer has not acknowledged.", "peer")
    skew = gauge("sow_replication_skew_seconds", "The peer's clock minus this clock.", "direction", "peer")
    downgraded = gauge("sow_replication_downgraded", "1: REPLICATED does not wait for this sync peer.", "peer")
    topics = gauge(
        "sow_replication_topics", "Topics of a link that are being seeded or refused.", "direction", "peer", "state"
    )
    applied = CounterMetricFamily("sow_replication_applied", "Changes of a peer that were applied.", labels=["peer"])
    lost = CounterMetricFamily(
        "sow_replication_superseded", "Changes of a peer that lost against a newer version.", labels=["peer"]
    )
    dropped = CounterMetricFamily(
        "sow_replication_dropped", "Records dropped because a peer has deleted them.", labels=["peer"]
    )
    refused = CounterMetricFamily(
        "sow_replication_rows_refused",
        "Rows of a peer that were refused because no publish could have made them.",
        labels=["peer"],
    )

    def both(
        direction: str, link: admin_pb2.OutgoingLink | admin_pb2.IncomingLink, states: Sequence[str], left: int
    ) -> None:
        for name in states:
            state.add_metric([direction, link.peer, name], int(link.state == name))
        for name in TOPIC_STATES:
            topics.add_metric([direction, link.peer, name], sum(topic.state == name for topic in link.topics))
        behind.add_metric([direction, link.peer], left)
        skew.add_metric([direction, link.peer], link.skew_micros / MICROS)
        if link.last_error_reason:
            reason = types_pb2.ErrorReason.Name(link.last_error_reason).removeprefix("ERROR_REASON_")
            error.add_metric([direction, link.peer, reason], 1)

    for out in status.outgoing:
        both(OUT, out, OUT_STATES, out.lag_sequences)
        lag.add_metric([out.peer], out.lag_micros / MICROS)
        downgraded.add_metric([out.peer], int(out.mode == "downgraded"))
    for into in status.incoming:
        both(IN, into, IN_STATES, max(0, into.head_sequence - into.cursor))
        applied.add_metric([into.peer], into.applied)
        lost.add_metric([into.peer], into.superseded)
        dropped.add_metric([into.peer], into.dropped)
        refused.add_metric([into.peer], into.rows_refused)
    yield from (state, error, behind, lag, skew, downgraded, topics, applied, lost, dropped, refused)
