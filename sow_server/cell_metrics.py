"""The metrics of cells (rules C1, C5, C7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from sow_server.cells import Cells, Trouble
from sow_server.engine.catalog.topics import Topic


def cell_metrics(cells: Cells, topics: Iterable[Topic]) -> Iterator[Metric]:
    """The placement of this server, the troubles of all cells, and the strays here."""
    places, problems = cells.places, dict(cells.problems)
    trouble = GaugeMetricFamily("sow_cell_trouble", "1: there is this trouble with a cell.", labels=["cell", "trouble"])
    for cell in sorted(places.placement.cells):
        found = problems.get(cell)
        for kind in Trouble:
            trouble.add_metric([cell, kind.name.lower()], int(found is not None and found.kind is kind))
    yield trouble
    yield GaugeMetricFamily("sow_placement_version", "Version of the placement in force.", places.placement.version)
    waits = int(cells.prepared is not None)
    yield GaugeMetricFamily("sow_placement_prepared", "1: a placement waits here until topics have moved.", waits)
    strays = sum(places.elsewhere(topic.name) is not None for topic in topics)
    yield GaugeMetricFamily("sow_topics_stray", "Topics here that are placed in another cell.", strays)
