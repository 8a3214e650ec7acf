"""The pages, in the order of the menu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sow_console.pages import connections, due, durables, key, letters, overview, records, replication, server, topic
from sow_console.pages.page import Facts, Page, View

__all__ = ["PAGES", "Facts", "Page", "View"]

PAGES: Final[Mapping[str, Page]] = {
    page.name: page
    for page in (
        Page("overview", "Overview", overview.facts, interval=1.0),
        Page("records", "Records", records.facts, twin=records.twin),
        Page("key", "Key", key.facts, twin=key.twin),
        Page("due", "Due", due.facts),
        Page("durables", "Durables", durables.facts),
        Page("replication", "Replication", replication.facts),
        Page("topic", "Settings", topic.facts, interval=10.0),
        Page("connections", "Connections", connections.facts),
        Page("dead-letters", "Dead letters", letters.facts, twin=letters.twin, interval=5.0),
        Page("server", "Server", server.facts, twin=server.twin, interval=1.0),
    )
}
