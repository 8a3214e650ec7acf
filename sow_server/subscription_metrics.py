"""The metrics of subscriptions and of live results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from sow_server.engine.values.model import MICROS
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.results.live_results import LiveResults

READING: Final = ("first", "short", "gap", "changed")
"""Why the records of a live result are read (rule S12)."""


def subscription_metrics(hub: Hub) -> Iterator[Metric]:
    subscriptions, dispatcher = list(hub.subscriptions()), hub.dispatcher
    yield GaugeMetricFamily("sow_subscriptions", "Subscriptions.", len(subscriptions))
    yield GaugeMetricFamily(
        "sow_subscriptions_behind",
        "Subscriptions that are served from the journal.",
        sum(subscription.behind for subscription in subscriptions),
    )
    yield GaugeMetricFamily(
        "sow_subscription_groups", "Groups of subscriptions that share their frames.", dispatcher.group_count
    )
    yield GaugeMetricFamily(
        "sow_subscription_queue_bytes",
        "Memory of frames that wait for subscribers; a frame counts for each subscriber that it waits for.",
        sum(subscription.queued_bytes for subscription in subscriptions),
    )
    yield CounterMetricFamily(
        "sow_changes_dispatched", "Changes of topics with subscriptions.", dispatcher.changes_total
    )
    yield GaugeMetricFamily(
        "sow_dispatch_lag_sequences",
        "Durable changes that have not yet been dispatched.",
        max(0, dispatcher.synced - dispatcher.position),
    )
    yield CounterMetricFamily(
        "sow_dispatch_drops",
        "Times when dispatching was so late that all subscribers continued from the journal.",
        dispatcher.dropped_total,
    )
    yield CounterMetricFamily(
        "sow_dispatch_deferred",
        "Changes left to reader threads, because a filter may take long on them; counted per filter.",
        dispatcher.unjudged_total,
    )
    yield CounterMetricFamily("sow_resyncs", "Subscriptions that ended with RESYNC_REQUIRED.", hub.resyncs_total)


def result_metrics(results: LiveResults) -> Iterator[Metric]:
    """The metrics of live results."""
    sources = list(results.sources())
    yield GaugeMetricFamily("sow_live_results", "Subscriptions to a live result.", results.count)
    yield GaugeMetricFamily(
        "sow_live_result_sources", "Live results that are kept; equal ones are kept once.", len(sources)
    )
    yield GaugeMetricFamily(
        "sow_live_result_bytes", "Memory of the records that they keep.", sum(source.size for source in sources)
    )
    reads = CounterMetricFamily(
        "sow_live_result_reads", "How often the records of a live result were read, by reason.", labels=["why"]
    )
    seconds = CounterMetricFamily("sow_live_result_seconds", "Time that this took, by reason.", labels=["why"])
    for why in READING:
        reads.add_metric([why], results.reads_total[why])
        seconds.add_metric([why], results.micros_total[why] / MICROS)
    yield reads
    yield seconds
