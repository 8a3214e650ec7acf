"""Replication: the links of an instance, drawn, with lags and differences of the clocks, and the last comparison."""

from __future__ import annotations

from sow_console import graph
from sow_console.pages.page import Facts, View


async def facts(view: View) -> Facts:
    """The links as this instance sees them."""
    status = await view.client.replication_status()
    return {
        "status": status,
        "graph": graph.drawn(status),
        "width": graph.WIDTH,
        "height": graph.HEIGHT,
        "run": _run(view),
        "command": view.command("replication", "status"),
    }


def _run(view: View) -> Facts | None:
    """The comparison or repair that this person has begun, how far it is, and what it has found."""
    run = view.session.comparisons.get(view.server)
    if run is None:
        return None
    return {
        "peer": run.peer,
        "repairs": run.repairs,
        "began": run.began,
        "ended": run.ended,
        "total": run.topics_total,
        "done": run.done,
        "records": run.records,
        "differing": run.differing,
        "results": list(run.repaired if run.repairs else run.verified),
        "error": "" if run.error is None else f"{run.error.reason}: {run.error.message}",
    }
