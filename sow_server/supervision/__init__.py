"""`sow-server --cells N`: one process starts, watches and stops the cells of a machine, each a server of its own.

directories  the data directory of all cells: whose it is, and whether it is that of these cells
supervisor   starts the cells, starts one again that ended, stops them all
pauses       how long a cell that ended waits until it is started again
output       one log from the lines of all cells
supervised   a cell's side: it stops when the supervisor has gone
"""

from __future__ import annotations

from sow_server.config import Config


def summary(config: Config) -> str:
    """Where a cell listens and has its data."""
    metrics = f", metrics on {config.metrics.listen}" if config.metrics.listen else ""
    listen = ", ".join(listener.listen for listener in config.listeners)
    return f"listens on {listen}{metrics}, data in {config.server.data_dir}"
