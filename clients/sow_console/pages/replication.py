"""Replication: the links of an instance, drawn, with lags and differences of the clocks."""

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
        "command": view.command("replication", "status"),
    }
