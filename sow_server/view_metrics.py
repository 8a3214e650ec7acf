"""The metrics of views (rules V1, V6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from sow_server.engine.catalog.topics import Topic


def view_metrics(topics: Iterable[Topic], derived_seconds: float, *, most: int) -> Iterator[Metric]:
    """The state of each view, of the first `most` by name. `derived_seconds`: what views have taken of commits."""
    groups = GaugeMetricFamily("sow_view_groups", "Records of a view.", labels=["topic"])
    ungrouped = GaugeMetricFamily(
        "sow_view_ungrouped", "Records of the source that match and are in no group.", labels=["topic"]
    )
    read = GaugeMetricFamily(
        "sow_view_build_records",
        "Records of the source that the build has read; absent once it is done.",
        labels=["topic"],
    )
    views = sorted([topic for topic in topics if topic.view is not None], key=lambda topic: topic.name)
    for view in views[:most]:
        status = view.view_status
        groups.add_metric([view.name], status.groups)
        ungrouped.add_metric([view.name], status.ungrouped)
        if not status.complete:
            read.add_metric([view.name], status.records_read)
    yield from (groups, ungrouped, read)
    yield CounterMetricFamily("sow_derived_seconds", "Time of commits that views have taken.", derived_seconds)
