"""The metrics of views: each follows its quantity (rules V1, V6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from prometheus_client.metrics_core import Metric

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.views import ViewDefinition, ViewStatus
from sow_server.view_metrics import view_metrics

BUILT = ViewStatus(complete=True, records_read=0, groups=0, ungrouped=0)


@dataclass
class Shown:
    """As much of a topic as is shown."""

    name: str
    view: ViewDefinition | None = None
    view_status: ViewStatus = BUILT


def samples(*topics: Shown, most: int = 1000) -> dict[tuple[str, str], float]:
    families: list[Metric] = list(view_metrics(cast("tuple[Topic, ...]", topics), 1.5, most=most))
    return {
        (sample.name, sample.labels.get("topic", "")): sample.value for family in families for sample in family.samples
    }


def test_each_view_has_its_figures_and_the_build_only_while_it_runs() -> None:
    definition = ViewDefinition("orders")
    built = ViewStatus(complete=True, records_read=9, groups=3, ungrouped=2)
    building = ViewStatus(complete=False, records_read=5, groups=1, ungrouped=0)
    assert samples(Shown("orders"), Shown("b", definition, building), Shown("a", definition, built)) == {
        ("sow_view_groups", "a"): 3,
        ("sow_view_groups", "b"): 1,
        ("sow_view_ungrouped", "a"): 2,
        ("sow_view_ungrouped", "b"): 0,
        ("sow_view_build_records", "b"): 5,
        ("sow_derived_seconds_total", ""): 1.5,
    }


def test_views_beyond_a_number_are_not_shown() -> None:
    definition = ViewDefinition("orders")
    found = samples(*[Shown(name, definition) for name in "cba"], most=2)
    assert [topic for name, topic in found if name == "sow_view_groups"] == ["a", "b"]
